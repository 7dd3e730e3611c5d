//! A replica among strangers and one honest peer.
//!
//! Two real engines with limiters, `subject` and `honest`, have a session with each
//! other over the product's own encoding. Strangers open sessions with the subject and
//! say whatever the input says; requests, resets, cuts and a virtual clock are the
//! input's as well. Whatever happens, no bucket holds more than its burst, memory
//! stays bounded, and what the subject says to the honest replica breaks no rule.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use prost::Message as _;
use tidegate::limiter::{
    Attributes, BucketId, Client, Cost, KeyBuf, KeyPart, Limit, LimitIndex, LimitSet, LimitSpec,
    Partition, PauseOrder, Quota, Rate, Rule, Source, Tokens,
};
use tidegate::peer::{Decoder, Encoder};
use tidegate::replication::{
    Body, Companion, Contribution, DialFailure, Engine, Entry, Frame, Hello, Incarnation,
    LimitDeclaration, LimitEpoch, LimitPause, PauseLeft, ReplicatedLimiter, Reset, Row, SessionId,
    Settings, Side, Snapshot, Update,
};
use tidegate::time::Timestamp;
use tidegate::wire::tidegate::peer::v1 as wire;

use super::input::Input;

const MAX_BUCKETS: usize = 12;
const KEYS: [&str; 5] = ["a", "b", "c", "d", "e"];
/// Longer runs show nothing that shorter ones do not.
const MOST_STEPS: usize = 256;
/// What is held for one peer at most: a backlog, a window and a pass of a snapshot.
const MOST_BACKLOG: usize = 2 << 20;

/// Plays the scenario that `data` is.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut world = World::new();
    world.connect();
    for _ in 0..MOST_STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
        world.check();
    }
}

struct Node {
    limiter: Arc<ReplicatedLimiter>,
    engine: Engine,
    address: SocketAddr,
}

struct World {
    now: Timestamp,
    subject: Node,
    honest: Node,
    /// The session of the two, by either's name for it.
    link: Option<SessionId>,
    /// Sessions of strangers with the subject, and the last frame of each direction.
    strangers: BTreeMap<SessionId, (u64, u64)>,
    sessions: u64,
    limits: Vec<Limit>,
}

struct Question<'a> {
    key: &'a str,
    cost: u64,
}

impl Attributes for Question<'_> {
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

fn limit(name: &str, tokens: u64, seconds: u64, burst: u64, partition: Partition) -> Limit {
    let key = KeyPart::new(Source::Header("key".into()), false);
    let rule = Rule { key: vec![key], ..Rule::default() };
    let rate = Rate::try_new(tokens, Duration::from_secs(seconds)).expect("a rate");
    let max = Tokens::from_whole(9).expect("few");
    Limit::new(LimitSpec {
        cost: Cost::Header { name: "cost".into(), max },
        partition,
        ..LimitSpec::new(name, rule, Quota::try_new(rate, burst).expect("a quota"))
    })
}

fn limits() -> Vec<Limit> {
    vec![
        limit("fast", 1000, 1, 1000, Partition::Frozen),
        limit("slow", 5, 1, 10, Partition::Strict),
        limit("rare", 10, 86_400, 10, Partition::Open),
    ]
}

fn incarnation(number: u8) -> Incarnation {
    Incarnation::from_bytes([number; 16])
}

const SUBJECT: u8 = 100;
const HONEST: u8 = 200;

impl Node {
    fn new(number: u8, limits: &[Limit], now: Timestamp) -> Self {
        let limiter = Arc::new(ReplicatedLimiter::new(
            LimitSet::new(limits.iter().cloned()),
            MAX_BUCKETS,
            Companion::default(),
        ));
        let address = SocketAddr::from(([10, 0, 0, number], 9401));
        let settings = Settings {
            group: "g".into(),
            name: format!("n{number}"),
            address: address.to_string(),
            sync_interval: Duration::from_millis(100),
            join_timeout: Duration::from_secs(2),
            share_hold: Duration::from_secs(30),
            expected_replicas: 2,
            expects_peers: true,
        };
        let engine = Engine::new(settings, incarnation(number), Arc::clone(&limiter), now);
        Self { limiter, engine, address }
    }

