//! What the admin port counts.

use std::sync::atomic::AtomicI64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::runtime::FileChange;

/// The metrics of the admin port. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Metrics {
    replaced: Counter,
    refused: Counter,
    not_after: Gauge<i64, AtomicI64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    result: &'static str,
}

impl Metrics {
    /// Registers `admin_certificate_reads_total{result}` and
    /// `admin_certificate_not_after_timestamp_seconds`, which is 0 without TLS.
    pub fn register(registry: &mut Registry) -> Self {
        let reads = Family::<ResultLabels, Counter>::default();
        let counter = |result| reads.get_or_create_owned(&ResultLabels { result });
        let metrics = Self {
            replaced: counter("success"),
            refused: counter("failure"),
            not_after: Gauge::default(),
        };
        registry.register(
            "admin_certificate_reads",
            "Changes of the files of the admin port's certificate, by result: success, failure",
            reads,
        );
        registry.register_with_unit(
            "admin_certificate_not_after_timestamp",
            "When the certificate of the admin port ends, 0 without one",
            Unit::Seconds,
            metrics.not_after.clone(),
        );
        metrics
    }

    /// When the certificate in use ends, in seconds since 1970.
    pub(super) fn certificate(&self, not_after: i64) {
        self.not_after.set(not_after);
    }

    /// The files of the certificate changed.
    pub(super) fn certificate_read(&self, change: FileChange) {
        match change {
            FileChange::Replaced => &self.replaced,
            FileChange::Refused => &self.refused,
        }
        .inc();
    }
}
