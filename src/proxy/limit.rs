//! The limit as a [`tower::Layer`]: requests that a limiter refuses are answered
//! here, the others go to the inner service.
//!
//! It is of use in any program built on `http` types, such as hyper or axum: the
//! body only has to be made from bytes.
//!
//! A request without room may have to wait (`hold`): it goes to the inner service
//! when it is its turn, and is charged then.
//!
//! Invariants: a request is charged at most once however often the inner service
//! tries; with [refunds](RateLimitLayer::refunding) a request that was charged
//! and never [delivered](Admission::set_delivered) gets its tokens back exactly
//! once, also when the caller goes away meanwhile.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, Request, Response};
use pin_project_lite::pin_project;
use tower::{Layer, Service};

use super::access::Note;
use super::admission::{Admission, HandOver, InExtensions, NoRefunds};
use super::again::Again;
use super::config::HeaderStyle;
use super::egress::{InFlight, Permit, gate_of, upstream_of, wait_of_route};
use super::fields::{Fields, Presentation};
use super::hold::Held;
use super::metrics::{CheckTotals, Metrics, WaitMetrics, WaitOutcome};
use super::request::{HttpRequest, is_preflight, preferred_wait};
use super::response::{Asker, Problem, refusal};
use crate::limiter::{
    Client, Companion, Decision, Due, LimitIndex, Limiter, Outlook, Verdict, Waiter,
};
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
    style: Arc<AtomicU8>,
    presentation: ArcSwap<Presentation>,
}

/// Puts a [`RateLimit`] in front of a service.
#[derive(Debug)]
pub struct RateLimitLayer<C: Companion, F, H = NoRefunds> {
    enforcer: Arc<Enforcer<C>>,
    find_client: F,
    hand_over: H,
}

/// A service whose requests pass a limiter first.
#[derive(Debug)]
pub struct RateLimit<S, C: Companion, F, H = NoRefunds> {
    inner: S,
    enforcer: Arc<Enforcer<C>>,
    find_client: F,
    hand_over: H,
}

/// What a request was charged. Dropping it gives the tokens back, unless the
/// request was delivered.
struct Charge<C: Companion> {
    enforcer: Arc<Enforcer<C>>,
    decision: Decision,
    admission: Admission,
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
        let style = Arc::new(AtomicU8::new(style as u8));
        Self { limiter, clock, metrics, style, presentation }
    }

    /// The same for a thread that serves by itself: what every request takes hold of is
    /// then not what other threads count their holds on, too.
    pub(super) fn for_thread(&self) -> Self {
        let limits = self.limiter.limits();
        Self {
            limiter: Arc::clone(&self.limiter),
            clock: self.clock.clone(),
            metrics: self.metrics.clone(),
            style: Arc::clone(&self.style),
            presentation: ArcSwap::from_pointee(Presentation::new(limits, &self.metrics)),
        }
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

    /// What is counted.
    pub(super) const fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// What the limit called `name` made of its requests since the start.
    pub(super) fn totals(&self, name: &str) -> CheckTotals {
        self.metrics.limit(name).totals()
    }

    /// How the limits in force are presented.
    pub(super) fn presentation(&self) -> arc_swap::Guard<Arc<Presentation>> {
        let current = self.presentation.load();
        if self.limiter.enforces(current.limits()) {
            return current;
        }
        let limits = self.limiter.limits();
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
        Self { enforcer, find_client, hand_over: NoRefunds }
    }

    /// Gives tokens back for requests that the inner service does not declare
    /// delivered, through the [`Admission`] in their extensions.
    #[must_use]
    pub fn refunding(self) -> RateLimitLayer<C, F, InExtensions> {
        self.refunding_through(InExtensions)
    }

    /// The same, with the [`Admission`] where `hand_over` puts it.
    #[must_use]
    pub fn refunding_through<H>(self, hand_over: H) -> RateLimitLayer<C, F, H> {
        RateLimitLayer { enforcer: self.enforcer, find_client: self.find_client, hand_over }
    }
}

impl<S, C: Companion, F: Clone, H: Clone> Layer<S> for RateLimitLayer<C, F, H> {
    type Service = RateLimit<S, C, F, H>;

