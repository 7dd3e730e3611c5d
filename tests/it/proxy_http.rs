//! Being a proxy (HP): what is passed on, what is not, and how connections live.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use crate::harness::{Reply, Setup, Upstream, eventually, limit, request};

fn answer(text: &'static str) -> Reply {
    Reply::Bytes(text.as_bytes().to_vec())
}

#[test]
fn hp_g1_what_is_meant_for_one_connection_is_not_passed_on() {
    let upstream = Upstream::scripted(|_| {
        answer(
            "HTTP/1.1 201 Made\r\nConnection: x-r, close\r\nX-R: 1\r\nKeep-Alive: timeout=5\r\n\
             Connection: x-s\r\nX-S: 1\r\nProxy-Authenticate: Basic\r\nX-Kept: 1\r\n\
             Content-Length: 2\r\n\r\nok",
        )
    });
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    let fields = [
        ("Connection", "x-other"),
        ("Connection", "close, x-secret"),
        ("X-Secret", "1"),
        ("X-Other", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Authorization", "Basic eA=="),
        ("Proxy-Connection", "keep-alive"),
        ("TE", "gzip"),
        ("Trailer", "x-t"),
        ("Upgrade", "foo"),
        ("X-Kept", "1"),
    ];
    let got = connection.post("/", &fields, "body");
    assert_eq!((got.status, got.text()), (201, "ok"));
    assert!(got.head.starts_with("HTTP/1.1 201 Made\r\n"), "{}", got.head);
    for name in ["x-r", "x-s", "keep-alive", "proxy-authenticate"] {
        assert_eq!(got.field(name), None, "{name}");
    }
    assert_eq!(got.field("x-kept"), Some("1"));
    let seen = upstream.only();
    for (name, _) in &fields[..10] {
        assert_eq!(seen.field(name), None, "{name}");
    }
    assert_eq!((seen.field("x-kept"), seen.body.as_slice()), (Some("1"), b"body".as_slice()));
    assert_eq!(seen.field("host"), Some("app.example"));
    assert_eq!(seen.field("via"), Some("1.1 tidegate"));
    assert!(connection.is_ended(), "the client asked to close");
}

#[test]
fn hp_g2_head_has_no_body_however_the_upstream_frames_it() {
    let upstream = Upstream::scripted(|received| {
        if received.line().starts_with("HEAD") {
            answer("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        } else {
            Reply::Ok("next")
        }
    });
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    connection.send(request("HEAD", "/", &[], ""));
    let head = connection.bodyless_answer();
    assert_eq!((head.status, head.field("content-length")), (200, None));
    assert_eq!(connection.get("/").text(), "next");
}

#[test]
fn hp_g3_answers_without_content_end_at_once() {
    let upstream = Upstream::scripted(|received| {
        answer(match received.line() {
            "GET /204 HTTP/1.1" => "HTTP/1.1 204 None\r\n\r\n",
            "GET /204-length HTTP/1.1" => "HTTP/1.1 204 None\r\nContent-Length: 0\r\n\r\n",
            "GET /304 HTTP/1.1" => "HTTP/1.1 304 Same\r\nContent-Length: 77\r\n\r\n",
            _ => "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        })
    });
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    for (target, status) in [("/204", 204), ("/204-length", 204), ("/304", 304), ("/", 200)] {
        let got = connection.get(target);
        assert_eq!((got.status, got.field("transfer-encoding")), (status, None));
    }
    assert_eq!(upstream.count(), 4);
}

#[test]
fn an_upstream_of_http_1_0_does_not_cost_the_client_its_connection() {
    let upstream = Upstream::scripted(|_| answer("HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n"));
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    for _ in 0..2 {
        let got = connection.get("/");
        assert!(got.head.starts_with("HTTP/1.1 200 "), "{}", got.head);
    }
}

#[test]
fn hp_g4_a_refused_upload_reads_its_answer() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "0/s")).start();
    let body = "x".repeat(5 * 1024 * 1024);
    for _ in 0..20 {
        let mut connection = proxy.connect();
        connection.send(request("POST", "/", &[], &body));
        let got = connection.answer();
        assert_eq!((got.status, got.field("connection")), (429, Some("close")));
        assert!(connection.is_ended());
    }
    assert_eq!(upstream.connections(), 0);
}

#[test]
fn hp_g4_of_an_endless_refused_upload_only_so_much_is_read() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "0/s")).start();
    let mut connection = proxy.connect();
    connection.send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1073741824\r\n\r\n");
    assert_eq!(connection.answer().status, 429);
    let chunk = [b'x'; 64 * 1024];
    let chunks = (0..1024).take_while(|_| connection.try_send(chunk)).count();
    // 8 MiB are read, and what fits into the buffers of two sockets is written.
    assert!(chunks * chunk.len() < 32 * 1024 * 1024, "{chunks} chunks were taken");
}

