//! Pauses (layer 1, pure): buckets that are closed until some moment, whatever
//! they hold, because the upstream or an operator asked for it.
//!
//! How long a bucket is closed is kept by the [`Companion`], which tells other
//! replicas. A closed bucket refills, refuses with the end of the pause as the
//! moment to come back, and keeps its line: its front waits for that end.

use std::time::Duration;

use super::{BucketId, Calls, Companion, LimitIndex, Limiter};
use crate::time::Timestamp;

/// What is said of a bucket's being closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseOrder {
    /// The upstream wants no request before this moment. Of several the latest
    /// moment holds, whichever replica heard it; one that has passed says nothing.
    AtLeast(Timestamp),
    /// An operator closes it until this moment, in place of what was said before.
    Until(Timestamp),
    /// An operator opens it.
    Lift,
}

impl PauseOrder {
    /// The longest pause; a longer one is cut to it, so that a mistake ends by
    /// itself.
    pub const LONGEST: Duration = Duration::from_secs(24 * 3600);
}

impl<C: Companion> Limiter<C> {
    /// Closes or opens a bucket on every replica, without waiting for any. A bucket
    /// that does not exist is made for it; `key`, if it is known, must be its own.
    /// Whether there is such a limit, and the bucket is its own.
    pub fn pause(
        &self,
        index: LimitIndex,
        bucket: BucketId,
        key: Option<&[u8]>,
        order: PauseOrder,
        now: Timestamp,
    ) -> bool {
        let limits = self.limits.load();
        let Some(limit) = limits.get(index) else { return false };
        let calls = self.with_quota(bucket, index, limit, key, now, |slot, quota| {
            if slot.limit != index {
                return None;
            }
            // What is reckoned until now was reckoned as it stood.
            self.companion.advance(slot, quota, now);
            let changed = self.companion.pause(bucket, slot, order, now);
            Some(if changed { slot.call_front() } else { Calls::default() })
        });
        let is_of_limit = calls.is_some();
        calls.unwrap_or_default().call();
        is_of_limit
    }

    /// Closes or opens all buckets of a limit on every replica, those that are still
    /// to be made included. Opening them also opens those that were closed alone.
    /// Whether there is such a limit.
    pub fn pause_limit(&self, index: LimitIndex, order: PauseOrder, now: Timestamp) -> bool {
        if self.limits.load().get(index).is_none() {
            return false;
        }
        let changed = self.companion.pause_limit(index, order, now);
        if order == PauseOrder::Lift {
            let mut closed = Vec::new();
            self.store.for_each(|id, slot| {
                if slot.limit == index && self.companion.paused_for(slot, now) > 0 {
                    closed.push(id);
                }
            });
            for bucket in closed {
                self.pause(index, bucket, None, PauseOrder::Lift, now);
            }
        }
        if changed {
            self.stir_limit(index);
        }
        true
    }

    /// Calls the requests that are in front of the lines of a limit's buckets.
    pub fn stir_limit(&self, index: LimitIndex) {
        if self.waiting() == 0 {
            return;
        }
        let mut calls = Calls::default();
        self.store.for_each(|_, slot| {
            if slot.limit == index {
                calls.add(slot.call_front());
            }
        });
        calls.call();
    }
}
