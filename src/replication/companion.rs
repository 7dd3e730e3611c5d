//! The hot path's side of replication: marking buckets that peers should hear of.
//!
//! A check never waits for a peer. It only compares, under the bucket's guard,
//! what it has spent with what was last handed to the streams, and pushes the
//! bucket's identity on a lock-free queue when peers should know: at once if the
//! difference matters, within the sync interval otherwise. Until a first peer
//! was seen nothing is marked and no ledger is made, so that a lone replica
//! costs what a lone bucket costs.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll};

use atomic_waker::AtomicWaker;
use crossbeam_queue::SegQueue;

use super::ledger::{Ledger, Mark};
use crate::limiter::{self, BucketId, Event, Quota, Slot};
use crate::time::Timestamp;

/// A bucket that peers should hear of, and how soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marked {
    /// The bucket.
    pub bucket: BucketId,
    /// How soon.
    pub mark: Mark,
}

/// What every check shares with the engine.
#[derive(Debug)]
pub struct Companion {
    /// Whether any peer was ever seen.
    active: AtomicBool,
    /// How many replicas there are, this one included.
    replicas: AtomicU32,
    generations: AtomicU32,
    queue: SegQueue<Marked>,
    waker: AtomicWaker,
}

impl Default for Companion {
    fn default() -> Self {
        Self {
            active: AtomicBool::new(false),
            replicas: AtomicU32::new(1),
            generations: AtomicU32::new(1),
            queue: SegQueue::new(),
            waker: AtomicWaker::new(),
        }
    }
}

impl Companion {
    /// How many replicas there are, this one included.
    pub fn replicas(&self) -> u32 {
        self.replicas.load(Ordering::Relaxed)
    }

    /// Ready when buckets are marked; otherwise the caller is woken when one is.
    pub fn poll_marked(&self, context: &mut Context<'_>) -> Poll<()> {
        if !self.queue.is_empty() {
            return Poll::Ready(());
        }
        self.waker.register(context.waker());
        // A mark between the look and the registration woke nobody.
        if self.queue.is_empty() { Poll::Pending } else { Poll::Ready(()) }
    }

    pub(super) fn set_replicas(&self, replicas: u32) {
        self.replicas.store(replicas.max(1), Ordering::Relaxed);
        if replicas > 1 {
            self.active.store(true, Ordering::Release);
        }
    }

    pub(super) fn pop(&self) -> Option<Marked> {
        self.queue.pop()
    }

    /// A ledger for a bucket of which others knew `spent` and `returned`.
    pub(super) fn new_ledger(&self, spent: u64, returned: u64, now: Timestamp) -> Box<Ledger> {
        let generation = self.generations.fetch_add(1, Ordering::Relaxed);
        Box::new(Ledger::new(generation, spent, returned, now))
    }

    fn push(&self, bucket: BucketId, mark: Mark) {
        self.queue.push(Marked { bucket, mark });
        self.waker.wake();
    }
}

impl limiter::Companion for Companion {
    type State = Ledger;

    fn happened(
        &self,
        event: Event,
        id: BucketId,
        slot: &mut Slot<Ledger>,
        quota: &Quota,
        now: Timestamp,
    ) {
        if !self.active.load(Ordering::Acquire) {
            return;
        }
        let (spent, returned) = match event {
            Event::Spent(cost) => (cost.micros().unsigned_abs(), 0),
            Event::Returned(cost) => (0, cost.micros().unsigned_abs()),
            // A refusal matters only to a bucket that is already shared: it
            // keeps the averaging of levels going where nothing is spent.
            Event::Refused(_) if slot.companion.is_none() => return,
            Event::Refused(_) => (0, 0),
        };
        // What happened before the first event in company is in snapshots.
        let before = (slot.spent.saturating_sub(spent), slot.returned.saturating_sub(returned));
        let net = slot.net();
        let level = slot.bucket.level();
        let ledger = slot.companion.get_or_insert_with(|| self.new_ledger(before.0, before.1, now));
        let mark = ledger.happened(event, net, level, quota, self.replicas());
        if let Some(mark) = mark {
            self.push(id, mark);
        }
    }

    fn may_drop(&self, ledger: &Ledger, _now: Timestamp) -> bool {
        ledger.is_settled()
    }
}
