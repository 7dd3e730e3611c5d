//! What answers tell about limits (HD).

use std::time::Duration;

use tidegate::proxy::HeaderStyle;

use crate::harness::{Answer, Reply, Setup, TestProxy, Upstream, limit};

fn legacy(answer: &Answer) -> [u64; 3] {
    ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"]
        .map(|name| answer.field(name).unwrap_or_else(|| panic!("{answer:?}")).parse().unwrap())
}

fn retry_after(answer: &Answer) -> u64 {
    let value = answer.field("retry-after").unwrap();
    assert!(value.bytes().all(|b| b.is_ascii_digit()), "{value}");
    value.parse().unwrap()
}

fn drained(upstream: &Upstream, rate: &str, burst: usize) -> TestProxy {
    let proxy = Setup::before(upstream).limit(limit("r", rate)).frozen().start();
    assert_eq!(proxy.statuses(burst, &[]), vec![200; burst]);
    proxy
}

#[test]
fn hd_g1_retry_after_is_rounded_up_and_never_zero() {
    let upstream = Upstream::start();
    assert_eq!(retry_after(&drained(&upstream, "5/s", 5).connect().get("/")), 1);
    let proxy = drained(&upstream, "1/10s", 1);
    assert_eq!(retry_after(&proxy.connect().get("/")), 10);
    proxy.advance(Duration::from_millis(300));
    assert_eq!(retry_after(&proxy.connect().get("/")), 10);
    proxy.advance(Duration::from_millis(700));
    assert_eq!(retry_after(&proxy.connect().get("/")), 9);
}

#[test]
fn hd_g2_a_blocked_limit_has_no_retry_after() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "0/s")).start();
    let answer = proxy.connect().get("/");
    assert_eq!((answer.status, answer.field("retry-after")), (429, None));
    assert_eq!(answer.field("ratelimit-policy"), Some("\"r\";q=0"));
    assert_eq!(answer.field("ratelimit"), Some("\"r\";r=0"));
    assert!(answer.json().get("retry_after").is_none());
}

#[test]
fn hd_g3_retry_after_is_the_time_to_the_next_token_not_the_window() {
    let upstream = Upstream::start();
    let proxy = drained(&upstream, "10/60s", 10);
    proxy.advance(Duration::from_secs(3));
    assert_eq!(retry_after(&proxy.connect().get("/")), 3);
}

#[test]
fn hd_g4_reset_is_positive_while_tokens_are_missing_and_falls() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .limit(limit("r", "2/10s"))
        .with(|config| config.headers = HeaderStyle::Both)
        .frozen()
        .start();
    let mut connection = proxy.connect();
    let answers: Vec<Answer> = (0..3).map(|_| connection.get("/")).collect();
    assert_eq!(answers.iter().map(|a| a.status).collect::<Vec<_>>(), [200, 200, 429]);
    assert_eq!(answers.iter().map(|a| legacy(a)[2]).collect::<Vec<_>>(), [5, 10, 10]);
    assert_eq!(answers[2].field("ratelimit"), Some("\"r\";r=0;t=10"));
    proxy.advance(Duration::from_secs(2));
    assert_eq!(legacy(&connection.get("/"))[2], 8);
}

#[test]
fn hd_g5_the_fields_are_on_every_answer_that_a_limit_applied_to() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .limit(limit("r", "2/min").on("/limited"))
        .with(|config| config.headers = HeaderStyle::Legacy)
        .frozen()
        .start();
    let mut connection = proxy.connect();
    for (status, remaining) in [(200, 1), (200, 0), (429, 0)] {
        let answer = connection.get("/limited");
        assert_eq!(answer.status, status);
        assert_eq!(legacy(&answer)[..2], [2, remaining]);
        assert_eq!(answer.field("retry-after").is_some(), status == 429);
        assert_eq!(answer.field("ratelimit"), None);
    }
    let answer = connection.get("/free");
    assert_eq!(answer.status, 200);
    assert!(!answer.head.to_ascii_lowercase().contains("ratelimit"), "{}", answer.head);
}

