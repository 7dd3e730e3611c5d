//! Generated protobuf code (layer 0), nothing else.
#![allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]

include!(concat!(env!("OUT_DIR"), "/protos.rs"));

/// The compiled descriptors of every service, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
