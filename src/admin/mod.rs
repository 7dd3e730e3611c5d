//! Admin (layer 5): gRPC for operators.

mod config;

pub use config::Config;
