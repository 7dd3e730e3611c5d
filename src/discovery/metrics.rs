//! What discovery counts.

use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicI64, AtomicU64};

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// The outcome of looking one name up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Outcome {
    /// At least one address.
    Found,
    /// The name does not exist or has no address.
    Empty,
    /// No answer, or an error: the last good addresses stay.
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    result: Outcome,
}

/// The metrics of discovery. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    lookups: Family<Labels, Counter<u64, AtomicU64>>,
    addresses: Gauge<i64, AtomicI64>,
}

impl Metrics {
    /// Registers `discovery_lookups_total{result}` and `discovery_addresses`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "discovery_lookups",
            "Lookups of a name by result: found, empty (no such name or no address), failed",
            metrics.lookups.clone(),
        );
        registry.register(
            "discovery_addresses",
            "Addresses that discovery gives for peers, possibly with this replica's own",
            metrics.addresses.clone(),
        );
        metrics
    }

    pub(super) fn looked_up(&self, result: Outcome) {
        self.lookups.get_or_create(&Labels { result }).inc();
    }

    pub(super) fn set_addresses(&self, count: usize) {
        self.addresses.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}

impl EncodeLabelValue for Outcome {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        encoder.write_str(match self {
            Self::Found => "found",
            Self::Empty => "empty",
            Self::Failed => "failed",
        })
    }
}
