//! Discovery (layer 3): who the peers are.
//!
//! A [`Discovery`] asks the DNS for the addresses behind a headless service, or
//! behind the names of a static list, and publishes the [`PeerSet`] on a watch
//! channel. It does not know which address is this replica's own: a replica is
//! recognised by its incarnation when it answers.
//!
//! Invariants:
//! - an address leaves the set only because a server said so; silence and errors
//!   keep the last good answer;
//! - looking never ends while the process serves, whatever the answers are;
//! - two rounds are at least half a second apart, and at most about five.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{Notify, watch};
use tracing::{info, warn};

use crate::runtime::{Drain, Stage};
use crate::time::{Clock, Timestamp};

mod config;
mod lookup;
mod metrics;
mod schedule;
mod target;

pub use config::{Config, HostPort};
pub use metrics::Metrics;

use lookup::Resolver;
use target::{Report, Target};

/// The addresses where peers may be, and how far they can be trusted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerSet {
    /// In order, without duplicates, possibly with this replica's own.
    pub addresses: BTreeSet<SocketAddr>,
    /// Whether every name was answered at least once, with addresses or without.
    /// While false, an empty set says nothing.
    pub answered: bool,
    /// How the last round of lookups went.
    pub health: Health,
}

/// How the last round of lookups went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// Every name was answered, or none was asked yet.
    #[default]
    Ok,
    /// At least one name was not, and its addresses are those of its last good
    /// answer.
    Failing {
        /// When the first of the failed rounds in a row ended.
        since: Timestamp,
    },
}

/// Finds the peers; [`Discovery::run`] does the work.
pub struct Discovery {
    server: Option<SocketAddr>,
    resolver: Option<Resolver>,
    literals: BTreeSet<SocketAddr>,
    targets: Vec<Target>,
    clock: Clock,
    metrics: Metrics,
    peers: watch::Sender<PeerSet>,
    refresh: Arc<Notify>,
}

/// Where others see the set and ask for a fresh one. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Handle {
    peers: watch::Receiver<PeerSet>,
    refresh: Arc<Notify>,
}

impl Discovery {
    /// Discovery of what `config` names. Without a port in `config` it is the one
    /// that the service names `peer` (SRV `_peer._tcp.NAME`), or else
    /// `default_port`. `server` is the DNS server to ask, with `None` the
    /// system's, with its search list.
    ///
    /// Addresses that are written as such are in the set from the start.
    pub fn new(
        config: &Config,
        default_port: u16,
        server: Option<SocketAddr>,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let mut literals = BTreeSet::new();
        let mut targets = Vec::new();
        match config {
            Config::Dns { name, port } => {
                targets.push(match port {
                    Some(port) => Target::new(name, *port),
                    None => Target::new(name, default_port).with_port_of_service(),
                });
            }
            Config::Static(list) => {
                for HostPort { host, port } in list {
                    match host.parse::<IpAddr>() {
                        Ok(address) => {
                            literals.insert(SocketAddr::new(address.to_canonical(), *port));
                        }
                        Err(_) => targets.push(Target::new(host, *port)),
                    }
                }
            }
        }
        metrics.set_addresses(literals.len());
        let set = PeerSet {
            addresses: literals.clone(),
            answered: targets.is_empty(),
            health: Health::Ok,
        };
        Self {
            server,
            resolver: None,
            literals,
            targets,
            clock,
            metrics,
            peers: watch::Sender::new(set),
            refresh: Arc::new(Notify::new()),
        }
    }

    /// The side for those who use the set.
    pub fn handle(&self) -> Handle {
        Handle { peers: self.peers.subscribe(), refresh: Arc::clone(&self.refresh) }
    }

    /// Looks up on schedule and when asked, until the process closes.
    pub async fn run(mut self, drain: Drain) {
        if self.targets.is_empty() {
            drain.reached(Stage::Closing).await;
            return;
        }
        let refresh = Arc::clone(&self.refresh);
        let mut fruitless = 0_u32;
        loop {
            let ttl = tokio::select! {
                () = drain.reached(Stage::Closing) => return,
                ttl = self.round() => ttl,
            };
            fruitless = if ttl.is_some() { 0 } else { fruitless.saturating_add(1) };
            let asked = async {
                // A request that came during the round counts: what made its
                // sender ask may be newer than the answer.
                let gap = pin!(tokio::time::sleep(schedule::REFRESH_GAP));
                refresh.notified().await;
                gap.await;
            };
            tokio::select! {
                () = drain.reached(Stage::Closing) => return,
                () = tokio::time::sleep(schedule::next_lookup(ttl, fruitless)) => {}
                () = asked => {}
            }
        }
    }

    /// Looks every name up once, publishes, and returns the smallest TTL.
    async fn round(&mut self) -> Option<Duration> {
        let resolver = self.resolver.take().map_or_else(|| Resolver::try_new(self.server), Ok);
        let reports = match &resolver {
            Ok(resolver) => {
                let lookups = self.targets.iter_mut().map(|target| target.look_up(resolver));
                join_all(lookups).await
            }
            Err(reason) => self.targets.iter().map(|_| Report::failed(reason.clone())).collect(),
        };
        for report in &reports {
            self.metrics.looked_up(report.outcome);
        }
        let reason = reports.iter().find_map(|report| report.reason.as_deref());
        self.publish(reason);
        // After a failure the next round starts from the system's configuration
        // as it is then, and with fresh connections.
        self.resolver = if reason.is_none() { resolver.ok() } else { None };
        reports.iter().filter_map(|report| report.ttl).min()
    }

    fn publish(&self, failure: Option<&str>) {
        let addresses: BTreeSet<SocketAddr> = self
            .targets
            .iter()
            .flat_map(Target::addresses)
            .chain(self.literals.iter().copied())
            .collect();
        let answered = self.targets.iter().all(Target::is_answered);
        let health = match (failure, self.peers.borrow().health) {
            (None, _) => Health::Ok,
            (Some(_), Health::Failing { since }) => Health::Failing { since },
            (Some(_), Health::Ok) => Health::Failing { since: self.clock.now() },
        };
        let new = PeerSet { addresses, answered, health };
        self.peers.send_if_modified(|old| {
            if *old == new {
                return false;
            }
            if let (Health::Ok, Some(reason)) = (old.health, failure) {
                warn!(reason, kept = new.addresses.len(), "peer lookup failed");
            } else if old.health != new.health {
                info!("peer lookups work again");
            }
            if old.addresses != new.addresses || old.answered != new.answered {
                info!(
                    addresses = new.addresses.len(),
                    added = new.addresses.difference(&old.addresses).count(),
                    removed = old.addresses.difference(&new.addresses).count(),
                    "peer addresses"
                );
            }
            *old = new;
            true
        });
        self.metrics.set_addresses(self.peers.borrow().addresses.len());
    }
}

impl Handle {
    /// The set, now and whenever it changes. The channel closes when discovery
    /// ends, which it does when the process closes; the last set stays readable.
    pub fn peers(&self) -> watch::Receiver<PeerSet> {
        self.peers.clone()
    }

    /// Asks for a lookup soon: at once, unless the last one ended less than half
    /// a second ago. Requests that come before it starts are one.
    pub fn refresh(&self) {
        self.refresh.notify_one();
    }
}
