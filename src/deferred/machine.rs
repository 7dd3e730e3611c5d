//! The state machine: a record, what happened, and the moment give the next record
//! and what is to be kept with it. Pure; the numbers are those of the table in
//! `docs/deferred.md`.
//!
//! Invariants:
//! - a try that the upstream refused because there were too many is no try;
//! - a settled record only leaves its state when an operator says so, or is
//!   forgotten;
//! - what may have reached the upstream is never called failed without its word.

use std::time::Duration;

use super::plan::{Delivery, Poll, Rules, Tries};
use super::record::{Kind, Record, State};
use crate::time::WallTime;

/// Ends in flight, one after the other, after which a request is suspected to be
/// the cause.
pub const MAX_CRASHES: u32 = 3;

/// How long a stale record is kept for a person to look at.
pub const KEEP_STALE: Duration = Duration::from_secs(30 * 86_400);

/// The longest time that the upstream may ask one request to stay away.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(900);
/// How long a throttled request stays away if the upstream does not say.
const THROTTLED_PAUSE: Duration = Duration::from_secs(1);

/// What came of sending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The upstream answered.
    Answered(Seen),
    /// Nothing of the request left, and why.
    Unsent(String),
    /// It may have arrived; why that is not known.
    Unknown(String),
    /// The process or the worker ended meanwhile.
    Lost,
}

/// What of an answer counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Its status.
    pub status: u16,
    /// What the upstream calls the request, from the answer to it.
    pub id: Option<String>,
    /// How far it has come, from the answer to a question for the result.
    pub progress: Option<String>,
    /// How long the upstream asks to stay away.
    pub retry_after: Option<Duration>,
}

/// What follows from an [`Outcome`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The record from now on.
    pub record: Record,
    /// What the answer is kept as, if there was one.
    pub keep: Option<Kind>,
}

/// The record is not in a state in which this can be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request is {state}{}", if *.in_flight { " and in flight" } else { "" })]
pub struct Unfit {
    /// The state that it is in.
    pub state: State,
    /// Whether it is in flight.
    pub in_flight: bool,
}

impl Record {
    /// Rows 3 and 13: a token was taken, and it is about to be sent.
    ///
    /// # Errors
    /// If it does not wait.
    pub fn claim(mut self, now: WallTime) -> Result<Self, Unfit> {
        self.must(!self.in_flight && !self.state.is_settled())?;
        if self.state == State::Pending {
            self.attempts.poll = self.attempts.poll.saturating_add(1);
        } else {
            self.attempts.create = self.attempts.create.saturating_add(1);
        }
        self.in_flight = true;
        self.updated = now;
        Ok(self)
    }

    /// Rows 4 to 12, 14 to 18, 24, 25 and 29: it was sent, or was to be.
    ///
    /// # Errors
    /// If it is not in flight.
    pub fn settle(
        mut self,
        outcome: Outcome,
        rules: &Rules<'_>,
        now: WallTime,
    ) -> Result<Step, Unfit> {
        self.must(self.in_flight && !self.state.is_settled())?;
        self.in_flight = false;
        self.updated = now;
        if outcome == Outcome::Lost {
            self.reached = true;
            self.attempts.crashes = self.attempts.crashes.saturating_add(1);
            if self.attempts.crashes >= MAX_CRASHES {
                return Ok(self.ends(State::Stale, "crash loop"));
            }
        } else {
            self.attempts.crashes = 0;
        }
        let throttled = match &outcome {
            Outcome::Answered(seen) => rules.pause_on.contains(&seen.status),
            Outcome::Unsent(_) | Outcome::Unknown(_) | Outcome::Lost => false,
        };
        Ok(match (outcome, self.state == State::Pending, &rules.plan.poll) {
            (Outcome::Answered(seen), _, _) if throttled => self.throttled(&seen, now),
            (outcome, true, Some(poll)) => self.settle_poll(outcome, poll, rules, now),
            (_, true, None) => {
                self.ends(State::Stale, "the route does not ask for results any more")
            }
            (outcome, false, poll) => self.settle_create(outcome, poll.as_ref(), rules, now),
        })
    }

    /// Rows 7 and 18.
    fn throttled(mut self, seen: &Seen, now: WallTime) -> Step {
        let tries = match self.state {
            State::Pending => &mut self.attempts.poll,
            State::Accepted
            | State::Completed
            | State::Failed
            | State::Stale
            | State::Canceled
            | State::Moved => &mut self.attempts.create,
        };
        *tries = tries.saturating_sub(1);
        self.attempts.throttled = self.attempts.throttled.saturating_add(1);
        let asked = seen.retry_after.unwrap_or_default();
        self.due = now.plus(asked.clamp(THROTTLED_PAUSE, MAX_RETRY_AFTER));
        Step { record: self, keep: None }
    }

