//! Waiting (layer 1, pure): a request that finds no room, and may wait for it.
//!
//! It waits in the line of its scarcest bucket and owns nothing meanwhile. When
//! it is in front and due, all limits are tried again, as for a request that has
//! just come, except that it is older: a bucket is closed to it only while
//! somebody older waits there.
//!
//! **No deadlock**: nobody holds anything. **No starvation**: a request that is
//! turned away by another bucket goes to that one's line, at the place that its
//! age gives it, and leaves the first. Whoever is turned away once more keeps its
//! places from then on, so that in all buckets that ever lacked room for it only
//! older ones pass. The oldest of all is in front wherever it stands, and passes
//! as soon as its buckets hold what it costs. Leaving the first time keeps a
//! request whose own bucket is empty from closing a shared one to all others.
//!
//! **Who wakes whom**: the one in front of a line has the line's only timer, for
//! its own tokens and for the next of its line whose time is up. Whoever leaves
//! the front calls the next; whoever raises a level calls the one in front.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::Waker;
use std::time::Duration;

use smallvec::SmallVec;

use super::line::{Calls, Line, Ticket};
use super::{
    Attributes, BucketId, Check, Companion, Decision, Due, Event, LimitIndex, Limiter, Outcome,
    Verdict,
};
use crate::time::Timestamp;

/// The least time after which one in front tries again: less is below what a timer
/// can tell apart.
const SHORTEST: Duration = Duration::from_millis(1);
/// The same where the tokens are there and yet out of reach, because part of the
/// level is kept for replicas that are not heard.
const OUT_OF_REACH: Duration = Duration::from_millis(20);

/// How many requests may wait at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crowding {
    /// For all buckets together.
    pub in_all: usize,
    /// For one bucket.
    pub per_bucket: usize,
}

impl Default for Crowding {
    fn default() -> Self {
        Self { in_all: 100_000, per_bucket: 10_000 }
    }
}

/// What all waiting requests share.
#[derive(Debug, Default)]
pub(super) struct Hall {
    bounds: Crowding,
    waiting: AtomicUsize,
    tickets: AtomicU64,
}

/// What becomes of a request after a [`Decision`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outlook {
    /// What the decision says.
    Settled,
    /// It may wait.
    Waits {
        /// How long its tokens are reckoned to take.
        due: Duration,
        /// How long it waits at most.
        patience: Duration,
    },
    /// It might wait, but too many do.
    Crowded {
        /// How long its tokens are reckoned to take.
        due: Duration,
    },
}

/// A request that waits. It is in lines until [`Limiter::leave`] or the end of
/// [`Limiter::try_again`] takes it out.
#[derive(Debug)]
#[must_use]
pub struct Waiter {
    ticket: Ticket,
    begun: Timestamp,
    deadline: Timestamp,
    /// Where it stands.
    lines: SmallVec<[BucketId; 1]>,
    /// The limits that had no room for it.
    held_by: SmallVec<[LimitIndex; 2]>,
    /// Another bucket turned it away when it was its turn.
    turned: bool,
    /// It waits no more.
    over: bool,
}

/// Who asks for tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asking<'a> {
    ticket: Ticket,
    /// The limits that it has asked before.
    before: &'a [LimitIndex],
}

impl Asking<'_> {
    /// A request that has just come.
    pub(super) const NEWCOMER: Self = Self { ticket: Ticket::NEWCOMER, before: &[] };

    /// When it came.
    pub(super) const fn ticket(self) -> Ticket {
        self.ticket
    }

    /// Whether it has just come.
    pub(super) fn is_new(self) -> bool {
        self.ticket == Ticket::NEWCOMER
    }

    /// Whether it has asked this limit before.
    pub(super) fn has_asked(self, limit: LimitIndex) -> bool {
        self.before.contains(&limit)
    }
}

