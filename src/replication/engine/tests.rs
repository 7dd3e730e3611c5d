use super::*;
use crate::limiter::{KeyPart, Limit, LimitSpec, Quota, Rule, Source};
use crate::replication::Companion;

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
