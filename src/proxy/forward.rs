//! Forwarding: a request becomes one of our own to the upstream, and its answer
//! one of our own to the client.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::HOST;
use http::request::Parts;
use http::uri::{self, PathAndQuery, Scheme, Uri};
use http::{HeaderName, Request, Response, StatusCode, Version, response};
use http_body::Body as _;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tower::Service;

use super::admission::Admission;
use super::again::Told;
use super::body::{Body, RequestBody};
use super::egress::{Destination, Feedback, InFlight, Route, Routed};
use super::headers::{self, BodyShape, Peer, Present};
use super::kept::Kept;
use super::live::SharedLive;
use super::metrics::Metrics;
use super::request::needs_http2;
use super::response::{Asker, GatewayFault, Problem};
use super::upstream::Upstream;
use super::worker::OpenConnection;
use crate::runtime::{Drain, Stage, spawn_local};

/// Sends the requests of one client connection to the upstream.
#[derive(Clone)]
pub(super) struct Forward {
    shared: Rc<Shared>,
    peer: Rc<Peer>,
    /// Keeps the connection counted for as long as anything of it is left.
    open: Rc<OpenConnection>,
}

/// What all connections of a thread share.
pub(super) struct Shared {
    /// For requests without a route.
    pub(super) default: Option<Rc<Upstream>>,
    /// The others, in the order of their names.
    pub(super) named: Vec<Rc<Upstream>>,
    pub(super) live: SharedLive,
    pub(super) metrics: Metrics,
    pub(super) drain: Drain,
    /// Whether a limit, a route or a credential has to do with this field.
    pub(super) is_keyed: Box<dyn Fn(&HeaderName) -> bool>,
}

impl Shared {
    /// All connections of the thread.
    pub(super) fn upstreams(&self) -> impl Iterator<Item = &Rc<Upstream>> {
        self.default.iter().chain(&self.named)
    }

    /// The way that leads where `route` says.
    fn way(&self, route: Option<&Route>) -> Result<&Rc<Upstream>, Problem> {
        let named = route.and_then(|route| route.place);
        let upstream = match named {
            Some(place) => self.named.get(place),
            None => self.default.as_ref(),
        };
        upstream.ok_or(Problem::NoRoute)
    }
}

impl Forward {
    pub(super) const fn new(shared: Rc<Shared>, peer: Rc<Peer>, open: Rc<OpenConnection>) -> Self {
        Self { shared, peer, open }
    }
}

impl Service<Request<RequestBody>> for Forward {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody>) -> Self::Future {
        let asker = Asker::new(request.method(), request.headers());
        let outgoing = self.prepare(request);
        let (shared, open) = (Rc::clone(&self.shared), Rc::clone(&self.open));
        // What is moved into this block is copied once more, and what it holds while it
        // waits is allocated for each request: so it is little.
        Box::pin(async move {
            let answer = match outgoing {
                Ok(mut outgoing) => outgoing.send(&shared, &open).await,
                Err(problem) => Err(problem),
            };
            Ok(answer.unwrap_or_else(|problem| problem.answer(&asker)))
        })
    }
}

/// A request as the upstream gets it.
struct Outgoing {
    upstream: Rc<Upstream>,
    /// `None` once it was sent.
    request: Option<Request<RequestBody>>,
    admission: Option<Admission>,
    upgrade: Option<OnUpgrade>,
    http2: bool,
    in_flight: Option<InFlight>,
    /// Where the upstream is listened to: the head as it came, and what is kept of the
    /// body.
    spare: Option<Box<(Parts, Option<Arc<Kept>>)>>,
}

impl Forward {
    /// Makes a request one of our own.
    fn prepare(&self, request: Request<RequestBody>) -> Result<Outgoing, Problem> {
        let Self { shared, peer, .. } = self;
        let (mut parts, mut body) = request.into_parts();
        let admission = body.take_admission();
        let in_flight = parts.extensions.remove::<InFlight>();
        let routed = parts.extensions.get::<Routed>().cloned();
        let route = routed.as_ref().map(|routed| &*routed.0);
        let upstream = Rc::clone(shared.way(route)?);
        let destination = &upstream.destination;
        let spare = destination.hearing.as_ref().map(|_| Box::new((parts.clone(), body.keep())));
        if let Some(route) = route {
            route.strip(&mut parts.uri);
        }
        let http2 = needs_http2(&parts);
        let shape =
            BodyShape { empty: body.is_end_stream(), exact: body.size_hint().exact().is_some() };
        let upgrade = if shape.empty && headers::asks_for_websocket(&parts) {
            parts.extensions.remove::<OnUpgrade>()
        } else {
            None
        };
        let (peer, client) = {
            let trust = &shared.live.load().trust;
            let peer = peer.with_trust(trust.trusts(peer.ip));
            let client = trust.client(peer.ip, &parts.headers).ip();
            (peer, client)
        };
        let keyed = &*shared.is_keyed;
        let present = headers::prepare_request(&mut parts.headers, parts.version, shape, keyed);
        if !present.has(Present::HOST) {
            parts.headers.insert(HOST, destination.host.clone());
        }
        if headers::set_forwarding(&mut parts.headers, present, &peer, client) {
            shared.metrics.ignored_forwarding.inc();
        }
        if destination.replaces_host {
            parts.headers.insert(HOST, destination.host.clone());
        }
        // Last, so that nothing of the client's stands beside them.
        for credential in &destination.credentials {
            credential.insert(&mut parts.headers);
        }
        if upgrade.is_some() {
            headers::insert_websocket(&mut parts.headers);
        }
        if http2 {
            parts.version = Version::HTTP_2;
        } else {
            parts.version = Version::HTTP_11;
        }
        let request = Some(Request::from_parts(parts, body));
        Ok(Outgoing { upstream, request, admission, upgrade, http2, in_flight, spare })
    }
}

