//! A limit in its provider's own words: so many requests in any window.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::quota::Rate;
use super::super::tokens::Tokens;
use super::text::Burst;
use crate::settings::{DurationText, Fault, OrNone, Whole};

/// How much a provider bears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Window")]
pub struct WindowConfig {
    /// Requests in any window, 2 to 10^12. Required.
    #[serde(with = "Requests")]
    pub requests: u64,
    /// How long a window is. Required.
    #[serde(with = "DurationText")]
    pub per: Duration,
    /// Requests that may go at once, fewer than `requests`. Default: a twentieth of
    /// `requests`, and 2 where that is less.
    #[serde(default, with = "OrNone::<Burst>")]
    pub burst: Option<Burst>,
}

type Requests = Whole<2, { Tokens::MAX_WHOLE }>;

impl WindowConfig {
    /// Requests that may go at once.
    pub fn burst(&self) -> u64 {
        self.burst.map_or_else(|| Self::usual_burst(self.requests), |burst| burst.0)
    }

    /// Requests that may go at once if nothing is said.
    pub(super) fn usual_burst(requests: u64) -> u64 {
        (requests / 20).max(2).min(requests.saturating_sub(1))
    }

    /// The window of a limit whose rate promises it.
    pub(super) fn of(rate: Rate, burst: Option<Burst>) -> Self {
        let per = Duration::from_millis(u64::from(rate.period_ms()));
        Self { requests: rate.tokens(), per, burst }
    }

    /// Rate and burst of a bucket that keeps to the window: a bucket lets burst + rate
    /// x time pass, and replicas hear of each other's spending within
    /// `sync_interval`, so that r = (requests - burst) / (per + sync_interval).
    ///
    /// # Errors
    /// If the burst leaves no rate, or the rate cannot be represented.
    pub(super) fn paced(&self, sync_interval: Duration) -> Result<(Rate, u64), Fault> {
        let burst = self.burst();
        let rest = self.requests.checked_sub(burst).filter(|rest| *rest > 0).ok_or_else(|| {
            let message = format!("must be less than the {} requests", self.requests);
            Fault::new(["burst".into()], message).given(&["requests"])
        })?;
        let millis = |time: Duration| u64::try_from(time.as_nanos().div_ceil(1_000_000));
        let period = millis(self.per.saturating_add(sync_interval)).unwrap_or(u64::MAX);
        let rate = Rate::try_new(rest, Duration::from_millis(period));
        rate.map(|rate| (rate, burst)).map_err(|error| {
            let message = format!("does not go with {} requests: {error}", self.requests);
            Fault::new(["per".into()], message).given(&["requests"])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(requests: u64, per: &str, burst: Option<u64>) -> WindowConfig {
        let per = humantime::parse_duration(per).unwrap();
        WindowConfig { requests, per, burst: burst.map(Burst) }
    }

    #[test]
    fn burst_and_rate_together_are_what_the_provider_bears() {
        let sync = Duration::from_millis(100);
        for (window, rate, burst) in [
            (window(100, "10s", Some(5)), "95/10100ms", 5),
            (window(100, "10s", None), "95/10100ms", 5),
            (window(10, "1s", None), "8/1100ms", 2),
            (window(2, "1min", None), "1/60100ms", 1),
            (window(1000, "1ms", None), "950/101ms", 50),
            (window(7, "1500us", Some(1)), "6/102ms", 1),
        ] {
            let (got, b) = window.paced(sync).unwrap();
            let wanted: Rate = rate.parse().unwrap();
            assert_eq!((got, b), (wanted, burst), "{window:?}");
        }
    }

    #[test]
    fn what_leaves_no_rate_or_cannot_be_a_rate_is_a_fault() {
        let sync = Duration::from_millis(100);
        for (window, field) in [
            (window(5, "1s", Some(5)), "burst"),
            (window(5, "1s", Some(6)), "burst"),
            (window(1_000_000_000_000, "1ms", None), "per"),
            (window(10, "60d", None), "per"),
        ] {
            let fault = window.paced(sync).unwrap_err();
            assert_eq!(fault.path, [field.into()], "{window:?}");
        }
    }
}
