//! Trust: the certificates of mutual TLS follow their files.

use std::sync::Arc;

use super::metrics::Metrics;
use crate::runtime::{FileChange, follow_files};
use crate::tls;

/// Reads the files again and again, without end.
pub(super) async fn follow(peers: Arc<tls::Peers>, metrics: Metrics) {
    metrics.certificate(peers.not_after());
    let told = |change| {
        metrics.certificates_read(change == FileChange::Replaced);
        metrics.certificate(peers.not_after());
    };
    follow_files("replication.tls", || peers.refresh(), told).await;
}