    fn layer(&self, inner: S) -> RateLimit<S, C, F, H> {
        RateLimit {
            inner,
            enforcer: Arc::clone(&self.enforcer),
            find_client: self.find_client.clone(),
            hand_over: self.hand_over.clone(),
        }
    }
}

impl<C: Companion, F: Clone, H: Clone> Clone for RateLimitLayer<C, F, H> {
    fn clone(&self) -> Self {
        Self {
            enforcer: Arc::clone(&self.enforcer),
            find_client: self.find_client.clone(),
            hand_over: self.hand_over.clone(),
        }
    }
}

impl<S: Clone, C: Companion, F: Clone, H: Clone> Clone for RateLimit<S, C, F, H> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            enforcer: Arc::clone(&self.enforcer),
            find_client: self.find_client.clone(),
            hand_over: self.hand_over.clone(),
        }
    }
}

impl<S, C, F, H, ReqB, ResB> Service<Request<ReqB>> for RateLimit<S, C, F, H>
where
    S: Service<Request<ReqB>, Response = Response<ResB>> + Clone,
    C: Companion,
    F: FindClient,
    H: HandOver<ReqB> + Clone,
    ResB: From<Bytes>,
{
    type Response = Response<ResB>;
    type Error = S::Error;
    type Future = RateLimitFuture<S, C, H, ReqB, ResB>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqB>) -> Self::Future {
        let (parts, body) = request.into_parts();
        if is_preflight(&parts) {
            let future = self.inner.call(Request::from_parts(parts, body));
            return RateLimitFuture::passed(future, None, None, None);
        }
        let client = self.find_client.find(&parts);
        let enforcer = &self.enforcer;
        let now = enforcer.clock.now();
        let permit = match gate_of(&parts) {
            None => None,
            Some(gate) => match gate.enter() {
                Some(permit) => Some(permit),
                // Whether there are tokens is asked when there is a place.
                None => return self.queue((parts, body), client, now),
            },
        };
        let decision = enforcer.limiter.decide(&HttpRequest::new(&parts, client), now);
        if let Verdict::Refused(_) = decision.verdict {
            let (route, asked) = (wait_of_route(&parts), preferred_wait(&parts.headers));
            match enforcer.limiter.outlook_on(route, &decision, asked) {
                Outlook::Settled => {}
                Outlook::Waits { due, patience } => {
                    drop(permit);
                    match enforcer.limiter.hold(&decision, patience, now) {
                        Some(waiter) => {
                            // The clone that stays was not told that it is ready.
                            let next = self.inner.clone();
                            let inner = std::mem::replace(&mut self.inner, next);
                            let metrics = enforcer.waits(&decision);
                            let request = (parts, body);
                            return RateLimitFuture::held(Held::new(
                                enforcer,
                                waiter,
                                metrics,
                                request,
                                client,
                                inner,
                                self.hand_over.clone(),
                            ));
                        }
                        None => {
                            return RateLimitFuture::answered(
                                enforcer.turn_away(&decision, due, client, &parts),
                            );
                        }
                    }
                }
                Outlook::Crowded { due } => {
                    let answer = enforcer.turn_away(&decision, due, client, &parts);
                    return RateLimitFuture::answered(answer);
                }
            }
        }
        let way = (&self.inner, &self.hand_over);
        let again = Again::new(enforcer, &decision, &parts, client, None, way);
        match enforcer.settle(decision, client, None, &parts, H::REFUNDS) {
            Ok(Admitted { charge, fields }) => {
                let mut request = Request::from_parts(parts, body);
                request.extensions_mut().extend(in_flight(permit));
                if let Some(charge) = &charge {
                    self.hand_over.hand_over(&mut request, charge.admission());
                }
                RateLimitFuture::passed(self.inner.call(request), charge, fields, again)
            }
            Err(answer) => RateLimitFuture::answered(answer),
        }
    }
}

