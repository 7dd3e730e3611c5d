//! Peer (layer 4): the mesh between replicas.

mod config;

pub use config::Config;
