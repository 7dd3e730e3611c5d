//! Whole replicas in front of a provider that has a limit of its own (EG).

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::app::{Network, Replica, Spec, agreed, meshed, until};
use crate::harness::{Connection, Reply, Upstream, request};

/// A refusal in the provider's own words.
fn refusal(fields: &str) -> Reply {
    Reply::Bytes(
        format!("HTTP/1.1 429 Too Many Requests\r\n{fields}Content-Length: 4\r\n\r\nfull").into(),
    )
}

/// Refuses the first `count` requests with these fields.
fn refusing(count: usize, fields: &'static str) -> Upstream {
    let seen = AtomicUsize::new(0);
    Upstream::scripted(move |_| {
        if seen.fetch_add(1, Ordering::SeqCst) < count { refusal(fields) } else { Reply::Ok("ok") }
    })
}

/// A replica whose clients may wait `max_wait` for `provider`, which bears `limit`.
fn spec(provider: &Upstream, limit: &str, max_wait: &str) -> Spec {
    Spec::new([]).and(&format!(
        "upstreams: {{ acme: {{ url: \"http://{}\", limit: {{ {limit} }} }} }}
egress: {{ routes: [{{ strip: /acme, upstream: acme, max_wait: {max_wait} }}] }}
",
        provider.address()
    ))
}

const MANY: &str = "requests: 1000, per: 1s";
const REFUSALS: &str = "tidegate_upstream_refusals_total{upstream=\"acme\"}";

fn post(body: &str) -> String {
    let length = body.len().to_string();
    request("POST", "/acme/x", &[("content-length", &length)], body)
}

#[test]
fn eg_g31_a_request_that_the_provider_refuses_waits_and_is_sent_again_with_its_body() {
    let provider = refusing(2, "Retry-After: 1\r\n");
    let network = Network::new();
    let replica = network.start(11, &spec(&provider, MANY, "60s").alone());
    replica.ready();
    let started = Instant::now();
    let mut client = replica.connect();
    client.send(post("hello"));
    assert_eq!(client.answer().status, 200);
    assert!(started.elapsed() >= Duration::from_secs(2), "{:?}", started.elapsed());
    let seen = provider.requests();
    assert_eq!(seen.len(), 3);
    for received in &seen {
        assert_eq!((received.line(), &*received.body), ("POST /x HTTP/1.1", &b"hello"[..]));
        assert_eq!(received.head, seen[0].head);
    }
    assert_eq!(replica.metric(REFUSALS), 2.0);
    // Each sending cost a token, and only the last one was answered.
    assert_eq!(replica.bucket("acme", &[]).spent.iter().map(|s| s.tokens).sum::<f64>(), 3.0);
    assert_eq!(replica.metric("tidegate_http_requests_total{outcome=\"forwarded\"}"), 1.0);
    // A chunked body is kept as well as one of known length.
    let mut client = replica.connect();
    client.send(request(
        "POST",
        "/acme/y",
        &[("transfer-encoding", "chunked")],
        "3\r\nabc\r\n0\r\n\r\n",
    ));
    assert_eq!(client.answer().status, 200);
}

#[test]
fn eg_g32_what_cannot_be_sent_again_in_time_gets_the_providers_refusal() {
    let large = "x".repeat(64 * 1024 + 1);
    for (fields, max_wait, body) in [
        // Later than the client may wait.
        ("Retry-After: 30\r\nX-Own: yes\r\n", "5s", "small"),
        ("Retry-After: 1\r\nX-Own: yes\r\n", "0s", ""),
        // Too much to be kept.
        ("X-Own: yes\r\n", "60s", large.as_str()),
    ] {
        let provider = refusing(1, fields);
        let network = Network::new();
        let replica = network.start(11, &spec(&provider, MANY, max_wait).alone());
        replica.ready();
        let mut client = replica.connect();
        client.send(post(body));
        let answer = client.answer();
        assert_eq!((answer.status, answer.text()), (429, "full"), "{max_wait}");
        assert_eq!((answer.field("x-own"), answer.field("ratelimit")), (Some("yes"), None));
        assert_eq!(provider.count(), 1);
    }
}

