//! The full matrix, by one command, and the page that it writes.

use std::fmt::Write as _;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::faults::roll;
use crate::many;
use crate::oracle::Report;
use crate::scenario::{Demand, Fault, Scenario};

/// A run of the matrix.
struct Run {
    group: &'static str,
    what: String,
    scenario: Scenario,
}

const COMMAND: &str = "cargo test --release --test sim -- --ignored matrix --nocapture";

/// Long enough for a few hundred tokens, and not much longer.
fn seconds(per_second: u64, nodes: usize) -> u64 {
    match (per_second, nodes) {
        (0..=5, 50..) => 40,
        (6..=100, 50..) => 25,
        (0..=5, 20..) => 80,
        (0..=5, _) => 200,
        (6..=100, 20..) => 20,
        (6..=30, _) => 60,
        (31..=100, _) => 40,
        (101..=1000, _) => 25,
        (1001..=3000, _) => 20,
        (_, 50..) => 12,
        (_, _) => 20,
    }
}

fn shape(demand: &Demand) -> &'static str {
    match demand {
        Demand::Even => "balanced",
        Demand::First(_) => "90/10",
        Demand::Moving(_) => "moving",
        Demand::Shares(_) => "shares",
    }
}

struct Matrix(Vec<Run>);

impl Matrix {
    fn add(&mut self, group: &'static str, what: impl Into<String>, scenario: Scenario) {
        self.0.push(Run { group, what: what.into(), scenario });
    }

    fn steady(&mut self) {
        for per_second in [2, 5, 30, 60, 100, 700, 3000, 10_000] {
            for nodes in [2, 3, 5, 10, 50] {
                if nodes == 50 && ![5, 100, 10_000].contains(&per_second) {
                    continue;
                }
                let loads: &[f64] = if nodes == 50 { &[0.5, 2.0] } else { &[0.5, 1.2, 2.0, 10.0] };
                for load in loads {
                    for demand in [Demand::Even, Demand::First(0.9)] {
                        let run =
                            Scenario::new(nodes, per_second, *load, seconds(per_second, nodes));
                        self.add("steady", "", Scenario { seed: 11, demand, ..run });
                    }
                }
            }
        }
        for per_second in [2, 30, 60, 700, 3000] {
            for nodes in [4, 7, 20] {
                for load in [0.8, 1.1, 3.0, 6.0] {
                    for seed in [101, 102] {
                        let demand = if seed == 101 { Demand::Even } else { Demand::First(0.9) };
                        let run =
                            Scenario::new(nodes, per_second, load, seconds(per_second, nodes));
                        self.add("held out", "", Scenario { seed, demand, ..run });
                    }
                }
            }
        }
    }

    fn networks(&mut self) {
        for per_second in [5, 100, 10_000] {
            for nodes in [3, 10] {
                for load in [0.5, 2.0, 10.0] {
                    if nodes == 10 && load > 2.0 {
                        continue;
                    }
                    for latency_us in [5_000, 20_000, 80_000] {
                        let mut run =
                            Scenario::new(nodes, per_second, load, seconds(per_second, nodes));
                        run.network.latency_us = latency_us;
                        let what = format!("{} ms", latency_us / 1000);
                        self.add("latency", what, run);
                    }
                    if load < 10.0 {
                        let mut run =
                            Scenario::new(nodes, per_second, load, seconds(per_second, nodes));
                        run.network.duplicates = 20;
                        self.add("network", "20 % of the frames twice", run.clone());
                        run.network.duplicates = 0;
                        run.network.spread = 8;
                        self.add("network", "latency 1 to 8 ms by connection", run.clone());
                        run.network.spread = 1;
                        run.faults =
                            (1..run.seconds).map(|second| (second * 1000, Fault::Cut)).collect();
                        self.add("network", "a connection cut each second", run);
                    }
                }
            }
        }
    }

