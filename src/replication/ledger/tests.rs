use super::*;
use crate::limiter::{BucketId, Event, LimitIndex, Store, TokenBucket};
use crate::replication::frame::{Entry, Row};
use crate::replication::members::Standing;
use proptest::prelude::*;

const NOW: Timestamp = Timestamp::from_millis(3_600_000);
const TOKEN: u64 = 1_000_000;
const ME: Incarnation = Incarnation::from_bytes([1; 16]);
const PEER: Incarnation = Incarnation::from_bytes([2; 16]);
const THIRD: Incarnation = Incarnation::from_bytes([3; 16]);
const ORIGIN: OriginId = OriginId(7);
const OTHER: OriginId = OriginId(8);

/// A bucket of 100 tokens that refills nothing during a test, `spent` of
/// which this replica spent.
struct Bucket {
    store: Store<Ledger>,
    quota: Quota,
}

impl Bucket {
    fn new(spent: u64) -> Self {
        let quota = Quota::try_new("100/40d".parse().unwrap(), 100).unwrap();
        let bucket = Self { store: Store::new(1), quota };
        bucket.with(|slot, quota| {
            slot.spent = spent * TOKEN;
            slot.bucket.shift(quota, Tokens::from_micros(-signed(spent * TOKEN)));
            slot.companion = Some(Box::new(Ledger::new(1, 0, 0, 0, NOW)));
        });
        bucket
    }

    fn with<R>(&self, f: impl FnOnce(&mut Slot<Ledger>, &Quota) -> R) -> R {
        let id = BucketId::from_bytes([9; 16]);
        let full = || TokenBucket::full(&self.quota, NOW);
        self.store.with(id, LimitIndex(0), None, full, |slot| f(slot, &self.quota))
    }

    fn flush(&self) {
        self.with(|slot, quota| {
            let spent = slot.spent;
            slot.companion.as_deref_mut().unwrap().flush(spent, 0, quota, NOW);
        });
    }

    fn level(&self) -> u64 {
        self.with(|slot, _| slot.bucket.level().whole())
    }

    fn apply(&self, spent: u64, fresh: u64, flush: u32, generation: u32) -> Applied {
        self.apply_entry(&entry(spent, fresh, flush, generation))
    }

    fn apply_entry(&self, entry: &Entry) -> Applied {
        let terms = Terms {
            origin: ORIGIN,
            replicas: 2,
            round_trip: 2_000_000,
            stale: true,
            same_quota: true,
            larger_quota: false,
        };
        self.with(|slot, quota| apply(slot, entry, terms, quota, NOW))
    }

    fn merge(&self, deficit: u64, contributions: &[(Incarnation, u64)]) {
        self.merge_from(ORIGIN, deficit, contributions);
    }

    fn merge_from(&self, from: OriginId, deficit: u64, contributions: &[(Incarnation, u64)]) {
        let all: Vec<_> = contributions.iter().map(|(who, spent)| (*who, 0, *spent)).collect();
        self.merge_parts(from, deficit, &all);
    }

    /// Of each origin the row contains what it spent between two totals.
    fn merge_parts(&self, from: OriginId, deficit: u64, parts: &[(Incarnation, u64, u64)]) {
        let contributions = parts
            .iter()
            .map(|(incarnation, unseen, spent)| Contribution {
                incarnation: *incarnation,
                generation: 1,
                spent: spent * TOKEN,
                returned: 0,
                demand: 0.0,
                unseen: unseen * TOKEN,
            })
            .collect();
        let row = Row {
            bucket: BucketId::from_bytes([9; 16]),
            limit: 0,
            epoch: 0,
            deficit: deficit * TOKEN,
            contributions,
            key: None,
            pause: None,
        };
        let find = |incarnation| match incarnation {
            PEER => Some(ORIGIN),
            THIRD => Some(OTHER),
            _ => None,
        };
        self.with(|slot, quota| merge(slot, &row, from, ME, find, quota, NOW));
    }
}

