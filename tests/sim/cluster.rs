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

use prost::Message as _;
use tidegate::limiter::{
    Attributes, Client, Cost, KeyPart, Limit, LimitIndex, LimitSet, LimitSpec, Outlook, Partition,
    PauseOrder, Quota, Rule, Source, Tokens, Turn, Waiter,
};
use tidegate::peer::Encoder;
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

struct Request<'a> {
    key: &'a str,
    cost: u64,
}

impl Attributes for Request<'_> {
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
        Client::new([127, 0, 0, 1].into(), 64).vouched_for()
    }
    fn header(&self, name: &str, each: &mut dyn FnMut(&[u8])) {
        match name {
            "key" => each(self.key.as_bytes()),
            "cost" => each(self.cost.to_string().as_bytes()),
            _ => {}
        }
    }
    fn query(&self) -> &str {
        ""
    }
}

pub(crate) fn limit(name: &str, rate: &str, burst: u64, cost: u64) -> Limit {
    split_limit(name, rate, burst, cost, Partition::default())
}

/// A limit with this quota whose requests may wait so long.
pub(crate) fn limit_with(name: &str, quota: Quota, max_wait: Duration) -> Limit {
    let key = KeyPart::new(Source::Header("key".into()), false);
    let rule = Rule { key: vec![key], ..Rule::default() };
    Limit::new(LimitSpec { max_wait, ..LimitSpec::new(name, rule, quota) })
}

/// The request in front of an endless backlog.
#[derive(Default)]
pub(crate) struct Queue {
    front: Option<Waiter>,
    /// When it tries again at the latest.
    alarm: Timestamp,
}

impl Queue {
    pub(crate) const KEY: &'static str = "k";
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

/// As [`limit`], but every request says what it costs, up to `most`.
pub(crate) fn limit_by_header(name: &str, rate: &str, burst: u64, most: u64) -> Limit {
    let key = KeyPart::new(Source::Header("key".into()), false);
    let rule = Rule { key: vec![key], ..Rule::default() };
    Limit::new(LimitSpec {
        cost: Cost::Header { name: "cost".into(), max: Tokens::from_whole(most).unwrap() },
        ..LimitSpec::new(name, rule, Quota::try_new(rate.parse().unwrap(), burst).unwrap())
    })
}

/// Bytes of a frame on the wire, as the product encodes it, with the 14 bytes
/// that gRPC and HTTP/2 put before it, without TCP and IP. Only frames of the
/// steady state are measured: updates and heartbeats.
fn frame_bytes(codec: &mut Encoder, frame: &Frame) -> u64 {
    let body = match &frame.body {
        Body::Update(update) => Body::Update(update.clone()),
        Body::Heartbeat
        | Body::Hello(_)
        | Body::SnapshotRequest { .. }
        | Body::Snapshot(_)
        | Body::Goodbye(_) => Body::Heartbeat,
    };
    14 + codec.encode(Frame { body, ..*frame }).encoded_len() as u64
}

pub(crate) struct Node {
    pub(crate) engine: Engine,
    pub(crate) limiter: Arc<ReplicatedLimiter>,
    pub(crate) alive: bool,
    pub(crate) drift_ppm: i64,
    pub(crate) address: SocketAddr,
    /// The process stands still; what would happen to it waits.
    pub(crate) stopped: bool,
    waiting: Vec<Event>,
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
    /// What measures the bytes that go to each end.
    codecs: [Encoder; 2],
    /// Frames that a partition holds back, by the end they go to.
    held: [Vec<Frame>; 2],
    /// By how much this connection is slower than the network's latency.
    slowness: u64,
    /// Counts the cuts of this connection that began.
    cuts: u64,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Wake(usize),
    /// A connection's pings go unanswered since its so-manieth cut.
    PingTimeout {
        link: u64,
        cut: u64,
    },
    Dial {
        from: usize,
        address: SocketAddr,
    },
    Deliver {
        link: u64,
        to_end: usize,
        frame: u64,
    },
}

/// What the network does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Network {
    pub(crate) latency_us: u64,
    /// Uniform jitter, in percent of the latency.
    pub(crate) jitter: u64,
    /// Every connection is slower by a factor of 1 to this.
    pub(crate) spread: u64,
    /// Percent of the frames that come twice.
    pub(crate) duplicates: u64,
    /// A connection that is cut for this long ends.
    pub(crate) ping_timeout_ms: u64,
}

