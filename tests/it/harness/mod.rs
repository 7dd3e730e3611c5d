//! What the tests are written in: a proxy in this process, a client that speaks
//! bytes, and an upstream that records them.

pub mod app;
pub mod certs;
mod client;
pub mod dns;
pub mod frames;
mod limits;
mod proxy;
pub mod relay;
pub mod replica;
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

/// Waits until `condition` holds, without blocking the test's runtime.
pub async fn until(what: &str, condition: impl AsyncFnMut() -> bool) {
    until_within(PATIENCE, what, condition).await;
}

/// Waits until `condition` holds, with a patience of its own.
pub async fn until_within(
    patience: Duration,
    what: &str,
    mut condition: impl AsyncFnMut() -> bool,
) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < patience, "{what} did not come about within {patience:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
