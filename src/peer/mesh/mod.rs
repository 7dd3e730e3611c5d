//! Mesh: the task that owns the engine.
//!
//! It sleeps until something happens (a frame, a marked bucket, a stream with
//! room, a command, a deadline), takes everything that has happened as one
//! batch, and then fills every stream that has room.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::poll_fn;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tracing::info;

use super::acceptor::Acceptor;
use super::dialer::Dial;
use super::handle::{Command, MeshHandle};
use super::metrics::{Metrics, Publisher};
use super::session::Event;
use super::{Config, Error, Replica, trust};
use crate::replication::{DialFailure, Engine, ReplicatedLimiter, SessionId, Settings};
use crate::runtime::{Drain, OnExit, Stage, Supervisor};
use crate::time::{Clock, Timestamp};
use crate::tls;

mod sessions;

use sessions::Session;

/// Events that wait at most, and that are taken as one batch.
const EVENTS: usize = 64;
const COMMANDS: usize = 16;
/// After buckets were marked, marks are not looked at for this long: the engine
/// would not send them sooner, and one wake then serves them all.
const MARK_PAUSE: Duration = Duration::from_millis(5);
/// A deadline that passed although everything was done belongs to a stream
/// without room, or to a dial that must not be made; it is looked at again
/// after this long.
const OVERDUE_PAUSE: Duration = Duration::from_millis(5);
const PARTITIONED_PAUSE: Duration = Duration::from_millis(100);
/// How long leaving may take.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// How often metrics are brought up to date.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(1);
/// Visiting every bucket for a metric may take this part of the mesh's time.
const VISIT_SHARE: u32 = 100;

/// What a mesh needs from the process around it.
#[derive(Clone)]
pub struct Surroundings {
    /// Where its timestamps come from; the limiter must be asked with the same.
    pub clock: Clock,
    /// Runs its tasks.
    pub supervisor: Supervisor,
    /// The addresses that discovery gives, possibly with this replica's own. An
    /// empty set at the start says nothing; later ones are believed.
    pub addresses: watch::Receiver<BTreeSet<SocketAddr>>,
    /// Asks for a fresh set; called when a session was lost.
    pub refresh: Arc<dyn Fn() + Send + Sync>,
    /// Its metrics.
    pub metrics: Metrics,
}

/// A mesh that is leaving.
#[derive(Debug)]
struct Leaving {
    deadline: Timestamp,
    done: Vec<oneshot::Sender<()>>,
}

/// The network side of replication. See the [module](super).
pub struct Mesh {
    engine: Engine,
    surroundings: Surroundings,
    publisher: Publisher,
    published_at: Timestamp,
    visit_at: Timestamp,
    listener: Option<TcpListener>,
    tls: Option<Arc<tls::Peers>>,
    events: mpsc::Receiver<Event>,
    /// Cloned by every session.
    events_in: mpsc::Sender<Event>,
    commands: mpsc::Receiver<Command>,
    handle: MeshHandle,
    joined: watch::Sender<bool>,
    room: Arc<Notify>,
    stop: CancellationToken,
    sessions: BTreeMap<SessionId, Session>,
    next_session: u64,
    /// Addresses of peers with which a session ended for a fault of either side,
    /// and until when they are not dialled: what they or this replica say is not
    /// understood, and would not be in the next session.
    faulty: BTreeMap<SocketAddr, Timestamp>,
    partitioned: bool,
    leaving: Option<Leaving>,
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh")
            .field("incarnation", &self.engine.incarnation())
            .field("sessions", &self.sessions)
            .finish_non_exhaustive()
    }
}

impl Mesh {
    /// Binds the listener of the replica `replica`, whose buckets are those of
    /// `limiter`. Returns the mesh and its bound address.
    ///
    /// # Errors
    /// If the listener cannot be bound, or a certificate cannot be used.
    pub fn bind(
        config: &Config,
        replica: &Replica,
        limiter: Arc<ReplicatedLimiter>,
        surroundings: Surroundings,
    ) -> Result<(Self, SocketAddr), Error> {
        let tls = config.tls.clone().map(tls::Peers::load).transpose()?;
        let listener = config.listen.bind(false)?;
        let bound = listener.local_addr()?;
        let address = replica.address(bound);
        let mut mesh = Self::new(config, replica, address, Some(listener), limiter, surroundings);
        mesh.tls = tls.map(Arc::new);
        Ok((mesh, bound))
    }

    /// The mesh of a lone replica: it listens nowhere and has nobody to dial.
    pub fn alone(
        config: &Config,
        replica: &Replica,
        limiter: Arc<ReplicatedLimiter>,
        surroundings: Surroundings,
    ) -> Self {
        Self::new(config, replica, String::new(), None, limiter, surroundings)
    }

