//! Interleavings: what threads do to buckets at the same time, in thousands of
//! orders, with the product's own code. A failure prints the schedule that led to it.
//!
//! ```sh
//! RUSTFLAGS="--cfg shuttle" cargo test --target-dir target/shuttle --test interleavings
//! ```

#![cfg(shuttle)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail by a panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread;
use shuttle::{Config, Runner};
use tidegate::limiter::{
    Alone, Attributes, Client, Decision, KeyBuf, KeyPart, Limit, LimitIndex, LimitSet, LimitSpec,
    Limiter, Quota, Rule, Source, Verdict,
};
use tidegate::replication::{
    Body, Companion, Engine, Frame, Incarnation, ReplicatedLimiter, Reset, SessionId, Settings,
    Side,
};
use tidegate::time::Timestamp;

const SEED: u64 = 0x7e57_5eed;
const RUNS: usize = 2000;

/// Runs `scenario` in many orders, the same ones every time.
fn explore(scenario: impl Fn() + Send + Sync + 'static) {
    let scenario = Arc::new(scenario);
    println!("seed {SEED:#x}, {RUNS} random orders, then {RUNS} with three changes of priority");
    let run = Arc::clone(&scenario);
    let random = RandomScheduler::new_from_seed(SEED, RUNS);
    Runner::new(random, Config::new()).run(move || run());
    let priorities = PctScheduler::new_from_seed(SEED, 3, RUNS);
    Runner::new(priorities, Config::new()).run(move || scenario());
}

