//! What the proxy counts. Labels hold configured names only, never a word of a
//! client's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Registry, Unit};

use super::certificates::CertificateMetrics;
use crate::limiter::{self, LimitSet};
use crate::runtime::FileChange;
use crate::telemetry::FileReads;

/// The proxy's metrics; clones count into the same numbers.
#[derive(Clone, Debug)]
pub struct Metrics {
    checks: Family<CheckLabels, Counter>,
    outcomes: [Counter; Outcome::ALL.len()],
    upstream_duration: DurationHistogram,
    waiting: Family<LimitLabels, Gauge>,
    waits: Family<WaitLabels, Counter>,
    held_duration: DurationHistogram,
    in_flight: Family<UpstreamLabels, Gauge>,
    upstream_refusals: Family<UpstreamLabels, Counter>,
    credential_reads: FileReads,
    upstream_ca_reads: FileReads,
    pub(super) certificates: CertificateMetrics,
    pub(super) ignored_forwarding: Counter,
    pub(super) refunds: Counter,
    pub(super) accept_errors: Counter,
    pub(super) connections: Gauge,
}

/// What became of an HTTP request, or of a connection that never got to send one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The upstream answered.
    Forwarded,
    /// A limit refused it.
    Limited,
    /// It was the client's fault.
    Rejected,
    /// It was meant for the proxy itself.
    Answered,
    /// The upstream could not be reached, failed or took too long.
    UpstreamFailed,
    /// There were too many connections, or too many requests that wait.
    Overloaded,
    /// The client went away before there was an answer.
    Cancelled,
}

/// How many requests came to each end at one limit since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckTotals {
    /// It had room and was charged.
    pub admitted: u64,
    /// It had room only after the request had waited, and was charged then.
    pub held: u64,
    /// It refused the request.
    pub refused: u64,
    /// It would have refused, but only reports.
    pub shadow_refused: u64,
    /// It had room, but another limit refused.
    pub not_charged: u64,
}

/// What one limit made of its requests.
#[derive(Clone, Debug)]
pub(super) struct LimitMetrics {
    pub(super) waits: Arc<WaitMetrics>,
    admitted: Counter,
    held: Counter,
    refused: Counter,
    shadow_refused: Counter,
    not_charged: Counter,
}

/// What became of the requests that were to wait for one limit.
#[derive(Clone, Debug)]
pub(super) struct WaitMetrics {
    /// The limit's name.
    pub(super) limit: String,
    /// How many wait now.
    pub(super) waiting: Gauge,
    outcomes: [Counter; WaitOutcome::ALL.len()],
}

/// How a wait ended, or that there was none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitOutcome {
    /// The request passed.
    Admitted,
    /// It could wait no longer.
    TimedOut,
    /// Its client went away.
    Left,
    /// Too many waited already.
    TooMany,
}

impl WaitOutcome {
    const ALL: [Self; 4] = [Self::Admitted, Self::TimedOut, Self::Left, Self::TooMany];

    const fn label(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::TimedOut => "timed_out",
            Self::Left => "left",
            Self::TooMany => "too_many",
        }
    }
}

