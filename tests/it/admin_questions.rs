//! The admin gRPC's questions beyond listings, and the subcommands that ask them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{Request, Response};
use tidegate::admin::{Bounds, Configuration};
use tidegate::limiter::{
    Client, Condition, Limit, LimitSet, LimitSpec, Missing, Mode, PathPattern, Rule, Source,
};
use tidegate::proxy::RateLimitLayer;
use tidegate::wire::tidegate::admin::v1 as pb;
use tonic::Code;
use tower::{Layer as _, ServiceExt as _};

use crate::admin::{PEER, Replica, key, limit, limit_set};

/// Limits of every kind that an explanation tells apart.
fn many_limits() -> LimitSet {
    let on = |path: &str| Condition {
        path: Some(PathPattern::try_new(path).unwrap()),
        ..Condition::default()
    };
    let by_client = Rule { key: key(&[Source::ClientIp]), ..Rule::default() };
    let by_tenant = |missing| Rule {
        key: key(&[Source::Header("x-tenant".into())]),
        missing,
        ..Rule::default()
    };
    LimitSet::new([
        Limit::new(limit("per-client", "60/min", 3, by_client.clone())),
        Limit::new(LimitSpec { mode: Mode::Shadow, ..limit("trial", "60/min", 1, by_client) }),
        Limit::new(limit(
            "posts",
            "1/h",
            1,
            Rule {
                condition: Condition { methods: vec!["POST".into()], ..on("/api/") },
                ..Rule::default()
            },
        )),
        Limit::new(limit(
            "inside",
            "1/h",
            1,
            Rule { exempt: vec![on("/health")], ..by_tenant(Missing::Skip) },
        )),
    ])
}

async fn with(limits: LimitSet) -> Replica {
    Replica::start_dressed(limits, Vec::new(), Bounds::default(), |service| service).await
}

fn question(target: &str) -> pb::ExplainRequest {
    pb::ExplainRequest {
        target: target.into(),
        client_address: "203.0.113.9".into(),
        ..pb::ExplainRequest::default()
    }
}

impl Replica {
    async fn explain(&self, question: pb::ExplainRequest) -> pb::ExplainResponse {
        self.client().await.explain(question).await.unwrap().into_inner()
    }

    /// Sends a request through the limit itself, as the data path does.
    async fn send(&self, client: [u8; 4]) -> Response<bytes::Bytes> {
        let find = move |_: &http::request::Parts| Client::new(client.into(), 64);
        let layer = RateLimitLayer::new(Arc::clone(&self.enforcer), find);
        let service = layer.layer(tower::service_fn(|_: Request<()>| async {
            Ok::<_, std::convert::Infallible>(Response::new(bytes::Bytes::new()))
        }));
        let request = Request::builder().uri("/").header("host", "localhost").body(()).unwrap();
        service.oneshot(request).await.unwrap()
    }
}

fn verdicts(answer: &pb::ExplainResponse) -> BTreeMap<&str, pb::LimitVerdict> {
    answer.limits.iter().map(|limit| (limit.limit.as_str(), limit.verdict())).collect()
}

#[tokio::test]
async fn an_explanation_says_of_every_limit_what_it_would_do_and_why() {
    use pb::LimitVerdict::{Admitted, Exempt, NotMatched, Skipped};
    let replica = with(many_limits()).await;
    let answer = replica.explain(question("/x/../api/y?q=1")).await;
    assert_eq!(answer.path, "/api/y");
    assert_eq!(
        verdicts(&answer),
        BTreeMap::from([
            ("per-client", Admitted),
            ("trial", Admitted),
            ("posts", NotMatched),
            ("inside", Skipped)
        ])
    );
    let reasons: Vec<&str> = answer.limits.iter().map(|limit| limit.reason.as_str()).collect();
    assert_eq!(reasons[2], "not method POST: it is GET");
    assert_eq!(reasons[3], "the request lacks header:x-tenant, and the limit does not apply then");
    let first = &answer.limits[0];
    assert!(!first.bucket_exists);
    assert_eq!((first.level, first.burst, first.cost), (3.0, 3.0, 1.0));
    assert_eq!(first.key[0].text, "203.0.113.9");
    let given = answer.answer.unwrap();
    assert!(given.forwarded && given.status == 0);
    let field = |name: &str| {
        given.headers.iter().find(|header| header.name == name).map(|h| h.value.as_str())
    };
    assert_eq!(field("ratelimit"), Some("\"per-client\";r=2;t=1"));

    let post = pb::ExplainRequest { method: "POST".into(), ..question("/other") };
    let answer = replica.explain(post).await;
    assert_eq!(answer.limits[2].reason, "not path /api/: it is /other");
    assert_eq!(verdicts(&replica.explain(question("/health")).await)["inside"], Exempt);
    assert!(replica.limiter.store().is_empty());
}

