//! The mesh's dealings with single sessions.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::oneshot;
use tonic::Status;
use tracing::{debug, info, warn};

use super::super::metrics::Reason;
use super::super::session::{Denial, End, Open, Opening, Outlet, Room};
use super::Mesh;
use crate::replication::{Body, DialFailure, Frame, Incarnation, Refusal, SessionId, Side};
use crate::time::Timestamp;

/// How long a peer is not dialled after a session that ended for a fault.
const FAULT_PAUSE: Duration = Duration::from_secs(5);
/// How long a stream may take to end after the peer stopped taking frames.
const CLOSED_PATIENCE: Duration = Duration::from_secs(1);

/// An open session.
#[derive(Debug)]
pub(super) struct Session {
    peer: Incarnation,
    name: String,
    /// Where it was dialled, if this replica dialled.
    dialled: Option<SocketAddr>,
    outlet: Outlet,
    /// Since when the peer takes no frames any more.
    closed_at: Option<Timestamp>,
    /// Dropped with the session, which ends its reader.
    _alive: oneshot::Sender<()>,
}

impl Mesh {
    pub(super) fn open(&mut self, open: Open, now: Timestamp) {
        let Open { side, remote, hello, stamp_ms, outlet, answer } = open;
        if self.partitioned {
            if let Side::Dialled(address) = side {
                self.engine.dial_failed(address, DialFailure::Other, now);
            }
            let _ = answer.send(Err(Denial::Partitioned));
            return;
        }
        let id = SessionId(self.next_session);
        self.next_session += 1;
        let (peer, name) = (hello.incarnation, hello.name.clone());
        match self.engine.open(id, side, hello, stamp_ms, now) {
            Ok(opened) => {
                if let Some(old) = opened.replaces {
                    let status = Status::already_exists("a newer session took its place");
                    self.end(old, "replaced", Some(status));
                }
                let dialled = match side {
                    Side::Dialled(address) => Some(address),
                    Side::Accepted => None,
                };
                let by = if dialled.is_some() { "this replica" } else { "the peer" };
                info!(peer = name, incarnation = %peer, %remote, dialled_by = by, "session opened");
                let (alive, over) = oneshot::channel();
                let session =
                    Session { peer, name, dialled, outlet, closed_at: None, _alive: alive };
                self.sessions.insert(id, session);
                // Without a reader nobody would notice the end of the stream.
                if answer.send(Ok(Opening { id, over })).is_err() {
                    self.ended(id, &End::Closed, now);
                }
            }
            Err(refusal) => {
                self.refuse(side, remote, &name, peer, &refusal);
                let tells = matches!(refusal, Refusal::Myself | Refusal::Duplicate);
                let hello = tells.then(|| Box::new(self.engine.greeting(now)));
                let _ = answer.send(Err(Denial::Refused { refusal, hello }));
            }
        }
    }

    fn refuse(
        &self,
        side: Side,
        remote: SocketAddr,
        name: &str,
        peer: Incarnation,
        refusal: &Refusal,
    ) {
        if side == Side::Accepted {
            self.surroundings.metrics.refused(Reason::from(refusal));
        }
        match refusal {
            // These are how a mesh forms and ends.
            Refusal::Myself | Refusal::Duplicate | Refusal::Leaving => {
                debug!(peer = name, incarnation = %peer, %remote, reason = %refusal, "session refused");
            }
            Refusal::Group { .. } | Refusal::Version { .. } | Refusal::TooMany => {
                warn!(peer = name, incarnation = %peer, %remote, reason = %refusal, "session refused");
            }
        }
    }

    pub(super) fn receive(&mut self, id: SessionId, frame: Frame, now: Timestamp) {
        if !self.sessions.contains_key(&id) {
            return;
        }
        if let Body::Goodbye(reason) = &frame.body
            && let Some(session) = self.sessions.get(&id)
        {
            info!(peer = session.name, incarnation = %session.peer, reason, "peer leaves");
        }
        if let Err(violation) = self.engine.receive(id, frame, now) {
            self.surroundings.metrics.refused(Reason::Violation);
            let reason = violation.to_string();
            self.distrust(id, now);
            self.end(id, &reason, Some(Status::invalid_argument(reason.clone())));
            self.engine.close(id, now);
        }
    }

    /// A stream ended by itself, or has to.
    pub(super) fn ended(&mut self, id: SessionId, end: &End, now: Timestamp) {
        let fault = Reason::of(end);
        if let Some(reason) = fault
            && self.sessions.contains_key(&id)
        {
            self.surroundings.metrics.refused(reason);
        }
        if fault.is_some() || matches!(end, End::Rejected(_)) {
            self.distrust(id, now);
        }
        let status = fault.map(|_| Status::invalid_argument(end.to_string()));
        self.end(id, &end.to_string(), status);
        self.engine.close(id, now);
    }

    /// One side does not understand the other: the next session would end alike.
    fn distrust(&mut self, id: SessionId, now: Timestamp) {
        if let Some(address) = self.sessions.get(&id).and_then(|session| session.dialled) {
            self.faulty.insert(address, now.plus(FAULT_PAUSE));
        }
    }

    /// Lets go of a session's stream. The engine is told by the caller.
    pub(super) fn end(&mut self, id: SessionId, reason: &str, status: Option<Status>) {
        let Some(session) = self.sessions.remove(&id) else { return };
        info!(peer = session.name, incarnation = %session.peer, reason, "session closed");
        if let Some(status) = status {
            session.outlet.end(status);
        }
        if self.leaving.is_none() {
            (self.surroundings.refresh)();
        }
    }

    /// Ends the streams of sessions that the engine has closed by itself.
    pub(super) fn end_forgotten(&mut self) {
        if self.sessions.len() == self.engine.sessions().count() {
            return;
        }
        let known: BTreeSet<SessionId> = self.engine.sessions().collect();
        let forgotten: Vec<SessionId> =
            self.sessions.keys().filter(|id| !known.contains(id)).copied().collect();
        for id in forgotten {
            self.end(id, "the peer has left", None);
        }
    }

    /// Fills every stream that has room.
    pub(super) fn transmit(&mut self, now: Timestamp) {
        let mut closed = Vec::new();
        for (id, session) in &mut self.sessions {
            loop {
                match session.outlet.room() {
                    Room::Full => break,
                    Room::Closed => {
                        // What the peer said last may still be on its way to
                        // the mesh; usually its end is what comes next.
                        let since = *session.closed_at.get_or_insert(now);
                        if now.since(since) >= CLOSED_PATIENCE {
                            closed.push(*id);
                        }
                        break;
                    }
                    Room::Free(permit) => match self.engine.transmit(*id, now) {
                        Some(frame) => permit.send(frame),
                        None => break,
                    },
                }
            }
        }
        for id in closed {
            self.ended(id, &End::Failed("the peer takes no frames".to_owned()), now);
        }
    }
}
