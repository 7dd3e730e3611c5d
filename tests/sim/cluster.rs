//! A cluster of the product's own engines over a virtual clock and network.
//!
//! Nothing of the algorithm is written again here: nodes are real limiters and
//! engines; this file only carries frames, moves time and breaks things.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use tidegate::limiter::{
    Attributes, Client, KeyPart, Limit, LimitIndex, LimitSet, LimitSpec, Partition, Quota, Rule,
    Source, Tokens,
};
use tidegate::replication::{
    Body, Companion, DialFailure, Engine, Frame, Incarnation, ReplicatedLimiter, Reset, SessionId,
    Settings, Side,
};
use tidegate::time::Timestamp;

use crate::rng::Rng;

const MS: u64 = 1_000_000;

/// Every node begins with a clock of its own, far from the others'.
fn local(node: usize, drift_ppm: i64, now: u64) -> Timestamp {
    let origin = 3_600_000_000_000 + node as u64 * 7_777_777_777;
    let drifted = now as i128 + now as i128 * i128::from(drift_ppm) / 1_000_000;
    Timestamp::from_nanos(origin + drifted as u64)
}

pub(crate) struct Request {
    pub(crate) key: String,
}

impl Attributes for Request {
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
        if name == "key" {
            each(self.key.as_bytes());
        }
    }
    fn query(&self) -> &str {
        ""
    }
}

pub(crate) fn limit(name: &str, rate: &str, burst: u64, cost: u64) -> Limit {
    split_limit(name, rate, burst, cost, Partition::default())
}

/// A limit that says what happens while replicas are not heard.
pub(crate) fn split_limit(
    name: &str,
    rate: &str,
    burst: u64,
    cost: u64,
    partition: Partition,
) -> Limit {
    let key = KeyPart::new(Source::Header("key".into()), false);
    let rule = Rule { key: vec![key], ..Rule::default() };
    Limit::new(LimitSpec {
        cost: Tokens::from_whole(cost).unwrap().into(),
        partition,
        ..LimitSpec::new(name, rule, Quota::try_new(rate.parse().unwrap(), burst).unwrap())
    })
}

pub(crate) struct Node {
    pub(crate) engine: Engine,
    pub(crate) limiter: Arc<ReplicatedLimiter>,
    pub(crate) alive: bool,
    pub(crate) drift_ppm: i64,
    wake_at: u64,
}

/// One connection: two ends, each a node and its session.
struct Link {
    ends: [(usize, SessionId); 2],
    /// Whether the dialler has had the acceptor's Hello.
    open: bool,
    address: SocketAddr,
    /// When the last frame of each direction arrives; a connection keeps order.
    last_arrival: [u64; 2],
    /// Frames that a partition holds back, by the end they go to.
    held: [Vec<Frame>; 2],
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Wake(usize),
    Dial { from: usize, address: SocketAddr },
    Deliver { link: u64, to_end: usize, frame: u64 },
}

/// What the network does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Network {
    pub(crate) latency_us: u64,
    /// Uniform jitter, in percent of the latency.
    pub(crate) jitter: u64,
}

impl Default for Network {
    fn default() -> Self {
        Self { latency_us: 1000, jitter: 25 }
    }
}

pub(crate) struct Cluster {
    pub(crate) now: u64,
    pub(crate) nodes: Vec<Node>,
    network: Network,
    limits: Vec<Limit>,
    rng: Rng,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    frames: BTreeMap<u64, Frame>,
    links: BTreeMap<u64, Link>,
    /// Which part of the network each node is in; different parts cannot talk.
    part: Vec<usize>,
    /// What discovery answers to nodes that start; all that are alive if empty.
    listed: Vec<usize>,
    counter: u64,
    trace: blake3::Hasher,
    pub(crate) frame_count: u64,
}

impl Cluster {
    pub(crate) fn new(seed: u64, network: Network, limits: Vec<Limit>) -> Self {
        Self {
            now: 0,
            nodes: Vec::new(),
            network,
            limits,
            rng: Rng::new(seed),
            events: BinaryHeap::new(),
            frames: BTreeMap::new(),
            links: BTreeMap::new(),
            part: Vec::new(),
            listed: Vec::new(),
            counter: 0,
            trace: blake3::Hasher::new(),
            frame_count: 0,
        }
    }

    pub(crate) fn address(node: usize) -> SocketAddr {
        SocketAddr::from(([10, 0, (node / 250) as u8, (node % 250) as u8 + 1], 9401))
    }

