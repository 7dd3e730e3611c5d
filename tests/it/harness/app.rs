//! Whole replicas in this process: everything that `tidegate run` starts, each on
//! a thread and runtime of its own, so that killing one ends all its sockets at
//! once, as the end of a process does.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc as channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tidegate::app::{Addresses, App, Options};
use tidegate::config::{self, Config};
use tidegate::wire::tidegate::admin::v1 as pb;
use tidegate::wire::tidegate::admin::v1::admin_client::AdminClient;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::dns::{DnsServer, Script};
use super::{Answer, Connection, Upstream};

/// Longer than anything that is waited for may take, lookups that back off to
/// five seconds included.
const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until `condition` holds.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What replicas share: a network of addresses that no other test uses, a DNS
/// server, an upstream, and the port at which they listen for each other.
pub struct Network {
    pub upstream: Upstream,
    pub dns: DnsServer,
    runtime: Runtime,
    network: [u8; 3],
    port: u16,
}

/// How a replica is to be.
pub struct Spec {
    limits: String,
    peers: bool,
    workers: usize,
    upstream: Option<SocketAddr>,
    join_timeout: &'static str,
    drain_delay: &'static str,
    more: String,
}

/// A running replica. Dropping it kills it.
pub struct Replica {
    pub addresses: Addresses,
    pub name: String,
    stop: mpsc::Sender<&'static str>,
    kill: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Option<anyhow::Result<()>>>>,
    runtime: tokio::runtime::Handle,
}

impl Network {
    /// A network whose DNS server knows no replica, with an upstream that answers
    /// everything.
    pub fn new() -> Self {
        Self::with_upstream(Upstream::start())
    }

    pub fn with_upstream(upstream: Upstream) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // By process and count, so that tests that run at the same time are in
        // different networks.
        let number = std::process::id() + 7919 * COUNT.fetch_add(1, Ordering::Relaxed);
        let network = [127, 64 + (number >> 8) as u8 % 128, number as u8];
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let dns = runtime.block_on(DnsServer::start(Script::NoSuchName));
        let ip = Ipv4Addr::new(network[0], network[1], network[2], 11);
        // Below the ports that an address with port 0 gets: another listener of a
        // replica would sooner or later be given a port from there.
        let port = (20_000..30_000).find(|port| TcpListener::bind((ip, *port)).is_ok()).unwrap();
        Self { upstream, dns, runtime, network, port }
    }

    /// The address of a host.
    pub fn ip(&self, host: u8) -> Ipv4Addr {
        let [a, b, c] = self.network;
        Ipv4Addr::new(a, b, c, host)
    }

    /// Where a replica on a host listens for the others.
    pub fn peer_address(&self, host: u8) -> SocketAddr {
        (self.ip(host), self.port).into()
    }

    /// The replicas that the DNS server knows from now on.
    pub fn list(&self, hosts: &[u8]) {
        let addresses = hosts.iter().map(|host| self.ip(*host).into()).collect();
        self.dns.set(Script::Addresses { addresses, ttl: 1 });
    }

    /// Waits for `count` more rounds of lookups in sum of all replicas.
    pub fn next_lookups(&mut self, count: usize) {
        self.runtime.block_on(self.dns.next_questions(count));
    }

    /// Starts a replica on a host.
    pub fn start(&self, host: u8, spec: &Spec) -> Replica {
        let config = config::parse("test", &self.yaml(host, spec), &|_| None);
        let config = config.unwrap_or_else(|error| panic!("{error}"));
        self.start_with(host, config, spec.workers)
    }

    /// Starts a replica of a configuration whose addresses are free ones.
    pub fn start_with(&self, host: u8, config: Config, workers: usize) -> Replica {
        let name = format!("replica-{host}");
        let options = Options { workers, name: name.clone(), ip: None, addresses: None };
        let (stop, stopped) = mpsc::channel(2);
        let (kill, killed) = oneshot::channel();
        let (bound_in, bound) = channel::channel();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let (app, addresses) = App::bind(config, options).unwrap();
                bound_in.send(addresses).unwrap();
                tokio::select! {
                    result = app.run(stopped) => Some(result),
                    _ = killed => None,
                }
            })
        });
        let addresses = bound.recv().expect("the replica could not be bound");
        let runtime = self.runtime.handle().clone();
        Replica { addresses, name, stop, kill: Some(kill), thread: Some(thread), runtime }
    }

    fn yaml(&self, host: u8, spec: &Spec) -> String {
        let (ip, port, dns) = (self.ip(host), self.port, self.dns.address());
        let upstream = spec.upstream.unwrap_or_else(|| self.upstream.address());
        let Spec { join_timeout, drain_delay, limits, .. } = spec;
        let replication = if spec.peers {
            format!(
                "replication:\n  listen: {ip}:{port}\n  peers: {{ dns: peers.test }}\n  \
                 resolver: {dns}\n  insecure: true\n  join_timeout: {join_timeout}\n"
            )
        } else {
            String::new()
        };
        format!(
            "proxy:\n  listen: {ip}:0\n  upstream: http://{upstream}\n  \
             drain_delay: {drain_delay}\n  drain_timeout: 20s\n\
             admin: {{ listen: '{ip}:0' }}\n\
             telemetry: {{ listen: '{ip}:0' }}\n\
             {replication}{limits}{}",
            spec.more
        )
    }
}

