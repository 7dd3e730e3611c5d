//! A request that waits for its tokens, or for a place among those on their way to
//! its upstream. It owns neither, and gives up its place when its client goes away.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::request::Parts;
use tokio::time::{Sleep, sleep};

use super::access::Note;
use super::egress::{Gate, Permit, Queued, gate_of};
use super::limit::Enforcer;
use super::metrics::{WaitMetrics, WaitOutcome};
use super::request::HttpRequest;
use crate::limiter::{Client, Companion, Decision, Turn, Waiter};
use crate::time::Timestamp;

/// A request, and the service that it goes to when it is its turn. Kept in one
/// allocation, which only requests that wait pay for.
pub(super) struct Held<S, C: Companion, H, B> {
    wait: Wait<C>,
    /// None once it has gone on.
    pub(super) request: Option<(Parts, B)>,
    pub(super) inner: S,
    pub(super) client: Client,
    pub(super) hand_over: H,
}

/// A place in the lines. Dropping it gives the place up.
struct Wait<C: Companion> {
    enforcer: Arc<Enforcer<C>>,
    waiter: Waiter,
    alarm: Option<(Timestamp, Pin<Box<Sleep>>)>,
    metrics: Arc<WaitMetrics>,
    note: Option<Note>,
    /// What lets requests go to the upstream, if there is a bound on them.
    gate: Option<Arc<Gate>>,
    /// It waits there, and in no line.
    queued: Option<Queued>,
    over: bool,
}

/// What a waiting request may do.
enum Step {
    /// Ask for its tokens, with its place among those on their way.
    Ask(Option<Permit>),
    /// Wait until it is woken, and not beyond this moment.
    Wait(Option<Timestamp>),
    /// Give up: its time is up, and there is no place for it.
    GiveUp,
}

/// How a wait ended.
pub(super) struct Heard {
    /// None if there was no place among those on their way, so that nothing was
    /// decided.
    pub(super) decision: Option<Decision>,
    /// Its place, if it passes.
    pub(super) permit: Option<Permit>,
    /// How long it was.
    pub(super) time: Duration,
}

impl<S, C: Companion, H, B> Held<S, C, H, B> {
    pub(super) fn new(
        enforcer: &Arc<Enforcer<C>>,
        waiter: Waiter,
        metrics: Arc<WaitMetrics>,
        request: (Parts, B),
        client: Client,
        inner: S,
        hand_over: H,
    ) -> Self {
        metrics.waiting.inc();
        let note = request.0.extensions.get::<Note>().cloned();
        let enforcer = Arc::clone(enforcer);
        let gate = gate_of(&request.0).map(Arc::clone);
        let wait =
            Wait { enforcer, waiter, alarm: None, metrics, note, gate, queued: None, over: false };
        Self { wait, request: Some(request), inner, client, hand_over }
    }

    pub(super) const fn enforcer(&self) -> &Arc<Enforcer<C>> {
        &self.wait.enforcer
    }

    pub(super) const fn waiter(&self) -> &Waiter {
        &self.wait.waiter
    }

    /// Ready when the request passes or may wait no longer.
    pub(super) fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<Heard> {
        let Some((parts, _)) = &self.request else { return Poll::Pending };
        let request = HttpRequest::new(parts, self.client);
        let wait = &mut self.wait;
        loop {
            let now = wait.enforcer.now();
            let alarm = match wait.step(cx.waker(), now) {
                Step::Wait(alarm) => alarm,
                Step::GiveUp => {
                    let limiter = wait.enforcer.limiter();
                    limiter.leave(&mut wait.waiter, now);
                    let time = wait.end(WaitOutcome::TimedOut, now);
                    return Poll::Ready(Heard { decision: None, permit: None, time });
                }
                Step::Ask(permit) => {
                    let limiter = wait.enforcer.limiter();
                    match limiter.try_again(&mut wait.waiter, &request, cx.waker(), now) {
                        Turn::Settled(decision) => {
                            let admitted = decision.is_admitted();
                            let outcome = if admitted {
                                WaitOutcome::Admitted
                            } else {
                                WaitOutcome::TimedOut
                            };
                            let time = wait.end(outcome, now);
                            let permit = permit.filter(|_| admitted);
                            return Poll::Ready(Heard { decision: Some(decision), permit, time });
                        }
                        // The place goes to whoever has a use for it.
                        Turn::Waits(alarm) => alarm,
                    }
                }
            };
            match alarm {
                None => {
                    wait.alarm = None;
                    return Poll::Pending;
                }
                Some(at) => {
                    if wait.alarm.as_ref().is_none_or(|(set, _)| *set != at) {
                        wait.alarm = Some((at, Box::pin(sleep(at.since(now)))));
                    }
                    let Some((_, alarm)) = &mut wait.alarm else { return Poll::Pending };
                    if alarm.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    wait.alarm = None;
                }
            }
        }
    }
}

impl<C: Companion> Wait<C> {
    /// Waits for the tokens first and then for a place among those on their way, and
    /// has neither meanwhile.
    fn step(&mut self, waker: &Waker, now: Timestamp) -> Step {
        let Some(gate) = &self.gate else { return Step::Ask(None) };
        let limiter = self.enforcer.limiter();
        let queued = match &self.queued {
            Some(queued) => queued,
            None => {
                if let Err(alarm) = limiter.is_turn(&mut self.waiter, waker, now) {
                    return Step::Wait(alarm);
                }
                if let Some(permit) = gate.enter() {
                    return Step::Ask(Some(permit));
                }
                limiter.step_aside(&mut self.waiter, now);
                self.queued.insert(gate.queue(self.waiter.ticket()))
            }
        };
        if let Poll::Ready(permit) = queued.poll_enter(waker) {
            self.queued = None;
            return Step::Ask(Some(permit));
        }
        let deadline = self.waiter.deadline();
        if now >= deadline { Step::GiveUp } else { Step::Wait(Some(deadline)) }
    }

    fn end(&mut self, outcome: WaitOutcome, now: Timestamp) -> Duration {
        self.over = true;
        let time = now.since(self.waiter.begun());
        self.metrics.waiting.dec();
        self.metrics.count(outcome);
        self.enforcer.metrics().held(time);
        time
    }
}

impl<C: Companion> Drop for Wait<C> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let now = self.enforcer.now();
        self.enforcer.limiter().leave(&mut self.waiter, now);
        let time = self.end(WaitOutcome::Left, now);
        if let Some(note) = &self.note {
            note.left(&self.metrics.limit, time);
        }
    }
}
