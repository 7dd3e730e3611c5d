//! Process plumbing (layer 0): drain, readiness, signals, supervised tasks.
//! Nothing here knows what the process does.

mod drain;
mod readiness;
mod signal;
mod supervisor;

pub use drain::{Drain, DrainControl, Stage};
pub use readiness::{Gate, Readiness};
pub use signal::Signals;
pub use supervisor::{Failure, OnExit, Supervisor, spawn_local};
