//! App (layer 7): the composition root.
//!
//! [`App::bind`] makes every part and binds every socket, so that an address in
//! use is an error before anything runs; [`App::run`] starts the parts, waits for
//! the word to leave, and takes them down in order: readiness off, serve on
//! while endpoints notice, no new connections, finish what runs, tell the peers,
//! end.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use tokio::sync::{mpsc, watch};
use tracing::{error, info, warn};

use crate::admin::{self, AdminServer, AdminService, Configuration, HttpServer, Pages, Status};
use crate::config::{Config, Source, Watch, reload::Status as ConfigStatus};
use crate::discovery::{self, Discovery};
use crate::peer::{self, Mesh, MeshHandle, Replica, Surroundings};
use crate::proxy::{self, Proxy};
use crate::replication::{Companion, ReplicatedLimiter};
use crate::runtime::{
    Drain, DrainControl, Failure, Gate, Hangups, OnExit, Readiness, Stage, Supervisor,
};
use crate::telemetry::{self, log};
use crate::time::Clock;

mod cluster;
mod metrics;
mod reload;

use cluster::MeshCluster;
use reload::{Reload, Report};

/// How often full and idle buckets are looked for, at most.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// How long the last tasks may take once everything is told to end.
const LAST_TASKS: Duration = Duration::from_millis(500);

/// What does not come from the configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads of the data path.
    pub workers: usize,
    /// A label for people, such as the pod's name.
    pub name: String,
    /// The address at which peers reach this replica, if that is known.
    pub ip: Option<IpAddr>,
    /// Addresses of peers in place of discovery, for several replicas in one
    /// process.
    pub addresses: Option<watch::Receiver<BTreeSet<SocketAddr>>>,
}

/// Where the sockets are bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Requests.
    pub proxy: SocketAddr,
    /// Other replicas; none without peers.
    pub peer: Option<SocketAddr>,
    /// Operators, over gRPC.
    pub admin: SocketAddr,
    /// Probes and metrics, over HTTP.
    pub telemetry: SocketAddr,
}

/// What others may hold of an app while it runs. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Handle {
    /// The mesh.
    pub mesh: MeshHandle,
    /// The limiter.
    pub limiter: Arc<ReplicatedLimiter>,
    /// What the proxy counts.
    pub proxy: proxy::Metrics,
    /// Which gates are still shut.
    pub readiness: Readiness,
    /// How the configuration came about.
    pub config: watch::Receiver<ConfigStatus>,
}

/// A replica whose sockets are bound and that does not serve yet.
pub struct App {
    config: Arc<Config>,
    clock: Clock,
    handle: Handle,
    proxy: Proxy<Companion>,
    mesh: Mesh,
    discovery: Option<Discovery>,
    addresses: watch::Sender<BTreeSet<SocketAddr>>,
    admin: AdminServer,
    http: HttpServer,
    metrics: telemetry::Metrics,
    supervisor: Supervisor,
    failures: mpsc::UnboundedReceiver<Failure>,
    gates: Gates,
    name: String,
    file_name: String,
    report: Report,
    file: Option<(Watch, Hangups)>,
    log: Option<log::Control>,
}

struct Gates {
    start: Gate,
    join: Gate,
}

