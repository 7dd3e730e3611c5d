//! Engine: everything that replication decides away from the hot path.
//!
//! One owner drives it: [`Engine::open`], [`Engine::receive`] and
//! [`Engine::close`] when sessions say so, [`Engine::tick`] when
//! [`Engine::next_deadline`] has come or buckets are marked, and
//! [`Engine::transmit`] for every session that has room for a frame, until it
//! returns `None`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::ReplicatedLimiter;
use super::catalog::{Catalog, declare};
use super::companion::SPACING_NANOS;
use super::contacts::{Contacts, DialFailure};
use super::frame::{Body, Frame, Hello, Incarnation};
use super::ledger::{Base, Ledger, Mark, OriginId, Pace};
use super::members::{Members, Standing};
use super::peer::{Peer, PeerState, PeerView, Pending, Told, Wanted};
use crate::limiter::{BucketId, Companion as _, LimitSet, Partition};
use crate::time::Timestamp;

mod receive;
mod reset;
mod transmit;
mod view;

pub use receive::Violation;
pub use reset::Reset;
pub use view::{BucketView, Stats};

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
/// Heartbeats missed until a peer is suspect.
const MISSED_BEATS: u32 = 3;
/// How much later than it asked for the engine may be driven until it takes it
/// that the process stood still.
const LATE: Duration = Duration::from_millis(300);
/// How long a replica that lost a session and is not listed may take to be met
/// again.
const REDIAL: Duration = Duration::from_secs(2);
/// How long an origin that is only named in snapshots is remembered, and how long
/// one that is gone is not believed to live because a snapshot names it.
const NAMED_FOR: Duration = Duration::from_secs(60);
/// How long the epoch of a bucket outlives it.
const EPOCH_OUTLIVES: Duration = Duration::from_secs(60);
/// How often what is no longer needed is looked for.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Addresses of others that a Hello names at most.
const MAX_HINTS_SENT: usize = 64;
/// Sessions at most, so that strangers cannot use up memory.
const MAX_SESSIONS: usize = 1024;
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

/// Who dialled a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// This replica, at this address.
    Dialled(SocketAddr),
    /// The other one.
    Accepted,
}

/// A session that was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// An older session with the same peer that the driver is to end.
    pub replaces: Option<SessionId>,
}

/// Why a session is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The peer is this replica itself.
    #[error("this is the same replica")]
    Myself,
    /// Another session with the peer stays.
    #[error("another session with this replica stays")]
    Duplicate,
    /// Another group.
    #[error("group `{theirs}` is not `{ours}`")]
    Group {
        /// This replica's.
        ours: String,
        /// The peer's.
        theirs: String,
    },
    /// No common protocol version.
    #[error(
        "protocol versions {oldest} to {version} and {OLDEST_VERSION} to {VERSION} do not meet"
    )]
    Version {
        /// The peer's oldest.
        oldest: u32,
        /// The peer's newest.
        version: u32,
    },
    /// Too many sessions.
    #[error("there are already {MAX_SESSIONS} sessions")]
    TooMany,
    /// This replica is leaving.
    #[error("this replica is leaving")]
    Leaving,
}

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

/// Ids of origins; they are met as peers or only named in snapshots.
#[derive(Debug, Default)]
struct Origins {
    /// Named in a snapshot at this moment, and not met.
    named: BTreeMap<Incarnation, Timestamp>,
    /// Known to be gone since this moment.
    gone: BTreeMap<Incarnation, Timestamp>,
    ids: HashMap<Incarnation, OriginId>,
    names: HashMap<OriginId, Incarnation>,
    next: u32,
}

impl Origins {
    fn intern(&mut self, incarnation: Incarnation) -> OriginId {
        let next = self.next;
        let id = *self.ids.entry(incarnation).or_insert(OriginId(next));
        if id.0 == next {
            self.next = next.wrapping_add(1);
            self.names.insert(id, incarnation);
        }
        id
    }

    fn find(&self, incarnation: Incarnation) -> Option<OriginId> {
        self.ids.get(&incarnation).copied()
    }

    fn name(&self, id: OriginId) -> Option<Incarnation> {
        self.names.get(&id).copied()
    }

    /// A session with it began.
    fn meet(&mut self, incarnation: Incarnation) -> OriginId {
        self.named.remove(&incarnation);
        self.gone.remove(&incarnation);
        self.intern(incarnation)
    }

