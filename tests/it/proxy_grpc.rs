//! gRPC, and HTTP/2 at large (GR, SE-G7).

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{Reason, server};
use http::{HeaderMap, HeaderValue, Request, Response};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::harness::certs::{Ca, Files, terminator};
use crate::harness::{Reply, Setup, TestProxy, Upstream, eventually, limit};

/// Under which name the upstream keeps `:authority`.
const AUTHORITY: &str = "seen-authority";

/// A gRPC upstream: what it saw, and an answer for each path.
#[derive(Clone, Default)]
struct Calls {
    seen: Arc<Mutex<Vec<HeaderMap>>>,
    cancelled: Arc<Notify>,
}

impl Calls {
    async fn start(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let calls = self.clone();
        tokio::spawn(async move {
            while let Ok((io, _)) = listener.accept().await {
                let calls = calls.clone();
                tokio::spawn(async move {
                    let mut connection = server::handshake(io).await.unwrap();
                    while let Some(Ok((request, respond))) = connection.accept().await {
                        tokio::spawn(calls.clone().serve(request, respond));
                    }
                });
            }
        });
        address
    }

    async fn serve(
        self,
        request: Request<h2::RecvStream>,
        mut respond: server::SendResponse<Bytes>,
    ) {
        let (mut parts, mut body) = request.into_parts();
        if let Some(authority) = parts.uri.authority() {
            let value = HeaderValue::from_str(authority.as_str()).unwrap();
            parts.headers.insert(AUTHORITY, value);
        }
        self.seen.lock().unwrap().push(parts.headers);
        let answer = Response::builder().header("content-type", "application/grpc");
        let mut trailers = HeaderMap::new();
        match parts.uri.path() {
            "/echo" => {
                let mut stream = respond.send_response(answer.body(()).unwrap(), false).unwrap();
                while let Some(Ok(data)) = body.data().await {
                    body.flow_control().release_capacity(data.len()).unwrap();
                    stream.send_data(data, false).unwrap();
                }
                trailers.insert("grpc-status", HeaderValue::from_static("0"));
                stream.send_trailers(trailers).unwrap();
            }
            "/error" => {
                let answer = answer
                    .header("grpc-status", "5")
                    .header("grpc-message", "not%20here")
                    .header("x-detail-bin", "AAEC");
                respond.send_response(answer.body(()).unwrap(), true).unwrap();
            }
            "/stream" => {
                let mut stream = respond.send_response(answer.body(()).unwrap(), false).unwrap();
                for i in 0..100_u8 {
                    stream.send_data(Bytes::copy_from_slice(&[0, 0, 0, 0, 1, i]), false).unwrap();
                }
                trailers.insert("grpc-status", HeaderValue::from_static("0"));
                trailers.insert("x-sum", HeaderValue::from_static("100"));
                stream.send_trailers(trailers).unwrap();
            }
            "/refuse" => respond.send_reset(Reason::REFUSED_STREAM),
            _ => {
                let mut stream = respond.send_response(answer.body(()).unwrap(), false).unwrap();
                std::future::poll_fn(|cx| stream.poll_reset(cx)).await.unwrap();
                self.cancelled.notify_one();
            }
        }
    }

    fn only(&self) -> HeaderMap {
        let seen = self.seen.lock().unwrap();
        assert_eq!(seen.len(), 1);
        seen[0].clone()
    }
}

async fn connect(proxy: &TestProxy) -> SendRequest<Bytes> {
    let io = TcpStream::connect(proxy.address).await.unwrap();
    let (client, connection) = h2::client::handshake(io).await.unwrap();
    tokio::spawn(connection);
    client.ready().await.unwrap()
}

