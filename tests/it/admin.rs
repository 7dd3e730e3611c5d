//! The admin gRPC and the subcommands that ask it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clap::Parser;
use prometheus_client::registry::Registry;
use prost::Message as _;
use tidegate::admin::{
    AdminServer, AdminService, Bounds, Cluster, Health, MeshView, ReplicaView, Stopped,
};
use tidegate::cli::{buckets, client, explain, limits, log, peers, top};
use tidegate::limiter::{
    Attributes, BucketId, Client, Condition, KeyPart, Limit, LimitSet, LimitSpec, Limiter, Missing,
    Mode, PathPattern, Quota, Rule, Source,
};
use tidegate::proxy::{Config, Enforcer, HeaderStyle, Metrics, Preview};
use tidegate::replication::{
    BucketView, Companion, Engine, Incarnation, PeerState, PeerView, ReplicatedLimiter, Reset,
    Settings,
};
use tidegate::runtime::{Drain, DrainControl, Stage};
use tidegate::time::{Clock, Timestamp};
use tidegate::wire::tidegate::admin::v1 as pb;
use tidegate::wire::tidegate::admin::v1::admin_client::AdminClient;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinHandle;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::harness::until;

const ME: Incarnation = Incarnation::from_bytes([1; 16]);
pub(crate) const PEER: Incarnation = Incarnation::from_bytes([2; 16]);
const LOST: Incarnation = Incarnation::from_bytes([3; 16]);

/// A request with a client and headers.
#[derive(Default)]
struct Asked {
    ip: [u8; 4],
    headers: Vec<(&'static str, String)>,
}

impl Attributes for Asked {
    fn method(&self) -> &str {
        "GET"
    }

    fn path(&self) -> &[u8] {
        b"/api/x"
    }

    fn host(&self) -> &str {
        "api.example.com"
    }

    fn client(&self) -> Client {
        Client::new(self.ip.into(), 64)
    }

    fn header(&self, name: &str, each: &mut dyn FnMut(&[u8])) {
        for (_, value) in self.headers.iter().filter(|(known, _)| *known == name) {
            each(value.as_bytes());
        }
    }

    fn query(&self) -> &str {
        ""
    }
}

/// The product's engine, with peers and their spending made up.
pub(crate) struct FakeCluster {
    engine: Mutex<Engine>,
    clock: Clock,
    peers: Vec<PeerView>,
    /// What the peer spent from a bucket, in micro-tokens.
    pub(crate) spent: Mutex<BTreeMap<BucketId, u64>>,
    /// How many more replicas spent from every bucket.
    crowd: AtomicU8,
    stopped: AtomicBool,
}

pub(crate) struct Shared(Arc<FakeCluster>);

impl Cluster for Shared {
    async fn mesh(&self) -> Result<MeshView, Stopped> {
        if self.0.stopped.load(Ordering::SeqCst) {
            return Err(Stopped);
        }
        let engine = self.0.engine.lock().unwrap();
        Ok(MeshView {
            this: ReplicaView {
                incarnation: engine.incarnation(),
                name: "pod-a".into(),
                address: "10.0.0.1:9401".into(),
                group: "default".into(),
                joined: engine.is_joined(),
            },
            peers: self.0.peers.clone(),
            listed_addresses: 3,
        })
    }

    async fn unsent(&self) -> Result<u64, Stopped> {
        if self.0.stopped.load(Ordering::SeqCst) {
            return Err(Stopped);
        }
        Ok(1_500_000)
    }

    async fn buckets(&self, ids: Vec<BucketId>) -> Result<Vec<Option<BucketView>>, Stopped> {
        assert!(ids.len() <= 1024, "{} buckets were asked for at once", ids.len());
        if self.0.stopped.load(Ordering::SeqCst) {
            return Err(Stopped);
        }
        let engine = self.0.engine.lock().unwrap();
        let now = self.0.clock.now();
        let spent = self.0.spent.lock().unwrap();
        Ok(ids
            .into_iter()
            .map(|id| {
                let mut view = engine.bucket(id, now)?;
                if let Some(micros) = spent.get(&id) {
                    view.spent.push((PEER, *micros));
                    view.heard_nanos_ago = Some(250_000_000);
                }
                for n in 0..self.0.crowd.load(Ordering::SeqCst) {
                    view.spent.push((Incarnation::from_bytes([n; 16]), u64::MAX));
                }
                Some(view)
            })
            .collect())
    }

