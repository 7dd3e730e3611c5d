//! A replica without a proxy: a limiter and its mesh on a runtime of their own,
//! so that killing it ends all its sockets at once, as the end of a process does.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use tidegate::discovery;
use tidegate::limiter::{
    Attributes, BucketId, Client, KeyBuf, KeyPart, Limit, LimitSet, LimitSpec, Quota, Rule, Source,
    Tokens,
};
use tidegate::peer::{Config, Mesh, MeshHandle, Metrics, Replica as Identity, Surroundings};
use tidegate::replication::{BucketView, Companion, Engine, PeerView, ReplicatedLimiter};
use tidegate::runtime::{DrainControl, Supervisor};
use tidegate::time::{Clock, Timestamp};
use tidegate::tls::Mutual;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::{PATIENCE, until};

/// How a replica is started.
#[derive(Clone, Debug)]
pub struct Spec {
    pub listen: SocketAddr,
    pub name: String,
    pub group: String,
    /// The rate of its one limit, called `per-key`.
    pub rate: String,
    /// Whether peers are configured, so that it waits for a snapshot.
    pub expects_peers: bool,
    pub join_timeout: Duration,
    /// Mutual TLS in place of plain text.
    pub tls: Option<Mutual>,
}

impl Spec {
    /// A replica on 127.0.0.1, in the group of this test, that expects peers.
    pub fn new(name: &str, rate: &str) -> Self {
        Self {
            listen: "127.0.0.1:0".parse().unwrap(),
            name: name.to_owned(),
            group: own_group(),
            rate: rate.to_owned(),
            expects_peers: true,
            join_timeout: Duration::from_millis(300),
            tls: None,
        }
    }

    pub fn at(mut self, listen: impl ToString) -> Self {
        self.listen = listen.to_string().parse().unwrap();
        self
    }
}

/// A group of the test that asks, named like its thread. The port of a replica
/// that was killed may become that of a replica in another test, to which its
/// former peers then speak.
pub fn own_group() -> String {
    std::thread::current().name().unwrap_or("test").to_owned()
}

/// A running replica. Dropping it kills it.
pub struct Replica {
    pub address: SocketAddr,
    pub mesh: MeshHandle,
    pub limiter: Arc<ReplicatedLimiter>,
    pub refreshes: Arc<AtomicUsize>,
    clock: Clock,
    addresses: watch::Sender<BTreeSet<SocketAddr>>,
    registry: Registry,
    _drain: DrainControl,
    runtime: Option<Runtime>,
}

impl Replica {
    /// A replica that knows `peers` from the start.
    pub async fn start(spec: Spec, peers: impl IntoIterator<Item = SocketAddr>) -> Self {
        let quota = {
            let rate: tidegate::limiter::Rate = spec.rate.parse().unwrap();
            Quota::try_new(rate, rate.tokens()).unwrap()
        };
        let limiter = Arc::new(ReplicatedLimiter::new(
            LimitSet::new([per_key("per-key", quota)]),
            100_000,
            Companion::default(),
        ));
        let clock = Clock::monotonic();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name(&spec.name)
            .enable_all()
            .build()
            .unwrap();
        let (supervisor, _failures) = Supervisor::new();
        let (addresses, known) = watch::channel(peers.into_iter().collect());
        let mut registry = Registry::default();
        let refreshes = Arc::new(AtomicUsize::new(0));
        let asked = Arc::clone(&refreshes);
        let surroundings = Surroundings {
            clock: clock.clone(),
            supervisor,
            addresses: known,
            refresh: Arc::new(move || {
                asked.fetch_add(1, Ordering::Relaxed);
            }),
            metrics: Metrics::register(&mut registry),
        };
        let config = Config {
            listen: spec.listen.into(),
            peers: spec.expects_peers.then(|| discovery::Config::Static(Vec::new())),
            group: spec.group,
            sync_interval: Duration::from_millis(20),
            join_timeout: spec.join_timeout,
            insecure: spec.tls.is_none(),
            tls: spec.tls,
            ..Config::default()
        };
        let identity = Identity::try_new(spec.name, None).unwrap();
        // The port of a replica that was just killed may take a moment.
        let mut bound = None;
        until("the peer listener is bound", async || {
            let limiter = Arc::clone(&limiter);
            bound = Mesh::bind(&config, &identity, limiter, surroundings.clone()).ok();
            bound.is_some()
        })
        .await;
        let (mesh, address) = bound.unwrap();
        let handle = mesh.handle();
        let (control, drain) = DrainControl::new();
        runtime.spawn(mesh.run(drain));
        Self {
            address,
            mesh: handle,
            limiter,
            refreshes,
            clock,
            addresses,
            registry,
            _drain: control,
            runtime: Some(runtime),
        }
    }

    /// What discovery says from now on.
    pub fn list(&self, addresses: impl IntoIterator<Item = SocketAddr>) {
        self.addresses.send_replace(addresses.into_iter().collect());
    }

    /// Sends `count` requests for `key`; returns how many were admitted.
    pub fn spend(&self, key: &str, count: usize) -> usize {
        (0..count)
            .filter(|_| self.limiter.decide(&Keyed(key), self.clock.now()).is_admitted())
            .count()
    }