#[test]
fn hp_g4_a_small_refused_upload_keeps_its_connection() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "0/s").on("/no")).start();
    let mut connection = proxy.connect();
    // The body comes late, so that it is not yet there when it is refused.
    connection.send("POST /no HTTP/1.1\r\nHost: a\r\nContent-Length: 30000\r\n\r\n");
    let got = connection.answer();
    assert_eq!((got.status, got.field("connection")), (429, None));
    connection.send("x".repeat(30_000));
    assert_eq!(connection.get("/yes").status, 200);
}

#[test]
fn hp_g5_a_refused_client_that_waits_to_be_asked_is_not_asked() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "1/h")).frozen().start();
    let head = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n";
    let mut connection = proxy.connect();
    connection.send(head);
    assert_eq!(connection.bodyless_answer().head, "HTTP/1.1 100 Continue\r\n\r\n");
    connection.send("hello");
    assert_eq!(connection.answer().status, 200);
    let seen = upstream.only();
    assert_eq!((seen.body.as_slice(), seen.field("expect")), (b"hello".as_slice(), None));
    connection.send(head);
    assert_eq!(connection.answer().status, 429);
    assert!(connection.is_ended(), "the client may or may not send its body");
    assert_eq!(upstream.count(), 1);
}

#[test]
fn hp_g6_a_connection_that_died_idle_costs_no_request() {
    let upstream = Upstream::scripted(|received| {
        if received.index == 0 { Reply::Ok("ok") } else { Reply::Last(Vec::new()) }
    });
    let proxy = Setup::before(&upstream).limit(limit("r", "1000/h")).frozen().start();
    assert_eq!(proxy.statuses(100, &[]), [200; 100]);
    assert_eq!(proxy.spent(), 100, "a second attempt is not a second request");
}

#[test]
fn hp_g6_what_may_have_been_done_is_not_done_again() {
    let upstream = Upstream::scripted(|received| {
        if received.index == 0 { Reply::Ok("ok") } else { Reply::Last(Vec::new()) }
    });
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    assert_eq!(connection.get("/").status, 200);
    let got = connection.post("/", &[], "once");
    assert_eq!(got.status, 502);
    assert_eq!(got.field("proxy-status"), Some("tidegate; error=connection_terminated"));
    assert_eq!(upstream.count(), 2);
}

#[test]
fn connections_to_the_upstream_are_used_again() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    assert_eq!(proxy.statuses(20, &[]), [200; 20]);
    assert_eq!(upstream.connections(), 1);
}