/// What comes of trying again.
#[allow(clippy::large_enum_variant, reason = "a decision is as large everywhere")]
#[derive(Debug)]
pub enum Turn {
    /// It waits no more, and this is what was decided.
    Settled(Decision),
    /// It waits on: until it is woken, and not beyond this moment.
    Waits(Option<Timestamp>),
}

impl Waiter {
    /// How old it is, compared with others.
    pub const fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Since when it waits.
    pub const fn begun(&self) -> Timestamp {
        self.begun
    }

    /// Until when it waits at most.
    pub const fn deadline(&self) -> Timestamp {
        self.deadline
    }

    /// Whether this limit had no room for it.
    pub fn was_held_by(&self, limit: LimitIndex) -> bool {
        self.held_by.contains(&limit)
    }
}

/// How a waiter stands in its lines.
struct Standing {
    /// Nobody older is in any of them.
    first: bool,
    /// When the time of somebody is up in whose line it is in front.
    alarm: Option<Timestamp>,
}

impl<C: Companion> Limiter<C> {
    /// The same, in which so many requests may wait.
    #[must_use]
    pub fn with_crowding(mut self, bounds: Crowding) -> Self {
        self.hall.bounds = bounds;
        self
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.hall.waiting.load(Ordering::Relaxed)
    }

    /// Whether a request on which `decision` was made may wait: if every limit that
    /// refuses it would let it wait as long as its tokens take, and it has not
    /// `asked` to wait less.
    pub fn outlook(&self, decision: &Decision, asked: Option<Duration>) -> Outlook {
        self.outlook_on(None, decision, asked)
    }

    /// The same on a route with a wait of its own, which holds in place of that of
    /// each limit whose condition names an upstream.
    pub fn outlook_on(
        &self,
        route: Option<Duration>,
        decision: &Decision,
        asked: Option<Duration>,
    ) -> Outlook {
        let Verdict::Refused(scarcest) = decision.verdict else { return Outlook::Settled };
        let limits = self.limits.load();
        let mut patience = asked.unwrap_or(Duration::MAX);
        let mut due = Duration::ZERO;
        for check in decision.checks.iter().filter(|check| check.outcome == Outcome::Refused) {
            let Some(limit) = limits.get(check.limit) else { return Outlook::Settled };
            let routed = route.filter(|_| limit.rule().condition.upstream.is_some());
            patience = patience.min(routed.unwrap_or(limit.max_wait()));
            match check.due {
                Due::Now => {}
                Due::In(nanos) => due = due.max(Duration::from_nanos(nanos)),
                Due::Never => return Outlook::Settled,
            }
        }
        if patience.is_zero() || due > patience {
            return Outlook::Settled;
        }
        let bucket = decision.checks.get(scarcest).map(|check| check.bucket);
        let waiting = bucket.and_then(|id| self.store.with_existing(id, |slot| slot.waiting()));
        let Crowding { in_all, per_bucket } = self.hall.bounds;
        if self.waiting() >= in_all || waiting.unwrap_or(0) >= per_bucket {
            return Outlook::Crowded { due };
        }
        Outlook::Waits { due, patience }
    }