    fn request(&self, key: &str, cost: u64, refunded: bool, now: Timestamp) {
        let decision = self.limiter.decide(&Question { key, cost }, now);
        if refunded {
            self.limiter.refund(&decision, now);
        }
    }

    /// What must hold between any two steps.
    fn check(&self, now: Timestamp) {
        let limits = self.limiter.limits();
        let (mut count, mut held) = (0, 0);
        self.limiter.store().for_each(|id, slot| {
            count += 1;
            held += slot.held();
            assert!(slot.returned() <= slot.spent, "more was given back than spent");
            let Some(limit) = limits.get(slot.limit) else { return };
            let quota = limit.quota(id);
            assert!(slot.bucket.is_valid(quota), "{:?} of {quota:?}", slot.bucket);
        });
        assert_eq!(count, self.limiter.store().len());
        assert!(count <= MAX_BUCKETS, "{count} buckets");
        assert_eq!(held, 0, "no request is being decided");
        for index in 0..limits.len() as u16 {
            let bound = self.engine.overshoot_bound(LimitIndex(index), now);
            assert!(bound.is_none_or(|tokens| tokens.is_finite() && tokens >= 0.0));
        }
    }
}

impl World {
    fn new() -> Self {
        let now = Timestamp::from_millis(3_600_000);
        let limits = limits();
        Self {
            now,
            subject: Node::new(SUBJECT, &limits, now),
            honest: Node::new(HONEST, &limits, now),
            link: None,
            strangers: BTreeMap::new(),
            sessions: 0,
            limits,
        }
    }

    fn session(&mut self) -> SessionId {
        self.sessions += 1;
        SessionId(self.sessions)
    }

    /// The subject dials the honest replica.
    fn connect(&mut self) {
        let id = self.session();
        let Frame { body: Body::Hello(hello), stamp_ms, .. } =
            through_the_wire(self.subject.engine.greeting(self.now))
        else {
            panic!("a greeting is a Hello");
        };
        let opened = self.honest.engine.open(id, Side::Accepted, hello, stamp_ms, self.now);
        assert!(opened.is_ok_and(|opened| opened.replaces.is_none()), "an honest session");
        let Some(answer) = self.honest.engine.transmit(id, self.now) else {
            panic!("a session that was accepted begins with a Hello");
        };
        let Frame { body: Body::Hello(hello), stamp_ms, .. } = through_the_wire(answer) else {
            panic!("a session that was accepted begins with a Hello");
        };
        let side = Side::Dialled(self.honest.address);
        match self.subject.engine.open(id, side, hello, stamp_ms, self.now) {
            Ok(_) => self.link = Some(id),
            // A stranger may be there under the honest replica's name.
            Err(_) => self.honest.engine.close(id, self.now),
        }
    }

    fn disconnect(&mut self) {
        if let Some(link) = self.link.take() {
            self.subject.engine.close(link, self.now);
            self.honest.engine.close(link, self.now);
        }
    }

    /// Carries frames between the two until neither has more to say.
    fn pump(&mut self) {
        let Some(link) = self.link else { return };
        for _ in 0..64 {
            let mut idle = true;
            while let Some(frame) = self.subject.engine.transmit(link, self.now) {
                idle = false;
                let taken = self.honest.engine.receive(link, through_the_wire(frame), self.now);
                assert_eq!(taken, Ok(()), "the subject broke the protocol");
            }
            while let Some(frame) = self.honest.engine.transmit(link, self.now) {
                idle = false;
                let taken = self.subject.engine.receive(link, through_the_wire(frame), self.now);
                // Strangers may have ended the session under its name.
                if taken.is_err() {
                    self.disconnect();
                    return;
                }
            }
            if idle {
                return;
            }
        }
        panic!("the two do not come to rest");
    }

    fn tick(&mut self) {
        for node in [&mut self.subject, &mut self.honest] {
            node.engine.tick(self.now);
            let _ = node.engine.dials(self.now);
            let mut context = Context::from_waker(Waker::noop());
            let _ = node.limiter.companion().poll_marked(&mut context);
        }
        self.pump();
        for stranger in self.strangers.keys().copied().collect::<Vec<_>>() {
            self.hear(stranger);
        }
        // Whoever has just been driven asks for no more at this moment.
        self.subject.engine.tick(self.now);
        let _ = self.subject.engine.dials(self.now);
        let next = self.subject.engine.next_deadline(self.now);
        assert!(next > self.now || self.link.is_none(), "the engine would be driven without end");
    }

