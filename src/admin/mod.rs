//! Admin (layer 5): what the kubelet, Prometheus and operators ask.

mod http;

pub use http::{HttpServer, Pages, Status};
