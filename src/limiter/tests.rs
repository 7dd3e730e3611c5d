use std::sync::atomic::{AtomicUsize, Ordering};

use super::testing::FakeRequest;
use super::*;

fn tokens(whole: u64) -> Tokens {
    Tokens::from_whole(whole).unwrap()
}

fn limit(name: &str, rate: &str, burst: u64) -> LimitSpec {
    LimitSpec::new(name, Rule::default(), Quota::try_new(rate.parse().unwrap(), burst).unwrap())
}

fn on_path(mut spec: LimitSpec, path: &str) -> LimitSpec {
    spec.rule.condition.path = Some(PathPattern::try_new(path).unwrap());
    spec
}

fn keyed(mut spec: LimitSpec, source: Source) -> LimitSpec {
    spec.rule.key = vec![KeyPart::new(source, false)];
    spec
}

fn limiter(specs: impl IntoIterator<Item = LimitSpec>) -> Limiter<Alone> {
    with_room(specs, 1_000_000)
}

fn with_room(specs: impl IntoIterator<Item = LimitSpec>, max_buckets: usize) -> Limiter<Alone> {
    Limiter::new(LimitSet::new(specs.into_iter().map(Limit::new)), max_buckets, Alone)
}

fn admitted(
    limiter: &Limiter<Alone>,
    request: &FakeRequest,
    count: usize,
    now: Timestamp,
) -> usize {
    (0..count).filter(|_| limiter.decide(request, now).is_admitted()).count()
}

const NOW: Timestamp = Timestamp::from_millis(1_000_000);

#[test]
fn ba_g7_a_refused_request_takes_nothing() {
    let mut big = on_path(limit("work", "10/10s", 10), "/big");
    big.cost = tokens(5).into();
    let limiter = limiter([big]);
    let request = FakeRequest::get("/big");
    assert_eq!(admitted(&limiter, &request, 22, NOW), 2);
    // Half of the cost came back; refusals in between took none of it.
    let later = NOW.plus(Duration::from_millis(2500));
    let decision = limiter.decide(&request, later);
    assert!(!decision.is_admitted());
    assert_eq!(decision.checks[0].level, Tokens::from_micros(2_500_000));
    assert_eq!(decision.checks[0].due, Due::In(2_500_000_000));
}

#[test]
fn ba_g8_concurrent_requests_share_the_last_tokens_exactly() {
    for round in 0..50 {
        let limiter = limiter([keyed(limit("k", "5/h", 5), Source::Header("x-k".into()))]);
        let passed = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let request = FakeRequest::get("/").with_header("x-k", &round.to_string());
                    passed.fetch_add(admitted(&limiter, &request, 25, NOW), Ordering::Relaxed);
                });
            }
        });
        assert_eq!(passed.into_inner(), 5);
    }
}

#[test]
fn several_limits_under_contention_never_leak_a_hold() {
    let limiter =
        limiter([limit("a", "100/h", 100), limit("b", "40/h", 40), limit("c", "70/h", 70)]);
    let passed = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                passed.fetch_add(
                    admitted(&limiter, &FakeRequest::get("/"), 500, NOW),
                    Ordering::Relaxed,
                );
            });
        }
    });
    assert_eq!(passed.into_inner(), 40);
    let limits = limiter.limits();
    limiter.store().for_each(|id, slot| {
        assert_eq!(slot.held(), 0);
        assert_eq!(slot.spent, 40_000_000);
        let quota = limits.get(slot.limit).unwrap().quota(id);
        assert_eq!(slot.bucket.level(), quota.burst().minus(tokens(40)));
    });
}

