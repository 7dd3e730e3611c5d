//! Pause: a bucket that is closed until some moment, because the upstream asked
//! for it. It refills meanwhile, and nobody is reckoned to spend from it.

use super::frame::PauseLeft;
use crate::time::Timestamp;

/// Longest pause; a longer one is cut, so that a mistake ends by itself.
const MAX_MILLIS: u64 = 24 * 3_600_000;

/// Until when a bucket is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pause {
    pub(super) generation: u64,
    pub(super) until: Timestamp,
    /// This replica set it, and tells its peers; others never pass it on, since
    /// the time that it takes would make it longer each time.
    pub(super) mine: bool,
}

impl Pause {
    pub(super) fn new(generation: u64, millis: u64, mine: bool, now: Timestamp) -> Self {
        let until = now.plus_nanos(millis.min(MAX_MILLIS).saturating_mul(1_000_000));
        Self { generation, until, mine }
    }

    /// Nanoseconds until it ends.
    pub(super) const fn left(&self, now: Timestamp) -> u64 {
        self.until.nanos_since(now)
    }

    pub(super) const fn wire(&self, now: Timestamp) -> PauseLeft {
        PauseLeft { generation: self.generation, millis: self.left(now).div_ceil(1_000_000) }
    }

    /// Which of two holds: the larger generation, then the later end.
    pub(super) fn later(mine: Option<Self>, theirs: Self) -> Self {
        match mine {
            Some(mine) if (mine.generation, mine.until) >= (theirs.generation, theirs.until) => {
                mine
            }
            Some(_) | None => theirs,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_larger_generation_holds_and_then_the_later_end() {
        let now = Timestamp::from_millis(1000);
        let pause = |generation, millis| Pause::new(generation, millis, false, now);
        assert_eq!(Pause::later(Some(pause(2, 10)), pause(1, 900)), pause(2, 10));
        assert_eq!(Pause::later(Some(pause(2, 10)), pause(2, 900)), pause(2, 900));
        assert_eq!(Pause::later(Some(pause(2, 900)), pause(3, 0)), pause(3, 0));
        assert_eq!(pause(1, 2).wire(now), PauseLeft { generation: 1, millis: 2 });
        let longest = Pause::new(1, u64::MAX, true, now);
        assert_eq!(longest.left(now), MAX_MILLIS * 1_000_000);
    }
}