    /// Lets a request wait that `decision` refuses, as [`outlook`](Self::outlook)
    /// allows. It is to [try again](Self::try_again) at once. `None`, and nothing
    /// changed, if too many wait.
    pub fn hold(&self, decision: &Decision, patience: Duration, now: Timestamp) -> Option<Waiter> {
        let check = decision.refusal()?;
        let Crowding { in_all, per_bucket } = self.hall.bounds;
        let more = |waiting: usize| (waiting < in_all).then_some(waiting + 1);
        self.hall.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        let mut waiter = Waiter {
            ticket: self.ticket(),
            begun: now,
            deadline: now.plus(patience),
            lines: SmallVec::new(),
            held_by: SmallVec::new(),
            turned: false,
            over: false,
        };
        if !self.join(&mut waiter, check, per_bucket, now) {
            self.hall.waiting.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        // It was counted as refused, which it is not yet.
        for check in decision.checks.iter().filter(|check| check.outcome == Outcome::Refused) {
            waiter.held_by.push(check.limit);
            self.store.with_existing(check.bucket, |slot| {
                slot.refused = slot.refused.saturating_sub(1);
            });
        }
        Some(waiter)
    }

    /// How old a request is that comes now, compared with those that wait.
    pub fn ticket(&self) -> Ticket {
        Ticket(self.hall.tickets.fetch_add(1, Ordering::Relaxed))
    }

    /// Lets a request wait that was admitted and is to be admitted once more, with the
    /// age that it had. It stands in no line yet and is to [try
    /// again](Self::try_again) at once. `None` if too many wait.
    pub fn hold_again(
        &self,
        ticket: Ticket,
        deadline: Timestamp,
        now: Timestamp,
    ) -> Option<Waiter> {
        let in_all = self.hall.bounds.in_all;
        let more = |waiting: usize| (waiting < in_all).then_some(waiting + 1);
        self.hall.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Waiter {
            ticket,
            begun: now,
            deadline,
            lines: SmallVec::new(),
            held_by: SmallVec::new(),
            turned: false,
            over: false,
        })
    }

    /// Tries again to let a request pass that waits. It is charged if it may, and
    /// refused if its time is up. Otherwise `waker` is woken when it is to try
    /// again, and the caller sees to the moment that is returned.
    pub fn try_again(
        &self,
        waiter: &mut Waiter,
        request: &impl Attributes,
        waker: &Waker,
        now: Timestamp,
    ) -> Turn {
        let standing = self.stand(waiter, waker, now);
        let over = now >= waiter.deadline;
        if !standing.first && !over {
            return Turn::Waits(standing.alarm);
        }
        let asking = Asking { ticket: waiter.ticket, before: &waiter.held_by };
        let decision = self.decide_as(asking, request, now);
        for check in decision.checks.iter().filter(|check| check.outcome == Outcome::Refused) {
            if !waiter.held_by.contains(&check.limit) {
                waiter.held_by.push(check.limit);
            }
        }
        let Some(check) = decision.refusal().filter(|_| !over) else {
            for check in decision.checks.iter().filter(|check| check.outcome == Outcome::Refused) {
                self.store.with_existing(check.bucket, |slot| {
                    slot.refused = slot.refused.saturating_add(1);
                });
            }
            self.leave(waiter, now);
            return Turn::Settled(decision);
        };
        self.turn_to(waiter, &decision, check, now);
        let standing = self.stand(waiter, waker, now);
        let due = match check.due {
            Due::Never => None,
            Due::Now => Some(now.plus(OUT_OF_REACH)),
            Due::In(nanos) => Some(now.plus(Duration::from_nanos(nanos).max(SHORTEST))),
        };
        let due = due.filter(|_| standing.first);
        Turn::Waits(match (standing.alarm, due) {
            (Some(alarm), Some(due)) => Some(alarm.min(due)),
            (alarm, due) => alarm.or(due),
        })
    }

    /// Whether it is a request's turn to [try again](Self::try_again), or its time is
    /// up. Otherwise `waker` is woken at its turn, and the caller sees to the moment
    /// that is returned.
    ///
    /// # Errors
    /// That moment, if it is not.
    pub fn is_turn(
        &self,
        waiter: &mut Waiter,
        waker: &Waker,
        now: Timestamp,
    ) -> Result<(), Option<Timestamp>> {
        let standing = self.stand(waiter, waker, now);
        if standing.first || now >= waiter.deadline { Ok(()) } else { Err(standing.alarm) }
    }

    /// Takes a request out of its lines, because it waits for something else first. It
    /// comes back to them, at the place of its age, by trying again.
    pub fn step_aside(&self, waiter: &mut Waiter, now: Timestamp) {
        for bucket in std::mem::take(&mut waiter.lines) {
            self.quit(waiter.ticket, bucket, now);
        }
    }

