//! The service at the edge: what every request of a client connection passes
//! first, and every answer last.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::header::CONNECTION;
use http::request::Parts;
use http::{HeaderValue, Request, Response, Version};
use hyper::body::Incoming;
use pin_project_lite::pin_project;

use super::access::Line;
use super::body::{Body, RequestBody};
use super::config::Maxima;
use super::connection::{Activity, Exchange};
use super::cors::Grant;
use super::egress::{Routed, Routes, upstream_of};
use super::live::SharedLive;
use super::metrics::{Metrics, Outcome};
use super::request::{HttpRequest, admit, needs_http2};
use super::response::{Asker, Problem, Synthetic};
use super::worker::Leaving;
use crate::runtime::Stage;
use crate::time::Clock;

/// Checks the requests of one connection, hands the good ones to `inner`, and
/// ends the connection when it has to end.
pub(super) struct Edge<S> {
    /// Must always be ready, so that it needs no copy of its own for each request.
    pub(super) inner: RefCell<S>,
    pub(super) activity: Arc<Activity>,
    /// The address of the connection's other end.
    pub(super) peer: IpAddr,
    pub(super) settings: Rc<EdgeSettings>,
}

/// What the edges of all connections have in common.
pub(super) struct EdgeSettings {
    pub(super) max: Maxima,
    /// How long a request's body may pause.
    pub(super) patience: Duration,
    pub(super) leaving: Rc<Leaving>,
    pub(super) metrics: Metrics,
    pub(super) live: SharedLive,
    pub(super) routes: Arc<Routes>,
    /// Whether there is an upstream for requests without a route.
    pub(super) has_default: bool,
    /// The time for the access log, if there is one.
    pub(super) access_log: Option<Clock>,
}

impl EdgeSettings {
    /// Finds the way of a request of `peer`, and keeps it in its extensions.
    fn route(&self, parts: &mut Parts, peer: IpAddr) -> Result<(), Problem> {
        if self.routes.is_empty() && self.has_default {
            return Ok(());
        }
        let client = self.live.load().trust.client(peer, &parts.headers);
        let route = self.routes.find(parts, &HttpRequest::new(parts, client)).map(Arc::clone);
        match route {
            Some(route) => {
                parts.extensions.insert(Routed(route));
                Ok(())
            }
            None if self.has_default => Ok(()),
            None => Err(Problem::NoRoute),
        }
    }
}

impl<S> hyper::service::Service<Request<Incoming>> for Edge<S>
where
    S: tower::Service<Request<RequestBody>, Response = Response<Body>, Error = Infallible>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = EdgeFuture<S>;

    fn call(&self, request: Request<Incoming>) -> EdgeFuture<S> {
        let exchange = self.activity.begin(request.version() >= Version::HTTP_2);
        let settings = &self.settings;
        let (mut parts, incoming) = request.into_parts();
        let version = parts.version;
        let body = RequestBody::new(
            incoming,
            &parts.headers,
            version,
            &exchange,
            settings.max.body,
            // In a gRPC call either side may be silent while the other streams; its
            // deadline is the client's own.
            (!needs_http2(&parts)).then_some(settings.patience),
        );
        let grant = settings.live.load().cors.grant(&parts.headers);
        let mut line = settings.access_log.as_ref().map(|clock| Line::begin(&mut parts, clock));
        let admitted = admit(&mut parts, &settings.max);
        let step = match admitted.and_then(|()| settings.route(&mut parts, self.peer)) {
            Ok(()) => {
                if let Some(line) = &mut line {
                    line.routed(upstream_of(&parts));
                }
                let request = Request::from_parts(parts, body);
                Step::Inner { future: self.inner.borrow_mut().call(request) }
            }
            Err(problem) => {
                drop(body);
                let asker = Asker::new(&parts.method, &parts.headers);
                Step::Answered { response: Some(problem.answer(&asker)) }
            }
        };
        let watch = Watch { settings: Rc::clone(settings), answered: false };
        EdgeFuture {
            step,
            exchange: Some(exchange),
            grant,
            line,
            http1: version < Version::HTTP_2,
            watch,
        }
    }
}

pin_project! {
    /// The future of [`Edge`].
    pub(super) struct EdgeFuture<S>
    where
        S: tower::Service<Request<RequestBody>>,
    {
        #[pin]
        step: Step<S>,
        exchange: Option<Exchange>,
        grant: Option<Grant>,
        line: Option<Box<Line>>,
        http1: bool,
        watch: Watch,
    }
}

pin_project! {
    #[project = StepProjected]
    enum Step<S>
    where
        S: tower::Service<Request<RequestBody>>,
    {
        Answered { response: Option<Response<Body>> },
        Inner { #[pin] future: S::Future },
    }
}

/// Counts a request whose client went away before it was answered.
struct Watch {
    settings: Rc<EdgeSettings>,
    answered: bool,
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.answered {
            self.settings.metrics.count(Outcome::Cancelled);
        }
    }
}

impl<S> Future for EdgeFuture<S>
where
    S: tower::Service<Request<RequestBody>, Response = Response<Body>, Error = Infallible>,
{
    type Output = Result<Response<Body>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let mut response = match this.step.project() {
            StepProjected::Answered { response } => match response.take() {
                Some(response) => response,
                // Polled again after it was done.
                None => return Poll::Pending,
            },
            StepProjected::Inner { future } => match ready!(future.poll(cx)) {
                Ok(response) => response,
            },
        };
        let upgraded = response.status() == http::StatusCode::SWITCHING_PROTOCOLS;
        let outcome = match response.extensions_mut().remove::<Synthetic>() {
            Some(made) => made.0,
            None if response.body().is_own() && !upgraded => Outcome::Limited,
            None => Outcome::Forwarded,
        };
        if let Some(grant) = this.grant.take().filter(|_| outcome != Outcome::Forwarded) {
            grant.insert(response.headers_mut());
        }
        this.watch.answered = true;
        this.watch.settings.metrics.count(outcome);
        if let Some(mut line) = this.line.take() {
            line.answered(outcome, response.status());
            response.body_mut().log(line);
        }
        if let Some(exchange) = this.exchange.take() {
            let leaving = this.watch.settings.leaving.stage() >= Stage::Announcing;
            if upgraded {
                exchange.activity().upgrade();
            }
            if *this.http1 && !upgraded && (leaving || exchange.activity().has_unread_body()) {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            response.body_mut().hold(exchange);
        }
        Poll::Ready(Ok(response))
    }
}
