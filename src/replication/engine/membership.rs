//! Who the peers are: sessions that begin and end, discovery, silence, and who is
//! gone.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use super::super::catalog::{Catalog, declare};
use super::super::contacts::DialFailure;
use super::super::frame::{Body, Frame, Hello, Incarnation};
use super::super::members::{Members, Standing};
use super::super::peer::{Peer, PeerState, PeerView, Pending, Wanted};
use super::{
    BUSY_BEAT, BUSY_FOR, Engine, IDLE_BEAT, OLDEST_VERSION, Session, SessionId, VERSION, defer,
};
use crate::limiter::Partition;
use crate::time::Timestamp;

/// Heartbeats missed until a peer is suspect.
pub(super) const MISSED_BEATS: u32 = 3;
/// How much later than it asked for the engine may be driven until it takes it
/// that the process stood still.
const LATE: Duration = Duration::from_millis(300);
/// How long a replica that lost a session and is not listed may take to be met
/// again.
const REDIAL: Duration = Duration::from_secs(2);
/// Addresses of others that a Hello names at most.
const MAX_HINTS_SENT: usize = 64;
/// Sessions at most, so that strangers cannot use up memory.
const MAX_SESSIONS: usize = 1024;

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

impl Engine {
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

    pub(super) fn hello(&self, revision: u64) -> Hello {
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
    pub(super) fn known_addresses(&self) -> Vec<String> {
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
            limit_pauses: BTreeSet::new(),
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
        // Resets and pauses of whole limits are told anew; they are few.
        peer.limit_epochs =
            self.limiter.companion().epochs().limits().into_iter().map(|(l, _)| l).collect();
        peer.limit_pauses =
            self.limiter.companion().pauses().all(now).into_iter().map(|(l, _)| l).collect();
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
    pub(super) fn admit(&self, side: Side, hello: &Hello) -> Result<Option<SessionId>, Refusal> {
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
    pub(super) fn end(&mut self, id: SessionId, now: Timestamp) -> Option<Incarnation> {
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
    pub(super) fn bury_unlisted(&mut self, now: Timestamp) {
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
    pub(super) fn bury_lost_at(
        &mut self,
        address: &str,
        now_there: Option<Incarnation>,
        now: Timestamp,
    ) {
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

    pub(super) fn bury_if_lost(&mut self, incarnation: Incarnation, now: Timestamp) {
        if self.peers.get(&incarnation).is_some_and(|peer| peer.session.is_none()) {
            self.bury(incarnation, now);
        }
    }

    /// A peer is gone for good. What it spent stays subtracted.
    pub(super) fn bury(&mut self, incarnation: Incarnation, now: Timestamp) {
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
    pub(super) fn publish_members(&self) {
        let mut members = Members::default();
        for (incarnation, named) in self.origins.named() {
            if let Some(id) = self.origins.find(incarnation) {
                members.standings.insert(id, Standing::Named(named));
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
        members.is_any_window = self.limits.iter().any(|(_, limit)| limit.keeps_window());
        self.limiter.companion().set_members(members, replicas);
    }

    /// A process that stood still for long has heard nobody meanwhile: what comes
    /// first is the backlog of that time, which says nothing of the present. All
    /// peers are suspect until a fresh frame comes.
    pub(super) fn notice_standstill(&mut self, now: Timestamp) {
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

    /// Notices who fell silent, and gives up who is lost for too long.
    pub(super) fn watch_peers(&mut self, now: Timestamp) {
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
    pub(super) fn is_heard(&mut self, incarnation: Incarnation, now: Timestamp) {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        peer.heard_at = now;
        peer.state = PeerState::Live;
        if peer.silent_since.take().is_some() {
            peer.heard_since = now;
            self.publish_members();
        }
    }

    /// Every peer, for operators.
    pub fn peers(&self, now: Timestamp) -> Vec<PeerView> {
        self.peers.iter().map(|(incarnation, peer)| peer.view(*incarnation, now)).collect()
    }
}

impl Peer {
    /// How often either side speaks at least.
    pub(super) fn beat(&self, now: Timestamp) -> Duration {
        if self.active_until >= now { BUSY_BEAT } else { IDLE_BEAT }
    }

    /// Since when it is so often.
    pub(super) fn beats_since(&self, now: Timestamp) -> Timestamp {
        if self.active_until >= now { self.active_since } else { Timestamp::ZERO }
    }

    /// After how long a silence is suspect.
    pub(super) fn patience(&self, now: Timestamp) -> Duration {
        self.beat(now) * MISSED_BEATS + Duration::from_nanos(self.round_trip)
    }

    pub(super) fn next_beat(&self, now: Timestamp) -> Timestamp {
        self.sent_at.plus(self.beat(now))
    }

    /// Buckets are spoken of, by either side.
    pub(super) fn is_active(&mut self, now: Timestamp) {
        if self.active_until < now {
            self.active_since = now;
        }
        self.active_until = now.plus(BUSY_FOR);
    }

    pub(super) fn view(&self, incarnation: Incarnation, now: Timestamp) -> PeerView {
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
