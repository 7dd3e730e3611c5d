//! Limits from a configuration file, through HTTP, as the metrics and the admin
//! gRPC tell of them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::thread;

use tidegate::config;

use crate::harness::app::{Network, Replica, Spec};

fn replica<const N: usize>(network: &Network, limits: [&str; N]) -> Replica {
    let replica = network.start(11, &Spec::new(limits).alone());
    replica.ready();
    replica
}

#[test]
fn ob_g1_a_shadow_limit_counts_every_refusal_and_refuses_nothing() {
    let network = Network::new();
    let r = replica(&network, ["name: dry, key: [], rate: 5/40d, mode: shadow"]);
    assert_eq!(r.spend("/", 100), 100);
    assert_eq!(network.upstream.count(), 100);
    assert_eq!(r.requests("dry", "admitted"), 5.0);
    assert_eq!(r.requests("dry", "shadow_refused"), 95.0);
    assert_eq!(r.requests("dry", "refused"), 0.0);
    assert_eq!(r.left("dry", &[]), 0);
}

#[test]
fn ob_g1_admitted_and_refused_are_all_requests() {
    let network = Network::new();
    let r = replica(&network, ["name: real, key: [], rate: 5/40d"]);
    assert_eq!(r.spend("/", 100), 5);
    assert_eq!(r.requests("real", "admitted"), 5.0);
    assert_eq!(r.requests("real", "refused"), 95.0);
    assert_eq!(r.metric("tidegate_http_requests_total{outcome=\"forwarded\"}"), 5.0);
    assert_eq!(r.metric("tidegate_http_requests_total{outcome=\"limited\"}"), 95.0);
    let bucket = r.bucket("real", &[]);
    assert_eq!((bucket.admitted, bucket.refused), (5, 95));
}

#[test]
fn a_shadow_limit_is_not_debited_for_what_another_limit_refuses() {
    let network = Network::new();
    let real = "name: real, key: [], rate: 3/40d";
    let dry = "name: dry, key: [], rate: 5/40d, mode: shadow";
    let r = replica(&network, [real, dry]);
    assert_eq!(r.spend("/", 10), 3);
    assert_eq!(r.left("dry", &[]), 2);
    assert_eq!(r.requests("dry", "admitted"), 3.0);
    assert_eq!(r.requests("dry", "not_charged"), 7.0);
}

#[test]
fn ob_g3_a_refusal_names_the_limit_that_refused() {
    let network = Network::new();
    let r = replica(
        &network,
        [
            "name: large, key: [], rate: 1000/40d",
            "name: small, key: [], rate: 10/40d",
            "name: medium, key: [], rate: 100/40d",
        ],
    );
    assert_eq!(r.spend("/", 10), 10);
    let refused = r.get("/");
    assert_eq!(refused.status, 429);
    assert_eq!(refused.json()["limit"], "small");
    for (limit, left) in [("small", 0), ("medium", 90), ("large", 990)] {
        assert_eq!(r.left(limit, &[]), left, "{limit}");
        assert_eq!(r.requests(limit, "admitted"), 10.0, "{limit}");
    }
    assert_eq!(r.requests("small", "refused"), 1.0);
    assert_eq!(r.requests("medium", "not_charged"), 1.0);
    assert_eq!(r.requests("large", "not_charged"), 1.0);
}

#[test]
fn ba_g7_a_refused_request_takes_nothing() {
    let network = Network::new();
    let r = replica(&network, ["name: dear, key: [], rate: 10/40d, cost: 4"]);
    assert_eq!(r.spend("/", 2), 2);
    assert_eq!(r.spend("/", 20), 0);
    assert_eq!(r.left("dear", &[]), 2);
}

#[test]
fn ba_g8_the_last_tokens_are_given_out_once() {
    let network = Network::new();
    let spec = Spec::new(["name: per-key, key: [query:k], rate: 5/40d"]).alone().workers(2);
    let r = network.start(11, &spec);
    r.ready();
    for round in 0..20 {
        let target = format!("/?k={round}");
        let admitted: usize = thread::scope(|scope| {
            let clients: Vec<_> = (0..10).map(|_| scope.spawn(|| r.spend(&target, 4))).collect();
            clients.into_iter().map(|client| client.join().unwrap()).sum()
        });
        assert_eq!(admitted, 5);
        assert_eq!(r.left("per-key", &[&round.to_string()]), 0);
    }
    assert_eq!(network.upstream.count(), 100);
}

#[test]
fn ba_g10_what_a_short_limit_refuses_costs_the_long_one_nothing() {
    let network = Network::new();
    let r = replica(
        &network,
        ["name: short, key: [], rate: 2/40d", "name: long, key: [], rate: 10/40d"],
    );
    assert_eq!(r.spend("/", 40), 2);
    assert_eq!(r.left("long", &[]), 8);
}