struct Question(&'static str);

impl Attributes for Question {
    fn method(&self) -> &str {
        "GET"
    }
    fn path(&self) -> &[u8] {
        b"/"
    }
    fn host(&self) -> &str {
        ""
    }
    fn client(&self) -> Client {
        Client::new([127, 0, 0, 1].into(), 64)
    }
    fn header(&self, name: &str, each: &mut dyn FnMut(&[u8])) {
        if name == "key" {
            each(self.0.as_bytes());
        }
    }
    fn query(&self) -> &str {
        ""
    }
}

/// A limit that refills next to nothing while a test lasts.
fn limit(name: &str, burst: u64, keyed: bool) -> Limit {
    let key = keyed.then(|| KeyPart::new(Source::Header("key".into()), false));
    let rule = Rule { key: key.into_iter().collect(), ..Rule::default() };
    let quota = Quota::try_new("1/40d".parse().unwrap(), burst).unwrap();
    Limit::new(LimitSpec::new(name, rule, quota))
}

fn now() -> Timestamp {
    Timestamp::from_millis(3_600_000)
}

fn is_admitted(decision: &Decision) -> bool {
    decision.verdict == Verdict::Admitted
}

/// Runs every one of `threads` and returns what they return.
fn at_once<T: Send + 'static>(threads: Vec<Box<dyn FnOnce() -> T + Send>>) -> Vec<T> {
    let running: Vec<_> = threads.into_iter().map(thread::spawn).collect();
    running.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Buckets, as the store counts them and as they are.
fn check_count<C: tidegate::limiter::Companion>(limiter: &Limiter<C>) {
    let mut count = 0;
    limiter.store().for_each(|_, slot| {
        count += 1;
        assert_eq!(slot.held(), 0);
    });
    assert_eq!(count, limiter.store().len());
}

#[test]
fn there_are_never_more_buckets_than_allowed() {
    explore(|| {
        const MAX: usize = 2;
        let limits = LimitSet::new([limit("one", 2, true)]);
        let limiter = Arc::new(Limiter::new(limits, MAX, Alone));
        let threads = [["a", "b"], ["c", "a"], ["d", "b"]].map(|keys| {
            let limiter = Arc::clone(&limiter);
            let thread: Box<dyn FnOnce() + Send> = Box::new(move || {
                for key in keys {
                    limiter.decide(&Question(key), now());
                    assert!(limiter.store().len() <= MAX);
                }
            });
            thread
        });
        at_once(threads.into());
        check_count(&limiter);
        // Each of them can go for another.
        for key in ["e", "f", "g"] {
            limiter.decide(&Question(key), now());
            check_count(&limiter);
        }
    });
}

#[test]
fn a_key_never_spends_more_than_its_burst_however_often_it_is_evicted() {
    explore(|| {
        let limits = LimitSet::new([limit("one", 2, true)]);
        let limiter = Arc::new(Limiter::new(limits, 1, Alone));
        let threads = [["a", "a"], ["a", "a"], ["b", "a"]].map(|keys| {
            let limiter = Arc::clone(&limiter);
            let thread: Box<dyn FnOnce() -> usize + Send> = Box::new(move || {
                let admitted = keys.map(|key| {
                    let admitted = is_admitted(&limiter.decide(&Question(key), now()));
                    usize::from(admitted && key == "a")
                });
                admitted.iter().sum()
            });
            thread
        });
        let admitted: usize = at_once(threads.into()).into_iter().sum();
        assert!(admitted <= 2, "{admitted} of 2");
        check_count(&limiter);
    });
}

#[test]
fn what_is_held_is_spent_or_given_back() {
    explore(|| {
        let limits = LimitSet::new([limit("each", 2, true), limit("all", 3, false)]);
        let limiter = Arc::new(Limiter::new(limits, 100, Alone));
        let threads = [["a", "b"], ["a", "a"], ["b", "a"]].map(|keys| {
            let limiter = Arc::clone(&limiter);
            let thread: Box<dyn FnOnce() -> u64 + Send> = Box::new(move || {
                let decisions = keys.map(|key| limiter.decide(&Question(key), now()));
                // The last one did not reach its upstream.
                limiter.refund(&decisions[1], now());
                u64::from(is_admitted(&decisions[0]))
            });
            thread
        });
        let admitted: u64 = at_once(threads.into()).into_iter().sum();
        let mut spent = [0, 0];
        limiter.store().for_each(|_, slot| {
            assert_eq!(slot.held(), 0);
            let burst = [2_000_000, 3_000_000][slot.limit.0 as usize];
            assert_eq!(slot.bucket.level().micros(), burst - slot.net() as i64);
            spent[slot.limit.0 as usize] += slot.net();
        });
        assert_eq!(spent, [admitted * 1_000_000; 2]);
    });
}

#[test]
fn a_bucket_that_is_held_does_not_go_for_another() {
    explore(|| {
        let limits = LimitSet::new([limit("each", 2, true), limit("all", 3, false)]);
        let limiter = Arc::new(Limiter::new(limits, 2, Alone));
        let threads = [["a", "b"], ["a", "c"], ["b", "a"]].map(|keys| {
            let limiter = Arc::clone(&limiter);
            let thread: Box<dyn FnOnce() -> [usize; 2] + Send> = Box::new(move || {
                let mut admitted = [0, 0];
                for key in keys {
                    if is_admitted(&limiter.decide(&Question(key), now())) {
                        admitted[0] += usize::from(key == "a");
                        admitted[1] += 1;
                    }
                }
                admitted
            });
            thread
        });
        let admitted = at_once(threads.into());
        let [a, all] = admitted.iter().fold([0, 0], |[a, all], [x, y]| [a + x, all + y]);
        assert!(a <= 2 && all <= 3, "{a} of 2, {all} of 3");
        check_count(&limiter);
    });
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn replica() -> (Arc<ReplicatedLimiter>, Engine) {
    let limits = LimitSet::new([limit("one", 3, true)]);
    let limiter = Arc::new(ReplicatedLimiter::new(limits, 100, Companion::default()));
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
    let mut engine = Engine::new(settings, me, Arc::clone(&limiter), now());
    let Frame { body: Body::Hello(hello), .. } = engine.greeting(now()) else { unreachable!() };
    let hello =
        tidegate::replication::Hello { incarnation: Incarnation::from_bytes([2; 16]), ..hello };
    engine.open(SessionId(1), Side::Accepted, hello, 1, now()).unwrap();
    (limiter, engine)
}

/// What the engine says to its peer until it has nothing more to say.
fn told(engine: &mut Engine, now: Timestamp) -> u64 {
    engine.tick(now);
    let mut most = 0;
    while let Some(frame) = engine.transmit(SessionId(1), now) {
        if let Body::Update(update) = frame.body {
            most = update.entries.iter().map(|entry| entry.spent).max().unwrap_or(most);
        }
    }
    most
}

#[test]
fn no_mark_is_lost_between_requests_and_the_engine() {
    explore(|| {
        let (limiter, mut engine) = replica();
        let spending: Vec<_> = (0..2)
            .map(|_| {
                let limiter = Arc::clone(&limiter);
                thread::spawn(move || {
                    limiter.decide(&Question("a"), now());
                })
            })
            .collect();
        // The engine is driven meanwhile, each time a little later.
        for millis in [0, 6, 12, 30] {
            told(&mut engine, now().plus(Duration::from_millis(millis)));
        }
        for thread in spending {
            thread.join().unwrap();
        }
        for millis in [200, 400] {
            told(&mut engine, now().plus(Duration::from_millis(millis)));
        }
        assert_eq!(engine.unsent(), 0, "a bucket is neither marked nor watched");
        // What is spent later is marked again.
        let later = now().plus(Duration::from_millis(600));
        limiter.decide(&Question("a"), later);
        told(&mut engine, later);
        let most = told(&mut engine, later.plus(Duration::from_millis(200)));
        assert_eq!(engine.unsent(), 0);
        assert!(most == 0 || most == 3_000_000, "{most}");
    });
}

#[test]
fn whoever_waits_for_marks_is_woken() {
    explore(|| {
        let (limiter, _engine) = replica();
        let spending = {
            let limiter = Arc::clone(&limiter);
            thread::spawn(move || {
                limiter.decide(&Question("a"), now());
            })
        };
        let woken = Arc::new(Woken(AtomicBool::new(false)));
        let waker = Waker::from(Arc::clone(&woken));
        let ready = limiter.companion().poll_marked(&mut Context::from_waker(&waker));
        spending.join().unwrap();
        assert!(ready == Poll::Ready(()) || woken.0.load(Ordering::SeqCst));
    });
}

#[test]
fn a_reset_and_requests_lose_no_tokens() {
    explore(|| {
        let (limiter, mut engine) = replica();
        let spending: Vec<_> = (0..2)
            .map(|_| {
                let limiter = Arc::clone(&limiter);
                thread::spawn(move || {
                    let decision = limiter.decide(&Question("a"), now());
                    limiter.refund(&decision, now());
                    limiter.decide(&Question("a"), now());
                })
            })
            .collect();
        let mut key = KeyBuf::new();
        key.push_text(b"a");
        key.finish();
        engine.reset(&Reset::Key(LimitIndex(0), key), now());
        for thread in spending {
            thread.join().unwrap();
        }
        limiter.store().for_each(|_, slot| {
            assert_eq!(slot.held(), 0);
            assert_eq!(slot.bucket.level().micros(), 3_000_000 - slot.net() as i64);
        });
        told(&mut engine, now().plus(Duration::from_millis(200)));
        assert_eq!(engine.unsent(), 0);
    });
}
