//! A load on one key of a cluster, with what goes wrong meanwhile.

use crate::cluster::{Cluster, Network, limit, limit_by_header};
use crate::oracle::{Report, Tally};
use crate::rng::Rng;

pub(crate) const SECOND: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

/// What happens at a moment of a run.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The network splits; one part for each node.
    Split(Vec<usize>),
    /// What these send does not reach those, in this direction only.
    Deafen(Vec<usize>, Vec<usize>),
    /// The network is whole again.
    Heal,
    /// A node ends without a word.
    Kill(usize),
    /// A node leaves in order.
    Leave(usize),
    /// A new node starts, at an address of its own.
    Start,
    /// A new node starts where this one lived.
    StartAt(usize),
    /// A process stands still, and goes on.
    Stop(usize),
    Resume(usize),
    /// Some connection ends.
    Cut,
    /// The bucket is reset through a node.
    Reset(usize),
    /// A node has another rate and burst; the ideal bucket follows if `true`.
    Reload(usize, u64, bool),
    /// Requests come to these nodes in other shares.
    Shares(Vec<f64>),
    /// Another load, as a multiple of the limit.
    Load(f64),
}

/// To whom requests come.
#[derive(Clone, Debug)]
pub(crate) enum Demand {
    /// To all alike.
    Even,
    /// This part to the first, the rest to the others alike.
    First(f64),
    /// This part to one of them, each second to another.
    Moving(f64),
    /// In these shares, by node; 1 for those that are not listed.
    Shares(Vec<f64>),
}

impl Demand {
    fn share(&self, node: usize, nodes: usize, now: u64) -> f64 {
        let rest = |part: f64| (1.0 - part) / (nodes.max(2) - 1) as f64;
        match self {
            Self::Even => 1.0,
            Self::First(part) => {
                if node == 0 {
                    *part
                } else {
                    rest(*part)
                }
            }
            Self::Moving(part) => {
                let hot = (now / SECOND) as usize % nodes == node;
                if hot { *part } else { rest(*part) }
            }
            Self::Shares(shares) => shares.get(node).copied().unwrap_or(1.0),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) nodes: usize,
    pub(crate) per_second: u64,
    pub(crate) burst: u64,
    /// Offered load as a multiple of the limit.
    pub(crate) load: f64,
    pub(crate) seconds: u64,
    pub(crate) network: Network,
    pub(crate) demand: Demand,
    /// On for this long and off as long, if not zero (milliseconds).
    pub(crate) on_off: u64,
    /// What requests cost, all alike often.
    pub(crate) costs: Vec<u64>,
    /// Percent of the admitted requests that are refunded.
    pub(crate) refunds: u64,
    /// The odd nodes' clocks run this much too fast, the even ones' too slow.
    pub(crate) drift_ppm: i64,
    /// Milliseconds after the load began, in order.
    pub(crate) faults: Vec<(u64, Fault)>,
    /// The time of the fault, in milliseconds.
    pub(crate) window: Option<(u64, u64)>,
    /// Replicas' ratios count from here on, in milliseconds.
    pub(crate) ratios_from: u64,
}

impl Scenario {
    pub(crate) fn new(nodes: usize, per_second: u64, load: f64, seconds: u64) -> Self {
        Self {
            seed: 21,
            nodes,
            per_second,
            burst: per_second,
            load,
            seconds,
            network: Network::default(),
            demand: Demand::Even,
            on_off: 0,
            costs: vec![1],
            refunds: 0,
            drift_ppm: 0,
            faults: Vec::new(),
            window: None,
            ratios_from: 0,
        }
    }

    pub(crate) fn report(&self) -> Report {
        self.play().0.report()
    }

    fn limit(&self, per_second: u64) -> tidegate::limiter::Limit {
        let rate = format!("{per_second}/s");
        // A burst that follows the rate when that is reloaded.
        let burst = self.burst * per_second / self.per_second;
        if self.costs == [1] {
            limit("one", &rate, burst, 1)
        } else {
            limit_by_header("one", &rate, burst, self.costs.iter().copied().max().unwrap())
        }
    }

    /// The most that is ever offered, as a multiple of the limit.
    fn peak(&self) -> f64 {
        let loads = self.faults.iter().filter_map(|(_, fault)| {
            if let Fault::Load(load) = fault { Some(*load) } else { None }
        });
        loads.fold(self.load, f64::max)
    }