#[test]
fn ba_g10_all_limits_or_none() {
    let limiter = limiter([limit("s", "2/s", 2), limit("l", "10/h", 10)]);
    let request = FakeRequest::get("/");
    assert_eq!(admitted(&limiter, &request, 40, NOW), 2);
    let decision = limiter.decide(&request, NOW);
    assert_eq!(decision.verdict, Verdict::Refused(0));
    assert_eq!(decision.checks[0].outcome, Outcome::Refused);
    assert_eq!(decision.checks[1].outcome, Outcome::NotCharged);
    assert_eq!(decision.checks[1].level, tokens(8));
    let later = NOW.plus(Duration::from_millis(1100));
    assert_eq!(admitted(&limiter, &request, 40, later), 2);
}

#[test]
fn ba_g11_every_matching_limit_must_have_room() {
    let limiter = limiter([limit("default", "1/s", 1), on_path(limit("p1", "100/s", 100), "/p1")]);
    assert_eq!(admitted(&limiter, &FakeRequest::get("/p1"), 10, NOW), 1);
    let decision = limiter.decide(&FakeRequest::get("/p1"), NOW);
    assert_eq!(decision.refusal().unwrap().limit, LimitIndex(0));
    let later = NOW.plus(Duration::from_secs(2));
    assert_eq!(admitted(&limiter, &FakeRequest::get("/other"), 3, later), 1);
}

#[test]
fn the_refusal_named_is_the_one_that_is_due_last() {
    let limiter = limiter([limit("short", "1/s", 1), limit("long", "1/h", 1)]);
    let request = FakeRequest::get("/");
    assert_eq!(admitted(&limiter, &request, 1, NOW), 1);
    let decision = limiter.decide(&request, NOW);
    assert_eq!(decision.refusal().unwrap().limit, LimitIndex(1));
}

#[test]
fn kx_g10_equal_limits_have_buckets_of_their_own() {
    let limiter = limiter([
        on_path(keyed(limit("a", "3/min", 3), Source::ClientIp), "/a"),
        on_path(keyed(limit("b", "3/min", 3), Source::ClientIp), "/b"),
    ]);
    for path in ["/a", "/b"] {
        let decision = limiter.decide(&FakeRequest::get(path), NOW);
        assert_eq!(decision.checks[0].level, tokens(2));
    }
}

#[test]
fn kx_g3_the_configured_source_is_the_only_one() {
    let limiter = limiter([keyed(limit("t", "2/min", 2), Source::Header("x-tenant".into()))]);
    for tenant in ["a", "b", "c"] {
        let request = FakeRequest::get("/").with_header("x-tenant", tenant);
        assert_eq!(admitted(&limiter, &request, 3, NOW), 2);
    }
    let elsewhere = FakeRequest::get("/").with_header("x-tenant", "a").from("127.0.0.3");
    assert_eq!(admitted(&limiter, &elsewhere, 3, NOW), 0);
}

#[test]
fn shadow_limits_count_but_never_refuse() {
    let mut shadow = limit("dry", "5/h", 5);
    shadow.mode = Mode::Shadow;
    let limiter = limiter([shadow]);
    let request = FakeRequest::get("/");
    let mut would_refuse = 0;
    for _ in 0..100 {
        let decision = limiter.decide(&request, NOW);
        assert!(decision.is_admitted());
        would_refuse += u32::from(decision.checks[0].outcome == Outcome::ShadowRefused);
    }
    assert_eq!(would_refuse, 95);
}

#[test]
fn a_shadow_limit_is_not_charged_for_what_another_refuses() {
    let mut shadow = limit("dry", "50/h", 50);
    shadow.mode = Mode::Shadow;
    let limiter = limiter([shadow, limit("real", "2/h", 2)]);
    let request = FakeRequest::get("/");
    assert_eq!(admitted(&limiter, &request, 10, NOW), 2);
    let decision = limiter.decide(&request, NOW);
    assert_eq!(decision.checks[0].outcome, Outcome::NotCharged);
    assert_eq!(decision.checks[0].level, tokens(48));
}

