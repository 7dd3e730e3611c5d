//! Limits that change while requests are decided.

use std::sync::atomic::AtomicBool;

use super::*;

fn set(specs: impl IntoIterator<Item = LimitSpec>) -> LimitSet {
    LimitSet::new(specs.into_iter().map(Limit::new))
}

fn by_header(spec: LimitSpec) -> LimitSpec {
    keyed(spec, Source::Header("x-key".into()))
}

fn from_key(key: &str) -> FakeRequest {
    FakeRequest::get("/").with_header("x-key", key)
}

/// The remaining tokens and the burst that the next decision would tell.
fn state(limiter: &Limiter<Alone>, now: Timestamp) -> (u64, u64) {
    let mut states = Vec::new();
    limiter.store().for_each(|id, slot| {
        let (bucket, quota) = limiter.level(id, slot, now).unwrap();
        assert!(bucket.is_valid(&quota));
        states.push((bucket.level().whole(), quota.burst().whole()));
    });
    assert_eq!(states.len(), 1);
    states[0]
}

#[test]
fn cf_g7_a_reload_that_changes_nothing_gives_nothing_back() {
    let request = FakeRequest::get("/a");
    let specs = || on_path(limit("r", "3/h", 3), "/a");
    let limiter = limiter([specs()]);
    assert_eq!(admitted(&limiter, &request, 4, NOW), 3);
    for _ in 0..20 {
        limiter.reload(set([specs()]), NOW).unwrap();
        assert_eq!(admitted(&limiter, &request, 1, NOW), 0);
    }
    let other = |burst| on_path(limit("other", "9/h", burst), "/b");
    for burst in [9, 5] {
        // In front of it, so that the order changes too.
        limiter.reload(set([other(burst), specs()]), NOW).unwrap();
        assert_eq!(admitted(&limiter, &request, 1, NOW), 0);
    }
    limiter.reload(set([specs()]), NOW).unwrap();
    assert_eq!(admitted(&limiter, &request, 1, NOW), 0);
}

#[test]
fn cf_g8_a_new_quota_holds_at_once_also_for_keys_already_denied() {
    let request = FakeRequest::get("/");
    let limiter = limiter([limit("r", "2/h", 2)]);
    assert_eq!(admitted(&limiter, &request, 3, NOW), 2);
    limiter.reload(set([limit("r", "10/h", 10)]), NOW).unwrap();
    let decision = limiter.decide(&request, NOW);
    assert!(decision.is_admitted());
    assert_eq!(decision.checks[0].quota.burst(), tokens(10));
    assert_eq!(decision.checks[0].level, tokens(7), "two and one are spent");
    limiter.reload(set([limit("r", "1/h", 1)]), NOW).unwrap();
    let decision = limiter.decide(&request, NOW);
    assert!(!decision.is_admitted());
    assert_eq!(decision.checks[0].quota.burst(), tokens(1));
    assert!(decision.checks[0].level <= tokens(1));
}

#[test]
fn ad_g1_the_listing_follows_the_limit_in_force() {
    let request = FakeRequest::get("/");
    let limiter = limiter([limit("r", "5/h", 5)]);
    assert_eq!(admitted(&limiter, &request, 5, NOW), 5);
    limiter.reload(set([limit("r", "50/h", 50)]), NOW).unwrap();
    assert_eq!(state(&limiter, NOW), (45, 50));
    assert_eq!(admitted(&limiter, &request, 20, NOW), 20);
    assert_eq!(state(&limiter, NOW), (25, 50));
    limiter.reload(set([limit("r", "3/h", 3)]), NOW).unwrap();
    for _ in 0..100 {
        assert_eq!(state(&limiter, NOW), (0, 3));
    }
}