#[tokio::test]
async fn what_is_explained_is_what_the_client_gets() {
    let replica = with(many_limits()).await;
    for _ in 0..3 {
        assert_eq!(replica.send([203, 0, 113, 9]).await.status(), 200);
    }
    let told = replica.explain(question("/")).await;
    assert_eq!(verdicts(&told)["per-client"], pb::LimitVerdict::Refused);
    assert_eq!(verdicts(&told)["trial"], pb::LimitVerdict::ShadowRefused);
    let told = told.answer.unwrap();
    let given = replica.send([203, 0, 113, 9]).await;
    assert_eq!(told.refused_by, "per-client");
    assert_eq!(told.status, u32::from(given.status().as_u16()));
    assert_eq!(told.body.as_bytes(), given.body());
    let mut fields: Vec<(String, String)> = given
        .headers()
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
        .collect();
    let mut foretold: Vec<(String, String)> =
        told.headers.into_iter().map(|header| (header.name, header.value)).collect();
    fields.sort();
    foretold.sort();
    assert_eq!(fields, foretold);
    assert!(foretold.iter().any(|(name, value)| name == "retry-after" && value == "1"));
}

#[tokio::test]
async fn eg_g10_a_wait_is_foreseen() {
    let by_client = Rule { key: key(&[Source::ClientIp]), ..Rule::default() };
    let max_wait = Duration::from_secs(30);
    let paced = LimitSpec { max_wait, ..limit("paced", "6/min", 1, by_client) };
    let replica = with(LimitSet::new([Limit::new(paced)])).await;
    assert_eq!(replica.explain(question("/")).await.answer.unwrap().held_for, None);
    replica.send([203, 0, 113, 9]).await;
    let told = replica.explain(question("/")).await;
    let answer = told.answer.as_ref().unwrap();
    assert!(answer.forwarded && answer.status == 0, "{answer:?}");
    let held = answer.held_for.unwrap();
    assert!((9..=10).contains(&held.seconds), "{held:?}");
    assert_eq!(
        (answer.refused_by.as_str(), verdicts(&told)["paced"]),
        ("paced", pb::LimitVerdict::Held)
    );

    // Who does not want to wait that long is refused.
    let mut impatient = question("/");
    impatient.headers = vec![pb::Header { name: "Prefer".into(), value: "wait=5".into() }];
    let told = replica.explain(impatient).await;
    assert_eq!(told.answer.as_ref().unwrap().status, 429);
    assert_eq!(verdicts(&told)["paced"], pb::LimitVerdict::Refused);

    let text = replica.tidegate(&["explain", "/", "--client", "203.0.113.9"]).await.unwrap();
    assert!(text.contains("the upstream's, after about "), "{text}");
    assert!(text.contains("the request waits"), "{text}");
    let text = replica.tidegate(&["limits", "-o", "json"]).await.unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json[0]["max_wait_seconds"], 30.0);
}

