//! Admin (layer 5): what operators ask over gRPC, and what the kubelet and
//! Prometheus ask over HTTP.
//!
//! Invariants:
//! - a question never waits in front of the data path: buckets are looked at one
//!   at a time, in small groups between which others get their turn;
//! - what an answer needs in memory is bounded, however many buckets there are;
//! - both servers answer until the process aborts, and their end waits for
//!   nobody.

mod cluster;
mod config;
mod connection;
mod convert;
mod explain;
mod guard;
mod http;
mod listing;
mod metrics;
mod question;
mod routes;
mod server;
mod service;
mod token;
mod top;
mod watch;

pub use cluster::{Cluster, MeshView, ReplicaView, Stopped};
pub use config::Config;
pub use http::{HttpServer, Pages, Status};
pub use metrics::Metrics;
pub use server::{AdminServer, Bounds, Health, ServerError};
pub use service::{AdminService, Configuration};
pub use token::{TokenError, token};
