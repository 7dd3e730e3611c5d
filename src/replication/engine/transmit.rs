//! What the engine sends, when a session has room for a frame.

use std::collections::VecDeque;

use super::super::frame::{
    Body, Contribution, Entry, Frame, LimitEpoch, LimitPause, Row, Snapshot, Update,
};
use super::super::ledger::{Telling, true_deficit};
use super::super::peer::{NextPass, SnapshotWalk, Told, Wanted};
use super::{Engine, FRESH, Sent, SessionId, defer};
use crate::limiter::{BucketId, Companion as _, key};
use crate::time::Timestamp;

/// Frames that may be unacknowledged before a session has no window.
const MAX_IN_FLIGHT: usize = 32;
/// Entries that may be unacknowledged before a session has no window.
const MAX_ENTRIES_IN_FLIGHT: usize = 4096;
/// Buckets that one pass of a snapshot lines up.
const SNAPSHOT_PASS: usize = 16_384;
/// Rough size at which a frame is full.
const FRAME_BYTES: usize = 64 * 1024;
/// Rough size of an entry, and of a row's fixed part, without the key.
const ENTRY_BYTES: usize = 64;
const CONTRIBUTION_BYTES: usize = 40;

impl Engine {
    /// The next frame for a session, if there is something to say. To be called
    /// only when the session can take a frame at once.
    pub fn transmit(&mut self, id: SessionId, now: Timestamp) -> Option<Frame> {
        let session = self.sessions.get(&id)?;
        if session.said_goodbye {
            return None;
        }
        let incarnation = session.peer;
        if session.hello_due {
            let session = self.sessions.get_mut(&id)?;
            session.hello_due = false;
            session.hellos += 1;
            let revision = session.hellos;
            let hello = self.hello(revision);
            return self.frame(id, Body::Hello(hello), now);
        }
        let peer = self.peers.get_mut(&incarnation)?;
        if peer.wanted == Some(Wanted::Ask) {
            peer.wanted = Some(Wanted::Asked);
            let first_meeting = !session.met;
            return self.frame(id, Body::SnapshotRequest { first_meeting }, now);
        }
        if !peer.limit_epochs.is_empty() || !peer.limit_pauses.is_empty() {
            let reset = std::mem::take(&mut peer.limit_epochs);
            let paused = std::mem::take(&mut peer.limit_pauses);
            let (epochs, pauses) =
                (self.limiter.companion().epochs(), self.limiter.companion().pauses());
            let limit_epochs = reset
                .into_iter()
                .map(|limit| LimitEpoch {
                    limit: u32::from(limit.0),
                    epoch: epochs.of_limit(limit),
                })
                .collect();
            let limit_pauses = pauses
                .all(now)
                .into_iter()
                .filter(|(limit, _)| paused.contains(limit))
                .map(|(limit, pause)| LimitPause { limit: limit.0.into(), pause: pause.wire(now) })
                .collect();
            let update = Update { entries: Vec::new(), limit_epochs, limit_pauses };
            return self.frame(id, Body::Update(update), now);
        }
        let unacknowledged: usize = session.in_flight.iter().map(|(_, sent)| sent.len()).sum();
        let has_window =
            session.in_flight.len() < MAX_IN_FLIGHT && unacknowledged < MAX_ENTRIES_IN_FLIGHT;
        if has_window && (peer.resync || peer.snapshot.is_some()) {
            return self.snapshot_part(id, now);
        }
        if has_window && !peer.pending.is_empty() {
            let (entries, sent) = self.entries(id, now);
            if !entries.is_empty() {
                self.stats.entries_sent += entries.len() as u64;
                self.peers.get_mut(&incarnation)?.is_active(now);
                let update = Update { entries, ..Update::default() };
                let frame = self.frame(id, Body::Update(update), now)?;
                let session = self.sessions.get_mut(&id)?;
                session.in_flight.push_back((frame.seq, sent));
                return Some(frame);
            }
        }
        let peer = self.peers.get(&incarnation)?;
        if let Some(reason) = self.leaving.clone()
            && peer.pending.is_empty()
            && !peer.resync
            && peer.snapshot.is_none()
        {
            self.sessions.get_mut(&id)?.said_goodbye = true;
            return self.frame(id, Body::Goodbye(reason), now);
        }
        let owes_ack = self.sessions.get(&id).is_some_and(|session| session.owes_ack);
        if owes_ack || peer.next_beat(now) <= now {
            return self.frame(id, Body::Heartbeat, now);
        }
        None
    }

