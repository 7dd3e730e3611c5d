//! Requests that wait for their tokens, in whole replicas (EG).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use tidegate::limiter::{
    Attributes, Client, Limit, LimitSet, LimitSpec, Outlook, PauseOrder, Quota, Rule, Turn,
};
use tidegate::replication::{Companion, Engine, Incarnation, ReplicatedLimiter, Reset, Settings};
use tidegate::time::Timestamp;

use crate::harness::app::{Network, Spec, meshed, until};
use crate::harness::{Connection, request};

#[test]
fn eg_g11_operators_see_who_waits_and_a_reset_lets_them_pass() {
    let network = Network::new();
    let spec = Spec::new(["name: p, key: [], rate: 1/h, burst: 4, max_wait: 10h"]).alone();
    let replica = network.start(11, &spec.workers(2));
    replica.ready();
    assert_eq!(replica.spend("/", 4), 4);
    let mut connections: Vec<Connection> = (0..3).map(|_| replica.connect()).collect();
    for connection in &mut connections {
        connection.send(request("GET", "/", &[], ""));
    }
    until("three wait", || replica.metric("tidegate_waiting{limit=\"p\"}") == 3.0);
    let bucket = replica.bucket("p", &[]);
    assert_eq!((bucket.waiting, bucket.awaited), (3, 3.0));
    assert_eq!((bucket.admitted, bucket.refused, network.upstream.count()), (4, 0, 4));
    replica.reset("p");
    for connection in &mut connections {
        assert_eq!(connection.answer().status, 200);
    }
    assert_eq!(replica.requests("p", "held"), 3.0);
    assert_eq!(replica.bucket("p", &[]).waiting, 0);
}

#[test]
fn eg_g12_replicas_pace_to_one_limit_together() {
    let network = Network::new();
    network.list(&[11, 12]);
    let spec = Spec::new(["name: p, key: [], rate: 60/s, burst: 6, max_wait: 20s"]);
    let replicas = [11, 12].map(|host| network.start(host, &spec));
    meshed(&replicas.each_ref());
    let started = Instant::now();
    thread::scope(|scope| {
        for replica in &replicas {
            scope.spawn(|| {
                let mut connections: Vec<_> = (0..60).map(|_| replica.connect()).collect();
                for connection in &mut connections {
                    connection.send(request("GET", "/", &[], ""));
                }
                for connection in &mut connections {
                    assert_eq!(connection.answer().status, 200);
                }
            });
        }
    });
    let took = started.elapsed();
    assert_eq!(network.upstream.count(), 120);
    // One ideal bucket: 6 at once and 114 at 60 a second are 1.9 s. The last few
    // tokens can be given out once by each replica.
    assert!(took >= Duration::from_millis(1650), "{took:?}");
    assert!(took < Duration::from_secs(6), "{took:?}");
}

struct Get;

impl Attributes for Get {
    fn method(&self) -> &str {
        "GET"
    }
    fn path(&self) -> &[u8] {
        b"/"
    }
    fn host(&self) -> &str {
        "a"
    }
    fn client(&self) -> Client {
        Client::new([127, 0, 0, 1].into(), 64)
    }
    fn header(&self, _: &str, _: &mut dyn FnMut(&[u8])) {}
    fn query(&self) -> &str {
        ""
    }
}

#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn eg_g13_a_pause_keeps_the_line_and_its_end_or_a_reset_moves_it() {
    let start = Timestamp::from_millis(3_600_000);
    let at = |millis| start.plus(Duration::from_millis(millis));
    let quota = Quota::try_new("10/s".parse().unwrap(), 1).unwrap();
    let max_wait = Duration::from_secs(60);
    let spec = LimitSpec { max_wait, ..LimitSpec::new("p", Rule::default(), quota) };
    let limits = LimitSet::new([Limit::new(spec)]);
    let limiter = Arc::new(ReplicatedLimiter::new(limits, 100, Companion::default()));
    let me = Incarnation::from_bytes([1; 16]);
    let settings = Settings {
        group: "default".into(),
        name: "one".into(),
        address: String::new(),
        sync_interval: Duration::from_millis(100),
        join_timeout: Duration::from_secs(2),
        share_hold: Duration::from_secs(30),
        expected_replicas: 0,
        expects_peers: false,
    };
    let mut engine = Engine::new(settings, me, Arc::clone(&limiter), start);
    let first = limiter.decide(&Get, start);
    let (index, bucket) = (first.checks[0].limit, first.checks[0].bucket);
    let bell = Arc::new(Bell::default());
    let waker = Waker::from(Arc::clone(&bell));
    let hold = |now| {
        let decision = limiter.decide(&Get, now);
        let Outlook::Waits { due, patience } = limiter.outlook(&decision, None) else { panic!() };
        (limiter.hold(&decision, patience, now).unwrap(), due)
    };
    let (mut waiter, due) = hold(start);
    assert_eq!(due, Duration::from_millis(100));
    let turn = |waiter: &mut _, now| match limiter.try_again(waiter, &Get, &waker, now) {
        Turn::Waits(alarm) => alarm,
        Turn::Settled(decision) => {
            assert!(decision.is_admitted());
            None
        }
    };
    assert_eq!(turn(&mut waiter, start), Some(at(100)));

    // Closed for 30 s: the one in front is called, and waits for the end of it.
    assert!(limiter.pause(index, bucket, None, PauseOrder::AtLeast(at(30_000)), start));
    assert_eq!(bell.0.load(Ordering::Relaxed), 1);
    assert_eq!(turn(&mut waiter, at(200)), Some(at(30_000)));
    let (mut second, due) = hold(at(200));
    assert_eq!(due, Duration::from_millis(29_900), "one is there at the end, for the first");
    turn(&mut second, at(200));

    // Opened again, it passes at once, and the next in its turn.
    assert!(limiter.pause(index, bucket, None, PauseOrder::Lift, at(1000)));
    assert_eq!(bell.0.load(Ordering::Relaxed), 2);
    assert_eq!(turn(&mut waiter, at(1000)), None);
    assert_eq!(bell.0.load(Ordering::Relaxed), 3);
    assert_eq!(turn(&mut second, at(1000)), Some(at(1100)));
    engine.reset(&Reset::Bucket(index, bucket), at(1010)).unwrap();
    assert_eq!(bell.0.load(Ordering::Relaxed), 4);
    assert_eq!(turn(&mut second, at(1010)), None);
    assert_eq!(limiter.waiting(), 0);
}
