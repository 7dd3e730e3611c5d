//! Many keys: bounds of memory, and what entries cost.
//!
//! The figures go to `docs/accuracy-many-keys.md`.

#![allow(clippy::disallowed_methods, reason = "what the processor needs is what is measured")]

use std::time::Instant;

use crate::cluster::{Cluster, Network, limit};
use crate::rng::Rng;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
const MIB: usize = 1024 * 1024;

fn cluster(nodes: usize, rate: &str, burst: u64) -> Cluster {
    let mut cluster = Cluster::new(31, Network::default(), vec![limit("one", rate, burst, 1)]);
    for _ in 0..nodes {
        cluster.start();
    }
    cluster.run_for(3 * SECOND);
    cluster
}

/// What one node holds for another.
fn backlog(cluster: &Cluster, of: usize, for_whom: usize) -> usize {
    let peer = cluster.nodes[for_whom].engine.incarnation();
    cluster.nodes[of].engine.backlog_bytes(peer)
}

#[test]
fn a_stalled_stream_with_100_000_marked_keys_holds_less_than_a_mebibyte() {
    let mut cluster = cluster(2, "10/40d", 10);
    cluster.deafen(0, 1);
    let mut most = 0;
    for i in 0..100_000 {
        assert!(cluster.request(0, &format!("k{i}")));
        if i % 1000 == 0 {
            cluster.run_for(10 * MS);
            most = most.max(backlog(&cluster, 0, 1));
        }
    }
    cluster.run_for(5 * SECOND);
    most = most.max(backlog(&cluster, 0, 1));
    // What is being caught up is bounded likewise.
    cluster.partition(&[0, 0]);
    for _ in 0..300 {
        cluster.run_for(10 * MS);
        most = most.max(backlog(&cluster, 0, 1));
    }
    println!("at most {} KiB", most / 1024);
    assert!(most < MIB, "{most} bytes");
    cluster.run_for(5 * SECOND);
    for i in (0..100_000).step_by(977) {
        let level = cluster.level(1, 0, &format!("k{i}")).floor();
        assert!((level - 9.0).abs() < 0.5, "k{i} has {level}");
    }
}

/// One run's figures, as lines for the report.
fn many_buckets(nodes: usize, keys: u64) -> String {
    let mut cluster = cluster(nodes, "10/40d", 10);
    let began = Instant::now();
    for i in 0..keys {
        assert!(cluster.request(0, &format!("k{i}")));
        if i % 1000 == 0 {
            cluster.run_for(10 * MS);
        }
    }
    let spent = began.elapsed();
    cluster.run_for(30 * SECOND);
    for i in (0..keys).step_by(9973) {
        for node in 1..nodes {
            let level = cluster.level(node, 0, &format!("k{i}")).floor();
            assert!((level - 9.0).abs() < 0.5, "k{i} has {level} on {node}");
        }
    }
    let began = Instant::now();
    let joiner = cluster.start();
    let from = cluster.now;
    while !cluster.nodes[joiner].engine.is_joined() {
        cluster.run_for(MS);
    }
    let (joined, took) = ((cluster.now - from) / MS, began.elapsed());
    let mut most = 0;
    for _ in 0..10_000 {
        cluster.run_for(MS);
        most = most.max(backlog(&cluster, 0, joiner));
    }
    for i in (0..keys).step_by(9973) {
        let level = cluster.level(joiner, 0, &format!("k{i}")).floor();
        assert!((level - 9.0).abs() < 0.5, "k{i} has {level}");
    }
    assert!(most < MIB, "{most} bytes");
    format!(
        "| {keys} buckets in each of {nodes} stores, 100,000 new keys/s | every bucket equal on all \
         sides; {:.1} us of CPU for a request with all that follows from it on all sides |\n\
         | another replica joins them | {joined} ms of virtual time to all {keys} rows, {:.1} s \
         of CPU for all replicas; at most {} KiB held for its stream |\n",
        spent.as_secs_f64() * 1e6 / keys as f64,
        took.as_secs_f64(),
        most / 1024,
    )
}

/// One run's figures, as lines for the report.
fn ten_thousand_active_keys(nodes: usize, per_key: f64, what: &str) -> String {
    const KEYS: usize = 10_000;
    const SECONDS: u64 = 4;
    let mut cluster = cluster(nodes, "10/s", 10);
    let keys: Vec<String> = (0..KEYS).map(|i| format!("k{i}")).collect();
    let mut rng = Rng::new(32);
    let started = cluster.now;
    let (mut at, mut requests) = (started, 0_u64);
    // A second for the keys to be met.
    let mut before = None;
    let mut began = Instant::now();
    while at < started + (1 + SECONDS) * SECOND {
        at += rng.exponential_nanos(KEYS as f64 * per_key);
        cluster.run_until(at);
        if before.is_none() && at >= started + SECOND {
            before = Some((cluster.entries_sent(), cluster.bytes_sent, requests));
            began = Instant::now();
        }
        let node = (rng.unit() * nodes as f64) as usize;
        let key = &keys[(rng.unit() * KEYS as f64) as usize];
        cluster.request(node, key);
        requests += 1;
    }
    let took = began.elapsed().as_secs_f64();
    let (entries, bytes, asked) = before.unwrap();
    let entries = cluster.entries_sent() - entries;
    let bytes = cluster.bytes_sent - bytes;
    let replica_seconds = (SECONDS * nodes as u64) as f64;
    let fixed = KEYS as f64 * (nodes - 1) as f64 * 20.0;
    format!(
        "| {nodes} | {what} | {:.0} | {:.0} | {:.1} | {:.0} | {:.0} | {:.2} | {:.1} % |\n",
        (requests - asked) as f64 / SECONDS as f64,
        entries as f64 / replica_seconds,
        bytes as f64 / entries.max(1) as f64,
        bytes as f64 / replica_seconds / 1024.0,
        fixed,
        took * 1e6 / entries.max(1) as f64,
        took / replica_seconds * 100.0,
    )
}

#[test]
#[ignore = "takes minutes; writes docs/accuracy-many-keys.md"]
fn matrix_of_many_keys() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/accuracy-many-keys.md");
    let mut page = String::from(
        "# Many keys\n\nWritten by the command of [accuracy.md](accuracy.md), by the same model; \
         seeds 31 and 32. CPU is that of the whole simulated cluster, requests and arrivals \
         included.\n\n10,000 keys of 10/s each; fixed is what sending every key to every peer \
         each 50 ms would take.\n\n\
         | N | keys | requests/s | entries/s/replica | bytes/entry | KiB/s/replica | fixed \
         entries/s/replica | CPU us/entry | CPU/replica |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for (nodes, per_key, what) in [
        (3, 1.0, "slack, 0.1 x"),
        (3, 20.0, "scarce, 2 x"),
        (10, 1.0, "slack, 0.1 x"),
        (50, 1.0, "slack, 0.1 x"),
    ] {
        page.push_str(&ten_thousand_active_keys(nodes, per_key, what));
        std::fs::write(path, &page).unwrap();
    }
    page.push_str("\n| what | result |\n|---|---|\n");
    page.push_str(&many_buckets(2, 1_000_000));
    page.push_str(&many_buckets(50, 20_000));
    std::fs::write(path, &page).unwrap();
}