    async fn reset(&self, what: Reset) -> Result<Option<usize>, Stopped> {
        let now = self.0.clock.now();
        Ok(self.0.engine.lock().unwrap().reset(&what, now))
    }
}

fn peer(incarnation: Incarnation, name: &str, state: PeerState, heard: Duration) -> PeerView {
    PeerView {
        incarnation,
        name: name.into(),
        address: "10.0.0.2:9401".into(),
        state,
        connected: state == PeerState::Live,
        heard_nanos_ago: heard.as_nanos() as u64,
        sent_nanos_ago: 40_000_000,
        round_trip_nanos: 1_500_000,
        pending: 7,
        mismatches: vec!["per-client: rate 5/s here, 6/s there".into()],
    }
}

pub(crate) fn limit(name: &str, rate: &str, burst: u64, rule: Rule) -> LimitSpec {
    LimitSpec::new(name, rule, Quota::try_new(rate.parse().unwrap(), burst).unwrap())
}

pub(crate) fn key(parts: &[Source]) -> Vec<KeyPart> {
    parts.iter().map(|source| KeyPart::new(source.clone(), false)).collect()
}

/// Three limits: by client, by two headers (one of them a credential) and one
/// bucket for all, which only applies where a header says so.
pub(crate) fn limit_set() -> LimitSet {
    let by_client = Rule { key: key(&[Source::ClientIp]), ..Rule::default() };
    let override_id = {
        let seed = Limit::seed("per-client", &by_client);
        seed.id(by_client.key_from_text(&["203.0.113.7"], 64).unwrap().as_bytes())
    };
    let by_headers = Rule {
        condition: Condition {
            path: Some(PathPattern::try_new("/api/").unwrap()),
            headers: vec![("x-kind".into(), "tenant".into())],
            ..Condition::default()
        },
        exempt: vec![Condition {
            cidrs: vec!["10.1.0.0/16".parse().unwrap()],
            ..Condition::default()
        }],
        key: key(&[Source::Header("x-tenant".into()), Source::Header("authorization".into())]),
        missing: Missing::Shared,
    };
    let for_all = Rule {
        condition: Condition {
            headers: vec![("x-kind".into(), "all".into())],
            ..Condition::default()
        },
        ..Rule::default()
    };
    LimitSet::new([
        Limit::new(LimitSpec {
            overrides: HashMap::from([(
                override_id,
                Quota::try_new("1000/min".parse().unwrap(), 200).unwrap(),
            )]),
            ..limit("per-client", "60/min", 10, by_client)
        }),
        Limit::new(LimitSpec {
            mode: Mode::Shadow,
            expose: false,
            ..limit("tenants", "5/10s", 5, by_headers)
        }),
        Limit::new(limit("blocked", "0/s", 0, for_all)),
    ])
}

/// A bound and running admin server on a limiter whose clock stands still.
pub(crate) struct Replica {
    pub(crate) limiter: Arc<ReplicatedLimiter>,
    pub(crate) cluster: Arc<FakeCluster>,
    pub(crate) enforcer: Arc<Enforcer<Companion>>,
    pub(crate) clock: Clock,
    pub(crate) address: SocketAddr,
    health: Health,
    control: Option<DrainControl>,
    server: JoinHandle<()>,
}

impl Replica {
    pub(crate) async fn start() -> Self {
        Self::start_with(limit_set(), Vec::new(), Bounds::default()).await
    }

    pub(crate) async fn with_peers() -> Self {
        let peers = vec![
            peer(PEER, "pod-b", PeerState::Live, Duration::from_millis(120)),
            peer(LOST, "pod-c\u{1b}[2J", PeerState::Suspect, Duration::from_secs(9)),
        ];
        Self::start_with(limit_set(), peers, Bounds::default()).await
    }

    async fn start_with(limits: LimitSet, peers: Vec<PeerView>, bounds: Bounds) -> Self {
        Self::start_dressed(limits, peers, bounds, |service| service).await
    }

    pub(crate) async fn start_dressed(
        limits: LimitSet,
        peers: Vec<PeerView>,
        bounds: Bounds,
        dress: impl FnOnce(AdminService<Shared>) -> AdminService<Shared>,
    ) -> Self {
        Self::start_guarded(limits, peers, |server| server.with_bounds(bounds), dress).await
    }

    pub(crate) async fn start_guarded(
        limits: LimitSet,
        peers: Vec<PeerView>,
        guard: impl FnOnce(AdminServer) -> AdminServer,
        dress: impl FnOnce(AdminService<Shared>) -> AdminService<Shared>,
    ) -> Self {
        let clock = Clock::manual(Timestamp::from_millis(1_000_000));
        let limiter = Arc::new(Limiter::new(limits, 1_000_000, Companion::default()));
        let settings = Settings {
            group: "default".into(),
            name: "pod-a".into(),
            address: String::new(),
            sync_interval: Duration::from_millis(100),
            join_timeout: Duration::from_secs(2),
            share_hold: Duration::from_secs(30),
            expected_replicas: 0,
            expects_peers: false,
        };
        let engine = Engine::new(settings, ME, Arc::clone(&limiter), clock.now());
        let cluster = Arc::new(FakeCluster {
            engine: Mutex::new(engine),
            clock: clock.clone(),
            peers,
            spent: Mutex::default(),
            crowd: AtomicU8::new(0),
            stopped: AtomicBool::new(false),
        });
        let (server, address) = AdminServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let server = guard(server);
        let health = server.health();
        let metrics = Metrics::register(&mut Registry::default(), &limiter.limits());
        let enforcer =
            Enforcer::new(Arc::clone(&limiter), clock.clone(), metrics, HeaderStyle::Standard);
        let mut config = Config::new("http://127.0.0.1:1".parse().unwrap());
        config.trusted_proxies = vec!["10.0.0.0/8".parse().unwrap()];
        let enforcer = Arc::new(enforcer);
        let preview = Preview::new(Arc::clone(&enforcer), &config);
        let service =
            AdminService::new(Arc::clone(&limiter), Shared(Arc::clone(&cluster)), preview);
        let service = dress(service);
        let (control, drain): (_, Drain) = DrainControl::new();
        let server = tokio::spawn(async move { server.run(service, drain).await.unwrap() });
        Self { limiter, cluster, enforcer, clock, address, health, control: Some(control), server }
    }

    pub(crate) fn ask(&self, ip: [u8; 4], headers: &[(&'static str, &str)]) -> bool {
        let headers = headers.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        self.limiter.decide(&Asked { ip, headers }, self.clock.now()).is_admitted()
    }

    async fn channel(&self) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address)).unwrap();
        endpoint.connect().await.unwrap()
    }

    /// A client as anybody would make one: default limits.
    pub(crate) async fn client(&self) -> AdminClient<Channel> {
        AdminClient::new(self.channel().await)
    }

    async fn health_client(&self) -> HealthClient<Channel> {
        HealthClient::new(self.channel().await)
    }

    async fn get(
        &self,
        limit: &str,
        parts: &[&str],
    ) -> Result<pb::GetBucketResponse, tonic::Status> {
        let parts = parts
            .iter()
            .map(|text| pb::KeyValue {
                value: Some(match *text {
                    "(none)" => pb::key_value::Value::Missing(true),
                    text => pb::key_value::Value::Text(text.into()),
                }),
            })
            .collect();
        let bucket = Some(pb::get_bucket_request::Bucket::Key(pb::Key { parts }));
        let request = pb::GetBucketRequest { limit: limit.into(), bucket };
        Ok(self.client().await.get_bucket(request).await?.into_inner())
    }

