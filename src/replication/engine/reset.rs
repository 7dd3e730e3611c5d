//! Resets: buckets made full again everywhere.

use super::super::ledger::Ledger;
use super::Engine;
use super::receive::epoch_after;
use crate::limiter::{BucketId, KeyBuf, LimitIndex, Quota, Slot, TokenBucket, Tokens};
use crate::replication::Companion;
use crate::time::Timestamp;

/// What is to be reset.
#[derive(Clone, Debug)]
pub enum Reset {
    /// One bucket, by the canonical key that names it.
    Key(LimitIndex, KeyBuf),
    /// One bucket, by its identity.
    Bucket(LimitIndex, BucketId),
    /// All buckets of a limit.
    Limit(LimitIndex),
}

impl Engine {
    /// Makes a bucket, or all buckets of a limit, full again on every replica.
    /// Returns how many buckets of this replica that were, or `None` if there is
    /// no such limit or the bucket is another's. Peers that cannot be reached now are told when they can.
    pub fn reset(&mut self, what: &Reset, now: Timestamp) -> Option<usize> {
        match what {
            Reset::Key(index, key) => {
                let bucket = self.limits.get(*index)?.bucket_id(key.as_bytes());
                self.reset_bucket(*index, bucket, Some(key.as_bytes()), now)
            }
            Reset::Bucket(index, bucket) => self.reset_bucket(*index, *bucket, None, now),
            Reset::Limit(index) => {
                self.limits.get(*index)?;
                let epochs = self.limiter.companion().epochs();
                let mut highest = epochs.of_limit(*index);
                self.limiter.store().for_each(|_, slot| {
                    if let Some(ledger) = slot.companion.as_deref().filter(|_| slot.limit == *index)
                    {
                        highest = highest.max(ledger.epoch());
                    }
                });
                Some(self.reset_limit(*index, epoch_after(highest), now))
            }
        }
    }

    fn reset_bucket(
        &mut self,
        index: LimitIndex,
        bucket: BucketId,
        key: Option<&[u8]>,
        now: Timestamp,
    ) -> Option<usize> {
        let (limits, companion) = (&self.limits, self.limiter.companion());
        let limit = limits.get(index)?;
        let existed = self.limiter.store().with_existing(bucket, |_| ()).is_some();
        let life = self.limiter.store().new_life();
        let is_of_limit = self.limiter.with_quota(bucket, index, limit, key, now, |slot, quota| {
            if slot.limit != index {
                return false;
            }
            companion.ensure_ledger(bucket, slot, now);
            let before = slot.companion.as_deref().map_or(0, Ledger::epoch);
            let epoch = epoch_after(before.max(companion.epochs().of_limit(index)));
            companion.epochs().raise_bucket(bucket, epoch, now);
            empty(slot, bucket, life, companion, quota, now);
            true
        });
        if !is_of_limit {
            return None;
        }
        self.limiter.stir(bucket);
        // Peers must hear of it although nothing was spent.
        self.flush_and_watch(bucket, now);
        Some(usize::from(existed))
    }

    /// All buckets of a limit have reached `epoch`. Returns how many were reset.
    pub(super) fn reset_limit(&mut self, index: LimitIndex, epoch: u64, now: Timestamp) -> usize {
        let companion = self.limiter.companion();
        companion.epochs().raise_limit(index, epoch);
        for peer in self.peers.values_mut() {
            peer.limit_epochs.insert(index);
        }
        let mut behind = Vec::new();
        self.limiter.store().for_each(|bucket, slot| {
            let reached = slot.companion.as_deref().map_or(0, Ledger::epoch);
            if slot.limit == index && reached < epoch {
                behind.push(bucket);
            }
        });
        for bucket in &behind {
            let life = self.limiter.store().new_life();
            self.limiter.with_existing(*bucket, |slot, quota| {
                empty(slot, *bucket, life, companion, quota, now);
            });
            self.limiter.stir(*bucket);
        }
        behind.len()
    }
}

/// Begins a new life of the bucket: full, and nothing spent by anyone. Requests
/// that are being decided keep what they hold, and a pause lasts. The ledger's epoch is what the
/// epochs say it has reached.
pub(super) fn empty(
    slot: &mut Slot<Ledger>,
    bucket: BucketId,
    life: u32,
    companion: &Companion,
    quota: &Quota,
    now: Timestamp,
) {
    slot.bucket = TokenBucket::full(quota, now);
    let held = i64::try_from(slot.held()).unwrap_or(i64::MAX);
    slot.bucket.shift(quota, Tokens::from_micros(-held));
    slot.life = life;
    slot.forget_spending();
    // It was not the spending that closed the bucket.
    let pause = slot.companion.as_deref().and_then(Ledger::pause).copied();
    let mut ledger = companion.new_ledger(bucket, slot.limit, 0, 0, now);
    if let Some(pause) = pause {
        ledger.set_pause(pause, now);
    }
    slot.companion = Some(ledger);
}
