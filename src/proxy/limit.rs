//! The limit as a [`tower::Layer`]: requests that a limiter refuses are answered
//! here, the others go to the inner service.
//!
//! It is of use in any program built on `http` types, such as hyper or axum: the
//! body only has to be made from bytes.
//!
//! Invariants: a request is charged at most once however often the inner service
//! tries; with [refunds](RateLimitLayer::refunding) a request that was charged
//! and never [delivered](Admission::set_delivered) gets its tokens back exactly
//! once, also when the caller goes away meanwhile.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::{Context, Poll, ready};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower::{Layer, Service};

use super::access::Note;
use super::config::HeaderStyle;
use super::fields::{Fields, Presentation};
use super::metrics::{CheckTotals, Metrics};
use super::request::{HttpRequest, is_preflight};
use super::response::{Asker, Problem, refusal};
use crate::limiter::{Client, Companion, Decision, Due, Limiter, Verdict};
use crate::time::{Clock, Timestamp};

/// Finds the client on whose behalf a request was sent.
pub trait FindClient {
    /// The client of the request with this head.
    fn find(&self, parts: &Parts) -> Client;
}

impl<F: Fn(&Parts) -> Client> FindClient for F {
    fn find(&self, parts: &Parts) -> Client {
        self(parts)
    }
}

/// A limiter with all that is needed to answer for it. Shared by every service
/// that it protects.
pub struct Enforcer<C: Companion> {
    limiter: Arc<Limiter<C>>,
    clock: Clock,
    metrics: Metrics,
    /// The discriminant of a [`HeaderStyle`].
    style: AtomicU8,
    presentation: ArcSwap<Presentation>,
}

/// Puts a [`RateLimit`] in front of a service.
#[derive(Debug)]
pub struct RateLimitLayer<C: Companion, F> {
    enforcer: Arc<Enforcer<C>>,
    find_client: F,
    refunding: bool,
}

/// A service whose requests pass a limiter first.
#[derive(Debug)]
pub struct RateLimit<S, C: Companion, F> {
    inner: S,
    enforcer: Arc<Enforcer<C>>,
    find_client: F,
    refunding: bool,
}

/// In the extensions of a request that was charged, if refunds are on: where the
/// inner service says whether it delivered the request.
#[derive(Clone, Debug)]
pub struct Admission(Arc<AtomicBool>);

/// What a request was charged. Dropping it gives the tokens back, unless the
/// request was delivered.
struct Charge<C: Companion> {
    enforcer: Arc<Enforcer<C>>,
    decision: Decision,
    delivered: Arc<AtomicBool>,
}

impl<C: Companion> Enforcer<C> {
    /// Answers for `limiter`, by the time of `clock`.
    pub fn new(
        limiter: Arc<Limiter<C>>,
        clock: Clock,
        metrics: Metrics,
        style: HeaderStyle,
    ) -> Self {
        let presentation = ArcSwap::from_pointee(Presentation::new(limiter.limits(), &metrics));
        let style = AtomicU8::new(style as u8);
        Self { limiter, clock, metrics, style, presentation }
    }

    /// Changes which rate limit fields answers carry.
    pub fn set_style(&self, style: HeaderStyle) {
        self.style.store(style as u8, Ordering::Relaxed);
    }

    /// Prepares what answers tell of the limits in force, which else the first
    /// request does.
    pub fn refresh(&self) {
        drop(self.presentation());
    }

    /// How state is told to clients.
    pub(super) fn style(&self) -> HeaderStyle {
        let style = usize::from(self.style.load(Ordering::Relaxed));
        HeaderStyle::ALL.get(style).copied().unwrap_or_default()
    }

    /// The limiter.
    pub fn limiter(&self) -> &Limiter<C> {
        &self.limiter
    }

    /// The moment at which it would decide.
    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// What the limit called `name` made of its requests since the start.
    pub(super) fn totals(&self, name: &str) -> CheckTotals {
        self.metrics.limit(name).totals()
    }

    /// How the limits in force are presented.
    pub(super) fn presentation(&self) -> arc_swap::Guard<Arc<Presentation>> {
        let limits = self.limiter.limits();
        let current = self.presentation.load();
        if current.presents(&limits) {
            return current;
        }
        self.presentation.store(Arc::new(Presentation::new(limits, &self.metrics)));
        self.presentation.load()
    }
}

impl<C: Companion> fmt::Debug for Enforcer<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Enforcer").field("style", &self.style()).finish_non_exhaustive()
    }
}

impl<C: Companion, F> RateLimitLayer<C, F> {
    /// Enforces the limits of `enforcer` on the clients that `find_client` finds.
    pub fn new(enforcer: Arc<Enforcer<C>>, find_client: F) -> Self {
        Self { enforcer, find_client, refunding: false }
    }

    /// Gives tokens back for requests that the inner service does not declare
    /// delivered, through the [`Admission`] in their extensions.
    #[must_use]
    pub fn refunding(mut self) -> Self {
        self.refunding = true;
        self
    }
}

impl<S, C: Companion, F: Clone> Layer<S> for RateLimitLayer<C, F> {
    type Service = RateLimit<S, C, F>;

    fn layer(&self, inner: S) -> RateLimit<S, C, F> {
        RateLimit {
            inner,
            enforcer: Arc::clone(&self.enforcer),
            find_client: self.find_client.clone(),
            refunding: self.refunding,
        }
    }
}

impl<C: Companion, F: Clone> Clone for RateLimitLayer<C, F> {
    fn clone(&self) -> Self {
        Self {
            enforcer: Arc::clone(&self.enforcer),
            find_client: self.find_client.clone(),
            refunding: self.refunding,
        }
    }
}