fn entry(spent: u64, fresh: u64, flush: u32, generation: u32) -> Entry {
    Entry {
        bucket: BucketId::from_bytes([9; 16]),
        limit: 0,
        generation,
        epoch: 0,
        flush,
        ack: 0,
        spent: spent * TOKEN,
        returned: 0,
        fresh_spent: fresh * TOKEN,
        fresh_returned: 0,
        level: 0,
        elsewhere: None,
        demand: 0.0,
        key: None,
        pause: None,
    }
}

#[test]
fn the_first_sight_of_an_origin_is_a_baseline() {
    let bucket = Bucket::new(0);
    bucket.apply(5000, 3, 1, 1);
    assert_eq!(bucket.level(), 97);
    bucket.apply(5002, 2, 2, 1);
    assert_eq!(bucket.level(), 95);
}

#[test]
fn a_newer_generation_is_a_new_baseline_and_an_older_one_is_ignored() {
    let bucket = Bucket::new(0);
    bucket.apply(50, 1, 9, 4);
    bucket.apply(1, 1, 1, 5);
    assert_eq!(bucket.level(), 98);
    assert!(bucket.apply(60, 10, 10, 4).old);
    assert_eq!(bucket.level(), 98);
    // The counter wraps.
    let bucket = Bucket::new(0);
    bucket.apply(50, 1, 9, u32::MAX);
    bucket.apply(1, 1, 1, 0);
    assert_eq!(bucket.level(), 98);
}

#[test]
fn a_snapshot_adds_what_only_one_side_knows() {
    // Fresh: the row is taken over.
    let bucket = Bucket::new(0);
    bucket.merge(30, &[(PEER, 30)]);
    assert_eq!(bucket.level(), 70);
    // Both spent, and have not met before.
    let bucket = Bucket::new(20);
    bucket.merge(30, &[(PEER, 30)]);
    assert_eq!(bucket.level(), 50);
    // The peer already had 15 of our 20.
    let bucket = Bucket::new(20);
    bucket.merge(45, &[(PEER, 30), (ME, 15)]);
    assert_eq!(bucket.level(), 50);
    // What was spent long ago and refilled is not counted again.
    let bucket = Bucket::new(20);
    bucket.with(|slot, _| slot.spent = 5000 * TOKEN);
    bucket.merge(30, &[(PEER, 30)]);
    assert_eq!(bucket.level(), 50);
}

#[test]
fn an_entry_before_the_snapshot_is_counted_once() {
    let bucket = Bucket::new(0);
    bucket.apply(33, 3, 2, 1);
    assert_eq!(bucket.level(), 97);
    bucket.merge(30, &[(PEER, 30)]);
    assert_eq!(bucket.level(), 67);
    bucket.apply(35, 5, 3, 1);
    assert_eq!(bucket.level(), 65);
}

#[test]
fn the_first_sight_of_a_peer_that_knows_us_adds_nothing_of_ours() {
    // The peer lost track of whose spending it is, but has what it acknowledged.
    let bucket = Bucket::new(20);
    bucket.flush();
    bucket.apply_entry(&Entry { ack: 1, ..entry(10, 10, 1, 1) });
    bucket.with(|slot, quota| {
        slot.spent += 5 * TOKEN;
        slot.bucket.shift(quota, Tokens::from_micros(-signed(5 * TOKEN)));
    });
    bucket.merge(32, &[(PEER, 12)]);
    assert_eq!(bucket.level(), 63);
}

#[test]
fn a_snapshot_of_a_peer_that_has_not_heard_of_us_adds_what_we_spent() {
    // Its entry overtook its snapshot, which names a third replica.
    let bucket = Bucket::new(30);
    bucket.apply(20, 20, 1, 1);
    assert_eq!(bucket.level(), 50);
    bucket.merge(30, &[(PEER, 20), (THIRD, 10)]);
    assert_eq!(bucket.level(), 40);
}