impl Spec {
    /// A replica with `limits`, each written as the configuration has it, that
    /// looks for peers.
    pub fn new<const N: usize>(limits: [&str; N]) -> Self {
        let mut text = "limits:\n".to_owned();
        for limit in limits {
            text += &format!("  - {{ {limit} }}\n");
        }
        Self {
            limits: text,
            peers: true,
            workers: 1,
            upstream: None,
            // Whoever has peers hears from them long before.
            join_timeout: "30s",
            drain_delay: "0s",
            more: String::new(),
        }
    }

    /// With these sections too.
    pub fn and(mut self, sections: &str) -> Self {
        self.more += sections;
        self
    }

    /// Without peers.
    pub fn alone(mut self) -> Self {
        self.peers = false;
        self
    }

    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    pub fn upstream(mut self, address: SocketAddr) -> Self {
        self.upstream = Some(address);
        self
    }

    pub fn join_timeout(mut self, text: &'static str) -> Self {
        self.join_timeout = text;
        self
    }

    pub fn drain_delay(mut self, text: &'static str) -> Self {
        self.drain_delay = text;
        self
    }
}

impl Replica {
    /// A connection to the proxy.
    pub fn connect(&self) -> Connection {
        Connection::open(self.addresses.proxy)
    }

    /// One GET over a connection of its own.
    pub fn get(&self, target: &str) -> Answer {
        self.connect().get(target)
    }

    /// Sends `count` GETs one after another over one connection; returns how many
    /// were admitted. Any answer but 200 and 429 is a failure.
    pub fn spend(&self, target: &str, count: usize) -> usize {
        let mut connection = self.connect();
        (0..count)
            .filter(|_| match connection.get(target).status {
                200 => true,
                429 => false,
                status => panic!("{} answered {status}", self.name),
            })
            .count()
    }

    /// One GET to the telemetry listener.
    pub fn telemetry(&self, target: &str) -> Answer {
        Connection::open(self.addresses.telemetry).get(target)
    }

    /// The gates of `/readyz` that are still shut.
    pub fn waiting_for(&self) -> Vec<String> {
        let answer = self.telemetry("/readyz");
        match answer.status {
            200 => Vec::new(),
            503 => answer.text().lines().map(str::to_owned).collect(),
            status => panic!("/readyz answered {status}"),
        }
    }

    pub fn ready(&self) {
        until(&format!("{} is ready", self.name), || self.waiting_for().is_empty());
    }

    /// The value of a sample of `/metrics`, labels included in its name; 0 if
    /// there is none.
    pub fn metric(&self, sample: &str) -> f64 {
        let answer = self.telemetry("/metrics");
        let value = answer.text().lines().find_map(|l| l.strip_prefix(sample)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse().unwrap())
    }

    /// How many requests of `limit` ended with `verdict`.
    pub fn requests(&self, limit: &str, verdict: &str) -> f64 {
        let labels = format!("limit=\"{limit}\",verdict=\"{verdict}\"");
        self.metric(&format!("tidegate_requests_total{{{labels}}}"))
    }

    /// A bucket as the admin gRPC shows it.
    pub fn bucket(&self, limit: &str, key: &[&str]) -> pb::Bucket {
        self.find_bucket(limit, key)
            .unwrap_or_else(|| panic!("{} has no bucket of {limit} for {key:?}", self.name))
    }