impl App {
    /// Makes every part and binds every socket.
    ///
    /// # Errors
    /// If a socket cannot be bound, which the error names, or the system has no
    /// random bits.
    pub fn bind(config: Config, options: Options) -> anyhow::Result<(Self, Addresses)> {
        let clock = Clock::monotonic();
        let (supervisor, failures) = Supervisor::new();
        let limits = config.limits();
        let mut metrics = telemetry::Metrics::new();
        let proxy_metrics = proxy::Metrics::register(metrics.registry(), &limits);
        let limiter =
            ReplicatedLimiter::new(limits, config.limiter.max_buckets, Companion::default());
        let limiter = Arc::new(limiter.with_crowding(config.limiter.crowding()));
        metrics::register(metrics.registry(), &limiter);
        metrics::register_tasks(metrics.registry(), supervisor.census());
        let report = Report::register(metrics.registry(), &config);

        let (http, telemetry_address) =
            HttpServer::bind(config.telemetry.listen).context("telemetry")?;
        let (mut admin, admin_address) = AdminServer::bind(config.admin.listen).context("admin")?;
        if let Some(path) = &config.admin.token_file {
            admin = admin.with_token(path).context("admin")?;
        }
        let admin_metrics = admin::Metrics::register(metrics.registry());
        if let Some(files) = &config.admin.tls {
            admin = admin.with_tls(files.clone(), admin_metrics).context("admin")?;
        }
        let (proxy, proxy_address) = Proxy::bind(
            config.proxy.clone(),
            Arc::clone(&limiter),
            clock.clone(),
            proxy_metrics.clone(),
            options.workers,
        )
        .context("proxy")?;
        let proxy = proxy
            .with_egress(&config.upstreams, &config.egress)
            .context("upstreams")?
            .with_access_log(config.telemetry.access_log);

        let replica = Replica::try_new(options.name.clone(), options.ip)
            .map_err(|error| anyhow!("the system gives no random bits: {error}"))?;
        let discovery = match (&config.replication.peers, &options.addresses) {
            (Some(peers), None) => Some(Discovery::new(
                peers,
                config.replication.listen.addr().port(),
                config.replication.resolver,
                clock.clone(),
                discovery::Metrics::register(metrics.registry()),
            )),
            (Some(_) | None, _) => None,
        };
        let (addresses, found) = watch::channel(BTreeSet::new());
        let finder = discovery.as_ref().map(Discovery::handle);
        let surroundings = Surroundings {
            clock: clock.clone(),
            supervisor: supervisor.clone(),
            addresses: options.addresses.unwrap_or(found),
            refresh: Arc::new(move || {
                if let Some(finder) = &finder {
                    finder.refresh();
                }
            }),
            metrics: peer::Metrics::register(metrics.registry()),
        };
        let limiter_of_mesh = Arc::clone(&limiter);
        let (mesh, peer_address) = if config.replication.peers.is_some() {
            let (mesh, address) =
                Mesh::bind(&config.replication, &replica, limiter_of_mesh, surroundings)
                    .context("replication")?;
            (mesh, Some(address))
        } else {
            (Mesh::alone(&config.replication, &replica, limiter_of_mesh, surroundings), None)
        };

        let readiness = Readiness::new();
        let gates = Gates { start: readiness.gate("start"), join: readiness.gate("join") };
        let handle = Handle {
            mesh: mesh.handle(),
            limiter,
            proxy: proxy_metrics,
            readiness,
            config: report.status(),
        };
        let bound = Addresses {
            proxy: proxy_address,
            peer: peer_address,
            admin: admin_address,
            telemetry: telemetry_address,
        };
        let app = Self {
            config: Arc::new(config),
            clock,
            handle,
            proxy,
            mesh,
            discovery,
            addresses,
            admin,
            http,
            metrics,
            supervisor,
            failures,
            gates,
            name: options.name,
            file_name: String::new(),
            report,
            file: None,
            log: None,
        };
        Ok((app, bound))
    }

    /// Follows the file at `path`, from which the configuration was read: its
    /// changes take effect as [`config::reload`](crate::config::reload) says,
    /// within a few seconds, and at once on SIGHUP.
    ///
    /// # Errors
    /// If SIGHUP cannot be listened for.
    pub fn following(mut self, path: impl Into<PathBuf>) -> anyhow::Result<Self> {
        let hangups = Hangups::listen().context("cannot listen for SIGHUP")?;
        let path = path.into();
        self.file_name = path.display().to_string();
        let hash = self.config.hash().unwrap_or_default();
        self.file = Some((Watch::new(Source::new(path), hash), hangups));
        Ok(self)
    }

