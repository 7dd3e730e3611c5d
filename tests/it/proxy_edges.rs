//! What stands around the limits: who may name the client and the cost, who may
//! read a refusal, and what changes while the proxy runs.

use tidegate::limiter::{Condition, Cost, Tokens};
use tidegate::proxy::{Config, HeaderStyle};

use crate::harness::{Connection, Setup, TestProxy, Upstream, eventually, limit, request};

fn tokens(whole: u64) -> Tokens {
    Tokens::from_whole(whole).unwrap()
}

/// A proxy that expects the PROXY protocol of 127.0.0.9.
fn behind_balancer(upstream: &Upstream) -> TestProxy {
    Setup::before(upstream)
        .limit(limit("r", "2/h").by_client())
        .trusting(&["127.0.0.9/32"])
        .with(|config| config.proxy_protocol = true)
        .frozen()
        .start()
}

#[test]
fn kx_g13_a_balancer_names_the_client_in_front_of_the_bytes() {
    let upstream = Upstream::start();
    let proxy = behind_balancer(&upstream);
    let open = |preamble: &[u8]| {
        let mut connection = proxy.connect_from([127, 0, 0, 9]);
        connection.send(preamble);
        connection
    };
    let line = |ip: &str| format!("PROXY TCP4 {ip} 192.0.2.1 1 443\r\n");
    let mut first = open(line("203.0.113.1").as_bytes());
    let statuses: Vec<u16> = (0..3).map(|_| first.get("/").status).collect();
    assert_eq!(statuses, [200, 200, 429]);
    // In one piece with the request, and in the binary form.
    let one = [line("203.0.113.2").as_bytes(), request("GET", "/", &[], "").as_ref()].concat();
    assert_eq!(open(&one).answer().status, 200);
    let signature = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c";
    let binary = [&signature[..], &[203, 0, 113, 2, 192, 0, 2, 1, 0, 1, 1, 187]].concat();
    let mut second = open(&binary);
    assert_eq!([second.get("/").status, second.get("/").status], [200, 429]);
    // A health check speaks for the balancer itself.
    assert_eq!(open(b"PROXY UNKNOWN\r\n").get("/").status, 200);
    assert_eq!(proxy.keys(), ["127.0.0.9", "203.0.113.1", "203.0.113.2"]);
    let seen = upstream.requests();
    assert_eq!(seen[0].field("x-forwarded-for"), Some("203.0.113.1"));
}

#[test]
fn a_balancer_that_names_nobody_is_refused_and_others_are_plain() {
    let upstream = Upstream::start();
    let proxy = behind_balancer(&upstream);
    let mut balancer = proxy.connect_from([127, 0, 0, 9]);
    balancer.send(request("GET", "/", &[], ""));
    assert!(balancer.is_ended());
    // Whoever is not trusted names nobody: these bytes are no request.
    let mut stranger = proxy.connect_from([127, 0, 0, 8]);
    stranger.send(b"PROXY TCP4 203.0.113.1 192.0.2.1 1 443\r\n\r\n");
    assert_eq!(stranger.answer().status, 400);
    assert_eq!(proxy.connect_from([127, 0, 0, 8]).get("/").status, 200);
    assert_eq!(proxy.keys(), ["127.0.0.8"]);
    eventually("the refusal", || {
        proxy.metric("tidegate_http_requests_total{outcome=\"rejected\"}") >= 1.0
    });
}

#[test]
fn a_balancer_that_says_nothing_is_not_waited_for_without_end() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .trusting(&["127.0.0.9/32"])
        .with(|config| {
            config.proxy_protocol = true;
            config.timeouts.header = std::time::Duration::from_millis(200);
        })
        .start();
    let mut silent = proxy.connect_from([127, 0, 0, 9]);
    silent.send(b"PROXY TCP4 203");
    assert!(silent.is_ended());
    eventually("its end", || proxy.handle.connections() == 0);
}

/// The status of an answer, and its `RateLimit` field.
fn get(connection: &mut Connection, target: &str, fields: &[(&str, &str)]) -> (u16, String) {
    let answer = connection.get_with(target, fields);
    (answer.status, answer.field("ratelimit").unwrap_or_default().to_owned())
}

#[test]
fn a_cost_by_case_is_charged_and_told() {
    let upstream = Upstream::start();
    let post = Condition { methods: vec!["POST".into()], ..Condition::default() };
    let proxy = Setup::before(&upstream)
        .limit(limit("r", "10/h").costing(Cost::Cases(vec![(post, tokens(6))])))
        .frozen()
        .start();
    let mut connection = proxy.connect();
    let answer = connection.post("/", &[], "x");
    assert_eq!((answer.status, answer.field("ratelimit")), (200, Some("\"r\";r=4;t=2160")));
    assert_eq!(connection.post("/", &[], "x").status, 429);
    assert_eq!(get(&mut connection, "/", &[]), (200, "\"r\";r=3;t=2520".into()));
    assert_eq!(proxy.spent(), 7);
}

#[test]
fn a_cost_in_a_header_counts_only_from_a_trusted_proxy() {
    let upstream = Upstream::start();
    let cost = Cost::Header { name: "x-cost".into(), max: tokens(10) };
    let proxy = Setup::before(&upstream)
        .limit(limit("r", "100/h").costing(cost))
        .trusting(&["127.0.0.9/32"])
        .frozen()
        .start();
    let spent = |from: [u8; 4], fields: &[(&str, &str)]| {
        let before = proxy.spent();
        assert_eq!(proxy.connect_from(from).get_with("/", fields).status, 200);
        proxy.spent() - before
    };
    let trusted = [127, 0, 0, 9];
    assert_eq!(spent(trusted, &[("x-cost", "3")]), 3);
    assert_eq!(spent(trusted, &[("X-Cost", "50")]), 10);
    for fields in [&[("x-cost", "0")][..], &[("x-cost", "-1")], &[("x-cost", "a")], &[]] {
        assert_eq!(spent(trusted, fields), 10, "{fields:?}");
    }
    assert_eq!(spent([127, 0, 0, 8], &[("x-cost", "1")]), 10);
}