    async fn list(&self, request: pb::ListBucketsRequest) -> Vec<pb::ListBucketsResponse> {
        let mut stream = self.client().await.list_buckets(request).await.unwrap().into_inner();
        let mut messages = Vec::new();
        while let Some(message) = stream.message().await.unwrap() {
            messages.push(message);
        }
        messages
    }

    async fn keys(&self, request: pb::ListBucketsRequest) -> Vec<String> {
        let messages = self.list(request).await;
        let buckets = messages.into_iter().flat_map(|message| message.buckets);
        let mut keys: Vec<String> = buckets
            .map(|b| b.key.into_iter().map(|part| part.text).collect::<Vec<_>>().join(" "))
            .collect();
        keys.sort();
        keys
    }

    /// What `tidegate ARGS...` prints.
    pub(crate) async fn tidegate(&self, args: &[&str]) -> Result<String, client::Error> {
        run(args, Some(self.address)).await
    }
}

/// The subcommands under test, as the program declares them.
#[derive(Parser)]
enum Program {
    Buckets(buckets::BucketsArgs),
    Limits(limits::LimitsArgs),
    Peers(peers::PeersArgs),
    Explain(explain::ExplainArgs),
    Top(top::TopArgs),
    Log(log::LogArgs),
}

pub(crate) async fn run(args: &[&str], admin: Option<SocketAddr>) -> Result<String, client::Error> {
    let admin = admin.map(|address| format!("--admin={address}"));
    let words = ["tidegate"].into_iter().chain(args.iter().copied()).chain(admin.as_deref());
    let mut out = Vec::new();
    match Program::try_parse_from(words).unwrap() {
        Program::Buckets(args) => buckets::run(args, &mut out).await?,
        Program::Limits(args) => limits::run(args, &mut out).await?,
        Program::Peers(args) => peers::run(args, &mut out).await?,
        Program::Explain(args) => explain::run(args, &mut out).await?,
        Program::Top(args) => top::run(args, &mut out, false).await?,
        Program::Log(args) => log::run(args, &mut out).await?,
    }
    Ok(String::from_utf8(out).unwrap())
}

pub(crate) fn seconds(duration: Option<prost_types::Duration>) -> f64 {
    let duration = duration.expect("the duration is there");
    duration.seconds as f64 + f64::from(duration.nanos) / 1e9
}

#[tokio::test]
async fn limits_are_listed_with_all_that_is_in_force() {
    let replica = Replica::start().await;
    replica.ask([203, 0, 113, 7], &[]);
    replica.ask([203, 0, 113, 8], &[]);
    let answer = replica.client().await.list_limits(pb::ListLimitsRequest {}).await.unwrap();
    let limits = answer.into_inner().limits;
    let names: Vec<&str> = limits.iter().map(|limit| limit.name.as_str()).collect();
    assert_eq!(names, ["per-client", "tenants", "blocked"]);

    let per_client = &limits[0];
    assert_eq!(per_client.rate.as_ref().unwrap().text, "60/min");
    assert_eq!(seconds(per_client.rate.as_ref().unwrap().period), 60.0);
    assert_eq!((per_client.burst, per_client.burst_micros), (10.0, 10_000_000));
    assert_eq!((per_client.overrides, per_client.buckets), (1, 2));
    assert_eq!((per_client.cost, per_client.expose), (1.0, true));
    assert_eq!(per_client.mode(), pb::Mode::Enforce);
    assert_eq!(per_client.applies_to, "");

    let tenants = &limits[1];
    let key: Vec<_> = tenants.key.iter().map(|part| (part.source.as_str(), part.secret)).collect();
    assert_eq!(key, [("header:x-tenant", false), ("header:authorization", true)]);
    assert_eq!(tenants.missing(), pb::Missing::Shared);
    assert_eq!((tenants.mode(), tenants.expose), (pb::Mode::Shadow, false));
    assert_eq!(tenants.applies_to, "path /api/, header x-kind=tenant");
    assert_eq!(tenants.exempt, ["client 10.1.0.0/16"]);
    assert_eq!(tenants.buckets, 0);
}

#[tokio::test]
async fn a_bucket_says_its_level_who_spent_and_how_old_that_is() {
    let replica = Replica::with_peers().await;
    let admitted = (0..13).filter(|_| replica.ask([203, 0, 113, 9], &[])).count();
    assert_eq!(admitted, 10);
    replica.clock.set(replica.clock.now().plus(Duration::from_millis(400)));

    let first = replica.get("per-client", &["203.0.113.9"]).await.unwrap().bucket.unwrap();
    let id: u128 = u128::from_str_radix(&first.id, 16).unwrap();
    replica.cluster.spent.lock().unwrap().insert(BucketId::from_bytes(id.to_be_bytes()), 2_500_000);

    let answer = replica.get("per-client", &["203.0.113.9"]).await.unwrap();
    let bucket = answer.bucket.unwrap();
    assert_eq!((bucket.limit.as_str(), bucket.id.as_str()), ("per-client", first.id.as_str()));
    assert_eq!((bucket.level, bucket.level_micros), (0.4, 400_000));
    assert_eq!((bucket.burst, bucket.burst_micros), (10.0, 10_000_000));
    assert_eq!(bucket.rate.as_ref().unwrap().tokens, 60);
    assert_eq!(seconds(bucket.next_token_in), 0.6);
    assert_eq!(seconds(bucket.full_in), 9.6);
    assert_eq!((bucket.admitted, bucket.refused), (10, 3));
    assert_eq!(seconds(bucket.heard_ago), 0.25);
    assert!(bucket.key_known);
    assert_eq!(bucket.key.len(), 1);
    assert_eq!(bucket.key[0].source, "client_ip");
    assert_eq!(
        (bucket.key[0].kind(), bucket.key[0].text.as_str()),
        (pb::KeyKind::Address, "203.0.113.9")
    );

    let [me, other] = &bucket.spent[..] else { panic!("{:?}", bucket.spent) };
    assert_eq!((me.incarnation.as_str(), me.name.as_str()), (ME.to_string().as_str(), "pod-a"));
    assert_eq!((me.tokens, me.micros, me.is_self), (10.0, 10_000_000, true));
    assert_eq!(
        (other.incarnation.as_str(), other.name.as_str()),
        (PEER.to_string().as_str(), "pod-b")
    );
    assert_eq!((other.tokens, other.is_self), (2.5, false));

    let knowledge = answer.knowledge.unwrap();
    assert_eq!(seconds(knowledge.age), 0.12);
    assert_eq!((knowledge.live_peers, knowledge.suspect_peers), (1, 1));
}

