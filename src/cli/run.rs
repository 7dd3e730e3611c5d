//! `tidegate run`: a replica, from a file or from flags.

use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread;

use anyhow::Context as _;
use tokio::sync::mpsc;
use tracing::info;

use super::{Exit, LogFormat, say};
use crate::app::{Addresses, App, Options};
use crate::config::{self, Config, LoadError};
use crate::runtime::Signals;
use crate::telemetry::log;

/// Threads of the data path at most, unless told otherwise: a sidecar on a large
/// node without a CPU limit should not take a thread for every core of it.
const MAX_WORKERS: usize = 8;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The configuration file.
    #[arg(
        short,
        long,
        env = "TIDEGATE_CONFIG",
        value_name = "FILE",
        required_unless_present = "upstream",
        conflicts_with = "upstream"
    )]
    config: Option<PathBuf>,
    /// Without a file: where requests go, such as http://127.0.0.1:3000.
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
    /// Without a file: a limit as [NAME:]PART[,PART...]=RATE[:BURST], such as
    /// client_ip=100/min or per-key:header:x-api-key=10/s:20. May be repeated.
    #[arg(long, value_name = "LIMIT", requires = "upstream")]
    limit: Vec<String>,
    /// Threads of the data path. Default: one for each core, eight at most.
    #[arg(long, env = "TIDEGATE_WORKERS", value_name = "N")]
    workers: Option<NonZeroUsize>,
}

pub(super) fn run(args: &Args, format: LogFormat) -> anyhow::Result<Exit> {
    let filter = std::env::var("TIDEGATE_LOG").ok();
    let log = match log::init(format.into(), filter.as_deref()) {
        Ok(log) => log,
        Err(error) => {
            say(&format!("tidegate: TIDEGATE_LOG: {error}"));
            return Ok(Exit::Usage);
        }
    };
    let config = match load(args) {
        Ok(config) => config,
        Err(error) => {
            say(&error.to_string());
            return Ok(Exit::Config);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(config, args, log))?;
    Ok(Exit::Done)
}

fn load(args: &Args) -> Result<Config, LoadError> {
    match (&args.config, &args.upstream) {
        (_, Some(upstream)) => config::from_flags(upstream, &args.limit),
        (Some(path), None) => config::load(path, &|name| std::env::var(name).ok()),
        // The parser requires one of the two.
        (None, None) => config::from_flags("", &[]),
    }
}

async fn serve(config: Config, args: &Args, log: log::Control) -> anyhow::Result<()> {
    // Before anything is bound, so that no signal is lost.
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let options = Options {
        workers: args.workers.map_or(cores.min(MAX_WORKERS), NonZeroUsize::get),
        name: name(),
        ip: std::env::var("POD_IP").ok().and_then(|ip| ip.parse::<IpAddr>().ok()),
        addresses: None,
    };
    info!(
        version = env!("CARGO_PKG_VERSION"),
        workers = options.workers,
        limits = config.limits().len(),
        upstream = config.proxy.upstream.as_ref().map_or("none".to_owned(), ToString::to_string),
        routes = config.egress.routes.len(),
        "starting"
    );
    let (mut app, addresses) = App::bind(config, options)?;
    if let Some(file) = args.config.as_ref().filter(|_| args.upstream.is_none()) {
        app = app.following(file)?;
    }
    announce(&addresses);
    let (sender, stop) = mpsc::channel(2);
    let app = app.with_log(log).run(stop);
    tokio::pin!(app);
    loop {
        tokio::select! {
            left = &mut app => return left,
            signal = signals.next() => {
                // Full only after two signals, which is as many as matter.
                let _ = sender.try_send(signal);
            }
        }
    }
}

/// One line for each bound address.
fn announce(addresses: &Addresses) {
    info!(listener = "proxy", address = %addresses.proxy, "listening");
    if let Some(peer) = addresses.peer {
        info!(listener = "peer", address = %peer, "listening");
    }
    info!(listener = "admin", address = %addresses.admin, "listening");
    info!(listener = "telemetry", address = %addresses.telemetry, "listening");
}

/// A label for people: the pod, else the host.
fn name() -> String {
    let pod = std::env::var("POD_NAME").ok().filter(|name| !name.is_empty());
    let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    pod.or_else(host).map_or_else(|| "tidegate".to_owned(), |name| name.trim().to_owned())
}
