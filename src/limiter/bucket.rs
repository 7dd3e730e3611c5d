//! Token bucket (layer 1, pure): a level that refills exactly.
//!
//! Invariants, checked by [`TokenBucket::is_valid`]: the level never exceeds
//! the burst, and the carry is below the rate's period. A full bucket carries
//! nothing, since what would refill it is lost.

use super::quota::Quota;
use super::tokens::Tokens;
use crate::time::Timestamp;

/// When an amount of tokens will be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Due {
    /// They are there.
    Now,
    /// They will be there after this many nanoseconds.
    In(u64),
    /// They never come: the amount is above the burst, or the rate is zero.
    Never,
}

/// The level of one bucket at one moment.
///
/// Packed, since four bytes of padding in each of a million buckets are four
/// megabytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, packed(4))]
pub struct TokenBucket {
    level: i64,
    at: Timestamp,
    carry: u32,
}

impl TokenBucket {
    /// A full bucket.
    pub const fn full(quota: &Quota, now: Timestamp) -> Self {
        Self { level: quota.burst().micros(), at: now, carry: 0 }
    }

    /// A bucket that holds `level`, or the burst if that is less.
    pub fn with_level(quota: &Quota, level: Tokens, now: Timestamp) -> Self {
        Self { level: level.micros().min(quota.burst().micros()), at: now, carry: 0 }
    }

    /// Refills up to `now`. A `now` in the past changes nothing.
    pub fn advance(&mut self, quota: &Quota, now: Timestamp) {
        let nanos = now.nanos_since(self.at);
        if nanos == 0 {
            return;
        }
        self.at = now;
        let burst = quota.burst().micros();
        if self.level >= burst {
            self.carry = 0;
            return;
        }
        let (micros, carry) = quota.rate().refill(nanos, self.carry);
        self.level = self.level.saturating_add_unsigned(micros);
        self.carry = carry;
        if self.level >= burst {
            self.level = burst;
            self.carry = 0;
        }
    }

    /// The level after the last [`advance`](Self::advance).
    pub const fn level(&self) -> Tokens {
        Tokens::from_micros(self.level)
    }

    /// The moment of the last advance.
    pub const fn advanced_at(&self) -> Timestamp {
        self.at
    }

    /// Takes `cost` if that much is there.
    pub fn try_take(&mut self, cost: Tokens) -> bool {
        if self.level < cost.micros() {
            return false;
        }
        self.level -= cost.micros();
        true
    }

    /// Lowers the level by what others are reckoned to have spent, however far.
    pub fn drain(&mut self, amount: Tokens) {
        self.level = self.level.saturating_sub(amount.micros());
    }

    /// Moves the level by `change`, within the burst above and the debt cap
    /// below. Returns what the debt cap forgave.
    pub fn shift(&mut self, quota: &Quota, change: Tokens) -> Tokens {
        let floor = -quota.debt_cap().micros();
        let wanted = self.level.saturating_add(change.micros());
        // A level already below the floor (after a reload) is not raised here.
        let held = wanted.max(floor.min(self.level));
        self.level = held.min(quota.burst().micros());
        if self.level == quota.burst().micros() {
            self.carry = 0;
        }
        Tokens::from_micros(held.saturating_sub(wanted))
    }

    /// Passes from `old` to `new`, which is in force from `since` on. What was
    /// spent stays: the deficit is kept in tokens,
    /// `L' = clamp(b' - (b - L), min(L, 0), b')`, so that a smaller burst makes
    /// no debt that was not there, and a larger one gives what it has more.
    pub fn change_quota(&mut self, old: &Quota, new: &Quota, since: Timestamp) {
        if old == new {
            return;
        }
        self.advance(old, since);
        let deficit = old.burst().micros().saturating_sub(self.level);
        let burst = new.burst().micros();
        // The lower bound is at most zero and so never above the burst.
        let lowest = self.level.min(0);
        self.level = burst.saturating_sub(deficit).clamp(lowest, burst);
        if old.rate() != new.rate() || self.level == burst {
            // Parts of a micro-token, counted in units of the old rate.
            self.carry = 0;
        }
    }

    /// Passes to `new` from a quota that is not known any more: gives nothing,
    /// and takes only what the new burst cannot hold.
    pub fn adopt_quota(&mut self, new: &Quota) {
        self.level = self.level.min(new.burst().micros());
        self.carry = 0;
    }

    /// When `cost` will be there, if nobody else spends.
    pub fn due(&self, quota: &Quota, cost: Tokens) -> Due {
        self.due_after(quota, Tokens::ZERO, cost)
    }

