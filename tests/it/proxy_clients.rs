//! Key extraction through HTTP (KX) and whose word on addresses counts.

use tidegate::limiter::Missing;

use crate::harness::{Connection, Setup, TestProxy, Upstream, limit};

const TRUSTED: &[&str] = &["127.0.0.1/32"];

fn per_client(upstream: &Upstream, rate: &str, trusted: &[&str]) -> TestProxy {
    Setup::before(upstream).limit(limit("r", rate).by_client()).trusting(trusted).frozen().start()
}

fn each(connection: &mut Connection, xffs: &[&str]) -> Vec<u16> {
    xffs.iter().map(|xff| connection.get_with("/", &[("X-Forwarded-For", xff)]).status).collect()
}

#[test]
fn kx_g1_a_missing_header_is_a_key_of_its_own_and_an_empty_one_is_missing() {
    let upstream = Upstream::start();
    let proxy =
        Setup::before(&upstream).limit(limit("r", "3/min").by_header("x-api-key")).frozen().start();
    assert_eq!(proxy.statuses(6, &[]), [200, 200, 200, 429, 429, 429]);
    assert_eq!(proxy.statuses(1, &[("x-api-key", "a")]), [200]);
    assert_eq!(proxy.statuses(4, &[("x-api-key", "")]), [429; 4]);
    assert_eq!(upstream.count(), 4);
}

#[test]
fn kx_g1_a_missing_part_that_is_denied_is_named_and_not_charged() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .limit(limit("r", "3/min").by_header("X-Api-Key").missing(Missing::Deny))
        .start();
    let answer = proxy.connect().get("/");
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("header:x-api-key"), "{}", answer.text());
    assert_eq!((upstream.count(), proxy.spent()), (0, 0));
}

#[test]
fn kx_g2_without_a_forwarding_field_the_peer_is_the_client() {
    let upstream = Upstream::start();
    let proxy = per_client(&upstream, "2/min", &["10.0.0.0/8"]);
    for from in [[127, 0, 0, 2], [127, 0, 0, 3]] {
        let mut connection = proxy.connect_from(from);
        let statuses: Vec<u16> = (0..3).map(|_| connection.get("/").status).collect();
        assert_eq!(statuses, [200, 200, 429]);
    }
    assert_eq!(proxy.keys(), ["127.0.0.2", "127.0.0.3"]);
}

#[test]
fn kx_g3_the_configured_source_is_the_only_one() {
    let upstream = Upstream::start();
    let proxy =
        Setup::before(&upstream).limit(limit("r", "2/min").by_header("x-tenant")).frozen().start();
    for tenant in ["a", "b", "c"] {
        assert_eq!(proxy.statuses(3, &[("x-tenant", tenant)]), [200, 200, 429]);
    }
    let statuses = [[127, 0, 0, 2], [127, 0, 0, 3], [127, 0, 0, 2]]
        .map(|from| proxy.connect_from(from).get_with("/", &[("X-Tenant", "shared")]).status);
    assert_eq!(statuses, [200, 200, 429]);
    assert_eq!(upstream.count(), 8);
}

#[test]
fn kx_g4_an_untrusted_peer_cannot_choose_its_key() {
    let upstream = Upstream::start();
    let proxy = per_client(&upstream, "3/min", &[]);
    let xffs: Vec<String> = (1..=6).map(|i| format!("1.1.1.{i}")).collect();
    let xffs: Vec<&str> = xffs.iter().map(String::as_str).collect();
    assert_eq!(each(&mut proxy.connect(), &xffs), [200, 200, 200, 429, 429, 429]);
    assert_eq!(proxy.metric("tidegate_forwarding_ignored_total"), 3.0);
}

#[test]
fn kx_g4_behind_a_trusted_proxy_the_last_address_is_the_client() {
    let upstream = Upstream::start();
    let proxy = per_client(&upstream, "3/min", TRUSTED);
    let xffs: Vec<String> = (1..=6).map(|i| format!("9.9.9.{i}, 203.0.113.5")).collect();
    let xffs: Vec<&str> = xffs.iter().map(String::as_str).collect();
    assert_eq!(each(&mut proxy.connect(), &xffs), [200, 200, 200, 429, 429, 429]);
    assert_eq!(proxy.keys(), ["203.0.113.5"]);
}

