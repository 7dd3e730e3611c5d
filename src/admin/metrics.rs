//! What the admin port counts.

use std::sync::atomic::AtomicI64;

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::runtime::FileChange;
use crate::telemetry::FileReads;

/// The metrics of the admin port. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Metrics {
    reads: FileReads,
    not_after: Gauge<i64, AtomicI64>,
}

impl Metrics {
    /// Registers `admin_certificate_reads_total{result}` and
    /// `admin_certificate_not_after_timestamp_seconds`, which is 0 without TLS.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            reads: FileReads::register(
                registry,
                "admin_certificate_reads",
                "Changes of the files of the admin port's certificate, by result: success, failure",
            ),
            not_after: Gauge::default(),
        };
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
        self.reads.count(change);
    }
}