    /// The same, whose operators can change what is logged.
    #[must_use]
    pub fn with_log(self, log: log::Control) -> Self {
        Self { log: Some(log), ..self }
    }

    /// What others may hold of it.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves until `stop` gives a reason to leave, then leaves in order. A second
    /// reason ends it at once.
    ///
    /// # Errors
    /// If a task without which it cannot go on has ended, a thread cannot be
    /// started, or a second reason came before it had left.
    pub async fn run(self, mut stop: mpsc::Receiver<&'static str>) -> anyhow::Result<()> {
        let (control, drain) = DrainControl::new();
        let Self { config, handle, supervisor, mut failures, .. } = self;
        let Gates { start, join } = self.gates;

        let peers = Arc::new(Mutex::new(Vec::new()));
        let pages = pages(&self.name, &self.clock, &handle, self.metrics, Arc::clone(&peers));
        spawn_fallible(&supervisor, "telemetry", self.http.run(pages, drain.clone()));
        let cluster = MeshCluster::new(handle.mesh.clone(), self.name, &config.replication.group);
        let service = AdminService::new(Arc::clone(&handle.limiter), cluster, self.proxy.preview())
            .with_log(self.log)
            .with_configuration(configuration(handle.config.clone(), self.file_name));
        let health = self.admin.health();
        spawn_fallible(&supervisor, "admin", self.admin.run(service, drain.clone()));
        supervisor.spawn("mesh", OnExit::Fail, self.mesh.run(drain.clone()));
        if let Some(discovery) = self.discovery {
            let found = discovery.handle().peers();
            supervisor.spawn("discovery", OnExit::Fail, discovery.run(drain.clone()));
            supervisor.spawn("addresses", OnExit::Ignore, forward(found, self.addresses));
        }
        supervisor.spawn("peers by state", OnExit::Ignore, watch_peers(handle.mesh.clone(), peers));
        let idle = config.limiter.idle_expiry;
        let sweeper = sweep(Arc::clone(&handle.limiter), self.clock.clone(), idle, drain.clone());
        supervisor.spawn("sweeper", OnExit::Fail, sweeper);

        if let Some((file, hangups)) = self.file {
            let reload = Reload {
                started: Arc::clone(&config),
                limiter: Arc::clone(&handle.limiter),
                tuner: self.proxy.tuner(),
                mesh: handle.mesh.clone(),
                clock: self.clock.clone(),
                report: self.report,
            };
            supervisor.spawn("reload", OnExit::Fail, reload.run(file, hangups, drain.clone()));
        }
        if let Some(following) = self.proxy.follow_certificate(&drain) {
            supervisor.spawn("proxy certificate", OnExit::Ignore, following);
        }
        for following in self.proxy.follow_files(&drain) {
            supervisor.spawn("upstream files", OnExit::Ignore, following);
        }
        let proxy = self.proxy.start(&supervisor, drain.clone()).context("proxy")?;
        start.open();
        let mesh = handle.mesh.clone();
        supervisor.spawn("join", OnExit::Ignore, async move {
            if mesh.joined().await.is_ok() {
                join.open();
                health.set_serving(true).await;
                info!("ready");
            }
        });

        let reason = tokio::select! {
            reason = stop.recv() => reason.unwrap_or("the owner is gone"),
            failure = failures.recv() => {
                let failure = failure.map_or_else(String::new, |failure| failure.to_string());
                error!(%failure, "cannot go on");
                bail!("{failure}");
            }
            () = proxy.finished() => bail!("the proxy's threads have ended"),
        };
        let leaving = leave(reason, &config, &handle, &control, &proxy);
        tokio::select! {
            () = leaving => {}
            Some(again) = stop.recv() => {
                control.advance(Stage::Aborting);
                bail!("{again} again: left at once, with {} connections open", proxy.connections());
            }
        }
        control.advance(Stage::Aborting);
        // Whatever still runs now only has itself to end.
        let _ = tokio::time::timeout(LAST_TASKS, supervisor.finished()).await;
        info!("left");
        Ok(())
    }
}