    pub async fn look<R: Send + 'static>(
        &self,
        look: impl FnOnce(&Engine, Timestamp) -> R + Send + 'static,
    ) -> R {
        self.mesh.inspect(look).await.unwrap()
    }

    pub fn bucket_id(&self, key: &str) -> BucketId {
        let mut buf = KeyBuf::new();
        let limits = self.limiter.limits();
        let (_, limit) = limits.iter().next().unwrap();
        limit.rule().extract(&Keyed(key), &mut buf);
        limit.bucket_id(buf.as_bytes())
    }

    /// The bucket of `key` as this replica knows it; `None` is a full one.
    pub async fn bucket(&self, key: &str) -> Option<BucketView> {
        let id = self.bucket_id(key);
        self.look(move |engine, now| engine.bucket(id, now)).await
    }

    /// Tokens left for `key`, to the nearest one: refilling and averaging move
    /// small parts of a token.
    pub async fn remaining(&self, key: &str) -> u64 {
        let limits = self.limiter.limits();
        let burst = limits.iter().next().unwrap().1.default_quota().burst();
        let level = self.bucket(key).await.map_or(burst, |bucket| bucket.level);
        level.plus(Tokens::from_micros(Tokens::MICRO / 2)).whole()
    }

    pub async fn peers(&self) -> Vec<PeerView> {
        self.look(|engine, now| engine.peers(now)).await
    }

    /// How many peers there are a session with.
    pub async fn connected(&self) -> usize {
        self.peers().await.iter().filter(|peer| peer.connected).count()
    }

    pub async fn joined(&self) {
        tokio::time::timeout(Duration::from_secs(10), self.mesh.joined())
            .await
            .expect("not joined within 10 s")
            .unwrap();
    }

    /// The metrics as text.
    pub fn metrics(&self) -> String {
        let mut out = String::new();
        text::encode(&mut out, &self.registry).unwrap();
        out
    }

    /// The value of one sample, 0 if there is none.
    pub fn metric(&self, sample: &str) -> f64 {
        let text = self.metrics();
        let value = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse().unwrap())
    }

    /// How long its runtime worked so far, and how often it woke up.
    pub fn effort(&self) -> (Duration, u64) {
        let metrics = self.runtime.as_ref().unwrap().metrics();
        (metrics.worker_total_busy_duration(0), metrics.worker_park_count(0))
    }

    /// Ends it without a word.
    pub fn kill(self) {
        drop(self);
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Waits until each replica has a session with every other.
pub async fn meshed(replicas: &[&Replica]) {
    for replica in replicas {
        until("every pair has one session", async || {
            replica.connected().await == replicas.len() - 1
        })
        .await;
    }
}

/// Waits until all agree on what is left for `key`.
pub async fn agreed(replicas: &[&Replica], key: &str, remaining: u64) {
    about(replicas, key, remaining, 0).await;
}

/// Waits until all agree on what is left for `key`, give or take `slack`: while
/// several replicas spend at once, averaging compares levels of which none is
/// complete yet, and moves a few tokens.
pub async fn about(replicas: &[&Replica], key: &str, remaining: u64, slack: u64) {
    for (index, replica) in replicas.iter().enumerate() {
        let started = Instant::now();
        while replica.remaining(key).await.abs_diff(remaining) > slack {
            if started.elapsed() > PATIENCE {
                let bucket = replica.bucket(key).await;
                panic!("replica {index} does not come to {remaining} left for {key}: {bucket:#?}");
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// Waits until every replica knows what each spent for `key`, exactly.
pub async fn known(replicas: &[&Replica], key: &str, spent: &[u64]) {
    for (index, replica) in replicas.iter().enumerate() {
        let mut seen = Vec::new();
        let started = Instant::now();
        while seen != spent {
            assert!(started.elapsed() < PATIENCE, "replica {index} knows {seen:?} of {spent:?}");
            tokio::time::sleep(Duration::from_millis(2)).await;
            let bucket = replica.bucket(key).await;
            let each = bucket.iter().flat_map(|bucket| &bucket.spent);
            seen = each.map(|(_, micros)| micros / 1_000_000).collect();
            seen.sort_unstable();
        }
    }
}

/// A limit whose buckets are named by the header `x-key`.
pub fn per_key(name: &str, quota: Quota) -> Limit {
    let key = vec![KeyPart::new(Source::Header("x-key".to_owned()), false)];
    Limit::new(LimitSpec::new(name, Rule { key, ..Rule::default() }, quota))
}

/// A request of which only the header `x-key` matters.
struct Keyed<'a>(&'a str);

impl Attributes for Keyed<'_> {
    fn method(&self) -> &str {
        "GET"
    }

    fn path(&self) -> &[u8] {
        b"/"
    }

    fn host(&self) -> &str {
        ""
    }

    fn client(&self) -> Client {
        Client::new([127, 0, 0, 1].into(), 64)
    }

    fn header(&self, name: &str, each: &mut dyn FnMut(&[u8])) {
        if name == "x-key" {
            each(self.0.as_bytes());
        }
    }

    fn query(&self) -> &str {
        ""
    }
}
