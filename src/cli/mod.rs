//! Subcommands (layer 8): arguments to output and exit status.

pub mod buckets;
pub mod client;
pub mod limits;
pub mod peers;
mod table;