#[tokio::test]
async fn explaining_spends_nothing_and_counts_nothing() {
    let replica = with(many_limits()).await;
    replica.send([203, 0, 113, 9]).await;
    for _ in 0..50 {
        replica.explain(question("/")).await;
    }
    let mut client = replica.client().await;
    let top = client.top_keys(pb::TopKeysRequest {
        by: pb::Ranking::Spent.into(),
        ..pb::TopKeysRequest::default()
    });
    let top = top.await.unwrap().into_inner();
    let bucket = top.buckets.iter().find(|bucket| bucket.limit == "per-client").unwrap();
    assert_eq!((bucket.level, bucket.admitted, bucket.refused), (2.0, 1, 0));
    let watched = replica.watch(pb::WatchRequest::default()).await.unwrap();
    let totals = watched.totals.iter().find(|totals| totals.limit == "per-client").unwrap();
    assert_eq!((totals.admitted, totals.refused, totals.buckets), (1, 0, 1));
}

#[tokio::test]
async fn an_explanation_finds_the_client_as_the_proxy_does() {
    let replica = with(many_limits()).await;
    let from = |peer: &str| pb::ExplainRequest {
        client_address: String::new(),
        peer_address: peer.into(),
        headers: vec![pb::Header {
            name: "X-Forwarded-For".into(),
            value: "203.0.113.9, 10.9.9.9".into(),
        }],
        ..question("/")
    };
    for (peer, client, found) in [
        ("10.0.0.1", "203.0.113.9", "from X-Forwarded-For, of a trusted proxy"),
        ("192.0.2.1", "192.0.2.1", "the connection's address, which is no trusted proxy"),
    ] {
        let answer = replica.explain(from(peer)).await;
        let told = answer.client.unwrap();
        assert_eq!(told.address, client);
        assert!(told.found.starts_with(found), "{}", told.found);
        assert_eq!(answer.limits[0].key[0].text, client);
    }
}

#[tokio::test]
async fn what_no_limit_is_asked_about_is_explained_too() {
    let replica = with(many_limits()).await;
    let trace = pb::ExplainRequest { method: "TRACE".into(), ..question("/") };
    let answer = replica.explain(trace).await;
    assert_eq!(answer.answer.unwrap().status, 405);
    assert_eq!(answer.note, "the request is refused before any limit is asked");
    assert!(answer.limits.is_empty());
    let last = pb::ExplainRequest {
        method: "OPTIONS".into(),
        headers: vec![pb::Header { name: "max-forwards".into(), value: "0".into() }],
        ..question("/")
    };
    let answer = replica.explain(last).await;
    assert_eq!(answer.answer.unwrap().status, 200);
    assert_eq!(answer.note, "the request asks the proxy itself, which no limit counts");
    assert!(answer.limits.is_empty());
    let header = |name: &str| pb::Header { name: name.into(), value: "https://a.example".into() };
    let preflight = pb::ExplainRequest {
        method: "OPTIONS".into(),
        headers: vec![header("origin"), header("access-control-request-method")],
        ..question("/")
    };
    let answer = replica.explain(preflight).await;
    assert!(answer.answer.unwrap().forwarded);
    assert_eq!(answer.note, "a preflight of a browser is not limited");
}

#[tokio::test]
async fn a_secret_is_not_repeated_by_an_explanation() {
    let replica = Replica::start().await;
    let request = pb::ExplainRequest {
        headers: [("x-kind", "tenant"), ("authorization", "hunter2"), ("x-tenant", "t")]
            .map(|(name, value)| pb::Header { name: name.into(), value: value.into() })
            .to_vec(),
        ..question("/api/x")
    };
    let answer = replica.explain(request).await;
    let tenants = answer.limits.iter().find(|limit| limit.limit == "tenants").unwrap();
    assert_eq!(tenants.key[1].kind(), pb::KeyKind::Secret);
    assert!(!format!("{answer:?}").contains("hunter2"));
}

