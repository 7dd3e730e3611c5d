//! Quota (layer 1, pure): how fast a bucket refills and how much it holds.
//!
//! A rate of `n` tokens per `k` milliseconds is, in the units of the bucket,
//! exactly `n / k` micro-tokens per nanosecond (one token per millisecond is
//! 10^6 micro-tokens per 10^6 ns). Refilling is therefore one multiplication
//! and one division whose remainder the bucket carries on: nothing is rounded
//! away, for 1/d as for 1,000,000/s.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::tokens::Tokens;

/// Tokens per period. Zero tokens block everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    tokens: u64,
    period_ms: u32,
}

/// Why a rate cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RateError {
    /// Not of the form `N/period`.
    #[error("`{0}` is not a rate: write N/s, N/min, N/h, N/d or N/<duration> such as 5/10s")]
    Form(String),
    /// The number of tokens is not a whole number in range.
    #[error("`{0}` is not a whole number of tokens from 0 to {max}", max = Tokens::MAX_WHOLE)]
    Tokens(String),
    /// The period is not a whole number of milliseconds in range.
    #[error("`{0}` is not a period of whole milliseconds from 1ms to 49d")]
    Period(String),
    /// More than a token per nanosecond.
    #[error("`{0}` is more than 1,000,000,000 tokens per second")]
    TooFast(String),
}

impl Rate {
    /// `tokens` every `period`.
    ///
    /// # Errors
    /// If the period is not a whole number of milliseconds from 1 ms to 49 d, or
    /// the rate is above 10^9 tokens per second.
    pub fn try_new(tokens: u64, period: Duration) -> Result<Self, RateError> {
        let text = || format!("{tokens}/{}", humantime::format_duration(period));
        if tokens > Tokens::MAX_WHOLE {
            return Err(RateError::Tokens(tokens.to_string()));
        }
        let millis = u32::try_from(period.as_millis())
            .ok()
            .filter(|ms| *ms > 0 && period.subsec_nanos().is_multiple_of(1_000_000))
            .ok_or_else(|| RateError::Period(text()))?;
        if tokens > u64::from(millis) * 1_000_000 {
            return Err(RateError::TooFast(text()));
        }
        Ok(Self { tokens, period_ms: millis })
    }

    /// Tokens per period.
    pub const fn tokens(self) -> u64 {
        self.tokens
    }

    /// The period in milliseconds.
    pub const fn period_ms(self) -> u32 {
        self.period_ms
    }

    /// Whether the rate lets nothing pass, ever.
    pub const fn is_blocked(self) -> bool {
        self.tokens == 0
    }

    /// Tokens per second, for estimates and display.
    pub fn per_second(self) -> f64 {
        self.tokens as f64 * 1000.0 / f64::from(self.period_ms)
    }

    /// The refill over `nanos` nanoseconds, given the `carry` left by the last
    /// one: whole micro-tokens and the new carry (below `period_ms`).
    pub(super) fn refill(self, nanos: u64, carry: u32) -> (u64, u32) {
        let period = u64::from(self.period_ms);
        match nanos.checked_mul(self.tokens).and_then(|p| p.checked_add(u64::from(carry))) {
            // The remainder is below `period_ms`, a u32.
            Some(product) => (product / period, (product % period) as u32),
            None => {
                let product = u128::from(nanos) * u128::from(self.tokens) + u128::from(carry);
                let micros = product / u128::from(period);
                let rest = (product % u128::from(period)) as u32;
                (u64::try_from(micros).unwrap_or(u64::MAX), rest)
            }
        }
    }

    /// Nanoseconds until `micros` more micro-tokens have come, given `carry`.
    /// `None` if they never come.
    pub(super) fn nanos_for(self, micros: u64, carry: u32) -> Option<u64> {
        if micros == 0 {
            return Some(0);
        }
        if self.tokens == 0 {
            return None;
        }
        // The carry is below the period.
        match micros.checked_mul(u64::from(self.period_ms)) {
            Some(product) => Some((product - u64::from(carry)).div_ceil(self.tokens)),
            None => {
                let units = u128::from(micros) * u128::from(self.period_ms) - u128::from(carry);
                u64::try_from(units.div_ceil(u128::from(self.tokens))).ok()
            }
        }
    }
}

impl FromStr for Rate {
    type Err = RateError;

