//! The whole engine with its writer, in front of an upstream that does as it is
//! told, on a disk whose power can be cut, by the runtime's paused clock.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use super::super::carrier::{Call, Capacity, Fault, Route};
use super::super::message::Answer;
use super::super::plan::Delivery;
use super::super::record::Kind;
use super::super::store::Store;
use super::super::testing::{answer, plan, request};
use super::*;
use crate::runtime::DrainControl;

mod disk;
mod power;

use disk::Disk;

/// What the upstream does with a call.
enum Reply {
    Answers(u16, &'static str),
    Fails(Fault),
    Hangs,
    Panics,
}

type Script = Box<dyn FnMut(&Call) -> Reply>;

/// The upstream, and the limit in front of it.
#[derive(Clone)]
struct Provider(Rc<Inner>);

struct Inner {
    script: RefCell<Script>,
    /// What left for it.
    calls: RefCell<Vec<Call>>,
    delivery: Cell<Delivery>,
    polls: Cell<bool>,
    /// Whether the limit lets anything pass.
    open: tokio::sync::watch::Sender<bool>,
    max: Cell<usize>,
    now: Cell<usize>,
    most: Cell<usize>,
}

impl Provider {
    fn new(script: impl FnMut(&Call) -> Reply + 'static) -> Self {
        Self(Rc::new(Inner {
            script: RefCell::new(Box::new(script)),
            calls: RefCell::default(),
            delivery: Cell::default(),
            polls: Cell::new(true),
            open: tokio::sync::watch::Sender::new(true),
            max: Cell::new(4),
            now: Cell::new(0),
            most: Cell::new(0),
        }))
    }

    fn calls(&self) -> Vec<Call> {
        self.0.calls.borrow().clone()
    }