impl<S, C: Companion, F, H: Clone> RateLimit<S, C, F, H> {
    /// Lets a request wait for a place among those on their way to its upstream.
    fn queue<ReqB, ResB>(
        &mut self,
        request: (Parts, ReqB),
        client: Client,
        now: Timestamp,
    ) -> RateLimitFuture<S, C, H, ReqB, ResB>
    where
        S: Service<Request<ReqB>, Response = Response<ResB>> + Clone,
        ResB: From<Bytes>,
    {
        let (limiter, parts) = (&self.enforcer.limiter, &request.0);
        let patience = wait_of_route(parts).unwrap_or_default();
        let patience = patience.min(preferred_wait(&parts.headers).unwrap_or(Duration::MAX));
        let waiter = (!patience.is_zero())
            .then(|| limiter.hold_again(limiter.ticket(), now.plus(patience), now));
        let Some(waiter) = waiter.flatten() else {
            let answer = Problem::UpstreamBusy.answer(&Asker::new(&parts.method, &parts.headers));
            return RateLimitFuture::answered(answer);
        };
        let metrics = self.enforcer.metrics.waits(upstream_of(parts));
        let next = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, next);
        let hand_over = self.hand_over.clone();
        let held = Held::new(&self.enforcer, waiter, metrics, request, client, inner, hand_over);
        RateLimitFuture::held(held)
    }
}

/// A place among those on their way, as it comes with a request.
fn in_flight(permit: Option<Permit>) -> Extensions {
    let mut extensions = Extensions::new();
    if let Some(permit) = permit {
        extensions.insert(InFlight::new(permit));
    }
    extensions
}

/// A request that may pass.
struct Admitted<C: Companion> {
    charge: Option<Charge<C>>,
    fields: Option<Fields>,
}

impl<C: Companion> Enforcer<C> {
    /// Counts and notes `decision`, for a request that may have waited; the answer
    /// of its own if the request may not pass.
    fn settle<B: From<Bytes>>(
        self: &Arc<Self>,
        decision: Decision,
        client: Client,
        waited: Option<(&Waiter, Duration)>,
        parts: &Parts,
        refunding: bool,
    ) -> Result<Admitted<C>, Response<B>> {
        let presentation = self.presentation();
        for check in &decision.checks {
            if let Some(view) = presentation.view(check.limit) {
                let held = waited.is_some_and(|(waiter, _)| waiter.was_held_by(check.limit));
                view.metrics.count(check.outcome, held);
            }
        }
        if let Some(note) = parts.extensions.get::<Note>() {
            note.judge(&presentation, &decision, client, waited.map(|(_, time)| time));
        }
        let mut fields = presentation.fields(&decision, self.style());
        if let Some(check) = decision.refusal() {
            let limit = presentation.name(check.limit);
            tracing::debug!(limit, verdict = "refused", "request refused");
        }
        if let Some(answer) = rejection(&presentation, &decision, &mut fields, parts) {
            return Err(answer);
        }
        let charge = (refunding && !decision.checks.is_empty()).then(|| Charge {
            enforcer: Arc::clone(self),
            decision,
            admission: Admission::default(),
        });
        Ok(Admitted { charge, fields })
    }

    /// Where waits for the limit that refuses are counted.
    fn waits(&self, decision: &Decision) -> Arc<WaitMetrics> {
        self.waits_for(decision.refusal().map(|check| check.limit))
    }

    /// Where waits for `limit` are counted.
    pub(super) fn waits_for(&self, limit: Option<LimitIndex>) -> Arc<WaitMetrics> {
        let presentation = self.presentation();
        let view = limit.and_then(|limit| presentation.view(limit));
        view.map_or_else(|| self.metrics.waits(""), |view| Arc::clone(&view.metrics.waits))
    }

