use super::*;
use crate::limiter::{
    KeyBuf, KeyPart, Limit, LimitIndex, LimitSpec, PauseOrder, Quota, Rule, Source, Tokens,
};
use crate::replication::frame::{Body, Frame, Hello};
use crate::replication::{Companion, Entry, Row, Snapshot, Update};

fn at(millis: u64) -> Timestamp {
    Timestamp::from_millis(3_600_000 + millis)
}

fn engine() -> Engine {
    let key = KeyPart::new(Source::Header("key".into()), false);
    let rule = Rule { key: vec![key], ..Rule::default() };
    let quota = Quota::try_new("10/s".parse().unwrap(), 10).unwrap();
    let larger = Quota::try_new("1000/s".parse().unwrap(), 1000).unwrap();
    let limits = LimitSet::new([
        Limit::new(LimitSpec::new("one", rule.clone(), quota)),
        Limit::new(LimitSpec::new("large", rule, larger)),
    ]);
    let limiter = Arc::new(ReplicatedLimiter::new(limits, 100, Companion::default()));
    let settings = Settings {
        group: "g".into(),
        name: "a".into(),
        address: String::new(),
        sync_interval: Duration::from_millis(100),
        join_timeout: Duration::from_secs(2),
        share_hold: Duration::from_secs(30),
        expected_replicas: 0,
        expects_peers: true,
    };
    Engine::new(settings, Incarnation::from_bytes([1; 16]), limiter, at(0))
}

/// Opens a session with another replica, whose limits are the same.
fn meet(engine: &mut Engine, id: u64, now: Timestamp) -> SessionId {
    let incarnation = Incarnation::from_bytes([100 + id as u8; 16]);
    let hello = Hello { incarnation, ..engine.hello(1) };
    engine.open(SessionId(id), Side::Accepted, hello, 1, now).unwrap();
    SessionId(id)
}

fn drive(engine: &mut Engine, id: SessionId, now: Timestamp) -> Vec<Frame> {
    engine.tick(now);
    std::iter::from_fn(|| engine.transmit(id, now)).collect()
}

#[test]
fn waiting_for_a_slow_snapshot_is_no_reason_to_wake_at_once() {
    let mut engine = engine();
    let id = meet(&mut engine, 1, at(0));
    for millis in [0, 1000, 2000, 3000, 5000] {
        drive(&mut engine, id, at(millis));
        assert!(!engine.is_joined());
        assert!(engine.next_deadline(at(millis)) > at(millis), "after {millis} ms");
    }
    drive(&mut engine, id, at(10_000));
    assert!(engine.is_joined());
}

fn say(engine: &mut Engine, id: SessionId, seq: u64, body: Body, now: Timestamp) {
    let frame = Frame { seq, ack: 0, stamp_ms: 1, echo_ms: 0, held_ms: 0, body };
    engine.receive(id, frame, now).unwrap();
}

/// What a peer spent from a bucket, of which it tells no key.
fn entry(bucket: BucketId, limit: u32) -> Entry {
    Entry {
        bucket,
        limit,
        generation: 1,
        epoch: 0,
        flush: 1,
        ack: 0,
        spent: 1_000_000,
        returned: 0,
        fresh_spent: 1_000_000,
        fresh_returned: 0,
        level: 0,
        elsewhere: None,
        demand: 0.0,
        key: None,
        pause: None,
    }
}

#[test]
fn a_bucket_stays_with_its_limit_whatever_a_peer_says() {
    let mut engine = engine();
    let id = meet(&mut engine, 1, at(0));
    let mut key = KeyBuf::new();
    key.push_text(b"k");
    let (one, large) = (LimitIndex(0), LimitIndex(1));
    let bucket = engine.limits.get(one).unwrap().bucket_id(key.as_bytes());
    let level = |engine: &Engine| engine.bucket(bucket, at(100)).unwrap().level;
    let update = |limit| {
        let entries = vec![entry(bucket, limit)];
        Body::Update(Update { entries, ..Default::default() })
    };
    say(&mut engine, id, 2, update(0), at(0));
    let row = Row {
        bucket,
        limit: 1,
        epoch: 7,
        deficit: 0,
        contributions: Vec::new(),
        key: None,
        pause: None,
    };
    say(&mut engine, id, 3, update(1), at(10));
    let snapshot = Snapshot { rows: vec![row], last: true, joining: false };
    say(&mut engine, id, 4, Body::Snapshot(snapshot), at(10));
    assert_eq!(engine.stats().entries_skipped, 2);
    assert!(level(&engine) <= Tokens::from_whole(10).unwrap());
    assert_eq!(engine.reset(&Reset::Bucket(large, bucket), at(20)), None);
    let closed = PauseOrder::Until(at(1020));
    assert!(!engine.limiter.pause(large, bucket, None, closed, at(20)));
    assert_eq!(engine.reset(&Reset::Bucket(one, bucket), at(20)), Some(1));
    assert_eq!(level(&engine), Tokens::from_whole(10).unwrap());
}

#[test]
fn whoever_has_the_key_knows_the_limit() {
    let mut engine = engine();
    let id = meet(&mut engine, 1, at(0));
    let mut key = KeyBuf::new();
    key.push_text(b"k");
    let bucket = engine.limits.get(LimitIndex(0)).unwrap().bucket_id(key.as_bytes());
    let hearsay = Update { entries: vec![entry(bucket, 1)], ..Default::default() };
    say(&mut engine, id, 2, Body::Update(hearsay), at(0));
    assert_eq!(engine.bucket(bucket, at(0)).unwrap().limit, LimitIndex(1));
    let told = Entry { key: Some(key.as_bytes().to_vec()), flush: 2, ..entry(bucket, 0) };
    let told = Update { entries: vec![told], ..Default::default() };
    say(&mut engine, id, 3, Body::Update(told), at(0));
    let view = engine.bucket(bucket, at(100)).unwrap();
    assert_eq!(view.limit, LimitIndex(0));
    assert!(view.level <= Tokens::from_whole(10).unwrap(), "{:?}", view.level);
}

#[test]
fn after_the_last_epoch_comes_no_other() {
    let last = (1 << 48) - 1;
    assert_eq!(receive::epoch_after(7), 8);
    assert_eq!(receive::epoch_after(last - 1), last);
    assert_eq!(receive::epoch_after(last), last);
}

#[test]
fn a_closed_bucket_goes_last_when_memory_is_short() {
    let engine = engine();
    let limits = engine.limiter.limits();
    let (index, limit) = limits.iter().next().unwrap();
    let id = |n: u16| BucketId::from_bytes(u128::from(n).to_be_bytes());
    let order = PauseOrder::AtLeast(at(60_000));
    assert!(engine.limiter.pause(index, id(0), None, order, at(0)));
    // A hundred fit. Those that come have spent, and the closed one is full.
    for n in 1..2000 {
        engine.limiter.with_bucket(id(n), index, limit, None, at(1), |slot| {
            slot.bucket.drain(Tokens::from_whole(1).unwrap());
        });
    }
    assert_eq!(engine.limiter.store().len(), 100);
    let view = engine.bucket(id(0), at(10_000)).unwrap();
    assert_eq!(view.paused_for, 50_000_000_000);
    assert_eq!(engine.paused(at(10_000)).get(&index), Some(&1));
    assert!(engine.paused(at(60_000)).is_empty());
}
