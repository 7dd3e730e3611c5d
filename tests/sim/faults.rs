//! Faults under load: what the cluster admits while and after they last.

use tidegate::limiter::{LimitIndex, Partition};

use crate::cluster::{Cluster, Network, split_limit};
use crate::oracle::Tally;
use crate::rng::Rng;

const SECOND: u64 = 1_000_000_000;

/// What happens at a moment of a run.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The network splits; one part for each node.
    Split(Vec<usize>),
    /// It is whole again.
    Heal,
    /// A node ends without a word.
    Kill(usize),
    /// A node leaves in order.
    Leave(usize),
    /// A new node starts.
    Start,
}

/// A load on one key, with faults.
pub(crate) struct Run {
    pub(crate) seed: u64,
    pub(crate) nodes: usize,
    pub(crate) per_second: u64,
    pub(crate) burst: u64,
    pub(crate) load: f64,
    pub(crate) seconds: u64,
    pub(crate) network: Network,
    /// Share of the load by node, among those that are alive; even if empty.
    pub(crate) shares: Vec<f64>,
    /// On for this long and off as long, if not zero (milliseconds).
    pub(crate) on_off: u64,
    pub(crate) faults: Vec<(u64, Fault)>,
    pub(crate) policy: Partition,
    /// No requests before this (milliseconds).
    pub(crate) silent_until: u64,
}

impl Run {
    pub(crate) fn new(nodes: usize, per_second: u64, load: f64, seconds: u64) -> Self {
        Self {
            seed: 21,
            nodes,
            per_second,
            burst: per_second,
            load,
            seconds,
            network: Network::default(),
            shares: Vec::new(),
            on_off: 0,
            faults: Vec::new(),
            policy: Partition::default(),
            silent_until: 0,
        }
    }

    pub(crate) fn play(&self) -> Tally {
        self.play_out().0
    }

    fn play_out(&self) -> (Tally, Cluster) {
        let rate = format!("{}/s", self.per_second);
        let limits = vec![split_limit("one", &rate, self.burst, 1, self.policy)];
        let mut cluster = Cluster::new(self.seed, self.network, limits);
        for _ in 0..self.nodes {
            cluster.start();
        }
        cluster.run_for(3 * SECOND);
        let started = cluster.now;
        let mut tally = Tally::new(self.per_second as f64, self.burst as f64, self.nodes);
        let mut rng = Rng::new(self.seed ^ 0xfa_017);
        let mut faults = self.faults.iter().peekable();
        let mut at = 0;
        loop {
            at += rng.exponential_nanos(self.per_second as f64 * self.load);
            while let Some((when, fault)) = faults.next_if(|(when, _)| when * 1_000_000 <= at) {
                cluster.run_until(cluster.now.max(started + when * 1_000_000));
                match fault {
                    Fault::Split(parts) => cluster.partition(parts),
                    Fault::Heal => cluster.partition(&vec![0; cluster.nodes.len()]),
                    Fault::Kill(node) => cluster.kill(*node),
                    Fault::Leave(node) => cluster.leave(*node),
                    Fault::Start => {
                        cluster.start();
                    }
                }
            }
            if at >= self.seconds * SECOND {
                return (tally, cluster);
            }
            if at < self.silent_until * 1_000_000 {
                continue;
            }
            if self.on_off > 0 && (at / 1_000_000 / self.on_off) % 2 == 1 {
                continue;
            }
            cluster.run_until(cluster.now.max(started + at));
            let node = self.pick(&cluster, &mut rng);
            let admitted = cluster.request(node, "k");
            tally.arrival(node, cluster.now - started, 1, admitted);
        }
    }

    fn pick(&self, cluster: &Cluster, rng: &mut Rng) -> usize {
        let ready: Vec<usize> = (0..cluster.nodes.len())
            .filter(|node| cluster.nodes[*node].alive && cluster.nodes[*node].engine.is_joined())
            .collect();
        let share = |node: &usize| self.shares.get(*node).copied().unwrap_or(1.0);
        let mut draw = rng.unit() * ready.iter().map(share).sum::<f64>();
        for node in &ready {
            draw -= share(node);
            if draw <= 0.0 {
                return *node;
            }
        }
        ready[ready.len() - 1]
    }
}

