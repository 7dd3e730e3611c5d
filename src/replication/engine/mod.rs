//! Engine: everything that replication decides away from the hot path.
//!
//! One owner drives it: [`Engine::open`], [`Engine::receive`] and
//! [`Engine::close`] when sessions say so, [`Engine::tick`] when
//! [`Engine::next_deadline`] has come or buckets are marked, and
//! [`Engine::transmit`] for every session that has room for a frame, until it
//! returns `None`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::ReplicatedLimiter;
use super::catalog::Catalog;
use super::companion::{Marked, SPACING_NANOS};
use super::contacts::Contacts;
use super::frame::Incarnation;
use super::ledger::{Base, Ledger, Mark, Pace};
use super::peer::{Peer, Told, Wanted};
use crate::limiter::{BucketId, Companion as _, LimitSet};
use crate::time::Timestamp;

mod membership;
mod origins;
mod receive;
mod reset;
#[cfg(test)]
mod tests;
mod transmit;
mod view;

pub use membership::{Opened, Refusal, Side};
pub use receive::Violation;
pub use reset::Reset;
pub use view::{BucketView, Stats};

use origins::Origins;

/// The protocol version this replica speaks.
pub const VERSION: u32 = 1;
/// The oldest protocol version it understands.
pub const OLDEST_VERSION: u32 = 1;

/// Shortest time between two flushes of urgent buckets.
const SPACING: Duration = Duration::from_nanos(SPACING_NANOS);
/// Shortest time between two looks at a bucket.
const TICK: Duration = Duration::from_millis(10);
/// A flush older than this is made anew before it is sent.
const FRESH: Duration = Duration::from_millis(10);
/// Heartbeats while buckets are spoken of, and otherwise.
const BUSY_BEAT: Duration = Duration::from_millis(100);
const IDLE_BEAT: Duration = Duration::from_secs(1);
/// How long a bucket spoken of keeps a peer busy.
const BUSY_FOR: Duration = Duration::from_secs(1);
/// How long the epoch of a bucket outlives it.
const EPOCH_OUTLIVES: Duration = Duration::from_secs(60);
/// How often what is no longer needed is looked for.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// How many join timeouts a peer that answered may take for its snapshot.
const SNAPSHOT_PATIENCE: u32 = 5;

/// What an engine is told at its start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Replicas of other groups are strangers.
    pub group: String,
    /// A label for people.
    pub name: String,
    /// Where this replica believes it can be dialled; may be empty.
    pub address: String,
    /// A bucket whose requests stop has told everything after this long.
    pub sync_interval: Duration,
    /// How long a start waits for a peer to answer.
    pub join_timeout: Duration,
    /// How long a silent peer that is still listed is not given up.
    pub share_hold: Duration,
    /// Replicas that a strict limit counts with while fewer were seen.
    pub expected_replicas: u32,
    /// Whether peers are configured at all.
    pub expects_peers: bool,
}

/// Names a session; chosen by the driver, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// Bucket totals put back by base when a frame is lost.
type Sent = Vec<Told>;

#[derive(Debug)]
struct Session {
    peer: Incarnation,
    dialled: bool,
    /// Number of the next frame to send, and of the newest received.
    next_seq: u64,
    received: u64,
    /// The newest received frame that the peer was told of, and whether it waits
    /// for that.
    acknowledged: u64,
    owes_ack: bool,
    their_stamp: u64,
    their_stamp_at: Timestamp,
    /// Update frames not yet acknowledged, with what they contained.
    in_flight: VecDeque<(u64, Sent)>,
    said_goodbye: bool,
    /// Whether the peer was known when it began.
    met: bool,
    /// The peer forgot this replica, and with it what was pending: once it has
    /// merged this replica's snapshot it is asked for its own.
    asks_back: bool,
    /// The peer has not had the present limits.
    hello_due: bool,
    hellos: u64,
}

/// Replication's state; the module says how it is driven.
#[derive(Debug)]
pub struct Engine {
    settings: Settings,
    me: Incarnation,
    limiter: Arc<ReplicatedLimiter>,
    limits: Arc<LimitSet>,
    peers: BTreeMap<Incarnation, Peer>,
    sessions: BTreeMap<SessionId, Session>,
    contacts: Contacts,
    origins: Origins,
    urgent: VecDeque<BucketId>,
    urgent_at: Timestamp,
    /// Buckets to look at, in order of time.
    watched: BinaryHeap<Reverse<(Timestamp, BucketId)>>,
    started_at: Timestamp,
    listed_at: Option<Timestamp>,
    /// Peers that were given up without a sign of their end: where they lived, and
    /// since when they are silent. They may go on spending behind a split.
    given_up: BTreeMap<Incarnation, (String, Timestamp)>,
    snapshots_done: u64,
    joined: bool,
    leaving: Option<String>,
    swept_at: Timestamp,
    /// When the driver was asked to come back at the latest.
    expected_at: Timestamp,
    stats: Stats,
}

