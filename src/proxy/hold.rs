//! A request that waits for its tokens. It owns none, and gives up its place when
//! its client goes away.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::request::Parts;
use tokio::time::{Sleep, sleep};

use super::access::Note;
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
    over: bool,
}

/// How a wait ended.
pub(super) struct Heard {
    pub(super) decision: Decision,
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
        let wait = Wait { enforcer, waiter, alarm: None, metrics, note, over: false };
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
            let limiter = wait.enforcer.limiter();
            match limiter.try_again(&mut wait.waiter, &request, cx.waker(), now) {
                Turn::Settled(decision) => {
                    let outcome = if decision.is_admitted() {
                        WaitOutcome::Admitted
                    } else {
                        WaitOutcome::TimedOut
                    };
                    let time = wait.end(outcome, now);
                    return Poll::Ready(Heard { decision, time });
                }
                Turn::Waits(None) => {
                    wait.alarm = None;
                    return Poll::Pending;
                }
                Turn::Waits(Some(at)) => {
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