    /// A snapshot names an origin that is no peer. Whether that is news.
    fn hear_of(&mut self, incarnation: Incarnation, now: Timestamp) -> bool {
        // Whoever sent the snapshot may learn later that it is gone.
        if self.gone.contains_key(&incarnation) {
            return false;
        }
        self.intern(incarnation);
        self.named.insert(incarnation, now).is_none()
    }

    /// It is gone; should it be met again, it is another origin.
    fn bury(&mut self, incarnation: Incarnation, now: Timestamp) {
        self.named.remove(&incarnation);
        self.gone.insert(incarnation, now);
        if let Some(id) = self.ids.remove(&incarnation) {
            self.names.remove(&id);
        }
    }

    fn retain(&mut self, keep: impl Fn(Incarnation) -> bool) {
        self.ids.retain(|incarnation, _| keep(*incarnation));
        self.names.retain(|_, incarnation| keep(*incarnation));
        self.named.retain(|incarnation, _| keep(*incarnation));
    }
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
        Self {
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
        }
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

    /// The first frame that a dialler sends.
    pub fn greeting(&self, now: Timestamp) -> Frame {
        Frame {
            seq: 1,
            ack: 0,
            stamp_ms: now.as_millis(),
            echo_ms: 0,
            held_ms: 0,
            body: Body::Hello(self.hello(1)),
        }
    }

    fn hello(&self, revision: u64) -> Hello {
        Hello {
            version: VERSION,
            oldest_version: OLDEST_VERSION,
            group: self.settings.group.clone(),
            incarnation: self.me,
            name: self.settings.name.clone(),
            address: self.settings.address.clone(),
            limits: declare(&self.limits),
            peers: self.known_addresses(),
            joining: !self.joined,
            revision,
        }
    }

    /// Addresses of peers in session, as hints for others.
    fn known_addresses(&self) -> Vec<String> {
        self.peers
            .values()
            .filter(|peer| peer.session.is_some() && !peer.address.is_empty())
            .map(|peer| peer.address.clone())
            .take(MAX_HINTS_SENT)
            .collect()
    }

    /// A session begins with the peer's first frame, which must be a Hello. The
    /// side that accepted then sends its own with the first
    /// [`transmit`](Self::transmit).
    ///
    /// # Errors
    /// If there is not to be a session; nothing changed then, except that an
    /// address may now be known to be this replica itself.
    pub fn open(
        &mut self,
        id: SessionId,
        side: Side,
        hello: Hello,
        stamp_ms: u64,
        now: Timestamp,
    ) -> Result<Opened, Refusal> {
        let theirs = hello.incarnation;
        if let Side::Dialled(address) = side
            && let Some(gone) = self.contacts.answered(address, theirs, now)
        {
            self.bury_if_lost(gone, now);
        }
        let replaces = self.admit(side, &hello)?;
        if let Some(old) = replaces {
            self.end(old, now);
        }
        for hint in hello.peers.iter().filter_map(|hint| hint.parse().ok()) {
            self.contacts.hint(hint);
        }
        let address = match side {
            Side::Dialled(address) => address.to_string(),
            Side::Accepted => hello.address.clone(),
        };
        self.given_up.remove(&theirs);
        // Whoever was lost there before has been restarted.
        self.bury_lost_at(&address, Some(theirs), now);
        let catalog = Catalog::new(&hello.limits, &self.limits);
        let origin = self.origins.meet(theirs);
        let met = self.peers.contains_key(&theirs);
        let peer = self.peers.entry(theirs).or_insert_with(|| Peer {
            origin,
            name: String::new(),
            address: String::new(),
            session: None,
            state: PeerState::Live,
            catalog: Catalog::default(),
            pending: Pending::default(),
            resync: false,
            snapshot: None,
            wanted: None,
            declared: Vec::new(),
            limit_epochs: BTreeSet::new(),
            heard_since: now,
            silent_since: None,
            round_trip: 0,
            heard_at: now,
            sent_at: now,
            active_until: now,
            active_since: now,
            lost_at: None,
        });
        peer.name = hello.name;
        peer.address = address;
        peer.session = Some(id);
        peer.state = PeerState::Live;
        if peer.silent_since.take().is_some() {
            peer.heard_since = now;
        }
        peer.catalog = catalog;
        peer.declared = hello.limits;
        // Resets of whole limits are told anew; they are few.
        peer.limit_epochs =
            self.limiter.companion().epochs().limits().into_iter().map(|(l, _)| l).collect();
        peer.heard_at = now;
        peer.sent_at = now;
        peer.active_since = now;
        peer.lost_at = None;
        // At a first meeting everything is asked for. Later, totals and what is
        // pending say it all, unless an earlier snapshot was cut off.
        if !met || peer.wanted.is_some() {
            peer.wanted = Some(Wanted::Ask);
        }
        // A snapshot that was under way when the session was lost starts again.
        peer.resync |= peer.snapshot.take().is_some();
        self.sessions.insert(
            id,
            Session {
                peer: theirs,
                dialled: matches!(side, Side::Dialled(_)),
                next_seq: if matches!(side, Side::Dialled(_)) { 2 } else { 1 },
                received: 1,
                acknowledged: 0,
                owes_ack: false,
                their_stamp: stamp_ms,
                their_stamp_at: now,
                in_flight: VecDeque::new(),
                said_goodbye: false,
                met,
                asks_back: false,
                hello_due: side == Side::Accepted,
                hellos: u64::from(side != Side::Accepted),
            },
        );
        self.publish_members();
        Ok(Opened { replaces })
    }