    /// Starts a node; discovery then lists every node that is alive.
    pub(crate) fn start(&mut self) -> usize {
        let node = self.nodes.len();
        let limiter = Arc::new(ReplicatedLimiter::new(
            LimitSet::new(self.limits.iter().cloned()),
            1_000_000,
            Companion::default(),
        ));
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.rng.next().to_be_bytes());
        bytes[8..].copy_from_slice(&self.rng.next().to_be_bytes());
        let settings = Settings {
            group: "sim".into(),
            name: format!("n{node}"),
            address: Self::address(node).to_string(),
            sync_interval: Duration::from_millis(100),
            join_timeout: Duration::from_secs(2),
            share_hold: Duration::from_secs(30),
            expected_replicas: 0,
            expects_peers: true,
        };
        let now = local(node, 0, self.now);
        let engine =
            Engine::new(settings, Incarnation::from_bytes(bytes), Arc::clone(&limiter), now);
        self.nodes.push(Node { engine, limiter, alive: true, drift_ppm: 0, wake_at: u64::MAX });
        self.part.push(0);
        self.list();
        node
    }

    /// Kills a node: its connections reset, nothing more leaves it.
    pub(crate) fn kill(&mut self, node: usize) {
        self.nodes[node].alive = false;
        let dead: Vec<u64> = self
            .links
            .iter()
            .filter(|(_, link)| link.ends.iter().any(|end| end.0 == node))
            .map(|(id, _)| *id)
            .collect();
        for link in dead {
            self.close(link);
        }
        self.list();
    }

    /// A node leaves in order: it says Goodbye and then ends.
    pub(crate) fn leave(&mut self, node: usize) {
        let now = self.local(node);
        self.nodes[node].engine.leave("test", now);
        self.pump(node);
        assert!(self.nodes[node].engine.has_left());
        self.run_for(50 * MS);
        self.kill(node);
    }

    /// From now on discovery names only these nodes.
    pub(crate) fn only_lists(&mut self, nodes: &[usize]) {
        self.listed = nodes.to_vec();
    }

    fn list(&mut self) {
        let all: BTreeSet<SocketAddr> = (0..self.nodes.len())
            .filter(|node| self.nodes[*node].alive)
            .filter(|node| self.listed.is_empty() || self.listed.contains(node))
            .map(Self::address)
            .collect();
        for node in 0..self.nodes.len() {
            if self.nodes[node].alive {
                let now = self.local(node);
                self.nodes[node].engine.listed(&all, now);
                self.pump(node);
            }
        }
    }

    /// Splits the network; nodes of different parts cannot talk. What was sent
    /// meanwhile arrives, in order, once its ends are in one part again.
    pub(crate) fn partition(&mut self, parts: &[usize]) {
        self.part.copy_from_slice(parts);
        let links: Vec<u64> = self.links.keys().copied().collect();
        for link in links {
            for to_end in [0, 1] {
                let Some(found) = self.links.get_mut(&link) else { continue };
                let [(a, _), (b, _)] = found.ends;
                if self.part[a] == self.part[b] {
                    // Before anything that was sent later and is under way.
                    for frame in std::mem::take(&mut found.held[to_end]) {
                        self.counter += 1;
                        let id = self.counter;
                        self.frames.insert(id, frame);
                        self.schedule(self.now, Event::Deliver { link, to_end, frame: id });
                    }
                }
            }
        }
    }

    /// Cuts all connections, as a load balancer or a restarted network would.
    pub(crate) fn cut_connections(&mut self) {
        let all: Vec<u64> = self.links.keys().copied().collect();
        for link in all {
            self.close(link);
        }
    }

    /// A moment of the node's own clock.
    pub(crate) fn local(&self, node: usize) -> Timestamp {
        local(node, self.nodes[node].drift_ppm, self.now)
    }

    /// A request arrives at a node. Whether it is admitted.
    pub(crate) fn request(&mut self, node: usize, key: &str) -> bool {
        let now = self.local(node);
        let decision = self.nodes[node].limiter.decide(&Request { key: key.into() }, now);
        let admitted = decision.is_admitted();
        self.trace.update(&[u8::from(admitted), node as u8]);
        let mut context = Context::from_waker(Waker::noop());
        if self.nodes[node].limiter.companion().poll_marked(&mut context).is_ready() {
            self.pump(node);
        }
        admitted
    }

    /// The level a node knows, in whole tokens; full if it knows nothing.
    pub(crate) fn level(&self, node: usize, limit: usize, key: &str) -> f64 {
        let limits = self.nodes[node].limiter.limits();
        let limit = limits.get(LimitIndex(limit as u32)).unwrap();
        let key = limit.rule().key_from_text(&[key], 64).unwrap();
        let id = limit.bucket_id(key.as_bytes());
        let view = self.nodes[node].engine.bucket(id, self.local(node));
        view.map_or(limit.default_quota().burst().as_f64(), |view| view.level.as_f64())
    }

    /// Closes a bucket for so long through the node.
    pub(crate) fn pause_key(&mut self, node: usize, key: &str, millis: u64) -> bool {
        let now = self.local(node);
        let limits = self.nodes[node].limiter.limits();
        let limit = limits.get(LimitIndex(0)).unwrap();
        let key = limit.rule().key_from_text(&[key], 64).unwrap();
        let (bucket, key) = (limit.bucket_id(key.as_bytes()), Some(key.as_bytes()));
        let there = self.nodes[node].engine.pause(LimitIndex(0), bucket, key, millis, now);
        self.pump(node);
        there
    }

    /// Resets one bucket through the node.
    pub(crate) fn reset_key(&mut self, node: usize, key: &str) -> Option<usize> {
        let limits = self.nodes[node].limiter.limits();
        let key = limits.get(LimitIndex(0)).unwrap().rule().key_from_text(&[key], 64).unwrap();
        self.reset(node, &Reset::Key(LimitIndex(0), key))
    }

    /// Resets all buckets of the limit through the node.
    pub(crate) fn reset_limit(&mut self, node: usize) -> Option<usize> {
        self.reset(node, &Reset::Limit(LimitIndex(0)))
    }

    fn reset(&mut self, node: usize, what: &Reset) -> Option<usize> {
        let now = self.local(node);
        let count = self.nodes[node].engine.reset(what, now);
        self.pump(node);
        count
    }

    /// A hash of all that happened; equal for equal seeds.
    pub(crate) fn trace(&self) -> String {
        self.trace.finalize().to_hex().to_string()
    }

    pub(crate) fn entries_sent(&self) -> u64 {
        self.nodes.iter().map(|node| node.engine.stats().entries_sent).sum()
    }

    pub(crate) fn run_for(&mut self, nanos: u64) {
        self.run_until(self.now + nanos);
    }

    pub(crate) fn run_until(&mut self, until: u64) {
        while let Some(Reverse((at, _, _))) = self.events.peek() {
            if *at > until {
                break;
            }
            let Some(Reverse((at, _, event))) = self.events.pop() else { break };
            self.now = self.now.max(at);
            self.handle(event);
        }
        self.now = until;
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Wake(node) => {
                if self.nodes[node].alive && self.nodes[node].wake_at <= self.now {
                    self.nodes[node].wake_at = u64::MAX;
                    self.pump(node);
                }
            }
            Event::Dial { from, address } => self.dial(from, address),
            Event::Deliver { link, to_end, frame } => {
                let Some(frame) = self.frames.remove(&frame) else { return };
                self.deliver(link, to_end, frame);
            }
        }
    }

    fn schedule(&mut self, at: u64, event: Event) {
        self.counter += 1;
        self.events.push(Reverse((at, self.counter, event)));
    }

    fn delay(&mut self) -> u64 {
        let base = self.network.latency_us * 1000;
        let spread = base * self.network.jitter / 100;
        base - spread + (self.rng.unit() * (2 * spread) as f64) as u64
    }

    fn reachable(&self, a: usize, b: usize) -> bool {
        self.nodes[a].alive && self.nodes[b].alive && self.part[a] == self.part[b]
    }

    fn node_at(&self, address: SocketAddr) -> Option<usize> {
        (0..self.nodes.len()).find(|node| Self::address(*node) == address)
    }

    fn dial(&mut self, from: usize, address: SocketAddr) {
        if !self.nodes[from].alive {
            return;
        }
        let now = self.local(from);
        let Some(to) = self.node_at(address).filter(|to| self.part[*to] == self.part[from]) else {
            self.nodes[from].engine.dial_failed(address, DialFailure::Other, now);
            return self.pump(from);
        };
        if !self.nodes[to].alive {
            self.nodes[from].engine.dial_failed(address, DialFailure::Refused, now);
            return self.pump(from);
        }
        let greeting = self.nodes[from].engine.greeting(now);
        self.counter += 2;
        let (link, ids) = (self.counter, [SessionId(self.counter), SessionId(self.counter - 1)]);
        let arrives = self.now + 2 * self.delay();
        self.links.insert(
            link,
            Link {
                ends: [(from, ids[0]), (to, ids[1])],
                open: false,
                address,
                last_arrival: [arrives, arrives],
                held: [Vec::new(), Vec::new()],
            },
        );
        self.send(link, 1, greeting);
    }

    fn send(&mut self, link: u64, to_end: usize, frame: Frame) {
        let delay = self.delay();
        let Some(found) = self.links.get_mut(&link) else { return };
        let at = (self.now + delay).max(found.last_arrival[to_end] + 1);
        found.last_arrival[to_end] = at;
        self.counter += 1;
        let id = self.counter;
        self.frames.insert(id, frame);
        self.frame_count += 1;
        self.schedule(at, Event::Deliver { link, to_end, frame: id });
    }

    fn deliver(&mut self, link: u64, to_end: usize, frame: Frame) {
        let Some(found) = self.links.get(&link) else { return };
        let ((node, session), (other, _)) = (found.ends[to_end], found.ends[1 - to_end]);
        let (open, address) = (found.open, found.address);
        if !self.nodes[node].alive {
            return;
        }
        if !self.reachable(node, other) {
            // The network holds it back; a connection loses nothing while it lives.
            if let Some(found) = self.links.get_mut(&link) {
                found.held[to_end].push(frame);
            }
            return;
        }
        let now = self.local(node);
        let first = to_end == 1 && frame.seq == 1 || to_end == 0 && !open;
        let outcome = if first {
            let Body::Hello(hello) = frame.body else { panic!("the first frame is no Hello") };
            let side = if to_end == 1 { Side::Accepted } else { Side::Dialled(address) };
            match self.nodes[node].engine.open(session, side, hello, frame.stamp_ms, now) {
                Ok(opened) => {
                    if to_end == 0
                        && let Some(found) = self.links.get_mut(&link)
                    {
                        found.open = true;
                    }
                    if let Some(old) = opened.replaces {
                        self.drop_session(node, old);
                    }
                    Ok(())
                }
                Err(refusal) => Err(refusal.to_string()),
            }
        } else {
            self.nodes[node].engine.receive(session, frame, now).map_err(|e| e.to_string())
        };
        if outcome.is_err() {
            self.nodes[node].engine.close(session, now);
            if !open {
                let dialler = if to_end == 1 { other } else { node };
                let at = self.local(dialler);
                self.nodes[dialler].engine.dial_failed(address, DialFailure::Other, at);
            }
            self.close(link);
        }
        self.pump(node);
    }

    fn drop_session(&mut self, node: usize, session: SessionId) {
        let link = self
            .links
            .iter()
            .find(|(_, link)| link.ends.contains(&(node, session)))
            .map(|(id, _)| *id);
        if let Some(link) = link {
            self.close(link);
        }
    }

    /// Ends a connection; each side learns of it a moment later.
    fn close(&mut self, link: u64) {
        let Some(found) = self.links.remove(&link) else { return };
        for (node, session) in found.ends {
            if self.nodes[node].alive {
                let now = self.local(node);
                self.nodes[node].engine.close(session, now);
                self.wake(node, self.now + MS);
            }
        }
    }

    fn wake(&mut self, node: usize, at: u64) {
        if at < self.nodes[node].wake_at {
            self.nodes[node].wake_at = at;
            self.schedule(at, Event::Wake(node));
        }
    }

    /// What the mesh does after every wake-up.
    pub(crate) fn pump(&mut self, node: usize) {
        let now = self.local(node);
        self.nodes[node].engine.tick(now);
        for address in self.nodes[node].engine.dials(now) {
            let at = self.now + self.delay();
            self.schedule(at, Event::Dial { from: node, address });
        }
        let sessions: Vec<SessionId> = self.nodes[node].engine.sessions().collect();
        for session in sessions {
            let link = self.links.iter().find_map(|(id, l)| {
                l.ends.iter().position(|e| *e == (node, session)).map(|e| (*id, e))
            });
            let Some((link, end)) = link else { continue };
            while let Some(frame) = self.nodes[node].engine.transmit(session, now) {
                self.trace.update(&frame.seq.to_le_bytes());
                self.send(link, 1 - end, frame);
            }
        }
        let next = self.nodes[node].engine.next_deadline(now);
        let wait = next.nanos_since(now).max(MS / 10);
        self.wake(node, self.now + wait);
    }
}