impl Default for Network {
    fn default() -> Self {
        // The product's pings: every 10 s, 5 s to answer.
        Self { latency_us: 1000, jitter: 25, spread: 1, duplicates: 0, ping_timeout_ms: 15_000 }
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
    /// Which connection, and which end of it, is a session.
    ends: BTreeMap<(usize, SessionId), (u64, usize)>,
    /// Which part of the network each node is in; different parts cannot talk.
    part: Vec<usize>,
    /// Pairs of which the first cannot reach the second.
    deaf: BTreeSet<(usize, usize)>,
    /// What discovery answers to nodes that start; all that are alive if empty.
    listed: Vec<usize>,
    counter: u64,
    trace: blake3::Hasher,
    /// Bytes of updates and heartbeats.
    pub(crate) bytes_sent: u64,
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
            ends: BTreeMap::new(),
            part: Vec::new(),
            deaf: BTreeSet::new(),
            listed: Vec::new(),
            counter: 0,
            trace: blake3::Hasher::new(),
            bytes_sent: 0,
        }
    }

    pub(crate) fn address(node: usize) -> SocketAddr {
        SocketAddr::from(([10, 0, (node / 250) as u8, (node % 250) as u8 + 1], 9401))
    }

    /// Starts a node; discovery then lists every node that is alive.
    pub(crate) fn start(&mut self) -> usize {
        self.start_at(Self::address(self.nodes.len()))
    }

    /// Starts a node at an address where another one lived.
    pub(crate) fn start_at(&mut self, address: SocketAddr) -> usize {
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
            address: address.to_string(),
            sync_interval: Duration::from_millis(100),
            join_timeout: Duration::from_secs(2),
            share_hold: Duration::from_secs(30),
            expected_replicas: 0,
            expects_peers: true,
        };
        let now = local(node, 0, self.now);
        let engine =
            Engine::new(settings, Incarnation::from_bytes(bytes), Arc::clone(&limiter), now);
        self.nodes.push(Node {
            engine,
            limiter,
            alive: true,
            drift_ppm: 0,
            address,
            stopped: false,
            waiting: Vec::new(),
            wake_at: u64::MAX,
        });
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
            .map(|node| self.nodes[node].address)
            .collect();
        for node in 0..self.nodes.len() {
            if self.nodes[node].alive && !self.nodes[node].stopped {
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
        self.deaf.clear();
        self.follow_partition();
    }

    /// What `from` sends does not reach `to`, in this direction only.
    pub(crate) fn deafen(&mut self, from: usize, to: usize) {
        self.deaf.insert((from, to));
        self.follow_partition();
    }

    fn follow_partition(&mut self) {
        let links: Vec<u64> = self.links.keys().copied().collect();
        for link in links {
            let mut cut = false;
            for to_end in [0, 1] {
                let Some(found) = self.links.get_mut(&link) else { continue };
                let ends = (found.ends[1 - to_end].0, found.ends[to_end].0);
                if self.part[ends.0] == self.part[ends.1] && !self.deaf.contains(&ends) {
                    // Before anything that was sent later and is under way.
                    for frame in std::mem::take(&mut found.held[to_end]) {
                        self.counter += 1;
                        let id = self.counter;
                        self.frames.insert(id, frame);
                        self.schedule(self.now, Event::Deliver { link, to_end, frame: id });
                    }
                } else {
                    cut = true;
                }
            }
            let Some(found) = self.links.get_mut(&link) else { continue };
            found.cuts += 1;
            if cut {
                let event = Event::PingTimeout { link, cut: found.cuts };
                self.schedule(self.now + self.network.ping_timeout_ms * MS, event);
            }
        }
    }

    /// The process stands still, as by SIGSTOP.
    pub(crate) fn stop(&mut self, node: usize) {
        self.nodes[node].stopped = true;
    }

    /// It goes on; all that waited for it comes at once, in order.
    pub(crate) fn resume(&mut self, node: usize) {
        self.nodes[node].stopped = false;
        for event in std::mem::take(&mut self.nodes[node].waiting) {
            self.handle(event);
        }
        self.pump(node);
    }

    /// Ends one connection, any.
    pub(crate) fn cut_any_connection(&mut self) {
        let all: Vec<u64> = self.links.keys().copied().collect();
        if !all.is_empty() {
            let any = (self.rng.unit() * all.len() as f64) as usize;
            self.close(all[any]);
        }
    }

    /// A node has other limits from now on, and so have those that start later.
    pub(crate) fn reload(&mut self, node: usize, limits: &[Limit]) {
        self.limits = limits.to_vec();
        let now = self.local(node);
        self.nodes[node].limiter.reload(LimitSet::new(limits.iter().cloned()), now).unwrap();
        self.nodes[node].engine.reload();
        self.pump(node);
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
        self.ask(node, key, 1, false)
    }

    /// A request that says what it costs, and gets it back at once if `refunded`.
    pub(crate) fn ask(&mut self, node: usize, key: &str, cost: u64, refunded: bool) -> bool {
        let now = self.local(node);
        let decision = self.nodes[node].limiter.decide(&Request { key, cost }, now);
        let admitted = decision.is_admitted();
        if admitted && refunded {
            self.nodes[node].limiter.refund(&decision, now);
        }
        self.trace.update(&[u8::from(admitted), node as u8]);
        let mut context = Context::from_waker(Waker::noop());
        if self.nodes[node].limiter.companion().poll_marked(&mut context).is_ready() {
            self.pump(node);
        }
        admitted
    }

    /// The request in front of a node's backlog tries to pass; whether it does. Who is
    /// woken here tries again within five milliseconds.
    pub(crate) fn turn(&mut self, node: usize, queue: &mut Queue) -> bool {
        let now = self.local(node);
        if !self.nodes[node].alive || now < queue.alarm {
            return false;
        }
        let limiter = Arc::clone(&self.nodes[node].limiter);
        let request = Request { key: Queue::KEY, cost: 1 };
        let mut front = match queue.front.take() {
            Some(front) => front,
            None => {
                let decision = limiter.decide(&request, now);
                if decision.is_admitted() {
                    self.heed_marks(node);
                    return true;
                }
                let Outlook::Waits { patience, .. } = limiter.outlook(&decision, None) else {
                    panic!("{:?}", limiter.outlook(&decision, None));
                };
                limiter.hold(&decision, patience, now).unwrap()
            }
        };
        let admitted = match limiter.try_again(&mut front, &request, Waker::noop(), now) {
            Turn::Settled(decision) => {
                assert!(decision.is_admitted());
                queue.alarm = now;
                true
            }
            Turn::Waits(alarm) => {
                queue.front = Some(front);
                let poll = now.plus_nanos(5_000_000);
                queue.alarm = alarm.map_or(poll, |alarm| alarm.min(poll));
                false
            }
        };
        self.heed_marks(node);
        admitted
    }

    /// The backlog of a node is gone.
    pub(crate) fn leave_queue(&mut self, node: usize, queue: &mut Queue) {
        if let Some(mut front) = queue.front.take() {
            let now = self.local(node);
            self.nodes[node].limiter.leave(&mut front, now);
            self.heed_marks(node);
        }
    }

    /// What the mesh does when buckets were marked.
    fn heed_marks(&mut self, node: usize) {
        let mut context = Context::from_waker(Waker::noop());
        if self.nodes[node].limiter.companion().poll_marked(&mut context).is_ready() {
            self.pump(node);
        }
    }

    /// The level a node knows, in whole tokens; full if it knows nothing.
    pub(crate) fn level(&self, node: usize, limit: usize, key: &str) -> f64 {
        let limits = self.nodes[node].limiter.limits();
        let limit = limits.get(LimitIndex(limit as u16)).unwrap();
        let key = limit.rule().key_from_text(&[key], 64).unwrap();
        let id = limit.bucket_id(key.as_bytes());
        let view = self.nodes[node].engine.bucket(id, self.local(node));
        view.map_or(limit.default_quota().burst().as_f64(), |view| view.level.as_f64())
    }

    /// What the node knows of each replica's net spending, its own first, in
    /// micro-tokens; nothing if it has no such bucket.
    pub(crate) fn spent(&self, node: usize, key: &str) -> Vec<(Incarnation, u64)> {
        let limits = self.nodes[node].limiter.limits();
        let limit = limits.get(LimitIndex(0)).unwrap();
        let key = limit.rule().key_from_text(&[key], 64).unwrap();
        let id = limit.bucket_id(key.as_bytes());
        let view = self.nodes[node].engine.bucket(id, self.local(node));
        view.map_or(Vec::new(), |view| view.spent)
    }

    /// Closes a bucket for so long through the node; 0 opens it.
    pub(crate) fn pause_key(&mut self, node: usize, key: &str, millis: u64) -> bool {
        let now = self.local(node);
        let limits = self.nodes[node].limiter.limits();
        let limit = limits.get(LimitIndex(0)).unwrap();
        let key = limit.rule().key_from_text(&[key], 64).unwrap();
        let (bucket, key) = (limit.bucket_id(key.as_bytes()), Some(key.as_bytes()));
        let order = match millis {
            0 => PauseOrder::Lift,
            millis => PauseOrder::Until(now.plus_nanos(millis * 1_000_000)),
        };
        let there = self.nodes[node].limiter.pause(LimitIndex(0), bucket, key, order, now);
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
        let concerned = match &event {
            Event::Wake(node) | Event::Dial { from: node, .. } => Some(*node),
            Event::Deliver { link, to_end, .. } => {
                self.links.get(link).map(|link| link.ends[*to_end].0)
            }
            Event::PingTimeout { .. } => None,
        };
        if let Some(node) = concerned.filter(|node| self.nodes[*node].stopped) {
            return self.nodes[node].waiting.push(event);
        }
        match event {
            Event::Wake(node) => {
                if self.nodes[node].alive && self.nodes[node].wake_at <= self.now {
                    self.nodes[node].wake_at = u64::MAX;
                    self.pump(node);
                }
            }
            Event::PingTimeout { link, cut } => {
                if self.links.get(&link).is_some_and(|link| link.cuts == cut) {
                    self.close(link);
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

    /// Whether what `from` sends reaches `to`.
    fn reaches(&self, from: usize, to: usize) -> bool {
        self.nodes[from].alive
            && self.nodes[to].alive
            && self.part[from] == self.part[to]
            && !self.deaf.contains(&(from, to))
    }

    fn node_at(&self, address: SocketAddr) -> Option<usize> {
        let at = |node: &usize| self.nodes[*node].address == address;
        (0..self.nodes.len()).rev().find(at)
    }

    fn dial(&mut self, from: usize, address: SocketAddr) {
        if !self.nodes[from].alive {
            return;
        }
        let now = self.local(from);
        let passes = |to: &usize| {
            self.part[*to] == self.part[from]
                && !self.deaf.contains(&(from, *to))
                && !self.deaf.contains(&(*to, from))
        };
        let Some(to) = self.node_at(address).filter(passes) else {
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
        let slowness = 1 + (self.rng.unit() * self.network.spread as f64) as u64;
        let arrives = self.now + 2 * slowness * self.delay();
        self.links.insert(
            link,
            Link {
                ends: [(from, ids[0]), (to, ids[1])],
                open: false,
                address,
                last_arrival: [arrives, arrives],
                codecs: Default::default(),
                held: [Vec::new(), Vec::new()],
                slowness,
                cuts: 0,
            },
        );
        self.ends.insert((from, ids[0]), (link, 0));
        self.ends.insert((to, ids[1]), (link, 1));
        self.send(link, 1, greeting);
    }

    fn send(&mut self, link: u64, to_end: usize, frame: Frame) {
        let delay = self.delay();
        let twice = self.network.duplicates > 0
            && frame.seq > 1
            && self.rng.unit() * 100.0 < self.network.duplicates as f64;
        let Some(found) = self.links.get_mut(&link) else { return };
        let at = (self.now + delay * found.slowness).max(found.last_arrival[to_end] + 1);
        found.last_arrival[to_end] = at + u64::from(twice);
        self.bytes_sent += frame_bytes(&mut found.codecs[to_end], &frame);
        if twice {
            self.counter += 1;
            let id = self.counter;
            self.frames.insert(id, frame.clone());
            self.schedule(at + 1, Event::Deliver { link, to_end, frame: id });
        }
        self.counter += 1;
        let id = self.counter;
        self.frames.insert(id, frame);
        self.schedule(at, Event::Deliver { link, to_end, frame: id });
    }

    fn deliver(&mut self, link: u64, to_end: usize, frame: Frame) {
        let Some(found) = self.links.get(&link) else { return };
        let ((node, session), (other, _)) = (found.ends[to_end], found.ends[1 - to_end]);
        let (open, address) = (found.open, found.address);
        if !self.nodes[node].alive {
            return;
        }
        if !self.reaches(other, node) {
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
            self.close(link);
        }
        self.pump(node);
    }

    fn drop_session(&mut self, node: usize, session: SessionId) {
        let link = self.ends.get(&(node, session)).map(|(link, _)| *link);
        if let Some(link) = link {
            self.close(link);
        }
    }

    /// Ends a connection; each side learns of it a moment later.
    fn close(&mut self, link: u64) {
        let Some(found) = self.links.remove(&link) else { return };
        let dialler = found.ends[0].0;
        if !found.open && self.nodes[dialler].alive {
            let at = self.local(dialler);
            self.nodes[dialler].engine.dial_failed(found.address, DialFailure::Other, at);
        }
        for (node, session) in found.ends {
            self.ends.remove(&(node, session));
            // A process that stands still learns of it when it looks.
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
        if self.nodes[node].stopped {
            return;
        }
        let now = self.local(node);
        self.nodes[node].engine.tick(now);
        for address in self.nodes[node].engine.dials(now) {
            let at = self.now + self.delay();
            self.schedule(at, Event::Dial { from: node, address });
        }
        let sessions: Vec<SessionId> = self.nodes[node].engine.sessions().collect();
        for session in sessions {
            let Some((link, end)) = self.ends.get(&(node, session)).copied() else { continue };
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
