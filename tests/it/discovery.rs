//! Discovery against a DNS server that the test scripts.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use prometheus_client::registry::Registry;
use tidegate::discovery::{Config, Discovery, Handle, Health, HostPort, Metrics, PeerSet};
use tidegate::runtime::{Drain, DrainControl, Stage};
use tidegate::time::Clock;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::harness::dns::{DnsServer, Script};

const PORT: u16 = 9401;

/// Longer than any test may take to see what it waits for.
const PATIENCE: Duration = Duration::from_secs(20);

/// A discovery that runs until the test ends.
struct Running {
    handle: Handle,
    peers: watch::Receiver<PeerSet>,
    registry: Registry,
    control: DrainControl,
    task: JoinHandle<()>,
}

impl Running {
    fn start(config: &Config, dns: &DnsServer) -> Self {
        let mut registry = Registry::with_prefix("tidegate");
        let metrics = Metrics::register(&mut registry);
        let clock = Clock::monotonic();
        let discovery = Discovery::new(config, PORT, Some(dns.address()), clock, metrics);
        let (control, drain): (DrainControl, Drain) = DrainControl::new();
        let handle = discovery.handle();
        let task = tokio::spawn(discovery.run(drain));
        Self { peers: handle.peers(), handle, registry, control, task }
    }

    fn headless(dns: &DnsServer) -> Self {
        Self::start(&Config::Dns { name: "peers.test".to_owned(), port: None }, dns)
    }

    /// Waits until the set satisfies `wanted`, which `what` describes.
    async fn until(&mut self, what: &str, wanted: impl FnMut(&PeerSet) -> bool) -> PeerSet {
        let seen = tokio::time::timeout(PATIENCE, self.peers.wait_for(wanted)).await;
        let seen = seen.map(|set| set.unwrap().clone());
        seen.unwrap_or_else(|_| panic!("waited for {what}, have {:?}", self.peers.borrow()))
    }

    async fn until_addresses<const N: usize>(&mut self, wanted: [&str; N]) -> PeerSet {
        let wanted = wanted.map(|address| address.parse().unwrap()).into();
        self.until(&format!("{wanted:?}"), |set| set.addresses == wanted).await
    }

    fn metric(&self, name: &str) -> u64 {
        let mut text = String::new();
        prometheus_client::encoding::prometheus_text::encode(&mut text, &self.registry).unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.map_or(0, |value| value.parse().unwrap())
    }

    async fn stop(self) {
        self.control.advance(Stage::Closing);
        self.task.await.unwrap();
    }
}

fn is_failing(set: &PeerSet) -> bool {
    matches!(set.health, Health::Failing { .. })
}

#[tokio::test]
async fn addresses_of_both_families_are_found_and_followed() {
    let dns = DnsServer::start(Script::addresses(["127.0.0.12", "127.0.0.11", "::1"])).await;
    let mut discovery = Running::headless(&dns);
    let set = discovery.until_addresses(["127.0.0.11:9401", "127.0.0.12:9401", "[::1]:9401"]).await;
    assert!(set.answered);
    assert_eq!(set.health, Health::Ok);
    assert_eq!(discovery.metric("tidegate_discovery_addresses"), 3);
    dns.set(Script::addresses(["127.0.0.13"]));
    discovery.until_addresses(["127.0.0.13:9401"]).await;
    dns.set(Script::addresses(["::1"]));
    discovery.until_addresses(["[::1]:9401"]).await;
    discovery.stop().await;
}

#[tokio::test]
async fn ds_g1_silence_and_errors_keep_the_last_good_set() {
    let mut dns = DnsServer::start(Script::addresses(["127.0.0.11", "127.0.0.12"])).await;
    let mut discovery = Running::headless(&dns);
    let good = discovery.until_addresses(["127.0.0.11:9401", "127.0.0.12:9401"]).await;

    dns.set(Script::Silent);
    let failing = discovery.until("a failed lookup", is_failing).await;
    assert_eq!(failing.addresses, good.addresses);
    assert!(failing.answered);
    assert!(discovery.metric("tidegate_discovery_lookups_total{result=\"failed\"}") >= 1);

    // Another failure of another kind: nothing new to tell, and no new beginning.
    discovery.peers.mark_unchanged();
    dns.set(Script::ServerFailure);
    discovery.handle.refresh();
    // With the second round begun the first has ended; a round asks twice.
    dns.next_questions(1).await;
    discovery.handle.refresh();
    dns.next_questions(2).await;
    assert!(!discovery.peers.has_changed().unwrap(), "{:?}", discovery.peers.borrow());
    assert_eq!(*discovery.peers.borrow(), failing);

    dns.set(Script::addresses(["127.0.0.11", "127.0.0.12", "127.0.0.13"]));
    discovery.handle.refresh();
    let set = discovery.until("recovery", |set| !is_failing(set)).await;
    assert_eq!(set.addresses.len(), 3);
    discovery.stop().await;
}

#[tokio::test]
async fn a_clean_empty_answer_is_believed_even_after_addresses() {
    let dns = DnsServer::start(Script::addresses(["127.0.0.11"])).await;
    let mut discovery = Running::headless(&dns);
    discovery.until_addresses(["127.0.0.11:9401"]).await;
    dns.set(Script::NoSuchName);
    let set = discovery.until_addresses([]).await;
    assert_eq!(set.health, Health::Ok);
    discovery.stop().await;
}