#[test]
fn kx_g5_the_client_is_left_of_every_trusted_hop() {
    for (trusted, key) in [
        (&["127.0.0.1/32"][..], "3.3.3.3"),
        (&["127.0.0.1/32", "3.3.3.3/32"], "2.2.2.2"),
        (&["127.0.0.1/32", "3.3.3.3/32", "2.2.2.2/32", "1.1.1.1/32"], "1.1.1.1"),
    ] {
        let upstream = Upstream::start();
        let proxy = per_client(&upstream, "3/min", trusted);
        assert_eq!(each(&mut proxy.connect(), &["1.1.1.1, 2.2.2.2, 3.3.3.3"]), [200]);
        assert_eq!(proxy.keys(), [key]);
    }
}

#[test]
fn kx_g6_ports_and_brackets_are_no_part_of_the_key() {
    let upstream = Upstream::start();
    let proxy = per_client(&upstream, "2/min", TRUSTED);
    let mut connection = proxy.connect();
    let v4 = ["203.0.113.9:1001", "203.0.113.9:1002", " 203.0.113.9 "];
    assert_eq!(each(&mut connection, &v4), [200, 200, 429]);
    let v6 = ["[2001:db8::9]:1", "[2001:db8::9]:2", "2001:db8::9"];
    assert_eq!(each(&mut connection, &v6), [200, 200, 429]);
}

#[test]
fn kx_g7_a_network_of_ipv6_addresses_is_one_client() {
    let upstream = Upstream::start();
    let proxy = per_client(&upstream, "3/min", TRUSTED);
    let mut connection = proxy.connect();
    let xffs: Vec<String> = (1..=6).map(|i| format!("2001:db8:1:2::{i}")).collect();
    let xffs: Vec<&str> = xffs.iter().map(String::as_str).collect();
    assert_eq!(each(&mut connection, &xffs), [200, 200, 200, 429, 429, 429]);
    let others = ["2001:db8:1:3::1", "203.0.113.1", "203.0.113.2"];
    assert_eq!(each(&mut connection, &others), [200; 3]);
    assert_eq!(
        proxy.keys(),
        ["2001:db8:1:2::/64", "2001:db8:1:3::/64", "203.0.113.1", "203.0.113.2"]
    );
}

#[test]
fn kx_g8_header_names_have_no_case() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .limit(limit("r", "1/min").by_header("X-Tenant-ID"))
        .frozen()
        .start();
    assert_eq!(proxy.statuses(1, &[("x-tenant-id", "q")]), [200]);
    assert_eq!(proxy.statuses(1, &[("X-TENANT-ID", "q")]), [429]);
}

#[test]
fn kx_g11_junk_before_the_client_makes_no_new_key() {
    let upstream = Upstream::start();
    let proxy = per_client(&upstream, "9/min", TRUSTED);
    let xffs = ["junk1, 203.0.113.7", "a,b, 203.0.113.7", "1.2.3.4, 203.0.113.7", ", 203.0.113.7"];
    assert_eq!(each(&mut proxy.connect(), &xffs), [200; 4]);
    assert_eq!(proxy.keys(), ["203.0.113.7"]);
}

#[test]
fn kx_g12_rubbish_is_no_identity_and_no_victim_is_locked_out() {
    let upstream = Upstream::start();
    let proxy = per_client(&upstream, "2/min", TRUSTED);
    let mut connection = proxy.connect();
    let forged = ["198.51.100.1, unknown"; 5];
    assert_eq!(each(&mut connection, &forged), [200, 200, 429, 429, 429]);
    assert_eq!(each(&mut connection, &["198.51.100.1"]), [200]);
    let long = "x".repeat(4096);
    assert_eq!(each(&mut connection, &["", ",,,", &long]), [429; 3]);
    assert_eq!(proxy.keys(), ["127.0.0.1", "198.51.100.1"]);
}

#[test]
fn kx_g13_a_balancer_counts_as_its_clients_only_if_it_is_trusted() {
    let upstream = Upstream::start();
    let proxy = per_client(&upstream, "2/min", &["127.0.0.9/32"]);
    let mut trusted = proxy.connect_from([127, 0, 0, 9]);
    assert_eq!(each(&mut trusted, &["203.0.113.1"; 5]), [200, 200, 429, 429, 429]);
    assert_eq!(each(&mut trusted, &["203.0.113.2"]), [200]);
    let mut untrusted = proxy.connect_from([127, 0, 0, 8]);
    assert_eq!(
        each(&mut untrusted, &["203.0.113.3", "203.0.113.4", "203.0.113.5"]),
        [200, 200, 429]
    );
    assert_eq!(proxy.keys(), ["127.0.0.8", "203.0.113.1", "203.0.113.2"]);
    assert_eq!(proxy.metric("tidegate_forwarding_ignored_total"), 2.0);
}
