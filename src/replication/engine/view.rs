//! What the engine tells operators.

use std::collections::BTreeMap;

use super::super::frame::Incarnation;
use super::Engine;
use crate::limiter::{BucketId, Companion as _, LimitIndex, Quota, Tokens};
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
    /// Entries and rows of limits that are not ours.
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

    /// Where this replica believes it can be dialled; may be empty.
    pub fn address(&self) -> &str {
        &self.settings.address
    }

    /// How many addresses discovery lists, this replica's own left out.
    pub fn listed_addresses(&self) -> usize {
        self.contacts.len()
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
                key: slot.key.as_deref().map(<[u8]>::to_vec),
                quota: *quota,
                level,
                spent,
                admitted: slot.admitted,
                refused: slot.refused,
                unsent: ledger.map_or(0, |l| l.unsent(slot.spent, slot.returned)),
                heard_nanos_ago: ledger
                    .and_then(|l| l.heard_at())
                    .map(|heard| now.nanos_since(heard)),
            })
        });
        view.flatten()
    }

    /// Micro-tokens over all buckets that peers have not been told of. Visits
    /// every bucket.
    pub fn unsent(&self) -> u64 {
        let mut total: u64 = 0;
        self.limiter.store().for_each(|_, slot| {
            if let Some(ledger) = slot.companion.as_deref() {
                total = total.saturating_add(ledger.unsent(slot.spent, slot.returned));
            }
        });
        total
    }
}
