//! How a whole replica starts, is asked whether it is well, and leaves.

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use tonic_health::pb::health_check_response::ServingStatus;

use crate::harness::app::{Network, Spec, meshed, until};
use crate::harness::{Reply, Upstream};

const ALL: &str = "name: all, key: [], rate: 1000/40d";

#[test]
fn ready_means_joined() {
    let network = Network::new();
    network.list(&[11, 12]);
    let spec = Spec::new([ALL]);
    // Nobody listens at the other address yet, and half a minute is the limit.
    let r1 = network.start(11, &spec);
    assert_eq!(r1.waiting_for(), ["join"]);
    assert_eq!(r1.telemetry("/livez").status, 200);
    assert_eq!(r1.health(), ServingStatus::NotServing);
    let page = r1.telemetry("/");
    assert!(page.text().contains("no, waiting for join"), "{}", page.text());

    let r2 = network.start(12, &spec);
    meshed(&[&r1, &r2]);
    for replica in [&r1, &r2] {
        until("health follows", || replica.health() == ServingStatus::Serving);
        assert_eq!(replica.telemetry("/readyz").text(), "ready\n");
    }
}

#[test]
fn a_replica_without_peers_is_ready_at_once() {
    let network = Network::new();
    let replica = network.start(11, &Spec::new([ALL]).alone());
    assert_eq!(replica.addresses.peer, None);
    replica.ready();
    until("health follows", || replica.health() == ServingStatus::Serving);
    assert_eq!(replica.get("/").status, 200);
}

#[test]
fn lc_g4_a_replica_that_leaves_still_serves_while_endpoints_notice() {
    let network = Network::new();
    let replica = network.start(11, &Spec::new([ALL]).alone().drain_delay("1h"));
    replica.ready();
    let mut kept = replica.connect();
    assert_eq!(kept.get("/").field("connection"), None);

    replica.stop("first");
    until("it is not ready", || replica.waiting_for() == ["draining"]);
    until("health follows", || replica.health() == ServingStatus::NotServing);
    for _ in 0..20 {
        assert_eq!(replica.get("/").status, 200);
        assert_eq!(replica.telemetry("/livez").status, 200);
        assert_eq!(replica.telemetry("/readyz").status, 503);
    }
    assert_eq!(kept.get("/").status, 200);

    replica.stop("second");
    let error = replica.left_with().unwrap_err().to_string();
    assert!(error.starts_with("second again: left at once"), "{error}");
}

#[test]
fn lc_g1_requests_that_run_are_finished() {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let opened = Arc::clone(&gate);
    let network = Network::with_upstream(Upstream::scripted(move |_| {
        let (open, changed) = &*opened;
        drop(changed.wait_while(open.lock().unwrap(), |open| !*open).unwrap());
        Reply::Ok("late")
    }));
    let replica = network.start(11, &Spec::new([ALL]).alone());
    replica.ready();
    let mut clients: Vec<_> = (0..20).map(|_| replica.connect()).collect();
    for client in &mut clients {
        client.send(crate::harness::request("GET", "/", &[], ""));
    }
    until("all run", || network.upstream.count() == 20);

    replica.stop("a test");
    until("it is not ready", || replica.waiting_for() == ["draining"]);
    until("no more are let in", || std::net::TcpStream::connect(replica.addresses.proxy).is_err());
    let (open, changed) = &*gate;
    *open.lock().unwrap() = true;
    changed.notify_all();
    for mut client in clients {
        let answer = client.answer();
        assert_eq!((answer.status, answer.text()), (200, "late"));
        assert_eq!(answer.field("connection"), Some("close"));
        assert!(client.is_ended());
    }
    replica.left_with().unwrap();
}

#[test]
fn the_tasks_of_connections_are_counted_and_end_with_them() {
    let network = Network::new();
    let replica = network.start(11, &Spec::new([ALL]).alone());
    replica.ready();
    let on_proxies = || {
        let page = replica.telemetry("/metrics");
        assert!(page.text().contains("\ntidegate_tasks{thread=\"main\"} "), "{}", page.text());
        let samples = page.text().lines().filter_map(|line| {
            line.strip_prefix("tidegate_tasks{thread=\"proxy-")?
                .split(' ')
                .nth(1)?
                .parse::<usize>()
                .ok()
        });
        samples.sum::<usize>()
    };
    let before = on_proxies();
    let mut clients: Vec<_> = (0..20).map(|_| replica.connect()).collect();
    for client in &mut clients {
        assert_eq!(client.get("/").status, 200);
    }
    assert!(on_proxies() >= before + clients.len());
    drop(clients);
    until("all have ended", || on_proxies() <= before);
}

#[test]
fn lc_g5_an_upstream_that_starts_late_is_reached_without_a_restart() {
    let network = Network::new();
    let address = {
        let listener = TcpListener::bind((network.ip(99), 0)).unwrap();
        listener.local_addr().unwrap()
    };
    let limit = "name: all, key: [], rate: 3/40d";
    let replica = network.start(11, &Spec::new([limit]).alone().upstream(address));
    replica.ready();
    for _ in 0..5 {
        let answer = replica.get("/");
        assert_eq!(answer.status, 502);
        assert!(answer.field("proxy-status").is_some());
        assert_eq!(answer.field("content-type"), Some("application/problem+json"));
    }
    assert_eq!(replica.left("all", &[]), 3, "a token did not come back");
    assert!(replica.waiting_for().is_empty(), "readiness hangs on the upstream");

    let upstream = Upstream::on(TcpListener::bind(address).unwrap(), |_| Reply::Ok("ok"));
    assert_eq!(replica.spend("/", 5), 3);
    assert_eq!(upstream.count(), 3);
    assert_eq!(replica.left("all", &[]), 0);
    assert_eq!(replica.metric("tidegate_http_requests_total{outcome=\"upstream_failed\"}"), 5.0);
}

#[test]
fn lc_g7_nothing_that_clients_do_keeps_probes_from_an_answer() {
    let network = Network::new();
    let replica = network.start(11, &Spec::new(["name: all, key: [], rate: 1/40d"]).alone());
    replica.ready();
    until("health follows", || replica.health() == ServingStatus::Serving);
    assert_eq!(replica.spend("/", 2), 1);
    let ended = AtomicBool::new(false);
    let refused = std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let (mut connection, mut refused) = (replica.connect(), 0);
            while !ended.load(Ordering::Relaxed) {
                assert_eq!(connection.get("/").status, 429);
                refused += 1;
            }
            refused
        });
        for _ in 0..50 {
            assert_eq!(replica.telemetry("/livez").status, 200);
            assert_eq!(replica.telemetry("/readyz").status, 200);
            assert_eq!(replica.health(), ServingStatus::Serving);
        }
        ended.store(true, Ordering::Relaxed);
        flood.join().unwrap()
    });
    assert!(refused > 0);
    assert_eq!(network.upstream.count(), 1);
}
