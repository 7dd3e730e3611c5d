//! The proxy's own certificate follows its files, and handshakes are counted.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::runtime::{Drain, Stage, follow_files};
use crate::telemetry::FileReads;
use crate::tls;

/// What is counted of certificates; clones count into the same numbers.
#[derive(Clone, Debug)]
pub(super) struct CertificateMetrics {
    greetings: [Counter; Greeting::ALL.len()],
    reads: FileReads,
    not_after: Gauge<i64, AtomicI64>,
}

/// How the handshake of a client ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// TLS stands.
    Done,
    /// It is no TLS, or there is no agreement, or the client's certificate is refused.
    Failed,
    /// It took too long.
    Late,
    /// It was the oldest when there were too many.
    Displaced,
    /// The client speaks HTTP without TLS.
    Text,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    result: &'static str,
}

impl Greeting {
    const ALL: [Self; 5] = [Self::Done, Self::Failed, Self::Late, Self::Displaced, Self::Text];

    const fn label(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Late => "late",
            Self::Displaced => "displaced",
            Self::Text => "text",
        }
    }
}

impl CertificateMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let greetings = Family::<ResultLabels, Counter>::default();
        let metrics = Self {
            greetings: Greeting::ALL
                .map(|how| greetings.get_or_create_owned(&ResultLabels { result: how.label() })),
            reads: FileReads::register(
                registry,
                "proxy_certificate_reads",
                "Changes of the files of the proxy port's certificate, by result: success, failure",
            ),
            not_after: Gauge::default(),
        };
        registry.register(
            "proxy_handshakes",
            "Handshakes of TLS with clients by how they ended: done, failed, late, displaced, text",
            greetings,
        );
        registry.register_with_unit(
            "proxy_certificate_not_after_timestamp",
            "When the certificate of the proxy port ends, 0 without one",
            Unit::Seconds,
            metrics.not_after.clone(),
        );
        metrics
    }

    /// A handshake ended.
    pub(super) fn greeted(&self, how: Greeting) {
        self.greetings[how as usize].inc();
    }
}

/// Follows the files of the proxy's own certificate until `drain` aborts.
pub(super) async fn follow(tls: Arc<tls::Server>, metrics: CertificateMetrics, drain: Drain) {
    metrics.not_after.set(tls.not_after());
    let told = |change| {
        metrics.reads.count(change);
        metrics.not_after.set(tls.not_after());
    };
    tokio::select! {
        () = follow_files("proxy.tls", || tls.refresh(), told) => {}
        () = drain.reached(Stage::Aborting) => {}
    }
}