const ASK: &[(&str, &str)] = &[
    ("Connection", "keep-alive, Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
];

#[test]
fn hp_g7_a_websocket_is_bridged_and_counts_once() {
    let upstream = Upstream::scripted(|_| {
        Reply::Take(Box::new(|mut io, early| {
            // The first bytes come in one segment with the answer.
            let head = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
                Upgrade: websocket\r\nSec-WebSocket-Accept: x\r\n\r\nhello";
            io.write_all(head).unwrap();
            io.write_all(&early).unwrap();
            let mut bytes = [0; 4096];
            while let Ok(count) = io.read(&mut bytes) {
                if count == 0 || io.write_all(&bytes[..count]).is_err() {
                    return;
                }
            }
        }))
    });
    let proxy = Setup::before(&upstream).limit(limit("r", "1/h")).frozen().start();
    let mut connection = proxy.connect();
    let got = connection.get_with("/", ASK);
    assert_eq!((got.status, got.field("upgrade")), (101, Some("websocket")));
    assert_eq!(got.field("connection"), Some("upgrade"));
    assert_eq!(got.field("sec-websocket-accept"), Some("x"));
    let seen = upstream.only();
    assert_eq!(
        (seen.field("upgrade"), seen.field("connection")),
        (Some("websocket"), Some("upgrade"))
    );
    assert_eq!(connection.exactly(5), b"hello");
    for i in 0..1000 {
        let message = format!("message {i}");
        connection.send(&message);
        assert_eq!(connection.exactly(message.len()), message.as_bytes());
    }
    assert_eq!((proxy.spent(), proxy.handle.connections()), (1, 1));
    assert_eq!(proxy.connect().get_with("/", ASK).status, 429);
    connection.finish();
    assert!(connection.is_ended());
    eventually("the end of the bridge", || proxy.handle.connections() == 0);
}

#[test]
fn what_a_websocket_says_is_never_taken_for_an_answer() {
    let upstream = Upstream::scripted(|_| {
        Reply::Take(Box::new(|mut io, _| {
            let head = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
                Upgrade: websocket\r\n\r\n";
            io.write_all(head).unwrap();
            let mut bytes = [0; 5];
            io.read_exact(&mut bytes).unwrap();
            io.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        }))
    });
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    assert_eq!(connection.get_with("/", ASK).status, 101);
    connection.send("hello");
    assert_eq!(connection.rest(), b"HTTP/1.1 400 Bad Request\r\n\r\n");
}

#[test]
fn a_switch_of_protocols_that_nobody_asked_for_is_an_error() {
    let upstream = Upstream::scripted(|_| {
        answer("HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
    });
    let proxy = Setup::before(&upstream).start();
    assert_eq!(proxy.connect().get("/").status, 502);
}

#[test]
fn hp_g8_a_request_names_exactly_one_valid_host() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "9/h").by_client()).start();
    for hosts in [
        "",
        "Host: a\r\nHost: b\r\n",
        "Host: a\r\nHost: a\r\n",
        "Host: a b\r\n",
        "Host: a,b\r\n",
        "Host:\r\n",
    ] {
        let mut connection = proxy.connect();
        connection.send(format!("GET / HTTP/1.1\r\n{hosts}\r\n"));
        let got = connection.answer();
        assert_eq!((got.status, got.field("proxy-status").is_some()), (400, true), "{hosts}");
    }
    assert_eq!((upstream.connections(), proxy.keys().len()), (0, 0));
}

#[test]
fn targets_and_versions_become_the_proxys_own() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    connection.send("GET http://real.example/x?y HTTP/1.1\r\nHost: other\r\n\r\n");
    assert_eq!(connection.answer().status, 200);
    connection.send("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(connection.answer().status, 200);
    connection.send("GET /old HTTP/1.0\r\n\r\n");
    let old = connection.answer();
    assert!(old.head.starts_with("HTTP/1.0 200"), "{}", old.head);
    assert!(connection.is_ended());
    let seen = upstream.requests();
    assert_eq!(
        (seen[0].line(), seen[0].field("host")),
        ("GET /x?y HTTP/1.1", Some("real.example"))
    );
    assert_eq!(seen[1].line(), "OPTIONS * HTTP/1.1");
    let host = upstream.address().to_string();
    assert_eq!((seen[2].line(), seen[2].field("host")), ("GET /old HTTP/1.1", Some(host.as_str())));
    assert_eq!(seen[2].field("via"), Some("1.0 tidegate"));
}