    fn new(
        config: &Config,
        replica: &Replica,
        address: String,
        listener: Option<TcpListener>,
        limiter: Arc<ReplicatedLimiter>,
        surroundings: Surroundings,
    ) -> Self {
        let settings = Settings {
            group: config.group.clone(),
            name: replica.name.clone(),
            address,
            sync_interval: config.sync_interval,
            join_timeout: config.join_timeout,
            share_hold: config.share_hold,
            expected_replicas: config.expected_replicas,
            expects_peers: listener.is_some(),
        };
        let now = surroundings.clock.now();
        let engine = Engine::new(settings, replica.incarnation, limiter, now);
        let (events_in, events) = mpsc::channel(EVENTS);
        let (commands_in, commands) = mpsc::channel(COMMANDS);
        let (joined, joined_out) = watch::channel(engine.is_joined());
        Self {
            publisher: Publisher::new(surroundings.metrics.clone()),
            published_at: Timestamp::ZERO,
            visit_at: Timestamp::ZERO,
            engine,
            surroundings,
            listener,
            tls: None,
            events,
            events_in,
            commands,
            handle: MeshHandle { commands: commands_in, joined: joined_out },
            joined,
            room: Arc::new(Notify::new()),
            stop: CancellationToken::new(),
            sessions: BTreeMap::new(),
            next_session: 1,
            faulty: BTreeMap::new(),
            partitioned: false,
            leaving: None,
        }
    }

    /// A handle to this mesh.
    pub fn handle(&self) -> MeshHandle {
        self.handle.clone()
    }

    /// Runs until [`MeshHandle::leave`] has done its work, or until `drain`
    /// aborts, which ends everything at once. Closing alone does not end the
    /// mesh: requests that still finish are still to be told of.
    pub async fn run(mut self, drain: Drain) {
        let served = self.serve();
        if let Some(tls) = self.tls.clone() {
            let (stop, metrics) = (self.stop.clone(), self.surroundings.metrics.clone());
            self.surroundings.supervisor.spawn("peer certificates", OnExit::Ignore, async move {
                stop.run_until_cancelled(trust::follow(tls, metrics)).await;
            });
        }
        self.run_until_left(&drain).await;
        self.stop.cancel();
        self.sessions.clear();
        // Whoever still asks for a session learns that there is none.
        self.events.close();
        while self.events.try_recv().is_ok() {}
        // The streams end now, and the connections with them.
        let _ = tokio::time::timeout(LEAVE_TIMEOUT, served).await;
        for done in self.leaving.into_iter().flat_map(|leaving| leaving.done) {
            let _ = done.send(());
        }
    }

    /// Starts to accept. The receiver is closed when that has ended.
    fn serve(&mut self) -> oneshot::Receiver<()> {
        let (ended, served) = oneshot::channel::<()>();
        if let Some(listener) = self.listener.take() {
            let acceptor = Acceptor {
                events: self.events_in.clone(),
                room: Arc::clone(&self.room),
                supervisor: self.surroundings.supervisor.clone(),
                metrics: self.surroundings.metrics.clone(),
                tls: self.tls.clone(),
            };
            let stop = self.stop.clone();
            self.surroundings.supervisor.spawn("peer listener", OnExit::Fail, async move {
                // A connection that does not end must not keep the process.
                let patience = async {
                    stop.cancelled().await;
                    tokio::time::sleep(LEAVE_TIMEOUT).await;
                };
                tokio::select! {
                    () = acceptor.serve(listener, stop.clone()) => {}
                    () = patience => {}
                }
                drop(ended);
            });
        }
        served
    }

    async fn run_until_left(&mut self, drain: &Drain) {
        let limiter = Arc::clone(self.engine.limiter());
        let mut addresses = self.surroundings.addresses.clone();
        let known = addresses.borrow_and_update().clone();
        if !known.is_empty() {
            self.engine.listed(&known, self.now());
        }
        let mut discovering = true;
        let mut batch = Vec::with_capacity(EVENTS);
        let mut marks_from = self.now();
        loop {
            let now = self.work(&mut batch);
            if self.has_left(now) {
                return;
            }
            let pause = self.pause(now);
            let marked = async {
                // Even a sleep of no length may wait for the timer's next tick.
                if marks_from > now {
                    tokio::time::sleep(marks_from.since(now)).await;
                }
                poll_fn(|cx| limiter.companion().poll_marked(cx)).await;
            };
            tokio::select! {
                _ = self.events.recv_many(&mut batch, EVENTS) => {}
                () = marked => marks_from = self.now().plus(MARK_PAUSE),
                () = self.room.notified() => {}
                () = tokio::time::sleep(pause) => {}
                Some(command) = self.commands.recv() => self.obey(command),
                changed = addresses.changed(), if discovering => match changed {
                    Ok(()) => {
                        let listed = addresses.borrow_and_update().clone();
                        self.engine.listed(&listed, self.now());
                    }
                    // Discovery has ended; what it said last stays.
                    Err(_) => discovering = false,
                },
                () = drain.reached(Stage::Aborting) => return,
            }
            while batch.len() < EVENTS
                && let Ok(event) = self.events.try_recv()
            {
                batch.push(event);
            }
        }
    }