/// Tokens admitted in whole seconds `from..to` of the run, as a part of what the
/// rate gives in that time.
fn part_of_rate(run: &Run, tally: &Tally, from: u64, to: u64) -> f64 {
    let admitted = tally.admitted_between(from * SECOND, to * SECOND) as f64;
    admitted / (run.per_second * (to - from)) as f64
}

#[test]
fn a_partition_keeps_the_limit_while_demand_is_stable() {
    for (nodes, parts) in [(2, vec![0, 1]), (3, vec![0, 0, 1]), (4, vec![0, 0, 1, 1])] {
        for per_second in [60, 100, 1000] {
            for load in [1.5, 3.0] {
                let mut run = Run::new(nodes, per_second, load, 30);
                run.faults = vec![(8000, Fault::Split(parts.clone())), (18_000, Fault::Heal)];
                let tally = run.play();
                let before = part_of_rate(&run, &tally, 4, 8);
                let during = part_of_rate(&run, &tally, 8, 18);
                let after = part_of_rate(&run, &tally, 18, 21);
                let settled = part_of_rate(&run, &tally, 21, 30);
                println!(
                    "N={nodes} {per_second}/s x{load}: before {before:.3} during {during:.3} \
                     after {after:.3} settled {settled:.3}"
                );
                assert!((0.98..=1.02).contains(&before), "before {before}");
                assert!((0.97..=1.03).contains(&during), "during {during}");
                assert!((0.95..=1.05).contains(&after), "no silence after it heals: {after}");
                assert!((0.98..=1.02).contains(&settled), "settled {settled}");
            }
        }
    }
}

#[test]
fn the_hottest_replica_is_killed() {
    for per_second in [100, 1000] {
        let mut run = Run::new(3, per_second, 3.0, 20);
        run.shares = vec![0.6, 0.2, 0.2];
        run.faults = vec![(8000, Fault::Kill(0))];
        let tally = run.play();
        let around = part_of_rate(&run, &tally, 8, 10);
        let later = part_of_rate(&run, &tally, 10, 20);
        println!("{per_second}/s: around {around:.3} later {later:.3}");
        assert!((0.90..=1.06).contains(&around), "{around}");
        assert!((0.98..=1.02).contains(&later), "{later}");
    }
}

#[test]
fn rolling_all_replicas_under_load_stays_within_one_percent() {
    for (orderly, per_second) in [(true, 100), (true, 1000), (false, 100), (false, 1000)] {
        let mut run = Run::new(5, per_second, 2.0, 40);
        for i in 0..5 {
            let when = 3000 + 6000 * i as u64;
            run.faults.push((when, Fault::Start));
            let ends = if orderly { Fault::Leave(i) } else { Fault::Kill(i) };
            run.faults.push((when + 3000, ends));
        }
        let report = run.play().report(0, 40.0);
        println!("orderly {orderly} {per_second}/s: {report:?}");
        assert!(report.over <= 1.0, "{report:?}");
        assert!(report.under <= 2.0, "{report:?}");
    }
}

/// A newcomer hears of a replica from the others' snapshots before it meets it.
/// When that one leaves, nothing is reckoned for it any more.
#[test]
fn a_replica_that_was_named_before_it_was_met_leaves_no_demand_behind() {
    let mut run = Run::new(3, 100, 3.0, 30);
    run.shares = vec![0.1, 0.1, 0.4, 0.4];
    run.faults = vec![
        (3000, Fault::Split(vec![0, 0, 1])),
        (3100, Fault::Start),
        (4500, Fault::Heal),
        (8000, Fault::Leave(2)),
    ];
    let (tally, _) = run.play_out();
    let around = part_of_rate(&run, &tally, 8, 10);
    let later = part_of_rate(&run, &tally, 10, 30);
    println!("around {around:.3} later {later:.3}");
    assert!((0.95..=1.05).contains(&around), "{around}");
    assert!((0.98..=1.02).contains(&later), "{later}");
}

