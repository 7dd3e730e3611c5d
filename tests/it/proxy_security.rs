//! Attempts at getting past the proxy or keeping it busy (SE).

use std::time::{Duration, Instant};

use tidegate::runtime::Stage;

use crate::harness::{Connection, Reply, Setup, Upstream, eventually, limit};

#[test]
fn se_g4_what_the_proxy_sets_and_keys_on_cannot_be_named_away() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .limit(limit("ip", "9/h").by_client())
        .limit(limit("tenant", "9/h").by_header("x-tenant"))
        .trusting(&["127.0.0.1/32"])
        .frozen()
        .start();
    let fields = [
        ("Connection", "x-forwarded-for, x-tenant, Host, Authorization, X-Real-IP, x-gone"),
        ("X-Forwarded-For", "203.0.113.1"),
        ("X-Tenant", "t"),
        ("X-Gone", "1"),
        ("Authorization", "Basic eA=="),
    ];
    assert_eq!(proxy.connect().get_with("/", &fields).status, 200);
    assert_eq!(proxy.keys(), ["203.0.113.1", "t"]);
    let seen = upstream.only();
    assert_eq!(seen.field("x-forwarded-for"), Some("203.0.113.1, 127.0.0.1"));
    assert_eq!(seen.field("x-real-ip"), Some("203.0.113.1"));
    assert_eq!(seen.field("host"), Some("app.example"));
    assert_eq!(seen.field("authorization"), Some("Basic eA=="));
    assert_eq!(seen.field("x-tenant"), Some("t"));
    assert_eq!(seen.field("x-gone"), None);
}

#[test]
fn se_g5_a_request_framed_twice_is_one_request() {
    let length = "Content-Length: 30\r\n";
    let coding = "Transfer-Encoding: chunked\r\n";
    for (first, second) in [(length, coding), (coding, length)] {
        let upstream = Upstream::start();
        let proxy = Setup::before(&upstream).start();
        let mut connection = proxy.connect();
        connection.send(format!(
            "POST /one HTTP/1.1\r\nHost: a\r\n{first}{second}\r\n0\r\n\r\n\
             GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
        ));
        let got = connection.answer();
        assert!(matches!(got.status, 200 | 400), "{got:?}");
        assert!(connection.is_ended(), "the rest is nobody's request");
        assert!(upstream.count() <= 1);
        for received in upstream.requests() {
            assert!(received.line().starts_with("POST /one "));
            assert_eq!(received.field("content-length").filter(|length| *length != "0"), None);
        }
        assert!(!upstream.all_bytes().contains("smuggled"));
    }
}

#[test]
fn se_g6_no_upgrade_but_to_a_websocket_is_passed_on() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    for upgrade in ["h2c", "foo", "h2c, foo"] {
        let fields = [
            ("Connection", "Upgrade, HTTP2-Settings"),
            ("Upgrade", upgrade),
            ("HTTP2-Settings", "AAMAAABkAAQAoAAAAAIAAAAA"),
        ];
        let got = proxy.connect().get_with("/", &fields);
        assert!(got.head.starts_with("HTTP/1.1 200 OK"), "{}", got.head);
    }
    for seen in upstream.requests() {
        assert_eq!((seen.field("upgrade"), seen.field("http2-settings")), (None, None));
        assert_eq!(seen.field("connection"), None);
    }
}

