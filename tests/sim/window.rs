//! Strict windows: a provider that counts in a sliding window, in front of replicas
//! with an endless backlog, with bursts, that start cold, join, leave and die.

use std::time::Duration;

use tidegate::limiter::{Limit, LimitIndex, PauseOrder, Quota};

use crate::cluster::{Cluster, Network, Queue, limit_with};
use crate::rng::Rng;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
/// Seeds of each scenario; `many_seeds` takes more.
const SEEDS: u64 = 1;
const MANY: u64 = 20;
/// How often a backlog is looked at.
const STEP: u64 = 2 * MS;

/// What a provider says, and what a limit makes of it.
#[derive(Clone, Copy, Debug)]
struct Provider {
    requests: usize,
    per: u64,
    burst: u64,
}

const SLOW: Provider = Provider { requests: 100, per: 10 * SECOND, burst: 10 };
const FAST: Provider = Provider { requests: 1000, per: 10 * SECOND, burst: 20 };

impl Provider {
    /// r = (L - b) / (W + s), in requests per second.
    fn rate(self) -> f64 {
        (self.requests as f64 - self.burst as f64) / (self.per as f64 / 1e9 + 0.1)
    }

    fn limit(self) -> Limit {
        self.limit_of(self.quota().keeping_window())
    }

    fn limit_of(self, quota: Quota) -> Limit {
        limit_with("provider", quota, Duration::from_secs(3600))
    }

    fn quota(self) -> Quota {
        let text = format!("{}/{}ms", self.requests as u64 - self.burst, self.per / MS + 100);
        Quota::try_new(text.parse().unwrap(), self.burst).unwrap()
    }

    /// Most requests in any window as long as its own.
    fn most(self, sent: &[u64]) -> usize {
        let mut first = 0;
        let mut most = 0;
        for (last, at) in sent.iter().enumerate() {
            while at - sent[first] >= self.per {
                first += 1;
            }
            most = most.max(last + 1 - first);
        }
        most
    }
}

/// Replicas and what they send.
struct Senders {
    cluster: Cluster,
    queues: Vec<Queue>,
    sent: Vec<u64>,
    now: u64,
}

impl Senders {
    fn new(seed: u64, replicas: usize, provider: Provider) -> Self {
        Self::under(seed, replicas, provider.limit())
    }

    fn under(seed: u64, replicas: usize, limit: Limit) -> Self {
        let mut cluster = Cluster::new(seed, Network::default(), vec![limit]);
        for _ in 0..replicas {
            cluster.start();
        }
        cluster.run_for(3 * SECOND);
        let queues = (0..replicas).map(|_| Queue::default()).collect();
        Self { cluster, queues, sent: Vec::new(), now: 3 * SECOND }
    }

    fn join(&mut self) {
        self.cluster.start();
        self.queues.push(Queue::default());
    }

    /// For so long the replicas for which `busy` holds have a backlog.
    fn run(&mut self, nanos: u64, busy: impl Fn(usize) -> bool) {
        let until = self.now + nanos;
        while self.now < until {
            self.now += STEP;
            self.cluster.run_until(self.now);
            for node in 0..self.queues.len() {
                if !busy(node) {
                    self.cluster.leave_queue(node, &mut self.queues[node]);
                    continue;
                }
                while self.cluster.turn(node, &mut self.queues[node]) {
                    self.sent.push(self.now);
                }
            }
        }
    }

    fn sent_since(&self, from: u64) -> usize {
        self.sent.len() - self.sent.partition_point(|at| *at < from)
    }
}

/// Of the mean that the limit allows, what was used since `from`.
fn used(senders: &Senders, provider: Provider, from: u64) -> f64 {
    let seconds = (senders.now - from) as f64 / 1e9;
    senders.sent_since(from) as f64 / (provider.rate() * seconds)
}

