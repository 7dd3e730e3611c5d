//! What one decision costs: `cargo bench --bench limiter`.
//!
//! Time includes drawing a random key from a list of prepared ones, so that
//! caches behave as they do in traffic.

use tidegate::limiter::{
    Alone, Attributes, Client, KeyPart, Limit, LimitSet, LimitSpec, Limiter, Quota, Rule, Source,
};
use tidegate::time::{Clock, Timestamp};

fn main() {
    divan::main();
}

struct Request<'a>(&'a str);

impl Attributes for Request<'_> {
    fn method(&self) -> &str {
        "GET"
    }
    fn path(&self) -> &[u8] {
        b"/"
    }
    fn host(&self) -> &str {
        "localhost"
    }
    fn client(&self) -> Client {
        Client::new([127, 0, 0, 1].into(), 64)
    }
    fn header(&self, name: &str, each: &mut dyn FnMut(&[u8])) {
        if name == "x-api-key" {
            each(self.0.as_bytes());
        }
    }
    fn query(&self) -> &str {
        ""
    }
}

fn limit(name: &str) -> Limit {
    let part = KeyPart::new(Source::Header("x-api-key".into()), false);
    let rate = "1000000/s".parse().unwrap_or_else(|_| unreachable!());
    let quota = Quota::try_new(rate, 1_000_000).unwrap_or_else(|| unreachable!());
    Limit::new(LimitSpec::new(name, Rule { key: vec![part], ..Rule::default() }, quota))
}

fn limiter(limits: usize) -> Limiter<Alone> {
    let limits = (0..limits).map(|i| limit(&format!("l{i}")));
    Limiter::new(LimitSet::new(limits), 2_000_000, Alone)
}

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

#[divan::bench(args = [1_000, 100_000, 1_000_000])]
fn one_limit(bencher: divan::Bencher<'_, '_>, count: usize) {
    let (limiter, keys) = (limiter(1), keys(count));
    let mut now = Timestamp::from_millis(3_600_000);
    for key in &keys {
        limiter.decide(&Request(key), now);
    }
    let mut i = 0;
    bencher.bench_local(move || {
        i = (i + 1) % keys.len();
        now = now.plus_nanos(1000);
        limiter.decide(&Request(&keys[i]), now).is_admitted()
    });
}

#[divan::bench(args = [2, 4])]
fn several_limits(bencher: divan::Bencher<'_, '_>, limits: usize) {
    let (limiter, keys) = (limiter(limits), keys(1000));
    let mut now = Timestamp::from_millis(3_600_000);
    let mut i = 0;
    bencher.bench_local(move || {
        i = (i + 1) % keys.len();
        now = now.plus_nanos(1000);
        limiter.decide(&Request(&keys[i]), now).is_admitted()
    });
}

#[divan::bench]
fn reading_the_clock(bencher: divan::Bencher<'_, '_>) {
    let clock = Clock::monotonic();
    bencher.bench_local(move || clock.now());
}
