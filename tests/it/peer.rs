//! The mesh between replicas, over real gRPC on loopback.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tidegate::replication::PeerState;

use crate::harness::relay::{Mode, Relay};
use crate::harness::replica::{Replica, Spec, about, agreed, known, meshed};
use crate::harness::{until, until_within};

mod strangers;
mod tls;

/// Two replicas that know each other directly.
async fn pair(rate: &str) -> (Replica, Replica) {
    let r1 = Replica::start(Spec::new("r1", rate), []).await;
    let r2 = Replica::start(Spec::new("r2", rate), [r1.address]).await;
    meshed(&[&r1, &r2]).await;
    (r1, r2)
}

/// Two replicas that are connected through a relay only: r1 dials r2.
async fn pair_through_relay(rate: &str) -> (Replica, Relay, Replica) {
    let r2 = Replica::start(Spec::new("r2", rate), []).await;
    let relay = Relay::to(r2.address).await;
    let r1 = Replica::start(Spec::new("r1", rate), [relay.address]).await;
    meshed(&[&r1, &r2]).await;
    (r1, relay, r2)
}

#[tokio::test]
async fn what_one_replica_spends_the_others_see() {
    let specs = [11, 12, 13]
        .map(|host| Spec::new(&format!("r{host}"), "100/d").at(format!("127.0.0.{host}:0")));
    let mut replicas = Vec::new();
    for spec in specs {
        replicas.push(Replica::start(spec, []).await);
    }
    // Everybody dials everybody, itself included, at the same moment.
    let all: Vec<SocketAddr> = replicas.iter().map(|replica| replica.address).collect();
    for replica in &replicas {
        replica.list(all.iter().copied());
    }
    let all: Vec<&Replica> = replicas.iter().collect();
    meshed(&all).await;
    for (index, replica) in all.iter().enumerate() {
        assert_eq!(replica.spend("k", 10 * (index + 1)), 10 * (index + 1));
    }
    known(&all, "k", &[10, 20, 30]).await;
    about(&all, "k", 40, 1).await;
    // Of the two streams that each pair dialled one stayed.
    for replica in &all {
        assert_eq!(replica.look(|engine, _| engine.sessions().count()).await, 2);
    }
}

#[tokio::test]
async fn an_urgent_change_is_seen_within_milliseconds() {
    let (r1, r2) = pair("10/d").await;
    // The second change of a bucket that is known on both sides.
    r1.spend("k", 1);
    agreed(&[&r2], "k", 9).await;
    let mut best = Duration::MAX;
    for left in (0..8).rev() {
        let start = Instant::now();
        assert_eq!(r1.spend("k", 1), 1);
        while r2.remaining("k").await != left + 1 {
            assert!(start.elapsed() < Duration::from_secs(5), "{left}");
            tokio::task::yield_now().await;
        }
        best = best.min(start.elapsed());
    }
    // Not the sync interval of 20 ms, nor a tick of a timer.
    assert!(best < Duration::from_millis(15), "{best:?}");
}

#[tokio::test]
async fn rp_g1_each_replica_decides_by_what_both_spent() {
    let (r1, r2) = pair("10/d").await;
    assert_eq!(r1.spend("k", 10), 10);
    agreed(&[&r1, &r2], "k", 0).await;
    assert_eq!(r2.spend("k", 10), 0);

    let mut admitted = 0;
    for round in 0..40 {
        let replica = if round % 2 == 0 { &r1 } else { &r2 };
        admitted += replica.spend("other", 1);
        agreed(&[&r1, &r2], "other", 10_u64.saturating_sub(admitted as u64)).await;
    }
    assert!((10..=11).contains(&admitted), "{admitted}");
}

#[tokio::test]
async fn rp_g2_a_resync_changes_nothing() {
    let (r1, relay, mut r2) = pair_through_relay("100/d").await;
    assert_eq!(r1.spend("k", 3), 3);
    agreed(&[&r1, &r2], "k", 97).await;
    for _ in 0..20 {
        let before = r1.refreshes.load(std::sync::atomic::Ordering::Relaxed);
        relay.cut();
        until("the lost session is noticed", async || {
            r1.refreshes.load(std::sync::atomic::Ordering::Relaxed) > before
        })
        .await;
        meshed(&[&r1, &r2]).await;
        assert_eq!((r1.remaining("k").await, r2.remaining("k").await), (97, 97));
    }
    for _ in 0..5 {
        let address = r2.address;
        r2.kill();
        r2 = Replica::start(Spec::new("r2", "100/d").at(address), [r1.address]).await;
        r2.joined().await;
        assert_eq!(r2.remaining("k").await, 97);
        meshed(&[&r1, &r2]).await;
        agreed(&[&r1, &r2], "k", 97).await;
    }
}