#[tokio::test]
async fn bad_questions_name_their_field() {
    let replica = Replica::start().await;
    let mut client = replica.client().await;
    let explain = |change: fn(&mut pb::ExplainRequest)| {
        let mut request = question("/");
        change(&mut request);
        request
    };
    for (request, field) in [
        (explain(|r| r.method = "A B".into()), "method: "),
        (explain(|r| r.target = "no-slash".into()), "target: "),
        (explain(|r| r.client_address = "x".into()), "client_address: "),
        (explain(|r| r.client_address.clear()), "client_address: "),
        (explain(|r| r.peer_address = "10.0.0.1".into()), "peer_address: "),
    ] {
        let status = client.explain(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().starts_with(field), "{}", status.message());
    }
    let top = |limit: &str, by, count| pb::TopKeysRequest { limit: limit.into(), by, count };
    for (request, code, text) in [
        (top("nowhere", 0, 0), Code::NotFound, "there is no limit `nowhere`"),
        (top("", 9, 0), Code::InvalidArgument, "by: "),
        (top("", 0, 1001), Code::InvalidArgument, "count: 1000 at most"),
    ] {
        let status = client.top_keys(request).await.unwrap_err();
        assert_eq!(status.code(), code);
        assert!(status.message().starts_with(text), "{}", status.message());
    }
    let watch = |limit: &str, interval: Option<u64>, id: Option<&str>| pb::WatchRequest {
        limit: limit.into(),
        interval: interval.map(|millis| Duration::from_millis(millis).try_into().unwrap()),
        bucket: id.map(|id| pb::watch_request::Bucket::Id(id.into())),
        ..pb::WatchRequest::default()
    };
    for (request, code, text) in [
        (watch("nowhere", None, None), Code::NotFound, "there is no limit `nowhere`"),
        (watch("", Some(499), None), Code::InvalidArgument, "interval: a time from 500ms to 1h"),
        (watch("", Some(3_600_001), None), Code::InvalidArgument, "interval: "),
        (watch("", None, Some("xyz")), Code::InvalidArgument, "id: "),
    ] {
        let status = client.watch(request).await.unwrap_err();
        assert_eq!(status.code(), code);
        assert!(status.message().starts_with(text), "{}", status.message());
    }
}

#[tokio::test]
async fn the_busiest_keys_are_exactly_those_that_refused_or_spent_most() {
    let replica = with(LimitSet::new([Limit::new(limit(
        "per-client",
        "60/min",
        5,
        Rule { key: key(&[Source::ClientIp]), ..Rule::default() },
    ))]))
    .await;
    // The n-th client is refused n times, in no particular order.
    for n in (0..40_u32).map(|n| (n * 7 % 40) as u8) {
        for _ in 0..5 + n {
            replica.ask([10, 0, 0, n], &[]);
        }
    }
    let mut client = replica.client().await;
    let mut top = async |by: pb::Ranking, count| {
        let request = pb::TopKeysRequest { limit: String::new(), by: by.into(), count };
        client.top_keys(request).await.unwrap().into_inner()
    };
    let refused = top(pb::Ranking::Refused, 3).await;
    let told: Vec<(&str, u64)> =
        refused.buckets.iter().map(|b| (b.key[0].text.as_str(), b.refused)).collect();
    assert_eq!(told, [("10.0.0.39", 39), ("10.0.0.38", 38), ("10.0.0.37", 37)]);
    assert_eq!((refused.compared, refused.dropped_not_full), (40, 0));
    // One client was refused nothing, and so is not told of.
    assert_eq!(top(pb::Ranking::Refused, 1000).await.buckets.len(), 39);
    assert_eq!(top(pb::Ranking::Unspecified, 0).await.buckets.len(), 10);
    assert_eq!(top(pb::Ranking::Spent, 0).await.buckets[0].spent[0].tokens, 5.0);
}

impl Replica {
    /// The first message of a watch.
    async fn watch(&self, request: pb::WatchRequest) -> Result<pb::WatchResponse, tonic::Status> {
        let mut stream = self.client().await.watch(request).await?.into_inner();
        Ok(stream.message().await?.unwrap())
    }
}