    fn frame(&mut self, id: SessionId, body: Body, now: Timestamp) -> Option<Frame> {
        let session = self.sessions.get_mut(&id)?;
        let seq = session.next_seq;
        session.next_seq += 1;
        session.acknowledged = session.received;
        session.owes_ack = false;
        if let Some(peer) = self.peers.get_mut(&session.peer) {
            peer.sent_at = now;
        }
        self.stats.frames_sent += 1;
        let held = now.since(session.their_stamp_at).as_millis();
        Some(Frame {
            seq,
            ack: session.received,
            stamp_ms: now.as_millis(),
            echo_ms: session.their_stamp,
            held_ms: u32::try_from(held).unwrap_or(u32::MAX),
            body,
        })
    }

    /// As many pending buckets as a frame holds, oldest first, and the bases to
    /// put back should the frame be lost.
    fn entries(&mut self, id: SessionId, now: Timestamp) -> (Vec<Entry>, Sent) {
        let (mut entries, mut sent, mut bytes) = (Vec::new(), Vec::<Told>::new(), 0);
        let Some(incarnation) = self.sessions.get(&id).map(|session| session.peer) else {
            return (entries, sent);
        };
        while bytes < FRAME_BYTES {
            let Some(peer) = self.peers.get_mut(&incarnation) else { break };
            let Some((bucket, base)) = peer.pending.pop() else { break };
            let origin = peer.origin;
            let companion = self.limiter.companion();
            let made = self.limiter.with_existing(bucket, |slot, quota| {
                companion.advance(slot, quota, now);
                let level = slot.bucket.level();
                let (spent, returned) = (slot.spent, slot.returned());
                let ledger = slot.companion.as_deref_mut()?;
                // An old flush says too little: what was spent since goes with
                // it, as a new flush for everybody.
                let renewed = (ledger.unsent(spent, returned) != 0
                    && now.since(ledger.last().at) > FRESH)
                    .then(|| {
                        let base = ledger.base();
                        ledger.flush(spent, returned, quota, now);
                        base
                    });
                let ledger = slot.companion.as_deref()?;
                let flush = ledger.last();
                let Telling { base, ack, elsewhere, is_first } =
                    ledger.telling(origin, base, quota);
                let key = slot.key().filter(|key| is_first && key::may_travel(key));
                let entry = Entry {
                    bucket,
                    limit: u32::from(slot.limit.0),
                    generation: ledger.generation(),
                    epoch: ledger.epoch(),
                    flush: flush.number,
                    ack,
                    spent: flush.spent,
                    returned: flush.returned,
                    fresh_spent: flush.spent.saturating_sub(base.spent),
                    fresh_returned: flush.returned.saturating_sub(base.returned),
                    // As of now, as what is acknowledged is, but of what was spent here
                    // it contains only what the entry says.
                    level: level.micros().saturating_add(ledger.unsent(spent, returned)),
                    elsewhere,
                    demand: flush.demand,
                    key: key.map(<[u8]>::to_vec),
                    pause: ledger.told_pause(now).map(|pause| pause.wire(now)),
                };
                Some((entry, base, renewed))
            });
            // A bucket that was dropped meanwhile was full: nothing to tell.
            let Some((entry, base, renewed)) = made.flatten() else { continue };
            if let Some(renewed) = renewed {
                for (other, peer) in &mut self.peers {
                    if *other != incarnation {
                        defer(peer, bucket, renewed);
                    }
                }
            }
            bytes += ENTRY_BYTES + entry.key.as_ref().map_or(0, Vec::len);
            entries.push(entry);
            sent.push((bucket, base));
        }
        sent.shrink_to_fit();
        (entries, sent)
    }

