//! What the engine tells operators.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::frame::Incarnation;
use super::super::peer::Told;
use super::{Engine, Sent};
use crate::limiter::{BucketId, Companion as _, LimitIndex, Partition, Quota, Tokens};
use crate::time::Timestamp;

/// Counters of replication since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Frames handed to sessions.
    pub frames_sent: u64,
    /// Frames taken from sessions.
    pub frames_received: u64,
    /// Frames that had come before.
    pub frames_repeated: u64,
    /// Entries handed to sessions.
    pub entries_sent: u64,
    /// Entries taken from sessions.
    pub entries_received: u64,
    /// Entries that said nothing new.
    pub entries_old: u64,
    /// Entries and rows of limits that are not ours, or not their bucket's.
    pub entries_skipped: u64,
    /// Rows of snapshots handed to sessions.
    pub rows_sent: u64,
    /// Rows of snapshots taken from sessions.
    pub rows_received: u64,
    /// Snapshots that came complete.
    pub snapshots_received: u64,
    /// Buckets handed to the streams.
    pub flushes: u64,
    /// Dials that did not lead to a session.
    pub dial_failures: u64,
    /// Peers that were given up.
    pub peers_lost: u64,
    /// Times that the process stood still for long.
    pub standstills: u64,
    /// The join ended without a snapshot.
    pub joined_alone: bool,
    /// Micro-tokens that the debt cap forgave, by limit.
    pub forgiven: BTreeMap<LimitIndex, u64>,
}

impl Stats {
    pub(super) fn forgive(&mut self, limit: LimitIndex, micros: u64) {
        if micros > 0 {
            let forgiven = self.forgiven.entry(limit).or_default();
            *forgiven = forgiven.saturating_add(micros);
        }
    }
}

/// A bucket as this replica knows it.
#[derive(Clone, Debug, PartialEq)]
pub struct BucketView {
    /// Its identity.
    pub bucket: BucketId,
    /// Its limit.
    pub limit: LimitIndex,
    /// Its canonical key, if it was kept.
    pub key: Option<Vec<u8>>,
    /// Its quota.
    pub quota: Quota,
    /// Its level.
    pub level: Tokens,
    /// What each replica spent, net, in micro-tokens; this one first.
    pub spent: Vec<(Incarnation, u64)>,
    /// Requests that this replica admitted.
    pub admitted: u32,
    /// Requests that this replica refused.
    pub refused: u32,
    /// Requests that wait here for its tokens.
    pub waiting: usize,
    /// What they cost.
    pub awaited: Tokens,
    /// Nanoseconds until it opens, 0 if it is open.
    pub paused_for: u64,
    /// Micro-tokens that peers have not been told of.
    pub unsent: u64,
    /// Nanoseconds since a peer was last heard on this bucket, if ever.
    pub heard_nanos_ago: Option<u64>,
}

impl Engine {
    /// Counters since the start.
    pub const fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Whether this replica knows of others and hears none of them.
    pub fn is_isolated(&self) -> bool {
        let heard = self.peers.values().any(|peer| peer.silent_since.is_none());
        !heard && (!self.peers.is_empty() || self.contacts.len() > 0)
    }

    /// By how many tokens one bucket of a limit may at most be over-admitted in
    /// all, as things stand; `None` if there is no such limit.
    ///
    /// With N replicas, the rate r, the burst b and the horizon h within which
    /// news arrives it is (N - 1) (b + r h): every replica may give out what it
    /// sees once more than the others know. Each replica that is silent for t adds
    /// r t, for the buckets that nobody used before and all do now; if the limit is
    /// strict, only for the time until silence is noticed. One that was given up after
    /// its share was released, and is still listed, counts as long as that. What is beyond the debt
    /// cap is never made good and counted as forgiven.
    pub fn overshoot_bound(&self, limit: LimitIndex, now: Timestamp) -> Option<f64> {
        let limit = self.limits.get(limit)?;
        let quota = limit.default_quota();
        let (rate, burst) = (quota.rate().per_second(), quota.burst().as_f64());
        let round_trip = self.peers.values().map(|peer| peer.round_trip).max().unwrap_or(0);
        let horizon = (super::SPACING + Duration::from_nanos(round_trip)).as_secs_f64();
        let news = self.peers.len() as f64 * (burst + rate * horizon);
        let noticed = (super::BUSY_BEAT * super::membership::MISSED_BEATS).as_secs_f64();
        let silent = self.peers.values().filter(|peer| peer.silent_since.is_some());
        let silence: f64 = silent
            .map(|peer| match limit.partition() {
                Partition::Strict => noticed,
                Partition::Frozen | Partition::Open => now.since(peer.heard_at).as_secs_f64(),
            })
            .sum();
        // Given up, they may spend a burst and the rate, whatever the policy.
        let given_up: f64 = self
            .given_up
            .values()
            .map(|(_, since)| burst + rate * now.since(*since).as_secs_f64())
            .sum();
        Some(news + rate * silence + given_up)
    }