    /// Takes what the subject says to a stranger.
    fn hear(&mut self, id: SessionId) {
        for _ in 0..256 {
            let Some(frame) = self.subject.engine.transmit(id, self.now) else { return };
            let frame = through_the_wire(frame);
            if let Some((_, heard)) = self.strangers.get_mut(&id) {
                *heard = frame.seq;
            }
        }
        panic!("a stranger is told without end");
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.below(20) {
            0..=2 => {
                self.now = self.now.plus(Duration::from_millis(input.byte().into()));
                self.tick();
            }
            3 => {
                self.now = self.now.plus(Duration::from_millis(u64::from(input.byte()) * 500));
                self.tick();
            }
            4 | 5 => {
                let (key, cost) = (KEYS[input.below(KEYS.len())], input.byte());
                for _ in 0..=input.below(8) {
                    let refunded = cost > 240;
                    self.subject.request(key, u64::from(cost % 12), refunded, self.now);
                }
            }
            6 => {
                let key = KEYS[input.below(KEYS.len())];
                for _ in 0..=input.below(8) {
                    self.honest.request(key, 1, false, self.now);
                }
            }
            7 => self.open(input),
            8..=10 => {
                let body = Body::Update(self.update(input));
                self.say(input, body);
            }
            11 | 12 => {
                let body = Body::Snapshot(self.snapshot(input));
                self.say(input, body);
            }
            13 => {
                let body = match input.below(4) {
                    0 => Body::Heartbeat,
                    1 => Body::Hello(self.hello(input)),
                    2 => Body::SnapshotRequest { first_meeting: input.flag() },
                    _ => Body::Goodbye(String::new()),
                };
                self.say(input, body);
            }
            14 => {
                let frame = wire::Frame::decode(input.bytes())
                    .map(|frame| Decoder::default().decode(frame));
                if let (Ok(Ok(frame)), Some(id)) = (frame, self.stranger(input)) {
                    self.deliver(id, frame);
                }
            }
            15 => self.reset(input),
            16 => match self.stranger(input) {
                Some(id) if input.flag() => {
                    self.strangers.remove(&id);
                    self.subject.engine.close(id, self.now);
                }
                _ => {
                    self.disconnect();
                    if input.flag() {
                        self.connect();
                        self.pump();
                    }
                }
            },
            17 => {
                let idle = Duration::from_millis(input.byte().into());
                self.subject.limiter.expire(idle, self.now);
            }
            18 => match input.below(3) {
                0 => {
                    let listed: BTreeSet<SocketAddr> =
                        (0..input.below(4)).map(|_| address(input)).collect();
                    self.subject.engine.listed(&listed, self.now);
                }
                1 => {
                    let failure = DialFailure::Other;
                    self.subject.engine.dial_failed(address(input), failure, self.now);
                }
                _ => {
                    let failure = DialFailure::Refused;
                    self.subject.engine.dial_failed(address(input), failure, self.now);
                }
            },
            _ => {
                if self.link.is_none() {
                    self.connect();
                }
                self.pump();
            }
        }
    }

    fn stranger(&self, input: &mut Input<'_>) -> Option<SessionId> {
        let count = self.strangers.len();
        if count == 0 {
            return None;
        }
        self.strangers.keys().nth(input.below(count.min(256))).copied()
    }

    fn open(&mut self, input: &mut Input<'_>) {
        let id = self.session();
        let side = if input.flag() { Side::Dialled(address(input)) } else { Side::Accepted };
        let hello = self.hello(input);
        if let Ok(opened) = self.subject.engine.open(id, side, hello, input.number(), self.now) {
            self.strangers.insert(id, (1, 0));
            if let Some(old) = opened.replaces {
                self.strangers.remove(&old);
                self.subject.engine.close(old, self.now);
                if self.link == Some(old) {
                    self.disconnect();
                }
            }
        }
    }

