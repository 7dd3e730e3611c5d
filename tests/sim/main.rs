//! Deterministic cluster simulation: real limiters and engines, a virtual clock
//! and network, seeded arrivals, and one ideal central bucket as the oracle.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail by a panic")]

mod cluster;
mod exchange;
mod faults;
mod oracle;
mod rng;

use cluster::{Cluster, Network, limit};
use oracle::{Report, Tally};
use rng::Rng;

const SECOND: u64 = 1_000_000_000;

/// One key under one limit.
#[derive(Clone, Debug)]
struct Scenario {
    seed: u64,
    replicas: usize,
    per_second: u64,
    burst: u64,
    /// Offered load as a multiple of the limit.
    load: f64,
    /// Share of the load that the first replica gets; the rest is even.
    skew: Option<f64>,
    seconds: u64,
    network: Network,
}

impl Scenario {
    fn run(&self) -> (Report, Cluster) {
        let rate = format!("{}/s", self.per_second);
        let limits = vec![limit("one", &rate, self.burst, 1)];
        let mut cluster = Cluster::new(self.seed, self.network, limits);
        for _ in 0..self.replicas {
            cluster.start();
        }
        cluster.run_for(3 * SECOND);
        assert!(cluster.nodes.iter().all(|node| node.engine.is_joined()), "{self:?}");
        let started = cluster.now;
        let before = cluster.entries_sent();
        let mut tally = Tally::new(self.per_second as f64, self.burst as f64, self.replicas);
        let mut arrivals = Rng::new(self.seed ^ 0x5eed);
        let offered = self.per_second as f64 * self.load;
        let mut at = started;
        loop {
            at += arrivals.exponential_nanos(offered);
            if at >= started + self.seconds * SECOND {
                break;
            }
            cluster.run_until(at);
            let node = self.pick(&mut arrivals);
            let admitted = cluster.request(node, "k");
            tally.arrival(node, at - started, 1, admitted);
        }
        let entries = cluster.entries_sent() - before;
        (tally.report(entries, self.seconds as f64), cluster)
    }

    fn pick(&self, rng: &mut Rng) -> usize {
        match self.skew {
            Some(share) if rng.unit() < share => 0,
            Some(_) => 1 + (rng.unit() * (self.replicas - 1) as f64) as usize,
            None => (rng.unit() * self.replicas as f64) as usize,
        }
    }
}

fn scenario(replicas: usize, per_second: u64, load: f64, skew: Option<f64>) -> Scenario {
    let seconds = match per_second {
        0..=10 => 120,
        11..=200 => 40,
        _ => 8,
    };
    let network = Network::default();
    Scenario { seed: 11, replicas, per_second, burst: per_second, load, skew, seconds, network }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let run = || scenario(3, 100, 2.0, Some(0.9)).run().1.trace();
    assert_eq!(run(), run());
    let mut other = scenario(3, 100, 2.0, Some(0.9));
    other.seed += 1;
    assert_ne!(run(), other.run().1.trace());
}

/// One line for every scenario, then the verdict, so that a failure shows the
/// whole picture.
fn check(scenarios: impl IntoIterator<Item = Scenario>, accept: impl Fn(&Report) -> bool) {
    let mut failed = Vec::new();
    for scenario in scenarios {
        let (report, _) = scenario.run();
        let line = format!(
            "N={:<2} {:>5}/s x{:<4} {} seed {}: over {:.2} % under {:.2} % worst second +{:.1} % \
             first second {:+.1} % Jain {:.3} entries {:.0}/s",
            scenario.replicas,
            scenario.per_second,
            scenario.load,
            if scenario.skew.is_some() { "90/10   " } else { "balanced" },
            scenario.seed,
            report.over,
            report.under,
            report.worst_second,
            report.first_second,
            report.jain,
            report.entries,
        );
        println!("{line}");
        if !accept(&report) {
            failed.push(line);
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

fn steady(per_second: u64, replicas: &[usize], loads: &[f64]) -> Vec<Scenario> {
    let mut all = Vec::new();
    for replicas in replicas {
        for load in loads {
            for skew in [None, Some(0.9)] {
                all.push(scenario(*replicas, per_second, *load, skew));
            }
        }
    }
    all
}

fn is_accurate(report: &Report) -> bool {
    report.over <= 0.5 && report.under <= 0.5 && report.first_second <= 10.0
}

#[test]
fn steady_load_at_5_per_second_is_within_half_a_percent() {
    let all = steady(5, &[2, 3, 10], &[0.5, 1.2, 10.0]);
    check(all, |report| is_accurate(report) && report.jain >= 0.8);
}

#[test]
fn steady_load_at_100_per_second_is_within_half_a_percent() {
    let all = steady(100, &[2, 3, 10], &[0.5, 1.2, 3.0]);
    check(all, |report| is_accurate(report) && report.jain >= 0.85);
}

#[test]
fn steady_load_at_1000_per_second_is_within_half_a_percent() {
    check(steady(1000, &[3], &[0.5, 1.2, 3.0]), |report| {
        is_accurate(report) && report.jain >= 0.85
    });
}

#[test]
fn slow_networks_stay_within_one_percent() {
    let slow = |latency_us| {
        steady(100, &[3], &[0.5, 2.0]).into_iter().map(move |mut scenario| {
            scenario.network.latency_us = latency_us;
            scenario
        })
    };
    check(slow(5_000).chain(slow(20_000)), |r| r.over <= 1.0 && r.under <= 1.0 && r.jain >= 0.85);
}