#[test]
fn cf_g2_keys_in_use_survive_a_reload_under_load() {
    let quota = |n: u64| by_header(limit("r", &format!("{n}/min"), n));
    let limiter = limiter([quota(5)]);
    let stop = AtomicBool::new(false);
    let keys: Vec<String> = (0..50).map(|i| format!("k{i}")).collect();
    std::thread::scope(|scope| {
        for worker in 0..2 {
            let (limiter, stop, keys) = (&limiter, &stop, &keys);
            scope.spawn(move || {
                let mut turn = worker;
                while !stop.load(Ordering::Relaxed) {
                    limiter.decide(&from_key(&keys[turn % keys.len()]), NOW);
                    turn += 1;
                }
            });
        }
        for round in 0..200 {
            limiter.reload(set([quota(if round % 2 == 0 { 2 } else { 5 })]), NOW).unwrap();
        }
        limiter.reload(set([quota(2)]), NOW).unwrap();
        stop.store(true, Ordering::Relaxed);
    });
    // The clock stood still, so a key never had more than the larger burst, and
    // each smaller one took nothing that was not spent.
    limiter.store().for_each(|id, slot| {
        let (bucket, quota) = limiter.level(id, slot, NOW).unwrap();
        assert_eq!(quota.burst(), tokens(2));
        assert!(bucket.is_valid(&quota) && bucket.level() >= Tokens::ZERO);
    });
    for key in &keys {
        let left = limiter.decide(&from_key(key), NOW);
        assert!(left.checks[0].level <= tokens(2));
    }
    assert_eq!(admitted(&limiter, &from_key("fresh"), 5, NOW), 2);
}

#[test]
fn a_rate_counts_from_the_reload_on() {
    let request = FakeRequest::get("/");
    let limiter = limiter([limit("r", "1/s", 10)]);
    assert_eq!(admitted(&limiter, &request, 10, NOW), 10);
    let reloaded = NOW.plus(Duration::from_secs(2));
    limiter.reload(set([limit("r", "3/s", 10)]), reloaded).unwrap();
    assert_eq!(admitted(&limiter, &request, 10, reloaded.plus(Duration::from_secs(1))), 5);
}

#[test]
fn an_override_that_comes_and_goes_keeps_the_deficit() {
    let plain = || by_header(limit("r", "5/h", 5));
    let request = from_key("vip");
    let with_override = || {
        let mut spec = plain();
        let id = {
            let key = spec.rule.key_from_text(&["vip"], 64).unwrap();
            Limit::seed("r", &spec.rule).id(key.as_bytes())
        };
        spec.overrides.insert(id, Quota::try_new("100/h".parse().unwrap(), 100).unwrap());
        spec
    };
    let limiter = limiter([plain()]);
    assert_eq!(admitted(&limiter, &request, 6, NOW), 5);
    limiter.reload(set([with_override()]), NOW).unwrap();
    assert_eq!(state(&limiter, NOW), (95, 100));
    assert_eq!(admitted(&limiter, &request, 1, NOW), 1);
    limiter.reload(set([plain()]), NOW).unwrap();
    assert_eq!(state(&limiter, NOW), (0, 5));
    assert_eq!(admitted(&limiter, &from_key("other"), 6, NOW), 5);
}

#[test]
fn a_renamed_limit_adopts_the_buckets_of_its_first_name() {
    let request = FakeRequest::get("/");
    let limiter = limiter([limit("old", "3/h", 3), on_path(limit("x", "1/h", 1), "/x")]);
    assert_eq!(admitted(&limiter, &request, 2, NOW), 2);
    let renamed = || LimitSpec { was: Some("old".into()), ..limit("new", "3/h", 3) };
    limiter.reload(set([renamed()]), NOW).unwrap();
    assert_eq!(admitted(&limiter, &request, 2, NOW), 1);
    let limits = limiter.limits();
    let (index, new) = limits.find("new").unwrap();
    assert_eq!((index, new.identity()), (LimitIndex(0), "old"));
    assert!(limits.find("old").is_none());
    // Renamed once more, it still names its first name.
    let again = LimitSpec { name: "newer".into(), ..renamed() };
    limiter.reload(set([again]), NOW).unwrap();
    assert_eq!(admitted(&limiter, &request, 1, NOW), 0);
    // Without the word it is another limit.
    limiter.reload(set([limit("newer", "3/h", 3)]), NOW).unwrap();
    assert_eq!(admitted(&limiter, &request, 4, NOW), 3);
}