    fn methods(&self) -> String {
        self.calls().iter().map(|call| call.request.method.chars().next().unwrap()).collect()
    }
}

/// Creates on POST, has completed at the second question.
fn usual() -> Provider {
    let mut asked = HashMap::new();
    Provider::new(move |call| match call.request.method.as_str() {
        "POST" => Reply::Answers(201, r#"{"id":"tr_1"}"#),
        _ => {
            let n: &mut u32 = asked.entry(call.request.target.clone()).or_default();
            *n += 1;
            let states = [r#"{"status":"processing"}"#, r#"{"status":"completed"}"#];
            Reply::Answers(200, states[usize::from(*n >= 2)])
        }
    })
}

struct Guard<'a>(&'a Cell<usize>);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Carrier for Provider {
    type Permit = ();

    fn route(&self, _: &super::super::message::Request, upstream: &str) -> Result<Route, String> {
        if upstream != "bank" {
            return Err(format!("there is no upstream `{upstream}` any more"));
        }
        Ok(Route {
            plan: Arc::new(plan(self.0.delivery.get(), self.0.polls.get())),
            pause_on: Arc::from([429, 503]),
        })
    }

    fn capacity(&self, _: &str) -> Capacity {
        Capacity { in_flight: self.0.max.get(), rate: None }
    }

    async fn admit(&self, _: &Call) {
        self.0.open.subscribe().wait_for(|open| *open).await.unwrap();
    }

    async fn send(&self, call: Call, (): ()) -> Result<Answer, Fault> {
        self.0.calls.borrow_mut().push(call.clone());
        self.0.now.set(self.0.now.get() + 1);
        let _guard = Guard(&self.0.now);
        self.0.most.set(self.0.most.get().max(self.0.now.get()));
        sleep(Duration::from_millis(5)).await;
        let reply = (self.0.script.borrow_mut())(&call);
        match reply {
            Reply::Answers(status, body) => Ok(answer(status, body)),
            Reply::Fails(fault) => Err(fault),
            Reply::Hangs => std::future::pending().await,
            Reply::Panics => panic!("expected by the test"),
        }
    }
}

const BOUNDS: Bounds = Bounds { max_records: 100, retain: Duration::from_secs(3600) };

/// One life of a process that delivers from `disk` to `provider`.
struct Life {
    handle: Handle,
    drain: DrainControl,
    store: Store,
    running: std::pin::Pin<Box<dyn Future<Output = ()>>>,
}

impl Life {
    fn begin(disk: &Disk, provider: &Provider) -> Result<Self, Error> {
        Self::begin_with(disk, provider, BOUNDS)
    }

    fn begin_with(disk: &Disk, provider: &Provider, bounds: Bounds) -> Result<Self, Error> {
        let (clock, metrics) = (Clock::runtime(), Metrics::default());
        let (store, writer) =
            Store::open_on(Path::new("disk"), disk.clone(), clock.clone(), metrics.clone())?;
        let (engine, handle) = Engine::open(store.clone(), bounds, clock, metrics)?;
        let (drain, listener) = DrainControl::new();
        let provider = provider.clone();
        let running = Box::pin(async move {
            tokio::select! {
                () = engine.run(provider, listener) => {}
                () = writer.run() => {}
            }
        });
        Ok(Self { handle, drain, store, running })
    }

    /// Runs the engine while `what` happens.
    async fn during<T>(&mut self, what: impl Future<Output = T>) -> T {
        tokio::select! {
            biased;
            result = what => result,
            () = &mut self.running => panic!("the engine ended"),
        }
    }

    /// Runs the engine for some time.
    async fn passes(&mut self, seconds: u64) {
        self.during(sleep(Duration::from_secs(seconds))).await;
    }

    async fn accept(&mut self, body: &str) -> Id {
        let handle = self.handle.clone();
        self.during(handle.accept(submission(body))).await.unwrap().record.id
    }

    async fn look(&mut self, id: Id) -> Record {
        let handle = self.handle.clone();
        self.during(handle.look(id)).await.unwrap().unwrap().record
    }

    async fn order(&mut self, id: Id, order: Order) -> Result<Record, Unchanged> {
        let handle = self.handle.clone();
        self.during(handle.change(id, order)).await
    }
}

fn submission(body: &str) -> Submission {
    let digest = |text: &str| Digest::of("tidegate test", &[text.as_bytes()]);
    Submission {
        upstream: "bank".to_owned(),
        expires: Duration::from_secs(86_400),
        request: request(body),
        owner: digest("me"),
        payload: digest(body),
        claim: None,
    }
}

fn claiming(body: &str, key: &str) -> Submission {
    let claim = Some(Digest::of("tidegate test claim", &[key.as_bytes()]));
    Submission { claim, ..submission(body) }
}

#[tokio::test(start_paused = true)]
async fn a_request_is_created_polled_and_completed() {
    let (disk, provider) = (Disk::new(), usual());
    let mut life = Life::begin(&disk, &provider).unwrap();
    let id = life.accept("{}").await;
    let handle = life.handle.clone();
    let clock = Clock::runtime();
    let begun = clock.now();
    life.during(handle.settled(id)).await;
    // Polls after 2 s and 4 s more.
    assert_eq!(clock.now().since(begun).as_secs(), 6);
    let record = life.look(id).await;
    assert_eq!((record.state, record.in_flight), (State::Completed, false));
    assert_eq!((record.attempts.create, record.attempts.poll), (1, 2));
    assert_eq!(handle.answer(id, Kind::Initial).unwrap().unwrap(), answer(201, r#"{"id":"tr_1"}"#));
    let last = answer(200, r#"{"status":"completed"}"#);
    assert_eq!(handle.answer(id, Kind::Final).unwrap().unwrap(), last);
    assert_eq!(provider.methods(), "PGG");
    assert_eq!(provider.calls()[2].request.target, "/v1/transfers/tr_1");
    assert_eq!(provider.calls()[0].key, Some(id.to_string()));
    // It is settled already: waiting returns at once, also for what nobody knows.
    life.during(handle.settled(id)).await;
    life.during(handle.settled(Id::from_u128(7))).await;
    assert!(life.during(handle.look(Id::from_u128(7))).await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_key_is_one_request_however_often_it_comes() {
    let (disk, provider) = (Disk::new(), usual());
    let mut life = Life::begin(&disk, &provider).unwrap();
    let handle = life.handle.clone();
    let all = futures_util::future::join_all((0..10).map(|n| {
        let body = if n == 7 { "another" } else { "one" };
        handle.accept(claiming(body, "key"))
    }));
    let mut replies = life.during(all).await;
    assert!(matches!(replies.remove(7), Err(Refused::KeyReused)));
    let first = replies.remove(0).unwrap();
    assert!(!first.replayed);
    for reply in replies {
        let reply = reply.unwrap();
        assert_eq!((reply.record.id, reply.replayed), (first.record.id, true));
    }
    life.passes(20).await;
    let again = life.during(handle.accept(claiming("one", "key"))).await.unwrap();
    assert_eq!((again.record.id, again.record.state), (first.record.id, State::Completed));
    let other = life.during(handle.accept(claiming("two", "key"))).await;
    assert!(matches!(other, Err(Refused::KeyReused)));
    assert_eq!(provider.methods(), "PGG");
    // When it is forgotten, its key is free.
    life.passes(3600).await;
    assert_eq!(life.store.record(first.record.id).unwrap(), None);
    assert_eq!(life.store.request(first.record.id).unwrap(), None);
    assert_eq!(life.store.answer(first.record.id, Kind::Final).unwrap(), None);
    assert!(!life.during(handle.accept(claiming("two", "key"))).await.unwrap().replayed);
}

#[tokio::test(start_paused = true)]
async fn a_full_store_says_so_and_settled_requests_count() {
    let (disk, provider) = (Disk::new(), usual());
    let bounds = Bounds { max_records: 2, ..BOUNDS };
    let mut life = Life::begin_with(&disk, &provider, bounds).unwrap();
    life.accept("1").await;
    life.accept("2").await;
    let handle = life.handle.clone();
    assert!(matches!(life.during(handle.accept(submission("3"))).await, Err(Refused::Full)));
    life.passes(3700).await;
    life.accept("4").await;
}

#[tokio::test(start_paused = true)]
async fn throttling_costs_no_attempt_however_long_it_lasts() {
    let clock = Clock::runtime();
    let begun = clock.now();
    let provider = Provider::new(move |call| {
        if clock.now().since(begun) < Duration::from_secs(600) {
            Reply::Answers(429, "")
        } else if call.request.method == "POST" {
            Reply::Answers(201, r#"{"id":7}"#)
        } else {
            Reply::Answers(200, r#"{"status":"completed"}"#)
        }
    });
    let mut life = Life::begin(&Disk::new(), &provider).unwrap();
    let id = life.accept("{}").await;
    life.passes(590).await;
    let record = life.look(id).await;
    assert_eq!((record.state, record.attempts.create), (State::Accepted, 0));
    assert!(record.attempts.throttled > 500, "{record:?}");
    life.passes(30).await;
    assert_eq!(life.look(id).await.state, State::Completed);
}

#[tokio::test(start_paused = true)]
async fn what_waits_for_a_token_is_taken_back_and_what_left_is_not() {
    let provider = Provider::new(|_| Reply::Hangs);
    let mut life = Life::begin(&Disk::new(), &provider).unwrap();
    provider.0.open.send_replace(false);
    let waiting = life.accept("1").await;
    life.passes(1).await;
    assert_eq!(life.order(waiting, Order::Cancel).await.unwrap().state, State::Canceled);
    provider.0.open.send_replace(true);
    life.passes(1).await;
    assert!(provider.calls().is_empty(), "it was sent after it was taken back");
    let again = life.order(waiting, Order::Cancel).await;
    assert!(matches!(again, Err(Unchanged::Unfit(_))), "{again:?}");

    let leaving = life.accept("2").await;
    life.passes(1).await;
    let refused = life.order(leaving, Order::Cancel).await.unwrap_err();
    assert_eq!(refused.to_string(), "the request is accepted and in flight");
    let nobody = life.order(Id::from_u128(1), Order::Cancel).await;
    assert!(matches!(nobody, Err(Unchanged::Unknown)));
}

#[tokio::test(start_paused = true)]
async fn a_request_expires_while_it_waits_for_a_token() {
    let provider = usual();
    let mut life = Life::begin(&Disk::new(), &provider).unwrap();
    provider.0.open.send_replace(false);
    provider.0.max.set(1);
    let (working, queued) = (life.accept("1").await, life.accept("2").await);
    life.passes(86_401).await;
    for id in [working, queued] {
        let record = life.look(id).await;
        assert_eq!((record.state, record.reason.as_deref()), (State::Failed, Some("expired")));
    }
    provider.0.open.send_replace(true);
    life.accept("3").await;
    life.passes(60).await;
    assert_eq!(provider.methods(), "PGG");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_breaks_its_worker_is_stopped_and_the_others_are_delivered() {
    let provider = Provider::new(|call| match call.request.body.as_ref() {
        b"poison" => Reply::Panics,
        _ if call.request.method == "POST" => Reply::Answers(201, r#"{"id":7}"#),
        _ => Reply::Answers(200, r#"{"status":"completed"}"#),
    });
    let mut life = Life::begin(&Disk::new(), &provider).unwrap();
    provider.0.max.set(1);
    let poison = life.accept("poison").await;
    let fine = life.accept("fine").await;
    life.passes(60).await;
    let record = life.look(poison).await;
    assert_eq!((record.state, record.reason.as_deref()), (State::Stale, Some("crash loop")));
    assert_eq!(life.look(fine).await.state, State::Completed);
    let sent = provider.calls().iter().filter(|call| call.request.body == "poison").count();
    assert_eq!(sent, 3);
}

#[tokio::test(start_paused = true)]
async fn no_more_are_at_the_upstream_than_it_bears() {
    let provider = usual();
    let mut life = Life::begin(&Disk::new(), &provider).unwrap();
    provider.0.max.set(3);
    let mut ids = Vec::new();
    for n in 0..20 {
        ids.push(life.accept(&n.to_string()).await);
    }
    life.passes(120).await;
    for id in ids {
        assert_eq!(life.look(id).await.state, State::Completed);
    }
    assert_eq!(provider.0.most.get(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_provider_that_hangs_is_asked_again_or_left_to_a_person() {
    for (delivery, state, sent) in
        [(Delivery::AtLeastOnce, State::Stale, 5), (Delivery::AtMostOnce, State::Stale, 1)]
    {
        let provider = Provider::new(|_| Reply::Hangs);
        provider.0.delivery.set(delivery);
        let mut life = Life::begin(&Disk::new(), &provider).unwrap();
        let id = life.accept("{}").await;
        life.passes(120).await;
        assert_eq!(life.look(id).await.state, state, "{delivery:?}");
        assert_eq!(provider.calls().len(), sent, "{delivery:?}");
        let keys: std::collections::HashSet<_> =
            provider.calls().into_iter().map(|call| call.key).collect();
        assert_eq!(keys.len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_provider_that_cannot_be_reached_fails_what_it_cannot_have_got() {
    let provider = Provider::new(|_| Reply::Fails(Fault::Unsent("refused".to_owned())));
    let mut life = Life::begin(&Disk::new(), &provider).unwrap();
    let id = life.accept("{}").await;
    life.passes(60).await;
    let record = life.look(id).await;
    assert_eq!((record.state, record.reached), (State::Failed, false));
    assert_eq!(record.reason.as_deref(), Some("5 tries: refused"));
    assert_eq!(provider.calls().len(), 5);
}

#[tokio::test(start_paused = true)]
async fn operators_have_it_looked_at_or_sent_again() {
    let provider = Provider::new(|call| match call.request.method.as_str() {
        "POST" => Reply::Answers(201, r#"{"id":7}"#),
        _ => Reply::Answers(200, r#"{"status":"processing"}"#),
    });
    let mut life = Life::begin(&Disk::new(), &provider).unwrap();
    let id = life.accept("{}").await;
    life.passes(120).await;
    assert_eq!(life.look(id).await.state, State::Stale);
    let record = life.order(id, Order::Recheck).await.unwrap();
    assert_eq!((record.state, record.attempts.poll), (State::Pending, 0));
    life.passes(200).await;
    assert_eq!(life.look(id).await.state, State::Stale);
    let record = life.order(id, Order::Resend { fresh_key: true }).await.unwrap();
    assert_eq!((record.state, record.initial), (State::Accepted, None));
    assert_eq!(life.handle.answer(id, Kind::Initial).unwrap(), None);
    life.passes(1).await;
    let keys: Vec<_> = provider.calls().into_iter().filter_map(|call| call.key).collect();
    assert_eq!(keys, [id.to_string(), format!("{id}-1")]);
}

#[tokio::test(start_paused = true)]
async fn a_restart_goes_on_where_it_was() {
    for (delivery, in_flight) in
        [(Delivery::AtLeastOnce, State::Completed), (Delivery::AtMostOnce, State::Stale)]
    {
        let (disk, provider) = (Disk::new(), Provider::new(|_| Reply::Hangs));
        provider.0.delivery.set(delivery);
        provider.0.polls.set(false);
        let mut life = Life::begin(&disk, &provider).unwrap();
        provider.0.max.set(1);
        let (sent, queued) = (life.accept("1").await, life.accept("2").await);
        life.passes(1).await;
        assert!(life.look(sent).await.in_flight);
        drop(life);

        *provider.0.script.borrow_mut() = Box::new(|_| Reply::Answers(200, "done"));
        let mut life = Life::begin(&disk.without_power(1), &provider).unwrap();
        life.passes(10).await;
        assert_eq!(life.look(sent).await.state, in_flight);
        assert_eq!(life.look(queued).await.state, State::Completed);
        let first = provider.calls()[0].clone();
        let same = provider.calls().iter().filter(|call| **call == first).count();
        assert_eq!(same, if delivery == Delivery::AtLeastOnce { 2 } else { 1 });
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_in_flight_may_finish_when_the_process_leaves() {
    let (disk, provider) = (Disk::new(), usual());
    provider.0.polls.set(false);
    provider.0.max.set(1);
    let mut life = Life::begin(&disk, &provider).unwrap();
    let (sent, waits) = (life.accept("1").await, life.accept("2").await);
    life.during(sleep(Duration::from_millis(2))).await;
    life.drain.advance(Stage::Closing);
    (&mut life.running).await;
    assert_eq!(life.store.record(sent).unwrap().unwrap().state, State::Completed);
    assert_eq!(life.store.record(waits).unwrap().unwrap().attempts.create, 0);
    assert!(matches!(life.handle.accept(submission("3")).await, Err(Refused::Leaving)));
    let view = life.handle.look(sent).await.unwrap().unwrap();
    assert_eq!(view.record.state, State::Completed);

    // One that is still there when the process aborts is left in flight.
    let provider = Provider::new(|_| Reply::Hangs);
    let mut life = Life::begin(&Disk::new(), &provider).unwrap();
    let id = life.accept("1").await;
    life.passes(1).await;
    life.drain.advance(Stage::Aborting);
    (&mut life.running).await;
    assert!(life.store.record(id).unwrap().unwrap().in_flight);
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_stops_everything_and_loses_nothing() {
    let (disk, provider) = (Disk::new(), usual());
    provider.0.max.set(1);
    let mut life = Life::begin(&disk, &provider).unwrap();
    let kept = life.accept("1").await;
    life.passes(1).await;
    disk.fill();
    let handle = life.handle.clone();
    let refused = life.during(handle.accept(submission("2"))).await;
    assert!(matches!(refused, Err(Refused::Store(Error::Closed))), "{refused:?}");
    let calls = provider.calls().len();
    // Also after there is room again: what the file holds is not known in this life.
    disk.empty();
    life.passes(600).await;
    assert_eq!(provider.calls().len(), calls, "nothing is sent any more");
    assert!(handle.is_closed());
    let refused = life.during(handle.accept(submission("3"))).await;
    assert!(matches!(refused, Err(Refused::Store(Error::Closed))));
    drop((life, handle));
    let mut life = Life::begin(&disk.without_power(7), &provider).unwrap();
    life.passes(60).await;
    assert_eq!(life.look(kept).await.state, State::Completed);
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_route_is_for_a_person() {
    let provider = usual();
    let mut life = Life::begin(&Disk::new(), &provider).unwrap();
    let handle = life.handle.clone();
    let gone = Submission { upstream: "gone".to_owned(), ..submission("1") };
    let id = life.during(handle.accept(gone)).await.unwrap().record.id;
    life.passes(1).await;
    let record = life.look(id).await;
    assert_eq!(record.state, State::Stale);
    assert_eq!(record.reason.as_deref(), Some("there is no upstream `gone` any more"));
}

#[tokio::test(start_paused = true)]
async fn requests_are_listed_oldest_first_and_by_page() {
    let provider = Provider::new(|_| Reply::Answers(404, ""));
    let clock = Clock::runtime();
    let mut life = Life::begin(&Disk::new(), &provider).unwrap();
    let mut ids = Vec::new();
    for n in 0..5 {
        ids.push(life.accept(&n.to_string()).await);
        life.passes(10).await;
    }
    let now = clock.wall();
    let list = |filter: Filter| {
        let found = life.handle.list(&filter, now).unwrap();
        found.into_iter().map(|record| record.id).collect::<Vec<_>>()
    };
    let all = Filter { count: 10, ..Filter::default() };
    assert_eq!(list(all.clone()), ids);
    assert_eq!(list(Filter { count: 2, after: Some(ids[0]), ..all.clone() }), ids[1..3]);
    assert_eq!(list(Filter { states: vec![State::Stale], ..all.clone() }), []);
    assert_eq!(list(Filter { states: vec![State::Failed], ..all.clone() }), ids);
    assert_eq!(list(Filter { upstream: Some("mail".to_owned()), ..all.clone() }), []);
    assert_eq!(list(Filter { count: 0, ..all }), []);
}
