//! Requests that wait for their tokens, by virtual time.

use std::sync::Arc;
use std::task::{Wake, Waker};

use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn pacing(name: &str, rate: &str, burst: u64) -> LimitSpec {
    LimitSpec { max_wait: 10 * SECOND, ..limit(name, rate, burst) }
}

/// How often a waiter was woken.
#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// One waiting request, as whoever serves it sees it.
struct Guest {
    name: usize,
    request: FakeRequest,
    waiter: Waiter,
    bell: Arc<Bell>,
    heard: usize,
    alarm: Option<Timestamp>,
}

/// A world without threads: who was woken tries again, in the order of coming.
struct World {
    limiter: Limiter<Alone>,
    now: Timestamp,
    guests: Vec<Guest>,
    /// Who passed and when, at once or later.
    passed: Vec<(usize, Timestamp)>,
    refused: Vec<(usize, Timestamp)>,
    tries: usize,
    next: usize,
}

impl World {
    fn new(limiter: Limiter<Alone>) -> Self {
        let (guests, passed, refused) = (Vec::new(), Vec::new(), Vec::new());
        Self { limiter, now: NOW, guests, passed, refused, tries: 0, next: 0 }
    }

    fn come(&mut self, request: FakeRequest) -> usize {
        self.come_for(request, None)
    }

    /// A request comes; `asked` is how long it wants to wait.
    fn come_for(&mut self, request: FakeRequest, asked: Option<Duration>) -> usize {
        let name = self.next;
        self.next += 1;
        let decision = self.limiter.decide(&request, self.now);
        if decision.is_admitted() {
            self.passed.push((name, self.now));
            return name;
        }
        let held = match self.limiter.outlook(&decision, asked) {
            Outlook::Waits { patience, .. } => self.limiter.hold(&decision, patience, self.now),
            Outlook::Settled | Outlook::Crowded { .. } => None,
        };
        let Some(waiter) = held else {
            self.refused.push((name, self.now));
            return name;
        };
        let bell = Arc::new(Bell(AtomicUsize::new(1)));
        self.guests.push(Guest { name, request, waiter, bell, heard: 0, alarm: None });
        self.settle();
        name
    }

    fn leave(&mut self, name: usize) {
        if let Some(at) = self.guests.iter().position(|guest| guest.name == name) {
            let mut guest = self.guests.remove(at);
            self.limiter.leave(&mut guest.waiter, self.now);
            self.settle();
        }
    }

    /// Everybody who was woken, or whose alarm rang, tries again.
    fn settle(&mut self) {
        loop {
            let is_called = |guest: &Guest| {
                guest.bell.0.load(Ordering::Relaxed) > guest.heard
                    || guest.alarm.is_some_and(|at| at <= self.now)
            };
            let Some(at) = self.guests.iter().position(is_called) else { return };
            self.tries += 1;
            let guest = &mut self.guests[at];
            guest.heard = guest.bell.0.load(Ordering::Relaxed);
            let waker = Waker::from(Arc::clone(&guest.bell));
            match self.limiter.try_again(&mut guest.waiter, &guest.request, &waker, self.now) {
                Turn::Waits(alarm) => {
                    assert!(alarm.is_none_or(|at| at > self.now), "it would spin");
                    guest.alarm = alarm;
                }
                Turn::Settled(decision) => {
                    let name = self.guests.remove(at).name;
                    let list =
                        if decision.is_admitted() { &mut self.passed } else { &mut self.refused };
                    list.push((name, self.now));
                }
            }
        }
    }

    /// Lets time pass, from alarm to alarm.
    fn pass(&mut self, time: Duration) {
        let end = self.now.plus(time);
        while let Some(at) = self.guests.iter().filter_map(|guest| guest.alarm).min()
            && at <= end
        {
            self.now = self.now.max(at);
            self.settle();
        }
        self.now = end;
        self.settle();
    }

    fn passed(&self) -> Vec<usize> {
        self.passed.iter().map(|(name, _)| *name).collect()
    }

    /// Milliseconds after the start at which requests passed.
    fn times(&self) -> Vec<u64> {
        self.passed.iter().map(|(_, at)| at.since(NOW).as_millis() as u64).collect()
    }

    /// Nobody waits, nothing is held, and the books say what passed.
    fn assert_clean(&self) {
        assert_eq!((self.guests.len(), self.limiter.waiting()), (0, 0));
        self.limiter.store().for_each(|_, slot| {
            assert_eq!((slot.waiting(), slot.held(), slot.awaited()), (0, 0, Tokens::ZERO));
        });
    }
}

