//! The hot path's side of replication: marking buckets that peers should hear of.
//!
//! A check never waits for a peer. It only compares, under the bucket's guard,
//! what it has spent with what was last handed to the streams, and pushes the
//! bucket's identity on a lock-free queue when peers should know: at once if the
//! difference matters, within the sync interval otherwise. Until a first peer
//! was seen nothing is marked and no ledger is made, so that a lone replica
//! costs what a lone bucket costs.

use std::sync::Arc;
use std::task::{Context, Poll};

use arc_swap::ArcSwap;
use atomic_waker::AtomicWaker;

use super::epochs::Epochs;
use super::ledger::{Climate, Ledger, Mark, Sharing};
use super::members::Members;
use super::pause::{LimitPauses, Pause};
use crate::limiter::{self, BucketId, Due, Event, LimitIndex, PauseOrder, Quota, Slot, Tokens};
use crate::sync::SegQueue;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::time::Timestamp;

/// Shortest time between two flushes of urgent buckets, in nanoseconds.
pub(super) const SPACING_NANOS: u64 = 5_000_000;

/// What peers should hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marked {
    /// A bucket, and how soon.
    Bucket(BucketId, Mark),
    /// A limit that was closed or opened as a whole.
    Limit(LimitIndex),
}

/// What every check shares with the engine.
#[derive(Debug)]
pub struct Companion {
    /// Whether any peer was ever seen.
    active: AtomicBool,
    /// How many replicas there are, this one included.
    replicas: AtomicU32,
    /// The same, with those that are expected.
    counted: AtomicU32,
    /// How long a replica that went busy takes no more than an even share.
    slow_start: AtomicU64,
    /// Nanoseconds within which news arrives.
    horizon: AtomicU64,
    /// Version of `members`, so that a check need not load them.
    version: AtomicU32,
    members: ArcSwap<Members>,
    epochs: Epochs,
    pauses: LimitPauses,
    generations: AtomicU32,
    queue: SegQueue<Marked>,
    waker: AtomicWaker,
}