    /// The next part of a snapshot: every bucket that is not full, the deepest
    /// deficits first, each as it is when its part leaves.
    fn snapshot_part(&mut self, id: SessionId, now: Timestamp) -> Option<Frame> {
        let incarnation = self.sessions.get(&id)?.peer;
        let peer = self.peers.get_mut(&incarnation)?;
        if peer.resync {
            peer.resync = false;
            peer.snapshot = Some(SnapshotWalk::default());
        }
        let joining = !self.joined;
        let (mut rows, mut bytes) = (Vec::new(), 0);
        let last = loop {
            let walk = self.peers.get_mut(&incarnation)?.snapshot.as_mut()?;
            let Some(bucket) = walk.buckets.pop_front() else {
                let next = walk.next;
                let walk = self.pass(next, now);
                let peer = self.peers.get_mut(&incarnation)?;
                peer.snapshot = walk;
                if peer.snapshot.is_none() {
                    break true;
                }
                continue;
            };
            if let Some(row) = self.row(bucket, now) {
                bytes += ENTRY_BYTES
                    + CONTRIBUTION_BYTES * row.contributions.len()
                    + row.key.as_ref().map_or(0, Vec::len);
                rows.push(row);
            }
            if bytes >= FRAME_BYTES {
                break false;
            }
        };
        if last && std::mem::take(&mut self.sessions.get_mut(&id)?.asks_back) {
            self.peers.get_mut(&incarnation)?.wanted = Some(Wanted::Ask);
        }
        self.stats.rows_sent += rows.len() as u64;
        let frame = self.frame(id, Body::Snapshot(Snapshot { rows, last, joining }), now)?;
        // Counts against the window, but is not taken back: a snapshot that was
        // cut off is asked for again.
        self.sessions.get_mut(&id)?.in_flight.push_back((frame.seq, Vec::new()));
        Some(frame)
    }

    /// One pass of a snapshot; `None` if there is nothing left. Rows may come any
    /// number of times, so that a bucket of the first pass may come again.
    fn pass(&self, pass: NextPass, now: Timestamp) -> Option<SnapshotWalk> {
        // The smallest are kept; what is kept is cut down when it is twice too long.
        let (mut kept, mut more) = (Vec::new(), false);
        let after = match pass {
            NextPass::Nothing => return None,
            NextPass::Deepest | NextPass::Smallest => None,
            NextPass::After(bucket) => Some(bucket),
        };
        self.limiter.store().for_each(|id, slot| {
            if after.is_some_and(|after| id <= after) {
                return;
            }
            // A bucket that was reset or closed is told of though it may be full.
            let reset = slot
                .companion
                .as_deref()
                .is_some_and(|ledger| ledger.epoch() > 0 || ledger.has_pause(now));
            let Some(limit) = self.limits.get(slot.limit) else { return };
            let quota = limit.quota(id);
            let mut bucket = slot.bucket;
            bucket.advance(quota, now);
            let deficit = quota.burst().minus(bucket.level()).micros();
            if deficit > 0 || reset {
                let depth = if pass == NextPass::Deepest { -deficit } else { 0 };
                kept.push((depth, id));
                if kept.len() >= 2 * SNAPSHOT_PASS {
                    kept.select_nth_unstable(SNAPSHOT_PASS);
                    kept.truncate(SNAPSHOT_PASS);
                    more = true;
                }
            }
        });
        kept.sort_unstable();
        more |= kept.len() > SNAPSHOT_PASS;
        kept.truncate(SNAPSHOT_PASS);
        let (_, last) = *kept.last()?;
        let next = match (more, pass) {
            (false, _) => NextPass::Nothing,
            (true, NextPass::Deepest) => NextPass::Smallest,
            (true, _) => NextPass::After(last),
        };
        let mut buckets = VecDeque::with_capacity(kept.len());
        buckets.extend(kept.into_iter().map(|(_, id)| id));
        Some(SnapshotWalk { buckets, next })
    }

    fn row(&self, bucket: BucketId, now: Timestamp) -> Option<Row> {
        let row = self.limiter.with_existing(bucket, |slot, quota| {
            self.limiter.companion().advance(slot, quota, now);
            let epoch = slot.companion.as_ref().map_or(0, |ledger| ledger.epoch());
            let deficit = u64::try_from(true_deficit(slot, quota).micros()).unwrap_or(0);
            let pause = slot.companion.as_ref().and_then(|ledger| ledger.pause());
            let pause = pause.filter(|pause| !pause.is_over(now)).map(|pause| pause.wire(now));
            if deficit == 0 && epoch == 0 && pause.is_none() {
                return None;
            }
            // So that the row is of the same life as every entry that follows it;
            // otherwise its receivers would take those for another origin's.
            self.limiter.companion().ensure_ledger(bucket, slot, now);
            let me = Contribution {
                incarnation: self.me,
                generation: 0,
                spent: slot.spent,
                returned: slot.returned(),
                demand: 0.0,
                unseen: 0,
            };
            let contributions = match slot.companion.as_deref() {
                Some(ledger) => ledger.contributions(me, |origin| self.origins.name(origin), now),
                None => vec![me],
            };
            Some(Row {
                bucket,
                limit: u32::from(slot.limit.0),
                epoch,
                deficit,
                contributions,
                key: slot.key().filter(|k| key::may_travel(k)).map(<[u8]>::to_vec),
                pause,
            })
        });
        row.flatten()
    }
}
