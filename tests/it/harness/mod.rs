//! What the tests share.

pub(crate) mod relay;
pub(crate) mod replica;

use std::time::{Duration, Instant};

/// How long a condition may take until it is a failure.
const PATIENCE: Duration = Duration::from_secs(10);

/// Waits until `condition` holds, and fails the test naming `what` if it does
/// not within ten seconds.
pub(crate) async fn eventually(what: &str, condition: impl AsyncFnMut() -> bool) {
    within(PATIENCE, what, condition).await;
}

/// Waits until `condition` holds, and fails the test if it does not in time.
pub(crate) async fn within(
    patience: Duration,
    what: &str,
    mut condition: impl AsyncFnMut() -> bool,
) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < patience, "not within {patience:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
