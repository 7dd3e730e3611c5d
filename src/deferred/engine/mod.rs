//! The engine: one task that owns all deferred requests.
//!
//! A request is a row, not a task: waiting ones are a few bytes of the
//! [`Schedule`], and a worker exists only for those that take their turn at the
//! upstream now. Workers are futures of this task, so that nothing is locked.

use std::cell::Cell;
use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::StreamExt as _;
use futures_util::future::{AbortHandle, LocalBoxFuture, abortable};
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;

use super::carrier::Carrier;
use super::machine::Unfit;
use super::metrics::Metrics;
use super::record::{Attempts, Digest, Id, Record, State};
use super::store::{Change, Error, Store};
use crate::runtime::{Drain, Stage};
use crate::time::{Clock, WallTime};

mod handle;
mod lane;
mod schedule;
mod worker;

pub use handle::{Accepted, Filter, Handle, Order, Refused, Submission, Unchanged, View};

use handle::Command;
use schedule::{Fired, Phase, Schedule};
use worker::Work;

/// How long what is at the upstream may take when the process leaves.
const FINISH: Duration = Duration::from_secs(10);
/// How often the age of the oldest request is shown.
const SHOW_INTERVAL: Duration = Duration::from_secs(5);

/// How much is kept, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Requests in the store, settled ones included.
    pub max_records: usize,
    /// How long a settled request can be asked for.
    pub retain: Duration,
}

/// All deferred requests of a process, before [`Engine::run`] begins.
#[derive(Debug)]
pub struct Engine {
    schedule: Schedule,
    bounds: Bounds,
    store: Store,
    clock: Clock,
    metrics: Metrics,
    commands: mpsc::UnboundedReceiver<Command>,
}

impl Engine {
    /// Takes up what is in `store`.
    ///
    /// # Errors
    /// If that cannot be read.
    pub fn open(
        store: Store,
        bounds: Bounds,
        clock: Clock,
        metrics: Metrics,
    ) -> Result<(Self, Handle), Error> {
        let mut schedule = Schedule::new(bounds.retain, metrics.clone());
        let (now, wall) = (clock.now(), clock.wall());
        store.each_record(None, |record| {
            schedule.set(&record, now, wall);
            true
        })?;
        let (sender, commands) = mpsc::unbounded_channel();
        let handle = Handle { store: store.clone(), commands: sender };
        Ok((Self { schedule, bounds, store, clock, metrics, commands }, handle))
    }

    /// How many requests there are.
    pub fn len(&self) -> usize {
        self.schedule.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.schedule.len() == 0
    }

    /// Delivers through `carrier` until the process closes. What is at the upstream
    /// then may take ten seconds more, unless the process aborts; what it does not
    /// finish is found in flight by the next start.
    pub async fn run<C: Carrier + 'static>(self, carrier: C, drain: Drain) {
        let running = Running {
            carrier: Rc::new(carrier),
            schedule: self.schedule,
            bounds: self.bounds,
            store: self.store,
            clock: self.clock,
            metrics: self.metrics,
            workers: HashMap::new(),
            jobs: FuturesUnordered::new(),
            arriving: HashMap::new(),
            watchers: HashMap::new(),
            leaving: false,
        };
        running.run(self.commands, drain).await;
    }
}

struct Running<C> {
    carrier: Rc<C>,
    schedule: Schedule,
    bounds: Bounds,
    store: Store,
    clock: Clock,
    metrics: Metrics,
    workers: HashMap<Id, Worker>,
    jobs: FuturesUnordered<LocalBoxFuture<'static, End>>,
    /// Claims that are being committed, with those who wait for it.
    arriving: HashMap<Digest, Arriving>,
    watchers: HashMap<Id, Vec<oneshot::Sender<()>>>,
    leaving: bool,
}

struct Worker {
    abort: AbortHandle,
    /// Whether it must not be interrupted.
    busy: Rc<Cell<bool>>,
}

struct Arriving {
    payload: Digest,
    replies: Vec<oneshot::Sender<Result<Accepted, Refused>>>,
}

/// How something came to its end.
enum End {
    /// A new request was committed, or not.
    Accepted {
        record: Box<Record>,
        result: Result<(), Error>,
        reply: oneshot::Sender<Result<Accepted, Refused>>,
    },
    /// A worker ended; with `None` it was interrupted.
    Worked { id: Id, upstream: std::sync::Arc<str>, result: Option<Worked> },
    /// A record was changed, or not.
    Changed {
        record: Box<Record>,
        result: Result<(), Error>,
        reply: Option<oneshot::Sender<Result<Record, Unchanged>>>,
    },
    /// A record was forgotten, or not.
    Forgotten { id: Id, result: Result<(), Error> },
}