/// As before, but the newcomer never meets it.
#[test]
fn a_replica_that_was_named_and_never_met_leaves_no_demand_behind() {
    let mut run = Run::new(3, 100, 3.0, 30);
    run.shares = vec![0.1, 0.1, 0.4, 0.4];
    run.faults = vec![
        (3000, Fault::Split(vec![0, 0, 1])),
        (3100, Fault::Start),
        (4500, Fault::Kill(2)),
        (4600, Fault::Heal),
    ];
    let (tally, _) = run.play_out();
    let later = part_of_rate(&run, &tally, 12, 30);
    println!("later {later:.3}");
    assert!((0.98..=1.02).contains(&later), "{later}");
}

#[test]
fn bursts_and_small_buckets_stay_close_to_the_ideal() {
    for (burst, on_off) in [(10, 0), (50, 2000), (1000, 2000)] {
        let mut run = Run::new(3, 1000, 1.5, 20);
        run.burst = burst;
        run.on_off = on_off;
        let report = run.play().report(0, 20.0);
        println!("burst {burst} on/off {on_off} ms: {report:?}");
        assert!(report.over <= 1.5 && report.under <= 1.5, "{report:?}");
    }
}

/// Nobody asked before the network split; then both halves are flooded. What they
/// admit in ten seconds, and what one bucket may.
fn idle_at_the_cut(policy: Partition) -> (f64, f64, f64) {
    let mut run = Run::new(4, 100, 5.0, 15);
    run.policy = policy;
    run.silent_until = 5000;
    run.faults = vec![(2000, Fault::Split(vec![0, 0, 1, 1]))];
    let (tally, cluster) = run.play_out();
    let admitted = tally.admitted_between(5 * SECOND, 15 * SECOND) as f64;
    let legal = run.burst as f64 + (run.per_second * 10) as f64;
    let bound = cluster.nodes[0].engine.overshoot_bound(LimitIndex(0), cluster.local(0));
    (admitted, legal, bound.unwrap())
}

#[test]
fn a_strict_limit_holds_whatever_demand_does_in_a_partition() {
    let (admitted, legal, bound) = idle_at_the_cut(Partition::Strict);
    println!("strict, idle at the cut: {admitted} of {legal}, bound {bound:.0} more");
    assert!(admitted <= legal + bound, "{admitted} of {legal}");
    assert!(admitted <= 1.2 * legal, "{admitted} of {legal}");
    assert!(admitted >= 0.9 * legal, "{admitted} of {legal}");
}

#[test]
fn frozen_and_open_limits_give_out_one_limit_for_each_part_to_keys_idle_at_the_cut() {
    for policy in [Partition::Frozen, Partition::Open] {
        let (admitted, legal, bound) = idle_at_the_cut(policy);
        println!("{policy:?}, idle at the cut: {admitted} of {legal}, bound {bound:.0} more");
        assert!(admitted <= legal + bound, "{admitted} of {legal}");
        assert!(admitted <= 2.0 * legal, "{admitted} of {legal}");
        assert!(admitted >= 1.5 * legal, "{admitted} of {legal}");
    }
}

#[test]
fn what_a_strict_limit_costs_and_an_open_one_gives() {
    let during = |policy| {
        let mut run = Run::new(3, 100, 3.0, 30);
        run.policy = policy;
        run.shares = vec![0.8, 0.1, 0.1];
        run.faults = vec![(10_000, Fault::Split(vec![0, 1, 1])), (20_000, Fault::Heal)];
        let tally = run.play();
        (part_of_rate(&run, &tally, 10, 20), part_of_rate(&run, &tally, 21, 30))
    };
    let (strict, after_strict) = during(Partition::Strict);
    let (frozen, after_frozen) = during(Partition::Frozen);
    let (open, after_open) = during(Partition::Open);
    println!("during: strict {strict:.3} frozen {frozen:.3} open {open:.3}");
    println!("after: strict {after_strict:.3} frozen {after_frozen:.3} open {after_open:.3}");
    assert!((0.4..=1.02).contains(&strict), "{strict}");
    assert!((0.9..=1.05).contains(&frozen), "{frozen}");
    assert!((1.2..=2.05).contains(&open), "{open}");
    assert!((0.95..=1.05).contains(&after_strict) && (0.95..=1.05).contains(&after_frozen));
}
