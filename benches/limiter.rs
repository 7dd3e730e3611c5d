//! What one decision costs: `cargo bench --bench limiter`.
//!
//! Time includes drawing a random key from a list of prepared ones, so that
//! caches behave as they do in traffic. Where it says `clock`, it is also read for
//! each decision, as `governor` does, which stands beside it.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use divan::Bencher;
use governor::DefaultKeyedRateLimiter;
use tidegate::limiter::{
    Alone, Attributes, Client, Companion, Condition, KeyPart, Limit, LimitSet, LimitSpec, Limiter,
    PathPattern, Quota, Rule, Source,
};
use tidegate::replication::{
    self, Body, Engine, Frame, Hello, Incarnation, ReplicatedLimiter, SessionId, Settings, Side,
};
use tidegate::time::{Clock, Timestamp};

fn main() {
    divan::main();
}

struct Request<'a> {
    key: &'a str,
    path: &'a str,
}

impl Attributes for Request<'_> {
    fn method(&self) -> &str {
        "GET"
    }
    fn path(&self) -> &[u8] {
        self.path.as_bytes()
    }
    fn host(&self) -> &str {
        "localhost"
    }
    fn client(&self) -> Client {
        Client::new([127, 0, 0, 1].into(), 64)
    }
    fn header(&self, name: &str, each: &mut dyn FnMut(&[u8])) {
        if name == "x-api-key" {
            each(self.key.as_bytes());
        }
    }
    fn query(&self) -> &str {
        ""
    }
}

fn limit(name: &str, path: Option<&str>) -> Limit {
    let part = KeyPart::new(Source::Header("x-api-key".into()), false);
    let rate = "1000000/s".parse().unwrap_or_else(|_| unreachable!());
    let quota = Quota::try_new(rate, 1_000_000).unwrap_or_else(|| unreachable!());
    let path = path.and_then(|path| PathPattern::try_new(path).ok());
    let condition = Condition { path, ..Condition::default() };
    let rule = Rule { condition, key: vec![part], ..Rule::default() };
    Limit::new(LimitSpec::new(name, rule, quota))
}

/// As many limits, all of which apply to every request.
fn limits(count: usize) -> LimitSet {
    LimitSet::new((0..count).map(|i| limit(&format!("l{i}"), None)))
}

fn alone(limits: LimitSet) -> Limiter<Alone> {
    Limiter::new(limits, 2_000_000, Alone)
}

/// A replica that has met another one, whose engine rests.
fn in_company(limits: LimitSet) -> (Arc<ReplicatedLimiter>, Engine) {
    let companion = replication::Companion::default();
    let limiter = Arc::new(ReplicatedLimiter::new(limits, 2_000_000, companion));
    let settings = Settings {
        group: "g".into(),
        name: String::new(),
        address: String::new(),
        sync_interval: Duration::from_millis(100),
        join_timeout: Duration::from_secs(2),
        share_hold: Duration::from_secs(30),
        expected_replicas: 0,
        expects_peers: true,
    };
    let me = Incarnation::from_bytes([1; 16]);
    let mut engine = Engine::new(settings, me, Arc::clone(&limiter), START);
    let Frame { body: Body::Hello(hello), .. } = engine.greeting(START) else { unreachable!() };
    let hello = Hello { incarnation: Incarnation::from_bytes([2; 16]), ..hello };
    let met = engine.open(SessionId(1), Side::Accepted, hello, 1, START);
    assert!(met.is_ok());
    (limiter, engine)
}

const START: Timestamp = Timestamp::from_millis(3_600_000);

/// Ten bytes each, in an order that no prefetcher guesses.
fn keys(count: usize) -> Vec<String> {
    let mut state: u64 = 42;
    let mut keys: Vec<String> = (0..count).map(|i| format!("k{i:09}")).collect();
    for i in (1..keys.len()).rev() {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        keys.swap(i, (state >> 33) as usize % (i + 1));
    }
    keys
}

thread_local! {
    static TURN: Cell<usize> = const { Cell::new(0) };
}