#[test]
fn eg_g33_what_one_replica_is_told_keeps_all_of_them_silent() {
    let provider = refusing(1, "Retry-After: 600\r\n");
    let network = Network::new();
    network.list(&[11, 12]);
    let replicas = [11, 12].map(|host| network.start(host, &spec(&provider, MANY, "1s")));
    meshed(&replicas.each_ref());
    assert_eq!(replicas[0].get("/acme/x").status, 429);
    // The provider answers 200 from now on: only a replica that knows refuses.
    until("the other one knows", || {
        let before = provider.count();
        let answer = replicas[1].get("/acme/x");
        let silent = answer.status == 429 && provider.count() == before;
        if silent {
            let seconds: u64 = answer.field("retry-after").unwrap().parse().unwrap();
            assert!((500..=660).contains(&seconds), "{seconds}");
        }
        silent
    });
    let before = provider.count();
    for replica in &replicas {
        assert_eq!(replica.get("/acme/x").status, 429);
    }
    assert_eq!(provider.count(), before);
    // Other upstreams are none of its business.
    assert_eq!(replicas[0].get("/x").status, 200);
}

/// Bears so many requests in any window, and refuses those beyond.
struct Strict {
    limit: AtomicUsize,
    window: Duration,
    taken: Mutex<VecDeque<Instant>>,
    refused: AtomicUsize,
}

impl Strict {
    fn answer(&self) -> Reply {
        let now = Instant::now();
        let mut taken = self.taken.lock().unwrap();
        while taken.front().is_some_and(|at| now.duration_since(*at) >= self.window) {
            taken.pop_front();
        }
        if taken.len() < self.limit.load(Ordering::SeqCst) {
            taken.push_back(now);
            return Reply::Ok("ok");
        }
        self.refused.fetch_add(1, Ordering::SeqCst);
        refusal("Retry-After: 1\r\n")
    }
}

/// Sends `count` requests to each replica at once; all must be answered 200.
fn burst(replicas: &[Replica], count: usize, meanwhile: impl FnOnce()) {
    thread::scope(|scope| {
        for replica in replicas {
            scope.spawn(|| {
                let mut connections: Vec<Connection> =
                    (0..count).map(|_| replica.connect()).collect();
                for connection in &mut connections {
                    connection.send(request("GET", "/acme/x", &[], ""));
                }
                for connection in &mut connections {
                    assert_eq!(connection.answer().status, 200);
                }
            });
        }
        meanwhile();
    });
}

#[test]
fn eg_g34_no_request_fails_for_a_limit_of_the_provider_also_when_it_halves() {
    let window = Duration::from_secs(1);
    let strict = std::sync::Arc::new(Strict {
        limit: AtomicUsize::new(40),
        window,
        taken: Mutex::default(),
        refused: AtomicUsize::new(0),
    });
    let provider = {
        let strict = std::sync::Arc::clone(&strict);
        Upstream::scripted(move |_| strict.answer())
    };
    let network = Network::new();
    network.list(&[11, 12, 13]);
    let spec = spec(&provider, "requests: 40, per: 1s, burst: 4", "5m");
    let replicas = [11, 12, 13].map(|host| network.start(host, &spec));
    meshed(&replicas.each_ref());
    burst(&replicas, 20, || {});
    let refused = strict.refused.load(Ordering::SeqCst);
    assert_eq!(provider.count(), 60 + refused);
    // On a machine that stalls, what was paced may arrive together.
    println!("refused at the configured limit: {refused}");
    burst(&replicas, 20, || strict.limit.store(20, Ordering::SeqCst));
    let refused = strict.refused.load(Ordering::SeqCst);
    println!("refused in all, the limit halved: {refused}");
    assert_eq!(provider.count(), 120 + refused);
}

