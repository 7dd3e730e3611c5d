//! What the engine does with frames that arrive.

use super::super::frame::{Body, Entry, Frame, Row, Snapshot};
use super::super::ledger::{self, Terms};
use super::super::peer::PeerState;
use super::{Catalog, Engine, SessionId};
use crate::limiter::{BucketId, LimitIndex};
use crate::time::Timestamp;

/// A frame older than this, beyond a round trip, says nothing about levels.
const STALE_MS: u64 = 300;
/// Weight of a new sample of the round trip.
const ROUND_TRIP_WEIGHT: f64 = 0.125;

/// A peer broke the protocol; its session is to be ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A frame on a session that is not open.
    #[error("the session is not open")]
    NotOpen,
    /// A Hello in a running session by another replica, or of another group.
    #[error("the replica changed who it is")]
    Identity,
    /// Totals that cannot be.
    #[error("an entry's fresh part is larger than its total")]
    Totals,
    /// A key that does not belong to its bucket.
    #[error("a key does not belong to its bucket")]
    Key,
}

impl Engine {
    /// Takes a frame from the peer of `id`.
    ///
    /// # Errors
    /// If the peer broke the protocol. Entries before the offending one were
    /// applied; the driver is to end the session.
    pub fn receive(
        &mut self,
        id: SessionId,
        frame: Frame,
        now: Timestamp,
    ) -> Result<(), Violation> {
        let session = self.sessions.get_mut(&id).ok_or(Violation::NotOpen)?;
        let incarnation = session.peer;
        let peer = self.peers.get_mut(&incarnation).ok_or(Violation::NotOpen)?;
        if peer.session != Some(id) {
            return Err(Violation::NotOpen);
        }
        self.stats.frames_received += 1;
        if frame.seq <= session.received {
            self.stats.frames_repeated += 1;
            return Ok(());
        }
        session.received = frame.seq;
        session.their_stamp = frame.stamp_ms;
        session.their_stamp_at = now;
        while session.in_flight.pop_front_if(|(seq, _)| *seq <= frame.ack).is_some() {}
        peer.heard_at = now;
        peer.state = PeerState::Live;
        let mut stale = true;
        if frame.echo_ms > 0 {
            let echoed = frame.echo_ms.saturating_add(frame.held_ms.into());
            let travelled = now.as_millis().saturating_sub(echoed);
            stale = travelled > STALE_MS + peer.round_trip / 1_000_000;
            if !stale {
                let sample = (travelled * 1_000_000) as f64;
                let smoothed = peer.round_trip as f64;
                let weight = if peer.round_trip == 0 { 1.0 } else { ROUND_TRIP_WEIGHT };
                peer.round_trip = (smoothed + weight * (sample - smoothed)) as u64;
            }
        }
        match frame.body {
            Body::Heartbeat => Ok(()),
            Body::Hello(hello) => {
                if hello.incarnation != incarnation || hello.group != self.settings.group {
                    return Err(Violation::Identity);
                }
                peer.catalog = Catalog::new(&hello.limits, &self.limits);
                peer.declared = hello.limits;
                Ok(())
            }
            Body::Update(entries) => {
                peer.is_active(now);
                let terms = Terms {
                    origin: peer.origin,
                    replicas: self.limiter.companion().replicas(),
                    round_trip: peer.round_trip,
                    averaging: !stale,
                };
                entries.iter().try_for_each(|entry| self.apply(id, entry, terms, now))
            }
            Body::SnapshotRequest => {
                peer.resync = true;
                Ok(())
            }
            Body::Snapshot(snapshot) => self.take_snapshot(id, snapshot, now),
            Body::Goodbye(_) => {
                self.bury(incarnation);
                Ok(())
            }
        }
    }