#[tokio::test]
async fn a_watch_of_a_bucket_tells_each_change_once() {
    let replica = Replica::start().await;
    let parts =
        vec![pb::KeyValue { value: Some(pb::key_value::Value::Text("203.0.113.9".into())) }];
    let request = pb::WatchRequest {
        limit: "per-client".into(),
        bucket: Some(pb::watch_request::Bucket::Key(pb::Key { parts })),
        interval: Some(Duration::from_millis(100).try_into().unwrap()),
        ..pb::WatchRequest::default()
    };
    let mut stream = replica.client().await.watch(request).await.unwrap().into_inner();
    let first = stream.message().await.unwrap().unwrap();
    assert!(first.buckets.is_empty(), "a bucket that does not exist is full");
    for spent in 1..=3 {
        replica.ask([203, 0, 113, 9], &[]);
        let message = stream.message().await.unwrap().unwrap();
        let [bucket] = message.buckets.as_slice() else { panic!("{message:?}") };
        assert_eq!((bucket.level, bucket.admitted), (10.0 - f64::from(spent), spent as u64));
        assert!(message.totals.is_empty());
    }
    // The clock stands still, so that nothing changes any more.
    let quiet = tokio::time::timeout(Duration::from_millis(350), stream.message()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    replica.clock.set(replica.clock.now().plus(Duration::from_secs(1)));
    assert_eq!(stream.message().await.unwrap().unwrap().buckets[0].level, 8.0);
}

#[tokio::test]
async fn a_watch_of_all_limits_tells_totals_and_the_busiest() {
    let replica = Replica::start().await;
    for _ in 0..12 {
        replica.send([203, 0, 113, 9]).await;
    }
    let request = pb::WatchRequest {
        interval: Some(Duration::from_millis(500).try_into().unwrap()),
        ..pb::WatchRequest::default()
    };
    let mut stream = replica.client().await.watch(request.clone()).await.unwrap().into_inner();
    for _ in 0..2 {
        let message = stream.message().await.unwrap().unwrap();
        let names: Vec<&str> = message.totals.iter().map(|t| t.limit.as_str()).collect();
        assert_eq!(names, ["per-client", "tenants", "blocked"]);
        assert_eq!((message.totals[0].admitted, message.totals[0].refused), (10, 2));
        assert_eq!(message.buckets[0].refused, 2);
    }
    let one = pb::WatchRequest { limit: "tenants".into(), ..request };
    let message = replica.watch(one).await.unwrap();
    assert_eq!((message.totals.len(), message.buckets.len()), (1, 0));
}

#[tokio::test]
async fn watches_at_the_same_time_are_bounded_and_a_dropped_one_makes_room() {
    let replica = Replica::start().await;
    let mut client = replica.client().await;
    let mut watches = Vec::new();
    for _ in 0..16 {
        watches.push(client.watch(pb::WatchRequest::default()).await.unwrap());
    }
    let status = client.watch(pb::WatchRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    watches.pop();
    let freed = async {
        while client.watch(pb::WatchRequest::default()).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), freed).await.unwrap();
}

#[tokio::test]
async fn the_configuration_is_told_with_the_last_error() {
    let none = Replica::start().await;
    let status = none.client().await.get_config(pb::GetConfigRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);

    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let first = Configuration {
        yaml: "limits: []\n".into(),
        hash: "abc".into(),
        file: "tidegate.yaml".into(),
        loaded_at: at,
        last_error: None,
        needs_restart: Vec::new(),
    };
    let (sender, receiver) = tokio::sync::watch::channel(first.clone());
    let replica = Replica::start_dressed(limit_set(), Vec::new(), Bounds::default(), |service| {
        service.with_configuration(move || receiver.borrow().clone())
    })
    .await;
    let mut client = replica.client().await;
    let answer = client.get_config(pb::GetConfigRequest {}).await.unwrap().into_inner();
    assert_eq!((answer.yaml.as_str(), answer.hash.as_str()), ("limits: []\n", "abc"));
    assert_eq!(answer.loaded_at.unwrap().seconds, 1_700_000_000);
    assert_eq!((answer.last_error.as_str(), answer.last_error_at), ("", None));
    let later = at + Duration::from_secs(5);
    sender.send_replace(Configuration {
        last_error: Some(("limits[0].rate: bad".into(), later)),
        needs_restart: vec!["proxy.listen".into()],
        ..first
    });
    let answer = client.get_config(pb::GetConfigRequest {}).await.unwrap().into_inner();
    assert_eq!(answer.last_error, "limits[0].rate: bad");
    assert_eq!(answer.last_error_at.unwrap().seconds, 1_700_000_005);
    assert_eq!(answer.needs_restart, ["proxy.listen"]);
}

#[tokio::test]
async fn a_log_that_does_not_exist_cannot_be_changed() {
    let replica = Replica::start().await;
    let mut client = replica.client().await;
    let mut set = async |filter: &str| {
        let request = pb::SetLogFilterRequest { filter: filter.into() };
        client.set_log_filter(request).await.unwrap_err()
    };
    assert_eq!(set("debug").await.code(), Code::FailedPrecondition);
    let empty = set(" ").await;
    assert_eq!(empty.code(), Code::InvalidArgument);
    assert!(empty.message().starts_with("filter: "), "{}", empty.message());
}

#[tokio::test]
async fn the_program_explains_a_request() {
    let replica = with(many_limits()).await;
    for _ in 0..3 {
        replica.send([203, 0, 113, 9]).await;
    }
    let text = replica
        .tidegate(&["explain", "-H", "x-a: 1", "--client", "203.0.113.9", "/api/x"])
        .await
        .unwrap();
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let lines: Vec<Vec<String>> = text.lines().map(words).collect();
    let has = |line: &str| lines.iter().any(|found| *found == words(line));
    for line in [
        "client 203.0.113.9: as the question says",
        "path /api/x",
        "answer 429, refused by per-client",
        "retry-after: 1",
        "LIMIT VERDICT KEY LEVEL BURST RATE COST DUE WHY",
        "per-client refused 203.0.113.9 0 3 60/min 1 1s it lacks the 1 token(s) that the request costs",
        "posts no match - - - - - - not method POST: it is GET",
    ] {
        assert!(has(line), "{line} is not in\n{text}");
    }
    let json = replica.tidegate(&["explain", "-X", "POST", "-o", "json", "/api/x"]).await.unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["client"]["address"], "127.0.0.1");
    assert_eq!(json["answer"]["forwarded"], true);
    assert_eq!(json["limits"][2]["verdict"], "admitted");
    assert_eq!(json["limits"][2]["bucket"]["exists"], false);
    let error = replica.tidegate(&["explain", "x"]).await.unwrap_err();
    assert_eq!(error.exit() as u8, 2);
    assert!(error.to_string().starts_with("target: "), "{error}");
}

