//! Telemetry (layer 0): logs and metrics.

mod config;

pub use config::Config;