impl WaitMetrics {
    /// Counts a request.
    pub(super) fn count(&self, outcome: WaitOutcome) {
        self.outcomes[outcome as usize].inc();
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LimitLabels {
    limit: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WaitLabels {
    limit: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CheckLabels {
    limit: String,
    verdict: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UpstreamLabels {
    upstream: String,
}

impl Outcome {
    const ALL: [Self; 7] = [
        Self::Forwarded,
        Self::Limited,
        Self::Rejected,
        Self::Answered,
        Self::UpstreamFailed,
        Self::Overloaded,
        Self::Cancelled,
    ];

    /// The value of the label `outcome`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Forwarded => "forwarded",
            Self::Limited => "limited",
            Self::Rejected => "rejected",
            Self::Answered => "answered",
            Self::UpstreamFailed => "upstream_failed",
            Self::Overloaded => "overloaded",
            Self::Cancelled => "cancelled",
        }
    }
}

impl Metrics {
    /// How many requests came to this end so far.
    pub fn total(&self, outcome: Outcome) -> u64 {
        self.outcomes[outcome as usize].get()
    }

    /// Registers everything, with a sample for each of `limits` and each verdict.
    pub fn register(registry: &mut Registry, limits: &LimitSet) -> Self {
        let outcomes = Family::<OutcomeLabels, Counter>::default();
        let metrics = Self {
            checks: Family::default(),
            outcomes: Outcome::ALL.map(|outcome| {
                outcomes.get_or_create_owned(&OutcomeLabels { outcome: outcome.label() })
            }),
            upstream_duration: DurationHistogram::default(),
            waiting: Family::default(),
            waits: Family::default(),
            held_duration: DurationHistogram::default(),
            in_flight: Family::default(),
            upstream_refusals: Family::default(),
            upstream_ca_reads: FileReads::register(
                registry,
                "upstream_ca_reads",
                "Changes of files with the CAs of upstreams, by result: success, failure",
            ),
            credential_reads: FileReads::register(
                registry,
                "upstream_credential_reads",
                "Changes of files with credentials for upstreams, by result: success, failure",
            ),
            certificates: CertificateMetrics::register(registry),
            ignored_forwarding: Counter::default(),
            refunds: Counter::default(),
            accept_errors: Counter::default(),
            connections: Gauge::default(),
        };
        registry.register(
            "requests",
            "Checks of requests against limits, one for each request and limit that applies to it",
            metrics.checks.clone(),
        );
        registry.register("http_requests", "Requests by what became of them", outcomes);
        registry.register_with_unit(
            "upstream_duration",
            "Time from handing a request to the upstream to the head of its answer",
            Unit::Seconds,
            metrics.upstream_duration.clone(),
        );
        registry.register(
            "waiting",
            "Requests that wait for their tokens, by the limit that they came to first",
            metrics.waiting.clone(),
        );
        registry.register(
            "waits",
            "Requests that were to wait for their tokens, by what became of that",
            metrics.waits.clone(),
        );
        registry.register_with_unit(
            "held_duration",
            "Time that requests waited for their tokens, however it ended",
            Unit::Seconds,
            metrics.held_duration.clone(),
        );
        registry.register(
            "forwarding_ignored",
            "Forwarded requests whose X-Forwarded-For or Forwarded was replaced since the peer is not trusted",
            metrics.ignored_forwarding.clone(),
        );
        registry.register(
            "refunds",
            "Requests that were admitted, never reached the upstream, and got their tokens back",
            metrics.refunds.clone(),
        );
        registry.register(
            "accept_errors",
            "Failures to accept a connection",
            metrics.accept_errors.clone(),
        );
        registry.register(
            "upstream_in_flight",
            "Requests on their way to a named upstream, until their answers have been passed on",
            metrics.in_flight.clone(),
        );
        registry.register(
            "upstream_refusals",
            "Answers of named upstreams by which they refuse for having too many requests",
            metrics.upstream_refusals.clone(),
        );
        registry.register("connections", "Open client connections", metrics.connections.clone());
        for (_, limit) in limits.iter() {
            metrics.limit(limit.name());
        }
        metrics
    }

    /// The counters of the limit called `name`, made if they do not exist.
    pub(super) fn limit(&self, name: &str) -> LimitMetrics {
        let counter = |verdict| {
            self.checks.get_or_create_owned(&CheckLabels { limit: name.to_owned(), verdict })
        };
        LimitMetrics {
            waits: self.waits(name),
            admitted: counter("admitted"),
            held: counter("held"),
            refused: counter("refused"),
            shadow_refused: counter("shadow_refused"),
            not_charged: counter("not_charged"),
        }
    }

    /// Where waits for the limit called `name` are counted.
    pub(super) fn waits(&self, name: &str) -> Arc<WaitMetrics> {
        let limit = name.to_owned();
        let waiting = self.waiting.get_or_create_owned(&LimitLabels { limit: limit.clone() });
        let outcomes = WaitOutcome::ALL.map(|outcome| {
            let labels = WaitLabels { limit: limit.clone(), outcome: outcome.label() };
            self.waits.get_or_create_owned(&labels)
        });
        Arc::new(WaitMetrics { limit, waiting, outcomes })
    }

    /// Records how long a request waited for its tokens.
    pub(super) fn held(&self, duration: Duration) {
        self.held_duration.observe(duration);
    }

    /// Counts a request.
    pub(super) fn count(&self, outcome: Outcome) {
        self.outcomes[outcome as usize].inc();
    }

    /// How many requests are on their way to an upstream.
    pub(super) fn in_flight(&self, upstream: &str) -> Gauge {
        let labels = UpstreamLabels { upstream: upstream.to_owned() };
        self.in_flight.get_or_create_owned(&labels)
    }

    /// Where the refusals of an upstream are counted.
    pub(super) fn refusals(&self, upstream: &str) -> Counter {
        let labels = UpstreamLabels { upstream: upstream.to_owned() };
        self.upstream_refusals.get_or_create_owned(&labels)
    }

    /// A file with the CAs of an upstream changed, or one with a credential for it.
    pub(super) fn file_read(&self, is_credential: bool, change: FileChange) {
        let reads = if is_credential { &self.credential_reads } else { &self.upstream_ca_reads };
        reads.count(change);
    }

    /// Records how long the upstream took.
    pub(super) fn upstream_took(&self, duration: Duration) {
        self.upstream_duration.observe(duration);
    }
}

impl LimitMetrics {
    /// What was counted so far.
    pub(super) fn totals(&self) -> CheckTotals {
        CheckTotals {
            admitted: self.admitted.get(),
            held: self.held.get(),
            refused: self.refused.get(),
            shadow_refused: self.shadow_refused.get(),
            not_charged: self.not_charged.get(),
        }
    }

    /// Counts a check, of a request that had to wait for this limit if `held`.
    pub(super) fn count(&self, outcome: limiter::Outcome, held: bool) {
        match outcome {
            limiter::Outcome::Admitted if held => &self.held,
            limiter::Outcome::Admitted => &self.admitted,
            limiter::Outcome::Refused => &self.refused,
            limiter::Outcome::NotCharged => &self.not_charged,
            limiter::Outcome::ShadowRefused => &self.shadow_refused,
        }
        .inc();
    }
}

/// Upper bounds of the duration buckets, in microseconds.
const BOUNDS_US: [u64; 16] = [
    250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000, 30_000_000,
];

/// A histogram of durations without a lock: every request passes here.
#[derive(Clone, Debug, Default)]
struct DurationHistogram(Arc<DurationBuckets>);

#[derive(Debug, Default)]
struct DurationBuckets {
    sum_us: AtomicU64,
    /// One for each bound, and one for what is above them all.
    counts: [AtomicU64; BOUNDS_US.len() + 1],
}

impl DurationHistogram {
    fn observe(&self, duration: Duration) {
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| *bound < micros);
        self.0.sum_us.fetch_add(micros, Ordering::Relaxed);
        self.0.counts[bucket].fetch_add(1, Ordering::Relaxed);
    }
}

impl TypedMetric for DurationHistogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for DurationHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let bounds = BOUNDS_US.iter().map(|us| *us as f64 / 1e6).chain([f64::INFINITY]);
        let counts = self.0.counts.iter().map(|count| count.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        let sum = self.0.sum_us.load(Ordering::Relaxed) as f64 / 1e6;
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_exported_from_the_start() {
        let mut registry = Registry::with_prefix("tidegate");
        let metrics = Metrics::register(&mut registry, &LimitSet::default());
        metrics.limit("per-client").count(limiter::Outcome::Refused, false);
        metrics.limit("per-client").count(limiter::Outcome::Admitted, true);
        metrics.waits("per-client").count(WaitOutcome::Left);
        metrics.held(Duration::from_millis(3));
        metrics.count(Outcome::Limited);
        metrics.upstream_took(Duration::from_micros(250));
        metrics.upstream_took(Duration::from_secs(3600));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "tidegate_requests_total{limit=\"per-client\",verdict=\"refused\"} 1",
            "tidegate_requests_total{limit=\"per-client\",verdict=\"admitted\"} 0",
            "tidegate_requests_total{limit=\"per-client\",verdict=\"held\"} 1",
            "tidegate_waiting{limit=\"per-client\"} 0",
            "tidegate_waits_total{limit=\"per-client\",outcome=\"left\"} 1",
            "tidegate_waits_total{limit=\"per-client\",outcome=\"too_many\"} 0",
            "tidegate_held_duration_seconds_bucket{le=\"0.005\"} 1",
            "tidegate_http_requests_total{outcome=\"limited\"} 1",
            "tidegate_http_requests_total{outcome=\"cancelled\"} 0",
            "tidegate_upstream_duration_seconds_bucket{le=\"0.00025\"} 1",
            "tidegate_upstream_duration_seconds_bucket{le=\"30.0\"} 1",
            "tidegate_upstream_duration_seconds_bucket{le=\"+Inf\"} 2",
            "tidegate_upstream_duration_seconds_count 2",
            "tidegate_refunds_total 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