impl<S: Clone, C: Companion, F: Clone> Clone for RateLimit<S, C, F> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            enforcer: Arc::clone(&self.enforcer),
            find_client: self.find_client.clone(),
            refunding: self.refunding,
        }
    }
}

impl<S, C, F, ReqB, ResB> Service<Request<ReqB>> for RateLimit<S, C, F>
where
    S: Service<Request<ReqB>, Response = Response<ResB>>,
    C: Companion,
    F: FindClient,
    ResB: From<Bytes>,
{
    type Response = Response<ResB>;
    type Error = S::Error;
    type Future = RateLimitFuture<S::Future, C, ResB>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqB>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        if is_preflight(&parts) {
            return self.pass(Request::from_parts(parts, body), None, None);
        }
        let client = self.find_client.find(&parts);
        let attributes = HttpRequest::new(&parts, client);
        let decision = self.enforcer.limiter.decide(&attributes, self.enforcer.clock.now());
        let presentation = self.enforcer.presentation();
        for check in &decision.checks {
            if let Some(view) = presentation.view(check.limit) {
                view.metrics.count(check.outcome);
            }
        }
        if let Some(note) = parts.extensions.get::<Note>() {
            note.judge(&presentation, &decision, client);
        }
        let mut fields = presentation.fields(&decision, self.enforcer.style());
        if let Some(check) = decision.refusal() {
            let limit = presentation.name(check.limit);
            tracing::debug!(limit, verdict = "refused", "request refused");
        }
        if let Some(answer) = rejection(&presentation, &decision, &mut fields, &parts) {
            return RateLimitFuture::answered(answer);
        }
        let charge = (self.refunding && !decision.checks.is_empty()).then(|| {
            let delivered = Arc::new(AtomicBool::new(false));
            parts.extensions.insert(Admission(Arc::clone(&delivered)));
            Charge { enforcer: Arc::clone(&self.enforcer), decision, delivered }
        });
        self.pass(Request::from_parts(parts, body), charge, fields)
    }
}

/// The answer to a request that may not pass, which takes `fields` with it;
/// `None` for one that may.
pub(super) fn rejection<B: From<Bytes>>(
    presentation: &Presentation,
    decision: &Decision,
    fields: &mut Option<Fields>,
    parts: &Parts,
) -> Option<Response<B>> {
    let asker = || Asker::new(&parts.method, &parts.headers);
    match decision.verdict {
        Verdict::Admitted => None,
        Verdict::Refused(_) => {
            let fields = fields.take();
            let check = decision.refusal()?;
            // Missing only while limits are being replaced; then it passes.
            let view = presentation.view(check.limit)?;
            let due = match check.due {
                Due::Now => Some(0),
                Due::In(nanos) => Some(nanos),
                Due::Never => None,
            };
            Some(refusal(view, due, fields, &asker()))
        }
        Verdict::MissingPart { limit, part } => {
            let part = presentation
                .limit(limit)
                .and_then(|limit| limit.rule().key.get(part))
                .map_or_else(|| "a part of a key".to_owned(), ToString::to_string);
            Some(Problem::MissingKeyPart(part).answer(&asker()))
        }
    }
}

impl<S, C: Companion, F> RateLimit<S, C, F> {
    fn pass<ReqB, ResB>(
        &mut self,
        request: Request<ReqB>,
        charge: Option<Charge<C>>,
        fields: Option<Fields>,
    ) -> RateLimitFuture<S::Future, C, ResB>
    where
        S: Service<Request<ReqB>, Response = Response<ResB>>,
    {
        let state = State::Passed { future: self.inner.call(request), charge, fields };
        RateLimitFuture { state }
    }
}

impl Admission {
    /// Says whether the request is in the hands of the one it is for. The last
    /// word before the answer counts.
    pub fn set_delivered(&self, delivered: bool) {
        self.0.store(delivered, Ordering::Relaxed);
    }
}

impl<C: Companion> Drop for Charge<C> {
    fn drop(&mut self) {
        if !self.delivered.load(Ordering::Relaxed) {
            self.enforcer.metrics.refunds.inc();
            self.enforcer.limiter.refund(&self.decision, self.enforcer.clock.now());
        }
    }
}

pin_project! {
    /// The future of [`RateLimit`].
    pub struct RateLimitFuture<Fut, C: Companion, B> {
        #[pin]
        state: State<Fut, C, B>,
    }
}

pin_project! {
    #[project = StateProjected]
    enum State<Fut, C: Companion, B> {
        // The limiter answered.
        Answered { response: Option<Response<B>> },
        // The inner service answers.
        Passed {
            #[pin]
            future: Fut,
            charge: Option<Charge<C>>,
            fields: Option<Fields>,
        },
    }
}

impl<Fut, C: Companion, B> RateLimitFuture<Fut, C, B> {
    const fn answered(response: Response<B>) -> Self {
        Self { state: State::Answered { response: Some(response) } }
    }
}

impl<Fut, C, B, E> Future for RateLimitFuture<Fut, C, B>
where
    Fut: Future<Output = Result<Response<B>, E>>,
    C: Companion,
{
    type Output = Result<Response<B>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProjected::Answered { response } => match response.take() {
                Some(response) => Poll::Ready(Ok(response)),
                // Polled again after it was done.
                None => Poll::Pending,
            },
            StateProjected::Passed { future, charge, fields } => {
                let result = ready!(future.poll(cx));
                drop(charge.take());
                Poll::Ready(result.map(|mut response| {
                    if let Some(fields) = fields.take() {
                        fields.insert(response.headers_mut());
                    }
                    response
                }))
            }
        }
    }
}
