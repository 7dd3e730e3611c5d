//! What the tests are written in: a proxy in this process, a client that speaks
//! bytes, and an upstream that records them.

mod client;
pub mod dns;
mod limits;
mod proxy;
mod upstream;

pub use client::{Answer, Connection, request};
pub use limits::limit;
pub use proxy::{Setup, TestProxy};
pub use upstream::{Reply, Upstream};

use std::time::{Duration, Instant};

/// How long anything may take before a test gives up.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Waits until `condition` holds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(5));
    }
}
