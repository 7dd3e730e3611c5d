//! Discovery (layer 3): who the peers are.

mod config;

pub use config::{Config, HostPort};