#[test]
fn a_limit_that_is_gone_leaves_its_index_and_takes_its_buckets() {
    let (a, b, c) = ("/a", "/b", "/c");
    let of = |name: &str, path| on_path(limit(name, "3/h", 3), path);
    let limiter = limiter([of("a", a), of("b", b)]);
    for path in [a, b] {
        assert_eq!(admitted(&limiter, &FakeRequest::get(path), 3, NOW), 3);
    }
    limiter.reload(set([of("c", c), of("b", b)]), NOW).unwrap();
    assert_eq!(limiter.store().len(), 1);
    let names: Vec<(u16, String)> =
        limiter.limits().iter().map(|(index, limit)| (index.0, limit.name().into())).collect();
    assert_eq!(names, [(2, "c".into()), (1, "b".into())], "in the order of the file");
    assert_eq!(
        limiter.limits().places().map(|limit| limit.map(Limit::name)).collect::<Vec<_>>(),
        [None, Some("b"), Some("c")]
    );
    assert_eq!(admitted(&limiter, &FakeRequest::get(b), 1, NOW), 0);
    assert_eq!(admitted(&limiter, &FakeRequest::get(c), 4, NOW), 3);
    limiter.reload(set([of("a", a)]), NOW).unwrap();
    assert_eq!(limiter.limits().find("a").unwrap().0, LimitIndex(0));
    assert_eq!(admitted(&limiter, &FakeRequest::get(a), 4, NOW), 3);
}

#[test]
fn other_key_parts_are_another_limit() {
    let limiter = limiter([limit("r", "3/h", 3)]);
    assert_eq!(admitted(&limiter, &from_key("k"), 3, NOW), 3);
    limiter.reload(set([by_header(limit("r", "3/h", 3))]), NOW).unwrap();
    assert!(limiter.store().is_empty());
    assert_eq!(limiter.limits().find("r").unwrap().0, LimitIndex(1));
    assert_eq!(admitted(&limiter, &from_key("k"), 4, NOW), 3);
}

#[test]
fn a_shadow_limit_that_begins_to_enforce_keeps_its_buckets() {
    let request = FakeRequest::get("/");
    let mode = |mode| LimitSpec { mode, ..limit("r", "3/h", 3) };
    let limiter = limiter([mode(Mode::Shadow)]);
    assert_eq!(admitted(&limiter, &request, 10, NOW), 10);
    limiter.reload(set([mode(Mode::Enforce)]), NOW).unwrap();
    assert_eq!(admitted(&limiter, &request, 1, NOW), 0);
    limiter.reload(set([mode(Mode::Shadow)]), NOW).unwrap();
    assert_eq!(limiter.decide(&request, NOW).checks[0].outcome, Outcome::ShadowRefused);
}

#[test]
fn a_request_admitted_before_a_reload_gets_its_tokens_back_after_it() {
    let request = FakeRequest::get("/");
    let priced = |cost, burst| LimitSpec {
        cost: tokens(cost).into(),
        ..limit("r", &format!("{burst}/h"), burst)
    };
    let limiter = limiter([priced(2, 5)]);
    let first = limiter.decide(&request, NOW);
    let second = limiter.decide(&request, NOW);
    limiter.reload(set([priced(1, 50)]), NOW).unwrap();
    assert_eq!(state(&limiter, NOW), (46, 50));
    limiter.refund(&first, NOW);
    assert_eq!(state(&limiter, NOW), (48, 50));
    limiter.reload(set([priced(1, 1)]), NOW).unwrap();
    assert_eq!(state(&limiter, NOW), (0, 1));
    limiter.refund(&second, NOW);
    assert_eq!(state(&limiter, NOW), (1, 1));
    limiter.reload(set([]), NOW).unwrap();
    limiter.refund(&second, NOW);
    assert!(limiter.store().is_empty());
}