impl Default for Companion {
    fn default() -> Self {
        Self {
            active: AtomicBool::new(false),
            replicas: AtomicU32::new(1),
            counted: AtomicU32::new(1),
            slow_start: AtomicU64::new(0),
            horizon: AtomicU64::new(SPACING_NANOS),
            version: AtomicU32::new(0),
            members: ArcSwap::from_pointee(Members::default()),
            epochs: Epochs::default(),
            pauses: LimitPauses::default(),
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

    /// Nanoseconds until all buckets of a limit open, 0 if they are not closed
    /// together.
    pub fn limit_paused_for(&self, limit: LimitIndex, now: Timestamp) -> u64 {
        self.pauses.until(limit).nanos_since(now)
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

    /// Publishes who is heard; every ledger follows when it is touched next.
    pub(super) fn set_members(&self, mut members: Members, replicas: u32) {
        self.replicas.store(replicas.max(1), Ordering::Relaxed);
        members.version = self.version.load(Ordering::Relaxed).wrapping_add(1).max(1);
        let version = members.version;
        let counts = members.is_any_strict() || members.is_any_window;
        let counted = members.counted.max(replicas).max(1);
        self.counted.store(counted, Ordering::Relaxed);
        self.members.store(Arc::new(members));
        self.version.store(version, Ordering::Release);
        // What a lone replica spends needs no ledger, unless a limit counts with
        // others that are only expected.
        if replicas > 1 || counted > 1 && counts {
            self.active.store(true, Ordering::Release);
        }
    }

    /// Sets how long a sync interval is, in nanoseconds.
    pub(super) fn set_sync_interval(&self, nanos: u64) {
        self.slow_start.store(nanos.saturating_add(nanos / 2), Ordering::Relaxed);
    }

    /// Sets the largest round trip to a peer, in nanoseconds.
    pub(super) fn set_round_trip(&self, nanos: u64) {
        self.horizon.store(SPACING_NANOS + nanos, Ordering::Relaxed);
    }

    pub(super) const fn epochs(&self) -> &Epochs {
        &self.epochs
    }

    pub(super) const fn pauses(&self) -> &LimitPauses {
        &self.pauses
    }

    pub(super) fn pop(&self) -> Option<Marked> {
        self.queue.pop()
    }

    /// Makes sure that `slot` has a ledger; one that is made contains what the
    /// slot has spent up to now as known to all.
    pub(super) fn ensure_ledger(&self, id: BucketId, slot: &mut Slot<Ledger>, now: Timestamp) {
        if slot.companion.is_none() {
            let ledger = self.new_ledger(id, slot.limit, slot.spent, slot.returned(), now);
            slot.companion = Some(ledger);
        }
    }

    /// A ledger for a bucket of which others knew `spent` and `returned`.
    pub(super) fn new_ledger(
        &self,
        id: BucketId,
        limit: LimitIndex,
        spent: u64,
        returned: u64,
        now: Timestamp,
    ) -> Box<Ledger> {
        let generation = self.generations.fetch_add(1, Ordering::Relaxed);
        Box::new(Ledger::new(generation, self.epochs.of(id, limit), spent, returned, now))
    }

    fn climate<'a>(
        &'a self,
        limit: LimitIndex,
        members: &'a dyn Fn() -> Arc<Members>,
    ) -> Climate<'a> {
        Climate {
            limit,
            sharing: self.sharing(),
            closed_until: self.pauses.until(limit),
            horizon: self.horizon.load(Ordering::Relaxed) as f64,
            version: self.version.load(Ordering::Acquire),
            members,
        }
    }

    fn sharing(&self) -> Sharing {
        Sharing {
            members: self.counted.load(Ordering::Relaxed),
            slow: self.slow_start.load(Ordering::Relaxed),
        }
    }

    fn push(&self, marked: Marked) {
        self.queue.push(marked);
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
        if slot.companion.is_none() {
            let (spent, returned) = match event {
                Event::Spent(cost) | Event::Paced(cost) => (cost.micros().unsigned_abs(), 0),
                Event::Returned(cost) => (0, cost.micros().unsigned_abs()),
                // These matter only to a bucket that is already shared.
                Event::Refused(_) | Event::Line => return,
            };
            // What happened before the first event in company is in snapshots.
            let (spent, returned) =
                (slot.spent.saturating_sub(spent), slot.returned().saturating_sub(returned));
            let mut ledger = self.new_ledger(id, slot.limit, spent, returned, now);
            if quota.keeps_window() {
                let taken = i64::try_from(slot.spent.saturating_sub(spent)).unwrap_or(i64::MAX);
                let before = slot.bucket.level().plus(Tokens::from_micros(taken));
                ledger.advance_share(before, quota, self.sharing(), now);
            }
            slot.companion = Some(ledger);
        }
        let (net, level, waiting) = (slot.net(), slot.bucket.level(), slot.waiting() > 0);
        let Some(ledger) = slot.companion.as_deref_mut() else { return };
        ledger.set_backlog(waiting);
        if let Some(mark) = ledger.happened(event, net, level, quota, self.replicas(), now) {
            self.push(Marked::Bucket(id, mark));
        }
    }

    fn advance(&self, slot: &mut Slot<Ledger>, quota: &Quota, now: Timestamp) {
        match slot.companion.as_deref_mut() {
            Some(ledger) => {
                let members = || self.members.load_full();
                ledger.advance(&mut slot.bucket, quota, &self.climate(slot.limit, &members), now);
            }
            None => slot.bucket.advance(quota, now),
        }
    }

    fn room(&self, slot: &Slot<Ledger>, now: Timestamp) -> Tokens {
        if self.paused_for(slot, now) > 0 {
            return Tokens::from_micros(i64::MIN);
        }
        let level = slot.bucket.level();
        let ledger = slot.companion.as_deref();
        ledger.map_or(level, |ledger| ledger.shared_room(ledger.room(level), slot.held()))
    }

    fn due(
        &self,
        slot: &Slot<Ledger>,
        quota: &Quota,
        ahead: Tokens,
        cost: Tokens,
        now: Timestamp,
    ) -> Due {
        if slot.bucket.due(quota, cost) == Due::Never {
            return Due::Never;
        }
        // A bucket that is closed refills meanwhile, and no further than its burst.
        let paused = self.paused_for(slot, now);
        let mut bucket = slot.bucket;
        if paused > 0 {
            bucket.advance(quota, now.plus_nanos(paused));
        }
        let ledger = slot.companion.as_deref();
        let share = ledger.map_or(0, |ledger| ledger.share_due(ahead, cost, now));
        let wanted = ledger.map_or(cost, |ledger| ledger.level_for(cost, quota));
        match bucket.due_after(quota, ahead, wanted) {
            Due::Never => Due::Never,
            Due::Now => match share.max(paused) {
                0 => Due::Now,
                nanos => Due::In(nanos),
            },
            Due::In(nanos) => {
                let slower = ledger.map_or(1.0, |ledger| ledger.slowdown(quota, self.replicas()));
                Due::In(paused.saturating_add((nanos as f64 * slower) as u64).max(share))
            }
        }
    }

    fn pause(
        &self,
        id: BucketId,
        slot: &mut Slot<Ledger>,
        order: PauseOrder,
        now: Timestamp,
    ) -> bool {
        let known = slot.companion.as_deref().and_then(Ledger::pause).copied();
        let Some(pause) = Pause::ordered(known, order, now) else { return false };
        self.ensure_ledger(id, slot, now);
        let Some(ledger) = slot.companion.as_deref_mut() else { return false };
        ledger.set_pause(pause, now);
        // Who meets this replica later gets it with the snapshot.
        if self.active.load(Ordering::Acquire) && ledger.mark_urgent() {
            self.push(Marked::Bucket(id, Mark::Urgent));
        }
        true
    }

    fn pause_limit(&self, limit: LimitIndex, order: PauseOrder, now: Timestamp) -> bool {
        let changed = self.pauses.order(limit, order, now);
        if changed && self.active.load(Ordering::Acquire) {
            self.push(Marked::Limit(limit));
        }
        changed
    }

    fn paused_for(&self, slot: &Slot<Ledger>, now: Timestamp) -> u64 {
        let own = slot.companion.as_deref().and_then(Ledger::pause);
        let own = own.map_or(0, |pause| pause.left(now));
        own.max(self.pauses.until(slot.limit).nanos_since(now))
    }

    fn used_at(&self, ledger: &Ledger) -> Timestamp {
        ledger.used_at()
    }

    fn may_drop(&self, ledger: &Ledger, now: Timestamp) -> bool {
        ledger.is_idle(now)
    }
}
