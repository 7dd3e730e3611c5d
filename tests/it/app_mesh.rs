//! Whole replicas that find each other through DNS and enforce limits together.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use tonic_health::pb::health_check_response::ServingStatus;

use crate::harness::app::{Network, Replica, Spec, agreed, meshed, until};
use crate::harness::dns::Script;

/// Refills nothing that matters while a test runs.
const ALL: &str = "name: all, key: [], rate: 30/40d";

/// Three replicas that know each other.
fn three(network: &Network, spec: &Spec) -> [Replica; 3] {
    network.list(&[11, 12, 13]);
    let replicas = [11, 12, 13].map(|host| network.start(host, spec));
    meshed(&replicas.each_ref());
    replicas
}

#[test]
fn three_replicas_admit_one_burst_together() {
    let network = Network::new();
    let replicas = three(&network, &Spec::new([ALL]).workers(2));
    let all = replicas.each_ref();

    // What one spends is missing in the fields of the others' answers.
    assert_eq!(replicas[0].spend("/", 10), 10);
    agreed(&all, "all", &[], 20);
    for (replica, left) in replicas.iter().zip([19, 18, 17]) {
        let answer = replica.get("/");
        assert_eq!(answer.status, 200);
        let described = answer.field("ratelimit").unwrap();
        assert!(described.starts_with(&format!("\"all\";r={left};t=")), "{described}");
        assert_eq!(answer.field("ratelimit-policy"), Some("\"all\";q=30;w=3456000"));
        agreed(&all, "all", &[], left);
    }

    // As much as there is, without waiting for each other.
    for replica in &replicas {
        assert_eq!(replica.spend("/", 5), 5);
    }
    agreed(&all, "all", &[], 2);
    assert_eq!(replicas[1].spend("/", 5), 2);
    agreed(&all, "all", &[], 0);

    for replica in &replicas {
        assert_eq!(replica.spend("/", 10), 0, "{}", replica.name);
        let refused = replica.get("/");
        assert_eq!(refused.status, 429);
        assert_eq!(refused.json()["limit"], "all");
        let described = refused.field("ratelimit").unwrap();
        assert!(described.starts_with("\"all\";r=0;t="), "{described}");
    }
    assert_eq!(network.upstream.count(), 30);

    // Every replica can tell who spent how much.
    for replica in &replicas {
        let mut spent: Vec<(String, u64)> = Vec::new();
        until("all spending is known", || {
            let bucket = replica.bucket("all", &[]);
            spent = bucket.spent.iter().map(|s| (s.name.clone(), s.micros)).collect();
            spent.sort();
            spent.iter().map(|(_, micros)| micros).sum::<u64>() == 30_000_000
        });
        let wanted = [("replica-11", 16), ("replica-12", 8), ("replica-13", 6)];
        let wanted = wanted.map(|(name, tokens)| (name.to_owned(), tokens * 1_000_000));
        assert_eq!(spent, wanted, "as {} knows it", replica.name);
    }
}

#[test]
fn a_load_on_all_replicas_at_once_is_admitted_once() {
    let network = Network::new();
    let replicas = three(&network, &Spec::new(["name: all, key: [], rate: 300/40d"]));
    let admitted: usize = thread::scope(|scope| {
        let loads: Vec<_> =
            replicas.iter().map(|replica| scope.spawn(|| replica.spend("/", 400))).collect();
        loads.into_iter().map(|load| load.join().unwrap()).sum()
    });
    assert_eq!(network.upstream.count(), admitted);
    // Some pass at one replica before it hears of the last ones at the others;
    // the bucket owes them.
    assert!((300..360).contains(&admitted), "{admitted} were admitted");
    agreed(&replicas.each_ref(), "all", &[], 300 - i64::try_from(admitted).unwrap());
    for replica in &replicas {
        assert_eq!(replica.spend("/", 5), 0);
    }
}

#[test]
fn rp_g6_a_restarted_replica_is_ready_only_when_it_knows_what_was_spent() {
    let network = Network::new();
    let limit = "name: per-key, key: [query:k], rate: 5/40d";
    let spec = Spec::new([limit]);
    let [r1, r2, r3] = three(&network, &spec);
    for key in ["a", "b", "c"] {
        assert_eq!(r1.spend(&format!("/?k={key}"), 5), 5);
        agreed(&[&r1, &r2, &r3], "per-key", &[key], 0);
    }
    r3.kill();
    assert_eq!(r2.spend("/?k=d", 5), 5);

    let r3 = network.start(13, &spec);
    r3.ready();
    for key in ["a", "b", "c", "d"] {
        assert_eq!(r3.spend(&format!("/?k={key}"), 3), 0, "{key} is fresh");
    }
    assert_eq!(r3.spend("/?k=new", 6), 5);
    assert_eq!(network.upstream.count(), 25);
}

#[test]
fn rp_g7_a_restarted_replica_spends_under_a_new_name_and_the_old_stays_counted() {
    let network = Network::new();
    network.list(&[11, 12]);
    let spec = Spec::new(["name: all, key: [], rate: 100/40d"]);
    let r1 = network.start(11, &spec);
    let mut r2 = network.start(12, &spec);
    meshed(&[&r1, &r2]);
    assert_eq!(r2.spend("/", 50), 50);
    agreed(&[&r1, &r2], "all", &[], 50);
    for left in [40, 30] {
        r2.kill();
        r2 = network.start(12, &spec);
        meshed(&[&r1, &r2]);
        agreed(&[&r1, &r2], "all", &[], left + 10);
        assert_eq!(r2.spend("/", 10), 10);
        agreed(&[&r1, &r2], "all", &[], left);
    }
}

