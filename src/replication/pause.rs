//! Pause: a bucket, or all of a limit, that is closed until some moment, because
//! the upstream or an operator asked for it. It refills meanwhile, and nobody is
//! reckoned to spend from it.
//!
//! Of two pauses the larger generation holds, and then the later end. What the
//! upstream says keeps the generation, so that the longest of what all replicas
//! were told holds; an operator's word begins a new one, so that the latest holds,
//! also to open. A generation is remembered until all that it replaced would have
//! ended, wherever that may still be under way; then the next begins at 1 again.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use arc_swap::ArcSwap;

use super::frame::PauseLeft;
use crate::limiter::{LimitIndex, PauseOrder};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::time::Timestamp;

/// Longest pause; a longer one is cut, so that a mistake ends by itself.
const MAX_NANOS: u64 = PauseOrder::LONGEST.as_nanos() as u64;

/// Until when something is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pause {
    pub(super) generation: u64,
    pub(super) until: Timestamp,
    /// Until when the generation is remembered; never before `until`.
    pub(super) remembered: Timestamp,
    /// This replica set it, and tells its peers; others never pass it on, since
    /// the time that it takes would make it longer each time.
    pub(super) mine: bool,
}

impl Pause {
    /// What a peer said.
    pub(super) fn told(told: PauseLeft, now: Timestamp) -> Self {
        let after = |millis: u64| now.plus_nanos(millis.saturating_mul(1_000_000).min(MAX_NANOS));
        let until = after(told.millis);
        let remembered = after(told.remembered_millis).max(until);
        Self { generation: told.generation, until, remembered, mine: false }
    }

    /// What holds after `order`; `None` if it changes nothing.
    pub(super) fn ordered(known: Option<Self>, order: PauseOrder, now: Timestamp) -> Option<Self> {
        let known = known.filter(|pause| !pause.is_over(now));
        let generation = known.map_or(0, |pause| pause.generation);
        let (generation, until) = match order {
            PauseOrder::AtLeast(until) => {
                let until = until.min(now.plus_nanos(MAX_NANOS));
                if until <= known.map_or(now, |pause| pause.until.max(now)) {
                    return None;
                }
                (generation.max(1), until)
            }
            PauseOrder::Until(until) => {
                (generation.saturating_add(1), until.clamp(now, now.plus_nanos(MAX_NANOS)))
            }
            PauseOrder::Lift => {
                known.filter(|pause| pause.left(now) > 0)?;
                (generation.saturating_add(1), now)
            }
        };
        let remembered = known.map_or(until, |pause| pause.remembered.max(until));
        Some(Self { generation, until, remembered, mine: true })
    }

    /// Nanoseconds until it ends.
    pub(super) const fn left(&self, now: Timestamp) -> u64 {
        self.until.nanos_since(now)
    }

    /// Whether it is as if it had never been.
    pub(super) const fn is_over(&self, now: Timestamp) -> bool {
        self.remembered.nanos_since(now) == 0
    }

    pub(super) const fn wire(&self, now: Timestamp) -> PauseLeft {
        PauseLeft {
            generation: self.generation,
            millis: self.left(now).div_ceil(1_000_000),
            remembered_millis: self.remembered.nanos_since(now).div_ceil(1_000_000),
        }
    }

    /// Which of two holds: the larger generation, then the later end.
    pub(super) fn later(mine: Option<Self>, theirs: Self, now: Timestamp) -> Self {
        let Some(mine) = mine.filter(|mine| !mine.is_over(now)) else { return theirs };
        let remembered = mine.remembered.max(theirs.remembered);
        let mine_holds = theirs.is_over(now)
            || (mine.generation, mine.until) >= (theirs.generation, theirs.until);
        Self { remembered, ..if mine_holds { mine } else { theirs } }
    }
}

/// The limits all of whose buckets are closed, those that are still to be made
/// included. Costs a check one load while there are none.
#[derive(Debug, Default)]
pub(super) struct LimitPauses {
    any: AtomicBool,
    known: ArcSwap<BTreeMap<LimitIndex, Pause>>,
    /// Held by whoever changes them.
    changing: Mutex<()>,
}

impl LimitPauses {
    /// Until when a limit is closed.
    pub(super) fn until(&self, limit: LimitIndex) -> Timestamp {
        if !self.any.load(Ordering::Acquire) {
            return Timestamp::ZERO;
        }
        self.known.load().get(&limit).map_or(Timestamp::ZERO, |pause| pause.until)
    }

    /// All that are remembered at `now`.
    pub(super) fn all(&self, now: Timestamp) -> Vec<(LimitIndex, Pause)> {
        let known = self.known.load();
        let known = known.iter().filter(|(_, pause)| !pause.is_over(now));
        known.map(|(limit, pause)| (*limit, *pause)).collect()
    }

    /// Takes an order for a limit; whether it changes anything.
    pub(super) fn order(&self, limit: LimitIndex, order: PauseOrder, now: Timestamp) -> bool {
        self.change(limit, now, |known| Pause::ordered(known, order, now))
    }

    /// Takes what a peer said of a limit; whether it changes anything.
    pub(super) fn told(&self, limit: LimitIndex, told: PauseLeft, now: Timestamp) -> bool {
        self.change(limit, now, |known| Some(Pause::later(known, Pause::told(told, now), now)))
    }