impl Engine {
    /// An engine for the replica `me`, starting at `now`.
    pub fn new(
        settings: Settings,
        me: Incarnation,
        limiter: Arc<ReplicatedLimiter>,
        now: Timestamp,
    ) -> Self {
        let joined = !settings.expects_peers;
        let limits = limiter.limits();
        let sync = u64::try_from(settings.sync_interval.as_nanos()).unwrap_or(u64::MAX);
        limiter.companion().set_sync_interval(sync);
        let engine = Self {
            settings,
            me,
            limiter,
            limits,
            peers: BTreeMap::new(),
            sessions: BTreeMap::new(),
            contacts: Contacts::new(me),
            origins: Origins::default(),
            urgent: VecDeque::new(),
            urgent_at: now,
            watched: BinaryHeap::new(),
            started_at: now,
            listed_at: None,
            given_up: BTreeMap::new(),
            snapshots_done: 0,
            joined,
            leaving: None,
            swept_at: now,
            expected_at: now,
            stats: Stats::default(),
        };
        // A window is kept also while replicas are only expected.
        if engine.limits.iter().any(|(_, limit)| limit.keeps_window()) {
            engine.publish_members();
        }
        engine
    }

    /// This replica's life.
    pub const fn incarnation(&self) -> Incarnation {
        self.me
    }

    /// Whether the replica knows what its peers know, or has waited long enough.
    pub const fn is_joined(&self) -> bool {
        self.joined
    }

    /// The limiter whose buckets this engine replicates.
    pub const fn limiter(&self) -> &Arc<ReplicatedLimiter> {
        &self.limiter
    }

    /// The limits have changed: peers are told, and their own looked at anew.
    pub fn reload(&mut self) {
        self.limits = self.limiter.limits();
        for peer in self.peers.values_mut() {
            let catalog = Catalog::new(&peer.declared, &self.limits);
            // What was said of a limit that was not ours was not taken in.
            if catalog.maps_more_than(&peer.catalog) {
                peer.wanted = Some(Wanted::Ask);
            }
            peer.catalog = catalog;
        }
        for session in self.sessions.values_mut() {
            session.hello_due = true;
        }
        self.publish_members();
    }

    /// Begins to leave: everything is flushed, and when a session has no more
    /// to send its next frame is a Goodbye.
    pub fn leave(&mut self, reason: &str, now: Timestamp) {
        self.leaving = Some(reason.to_owned());
        self.take_marks(now);
        let mut all: Vec<BucketId> = self.urgent.drain(..).collect();
        all.extend(self.watched.drain().map(|Reverse((_, bucket))| bucket));
        for bucket in all {
            self.flush(bucket, |_| true, now);
        }
    }

    /// Whether every session had its Goodbye.
    pub fn has_left(&self) -> bool {
        self.leaving.is_some() && self.sessions.values().all(|session| session.said_goodbye)
    }

    /// Does what is due at `now`.
    pub fn tick(&mut self, now: Timestamp) {
        self.notice_standstill(now);
        self.watch_peers(now);
        self.bury_unlisted(now);
        self.take_marks(now);
        if !self.urgent.is_empty() && now.since(self.urgent_at) >= SPACING {
            self.urgent_at = now;
            for bucket in std::mem::take(&mut self.urgent) {
                if self.flush(bucket, Ledger::is_urgent, now) {
                    self.watched.push(Reverse((now.plus(TICK), bucket)));
                }
            }
        }
        while let Some(Reverse((due, bucket))) = self.watched.peek().copied() {
            if due > now {
                break;
            }
            self.watched.pop();
            self.look(bucket, now);
        }
        self.watch_join(now);
        self.sweep(now);
        // What is due now is done by the driver after this; no deadline that it is
        // then told lies beyond the next heartbeat.
        let is_busy = |peer: &Peer| peer.session.is_some() && peer.active_until >= now;
        let beat = if self.peers.values().any(is_busy) { BUSY_BEAT } else { IDLE_BEAT };
        self.expected_at = now.plus(beat);
    }

    fn take_marks(&mut self, now: Timestamp) {
        while let Some(marked) = self.limiter.companion().pop() {
            match marked {
                Marked::Bucket(bucket, Mark::Urgent) => self.urgent.push_back(bucket),
                Marked::Bucket(bucket, Mark::Watch) => {
                    let due = now.plus(self.settings.sync_interval);
                    self.watched.push(Reverse((due, bucket)));
                }
                Marked::Limit(limit) => {
                    for peer in self.peers.values_mut() {
                        peer.limit_pauses.insert(limit);
                    }
                }
            }
        }
    }

    /// Hands a bucket to all streams, if it is there and `wanted`. Whether a look
    /// at it is to be scheduled.
    fn flush(
        &mut self,
        bucket: BucketId,
        wanted: impl FnOnce(&Ledger) -> bool,
        now: Timestamp,
    ) -> bool {
        let companion = self.limiter.companion();
        let flushed = self.limiter.with_existing(bucket, |slot, quota| {
            slot.companion.as_deref().filter(|ledger| wanted(ledger))?;
            companion.advance(slot, quota, now);
            let (spent, returned) = (slot.spent, slot.returned());
            let ledger = slot.companion.as_deref_mut()?;
            let base = ledger.base();
            ledger.flush(spent, returned, quota, now);
            Some((base, ledger.watch()))
        });
        let Some((base, watch)) = flushed.flatten() else { return false };
        self.hand_out(bucket, base);
        watch
    }

