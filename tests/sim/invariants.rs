//! The invariants of the design, each by its number, over whole clusters. Those
//! of a single ledger are beside it.
//!
//! - I1 exactly once: whatever happens to frames, what an origin spent is
//!   subtracted once everywhere.
//! - I3 local bound: a replica alone admits at most r t + b in any window, and
//!   what averaging lent it.
//! - I4 global bound: together they admit at most r t + b + sum of U in any
//!   window, U being what one has spent and the others neither know nor reckon.
//! - I5 no false debt: at constant demand below the rate nobody is refused.
//! - I6 self-stabilisation: whatever the levels were, once a key idles they are
//!   right again.
//! - I7 fairness: replicas' admission ratios converge.

use proptest::prelude::*;

use crate::cluster::{Cluster, Network, limit};
use crate::scenario::{Demand, Fault, SECOND, Scenario};

const MS: u64 = 1_000_000;

/// Something that happens to a cluster of three.
#[derive(Clone, Debug)]
enum Step {
    Spend(usize, u64),
    Wait(u64),
    Cut,
    CutAll,
    Split(Vec<usize>),
    Deafen(usize, usize),
    Heal,
    Stop(usize, u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..3usize, 1..20u64).prop_map(|(node, count)| Step::Spend(node, count)),
        4 => (1..400u64).prop_map(Step::Wait),
        2 => Just(Step::Cut),
        1 => Just(Step::CutAll),
        1 => prop::collection::vec(0..2usize, 3).prop_map(Step::Split),
        1 => (0..3usize, 0..3usize).prop_map(|(from, to)| Step::Deafen(from, to)),
        1 => Just(Step::Heal),
        1 => (0..3usize, 1..3000u64).prop_map(|(node, millis)| Step::Stop(node, millis)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn i1_everything_counts_exactly_once_whatever_the_network_does(
        seed in any::<u64>(),
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let network = Network { duplicates: 20, spread: 3, ..Network::default() };
        let limits = vec![limit("one", "100000/40d", 100_000, 1)];
        let mut cluster = Cluster::new(seed, network, limits);
        for _ in 0..3 {
            cluster.start();
        }
        cluster.run_for(3 * SECOND);
        let mut spent = 0_u64;
        for step in steps {
            match step {
                Step::Spend(node, count) => {
                    for _ in 0..count {
                        prop_assert!(cluster.request(node, "k"));
                        spent += 1;
                    }
                }
                Step::Wait(millis) => cluster.run_for(millis * MS),
                Step::Cut => cluster.cut_any_connection(),
                Step::CutAll => cluster.cut_connections(),
                Step::Split(parts) => cluster.partition(&parts),
                Step::Deafen(from, to) => cluster.deafen(from, to),
                Step::Heal => cluster.partition(&[0, 0, 0]),
                Step::Stop(node, millis) => {
                    cluster.stop(node);
                    cluster.run_for(millis * MS);
                    cluster.resume(node);
                }
            }
        }
        cluster.partition(&[0, 0, 0]);
        // Demand fades, shares are settled, and what was averaged is level again.
        cluster.run_for(40 * SECOND);
        let own: Vec<u64> = (0..3)
            .map(|node| cluster.spent(node, "k").first().map_or(0, |(_, spent)| *spent))
            .collect();
        prop_assert_eq!(own.iter().sum::<u64>(), spent * 1_000_000);
        for node in 0..3 {
            // Every total, to the micro-token.
            let known = cluster.spent(node, "k");
            for (origin, spent) in own.iter().enumerate() {
                let incarnation = cluster.nodes[origin].engine.incarnation();
                let found = known.iter().find(|(other, _)| *other == incarnation);
                prop_assert_eq!(found.map_or(0, |(_, known)| *known), *spent);
            }
            // A little refills. Where A and C cannot talk but both reach B, an idle
            // B follows whoever speaks, who lacks what the other spent; a part of
            // it stays with B until the key is used again.
            let level = cluster.level(node, 0, "k");
            let off = level - (100_000 - spent) as f64;
            prop_assert!(off.abs() <= 5.0 + 0.1 * spent as f64, "{level} after {spent}");
        }
    }
}

#[test]
fn i3_a_replica_alone_never_exceeds_its_bucket() {
    for (per_second, burst) in [(5, 5), (100, 1), (1000, 100)] {
        for load in [0.9, 10.0] {
            let mut run = Scenario::new(1, per_second, load, 10);
            run.burst = burst;
            let (tally, _) = run.play();
            assert!(tally.replica_excess <= 1e-6, "{}", tally.replica_excess);
        }
        for nodes in [2, 5] {
            let mut run = Scenario::new(nodes, per_second, 4.0, 20);
            run.burst = burst;
            run.demand = Demand::Moving(0.9);
            let (tally, _) = run.play();
            // What averaging can lend: a part of one burst.
            let lent = 1.0 + 0.02 * burst as f64;
            assert!(tally.replica_excess <= lent, "{} lent", tally.replica_excess);
        }
    }
}

/// The sum of U over the replicas, in tokens: what may go unreported
/// (half a request, a tenth of the level or a thousandth of the rate), and what
/// is admitted until news of it arrives.
fn unknown(run: &Scenario) -> f64 {
    let (rate, burst, nodes) = (run.per_second as f64, run.burst as f64, run.nodes as f64);
    let threshold = (0.5 * nodes).max(0.1 * burst).max(0.001 * rate * nodes);
    let spacing = 0.005;
    let latency = run.network.latency_us as f64 * 1e-6 * (1.0 + run.network.jitter as f64 / 100.0);
    threshold + rate * run.load * (spacing + latency)
}

#[test]
fn i4_together_they_exceed_one_bucket_by_no_more_than_is_unknown() {
    for (per_second, burst) in [(5, 5), (60, 6), (100, 100), (1000, 10), (3000, 3000)] {
        for (nodes, load, latency_us) in [(2, 2.0, 1000), (3, 10.0, 1000), (5, 4.0, 20_000)] {
            let mut run = Scenario::new(nodes, per_second, load, 6);
            run.burst = burst;
            run.network.latency_us = latency_us;
            run.on_off = 1000;
            let report = run.report();
            let bound = unknown(&run);
            println!(
                "{per_second}/s b {burst} N {nodes} x{load} {latency_us} us: {:.1} of {bound:.1}",
                report.excess
            );
            assert!(report.excess <= bound, "{report:?}, not {bound}");
        }
    }
}

#[test]
fn i5_demand_below_the_rate_makes_no_false_debt() {
    for (per_second, burst) in [(1000, 10), (3000, 30), (10_000, 100), (100, 10), (100, 100)] {
        for demand in [Demand::Even, Demand::First(0.9)] {
            let mut run = Scenario::new(3, per_second, 0.7, 8);
            run.burst = burst;
            run.demand = demand;
            let report = run.report();
            println!("{per_second}/s b {burst} {:?}: {report:?}", run.demand);
            assert!(report.under <= 0.5, "{report:?}");
        }
    }
}

#[test]
fn i6_levels_are_right_again_once_the_key_idles() {
    for seed in 1..=3 {
        let mut run = Scenario::new(3, 100, 6.0, 8);
        run.seed = seed;
        // Both parts of a network overspend, and one process stands still.
        run.faults = vec![
            (100, Fault::Split(vec![0, 1, 1])),
            (4000, Fault::Stop(2)),
            (5500, Fault::Resume(2)),
            (6000, Fault::Heal),
            (6500, Fault::Cut),
        ];
        let (_, mut cluster) = run.play();
        // The debt cap is two seconds of the rate; the rest is detection.
        cluster.run_for(10 * SECOND);
        for node in 0..3 {
            assert_eq!(cluster.level(node, 0, "k"), 100.0, "seed {seed} node {node}");
        }
        let admitted = (0..150).filter(|_| cluster.request(0, "k")).count();
        assert_eq!(admitted, 100);
        cluster.run_for(15 * MS);
        assert!(!cluster.request(1, "k") || !cluster.request(1, "k") || !cluster.request(1, "k"));
    }
}

#[test]
fn i7_ratios_of_admission_converge() {
    for (nodes, per_second) in [(2, 100), (5, 100), (3, 1000), (3, 30)] {
        let mut run = Scenario::new(nodes, per_second, 3.0, 25);
        // One part spends alone and is in debt when they meet again.
        let parts: Vec<usize> = (0..nodes).map(|node| usize::from(node > 0)).collect();
        run.faults = vec![(10, Fault::Split(parts)), (3000, Fault::Heal)];
        run.ratios_from = 8000;
        let report = run.report();
        println!("N {nodes} {per_second}/s: {report:?}");
        assert!(report.jain >= 0.9, "{report:?}");
    }
}