    fn say(&mut self, input: &mut Input<'_>, body: Body) {
        let Some(id) = self.stranger(input) else { return };
        let Some((said, heard)) = self.strangers.get_mut(&id) else { return };
        let usual = input.byte() < 200;
        let (mut seq, mut ack) = (said.saturating_add(1), *heard);
        let (mut stamp_ms, mut echo_ms, mut held_ms) =
            (self.now.as_millis(), self.now.as_millis(), 0);
        if !usual {
            (seq, ack) = (input.number(), input.number());
            (stamp_ms, echo_ms, held_ms) = (input.number(), input.number(), input.short());
        }
        *said = (*said).max(seq);
        // As it would arrive.
        let frame = Frame { seq, ack, stamp_ms, echo_ms, held_ms, body };
        if let Ok(frame) = Decoder::default().decode(Encoder::default().encode(frame)) {
            self.deliver(id, frame);
        }
    }

    fn deliver(&mut self, id: SessionId, frame: Frame) {
        if self.subject.engine.receive(id, frame, self.now).is_err() {
            self.strangers.remove(&id);
            self.subject.engine.close(id, self.now);
        }
    }

    fn hello(&self, input: &mut Input<'_>) -> Hello {
        let mut limits: Vec<LimitDeclaration> = self
            .limits
            .iter()
            .map(|limit| LimitDeclaration {
                name: limit.name().to_owned(),
                parts: limit.parts_hash(),
                tokens: limit.default_quota().rate().tokens(),
                period_ms: limit.default_quota().rate().period_ms().into(),
                burst: limit.default_quota().burst().micros().unsigned_abs(),
            })
            .collect();
        if input.byte() > 200 {
            for limit in &mut limits {
                match input.below(6) {
                    0 => limit.tokens = input.number(),
                    1 => limit.period_ms = input.number(),
                    2 => limit.burst = input.number(),
                    3 => limit.parts = input.number(),
                    4 => limit.name.clear(),
                    _ => {}
                }
            }
        }
        Hello {
            version: if input.byte() > 250 { input.short() } else { 1 },
            oldest_version: 1,
            group: "g".into(),
            incarnation: whose(input),
            name: String::new(),
            address: if input.flag() { address(input).to_string() } else { String::new() },
            limits,
            peers: (0..input.below(3)).map(|_| address(input).to_string()).collect(),
            joining: input.flag(),
            revision: input.number(),
        }
    }

    fn update(&self, input: &mut Input<'_>) -> Update {
        let entries = (0..=input.below(4)).map(|_| self.entry(input)).collect();
        let mut limit_epochs = Vec::new();
        if input.byte() > 230 {
            limit_epochs.push(LimitEpoch { limit: input.byte().into(), epoch: input.number() });
        }
        let mut limit_pauses = Vec::new();
        while input.byte() > 240 {
            let told = LimitPause { limit: input.byte().into(), pause: pause_left(input) };
            limit_pauses.push(told);
        }
        Update { entries, limit_epochs, limit_pauses }
    }

    /// A bucket, its limit and its key, which mostly belong together.
    fn bucket(&self, input: &mut Input<'_>) -> (BucketId, u32, Option<Vec<u8>>) {
        let index = input.below(self.limits.len());
        let key = key(KEYS[input.below(KEYS.len())]);
        let bucket = self.limits[index].bucket_id(key.as_bytes());
        let tells = Some(key.as_bytes().to_vec());
        match input.byte() {
            0..=20 => (BucketId::from_bytes([input.byte(); 16]), index as u32, None),
            21..=30 => (bucket, input.short(), tells),
            31..=100 => (bucket, index as u32, None),
            _ => (bucket, index as u32, tells),
        }
    }

    fn entry(&self, input: &mut Input<'_>) -> Entry {
        let (bucket, limit, key) = self.bucket(input);
        let (spent, returned) = (input.number(), input.byte());
        let returned = if returned > 200 { input.number() } else { 0 };
        Entry {
            bucket,
            limit,
            generation: input.short(),
            epoch: epoch(input),
            flush: input.short(),
            ack: input.short(),
            spent,
            returned,
            fresh_spent: if input.flag() { input.number().min(spent) } else { spent },
            fresh_returned: if input.flag() { input.number().min(returned) } else { returned },
            level: input.number() as i64,
            elsewhere: input.flag().then(|| input.number()),
            demand: demand(input),
            key,
            pause: pause(input),
        }
    }