    fn loads(&mut self) {
        for per_second in [100, 700, 3000, 10_000] {
            for nodes in [3, 10] {
                for load in [0.5, 0.9, 2.0] {
                    if nodes == 10 && load < 2.0 {
                        continue;
                    }
                    for percent in [1, 10] {
                        let mut run =
                            Scenario::new(nodes, per_second, load, seconds(per_second, nodes));
                        run.burst = per_second * percent / 100;
                        let group = if run.burst < 4 { "burst of 1" } else { "small bursts" };
                        self.add(group, format!("b = {percent} % of r"), run);
                    }
                }
            }
        }
        for per_second in [30, 100, 3000, 10_000] {
            for nodes in [3, 10] {
                for load in [0.9, 1.5, 10.0] {
                    if nodes == 10 && load > 1.5 {
                        continue;
                    }
                    let run =
                        Scenario::new(nodes, per_second, load, seconds(per_second, nodes).max(12));
                    let moving = Scenario { demand: Demand::Moving(0.9), ..run.clone() };
                    self.add("moving", "the hot replica moves each second", moving);
                    for percent in [50, 100] {
                        let burst = (per_second * percent / 100).max(1);
                        let on_off = Scenario { on_off: 2000, burst, ..run.clone() };
                        self.add(
                            "on/off",
                            format!("2 s on, 2 s off, b = {percent} % of r"),
                            on_off,
                        );
                    }
                }
            }
        }
        for (per_second, burst) in [(100, 100), (1000, 1000), (10_000, 1000)] {
            for nodes in [3, 10] {
                for load in [0.5, 2.0] {
                    let mut run = Scenario::new(nodes, per_second, load, 30);
                    run.burst = burst;
                    run.costs = vec![1, 50];
                    self.add("costs", "costs 1 and 50", run.clone());
                    run.costs = vec![1];
                    run.refunds = 20;
                    run.seconds = seconds(per_second, nodes);
                    self.add("refunds", "20 % of the admitted are refunded", run);
                }
            }
        }
        for per_second in [5, 100, 10_000] {
            for nodes in [2, 10] {
                let mut run =
                    Scenario::new(nodes, per_second, 2.0, seconds(per_second, nodes).max(20));
                run.drift_ppm = 1000;
                self.add("clocks", "rates 1000 ppm off, half of them each way", run);
            }
        }
    }

    fn partitions(&mut self) {
        let halves = |nodes: usize| (0..nodes).map(|node| node % 2).collect::<Vec<_>>();
        let thirds = |nodes: usize| (0..nodes).map(|node| node % 3).collect::<Vec<_>>();
        for (per_second, long) in
            [(5, true), (30, true), (100, true), (1000, true), (10_000, false)]
        {
            for (nodes, parts, what) in [
                (2, halves(2), "halves"),
                (10, halves(10), "halves"),
                (3, thirds(3), "thirds"),
                (9, thirds(9), "thirds"),
            ] {
                for load in [0.5, 1.5, 3.0] {
                    for cut in [10, 30, 120] {
                        let many = nodes > 3 && cut > 10;
                        if (load != 1.5 && (cut > 10 || !long)) || (cut > 10 && !long) || many {
                            continue;
                        }
                        let run = Scenario::new(nodes, per_second, load, 8 + cut + 12);
                        let fault = Fault::Split(parts.clone());
                        let group = match (per_second, cut) {
                            (0..30, _) => "partition, limit below 30/s",
                            (_, 120) => "partition of 120 s",
                            _ => "partition",
                        };
                        self.add(group, format!("{cut} s, {what}"), cut_for(run, fault, cut));
                    }
                }
            }
            for nodes in [2, 3] {
                for cut in [10, 30] {
                    let run = Scenario::new(nodes, per_second, 1.5, 8 + cut + 12);
                    let fault = Fault::Deafen(vec![0], (1..nodes).collect());
                    self.add("one-way", format!("{cut} s"), cut_for(run, fault, cut));
                }
            }
        }
        for per_second in [100, 1000] {
            for nodes in [2, 4] {
                let run = Scenario::new(nodes, per_second, 3.0, 50);
                let mut run = cut_for(run, Fault::Split(halves(nodes)), 30);
                let shares = (0..nodes).map(|node| if node % 2 == 0 { 1.0 } else { 0.0 }).collect();
                run.faults.insert(1, (8000, Fault::Shares(shares)));
                self.add("demand moves", "all of it to one side at the cut, 30 s", run);
                let mut run = Scenario::new(nodes, per_second, 0.0, 50);
                run.faults = vec![
                    (8000, Fault::Split(halves(nodes))),
                    (9000, Fault::Load(2.0)),
                    (19_000, Fault::Heal),
                ];
                run.window = Some((9000, 19_000));
                self.add("idle at the cut", "then 2 x the limit on all sides, 10 s", run);
            }
        }
    }

