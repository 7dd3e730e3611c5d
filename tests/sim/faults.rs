//! Faults under load: what the cluster admits while and after they last.

use crate::oracle::Tally;
use crate::scenario::{Demand, Fault, SECOND, Scenario};

/// Tokens admitted in whole seconds `from..to` of the run, as a part of what the
/// rate gives in that time.
fn part_of_rate(run: &Scenario, tally: &Tally, from: u64, to: u64) -> f64 {
    let admitted = tally.admitted_between(from * SECOND, to * SECOND) as f64;
    admitted / (run.per_second * (to - from)) as f64
}

#[test]
fn a_partition_keeps_the_limit_while_demand_is_stable() {
    for (nodes, parts) in [(2, vec![0, 1]), (3, vec![0, 0, 1]), (4, vec![0, 0, 1, 1])] {
        for (per_second, load) in [(60, 1.5), (100, 3.0), (1000, 1.5)] {
            let mut run = Scenario::new(nodes, per_second, load, 30);
            run.faults = vec![(8000, Fault::Split(parts.clone())), (18_000, Fault::Heal)];
            let (tally, _) = run.play();
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

#[test]
fn the_hottest_replica_is_killed() {
    for per_second in [100, 1000] {
        let mut run = Scenario::new(3, per_second, 3.0, 20);
        run.demand = Demand::Shares(vec![0.6, 0.2, 0.2]);
        run.faults = vec![(8000, Fault::Kill(0))];
        let (tally, _) = run.play();
        let around = part_of_rate(&run, &tally, 8, 10);
        let later = part_of_rate(&run, &tally, 10, 20);
        println!("{per_second}/s: around {around:.3} later {later:.3}");
        assert!((0.90..=1.06).contains(&around), "{around}");
        assert!((0.98..=1.02).contains(&later), "{later}");
    }
}

/// A new replica, then an old one goes; every six seconds, for all of them.
pub(crate) fn roll(run: &mut Scenario, orderly: bool, same_address: bool) {
    for i in 0..run.nodes {
        let when = 3000 + 6000 * i as u64;
        let end = if orderly { Fault::Leave(i) } else { Fault::Kill(i) };
        if same_address {
            run.faults.push((when, end));
            run.faults.push((when + 1000, Fault::StartAt(i)));
        } else {
            run.faults.push((when, Fault::Start));
            run.faults.push((when + 3000, end));
        }
    }
}

#[test]
fn rolling_all_replicas_under_load_stays_within_one_percent() {
    for (orderly, same_address, per_second) in
        [(true, false, 100), (true, true, 1000), (false, false, 1000), (false, true, 100)]
    {
        let mut run = Scenario::new(5, per_second, 2.0, 40);
        roll(&mut run, orderly, same_address);
        let report = run.report();
        println!("orderly {orderly} same address {same_address} {per_second}/s: {report:?}");
        assert!(report.over <= 1.0, "{report:?}");
        assert!(report.under <= 2.0, "{report:?}");
    }
}

#[test]
fn bursts_and_small_buckets_stay_close_to_the_ideal() {
    for (burst, on_off) in [(10, 0), (50, 2000), (1000, 2000)] {
        let mut run = Scenario::new(3, 1000, 1.5, 20);
        run.burst = burst;
        run.on_off = on_off;
        let report = run.report();
        println!("burst {burst} on/off {on_off} ms: {report:?}");
        assert!(report.over <= 1.5 && report.under <= 1.5, "{report:?}");
    }
}

#[test]
fn a_process_that_stood_still_lets_nobody_through_twice() {
    for nodes in [2, 3] {
        let mut run = Scenario::new(nodes, 100, 3.0, 20);
        run.faults = vec![(8000, Fault::Stop(1)), (10_000, Fault::Resume(1))];
        run.window = Some((8000, 10_000));
        let (tally, cluster) = run.play();
        let report = tally.report();
        println!("N={nodes}: {report:?}");
        assert!(report.over <= 0.5, "{report:?}");
        // The share that nobody could use meanwhile is given back, within the burst.
        assert!(report.after.unwrap() >= 0.95, "no silence: {report:?}");
        assert!(report.excess <= 5.0, "{report:?}");
        assert!((0.98..=1.02).contains(&report.settled.unwrap()), "{report:?}");
        let noticed: Vec<u64> =
            cluster.nodes.iter().map(|node| node.engine.stats().standstills).collect();
        assert_eq!(noticed[1], 1);
        assert_eq!(noticed.iter().sum::<u64>(), 1, "only that one stood still");
    }
}

#[test]
fn what_comes_twice_counts_once_and_what_is_lost_comes_again() {
    let mut run = Scenario::new(3, 100, 2.0, 20);
    run.network.duplicates = 30;
    run.network.spread = 4;
    run.faults = (1..40).map(|i| (i * 500, Fault::Cut)).collect();
    let (tally, cluster) = run.play();
    let report = tally.report();
    println!("{report:?}");
    assert!(report.over <= 1.0 && report.under <= 1.0, "{report:?}");
    let repeated: u64 = cluster.nodes.iter().map(|n| n.engine.stats().frames_repeated).sum();
    assert!(repeated > 100, "{repeated}");
}

#[test]
fn one_direction_that_stands_still_costs_little() {
    let mut run = Scenario::new(2, 100, 2.0, 25);
    run.faults = vec![(8000, Fault::Deafen(vec![0], vec![1])), (18_000, Fault::Heal)];
    run.window = Some((8000, 18_000));
    let report = run.report();
    println!("{report:?}");
    assert!((0.94..=1.06).contains(&report.during.unwrap()), "{report:?}");
    assert!((0.95..=1.05).contains(&report.after.unwrap()), "{report:?}");
}