    /// Whether the session may be, and which older one gives way. Of two
    /// sessions the one dialled by the smaller incarnation stays, so that both
    /// sides choose alike; of two dialled by the same side the newer stays.
    fn admit(&self, side: Side, hello: &Hello) -> Result<Option<SessionId>, Refusal> {
        let theirs = hello.incarnation;
        if hello.oldest_version > VERSION || hello.version < OLDEST_VERSION {
            let (oldest, version) = (hello.oldest_version, hello.version);
            return Err(Refusal::Version { oldest, version });
        }
        if hello.group != self.settings.group {
            let ours = self.settings.group.clone();
            return Err(Refusal::Group { ours, theirs: hello.group.clone() });
        }
        if theirs == self.me {
            return Err(Refusal::Myself);
        }
        if self.leaving.is_some() {
            return Err(Refusal::Leaving);
        }
        let Some(old) = self.peers.get(&theirs).and_then(|peer| peer.session) else {
            let full = self.sessions.len() >= MAX_SESSIONS;
            return if full { Err(Refusal::TooMany) } else { Ok(None) };
        };
        let dialled_before = self.sessions.get(&old).is_some_and(|session| session.dialled);
        let dialled_now = matches!(side, Side::Dialled(_));
        let mine_stays = self.me < theirs;
        if dialled_before == dialled_now || dialled_now == mine_stays {
            Ok(Some(old))
        } else {
            Err(Refusal::Duplicate)
        }
    }

    /// Ends a session. Frames that were not acknowledged are taken back: what they
    /// said is pending again. Returns whose it was, if the peer has no other.
    fn end(&mut self, id: SessionId, now: Timestamp) -> Option<Incarnation> {
        let session = self.sessions.remove(&id)?;
        let peer = self.peers.get_mut(&session.peer)?;
        if peer.session != Some(id) {
            return None;
        }
        peer.session = None;
        peer.lost_at = Some(now);
        for (_, sent) in session.in_flight.into_iter().rev() {
            for (bucket, base) in sent {
                defer(peer, bucket, base);
            }
        }
        Some(session.peer)
    }

    /// A session ended, for whatever reason.
    pub fn close(&mut self, id: SessionId, now: Timestamp) {
        let Some(incarnation) = self.end(id, now) else { return };
        let Some(peer) = self.peers.get(&incarnation) else { return };
        let address = peer.address.clone();
        // Its next life may have come before its own end was noticed.
        let restarted = !address.is_empty()
            && self.peers.iter().any(|(other, peer)| {
                *other != incarnation && peer.address == address && peer.session.is_some()
            });
        if restarted {
            self.bury(incarnation, now);
        }
    }

    /// Discovery's present answer. Replicas that are lost and no longer listed
    /// are gone; a live session overrides discovery.
    pub fn listed(&mut self, addresses: &BTreeSet<SocketAddr>, now: Timestamp) {
        self.contacts.list(addresses);
        self.listed_at = Some(now);
        let contacts = &self.contacts;
        self.given_up.retain(|_, (address, _)| contacts.is_listed(address));
        self.bury_unlisted(now);
    }

    /// Lost and listed nowhere: it will not come back. But a new replica that is
    /// not listed yet may dial again, or be dialled where it lived.
    fn bury_unlisted(&mut self, now: Timestamp) {
        if self.listed_at.is_none() {
            return;
        }
        let mut gone = Vec::new();
        for (incarnation, peer) in &self.peers {
            let Some(lost) = peer.lost_at else { continue };
            if self.contacts.lists(*incarnation)
                || self.contacts.is_listed(&peer.address)
                || peer.address.is_empty()
            {
                continue;
            }
            if now.since(lost) >= REDIAL {
                gone.push(*incarnation);
            } else if let Ok(address) = peer.address.parse() {
                self.contacts.hint(address);
            }
        }
        for incarnation in gone {
            self.bury(incarnation, now);
        }
    }

