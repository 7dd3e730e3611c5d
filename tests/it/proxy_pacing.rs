//! Requests that wait for their tokens (EG).

use std::time::{Duration, Instant};

use tidegate::limiter::Crowding;
use tidegate::runtime::Stage;

use crate::harness::{Connection, Setup, TestProxy, Upstream, eventually, limit, request};

const WAIT: Duration = Duration::from_secs(5);

fn waiting(proxy: &TestProxy) -> f64 {
    proxy.metric("tidegate_waiting{limit=\"p\"}")
}

fn waits(proxy: &TestProxy, outcome: &str) -> f64 {
    proxy.metric(&format!("tidegate_waits_total{{limit=\"p\",outcome=\"{outcome}\"}}"))
}

fn checks(proxy: &TestProxy, verdict: &str) -> f64 {
    proxy.metric(&format!("tidegate_requests_total{{limit=\"p\",verdict=\"{verdict}\"}}"))
}

/// So many connections, each of which has asked for its number, one after
/// another.
fn line(proxy: &TestProxy, count: usize) -> Vec<Connection> {
    let before = waiting(proxy) as usize;
    (0..count)
        .map(|i| {
            let mut connection = proxy.connect();
            connection.send(request("GET", &format!("/{i}"), &[], ""));
            eventually("the wait", || waiting(proxy) as usize == before + i + 1);
            connection
        })
        .collect()
}

#[test]
fn eg_g1_callers_wait_instead_of_failing_and_in_the_order_of_coming() {
    let upstream = Upstream::start();
    let pace = limit("p", "10/s").burst(1).waiting(WAIT);
    let proxy = Setup::before(&upstream).workers(2).limit(pace).frozen().start();
    assert_eq!(proxy.statuses(1, &[]), [200]);
    let mut connections = line(&proxy, 8);
    assert_eq!((upstream.count(), proxy.spent()), (1, 1), "what waits owns nothing");
    for expected in 1..=8 {
        proxy.advance(Duration::from_millis(100));
        eventually("one more", || upstream.count() == 1 + expected);
        assert_eq!(proxy.spent(), 1 + expected as u64, "one for each token");
    }
    for connection in &mut connections {
        let got = connection.answer();
        assert_eq!(got.status, 200);
        assert!(got.field("ratelimit").is_some());
    }
    let order: Vec<_> = upstream.requests()[1..].iter().map(|r| r.line().to_owned()).collect();
    let expected: Vec<_> = (0..8).map(|i| format!("GET /{i} HTTP/1.1")).collect();
    assert_eq!(order, expected);
    assert_eq!((checks(&proxy, "held"), checks(&proxy, "admitted")), (8.0, 1.0));
    assert_eq!((waits(&proxy, "admitted"), waiting(&proxy)), (8.0, 0.0));
    assert_eq!(proxy.metric("tidegate_held_duration_seconds_count"), 8.0);
}

#[test]
fn eg_g1_a_real_second_passes_as_many_as_the_rate() {
    let upstream = Upstream::start();
    let pace = limit("p", "20/s").burst(2).waiting(WAIT);
    let proxy = Setup::before(&upstream).workers(2).limit(pace).start();
    let started = Instant::now();
    let mut connections: Vec<_> = (0..22).map(|_| proxy.connect()).collect();
    for connection in &mut connections {
        connection.send(request("GET", "/", &[], ""));
    }
    for connection in &mut connections {
        assert_eq!(connection.answer().status, 200);
    }
    assert!(started.elapsed() >= Duration::from_secs(1), "{:?}", started.elapsed());
}

#[test]
fn eg_g2_one_that_would_wait_too_long_is_refused_at_once() {
    let upstream = Upstream::start();
    let pace = limit("p", "1/s").burst(1).waiting(Duration::from_secs(2));
    let proxy = Setup::before(&upstream).limit(pace).frozen().start();
    assert_eq!(proxy.statuses(1, &[]), [200]);
    let _waiting = line(&proxy, 2);
    let got = proxy.connect().get("/");
    assert_eq!((got.status, got.field("retry-after")), (429, Some("3")));
    assert_eq!(
        got.field("proxy-status"),
        Some("tidegate; error=http_request_denied; details=\"p\"")
    );
    assert_eq!((upstream.count(), checks(&proxy, "refused")), (1, 1.0));
}

#[test]
fn eg_g3_a_client_may_ask_to_wait_less_and_not_more() {
    let upstream = Upstream::start();
    let pace = limit("p", "1/2s").burst(1).waiting(Duration::from_secs(3));
    let proxy = Setup::before(&upstream).limit(pace).frozen().start();
    assert_eq!(proxy.statuses(1, &[("Prefer", "wait=0")]), [200]);
    for prefer in ["wait=1", "wait=0", "respond-async, wait=1"] {
        assert_eq!(proxy.statuses(1, &[("Prefer", prefer)]), [429], "{prefer}");
    }
    let mut first = proxy.connect();
    first.send(request("GET", "/", &[("Prefer", "wait=2")], ""));
    eventually("the wait", || waiting(&proxy) == 1.0);
    // Due in four seconds: no preference makes three of them more.
    assert_eq!(proxy.statuses(1, &[("Prefer", "wait=60")]), [429]);
    proxy.advance(Duration::from_secs(2));
    assert_eq!(first.answer().status, 200);
}