#[tokio::test]
async fn an_override_is_the_quota_of_its_bucket() {
    let replica = Replica::start().await;
    replica.ask([203, 0, 113, 7], &[]);
    let answer = replica.get("per-client", &["203.0.113.7"]).await.unwrap();
    let bucket = answer.bucket.unwrap();
    assert_eq!((bucket.burst, bucket.level), (200.0, 199.0));
    assert_eq!(bucket.rate.unwrap().text, "1000/min");
    assert_eq!(answer.knowledge.unwrap().age, None, "a lone replica knows all");
}

#[tokio::test]
async fn secret_parts_and_missing_parts_are_found_by_value_and_shown_as_hashes() {
    let replica = Replica::start().await;
    let kind = ("x-kind", "tenant");
    replica.ask([127, 0, 0, 1], &[kind, ("x-tenant", "acme"), ("authorization", "Bearer s3cr3t")]);
    replica.ask([127, 0, 0, 1], &[kind, ("authorization", "Bearer s3cr3t")]);
    let bucket = replica.get("tenants", &["acme", "Bearer s3cr3t"]).await.unwrap().bucket.unwrap();
    assert_eq!(bucket.key[0].text, "acme");
    assert_eq!(bucket.key[1].kind(), pb::KeyKind::Secret);
    assert!(!format!("{bucket:?}").contains("s3cr3t"));

    let bucket =
        replica.get("tenants", &["(none)", "Bearer s3cr3t"]).await.unwrap().bucket.unwrap();
    assert_eq!(
        (bucket.key[0].kind(), bucket.key[0].text.as_str()),
        (pb::KeyKind::Missing, "(none)")
    );
}

