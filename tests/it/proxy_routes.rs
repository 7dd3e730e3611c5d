//! Several upstreams behind one proxy, each reached by a route (EG).

use std::time::Duration;

use crate::harness::app::until;
use crate::harness::certs::{Ca, Files, terminator};
use crate::harness::{Setup, TestProxy, Upstream, request};
use tidegate::proxy::Asking;

/// Three upstreams, and a file with routes to them.
fn providers() -> ([Upstream; 3], String) {
    let upstreams = [Upstream::start(), Upstream::start(), Upstream::start()];
    let [app, acme, other] = upstreams.each_ref().map(Upstream::address);
    let text = format!(
        "proxy: {{ upstream: \"http://{app}\" }}
upstreams:
  acme: {{ url: \"http://{acme}\", limit: {{ requests: 4, per: 1h, burst: 3 }} }}
  other: {{ url: \"http://{other}\", host: client }}
egress:
  routes:
    - {{ strip: /acme, upstream: acme }}
    - {{ match: {{ headers: {{ x-to: other }} }}, upstream: other }}
"
    );
    (upstreams, text)
}

#[test]
fn eg_g21_each_request_goes_where_the_first_route_that_takes_it_leads() {
    let ([app, acme, other], text) = providers();
    let proxy = Setup::of(&text).start();
    let mut client = proxy.connect();
    for (target, fields, upstream, seen, host) in [
        ("/x", &[][..], &app, "GET /x HTTP/1.1", "app.example".to_owned()),
        ("/acme/v1?q=/acme", &[], &acme, "GET /v1?q=/acme HTTP/1.1", acme.address().to_string()),
        ("/acme", &[("x-to", "other")], &acme, "GET / HTTP/1.1", acme.address().to_string()),
        (
            "/x//y%2F",
            &[("x-to", "other")],
            &other,
            "GET /x//y%2F HTTP/1.1",
            "app.example".to_owned(),
        ),
        ("/acmes", &[], &app, "GET /acmes HTTP/1.1", "app.example".to_owned()),
        // What leads out of the prefix does not take its route.
        ("/acme/../x", &[], &app, "GET /acme/../x HTTP/1.1", "app.example".to_owned()),
        ("/%61cme/x", &[], &app, "GET /%61cme/x HTTP/1.1", "app.example".to_owned()),
    ] {
        let before = upstream.count();
        assert_eq!(client.get_with(target, fields).status, 200, "{target}");
        assert_eq!(upstream.count(), before + 1, "{target}");
        let received = upstream.requests().pop().unwrap();
        assert_eq!(received.line(), seen);
        assert_eq!(received.field("host"), Some(host.as_str()), "{target}");
    }
    // One connection to each is enough.
    assert_eq!([app, acme, other].map(|upstream| upstream.connections()), [1, 1, 1]);
}

#[test]
fn eg_g22_the_limit_of_an_upstream_is_asked_only_where_requests_go_there() {
    let ([app, acme, _other], text) = providers();
    let proxy = Setup::of(&text).start();
    let mut client = proxy.connect();
    for _ in 0..3 {
        assert_eq!(client.get("/acme/x").status, 200);
    }
    let refused = client.get("/acme/x");
    assert_eq!(refused.status, 429);
    assert_eq!(
        refused.field("proxy-status"),
        Some("tidegate; error=http_request_denied; details=\"acme\"")
    );
    for _ in 0..5 {
        assert_eq!(client.get("/x").status, 200);
        assert_eq!(client.get_with("/x", &[("x-to", "other")]).status, 200);
    }
    assert_eq!((app.count(), acme.count(), proxy.spent()), (5, 3, 3));
    // A provider counts preflights too.
    let fields = [("origin", "https://a"), ("access-control-request-method", "GET")];
    for (target, status) in [("/x", 200), ("/acme/x", 429)] {
        client.send(request("OPTIONS", target, &fields, ""));
        assert_eq!(client.answer().status, status, "{target}");
    }
}

#[test]
fn eg_g23_without_a_route_and_a_default_there_is_nowhere_to_go() {
    let acme = Upstream::start();
    let text = format!(
        "upstreams: {{ acme: {{ url: \"http://{}\" }} }}
egress: {{ routes: [{{ match: {{ path: /v1/ }}, upstream: acme }}] }}
limits: [{{ name: all, key: [], rate: 2/h }}]",
        acme.address()
    );
    let proxy = Setup::of(&text).start();
    let mut client = proxy.connect();
    for target in ["/", "/v2", "/v1/../x"] {
        let answer = client.get(target);
        assert_eq!(answer.status, 404, "{target}");
        assert_eq!(answer.field("proxy-status"), Some("tidegate; error=destination_not_found"));
        assert_eq!(answer.field("content-type"), Some("application/problem+json"));
        assert!(answer.text().contains("no upstream is configured"), "{}", answer.text());
    }
    // They cost nothing.
    assert_eq!(proxy.statuses(3, &[]), [404, 404, 404]);
    assert_eq!(client.get("/v1/x").status, 200);
    assert_eq!((acme.count(), proxy.spent()), (1, 1));
}

#[test]
fn eg_g24_a_route_says_how_long_requests_wait_for_the_upstreams_limits() {
    let acme = Upstream::start();
    let text = format!(
        "upstreams: {{ acme: {{ url: \"http://{}\", limit: {{ requests: 2, per: 1h }} }} }}
egress:
  routes:
    - {{ match: {{ path: /slow }}, upstream: acme, max_wait: 2h }}
    - {{ match: {{ path: /soon }}, upstream: acme, max_wait: 1s }}
    - {{ upstream: acme }}
limits:
  - {{ name: own, key: [path], rate: 1/d, burst: 2, max_wait: 30d, match: {{ path: /own/, upstream: acme }} }}
  - {{ name: any, key: [], rate: 9/d, max_wait: 30d }}",
        acme.address()
    );
    let proxy = Setup::of(&text).frozen().start();
    let mut client = proxy.connect();
    assert_eq!(client.get("/").status, 200);
    assert_eq!(client.get("/").status, 429);
    assert_eq!(client.get("/soon").status, 429);
    let mut slow = proxy.connect();
    slow.send(request("GET", "/slow", &[], ""));
    until("it waits", || proxy.metric("tidegate_waiting{limit=\"acme\"}") == 1.0);
    proxy.advance(Duration::from_secs(3601));
    // Moving the clock wakes nobody: somebody who comes does.
    assert_eq!(client.get("/soon").status, 429);
    drop(slow);
    until("it left", || proxy.metric("tidegate_waiting{limit=\"acme\"}") == 0.0);
    assert_eq!(client.get("/soon").status, 200);
    assert_eq!(acme.count(), 2);
}

#[test]
fn eg_g26_an_explanation_names_the_upstream_and_its_route() {
    let (_providers, text) = providers();
    let proxy = Setup::of(&text).start();
    let ask = |proxy: &TestProxy, target: &str| {
        let request = http::Request::get(target).header("host", "app.example").body(()).unwrap();
        let client = Asking::Client([192, 0, 2, 1].into());
        proxy.preview.foresee(request.into_parts().0, client)
    };
    let foreseen = ask(&proxy, "/acme/x");
    assert_eq!((foreseen.upstream.as_str(), foreseen.route), ("acme", Some(0)));
    let decision = foreseen.explanation.unwrap().decision;
    assert_eq!(decision.checks.len(), 1);
    let foreseen = ask(&proxy, "/x");
    assert_eq!((foreseen.upstream.as_str(), foreseen.route), ("default", None));
    assert_eq!(foreseen.explanation.unwrap().decision.checks.len(), 0);

    let text = text.lines().skip(1).collect::<Vec<_>>().join("\n");
    let foreseen = ask(&Setup::of(&text).start(), "/x");
    assert_eq!(
        (foreseen.upstream.as_str(), foreseen.answer.unwrap().status()),
        ("", 404.try_into().unwrap())
    );
    assert!(foreseen.explanation.is_none() && foreseen.note.contains("no route"));
}

#[test]
fn eg_g25_each_upstream_has_a_tls_of_its_own() {
    let (ca, other_ca) = (Ca::new(), Ca::new());
    let (acme, other) = (Upstream::start(), Upstream::start());
    let (certificate, strange) = (ca.sign("localhost"), other_ca.sign("localhost"));
    let files = Files::new(&certificate, &ca.pem);
    let http1: &[&[u8]] = &[b"http/1.1"];
    let port = terminator(acme.address(), &certificate, http1).port();
    let strange = terminator(other.address(), &strange, http1).port();
    let trusted = files.path().join("ca.crt");
    let trusted = trusted.display();
    let text = format!(
        "upstreams:
  acme: {{ url: \"https://localhost:{port}\", ca: \"{trusted}\" }}
  other: {{ url: \"https://localhost:{strange}\", ca: \"{trusted}\" }}
egress: {{ routes: [{{ strip: /acme, upstream: acme }}, {{ upstream: other }}] }}"
    );
    let proxy = Setup::of(&text).start();
    let mut client = proxy.connect();
    assert_eq!(client.get("/acme/x").status, 200);
    assert_eq!(acme.only().field("host"), Some(format!("localhost:{port}").as_str()));
    let answer = client.get("/x");
    assert_eq!(answer.status, 502);
    assert!(answer.field("proxy-status").unwrap().contains("tls_certificate_error"));
    assert_eq!(other.count(), 0);
}

#[test]
fn eg_g27_credentials_are_put_in_when_a_request_is_sent_and_follow_their_file() {
    let (acme, other) = (Upstream::start(), Upstream::start());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "first\n").unwrap();
    let text = format!(
        "upstreams:
  acme:
    url: \"http://{}\"
    inject:
      Authorization: {{ file: \"{}\", prefix: \"Bearer \" }}
      x-key: {{ env: KEY }}
  other: {{ url: \"http://{}\" }}
egress: {{ routes: [{{ strip: /acme, upstream: acme }}, {{ upstream: other }}] }}",
        acme.address(),
        file.display(),
        other.address()
    );
    let env = |name: &str| (name == "KEY").then(|| "k3y".to_owned());
    let proxy = Setup::of_env(&text, &env).start();
    let mut client = proxy.connect();
    let own = [
        ("authorization", "Basic b3du"),
        ("Authorization", "Basic dHdv"),
        ("x-key", "mine"),
        // Nor can it be named away.
        ("connection", "authorization, x-key"),
    ];
    for fields in [&own[..], &[]] {
        assert_eq!(client.get_with("/acme/x", fields).status, 200);
        let received = acme.requests().pop().unwrap();
        assert_eq!(received.field("authorization"), Some("Bearer first"));
        assert_eq!(received.field("x-key"), Some("k3y"));
    }
    assert_eq!(client.get_with("/x", &own[..1]).status, 200);
    let received = other.only();
    assert_eq!(received.field("authorization"), Some("Basic b3du"));
    assert_eq!(received.field("x-key"), None);

    let reads = |result| format!("tidegate_upstream_credential_reads_total{{result=\"{result}\"}}");
    let sent = || {
        assert_eq!(proxy.connect().get("/acme/x").status, 200);
        acme.requests().pop().unwrap().field("authorization").unwrap().to_owned()
    };
    std::fs::write(&file, "second").unwrap();
    until("the file is followed", || proxy.metric(&reads("success")) == 1.0);
    assert_eq!(sent(), "Bearer second");
    std::fs::write(&file, "").unwrap();
    until("the file is refused", || proxy.metric(&reads("failure")) == 1.0);
    assert_eq!(sent(), "Bearer second");
}

#[test]
fn eg_g28_a_file_without_a_credential_is_an_error_at_the_start_that_names_it() {
    let text = "upstreams: { acme: { url: http://a, inject: { x-key: { file: /no/such/file } } } }
egress: { routes: [{ upstream: acme }] }";
    let error = Setup::of(text).bind_error();
    assert!(error.starts_with("acme.inject.x-key: /no/such/file: "), "{error}");
}
