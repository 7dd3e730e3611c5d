//! Proxy (layer 4): the data path.

mod config;

pub use config::{Config, HeaderStyle, Maxima, Timeouts, Upstream, UpstreamError};