fn get() -> FakeRequest {
    FakeRequest::get("/")
}

#[test]
fn requests_pass_one_by_one_in_the_order_of_coming() {
    let mut world = World::new(limiter([pacing("p", "10/s", 2)]));
    for _ in 0..6 {
        world.come(get());
    }
    world.pass(SECOND);
    assert_eq!(world.passed(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(world.times(), [0, 0, 100, 200, 300, 400]);
    // A look when it comes, one when it is in front, and one when it is due.
    assert!(world.tries <= 3 * 4, "{}", world.tries);
    world.assert_clean();
}

#[test]
fn nobody_overtakes_those_who_wait() {
    let mut world = World::new(limiter([pacing("p", "10/s", 1)]));
    world.come(get());
    world.come(get());
    world.now = world.now.plus(Duration::from_millis(100));
    // The token is there, and the one it is for has not looked yet.
    let decision = world.limiter.decide(&get(), world.now);
    assert!(!decision.is_admitted());
    assert_eq!(decision.checks[0].level, tokens(1));
    assert_eq!(decision.checks[0].due, Due::In(100_000_000), "behind the one that waits");
    world.come(get());
    world.pass(SECOND);
    assert_eq!(world.passed(), [0, 1, 2]);
}

#[test]
fn one_that_leaves_takes_no_token_and_the_next_moves_up() {
    let mut world = World::new(limiter([pacing("p", "10/s", 1)]));
    for _ in 0..4 {
        world.come(get());
    }
    world.leave(1);
    world.leave(2);
    world.pass(SECOND);
    assert_eq!(world.passed(), [0, 3]);
    assert_eq!(world.times(), [0, 100]);
    world.limiter.store().for_each(|_, slot| {
        assert_eq!((slot.admitted, slot.refused, slot.spent), (2, 0, 2_000_000));
    });
    world.assert_clean();
}

#[test]
fn who_would_wait_too_long_is_refused_at_once() {
    let spec = LimitSpec { max_wait: Duration::from_millis(250), ..limit("p", "10/s", 1) };
    let mut world = World::new(limiter([spec]));
    for _ in 0..5 {
        world.come(get());
    }
    assert_eq!(world.refused, [(3, NOW), (4, NOW)], "due in 300 ms");
    // It may ask to wait less, and not more.
    world.come_for(get(), Some(SECOND));
    assert_eq!(world.refused.len(), 3);
    world.pass(Duration::from_millis(150));
    world.come_for(get(), Some(Duration::from_millis(100)));
    assert_eq!(world.refused.len(), 4);
    world.come_for(get(), Some(Duration::ZERO));
    assert_eq!(world.refused.len(), 5);
    world.come_for(get(), Some(Duration::from_millis(160)));
    world.pass(SECOND);
    assert_eq!(world.passed(), [0, 1, 2, 8]);
    world.assert_clean();
}

#[test]
fn without_max_wait_and_in_shadow_nobody_waits() {
    let shadow = LimitSpec { mode: Mode::Shadow, ..pacing("s", "1/h", 1) };
    let mut world = World::new(limiter([shadow, limit("p", "10/s", 3)]));
    for _ in 0..5 {
        world.come(get());
    }
    assert_eq!((world.passed.len(), world.refused.len()), (3, 2));
    world.assert_clean();
}

#[test]
fn too_many_are_turned_away_by_bucket_and_in_all() {
    let limiter = limiter([keyed(pacing("p", "10/s", 1), Source::Header("x-k".into()))]);
    let bounds = Crowding { in_all: 3, per_bucket: 2 };
    let mut world = World::new(limiter.with_crowding(bounds));
    let from = |key: &str| get().with_header("x-k", key);
    for key in ["a", "a", "a", "a"] {
        world.come(from(key));
    }
    assert_eq!(world.refused, [(3, NOW)]);
    let decision = world.limiter.decide(&from("a"), NOW);
    let due = Duration::from_millis(300);
    assert_eq!(world.limiter.outlook(&decision, None), Outlook::Crowded { due });
    for key in ["b", "b", "b"] {
        world.come(from(key));
    }
    assert_eq!(world.refused, [(3, NOW), (6, NOW)]);
    world.leave(1);
    world.come(from("b"));
    assert_eq!(world.limiter.waiting(), 3);
    world.pass(SECOND);
    assert_eq!(world.passed.len(), 5);
    world.assert_clean();
}

#[test]
fn a_larger_cost_waits_longer_and_is_not_passed_by_small_ones() {
    let mut spec = pacing("p", "10/s", 5);
    spec.cost = Cost::Header { name: "x-cost".into(), max: tokens(5) };
    let mut world = World::new(limiter([spec]));
    let cost = |n: u64| get().vouched_for().with_header("x-cost", &n.to_string());
    world.come(cost(5));
    world.come(cost(5));
    world.come(cost(1));
    world.pass(2 * SECOND);
    assert_eq!(world.passed(), [0, 1, 2]);
    assert_eq!(world.times(), [0, 500, 600]);
}

#[test]
fn a_refund_and_a_larger_quota_call_the_one_in_front() {
    let mut world = World::new(limiter([pacing("p", "1/s", 1)]));
    let first = world.limiter.decide(&get(), NOW);
    for _ in 0..3 {
        world.come(get());
    }
    world.pass(Duration::from_millis(10));
    assert!(world.passed.is_empty());
    world.limiter.refund(&first, world.now);
    world.settle();
    assert_eq!(world.passed(), [0]);
    // What was spent stays spent, and the new burst has room for one more.
    let limits = LimitSet::new([Limit::new(pacing("p", "1/s", 2))]);
    world.limiter.reload(limits, world.now).unwrap();
    world.settle();
    assert_eq!(world.passed(), [0, 1]);
    // Without the limit there is nothing to wait for.
    world.limiter.reload(LimitSet::new([]), world.now).unwrap();
    world.settle();
    assert_eq!(world.passed(), [0, 1, 2]);
    assert_eq!(world.times(), [10, 10, 10]);
    world.assert_clean();
}

#[test]
fn whose_time_is_up_is_refused_also_from_the_middle() {
    let mut world = World::new(limiter([pacing("p", "10/s", 1)]));
    for asked in [9000, 9000, 250, 9000] {
        world.come_for(get(), Some(Duration::from_millis(asked)));
    }
    // Slower from now on, so that what was reckoned does not hold.
    let slower = LimitSet::new([Limit::new(pacing("p", "1/s", 1))]);
    world.limiter.reload(slower, world.now).unwrap();
    world.settle();
    world.pass(5 * SECOND);
    assert_eq!(world.refused, [(2, NOW.plus(Duration::from_millis(250)))]);
    assert_eq!(world.times(), [0, 1000, 2000]);
    world.limiter.store().for_each(|_, slot| assert_eq!((slot.admitted, slot.refused), (3, 1)));
    world.assert_clean();
}

#[test]
fn a_bucket_where_requests_wait_does_not_go() {
    let spec = keyed(pacing("p", "1/s", 1), Source::Header("x-k".into()));
    let mut world = World::new(with_room([spec], 1));
    let from = |key: &str| get().with_header("x-k", key);
    world.come(from("a"));
    world.come(from("a"));
    world.limiter.expire(Duration::ZERO, world.now.plus(9 * SECOND));
    assert_eq!(world.limiter.store().len(), 1);
    world.pass(3 * SECOND);
    assert_eq!(world.passed(), [0, 1]);
    world.assert_clean();
    assert_eq!(world.limiter.expire(Duration::ZERO, world.now.plus(9 * SECOND)), 1);
}

#[test]
fn with_several_limits_all_must_have_room_and_nothing_is_held_meanwhile() {
    let mut world = World::new(limiter([pacing("a", "10/s", 1), pacing("b", "4/s", 1)]));
    for _ in 0..4 {
        world.come(get());
    }
    world.limiter.store().for_each(|_, slot| assert_eq!((slot.held(), slot.spent), (0, 1_000_000)));
    world.pass(2 * SECOND);
    assert_eq!(world.passed(), [0, 1, 2, 3]);
    assert_eq!(world.times(), [0, 250, 500, 750]);
    world.assert_clean();
}

#[test]
fn one_whose_own_bucket_is_empty_does_not_keep_the_shared_one_from_others() {
    let own = keyed(pacing("own", "1/s", 1), Source::Header("x-k".into()));
    let mut world = World::new(limiter([pacing("all", "100/s", 1), own]));
    let from = |key: &str| get().with_header("x-k", key);
    // Five of one client, while the shared bucket is the scarcer.
    for _ in 0..5 {
        world.come(from("noisy"));
    }
    for client in 0..20 {
        world.come(from(&format!("c{client}")));
    }
    world.pass(Duration::from_millis(300));
    let others = world.passed().into_iter().filter(|name| *name >= 5).count();
    assert_eq!(others, 20, "{:?}", world.passed);
    world.pass(5 * SECOND);
    assert_eq!(world.passed.len(), 25);
    world.assert_clean();
}

#[test]
fn one_that_needs_two_contended_buckets_is_not_starved() {
    let on = |spec: LimitSpec, header: &str| {
        let mut spec = LimitSpec { max_wait: 60 * SECOND, ..spec };
        spec.rule.condition.headers = vec![(header.into(), "1".into())];
        spec
    };
    let mut world =
        World::new(limiter([on(limit("a", "10/s", 1), "a"), on(limit("b", "10/s", 1), "b")]));
    let (a, b) = (|| get().with_header("a", "1"), || get().with_header("b", "1"));
    let both = || get().with_header("a", "1").with_header("b", "1");
    // The two refill at different moments.
    world.come(a());
    world.pass(Duration::from_millis(50));
    world.come(b());
    let name = world.come(both());
    for _ in 0..100 {
        world.come(a());
        world.come(b());
        world.pass(Duration::from_millis(20));
    }
    let at = world.passed.iter().find(|(passed, _)| *passed == name).map(|(_, at)| *at);
    let waited = at.expect("it passed").since(NOW);
    assert!(waited < SECOND, "{waited:?}");
}

proptest! {
    /// Whatever comes and goes: no window admits more than burst and refill, the
    /// order of coming is kept in each bucket, nobody waits longer than allowed,
    /// and in the end nothing is left behind.
    #[test]
    fn pacing_keeps_the_limit_and_the_order(
        burst in 1u64..5,
        rate in 1u64..50,
        steps in prop::collection::vec((0u64..120, 0u8..8, 0u64..3000), 1..150),
    ) {
        let quota = Quota::try_new(format!("{rate}/s").parse().unwrap(), burst).unwrap();
        let mut spec = pacing("p", &format!("{rate}/s"), burst);
        spec.max_wait = 2 * SECOND;
        let mut world = World::new(limiter([spec]));
        let mut came = Vec::new();
        for (millis, what, asked) in steps {
            world.pass(Duration::from_millis(millis));
            match what {
                0 => {
                    let middle = world.guests.len() / 2;
                    if let Some(name) = world.guests.get(middle).map(|guest| guest.name) {
                        world.leave(name);
                    }
                }
                1 => came.push((world.come_for(get(), Some(Duration::from_millis(asked))), world.now)),
                _ => came.push((world.come(get()), world.now)),
            }
        }
        world.pass(3 * SECOND);
        world.assert_clean();
        let names = world.passed();
        prop_assert!(names.is_sorted(), "{:?}", names);
        let mut bucket = TokenBucket::full(&quota, NOW);
        for (name, at) in &world.passed {
            bucket.advance(&quota, *at);
            prop_assert!(bucket.try_take(tokens(1)), "{} at {:?}", name, at);
        }
        for (name, at) in world.passed.iter().chain(&world.refused) {
            let (_, when) = came.iter().find(|(other, _)| other == name).unwrap();
            prop_assert!(at.since(*when) <= 2 * SECOND);
        }
        world.limiter.store().for_each(|_, slot| {
            assert_eq!(slot.admitted as usize, world.passed.len());
            assert_eq!(slot.refused as usize, world.refused.len());
        });
    }

    /// The same with two limits: whoever comes first to both passes first, and
    /// both limits hold.
    #[test]
    fn pacing_by_two_limits_keeps_both(
        rates in prop::array::uniform2((1u64..40, 1u64..4)),
        steps in prop::collection::vec((0u64..60, 0u8..4), 1..120),
    ) {
        let specs = ["a", "b"].iter().zip(rates).map(|(name, (rate, burst))| {
            let mut spec = pacing(name, &format!("{rate}/s"), burst);
            spec.rule.condition.headers = vec![((*name).into(), "1".into())];
            spec
        });
        let mut world = World::new(limiter(specs));
        let mut of = Vec::new();
        for (millis, what) in steps {
            world.pass(Duration::from_millis(millis));
            let (a, b) = [(true, false), (false, true), (true, true), (true, true)][usize::from(what)];
            let mut request = get();
            for (name, _) in [("a", a), ("b", b)].iter().filter(|(_, on)| *on) {
                request = request.with_header(name, "1");
            }
            of.push((a, b));
            world.come(request);
        }
        world.pass(12 * SECOND);
        world.assert_clean();
        for (limit, (rate, burst)) in rates.into_iter().enumerate() {
            let quota = Quota::try_new(format!("{rate}/s").parse().unwrap(), burst).unwrap();
            let mut bucket = TokenBucket::full(&quota, NOW);
            for (name, at) in &world.passed {
                let (a, b) = of[*name];
                if if limit == 0 { a } else { b } {
                    bucket.advance(&quota, *at);
                    prop_assert!(bucket.try_take(tokens(1)));
                }
            }
        }
    }
}

#[test]
fn what_an_upstream_says_is_left_takes_the_rest_and_never_gives() {
    let limiter = Limiter::new(LimitSet::new([Limit::new(pacing("p", "1/h", 5))]), 10, Alone);
    let request = FakeRequest::get("/");
    let check = limiter.decide(&request, NOW).checks[0];
    let level = || limiter.store().with_existing(check.bucket, |s| s.bucket.level().whole());
    assert_eq!(level(), Some(4));
    for (left, then) in [(9, 4), (4, 4), (2, 2), (3, 2), (0, 0)] {
        limiter.debit(check.bucket, Tokens::from_whole(left).unwrap(), NOW);
        assert_eq!(level(), Some(then), "{left}");
    }
    let spent = limiter.store().with_existing(check.bucket, |slot| slot.net());
    assert_eq!(spent, Some(5_000_000), "peers are told");
}

#[test]
fn who_waits_again_has_the_age_that_it_had() {
    let limiter = Limiter::new(LimitSet::new([Limit::new(pacing("p", "1/s", 1))]), 10, Alone);
    let mut world = World::new(limiter);
    world.come(FakeRequest::get("/"));
    let first = world.limiter.ticket();
    let second = world.come(FakeRequest::get("/"));
    assert_eq!(world.limiter.waiting(), 1);
    // What was sent comes back: it is older than the one that waits.
    let mut again = world.limiter.hold_again(first, NOW.plus(10 * SECOND), NOW).unwrap();
    let waker = Waker::from(Arc::<Bell>::default());
    let request = FakeRequest::get("/");
    let due = NOW.plus(SECOND);
    let turn = world.limiter.try_again(&mut again, &request, &waker, NOW);
    assert!(matches!(turn, Turn::Waits(Some(at)) if at == due), "{turn:?}");
    let guest = &mut world.guests[0];
    assert!(world.limiter.is_turn(&mut guest.waiter, &waker, due).is_err());
    // Who steps aside lets the next pass, and comes back to where it was.
    assert!(world.limiter.is_turn(&mut again, &waker, due).is_ok());
    world.limiter.step_aside(&mut again, due);
    assert_eq!(world.limiter.waiting(), 2);
    assert!(world.limiter.is_turn(&mut world.guests[0].waiter, &waker, due).is_ok());
    let turn = world.limiter.try_again(&mut again, &request, &waker, due);
    assert!(matches!(turn, Turn::Settled(decision) if decision.is_admitted()));
    world.leave(second);
    assert_eq!(world.limiter.waiting(), 0);
}

#[test]
fn the_wait_of_a_route_holds_for_limits_that_name_the_upstream() {
    let mut routed = pacing("routed", "1/s", 1);
    routed.rule.condition.upstream = Some("acme".into());
    let own = LimitSpec { max_wait: SECOND, ..limit("own", "1/min", 2) };
    let limits = LimitSet::new([Limit::new(routed), Limit::new(own)]);
    let limiter = Limiter::new(limits, 10, Alone);
    let request = || FakeRequest::get("/").routed_to("acme");
    assert!(limiter.decide(&request(), NOW).is_admitted());
    let decision = limiter.decide(&request(), NOW);
    let patience = |route, asked| match limiter.outlook_on(route, &decision, asked) {
        Outlook::Waits { patience, .. } => Some(patience),
        Outlook::Settled | Outlook::Crowded { .. } => None,
    };
    assert_eq!(patience(None, None), Some(10 * SECOND));
    assert_eq!(patience(Some(5 * SECOND), None), Some(5 * SECOND));
    assert_eq!(patience(Some(60 * SECOND), Some(2 * SECOND)), Some(2 * SECOND));
    assert_eq!(patience(Some(Duration::ZERO), None), None);
    // The other limit keeps its own.
    let later = NOW.plus(2 * SECOND);
    assert!(limiter.decide(&request(), later).is_admitted());
    let decision = limiter.decide(&request(), later.plus(2 * SECOND));
    assert_eq!(limiter.outlook_on(Some(60 * SECOND), &decision, None), Outlook::Settled);
}
