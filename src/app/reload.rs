//! Reload: a changed file becomes the configuration in force, or none of it
//! does.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::config::reload::Status;
use crate::config::{Config, Look, Reading, Watch};
use crate::peer::MeshHandle;
use crate::proxy::Tuner;
use crate::replication::{Companion, ReplicatedLimiter};
use crate::runtime::{Drain, Hangups, Stage};
use crate::time::{Clock, wall_clock};

/// How often the file is looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How long a changed file must stay as it is until it is read.
const SETTLE_TIME: Duration = Duration::from_millis(250);

/// What a reload reaches.
pub(super) struct Reload {
    /// What the replica was started with.
    pub(super) started: Arc<Config>,
    pub(super) limiter: Arc<ReplicatedLimiter>,
    pub(super) tuner: Tuner<Companion>,
    pub(super) mesh: MeshHandle,
    pub(super) clock: Clock,
    pub(super) report: Report,
}

/// How reloads fare, for logs, metrics and operators.
#[derive(Debug)]
pub(super) struct Report {
    metrics: Metrics,
    status: watch::Sender<Status>,
}

#[derive(Clone, Debug)]
struct Metrics {
    success: Counter,
    failure: Counter,
    last_success: Gauge<f64, AtomicU64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Result {
    result: &'static str,
}

impl Report {
    /// Registers `config_reloads_total{result}`,
    /// `config_last_reload_success_timestamp_seconds` and `config_info{hash}`.
    pub(super) fn register(registry: &mut Registry, config: &Config) -> Self {
        let (status, current) = watch::channel(Status {
            loaded_at: wall_clock(),
            effective: config.effective(),
            hash: config.hash().map(str::to_owned),
            last_error: None,
            last_error_at: None,
            needs_restart: Vec::new(),
        });
        let reloads = Family::<Result, Counter>::default();
        let counter = |result| reloads.get_or_create_owned(&Result { result });
        let metrics = Metrics {
            success: counter("success"),
            failure: counter("failure"),
            last_success: Gauge::default(),
        };
        metrics.last_success.set(seconds(current.borrow().loaded_at));
        registry.register("config_reloads", "Changes of the configuration by result", reloads);
        registry.register_with_unit(
            "config_last_reload_success_timestamp",
            "When the configuration in force was loaded",
            Unit::Seconds,
            metrics.last_success.clone(),
        );
        registry.register_collector(Box::new(Info(current)));
        Self { metrics, status }
    }

    /// How it stands, now and later.
    pub(super) fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    fn refused(&self, problems: String) {
        for problem in problems.lines() {
            error!(problem, "the configuration is refused; the old one stays in force");
        }
        self.metrics.failure.inc();
        self.status.send_modify(|status| {
            status.last_error = Some(problems);
            status.last_error_at = Some(wall_clock());
        });
    }

    fn loaded(&self, config: &Config, needs_restart: Vec<String>) {
        for setting in &needs_restart {
            warn!(setting, "changed in the configuration, but needs a restart");
        }
        let loaded_at = wall_clock();
        let hash = config.hash().map(str::to_owned);
        info!(hash, limits = config.limits().len(), "the configuration is reloaded");
        self.metrics.success.inc();
        self.metrics.last_success.set(seconds(loaded_at));
        let status = Status {
            loaded_at,
            effective: config.effective(),
            hash,
            last_error: None,
            last_error_at: None,
            needs_restart,
        };
        self.status.send_replace(status);
    }
}

impl Reload {
    /// Follows the file until the process ends.
    pub(super) async fn run(self, mut file: Watch, mut hangups: Hangups, drain: Drain) {
        let mut pause = LOOK_INTERVAL;
        loop {
            let asked = tokio::select! {
                () = tokio::time::sleep(pause) => false,
                () = hangups.next() => true,
                () = drain.reached(Stage::Closing) => return,
            };
            let look = if asked { Look::Changed(file.take()) } else { file.look() };
            pause = LOOK_INTERVAL;
            match look {
                Look::Same => {}
                Look::Settling => pause = SETTLE_TIME,
                Look::Changed(reading) => self.apply(&reading).await,
            }
        }
    }

    async fn apply(&self, reading: &Reading) {
        match self.put_in_force(reading) {
            Ok(config) => {
                self.report.loaded(&config, self.started.needs_restart(&config));
                // Only while the process ends is there no mesh to be told.
                let _ = self.mesh.reload().await;
            }
            Err(problems) => self.report.refused(problems),
        }
    }

    /// # Errors
    /// With what is wrong, a problem a line; nothing changed then.
    fn put_in_force(&self, reading: &Reading) -> std::result::Result<Config, String> {
        let mut config =
            reading.parse(&|name| std::env::var(name).ok()).map_err(|e| e.to_string())?;
        let limits = config.limits_in(&self.started).map_err(|e| e.to_string())?;
        self.limiter.reload(limits, self.clock.now()).map_err(|e| format!("limits: {e}"))?;
        let prefix =
            std::mem::replace(&mut config.proxy.ipv6_prefix, self.started.proxy.ipv6_prefix);
        self.tuner.apply(&config.proxy);
        config.proxy.ipv6_prefix = prefix;
        Ok(config)
    }
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The hash of the configuration in force, of which there is one at a time.
#[derive(Debug)]
struct Info(watch::Receiver<Status>);

impl Collector for Info {
    fn encode(
        &self,
        mut encoder: DescriptorEncoder<'_>,
    ) -> std::result::Result<(), std::fmt::Error> {
        let hash = self.0.borrow().hash.clone().unwrap_or_default();
        let one = ConstGauge::new(1_i64);
        let mut metric = encoder.encode_descriptor(
            "config_info",
            "The configuration in force, by a hash of its file",
            None,
            one.metric_type(),
        )?;
        one.encode(metric.encode_family(&[("hash", hash.as_str())])?)
    }
}
