//! Rate: how fast an origin spends, measured from totals.
//!
//! An exponential average over time, divided by the weight of all samples so far,
//! so that the beginning from zero does not count. Every replica measures an
//! origin from the same flushes, and the origin itself does so too: what all
//! believe of its share is nearly the same.

use crate::limiter::Quota;

/// The window is three seconds, or the time of twenty tokens if that is longer.
const WINDOW_NANOS: f64 = 3e9;
const WINDOW_TOKENS: f64 = 20.0;

/// A measured rate, in micro-tokens per nanosecond.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rate {
    value: f64,
    /// Nanoseconds over which it was measured.
    observed: f64,
}

impl Rate {
    pub(super) const fn value(self) -> f64 {
        self.value
    }

    /// `spent` micro-tokens in `nanos` nanoseconds.
    pub(super) fn learn(&mut self, spent: f64, nanos: f64, quota: &Quota) {
        if nanos <= 0.0 {
            return;
        }
        let tokens = WINDOW_TOKENS * 1e9 / quota.rate().per_second().max(f64::MIN_POSITIVE);
        let window = WINDOW_NANOS.max(tokens);
        self.observed += nanos;
        let weight = (1.0 - (-nanos / window).exp()) / (1.0 - (-self.observed / window).exp());
        self.value += weight * (spent.max(0.0) / nanos - self.value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_rate_is_known_from_the_first_sample_on() {
        let quota = Quota::try_new("100/s".parse().unwrap(), 100).unwrap();
        let mut rate = Rate::default();
        for _ in 0..20 {
            rate.learn(2e6, 100e6, &quota);
            assert!((rate.value() * 1000.0 - 20.0).abs() < 1e-6);
        }
        for _ in 0..100 {
            rate.learn(5e6, 100e6, &quota);
        }
        assert!((rate.value() * 1000.0 - 50.0).abs() < 2.0);
    }
}