#[test]
fn a_refund_gives_back_once_and_never_above_the_burst() {
    let limiter = limiter([limit("a", "5/h", 5), limit("b", "9/h", 9)]);
    let request = FakeRequest::get("/");
    let decision = limiter.decide(&request, NOW);
    limiter.refund(&decision, NOW);
    let after = limiter.decide(&request, NOW);
    assert_eq!(after.checks[0].level, tokens(4));
    assert_eq!(after.checks[1].level, tokens(8));
    let later = NOW.plus(Duration::from_secs(7200));
    limiter.refund(&after, later);
    assert_eq!(limiter.decide(&request, later).checks[0].level, tokens(4));
    // A bucket that was dropped meanwhile has nothing to give back.
    let gone = limiter.decide(&request, later);
    let much_later = later.plus(Duration::from_secs(86_400));
    assert_eq!(limiter.expire(Duration::from_secs(10), much_later), 2);
    limiter.refund(&gone, much_later);
    assert!(limiter.store().is_empty());
}

#[test]
fn a_blocked_limit_refuses_for_ever() {
    let limiter = limiter([limit("blocked", "0/s", 0)]);
    let decision = limiter.decide(&FakeRequest::get("/"), NOW);
    assert_eq!(decision.refusal().unwrap().due, Due::Never);
}

#[test]
fn overrides_change_the_quota_of_one_bucket() {
    let mut spec = keyed(limit("o", "2/h", 2), Source::ClientIp);
    let key = spec.rule.key_from_text(&["203.0.113.7"], 64).unwrap();
    let id = Limit::seed(&spec.name, &spec.rule).id(key.as_bytes());
    spec.overrides.insert(id, Quota::try_new("7/h".parse().unwrap(), 7).unwrap());
    let limiter = limiter([spec]);
    assert_eq!(admitted(&limiter, &FakeRequest::get("/").from("203.0.113.7"), 10, NOW), 7);
    assert_eq!(admitted(&limiter, &FakeRequest::get("/").from("203.0.113.8"), 10, NOW), 2);
}

#[test]
fn a_denied_missing_part_charges_nothing() {
    let mut strict = keyed(limit("strict", "5/h", 5), Source::Header("x-k".into()));
    strict.rule.missing = Missing::Deny;
    let limiter = limiter([limit("all", "5/h", 5), strict]);
    let decision = limiter.decide(&FakeRequest::get("/"), NOW);
    assert_eq!(decision.verdict, Verdict::MissingPart { limit: LimitIndex(1), part: 0 });
    assert!(limiter.store().is_empty());
}

#[test]
fn only_full_and_idle_buckets_expire() {
    let limiter = limiter([keyed(limit("k", "1/min", 2), Source::ClientIp)]);
    let idle = Duration::from_secs(10);
    admitted(&limiter, &FakeRequest::get("/").from("10.0.0.1"), 1, NOW);
    admitted(&limiter, &FakeRequest::get("/").from("10.0.0.2"), 2, NOW);
    assert_eq!(limiter.expire(idle, NOW.plus(Duration::from_secs(9))), 0);
    assert_eq!(limiter.expire(idle, NOW.plus(Duration::from_secs(59))), 0);
    assert_eq!(limiter.expire(idle, NOW.plus(Duration::from_secs(61))), 1);
    assert_eq!(limiter.store().len(), 1);
    assert_eq!(limiter.expire(idle, NOW.plus(Duration::from_secs(121))), 1);
}

#[test]
fn me_g2_a_flood_of_keys_leaves_newcomers_served_and_memory_bounded() {
    let limiter = with_room([keyed(limit("k", "5/s", 5), Source::Header("x-k".into()))], 1000);
    let mut now = NOW;
    for i in 0..3000 {
        now = now.plus(Duration::from_millis(1));
        limiter.decide(&FakeRequest::get("/").with_header("x-k", &format!("flood{i}")), now);
        assert!(limiter.store().len() <= 1000);
    }
    assert_eq!(limiter.evictions().0 + limiter.evictions().1, 2000);
    let served = (0..100)
        .filter(|i| {
            let request = FakeRequest::get("/").with_header("x-k", &format!("honest{i}"));
            limiter.decide(&request, now).is_admitted()
        })
        .count();
    assert!(served >= 99, "{served}");
}