fn call(path: &str) -> http::request::Builder {
    Request::post(format!("http://app.example{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
}

/// Sends a call with one message; the answer's head, messages and trailers.
async fn unary(
    client: &mut SendRequest<Bytes>,
    request: http::request::Builder,
) -> (Response<()>, Vec<u8>, Option<HeaderMap>) {
    let (response, mut stream) = client.send_request(request.body(()).unwrap(), false).unwrap();
    stream.send_data(Bytes::from_static(b"\0\0\0\0\x02hi"), true).unwrap();
    let (parts, mut body) = response.await.unwrap().into_parts();
    let mut messages = Vec::new();
    while let Some(data) = body.data().await {
        let data = data.unwrap();
        body.flow_control().release_capacity(data.len()).unwrap();
        messages.extend_from_slice(&data);
    }
    let trailers = body.trailers().await.unwrap();
    (Response::from_parts(parts, ()), messages, trailers)
}

fn before(address: SocketAddr) -> Setup {
    Setup::before_url(&format!("http://{address}"))
}

#[tokio::test]
async fn the_authority_of_a_call_is_said_once() {
    let calls = Calls::default();
    let proxy = before(calls.start().await).start();
    unary(&mut connect(&proxy).await, call("/echo")).await;
    let seen = calls.only();
    assert_eq!(seen.get(AUTHORITY).unwrap(), "app.example");
    assert_eq!(seen.get("x-forwarded-host").unwrap(), "app.example");
    // Said again as a field, nginx refuses it as a duplicate.
    assert!(!seen.contains_key("host"), "{seen:?}");
}

#[tokio::test]
async fn calls_go_over_tls_as_http2() {
    let ca = Ca::new();
    let certificate = ca.sign("localhost");
    let files = Files::new(&certificate, &ca.pem);
    let calls = Calls::default();
    // It would speak HTTP/1.1 as well.
    let protocols: &[&[u8]] = &[b"http/1.1", b"h2"];
    let port = terminator(calls.start().await, &certificate, protocols).port();
    let proxy = Setup::before_url(&format!("https://localhost:{port}"))
        .with(|config| config.upstream_ca = Some(files.path().join("ca.crt")))
        .start();
    let mut client = connect(&proxy).await;
    let (_, body, trailers) = unary(&mut client, call("/echo")).await;
    assert!(!body.is_empty());
    assert_eq!(trailers.unwrap()["grpc-status"], "0");
}

#[tokio::test]
async fn gr_g1_a_refused_call_is_exhausted_in_one_frame() {
    let calls = Calls::default();
    let proxy = before(calls.start().await).limit(limit("r", "1/h")).frozen().start();
    let mut client = connect(&proxy).await;
    let (_, _, trailers) = unary(&mut client, call("/echo")).await;
    assert_eq!(trailers.unwrap()["grpc-status"], "0");
    let (response, _) = client.send_request(call("/echo").body(()).unwrap(), true).unwrap();
    let response = response.await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.body().is_end_stream(), "trailers only");
    for (name, value) in [
        ("grpc-status", "8"),
        ("content-type", "application/grpc"),
        ("grpc-retry-pushback-ms", "3600000"),
        ("ratelimit", "\"r\";r=0;t=3600"),
    ] {
        assert_eq!(response.headers()[name], value);
    }
    let plain = Request::get("http://app.example/").body(()).unwrap();
    let (response, _) = client.send_request(plain, true).unwrap();
    assert_eq!(response.await.unwrap().status(), 429);
    assert_eq!(calls.seen.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn gr_g1_a_call_without_an_upstream_is_unavailable() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let proxy = before(address).limit(limit("r", "1/h")).frozen().start();
    let mut client = connect(&proxy).await;
    for _ in 0..2 {
        let (response, ..) = unary(&mut client, call("/echo")).await;
        assert_eq!(
            (response.status().as_u16(), &response.headers()["grpc-status"]),
            (200, &"14".parse().unwrap())
        );
    }
    assert_eq!(proxy.spent(), 0);
}

#[tokio::test]
async fn a_call_that_the_upstream_refused_unseen_gets_its_token_back_once() {
    let calls = Calls::default();
    let proxy = before(calls.start().await).limit(limit("r", "9/h")).frozen().start();
    let mut client = connect(&proxy).await;
    for refunds in 1..=2 {
        let (response, ..) = unary(&mut client, call("/refuse")).await;
        assert_eq!(response.headers()["grpc-status"], "14");
        assert_eq!(proxy.spent(), 0);
        assert_eq!(proxy.metric("tidegate_refunds_total"), f64::from(refunds));
    }
    // The connection is still good, and what was answered stays spent.
    let (_, _, trailers) = unary(&mut client, call("/echo")).await;
    assert_eq!(trailers.unwrap()["grpc-status"], "0");
    assert_eq!(proxy.spent(), 1);
}

#[tokio::test]
async fn an_upstream_that_says_farewell_is_called_on_another_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let served = tokio::spawn(async move {
        for connections in 1..=3 {
            let (io, _) = listener.accept().await.unwrap();
            let mut connection = server::handshake(io).await.unwrap();
            let (_, mut respond) = connection.accept().await.unwrap().unwrap();
            let answer = Response::builder().header("grpc-status", "0").body(()).unwrap();
            respond.send_response(answer, true).unwrap();
            connection.graceful_shutdown();
            while connection.accept().await.is_some() {}
            if connections == 3 {
                return;
            }
        }
    });
    let proxy = before(address).limit(limit("r", "9/h")).frozen().start();
    let mut client = connect(&proxy).await;
    for spent in 1..=3 {
        let (response, ..) = unary(&mut client, call("/")).await;
        assert_eq!(response.headers()["grpc-status"], "0");
        assert_eq!(proxy.spent(), spent);
    }
    served.await.unwrap();
}

#[tokio::test]
async fn gr_g2_te_is_trailers_and_nothing_else() {
    let calls = Calls::default();
    let proxy = before(calls.start().await).start();
    let (response, ..) = unary(&mut connect(&proxy).await, call("/echo")).await;
    assert_eq!(response.status(), 200);
    assert_eq!(calls.only()["te"], "trailers");

    // HTTP/2 allows no other value; HTTP/1 does.
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let fields = [("TE", "trailers, deflate"), ("Connection", "TE")];
    assert_eq!(proxy.connect().get_with("/", &fields).status, 200);
    assert_eq!(upstream.only().field("te"), Some("trailers"));
}

#[tokio::test]
async fn gr_g3_a_cancelled_call_is_cancelled_upstream() {
    let calls = Calls::default();
    let proxy = before(calls.start().await).start();
    let mut client = connect(&proxy).await;
    let request = call("/wait").body(()).unwrap();
    let (response, mut stream) = client.send_request(request, false).unwrap();
    let response = response.await.unwrap();
    stream.send_reset(Reason::CANCEL);
    drop(response);
    tokio::time::timeout(Duration::from_secs(2), calls.cancelled.notified()).await.unwrap();
}

#[tokio::test]
async fn gr_g4_messages_and_trailers_pass_unchanged() {
    let calls = Calls::default();
    let proxy = before(calls.start().await).start();
    let mut client = connect(&proxy).await;
    let (_, messages, trailers) = unary(&mut client, call("/echo")).await;
    assert_eq!(
        (messages.as_slice(), &trailers.unwrap()["grpc-status"]),
        (b"\0\0\0\0\x02hi".as_slice(), &"0".parse().unwrap())
    );

    let (response, messages, trailers) = unary(&mut client, call("/error")).await;
    assert_eq!(response.headers()["grpc-status"], "5");
    assert_eq!(response.headers()["grpc-message"], "not%20here");
    assert_eq!(response.headers()["x-detail-bin"], "AAEC");
    assert!(messages.is_empty() && trailers.is_none());

    let (_, messages, trailers) = unary(&mut client, call("/stream")).await;
    let numbers: Vec<u8> = messages.chunks(6).map(|message| message[5]).collect();
    assert_eq!(numbers, (0..100).collect::<Vec<u8>>());
    assert_eq!(trailers.unwrap()["x-sum"], "100");
    let seen = calls.seen.lock().unwrap();
    assert_eq!(seen[0]["via"], "2.0 tidegate");
    assert_eq!(seen[0]["x-forwarded-for"], "127.0.0.1");
}

#[tokio::test]
async fn http2_clients_reach_an_http1_upstream() {
    let upstream = Upstream::scripted(|_| Reply::Ok("hello"));
    let proxy = Setup::before(&upstream).limit(limit("r", "2/h")).frozen().start();
    let mut client = connect(&proxy).await;
    let request = Request::post("http://app.example:8080/x?y")
        .header("cookie", "a=1")
        .header("cookie", "b=2");
    let (response, body, _) = unary(&mut client, request).await;
    assert_eq!((response.status().as_u16(), body.as_slice()), (200, b"hello".as_slice()));
    let (response, ..) = unary(&mut client, Request::post("http://app.example/")).await;
    assert_eq!(response.headers()["ratelimit"], "\"r\";r=0;t=3600");
    let (response, ..) = unary(&mut client, Request::post("http://app.example/")).await;
    assert_eq!(response.status(), 429);
    let seen = &upstream.requests()[0];
    assert_eq!(seen.line(), "POST /x?y HTTP/1.1");
    assert_eq!(seen.field("host"), Some("app.example:8080"));
    assert_eq!(seen.field("cookie"), Some("a=1; b=2"));
    assert_eq!(seen.body, b"\0\0\0\0\x02hi");
}

#[tokio::test]
async fn a_call_goes_on_though_the_client_is_silent_for_long() {
    let calls = Calls::default();
    let silence = Duration::from_millis(400);
    let proxy =
        before(calls.start().await).with(|config| config.timeouts.idle = silence / 4).start();
    let mut client = connect(&proxy).await;
    let request = call("/echo").body(()).unwrap();
    let (response, mut stream) = client.send_request(request, false).unwrap();
    stream.send_data(Bytes::from_static(b"one"), false).unwrap();
    let mut body = response.await.unwrap().into_body();
    assert_eq!(body.data().await.unwrap().unwrap(), "one");
    tokio::time::sleep(silence).await;
    stream.send_data(Bytes::from_static(b"two"), true).unwrap();
    assert_eq!(body.data().await.unwrap().unwrap(), "two");
    assert!(body.data().await.is_none());
    assert_eq!(body.trailers().await.unwrap().unwrap()["grpc-status"], "0");
}

#[tokio::test]
async fn the_bounds_of_a_head_hold_for_http2_too() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).with(|config| config.max.headers = 20).start();
    let mut client = connect(&proxy).await;
    for (name, count, status) in [("x-field", 21, 431), ("x-field", 20, 200), ("cookie", 50, 200)] {
        let mut request = Request::get("http://app.example/");
        for _ in 0..count {
            request = request.header(name, "a=1");
        }
        client = client.ready().await.unwrap();
        let (response, _) = client.send_request(request.body(()).unwrap(), true).unwrap();
        let response = response.await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{count} of {name}");
        let told = response.headers().contains_key("proxy-status");
        assert_eq!(told, status == 431);
    }
    assert_eq!(upstream.count(), 2);
}

#[tokio::test]
async fn se_g7_a_flood_of_resets_ends_its_connection() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "10/h")).frozen().start();
    let mut client = connect(&proxy).await;
    let mut ended = None;
    for _ in 0..20_000 {
        let request = Request::get("http://app.example/").body(()).unwrap();
        match client.send_request(request, false) {
            Ok((response, mut stream)) => {
                stream.send_reset(Reason::CANCEL);
                drop(response);
            }
            Err(error) => {
                ended = Some(error);
                break;
            }
        }
        match client.clone().ready().await {
            Ok(ready) => client = ready,
            Err(error) => {
                ended = Some(error);
                break;
            }
        }
        tokio::task::yield_now().await;
    }
    let error = ended.expect("the flood was borne");
    // Who goes on writing may find the connection closed before it reads why.
    let told = error.reason() == Some(Reason::ENHANCE_YOUR_CALM);
    assert!(told || error.is_io(), "{error}");
    assert!(upstream.count() <= 10);
    let mut other = connect(&proxy).await;
    let request = Request::get("http://app.example/").body(()).unwrap();
    let (response, _) = other.send_request(request, true).unwrap();
    assert!(response.await.is_ok());
    eventually("the end of the flood's connection", || proxy.handle.connections() == 1);
}