#[allow(clippy::large_enum_variant, reason = "a record is as large everywhere")]
enum Worked {
    Stepped(Result<Option<Record>, Error>),
    Panicked,
}

impl<C: Carrier + 'static> Running<C> {
    async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>, drain: Drain) {
        let mut show = self.clock.now();
        loop {
            let now = self.clock.now();
            while let Some(fired) = self.schedule.fire(now) {
                self.fired(fired);
            }
            if now >= show {
                self.schedule.show_oldest(self.clock.wall());
                show = now.plus(SHOW_INTERVAL);
            }
            self.start_workers();
            let alarm = self.schedule.next_timer().map_or(show, |timer| timer.min(show));
            tokio::select! {
                biased;
                () = drain.reached(Stage::Closing) => break,
                Some(end) = self.jobs.next() => self.ended(end),
                Some(command) = commands.recv() => self.command(command),
                () = sleep(alarm.since(now)) => {}
            }
        }
        self.leave(commands, drain).await;
    }

    /// Lets what is at the upstream finish.
    async fn leave(mut self, mut commands: mpsc::UnboundedReceiver<Command>, drain: Drain) {
        self.leaving = true;
        for worker in self.workers.values().filter(|worker| !worker.busy.get()) {
            worker.abort.abort();
        }
        let time_is_up = async {
            tokio::select! {
                () = drain.reached(Stage::Aborting) => {}
                () = sleep(FINISH) => {}
            }
        };
        let mut time_is_up = std::pin::pin!(time_is_up);
        while !self.jobs.is_empty() {
            tokio::select! {
                biased;
                () = &mut time_is_up => break,
                Some(end) = self.jobs.next() => self.ended(end),
                Some(command) = commands.recv() => self.command(command),
            }
        }
        if !self.workers.is_empty() {
            let in_flight = self.workers.len();
            tracing::warn!(in_flight, "deferred requests are left in flight");
        }
    }

    fn start_workers(&mut self) {
        if self.leaving || self.store.is_closed() {
            return;
        }
        let carrier = Rc::clone(&self.carrier);
        let capacity = |upstream: &str| carrier.capacity(upstream).in_flight;
        while let Some((id, upstream, pending)) = self.schedule.start(capacity) {
            let busy = Rc::new(Cell::new(false));
            let work = Work {
                id,
                upstream: std::sync::Arc::clone(&upstream),
                carrier: Rc::clone(&self.carrier),
                store: self.store.clone(),
                clock: self.clock.clone(),
                metrics: self.metrics.clone(),
                pending,
                busy: Rc::clone(&busy),
            };
            // What a panic may have left behind is dropped with the worker; the record
            // is in the store.
            let work = AssertUnwindSafe(work.run()).catch_unwind();
            let (work, abort) = abortable(work);
            self.workers.insert(id, Worker { abort, busy });
            self.jobs.push(Box::pin(async move {
                let result = match work.await {
                    Ok(Ok(stepped)) => Some(Worked::Stepped(stepped)),
                    Ok(Err(_)) => Some(Worked::Panicked),
                    Err(_) => None,
                };
                End::Worked { id, upstream, result }
            }));
        }
    }

    fn fired(&mut self, fired: Fired) {
        if self.store.is_closed() {
            return;
        }
        match fired {
            Fired::Expires(id) => {
                if let Some(worker) = self.workers.get(&id) {
                    if worker.busy.get() {
                        return;
                    }
                    worker.abort.abort();
                }
                let wall = self.clock.wall();
                self.change(id, None, |record| record.expire(wall).map(Settled::of));
            }
            Fired::Forgets(id) => match self.store.record(id) {
                Ok(Some(record)) => {
                    self.schedule.enter(id, Phase::Changes);
                    let store = self.store.clone();
                    self.jobs.push(Box::pin(async move {
                        let result = store.commit(vec![Change::Forget(record)]).await;
                        End::Forgotten { id, result }
                    }));
                }
                Ok(None) => self.schedule.remove(id),
                Err(error) => self.unreadable(&error),
            },
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Accept(submission, reply) => self.accept(*submission, reply),
            Command::Look(id, reply) => {
                let ahead = self.schedule.ahead(id);
                let found = self.store.record(id);
                let _ = reply.send(found.map(|r| r.map(|record| View { record, ahead })));
            }
            Command::Watch(id, reply) => match self.schedule.find(id) {
                Some((state, _)) if !state.is_settled() => {
                    let watchers = self.watchers.entry(id).or_default();
                    watchers.retain(|watcher| !watcher.is_closed());
                    watchers.push(reply);
                }
                // Dropping it tells.
                Some(_) | None => drop(reply),
            },
            Command::Change(id, order, reply) => self.order(id, order, reply),
        }
    }

    fn accept(
        &mut self,
        submission: Submission,
        reply: oneshot::Sender<Result<Accepted, Refused>>,
    ) {
        if let Some(known) =
            submission.claim.and_then(|claim| self.known(claim, submission.payload))
        {
            match known {
                Known::Arriving(arriving) => arriving.replies.push(reply),
                Known::Told(told) => {
                    if told.is_ok() {
                        self.metrics.replays.inc();
                    }
                    let _ = reply.send(*told);
                }
            }
            return;
        }
        let refused = if self.store.is_closed() {
            self.metrics.refused("store_closed");
            Some(Refused::Store(Error::Closed))
        } else if self.leaving {
            self.metrics.refused("leaving");
            Some(Refused::Leaving)
        } else if self.schedule.len() + self.arriving.len() >= self.bounds.max_records {
            self.metrics.refused("full");
            Some(Refused::Full)
        } else {
            None
        };
        if let Some(refused) = refused {
            let _ = reply.send(Err(refused));
            return;
        }
        let wall = self.clock.wall();
        let mut chance = [0; 16];
        if let Err(error) = getrandom::fill(&mut chance) {
            let _ = reply.send(Err(Refused::Store(Error::Read(error.to_string()))));
            return;
        }
        let record = Record {
            id: Id::new(wall, u128::from_be_bytes(chance)),
            state: State::Accepted,
            in_flight: false,
            reached: false,
            upstream: submission.upstream,
            created: wall,
            updated: wall,
            expires: wall.plus(submission.expires),
            due: wall,
            attempts: Attempts::default(),
            fresh_keys: 0,
            owner: submission.owner,
            payload: submission.payload,
            claim: submission.claim,
            response_id: None,
            reason: None,
            initial: None,
            outcome: None,
            last: None,
        };
        if let Some(claim) = record.claim {
            let arriving = Arriving { payload: record.payload, replies: Vec::new() };
            self.arriving.insert(claim, arriving);
        }
        let store = self.store.clone();
        let request = submission.request.encode().into();
        self.jobs.push(Box::pin(async move {
            let change = Change::Accept(record.clone(), request);
            let result = store.commit(vec![change]).await;
            End::Accepted { record: Box::new(record), result, reply }
        }));
    }

    /// What is known under `claim`.
    fn known(&mut self, claim: Digest, payload: Digest) -> Option<Known<'_>> {
        let told = |result| Some(Known::Told(Box::new(result)));
        // In two steps: the first would borrow for all of the second.
        if self.arriving.contains_key(&claim) {
            let arriving = self.arriving.get_mut(&claim)?;
            if arriving.payload != payload {
                return told(Err(Refused::KeyReused));
            }
            return Some(Known::Arriving(arriving));
        }
        let found = match self.store.claimed(&claim) {
            Ok(Some(id)) => self.store.record(id),
            Ok(None) => return None,
            Err(error) => Err(error),
        };
        match found {
            Ok(Some(record)) if record.payload == payload => {
                let ahead = self.schedule.ahead(record.id).unwrap_or(0);
                told(Ok(Accepted { record, replayed: true, ahead }))
            }
            Ok(Some(_)) => told(Err(Refused::KeyReused)),
            Ok(None) => None,
            Err(error) => told(Err(error.into())),
        }
    }

    fn order(&mut self, id: Id, order: Order, reply: oneshot::Sender<Result<Record, Unchanged>>) {
        let Some((state, phase)) = self.schedule.find(id) else {
            let _ = reply.send(Err(Unchanged::Unknown));
            return;
        };
        let busy = match phase {
            Phase::Works => self.workers.get(&id).is_some_and(|worker| worker.busy.get()),
            Phase::Changes => true,
            Phase::Waits | Phase::Queued | Phase::Settled => false,
        };
        let refused = if self.store.is_closed() {
            Some(Unchanged::Store(Error::Closed))
        } else if self.leaving {
            Some(Unchanged::Leaving)
        } else if busy {
            Some(Unchanged::Unfit(Unfit { state, in_flight: true }))
        } else {
            None
        };
        if let Some(refused) = refused {
            let _ = reply.send(Err(refused));
            return;
        }
        let wall = self.clock.wall();
        self.change(id, Some(reply), move |record| {
            // It lives on for as long as it was to live at first.
            let span = record.expires.since(record.created);
            match order {
                Order::Cancel => record.cancel(wall).map(Settled::of),
                Order::Recheck => record.recheck(span, wall).map(Settled::of),
                Order::Resend { fresh_key } => {
                    let record = record.resend(fresh_key, span, wall)?;
                    Ok(Settled { change: Change::Renew(record.clone()), record })
                }
            }
        });
    }

    /// Changes a record that no worker is busy with.
    fn change(
        &mut self,
        id: Id,
        reply: Option<oneshot::Sender<Result<Record, Unchanged>>>,
        how: impl FnOnce(Record) -> Result<Settled, Unfit>,
    ) {
        let changed = match self.store.record(id) {
            Ok(Some(record)) => how(record).map_err(Unchanged::from),
            Ok(None) => Err(Unchanged::Unknown),
            Err(error) => {
                self.unreadable(&error);
                Err(error.into())
            }
        };
        let Settled { record, change } = match changed {
            Ok(settled) => settled,
            Err(error) => {
                if let Some(reply) = reply {
                    let _ = reply.send(Err(error));
                }
                return;
            }
        };
        if let Some(worker) = self.workers.get(&id) {
            worker.abort.abort();
        }
        self.schedule.enter(id, Phase::Changes);
        let store = self.store.clone();
        self.jobs.push(Box::pin(async move {
            let result = store.commit(vec![change]).await;
            End::Changed { record: Box::new(record), result, reply }
        }));
    }

    fn ended(&mut self, end: End) {
        match end {
            End::Accepted { record, result, reply } => {
                let arriving = record.claim.and_then(|claim| self.arriving.remove(&claim));
                let others = arriving.map(|arriving| arriving.replies).unwrap_or_default();
                match result {
                    Ok(()) => {
                        let ahead = self.schedule.queued(&record.upstream);
                        self.take_up(&record);
                        for other in others {
                            self.metrics.replays.inc();
                            let record = Record::clone(&record);
                            let _ = other.send(Ok(Accepted { record, replayed: true, ahead }));
                        }
                        let _ =
                            reply.send(Ok(Accepted { record: *record, replayed: false, ahead }));
                    }
                    Err(_) => {
                        for reply in others.into_iter().chain([reply]) {
                            self.metrics.refused("store_closed");
                            let _ = reply.send(Err(Error::Closed.into()));
                        }
                    }
                }
            }
            End::Worked { id, upstream, result } => {
                self.schedule.ended(&upstream);
                match result {
                    Some(worked) => {
                        self.workers.remove(&id);
                        self.worked(id, worked);
                    }
                    // It may have another worker by now.
                    None => {
                        let over = |worker: &Worker| worker.abort.is_aborted();
                        if self.workers.get(&id).is_some_and(over) {
                            self.workers.remove(&id);
                        }
                    }
                }
            }
            End::Changed { record, result, reply } => {
                let told = match result {
                    Ok(()) => {
                        self.take_up(&record);
                        Ok(*record)
                    }
                    Err(error) => Err(error.into()),
                };
                if let Some(reply) = reply {
                    let _ = reply.send(told);
                }
            }
            End::Forgotten { id, result } => {
                if result.is_ok() {
                    self.schedule.remove(id);
                }
            }
        }
    }

    fn worked(&mut self, id: Id, worked: Worked) {
        match worked {
            Worked::Stepped(Ok(Some(record))) => self.take_up(&record),
            Worked::Stepped(Ok(None)) => match self.store.record(id) {
                Ok(Some(record)) => self.take_up(&record),
                Ok(None) => self.schedule.remove(id),
                Err(error) => self.unreadable(&error),
            },
            Worked::Stepped(Err(error)) => self.unreadable(&error),
            Worked::Panicked => match self.store.record(id) {
                // It is looked at again as one that was in flight when the process
                // ended.
                Ok(Some(record)) if record.in_flight => self.take_up(&record),
                Ok(Some(_)) => {
                    let wall = self.clock.wall();
                    let reason = "its worker panicked before it was sent";
                    self.change(id, None, |record| record.strand(reason, wall).map(Settled::of));
                }
                Ok(None) => self.schedule.remove(id),
                Err(error) => self.unreadable(&error),
            },
        }
    }

    fn take_up(&mut self, record: &Record) {
        let (now, wall): (_, WallTime) = (self.clock.now(), self.clock.wall());
        self.schedule.set(record, now, wall);
        if record.state.is_settled() {
            // Dropping them tells.
            self.watchers.remove(&record.id);
            if record.state == State::Stale {
                let reason = record.reason.as_deref().unwrap_or_default();
                tracing::warn!(request = %record.id, upstream = record.upstream, reason,
                    "a deferred request is stale");
            }
        }
    }

    /// A request that cannot be read is left where it is.
    fn unreadable(&self, error: &Error) {
        if !self.store.is_closed() {
            tracing::error!(%error, "a deferred request cannot be read");
        }
    }
}

/// A record after a change, and the change.
struct Settled {
    record: Record,
    change: Change,
}

impl Settled {
    fn of(record: Record) -> Self {
        Self { change: Change::Update(record.clone(), None), record }
    }
}

/// What is known under a key.
enum Known<'a> {
    Arriving(&'a mut Arriving),
    Told(Box<Result<Accepted, Refused>>),
}

#[cfg(test)]
mod tests;