#[tokio::test]
async fn rp_g6_a_late_joiner_gets_everything() {
    let keys = ["a", "b", "c", "d", "e"];
    let r1 = Replica::start(Spec::new("r1", "5/d"), []).await;
    r1.joined().await;
    for key in keys {
        assert_eq!(r1.spend(key, 6), 5);
    }
    let r2 = Replica::start(Spec::new("r2", "5/d"), [r1.address]).await;
    r2.joined().await;
    // From the first moment on, without another wait.
    for key in keys {
        assert_eq!(r2.spend(key, 1), 0, "{key}");
    }
}

#[tokio::test]
async fn a_fourth_replica_has_the_snapshot_before_it_has_joined() {
    let r1 = Replica::start(Spec::new("r1", "1000/d"), []).await;
    let r2 = Replica::start(Spec::new("r2", "1000/d"), [r1.address]).await;
    let r3 = Replica::start(Spec::new("r3", "1000/d"), [r1.address, r2.address]).await;
    meshed(&[&r1, &r2, &r3]).await;
    for (replica, count) in [(&r1, 100), (&r2, 200), (&r3, 300)] {
        assert_eq!(replica.spend("k", count), count);
    }
    known(&[&r1, &r2, &r3], "k", &[100, 200, 300]).await;
    about(&[&r1, &r2, &r3], "k", 400, 6).await;
    // Many buckets, so that the snapshot comes in several parts.
    for key in 0..3_000 {
        r1.spend(&format!("many-{key}"), 1);
    }
    agreed(&[&r2, &r3], "many-2999", 999).await;
    let all = [r1.address, r2.address, r3.address];
    let r4 = Replica::start(Spec::new("r4", "1000/d"), all).await;
    r4.joined().await;
    let left = r4.remaining("k").await;
    assert!(left.abs_diff(400) <= 6, "{left}");
    for key in [0, 1_500, 2_999] {
        assert_eq!(r4.remaining(&format!("many-{key}")).await, 999);
    }
    assert!(!r4.look(|engine, _| engine.stats().joined_alone).await);
}

#[tokio::test]
async fn rp_g7_a_restarted_replica_starts_a_new_ledger() {
    let (r1, r2) = pair("100/d").await;
    assert_eq!(r2.spend("k", 50), 50);
    agreed(&[&r1, &r2], "k", 50).await;
    let (address, before) = (r2.address, r1.peers().await[0].incarnation);
    r2.kill();
    let r2 = Replica::start(Spec::new("r2", "100/d").at(address), [r1.address]).await;
    r2.joined().await;
    meshed(&[&r1, &r2]).await;
    assert_eq!(r2.spend("k", 10), 10);
    agreed(&[&r1, &r2], "k", 40).await;
    let now = r1.peers().await;
    assert_eq!(now.len(), 1, "the former life is still a peer");
    assert_ne!(now[0].incarnation, before);
}

#[tokio::test]
async fn rp_g8_a_batch_that_is_delivered_again_counts_once() {
    let (r1, relay, r2) = pair_through_relay("1000/d").await;
    for round in 0..50 {
        let before = relay.passed();
        assert_eq!(r1.spend("k", 1), 1);
        // The entry is on its way, its acknowledgement is not back.
        until("something passed the relay", async || relay.passed() > before).await;
        relay.cut();
        if round % 10 == 9 {
            meshed(&[&r1, &r2]).await;
        }
    }
    agreed(&[&r1, &r2], "k", 950).await;
    meshed(&[&r1, &r2]).await;
    assert_eq!((r1.remaining("k").await, r2.remaining("k").await), (950, 950));
}

#[tokio::test]
async fn rp_g9_an_idle_mesh_does_next_to_nothing() {
    // Loopback addresses where nobody listens.
    let nobody = ["127.0.0.21:1", "127.0.0.22:1"].map(|address| address.parse().unwrap());
    let lonely = Replica::start(Spec::new("lonely", "10/d"), nobody).await;
    let (r1, r2) = pair("10/d").await;
    let replicas = [&lonely, &r1, &r2];
    for replica in replicas {
        replica.joined().await;
    }
    let before = replicas.map(|replica| replica.effort());
    // The measured span itself, not a wait for anything.
    let span = Duration::from_secs(3);
    tokio::time::sleep(span).await;
    for (replica, (busy, parks)) in replicas.into_iter().zip(before) {
        let (busy_now, parks_now) = replica.effort();
        let share = (busy_now - busy).as_secs_f64() / span.as_secs_f64();
        assert!(share < 0.02, "busy for {share} of the time");
        let wakes = parks_now - parks;
        assert!(wakes < 150, "{wakes} wake-ups in {span:?}");
    }
    let failures = lonely.look(|engine, _| engine.stats().dial_failures).await;
    assert!((4..=20).contains(&failures), "{failures} attempts at two addresses");
}