#[tokio::test]
async fn ds_g2_a_negative_answer_is_not_remembered() {
    let dns = DnsServer::start(Script::NoSuchName).await;
    let mut discovery = Running::headless(&dns);
    let set = discovery.until("a first answer", |set| set.answered).await;
    assert!(set.addresses.is_empty());
    assert_eq!(set.health, Health::Ok);
    assert!(discovery.metric("tidegate_discovery_lookups_total{result=\"empty\"}") >= 1);
    let appeared = Instant::now();
    dns.set(Script::addresses(["127.0.0.12"]));
    discovery.until_addresses(["127.0.0.12:9401"]).await;
    assert!(appeared.elapsed() < Duration::from_secs(6), "the zone says 300 s");
    discovery.stop().await;
}

#[tokio::test]
async fn before_the_first_answer_an_empty_set_says_nothing() {
    let dns = DnsServer::start(Script::Silent).await;
    let mut discovery = Running::headless(&dns);
    let set = discovery.until("a failed lookup", is_failing).await;
    assert!(!set.answered);
    dns.set(Script::addresses(["127.0.0.12"]));
    let set = discovery.until_addresses(["127.0.0.12:9401"]).await;
    assert!(set.answered);
    discovery.stop().await;
}

#[tokio::test]
async fn ds_g6_a_cut_answer_is_fetched_over_tcp() {
    let addresses = (1..=60).map(|host| IpAddr::V4(Ipv4Addr::new(127, 0, 1, host))).collect();
    let dns = DnsServer::start(Script::CutOverUdp { addresses, ttl: 30 }).await;
    let mut discovery = Running::headless(&dns);
    let set = discovery.until("addresses", |set| !set.addresses.is_empty()).await;
    assert_eq!(set.addresses.len(), 60);
    assert!(dns.asked().over_tcp > 0);
    discovery.stop().await;
}

#[tokio::test]
async fn the_services_named_port_is_used_where_none_is_configured() {
    let dns = DnsServer::start(Script::addresses(["127.0.0.11", "127.0.0.12"])).await;
    dns.set_ports(&[7001, 7001]);
    let mut discovery = Running::headless(&dns);
    discovery.until_addresses(["127.0.0.11:7001", "127.0.0.12:7001"]).await;
    // Ports that contradict each other say nothing.
    dns.set_ports(&[7001, 7002]);
    dns.set(Script::addresses(["127.0.0.13"]));
    discovery.handle.refresh();
    discovery.until_addresses(["127.0.0.13:7001"]).await;
    // A service that names no port leaves it to the configuration.
    dns.set_ports(&[]);
    discovery.handle.refresh();
    discovery.until_addresses(["127.0.0.13:9401"]).await;
    discovery.stop().await;
}

#[tokio::test]
async fn a_lost_stream_asks_again_before_the_period_is_over_but_not_at_once() {
    let mut dns = DnsServer::start(Script::Addresses {
        addresses: [IpAddr::V4(Ipv4Addr::LOCALHOST)].into(),
        ttl: 3600,
    })
    .await;
    let mut discovery = Running::headless(&dns);
    discovery.until_addresses(["127.0.0.1:9401"]).await;
    let published = Instant::now();
    let before = dns.asked().a_over_udp;
    dns.set(Script::addresses(["127.0.0.13"]));
    for _ in 0..100 {
        discovery.handle.refresh();
    }
    dns.next_questions(1).await;
    let waited = published.elapsed();
    assert!(waited >= Duration::from_millis(400), "asked after {waited:?}");
    assert!(waited < Duration::from_secs(4), "asked after {waited:?}");
    discovery.until_addresses(["127.0.0.13:9401"]).await;
    assert_eq!(dns.asked().a_over_udp, before + 1, "a hundred requests are one lookup");
    discovery.stop().await;
}

#[tokio::test]
async fn a_static_list_has_its_literals_at_once_and_its_names_when_resolved() {
    let dns = DnsServer::start(Script::ServerFailure).await;
    let list = ["127.0.0.12:7001", "[::1]:7002", "one.test:7003"];
    let list = list.map(|entry| entry.parse::<HostPort>().unwrap()).to_vec();
    let mut discovery = Running::start(&Config::Static(list), &dns);
    let literals = ["127.0.0.12:7001", "[::1]:7002"].map(|a| a.parse::<SocketAddr>().unwrap());
    assert_eq!(discovery.peers.borrow().addresses, literals.into());
    assert!(!discovery.peers.borrow().answered);
    let failing = discovery.until("a failed lookup", is_failing).await;
    assert_eq!(failing.addresses, literals.into());
    dns.set(Script::addresses(["127.0.0.13"]));
    let set = discovery.until_addresses(["127.0.0.12:7001", "[::1]:7002", "127.0.0.13:7003"]).await;
    assert!(set.answered);
    discovery.stop().await;
}

#[tokio::test]
async fn a_list_of_literals_asks_nobody() {
    let dns = DnsServer::start(Script::ServerFailure).await;
    let list = vec!["127.0.0.12:7001".parse().unwrap()];
    let discovery = Running::start(&Config::Static(list), &dns);
    assert!(discovery.peers.borrow().answered);
    discovery.stop().await;
    assert_eq!(dns.asked().a_over_udp, 0);
}

#[tokio::test]
async fn the_end_does_not_wait_for_a_lookup() {
    let mut dns = DnsServer::start(Script::Silent).await;
    let discovery = Running::headless(&dns);
    dns.next_questions(1).await;
    let begun = Instant::now();
    discovery.stop().await;
    assert!(begun.elapsed() < Duration::from_millis(900), "a try takes a second");
}