    /// The addresses to dial now.
    pub fn dials(&mut self, now: Timestamp) -> Vec<SocketAddr> {
        if self.leaving.is_some() {
            return Vec::new();
        }
        let peers = &self.peers;
        self.contacts.due(now, |i| peers.get(&i).is_some_and(|peer| peer.session.is_some()))
    }

    /// A dial did not lead to a Hello.
    pub fn dial_failed(&mut self, address: SocketAddr, failure: DialFailure, now: Timestamp) {
        self.stats.dial_failures += 1;
        if let Some(gone) = self.contacts.failed(address, failure, now) {
            self.bury_if_lost(gone, now);
        }
        if self.contacts.is_deserted(address) {
            self.bury_lost_at(&address.to_string(), None, now);
        }
    }

    /// Buries the peers that are lost and lived at an address, whether they were
    /// dialled there or said so, other than the one that lives there now.
    fn bury_lost_at(&mut self, address: &str, now_there: Option<Incarnation>, now: Timestamp) {
        if address.is_empty() {
            return;
        }
        self.given_up.retain(|_, (lived, _)| lived.as_str() != address);
        let gone: Vec<Incarnation> = self
            .peers
            .iter()
            .filter(|(incarnation, peer)| {
                peer.session.is_none()
                    && peer.address == address
                    && Some(**incarnation) != now_there
            })
            .map(|(incarnation, _)| *incarnation)
            .collect();
        for incarnation in gone {
            self.bury(incarnation, now);
        }
    }

    fn bury_if_lost(&mut self, incarnation: Incarnation, now: Timestamp) {
        if self.peers.get(&incarnation).is_some_and(|peer| peer.session.is_none()) {
            self.bury(incarnation, now);
        }
    }

    /// A peer is gone for good. What it spent stays subtracted.
    fn bury(&mut self, incarnation: Incarnation, now: Timestamp) {
        if let Some(peer) = self.peers.remove(&incarnation)
            && let Some(session) = peer.session
        {
            self.sessions.remove(&session);
        }
        self.origins.bury(incarnation, now);
        self.stats.peers_lost += 1;
        self.publish_members();
    }

