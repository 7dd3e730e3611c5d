//! Limits on the data path: who is charged, who is not, who gets tokens back.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::registry::Registry;
use socket2::{Domain, Socket, Type};
use tidegate::limiter::{Alone, Client, LimitSet, Limiter};
use tidegate::proxy::{Enforcer, HeaderStyle, Metrics, RateLimitLayer};
use tidegate::time::Clock;
use tower::{Layer, ServiceExt};

use crate::harness::{Reply, Setup, Upstream, eventually, limit, request};

#[test]
fn a_request_that_finds_no_upstream_gets_its_token_back() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let proxy =
        Setup::before_url(&format!("http://{address}")).limit(limit("r", "1/h")).frozen().start();
    let mut connection = proxy.connect();
    for _ in 0..5 {
        let answer = connection.get("/");
        assert_eq!(answer.status, 502);
        let status = "tidegate; error=destination_unavailable";
        assert_eq!(answer.field("proxy-status"), Some(status));
    }
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (0, 5.0));
    assert_eq!(proxy.metric("tidegate_http_requests_total{outcome=\"upstream_failed\"}"), 5.0);
}

/// A listener whose queue is full, so that connecting to it takes for ever.
fn crowded() -> (Socket, Vec<TcpStream>) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let mut waiting = Vec::new();
    while let Ok(io) = TcpStream::connect_timeout(&address, Duration::from_millis(100)) {
        waiting.push(io);
    }
    (socket, waiting)
}

#[test]
fn a_request_that_never_got_through_gets_its_token_back() {
    let (socket, _waiting) = crowded();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let proxy = Setup::before_url(&format!("http://{address}"))
        .limit(limit("r", "1/h"))
        .with(|config| config.timeouts.connect = Duration::from_millis(200))
        .frozen()
        .start();
    let got = proxy.connect().get("/");
    assert_eq!(got.status, 504);
    assert_eq!(got.field("proxy-status"), Some("tidegate; error=connection_timeout"));
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (0, 1.0));

    // Nor does one cost anything whose client left before there was a way.
    let mut connection = proxy.connect();
    connection.send(request("GET", "/", &[], ""));
    eventually("the charge", || proxy.spent() == 1);
    drop(connection);
    eventually("the refund", || proxy.spent() == 0);
    let cancelled = proxy.metric("tidegate_http_requests_total{outcome=\"cancelled\"}");
    assert_eq!((cancelled, proxy.metric("tidegate_refunds_total")), (1.0, 2.0));
}

#[test]
fn a_request_that_the_upstream_took_and_failed_stays_charged() {
    let upstream = Upstream::scripted(|_| Reply::Last(Vec::new()));
    let proxy = Setup::before(&upstream).limit(limit("r", "2/h")).frozen().start();
    let mut connection = proxy.connect();
    assert_eq!(connection.post("/", &[], "x").status, 502);
    assert_eq!(connection.get("/").status, 502);
    assert_eq!(connection.get("/").status, 429);
    assert_eq!(proxy.spent(), 2);
    // A fresh connection that fails is no reason to try again.
    assert_eq!(upstream.count(), 2);
}

#[test]
fn a_client_that_leaves_while_the_upstream_works_stays_charged() {
    let upstream = Upstream::scripted(|_| Reply::Silence);
    let proxy = Setup::before(&upstream).limit(limit("r", "2/h")).frozen().start();
    let mut connection = proxy.connect();
    connection.send(request("GET", "/", &[], ""));
    eventually("the request", || upstream.count() == 1);
    drop(connection);
    eventually("the end of the upstream's connection", || upstream.ended() == 1);
    assert_eq!(proxy.spent(), 1);
    assert_eq!(proxy.metric("tidegate_http_requests_total{outcome=\"cancelled\"}"), 1.0);
}

#[test]
fn preflights_of_browsers_are_not_limited() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "1/h")).frozen().start();
    let fields = [("Origin", "https://a.example"), ("Access-Control-Request-Method", "POST")];
    let mut connection = proxy.connect();
    for _ in 0..3 {
        connection.send(request("OPTIONS", "/", &fields, ""));
        assert_eq!(connection.answer().status, 200);
    }
    assert_eq!(proxy.spent(), 0);
    connection.send(request("OPTIONS", "/", &fields[..1], ""));
    assert_eq!(connection.answer().status, 200);
    assert_eq!(proxy.spent(), 1);
}

#[test]
fn se_g1_paths_are_matched_in_normal_form_and_forwarded_as_sent() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("p", "1/h").on("/private")).frozen().start();
    let mut connection = proxy.connect();
    assert_eq!(connection.get("/x/..//pr%69vate?q=%2F").status, 200);
    for target in ["/private", "/./private", "/x/%2e%2e/private", "/private/", "/private/."] {
        assert_eq!(connection.get(target).status, 429, "{target}");
    }
    assert_eq!(connection.get("/%2570rivate").status, 200);
    assert_eq!(upstream.requests()[0].line(), "GET /x/..//pr%69vate?q=%2F HTTP/1.1");
}

#[test]
fn head_is_refused_without_a_body() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "0/s")).start();
    let mut connection = proxy.connect();
    connection.send(request("HEAD", "/", &[], ""));
    assert_eq!(connection.bodyless_answer().status, 429);
    assert_eq!(connection.get("/").status, 429);
}

#[tokio::test]
async fn the_layer_serves_in_front_of_any_service() {
    let limits = LimitSet::new([limit("r", "1/h").by_client().build()]);
    let metrics = Metrics::register(&mut Registry::with_prefix("tidegate"), &limits);
    let limiter = Arc::new(Limiter::new(limits, 1_000_000, Alone));
    let enforcer =
        Arc::new(Enforcer::new(limiter, Clock::monotonic(), metrics, HeaderStyle::Standard));
    let client = |_: &http::request::Parts| Client::new([127, 0, 0, 1].into(), 64);
    let layer = RateLimitLayer::new(enforcer, client);
    let inner = tower::service_fn(|_: http::Request<()>| async {
        let body = http_body_util::Full::new(bytes::Bytes::from("hello"));
        Ok::<_, std::io::Error>(http::Response::new(body))
    });
    let service = layer.layer(inner);
    let statuses = [(); 2].map(|()| {
        let request = http::Request::get("/").body(()).unwrap();
        service.clone().oneshot(request)
    });
    let [first, second] = statuses;
    let first = first.await.unwrap();
    assert_eq!(
        (first.status().as_u16(), &first.headers()["ratelimit"]),
        (200, &"\"r\";r=0;t=3600".parse().unwrap())
    );
    assert_eq!(second.await.unwrap().status(), 429);
}