#[test]
fn ba_g11_a_tight_general_limit_holds_for_what_a_wide_one_allows() {
    let network = Network::new();
    let r = replica(
        &network,
        [
            "name: default, key: [], rate: 2/40d",
            "name: p1, match: { path: /p1 }, key: [], rate: 100/40d",
        ],
    );
    assert_eq!(r.spend("/p1", 10), 2);
    let refused = r.get("/p1");
    assert_eq!(refused.json()["limit"], "default");
    assert_eq!(r.spend("/other", 3), 0);
    assert_eq!(r.left("p1", &[]), 98);
}

#[test]
fn kx_g10_limits_of_equal_numbers_have_buckets_of_their_own() {
    let network = Network::new();
    let r = replica(
        &network,
        [
            "name: a, match: { path: /a }, key: [client_ip], rate: 3/40d",
            "name: b, match: { path: /b }, key: [client_ip], rate: 3/40d",
        ],
    );
    for path in ["/a", "/b"] {
        let answer = r.get(path);
        let described = answer.field("ratelimit").unwrap();
        assert!(described.contains(";r=2;"), "{path}: {described}");
    }
    for limit in ["a", "b"] {
        assert_eq!(r.left(limit, &["127.0.0.1"]), 2);
    }
}

#[test]
fn cf_g9_a_total_holds_for_parts_with_and_without_a_limit_of_their_own() {
    let network = Network::new();
    let r = replica(
        &network,
        [
            "name: total, key: [query:c], rate: 10/40d",
            "name: s1, match: { path: /s1 }, key: [query:c], rate: 2/40d",
        ],
    );
    assert_eq!(r.spend("/s1?c=x", 8), 2);
    assert_eq!(r.spend("/s4?c=x", 10), 8);
    assert_eq!(r.left("total", &["x"]), 0);
}

#[test]
fn hd_g5_the_fields_say_what_the_admin_grpc_says() {
    let network = Network::new();
    let r = replica(&network, ["name: all, match: { path: /api/ }, key: [], rate: 4/40d"]);
    for left in [3, 2, 1, 0] {
        let answer = r.get("/api/x");
        let described = answer.field("ratelimit").unwrap();
        assert!(described.starts_with(&format!("\"all\";r={left};t=")), "{described}");
        assert_eq!(answer.field("retry-after"), None);
        assert_eq!(r.left("all", &[]), left);
    }
    let refused = r.get("/api/x");
    assert_eq!(refused.status, 429);
    let wait: u64 = refused.field("retry-after").unwrap().parse().unwrap();
    let next = r.bucket("all", &[]).next_token_in.unwrap();
    let due = u64::try_from(next.seconds).unwrap();
    assert!((due..due + 60).contains(&wait), "{wait} s, but the next token is due in {due} s");
    let free = r.get("/free");
    assert_eq!(free.status, 200);
    for name in ["ratelimit", "ratelimit-policy", "retry-after"] {
        assert_eq!(free.field(name), None, "{name}");
    }
}

#[test]
fn me_g3_no_word_of_a_client_becomes_a_metric() {
    let network = Network::new();
    let r = replica(&network, ["name: per-key, key: [query:k, host, path], rate: 3/40d"]);
    let samples = || {
        let text = r.telemetry("/metrics").text().to_owned();
        // Without values, which change.
        let names = text.lines().filter_map(|line| Some(line.rsplit_once(' ')?.0.to_owned()));
        names.filter(|name| !name.starts_with('#')).collect::<BTreeSet<_>>()
    };
    let mut connection = r.connect();
    let mut ask = |n: usize| {
        let request = format!("GET /chosen-{n}?k=chosen-{n} HTTP/1.1\r\nHost: chosen-{n}\r\n\r\n");
        connection.send(request);
        assert_eq!(connection.answer().status, 200);
    };
    ask(0);
    let before = samples();
    for n in 1..2000 {
        ask(n);
    }
    let after = samples();
    assert_eq!(after, before);
    assert_eq!(r.metric("tidegate_buckets"), 2000.0);
    assert!(after.len() > 20, "{after:?}");
    assert!(!after.iter().any(|name| name.contains("chosen")), "{after:?}");
}

#[test]
fn limits_from_flags_are_enforced_without_a_file() {
    let network = Network::new();
    let upstream = format!("http://{}", network.upstream.address());
    let flags = ["per-key:header:x-api-key=2/40d", "client_ip=5/40d:6"].map(str::to_owned);
    let mut config = config::from_flags(&upstream, &flags).unwrap();
    let any = SocketAddr::from((network.ip(11), 0)).into();
    config.proxy.listen = any;
    config.admin.listen = any;
    config.telemetry.listen = any;
    let r = network.start_with(11, config, 1);
    r.ready();
    let mut connection = r.connect();
    let mut ask = |key| connection.get_with("/", &[("x-api-key", key)]).status;
    assert_eq!([ask("a"), ask("a"), ask("a")], [200, 200, 429]);
    assert_eq!([ask("b"), ask("b"), ask("c"), ask("c"), ask("d")], [200, 200, 200, 200, 429]);
    assert_eq!(r.left("client_ip", &["127.0.0.1"]), 0);
}
