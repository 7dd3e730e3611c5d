//! Admin (layer 5): what the kubelet, Prometheus and operators ask.

mod config;
mod http;

pub use config::Config;
pub use http::{HttpServer, Pages, Status};
