//! What the engine does with frames that arrive.

use std::time::Duration;

use super::super::Companion;
use super::super::catalog::Mapped;
use super::super::frame::{Body, Entry, Frame, LimitEpoch, LimitPause, PauseLeft, Row, Snapshot};
use super::super::ledger::{self, Applied, Ledger, Terms};
use super::super::pause::Pause;
use super::super::peer::Wanted;
use super::reset::empty;
use super::{Catalog, Engine, SessionId};
use crate::limiter::{BucketId, Companion as _, LimitIndex, Quota, Slot};
use crate::time::Timestamp;

/// A frame older than this, beyond a round trip, says nothing about levels.
const STALE_MS: u64 = 300;
/// Frames after which, and entries of one frame for which, an acknowledgement is
/// due although there is nothing else to say.
const ACK_FRAMES: u64 = 16;
const ACK_ENTRIES: usize = 512;
/// The last epoch.
const MAX_EPOCH: u64 = (1 << 48) - 1;
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
    /// More resets than there can have been.
    #[error("an epoch is beyond all bounds")]
    Epoch,
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
        self.notice_standstill(now);
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
        // Who has much to say waits for room; the next heartbeat may be far.
        session.owes_ack |= frame.seq - session.acknowledged >= ACK_FRAMES
            || match &frame.body {
                Body::Snapshot(_) => true,
                Body::Update(update) => update.entries.len() >= ACK_ENTRIES,
                Body::Heartbeat
                | Body::Hello(_)
                | Body::SnapshotRequest { .. }
                | Body::Goodbye(_) => false,
            };
        session.their_stamp = frame.stamp_ms;
        session.their_stamp_at = now;
        while session.in_flight.pop_front_if(|(seq, _)| *seq <= frame.ack).is_some() {}
        let mut stale = true;
        if frame.echo_ms > 0 {
            let echoed = frame.echo_ms.saturating_add(frame.held_ms.into());
            let travelled = now.as_millis().saturating_sub(echoed);
            // A peer that has had nothing new for so long does not hear this
            // replica: it has reserved a share and keeps to its own.
            let held = Duration::from_millis(frame.held_ms.into());
            let patience = peer.patience(now);
            let deaf = held > patience && now.since(peer.beats_since(now)) > patience;
            stale = deaf || travelled > STALE_MS + peer.round_trip / 1_000_000;
            if !stale {
                let sample = (travelled * 1_000_000) as f64;
                let smoothed = peer.round_trip as f64;
                let weight = if peer.round_trip == 0 { 1.0 } else { ROUND_TRIP_WEIGHT };
                peer.round_trip = (smoothed + weight * (sample - smoothed)) as u64;
            }
        }
        // A backlog says nothing of the present: only what is fresh, or comes before
        // anything could be echoed, shows that the two hear each other.
        if !stale || frame.echo_ms == 0 {
            self.is_heard(incarnation, now);
        }
        let peer = self.peers.get_mut(&incarnation).ok_or(Violation::NotOpen)?;
        match frame.body {
            Body::Heartbeat => Ok(()),
            Body::Hello(hello) => {
                if hello.incarnation != incarnation || hello.group != self.settings.group {
                    return Err(Violation::Identity);
                }
                let catalog = Catalog::new(&hello.limits, &self.limits);
                if catalog.maps_more_than(&peer.catalog) {
                    peer.wanted = Some(Wanted::Ask);
                }
                peer.catalog = catalog;
                peer.declared = hello.limits;
                Ok(())
            }
            Body::Update(update) => {
                peer.is_active(now);
                let terms = Terms {
                    origin: peer.origin,
                    replicas: self.limiter.companion().replicas(),
                    round_trip: peer.round_trip,
                    stale,
                    same_quota: true,
                    larger_quota: false,
                };
                for LimitEpoch { limit, epoch } in update.limit_epochs {
                    check_epoch(epoch)?;
                    if let Some(mapped) = self.map_limit(id, limit)
                        && epoch > self.limiter.companion().epochs().of_limit(mapped.index)
                    {
                        self.reset_limit(mapped.index, epoch, now);
                    }
                }
                for LimitPause { limit, pause } in update.limit_pauses {
                    if let Some(mapped) = self.map_limit(id, limit)
                        && self.limiter.companion().pauses().told(mapped.index, pause, now)
                    {
                        self.limiter.stir_limit(mapped.index);
                    }
                }
                update.entries.iter().try_for_each(|entry| self.apply(id, entry, terms, now))
            }
            Body::SnapshotRequest { first_meeting } => {
                peer.resync = true;
                let session = self.sessions.get_mut(&id).ok_or(Violation::NotOpen)?;
                session.asks_back |= first_meeting && session.met;
                Ok(())
            }
            Body::Snapshot(snapshot) => self.take_snapshot(id, snapshot, now),
            Body::Goodbye(_) => {
                self.bury(incarnation, now);
                Ok(())
            }
        }
    }

    /// The limit here that the peer of `id` calls `index`. Unknown ones are
    /// counted and skipped.
    fn map_limit(&mut self, id: SessionId, index: u32) -> Option<Mapped> {
        let peer = self.sessions.get(&id).and_then(|session| self.peers.get(&session.peer));
        let mapped = peer.and_then(|peer| peer.catalog.map(index));
        if mapped.is_none() {
            self.stats.entries_skipped += 1;
        }
        mapped
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
        check_epoch(entry.epoch)?;
        let Some(mapped) = self.map_limit(id, entry.limit) else { return Ok(()) };
        let index = mapped.index;
        terms.same_quota = mapped.same_quota;
        terms.larger_quota = mapped.larger_quota;
        self.check_key(index, entry.bucket, entry.key.as_deref())?;
        let companion = self.limiter.companion();
        let Some(limit) = self.limits.get(index) else { return Ok(()) };
        let (bucket, key) = (entry.bucket, entry.key.as_deref());
        let life = self.limiter.store().new_life();
        let applied = self.limiter.with_quota(bucket, index, limit, key, now, |slot, quota| {
            if slot.limit != index {
                return None;
            }
            companion.advance(slot, quota, now);
            companion.ensure_ledger(bucket, slot, now);
            hear_pause(slot, entry.pause, now);
            Some(if follow_epoch(slot, bucket, entry.epoch, life, companion, quota, now) {
                ledger::apply(slot, entry, terms, quota, now)
            } else {
                Applied { old: true, forgiven: 0 }
            })
        });
        let Some(applied) = applied else {
            self.stats.entries_skipped += 1;
            return Ok(());
        };
        self.limiter.stir(bucket);
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
        check_epoch(row.epoch)?;
        let Some(Mapped { index, .. }) = self.map_limit(id, row.limit) else { return Ok(()) };
        self.check_key(index, row.bucket, row.key.as_deref())?;
        let Some(from) = self.sessions.get(&id).and_then(|s| self.origins.find(s.peer)) else {
            return Ok(());
        };
        self.name_origins(row, now);
        let (me, origins, companion) = (self.me, &self.origins, self.limiter.companion());
        let Some(limit) = self.limits.get(index) else { return Ok(()) };
        let (bucket, key) = (row.bucket, row.key.as_deref());
        let life = self.limiter.store().new_life();
        let forgiven = self.limiter.with_quota(bucket, index, limit, key, now, |slot, quota| {
            if slot.limit != index {
                return None;
            }
            companion.advance(slot, quota, now);
            companion.ensure_ledger(bucket, slot, now);
            hear_pause(slot, row.pause, now);
            Some(if follow_epoch(slot, bucket, row.epoch, life, companion, quota, now) {
                ledger::merge(slot, row, from, me, |i| origins.find(i), quota, now)
            } else {
                0
            })
        });
        let Some(forgiven) = forgiven else {
            self.stats.entries_skipped += 1;
            return Ok(());
        };
        self.limiter.stir(bucket);
        self.stats.forgive(index, forgiven);
        Ok(())
    }

    /// Origins that a row names and that were not met are remembered for a while,
    /// so that their first entry is compared with the row.
    fn name_origins(&mut self, row: &Row, now: Timestamp) {
        let mut news = false;
        for contribution in &row.contributions {
            let incarnation = contribution.incarnation;
            if incarnation != self.me && !self.peers.contains_key(&incarnation) {
                news |= self.origins.hear_of(incarnation, now);
            }
        }
        if news {
            self.publish_members();
        }
    }
}