    /// The limit here that the peer of `id` calls `index`, and whether its quota
    /// is the same. Unknown ones are counted and skipped.
    fn map_limit(&mut self, id: SessionId, index: u32) -> Option<(LimitIndex, bool)> {
        let peer = self.sessions.get(&id).and_then(|session| self.peers.get(&session.peer));
        let mapped = peer.and_then(|peer| peer.catalog.map(index));
        if mapped.is_none() {
            self.stats.entries_skipped += 1;
        }
        mapped.map(|mapped| (mapped.index, mapped.same_quota))
    }

    fn apply(
        &mut self,
        id: SessionId,
        entry: &Entry,
        mut terms: Terms,
        now: Timestamp,
    ) -> Result<(), Violation> {
        self.stats.entries_received += 1;
        if entry.fresh_spent > entry.spent || entry.fresh_returned > entry.returned {
            return Err(Violation::Totals);
        }
        let Some((index, same_quota)) = self.map_limit(id, entry.limit) else { return Ok(()) };
        terms.averaging &= same_quota;
        self.check_key(index, entry.bucket, entry.key.as_deref())?;
        let limits = &self.limits;
        let companion = self.limiter.companion();
        let Some(limit) = limits.get(index) else { return Ok(()) };
        let quota = limit.quota(entry.bucket);
        let key = entry.key.as_deref();
        let applied = self.limiter.with_bucket(entry.bucket, index, limit, key, now, |slot| {
            slot.bucket.advance(quota, now);
            let (spent, returned) = (slot.spent, slot.returned);
            slot.companion.get_or_insert_with(|| companion.new_ledger(spent, returned, now));
            ledger::apply(slot, entry, terms, quota, now)
        });
        self.stats.entries_old += u64::from(applied.old);
        self.stats.forgive(index, applied.forgiven);
        Ok(())
    }

    fn check_key(
        &self,
        index: LimitIndex,
        bucket: BucketId,
        key: Option<&[u8]>,
    ) -> Result<(), Violation> {
        match (self.limits.get(index), key) {
            (Some(limit), Some(key)) if limit.bucket_id(key) != bucket => Err(Violation::Key),
            (Some(_), _) | (None, _) => Ok(()),
        }
    }

    fn take_snapshot(
        &mut self,
        id: SessionId,
        snapshot: Snapshot,
        now: Timestamp,
    ) -> Result<(), Violation> {
        for row in &snapshot.rows {
            self.merge_row(id, row, now)?;
        }
        if snapshot.last {
            let peer = self.sessions.get(&id).map(|session| session.peer);
            if let Some(peer) = peer.and_then(|incarnation| self.peers.get_mut(&incarnation)) {
                peer.wanted = None;
            }
            self.snapshots_done += 1;
            self.stats.snapshots_received += 1;
        }
        Ok(())
    }

    fn merge_row(&mut self, id: SessionId, row: &Row, now: Timestamp) -> Result<(), Violation> {
        self.stats.rows_received += 1;
        let Some((index, _)) = self.map_limit(id, row.limit) else { return Ok(()) };
        self.check_key(index, row.bucket, row.key.as_deref())?;
        let Some(from) = self.sessions.get(&id).and_then(|s| self.origins.find(s.peer)) else {
            return Ok(());
        };
        for contribution in &row.contributions {
            if contribution.incarnation != self.me {
                self.origins.intern(contribution.incarnation);
            }
        }
        let (me, origins, companion) = (self.me, &self.origins, self.limiter.companion());
        let limits = &self.limits;
        let Some(limit) = limits.get(index) else { return Ok(()) };
        let quota = limit.quota(row.bucket);
        let key = row.key.as_deref();
        let forgiven = self.limiter.with_bucket(row.bucket, index, limit, key, now, |slot| {
            slot.bucket.advance(quota, now);
            let (spent, returned) = (slot.spent, slot.returned);
            slot.companion.get_or_insert_with(|| companion.new_ledger(spent, returned, now));
            ledger::merge(slot, row, from, me, |i| origins.find(i), quota, now)
        });
        self.stats.forgive(index, forgiven);
        Ok(())
    }
}