    pub(crate) fn play(&self) -> (Tally, Cluster) {
        let mut cluster = Cluster::new(self.seed, self.network, vec![self.limit(self.per_second)]);
        for node in 0..self.nodes {
            cluster.start();
            let sign = if node % 2 == 0 { -1 } else { 1 };
            cluster.nodes[node].drift_ppm = sign * self.drift_ppm;
        }
        cluster.run_for(3 * SECOND);
        assert!(cluster.nodes.iter().all(|node| node.engine.is_joined()), "{self:?}");
        let started = cluster.now;
        let (entries, bytes) = (cluster.entries_sent(), cluster.bytes_sent);
        let mut tally = Tally::new(self.per_second as f64, self.burst as f64, self.nodes);
        tally.ratios_from = self.ratios_from * MS;
        tally.window = self.window.map(|(from, to)| (from * MS, to * MS));
        tally.ended = self.seconds * SECOND;
        let mut rng = Rng::new(self.seed ^ 0x5eed);
        let mean_cost = self.costs.iter().sum::<u64>() as f64 / self.costs.len() as f64;
        let (peak, mut load) = (self.peak(), self.load);
        let offered = self.per_second as f64 * peak / mean_cost;
        let mut demand = self.demand.clone();
        let mut faults = self.faults.iter().peekable();
        let (mut ready, mut look_again) = (Vec::new(), 0);
        let mut at = 0;
        loop {
            at += rng.exponential_nanos(offered);
            while let Some((when, fault)) = faults.next_if(|(when, _)| when * MS <= at) {
                cluster.run_until(cluster.now.max(started + when * MS));
                self.strike(&mut cluster, &mut tally, fault, when * MS);
                if let Fault::Shares(shares) = fault {
                    demand = Demand::Shares(shares.clone());
                }
                if let Fault::Load(new) = fault {
                    load = *new;
                }
                look_again = 0;
            }
            if at >= self.seconds * SECOND {
                break;
            }
            let off = self.on_off > 0 && (at / MS / self.on_off) % 2 == 1;
            if off || (load < peak && rng.unit() * peak >= load) {
                continue;
            }
            cluster.run_until(cluster.now.max(started + at));
            if at >= look_again {
                ready = self.ready(&cluster, &demand, at);
                look_again = at + 10 * MS;
            }
            let Some((_, all)) = ready.last() else { continue };
            let draw = rng.unit() * all;
            let found = ready.partition_point(|(_, up_to)| *up_to <= draw);
            let node = ready[found.min(ready.len() - 1)].0;
            let cost = self.costs[(rng.unit() * self.costs.len() as f64) as usize];
            let refunded = self.refunds > 0 && rng.unit() * 100.0 < self.refunds as f64;
            // A process that stands still decides nothing.
            if !cluster.nodes[node].stopped {
                let admitted = cluster.ask(node, "k", cost, refunded);
                tally.arrival(node, cluster.now - started, cost, refunded, admitted);
            }
        }
        tally.traffic.entries = cluster.entries_sent() - entries;
        tally.traffic.bytes = cluster.bytes_sent - bytes;
        (tally, cluster)
    }

    /// The nodes that take requests, with the sum of the shares up to each.
    fn ready(&self, cluster: &Cluster, demand: &Demand, at: u64) -> Vec<(usize, f64)> {
        let mut sum = 0.0;
        (0..cluster.nodes.len())
            .filter(|node| cluster.nodes[*node].alive && cluster.nodes[*node].engine.is_joined())
            .map(|node| {
                sum += demand.share(node, self.nodes, at);
                (node, sum)
            })
            .collect()
    }

    fn strike(&self, cluster: &mut Cluster, tally: &mut Tally, fault: &Fault, now: u64) {
        match fault {
            Fault::Split(parts) => cluster.partition(parts),
            Fault::Deafen(from, to) => {
                for from in from {
                    for to in to {
                        cluster.deafen(*from, *to);
                    }
                }
            }
            Fault::Heal => cluster.partition(&vec![0; cluster.nodes.len()]),
            Fault::Kill(node) => cluster.kill(*node),
            Fault::Leave(node) => cluster.leave(*node),
            Fault::Start => {
                cluster.start();
            }
            Fault::StartAt(node) => {
                let address = cluster.nodes[*node].address;
                cluster.start_at(address);
            }
            Fault::Stop(node) => cluster.stop(*node),
            Fault::Resume(node) => cluster.resume(*node),
            Fault::Cut => cluster.cut_any_connection(),
            Fault::Reset(node) => {
                assert_eq!(cluster.reset_key(*node, "k"), Some(1));
                tally.reset(now);
            }
            Fault::Reload(node, per_second, ideal_too) => {
                let limit = self.limit(*per_second);
                if *ideal_too {
                    let burst = limit.default_quota().burst().as_f64();
                    tally.change(now, *per_second as f64, burst);
                }
                cluster.reload(*node, &[limit]);
            }
            Fault::Shares(_) | Fault::Load(_) => {}
        }
    }
}
