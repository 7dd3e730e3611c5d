//! What threads share (layer 0): locks, atomic numbers, the map of buckets and the
//! queues of the hot path, under one name each.
//!
//! With `--cfg shuttle` these are models of themselves that a scheduler can
//! interleave in every way, so that `tests/interleavings.rs` checks the code that
//! is shipped.

#[cfg(shuttle)]
mod model;

#[cfg(not(shuttle))]
pub(crate) use crossbeam_queue::SegQueue;
#[cfg(not(shuttle))]
pub(crate) use dashmap::{DashMap, mapref::entry::Entry};
/// How hashes of what strangers may choose are seeded: anew by every process. In
/// the models every run of one seed is the same.
#[cfg(shuttle)]
pub(crate) use foldhash::quality::FixedState as Seed;
#[cfg(not(shuttle))]
pub(crate) use foldhash::quality::RandomState as Seed;
#[cfg(shuttle)]
pub(crate) use model::{DashMap, Entry, SegQueue};
#[cfg(shuttle)]
pub(crate) use shuttle::hint::spin_loop;
#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(shuttle))]
pub(crate) use std::hint::spin_loop;
#[cfg(not(shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};
