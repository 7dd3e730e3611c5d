//! Trust: the certificates of mutual TLS follow their files.

use std::sync::Arc;
use std::time::Duration;

use tracing::{error, info};

use super::metrics::Metrics;
use crate::tls;

/// How often the files are read.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Reads the files again and again, without end.
pub(super) async fn follow(peers: Arc<tls::Peers>, metrics: Metrics) {
    metrics.certificate(peers.not_after());
    let mut refused = None;
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        match peers.refresh() {
            Ok(false) => {}
            Ok(true) => {
                refused = None;
                info!("the certificates for peers are replaced");
                metrics.certificates_read(true);
                metrics.certificate(peers.not_after());
            }
            // The same fault is not told each second.
            Err(fault) if refused.as_ref() == Some(&fault) => {}
            Err(fault) => {
                error!(reason = %fault, "new certificates are refused; the old ones stay in use");
                metrics.certificates_read(false);
                refused = Some(fault);
            }
        }
    }
}
