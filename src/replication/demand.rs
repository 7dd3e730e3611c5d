//! Demand: how fast requests ask for tokens, admitted or not.
//!
//! An exponential average whose window follows the rate itself, so that it holds
//! about sixteen requests: fast keys are followed closely, slow ones steadily.
//! Rates are in micro-tokens per nanosecond, which is thousandths of a token per
//! second.

use crate::time::Timestamp;

/// Requests in the window.
const REQUESTS: f64 = 16.0;
/// The window's bounds in nanoseconds.
const SHORTEST: f64 = 50e6;
const LONGEST: f64 = 2e9;
/// Part of a request in the window below which the rest is nothing.
const NOTHING: f64 = 0.01;

/// The smoothed rate at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    rate: f64,
    at: Timestamp,
}

impl Demand {
    pub(super) const fn none(now: Timestamp) -> Self {
        Self { rate: 0.0, at: now }
    }

    /// When it was last asked.
    pub(super) const fn asked_at(&self) -> Timestamp {
        self.at
    }

    /// The rate at `now`, given the mean cost of a request in micro-tokens.
    pub(super) fn at(&self, mean_cost: f64, now: Timestamp) -> f64 {
        if self.rate <= 0.0 {
            return 0.0;
        }
        let pause = now.nanos_since(self.at) as f64;
        let window = window(self.rate, mean_cost);
        let rate = if pause > 0.0 { self.rate * (-pause / window).exp() } else { self.rate };
        if rate < NOTHING * mean_cost / window { 0.0 } else { rate }
    }

    /// A request asks for `cost` micro-tokens.
    pub(super) fn ask(&mut self, cost: f64, mean_cost: f64, now: Timestamp) {
        let window = window(self.rate, mean_cost);
        let pause = now.nanos_since(self.at) as f64;
        let before = if pause > 0.0 { self.rate * (-pause / window).exp() } else { self.rate };
        self.rate = before + cost / window;
        self.at = now;
    }
}

fn window(rate: f64, mean_cost: f64) -> f64 {
    if rate <= 0.0 { LONGEST } else { (REQUESTS * mean_cost / rate).clamp(SHORTEST, LONGEST) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: f64 = 1e6;

    #[test]
    fn a_steady_stream_is_measured_and_its_end_is_seen() {
        for per_second in [2.0, 30.0, 100.0, 5000.0] {
            let mut demand = Demand::none(Timestamp::ZERO);
            let step = (1e9 / per_second) as u64;
            let mut now = Timestamp::ZERO;
            for _ in 0..400 {
                now = now.plus_nanos(step);
                demand.ask(TOKEN, TOKEN, now);
            }
            let measured = demand.at(TOKEN, now) * 1000.0;
            assert!((measured / per_second - 1.0).abs() < 0.3, "{measured} for {per_second}");
            assert_eq!(demand.at(TOKEN, now.plus_nanos(15_000_000_000)), 0.0);
        }
    }
}