    fn change(
        &self,
        limit: LimitIndex,
        now: Timestamp,
        to: impl FnOnce(Option<Pause>) -> Option<Pause>,
    ) -> bool {
        // What is known is whole whatever a panicking holder did.
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known = BTreeMap::clone(&self.known.load());
        let before = known.get(&limit).copied();
        let Some(after) = to(before).filter(|after| before != Some(*after)) else { return false };
        known.retain(|_, pause| !pause.is_over(now));
        known.insert(limit, after);
        self.known.store(Arc::new(known));
        self.any.store(true, Ordering::Release);
        true
    }

    /// Forgets what is over.
    pub(super) fn sweep(&self, now: Timestamp) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known = BTreeMap::clone(&self.known.load());
        known.retain(|_, pause| !pause.is_over(now));
        let any = !known.is_empty();
        self.known.store(Arc::new(known));
        self.any.store(any, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(100_000);

    fn at(millis: u64) -> Timestamp {
        NOW.plus_nanos(millis * 1_000_000)
    }

    fn told(generation: u64, millis: u64) -> Pause {
        Pause::told(PauseLeft { generation, millis, remembered_millis: millis }, NOW)
    }

    #[test]
    fn the_larger_generation_holds_and_then_the_later_end() {
        let later = |mine, theirs| {
            let pause = Pause::later(Some(mine), theirs, NOW);
            (pause.generation, pause.left(NOW) / 1_000_000)
        };
        assert_eq!(later(told(2, 10), told(1, 900)), (2, 10));
        assert_eq!(later(told(2, 10), told(2, 900)), (2, 900));
        assert_eq!(later(told(2, 900), told(2, 10)), (2, 900));
        assert_eq!(later(told(1, 10), told(2, 5)), (2, 5));
        let longest = told(1, u64::MAX);
        assert_eq!(longest.left(NOW), MAX_NANOS);
    }

    #[test]
    fn the_upstream_can_only_lengthen_and_an_operator_can_also_shorten() {
        let order = |known, order| Pause::ordered(known, order, NOW);
        let first = order(None, PauseOrder::AtLeast(at(500))).unwrap();
        assert_eq!((first.generation, first.until), (1, at(500)));
        assert_eq!(order(Some(first), PauseOrder::AtLeast(at(300))), None);
        assert_eq!(order(None, PauseOrder::AtLeast(NOW)), None, "it is over");
        let longer = order(Some(first), PauseOrder::AtLeast(at(900))).unwrap();
        assert_eq!((longer.generation, longer.until), (1, at(900)));
        let shorter = order(Some(longer), PauseOrder::Until(at(100))).unwrap();
        assert_eq!((shorter.generation, shorter.until), (2, at(100)));
        let lifted = order(Some(shorter), PauseOrder::Lift).unwrap();
        assert_eq!((lifted.generation, lifted.left(NOW)), (3, 0));
        assert_eq!(order(Some(lifted), PauseOrder::Lift), None, "it is open");
        assert_eq!(order(None, PauseOrder::Lift), None);
        // What the upstream says after that counts.
        let again = order(Some(lifted), PauseOrder::AtLeast(at(50))).unwrap();
        assert_eq!((again.generation, again.until), (3, at(50)));
    }

    #[test]
    fn a_generation_is_remembered_as_long_as_what_it_replaced_may_be_told() {
        let long = Pause::ordered(None, PauseOrder::Until(at(60_000)), NOW).unwrap();
        let lifted = Pause::ordered(Some(long), PauseOrder::Lift, at(10)).unwrap();
        assert!(!lifted.is_over(at(59_999)) && lifted.is_over(at(60_000)));
        // Who missed that it was lifted says it again, and who lifted it knows better.
        let stale = Pause { mine: false, ..long };
        assert_eq!(Pause::later(Some(lifted), stale, at(50_000)).left(at(50_000)), 0);
        // Whoever hears of the lifting first remembers it as long.
        let heard = Pause::told(lifted.wire(at(10)), at(10));
        assert_eq!(heard.remembered, at(60_000));
        // When all is over generations begin anew, and nothing old is in the way.
        let anew = Pause::ordered(Some(lifted), PauseOrder::AtLeast(at(61_000)), at(60_000));
        let anew = anew.unwrap();
        assert_eq!(anew.generation, 1);
        let theirs = Pause { mine: false, ..anew };
        assert_eq!(Pause::later(Some(lifted), theirs, at(60_000)), theirs);
    }

    #[test]
    fn a_limit_is_closed_until_the_end_of_its_pause() {
        let pauses = LimitPauses::default();
        let (one, other) = (LimitIndex(1), LimitIndex(2));
        assert!(pauses.order(one, PauseOrder::Until(at(1000)), NOW));
        assert!(!pauses.order(other, PauseOrder::Lift, NOW));
        assert_eq!((pauses.until(one), pauses.until(other)), (at(1000), Timestamp::ZERO));
        let [(_, pause)] = pauses.all(NOW)[..] else { panic!() };
        assert!(!pauses.told(one, pause.wire(NOW), NOW), "nothing new");
        assert!(pauses.order(one, PauseOrder::Lift, at(10)));
        assert_eq!(pauses.until(one), at(10));
        pauses.sweep(at(999));
        assert_eq!(pauses.all(at(999)).len(), 1);
        pauses.sweep(at(1000));
        assert!(pauses.all(at(1000)).is_empty() && !pauses.any.load(Ordering::Relaxed));
    }
}
