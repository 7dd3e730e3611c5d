//! What an upstream of HTTP/2 did not look at is sent once more (RFC 9113 section 8.7).

use std::net::TcpListener;
use std::thread::{self, JoinHandle};

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, SendStream};
use http::{Request, Response};
use tokio::net::TcpStream;

use crate::harness::frames::{
    DATA, END_HEADERS, END_STREAM, FrameClient, GOAWAY, HEADERS, RST_STREAM, STATUS_200, block,
    frame,
};
use crate::harness::{Setup, TestProxy, limit};

const REFUSED: Reason = Reason::REFUSED_STREAM;

/// A proxy in front of an upstream that does as `script` says, with a limit of which
/// nothing refills.
fn before<T: Send + 'static>(
    script: impl FnOnce(&TcpListener) -> T + Send + 'static,
) -> (TestProxy, JoinHandle<T>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let upstream = thread::spawn(move || script(&listener));
    (Setup::before_url(&url).limit(limit("r", "9/h")).frozen().start(), upstream)
}

async fn connect(proxy: &TestProxy) -> SendRequest<Bytes> {
    let io = TcpStream::connect(proxy.address).await.unwrap();
    let (client, connection) = h2::client::handshake(io).await.unwrap();
    tokio::spawn(connection);
    client.ready().await.unwrap()
}

fn call(client: &mut SendRequest<Bytes>, ends: bool) -> (ResponseFuture, SendStream<Bytes>) {
    let request = Request::post("http://app.example/a.B/C?d")
        .header("content-type", "application/grpc")
        .header("x-twice", "1")
        .header("x-twice", "2");
    client.send_request(request.body(()).unwrap(), ends).unwrap()
}

async fn status(answer: ResponseFuture) -> String {
    let answer: Response<_> = answer.await.unwrap();
    assert_eq!(answer.status(), 200);
    answer.headers()["grpc-status"].to_str().unwrap().to_owned()
}

/// The next request: its stream and its block of fields.
fn request(server: &mut FrameClient) -> (u32, Vec<u8>) {
    let head = server.next_of(HEADERS).expect("a request");
    (head.stream, head.payload)
}

fn refuse(server: &mut FrameClient, stream: u32) {
    assert!(server.send(&frame(RST_STREAM, 0, stream, &u32::from(REFUSED).to_be_bytes())));
}

fn answer(server: &mut FrameClient, stream: u32) {
    let fields = [&[STATUS_200][..], &block(&[("grpc-status", "0")])].concat();
    assert!(server.send(&frame(HEADERS, END_HEADERS | END_STREAM, stream, &fields)));
}

/// Says farewell, with the last stream that was looked at.
fn farewell(server: &mut FrameClient, last: u32) {
    let payload = [last.to_be_bytes(), 0_u32.to_be_bytes()].concat();
    assert!(server.send(&frame(GOAWAY, 0, 0, &payload)));
}

#[tokio::test]
async fn a_refused_call_is_sent_once_more_and_charged_once() {
    let (proxy, upstream) = before(|listener| {
        let mut server = FrameClient::serve(listener);
        let (first, _) = request(&mut server);
        refuse(&mut server, first);
        let (second, _) = request(&mut server);
        answer(&mut server, second);
        assert!(server.next_of(HEADERS).is_none());
    });
    let (result, _) = call(&mut connect(&proxy).await, true);
    assert_eq!(status(result).await, "0");
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (1, 0.0));
    drop(proxy);
    upstream.join().unwrap();
}

#[tokio::test]
async fn a_call_that_is_refused_twice_fails_and_gets_its_token_back_once() {
    let (proxy, upstream) = before(|listener| {
        let mut server = FrameClient::serve(listener);
        for _ in 0..2 {
            let (stream, _) = request(&mut server);
            refuse(&mut server, stream);
        }
        // The next one is another call, not a third attempt.
        let (stream, _) = request(&mut server);
        answer(&mut server, stream);
    });
    let mut client = connect(&proxy).await;
    let (result, _) = call(&mut client, true);
    assert_eq!(status(result).await, "14");
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (0, 1.0));
    let (result, _) = call(&mut client, true);
    assert_eq!(status(result).await, "0");
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (1, 1.0));
    upstream.join().unwrap();
}