#[tokio::test]
async fn rp_g10_a_peer_that_vanished_is_suspected_in_bounded_time() {
    let (r1, relay, r2) = pair_through_relay("100/d").await;
    assert_eq!(r1.spend("k", 1), 1);
    agreed(&[&r1, &r2], "k", 99).await;
    relay.set(Mode::Swallow);
    let suspect = async |replica: &Replica| {
        replica.peers().await.iter().all(|peer| peer.state == PeerState::Suspect)
    };
    // Three heartbeats of the idle interval at most.
    until_within(Duration::from_secs(5), "r2 is suspect", async || suspect(&r1).await).await;
    until_within(Duration::from_secs(5), "r1 is suspect", async || suspect(&r2).await).await;
    until("the metric says so", async || {
        r1.metric("peers{state=\"suspect\"}") == 1.0 && r1.metric("peers{state=\"live\"}") == 0.0
    })
    .await;
    // Deciding goes on meanwhile.
    assert_eq!(r1.spend("k", 4), 4);
    assert_eq!(r2.spend("k", 5), 5);
    relay.set(Mode::Pass);
    agreed(&[&r1, &r2], "k", 90).await;
    meshed(&[&r1, &r2]).await;
}

#[tokio::test]
async fn rp_g5_what_a_stalled_stream_missed_arrives_when_it_moves_again() {
    const KEYS: usize = 5_000;
    let (r1, relay, r2) = pair_through_relay("100/d").await;
    relay.set(Mode::Stall);
    let mut spent = 0;
    // Until the stream has no window any more, and then as much again.
    until("buckets wait for the stream", async || {
        for key in 0..KEYS {
            r1.spend(&format!("k{key}"), 1);
        }
        spent += 1;
        r1.peers().await[0].pending == KEYS
    })
    .await;
    let frames = r1.look(|engine, _| engine.stats().frames_sent).await;
    assert!(frames < 100, "{frames} frames were made for a stream that takes none");
    for key in 0..KEYS {
        r1.spend(&format!("k{key}"), 1);
    }
    relay.set(Mode::Pass);
    for key in (0..KEYS).step_by(97) {
        agreed(&[&r1, &r2], &format!("k{key}"), 99 - spent).await;
    }
}

#[tokio::test]
async fn ds_g4_a_replica_that_finds_itself_is_not_its_own_peer() {
    let r1 = Replica::start(Spec::new("r1", "10/d"), []).await;
    r1.list([r1.address]);
    until("its own address is recognised", async || {
        r1.look(|engine, _| engine.listed_addresses()).await == 0
    })
    .await;
    assert_eq!(r1.spend("k", 4), 4);
    r1.joined().await;
    assert_eq!(r1.remaining("k").await, 6);
    assert_eq!(r1.peers().await, []);
    assert_eq!(r1.metric("peer_refusals_total{reason=\"self\"}"), 1.0);

    // And its own address need not be in the list.
    let r2 = Replica::start(Spec::new("r2", "10/d"), [r1.address]).await;
    r2.joined().await;
    meshed(&[&r1, &r2]).await;
    assert_eq!(r2.remaining("k").await, 6);
}

#[tokio::test]
async fn me_g4_departed_replicas_leave_no_slots() {
    let r1 = Replica::start(Spec::new("r1", "1000/d"), []).await;
    let mut at = "127.0.0.1:0".parse::<SocketAddr>().unwrap();
    for round in 1..=20 {
        let r2 = Replica::start(Spec::new("r2", "1000/d").at(at), [r1.address]).await;
        at = r2.address;
        r1.list([at]);
        r2.joined().await;
        assert_eq!(r2.remaining("k").await, 1_000 - (round - 1));
        assert_eq!(r2.spend("k", 1), 1);
        agreed(&[&r1], "k", 1_000 - round).await;
        r2.kill();
    }
    until("the last life is given up too", async || r1.peers().await.is_empty()).await;
    assert_eq!(r1.remaining("k").await, 980);
}