#[test]
fn what_must_not_be_forwarded_is_refused() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).with(|config| config.max.body = Some(10)).start();
    for (bytes, status) in [
        ("CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n", 405),
        ("TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 11\r\n\r\nhello world", 413),
        ("POST / HTTP/1.1\r\nHost: a\r\nExpect: magic\r\nContent-Length: 1\r\n\r\nx", 417),
        ("GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ] {
        let mut connection = proxy.connect();
        connection.send(bytes);
        let got = connection.answer();
        assert_eq!(got.status, status, "{bytes}");
        assert_eq!(got.field("allow").is_some(), status == 405);
        assert!(got.field("proxy-status").unwrap().starts_with("tidegate; error="));
    }
    assert_eq!(upstream.connections(), 0);
}

#[test]
fn options_go_as_far_as_they_may_and_no_further() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "9/h")).frozen().start();
    let mut connection = proxy.connect();
    for target in ["/", "*"] {
        connection.send(request("OPTIONS", target, &[("Max-Forwards", "0")], ""));
        let answer = connection.answer();
        assert_eq!((answer.status, answer.field("content-length")), (200, Some("0")));
        assert!(answer.field("allow").unwrap().contains("OPTIONS"));
        assert_eq!(answer.field("proxy-status"), Some("tidegate"));
    }
    assert_eq!((upstream.connections(), proxy.spent()), (0, 0));
    assert_eq!(proxy.metric("tidegate_http_requests_total{outcome=\"answered\"}"), 2.0);

    for (method, left) in [("OPTIONS", "6"), ("GET", "7")] {
        connection.send(request(method, "/", &[("Max-Forwards", "7")], ""));
        assert_eq!(connection.answer().status, 200);
        assert_eq!(upstream.requests().last().unwrap().field("max-forwards"), Some(left));
    }
    connection.send(request("OPTIONS", "/", &[("Max-Forwards", "many")], ""));
    let answer = connection.answer();
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("Max-Forwards is not one number"), "{}", answer.text());
    assert_eq!((upstream.count(), proxy.spent()), (2, 2));
}

#[test]
fn an_upload_that_goes_wrong_is_the_clients_fault() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .with(|config| {
            config.max.body = Some(10);
            config.timeouts.idle = Duration::from_millis(200);
        })
        .start();
    let head = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (body, status) in [
        ("5\r\nhello\r\nxyz\r\n", 400),
        ("5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n", 413),
        ("5\r\nhello\r\n", 408),
    ] {
        let mut connection = proxy.connect();
        connection.send(format!("{head}{body}"));
        let got = connection.answer();
        assert_eq!((got.status, got.field("connection")), (status, Some("close")), "{body}");
    }
    assert_eq!(upstream.count(), 0, "no upload was completed");
    assert_eq!(proxy.metric("tidegate_http_requests_total{outcome=\"rejected\"}"), 3.0);
}

#[test]
fn a_token_comes_back_once_if_the_upload_broke_before_anything_was_sent() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .limit(limit("r", "9/h"))
        .with(|config| config.timeouts.idle = Duration::from_millis(200))
        .frozen()
        .start();
    let head = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut connection = proxy.connect();
    connection.send(format!("{head}xyz\r\n"));
    assert_eq!(connection.answer().status, 400);
    assert_eq!(upstream.all_bytes(), "");
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (0, 1.0));
    // Here the head went to the upstream, which may have begun to work.
    let mut connection = proxy.connect();
    connection.send(format!("{head}5\r\nhello\r\n"));
    assert_eq!(connection.answer().status, 408);
    assert!(upstream.all_bytes().contains("hello"));
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (1, 1.0));
    // Over a connection that has served before, only what is new counts.
    assert_eq!(proxy.connect().get("/").status, 200);
    let mut connection = proxy.connect();
    connection.send(format!("{head}xyz\r\n"));
    assert_eq!(connection.answer().status, 400);
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (2, 2.0));
}

#[test]
fn trailers_of_a_request_pass_if_they_are_announced_and_nobody_decides_by_them() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "9/h").by_header("x-key")).start();
    let mut connection = proxy.connect();
    connection.send(
        "GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\
         Trailer: X-Sum, X-Key\r\nTrailer: X-Forwarded-For, Host, x-real-ip\r\n\r\n\
         2\r\nhi\r\n0\r\nX-Sum: 1\r\nX-Key: k\r\nX-Forwarded-For: 9.9.9.9\r\nHost: b\r\n\
         X-Real-IP: 9.9.9.9\r\nX-Other: 1\r\n\r\n",
    );
    assert_eq!(connection.answer().status, 200);
    let seen = upstream.only();
    assert_eq!((seen.field("trailer"), seen.body.as_slice()), (Some("x-sum"), &b"hi"[..]));
    assert_eq!(seen.trailers, "x-sum: 1\r\n");
    assert_eq!(connection.get("/").status, 200, "the connection goes on");
}