#[tokio::test]
async fn what_is_not_there_is_not_found() {
    let replica = Replica::start().await;
    replica.ask([127, 0, 0, 1], &[]);
    let status = replica.get("no-such", &["127.0.0.1"]).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::NotFound, "there is no limit `no-such`"));

    let status = replica.get("per-client", &["127.0.0.2"]).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    assert!(status.message().contains("limit `per-client`"), "{status:?}");
    assert!(status.message().contains("full (10 of 10 tokens)"), "{status:?}");

    let request = pb::ListBucketsRequest { limit: "no-such".into(), ..Default::default() };
    let status = replica.client().await.list_buckets(request).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);

    // A bucket is one limit's: asked for by identity under another it is not there.
    let id = replica.get("per-client", &["127.0.0.1"]).await.unwrap().bucket.unwrap().id;
    let by_id = |limit: &str| pb::GetBucketRequest {
        limit: limit.into(),
        bucket: Some(pb::get_bucket_request::Bucket::Id(id.clone())),
    };
    let mut client = replica.client().await;
    assert!(client.get_bucket(by_id("")).await.is_ok());
    assert!(client.get_bucket(by_id("per-client")).await.is_ok());
    assert_eq!(client.get_bucket(by_id("tenants")).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn bad_arguments_name_their_field() {
    use pb::get_bucket_request::Bucket;
    use pb::key_value::Value;
    let replica = Replica::start().await;
    let key = |values: Vec<Option<Value>>| {
        let parts = values.into_iter().map(|value| pb::KeyValue { value }).collect();
        Some(Bucket::Key(pb::Key { parts }))
    };
    let text = |text: &str| Some(Value::Text(text.into()));
    let mut client = replica.client().await;
    for (limit, bucket, message) in [
        ("per-client", None, "bucket: "),
        ("", key(vec![text("127.0.0.1")]), "limit: "),
        ("", Some(Bucket::Id("xyz".into())), "id: "),
        ("per-client", key(vec![]), "key.parts: the key has 1 part(s), but 0 value(s) were given"),
        ("blocked", key(vec![text("a")]), "key.parts: the key has 0 part(s), but 1"),
        ("per-client", key(vec![text("localhost")]), "key.parts: `localhost` is not an IP address"),
        ("per-client", key(vec![text("")]), "key.parts: the value for `client_ip` is empty"),
        ("tenants", key(vec![text("a"), None]), "key.parts[1]: "),
        ("tenants", key(vec![Some(Value::Missing(false)), text("a")]), "key.parts[0]: "),
    ] {
        let request = pb::GetBucketRequest { limit: limit.into(), bucket };
        let status = client.get_bucket(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().starts_with(message), "{status:?} does not start with {message}");
    }
}

#[tokio::test]
async fn buckets_are_listed_by_limit_prefix_count_and_level() {
    let replica = Replica::start().await;
    let empty = replica.list(pb::ListBucketsRequest::default()).await;
    assert_eq!(empty.len(), 1, "an answer without buckets still says how old it is");
    assert!(empty[0].buckets.is_empty() && empty[0].knowledge.is_some());

    replica.ask([10, 0, 0, 1], &[]);
    replica.clock.set(replica.clock.now().plus(Duration::from_secs(60)));
    replica.ask([10, 0, 0, 2], &[]);
    replica.ask([10, 0, 1, 1], &[("x-kind", "tenant"), ("x-tenant", "acme")]);
    let all = pb::ListBucketsRequest::default();
    assert_eq!(
        replica.keys(all.clone()).await,
        ["10.0.0.1", "10.0.0.2", "10.0.1.1", "acme (none)"]
    );
    let limit = pb::ListBucketsRequest { limit: "tenants".into(), ..all.clone() };
    assert_eq!(replica.keys(limit).await, ["acme (none)"]);
    let prefix = pb::ListBucketsRequest { key_prefix: "10.0.0.".into(), ..all.clone() };
    assert_eq!(replica.keys(prefix).await, ["10.0.0.1", "10.0.0.2"]);
    let most = pb::ListBucketsRequest { max_count: 3, ..all.clone() };
    assert_eq!(replica.keys(most).await.len(), 3);
    let not_full = pb::ListBucketsRequest { only_not_full: true, ..all.clone() };
    assert_eq!(replica.keys(not_full).await, ["10.0.0.2", "10.0.1.1", "acme (none)"]);
    let none = pb::ListBucketsRequest { key_prefix: "x".into(), ..all };
    assert!(replica.keys(none).await.is_empty());
}

#[tokio::test]
async fn ad_g1_a_hundred_lists_in_a_row_agree() {
    let replica = Replica::start().await;
    for _ in 0..5 {
        replica.ask([10, 0, 0, 1], &[]);
    }
    for _ in 0..100 {
        let messages = replica.list(pb::ListBucketsRequest::default()).await;
        assert_eq!((messages[0].buckets[0].level, messages[0].buckets[0].burst), (5.0, 10.0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ad_g2_two_hundred_thousand_keys_are_listed_whole_in_small_messages() {
    const KEYS: usize = 200_000;
    let rule = Rule { key: key(&[Source::Header("x-key".into())]), ..Rule::default() };
    let limits = LimitSet::new([Limit::new(limit("by-key", "10/h", 10, rule))]);
    let replica = Replica::start_with(limits, Vec::new(), Bounds::default()).await;
    let now = replica.clock.now();
    for n in 0..KEYS {
        let headers = vec![("x-key", format!("{n:064}"))];
        replica.limiter.decide(&Asked { ip: [127, 0, 0, 1], headers }, now);
    }

    // The data path meanwhile.
    let done = Arc::new(AtomicBool::new(false));
    let proxy = {
        let (done, limiter) = (Arc::clone(&done), Arc::clone(&replica.limiter));
        std::thread::spawn(move || {
            let mut took = Vec::new();
            let mut n = 0;
            while !done.load(Ordering::Relaxed) {
                n = (n + 7919) % KEYS;
                let headers = vec![("x-key", format!("{n:064}"))];
                let start = Instant::now();
                limiter.decide(&Asked { ip: [127, 0, 0, 1], headers }, now);
                took.push(start.elapsed());
                std::thread::sleep(Duration::from_micros(500));
            }
            took
        })
    };
    let messages = replica.list(pb::ListBucketsRequest::default()).await;
    done.store(true, Ordering::Relaxed);
    let mut took = proxy.join().unwrap();
    took.sort();
    assert!(took.len() > 100, "the data path hardly ran: {}", took.len());
    let p99 = took[took.len() * 99 / 100];
    assert!(p99 < Duration::from_millis(50), "p99 was {p99:?}");

    let largest = messages.iter().map(pb::ListBucketsResponse::encoded_len).max().unwrap();
    assert!(largest < 256 * 1024, "{largest} bytes");
    let buckets: Vec<_> = messages.into_iter().flat_map(|message| message.buckets).collect();
    assert_eq!(buckets.len(), KEYS);
    let ids: HashSet<&str> = buckets.iter().map(|b| b.id.as_str()).collect();
    assert_eq!(ids.len(), KEYS, "no bucket is told twice");
    assert!(buckets.iter().all(|b| b.key[0].text.len() == 64));
}

#[tokio::test]
async fn messages_stay_small_when_each_bucket_is_large() {
    let replica = Replica::start().await;
    replica.cluster.crowd.store(200, Ordering::SeqCst);
    for n in 0..250 {
        replica.ask([10, 0, 0, n], &[]);
    }
    let messages = replica.list(pb::ListBucketsRequest::default()).await;
    let sizes: Vec<usize> = messages.iter().map(pb::ListBucketsResponse::encoded_len).collect();
    assert!(sizes.iter().sum::<usize>() > 2_000_000, "{sizes:?}");
    assert!(sizes.iter().all(|size| *size < 256 * 1024), "{sizes:?}");
    let ids: HashSet<&str> =
        messages.iter().flat_map(|m| &m.buckets).map(|b| b.id.as_str()).collect();
    assert_eq!(ids.len(), 250);
    let told: usize = messages.iter().map(|m| m.buckets.len()).sum();
    assert_eq!(told, 250);
}

#[tokio::test]
async fn listings_at_the_same_time_are_few_and_a_dropped_one_makes_room() {
    // More than the windows of HTTP/2 hold, so that a listing nobody reads stays.
    let rule = Rule { key: key(&[Source::Header("x-key".into())]), ..Rule::default() };
    let limits = LimitSet::new([Limit::new(limit("by-key", "10/h", 10, rule))]);
    let replica = Replica::start_with(limits, Vec::new(), Bounds::default()).await;
    for n in 0..30_000 {
        replica.ask([127, 0, 0, 1], &[("x-key", &format!("{n:064}"))]);
    }
    let mut client = replica.client().await;
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(client.list_buckets(pb::ListBucketsRequest::default()).await.unwrap());
    }
    let status = client.list_buckets(pb::ListBucketsRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    held.pop();
    let again = async {
        while client.list_buckets(pb::ListBucketsRequest::default()).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), again).await.unwrap();
}

#[tokio::test]
async fn peers_are_listed_with_this_replica() {
    let replica = Replica::with_peers().await;
    let answer = replica.client().await.list_peers(pb::ListPeersRequest {}).await.unwrap();
    let answer = answer.into_inner();
    let this = answer.this.unwrap();
    assert_eq!((this.incarnation, this.name.as_str()), (ME.to_string(), "pod-a"));
    assert!(this.joined);
    assert_eq!((this.unsent, this.unsent_micros), (1.5, 1_500_000));
    assert_eq!(this.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(answer.listed_addresses, 3);
    let [live, lost] = &answer.peers[..] else { panic!("{:?}", answer.peers) };
    assert_eq!((live.state(), live.connected), (pb::PeerState::Live, true));
    assert_eq!((seconds(live.received_ago), seconds(live.sent_ago)), (0.12, 0.04));
    assert_eq!((seconds(live.round_trip), live.pending_buckets), (0.0015, 7));
    assert_eq!(live.mismatches, ["per-client: rate 5/s here, 6/s there"]);
    assert_eq!((lost.state(), lost.connected), (pb::PeerState::Suspect, false));
}

#[tokio::test]
async fn a_stopped_mesh_is_unavailable_and_limits_still_answer() {
    let replica = Replica::start().await;
    replica.ask([127, 0, 0, 1], &[]);
    replica.cluster.stopped.store(true, Ordering::SeqCst);
    let status = replica.get("per-client", &["127.0.0.1"]).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    let mut client = replica.client().await;
    let status = client.list_peers(pb::ListPeersRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    let mut stream =
        client.list_buckets(pb::ListBucketsRequest::default()).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap_err().code(), Code::Unavailable);
    assert!(client.list_limits(pb::ListLimitsRequest {}).await.is_ok());
}

#[tokio::test]
async fn with_a_token_file_every_call_but_health_needs_the_token() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    fs::write(&path, "first-token-of-all\n").unwrap();
    let guard = |server: AdminServer| server.with_token(&path).unwrap();
    let replica = Replica::start_guarded(limit_set(), Vec::new(), guard, |service| service).await;
    let mut client = replica.client().await;
    let mut ask = async |token: Option<&str>| {
        let mut request = tonic::Request::new(pb::ListLimitsRequest::default());
        if let Some(token) = token {
            let value = format!("Bearer {token}").parse().unwrap();
            request.metadata_mut().insert("authorization", value);
        }
        client.list_limits(request).await.map(|_| ()).map_err(|status| status.code())
    };
    assert_eq!(ask(None).await, Err(Code::Unauthenticated));
    assert_eq!(ask(Some("another-token-of-all")).await, Err(Code::Unauthenticated));
    assert_eq!(ask(Some("first-token-of-all")).await, Ok(()));
    // The kubelet has no token.
    let mut health = replica.health_client().await;
    health.check(HealthCheckRequest::default()).await.unwrap();

    // Replaced: the new one counts, and the old one no more. Unsound: it stays.
    fs::write(&path, "second-token-of-all\n").unwrap();
    until("the new token counts", async || ask(Some("second-token-of-all")).await.is_ok()).await;
    assert_eq!(ask(Some("first-token-of-all")).await, Err(Code::Unauthenticated));
    fs::write(&path, "short").unwrap();
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    assert_eq!(ask(Some("second-token-of-all")).await, Ok(()));
}

#[tokio::test]
async fn health_follows_readiness_and_the_drain() {
    let replica = Replica::start().await;
    let mut health = replica.health_client().await;
    let ask = |service: &str| HealthCheckRequest { service: service.into() };
    let mut watch = health.watch(ask("")).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    replica.health.set_serving(true).await;
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    let status = health.check(ask("")).await.unwrap().into_inner().status();
    assert_eq!(status, ServingStatus::Serving);

    replica.control.as_ref().unwrap().advance(Stage::Announcing);
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    replica.health.set_serving(true).await;
    let status = health.check(ask("")).await.unwrap().into_inner().status();
    assert_eq!(status, ServingStatus::NotServing, "leaving is for good");
    let admin = health.check(ask("tidegate.admin.v1.Admin")).await.unwrap().into_inner();
    assert_eq!(admin.status(), ServingStatus::Serving, "it still answers");
    assert_eq!(health.check(ask("no.such")).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn it_answers_while_draining_and_open_streams_do_not_hold_up_its_end() {
    let mut replica = Replica::start().await;
    let mut health = replica.health_client().await;
    let mut watch =
        health.watch(HealthCheckRequest { service: String::new() }).await.unwrap().into_inner();
    watch.message().await.unwrap().unwrap();
    let mut client = replica.client().await;

    replica.control.as_ref().unwrap().advance(Stage::Closing);
    assert!(client.list_limits(pb::ListLimitsRequest {}).await.is_ok());
    replica.client().await.list_limits(pb::ListLimitsRequest {}).await.unwrap();

    replica.control.take();
    let end = tokio::time::timeout(Duration::from_secs(5), &mut replica.server);
    end.await.expect("the server ends although a stream is open").unwrap();
    while let Ok(Some(_)) = watch.message().await {}
    assert!(client.list_limits(pb::ListLimitsRequest {}).await.is_err());
}

#[tokio::test]
async fn dropping_the_server_cuts_its_connections() {
    let replica = Replica::start().await;
    let mut health = replica.health_client().await;
    let mut watch =
        health.watch(HealthCheckRequest { service: String::new() }).await.unwrap().into_inner();
    watch.message().await.unwrap().unwrap();
    replica.server.abort();
    let cut = async { while let Ok(Some(_)) = watch.message().await {} };
    tokio::time::timeout(Duration::from_secs(5), cut).await.expect("the open stream is cut");
}

#[tokio::test]
async fn se_g8_connections_that_never_speak_are_closed_and_others_are_served() {
    let bounds = Bounds { preface: Duration::from_millis(300), ..Bounds::default() };
    let replica = Replica::start_with(limit_set(), Vec::new(), bounds).await;
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(TcpStream::connect(replica.address).await.unwrap());
    }
    let half = TcpStream::connect(replica.address).await.unwrap();
    half.writable().await.unwrap();
    half.try_write(b"PRI * HTTP/2").unwrap();
    silent.push(half);
    let mut client = replica.client().await;
    client.list_limits(pb::ListLimitsRequest {}).await.unwrap();
    for mut stream in silent {
        let closed = async {
            let mut buffer = [0; 64];
            // The server may send its own first frames before it gives up.
            while stream.read(&mut buffer).await.is_ok_and(|n| n > 0) {}
        };
        tokio::time::timeout(Duration::from_secs(5), closed).await.expect("it is closed");
    }
    client.list_limits(pb::ListLimitsRequest {}).await.unwrap();
}

#[tokio::test]
async fn connections_are_bounded_and_a_freed_place_is_taken() {
    let bounds =
        Bounds { connections: 2, preface: Duration::from_millis(300), ..Bounds::default() };
    let replica = Replica::start_with(limit_set(), Vec::new(), bounds).await;
    let silent =
        [TcpStream::connect(replica.address).await, TcpStream::connect(replica.address).await];
    // Served once the silent ones have been closed.
    let mut client = replica.client().await;
    let answer = client.list_limits(pb::ListLimitsRequest {});
    tokio::time::timeout(Duration::from_secs(5), answer).await.unwrap().unwrap();
    drop(silent);
}

#[tokio::test]
async fn reflection_lists_what_is_served_and_describes_it() {
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};
    use tonic_reflection::pb::v1alpha;
    let replica = Replica::start().await;
    let channel = replica.channel().await;
    let mut client = ServerReflectionClient::new(channel.clone());
    let mut answers = Vec::new();
    for question in [
        MessageRequest::ListServices(String::new()),
        MessageRequest::FileContainingSymbol("tidegate.admin.v1.Admin".into()),
        MessageRequest::FileByFilename("google/protobuf/duration.proto".into()),
    ] {
        let request =
            ServerReflectionRequest { host: String::new(), message_request: Some(question) };
        let stream = client.server_reflection_info(tokio_stream::once(request)).await.unwrap();
        let answer: ServerReflectionResponse =
            stream.into_inner().message().await.unwrap().unwrap();
        answers.push(answer.message_response.unwrap());
    }
    let MessageResponse::ListServicesResponse(services) = &answers[0] else {
        panic!("{:?}", answers[0])
    };
    let mut names: Vec<&str> = services.service.iter().map(|s| s.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
            "tidegate.admin.v1.Admin",
        ]
    );
    for answer in &answers[1..] {
        assert!(matches!(answer, MessageResponse::FileDescriptorResponse(_)), "{answer:?}");
    }

    let mut client = v1alpha::server_reflection_client::ServerReflectionClient::new(channel);
    let question = v1alpha::server_reflection_request::MessageRequest::ListServices(String::new());
    let request =
        v1alpha::ServerReflectionRequest { host: String::new(), message_request: Some(question) };
    let stream = client.server_reflection_info(tokio_stream::once(request)).await.unwrap();
    assert!(stream.into_inner().message().await.unwrap().is_some());
}

#[tokio::test]
async fn an_unknown_service_is_unimplemented() {
    use tidegate::wire::tidegate::peer::v1 as peer;
    let replica = Replica::start().await;
    let url = format!("http://{}", replica.address);
    let mut client = peer::replication_client::ReplicationClient::connect(url).await.unwrap();
    let status = client.exchange(tokio_stream::empty()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
}

#[test]
fn a_port_in_use_is_named() {
    let (_held, address) = AdminServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let error = AdminServer::bind(address.into()).unwrap_err();
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[tokio::test]
async fn the_program_prints_buckets_as_a_table() {
    let replica = Replica::with_peers().await;
    for _ in 0..12 {
        replica.ask([203, 0, 113, 9], &[]);
    }
    replica.ask([203, 0, 113, 7], &[]);
    let text = replica.tidegate(&["buckets", "list"]).await.unwrap();
    let (text, known) = text.split_once("\n\n").unwrap();
    assert_eq!(known, "2 bucket(s); up to 120ms old, 1 live peer(s); 1 peer(s) are not heard\n");
    let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(
        lines,
        [
            "LIMIT KEY LEVEL BURST RATE NEXT FULL PAUSED ADMITTED REFUSED SPENT",
            "per-client 203.0.113.7 199 200 1000/min now 60ms no 1 0 1",
            "per-client 203.0.113.9 0 10 60/min 1s 10s no 10 2 10",
        ]
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
    );
    // Numbers end where their header ends.
    let ends: HashSet<usize> =
        text.lines().map(|l| l.find(" REFUSED").map_or(0, |i| i + 8)).filter(|i| *i > 0).collect();
    let end = *ends.iter().next().unwrap();
    assert!(text.lines().skip(1).all(|l| l.as_bytes()[end - 1].is_ascii_digit()), "{text}");

    for (filter, count) in [
        (&["--not-full", "--max", "1"][..], 1),
        (&["--prefix", "203.0.113.9"], 1),
        (&["--limit", "per-client"], 2),
        (&["--limit", "tenants"], 0),
    ] {
        let text = replica.tidegate(&[&["buckets", "list"], filter].concat()).await.unwrap();
        let (table, known) = text.split_once("\n\n").unwrap();
        assert_eq!(table.lines().count(), 1 + count, "{text}");
        assert!(known.starts_with(&format!("{count} bucket(s); up to 120ms old")), "{text}");
    }
}

#[tokio::test]
async fn the_program_shows_one_bucket() {
    let replica = Replica::with_peers().await;
    replica.ask([203, 0, 113, 9], &[]);
    let text = replica.tidegate(&["buckets", "get", "per-client", "203.0.113.9"]).await.unwrap();
    for line in [
        "limit          per-client",
        "key            203.0.113.9",
        "level          9 of 10",
        "rate           60/min",
        "next token     now",
        "full           1s",
        "admitted here  1",
        "refused here   0",
        "paused         no",
        "knowledge      up to 120ms old, 1 live peer(s); 1 peer(s) are not heard",
        "01010101010101010101010101010101  pod-a      1  this replica",
    ] {
        assert!(text.lines().any(|l| l == line), "`{line}` is not in\n{text}");
    }

    let json = replica.tidegate(&["buckets", "list", "-o", "json"]).await.unwrap();
    let list: serde_json::Value = serde_json::from_str(&json).unwrap();
    let id = list[0]["id"].as_str().unwrap();
    let json = replica.tidegate(&["buckets", "get", "--id", id, "-o", "json"]).await.unwrap();
    let bucket: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(bucket, list[0], "get and list say the same");
    let fields: Vec<&String> = bucket.as_object().unwrap().keys().collect();
    assert_eq!(
        fields,
        [
            "limit",
            "id",
            "key",
            "key_known",
            "level",
            "level_micro_tokens",
            "burst",
            "burst_micro_tokens",
            "rate",
            "next_token_seconds",
            "full_seconds",
            "spent",
            "admitted",
            "refused",
            "waiting",
            "awaited",
            "paused_seconds",
            "unsent",
            "heard_seconds_ago",
            "knowledge",
        ]
    );
    assert_eq!(bucket["level"], 9.0);
    assert_eq!(bucket["rate"]["period_seconds"], 60.0);
    assert_eq!(bucket["key"][0]["kind"], "address");
    assert_eq!(bucket["knowledge"]["age_seconds"], 0.12);
    assert_eq!(bucket["spent"][0]["is_self"], true);
    assert_eq!(bucket["heard_seconds_ago"], serde_json::Value::Null);
}

#[tokio::test]
async fn the_program_prints_limits_and_peers() {
    let replica = Replica::with_peers().await;
    let text = replica.tidegate(&["limits"]).await.unwrap();
    let tenants = text.lines().find(|l| l.starts_with("tenants")).unwrap();
    let words: Vec<&str> = tenants.split_whitespace().collect();
    assert_eq!(
        words.join(" "),
        "tenants 5/10s 5 1 header:x-tenant,header:authorization shared shadow no 0 - no 0 \
         path /api/, header x-kind=tenant except (client 10.1.0.0/16)"
    );
    let json = replica.tidegate(&["limits", "-o", "json"]).await.unwrap();
    let limits: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(limits.as_array().unwrap().len(), 3);
    assert_eq!(limits[1]["mode"], "shadow");
    assert_eq!(limits[1]["key"][1]["secret"], true);

    let text = replica.tidegate(&["peers"]).await.unwrap();
    assert!(!text.contains('\u{1b}'), "a peer's name cannot move the cursor");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(lines[1].starts_with("pod-a") && lines[1].ends_with("this"), "{text}");
    let words: Vec<&str> = lines[2].split_whitespace().collect();
    assert_eq!(words[3..8], ["live", "120ms", "40ms", "2ms", "7"], "{text}");
    assert!(lines[3].contains("suspect, no session"), "{text}");
    let json = replica.tidegate(&["peers", "-o", "json"]).await.unwrap();
    let peers: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(peers["this"]["name"], "pod-a");
    assert_eq!(peers["peers"][1]["state"], "suspect");
    assert_eq!(peers["peers"][0]["round_trip_seconds"], 0.0015);
}

#[tokio::test]
async fn the_program_says_what_went_wrong_by_its_exit_status() {
    let replica = Replica::start().await;
    replica.ask([127, 0, 0, 1], &[]);
    for (args, code, says) in [
        (&["buckets", "get", "no-such", "x"][..], 1, "there is no limit `no-such`"),
        (&["buckets", "get", "per-client", "127.0.0.9"], 1, "full"),
        (&["buckets", "get", "per-client"], 2, "key.parts"),
        (&["buckets", "get", "--id", "zz"], 2, "id: "),
        (&["buckets", "list", "--limit", "no-such"], 1, "no-such"),
    ] {
        let error = replica.tidegate(args).await.unwrap_err();
        assert_eq!(error.exit() as u8, code, "{args:?}: {error}");
        assert!(error.to_string().contains(says), "{error}");
    }
    replica.cluster.stopped.store(true, Ordering::SeqCst);
    let error = replica.tidegate(&["peers"]).await.unwrap_err();
    assert_eq!(error.exit() as u8, 69, "{error}");

    // Bound, so that nobody else gets the port, but not listening.
    let held = TcpSocket::new_v4().unwrap();
    held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = held.local_addr().unwrap();
    for args in [&["limits"][..], &["peers"], &["buckets", "list"], &["buckets", "get", "a", "b"]] {
        let error = run(args, Some(address)).await.unwrap_err();
        assert_eq!(error.exit() as u8, 69, "{error}");
        let text = error.to_string();
        assert!(text.contains(&address.to_string()) && text.contains("hint: "), "{text}");
        assert!(text.contains("refused"), "{text}");
    }
}

#[test]
fn arguments_that_make_no_sense_are_usage_errors() {
    for args in [
        &["buckets"][..],
        &["buckets", "get"],
        &["buckets", "get", "limit", "key", "--id", "00"],
        &["buckets", "list", "--max", "0"],
        &["buckets", "list", "-o", "xml"],
        &["peers", "--admin", "nowhere"],
        &["limits", "extra"],
    ] {
        let words = ["tidegate"].into_iter().chain(args.iter().copied());
        let error = Program::try_parse_from(words).err();
        let error = error.unwrap_or_else(|| panic!("{args:?} is taken"));
        assert_eq!(error.exit_code(), 2, "{args:?}");
    }
}
