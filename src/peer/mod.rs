//! Peer (layer 4): the mesh between replicas.
//!
//! A thin network layer around the pure [`Engine`](crate::replication::Engine):
//! one task owns the engine and does what it says; each session has a task that
//! reads frames from its gRPC stream, and tonic takes the frames that are to
//! leave. What is spent, known, believed or due is never decided here.
//!
//! Invariants:
//! - a frame is made only when its stream can take it at once, so at most one
//!   waits for each session;
//! - what a stranger sends is an error value that ends at most its own session;
//! - every wait is bounded: connecting, the first frame, leaving;
//! - a mesh in which nothing is spent wakes about once a second.

use std::io;

use crate::tls;

mod acceptor;
mod codec;
mod config;
mod convert;
mod dialer;
mod handle;
mod incoming;
mod mesh;
mod metrics;
mod replica;
mod session;
mod trust;

pub use codec::{Decoder, Encoder};
pub use config::Config;
pub use convert::{Fault, Malformed};
pub use handle::{MeshGone, MeshHandle};
pub use mesh::{Mesh, Surroundings};
pub use metrics::Metrics;
pub use replica::Replica;

/// Why a mesh cannot start. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The listener cannot be bound; the text names the address.
    #[error(transparent)]
    Bind(#[from] io::Error),
    /// A certificate, a key or a CA cannot be used; the text names the file.
    #[error("tls: {0}")]
    Tls(#[from] tls::Error),
}