#[test]
fn a_stalled_upload_is_not_the_upstreams_fault_however_short_its_time() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .with(|config| {
            config.timeouts.response = Duration::from_millis(50);
            config.timeouts.idle = Duration::from_millis(400);
        })
        .start();
    let mut connection = proxy.connect();
    connection.send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nhello");
    assert_eq!(connection.answer().status, 408);
}

#[test]
fn uploads_pass_with_and_without_a_length_whatever_the_method() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    let body = "x".repeat(300_000);
    assert_eq!(connection.post("/", &[], &body).status, 200);
    for method in ["POST", "GET", "DELETE"] {
        let head = format!("{method} / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
        connection.send(format!("{head}5\r\nhello\r\n0\r\n\r\n"));
        assert_eq!(connection.answer().status, 200);
    }
    let seen = upstream.requests();
    assert_eq!(seen[0].body.len(), body.len());
    for received in &seen[1..] {
        assert_eq!(received.body, b"hello", "{}", received.head);
    }
}

#[test]
fn hp_g9_a_silent_upstream_is_given_up_and_not_used_again() {
    let behaves = Arc::new(AtomicBool::new(false));
    let script = Arc::clone(&behaves);
    let upstream = Upstream::scripted(move |_| {
        if script.load(Ordering::SeqCst) { Reply::Ok("ok") } else { Reply::Silence }
    });
    let proxy = Setup::before(&upstream)
        .with(|config| config.timeouts.response = Duration::from_millis(300))
        .start();
    let started = Instant::now();
    let got = proxy.connect().get("/");
    let took = started.elapsed();
    assert_eq!(got.status, 504);
    assert_eq!(got.field("proxy-status"), Some("tidegate; error=http_response_timeout"));
    assert!((300..800).contains(&took.as_millis()), "{took:?}");
    eventually("the end of the silent connection", || upstream.ended() == 1);
    behaves.store(true, Ordering::SeqCst);
    assert_eq!(proxy.statuses(20, &[]), [200; 20]);
    assert!(upstream.requests()[1..].iter().all(|received| received.connection == 1));
}

#[test]
fn hp_g10_trailers_do_not_harm_the_connection() {
    let upstream = Upstream::scripted(|_| {
        answer(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n\
             5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n",
        )
    });
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    for _ in 0..3 {
        assert_eq!(connection.get("/").text(), "hello");
    }
    assert_eq!(upstream.connections(), 1);
    connection.send(request("GET", "/", &[("TE", "trailers"), ("Connection", "te, close")], ""));
    let all = String::from_utf8(connection.rest()).unwrap();
    assert!(all.ends_with("0\r\nx-sum: 1\r\n\r\n"), "{all}");
}

#[test]
fn an_answer_framed_twice_is_delivered_by_its_chunks() {
    let upstream = Upstream::scripted(|_| {
        answer(
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n\
             5\r\nhello\r\n0\r\n\r\n",
        )
    });
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    let got = connection.get("/");
    assert_eq!((got.text(), got.field("content-length")), ("hello", None));
}

#[test]
fn an_answer_that_breaks_off_is_not_completed() {
    for text in [
        "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ] {
        let upstream = Upstream::scripted(move |_| Reply::Last(text.as_bytes().to_vec()));
        let proxy = Setup::before(&upstream).start();
        let mut connection = proxy.connect();
        connection.send(request("GET", "/", &[], ""));
        let all = String::from_utf8(connection.rest()).unwrap();
        assert!(all.trim_end().ends_with("hello"), "{all}");
    }
}

