//! What a bucket costs in memory: `cargo bench --bench memory`.
//!
//! Growth of the resident set (Linux), with keys of ten bytes; and beside it that of
//! `governor`, whose clients are known by a string.

use std::num::NonZeroU32;
use std::time::Duration;

use governor::DefaultKeyedRateLimiter;
use tidegate::limiter::{
    Attributes, Client, KeyPart, Limit, LimitSet, LimitSpec, Quota, Rule, Slot, Source,
};
use tidegate::replication::{Companion, Ledger, ReplicatedLimiter};
use tidegate::time::Timestamp;

struct Request(String);

impl Attributes for Request {
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
    fn header(&self, _: &str, each: &mut dyn FnMut(&[u8])) {
        each(self.0.as_bytes());
    }
    fn query(&self) -> &str {
        ""
    }
}

/// Bytes of the resident set; none where the system does not say.
fn resident() -> Option<i64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse::<i64>().ok().map(|kibi| kibi * 1024)
}

fn measure(what: &str, count: usize, fill: impl FnOnce()) {
    let before = resident();
    fill();
    let grown = resident().zip(before).map(|(after, before)| after - before);
    match grown {
        Some(bytes) => println!("{what:<32} {count:>9}  {:>5} bytes each", bytes / count as i64),
        None => println!("{what:<32} {count:>9}  not known on this system"),
    }
}

fn main() {
    println!("a slot: {} bytes, its identity: 16", size_of::<Slot<Ledger>>());
    println!("a ledger, for a bucket that peers use too: {} bytes", size_of::<Ledger>());
    let now = Timestamp::from_millis(3_600_000);
    let part = KeyPart::new(Source::Header("x-api-key".into()), false);
    let rate = "1/s".parse().unwrap_or_else(|_| unreachable!());
    let quota = Quota::try_new(rate, 100).unwrap_or_else(|| unreachable!());
    let rule = Rule { key: vec![part], ..Rule::default() };
    // Small ones first: what a large one gives back would serve them.
    for count in [1_000, 100_000, 1_000_000] {
        let limits = LimitSet::new([Limit::new(LimitSpec::new("one", rule.clone(), quota))]);
        let limiter = ReplicatedLimiter::new(limits, 2_000_000, Companion::default());
        measure("tidegate, without peers", count, || {
            for i in 0..count {
                limiter.decide(&Request(format!("k{i:09}")), now);
            }
        });
        if count == 1_000_000 {
            let full = resident();
            let later = now.plus(Duration::from_secs(600));
            assert_eq!(limiter.expire(Duration::from_secs(1), later), count);
            if let Some((before, after)) = full.zip(resident()) {
                let mib = (before - after) >> 20;
                println!("given back when all of them were full and idle: {mib} MiB");
            }
        }
    }
    for count in [1_000, 100_000, 1_000_000] {
        let limiter =
            DefaultKeyedRateLimiter::dashmap(governor::Quota::per_second(NonZeroU32::MIN));
        measure("governor", count, || {
            for i in 0..count {
                let key: String = format!("k{i:09}");
                assert!(limiter.check_key(&key).is_ok());
            }
        });
    }
}