#[test]
fn eg_g36_no_more_requests_are_on_their_way_than_may_be_and_the_others_have_no_tokens() {
    let (answer, answers) = std::sync::mpsc::channel::<()>();
    let answers = Mutex::new(answers);
    let inside = std::sync::Arc::new(AtomicUsize::new(0));
    let most = std::sync::Arc::new(AtomicUsize::new(0));
    let provider = {
        let (inside, most) = (std::sync::Arc::clone(&inside), std::sync::Arc::clone(&most));
        Upstream::scripted(move |_| {
            most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let _ = answers.lock().unwrap().recv();
            inside.fetch_sub(1, Ordering::SeqCst);
            Reply::Ok("ok")
        })
    };
    let network = Network::new();
    let limit =
        "requests: 1000, per: 1h, burst: 100 }, max_in_flight: 2, feedback: { retry_after_max: 1m";
    let replica = network.start(11, &spec(&provider, limit, "10h").alone().workers(2));
    replica.ready();
    let spent = || -> f64 {
        replica.find_bucket("acme", &[]).map_or(0.0, |b| b.spent.iter().map(|s| s.tokens).sum())
    };
    let mut clients: Vec<Connection> = (0..6).map(|_| replica.connect()).collect();
    for client in &mut clients {
        client.send(request("GET", "/acme/x", &[], ""));
    }
    until("four wait", || replica.metric("tidegate_waiting{limit=\"acme\"}") == 4.0);
    until("two are sent", || provider.count() == 2);
    assert_eq!(spent(), 2.0);
    assert_eq!(replica.metric("tidegate_upstream_in_flight{upstream=\"acme\"}"), 2.0);
    // One who would not wait is told so at once.
    let busy = replica.connect().get_with("/acme/x", &[("prefer", "wait=0")]);
    assert_eq!((busy.status, busy.field("retry-after")), (503, Some("1")));
    assert_eq!(busy.field("proxy-status"), Some("tidegate; error=connection_limit_reached"));
    // One who leaves makes room for nobody, since it had none.
    drop(clients.pop());
    until("three wait", || replica.metric("tidegate_waiting{limit=\"acme\"}") == 3.0);
    for _ in 0..5 {
        answer.send(()).unwrap();
    }
    for client in &mut clients {
        assert_eq!(client.answer().status, 200);
    }
    assert_eq!((spent(), provider.count(), most.load(Ordering::SeqCst)), (5.0, 5, 2));
    // The place of one who leaves while its request is on its way is free again.
    let mut leaving = replica.connect();
    leaving.send(request("GET", "/acme/x", &[], ""));
    until("it is sent", || provider.count() == 6);
    drop(leaving);
    until("its place is free", || {
        replica.metric("tidegate_upstream_in_flight{upstream=\"acme\"}") == 0.0
    });
    drop(answer);
}

#[test]
fn eg_g35_a_replica_that_dies_with_waiting_requests_spends_nothing_for_them() {
    let provider = Upstream::start();
    let network = Network::new();
    network.list(&[11, 12]);
    let spec = spec(&provider, "requests: 5, per: 1h, burst: 4", "10h");
    let [dying, other] = [11, 12].map(|host| network.start(host, &spec));
    meshed(&[&dying, &other]);
    assert_eq!(dying.get("/acme/x").status, 200);
    assert_eq!(dying.get("/acme/x").status, 200);
    // A killed replica takes its last news along.
    agreed(&[&dying, &other], "acme", &[], 2);
    let mut held: Vec<Connection> = (0..3).map(|_| dying.connect()).collect();
    for connection in &mut held {
        connection.send(request("GET", "/acme/x", &[], ""));
    }
    until("they wait", || dying.metric("tidegate_waiting{limit=\"acme\"}") == 3.0);
    drop(dying);
    until("its death is known", || other.connected() == 0);
    let spent: f64 = other.bucket("acme", &[]).spent.iter().map(|s| s.tokens).sum();
    assert_eq!((spent, provider.count()), (2.0, 2));
}
