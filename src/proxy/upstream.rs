//! The way to the upstream: one set of connections for each thread, HTTP/1.1 for
//! most requests and one shared HTTP/2 connection for gRPC.
//!
//! A connection that was idle may be dead before this side has noticed. A
//! request that was not written to it, or that could be sent twice without harm
//! (an idempotent method without a body), is tried once more on a fresh one. So is,
//! once, what an upstream of HTTP/2 says that it has not looked at.
//!
//! A request counts as delivered from its first byte on that the socket took, so
//! that one of which nothing left gets its tokens back, whoever was at fault.

use std::cell::{Cell, RefCell};
use std::error::Error as _;
use std::future::{Future as _, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{HeaderName, HeaderValue, Method, Request, Response, Uri, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::admission::Admission;
use super::alarm::Alarm;
use super::body::{RequestBody, Upload, UploadFault};
use super::config::{self, Timeouts};
use super::egress::Destination;
use super::forward::to_absolute_form;
use super::lent::{Lender, Lent};
use super::metrics::Metrics;
use super::response::{GatewayFault, Problem};
use super::wire::{Lease, SendResult, Wire};
use super::worker::LocalExecutor;
use crate::runtime::spawn_local;
use crate::time::{Clock, Timestamp};
use crate::tls;

/// Connections a thread keeps open for later.
const MAX_IDLE: usize = 256;
/// How long it keeps them: less than the keep-alive time of usual servers, so
/// that they rarely close a connection while a request is on its way.
const KEEP_IDLE: Duration = Duration::from_secs(3);

/// For a request that was taken before, which does not happen.
const LOST: Problem = Problem::BadGateway(GatewayFault::Closed);

/// How often a fault of TLS is told.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// One thread's connections to the upstream.
#[derive(Debug)]
pub(super) struct Upstream {
    /// What it is.
    pub(super) destination: Arc<Destination>,
    target: Target,
    /// When a fault of TLS was last told.
    warned: Cell<Option<Timestamp>>,
    timeouts: Timeouts,
    clock: Clock,
    metrics: Metrics,
    /// The one used last is at the end and is used first.
    idle: RefCell<Vec<Idle>>,
    http2: RefCell<Option<http2::SendRequest<Lent>>>,
    lender: Lender,
    /// Of exchanges that are over.
    alarms: RefCell<Vec<Alarm>>,
    /// Of spare requests that were not needed, empty.
    lists: RefCell<Vec<Vec<(HeaderName, HeaderValue)>>>,
}

#[derive(Debug)]
enum Target {
    Address(SocketAddr),
    Name(String),
    Unix(std::path::PathBuf),
}

#[derive(Debug)]
struct Idle {
    wire: Wire,
    since: Timestamp,
}

/// An answer, and the connection it comes on unless that is shared.
pub(super) type Answer = (Response<Incoming>, Option<Lease>);

impl Upstream {
    pub(super) fn new(
        destination: Arc<Destination>,
        timeouts: Timeouts,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let target = match &destination.upstream {
            config::Upstream::Http { authority } | config::Upstream::Https { authority } => {
                match authority.parse() {
                    Ok(address) => Target::Address(address),
                    Err(_) => Target::Name(authority.clone()),
                }
            }
            config::Upstream::Unix(path) => Target::Unix(path.clone()),
        };
        Self {
            destination,
            target,
            warned: Cell::default(),
            timeouts,
            clock,
            metrics,
            idle: RefCell::default(),
            http2: RefCell::default(),
            lender: Lender::default(),
            alarms: RefCell::default(),
            lists: RefCell::default(),
        }
    }

    /// Takes `request`, sends it over HTTP/1.1 and waits for the head of the answer.
    ///
    /// # Errors
    /// The problem to answer the client with.
    pub(super) async fn send_http1(
        self: &Rc<Self>,
        request: &mut Option<Request<RequestBody>>,
        admission: Option<&Admission>,
    ) -> Result<Answer, Problem> {
        let upload = request.as_ref().and_then(|request| request.body().upload());
        let mut fresh = false;
        loop {
            let idle = if fresh { None } else { self.take_idle() };
            let reused = idle.is_some();
            let mut wire = match idle {
                Some(wire) => wire,
                None => self.connect_http1().await?,
            };
            let Some(sent) = request.take() else { return Err(LOST) };
            let list = || self.lists.borrow_mut().pop().unwrap_or_default();
            let spare = if reused { Spare::of(&sent, list) } else { None };
            let delivery = wire.delivery(admission);
            let result = {
                let mut sending = pin!(wire.send(sent));
                let answer = |cx: &mut Context<'_>| wire.poll_answer(sending.as_mut(), cx);
                self.exchange(upload.as_deref(), answer).await
            };
            match (result, spare) {
                (Ok(response), spare) => {
                    drop(delivery);
                    if let Some(spare) = spare {
                        self.recycle(spare);
                    }
                    return Ok((response, wire.lend(self, upload.as_deref())));
                }
                // It was dead before; so may be others.
                (Err(Failure::Unsent(unsent)), _) if reused => *request = Some(*unsent),
                (Err(Failure::Sent(Problem::BadGateway(GatewayFault::Closed))), Some(spare)) => {
                    *request = Some(spare.into_request());
                    fresh = true;
                }
                (Err(failure), _) => return Err(failure.into_problem()),
            }
        }
    }

    /// Takes `request`, whose target is in origin form, sends it over the shared HTTP/2
    /// connection and waits for the head of the answer.
    ///
    /// # Errors
    /// The problem to answer the client with.
    pub(super) async fn send_http2(
        &self,
        request: &mut Option<Request<RequestBody>>,
        admission: Option<&Admission>,
    ) -> Result<Answer, Problem> {
        let Some(request) = request.take() else { return Err(LOST) };
        let upload = request.body().upload();
        // Others write to the same connection, so what was written says nothing.
        let deliver = |delivered| {
            if let Some(admission) = admission {
                admission.set_delivered(delivered);
            }
        };
        let (loan, mut request) = self.lender.lend(request);
        to_absolute_form(&mut request)?;
        // Each allows one attempt more.
        let (mut loan, mut may_share) = (Some(loan), true);
        loop {
            let open = if may_share { self.open_http2().await } else { None };
            let shared = open.is_some();
            let mut sender = match open {
                Some(sender) => sender,
                None => self.connect_http2().await?,
            };
            deliver(true);
            let result = {
                let mut sending = pin!(sender.try_send_request(request));
                self.exchange(upload.as_deref(), |cx| sending.as_mut().poll(cx)).await
            };
            let failure = match result {
                Ok(response) => return Ok((response, None)),
                Err(failure) => failure,
            };
            deliver(matches!(failure, Failure::Sent(_)));
            request = match (failure, loan.take()) {
                (Failure::Unsent(unsent), unused) if shared => {
                    (loan, may_share) = (unused, false);
                    *unsent
                }
                (Failure::Unprocessed, Some(mut loan)) => {
                    let Some(mut again) = loan.call_in() else {
                        return Err(Failure::<Lent>::Unprocessed.into_problem());
                    };
                    to_absolute_form(&mut again)?;
                    again
                }
                (failure, _) => {
                    let problem = failure.into_problem();
                    if problem == Problem::ResponseTimeout && shared {
                        // It may be dead without anybody having noticed. What
                        // still runs on it may go on.
                        self.http2.borrow_mut().take();
                    }
                    return Err(problem);
                }
            };
        }
    }

    /// Somebody must act, but one line for each request would help nobody.
    fn warn_of_tls(&self, error: &io::Error) {
        let now = self.clock.now();
        if self.warned.get().is_none_or(|last| now.since(last) >= WARN_INTERVAL) {
            self.warned.set(Some(now));
            let upstream = self.destination.name.as_str();
            tracing::warn!(upstream, reason = %error, "no TLS with the upstream");
        }
    }

    /// Closes what has been idle for too long.
    pub(super) fn reap(&self) {
        let now = self.clock.now();
        self.idle.borrow_mut().retain_mut(|idle| {
            idle.wire.look();
            !idle.wire.is_closed() && is_young(idle, now)
        });
    }

    /// Closes every idle connection.
    pub(super) fn close_idle(&self) {
        self.idle.borrow_mut().clear();
        self.http2.borrow_mut().take();
    }

    fn take_idle(&self) -> Option<Wire> {
        let mut idle = self.idle.borrow_mut();
        if idle.is_empty() {
            return None;
        }
        let now = self.clock.now();
        while let Some(last) = idle.pop() {
            if !last.wire.is_closed() && is_young(&last, now) {
                return Some(last.wire);
            }
        }
        None
    }

    /// Keeps a connection for another request.
    pub(super) fn take_back(&self, wire: Wire) {
        let mut idle = self.idle.borrow_mut();
        if idle.len() < MAX_IDLE && !wire.is_closed() {
            idle.push(Idle { wire, since: self.clock.now() });
        }
    }

    /// One attempt on one connection.
    async fn exchange<B>(
        &self,
        upload: Option<&Upload>,
        mut answer: impl FnMut(&mut Context<'_>) -> Poll<SendResult<B>>,
    ) -> Result<Response<Incoming>, Failure<B>> {
        let started = self.clock.now();
        let mut alarm = self.alarms.borrow_mut().pop().unwrap_or_default();
        let mut deadline = started.plus(self.timeouts.response);
        let mut frames = upload.map(Upload::frames);
        let result = poll_fn(|cx| {
            loop {
                if let Poll::Ready(result) = answer(cx) {
                    return Poll::Ready(Some(result));
                }
                ready!(alarm.poll_due(deadline, &self.clock, cx));
                let seen = upload.map(Upload::frames);
                // The upstream need not answer what is still being said.
                if seen == frames && !upload.is_some_and(Upload::is_awaited) {
                    return Poll::Ready(None);
                }
                frames = seen;
                deadline = self.clock.now().plus(self.timeouts.response);
            }
        })
        .await;
        self.keep(alarm);
        let Some(result) = result else { return Err(Failure::Sent(Problem::ResponseTimeout)) };
        match result {
            Ok(response) => {
                self.metrics.upstream_took(self.clock.now().since(started));
                Ok(response)
            }
            Err(mut error) => {
                if let Some(fault) = upload.and_then(Upload::fault) {
                    return Err(Failure::Sent(fault.into()));
                }
                if let Some(unsent) = error.take_message() {
                    return Err(Failure::Unsent(Box::new(unsent)));
                }
                let error = error.into_error();
                tracing::debug!(%error, "the upstream did not answer");
                if is_unprocessed(&error) {
                    return Err(Failure::Unprocessed);
                }
                let fault = if error.is_parse() || error.is_parse_too_large() {
                    GatewayFault::Protocol
                } else {
                    GatewayFault::Closed
                };
                Err(Failure::Sent(Problem::BadGateway(fault)))
            }
        }
    }

    /// Keeps the list of a spare request for the next one.
    fn recycle(&self, mut spare: Spare) {
        spare.fields.clear();
        let mut lists = self.lists.borrow_mut();
        if lists.len() < MAX_IDLE {
            lists.push(spare.fields);
        }
    }

    /// Keeps an alarm for the next exchange, armed as it is.
    fn keep(&self, alarm: Alarm) {
        let mut alarms = self.alarms.borrow_mut();
        if alarms.len() < MAX_IDLE {
            alarms.push(alarm);
        }
    }

    async fn connect_http1(&self) -> Result<Wire, Problem> {
        match self.connect(tls::Upstream::http1).await? {
            Stream::Tls(io) => Wire::begin(io).await,
            Stream::Tcp(io) => Wire::begin(io).await,
            Stream::Unix(io) => Wire::begin(io).await,
        }
    }

    /// The shared connection, if it takes requests.
    async fn open_http2(&self) -> Option<http2::SendRequest<Lent>> {
        let open = self.http2.borrow().as_ref().filter(|sender| !sender.is_closed()).cloned();
        let mut sender = open?;
        sender.ready().await.is_ok().then_some(sender)
    }

    async fn connect_http2(&self) -> Result<http2::SendRequest<Lent>, Problem> {
        let sender = match self.connect(tls::Upstream::http2).await? {
            Stream::Tls(io) => handshake_http2(io).await?,
            Stream::Tcp(io) => handshake_http2(io).await?,
            Stream::Unix(io) => handshake_http2(io).await?,
        };
        *self.http2.borrow_mut() = Some(sender.clone());
        Ok(sender)
    }

    async fn connect(
        &self,
        config: impl Fn(&tls::Upstream) -> Arc<rustls::ClientConfig>,
    ) -> Result<Stream, Problem> {
        let connecting = async {
            match &self.target {
                Target::Address(address) => TcpStream::connect(*address).await.map(Stream::Tcp),
                Target::Name(name) => TcpStream::connect(name.as_str()).await.map(Stream::Tcp),
                Target::Unix(path) => UnixStream::connect(path).await.map(Stream::Unix),
            }
        };
        let connecting = async {
            let stream = connecting.await.and_then(Stream::without_delay).map_err(|error| {
                tracing::debug!(%error, "the upstream cannot be reached");
                Problem::BadGateway(GatewayFault::Unreachable)
            })?;
            let (tls, io) = match (&self.destination.tls, stream) {
                (Some(tls), Stream::Tcp(io)) => (tls, io),
                (_, stream) => return Ok(stream),
            };
            let connector = TlsConnector::from(config(tls));
            let io = connector.connect(tls.name(), io).await.map_err(|error| {
                self.warn_of_tls(&error);
                Problem::BadGateway(GatewayFault::Tls)
            })?;
            Ok(Stream::Tls(Box::new(io)))
        };
        match tokio::time::timeout(self.timeouts.connect, connecting).await {
            Ok(connected) => connected,
            Err(_) => Err(Problem::ConnectTimeout),
        }
    }
}

enum Stream {
    Tls(Box<TlsStream<TcpStream>>),
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn without_delay(self) -> io::Result<Self> {
        if let Self::Tcp(io) = &self {
            io.set_nodelay(true)?;
        }
        Ok(self)
    }
}

/// Why an attempt failed.
enum Failure<B> {
    /// Nothing was written; the request is still here.
    Unsent(Box<Request<B>>),
    /// Something may have reached the upstream, or it is no use to try again.
    Sent(Problem),
    /// The upstream says that it did nothing about it; what of its body was read from
    /// the client is gone.
    Unprocessed,
}

impl<B> Failure<B> {
    fn into_problem(self) -> Problem {
        match self {
            Self::Unsent(_) | Self::Unprocessed => Problem::BadGateway(GatewayFault::Closed),
            Self::Sent(problem) => problem,
        }
    }
}

impl From<UploadFault> for Problem {
    fn from(fault: UploadFault) -> Self {
        match fault {
            UploadFault::Broken => Self::BadRequest("the request's content broke off"),
            UploadFault::TooLarge => Self::ContentTooLarge,
            UploadFault::Stalled => Self::RequestTimeout,
        }
    }
}

fn is_young(idle: &Idle, now: Timestamp) -> bool {
    now.since(idle.since) < KEEP_IDLE
}

/// Whether the upstream did not look at a stream, by its own word (RFC 9113 section
/// 8.7): it refused the stream, or said farewell and named an earlier one as the last.
/// The streams that it did look at do not learn of the farewell.
fn is_unprocessed(error: &hyper::Error) -> bool {
    let cause = error.source().and_then(|source| source.downcast_ref::<h2::Error>());
    cause.is_some_and(|error| {
        let refused = error.reason() == Some(h2::Reason::REFUSED_STREAM);
        error.is_remote() && (refused || error.is_go_away())
    })
}

/// What it takes to say a request again that may be sent twice: most are not, so that
/// this costs less than another map of its fields.
#[derive(Debug)]
struct Spare {
    method: Method,
    uri: Uri,
    fields: Vec<(HeaderName, HeaderValue)>,
}

impl Spare {
    /// Notes `request` in `fields`, which are empty; `None` if it must not be sent
    /// twice.
    fn of(
        request: &Request<RequestBody>,
        fields: impl FnOnce() -> Vec<(HeaderName, HeaderValue)>,
    ) -> Option<Self> {
        let idempotent = matches!(
            *request.method(),
            Method::GET | Method::HEAD | Method::OPTIONS | Method::PUT | Method::DELETE
        );
        if !idempotent || !request.body().is_end_stream() {
            return None;
        }
        let mut fields = fields();
        fields.extend(request.headers().iter().map(|(name, value)| (name.clone(), value.clone())));
        Some(Self { method: request.method().clone(), uri: request.uri().clone(), fields })
    }

    /// The same request again.
    fn into_request(self) -> Request<RequestBody> {
        let mut copy = Request::new(RequestBody::empty());
        *copy.method_mut() = self.method;
        *copy.uri_mut() = self.uri;
        *copy.version_mut() = Version::HTTP_11;
        for (name, value) in self.fields {
            copy.headers_mut().append(name, value);
        }
        copy
    }
}

async fn handshake_http2<T>(io: T) -> Result<http2::SendRequest<Lent>, Problem>
where
    T: AsyncRead + AsyncWrite + Unpin + 'static,
{
    // No pings: gRPC servers take frequent ones for an attack.
    let (sender, connection) = http2::Builder::new(LocalExecutor)
        .timer(TokioTimer::new())
        .handshake(TokioIo::new(io))
        .await
        .map_err(|_| Problem::BadGateway(GatewayFault::Unreachable))?;
    spawn_local(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "an HTTP/2 connection to the upstream ended");
        }
    });
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use http::Uri;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// The kinds of the frames in `bytes`, which begin with the preface.
    fn kinds(bytes: &[u8]) -> Vec<u8> {
        let (mut kinds, mut rest) = (Vec::new(), &bytes[24..]);
        while let [a, b, c, kind, ..] = *rest {
            kinds.push(kind);
            rest = &rest[9 + u32::from_be_bytes([0, a, b, c]) as usize..];
        }
        kinds
    }

    #[tokio::test(start_paused = true)]
    async fn gr_g5_an_upstream_is_not_pinged_however_long_a_call_is_silent() {
        const PING: u8 = 6;
        let (ours, mut theirs) = tokio::io::duplex(64 * 1024);
        let work = async {
            let mut sender = handshake_http2(ours).await.unwrap();
            let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
            let acknowledged = [0, 0, 0, 4, 1, 0, 0, 0, 0];
            theirs.write_all(&[settings, acknowledged].concat()).await.unwrap();
            let lender = Lender::default();
            let (_loan, mut request) = lender.lend(Request::new(RequestBody::empty()));
            *request.uri_mut() = Uri::from_static("http://app.example/");
            let mut said = Vec::new();
            let an_hour = tokio::time::sleep(Duration::from_secs(3600));
            tokio::select! {
                answer = sender.try_send_request(request) => panic!("{:?}", answer.is_ok()),
                ended = theirs.read_to_end(&mut said) => panic!("{ended:?}"),
                () = an_hour => {}
            }
            assert!(!sender.is_closed());
            // Preface, settings, a window, the request, and what answers our settings.
            let kinds = kinds(&said);
            assert!(kinds.contains(&1) && !kinds.contains(&PING), "{kinds:?}");
        };
        tokio::task::LocalSet::new().run_until(work).await;
    }
}
