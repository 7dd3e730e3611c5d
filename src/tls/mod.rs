//! TLS (layer 1): certificates from files, replaced while the process runs, who a
//! peer or a client may be, and sockets whose handshake is part of their first read.
//!
//! Configurations are made anew when the content of a file changes and used by
//! the next handshake; streams that are open stay. Files that are not sound change
//! nothing. A peer is not known by the address at which it was dialled, but by a
//! certificate that the CA signed for one of the allowed names.

mod client;
mod config;
mod material;
mod names;
mod peers;
mod server;
mod socket;
mod upstream;
mod verifier;
mod versions;

pub use client::{ClientIdentity, client};
pub use config::{Mutual, Serving};
pub use material::{Error, What};
pub use names::NamePattern;
pub use peers::Peers;
pub use server::{Clients, Server};
pub use socket::Accepted;
pub use upstream::Upstream;
