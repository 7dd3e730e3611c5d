//! What a limit does about replicas that it does not hear: frozen, strict, open.

use tidegate::limiter::{LimitIndex, Partition};

use crate::cluster::{Cluster, Network, split_limit};
use crate::oracle::Tally;
use crate::rng::Rng;

const SECOND: u64 = 1_000_000_000;

/// What happens at a moment of a run.
#[derive(Clone, Debug)]
enum Fault {
    /// The network splits; one part for each node.
    Split(Vec<usize>),
    /// It is whole again.
    Heal,
}

/// A load on one key, with faults.
struct Run {
    seed: u64,
    nodes: usize,
    per_second: u64,
    burst: u64,
    load: f64,
    seconds: u64,
    network: Network,
    /// Share of the load by node, among those that are alive; even if empty.
    shares: Vec<f64>,
    faults: Vec<(u64, Fault)>,
    policy: Partition,
    /// No requests before this (milliseconds).
    silent_until: u64,
    /// A split ends the connections, and does not only hold them up.
    cuts: bool,
}

impl Run {
    fn new(nodes: usize, per_second: u64, load: f64, seconds: u64) -> Self {
        Self {
            seed: 21,
            nodes,
            per_second,
            burst: per_second,
            load,
            seconds,
            network: Network::default(),
            shares: Vec::new(),
            faults: Vec::new(),
            policy: Partition::default(),
            silent_until: 0,
            cuts: false,
        }
    }

    fn play(&self) -> Tally {
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
                    Fault::Split(parts) => {
                        cluster.partition(parts);
                        if self.cuts {
                            cluster.cut_connections();
                        }
                    }
                    Fault::Heal => cluster.partition(&vec![0; cluster.nodes.len()]),
                }
            }
            if at >= self.seconds * SECOND {
                return (tally, cluster);
            }
            if at < self.silent_until * 1_000_000 {
                continue;
            }
            cluster.run_until(cluster.now.max(started + at));
            let node = self.pick(&cluster, &mut rng);
            let admitted = cluster.request(node, "k");
            tally.arrival(node, cluster.now - started, 1, false, admitted);
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

#[test]
fn a_share_that_was_released_is_not_given_out_again_at_once() {
    // Silent for longer than the share is held and released, and then given up.
    let mut run = Run::new(2, 100, 3.0, 80);
    run.cuts = true;
    run.faults = vec![(10_000, Fault::Split(vec![0, 1]))];
    let (tally, cluster) = run.play_out();
    let worst = (12..80)
        .map(|second| tally.admitted_between(second * SECOND, (second + 1) * SECOND))
        .max()
        .unwrap();
    // By then each half gives out the whole rate, and no burst beside it.
    assert!(worst <= 220, "{worst} in one second");
    assert!(part_of_rate(&run, &tally, 70, 80) >= 1.9);
    // The bound does not forget whom the replica has given up.
    let admitted = tally.admitted_between(0, 80 * SECOND) as f64;
    let legal = (run.burst + run.per_second * 80) as f64;
    let bound = cluster.nodes[0].engine.overshoot_bound(LimitIndex(0), cluster.local(0)).unwrap();
    assert!(admitted <= legal + bound, "{admitted} of {legal}, and {bound}");
    assert!(cluster.nodes[0].limiter.companion().replicas() == 1);
}