#[test]
fn eg_g4_a_client_that_leaves_takes_no_token() {
    let upstream = Upstream::start();
    let pace = limit("p", "10/s").burst(1).waiting(WAIT);
    let proxy = Setup::before(&upstream).limit(pace).frozen().start();
    assert_eq!(proxy.statuses(1, &[]), [200]);
    let mut connections = line(&proxy, 3);
    drop(connections.remove(0));
    eventually("the end of the wait", || waiting(&proxy) == 2.0);
    drop(connections.remove(0));
    eventually("the end of the wait", || waiting(&proxy) == 1.0);
    proxy.advance(Duration::from_millis(100));
    assert_eq!(connections[0].answer().status, 200);
    assert_eq!((upstream.count(), proxy.spent()), (2, 2));
    assert_eq!(upstream.requests()[1].line(), "GET /2 HTTP/1.1");
    assert_eq!((waits(&proxy, "left"), proxy.metric("tidegate_refunds_total")), (2.0, 0.0));
    assert_eq!(proxy.metric("tidegate_http_requests_total{outcome=\"cancelled\"}"), 2.0);
}

#[test]
fn eg_g5_too_many_that_wait_are_turned_away_with_503() {
    let upstream = Upstream::start();
    let pace = limit("p", "1/s").burst(1).waiting(WAIT);
    let crowding = Crowding { in_all: 100, per_bucket: 2 };
    let proxy = Setup::before(&upstream).limit(pace).crowding(crowding).frozen().start();
    assert_eq!(proxy.statuses(1, &[]), [200]);
    let _waiting = line(&proxy, 2);
    let got = proxy.connect().get("/");
    assert_eq!((got.status, got.field("retry-after")), (503, Some("3")));
    assert_eq!(got.field("content-type"), Some("application/problem+json"));
    assert_eq!(got.field("proxy-status"), Some("tidegate; error=http_request_denied"));
    assert!(got.text().contains("too many requests wait already"), "{}", got.text());
    assert_eq!(waits(&proxy, "too_many"), 1.0);
    assert_eq!(proxy.metric("tidegate_http_requests_total{outcome=\"overloaded\"}"), 1.0);
}

#[test]
fn eg_g6_what_waits_may_finish_while_the_proxy_leaves() {
    let upstream = Upstream::start();
    let pace = limit("p", "10/s").burst(1).waiting(WAIT);
    let proxy = Setup::before(&upstream).workers(2).limit(pace).frozen().start();
    assert_eq!(proxy.statuses(1, &[]), [200]);
    let mut connections = line(&proxy, 3);
    proxy.drain(Stage::Closing);
    for connection in &mut connections {
        proxy.advance(Duration::from_millis(100));
        let got = connection.answer();
        assert_eq!((got.status, got.field("connection")), (200, Some("close")));
    }
    eventually("the end", || proxy.handle.connections() == 0);
    assert_eq!(proxy.failure(), None);
}

#[test]
fn eg_g6_what_still_waits_when_the_time_is_up_ends_and_costs_nothing() {
    let upstream = Upstream::start();
    let pace = limit("p", "1/s").burst(1).waiting(WAIT);
    let proxy = Setup::before(&upstream).workers(2).limit(pace).frozen().start();
    assert_eq!(proxy.statuses(1, &[]), [200]);
    let _waiting = line(&proxy, 4);
    proxy.drain(Stage::Aborting);
    eventually("the end of the waits", || waiting(&proxy) == 0.0);
    assert_eq!((proxy.spent(), proxy.limiter.waiting()), (1, 0));
    assert_eq!(proxy.failure(), None);
}

#[test]
fn eg_g7_a_limit_that_is_gone_or_larger_lets_the_line_move() {
    let upstream = Upstream::start();
    let pace = |burst| limit("p", "1/s").burst(burst).waiting(WAIT);
    let proxy = Setup::before(&upstream).workers(2).limit(pace(1)).frozen().start();
    assert_eq!(proxy.statuses(1, &[]), [200]);
    let mut connections = line(&proxy, 3);
    proxy.reload([pace(2)]);
    assert_eq!(connections[0].answer().status, 200);
    assert_eq!(proxy.spent(), 2);
    proxy.reload([]);
    for connection in &mut connections[1..] {
        assert_eq!(connection.answer().status, 200);
    }
}

#[test]
fn eg_g8_a_body_waits_with_its_request() {
    let upstream = Upstream::start();
    let pace = limit("p", "10/s").burst(1).waiting(WAIT);
    let proxy = Setup::before(&upstream).limit(pace).frozen().start();
    assert_eq!(proxy.statuses(1, &[]), [200]);
    let mut connection = proxy.connect();
    connection.send(request("POST", "/", &[("Content-Length", "5")], "hello"));
    eventually("the wait", || waiting(&proxy) == 1.0);
    proxy.advance(Duration::from_millis(100));
    assert_eq!(connection.answer().status, 200);
    assert_eq!(upstream.requests()[1].body, b"hello");
}

#[test]
fn eg_g9_a_limit_that_only_reports_makes_nobody_wait() {
    let upstream = Upstream::start();
    let pace = limit("p", "1/h").waiting(WAIT).shadow();
    let proxy = Setup::before(&upstream).limit(pace).frozen().start();
    assert_eq!(proxy.statuses(3, &[]), [200, 200, 200]);
    assert_eq!((checks(&proxy, "shadow_refused"), checks(&proxy, "held")), (2.0, 0.0));
}