#[test]
fn ds_g3_a_fourth_replica_joins_when_it_is_listed() {
    let mut network = Network::new();
    let spec = Spec::new([ALL]);
    let [r1, r2, r3] = three(&network, &spec);
    assert_eq!(r1.spend("/", 12), 12);
    agreed(&[&r1, &r2, &r3], "all", &[], 18);

    // It lists itself in the DNS before it runs, as a pod that is not ready is.
    network.list(&[11, 12, 13, 14]);
    // Two rounds of each of three replicas.
    network.next_lookups(6);
    let r4 = network.start(14, &spec);
    r4.ready();
    assert_eq!(r4.left("all", &[]), 18, "ready without knowing what was spent");
    meshed(&[&r1, &r2, &r3, &r4]);
    assert_eq!(r4.spend("/", 6), 6);
    agreed(&[&r1, &r2, &r3, &r4], "all", &[], 12);
}

#[test]
fn ds_g3_a_replaced_replica_is_forgotten_and_left_in_peace() {
    let mut network = Network::new();
    network.list(&[11, 12]);
    let spec = Spec::new([ALL]);
    let r1 = network.start(11, &spec);
    let r2 = network.start(12, &spec);
    meshed(&[&r1, &r2]);
    r2.kill();
    network.list(&[11, 13]);
    let r3 = network.start(13, &spec);
    meshed(&[&r1, &r3]);
    until("the replaced one is forgotten", || {
        let mesh = r1.mesh();
        mesh.peers.len() == 1 && mesh.peers[0].name == "replica-13"
    });
    until("the metric says so", || {
        r1.metric("tidegate_peers{state=\"live\"}") == 1.0
            && r1.metric("tidegate_peers{state=\"suspect\"}") == 0.0
    });

    // Both have seen the new list; nobody comes to the old address any more.
    network.next_lookups(4);
    let visitors = TcpListener::bind(network.peer_address(12)).unwrap();
    visitors.set_nonblocking(true).unwrap();
    network.next_lookups(4);
    assert!(visitors.accept().is_err(), "the old address is still dialled");
}

#[test]
fn ds_g5_replicas_that_start_before_they_are_listed_meet_without_a_restart() {
    let network = Network::new();
    let spec = Spec::new([ALL]).join_timeout("1s");
    let started = Instant::now();
    let replicas = [11, 12, 13].map(|host| network.start(host, &spec));
    for replica in &replicas {
        replica.ready();
    }
    assert!(started.elapsed() < Duration::from_secs(3), "ready after {:?}", started.elapsed());
    for replica in &replicas {
        assert_eq!(replica.connected(), 0);
        assert_eq!(replica.spend("/", 4), 4);
    }
    network.list(&[11, 12, 13]);
    meshed(&replicas.each_ref());
    // What each spent while it was alone counts for all.
    agreed(&replicas.each_ref(), "all", &[], 30 - 3 * 4);
}

#[test]
fn ds_g1_a_silent_dns_server_changes_nothing() {
    let mut network = Network::new();
    let spec = Spec::new([ALL]);
    let [r1, r2, r3] = three(&network, &spec);
    network.dns.set(Script::Silent);
    until("the lookups fail", || {
        let failed = "tidegate_discovery_lookups_total{result=\"failed\"}";
        [&r1, &r2, &r3].iter().all(|replica| replica.metric(failed) >= 1.0)
    });
    network.dns.set(Script::ServerFailure);
    network.next_lookups(6);
    for replica in [&r1, &r2, &r3] {
        assert_eq!(replica.connected(), 2, "{}", replica.name);
        assert!(replica.waiting_for().is_empty());
    }
    assert_eq!(r1.spend("/", 7), 7);
    agreed(&[&r1, &r2, &r3], "all", &[], 23);

    // A peer that is restarted meanwhile is found by what is known of it.
    r3.kill();
    network.list(&[11, 12, 13]);
    let r3 = network.start(13, &spec);
    meshed(&[&r1, &r2, &r3]);
    agreed(&[&r3], "all", &[], 23);
}

#[test]
fn ds_g4_a_replica_that_is_listed_alone_is_no_peer_of_its_own() {
    let mut network = Network::new();
    network.list(&[11]);
    let r1 = network.start(11, &Spec::new(["name: all, key: [], rate: 10/40d"]).join_timeout("1s"));
    r1.ready();
    assert_eq!(r1.spend("/", 4), 4);
    network.next_lookups(3);
    assert_eq!(r1.left("all", &[]), 6);
    assert_eq!(r1.mesh().peers.len(), 0);
    assert_eq!(r1.metric("tidegate_peers{state=\"live\"}"), 0.0);
    assert_eq!(r1.health(), ServingStatus::Serving);
    assert_eq!(r1.telemetry("/readyz").status, 200);
}

#[test]
fn ds_g4_a_replica_that_is_not_listed_itself_is_healthy_and_has_peers() {
    let network = Network::new();
    network.list(&[12]);
    let spec = Spec::new([ALL]);
    let r2 = network.start(12, &Spec::new([ALL]).join_timeout("1s"));
    let r1 = network.start(11, &spec);
    meshed(&[&r1, &r2]);
    assert_eq!(r1.health(), ServingStatus::Serving);
    assert_eq!(r1.spend("/", 3), 3);
    agreed(&[&r1, &r2], "all", &[], 27);
}

#[test]
fn a_replica_that_leaves_has_told_everything_and_is_forgotten() {
    let network = Network::new();
    let [r1, r2, r3] = three(&network, &Spec::new([ALL]));
    assert_eq!(r3.spend("/", 11), 11);
    r3.stop("a test");
    r3.left_with().unwrap();
    for replica in [&r1, &r2] {
        assert_eq!(replica.left("all", &[]), 19, "{} was not told", replica.name);
        until("it is forgotten", || replica.mesh().peers.len() == 1);
    }
}