    fn settle_create(
        mut self,
        outcome: Outcome,
        poll: Option<&Poll>,
        rules: &Rules<'_>,
        now: WallTime,
    ) -> Step {
        let again = rules.plan.delivery == Delivery::AtLeastOnce;
        let tries = &rules.plan.create;
        match outcome {
            Outcome::Answered(seen) => {
                self.reached = true;
                match (seen.status, poll) {
                    (200..=299, None) => {
                        self.outcome = Some(seen.status);
                        let step = self.ends(State::Completed, "");
                        Step { keep: Some(Kind::Final), ..step }
                    }
                    (200..=299, Some(poll)) => self.created(seen, poll, rules, now),
                    (408 | 425, _) => self.retry(tries, Some(&seen), "", now),
                    (500.., _) if again => self.retry(tries, Some(&seen), "", now),
                    (500.., _) => {
                        self.last = Some(seen.status);
                        let step = self.ends(State::Stale, "create outcome unknown");
                        Step { keep: Some(Kind::Last), ..step }
                    }
                    (status, _) => {
                        self.outcome = Some(status);
                        let reason = format!("the upstream answered {status}");
                        let step = self.ends(State::Failed, &reason);
                        Step { keep: Some(Kind::Final), ..step }
                    }
                }
            }
            Outcome::Unsent(reason) => self.retry(tries, None, &reason, now),
            Outcome::Unknown(reason) if again => {
                self.reached = true;
                self.retry(tries, None, &reason, now)
            }
            Outcome::Lost if again => {
                self.retry(tries, None, "the process ended while it was in flight", now)
            }
            Outcome::Unknown(_) | Outcome::Lost => {
                self.reached = true;
                self.ends(State::Stale, "create outcome unknown")
            }
        }
    }

    /// Rows 5 and 6.
    fn created(mut self, seen: Seen, poll: &Poll, rules: &Rules<'_>, now: WallTime) -> Step {
        self.initial = Some(seen.status);
        self.response_id = seen.id;
        if self.response_id.is_none() {
            let step = self.ends(State::Stale, "no id in create answer");
            return Step { keep: Some(Kind::Initial), ..step };
        }
        self.state = State::Pending;
        self.reason = None;
        self.due = now.plus(poll.backoff.after(1).max(rules.stretch));
        Step { record: self, keep: Some(Kind::Initial) }
    }

    /// Rows 8 and 9.
    fn retry(mut self, tries: &Tries, seen: Option<&Seen>, reason: &str, now: WallTime) -> Step {
        let n = self.attempts.create;
        let reason = match seen {
            Some(seen) => format!("the upstream answered {}", seen.status),
            None => reason.to_owned(),
        };
        if n >= tries.attempts {
            self.outcome = seen.map(|seen| seen.status);
            let keep = seen.map(|_| Kind::Final);
            let reason = format!("{n} tries: {reason}");
            let state = if self.reached && seen.is_none() { State::Stale } else { State::Failed };
            let step = self.ends(state, &reason);
            return Step { keep, ..step };
        }
        let pause = seen.and_then(|seen| seen.retry_after).unwrap_or_default();
        self.due = now.plus(tries.backoff.after(n).max(pause.min(MAX_RETRY_AFTER)));
        self.last = seen.map_or(self.last, |seen| Some(seen.status));
        self.reason = Some(reason);
        Step { record: self, keep: seen.map(|_| Kind::Last) }
    }

    fn settle_poll(
        mut self,
        outcome: Outcome,
        poll: &Poll,
        rules: &Rules<'_>,
        now: WallTime,
    ) -> Step {
        let (seen, reason) = match outcome {
            Outcome::Answered(seen) => {
                let good = (200..=299).contains(&seen.status);
                let says = |states: &[String]| {
                    good && seen.progress.as_ref().is_some_and(|said| states.contains(said))
                };
                let (done, failed) = (says(&poll.completed), says(&poll.failed));
                if done || failed {
                    self.outcome = Some(seen.status);
                    let step = if done {
                        self.ends(State::Completed, "")
                    } else {
                        let said = seen.progress.as_deref().unwrap_or_default();
                        self.ends(State::Failed, &format!("the upstream says {said}"))
                    };
                    return Step { keep: Some(Kind::Final), ..step };
                }
                (Some(seen.status), None)
            }
            Outcome::Unsent(reason) | Outcome::Unknown(reason) => (None, Some(reason)),
            Outcome::Lost => (None, Some("the process ended while it was asked for".to_owned())),
        };
        let keep = seen.map(|_| Kind::Last);
        self.last = seen.or(self.last);
        let n = self.attempts.poll;
        if n >= poll.attempts {
            let step = self.ends(State::Stale, &format!("{n} polls"));
            return Step { keep, ..step };
        }
        self.reason = reason;
        self.due = now.plus(poll.backoff.after(n.saturating_add(1)).max(rules.stretch));
        Step { record: self, keep }
    }