    fn from_str(text: &str) -> Result<Self, RateError> {
        let form = || RateError::Form(text.to_owned());
        let (count, period) = text.trim().split_once('/').ok_or_else(form)?;
        let (count, period) = (count.trim(), period.trim());
        if count.is_empty() || period.is_empty() {
            return Err(form());
        }
        let digits: String = count.chars().filter(|c| *c != '_').collect();
        let tokens = digits
            .parse::<u64>()
            .ok()
            .filter(|n| *n <= Tokens::MAX_WHOLE)
            .ok_or_else(|| RateError::Tokens(count.to_owned()))?;
        let period = match period {
            "s" | "sec" | "second" => Duration::from_secs(1),
            "m" | "min" | "minute" => Duration::from_secs(60),
            "h" | "hour" => Duration::from_secs(3600),
            "d" | "day" => Duration::from_secs(86_400),
            "ms" => Duration::from_millis(1),
            other => {
                humantime::parse_duration(other).map_err(|_| RateError::Period(other.to_owned()))?
            }
        };
        Self::try_new(tokens, period).map_err(|error| match error {
            RateError::Period(_) => RateError::Period(text.to_owned()),
            RateError::TooFast(_) => RateError::TooFast(text.to_owned()),
            RateError::Form(_) | RateError::Tokens(_) => error,
        })
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // In the largest unit that gives a whole number, as people write it.
        let units = [("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000), ("ms", 1)];
        let (unit, ms) = units
            .into_iter()
            .find(|(_, ms)| self.period_ms.is_multiple_of(*ms))
            .unwrap_or(("ms", 1));
        match self.period_ms / ms {
            1 => write!(f, "{}/{unit}", self.tokens),
            count => write!(f, "{}/{count}{unit}", self.tokens),
        }
    }
}

/// A rate and the capacity of the bucket that it fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quota {
    rate: Rate,
    burst: Tokens,
    keeps_window: bool,
}

impl Quota {
    /// A bucket of `burst` tokens refilled at `rate`; `None` if the burst is
    /// zero for a rate that is not, or above [`Tokens::MAX_WHOLE`].
    pub fn try_new(rate: Rate, burst: u64) -> Option<Self> {
        if burst == 0 && !rate.is_blocked() {
            return None;
        }
        Some(Self { rate, burst: Tokens::from_whole(burst)?, keeps_window: false })
    }

    /// The same, of a limit that promises that all replicas together never let more
    /// pass than one bucket would, in any window.
    #[must_use]
    pub const fn keeping_window(self) -> Self {
        Self { keeps_window: true, ..self }
    }

    /// Whether replicas must not even for a moment give out more than one bucket.
    pub const fn keeps_window(&self) -> bool {
        self.keeps_window
    }

    /// The refill rate.
    pub const fn rate(&self) -> Rate {
        self.rate
    }

    /// The capacity.
    pub const fn burst(&self) -> Tokens {
        self.burst
    }

    /// How far below zero a level may go: max(burst, two seconds of the rate).
    /// What peers spent beyond that is forgiven.
    pub fn debt_cap(&self) -> Tokens {
        // Rates are at most 10^9/s, so two seconds are at most 2*10^15 micros.
        let (two_seconds, _) = self.rate.refill(2_000_000_000, 0);
        Tokens::from_micros(self.burst.micros().max(i64::try_from(two_seconds).unwrap_or(i64::MAX)))
    }

    /// Time from empty to full in seconds, rounded up; `None` when blocked.
    pub fn fill_seconds(&self) -> Option<u64> {
        self.rate
            .nanos_for(u64::try_from(self.burst.micros()).unwrap_or(0), 0)
            .map(|nanos| nanos.div_ceil(1_000_000_000))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Also where the product of the two does not fit into 64 bits.
        #[test]
        fn a_wait_is_as_long_as_the_tokens_take_and_no_nanosecond_longer(
            micros in prop_oneof![1u64..10_000_000, any::<u64>()],
            tokens in 1u64..1_000_000,
            period_ms in prop_oneof![1u32..100_000, 1u32..u32::MAX],
            carry in any::<u32>(),
        ) {
            prop_assume!(tokens <= u64::from(period_ms) * 1_000_000);
            let rate = Rate { tokens, period_ms };
            let carry = carry % period_ms;
            let Some(nanos) = rate.nanos_for(micros, carry) else { return Ok(()) };
            let come = |nanos: u64| {
                let units = u128::from(nanos) * u128::from(tokens) + u128::from(carry);
                units / u128::from(period_ms)
            };
            prop_assert!(come(nanos) >= u128::from(micros));
            prop_assert!(nanos == 0 || come(nanos - 1) < u128::from(micros));
        }
    }

    #[test]
    fn rates_parse_and_print() {
        for (text, tokens, period, printed) in [
            ("100/min", 100, 60_000, "100/min"),
            ("5/10s", 5, 10_000, "5/10s"),
            ("1/ms", 1, 1, "1/ms"),
            ("1/d", 1, 86_400_000, "1/d"),
            ("1_000/s", 1000, 1000, "1000/s"),
            (" 7 / 1500ms ", 7, 1500, "7/1500ms"),
            ("100/40d", 100, 3_456_000_000, "100/40d"),
            ("3/90s", 3, 90_000, "3/90s"),
            ("3/1h 30m", 3, 5_400_000, "3/90min"),
            ("0/s", 0, 1000, "0/s"),
        ] {
            let rate: Rate = text.parse().unwrap();
            assert_eq!((rate.tokens(), rate.period_ms()), (tokens, period), "{text}");
            assert_eq!(rate.to_string(), printed);
            assert_eq!(printed.parse(), Ok(rate), "what is printed is read again");
        }
    }

    #[test]
    fn what_cannot_be_represented_is_refused() {
        for text in [
            "",
            "100",
            "/s",
            "5/",
            "-1/s",
            "1.5/s",
            "5/0s",
            "5/1us",
            "5/1ns",
            "5/50d",
            "1000000000001/d",
            "2000000/ms",
            "99999999999999999999/s",
            "5/s/s",
            "5/fortnight",
        ] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
        assert!(Quota::try_new("5/s".parse().unwrap(), 0).is_none());
        assert!(Quota::try_new("0/s".parse().unwrap(), 0).is_some());
        assert!(Quota::try_new("5/s".parse().unwrap(), u64::MAX).is_none());
    }

    #[test]
    fn the_window_of_a_quota_is_its_fill_time() {
        let quota = Quota::try_new("100/min".parse().unwrap(), 20).unwrap();
        assert_eq!(quota.fill_seconds(), Some(12));
    }
}