#[test]
fn hd_g5_the_standard_fields_are_structured() {
    let upstream = Upstream::start();
    let proxy =
        Setup::before(&upstream).limit(limit("per-client", "100/min").burst(20)).frozen().start();
    let mut connection = proxy.connect();
    let first = connection.get("/");
    assert_eq!(first.field("ratelimit-policy"), Some("\"per-client\";q=20;w=12"));
    assert_eq!(first.field("ratelimit"), Some("\"per-client\";r=19;t=1"));
    let last = (0..20).map(|_| connection.get("/")).last().unwrap();
    assert_eq!(last.status, 429);
    assert_eq!(last.field("ratelimit"), Some("\"per-client\";r=0;t=12"));
    assert_eq!(last.field("content-type"), Some("application/problem+json"));
    let status = "tidegate; error=http_request_denied; details=\"per-client\"";
    assert_eq!(last.field("proxy-status"), Some(status));
    let document = last.json();
    assert_eq!(document["status"], 429);
    assert_eq!(document["limit"], "per-client");
    assert_eq!(document["retry_after"], 1);
}

#[test]
fn hd_g6_no_field_has_two_values() {
    let script = |_: &_| {
        Reply::Bytes(
            b"HTTP/1.1 503 Busy\r\nRateLimit-Remaining: 999\r\nRateLimit: \"u\";r=999\r\n\
              RateLimit-Policy: \"u\";q=999\r\nX-RateLimit-Limit: 7\r\nRetry-After: 3\r\n\
              Content-Length: 0\r\n\r\n"
                .to_vec(),
        )
    };
    let upstream = Upstream::scripted(script);
    for (style, standard, legacy) in [
        (HeaderStyle::Standard, Some("\"r\";r=1;t=30"), Some("7")),
        (HeaderStyle::Legacy, Some("\"u\";r=999"), Some("2")),
        (HeaderStyle::Both, Some("\"r\";r=1;t=30"), Some("2")),
        (HeaderStyle::Off, Some("\"u\";r=999"), Some("7")),
    ] {
        let proxy = Setup::before(&upstream)
            .limit(limit("r", "2/min"))
            .with(|config| config.headers = style)
            .frozen()
            .start();
        let answer = proxy.connect().get("/");
        assert_eq!((answer.status, answer.field("retry-after")), (503, Some("3")));
        assert_eq!(answer.field("ratelimit"), standard, "{style:?}");
        assert_eq!(answer.field("x-ratelimit-limit"), legacy, "{style:?}");
        let older = matches!(style, HeaderStyle::Legacy | HeaderStyle::Off).then_some("999");
        assert_eq!(answer.field("ratelimit-remaining"), older, "{style:?}");
    }
}

#[test]
fn hd_g7_the_limit_nearest_exhaustion_is_described() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .limit(limit("b", "5/min"))
        .limit(limit("a", "3/min"))
        .with(|config| config.headers = HeaderStyle::Both)
        .frozen()
        .start();
    let mut connection = proxy.connect();
    let first = connection.get("/");
    assert_eq!(legacy(&first)[..2], [3, 2]);
    assert_eq!(first.field("ratelimit"), Some("\"a\";r=2;t=20"));
    assert_eq!(first.field("ratelimit-policy"), Some("\"b\";q=5;w=60, \"a\";q=3;w=60"));
    connection.get("/");
    connection.get("/");
    let refused = connection.get("/");
    assert_eq!((refused.status, &legacy(&refused)[..2]), (429, &[3, 0][..]));
    assert_eq!(refused.json()["limit"], "a");
    let check = |limit: &str, verdict: &str| {
        proxy.metric(&format!("tidegate_requests_total{{limit=\"{limit}\",verdict=\"{verdict}\"}}"))
    };
    assert_eq!((check("a", "refused"), check("a", "admitted")), (1.0, 3.0));
    assert_eq!((check("b", "not_charged"), check("b", "admitted")), (1.0, 3.0));
    assert_eq!(proxy.metric("tidegate_http_requests_total{outcome=\"limited\"}"), 1.0);
    assert_eq!(proxy.metric("tidegate_http_requests_total{outcome=\"forwarded\"}"), 3.0);
}

#[test]
fn a_limit_that_is_not_exposed_and_one_in_shadow_tell_nothing() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .limit(limit("hidden", "2/min").hidden())
        .limit(limit("shadow", "1/min").shadow())
        .frozen()
        .start();
    let mut connection = proxy.connect();
    for status in [200, 200, 429] {
        let answer = connection.get("/");
        assert_eq!((answer.status, answer.field("ratelimit")), (status, None));
        let all = format!("{}{}", answer.head, answer.text());
        assert!(!all.contains("hidden") && !all.contains("shadow"), "{all}");
    }
    let shadow = "tidegate_requests_total{limit=\"shadow\",verdict=\"shadow_refused\"}";
    assert_eq!(proxy.metric(shadow), 2.0);
}