#[tokio::test]
async fn the_program_shows_the_busiest_keys_and_one_snapshot_of_top() {
    let replica = Replica::start().await;
    for _ in 0..12 {
        replica.send([203, 0, 113, 9]).await;
    }
    replica.send([203, 0, 113, 8]).await;
    let text = replica.tidegate(&["buckets", "top", "--by", "spent", "-n", "1"]).await.unwrap();
    assert!(text.contains("203.0.113.9") && !text.contains("203.0.113.8"), "{text}");
    assert!(text.ends_with("1 of 2 bucket(s); exact, no peers are known\n"), "{text}");
    let text = replica.tidegate(&["buckets", "top", "-o", "json"]).await.unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["buckets"].as_array().unwrap().len(), 1);
    assert_eq!(json["buckets"][0]["refused"], 2);

    let text = replica.tidegate(&["top"]).await.unwrap();
    assert!(!text.contains('\u{1b}'), "{text}");
    let line = text.lines().find(|line| line.starts_with("per-client")).unwrap();
    assert_eq!(
        line.split_whitespace().collect::<Vec<_>>(),
        ["per-client", "-", "-", "11", "0", "2", "0", "0", "2"]
    );
    let text = replica.tidegate(&["top", "-o", "json", "--limit", "blocked"]).await.unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["limits"][0]["limit"], "blocked");
    let error = replica.tidegate(&["log", "debug"]).await.unwrap_err();
    assert_eq!(error.exit() as u8, 1);
    assert!(error.to_string().contains("no log to change"), "{error}");
}