    /// The same, or `None` if the replica has not heard of the bucket.
    pub fn find_bucket(&self, limit: &str, key: &[&str]) -> Option<pb::Bucket> {
        let text = |part: &&str| pb::KeyValue {
            value: Some(pb::key_value::Value::Text((*part).to_owned())),
        };
        let key = pb::Key { parts: key.iter().map(text).collect() };
        let request = pb::GetBucketRequest {
            limit: limit.to_owned(),
            bucket: Some(pb::get_bucket_request::Bucket::Key(key)),
        };
        let answer = self
            .runtime
            .block_on(async { AdminClient::new(self.admin().await).get_bucket(request).await });
        match answer {
            Ok(answer) => Some(answer.into_inner().bucket.unwrap()),
            Err(status) if status.code() == tonic::Code::NotFound => None,
            Err(status) => panic!("{} answered {status:?}", self.name),
        }
    }

    /// Tokens left in a bucket of a limit that refills too slowly to matter.
    pub fn left(&self, limit: &str, key: &[&str]) -> i64 {
        let level = self.bucket(limit, key).level;
        assert!((level - level.round()).abs() < 0.01, "{level} is no whole number");
        level.round() as i64
    }

    /// Makes all buckets of a limit full again.
    pub fn reset(&self, limit: &str) {
        let bucket = Some(pb::reset_bucket_request::Bucket::All(true));
        let request = pb::ResetBucketRequest { limit: limit.to_owned(), bucket };
        self.runtime.block_on(async {
            AdminClient::new(self.admin().await).reset_bucket(request).await.unwrap();
        });
    }

    /// The mesh as the admin gRPC shows it.
    pub fn mesh(&self) -> pb::ListPeersResponse {
        self.runtime.block_on(async {
            let mut client = AdminClient::new(self.admin().await);
            client.list_peers(pb::ListPeersRequest {}).await.unwrap().into_inner()
        })
    }

    /// The peers that there is a session with.
    pub fn connected(&self) -> usize {
        self.mesh().peers.iter().filter(|peer| peer.connected).count()
    }

    /// What `grpc.health.v1` says of the whole server.
    pub fn health(&self) -> ServingStatus {
        self.runtime.block_on(async {
            let mut client = HealthClient::new(self.admin().await);
            let request = HealthCheckRequest { service: String::new() };
            client.check(request).await.unwrap().into_inner().status()
        })
    }

    async fn admin(&self) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.addresses.admin)).unwrap();
        endpoint.timeout(PATIENCE).connect().await.unwrap()
    }

    /// Asks it to leave, for `reason`.
    pub fn stop(&self, reason: &'static str) {
        self.stop.try_send(reason).unwrap();
    }

    /// Waits until it has left; returns how.
    pub fn left_with(mut self) -> anyhow::Result<()> {
        let thread = self.thread.take().unwrap();
        until(&format!("{} leaves", self.name), || thread.is_finished());
        thread.join().unwrap().expect("it was killed")
    }

    /// Ends it without a word to anyone, and returns when its ports are free.
    pub fn kill(self) {
        drop(self);
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        let (Some(kill), Some(thread)) = (self.kill.take(), self.thread.take()) else { return };
        // It may have ended by itself.
        let _ = kill.send(());
        let ended = thread.join();
        if std::thread::panicking() {
            return;
        }
        assert!(ended.is_ok(), "{} panicked", self.name);
        until(&format!("{} is gone", self.name), || {
            TcpStream::connect(self.addresses.proxy).is_err()
        });
    }
}

/// Waits until each replica is ready and has a session with every other.
pub fn meshed(replicas: &[&Replica]) {
    for replica in replicas {
        replica.ready();
        let what = format!("{} meets all others", replica.name);
        until(&what, || replica.connected() == replicas.len() - 1);
    }
}

/// Waits until all agree on what is left. A replica that has not heard of the
/// bucket yet does not agree.
pub fn agreed(replicas: &[&Replica], limit: &str, key: &[&str], left: i64) {
    for replica in replicas {
        let started = Instant::now();
        loop {
            let bucket = replica.find_bucket(limit, key);
            let seen = bucket.as_ref().map(|bucket| bucket.level.round() as i64);
            if seen == Some(left) {
                break;
            }
            assert!(
                started.elapsed() < PATIENCE,
                "{} knows of {seen:?} tokens left, not of {left}: {:#?}",
                replica.name,
                bucket.map(|bucket| bucket.spent)
            );
        }
    }
}