#[test]
fn se_g8_slow_clients_are_let_go_in_time() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .with(|config| {
            config.timeouts.header = Duration::from_secs(1);
            config.timeouts.idle = Duration::from_secs(60);
        })
        .start();
    let started = Instant::now();
    let mut slow: Vec<Connection> = (0..60).map(|_| proxy.connect()).collect();
    for (i, connection) in slow.iter_mut().enumerate() {
        match i % 3 {
            0 => {}
            1 => connection.send("GET /ha"),
            _ => connection.send("GET / HTTP/1.1\r\nHost: a\r\nX-A: "),
        }
    }
    let mut normal = proxy.connect();
    eventually("the connections", || proxy.handle.connections() == 61);
    while proxy.handle.connections() > 1 {
        assert_eq!(normal.get("/").status, 200);
        // One byte at a time buys no time.
        for connection in slow.iter_mut().skip(2).step_by(3) {
            connection.try_send("x");
        }
        assert!(started.elapsed() < Duration::from_secs(3), "{}", proxy.handle.connections());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(started.elapsed() >= Duration::from_secs(1));
    assert_eq!(normal.get("/").status, 200, "a connection between requests has more time");
    for (i, connection) in slow.iter_mut().enumerate() {
        // Who has not begun to ask anything is not answered.
        if i % 3 == 0 {
            assert!(connection.is_ended());
            continue;
        }
        let got = connection.answer();
        assert_eq!((got.status, got.field("connection")), (408, Some("close")));
        assert_eq!(got.field("proxy-status"), Some("tidegate; error=http_request_error"));
        assert!(got.field("date").is_some());
        assert!(connection.is_ended());
    }
    let rejected = "tidegate_http_requests_total{outcome=\"rejected\"}";
    assert_eq!(proxy.metric(rejected), 40.0);
}

#[test]
fn se_g8_a_head_that_stops_coming_between_requests_is_told_so_too() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .with(|config| config.timeouts.header = Duration::from_millis(200))
        .start();
    let mut connection = proxy.connect();
    assert_eq!(connection.get("/").status, 200);
    connection.send("GET /second HTTP/1.1\r\nHo");
    assert_eq!(connection.answer().status, 408);
    assert!(connection.is_ended());
}

#[test]
fn se_g8_a_connection_without_requests_is_let_go_when_it_has_idled() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .with(|config| {
            config.timeouts.header = Duration::from_secs(60);
            config.timeouts.idle = Duration::from_millis(300);
        })
        .start();
    let mut connection = proxy.connect();
    assert_eq!(connection.get("/").status, 200);
    let started = Instant::now();
    assert!(connection.is_ended());
    let took = started.elapsed().as_millis();
    assert!((200..1500).contains(&took), "{took} ms");
}

#[test]
fn se_g8_there_is_a_bound_on_connections() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).with(|config| config.max.connections = 3).start();
    let mut open: Vec<Connection> = (0..3).map(|_| proxy.connect()).collect();
    for connection in &mut open {
        assert_eq!(connection.get("/").status, 200);
    }
    let mut late = proxy.connect();
    let got = late.get("/");
    assert_eq!((got.status, got.field("retry-after")), (503, Some("1")));
    assert!(late.is_ended());
    drop(open.pop());
    eventually("room", || proxy.handle.connections() == 2);
    assert_eq!(proxy.connect().get("/").status, 200);
    assert_eq!(proxy.metric("tidegate_http_requests_total{outcome=\"overloaded\"}"), 1.0);
}

#[test]
fn se_g8_whoever_comes_too_late_is_told_however_many_there_are() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).with(|config| config.max.connections = 1).start();
    let mut first = proxy.connect();
    assert_eq!(first.get("/").status, 200);
    // None of them ends its side, so that those which are waited for stay.
    let mut late: Vec<Connection> = (0..150).map(|_| proxy.connect()).collect();
    for connection in &mut late {
        let got = connection.answer();
        assert_eq!((got.status, got.field("retry-after")), (503, Some("1")));
    }
    assert_eq!(first.get("/").status, 200);
    assert_eq!(proxy.metric("tidegate_http_requests_total{outcome=\"overloaded\"}"), 150.0);
}