    fn now(&self) -> Timestamp {
        self.surroundings.clock.now()
    }

    /// Does everything that there is to do.
    fn work(&mut self, batch: &mut Vec<Event>) -> Timestamp {
        let now = self.now();
        // Before frames are read: a process that was late must notice it first.
        self.engine.tick(now);
        if !batch.is_empty() {
            for event in batch.drain(..) {
                self.take(event, now);
            }
            self.engine.tick(now);
        }
        self.end_forgotten();
        if !self.partitioned {
            self.dial(now);
        }
        self.transmit(now);
        self.publish(now);
        now
    }

    /// How long nothing is to be done unless something happens.
    fn pause(&self, now: Timestamp) -> Duration {
        let due = self.engine.next_deadline(now).since(now);
        let pause = match (due.is_zero(), self.partitioned) {
            (false, _) => due,
            (true, false) => OVERDUE_PAUSE,
            (true, true) => PARTITIONED_PAUSE,
        };
        match &self.leaving {
            Some(leaving) => pause.min(leaving.deadline.since(now)),
            None => pause,
        }
    }

    /// Whether leaving is over: every peer took the Goodbye and closed its
    /// stream, or time is up.
    fn has_left(&self, now: Timestamp) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| {
            now >= leaving.deadline || (self.engine.has_left() && self.sessions.is_empty())
        })
    }

    fn obey(&mut self, command: Command) {
        let now = self.now();
        match command {
            Command::Inspect(inspection) => inspection(&self.engine, now),
            Command::Reload { done } => {
                self.engine.reload();
                let _ = done.send(());
            }
            Command::Reset { what, done } => {
                // Whoever asked may have given up meanwhile.
                let _ = done.send(self.engine.reset(&what, now));
            }
            Command::Partition { cut, done } => {
                self.partitioned = cut;
                let ids: Vec<SessionId> = self.sessions.keys().copied().collect();
                for id in ids.into_iter().filter(|_| cut) {
                    self.end(id, "cut off", Some(Status::unavailable("this replica is cut off")));
                    self.engine.close(id, now);
                }
                let _ = done.send(());
            }
            Command::Leave { reason, done } => match &mut self.leaving {
                Some(leaving) => leaving.done.push(done),
                None => {
                    info!(reason, sessions = self.sessions.len(), "leaving the mesh");
                    self.engine.leave(&reason, now);
                    let deadline = now.plus(LEAVE_TIMEOUT);
                    self.leaving = Some(Leaving { deadline, done: vec![done] });
                }
            },
        }
    }

    fn take(&mut self, event: Event, now: Timestamp) {
        match event {
            Event::Open(open) => self.open(*open, now),
            Event::Frame(id, frame) => self.receive(id, frame, now),
            Event::Ended(id, end) => self.ended(id, &end, now),
            Event::DialFailed(address, failure) => self.engine.dial_failed(address, failure, now),
        }
    }

    fn dial(&mut self, now: Timestamp) {
        self.faulty.retain(|_, until| *until > now);
        for address in self.engine.dials(now) {
            if self.faulty.contains_key(&address) {
                // Counts as a failure, so that the engine backs off.
                self.engine.dial_failed(address, DialFailure::Other, now);
                continue;
            }
            let dial = Dial {
                address,
                greeting: self.engine.greeting(now),
                clock: self.surroundings.clock.clone(),
                room: Arc::clone(&self.room),
                events: self.events_in.clone(),
                tls: self.tls.clone(),
                stop: self.stop.clone(),
            };
            self.surroundings.supervisor.spawn("peer dial", OnExit::Ignore, dial.run());
        }
    }

    fn publish(&mut self, now: Timestamp) {
        if !*self.joined.borrow() && self.engine.is_joined() {
            let alone = self.engine.stats().joined_alone;
            info!(alone, peers = self.sessions.len(), "joined the mesh");
            self.joined.send_replace(true);
        }
        if now.since(self.published_at) < PUBLISH_INTERVAL {
            return;
        }
        self.published_at = now;
        self.publisher.publish(&self.engine, now);
        if now >= self.visit_at {
            self.publisher.publish_visited(&self.engine, now);
            // With very many buckets the visit is made less often.
            let took = self.now().since(now);
            self.visit_at = now.plus(took * VISIT_SHARE);
        }
    }
}
