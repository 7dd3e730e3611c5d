//! TLS to the upstream.

use crate::harness::certs::{Ca, Files, terminator};
use crate::harness::{Setup, TestProxy, Upstream, eventually};
use tidegate::proxy::UpstreamHost;

const HTTP1: &[&[u8]] = &[b"http/1.1"];

/// A proxy in front of an upstream behind TLS, and the files that it trusts.
fn before(url: String, files: &Files, host: UpstreamHost) -> TestProxy {
    Setup::before_url(&url)
        .with(|config| {
            config.upstream_ca = Some(files.path().join("ca.crt"));
            config.upstream_host = host;
        })
        .start()
}

#[test]
fn requests_go_over_tls_with_the_host_that_is_wanted() {
    let ca = Ca::new();
    let certificate = ca.sign("localhost");
    let files = Files::new(&certificate, &ca.pem);
    let upstream = Upstream::start();
    let port = terminator(upstream.address(), &certificate, HTTP1).port();
    for (host, wanted) in
        [(UpstreamHost::Client, "app.example"), (UpstreamHost::Upstream, "localhost")]
    {
        let proxy = before(format!("https://localhost:{port}"), &files, host);
        let mut client = proxy.connect();
        for _ in 0..2 {
            assert_eq!(client.get("/a?b").status, 200);
        }
        let seen = upstream.requests().pop().unwrap();
        let sent = seen.field("host").unwrap();
        assert_eq!(sent.split(':').next(), Some(wanted));
        assert_eq!(seen.field("x-forwarded-host"), Some("app.example"));
        assert_eq!(seen.line(), "GET /a?b HTTP/1.1");
    }
    // Each proxy kept its connection.
    assert_eq!((upstream.count(), upstream.connections()), (4, 2));
}

#[test]
fn an_upstream_that_cannot_be_trusted_gets_no_request() {
    let (ca, other) = (Ca::new(), Ca::new());
    let upstream = Upstream::start();
    for (certificate, host) in [
        (other.sign("localhost"), "localhost"),
        (ca.sign("elsewhere"), "localhost"),
        (ca.sign_expired("localhost"), "localhost"),
        // A certificate for a name says nothing of an address.
        (ca.sign("localhost"), "127.0.0.1"),
    ] {
        let files = Files::new(&certificate, &ca.pem);
        let port = terminator(upstream.address(), &certificate, HTTP1).port();
        let proxy = before(format!("https://{host}:{port}"), &files, UpstreamHost::Client);
        let answer = proxy.connect().get("/");
        assert_eq!(answer.status, 502);
        let status = answer.field("proxy-status").unwrap();
        assert!(status.contains("error=tls_certificate_error"), "{status}");
    }
    // Nor one that speaks plain text.
    let files = Files::new(&ca.sign("localhost"), &ca.pem);
    let url = format!("https://localhost:{}", upstream.address().port());
    let proxy = before(url, &files, UpstreamHost::Client);
    assert!(matches!(proxy.connect().get("/").status, 502 | 504));
    assert_eq!(upstream.count(), 0);
}

#[test]
fn the_cas_of_the_upstream_follow_their_file() {
    let (old, new) = (Ca::new(), Ca::new());
    let certificate = new.sign("localhost");
    let files = Files::new(&certificate, &old.pem);
    let upstream = Upstream::start();
    let port = terminator(upstream.address(), &certificate, HTTP1).port();
    let proxy = before(format!("https://localhost:{port}"), &files, UpstreamHost::Client);
    let status = || proxy.connect().get("/").status;
    let reads = |result: &str| {
        proxy.metric(&format!("tidegate_upstream_ca_reads_total{{result=\"{result}\"}}"))
    };
    assert_eq!(status(), 502);
    // A truncated file changes nothing, and is told of once.
    files.write("ca.crt", &new.pem[..new.pem.len() / 2]);
    eventually("it is refused", || reads("failure") >= 1.0);
    assert_eq!(status(), 502);
    files.write("ca.crt", &new.pem);
    eventually("it is trusted", || status() == 200);
    assert_eq!((reads("success"), reads("failure")), (1.0, 1.0));
    // Nor does a file that is gone take away what was trusted.
    std::fs::remove_file(files.path().join("ca.crt")).unwrap();
    eventually("it is missed", || reads("failure") >= 2.0);
    let mut client = proxy.connect();
    assert_eq!(client.get("/").status, 200);
    // What is open stays open when the CA is no longer trusted.
    let connections = upstream.connections();
    files.write("ca.crt", &old.pem);
    eventually("it is replaced", || reads("success") >= 2.0);
    assert_eq!((client.get("/").status, upstream.connections()), (200, connections));
}
