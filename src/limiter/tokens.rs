//! Token amounts (layer 1, pure): whole tokens and millionths of them.

use std::fmt;

/// An amount of tokens in micro-tokens (millionths of a token).
///
/// Signed, because a bucket's level goes below zero when a peer spent what this
/// replica had already given out. Costs are whole tokens, so a micro-token only
/// ever appears through refilling, replication and averaging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tokens(i64);

impl Tokens {
    /// Micro-tokens in one token.
    pub const MICRO: i64 = 1_000_000;
    /// No tokens.
    pub const ZERO: Self = Self(0);
    /// The most tokens a quota may name, so that sums of a few amounts and the
    /// product of a refill stay far from overflow.
    pub const MAX_WHOLE: u64 = 1_000_000_000_000;

    /// `micros` millionths of a token.
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// `whole` tokens, or `None` above [`Tokens::MAX_WHOLE`].
    pub const fn from_whole(whole: u64) -> Option<Self> {
        if whole > Self::MAX_WHOLE { None } else { Some(Self(whole as i64 * Self::MICRO)) }
    }

    /// The amount in micro-tokens.
    pub const fn micros(self) -> i64 {
        self.0
    }

    /// Whole tokens, rounded down, zero for a debt.
    pub const fn whole(self) -> u64 {
        if self.0 <= 0 { 0 } else { (self.0 / Self::MICRO) as u64 }
    }

    /// The amount as a floating-point number of tokens, for display only.
    pub fn as_f64(self) -> f64 {
        self.0 as f64 / Self::MICRO as f64
    }

    /// `self + other`, held at the ends of the range.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// `self - other`, held at the ends of the range.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 % Self::MICRO == 0 {
            write!(f, "{}", self.0 / Self::MICRO)
        } else {
            write!(f, "{:.3}", self.as_f64())
        }
    }
}
