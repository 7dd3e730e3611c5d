//! TLS (layer 1): certificates from files, replaced while the process runs, and
//! who a peer may be.
//!
//! Configurations are made anew when the content of a file changes and used by
//! the next handshake; streams that are open stay. Files that are not sound change
//! nothing. A peer is not known by the address at which it was dialled, but by a
//! certificate that the CA signed for one of the allowed names.

mod config;
mod material;
mod names;
mod peers;
mod upstream;
mod versions;

pub use config::Mutual;
pub use material::{Error, What};
pub use names::NamePattern;
pub use peers::Peers;
pub use upstream::Upstream;
