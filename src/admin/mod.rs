//! Admin (layer 5): what operators ask, over gRPC.
//!
//! Invariants:
//! - a question never waits in front of the data path: buckets are looked at one
//!   at a time, in small groups between which others get their turn;
//! - what an answer needs in memory is bounded, however many buckets there are;
//! - the server answers until the process aborts, and its end waits for nobody.

mod cluster;
mod connection;
mod convert;
mod listing;
mod routes;
mod server;
mod service;

pub use cluster::{Cluster, MeshView, ReplicaView, Stopped};
pub use server::{AdminServer, Bounds, Health, ServerError};
pub use service::AdminService;
