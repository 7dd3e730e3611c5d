//! What the mesh counts.
//!
//! Counters of single events are raised where they happen; everything else is
//! copied from the engine about once a second.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicI64, AtomicU64};

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::session::End;
use crate::limiter::{LimitIndex, LimitSet, Tokens};
use crate::replication::{Engine, PeerState, PeerView, Refusal, Stats};
use crate::time::Timestamp;

/// Label of limits that only a peer has: their names are the peer's choice.
const OTHER_LIMIT: &str = "other";

/// Why this replica refused a stream or ended a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Reason {
    /// The dialler is this replica itself.
    Myself,
    /// Another session with the peer stays.
    Duplicate,
    /// Another group.
    Group,
    /// No common version.
    Version,
    /// Too many connections or sessions.
    TooMany,
    /// This replica is leaving.
    Leaving,
    /// The first frame was not a Hello, or did not come in time.
    NoHello,
    /// A message was too large.
    Oversized,
    /// A message or a field is not what the protocol allows.
    Malformed,
    /// A frame that contradicts what was said before.
    Violation,
    /// No TLS: a certificate that is not accepted, or none.
    Tls,
}

impl Reason {
    /// The reason why a stream that ended so is refused, if it is.
    pub(super) const fn of(end: &End) -> Option<Self> {
        match end {
            End::Closed | End::Failed(_) | End::Rejected(_) => None,
            End::Oversized => Some(Self::Oversized),
            End::Undecodable(_) | End::Malformed(_) => Some(Self::Malformed),
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Myself => "self",
            Self::Duplicate => "duplicate",
            Self::Group => "group",
            Self::Version => "version",
            Self::TooMany => "too_many",
            Self::Leaving => "leaving",
            Self::NoHello => "no_hello",
            Self::Oversized => "oversized",
            Self::Malformed => "malformed",
            Self::Violation => "violation",
            Self::Tls => "tls",
        }
    }
}

impl From<&Refusal> for Reason {
    fn from(refusal: &Refusal) -> Self {
        match refusal {
            Refusal::Myself => Self::Myself,
            Refusal::Duplicate => Self::Duplicate,
            Refusal::Group { .. } => Self::Group,
            Refusal::Version { .. } => Self::Version,
            Refusal::TooMany => Self::TooMany,
            Refusal::Leaving => Self::Leaving,
        }
    }
}

