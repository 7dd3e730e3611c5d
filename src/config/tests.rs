use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::limiter::{Condition, Cost, KeyBuf, Missing, Mode, Source, Tokens};
use crate::proxy::{HeaderStyle, Upstream};
use crate::{admin, discovery, peer, telemetry};

fn no_env(_: &str) -> Option<String> {
    None
}

fn good(text: &str) -> Config {
    parse("t.yaml", text, &no_env).unwrap_or_else(|error| panic!("{error}"))
}

/// Every line of the error, without the file's name.
fn faults(text: &str) -> Vec<String> {
    let error = parse("t.yaml", text, &no_env).expect_err("accepted").to_string();
    error.lines().map(|line| line.strip_prefix("t.yaml:").unwrap_or(line).to_owned()).collect()
}

/// The error lines of a file with this text as its only limit.
fn limit_faults(fields: &str) -> Vec<String> {
    faults(&format!("proxy: {{ upstream: http://a }}\nlimits:\n- {fields}\n"))
}

fn limit(fields: &str) -> Config {
    good(&format!("proxy: {{ upstream: http://a }}\nlimits:\n- {fields}\n"))
}

/// Asserts that there is one fault, and that its line has all of `words`.
fn one_fault(lines: &[String], words: &[&str]) {
    assert_eq!(lines.len(), 1, "{lines:#?}");
    for word in words {
        assert!(lines[0].contains(word), "`{word}` is not in: {}", lines[0]);
    }
}

/// The example of the README with every default written out.
const EVERY_DEFAULT: &str = r#"
proxy:
  listen: "[::]:8080"
  tls: none
  upstream: http://127.0.0.1:3000
  upstream_ca: none
  upstream_host: client
  trusted_proxies: []
  proxy_protocol: false
  ipv6_prefix: 64
  headers: standard
  cors: { allow_origins: [], allow_credentials: false }
  timeouts: { header: 10s, idle: 75s, connect: 2s, response: 60s }
  max: { header_bytes: 64KiB, headers: 100, body: none, connections: 10000, streams: 200 }
  drain_delay: 5s
  drain_timeout: 20s
upstreams:
  acme:
    url: https://api.acme.example
    ca: none
    host: upstream
    limit: { requests: 100, per: 10s, burst: 5 }
    max_in_flight: none
    feedback: { retry_after_max: 15m, x_ratelimit: off }
    pause_on: [429, 503]
    inject: { authorization: { file: /etc/tidegate/acme-token, prefix: "Bearer " } }
egress:
  routes:
    - match: { path: /acme/, methods: [GET, POST] }
      upstream: acme
      max_wait: 2s
      strip: /acme
limiter:
  max_buckets: 1000000
  idle_expiry: 10s
  max_waiting: 100000
  max_waiting_per_bucket: 10000
limits:
  - name: per-client
    was:
    match: { path: /api/, methods: [GET, POST], host: api.example.com, headers: { x-env: prod }, upstream: default }
    exempt: [ { path: /api/health }, { cidrs: [10.1.0.0/16] } ]
    key: [client_ip]
    missing: shared
    rate: 100/min
    window: bucket
    burst: 100
    cost: 1
    overrides: [ { key: [203.0.113.7], rate: 1000/min, burst: 200 } ]
    mode: enforce
    expose: true
    max_wait: 0s
    partition: frozen
replication:
  listen: "[::]:9401"
  peers:
  resolver:
  group: default
  sync_interval: 100ms
  join_timeout: 2s
  share_hold: 30s
  expected_replicas: 0
  tls: none
  insecure: false
admin: { listen: 127.0.0.1:9402, token_file: none, tls: none }
telemetry: { listen: "[::]:9403", access_log: off }
"#;

#[test]
fn the_written_defaults_are_the_defaults() {
    let config = good(EVERY_DEFAULT);
    let upstream = Upstream::Http { authority: "127.0.0.1:3000".into() };
    assert_eq!(config.proxy, proxy::Config::new(upstream));
    assert_eq!(config.limiter, LimiterConfig::default());
    assert_eq!(config.replication, peer::Config::default());
    assert_eq!(config.admin, admin::Config::default());
    assert_eq!(config.telemetry, telemetry::Config::default());

    let short = limit("{ name: per-client, rate: 100/min }");
    assert_eq!(short.proxy, proxy::Config::new(Upstream::Http { authority: "a:80".into() }));
    let (full, short) = (config.limits(), short.limits());
    let [full, short] = [&full, &short].map(|set| set.find("per-client").unwrap().1.clone());
    assert_eq!(full.default_quota(), short.default_quota());
    assert_eq!(full.rule().key, short.rule().key);
    assert_eq!(full.rule().missing, short.rule().missing);
    assert_eq!(full.cost(), short.cost());
    assert_eq!((full.mode(), full.exposed()), (short.mode(), short.exposed()));
    assert_eq!(full.overrides(), 1);
    assert_eq!(full.rule().exempt.len(), 2);
}