#[test]
fn whoever_still_goes_by_older_limits_uses_the_quota_in_force() {
    let limiter = limiter([limit("r", "5/h", 5)]);
    let request = FakeRequest::get("/");
    assert_eq!(admitted(&limiter, &request, 5, NOW), 5);
    let old = limiter.limits();
    let (index, limit_of_old) = old.find("r").unwrap();
    let id = limit_of_old.bucket_id(&[]);
    let look = |limiter: &Limiter<Alone>| {
        limiter.with_quota(id, index, limit_of_old, None, NOW, |slot, quota| {
            slot.bucket.advance(quota, NOW.plus(Duration::from_secs(1)));
            (slot.bucket.level().whole(), quota.burst())
        })
    };
    limiter.reload(set([limit("r", "50/h", 50)]), NOW).unwrap();
    assert_eq!(look(&limiter), (45, tokens(50)));
    // A bucket that is made by the older limits meanwhile is passed on as well.
    limiter.store().retain(|_, _| false);
    limiter.with_bucket(id, index, limit_of_old, None, NOW, |slot| {
        assert_eq!(slot.bucket.level(), tokens(5));
    });
    assert_eq!(admitted(&limiter, &request, 60, NOW), 50);
    assert_eq!(look(&limiter), (0, tokens(50)));
    limiter.reload(set([]), NOW).unwrap();
    assert_eq!(look(&limiter).1, tokens(5), "nothing else is known of it");
    assert_eq!(limiter.expire(Duration::from_secs(3600), NOW), 1);
}

#[test]
fn a_floor_keeps_its_deficit_as_buckets_do() {
    let quota = |n: u64| by_header(limit("r", &format!("{n}/h"), n));
    let limiter = with_room([quota(5)], 1);
    assert_eq!(admitted(&limiter, &from_key("a"), 6, NOW), 5);
    // The exhausted bucket has to go for another, which starts no fuller.
    assert_eq!(admitted(&limiter, &from_key("b"), 1, NOW), 0);
    limiter.reload(set([quota(20)]), NOW).unwrap();
    assert_eq!(admitted(&limiter, &from_key("c"), 30, NOW), 15);
}

#[test]
fn a_process_meets_a_bounded_number_of_limits() {
    let limiter = limiter([limit("keeps", "3/h", 3)]);
    assert_eq!(admitted(&limiter, &FakeRequest::get("/"), 3, NOW), 3);
    let keeps = || limit("keeps", "3/h", 3);
    for n in 1..LimitSet::MAX {
        limiter
            .reload(set([keeps(), on_path(limit(&format!("l{n}"), "1/h", 1), "/x")]), NOW)
            .unwrap();
    }
    let more = set([keeps(), on_path(limit("one-more", "1/h", 1), "/x")]);
    assert_eq!(limiter.reload(more, NOW), Err(TooManyLimits));
    assert_eq!(limiter.limits().find("l999").unwrap().0, LimitIndex(999));
    assert_eq!(admitted(&limiter, &FakeRequest::get("/"), 1, NOW), 0);
}

#[test]
fn a_cost_by_case_is_charged_and_told() {
    let spec = LimitSpec {
        cost: Cost::Cases(vec![(
            Condition { methods: vec!["POST".into()], ..Condition::default() },
            tokens(4),
        )]),
        ..limit("r", "10/h", 10)
    };
    let limiter = limiter([spec]);
    let post = FakeRequest::get("/").with_method("POST");
    let decision = limiter.decide(&post, NOW);
    assert_eq!((decision.checks[0].cost, decision.checks[0].level), (tokens(4), tokens(6)));
    assert_eq!(admitted(&limiter, &post, 3, NOW), 1);
    assert_eq!(admitted(&limiter, &FakeRequest::get("/"), 3, NOW), 2);
    limiter.refund(&decision, NOW);
    assert_eq!(state(&limiter, NOW), (4, 10));
}