    /// Tells every ledger who is heard; they follow when they are touched next.
    fn publish_members(&self) {
        let mut members = Members::default();
        for (incarnation, named) in &self.origins.named {
            if let Some(id) = self.origins.find(*incarnation) {
                members.standings.insert(id, Standing::Named(*named));
            }
        }
        let hold = self.settings.share_hold.as_nanos();
        let hold = u64::try_from(hold).unwrap_or(u64::MAX);
        for peer in self.peers.values() {
            let standing = match peer.silent_since {
                Some(since) => Standing::Silent { since, hold },
                None => Standing::Heard(peer.heard_since),
            };
            members.standings.insert(peer.origin, standing);
        }
        let replicas = u32::try_from(self.peers.len() + 1).unwrap_or(u32::MAX);
        let silent = self.peers.values().filter(|peer| peer.silent_since.is_some()).count();
        members.counted = replicas.max(self.settings.expected_replicas);
        members.silent = u32::try_from(silent).unwrap_or(u32::MAX) + (members.counted - replicas);
        members.policies = self
            .limits
            .iter()
            .filter(|(_, limit)| limit.partition() != Partition::default())
            .map(|(index, limit)| (index, limit.partition()))
            .collect();
        self.limiter.companion().set_members(members, replicas);
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

    /// A process that stood still for long has heard nobody meanwhile: what comes
    /// first is the backlog of that time, which says nothing of the present. All
    /// peers are suspect until a fresh frame comes.
    fn notice_standstill(&mut self, now: Timestamp) {
        if now.since(self.expected_at) <= LATE {
            return;
        }
        self.expected_at = now;
        self.stats.standstills += 1;
        let mut changed = false;
        for peer in self.peers.values_mut().filter(|peer| peer.silent_since.is_none()) {
            peer.state = PeerState::Suspect;
            peer.silent_since = Some(now);
            changed = true;
        }
        if changed {
            self.publish_members();
        }
    }

    fn take_marks(&mut self, now: Timestamp) {
        while let Some(marked) = self.limiter.companion().pop() {
            match marked.mark {
                Mark::Urgent => self.urgent.push_back(marked.bucket),
                Mark::Watch => {
                    let due = now.plus(self.settings.sync_interval);
                    self.watched.push(Reverse((due, marked.bucket)));
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
            let ledger = slot.companion.as_deref_mut()?;
            let base = ledger.base();
            ledger.flush(slot.spent, slot.returned, quota, now);
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
            let ledger = slot.companion.as_deref_mut()?;
            let verdict = ledger.inspect(net, level, quota, pace, now);
            let base = verdict.flush.then(|| {
                let base = ledger.base();
                ledger.flush(slot.spent, slot.returned, quota, now);
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

    /// Notices who fell silent, and gives up who is lost for too long.
    fn watch_peers(&mut self, now: Timestamp) {
        // Their shares are released over as long as they were held.
        let patience_for_lost = self.settings.share_hold * 2;
        let mut gone = Vec::new();
        let (mut changed, mut round_trip) = (false, 0);
        for (incarnation, peer) in &mut self.peers {
            let since = peer.heard_at.max(peer.beats_since(now));
            if now.since(since) > peer.patience(now) && peer.silent_since.is_none() {
                peer.state = PeerState::Suspect;
                peer.silent_since = Some(now);
                changed = true;
            }
            if peer.state == PeerState::Live {
                round_trip = round_trip.max(peer.round_trip);
            }
            // Not before its share is released to the last.
            let released = peer.silent_since.is_some_and(|s| now.since(s) >= patience_for_lost);
            if peer.lost_at.is_some() && released {
                gone.push(*incarnation);
            }
        }
        self.limiter.companion().set_round_trip(round_trip);
        if changed {
            self.publish_members();
        }
        for incarnation in gone {
            if let Some(peer) = self.peers.get(&incarnation) {
                let silent = peer.silent_since.unwrap_or(now);
                self.given_up.insert(incarnation, (peer.address.clone(), silent));
            }
            self.bury(incarnation, now);
        }
    }

    /// A silent peer is heard again.
    fn is_heard(&mut self, incarnation: Incarnation, now: Timestamp) {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        peer.heard_at = now;
        peer.state = PeerState::Live;
        if peer.silent_since.take().is_some() {
            peer.heard_since = now;
            self.publish_members();
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
        let (peers, before) = (&self.peers, self.origins.ids.len());
        self.origins.named.retain(|_, named| now.since(*named) < NAMED_FOR);
        self.origins.gone.retain(|_, gone| now.since(*gone) < NAMED_FOR);
        let named: BTreeSet<Incarnation> = self.origins.named.keys().copied().collect();
        self.origins.retain(|i| peers.contains_key(&i) || named.contains(&i));
        if self.origins.ids.len() != before {
            self.publish_members();
        }
        let store = self.limiter.store();
        let is_alive = |bucket| store.with_existing(bucket, |_| ()).is_some();
        self.limiter.companion().epochs().sweep(is_alive, EPOCH_OUTLIVES, now);
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
            sooner(self.started_at.plus(self.settings.join_timeout));
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

    /// Every peer, for operators.
    pub fn peers(&self, now: Timestamp) -> Vec<PeerView> {
        self.peers.iter().map(|(incarnation, peer)| peer.view(*incarnation, now)).collect()
    }
}

impl Peer {
    /// How often either side speaks at least.
    fn beat(&self, now: Timestamp) -> Duration {
        if self.active_until >= now { BUSY_BEAT } else { IDLE_BEAT }
    }

    /// Since when it is so often.
    fn beats_since(&self, now: Timestamp) -> Timestamp {
        if self.active_until >= now { self.active_since } else { Timestamp::ZERO }
    }

    /// After how long a silence is suspect.
    fn patience(&self, now: Timestamp) -> Duration {
        self.beat(now) * MISSED_BEATS + Duration::from_nanos(self.round_trip)
    }

    fn next_beat(&self, now: Timestamp) -> Timestamp {
        self.sent_at.plus(self.beat(now))
    }

    /// Buckets are spoken of, by either side.
    fn is_active(&mut self, now: Timestamp) {
        if self.active_until < now {
            self.active_since = now;
        }
        self.active_until = now.plus(BUSY_FOR);
    }

    fn view(&self, incarnation: Incarnation, now: Timestamp) -> PeerView {
        PeerView {
            incarnation,
            name: self.name.clone(),
            address: self.address.clone(),
            state: self.state,
            connected: self.session.is_some(),
            heard_nanos_ago: now.nanos_since(self.heard_at),
            sent_nanos_ago: now.nanos_since(self.sent_at),
            round_trip_nanos: self.round_trip,
            pending: self.pending.len(),
            mismatches: self.catalog.mismatches().to_vec(),
        }
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