impl Outgoing {
    /// Sends the request, and makes its answer one of our own.
    async fn send(
        &mut self,
        shared: &Shared,
        open: &Rc<OpenConnection>,
    ) -> Result<Response<Body>, Problem> {
        let (request, admission) = (&mut self.request, self.admission.as_ref());
        let (response, lease) = if self.http2 {
            self.upstream.send_http2(request, admission).await?
        } else {
            self.upstream.send_http1(request, admission).await?
        };

        let (mut parts, incoming) = response.into_parts();
        self.listen(&mut parts);
        // The version is that of a message's sender, so that an upstream of
        // HTTP/1.0 does not cost the client its connection (RFC 9110 2.5).
        parts.version = Version::HTTP_11;
        if parts.status == StatusCode::SWITCHING_PROTOCOLS {
            let theirs = parts.extensions.remove::<OnUpgrade>();
            let (Some(ours), Some(theirs), true) =
                (self.upgrade.take(), theirs, headers::agrees_to_websocket(&parts.headers))
            else {
                return Err(Problem::BadGateway(GatewayFault::UnaskedUpgrade));
            };
            if let Some(lease) = lease {
                lease.upgraded();
            }
            headers::prepare_response(&mut parts.headers);
            headers::insert_websocket(&mut parts.headers);
            let kept = (Rc::clone(open), self.in_flight.take());
            bridge(ours, theirs, kept, shared.drain.clone());
            return Ok(Response::from_parts(parts, Body::from(bytes::Bytes::new())));
        }
        headers::prepare_response(&mut parts.headers);
        let mut body = Body::upstream(incoming, lease);
        body.travel(self.in_flight.take());
        Ok(Response::from_parts(parts, body))
    }
}

impl Outgoing {
    /// Hears what the upstream says of how much it bears.
    fn listen(&mut self, answer: &mut response::Parts) {
        let Destination { hearing, refusals, .. } = &*self.upstream.destination;
        let (Some(hearing), Some(spare)) = (hearing, self.spare.take()) else { return };
        let feedback = hearing.read(answer.status, &answer.headers);
        if feedback == Feedback::default() {
            return;
        }
        let request = feedback.refused.then(|| {
            refusals.inc();
            let (parts, kept) = *spare;
            let body = RequestBody::replaying(kept?.replay()?);
            Some(Request::from_parts(parts, body))
        });
        answer.extensions.insert(Told::new(feedback, request.flatten()));
    }
}

/// Passes on what either side of a WebSocket sends, until one has enough or the
/// time to drain is up.
fn bridge(
    ours: OnUpgrade,
    theirs: OnUpgrade,
    kept: (Rc<OpenConnection>, Option<InFlight>),
    drain: Drain,
) {
    spawn_local(async move {
        let copying = async {
            let (ours, theirs) = (ours.await?, theirs.await?);
            let (mut ours, mut theirs) = (TokioIo::new(ours), TokioIo::new(theirs));
            Ok::<_, Box<dyn std::error::Error>>(
                tokio::io::copy_bidirectional(&mut ours, &mut theirs).await?,
            )
        };
        tokio::select! {
            result = copying => if let Err(error) = result {
                tracing::debug!(%error, "an upgraded connection ended");
            },
            () = drain.reached(Stage::Aborting) => {}
        }
        drop(kept);
    });
}

/// HTTP/2 names scheme and authority in the target, and `Host` no more (RFC 9113 section
/// 8.3.1): some servers refuse a request that says it twice.
pub(super) fn to_absolute_form<B>(request: &mut Request<B>) -> Result<(), Problem> {
    let mut target = uri::Parts::default();
    target.scheme = Some(Scheme::HTTP);
    target.authority =
        request.headers().get(HOST).and_then(|host| host.to_str().ok()?.parse().ok());
    target.path_and_query = request.uri().path_and_query().cloned();
    target.path_and_query.get_or_insert_with(|| PathAndQuery::from_static("/"));
    *request.uri_mut() =
        Uri::from_parts(target).map_err(|_| Problem::BadRequest("the target is not a path"))?;
    request.headers_mut().remove(HOST);
    Ok(())
}