    fn snapshot(&self, input: &mut Input<'_>) -> Snapshot {
        let rows = (0..input.below(4))
            .map(|_| {
                let (bucket, limit, key) = self.bucket(input);
                let contributions = (0..input.below(5))
                    .map(|_| Contribution {
                        incarnation: whose(input),
                        generation: input.short(),
                        spent: input.number(),
                        returned: if input.byte() > 200 { input.number() } else { 0 },
                        demand: demand(input),
                        unseen: if input.flag() { input.number() } else { 0 },
                    })
                    .collect();
                let (epoch, deficit) = (epoch(input), input.number());
                Row { bucket, limit, epoch, deficit, contributions, key, pause: pause(input) }
            })
            .collect();
        Snapshot { rows, last: input.flag(), joining: input.flag() }
    }

    fn reset(&mut self, input: &mut Input<'_>) {
        let index = LimitIndex(u16::from(input.byte()) % 4);
        let key = key(KEYS[input.below(KEYS.len())]);
        let bucket = match self.limits.get(index.0 as usize) {
            Some(limit) => limit.bucket_id(key.as_bytes()),
            None => BucketId::from_bytes(input.array()),
        };
        let engine = &mut self.subject.engine;
        let existed = match input.below(4) {
            0 => engine.reset(&Reset::Key(index, key), self.now).is_some(),
            1 => engine.reset(&Reset::Bucket(index, bucket), self.now).is_some(),
            2 => engine.reset(&Reset::Limit(index), self.now).is_some(),
            _ => {
                let until = self.now.plus_nanos(input.number());
                let order =
                    [PauseOrder::AtLeast(until), PauseOrder::Until(until), PauseOrder::Lift]
                        [input.below(3)];
                if input.byte() > 200 {
                    engine.limiter().pause_limit(index, order, self.now)
                } else {
                    engine.limiter().pause(index, bucket, None, order, self.now)
                }
            }
        };
        assert!(!existed || (index.0 as usize) < self.limits.len());
        let _ = engine.bucket(bucket, self.now);
    }

    fn check(&self) {
        self.subject.check(self.now);
        self.honest.check(self.now);
        for peer in self.subject.engine.peers(self.now) {
            assert!(self.subject.engine.backlog_bytes(peer.incarnation) <= MOST_BACKLOG);
        }
    }
}

/// A frame as it arrives, which it must.
fn through_the_wire(frame: Frame) -> Frame {
    let bytes = Encoder::default().encode(frame).encode_to_vec();
    let Ok(frame) = wire::Frame::decode(bytes.as_slice()) else {
        panic!("what was encoded is not protobuf");
    };
    match Decoder::default().decode(frame) {
        Ok(frame) => frame,
        Err(malformed) => panic!("{malformed}"),
    }
}

fn key(text: &str) -> KeyBuf {
    let mut key = KeyBuf::new();
    key.push_text(text.as_bytes());
    key.finish();
    key
}

fn whose(input: &mut Input<'_>) -> Incarnation {
    match input.byte() {
        250 => incarnation(SUBJECT),
        251 => incarnation(HONEST),
        number => incarnation(number % 6),
    }
}

fn address(input: &mut Input<'_>) -> SocketAddr {
    let number = [1, 2, 3, SUBJECT, HONEST][input.below(5)];
    SocketAddr::from(([10, 0, 0, number], 9401))
}

fn epoch(input: &mut Input<'_>) -> u64 {
    if input.byte() > 230 { input.number() } else { 0 }
}

fn demand(input: &mut Input<'_>) -> f64 {
    match input.byte() {
        0..=100 => 0.0,
        101..=200 => f64::from(input.byte()) / 100.0,
        _ => f64::from(f32::from_bits(input.short())),
    }
}

fn pause(input: &mut Input<'_>) -> Option<PauseLeft> {
    (input.byte() > 240).then(|| pause_left(input))
}

/// On the wire generations begin at 1, and a memory is as long as the pause at least.
fn pause_left(input: &mut Input<'_>) -> PauseLeft {
    let (generation, millis) = (input.number().max(1), input.number());
    PauseLeft { generation, millis, remembered_millis: millis.max(input.number()) }
}