#[tokio::test]
async fn what_peers_spent_counts_in_the_table_of_the_busiest() {
    let replica = Replica::with_peers().await;
    replica.ask([203, 0, 113, 9], &[]);
    let id = {
        let mut found = None;
        replica.limiter.store().for_each(|id, _| found = Some(id));
        found.unwrap()
    };
    replica.cluster.spent.lock().unwrap().insert(id, 4_000_000);
    let request = pb::TopKeysRequest { by: pb::Ranking::Spent.into(), ..Default::default() };
    let top = replica.client().await.top_keys(request).await.unwrap().into_inner();
    let spent: Vec<(String, f64)> =
        top.buckets[0].spent.iter().map(|s| (s.incarnation.clone(), s.tokens)).collect();
    assert_eq!(spent[1], (PEER.to_string(), 4.0));
    assert_eq!(top.knowledge.unwrap().live_peers, 1);
}

fn reset(limit: &str, bucket: pb::reset_bucket_request::Bucket) -> pb::ResetBucketRequest {
    pb::ResetBucketRequest { limit: limit.into(), bucket: Some(bucket) }
}

fn key_of(parts: &[&str]) -> pb::Key {
    let parts = parts
        .iter()
        .map(|text| pb::KeyValue { value: Some(pb::key_value::Value::Text((*text).into())) });
    pb::Key { parts: parts.collect() }
}

