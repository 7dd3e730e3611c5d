//! `tidegate demo`: three replicas enforce one limit together, in one process.
//!
//! Everything is real: sockets on loopback, HTTP through the proxies, gRPC
//! between the replicas. What is shown as admitted is what the upstream counted,
//! not the limiter's word, and beside it stands what one ideal bucket would have
//! admitted of the same requests.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};

use super::{Exit, LogFormat, print, say};
use crate::app::{Addresses, App, Handle, Options};
use crate::config::{self, Config};
use crate::proxy::Outcome;
use crate::runtime::{OnExit, Signals, Supervisor};
use crate::telemetry::log;
use crate::time::Clock;

mod board;
mod egress;
mod load;
mod upstream;

use board::Board;
use load::Load;
use upstream::Upstream;

/// How often counts are read; the ideal bucket sees requests in steps of it.
const SAMPLE: Duration = Duration::from_millis(50);
/// How long the replicas may take to meet.
const PATIENCE: Duration = Duration::from_secs(10);
/// With --break: when the last replica is cut off, for how long, and how often.
const BREAK_AFTER: u64 = 4;
const BREAK_FOR: u64 = 4;
const BREAK_EVERY: u64 = 12;
/// With --load, the load as a multiple of the limit.
const LOAD: f64 = 3.0;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Offer three times the limit, evenly to all replicas.
    #[arg(long)]
    load: bool,
    /// Cut the last replica off from the others and back again, over and over.
    #[arg(long = "break")]
    cut: bool,
    /// Show the other side: many callers of a provider that bears few requests.
    #[arg(long, conflicts_with_all = ["load", "cut", "limit"])]
    egress: bool,
    /// The limit that the replicas enforce together.
    #[arg(long, value_name = "RATE", default_value = "100/s")]
    limit: String,
    /// How many replicas.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=20))]
    replicas: u8,
    /// End by itself after so many seconds. Default: at Ctrl-C.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
}

/// One replica of the demo.
struct Replica {
    addresses: Addresses,
    handle: Handle,
    stop: mpsc::Sender<&'static str>,
}

pub(super) fn run(args: &Args, format: LogFormat) -> anyhow::Result<Exit> {
    // The board is what people look at: only what is wrong is logged.
    let filter =
        std::env::var("TIDEGATE_LOG").unwrap_or_else(|_| "warn,tidegate::peer=error".into());
    log::init(format.into(), Some(&filter))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if args.egress {
        return runtime.block_on(egress::show(usize::from(args.replicas), args.seconds));
    }
    runtime.block_on(show(args))
}

async fn show(args: &Args) -> anyhow::Result<Exit> {
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let clock = Clock::monotonic();
    let (supervisor, mut failures) = Supervisor::new();
    let count = usize::from(args.replicas);
    let upstream = Upstream::start(count, &supervisor)?;
    let (ended_in, mut ended) = mpsc::channel(count);
    let mut replicas = Vec::new();
    let (addresses, listed) = watch::channel(BTreeSet::new());
    let mut quota = None;
    for index in 0..count {
        let config = match config_of(args, upstream.address(index), count > 1) {
            Ok(config) => config,
            Err(error) => {
                say(&error.to_string());
                return Ok(Exit::Config);
            }
        };
        quota = config.limits().iter().next().map(|(_, limit)| *limit.default_quota());
        replicas.push(start(config, index, &listed, &supervisor, &ended_in)?);
    }
    let quota = quota.ok_or_else(|| anyhow!("the demo has no limit"))?;
    let peers: BTreeSet<SocketAddr> = replicas.iter().filter_map(|r| r.addresses.peer).collect();
    addresses.send_replace(peers);
    meet(&replicas).await?;
    print(&introduction(args, &replicas, &upstream))?;

    let proxies: Vec<SocketAddr> = replicas.iter().map(|r| r.addresses.proxy).collect();
    let load =
        args.load.then(|| Load::start(&proxies, LOAD * quota.rate().per_second(), &supervisor));
    let mut board = Board::new(quota, count, clock.now());
    print(&board.header())?;
    let (mut ticks, mut elapsed) = (interval(SAMPLE), Duration::ZERO);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let started = clock.now();
    let mut cut = false;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = signals.next() => break,
            Some(failure) = failures.recv() => bail!("{failure}"),
            Some(result) = ended.recv() => {
                result?;
                bail!("a replica has ended");
            }
        }
        let now = clock.now();
        board.sample(&upstream.counts(), &refused(&replicas), now);
        let before = elapsed.as_secs();
        elapsed = now.since(started);
        if elapsed.as_secs() > before {
            print(&board.second(elapsed.as_secs()))?;
        }
        if args.cut && count > 1 {
            let phase = elapsed.as_secs() % BREAK_EVERY;
            let wanted = (BREAK_AFTER..BREAK_AFTER + BREAK_FOR).contains(&phase);
            if let Some(last) = replicas.last().filter(|_| wanted != cut) {
                cut = wanted;
                last.handle.mesh.partition(cut).await?;
                let what = if cut { "is cut off from its peers" } else { "is back" };
                print(&format!("        -- replica {count} {what}"))?;
            }
        }
        if args.seconds.is_some_and(|seconds| elapsed.as_secs() >= seconds) {
            break;
        }
    }
    drop(load);
    print(&board.summary())?;
    for replica in &replicas {
        // One that has ended needs no telling.
        let _ = replica.stop.try_send("the demo ends");
    }
    for _ in &replicas {
        if let Some(result) = ended.recv().await {
            result?;
        }
    }
    Ok(Exit::Done)
}