    /// Ends the wait of a request, which costs it nothing. It may have ended before.
    pub fn leave(&self, waiter: &mut Waiter, now: Timestamp) {
        if std::mem::replace(&mut waiter.over, true) {
            return;
        }
        for bucket in std::mem::take(&mut waiter.lines) {
            self.quit(waiter.ticket, bucket, now);
        }
        self.hall.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Calls the request that is in front of a bucket's line, because the bucket
    /// may hold more than it did.
    pub fn stir(&self, bucket: BucketId) {
        if self.waiting() == 0 {
            return;
        }
        self.store.with_existing(bucket, |slot| slot.call_front()).unwrap_or_default().call();
    }

    /// Sees where a waiter stands, and that `waker` is called at its turn.
    fn stand(&self, waiter: &mut Waiter, waker: &Waker, now: Timestamp) -> Standing {
        let ticket = waiter.ticket;
        let mut standing = Standing { first: true, alarm: None };
        let mut calls = Calls::default();
        waiter.lines.retain(|bucket| {
            let found = self.store.with_existing(*bucket, |slot| {
                let Some(line) = slot.line_mut() else { return false };
                if !line.register(ticket, waker) {
                    return false;
                }
                if line.front() == ticket {
                    calls.add(line.call_overdue(now));
                    let next = line.next_deadline();
                    standing.alarm = match (standing.alarm, next) {
                        (Some(a), Some(b)) => Some(a.min(b)),
                        (a, b) => a.or(b),
                    };
                } else {
                    standing.first = false;
                }
                true
            });
            found == Some(true)
        });
        calls.call();
        standing
    }

    /// The bucket of `check` is the scarcest: the waiter goes to its line.
    fn turn_to(&self, waiter: &mut Waiter, decision: &Decision, check: &Check, now: Timestamp) {
        let ticket = waiter.ticket;
        let stays = waiter.turned || waiter.lines.contains(&check.bucket);
        let came_aside = waiter.lines.is_empty();
        waiter.lines.retain(|bucket| {
            // After a reload it may be none of its buckets any more.
            let applies = decision.checks.iter().any(|check| check.bucket == *bucket);
            if !(applies && stays) {
                self.quit(ticket, *bucket, now);
            }
            applies && stays
        });
        if !waiter.lines.contains(&check.bucket) {
            waiter.turned |= !came_aside;
            // It was let in already; bounds are for those who come.
            self.join(waiter, check, usize::MAX, now);
        }
    }

    /// Joins the line of a bucket, unless it is too long. A bucket that is gone is
    /// no longer scarce, and has no line.
    fn join(&self, waiter: &mut Waiter, check: &Check, longest: usize, now: Timestamp) -> bool {
        let (ticket, deadline) = (waiter.ticket, waiter.deadline);
        let joined = self.with_existing(check.bucket, |slot, quota| {
            match slot.line_mut() {
                Some(line) if line.len() >= longest => return false,
                Some(line) => line.join(ticket, check.cost, deadline),
                None if longest == 0 => return false,
                None => {
                    slot.begin_line(Line::new(ticket, check.cost, deadline));
                    self.companion.happened(Event::Line, check.bucket, slot, quota, now);
                }
            }
            true
        });
        if joined == Some(true) {
            waiter.lines.push(check.bucket);
        }
        joined != Some(false)
    }

    /// Takes a request out of the line of a bucket, and calls who is next.
    fn quit(&self, ticket: Ticket, bucket: BucketId, now: Timestamp) {
        let quit = self.store.with_existing(bucket, |slot| {
            let Some(line) = slot.line_mut() else { return (Calls::default(), false) };
            let calls = line.leave(ticket);
            let emptied = line.is_empty();
            if emptied {
                drop(slot.take_line());
            }
            (calls, emptied)
        });
        let Some((calls, emptied)) = quit else { return };
        calls.call();
        if emptied {
            self.with_existing(bucket, |slot, quota| {
                self.companion.happened(Event::Line, bucket, slot, quota, now);
            });
        }
    }
}
