//! Ids of origins.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::super::frame::Incarnation;
use super::super::ledger::OriginId;
use crate::time::Timestamp;

/// How long an origin that is only named in snapshots is remembered, and how long
/// one that is gone is not believed to live because a snapshot names it.
const NAMED_FOR: Duration = Duration::from_secs(60);

/// Origins that are only named in snapshots, at most. A group is smaller, even with
/// all that left it in the last minute; beyond it a snapshot is invented, and what it
/// says of more of them is as if it did not name them.
pub(super) const MAX_NAMED: usize = 4_096;

/// Ids of origins; they are met as peers or only named in snapshots.
#[derive(Debug, Default)]
pub(super) struct Origins {
    /// Named in a snapshot at this moment, and not met.
    named: BTreeMap<Incarnation, Timestamp>,
    /// Known to be gone since this moment.
    gone: BTreeMap<Incarnation, Timestamp>,
    ids: HashMap<Incarnation, OriginId>,
    names: HashMap<OriginId, Incarnation>,
    next: u32,
}

impl Origins {
    pub(super) fn intern(&mut self, incarnation: Incarnation) -> OriginId {
        let next = self.next;
        let id = *self.ids.entry(incarnation).or_insert(OriginId(next));
        if id.0 == next {
            self.next = next.wrapping_add(1);
            self.names.insert(id, incarnation);
        }
        id
    }

    pub(super) fn find(&self, incarnation: Incarnation) -> Option<OriginId> {
        self.ids.get(&incarnation).copied()
    }

    pub(super) fn name(&self, id: OriginId) -> Option<Incarnation> {
        self.names.get(&id).copied()
    }

    /// A session with it began.
    pub(super) fn meet(&mut self, incarnation: Incarnation) -> OriginId {
        self.named.remove(&incarnation);
        self.gone.remove(&incarnation);
        self.intern(incarnation)
    }

    /// A snapshot names an origin that is no peer. Whether that is news.
    pub(super) fn hear_of(&mut self, incarnation: Incarnation, now: Timestamp) -> bool {
        // Whoever sent the snapshot may learn later that it is gone.
        if self.gone.contains_key(&incarnation) {
            return false;
        }
        if self.named.len() >= MAX_NAMED && !self.named.contains_key(&incarnation) {
            return false;
        }
        self.intern(incarnation);
        self.named.insert(incarnation, now).is_none()
    }

    /// It is gone; should it be met again, it is another origin.
    pub(super) fn bury(&mut self, incarnation: Incarnation, now: Timestamp) {
        self.named.remove(&incarnation);
        self.gone.insert(incarnation, now);
        if let Some(id) = self.ids.remove(&incarnation) {
            self.names.remove(&id);
        }
    }

    /// Those that are only named, and when they were last.
    pub(super) fn named(&self) -> impl Iterator<Item = (Incarnation, Timestamp)> {
        self.named.iter().map(|(incarnation, at)| (*incarnation, *at))
    }

    /// Forgets who is neither a peer nor was named lately. Whether there was any.
    pub(super) fn sweep(&mut self, is_peer: impl Fn(Incarnation) -> bool, now: Timestamp) -> bool {
        let before = self.ids.len();
        self.named.retain(|_, at| now.since(*at) < NAMED_FOR);
        self.gone.retain(|_, at| now.since(*at) < NAMED_FOR);
        let named = &self.named;
        self.ids.retain(|i, _| is_peer(*i) || named.contains_key(i));
        let ids = &self.ids;
        self.names.retain(|_, i| ids.contains_key(i));
        self.ids.len() != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(3_600_000);

    fn incarnation(number: u128) -> Incarnation {
        Incarnation::from_bytes(number.to_le_bytes())
    }

    #[test]
    fn snapshots_cannot_name_origins_without_end() {
        let mut origins = Origins::default();
        let met = origins.meet(incarnation(0));
        for number in 1..=2 * MAX_NAMED as u128 {
            assert_eq!(origins.hear_of(incarnation(number), NOW), number <= MAX_NAMED as u128);
        }
        assert_eq!(origins.named().count(), MAX_NAMED);
        assert_eq!((origins.ids.len(), origins.names.len()), (MAX_NAMED + 1, MAX_NAMED + 1));
        assert_eq!(origins.find(incarnation(MAX_NAMED as u128 + 1)), None);
        // Those that are known are named on, and others are met as ever.
        assert!(!origins.hear_of(incarnation(1), NOW.plus(NAMED_FOR / 2)));
        assert_ne!(origins.meet(incarnation(u128::MAX)), met);
        // There is room again when the rest was not named for a while.
        let later = NOW.plus(NAMED_FOR);
        origins.sweep(|peer| peer == incarnation(0), later);
        assert_eq!(origins.named().count(), 1);
        assert!(origins.hear_of(incarnation(MAX_NAMED as u128 + 1), later));
    }
}