    fn membership(&mut self) {
        for per_second in [30, 100, 1000, 10_000] {
            for nodes in [3, 10] {
                let mut run = Scenario::new(nodes, per_second, 3.0, 24);
                let rest = 0.4 / (nodes - 1) as f64;
                let shares = (0..nodes).map(|node| if node == 0 { 0.6 } else { rest });
                run.demand = Demand::Shares(shares.collect());
                run.faults = vec![(8000, Fault::Kill(0))];
                run.window = Some((8000, 9500));
                self.add("kill -9 of the hottest", "first 1.5 s, then 3 s", run);
                let mut run = Scenario::new(nodes, per_second, 2.0, 24);
                run.faults = vec![(8000, Fault::Stop(0)), (10_000, Fault::Resume(0))];
                run.window = Some((8000, 10_000));
                self.add("a process stands still", "2 s", run);
            }
            for (orderly, same_address) in
                [(true, false), (true, true), (false, false), (false, true)]
            {
                let mut run = Scenario::new(5, per_second, 2.0, 40);
                roll(&mut run, orderly, same_address);
                let how = if orderly { "Goodbye" } else { "kill -9" };
                let place = if same_address { "the same address" } else { "another address" };
                self.add("rolling update of 5", format!("{how}, {place}"), run);
            }
            let mut run = Scenario::new(3, per_second, 2.0, 40);
            run.faults = (0..7).map(|i| (3000 + 500 * i, Fault::Start)).collect();
            run.faults.extend((3..10).map(|i| (20_000 + 500 * i as u64, Fault::Leave(i))));
            self.add("3, then 10, then 3", "", run);
        }
        for per_second in [100, 10_000] {
            for nodes in [3, 10] {
                let mut run = Scenario::new(nodes, per_second, 2.0, 20);
                run.faults =
                    (1..=5).map(|i| (3000 * i, Fault::Reset(i as usize % nodes))).collect();
                self.add("resets", "five under load", run);
                for (to, what) in [(per_second / 2, "lowered to half"), (per_second * 2, "doubled")]
                {
                    let mut run = Scenario::new(nodes, per_second, 3.0, 24);
                    // The larger one rules until all have reloaded.
                    let ideal_at = if to > per_second { 0 } else { nodes - 1 };
                    run.faults = (0..nodes)
                        .map(|i| {
                            (
                                8000 + 2000 * i as u64 / nodes as u64,
                                Fault::Reload(i, to, i == ideal_at),
                            )
                        })
                        .collect();
                    run.window = Some((8000, 10_000));
                    self.add("reloads", format!("{what} over 2 s"), run);
                }
            }
        }
    }
}

fn cut_for(mut run: Scenario, fault: Fault, cut: u64) -> Scenario {
    let end = 8000 + cut * 1000;
    run.faults = vec![(8000, fault), (end, Fault::Heal)];
    run.window = Some((8000, end));
    run
}

fn matrix() -> Vec<Run> {
    let mut matrix = Matrix(Vec::new());
    matrix.steady();
    matrix.networks();
    matrix.loads();
    matrix.partitions();
    matrix.membership();
    matrix.0
}

/// Plays all runs, on all cores.
fn play(runs: &[Run]) -> Vec<Report> {
    let reports = Mutex::new(vec![Report::default(); runs.len()]);
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(run) = runs.get(i) else { break };
                    let report = run.scenario.report();
                    println!("{}", line(run, &report));
                    reports.lock().unwrap()[i] = report;
                }
            });
        }
    });
    reports.into_inner().unwrap()
}

fn line(run: &Run, report: &Report) -> String {
    let s = &run.scenario;
    let part = |part: Option<f64>| part.map_or(String::from("-"), |part| format!("{part:.3}"));
    format!(
        "| {}{}{} | {} | {}/s | {} | {} | {:.2} | {:.2} | {:.1} | {:+.1} | {:.1} | {:.3} | {} | {} \
         | {} | {:.0} | {:.1} |",
        run.group,
        if run.what.is_empty() { "" } else { ": " },
        run.what,
        s.nodes,
        s.per_second,
        s.load,
        shape(&s.demand),
        report.over,
        report.under,
        report.worst_second,
        report.first_second,
        report.excess,
        report.jain,
        part(report.during),
        part(report.after),
        part(report.settled),
        report.entries,
        report.bytes / 1024.0,
    )
}

const HEAD: &str = "| run | N | limit | load | demand | over % | under % | worst second % | first \
                    second % | excess, tokens | Jain | during | after | settled | entries/s | KiB/s \
                    |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";

/// A target of the design, and which runs it is for.
struct Target {
    what: &'static str,
    of: fn(&Run) -> bool,
    met: fn(&Run, &Report) -> bool,
    worst: fn(&Report) -> f64,
}

