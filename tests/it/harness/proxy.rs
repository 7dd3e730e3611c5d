//! A proxy in this process.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use prometheus_client::registry::Registry;
use tidegate::limiter::{Alone, Crowding, Limit, LimitSet, Limiter};
use tidegate::proxy::{
    Config, EgressConfig, Handle, Metrics, Preview, Proxy, Tuner, UpstreamsConfig,
};
use tidegate::runtime::{DrainControl, Failure, Stage, Supervisor};
use tidegate::time::{Clock, Timestamp};
use tokio::sync::mpsc;

use super::{Connection, Upstream, limits::LimitBuilder};

/// How a proxy is to be.
pub struct Setup {
    config: Config,
    limits: Vec<Limit>,
    clock: Clock,
    workers: usize,
    crowding: Crowding,
    egress: (UpstreamsConfig, EgressConfig),
}

/// A running proxy; dropping it ends it.
pub struct TestProxy {
    pub address: SocketAddr,
    pub limiter: Arc<Limiter<Alone>>,
    pub handle: Handle,
    pub tuner: Tuner<Alone>,
    pub preview: Preview<Alone>,
    control: DrainControl,
    clock: Clock,
    registry: Registry,
    failures: Mutex<mpsc::UnboundedReceiver<Failure>>,
}

impl Setup {
    /// In front of `upstream`, with short timeouts.
    pub fn before(upstream: &Upstream) -> Self {
        Self::before_url(&format!("http://{}", upstream.address()))
    }

    /// In front of an upstream in the notation of the configuration.
    pub fn before_url(url: &str) -> Self {
        let mut config = Config::new(url.parse().unwrap());
        config.listen = "127.0.0.1:0".parse().unwrap();
        let (limits, clock) = (Vec::new(), Clock::monotonic());
        let (crowding, egress) = (Crowding::default(), Default::default());
        Self { config, limits, clock, workers: 1, crowding, egress }
    }

    /// By a file, in the notation of the configuration, of which `listen` is not
    /// looked at.
    pub fn of(text: &str) -> Self {
        Self::of_env(text, &|_| None)
    }

    /// The same in an environment.
    pub fn of_env(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Self {
        let config = tidegate::config::parse("test", text, env);
        let config = config.unwrap_or_else(|error| panic!("{error}"));
        let mut setup = Self::before_url("http://127.0.0.1:1");
        setup.limits = config.limits().iter().map(|(_, limit)| limit.clone()).collect();
        setup.egress = (config.upstreams, config.egress);
        setup.config = Config { listen: setup.config.listen, ..config.proxy };
        setup
    }

    /// Adds a limit.
    pub fn limit(mut self, limit: LimitBuilder) -> Self {
        self.limits.push(limit.build());
        self
    }

    /// Believes the forwarding fields of these networks.
    pub fn trusting(mut self, networks: &[&str]) -> Self {
        self.config.trusted_proxies = networks.iter().map(|net| net.parse().unwrap()).collect();
        self
    }

    /// Changes anything else.
    pub fn with(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// Lets time stand still until the test moves it.
    pub fn frozen(mut self) -> Self {
        self.clock = Clock::manual(Timestamp::from_millis(1_000_000));
        self
    }

    /// Bounds how many requests may wait.
    pub fn crowding(mut self, crowding: Crowding) -> Self {
        self.crowding = crowding;
        self
    }

    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Why the proxy cannot be made ready for its upstreams.
    pub fn bind_error(self) -> String {
        let mut registry = Registry::default();
        let limits = LimitSet::new(self.limits);
        let metrics = Metrics::register(&mut registry, &limits);
        let limiter = Arc::new(Limiter::new(limits, 1, Alone));
        let (proxy, _) = Proxy::bind(self.config, limiter, self.clock, metrics, 1).unwrap();
        proxy.with_egress(&self.egress.0, &self.egress.1).unwrap_err().to_string()
    }

    /// Starts the proxy.
    pub fn start(self) -> TestProxy {
        let limits = LimitSet::new(self.limits);
        let mut registry = Registry::with_prefix("tidegate");
        let metrics = Metrics::register(&mut registry, &limits);
        let limiter = Limiter::new(limits, 1_000_000, Alone).with_crowding(self.crowding);
        let limiter = Arc::new(limiter);
        let (proxy, address) = Proxy::bind(
            self.config,
            Arc::clone(&limiter),
            self.clock.clone(),
            metrics,
            self.workers,
        )
        .unwrap();
        let (upstreams, egress) = self.egress;
        let proxy = proxy.with_egress(&upstreams, &egress).unwrap();
        let (control, drain) = DrainControl::new();
        let (supervisor, failures) = Supervisor::new();
        let (tuner, preview) = (proxy.tuner(), proxy.preview());
        if let Some(following) = proxy.follow_certificate(&drain) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.unwrap();
            std::thread::spawn(move || runtime.block_on(following));
        }
        for following in proxy.follow_files(&drain) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.unwrap();
            std::thread::spawn(move || runtime.block_on(following));
        }
        let handle = proxy.start(&supervisor, drain).unwrap();
        let failures = Mutex::new(failures);
        TestProxy {
            address,
            limiter,
            handle,
            tuner,
            preview,
            control,
            clock: self.clock,
            registry,
            failures,
        }
    }
}

impl TestProxy {
    pub fn connect(&self) -> Connection {
        Connection::open(self.address)
    }

    pub fn connect_from(&self, from: [u8; 4]) -> Connection {
        Connection::open_from(from, self.address)
    }

    /// Sends `count` GETs one after another and returns their status codes.
    pub fn statuses(&self, count: usize, fields: &[(&str, &str)]) -> Vec<u16> {
        let mut connection = self.connect();
        (0..count).map(|_| connection.get_with("/", fields).status).collect()
    }

    /// Puts other limits in force.
    pub fn reload(&self, limits: impl IntoIterator<Item = LimitBuilder>) {
        let limits = LimitSet::new(limits.into_iter().map(LimitBuilder::build));
        self.limiter.reload(limits, self.clock.now()).unwrap();
    }

    /// Moves a frozen clock.
    pub fn advance(&self, by: Duration) {
        self.clock.set(self.clock.now().plus(by));
    }

    /// The first thread that failed, if one did.
    pub fn failure(&self) -> Option<Failure> {
        self.failures.lock().unwrap().try_recv().ok()
    }

    pub fn drain(&self, stage: Stage) {
        self.control.advance(stage);
    }

    /// The sample of a metric, labels included in its name.
    pub fn metric(&self, name: &str) -> f64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().unwrap()
    }

    /// The key of every bucket, as text, sorted.
    pub fn keys(&self) -> Vec<String> {
        let mut keys = Vec::new();
        self.limiter.store().for_each(|_, slot| {
            let key = slot.key().unwrap_or_default();
            let parts = tidegate::limiter::key::decode(key).unwrap();
            keys.push(parts.iter().map(ToString::to_string).collect::<Vec<_>>().join("|"));
        });
        keys.sort();
        keys
    }

    /// Micro-tokens spent in all buckets, less what was given back.
    pub fn spent(&self) -> u64 {
        let mut spent = 0;
        self.limiter.store().for_each(|_, slot| spent += slot.net());
        spent / 1_000_000
    }
}