#[tokio::test]
async fn a_bucket_or_a_whole_limit_is_made_full_again() {
    use pb::reset_bucket_request::Bucket;
    let replica = Replica::start().await;
    let mut client = replica.client().await;
    let exhaust = |last: u8| {
        while replica.ask([203, 0, 113, last], &[]) {}
    };
    exhaust(1);
    exhaust(2);
    let one = reset("per-client", Bucket::Key(key_of(&["203.0.113.1"])));
    assert_eq!(client.reset_bucket(one.clone()).await.unwrap().into_inner().buckets, 1);
    assert!(replica.ask([203, 0, 113, 1], &[]));
    assert!(!replica.ask([203, 0, 113, 2], &[]), "another bucket was not meant");

    let top = client.top_keys(pb::TopKeysRequest::default()).await.unwrap().into_inner();
    let id = top.buckets[0].id.clone();
    let by_id = reset("", Bucket::Id(id.clone()));
    assert_eq!(client.reset_bucket(by_id).await.unwrap().into_inner().buckets, 1);
    exhaust(1);
    exhaust(2);
    let all = reset("per-client", Bucket::All(true));
    assert_eq!(client.reset_bucket(all).await.unwrap().into_inner().buckets, 2);
    assert!(replica.ask([203, 0, 113, 1], &[]) && replica.ask([203, 0, 113, 2], &[]));
    // Peers may have a bucket that this replica lacks.
    let absent = reset("per-client", Bucket::Key(key_of(&["203.0.113.99"])));
    assert_eq!(client.reset_bucket(absent).await.unwrap().into_inner().buckets, 0);

    let unknown = "0123456789abcdef0123456789abcdef";
    for (request, code, text) in [
        (reset("nowhere", Bucket::All(true)), Code::NotFound, "there is no limit `nowhere`"),
        (reset("", Bucket::All(true)), Code::InvalidArgument, "limit: "),
        (reset("per-client", Bucket::All(false)), Code::InvalidArgument, "all: "),
        (reset("per-client", Bucket::Key(key_of(&[]))), Code::InvalidArgument, "key.parts: "),
        (reset("per-client", Bucket::Id("x".into())), Code::InvalidArgument, "id: "),
        (reset("", Bucket::Id(unknown.into())), Code::NotFound, "there is no bucket"),
        (reset("tenants", Bucket::Id(id)), Code::NotFound, "there is no bucket"),
        (
            pb::ResetBucketRequest { limit: "per-client".into(), bucket: None },
            Code::InvalidArgument,
            "bucket: ",
        ),
    ] {
        let status = client.reset_bucket(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{}", status.message());
        assert!(status.message().starts_with(text), "{}", status.message());
    }
}

#[tokio::test]
async fn the_program_resets_a_bucket_or_a_limit() {
    let replica = Replica::with_peers().await;
    while replica.ask([203, 0, 113, 9], &[]) {}
    let text = replica.tidegate(&["buckets", "reset", "per-client", "203.0.113.9"]).await.unwrap();
    assert_eq!(
        text,
        "full again: 1 bucket(s) of this replica, and those of 1 live peer(s); \
         1 peer(s) that are not heard are told when they are\n"
    );
    assert!(replica.ask([203, 0, 113, 9], &[]));
    let all = ["buckets", "reset", "per-client", "--all", "-o", "json"];
    let json: serde_json::Value =
        serde_json::from_str(&replica.tidegate(&all).await.unwrap()).unwrap();
    assert_eq!(json["buckets"], 1);
    let error = replica.tidegate(&["buckets", "reset", "per-client"]).await.unwrap_err();
    assert_eq!(error.exit() as u8, 2, "a whole limit must be asked for: {error}");
}

#[tokio::test]
async fn the_program_pauses_and_resumes_a_bucket_or_a_limit() {
    let replica = with(many_limits()).await;
    let text = replica
        .tidegate(&["buckets", "pause", "per-client", "203.0.113.9", "--for", "10m"])
        .await
        .unwrap();
    assert_eq!(text.trim(), "paused for 10m: here, and on 0 live peer(s)");
    let text = replica.tidegate(&["buckets", "get", "per-client", "203.0.113.9"]).await.unwrap();
    let paused = text.lines().find_map(|line| line.strip_prefix("paused")).unwrap();
    assert!(paused.trim().starts_with("10m") || paused.trim().starts_with("9m"), "{text}");
    let told = replica.tidegate(&["explain", "/", "--client", "203.0.113.9"]).await.unwrap();
    assert!(told.contains("429, refused by per-client"), "{told}");
    let why = told.contains("it is paused for another 9m")
        || told.contains("it is paused for another 10m");
    assert!(why, "{told}");
    let resume = ["buckets", "resume", "per-client", "203.0.113.9"];
    let text = replica.tidegate(&resume).await.unwrap();
    assert_eq!(text.trim(), "resumed: here, and on 0 live peer(s)");
    let all = ["buckets", "pause", "per-client", "--all", "--for", "1h", "-o", "json"];
    let json: serde_json::Value =
        serde_json::from_str(&replica.tidegate(&all).await.unwrap()).unwrap();
    assert_eq!(json["seconds"], 3600.0);
    let limits = replica.tidegate(&["limits", "-o", "json"]).await.unwrap();
    let limits: serde_json::Value = serde_json::from_str(&limits).unwrap();
    assert!(limits[0]["paused_seconds"].as_f64().unwrap() > 3500.0, "{limits}");
    assert!(limits[1]["paused_seconds"].is_null(), "{limits}");
    let text = replica.tidegate(&resume).await.unwrap();
    assert!(text.contains("but all buckets of the limit are paused for another"), "{text}");
    replica.tidegate(&["buckets", "resume", "per-client", "--all"]).await.unwrap();
    let told = replica.tidegate(&["explain", "/", "--client", "203.0.113.9"]).await.unwrap();
    assert!(!told.contains("paused for"), "{told}");
    for time in ["0s", "25h"] {
        let error = replica
            .tidegate(&["buckets", "pause", "per-client", "203.0.113.9", "--for", time])
            .await
            .unwrap_err();
        assert!(error.to_string().contains("pause_for: a time above zero"), "{error}");
    }
}