/// Takes over what a peer says of the bucket's pause, of whatever epoch: a reset
/// neither closes nor opens.
fn hear_pause(slot: &mut Slot<Ledger>, told: Option<PauseLeft>, now: Timestamp) {
    if let (Some(told), Some(ledger)) = (told, slot.companion.as_deref_mut()) {
        ledger.set_pause(Pause::told(told, now), now);
    }
}

/// A peer that counts wrongly must not use up the numbers.
const fn check_epoch(epoch: u64) -> Result<(), Violation> {
    if epoch > MAX_EPOCH { Err(Violation::Epoch) } else { Ok(()) }
}

/// The epoch after this one. After the last comes no other: a peer that claims it
/// ends what resets can tell, and not the sessions with peers that are told.
pub(super) const fn epoch_after(epoch: u64) -> u64 {
    if epoch < MAX_EPOCH { epoch + 1 } else { MAX_EPOCH }
}

/// Brings the ledger to `epoch` if that is newer; whether it is not older.
fn follow_epoch(
    slot: &mut Slot<Ledger>,
    bucket: BucketId,
    epoch: u64,
    life: u32,
    companion: &Companion,
    quota: &Quota,
    now: Timestamp,
) -> bool {
    let reached = slot.companion.as_deref().map_or(0, Ledger::epoch);
    if epoch > reached {
        companion.epochs().raise_bucket(bucket, epoch, now);
        empty(slot, bucket, life, companion, quota, now);
    }
    epoch >= reached
}