    /// The answer to a request that might wait, if there were not too many.
    fn turn_away<B: From<Bytes>>(
        &self,
        decision: &Decision,
        due: Duration,
        client: Client,
        parts: &Parts,
    ) -> Response<B> {
        let presentation = self.presentation();
        for check in &decision.checks {
            if let Some(view) = presentation.view(check.limit) {
                view.metrics.count(check.outcome, false);
            }
        }
        self.waits(decision).count(WaitOutcome::TooMany);
        if let Some(note) = parts.extensions.get::<Note>() {
            note.turned_away(&presentation, decision, client);
        }
        Problem::TooManyWaiting { due }.answer(&Asker::new(&parts.method, &parts.headers))
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

impl<C: Companion> Charge<C> {
    fn admission(&self) -> Admission {
        self.admission.clone()
    }
}

impl<C: Companion> Drop for Charge<C> {
    fn drop(&mut self) {
        if !self.admission.is_delivered() {
            self.enforcer.metrics.refunds.inc();
            self.enforcer.limiter.refund(&self.decision, self.enforcer.clock.now());
        }
    }
}

pin_project! {
    /// The future of [`RateLimit`].
    pub struct RateLimitFuture<S, C, H, ReqB, ResB>
    where
        S: Service<Request<ReqB>>,
        C: Companion,
    {
        #[pin]
        state: State<S, C, H, ReqB, ResB>,
    }
}

pin_project! {
    #[project = StateProjected]
    enum State<S, C, H, ReqB, ResB>
    where
        S: Service<Request<ReqB>>,
        C: Companion,
    {
        // The limiter answered.
        Answered { response: Option<Response<ResB>> },
        // It is not its turn yet.
        Held { held: Box<Held<S, C, H, ReqB>> },
        // The inner service answers.
        Passed {
            #[pin]
            future: S::Future,
            charge: Option<Charge<C>>,
            fields: Option<Fields>,
            // What it takes to send the request once more.
            again: Option<Box<Again<S, C, H>>>,
        },
    }
}

impl<S: Service<Request<ReqB>>, C: Companion, H, ReqB, ResB> RateLimitFuture<S, C, H, ReqB, ResB> {
    const fn answered(response: Response<ResB>) -> Self {
        Self { state: State::Answered { response: Some(response) } }
    }

    fn held(held: Held<S, C, H, ReqB>) -> Self {
        Self { state: State::Held { held: Box::new(held) } }
    }

    const fn passed(
        future: S::Future,
        charge: Option<Charge<C>>,
        fields: Option<Fields>,
        again: Option<Box<Again<S, C, H>>>,
    ) -> Self {
        Self { state: State::Passed { future, charge, fields, again } }
    }
}

impl<S, C, H, ReqB, ResB> Future for RateLimitFuture<S, C, H, ReqB, ResB>
where
    S: Service<Request<ReqB>, Response = Response<ResB>> + Clone,
    C: Companion,
    H: HandOver<ReqB> + Clone,
    ResB: From<Bytes>,
{
    type Output = Result<Response<ResB>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProjected::Answered { response } => {
                    return match response.take() {
                        Some(response) => Poll::Ready(Ok(response)),
                        // Polled again after it was done.
                        None => Poll::Pending,
                    };
                }
                StateProjected::Held { held } => {
                    let heard = ready!(held.poll_turn(cx));
                    let Some((parts, body)) = held.request.take() else { return Poll::Pending };
                    let waited = Some((held.waiter(), heard.time));
                    let (Some(decision), client) = (heard.decision, held.client) else {
                        let asker = Asker::new(&parts.method, &parts.headers);
                        let response = Some(Problem::UpstreamBusy.answer(&asker));
                        state.set(State::Answered { response });
                        continue;
                    };
                    let way = (&held.inner, &held.hand_over);
                    let waiter = Some(held.waiter());
                    let again = Again::new(held.enforcer(), &decision, &parts, client, waiter, way);
                    match held.enforcer().settle(decision, client, waited, &parts, H::REFUNDS) {
                        Ok(Admitted { charge, fields }) => {
                            let mut request = Request::from_parts(parts, body);
                            request.extensions_mut().extend(in_flight(heard.permit));
                            if let Some(charge) = &charge {
                                held.hand_over.hand_over(&mut request, charge.admission());
                            }
                            let future = held.inner.call(request);
                            State::Passed { future, charge, fields, again }
                        }
                        Err(answer) => State::Answered { response: Some(answer) },
                    }
                }
                StateProjected::Passed { future, charge, fields, again } => {
                    let result = ready!(future.poll(cx));
                    drop(charge.take());
                    let mut response = match result {
                        Ok(response) => response,
                        Err(error) => return Poll::Ready(Err(error)),
                    };
                    let heard = again.take().and_then(|again| {
                        let told = again.hand_over().told(response.extensions_mut())?;
                        Some(again.heard(&told))
                    });
                    match heard {
                        Some(Ok(held)) => State::Held { held: Box::new(held) },
                        // It is the upstream's refusal, and what it says holds.
                        Some(Err(true)) => return Poll::Ready(Ok(response)),
                        Some(Err(false)) | None => {
                            if let Some(fields) = fields.take() {
                                fields.insert(response.headers_mut());
                            }
                            return Poll::Ready(Ok(response));
                        }
                    }
                }
            };
            state.set(next);
        }
    }
}
