//! A request that its upstream had no room for. What the upstream says of it goes to
//! the buckets and not to the request alone, so that all replicas hear of it; the
//! request goes back to its line, at the place of its age, if it may be sent twice.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::Request;
use http::request::Parts;
use smallvec::SmallVec;

use super::egress::{Feedback, Routed};
use super::hold::Held;
use super::limit::Enforcer;
use super::request::preferred_wait;
use crate::limiter::{
    BucketId, Client, Companion, Decision, LimitIndex, PauseOrder, Ticket, Tokens, Waiter,
};
use crate::time::Timestamp;

/// What an upstream said in its answer to a request of which more may be to come.
#[derive(Debug)]
pub struct Told<B> {
    feedback: Feedback,
    /// The request once more, if it may be sent again. Shared only because what is in
    /// extensions must be.
    request: Arc<Mutex<Option<Request<B>>>>,
}

impl<B> Clone for Told<B> {
    fn clone(&self) -> Self {
        Self { feedback: self.feedback, request: Arc::clone(&self.request) }
    }
}

impl<B> Told<B> {
    /// This `feedback` to a request that is given once more if it may be sent again.
    pub(super) fn new(feedback: Feedback, request: Option<Request<B>>) -> Self {
        Self { feedback, request: Arc::new(Mutex::new(request)) }
    }
}

/// What is needed to wait again with a request that goes to a named upstream.
pub(super) struct Again<S, C: Companion, H> {
    enforcer: Arc<Enforcer<C>>,
    inner: S,
    hand_over: H,
    client: Client,
    ticket: Ticket,
    deadline: Timestamp,
    /// The buckets of the limits that name its upstream.
    buckets: SmallVec<[(LimitIndex, BucketId); 1]>,
}

impl<S: Clone, C: Companion, H: Clone> Again<S, C, H> {
    /// For a request with the head `parts` on which `decision` was made; `None` if it
    /// goes to the default upstream, or no limit is for its upstream.
    pub(super) fn new(
        enforcer: &Arc<Enforcer<C>>,
        decision: &Decision,
        parts: &Parts,
        client: Client,
        waiter: Option<&Waiter>,
        (inner, hand_over): (&S, &H),
    ) -> Option<Box<Self>> {
        let route = &parts.extensions.get::<Routed>()?.0;
        route.place?;
        let limits = enforcer.limiter().limits();
        let mut patience = preferred_wait(&parts.headers).unwrap_or(Duration::MAX);
        let mut buckets = SmallVec::new();
        for check in &decision.checks {
            let Some(limit) = limits.get(check.limit) else { continue };
            if limit.rule().condition.upstream.is_some() {
                patience = patience.min(route.max_wait.unwrap_or(limit.max_wait()));
                buckets.push((check.limit, check.bucket));
            }
        }
        if buckets.is_empty() {
            return None;
        }
        let (ticket, deadline) = match waiter {
            Some(waiter) => (waiter.ticket(), waiter.deadline()),
            None => (enforcer.limiter().ticket(), enforcer.now().plus(patience)),
        };
        Some(Box::new(Self {
            enforcer: Arc::clone(enforcer),
            inner: inner.clone(),
            hand_over: hand_over.clone(),
            client,
            ticket,
            deadline,
            buckets,
        }))
    }

    /// How the inner service is spoken with.
    pub(super) const fn hand_over(&self) -> &H {
        &self.hand_over
    }

    /// Does as the upstream says. The request that waits again, if it may be sent
    /// again in time; whether the upstream refused it, if not.
    pub(super) fn heard<B>(self, told: &Told<B>) -> Result<Held<S, C, H, B>, bool> {
        let Feedback { refused, pause, left } = told.feedback;
        let limiter = self.enforcer.limiter();
        let now = self.enforcer.now();
        for (limit, bucket) in &self.buckets {
            if let Some(pause) = pause {
                let order = PauseOrder::AtLeast(now.plus(pause));
                limiter.pause(*limit, *bucket, None, order, now);
            }
            // More than is representable is more than any bucket holds.
            if let Some(left) = left.and_then(Tokens::from_whole) {
                limiter.debit(*bucket, left, now);
            }
        }
        if !refused || now.plus(pause.unwrap_or_default()) > self.deadline {
            return Err(refused);
        }
        let request = told.request.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(request) = request else { return Err(true) };
        let waiter = limiter.hold_again(self.ticket, self.deadline, now).ok_or(true)?;
        let limit = self.buckets.first().map(|(limit, _)| *limit);
        let metrics = self.enforcer.waits_for(limit);
        let request = request.into_parts();
        let Self { enforcer, inner, hand_over, client, .. } = self;
        Ok(Held::new(&enforcer, waiter, metrics, request, client, inner, hand_over))
    }
}