#[test]
fn more_buckets_than_allowed_do_not_stay() {
    let limiter = with_room([keyed(limit("k", "5/s", 5), Source::Header("x-k".into()))], 10);
    let quota = Quota::try_new("5/s".parse().unwrap(), 5).unwrap();
    // Threads that made buckets at the same moment, each for the last place.
    for i in 0..13 {
        let full = || TokenBucket::full(&quota, NOW);
        limiter.store().with(BucketId::from_bytes([i; 16]), LimitIndex(0), None, full, |_| ());
    }
    limiter.decide(&FakeRequest::get("/").with_header("x-k", "next"), NOW);
    assert_eq!(limiter.store().len(), 10);
}

#[test]
fn buckets_that_must_stay_do_not_keep_others_from_going() {
    let limiter = with_room([keyed(limit("k", "5/s", 5), Source::Header("x-k".into()))], 31);
    let quota = Quota::try_new("5/s".parse().unwrap(), 5).unwrap();
    // Far more than a sample in front, then one that nobody needs.
    for i in 0..31 {
        let full = || TokenBucket::full(&quota, NOW);
        limiter.store().with(BucketId::from_bytes([i; 16]), LimitIndex(0), None, full, |slot| {
            if i < 30 {
                slot.hold(1);
            }
        });
    }
    for i in 0..100 {
        limiter.decide(&FakeRequest::get("/").with_header("x-k", &i.to_string()), NOW);
        assert_eq!(limiter.store().len(), 31);
    }
}

#[test]
fn an_evicted_key_never_comes_back_fresh() {
    let limiter = with_room([keyed(limit("k", "5/h", 5), Source::Header("x-k".into()))], 50);
    let exhausted = FakeRequest::get("/").with_header("x-k", "exhausted");
    assert_eq!(admitted(&limiter, &exhausted, 10, NOW), 5);
    // A flood in which every bucket is spent to the last: nothing fuller than
    // the exhausted one is left to go.
    for i in 0..500 {
        admitted(&limiter, &FakeRequest::get("/").with_header("x-k", &format!("f{i}")), 5, NOW);
    }
    assert_eq!(admitted(&limiter, &exhausted, 10, NOW), 0);
    // The floor refills at the rate: an hour later it is forgotten.
    let later = NOW.plus(Duration::from_secs(3600));
    assert_eq!(admitted(&limiter, &exhausted, 10, later), 5);
}

#[test]
fn fuller_buckets_go_first() {
    let limiter = with_room([keyed(limit("k", "5/h", 5), Source::Header("x-k".into()))], 8);
    let key = |name: &str| FakeRequest::get("/").with_header("x-k", name);
    assert_eq!(admitted(&limiter, &key("spent"), 5, NOW), 5);
    for i in 0..200 {
        admitted(&limiter, &key(&format!("f{i}")), 1, NOW);
    }
    assert_eq!(admitted(&limiter, &key("spent"), 5, NOW), 0);
    assert_eq!(limiter.store().len(), 8);
}

mod reload;
mod waiting;

#[test]
fn me_g1_keys_used_once_leave_and_give_their_memory_back() {
    let limiter = limiter([keyed(limit("k", "5/s", 5), Source::Header("x-k".into()))]);
    for i in 0..100_000 {
        limiter.decide(&FakeRequest::get("/").with_header("x-k", &i.to_string()), NOW);
    }
    assert_eq!(limiter.store().len(), 100_000);
    let later = NOW.plus(Duration::from_secs(20));
    assert_eq!(limiter.expire(Duration::from_secs(5), later), 100_000);
    assert!(limiter.store().capacity() < 10_000, "{}", limiter.store().capacity());
}
