//! Ids of origins.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::super::frame::Incarnation;
use super::super::ledger::OriginId;
use crate::time::Timestamp;

/// How long an origin that is only named in snapshots is remembered, and how long
/// one that is gone is not believed to live because a snapshot names it.
const NAMED_FOR: Duration = Duration::from_secs(60);

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