    /// Hands a bucket to all streams whatever its marks, and looks at it again.
    fn flush_and_watch(&mut self, bucket: BucketId, now: Timestamp) {
        if self.flush(bucket, |_| true, now) {
            self.watched.push(Reverse((now.plus(TICK), bucket)));
        }
    }

    fn hand_out(&mut self, bucket: BucketId, base: Base) {
        self.stats.flushes += 1;
        for peer in self.peers.values_mut() {
            defer(peer, bucket, base);
        }
    }

    /// Looks at a bucket: tells the peers if need be, and schedules the next look.
    fn look(&mut self, bucket: BucketId, now: Timestamp) {
        let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let companion = self.limiter.companion();
        let pace = Pace {
            replicas: companion.replicas(),
            sync: nanos(self.settings.sync_interval),
            tick: nanos(TICK),
        };
        let seen = self.limiter.with_existing(bucket, |slot, quota| {
            slot.companion.as_ref()?;
            companion.advance(slot, quota, now);
            let (net, level) = (slot.net(), slot.bucket.level());
            let (spent, returned) = (slot.spent, slot.returned());
            let ledger = slot.companion.as_deref_mut()?;
            let verdict = ledger.inspect(net, level, quota, pace, now);
            let base = verdict.flush.then(|| {
                let base = ledger.base();
                ledger.flush(spent, returned, quota, now);
                base
            });
            if verdict.again.is_none() {
                ledger.rest();
            }
            Some((base, verdict.again))
        });
        let Some((base, again)) = seen.flatten() else { return };
        if let Some(base) = base {
            self.hand_out(bucket, base);
        }
        if let Some(again) = again {
            self.watched.push(Reverse((again, bucket)));
        }
    }

    /// Joined once a snapshot came and none is outstanding, or nobody answered
    /// in time. A peer that answered but is slow is waited for a while longer.
    fn watch_join(&mut self, now: Timestamp) {
        if self.joined {
            return;
        }
        let waited = now.since(self.started_at);
        let outstanding =
            self.peers.values().any(|peer| peer.session.is_some() && peer.wanted.is_some());
        let timeout = self.settings.join_timeout;
        let complete = self.snapshots_done > 0 && !outstanding;
        let nobody = waited >= timeout && !outstanding;
        if complete || nobody || waited >= timeout * SNAPSHOT_PATIENCE {
            self.joined = true;
            self.stats.joined_alone = !complete;
        }
    }

    /// Forgets what is no longer of use.
    fn sweep(&mut self, now: Timestamp) {
        if now.since(self.swept_at) < SWEEP_INTERVAL {
            return;
        }
        self.swept_at = now;
        let peers = &self.peers;
        if self.origins.sweep(|incarnation| peers.contains_key(&incarnation), now) {
            self.publish_members();
        }
        let store = self.limiter.store();
        let is_alive = |bucket| store.with_existing(bucket, |_| ()).is_some();
        self.limiter.companion().epochs().sweep(is_alive, EPOCH_OUTLIVES, now);
        self.limiter.companion().pauses().sweep(now);
    }

    /// When [`tick`](Self::tick) or a heartbeat is next due.
    pub fn next_deadline(&self, now: Timestamp) -> Timestamp {
        let mut next = now.plus(IDLE_BEAT);
        let mut sooner = |at: Timestamp| next = next.min(at);
        if !self.urgent.is_empty() {
            sooner(self.urgent_at.plus(SPACING));
        }
        if let Some(Reverse((due, _))) = self.watched.peek() {
            sooner(*due);
        }
        for peer in self.peers.values().filter(|peer| peer.session.is_some()) {
            sooner(peer.next_beat(now));
        }
        if !self.joined {
            let timeout = self.started_at.plus(self.settings.join_timeout);
            // Past it, a peer that answered may still be waited for.
            if timeout > now {
                sooner(timeout);
            }
            sooner(now.plus(SPACING * 10));
        }
        let peers = &self.peers;
        let connected = |i: Incarnation| peers.get(&i).is_some_and(|peer| peer.session.is_some());
        if self.leaving.is_none()
            && let Some(at) = self.contacts.next(connected)
        {
            sooner(at);
        }
        next
    }

    /// Whether [`transmit`](Self::transmit) may have something for a session.
    pub fn sessions(&self) -> impl Iterator<Item = SessionId> {
        self.sessions.keys().copied()
    }
}

/// Makes a bucket pending for a peer; a backlog that grows too large is dropped
/// in favour of a snapshot.
fn defer(peer: &mut Peer, bucket: BucketId, base: Base) {
    if !peer.resync && !peer.pending.add(bucket, base) {
        peer.pending.clear();
        peer.resync = true;
    }
}