fn an_endless_backlog_from_a_cold_start_never_passes_the_window(seeds: u64) {
    for provider in [SLOW, FAST] {
        for replicas in [1, 2, 5, 10] {
            let mut worst = (0, 1.0_f64);
            for seed in 0..seeds {
                let mut senders = Senders::new(seed, replicas, provider);
                senders.run(40 * SECOND, |_| true);
                worst.0 = worst.0.max(provider.most(&senders.sent));
                worst.1 = worst.1.min(used(&senders, provider, 13 * SECOND));
            }
            println!(
                "{} in {} s, burst {}, {replicas} replicas, seeds 0..{seeds}: \
                 {} in the worst window, {:.2} % of the mean used",
                provider.requests,
                provider.per / SECOND,
                provider.burst,
                worst.0,
                100.0 * worst.1
            );
            assert!(worst.0 <= provider.requests, "{} in a window", worst.0);
            assert!(worst.1 >= 0.99, "{} of the mean", worst.1);
        }
    }
}

fn bursts_of_any_replicas_never_pass_the_window(seeds: u64) {
    for provider in [SLOW, FAST] {
        for replicas in [2, 5, 10] {
            let mut worst = 0;
            for seed in 100..100 + seeds {
                let mut rng = Rng::new(seed);
                let mut senders = Senders::new(seed, replicas, provider);
                for _ in 0..40 {
                    let mask = rng.next() % (1 << replicas);
                    let time = (50 + rng.next() % 2500) * MS;
                    senders.run(time, |node| mask >> node & 1 == 1);
                }
                worst = worst.max(provider.most(&senders.sent));
            }
            println!("{provider:?}, {replicas} replicas: {worst} in the worst window");
            assert!(worst <= provider.requests, "{worst} in a window");
        }
    }
}

#[test]
fn without_shares_replicas_that_race_pass_the_window() {
    let mut worst = 0;
    for seed in 100..102 {
        let mut rng = Rng::new(seed);
        let mut senders = Senders::under(seed, 10, SLOW.limit_of(SLOW.quota()));
        for _ in 0..40 {
            let mask = rng.next() % (1 << 10);
            let time = (50 + rng.next() % 2500) * MS;
            senders.run(time, |node| mask >> node & 1 == 1);
        }
        worst = worst.max(SLOW.most(&senders.sent));
    }
    println!("{worst} in the worst window");
    assert!(worst > SLOW.requests, "{worst}");
}

fn a_lone_busy_replica_has_the_whole_rate_and_shares_when_others_come(seeds: u64) {
    for seed in 200..200 + seeds {
        let mut senders = Senders::new(seed, 5, FAST);
        senders.run(20 * SECOND, |node| node == 3);
        assert!(used(&senders, FAST, 4 * SECOND) >= 0.99, "seed {seed}");
        let from = senders.now;
        senders.run(20 * SECOND, |node| node == 3 || node == 1);
        assert!(used(&senders, FAST, from) >= 0.98, "seed {seed}");
        let from = senders.now + SECOND;
        senders.run(20 * SECOND, |node| node == 0);
        assert!(used(&senders, FAST, from) >= 0.98, "seed {seed}");
        let most = FAST.most(&senders.sent);
        assert!(most <= FAST.requests, "{most} in a window, seed {seed}");
    }
}

fn who_joins_leaves_or_dies_with_a_backlog_does_not_pass_the_window(seeds: u64) {
    for seed in 300..300 + seeds {
        let mut senders = Senders::new(seed, 4, FAST);
        senders.run(8 * SECOND, |_| true);
        senders.join();
        // Whoever joins waits for what the others know.
        senders.run(3 * SECOND, |node| node < 4);
        senders.run(8 * SECOND, |_| true);
        senders.cluster.kill(2);
        senders.run(10 * SECOND, |node| node != 2);
        let from = senders.now;
        senders.run(10 * SECOND, |node| node != 2);
        let after = used(&senders, FAST, from);
        senders.cluster.leave(0);
        senders.run(10 * SECOND, |node| node != 2 && node != 0);
        let most = FAST.most(&senders.sent);
        println!("seed {seed}: {most} in the worst window, {after:.3} used after a death");
        assert!(most <= FAST.requests, "{most} in a window, seed {seed}");
        assert!(after >= 0.98, "{after}, seed {seed}");
    }
}

fn behind_a_partition_the_sides_together_keep_to_the_window(seeds: u64) {
    for seed in 400..400 + seeds {
        let mut senders = Senders::new(seed, 4, FAST);
        senders.run(10 * SECOND, |_| true);
        senders.cluster.partition(&[0, 0, 1, 1]);
        senders.run(15 * SECOND, |_| true);
        senders.cluster.partition(&[0, 0, 0, 0]);
        senders.run(15 * SECOND, |_| true);
        let most = FAST.most(&senders.sent);
        println!("seed {seed}: {most} in the worst window");
        assert!(most <= FAST.requests, "{most} in a window, seed {seed}");
    }
}