    /// Rows 19 and 20: its time is up.
    ///
    /// # Errors
    /// If it is in flight, or settled.
    pub fn expire(mut self, now: WallTime) -> Result<Self, Unfit> {
        self.must(!self.in_flight && !self.state.is_settled())?;
        self.updated = now;
        let state = if self.reached { State::Stale } else { State::Failed };
        Ok(self.ends(state, "expired").record)
    }

    /// It cannot be sent as things are; `reason` says why.
    ///
    /// # Errors
    /// If it is settled.
    pub fn strand(mut self, reason: &str, now: WallTime) -> Result<Self, Unfit> {
        self.must(!self.state.is_settled())?;
        self.reached |= self.in_flight;
        self.in_flight = false;
        self.updated = now;
        Ok(self.ends(State::Stale, reason).record)
    }

    /// Row 21: an operator asks for its result anew. It is given up after `expires`.
    ///
    /// # Errors
    /// If it is not stale, or the upstream gave it no id.
    pub fn recheck(mut self, expires: Duration, now: WallTime) -> Result<Self, Unfit> {
        self.must(self.state == State::Stale && self.response_id.is_some())?;
        self.state = State::Pending;
        self.attempts.poll = 0;
        Ok(self.revived(expires, now))
    }

    /// Row 22: an operator has it sent anew, with the same key unless `fresh_key`.
    /// It is given up after `expires`.
    ///
    /// # Errors
    /// If it is neither stale nor failed.
    pub fn resend(
        mut self,
        fresh_key: bool,
        expires: Duration,
        now: WallTime,
    ) -> Result<Self, Unfit> {
        self.must(matches!(self.state, State::Stale | State::Failed))?;
        self.state = State::Accepted;
        self.attempts.create = 0;
        self.attempts.poll = 0;
        self.fresh_keys = self.fresh_keys.saturating_add(u32::from(fresh_key));
        self.response_id = None;
        self.initial = None;
        self.outcome = None;
        self.last = None;
        Ok(self.revived(expires, now))
    }

    fn revived(mut self, expires: Duration, now: WallTime) -> Self {
        self.in_flight = false;
        self.attempts.crashes = 0;
        self.reason = None;
        self.due = now;
        self.updated = now;
        self.expires = self.expires.max(now.plus(expires));
        self
    }

    /// Row 23: it is taken back.
    ///
    /// # Errors
    /// If it may be at the upstream already, or is settled.
    pub fn cancel(mut self, now: WallTime) -> Result<Self, Unfit> {
        self.must(!self.in_flight && self.state == State::Accepted)?;
        self.updated = now;
        Ok(self.ends(State::Canceled, "").record)
    }

    /// Row 27: another replica has it.
    ///
    /// # Errors
    /// If it is in flight, or settled.
    pub fn hand_over(mut self, to: &str, now: WallTime) -> Result<Self, Unfit> {
        self.must(!self.in_flight && !self.state.is_settled())?;
        self.updated = now;
        Ok(self.ends(State::Moved, to).record)
    }

    /// Row 30: when it may be forgotten, if it is settled. What a client may still
    /// ask for is kept for `retain`.
    pub fn forgotten_at(&self, retain: Duration) -> Option<WallTime> {
        match self.state {
            State::Accepted | State::Pending => None,
            State::Completed | State::Failed | State::Canceled | State::Moved => {
                Some(self.updated.plus(retain))
            }
            State::Stale => Some(self.updated.plus(retain.max(KEEP_STALE))),
        }
    }

    fn ends(mut self, state: State, reason: &str) -> Step {
        self.state = state;
        self.reason = (!reason.is_empty()).then(|| reason.to_owned());
        Step { record: self, keep: None }
    }

    const fn must(&self, fits: bool) -> Result<(), Unfit> {
        if fits { Ok(()) } else { Err(Unfit { state: self.state, in_flight: self.in_flight }) }
    }
}

#[cfg(test)]
mod tests;