#[test]
fn se_g9_the_body_of_a_refused_request_is_never_a_request() {
    for chunked in [false, true] {
        let upstream = Upstream::start();
        let proxy = Setup::before(&upstream).limit(limit("r", "0/s").on("/no")).start();
        let mut connection = proxy.connect();
        let inner = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";
        let length = inner.len();
        let (framing, body) = if chunked {
            let body = format!("{length:x}\r\n{inner}\r\n0\r\n\r\n");
            ("Transfer-Encoding: chunked".to_owned(), body)
        } else {
            (format!("Content-Length: {length}"), inner.to_owned())
        };
        connection.send(format!(
            "POST /no HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n{body}\
             GET /next HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        ));
        assert_eq!(connection.answer().status, 429);
        let rest = String::from_utf8(connection.rest()).unwrap();
        assert!(rest.is_empty() || rest.starts_with("HTTP/1.1 200"), "{rest}");
        assert_eq!(rest.matches("HTTP/1.1").count(), usize::from(!rest.is_empty()));
        assert!(upstream.requests().iter().all(|r| r.line() == "GET /next HTTP/1.1"));
        assert!(!upstream.all_bytes().contains("smuggled"));
    }
}

#[test]
fn se_g10_an_untrusted_peer_says_nothing_about_forwarding() {
    let upstream = Upstream::start();
    let fields = [
        ("Forwarded", "for=9.9.9.9"),
        ("X-Forwarded-For", "9.9.9.9"),
        ("X-Forwarded-Host", "evil"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Port", "1"),
        ("X-Forwarded-Prefix", "/evil"),
        ("X-Real-IP", "9.9.9.9"),
    ];
    let proxy = Setup::before(&upstream).start();
    assert_eq!(proxy.connect_from([127, 0, 0, 2]).get_with("/", &fields).status, 200);
    let seen = upstream.only();
    let values = fields.map(|(name, _)| seen.field(name));
    let own = Some("127.0.0.2");
    assert_eq!(values, [None, own, Some("app.example"), Some("http"), None, None, own]);

    let proxy = Setup::before(&upstream).trusting(&["127.0.0.2/32"]).start();
    assert_eq!(proxy.connect_from([127, 0, 0, 2]).get_with("/", &fields).status, 200);
    let seen = upstream.requests().pop().unwrap();
    let values = fields.map(|(name, _)| seen.field(name));
    let expected = [
        "for=9.9.9.9, for=127.0.0.2",
        "9.9.9.9, 127.0.0.2",
        "evil",
        "https",
        "1",
        "/evil",
        "9.9.9.9",
    ];
    assert_eq!(values, expected.map(Some));
}

#[test]
fn what_is_no_request_is_answered_and_reaches_nobody() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).limit(limit("r", "9/h").by_client()).start();
    let long = format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    let many = format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "X: 1\r\n".repeat(200));
    let target = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(65_535));
    for (bytes, statuses) in [
        ("rubbish\r\n\r\n", &[400][..]),
        ("GET / HTTP/1.1\r\nHost : a\r\n\r\n", &[400]),
        ("GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\n folded\r\n\r\n", &[400]),
        ("GET / HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n", &[400]),
        ("GET / HTTP/1.2\r\nHost: a\r\n\r\n", &[400, 505]),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4, 5\r\n\r\nabcd", &[400]),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +4\r\n\r\nabcd", &[400]),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", &[400]),
        ("POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", &[400]),
        (&long, &[431]),
        (&many, &[431]),
        (&target, &[414]),
    ] {
        let mut connection = proxy.connect();
        connection.send(bytes);
        let got = connection.answer();
        assert!(statuses.contains(&got.status), "{got:?} to {:.80}", bytes.escape_debug());
        assert_eq!(got.field("proxy-status"), Some("tidegate; error=http_request_error"));
        assert_eq!(got.field("content-type"), Some("application/problem+json"));
        // As 29 characters (RFC 9110 section 5.6.7).
        let date = got.field("date").unwrap();
        assert!(date.len() == 29 && date.ends_with(" GMT"), "{date}");
        assert_eq!(got.json()["status"], got.status);
        assert!(connection.is_ended());
    }
    assert_eq!((upstream.connections(), proxy.keys().len()), (0, 0));
    eventually("each of them to be counted", || {
        proxy.metric("tidegate_http_requests_total{outcome=\"rejected\"}") == 12.0
    });
    proxy.drain(Stage::Closing);
}

#[test]
fn what_is_no_request_is_answered_after_others_were() {
    // The upstream's own bare 400 is not taken for the proxy's.
    let upstream = Upstream::scripted(|_| {
        Reply::Bytes(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n".to_vec())
    });
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    // In one piece, so that the last is read while the second is answered.
    connection.send("GET /1 HTTP/1.1\r\nHost: a\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n");
    connection.send("rubbish\r\n\r\n");
    for told in [false, false, true] {
        let got = connection.answer();
        assert_eq!((got.status, got.field("proxy-status").is_some()), (400, told));
    }
    assert!(connection.is_ended());
    assert_eq!(upstream.count(), 2);
}
