//! What is counted of deferred requests.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::record::State;

/// The metrics of deferred requests. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    requests: Family<StateLabels, Gauge>,
    in_flight: Family<UpstreamLabels, Gauge>,
    outcomes: Family<StateLabels, Counter>,
    sendings: Family<SendingLabels, Counter>,
    refusals: Family<ReasonLabels, Counter>,
    pub(super) replays: Counter,
    pub(super) crashes: Counter,
    pub(super) oldest: Gauge,
    pub(super) store_closed: Gauge,
    commits: Counter,
    commit_seconds: Counter<f64, std::sync::atomic::AtomicU64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    upstream: Arc<str>,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UpstreamLabels {
    upstream: Arc<str>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SendingLabels {
    upstream: Arc<str>,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

impl Metrics {
    /// Makes the metrics and puts them into `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "deferred_requests",
            "Deferred requests in the store, by upstream and state",
            metrics.requests.clone(),
        );
        registry.register(
            "deferred_in_flight",
            "Deferred requests that are at the upstream right now",
            metrics.in_flight.clone(),
        );
        registry.register(
            "deferred_outcomes",
            "Deferred requests that reached a state in which nothing more happens by itself",
            metrics.outcomes.clone(),
        );
        registry.register(
            "deferred_sendings",
            "Sendings to the upstream: of requests (create), of questions for a result (poll), \
             and those of both that it refused because there were too many (throttled)",
            metrics.sendings.clone(),
        );
        registry.register(
            "deferred_refusals",
            "Requests that were not deferred, by reason",
            metrics.refusals.clone(),
        );
        registry.register(
            "deferred_replays",
            "Requests that came again under the key of one that is known",
            metrics.replays.clone(),
        );
        registry.register(
            "deferred_crashes",
            "Requests that were in flight when the process or their worker ended",
            metrics.crashes.clone(),
        );
        registry.register_with_unit(
            "deferred_oldest",
            "Age of the oldest request that is not settled",
            Unit::Seconds,
            metrics.oldest.clone(),
        );
        registry.register(
            "deferred_store_closed",
            "1 if the store could not be written and nothing is accepted or sent any more",
            metrics.store_closed.clone(),
        );
        registry.register(
            "deferred_commits",
            "Synced writes of the store",
            metrics.commits.clone(),
        );
        registry.register_with_unit(
            "deferred_commit_time",
            "Time that synced writes of the store took",
            Unit::Seconds,
            metrics.commit_seconds.clone(),
        );
        metrics
    }

    /// Counts one synced write.
    pub(super) fn committed(&self, took: Duration) {
        self.commits.inc();
        self.commit_seconds.inc_by(took.as_secs_f64());
    }

    /// Counts what was not deferred.
    pub(super) fn refused(&self, reason: &'static str) {
        self.refusals.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// Moves a request from one state to another; `None` is outside of the store.
    pub(super) fn moved(&self, upstream: &Arc<str>, from: Option<State>, to: Option<State>) {
        if from == to {
            return;
        }
        let labels =
            |state: State| StateLabels { upstream: Arc::clone(upstream), state: state.name() };
        if let Some(from) = from {
            self.requests.get_or_create(&labels(from)).dec();
        }
        if let Some(to) = to {
            self.requests.get_or_create(&labels(to)).inc();
            if from.is_some() && to.is_settled() {
                self.outcomes.get_or_create(&labels(to)).inc();
            }
        }
    }

    /// A request is about to leave.
    pub(super) fn leaves(&self, upstream: &Arc<str>, poll: bool) {
        let labels = UpstreamLabels { upstream: Arc::clone(upstream) };
        self.in_flight.get_or_create(&labels).inc();
        self.sent(upstream, if poll { "poll" } else { "create" });
    }

    /// A request is back.
    pub(super) fn returned(&self, upstream: &Arc<str>, throttled: bool) {
        let labels = UpstreamLabels { upstream: Arc::clone(upstream) };
        self.in_flight.get_or_create(&labels).dec();
        if throttled {
            self.sent(upstream, "throttled");
        }
    }

    fn sent(&self, upstream: &Arc<str>, kind: &'static str) {
        let labels = SendingLabels { upstream: Arc::clone(upstream), kind };
        self.sendings.get_or_create(&labels).inc();
    }
}