    /// Where this replica believes it can be dialled; may be empty.
    pub fn address(&self) -> &str {
        &self.settings.address
    }

    /// How many addresses discovery lists, this replica's own left out.
    pub fn listed_addresses(&self) -> usize {
        self.contacts.len()
    }

    /// Bytes of memory that are held for what `peer` is still to be told, or has
    /// not acknowledged; bounded, however long its stream stands still.
    pub fn backlog_bytes(&self, peer: Incarnation) -> usize {
        let Some(peer) = self.peers.get(&peer) else { return 0 };
        let walk = peer.snapshot.as_ref().map_or(0, |walk| walk.buckets.capacity());
        let session = peer.session.and_then(|id| self.sessions.get(&id));
        let in_flight: usize = session.map_or(0, |session| {
            let frames = session.in_flight.capacity() * size_of::<(u64, Sent)>();
            let sent = session.in_flight.iter().map(|(_, sent)| sent.capacity());
            frames + sent.sum::<usize>() * size_of::<Told>()
        });
        peer.pending.bytes() + walk * size_of::<BucketId>() + in_flight
    }

    /// One bucket, if it exists. One that does not is full.
    pub fn bucket(&self, bucket: BucketId, now: Timestamp) -> Option<BucketView> {
        let view = self.limiter.with_existing(bucket, |slot, quota| {
            let level = if slot.companion.is_some() {
                self.limiter.companion().advance(slot, quota, now);
                slot.bucket.level()
            } else {
                // Looking must not make a bucket seem used.
                let mut bucket = slot.bucket;
                bucket.advance(quota, now);
                bucket.level()
            };
            let mut spent = vec![(self.me, slot.net())];
            let ledger = slot.companion.as_deref();
            if let Some(ledger) = ledger {
                spent.extend(
                    ledger
                        .spent_by_peers()
                        .filter_map(|(origin, net)| Some((self.origins.name(origin)?, net))),
                );
            }
            Some(BucketView {
                bucket,
                limit: slot.limit,
                key: slot.key().map(<[u8]>::to_vec),
                quota: *quota,
                level,
                spent,
                admitted: slot.admitted,
                refused: slot.refused,
                waiting: slot.waiting(),
                awaited: slot.awaited(),
                paused_for: self.limiter.companion().paused_for(slot, now),
                unsent: ledger.map_or(0, |l| l.unsent(slot.spent, slot.returned()).unsigned_abs()),
                heard_nanos_ago: ledger
                    .and_then(|l| l.heard_at())
                    .map(|heard| now.nanos_since(heard)),
            })
        });
        view.flatten()
    }

    /// How many buckets of each limit are closed; none of a limit that is not named.
    /// Visits every bucket.
    pub fn paused(&self, now: Timestamp) -> BTreeMap<LimitIndex, u64> {
        let mut paused = BTreeMap::new();
        self.limiter.store().for_each(|_, slot| {
            if self.limiter.companion().paused_for(slot, now) > 0 {
                *paused.entry(slot.limit).or_default() += 1;
            }
        });
        paused
    }

    /// Micro-tokens over all buckets that peers have not been told of. Visits
    /// every bucket.
    pub fn unsent(&self) -> u64 {
        let mut total: u64 = 0;
        self.limiter.store().for_each(|_, slot| {
            if let Some(ledger) = slot.companion.as_deref() {
                total =
                    total.saturating_add(ledger.unsent(slot.spent, slot.returned()).unsigned_abs());
            }
        });
        total
    }
}