fn is_steady(run: &Run) -> bool {
    ["steady", "held out"].contains(&run.group)
}

const TARGETS: &[Target] = &[
    Target {
        what: "steady: over <= 0.3 %",
        of: is_steady,
        met: |_, report| report.over <= 0.3,
        worst: |report| report.over,
    },
    Target {
        what: "steady: under <= 0.5 %",
        of: is_steady,
        met: |_, report| report.under <= 0.5,
        worst: |report| report.under,
    },
    Target {
        what: "steady: off by the target or by one token, whichever is more",
        of: is_steady,
        met: |_, report| {
            report.difference.abs() <= 1.0 || (report.over <= 0.3 && report.under <= 0.5)
        },
        worst: |report| report.over.max(report.under),
    },
    Target {
        what: "steady: first second <= 1 % over, or one token",
        of: is_steady,
        met: |_, report| report.first_second <= 1.0 || report.first_second_tokens <= 1.0,
        worst: |report| report.first_second,
    },
    Target {
        what: "steady: Jain >= 0.9",
        of: is_steady,
        met: |_, report| report.jain >= 0.9,
        worst: |report| -report.jain,
    },
    Target {
        what: "partition of 10 and 30 s, limits >= 30/s: 0.97 to 1.03 during it",
        of: |run| run.group == "partition",
        met: |_, report| report.during.is_some_and(|part| (0.97..=1.03).contains(&part)),
        worst: |report| report.during.map_or(0.0, |part| (part - 1.0).abs()),
    },
    Target {
        what: "partition: no silence in the 3 s after it (>= 0.95)",
        of: |run| run.group.starts_with("partition"),
        met: |_, report| report.after.is_some_and(|part| part >= 0.95),
        worst: |report| report.after.map_or(0.0, |part| 1.0 - part),
    },
    Target {
        what: "rolling update of 5: <= 1 % over",
        of: |run| run.group == "rolling update of 5",
        met: |_, report| report.over <= 1.0,
        worst: |report| report.over,
    },
    Target {
        what: "kill -9 of the hottest: >= 0.97 from 1.5 s on",
        of: |run| run.group == "kill -9 of the hottest",
        met: |_, report| report.after.is_some_and(|part| part >= 0.97),
        worst: |report| report.after.map_or(0.0, |part| 1.0 - part),
    },
];