/// Starts the replica of this index, whose end `ended_in` hears.
fn start(
    config: Config,
    index: usize,
    listed: &watch::Receiver<BTreeSet<SocketAddr>>,
    supervisor: &Supervisor,
    ended_in: &mpsc::Sender<anyhow::Result<()>>,
) -> anyhow::Result<Replica> {
    let name = format!("replica-{}", index + 1);
    let addresses = Some(listed.clone());
    let options = Options { workers: 1, name: name.clone(), ip: None, addresses };
    let (app, bound) = App::bind(config, options)?;
    let handle = app.handle();
    let (stop, stopped) = mpsc::channel(1);
    let ended_in = ended_in.clone();
    supervisor.spawn(name, OnExit::Ignore, async move {
        // The owner may have left already.
        let _ = ended_in.send(app.run(stopped).await).await;
    });
    Ok(Replica { addresses: bound, handle, stop })
}

fn config_of(args: &Args, upstream: SocketAddr, peers: bool) -> Result<Config, config::LoadError> {
    let replication = if peers {
        "replication: { listen: '127.0.0.1:0', insecure: true, peers: { static: ['127.0.0.1:1'] } }"
    } else {
        ""
    };
    let text = format!(
        "proxy: {{ listen: '127.0.0.1:0', upstream: 'http://{upstream}', drain_delay: 1ms, drain_timeout: 1s }}\n\
         limits: [ {{ name: demo, key: [], rate: '{}' }} ]\n\
         admin: {{ listen: '127.0.0.1:0' }}\n\
         telemetry: {{ listen: '127.0.0.1:0' }}\n\
         {replication}\n",
        args.limit.replace('\'', "''"),
    );
    config::parse("--limit", &text, &|_| None)
}

/// Waits until every replica is ready and in session with every other one.
async fn meet(replicas: &[Replica]) -> anyhow::Result<()> {
    let others = replicas.len() - 1;
    let meeting = async {
        for replica in replicas {
            loop {
                let connected = replica.handle.mesh.inspect(|engine, now| {
                    engine.peers(now).iter().filter(|peer| peer.connected).count()
                });
                if connected.await? == others && replica.handle.readiness.is_ready() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(())
    };
    match tokio::time::timeout(PATIENCE, meeting).await {
        Ok(met) => met,
        Err(_) => bail!("the replicas did not meet within {PATIENCE:?}"),
    }
}

/// Requests that each replica's limit refused.
fn refused(replicas: &[Replica]) -> Vec<u64> {
    replicas.iter().map(|replica| replica.handle.proxy.total(Outcome::Limited)).collect()
}

fn introduction(args: &Args, replicas: &[Replica], upstream: &Upstream) -> String {
    let mut text = format!(
        "{} replicas enforce {} together, in front of one upstream.\n\n",
        replicas.len(),
        args.limit
    );
    for (index, replica) in replicas.iter().enumerate() {
        let Addresses { proxy, peer, admin, telemetry } = replica.addresses;
        let peer = peer.map_or_else(|| "-".to_owned(), |peer| peer.to_string());
        text += &format!(
            "  replica {}   proxy {proxy}   peer {peer}   admin {admin}   telemetry {telemetry}   upstream {}\n",
            index + 1,
            upstream.address(index),
        );
    }
    if let Some(Replica { addresses, .. }) = replicas.first() {
        text += &format!(
            "\nTry, while it runs:\n\n\
             \x20 curl -i http://{}/hello\n\
             \x20 curl -s http://{}/metrics\n\
             \x20 tidegate buckets get demo --admin {}\n\
             \x20 tidegate peers --admin {}\n",
            addresses.proxy, addresses.telemetry, addresses.admin, addresses.admin
        );
    }
    if !args.load {
        text += "\nNothing is sent by itself; with --load three times the limit is.\n";
    }
    text
}