fn a_provider_that_halves_its_limit_is_followed_by_pauses(seeds: u64) {
    let half = Provider { requests: FAST.requests / 2, ..FAST };
    for seed in 500..500 + seeds {
        let mut senders = Senders::new(seed, 3, FAST);
        senders.run(10 * SECOND, |_| true);
        // From now on the provider refuses the 501st of a window, and says when the
        // next one may come; only what it took counts.
        let (mut taken, mut refused) = (senders.sent.clone(), 0);
        let halved = senders.now;
        while senders.now < halved + 60 * SECOND {
            let before = senders.sent.len();
            senders.run(STEP, |_| true);
            for at in senders.sent.split_off(before) {
                let first = taken.partition_point(|t| *t + half.per <= at);
                senders.sent.push(at);
                if taken.len() - first < half.requests {
                    taken.push(at);
                    continue;
                }
                refused += 1;
                // Retry-After has whole seconds.
                let frees = taken[taken.len() - half.requests] + half.per;
                let wait = (frees - at).div_ceil(SECOND) * SECOND;
                let node = refused % 3;
                let now = senders.cluster.local(node);
                let order = PauseOrder::AtLeast(now.plus_nanos(wait));
                let limiter = &senders.cluster.nodes[node].limiter;
                let limits = limiter.limits();
                let limit = limits.get(LimitIndex(0)).unwrap();
                let key = limit.rule().key_from_text(&[Queue::KEY], 64).unwrap();
                let id = limit.bucket_id(key.as_bytes());
                assert!(limiter.pause(LimitIndex(0), id, None, order, now));
                senders.cluster.pump(node);
            }
        }
        let accepted = taken.len() - taken.partition_point(|t| *t < halved + 10 * SECOND);
        println!("seed {seed}: {accepted} taken of 2500 in 50 s, {refused} refused");
        // It says when the first of a full window ends, so that windows fill at the
        // rate of before and then stand still; each time costs a few refusals.
        assert!(accepted >= 2000, "{accepted} of 2500, seed {seed}");
        assert!(refused <= 40, "{refused} refused, seed {seed}");
    }
}

#[test]
fn sw_g1_an_endless_backlog_from_a_cold_start_never_passes_the_window() {
    an_endless_backlog_from_a_cold_start_never_passes_the_window(SEEDS);
}

#[test]
fn sw_g2_bursts_of_any_replicas_never_pass_the_window() {
    bursts_of_any_replicas_never_pass_the_window(SEEDS);
}

#[test]
fn sw_g3_a_lone_busy_replica_has_the_whole_rate_and_shares_when_others_come() {
    a_lone_busy_replica_has_the_whole_rate_and_shares_when_others_come(SEEDS);
}

#[test]
fn sw_g4_who_joins_leaves_or_dies_with_a_backlog_does_not_pass_the_window() {
    who_joins_leaves_or_dies_with_a_backlog_does_not_pass_the_window(SEEDS);
}

#[test]
fn sw_g5_behind_a_partition_the_sides_together_keep_to_the_window() {
    behind_a_partition_the_sides_together_keep_to_the_window(SEEDS);
}

#[test]
fn sw_g6_a_provider_that_halves_its_limit_is_followed_by_pauses() {
    a_provider_that_halves_its_limit_is_followed_by_pauses(SEEDS);
}

/// Prints the figures of `docs/pacing.md`:
/// `cargo test --release --test sim -- --ignored strict_windows_of_many_seeds --nocapture`.
#[test]
#[ignore = "takes minutes"]
fn strict_windows_of_many_seeds() {
    an_endless_backlog_from_a_cold_start_never_passes_the_window(MANY);
    bursts_of_any_replicas_never_pass_the_window(MANY);
    a_lone_busy_replica_has_the_whole_rate_and_shares_when_others_come(MANY);
    who_joins_leaves_or_dies_with_a_backlog_does_not_pass_the_window(MANY);
    behind_a_partition_the_sides_together_keep_to_the_window(MANY);
    a_provider_that_halves_its_limit_is_followed_by_pauses(MANY);
}