fn page(runs: &[Run], reports: &[Report], many: &str, took: f64) -> String {
    let commit = Command::new("git").args(["describe", "--always", "--dirty"]).output();
    let commit = commit.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    let mut page = String::new();
    let all = || runs.iter().zip(reports);
    let _ = write!(
        page,
        "# Accuracy\n\n\
         Written by `{COMMAND}` at commit `{}`: {} runs in {took:.0} s. Do not edit; run it again.\n\n\
         Every run is the product's own limiter and replication engine, N times, over a virtual \
         clock and network: one key, seeded Poisson arrivals, connections that keep order (1 ms one \
         way +-25 % unless said otherwise), and one ideal central token bucket that is fed the same \
         arrivals. The seed is 11 for steady runs, 101 and 102 for the held-out ones (limits, sizes \
         and seeds that no constant was chosen by), and 21 for all others. The burst is one second \
         of the rate unless said otherwise.\n\n\
         - over, under: tokens admitted above or below the ideal bucket's, over the whole run\n\
         - worst second: most admitted in any second, above rate + burst\n\
         - first second: beside the ideal's\n\
         - excess: tokens above rate x t + burst in the worst window of any length\n\
         - Jain: fairness over the replicas' admission ratios\n\
         - during, after, settled: admitted beside the ideal while the fault lasts, in the three \
         seconds after it, and later\n\
         - entries/s, KiB/s: sent by one replica to all others, in the product's encoding with 14 \
         bytes of gRPC and HTTP/2 for each frame\n\n\
         ## Targets\n\n| target | runs | met | worst |\n|---|---|---|---|\n",
        commit.unwrap_or_default(),
        runs.len(),
    );
    let mut missed = Vec::new();
    for target in TARGETS {
        let of: Vec<_> = all().filter(|(run, _)| (target.of)(run)).collect();
        let met = of.iter().filter(|(run, report)| (target.met)(run, report)).count();
        let worst = of.iter().map(|(_, report)| (target.worst)(report)).fold(f64::MIN, f64::max);
        let _ = writeln!(
            page,
            "| {} | {} | {} | {:.3} |",
            target.what,
            of.len(),
            if met == of.len() { String::from("all") } else { format!("{met}, **not all**") },
            worst.abs(),
        );
        for (run, report) in of {
            if !(target.met)(run, report) {
                missed.push(format!("{} ({})\n", line(run, report), target.what));
            }
        }
    }
    let _ = write!(page, "\n### Runs that miss a target\n\n");
    if missed.is_empty() {
        page.push_str("None.\n");
    } else {
        page.push_str(HEAD);
        let mut seen = std::collections::BTreeSet::new();
        for line in &missed {
            let row = &line[..=line.rfind('|').unwrap_or(0)];
            if seen.insert(row) {
                let _ = writeln!(page, "{row}");
            }
        }
    }
    let _ = write!(
        page,
        "\n## Steady load, by limit and size\n\nThe worst of all loads and of both demands.\n\n\
         | runs | limit | N | over % | under % | tokens off | worst second % | first second % | Jain \
         | entries/s | KiB/s |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
    );
    let mut keys: Vec<(&str, u64, usize)> = all()
        .filter(|(run, _)| is_steady(run))
        .map(|(run, _)| (run.group, run.scenario.per_second, run.scenario.nodes))
        .collect();
    keys.sort_unstable_by(|a, b| b.0.cmp(a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    keys.dedup();
    for key in keys {
        let of = all()
            .filter(|(run, _)| (run.group, run.scenario.per_second, run.scenario.nodes) == key);
        let of: Vec<&Report> = of.map(|(_, report)| report).collect();
        let most = |f: fn(&Report) -> f64| of.iter().map(|r| f(r)).fold(f64::MIN, f64::max);
        let _ = writeln!(
            page,
            "| {} {} | {}/s | {} | {:.2} | {:.2} | {:.0} | {:.1} | {:+.1} | {:.3} | {:.0} | {:.1} |",
            of.len(),
            key.0,
            key.1,
            key.2,
            most(|r| r.over),
            most(|r| r.under),
            most(|r| r.difference.abs()),
            most(|r| r.worst_second),
            most(|r| r.first_second),
            -most(|r| -r.jain),
            most(|r| r.entries),
            most(|r| r.bytes / 1024.0),
        );
    }
    let _ = write!(page, "\n## All other runs\n\n{HEAD}");
    for (run, report) in all().filter(|(run, _)| !is_steady(run)) {
        let _ = writeln!(page, "{}", line(run, report));
    }
    page.push_str(many);
    page
}

/// The matrix is to hold what is documented, not only to be printed.
fn is_acceptable(run: &Run, report: &Report) -> bool {
    let token = 1.0f64.max(run.scenario.costs.iter().copied().max().unwrap_or(1) as f64);
    let few = report.difference.abs() <= 2.0 * token;
    match run.group {
        "steady" | "held out" => few || (report.over <= 0.5 && report.under <= 0.7),
        _ => true,
    }
}

#[test]
#[ignore = "takes minutes; writes docs/accuracy.md"]
fn matrix_of_all_scenarios() {
    #[allow(clippy::disallowed_methods, reason = "only to say how long it took")]
    let began = std::time::Instant::now();
    let runs = matrix();
    println!("{} runs", runs.len());
    let reports = play(&runs);
    let mut many = String::from("\n## Many keys\n\n| what | result |\n|---|---|\n");
    many.push_str(&many::a_million_buckets());
    many.push_str(
        "\n10,000 keys of 10/s each are asked for; the fixed rate is what sending every key to \
         every peer each 50 ms would take. CPU is that of the whole simulated cluster, requests \
         and arrivals included, in this build.\n\n\
         | N | keys | requests/s | entries/s/replica | bytes/entry | KiB/s/replica | fixed \
         entries/s/replica | CPU us/entry | CPU/replica |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for (nodes, per_key, what) in [
        (3, 1.0, "slack, 0.1 x"),
        (3, 20.0, "scarce, 2 x"),
        (10, 1.0, "slack, 0.1 x"),
        (50, 1.0, "slack, 0.1 x"),
    ] {
        many.push_str(&many::ten_thousand_active_keys(nodes, per_key, what));
    }
    let page = page(&runs, &reports, &many, began.elapsed().as_secs_f64());
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/accuracy.md");
    std::fs::create_dir_all(concat!(env!("CARGO_MANIFEST_DIR"), "/docs")).unwrap();
    std::fs::write(path, &page).unwrap();
    let failed: Vec<String> = runs
        .iter()
        .zip(&reports)
        .filter(|(run, report)| !is_acceptable(run, report))
        .map(|(run, report)| line(run, report))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