#[tokio::test]
async fn a_call_is_sent_again_while_nothing_was_taken_from_its_body() {
    let (told, again) = tokio::sync::oneshot::channel();
    let (proxy, upstream) = before(|listener| {
        let mut server = FrameClient::serve(listener);
        let (first, _) = request(&mut server);
        refuse(&mut server, first);
        let (second, _) = request(&mut server);
        told.send(()).unwrap();
        let data = server.next_of(DATA).unwrap();
        assert_eq!((data.stream, data.payload.as_slice()), (second, b"late".as_slice()));
        answer(&mut server, second);
    });
    let (result, mut body) = call(&mut connect(&proxy).await, false);
    again.await.unwrap();
    body.send_data(Bytes::from_static(b"late"), true).unwrap();
    assert_eq!(status(result).await, "0");
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (1, 0.0));
    upstream.join().unwrap();
}

#[tokio::test]
async fn a_call_whose_body_was_touched_is_not_sent_again() {
    let (proxy, upstream) = before(|listener| {
        let mut server = FrameClient::serve(listener);
        let (first, _) = request(&mut server);
        server.next_of(DATA).unwrap();
        refuse(&mut server, first);
        let (second, _) = request(&mut server);
        let data = server.next_of(DATA).unwrap();
        assert_eq!((data.stream, data.payload.as_slice()), (second, b"two".as_slice()));
        answer(&mut server, second);
    });
    let mut client = connect(&proxy).await;
    let (result, mut body) = call(&mut client, false);
    body.send_data(Bytes::from_static(b"one"), false).unwrap();
    assert_eq!(status(result).await, "14");
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (0, 1.0));
    let (result, mut body) = call(&mut client, false);
    body.send_data(Bytes::from_static(b"two"), true).unwrap();
    assert_eq!(status(result).await, "0");
    assert_eq!(proxy.spent(), 1);
    upstream.join().unwrap();
}

#[tokio::test]
async fn what_a_farewell_leaves_out_is_sent_as_it_was_on_another_connection() {
    let (proxy, upstream) = before(|listener| {
        let mut old = FrameClient::serve(listener);
        let (_, said) = request(&mut old);
        farewell(&mut old, 0);
        let mut new = FrameClient::serve(listener);
        let (stream, again) = request(&mut new);
        // Both are the first of their connection, and refer to nothing said before.
        assert_eq!(again.escape_ascii().to_string(), said.escape_ascii().to_string());
        answer(&mut new, stream);
    });
    let (result, _) = call(&mut connect(&proxy).await, true);
    assert_eq!(status(result).await, "0");
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (1, 0.0));
    upstream.join().unwrap();
}

#[tokio::test]
async fn a_farewell_moves_only_what_it_leaves_out() {
    let (proxy, upstream) = before(|listener| {
        let mut old = FrameClient::serve(listener);
        let (opened, _) = request(&mut old);
        answer(&mut old, opened);
        let (first, _) = request(&mut old);
        let (second, _) = request(&mut old);
        farewell(&mut old, first);
        let mut new = FrameClient::serve(listener);
        let (again, _) = request(&mut new);
        answer(&mut new, again);
        // What it did look at ends where it began.
        answer(&mut old, first);
        assert!(second > first);
    });
    let mut client = connect(&proxy).await;
    let (opening, _) = call(&mut client, true);
    assert_eq!(status(opening).await, "0");
    let ((first, _), (second, _)) = (call(&mut client, true), call(&mut client, true));
    assert_eq!((status(second).await, status(first).await), ("0".into(), "0".into()));
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (3, 0.0));
    upstream.join().unwrap();
}

#[tokio::test]
async fn what_a_farewell_includes_may_have_been_done_and_is_not_sent_again() {
    let (proxy, upstream) = before(|listener| {
        let mut server = FrameClient::serve(listener);
        let (stream, _) = request(&mut server);
        farewell(&mut server, stream);
        drop(server);
        let mut server = FrameClient::serve(listener);
        let (stream, _) = request(&mut server);
        answer(&mut server, stream);
    });
    let mut client = connect(&proxy).await;
    let (result, _) = call(&mut client, true);
    assert_eq!(status(result).await, "14");
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (1, 0.0));
    let (result, _) = call(&mut client, true);
    assert_eq!(status(result).await, "0");
    assert_eq!(proxy.spent(), 2);
    upstream.join().unwrap();
}