#[test]
fn a_browser_may_read_a_refusal_where_it_is_allowed_to() {
    let upstream = Upstream::start();
    let app = "https://app.example.com";
    let proxy = Setup::before(&upstream)
        .limit(limit("r", "1/h"))
        .with(|config| config.cors.allow_origins = vec![app.parse().unwrap()])
        .frozen()
        .start();
    let mut connection = proxy.connect();
    let passed = connection.get_with("/", &[("origin", app)]);
    // The upstream's own answer is the upstream's business.
    assert_eq!((passed.status, passed.field("access-control-allow-origin")), (200, None));
    let refused = connection.get_with("/", &[("origin", app)]);
    assert_eq!((refused.status, refused.field("access-control-allow-origin")), (429, Some(app)));
    let exposed = refused.field("access-control-expose-headers").unwrap();
    assert!(exposed.contains("retry-after") && exposed.contains("ratelimit"), "{exposed}");
    assert_eq!(refused.field("vary"), Some("origin"));
    let other = connection.get_with("/", &[("origin", "https://evil.example")]);
    assert_eq!((other.status, other.field("access-control-allow-origin")), (429, None));
    let preflight =
        request("OPTIONS", "/", &[("origin", app), ("access-control-request-method", "PUT")], "");
    connection.send(preflight);
    assert_eq!(connection.answer().status, 200);
}

#[test]
fn cf_g8_a_reload_shows_on_open_connections_at_once() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "2/h")).frozen().start();
    let mut connection = proxy.connect();
    for status in [200, 200, 429] {
        assert_eq!(connection.get("/").status, status);
    }
    proxy.reload([limit("r", "10/h")]);
    let answer = connection.get("/");
    assert_eq!((answer.status, answer.field("ratelimit-policy")), (200, Some("\"r\";q=10;w=3600")));
    assert_eq!(answer.field("ratelimit"), Some("\"r\";r=7;t=1080"));
    proxy.reload([limit("r", "1/h")]);
    let answer = connection.get("/");
    assert_eq!((answer.status, answer.field("ratelimit-policy")), (429, Some("\"r\";q=1;w=3600")));
    assert_eq!(answer.field("ratelimit"), Some("\"r\";r=0;t=3600"));
    // Another limit takes its place; the old one's numbers stay what they were.
    proxy.reload([limit("s", "5/h")]);
    assert_eq!(connection.get("/").field("ratelimit"), Some("\"s\";r=4;t=720"));
    assert_eq!(proxy.metric("tidegate_requests_total{limit=\"s\",verdict=\"admitted\"}"), 1.0);
    assert_eq!(proxy.metric("tidegate_requests_total{limit=\"r\",verdict=\"admitted\"}"), 3.0);
}

#[test]
fn trust_and_fields_change_on_open_connections() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "9/h").by_client()).frozen().start();
    let mut connection = proxy.connect();
    let forwarded = [("x-forwarded-for", "203.0.113.5")];
    assert!(connection.get_with("/", &forwarded).field("ratelimit").is_some());
    assert_eq!(proxy.keys(), ["127.0.0.1"]);
    let mut config = Config::new("http://127.0.0.1:1".parse().unwrap());
    config.trusted_proxies = vec!["127.0.0.1/32".parse().unwrap()];
    config.headers = HeaderStyle::Legacy;
    proxy.tuner.apply(&config);
    let answer = connection.get_with("/", &forwarded);
    assert_eq!(answer.field("ratelimit"), None);
    assert_eq!(answer.field("x-ratelimit-remaining"), Some("8"));
    assert_eq!(proxy.keys(), ["127.0.0.1", "203.0.113.5"]);
    let seen = upstream.requests();
    assert_eq!(seen[1].field("x-forwarded-for"), Some("203.0.113.5, 127.0.0.1"));
}

#[test]
fn cf_g2_a_limit_that_changes_under_load_neither_fails_nor_frees_anyone() {
    let upstream = Upstream::start();
    let per_key = |rate: &str| limit("r", rate).by_header("x-key");
    let proxy = Setup::before(&upstream).limit(per_key("5/min")).workers(2).frozen().start();
    let statuses = |first: usize, rounds: usize| -> Vec<u16> {
        let mut connection = proxy.connect();
        let key = |turn: usize| format!("k{}", (first + turn) % 50);
        (0..rounds * 50)
            .map(|turn| connection.get_with("/", &[("x-key", &key(turn))]).status)
            .collect()
    };
    std::thread::scope(|scope| {
        let statuses = &statuses;
        let load = [0, 25].map(|first| scope.spawn(move || statuses(first, 6)));
        for rate in ["2/min", "5/min"].iter().cycle().take(41) {
            proxy.reload([per_key(rate)]);
        }
        for answers in load.map(|thread| thread.join().unwrap()) {
            assert!(answers.iter().all(|status| [200, 429].contains(status)), "{answers:?}");
        }
    });
    // Each key has had what the smaller quota gives, and no more than the larger.
    assert!(statuses(0, 1).iter().all(|status| *status == 429));
    let admitted = proxy.spent();
    assert!((100..=250).contains(&admitted), "{admitted}");
    assert_eq!(proxy.statuses(4, &[("x-key", "fresh")]), [200, 200, 429, 429]);
}