#[test]
fn a_snapshot_of_a_peer_that_has_not_heard_of_a_third_adds_what_that_spent() {
    let bucket = Bucket::new(0);
    bucket.apply(20, 20, 1, 1);
    bucket.merge_from(OTHER, 30, &[(THIRD, 30)]);
    assert_eq!(bucket.level(), 50);
}

#[test]
fn a_snapshot_without_the_beginning_of_an_origin_adds_only_what_it_contains() {
    // Its sender heard only the last 20 of the peer's 70, and 30 of a third one.
    let bucket = Bucket::new(0);
    bucket.apply(70, 70, 1, 1);
    bucket.merge_parts(OTHER, 50, &[(PEER, 50, 70), (THIRD, 0, 30)]);
    assert_eq!(bucket.level(), 0);
    // As it is here: the row knows nothing of the peer, and this level only its end.
    let bucket = Bucket::new(0);
    bucket.apply(70, 20, 1, 1);
    bucket.merge_from(OTHER, 30, &[(THIRD, 30)]);
    assert_eq!(bucket.level(), 50);
    // What it tells of this replica has no beginning either.
    let bucket = Bucket::new(40);
    bucket.merge_parts(ORIGIN, 20, &[(PEER, 0, 10), (ME, 30, 40)]);
    assert_eq!(bucket.level(), 50);
}

#[test]
fn the_beginning_of_an_origin_comes_with_a_later_snapshot() {
    let bucket = Bucket::new(0);
    bucket.merge_parts(OTHER, 20, &[(PEER, 50, 70)]);
    assert_eq!(bucket.level(), 80);
    for _ in 0..2 {
        bucket.merge(70, &[(PEER, 70)]);
        assert_eq!(bucket.level(), 30);
    }
    bucket.apply(71, 1, 2, 1);
    assert_eq!(bucket.level(), 29);
}

#[test]
fn what_a_snapshot_contains_beyond_a_gap_comes_with_the_gap() {
    let bucket = Bucket::new(0);
    bucket.apply(20, 20, 1, 1);
    bucket.merge_parts(OTHER, 30, &[(PEER, 50, 70), (THIRD, 0, 10)]);
    assert_eq!(bucket.level(), 70);
    bucket.apply(70, 50, 2, 1);
    assert_eq!(bucket.level(), 20);
}

#[test]
fn history_that_was_refilled_is_not_added_again() {
    // Of 5000 spent long ago nothing is missing; the row has the 20 that are.
    let bucket = Bucket::new(20);
    bucket.with(|slot, _| slot.spent = 5000 * TOKEN);
    bucket.merge_parts(ORIGIN, 30, &[(PEER, 0, 10), (ME, 4980, 5000)]);
    assert_eq!(bucket.level(), 70);
}

#[test]
fn levels_are_not_averaged_while_news_of_others_is_under_way() {
    let bucket = Bucket::new(0);
    let terms = Terms {
        origin: ORIGIN,
        replicas: 3,
        round_trip: 0,
        stale: false,
        same_quota: true,
        larger_quota: false,
    };
    let compares = |spent: u64, elsewhere: u64, flush: u32, now: Timestamp| {
        let level = (100 - spent - elsewhere) * TOKEN;
        let level = i64::try_from(level).unwrap();
        let elsewhere = Some(elsewhere * TOKEN);
        let entry = Entry { level, elsewhere, ..entry(spent, 1, flush, 1) };
        bucket.with(|slot, quota| apply(slot, &entry, terms, quota, now));
        bucket.level()
    };
    // It has heard of 60 that a third replica spent; they come here later.
    let at = |millis| NOW.plus_nanos(millis * 1_000_000);
    assert_eq!(compares(1, 60, 1, at(400)), 99);
    bucket.with(|slot, quota| {
        let third = Terms { origin: OTHER, same_quota: false, ..terms };
        apply(slot, &entry(60, 60, 1, 1), third, quota, at(410));
    });
    assert_eq!(compares(2, 60, 2, at(800)), 38);
    // What still differs after two seconds is how the two count, and no reason not
    // to compare.
    for flush in 3..6 {
        assert_eq!(compares(2, 70, flush, at(u64::from(flush) * 400)), 38);
    }
    assert_eq!(compares(2, 70, 9, at(4000)), 38);
    assert!(compares(2, 70, 10, at(5000)) < 38);
}