/// A number that rises with each call, and begins elsewhere in each thread.
fn turn() -> usize {
    TURN.with(|turn| {
        let next = match turn.get() {
            0 => std::ptr::from_ref(turn) as usize >> 6,
            last => last + 1,
        };
        turn.set(next);
        next
    })
}

/// Decides on requests by one key after the other, a microsecond apart.
fn decide<C: Companion>(bencher: Bencher<'_, '_>, limiter: &Limiter<C>, keys: &[String]) {
    for key in keys {
        limiter.decide(&Request { key, path: "/" }, START);
    }
    bencher.bench(|| {
        let turn = turn();
        let now = START.plus_nanos((turn as u64 & 0xff_ffff) * 1000);
        limiter.decide(&Request { key: &keys[turn % keys.len()], path: "/" }, now).is_admitted()
    });
}

const COUNTS: [usize; 3] = [1_000, 100_000, 1_000_000];

#[divan::bench(args = COUNTS, threads = [1, 2])]
fn one_limit_alone(bencher: Bencher<'_, '_>, count: usize) {
    decide(bencher, &alone(limits(1)), &keys(count));
}

#[divan::bench(args = COUNTS)]
fn one_limit_of_a_proxy_without_peers(bencher: Bencher<'_, '_>, count: usize) {
    let companion = replication::Companion::default();
    let limiter = ReplicatedLimiter::new(limits(1), 2_000_000, companion);
    decide(bencher, &limiter, &keys(count));
}

#[divan::bench(args = [1_000, 100_000])]
fn one_limit_of_a_proxy_with_a_peer(bencher: Bencher<'_, '_>, count: usize) {
    let (limiter, _engine) = in_company(limits(1));
    decide(bencher, &limiter, &keys(count));
}

#[divan::bench(args = [2, 4])]
fn several_limits_on_each_request(bencher: Bencher<'_, '_>, count: usize) {
    decide(bencher, &alone(limits(count)), &keys(1000));
}

/// Of many limits, one applies.
#[divan::bench(args = [1, 10, 100, 1_000])]
fn one_of_many_limits(bencher: Bencher<'_, '_>, count: usize) {
    let limits = (0..count).map(|i| limit(&format!("l{i}"), Some(&format!("/t{i:04}/"))));
    let limiter = alone(LimitSet::new(limits));
    let keys = keys(1000);
    let paths: Vec<String> = (0..1000).map(|i| format!("/t{:04}/orders/17", i % count)).collect();
    bencher.bench(|| {
        let turn = turn();
        let now = START.plus_nanos((turn as u64 & 0xff_ffff) * 1000);
        let request = Request { key: &keys[turn % 1000], path: &paths[turn % 1000] };
        limiter.decide(&request, now).is_admitted()
    });
}

#[divan::bench]
fn reading_the_clock(bencher: Bencher<'_, '_>) {
    let clock = Clock::monotonic();
    bencher.bench_local(move || clock.now());
}

#[divan::bench(args = COUNTS, threads = [1, 2])]
fn with_the_clock(bencher: Bencher<'_, '_>, count: usize) {
    let (limiter, keys, clock) = (alone(limits(1)), keys(count), Clock::monotonic());
    for key in &keys {
        limiter.decide(&Request { key, path: "/" }, clock.now());
    }
    bencher.bench(|| {
        let request = Request { key: &keys[turn() % keys.len()], path: "/" };
        limiter.decide(&request, clock.now()).is_admitted()
    });
}

#[divan::bench(args = COUNTS, threads = [1, 2])]
fn governor(bencher: Bencher<'_, '_>, count: usize) {
    let keys = keys(count);
    let quota = governor::Quota::per_second(NonZeroU32::MAX);
    let limiter = DefaultKeyedRateLimiter::dashmap(quota);
    for key in &keys {
        assert!(limiter.check_key(key).is_ok());
    }
    bencher.bench(|| limiter.check_key(&keys[turn() % keys.len()]).is_ok());
}
