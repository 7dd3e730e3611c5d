//! Process plumbing (layer 1): drain, readiness, signals, supervised tasks,
//! listening sockets, files that change. Nothing here knows what the process does.

mod drain;
mod follow;
mod listen;
mod readiness;
mod signal;
mod supervisor;

pub use drain::{Drain, DrainControl, Stage};
pub use follow::{FileChange, follow_files};
pub use listen::{ListenAddr, ListenAddrError};
pub use readiness::{Gate, Readiness};
pub use signal::{Hangups, Signals};
pub use supervisor::{Census, Failure, OnExit, Supervisor, spawn_local};
