//! What a request costs of the allocator. Counted on the thread of the test alone, by a
//! global allocator that this binary has instead of the usual one.

#![allow(clippy::unwrap_used, reason = "a test may fail by a panic")]

use http::Request;
use http::request::Parts;
use tidegate::limiter::{
    Client, Companion, KeyPart, Limit, LimitSet, LimitSpec, Limiter, Mode, Quota, Rule, Source,
};
use tidegate::proxy::HttpRequest;
use tidegate::time::Timestamp;
use tidegate::{limiter, replication};

const KEYS: usize = 100;
const ROUNDS: usize = 50;

fn head(path: &str, key: usize) -> Parts {
    let request = Request::builder()
        .uri(path)
        .header("host", "api.example")
        .header("x-api-key", format!("key-{key:06}"))
        .header("accept", "*/*");
    request.body(()).unwrap().into_parts().0
}

/// A limit for each key, of `burst` requests, that does not refill while the test runs.
fn limit(name: &str, burst: u64, mode: Mode) -> Limit {
    let key = vec![KeyPart::new(Source::Header("x-api-key".into()), false)];
    let quota = Quota::try_new("1/d".parse().unwrap(), burst).unwrap();
    let rule = Rule { key, ..Rule::default() };
    Limit::new(LimitSpec { mode, ..LimitSpec::new(name, rule, quota) })
}

/// Allocations of `ROUNDS` decisions for each of `KEYS` keys, whose buckets exist, and
/// how many were admitted.
fn count<C: Companion>(limiter: &Limiter<C>, path: &str) -> (u64, usize) {
    let heads: Vec<_> = (0..KEYS).map(|key| head(path, key)).collect();
    let client = Client::new([127, 0, 0, 1].into(), 64);
    let mut now = Timestamp::from_millis(3_600_000);
    let mut decide = |head: &Parts| {
        now = now.plus_nanos(10_000);
        limiter.decide(&HttpRequest::new(head, client), now).is_admitted()
    };
    for head in &heads {
        decide(head);
    }
    let mut admitted = 0;
    let counted = allocation_counter::measure(|| {
        for _ in 0..ROUNDS {
            admitted += heads.iter().filter(|head| decide(head)).count();
        }
    });
    (counted.count_total, admitted)
}

#[test]
fn a_request_that_passes_a_limit_allocates_nothing() {
    let all = KEYS * ROUNDS;
    let limits = || LimitSet::new([limit("one", 1_000_000, Mode::Enforce)]);
    assert_eq!(count(&Limiter::new(limits(), 1000, limiter::Alone), "/v1/items"), (0, all));
    let shared = replication::Companion::default();
    assert_eq!(count(&Limiter::new(limits(), 1000, shared), "/v1/items"), (0, all));
}

#[test]
fn nor_does_one_that_passes_one_limit_and_is_only_reported_by_another() {
    let limits = LimitSet::new([
        limit("one", 1_000_000, Mode::Enforce),
        limit("two", 1_000_000, Mode::Shadow),
    ]);
    let limiter = Limiter::new(limits, 1000, limiter::Alone);
    assert_eq!(count(&limiter, "/v1/items"), (0, KEYS * ROUNDS));
}

#[test]
fn nor_does_one_that_is_refused() {
    let limits = LimitSet::new([limit("one", 1, Mode::Enforce)]);
    assert_eq!(count(&Limiter::new(limits, 1000, limiter::Alone), "/v1/items"), (0, 0));
}

#[test]
fn a_path_that_has_to_be_brought_into_form_is_seen_by_the_count() {
    let key = vec![KeyPart::new(Source::Path, false)];
    let quota = Quota::try_new("1/d".parse().unwrap(), 1_000_000).unwrap();
    let spec = LimitSpec::new("paths", Rule { key, ..Rule::default() }, quota);
    let limiter = Limiter::new(LimitSet::new([Limit::new(spec)]), 1000, limiter::Alone);
    let all = KEYS * ROUNDS;
    assert_eq!(count(&limiter, "/v1/items"), (0, all));
    let (allocations, admitted) = count(&limiter, "/v1/../v1/items");
    assert_eq!(admitted, all);
    assert!(allocations >= all as u64, "{allocations} for {all} requests");
}