impl EncodeLabelValue for Reason {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        encoder.write_str(self.as_str())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Refused {
    reason: Reason,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Read {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InState {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Going {
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfLimit {
    limit: String,
}

const SENT: Going = Going { direction: "sent" };
const RECEIVED: Going = Going { direction: "received" };

type Count = Counter<u64, AtomicU64>;
type Level = Gauge<f64, AtomicU64>;

/// The metrics of the mesh. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    peers: Family<InState, Gauge<i64, AtomicI64>>,
    lag: Level,
    unsynced: Level,
    frames: Family<Going, Count>,
    entries: Family<Going, Count>,
    forgiven: Family<OfLimit, Counter<f64, AtomicU64>>,
    overshoot_bound: Family<OfLimit, Gauge<f64, AtomicU64>>,
    paused: Family<OfLimit, Gauge<i64, AtomicI64>>,
    isolated: Gauge<i64, AtomicI64>,
    mismatches: Family<OfLimit, Gauge<i64, AtomicI64>>,
    refusals: Family<Refused, Count>,
    certificate_reads: Family<Read, Count>,
    certificate_end: Gauge<i64, AtomicI64>,
}

impl Metrics {
    /// Registers the metrics of the mesh:
    ///
    /// | name | meaning |
    /// |---|---|
    /// | `peers{state}` | replicas met and not known to be gone |
    /// | `replication_lag_seconds` | the longest time since a live peer's last frame; 0 without live peers |
    /// | `replication_unsynced_tokens` | spent here, and not yet handed to any stream |
    /// | `frames_total{direction}` | frames of all sessions |
    /// | `entries_total{direction}` | buckets that frames spoke of, snapshots not counted |
    /// | `forgiven_tokens_total{limit}` | debt beyond the debt cap |
    /// | `overshoot_bound_tokens{limit}` | most that one bucket may be over-admitted as things stand, see [`Engine::overshoot_bound`] |
    /// | `paused_buckets{limit}` | buckets in memory that are closed, alone or with all of their limit |
    /// | `isolated` | 1 while this replica knows of others and hears none |
    /// | `peer_config_mismatch{limit}` | peers whose configuration of the limit differs |
    /// | `peer_refusals_total{reason}` | streams refused, and sessions ended for a fault |
    /// | `peer_certificate_reads_total{result}` | changes of the certificates for peers |
    /// | `peer_certificate_not_after_timestamp_seconds` | when this replica's certificate for peers ends; 0 without |
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("peers", "Peers by state: live, suspect", metrics.peers.clone());
        registry.register(
            "replication_lag_seconds",
            "Longest time since the last frame of a live peer, 0 without live peers",
            metrics.lag.clone(),
        );
        registry.register(
            "replication_unsynced_tokens",
            "Tokens spent here and not yet handed to any stream",
            metrics.unsynced.clone(),
        );
        registry.register("frames", "Frames of all sessions", metrics.frames.clone());
        registry.register(
            "entries",
            "Entries of update frames: buckets that were spoken of",
            metrics.entries.clone(),
        );
        registry.register(
            "forgiven_tokens",
            "Tokens by which the debt cap lowered what peers had spent",
            metrics.forgiven.clone(),
        );
        registry.register(
            "overshoot_bound_tokens",
            "Most tokens that one bucket may be over-admitted in all, as things stand",
            metrics.overshoot_bound.clone(),
        );
        registry.register(
            "paused_buckets",
            "Buckets in memory that are closed, because the upstream or an operator asked for it",
            metrics.paused.clone(),
        );
        registry.register(
            "isolated",
            "1 while this replica knows of others and hears none of them",
            metrics.isolated.clone(),
        );
        registry.register(
            "peer_config_mismatch",
            "Peers whose configuration of the limit differs from this replica's",
            metrics.mismatches.clone(),
        );
        registry.register(
            "peer_refusals",
            "Streams of peers that were refused, and sessions ended for a fault, by reason",
            metrics.refusals.clone(),
        );
        registry.register(
            "peer_certificate_reads",
            "Changes of the certificates for peers, by result: success, failure",
            metrics.certificate_reads.clone(),
        );
        registry.register_with_unit(
            "peer_certificate_not_after_timestamp",
            "When this replica's certificate for peers ends, 0 without one",
            Unit::Seconds,
            metrics.certificate_end.clone(),
        );
        metrics
    }

    /// The certificates changed, and could be used or not.
    pub(super) fn certificates_read(&self, usable: bool) {
        let result = if usable { "success" } else { "failure" };
        self.certificate_reads.get_or_create(&Read { result }).inc();
    }

    /// When the certificate in use ends, in seconds since 1970.
    pub(super) fn certificate(&self, not_after: i64) {
        self.certificate_end.set(not_after);
    }

    pub(super) fn refused(&self, reason: Reason) {
        self.refusals.get_or_create(&Refused { reason }).inc();
    }
}

/// Copies what the engine knows into the metrics.
#[derive(Debug)]
pub(super) struct Publisher {
    metrics: Metrics,
    /// What was published last; counters can only be raised.
    last: Stats,
}

impl Publisher {
    pub(super) fn new(metrics: Metrics) -> Self {
        // Series exist before their first event.
        for state in [PeerState::Live, PeerState::Suspect] {
            drop(metrics.peers.get_or_create(&InState { state: state.as_str() }));
        }
        for going in [SENT, RECEIVED] {
            drop(metrics.frames.get_or_create(&going));
            drop(metrics.entries.get_or_create(&going));
        }
        Self { metrics, last: Stats::default() }
    }

    /// Everything that costs the same however many buckets there are.
    pub(super) fn publish(&mut self, engine: &Engine, now: Timestamp) {
        let peers = engine.peers(now);
        for state in [PeerState::Live, PeerState::Suspect] {
            let count = peers.iter().filter(|peer| peer.state == state).count();
            let gauge = self.metrics.peers.get_or_create_owned(&InState { state: state.as_str() });
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        let live = peers.iter().filter(|peer| peer.state == PeerState::Live);
        let lag = live.map(|peer| peer.heard_nanos_ago).max().unwrap_or(0);
        self.metrics.lag.set(lag as f64 / 1e9);
        let limits = engine.limiter().limits();
        for (index, limit) in limits.iter() {
            if let Some(bound) = engine.overshoot_bound(index, now) {
                let labels = OfLimit { limit: limit.name().to_owned() };
                self.metrics.overshoot_bound.get_or_create(&labels).set(bound);
            }
        }
        self.metrics.isolated.set(i64::from(engine.is_isolated()));
        self.publish_mismatches(&peers, &limits);
        self.publish_counters(engine.stats(), &limits);
    }

    /// Visits every bucket.
    pub(super) fn publish_visited(&self, engine: &Engine, now: Timestamp) {
        self.metrics.unsynced.set(engine.unsent() as f64 / Tokens::MICRO as f64);
        let paused = engine.paused(now);
        for (index, limit) in engine.limiter().limits().iter() {
            let labels = OfLimit { limit: limit.name().to_owned() };
            let count = paused.get(&index).copied().unwrap_or(0);
            self.metrics.paused.get_or_create(&labels).set(count.cast_signed());
        }
    }

    fn publish_mismatches(&self, peers: &[PeerView], limits: &LimitSet) {
        let ours = limits.iter().map(|(_, limit)| (limit.name(), 0));
        let mut counts: BTreeMap<&str, i64> = ours.collect();
        counts.insert(OTHER_LIMIT, 0);
        for mismatch in peers.iter().flat_map(|peer| &peer.mismatches) {
            let name = mismatch.split_once(": ").map_or(mismatch.as_str(), |(name, _)| name);
            let name = if counts.contains_key(name) { name } else { OTHER_LIMIT };
            *counts.entry(name).or_default() += 1;
        }
        for (name, count) in counts {
            let labels = OfLimit { limit: name.to_owned() };
            self.metrics.mismatches.get_or_create(&labels).set(count);
        }
    }

    fn publish_counters(&mut self, stats: &Stats, limits: &LimitSet) {
        let (last, metrics) = (&self.last, &self.metrics);
        let raise = |family: &Family<Going, Count>, going: &Going, now: u64, before: u64| {
            family.get_or_create(going).inc_by(now.saturating_sub(before));
        };
        raise(&metrics.frames, &SENT, stats.frames_sent, last.frames_sent);
        raise(&metrics.frames, &RECEIVED, stats.frames_received, last.frames_received);
        raise(&metrics.entries, &SENT, stats.entries_sent, last.entries_sent);
        raise(&metrics.entries, &RECEIVED, stats.entries_received, last.entries_received);
        for (index, micros) in &stats.forgiven {
            let before: u64 = last.forgiven.get::<LimitIndex>(index).copied().unwrap_or(0);
            if let Some(limit) = limits.get(*index) {
                let labels = OfLimit { limit: limit.name().to_owned() };
                let tokens = micros.saturating_sub(before) as f64 / Tokens::MICRO as f64;
                metrics.forgiven.get_or_create(&labels).inc_by(tokens);
            }
        }
        self.last = stats.clone();
    }
}
