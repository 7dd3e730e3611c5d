//! Telemetry (layer 2): the log, and the registry behind `/metrics`.
//!
//! Invariant: nothing that leaves here carries a key's value; labels are bounded.

mod config;
mod files;
pub mod log;
mod metrics;
mod process;

pub use config::Config;
pub use files::FileReads;
pub use log::LogFormat;
pub use metrics::{Format, Metrics};