#[test]
fn an_answer_that_is_no_http_is_a_bad_gateway() {
    let upstream = Upstream::scripted(|_| Reply::Last(b"SSH-2.0-x\r\n\r\n".to_vec()));
    let proxy = Setup::before(&upstream).start();
    let got = proxy.connect().get("/");
    assert_eq!(got.status, 502);
    assert_eq!(got.field("proxy-status"), Some("tidegate; error=http_protocol_error"));
}

#[test]
fn an_upstream_may_live_behind_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("app.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let served = std::thread::spawn(move || {
        let (mut io, _) = listener.accept().unwrap();
        let mut bytes = [0; 4096];
        let count = io.read(&mut bytes).unwrap();
        io.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nunix").unwrap();
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    });
    let proxy = Setup::before_url(&format!("unix:{}", path.display())).start();
    assert_eq!(proxy.connect().get("/").text(), "unix");
    assert!(served.join().unwrap().contains("host: app.example"));
}

#[test]
fn gr_g3_an_answer_that_nobody_reads_to_its_end_is_given_up() {
    // The client leaves, or does not read.
    for leaves in [true, false] {
        let upstream = Upstream::scripted(|_| {
            Reply::Take(Box::new(|mut io, _| {
                let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
                io.write_all(head).unwrap();
                let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
                while io.write_all(chunk.as_bytes()).is_ok() {}
            }))
        });
        let proxy = Setup::before(&upstream)
            .with(|config| config.timeouts.idle = Duration::from_millis(300))
            .start();
        let mut connection = proxy.connect();
        connection.send(request("GET", "/", &[], ""));
        connection.exactly(1000);
        if leaves {
            drop(connection);
            eventually("the upstream's end", || upstream.ended() == 1);
        } else {
            eventually("the upstream's end", || upstream.ended() == 1);
            drop(connection);
        }
        eventually("the connection's end", || proxy.handle.connections() == 0);
    }
}

#[test]
fn a_client_that_ends_its_side_has_left() {
    let upstream = Upstream::scripted(|_| Reply::Silence);
    let proxy = Setup::before(&upstream).limit(limit("r", "9/h")).frozen().start();
    let mut connection = proxy.connect();
    connection.send(request("GET", "/", &[], ""));
    eventually("the request", || upstream.count() == 1);
    connection.finish();
    assert!(connection.is_ended());
    eventually("the upstream's end", || upstream.ended() == 1);
    eventually("its count", || {
        proxy.metric("tidegate_http_requests_total{outcome=\"cancelled\"}") == 1.0
    });
    assert_eq!(proxy.spent(), 1, "it had reached the upstream");
}

#[test]
fn a_connection_that_idled_for_longer_than_servers_keep_theirs_is_not_used_again() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).frozen().start();
    let mut connection = proxy.connect();
    for (idle, connections) in [(0, 1), (2, 1), (4, 2)] {
        proxy.advance(Duration::from_secs(idle));
        assert_eq!(connection.get("/").status, 200);
        assert_eq!(upstream.connections(), connections, "after {idle} s");
    }
    proxy.advance(Duration::from_secs(4));
    eventually("the end of what idled", || upstream.ended() == 2);
}

#[test]
fn an_upstream_that_does_not_accept_in_time_is_a_gateway_timeout_and_costs_nothing() {
    let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    full.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    full.listen(0).unwrap();
    let address = full.local_addr().unwrap().as_socket().unwrap();
    // Nobody accepts: the kernel takes in a few and then answers no more.
    let mut waiting = Vec::new();
    while let Ok(io) = TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
        waiting.push(io);
        assert!(waiting.len() < 100);
    }
    let proxy = Setup::before_url(&format!("http://{address}"))
        .limit(limit("r", "9/h"))
        .with(|config| config.timeouts.connect = Duration::from_millis(200))
        .frozen()
        .start();
    let got = proxy.connect().get("/");
    assert_eq!(got.status, 504);
    assert_eq!(got.field("proxy-status"), Some("tidegate; error=connection_timeout"));
    assert_eq!((proxy.spent(), proxy.metric("tidegate_refunds_total")), (0, 1.0));
}