#[test]
fn a_peer_that_never_heard_a_flush_of_ours_is_not_averaged_with() {
    // It has our 30 from a snapshot, and its level says so.
    let bucket = Bucket::new(30);
    let compares = |entry: &Entry, now: Timestamp| {
        let terms = Terms {
            origin: ORIGIN,
            replicas: 2,
            round_trip: 0,
            stale: false,
            same_quota: true,
            larger_quota: false,
        };
        bucket.with(|slot, quota| apply(slot, entry, terms, quota, now));
    };
    bucket.flush();
    let level = |spent: i64| (70 - spent) * TOKEN as i64;
    compares(&Entry { level: level(5), ..entry(5, 5, 1, 1) }, NOW);
    let later = NOW.plus_nanos(500_000_000);
    compares(&Entry { level: level(10), ..entry(10, 5, 2, 1) }, later);
    assert_eq!(bucket.level(), 60);
    // Once it has heard one, levels are compared: it is five lower, and we move.
    let later = later.plus_nanos(500_000_000);
    compares(&Entry { level: level(15), ack: 1, ..entry(10, 5, 3, 1) }, later);
    assert!(bucket.level() < 60);
}

proptest! {
    /// I1: whatever is lost, repeated or reordered, once the latest entry is
    /// there exactly the total is subtracted.
    #[test]
    fn i1_entries_apply_exactly_once(
        amounts in prop::collection::vec(0u64..4, 1..12),
        order in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let mut total = 0;
        let totals: Vec<u64> = amounts.iter().map(|a| { total += a; total }).collect();
        let bucket = Bucket::new(0);
        for index in order {
            let i = index.index(totals.len());
            bucket.apply(totals[i], totals[i], i as u32 + 1, 1);
        }
        bucket.apply(total, total, totals.len() as u32, 1);
        prop_assert_eq!(bucket.level(), 100 - total);
    }

    /// A snapshot may come any number of times.
    #[test]
    fn merging_is_idempotent(own in 0u64..60, deficit in 0u64..60, theirs in 0u64..60, ours in 0u64..60, refilled in 0u64..500, times in 2usize..5) {
        let once = Bucket::new(own);
        let many = Bucket::new(own);
        for bucket in [&once, &many] {
            bucket.with(|slot, _| slot.spent += refilled * TOKEN);
        }
        let contributions = [(PEER, theirs), (ME, ours.min(own))];
        once.merge(deficit, &contributions);
        for _ in 0..times {
            many.merge(deficit, &contributions);
        }
        prop_assert_eq!(once.level(), many.level());
        // Never less than either side knew.
        prop_assert!(once.level() <= 100 - own.max(deficit));
    }

    /// I2: between hits of the cap and without averaging, the level is what it
    /// was, plus the refill, less what anyone is known to have spent, less what is
    /// reckoned or reserved for peers.
    #[test]
    fn i2_the_level_is_refill_less_spending_less_what_is_outstanding(
        rate in prop_oneof![Just(5u64), Just(100), Just(10_000)],
        steps in prop::collection::vec(happening(), 1..60),
    ) {
        let burst = 1_000_000;
        let start = 500_000;
        let quota = Quota::try_new(format!("{rate}/s").parse().unwrap(), burst).unwrap();
        let bucket = Bucket { store: Store::new(1), quota };
        bucket.with(|slot, _| {
            slot.bucket = TokenBucket::with_level(&quota, Tokens::from_whole(start).unwrap(), NOW);
            slot.companion = Some(Box::new(Ledger::new(1, 0, 0, 0, NOW)));
        });
        let mut members = Members { version: 1, ..Members::default() };
        let (mut now, mut own) = (NOW, 0);
        let mut peers = [(0u64, 0u32); 2];
        for origin in [ORIGIN, OTHER] {
            members.standings.insert(origin, Standing::Heard(NOW));
        }
        for step in steps {
            match step {
                Happening::Wait(millis) => now = now.plus_nanos(millis * 1_000_000),
                Happening::Silent(peer) => {
                    let origin = [ORIGIN, OTHER][peer];
                    let silent = Standing::Silent { since: now, hold: 30_000_000_000 };
                    members.standings.insert(origin, silent);
                    members.version += 1;
                }
                Happening::Spend(_) | Happening::Entry(..) => {}
            }
            let published = std::sync::Arc::new(members.clone());
            let climate = Climate {
                sharing: Sharing { members: 1, slow: 150_000_000 },
                closed_until: Timestamp::ZERO,
                horizon: 7e6,
                limit: LimitIndex(0),
                version: members.version,
                members: &|| published.clone(),
            };
            let (level, outstanding) = bucket.with(|slot, quota| {
                let Slot { bucket, companion, .. } = &mut *slot;
                companion.as_deref_mut().unwrap().advance(bucket, quota, &climate, now);
                match step {
                    Happening::Spend(count) => {
                        slot.bucket.shift(quota, Tokens::from_micros(-signed(count * TOKEN)));
                        slot.spent += count * TOKEN;
                        own += count;
                        let (net, level) = (slot.net(), slot.bucket.level());
                        let cost = Tokens::from_whole(count).unwrap();
                        let ledger = slot.companion.as_deref_mut().unwrap();
                        ledger.happened(Event::Spent(cost), net, level, quota, 3, now);
                    }
                    Happening::Entry(peer, count, demand) => {
                        let (spent, flush) = &mut peers[peer];
                        *spent += count;
                        *flush += 1;
                        let told = Entry {
                            demand: demand as f64 / 1000.0,
                            ..entry(*spent, count, *flush, 1)
                        };
                        let origin = [ORIGIN, OTHER][peer];
                        // A heard peer settles by a fresh entry; of another quota,
                        // so that levels are not compared.
                        let heard = matches!(members.standings[&origin], Standing::Heard(_));
                        let terms = Terms {
                            origin,
                            replicas: 3,
                            round_trip: 2_000_000,
                            stale: !heard,
                            same_quota: false,
                            larger_quota: false,
                        };
                        apply(slot, &told, terms, quota, now);
                    }
                    Happening::Wait(_) | Happening::Silent(_) => {}
                }
                let ledger = slot.companion.as_deref().unwrap();
                (slot.bucket.level().micros(), ledger.outstanding())
            });
            let refill = rate as f64 * now.nanos_since(NOW) as f64 / 1000.0;
            let spent = own + peers[0].0 + peers[1].0;
            let expected =
                (start * TOKEN) as f64 + refill - (spent * TOKEN) as f64 - outstanding;
            // A few micro-tokens of rounding for each step.
            let off = (level as f64 - expected).abs();
            prop_assert!(off <= 200.0, "{level} is off by {off} micro-tokens");
        }
    }
}

/// What may happen to a bucket of two peers.
#[derive(Clone, Copy, Debug)]
enum Happening {
    Wait(u64),
    Spend(u64),
    /// A peer spent so many tokens, and asks for so many in a second.
    Entry(usize, u64, u32),
    /// A peer falls silent.
    Silent(usize),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (1..2000u64).prop_map(Happening::Wait),
        3 => (1..40u64).prop_map(Happening::Spend),
        4 => (0..2usize, 0..40u64, 0..300u32).prop_map(|(p, n, d)| Happening::Entry(p, n, d)),
        1 => (0..2usize).prop_map(Happening::Silent),
    ]
}