/// Leaves in order.
async fn leave(
    reason: &str,
    config: &Config,
    handle: &Handle,
    control: &DrainControl,
    proxy: &proxy::Handle,
) {
    // Dropped without being opened: the gate stays shut.
    let _shut = handle.readiness.gate("draining");
    info!(reason, delay = ?config.proxy.drain_delay, "leaving: not ready, still serving");
    control.advance(Stage::Announcing);
    tokio::time::sleep(config.proxy.drain_delay).await;
    info!(connections = proxy.connections(), "no new connections");
    control.advance(Stage::Closing);
    if tokio::time::timeout(config.proxy.drain_timeout, proxy.finished()).await.is_err() {
        warn!(
            connections = proxy.connections(),
            timeout = ?config.proxy.drain_timeout,
            "some requests did not finish in time"
        );
    }
    handle.mesh.leave(reason).await;
}

fn spawn_fallible<E: std::fmt::Display>(
    supervisor: &Supervisor,
    name: &'static str,
    task: impl Future<Output = Result<(), E>> + Send + 'static,
) {
    supervisor.spawn(name, OnExit::Fail, async move {
        if let Err(error) = task.await {
            error!(task = name, %error, "task failed");
        }
    });
}

/// What operators are told of the configuration.
fn configuration(
    status: watch::Receiver<ConfigStatus>,
    file: String,
) -> impl Fn() -> Configuration + Send + Sync + 'static {
    move || {
        let status = status.borrow();
        Configuration {
            yaml: status.effective.clone(),
            hash: status.hash.clone().unwrap_or_default(),
            file: file.clone(),
            loaded_at: status.loaded_at,
            last_error: status.last_error.clone().zip(status.last_error_at),
            needs_restart: status.needs_restart.clone(),
        }
    }
}

fn pages(
    name: &str,
    clock: &Clock,
    handle: &Handle,
    metrics: telemetry::Metrics,
    peers: PeersByState,
) -> Pages {
    let (name, clock, started) = (name.to_owned(), clock.clone(), clock.now());
    let limiter = Arc::clone(&handle.limiter);
    Pages {
        readiness: handle.readiness.clone(),
        metrics: Arc::new(metrics),
        status: Arc::new(move || Status {
            replica: name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime: clock.now().since(started),
            limits: limiter.limits().len(),
            peers: peers.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }),
    }
}

type PeersByState = Arc<Mutex<Vec<(&'static str, usize)>>>;

/// Keeps the status page's count of peers; the page itself must not wait.
async fn watch_peers(mesh: MeshHandle, peers: PeersByState) {
    loop {
        let counted = mesh.inspect(|engine, now| {
            let mut counts: Vec<(&'static str, usize)> = Vec::new();
            for peer in engine.peers(now) {
                let state = peer.state.as_str();
                match counts.iter_mut().find(|(name, _)| *name == state) {
                    Some((_, count)) => *count += 1,
                    None => counts.push((state, 1)),
                }
            }
            counts
        });
        let Ok(counts) = counted.await else { return };
        *peers.lock().unwrap_or_else(PoisonError::into_inner) = counts;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Hands what discovery finds to the mesh.
async fn forward(
    mut found: watch::Receiver<discovery::PeerSet>,
    addresses: watch::Sender<BTreeSet<SocketAddr>>,
) {
    loop {
        let set = found.borrow_and_update().clone();
        if set.answered || !set.addresses.is_empty() {
            addresses.send_replace(set.addresses);
        }
        if found.changed().await.is_err() {
            return;
        }
    }
}

/// Drops the buckets that are full again and idle.
async fn sweep(limiter: Arc<ReplicatedLimiter>, clock: Clock, idle: Duration, drain: Drain) {
    let interval = (idle / 2).min(SWEEP_INTERVAL);
    loop {
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            () = drain.reached(Stage::Aborting) => return,
        }
        limiter.expire(idle, clock.now());
    }
}