#[test]
fn every_setting_can_be_set() {
    let config = good(
        r#"
proxy:
  listen: 127.0.0.1:1
  upstream: unix:/run/app.sock
  trusted_proxies: [10.0.0.0/8, 203.0.113.7]
  ipv6_prefix: 56
  headers: off
  timeouts: { header: 1s }
  max: { body: 10MiB, streams: 1 }
  drain_delay: 0s
replication:
  peers: { dns: peers.svc.cluster.local, port: 9500 }
  resolver: 127.0.0.1:5353
  insecure: true
telemetry: { access_log: on }
"#,
    );
    let proxy = &config.proxy;
    assert_eq!(proxy.listen.to_string(), "127.0.0.1:1");
    assert_eq!(proxy.upstream, Some(Upstream::Unix("/run/app.sock".into())));
    let trusted: Vec<String> = proxy.trusted_proxies.iter().map(ToString::to_string).collect();
    assert_eq!(trusted, ["10.0.0.0/8", "203.0.113.7/32"]);
    assert_eq!((proxy.ipv6_prefix, proxy.headers), (56, HeaderStyle::Off));
    assert_eq!(proxy.timeouts.header, Duration::from_secs(1));
    assert_eq!(proxy.timeouts.idle, Duration::from_secs(75));
    assert_eq!((proxy.max.body, proxy.max.streams), (Some(10 * 1024 * 1024), 1));
    assert_eq!(proxy.drain_delay, Duration::ZERO);
    assert_eq!(
        config.replication.peers,
        Some(discovery::Config::Dns { name: "peers.svc.cluster.local".into(), port: Some(9500) })
    );
    assert!(config.replication.insecure && config.telemetry.access_log);
    assert!(config.limits().is_empty());

    let fixed = good(
        "proxy: { upstream: http://a }\nreplication: { peers: { static: [10.0.0.1:1, '[::1]:2'] }, insecure: true }",
    );
    let Some(discovery::Config::Static(list)) = fixed.replication.peers else { panic!() };
    assert_eq!(list.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.0.0.1:1", "[::1]:2"]);
}

#[test]
fn ten_faults_are_ten_lines_in_order() {
    let text = "\
proxy:
  upstream: http://127.0.0.1:3000
  lisen: 1
  timeouts: { idle: 75 }
limits:
  - name: a b
    rate: 10
    mode: shadwo
  - name: b
    rate: 5/s
    burst: 2
    cost: 3
    key: [client_ip, ägypten]
  - name: b
    rate: 1/s
    rate: 2/s
admin:
  listen: 0.0.0.0:9402
telemetry: [1]
";
    assert_eq!(
        faults(text),
        [
            "3:3: proxy.lisen: unknown field; did you mean `listen`?",
            "4:21: proxy.timeouts.idle: `75` is not a duration: write a number and a unit, such as 10s, 250ms or 1m",
            "6:11: limits[0].name: `a b` is not a name of 1 to 64 letters, digits, `.`, `_` and `-`",
            "7:11: limits[0].rate: `10` is not a rate: write N/s, N/min, N/h, N/d or N/<duration> such as 5/10s",
            "8:11: limits[0].mode: `shadwo` is not one of the choices; did you mean `shadow`?",
            "11:12: limits[1].burst: no request would ever pass: each costs 3, above the burst of 2",
            "13:22: limits[1].key[1]: `ägypten` is not a key part: write client_ip, header:NAME, cookie:NAME, query:NAME, path, method or host",
            "14:11: limits[2].name: `b` is the name of limits[1] already",
            "16:5: limits[2].rate: given twice; first in line 15 column 5",
            "18:11: admin.listen: `0.0.0.0:9402` is not a loopback address; other addresses need `token_file` or `tls.client_ca`",
            "19:12: telemetry: expected a map, found a list",
        ]
    );
}

#[test]
fn a_fault_that_follows_from_another_is_not_reported() {
    one_fault(&limit_faults("{ name: a, rate: x, cost: 5 }"), &["limits[0].rate"]);
    one_fault(&limit_faults("{ name: a, rate: 5/s, burst: x, cost: 9 }"), &["limits[0].burst"]);
    one_fault(
        &limit_faults("{ name: a, rate: 5/s, key: [x], overrides: [{ key: [b], rate: 1/s }] }"),
        &["limits[0].key[0]"],
    );
    one_fault(
        &limit_faults("{ name: a, rate: 5/s, overrides: [{ key: [1.2.3.4], rate: x }] }"),
        &["limits[0].overrides[0].rate"],
    );
    one_fault(&faults("proxy: { upstream: ftp://a }"), &["1:20: proxy.upstream"]);
    one_fault(
        &faults("proxy: { listen: x, upstream: \"http://127.0.0.1:8080\" }"),
        &["proxy.listen"],
    );
}

#[test]
fn an_upstream_that_is_the_proxy_itself_is_refused() {
    one_fault(
        &faults("proxy: { upstream: \"http://127.0.0.1:8080\" }"),
        &["1:20: proxy.upstream", "own address, [::]:8080"],
    );
    let error = from_flags("http://localhost:8080", &[]).unwrap_err().to_string();
    assert!(error.contains("--upstream") && error.contains("own address"), "{error}");
}

#[test]
fn an_index_counts_elements_that_were_refused() {
    let lines = limit_faults(
        "{ name: a, rate: 5/s, overrides: [7, { key: [1.2.3.4], rate: 1/s }, { key: [1.2.3.4], rate: 2/s }] }",
    );
    assert_eq!(lines.len(), 2, "{lines:#?}");
    assert!(lines[0].contains("limits[0].overrides[0]: expected a map, found `7`"), "{lines:#?}");
    assert!(lines[1].contains("limits[0].overrides[2].key: another override"), "{lines:#?}");
}

#[test]
fn cf_g3_a_misspelled_field_is_named_with_its_limit() {
    for (field, meant) in [("maxwait", "max_wait"), ("bursts", "burst"), ("Rate", "rate")] {
        let lines = limit_faults(&format!("{{ name: a, rate: 1/s, {field}: 1 }}"));
        one_fault(&lines, &[&format!("limits[0].{field}: unknown"), &format!("`{meant}`?")]);
    }
    one_fault(&limit_faults("{ name: a, rate: 1/s, colour: red }"), &["there are `name`"]);
}

#[test]
fn cf_g4_a_rate_without_a_period_is_refused() {
    for rate in ["100", "100/", "/min", "''"] {
        let lines = limit_faults(&format!("{{ name: a, rate: {rate} }}"));
        one_fault(&lines, &["limits[0].rate: ", "N/min"]);
    }
    one_fault(&limit_faults("{ name: a }"), &["3:3: limits[0].rate: is required"]);
    one_fault(&limit_faults("{ name: a, rate: }"), &["limits[0].rate: is required"]);
}

#[test]
fn cf_g5_no_number_switches_a_limit_off() {
    for (field, value) in [
        ("burst", "0"),
        ("burst", "-1"),
        ("burst", "1.5"),
        ("burst", "1000000000001"),
        ("burst", "18446744073709551617"),
        ("rate", "-1/s"),
        ("rate", "1.5/s"),
        ("rate", "1/0s"),
        ("rate", "1/-1s"),
        ("rate", "1/50d"),
        ("rate", "2000000000/s"),
        ("rate", "1000000000001/d"),
        ("cost", "0"),
        ("cost", "-1"),
        ("cost", "1e3"),
        ("cost", "11"),
    ] {
        let rate = if field == "rate" { "" } else { "rate: 10/s, " };
        let lines = limit_faults(&format!("{{ name: a, {rate}{field}: {value} }}"));
        // A cost above the default burst is the rate's to mend.
        let named = if value == "11" { "rate" } else { field };
        one_fault(&lines, &[&format!("limits[0].{named}: ")]);
    }
    // A rate of zero is accepted and blocks from the first request on.
    let blocked = limit("{ name: a, rate: 0/s }").limits();
    let quota = *blocked.find("a").unwrap().1.default_quota();
    assert!(quota.rate().is_blocked() && quota.burst().whole() == 0);
    one_fault(&limit_faults("{ name: a, rate: 0/s, burst: 5 }"), &["limits[0].burst: "]);
}

#[test]
fn cf_g6_conflicting_sources_of_a_key_are_both_named() {
    let key = |key: &str| limit_faults(&format!("{{ name: a, rate: 1/s, key: {key} }}"));
    one_fault(&key("[{ header: x, client_ip: true }]"), &["key[0]: `header` and `client_ip`"]);
    one_fault(&key("[{ header: x, cookie: y }]"), &["`header` and `cookie` exclude"]);
    one_fault(&key("[{ query: x, host: }, path]"), &["key[0]: `query` and `host`"]);
    one_fault(&key("[client_ip, client_ip]"), &["key[1]: `client_ip` is in the key already"]);
    one_fault(&key("[header:X-A, { header: x-a }]"), &["key[1]: `header:x-a` is in the key"]);
    one_fault(&key("[{ secret: true }]"), &["key[0]: names no source"]);
    one_fault(&key("[{ path: true }]"), &["key[0]: write `path` as plain text"]);
    one_fault(&key("[{ cookie: sid, secret: false }]"), &["always secret"]);
    one_fault(&key("client_ip"), &["key: expected a list, found `client_ip`"]);
    one_fault(&key("[path], key: [client_ip]"), &["limits[0].key: given twice"]);
}

#[test]
fn cf_g9_a_total_and_tighter_children_are_separate_limits() {
    let config = good(
        "proxy: { upstream: http://a }
limits:
- { name: total, key: [header:c], rate: 10/min }
- { name: s1, match: { path: /s1 }, key: [header:c], rate: 2/min }
",
    );
    let limits = config.limits();
    let names: Vec<&str> = limits.iter().map(|(_, limit)| limit.name()).collect();
    assert_eq!(names, ["total", "s1"]);
    let (total, child) = (limits.find("total").unwrap().1, limits.find("s1").unwrap().1);
    assert!(total.rule().condition.path.is_none() && child.rule().condition.path.is_some());
    let mut key = KeyBuf::new();
    key.push_text(b"x");
    assert_ne!(total.bucket_id(key.as_bytes()), child.bucket_id(key.as_bytes()));
}

#[test]
fn cf_g10_the_burst_is_the_n_of_the_rate_unless_said() {
    for (fields, burst) in [("rate: 6/60s", 6), ("rate: 6/60s, burst: 1", 1), ("rate: 1/d", 1)] {
        let limits = limit(&format!("{{ name: a, {fields} }}")).limits();
        assert_eq!(limits.find("a").unwrap().1.default_quota().burst().whole(), burst);
    }
}

#[test]
fn cf_g10_a_strict_window_compiles_to_what_keeps_it() {
    for (fields, rate, burst) in [
        ("rate: 100/10s, burst: 5", "95/10100ms", 5),
        ("rate: 100/10s", "95/10100ms", 5),
        ("rate: 3/s", "1/1100ms", 2),
    ] {
        let limits = limit(&format!("{{ name: a, {fields}, window: strict }}")).limits();
        let quota = limits.find("a").unwrap().1.default_quota();
        assert_eq!((quota.rate().to_string().as_str(), quota.burst().whole()), (rate, burst));
        assert!(quota.keeps_window());
    }
    let config = good(
        "proxy: { upstream: http://a }\nreplication: { sync_interval: 50ms }\nlimits:\n\
         - { name: a, rate: 100/10s, burst: 5, window: strict, overrides: [ { key: [1.2.3.4], rate: 9/s } ] }\n",
    );
    let limits = config.limits();
    let a = limits.find("a").unwrap().1;
    assert_eq!(a.default_quota().rate().to_string(), "95/10050ms");
    let key = a.rule().key_from_text(&["1.2.3.4"], 64).unwrap();
    let quota = a.quota(a.bucket_id(key.as_bytes()));
    assert_eq!((quota.rate().to_string().as_str(), quota.burst().whole()), ("7/1050ms", 2));
    for (fields, words) in [
        ("rate: 5/s, burst: 5", ["burst", "must be less than the 5 requests"]),
        ("rate: 1/s", ["rate", "a strict window needs 2 or more"]),
        ("rate: 9/s, cost: 5", ["each costs 5", "above the burst of 2 (by default a twentieth"]),
    ] {
        one_fault(&limit_faults(&format!("{{ name: a, {fields}, window: strict }}")), &words);
    }
}

#[test]
fn cf_g11_a_pattern_that_would_be_inert_is_refused() {
    for pattern in ["/a/*/c", "/a/{id}", "a/b", "/a?b", "*"] {
        for field in ["match: ", "exempt: [ "] {
            let close = if field.contains('[') { " ]" } else { "" };
            let lines = limit_faults(&format!(
                "{{ name: a, rate: 1/s, {field}{{ path: '{pattern}' }}{close} }}"
            ));
            one_fault(&lines, &[".path: ", pattern]);
        }
    }
    for condition in [
        "methods: [get]",
        "host: '*.example.com'",
        "host: 'a:80'",
        "headers: { 'x y': 1 }",
        "cidrs: [10.0.0.0/33]",
    ] {
        let lines = limit_faults(&format!("{{ name: a, rate: 1/s, match: {{ {condition} }} }}"));
        one_fault(&lines, &["limits[0].match."]);
    }
    one_fault(&limit_faults("{ name: a, rate: 1/s, exempt: [{}] }"), &["exempt every request"]);
    let closed = limit_faults("{ name: a, rate: 1/s, partition: closed }");
    one_fault(&closed, &["limits[0].partition: ", "frozen", "strict", "open"]);
}

#[test]
fn what_a_later_version_brings_is_refused_by_name() {
    for (fields, path) in [("key: [jwt:sub]", "key[0]"), ("key: [{ jwt: sub }]", "key[0]")] {
        let lines = limit_faults(&format!("{{ name: a, rate: 1/s, {fields} }}"));
        one_fault(&lines, &[&format!("limits[0].{path}: "), "not supported by this version"]);
    }
}

#[test]
fn tls_of_a_port_has_a_certificate_and_a_key_and_may_ask_clients_for_theirs() {
    let of = |section: &str, tls: &str| match section {
        "proxy" => format!("proxy: {{ upstream: http://a, tls: {tls} }}"),
        _ => format!("proxy: {{ upstream: http://a }}\nadmin: {{ tls: {tls} }}"),
    };
    for section in ["proxy", "admin"] {
        let full = of(section, "{ cert: a, key: b, client_ca: c, names: ['*.ops'] }");
        let config = parse("t.yaml", &full, &no_env).unwrap();
        let tls = if section == "proxy" { config.proxy.tls } else { config.admin.tls }.unwrap();
        assert_eq!(tls.client_ca.unwrap().to_str(), Some("c"));
        assert!(parse("t.yaml", &of(section, "none"), &no_env).is_ok());
        assert!(parse("t.yaml", &of(section, "{ cert: a, key: b }"), &no_env).is_ok());
        for (tls, fault) in [
            ("{ cert: a }", &["key: is required"][..]),
            ("{ cert: a, key: b, names: [a] }", &["names: ", "needs `client_ca`"]),
            ("{ cert: a, key: b, client_ca: c, names: ['b c'] }", &["names[0]: ", "`b c` is"]),
            ("{ cert: a, key: b, ca: c }", &["ca: ", "unknown field"]),
            ("a", &[": "]),
        ] {
            let lines = faults(&of(section, tls));
            one_fault(&lines, &[&[&*format!("{section}.tls")], fault].concat());
        }
    }
    // Any client that the CA signed may send requests, but not be an operator.
    let open = "{ cert: a, key: b, client_ca: c }";
    assert!(parse("t.yaml", &of("proxy", open), &no_env).is_ok());
    one_fault(&faults(&of("admin", open)), &["admin.tls.names: ", "is required"]);
}

#[test]
fn an_admin_port_for_others_needs_a_token_or_certificates() {
    let of = |rest: &str| {
        format!("proxy: {{ upstream: http://a }}\nadmin: {{ listen: '0.0.0.0:1', {rest} }}")
    };
    for fields in ["tls: none", "tls: { cert: a, key: b }"] {
        one_fault(&faults(&of(fields)), &["admin.listen: ", "`token_file` or `tls.client_ca`"]);
    }
    for fields in ["token_file: a", "tls: { cert: a, key: b, client_ca: c, names: [ops] }"] {
        assert!(parse("t.yaml", &of(fields), &no_env).is_ok(), "{fields}");
    }
}

/// The error lines of a file with these limits behind a trusted proxy.
fn behind_proxy(limits: &str) -> Result<Config, Vec<String>> {
    let text = format!(
        "proxy: {{ upstream: http://a, trusted_proxies: [10.0.0.0/8] }}\nlimits:\n{limits}\n"
    );
    parse("t.yaml", &text, &no_env)
        .map_err(|error| error.to_string().lines().map(str::to_owned).collect())
}

#[test]
fn a_cost_has_three_forms() {
    let cost = |fields: &str| {
        let config = behind_proxy(&format!("- {{ name: a, rate: 10/s, cost: {fields} }}"));
        config.map(|config| config.limits().find("a").unwrap().1.cost().clone())
    };
    let tokens = |whole| Tokens::from_whole(whole).unwrap();
    assert_eq!(cost("3").unwrap(), Cost::Fixed(tokens(3)));
    let Cost::Cases(cases) =
        cost("[{ match: { methods: [POST] }, cost: 5 }, { cost: 2 }]").unwrap()
    else {
        panic!("not a list")
    };
    assert_eq!(cases[0].0.methods, ["POST"]);
    assert_eq!((cases[0].1, cases[1].1), (tokens(5), tokens(2)));
    assert_eq!(cases[1].0, Condition::default());
    assert_eq!(
        cost("{ header: X-Cost, max: 10 }").unwrap(),
        Cost::Header { name: "x-cost".into(), max: tokens(10) }
    );
    for (fields, words) in [
        ("11", &["limits[0].rate: ", "each costs 11, above the burst of 10"][..]),
        ("[{ cost: 1 }, { cost: 11 }]", &["limits[0].rate: ", "cost[1]", "it costs 11"]),
        ("{ header: x, max: 11 }", &["limits[0].rate: ", "the max of 11"]),
        ("[{ cost: 0 }]", &["limits[0].cost[0].cost: `0`"]),
        ("[{ match: { path: '/a/*' }, cost: 1 }]", &["limits[0].cost[0].match.path: "]),
        ("[{ match: {} }]", &["limits[0].cost[0].cost: is required"]),
        ("[{ when: {}, cost: 1 }]", &["limits[0].cost[0].when: unknown field"]),
        ("[7]", &["limits[0].cost[0]: expected a map, found `7`"]),
        ("{ header: x }", &["limits[0].cost.max: is required"]),
        ("{ max: 1 }", &["limits[0].cost.header: is required"]),
        ("{ header: 'a b', max: 1 }", &["limits[0].cost.header: `a b`"]),
        ("{ header: x, max: -1 }", &["limits[0].cost.max: `-1`"]),
        ("{ header: x, maximum: 1 }", &["limits[0].cost.maximum: unknown"]),
        ("1.5", &["limits[0].cost: `1.5`"]),
    ] {
        let lines = cost(fields).unwrap_err();
        assert!(lines.len() <= 2, "{fields}: {lines:#?}");
        for word in words {
            assert!(lines.iter().any(|line| line.contains(word)), "{fields}: {lines:#?}");
        }
    }
}

#[test]
fn a_cost_from_a_header_takes_a_proxy_to_trust() {
    let limit = "{ name: a, rate: 10/s, cost: { header: x-cost, max: 10 } }";
    one_fault(&limit_faults(limit), &["limits[0].cost: ", "needs `proxy.trusted_proxies`"]);
    assert!(behind_proxy(&format!("- {limit}")).is_ok());
}

#[test]
fn a_renamed_limit_names_its_first_name() {
    let config = limit("{ name: b, was: a, rate: 1/s }");
    let limits = config.limits();
    let (_, b) = limits.find("b").unwrap();
    assert_eq!((b.name(), b.identity()), ("b", "a"));
    let fresh = limit("{ name: a, rate: 9/s }").limits();
    assert_eq!(b.bucket_id(b"k"), fresh.find("a").unwrap().1.bucket_id(b"k"));
    one_fault(&limit_faults("{ name: a, was: a, rate: 1/s }"), &["limits[0].was: "]);
    one_fault(&limit_faults("{ name: a, was: 'b c', rate: 1/s }"), &["limits[0].was: "]);
    let two = |first: &str, second: &str| {
        behind_proxy(&format!("- {{ {first}, rate: 1/s }}\n- {{ {second}, rate: 1/s }}"))
    };
    let lines = two("name: a", "name: b, was: a").unwrap_err();
    one_fault(&lines, &["limits[1].was: the buckets of `a` are those of limits[0]"]);
    assert!(two("name: a, was: b", "name: b, was: a").is_ok(), "two that swap their names");
    assert!(two("name: a, was: x", "name: b, was: a").is_ok());
}

#[test]
fn overrides_of_a_renamed_limit_name_the_buckets_it_adopted() {
    let config =
        limit("{ name: b, was: a, rate: 5/s, overrides: [{ key: [203.0.113.7], rate: 50/s }] }");
    let limits = config.limits();
    let (_, b) = limits.find("b").unwrap();
    let key = b.rule().key_from_text(&["203.0.113.7"], 64).unwrap();
    assert_eq!(b.quota(b.bucket_id(key.as_bytes())).burst().whole(), 50);
}

#[test]
fn settings_of_the_proxy_that_need_another_say_so() {
    let proxy = |fields: &str| faults(&format!("proxy: {{ upstream: http://a, {fields} }}"));
    one_fault(&proxy("proxy_protocol: true"), &["1:46: proxy.proxy_protocol: needs `trusted_"]);
    one_fault(&proxy("proxy_protocol: maybe"), &["proxy.proxy_protocol: expected true or false"]);
    one_fault(
        &proxy("proxy_protocol: true, trusted_proxies: [x]"),
        &["proxy.trusted_proxies[0]: `x` is not a network"],
    );
    one_fault(
        &proxy("cors: { allow_origins: ['*'], allow_credentials: true }"),
        &["proxy.cors.allow_credentials: ", "list the origins"],
    );
    one_fault(&proxy("cors: { allow_origins: [a.example] }"), &["proxy.cors.allow_origins[0]: "]);
    one_fault(
        &proxy("cors: { origins: [] }"),
        &["proxy.cors.origins: ", "there are `allow_origins`"],
    );
    let config = good(
        "proxy: { upstream: http://a, proxy_protocol: true, trusted_proxies: [10.0.0.1],
           cors: { allow_origins: [https://a.example, '*'] } }",
    );
    assert!(config.proxy.proxy_protocol);
    assert_eq!(config.proxy.cors.allow_origins[0].to_string(), "https://a.example");
}

#[test]
fn peers_need_an_explicit_word_on_security() {
    let replication = |fields: &str| {
        faults(&format!("proxy: {{ upstream: http://a }}\nreplication: {{ {fields} }}"))
    };
    one_fault(&replication("peers: { dns: a }"), &["replication.peers: ", "`insecure: true`"]);
    let tls = "tls: { cert: a, key: b, ca: c, names: ['*.tidegate'] }";
    let config = good(&format!(
        "proxy: {{ upstream: http://a }}\nreplication: {{ peers: {{ dns: a }}, {tls} }}"
    ));
    assert_eq!(config.replication.tls.unwrap().names[0].to_string(), "*.tidegate");
    one_fault(
        &replication(&format!("peers: {{ dns: a }}, insecure: true, {tls}")),
        &["replication.insecure: ", "exclude each other"],
    );
    one_fault(
        &replication("peers: { dns: a }, tls: { cert: c, key: b, names: [a] }"),
        &["replication.tls.ca: is required"],
    );
    one_fault(
        &replication("peers: { dns: a }, tls: { cert: c, key: b, ca: d, names: [] }"),
        &["replication.tls.names: ", "needs a name"],
    );
    one_fault(
        &replication("peers: { dns: a }, tls: { cert: c, key: b, ca: d, names: [a, 'b c'] }"),
        &["replication.tls.names[1]: ", "`b c` is neither"],
    );
    one_fault(&replication("peers: { dns: a }, tls: yes"), &["replication.tls: "]);
    one_fault(
        &replication("peers: { dns: a, static: [b:1] }, insecure: true"),
        &["`dns` and `static`"],
    );
    one_fault(&replication("peers: {}, insecure: true"), &["needs `dns"]);
    one_fault(&replication("peers: { static: [a] }, insecure: true"), &["peers.static[0]: "]);
}

#[test]
fn keys_are_written_in_every_form() {
    let config = limit(
        "{ name: a, rate: 1/s, missing: deny, mode: shadow, expose: false, key: [client_ip, header:X-Api-Key, cookie:sid, query:tenant, path, method, host, { header: x-token, secret: true }] }",
    );
    let limits = config.limits();
    let limit = limits.find("a").unwrap().1;
    assert_eq!(
        limit.rule().parts_text(),
        "client_ip,header:x-api-key,cookie:sid,query:tenant,path,method,host,header:x-token"
    );
    let secret: Vec<bool> = limit.rule().key.iter().map(|part| part.is_secret()).collect();
    assert_eq!(secret, [false, false, true, false, false, false, false, true]);
    assert_eq!(
        (limit.rule().missing, limit.mode(), limit.exposed()),
        (Missing::Deny, Mode::Shadow, false)
    );

    let block = limit_of(
        "name: a\n  rate: 1/s\n  key:\n  - header:x-a\n  - header: x-b\n    secret: true\n",
    );
    assert_eq!(block, [("header:x-a".into(), false), ("header:x-b".into(), true)]);
    assert_eq!(limit_of("{ name: a, rate: 1/s, key: [] }"), []);
    assert_eq!(limit_of("{ name: a, rate: 1/s }"), [(Source::ClientIp.to_string(), false)]);
}

fn limit_of(fields: &str) -> Vec<(String, bool)> {
    let limits = limit(fields).limits();
    let limit = limits.find("a").unwrap().1;
    limit.rule().key.iter().map(|part| (part.to_string(), part.is_secret())).collect()
}

#[test]
fn an_override_names_the_bucket_that_requests_use() {
    let config = limit(
        "{ name: a, rate: 5/s, key: [client_ip, header:t], overrides: [{ key: ['2001:db8::9', 42], rate: 50/s, burst: 7 }] }",
    );
    let limits = config.limits();
    let limit = limits.find("a").unwrap().1;
    let key = limit.rule().key_from_text(&["2001:db8::1", "42"], 64).unwrap();
    assert_eq!(limit.quota(limit.bucket_id(key.as_bytes())).burst().whole(), 7);
    for (overrides, words) in [
        ("{ key: [a], rate: 1/s }", "`a` is not an IP address"),
        ("{ key: [1.2.3.4, b], rate: 1/s }", "1 part(s), but 2 value(s)"),
        ("{ key: [''], rate: 1/s }", "key[0]: is empty"),
        ("{ key: [10.0.0.0/8], rate: 1/s }", "grouped by /32"),
        ("{ key: ['fd00::/48'], rate: 1/s }", "grouped by /64"),
        ("{ key: ['fd00::1'], rate: 1/s }, { key: ['fd00::2'], rate: 1/s }", "[1].key: another"),
        ("{ key: [1.2.3.4] }", "overrides[0].rate: is required"),
        ("{ rate: 1/s }", "overrides[0].key: is required"),
        ("{ key: [1.2.3.4], rate: 1/s, burst: 0 }", "overrides[0].burst: "),
    ] {
        let lines = limit_faults(&format!("{{ name: a, rate: 5/s, overrides: [{overrides}] }}"));
        one_fault(&lines, &[words]);
    }
    one_fault(
        &limit_faults(
            "{ name: a, rate: 5/s, cost: 2, overrides: [{ key: [1.2.3.4], rate: 1/s }] }",
        ),
        &["overrides[0].rate: no request would ever pass"],
    );
}

#[test]
fn the_environment_fills_values_in() {
    let env = |name: &str| match name {
        "RATE" => Some("7/s".to_owned()),
        "BURST" => Some("9".to_owned()),
        "EVIL" => Some("a, rate: 1/s }".to_owned()),
        _ => None,
    };
    let file = |fields: &str| {
        let text = format!(
            "proxy: {{ upstream: 'http://${{HOST:-app}}:80' }}\nlimits:\n- {{ {fields} }}\nreplication: {{ insecure: \"${{YES:-true}}\" }}"
        );
        parse("t.yaml", &text, &env)
    };
    let config = file("name: a, rate: \"${RATE}\", burst: \"${BURST}\"").unwrap();
    let limits = config.limits();
    let quota = *limits.find("a").unwrap().1.default_quota();
    assert_eq!((quota.rate().to_string(), quota.burst().whole()), ("7/s".to_owned(), 9));
    assert_eq!(config.proxy.upstream.unwrap().to_string(), "http://app:80");
    assert!(config.replication.insecure);

    let error = file("name: a, rate: \"${NONE}\", burst: \"${BURST\"").unwrap_err();
    let places: Vec<_> =
        error.problems.iter().map(|p| (p.place.unwrap(), p.path.as_str())).collect();
    assert_eq!(
        places,
        [
            (Place { line: 3, column: 20 }, "limits[0].rate"),
            (Place { line: 3, column: 38 }, "limits[0].burst")
        ]
    );
    let error = file("name: \"${EVIL}\", rate: 1/s").unwrap_err();
    assert_eq!(error.problems.len(), 1, "{error}");
}

#[test]
fn broken_syntax_has_a_place() {
    for (text, place) in [
        ("proxy: { upstream: http://a\nlimits: x", "2:"),
        ("proxy:\n\tupstream: a", "2:"),
        ("proxy: 'a", "1:"),
        ("a: 1\n---\nb: 2", "3:"),
        ("? [a]\n: 1", "1:"),
    ] {
        let lines = faults(text);
        assert!(lines.iter().any(|line| line.starts_with(place)), "{text:?}: {lines:#?}");
    }
    one_fault(
        &faults("proxy: { upstream: http://a }\nadmin: &x {}\ntelemetry: *x"),
        &["3:12: telemetry: ", "aliases"],
    );
    one_fault(&faults("proxy: { upstream: !x http://a }"), &["proxy.upstream: ", "tags"]);
    one_fault(&faults(&format!("proxy: {}", "[".repeat(10_000))), &["1:", "recursion limit"]);
    one_fault(
        &faults(&format!("proxy: {}{}", "[".repeat(100), "]".repeat(100))),
        &["nested more than 64 deep"],
    );
    for empty in ["", "# nothing", "---", "proxy:", "proxy: {}"] {
        one_fault(&faults(empty), &["proxy.upstream: is required"]);
    }
    one_fault(&faults("- a"), &["expected a map"]);
    one_fault(
        &faults("proxy: { upstream: http://a }\nlimits: { a: 1 }"),
        &["2:9: limits: expected a list"],
    );
}

#[test]
fn what_is_quoted_stays_on_its_line() {
    one_fault(&faults("proxy: { upstream: \"http://\\n\\e[31m\" }"), &["`http://\\n\\u{1b}[31m`"]);
    one_fault(&faults("proxy: { upstream: http://a, \"a\\nb\": 1 }"), &["proxy.a\\nb: unknown"]);
}

#[test]
fn a_hostile_file_ends_in_bounded_time() {
    let mut text = String::from("proxy: { upstream: http://a }\nlimits:\n");
    for _ in 0..5000 {
        text.push_str("- { nope: 1 }\n");
    }
    let error = parse("t.yaml", &text, &no_env).unwrap_err();
    assert_eq!(error.problems.len(), MAX_PROBLEMS + 1);
}

#[test]
fn a_file_that_is_no_text_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.yaml");
    let error = load(&path, &no_env).unwrap_err();
    assert!(error.to_string().starts_with(&format!("{}: cannot be read: ", path.display())));
    std::fs::write(&path, b"proxy:\n  upstream: \xff\n").unwrap();
    let error = load(&path, &no_env).unwrap_err();
    assert_eq!(error.problems[0].place, Some(Place { line: 2, column: 13 }));
    std::fs::write(&path, EVERY_DEFAULT).unwrap();
    assert_eq!(load(&path, &no_env).unwrap().limits.len(), 1);
}

#[test]
fn limits_can_be_given_as_flags() {
    let flags = |limits: &[&str]| {
        let limits: Vec<String> = limits.iter().map(|&limit| limit.to_owned()).collect();
        from_flags("http://127.0.0.1:3000", &limits)
    };
    for (text, name, parts, burst) in [
        ("client_ip=100/min", "client_ip", "client_ip", 100),
        ("client_ip=100/min:20", "client_ip", "client_ip", 20),
        ("header:X-Api-Key,path=5/10s", "header-x-api-key.path", "header:x-api-key,path", 5),
        ("k:header:x=1/s", "k", "header:x", 1),
        ("everything:=9/s", "everything", "", 9),
        ("=9/s", "all", "", 9),
    ] {
        let config = flags(&[text]).unwrap();
        let limits = config.limits();
        let (_, limit) = limits.find(name).unwrap_or_else(|| panic!("{text}"));
        assert_eq!(limit.rule().parts_text(), parts, "{text}");
        assert_eq!(limit.default_quota().burst().whole(), burst, "{text}");
    }
    for text in [
        "",
        "client_ip",
        "client_ip=5",
        "client=5/s",
        "client_ip=5/s:0",
        "a b:path=1/s",
        "path,path=1/s",
        "client_ip=5/s:x",
        "path,=1/s",
    ] {
        let error = flags(&[text]).unwrap_err();
        assert_eq!(error.problems.len(), 1, "{error}");
        assert!(
            error.to_string().starts_with(&format!("command line: --limit {text}: ")),
            "{error}"
        );
    }
    assert_eq!(flags(&["path=1/s", "path=2/s", "x"]).unwrap_err().problems.len(), 2);
    let error = from_flags("ftp://a", &[]).unwrap_err().to_string();
    assert!(error.starts_with("command line: --upstream: "), "{error}");
}

#[test]
fn the_schema_has_the_fields_that_the_file_has() {
    let schema = serde_json::to_value(Config::schema()).unwrap();
    let names = |node: &serde_json::Value| -> BTreeSet<String> {
        node["properties"].as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!(names(&schema), SECTIONS.iter().map(|&name| name.to_owned()).collect());
    let root = tree::parse(EVERY_DEFAULT, &no_env, &mut Vec::new()).unwrap();
    for (of, required) in [("Limit", ["name", "rate"]), ("Override", ["key", "rate"])] {
        assert_eq!(schema["$defs"][of]["required"], serde_json::json!(required));
    }
    let mut compared = 0;
    compare(&root, &schema, &schema, &mut compared);
    assert!(compared >= 10, "{compared}");
}

/// Asserts that every map of the example has a schema that closes the door to
/// other fields and names exactly those of the example.
fn compare<'a>(
    node: &Node,
    mut schema: &'a serde_json::Value,
    root: &'a serde_json::Value,
    compared: &mut usize,
) {
    while let Some(reference) = schema["$ref"].as_str() {
        schema = root.pointer(reference.trim_start_matches('#')).unwrap();
    }
    match &node.content {
        Content::Map(fields) => {
            let Some(properties) = schema["properties"].as_object() else {
                // A value or `none`.
                if schema["anyOf"][0].is_object() {
                    compare(node, &schema["anyOf"][0], root, compared);
                    return;
                }
                if matches!(&*node.path, "upstreams" | "upstreams.acme.inject") {
                    let each = &schema["additionalProperties"];
                    fields.iter().for_each(|(_, value)| compare(value, each, root, compared));
                    return;
                }
                assert_eq!(node.path, "limits[0].match.headers", "{schema}");
                return;
            };
            assert_eq!(schema["additionalProperties"], false, "{}", node.path);
            for (name, value) in fields {
                let field = properties.get(name).unwrap_or_else(|| panic!("{}", value.path));
                assert!(
                    field["description"].as_str().is_some_and(|text| !text.is_empty()),
                    "{} has no description",
                    value.path
                );
                compare(value, field, root, compared);
            }
            // Conditions of the example each name some of the fields.
            if ["match", "exempt", "inject"].iter().all(|part| !node.path.contains(part)) {
                let known: BTreeSet<&String> = properties.keys().collect();
                assert_eq!(fields.iter().map(|(name, _)| name).collect::<BTreeSet<_>>(), known);
            }
            *compared += 1;
        }
        Content::List(list) => {
            list.iter().for_each(|item| compare(item, &schema["items"], root, compared));
        }
        Content::Scalar(text) => {
            let described = ["pattern", "enum", "oneOf", "anyOf", "const", "minimum", "examples"];
            let boolean = schema["type"] == "boolean";
            let any = described.iter().any(|word| !schema[word].is_null());
            assert!(boolean || any, "{} = {text} is not described: {schema}", node.path);
        }
        Content::Null => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_text_is_a_configuration_or_an_error(text in "\\PC{0,200}") {
        let _ = parse("t.yaml", &text, &no_env);
        let _ = from_flags(&text, std::slice::from_ref(&text));
    }

    #[test]
    fn a_cut_or_changed_example_is_a_configuration_or_an_error(
        at in 0..EVERY_DEFAULT.len(),
        length in 0..40usize,
        insert in "[-\\[\\]{}:,'\"#&*!|>%@`$ \\n\\ta-z0-9/]{0,6}",
    ) {
        let end = (at + length).min(EVERY_DEFAULT.len());
        let text = format!("{}{insert}{}", &EVERY_DEFAULT[..at], &EVERY_DEFAULT[end..]);
        match parse("t.yaml", &text, &no_env) {
            Ok(config) => {
                let of_upstreams = config.upstreams.values().filter(|u| u.limit.is_some()).count();
                prop_assert_eq!(config.limits().len(), config.limits.len() + of_upstreams);
            }
            Err(error) => {
                prop_assert!(!error.problems.is_empty());
                prop_assert_eq!(error.to_string().lines().count(), error.problems.len());
            }
        }
    }
}

#[test]
fn the_effective_configuration_reads_back_as_itself_and_tells_no_secret() {
    let text = r#"
proxy: { upstream: "http://127.0.0.1:3000", trusted_proxies: [10.0.0.0/8] }
upstreams:
  acme: { url: https://acme.example, ca: ca.crt, limit: { requests: 100, per: 10s } }
  plain: { url: "unix:/run/app.sock", host: client, inject: { x-a: { env: A, prefix: "Key " }, x-b: { file: b } } }
egress:
  routes:
    - { match: { path: /acme/, headers: { x-env: prod } }, upstream: acme, max_wait: 2s, strip: /acme }
    - { match: { cidrs: [10.0.0.0/8] }, upstream: plain }
    - { upstream: default }
limits:
  - name: a
    was: b
    match: { path: /api/, methods: [GET], host: a.example, headers: { x-env: prod } }
    exempt: [ { path: /api/health }, { cidrs: [10.1.0.0/16] } ]
    key: [client_ip, { header: x-api-key, secret: true }]
    missing: skip
    rate: 100/min
    overrides: [ { key: [203.0.113.7, hunter2], rate: 1000/min, burst: 200 } ]
    mode: shadow
  - { name: c, rate: 0/s, key: [], window: strict }
  - { name: w, rate: 100/10s, window: strict, overrides: [ { key: [203.0.113.7], rate: 9/s } ] }
  - { name: d, rate: 5/10s, burst: 7, cost: [ { match: { path: /x }, cost: 5 } ] }
  - { name: e, rate: 5/s, cost: { header: x-cost, max: 3 }, expose: false, partition: strict }
  - { name: f, rate: 5/s, missing: deny, partition: open, match: { upstream: acme } }
replication: { peers: { static: ["127.0.0.1:9401"] }, insecure: true }
"#;
    let env = |name: &str| (name == "A").then(|| "hunter2".to_owned());
    let config = parse("a", text, &env).unwrap();
    let effective = config.effective();
    assert!(!effective.contains("hunter2") && effective.contains("(secret)"), "{effective}");
    let again = parse("b", &effective, &env).unwrap_or_else(|error| panic!("{error}\n{effective}"));
    assert_eq!(again.effective(), effective);
    assert!(config.needs_restart(&again).is_empty());
    let same = |config: &Config| {
        let limits = config.limits();
        limits
            .iter()
            .map(|(_, l)| {
                format!(
                    "{:?} {:?} {:?} {:?} {:?}",
                    l.name(),
                    l.rule(),
                    l.default_quota(),
                    l.cost(),
                    l.partition()
                )
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(same(&config), same(&again));
}

#[test]
fn the_effective_configuration_names_no_variables() {
    let text = r#"
proxy: { upstream: "http://127.0.0.1:3000" }
limits:
  - { name: a, rate: 5/s, match: { headers: { x-a: "$${A} ${B}", x-b: "$$$${C}" } } }
"#;
    let env = |name: &str| (name == "B").then(|| "${A}".to_owned());
    let config = parse("a", text, &env).unwrap();
    let headers = |config: &Config| {
        let limits = config.limits();
        limits.iter().map(|(_, limit)| limit.rule().condition.headers.clone()).collect::<Vec<_>>()
    };
    assert_eq!(headers(&config)[0][0].1, "${A} ${A}");
    let again = parse("b", &config.effective(), &no_env).unwrap();
    assert_eq!(headers(&again), headers(&config));
}

#[test]
fn a_limit_of_an_upstream_is_a_limit_like_any_other() {
    let config = good(
        "upstreams: { acme: { url: https://acme.example, limit: { requests: 100, per: 10s } } }
egress: { routes: [{ upstream: acme }] }
replication: { sync_interval: 50ms }
limits: [{ name: tenant, key: [header:x-tenant], rate: 1/s, match: { upstream: acme } }]",
    );
    assert_eq!(config.proxy, proxy::Config::routed());
    let limits = config.limits();
    assert_eq!(
        limits.iter().map(|(_, limit)| limit.name()).collect::<Vec<_>>(),
        ["tenant", "acme"]
    );
    let (_, limit) = limits.find("acme").unwrap();
    assert_eq!(limit.rule().condition.upstream.as_deref(), Some("acme"));
    assert_eq!(limit.rule().key, []);
    assert_eq!(limit.default_quota().rate(), "95/10050ms".parse().unwrap());
    assert_eq!(limit.default_quota().burst().whole(), 5);
}

#[test]
fn faults_of_upstreams_and_routes_have_their_places() {
    let with = |upstreams: &str, routes: &str| {
        faults(&format!("upstreams: {{ {upstreams} }}\negress: {{ routes: [{routes}] }}"))
    };
    let acme = "acme: { url: https://acme.example }";
    for (upstreams, routes, words) in [
        ("acme: {}", "{ upstream: acme }", &["upstreams.acme.url: is required"][..]),
        ("acme: { url: ftp://a }", "{ upstream: acme }", &["1:27: upstreams.acme.url: `ftp://a`"]),
        ("acme: { url: http://a, ca: x }", "{ upstream: acme }", &["upstreams.acme.ca: goes with"]),
        (
            "acme: { url: http://127.0.0.1:8080 }",
            "{ upstream: acme }",
            &["upstreams.acme.url", "circle"],
        ),
        (
            "acme: { url: http://a, limit: { per: 1s } }",
            "{ upstream: acme }",
            &["acme.limit.requests"],
        ),
        (
            "acme: { url: http://a, limit: { requests: 1, per: 1s } }",
            "{ upstream: acme }",
            &["from 2"],
        ),
        (
            "acme: { url: http://a, limit: { requests: 9, per: 1s, burst: 9 } }",
            "{ upstream: acme }",
            &["1:75: upstreams.acme.limit.burst: must be less than the 9 requests"],
        ),
        (
            "acme: { url: http://a, limit: { requests: 9, per: 90d } }",
            "{ upstream: acme }",
            &["limit.per"],
        ),
        (
            "acme: { url: http://a, inject: { x-key: { env: NO_SUCH } } }",
            "{ upstream: acme }",
            &[
                "1:61: upstreams.acme.inject.x-key.env: the environment variable `NO_SUCH` is not set",
            ],
        ),
        (
            "acme: { url: http://a, inject: { x-key: s3cr3t } }",
            "{ upstream: acme }",
            &["upstreams.acme.inject.x-key: a value is not written here"],
        ),
        (
            "acme: { url: http://a, inject: { host: { file: x } } }",
            "{ upstream: acme }",
            &["upstreams.acme.inject.host: `host` is the proxy's own to set"],
        ),
        (
            "x: { url: http://x }, default: { url: http://a }",
            "{ upstream: x }",
            &["upstreams.default", "`proxy.upstream`"],
        ),
        (
            "x: { url: http://x }, a b: { url: http://a }",
            "{ upstream: x }",
            &["upstreams.a b", "not a name"],
        ),
        (acme, "{ upstream: acne }", &["2:32: egress.routes[0].upstream", "did you mean `acme`"]),
        (acme, "{ match: { path: /x } }", &["egress.routes[0].upstream: is required"]),
        (acme, "{ upstream: acme, match: { upstream: acme } }", &["routes[0].match.upstream"]),
        (acme, "{ upstream: acme, strip: acme }", &["routes[0].strip"]),
        (acme, "{ upstream: acme, max_wait: 5 }", &["routes[0].max_wait"]),
        (acme, "{ upstream: acme }, { upstream: default }", &["routes[1].upstream", "not given"]),
        (acme, "{ upstream: acme, defer: prefer }", &["routes[0].defer: unknown field"]),
        (acme, "", &["proxy.upstream: is required, unless"]),
    ] {
        let lines = with(upstreams, routes);
        one_fault(&lines, words);
    }
    one_fault(
        &faults("proxy: { upstream: http://a }\nupstreams: [a]"),
        &["2:12: upstreams: expected a map"],
    );
    let of = |limit: &str| {
        faults(&format!(
            "proxy: {{ upstream: http://a }}
upstreams: {{ acme: {{ url: http://b, limit: {{ requests: 9, per: 1s }} }} }}
limits:
- {limit}"
        ))
    };
    one_fault(
        &of("{ name: acme, rate: 1/s }"),
        &["4:11: limits[0].name", "upstreams.acme.limit already"],
    );
    one_fault(&of("{ name: a, was: acme, rate: 1/s }"), &["limits[0].was", "upstreams.acme.limit"]);
    one_fault(
        &of("{ name: a, rate: 1/s, match: { upstream: acm } }"),
        &["4:44: limits[0].match.upstream"],
    );
    one_fault(
        &of("{ name: a, rate: 1/s, exempt: [{ upstream: x }] }"),
        &["limits[0].exempt[0].upstream"],
    );
    one_fault(
        &of("{ name: a, rate: 9/s, cost: [{ match: { upstream: x }, cost: 2 }] }"),
        &["limits[0].cost[0].match.upstream"],
    );
    let exempt = "{ name: a, rate: 1/s, exempt: [{ upstream: default }] }";
    good(&format!("proxy: {{ upstream: http://a }}\nlimits: [{exempt}]"));
}