#[tokio::test]
async fn lc_a_goodbye_says_everything_and_its_sender_is_forgotten() {
    let r1 = Replica::start(Spec::new("r1", "1000/d"), []).await;
    let r2 = Replica::start(Spec::new("r2", "1000/d"), [r1.address]).await;
    let r3 = Replica::start(Spec::new("r3", "1000/d"), [r1.address, r2.address]).await;
    meshed(&[&r1, &r2, &r3]).await;
    // Spent in the last moment, nothing of it flushed yet.
    for key in 0..500 {
        assert_eq!(r2.spend(&format!("k{key}"), 3), 3);
    }
    let start = Instant::now();
    r2.mesh.leave("the test is over").await;
    let took = start.elapsed();
    // Taken by all, not given up after the bound of a second.
    assert!(took < Duration::from_millis(900), "{took:?}");
    for replica in [&r1, &r3] {
        assert_eq!(replica.connected().await, 1);
        // At once, unless the two were just dialling each other anew: then it is lost
        // first, and its address refuses.
        until("a peer that left is forgotten", async || replica.peers().await.len() == 1).await;
        for key in 0..500 {
            assert_eq!(replica.remaining(&format!("k{key}")).await, 997, "{key}");
        }
    }
    assert!(r2.mesh.inspect(|_, _| ()).await.is_err());
    // Leaving once more does no harm, and the address is free.
    r2.mesh.leave("again").await;
    Replica::start(Spec::new("next", "1000/d").at(r2.address), []).await;
}

#[tokio::test]
async fn a_stalled_peer_does_not_keep_a_replica_from_leaving() {
    let (r1, relay, _r2) = pair_through_relay("1000/d").await;
    relay.set(Mode::Stall);
    r1.spend("k", 1);
    let start = Instant::now();
    r1.mesh.leave("now").await;
    let took = start.elapsed();
    assert!(took < Duration::from_millis(2_500), "{took:?}");
}

#[tokio::test]
async fn a_partition_cuts_a_replica_off_until_it_is_healed() {
    let (r1, r2) = pair("100/d").await;
    r1.list([r2.address]);
    r1.mesh.partition(true).await.unwrap();
    assert_eq!(r1.connected().await, 0);
    until("r2 has lost it too", async || r2.connected().await == 0).await;
    assert_eq!((r1.spend("k", 10), r2.spend("k", 20)), (10, 20));
    // r2 keeps dialling and is refused.
    let failures = async || r2.look(|engine, _| engine.stats().dial_failures).await;
    let before = failures().await;
    until("r2 was refused twice", async || failures().await >= before + 2).await;
    assert_eq!((r1.remaining("k").await, r2.remaining("k").await), (90, 80));
    r1.mesh.partition(false).await.unwrap();
    agreed(&[&r1, &r2], "k", 70).await;
}

#[tokio::test]
async fn a_flood_of_marked_buckets_does_not_wake_the_mesh_for_each() {
    let (r1, r2) = pair("1000/d").await;
    let (_, before) = r1.effort();
    for round in 0..10 {
        for key in 0..1_000 {
            r1.spend(&format!("k{key}"), 1);
        }
        agreed(&[&r2], "k999", 999 - round).await;
    }
    let wakes = r1.effort().1 - before;
    assert!(wakes < 3_000, "{wakes} wake-ups for 10,000 spent tokens");
}

#[tokio::test]
async fn metrics_speak_of_peers_frames_and_entries() {
    let (r1, r2) = pair("100/d").await;
    r1.spend("k", 10);
    agreed(&[&r2], "k", 90).await;
    for (replica, direction) in [(&r1, "sent"), (&r2, "received")] {
        let sample = |name: &str| format!("{name}_total{{direction=\"{direction}\"}}");
        until("frames and entries are counted", async || {
            replica.metric(&sample("frames")) >= 2.0 && replica.metric(&sample("entries")) >= 1.0
        })
        .await;
    }
    until("the peer is counted", async || r1.metric("peers{state=\"live\"}") == 1.0).await;
    assert_eq!(r1.metric("peer_config_mismatch{limit=\"per-key\"}"), 0.0);
    until("nothing is unsynced", async || r1.metric("replication_unsynced_tokens") == 0.0).await;
    let lag = r1.metric("replication_lag_seconds");
    assert!((0.0..3.0).contains(&lag), "{lag}");
    let other = Replica::start(Spec::new("r3", "50/d"), [r1.address]).await;
    other.joined().await;
    until("another quota is a mismatch", async || {
        r1.metric("peer_config_mismatch{limit=\"per-key\"}") == 1.0
    })
    .await;
}