    /// When `cost` will be there, if others take `ahead` first, in parts that the
    /// bucket can give.
    pub fn due_after(&self, quota: &Quota, ahead: Tokens, cost: Tokens) -> Due {
        if cost > quota.burst() || quota.rate().is_blocked() {
            return Due::Never;
        }
        let missing = ahead.plus(cost).micros().saturating_sub(self.level);
        match u64::try_from(missing) {
            Err(_) | Ok(0) => Due::Now,
            Ok(missing) => quota.rate().nanos_for(missing, self.carry).map_or(Due::Never, Due::In),
        }
    }

    /// Nanoseconds until the bucket is full; `None` if it never is.
    pub fn full_in(&self, quota: &Quota) -> Option<u64> {
        let missing = quota.burst().micros().saturating_sub(self.level);
        u64::try_from(missing).map_or(Some(0), |m| quota.rate().nanos_for(m, self.carry))
    }

    /// Whether the invariants hold.
    pub const fn is_valid(&self, quota: &Quota) -> bool {
        self.level <= quota.burst().micros() && self.carry < quota.rate().period_ms()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    const T: fn(u64) -> Tokens = |n| Tokens::from_whole(n).unwrap();

    fn quota(rate: &str, burst: u64) -> Quota {
        Quota::try_new(rate.parse().unwrap(), burst).unwrap()
    }

    fn at(duration: Duration) -> Timestamp {
        Timestamp::ZERO.plus(duration)
    }

    #[test]
    fn ba_g1_any_window_holds_at_most_burst_plus_rate() {
        let quota = quota("3/s", 3);
        let mut bucket = TokenBucket::full(&quota, Timestamp::ZERO);
        let mut admitted = Vec::new();
        for step in 0..100u64 {
            let now = at(Duration::from_millis(step * 100));
            bucket.advance(&quota, now);
            if bucket.try_take(T(1)) {
                admitted.push(step * 100);
            }
        }
        assert!((32..=34).contains(&admitted.len()), "{}", admitted.len());
        for (window, most) in [(1000, 6), (5000, 18)] {
            for (i, start) in admitted.iter().enumerate() {
                let inside = admitted[i..].iter().take_while(|t| **t < start + window).count();
                assert!(inside <= most, "{inside} within {window} ms");
            }
        }
    }

    #[test]
    fn ba_g2_an_idle_bucket_never_exceeds_its_burst() {
        let quota = quota("5/s", 5);
        let mut bucket = TokenBucket::full(&quota, Timestamp::ZERO);
        assert!(bucket.try_take(T(1)));
        bucket.advance(&quota, at(Duration::from_secs(3)));
        assert_eq!(bucket.level(), T(5));
        let admitted = (0..20).filter(|_| bucket.try_take(T(1))).count();
        assert_eq!(admitted, 5);
    }

    #[test]
    fn ba_g3_polling_faster_than_a_refill_step_loses_nothing() {
        let quota = quota("1/s", 1);
        let mut bucket = TokenBucket::full(&quota, Timestamp::ZERO);
        assert!(bucket.try_take(T(1)));
        // An odd step, so that no refill is ever a whole number of units.
        let mut admitted = 0;
        let mut now = 0;
        while now < 10_000_000_000 {
            now += 49_999_999;
            bucket.advance(&quota, Timestamp::from_nanos(now));
            admitted += u32::from(bucket.try_take(T(1)));
        }
        assert!((9..=11).contains(&admitted), "{admitted}");
    }

    #[test]
    fn ba_g4_high_rates_are_exact() {
        for (rate, burst) in [("6000/s", 100), ("1000000/s", 10), ("1/ms", 1)] {
            let quota = quota(rate, burst);
            let mut bucket = TokenBucket::full(&quota, Timestamp::ZERO);
            let first = (0..500).filter(|_| bucket.try_take(T(1))).count() as u64;
            assert_eq!(first, burst.min(500), "{rate}");
            // One token per step: as many as the rate says, to the token.
            let step = quota.rate().nanos_for(Tokens::MICRO as u64, 0).unwrap();
            let mut admitted = 0;
            for n in 1..=1000 {
                bucket.advance(&quota, Timestamp::from_nanos(n * step));
                admitted += u64::from(bucket.try_take(T(1)));
            }
            assert_eq!(admitted, 1000, "{rate}");
        }
    }

    #[test]
    fn ba_g5_a_rate_below_one_per_second_waits_its_full_period() {
        let quota = quota("1/10s", 1);
        let mut bucket = TokenBucket::full(&quota, Timestamp::ZERO);
        assert!(bucket.try_take(T(1)));
        for (millis, admitted) in
            [(1500, false), (3000, false), (6000, false), (9000, false), (10_300, true)]
        {
            bucket.advance(&quota, Timestamp::from_millis(millis));
            assert_eq!(bucket.try_take(T(1)), admitted, "{millis} ms");
        }
    }

    #[test]
    fn ba_g6_below_the_rate_nothing_is_ever_refused() {
        let quota = quota("20/s", 20);
        let mut bucket = TokenBucket::full(&quota, Timestamp::ZERO);
        for n in 0..240 {
            bucket.advance(&quota, Timestamp::from_millis(n * 500));
            assert!(bucket.try_take(T(1)));
        }
    }

    #[test]
    fn a_changed_quota_keeps_the_deficit_in_tokens() {
        // Burst and level before, burst and level after.
        for (b, level, b_new, level_new) in [
            (5, 0, 50, 45),
            (5, 5, 50, 50),
            (5, 3, 10, 8),
            (50, 25, 3, 0),
            (100, 80, 50, 30),
            (10, -4, 20, 6),
            (20, 6, 10, 0),
            (10, -4, 10, -4),
            (10, -4, 3, -4),
            (5, 2, 0, 0),
            (0, 0, 5, 5),
        ] {
            let at = |b| quota(if b == 0 { "0/h" } else { "7/h" }, b);
            let mut bucket =
                TokenBucket { level: level * Tokens::MICRO, at: Timestamp::ZERO, carry: 0 };
            // Another rate, so that the change is one even with the same burst.
            let new = quota(if b_new == 0 { "0/s" } else { "9/h" }, b_new);
            bucket.change_quota(&at(b), &new, Timestamp::ZERO);
            let expected = level_new * Tokens::MICRO;
            assert_eq!(bucket.level().micros(), expected, "{level} of {b} under {b_new}");
        }
    }

    #[test]
    fn a_quota_counts_from_its_own_moment_on() {
        let (slow, fast) = (quota("1/s", 10), quota("4/s", 20));
        let mut bucket = TokenBucket::with_level(&slow, T(0), Timestamp::ZERO);
        bucket.change_quota(&slow, &fast, Timestamp::from_millis(2000));
        assert_eq!(bucket.level(), T(12));
        bucket.advance(&fast, Timestamp::from_millis(3000));
        assert_eq!(bucket.level(), T(16));
    }

    proptest! {
        #[test]
        fn any_change_of_quota_leaves_a_valid_bucket(
            (b, level, b_new) in (1..1000i64, -3000..1000i64, 1..1000i64),
            (n, n_new) in (1..1000u64, 1..1000u64),
            nanos in 0..5_000_000_000u64,
        ) {
            let old = quota(&format!("{n}/3s"), b as u64);
            let new = quota(&format!("{n_new}/7s"), b_new as u64);
            let level = level.min(b) * Tokens::MICRO;
            let mut bucket = TokenBucket { level, at: Timestamp::ZERO, carry: 0 };
            bucket.advance(&old, Timestamp::from_nanos(nanos / 2));
            let before = bucket.level;
            bucket.change_quota(&old, &new, Timestamp::from_nanos(nanos / 2));
            prop_assert!(bucket.is_valid(&new));
            prop_assert!(bucket.level >= before.min(0), "no debt is made");
            let deficit = |quota: &Quota, level: i64| quota.burst().micros() - level;
            prop_assert!(deficit(&new, bucket.level) <= deficit(&old, before), "nothing is taken");
        }
    }

    #[test]
    fn ba_g9_far_above_the_rate_the_rate_is_admitted_in_full() {
        let quota = quota("200/s", 200);
        let mut bucket = TokenBucket::full(&quota, Timestamp::ZERO);
        let mut admitted = 0;
        for n in 0..10_000 {
            bucket.advance(&quota, Timestamp::from_millis(n));
            admitted += u32::from(bucket.try_take(T(1)));
        }
        assert_eq!(admitted, 200 + 1999);
    }

    #[test]
    fn ba_g12_time_that_goes_back_changes_nothing() {
        let quota = quota("2/s", 2);
        let mut bucket = TokenBucket::full(&quota, Timestamp::from_millis(5000));
        assert!(bucket.try_take(T(2)));
        bucket.advance(&quota, Timestamp::from_millis(1000));
        assert_eq!(bucket.level(), Tokens::ZERO);
        bucket.advance(&quota, Timestamp::from_millis(5500));
        assert_eq!(bucket.level(), T(1));
    }

    #[test]
    fn one_per_day_and_a_million_per_second_are_exact() {
        let day = quota("1/d", 1);
        let mut bucket = TokenBucket::full(&day, Timestamp::ZERO);
        assert!(bucket.try_take(T(1)));
        // Advancing every 7 ms for a day less one step must not give the token
        // early, and the full day must give it.
        let full = 86_400_000_000_000;
        let mut now = 0;
        while now + 70_000_001 < full {
            now += 70_000_001;
            bucket.advance(&day, Timestamp::from_nanos(now));
        }
        assert!(!bucket.try_take(T(1)));
        assert_eq!(bucket.due(&day, T(1)), Due::In(full - now));
        bucket.advance(&day, Timestamp::from_nanos(full));
        assert!(bucket.try_take(T(1)));

        let fast = quota("1000000/s", 10);
        let mut bucket = TokenBucket::with_level(&fast, Tokens::ZERO, Timestamp::ZERO);
        bucket.advance(&fast, Timestamp::from_nanos(1500));
        assert_eq!(bucket.level(), Tokens::from_micros(1_500_000));
    }

    #[test]
    fn the_debt_cap_forgives_and_says_how_much() {
        let quota = quota("1/s", 5);
        let mut bucket = TokenBucket::full(&quota, Timestamp::ZERO);
        assert_eq!(bucket.shift(&quota, Tokens::from_micros(-12_000_000)), T(2));
        assert_eq!(bucket.level(), Tokens::from_micros(-5_000_000));
        assert_eq!(bucket.due(&quota, T(1)), Due::In(6_000_000_000));
        assert_eq!(bucket.shift(&quota, T(100)), Tokens::ZERO);
        assert_eq!(bucket.level(), T(5));
    }

    #[test]
    fn due_is_never_above_the_burst_or_at_rate_zero() {
        let limited = quota("1/s", 5);
        let bucket = TokenBucket::full(&limited, Timestamp::ZERO);
        assert_eq!(bucket.due(&limited, T(5)), Due::Now);
        assert_eq!(bucket.due(&limited, T(6)), Due::Never);
        let blocked = quota("0/s", 0);
        let bucket = TokenBucket::full(&blocked, Timestamp::ZERO);
        assert_eq!(bucket.due(&blocked, T(1)), Due::Never);
    }

    proptest! {
        /// However time is cut into steps, the level is the same as in one step.
        #[test]
        fn refilling_is_the_same_in_one_step_or_many(
            tokens in 1u64..1_000_000,
            period in 1u32..86_400_000,
            burst in 1u64..1_000,
            debt in 0i64..2_000_000_000,
            steps in prop::collection::vec(0u64..3_000_000_000, 1..40),
        ) {
            prop_assume!(tokens <= u64::from(period) * 1_000_000);
            let rate = super::super::Rate::try_new(tokens, Duration::from_millis(u64::from(period))).unwrap();
            let quota = Quota::try_new(rate, burst).unwrap();
            let start = TokenBucket::with_level(&quota, Tokens::from_micros(-debt), Timestamp::ZERO);
            let mut many = start;
            let mut now = 0;
            for step in &steps {
                now += step;
                many.advance(&quota, Timestamp::from_nanos(now));
                prop_assert!(many.is_valid(&quota));
            }
            let mut one = start;
            one.advance(&quota, Timestamp::from_nanos(now));
            prop_assert_eq!(one, many);
        }

        /// `due` is exact: one nanosecond earlier the tokens are not there.
        #[test]
        fn due_is_exact_to_the_nanosecond(
            tokens in 1u64..1_000_000,
            period in 1u32..86_400_000,
            spent in 1u64..500,
            first in 0u64..5_000_000_000,
            cost in 1u64..500,
        ) {
            prop_assume!(tokens <= u64::from(period) * 1_000_000);
            let rate = super::super::Rate::try_new(tokens, Duration::from_millis(u64::from(period))).unwrap();
            let quota = Quota::try_new(rate, 500).unwrap();
            let mut bucket = TokenBucket::with_level(&quota, T(500 - spent), Timestamp::ZERO);
            bucket.advance(&quota, Timestamp::from_nanos(first));
            if let Due::In(nanos) = bucket.due(&quota, T(cost)) {
                let mut early = bucket;
                early.advance(&quota, Timestamp::from_nanos(first + nanos - 1));
                prop_assert!(!early.try_take(T(cost)));
                let mut due = bucket;
                due.advance(&quota, Timestamp::from_nanos(first + nanos));
                prop_assert!(due.try_take(T(cost)));
            }
        }
    }
}
