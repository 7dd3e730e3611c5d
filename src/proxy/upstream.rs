//! The way to the upstream: one set of connections for each thread, HTTP/1.1 for
//! most requests and one shared HTTP/2 connection for gRPC.
//!
//! A connection that was idle may be dead before this side has noticed. A
//! request that was not written to it, or that could be sent twice without harm
//! (an idempotent method without a body), is tried once more on a fresh one.
//!
//! A request counts as delivered from its first byte on that the socket took, so
//! that one of which nothing left gets its tokens back, whoever was at fault.

use std::cell::{Cell, RefCell};
use std::error::Error as _;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Method, Request, Response, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::body::{RequestBody, Upload, UploadFault};
use super::config::{self, Timeouts};
use super::egress::Destination;
use super::limit::Admission;
use super::metrics::Metrics;
use super::response::{GatewayFault, Problem};
use super::worker::LocalExecutor;
use crate::runtime::spawn_local;
use crate::time::{Clock, Timestamp};
use crate::tls;

/// Connections a thread keeps open for later.
const MAX_IDLE: usize = 256;
/// How long it keeps them: less than the keep-alive time of usual servers, so
/// that they rarely close a connection while a request is on its way.
const KEEP_IDLE: Duration = Duration::from_secs(3);

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
    http2: RefCell<Option<http2::SendRequest<RequestBody>>>,
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

/// A connection of HTTP/1, with the number of bytes that were written to it.
#[derive(Debug)]
struct Wire {
    sender: http1::SendRequest<RequestBody>,
    written: Arc<AtomicU64>,
}

/// A socket that counts what is written to it.
struct Counted<T> {
    io: T,
    written: Arc<AtomicU64>,
}

/// Notes at its end whether something of a request was written.
struct Delivery<'a> {
    admission: Option<&'a Admission>,
    written: Arc<AtomicU64>,
    before: u64,
}

/// A connection in use. It goes back when the answer was read to its end, and is
/// closed if this is dropped before.
#[derive(Debug)]
pub(super) struct Lease {
    wire: Wire,
    home: Weak<Upstream>,
}

/// An answer, and the connection it comes on unless that is shared.
pub(super) type Answer = (Response<Incoming>, Option<Lease>);

type SendResult = Result<Response<Incoming>, TrySendError<Request<RequestBody>>>;

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
        }
    }

    /// Sends `request` over HTTP/1.1 and waits for the head of the answer.
    ///
    /// # Errors
    /// The problem to answer the client with.
    pub(super) async fn send_http1(
        self: &Rc<Self>,
        mut request: Request<RequestBody>,
        admission: Option<&Admission>,
    ) -> Result<Answer, Problem> {
        let upload = request.body().upload();
        if let Some(mut wire) = self.take_idle() {
            let spare = spare(&request);
            let delivery = wire.delivery(admission);
            match self.exchange(wire.sender.try_send_request(request), upload.as_deref()).await {
                Ok(response) => {
                    drop(delivery);
                    return Ok((response, Some(self.lease(wire))));
                }
                Err(Failure::Unsent(unsent)) => request = *unsent,
                Err(Failure::Sent(problem)) => match spare {
                    Some(spare) if problem == Problem::BadGateway(GatewayFault::Closed) => {
                        request = spare;
                    }
                    Some(_) | None => return Err(problem),
                },
                Err(Failure::Unprocessed) => {
                    return Err(Problem::BadGateway(GatewayFault::Closed));
                }
            }
        }
        let mut wire = self.connect_http1().await?;
        let delivery = wire.delivery(admission);
        match self.exchange(wire.sender.try_send_request(request), upload.as_deref()).await {
            Ok(response) => {
                drop(delivery);
                Ok((response, Some(self.lease(wire))))
            }
            Err(failure) => Err(failure.into_problem()),
        }
    }

    /// Sends `request` over the shared HTTP/2 connection and waits for the head
    /// of the answer.
    ///
    /// # Errors
    /// The problem to answer the client with.
    pub(super) async fn send_http2(
        &self,
        mut request: Request<RequestBody>,
        admission: Option<&Admission>,
    ) -> Result<Answer, Problem> {
        let upload = request.body().upload();
        // Others write to the same connection, so what was written says nothing.
        let deliver = |delivered| {
            if let Some(admission) = admission {
                admission.set_delivered(delivered);
            }
        };
        let open = self.http2.borrow().as_ref().filter(|sender| !sender.is_closed()).cloned();
        if let Some(mut sender) = open
            && sender.ready().await.is_ok()
        {
            deliver(true);
            match self.exchange(sender.try_send_request(request), upload.as_deref()).await {
                Ok(response) => return Ok((response, None)),
                Err(Failure::Unsent(unsent)) => {
                    deliver(false);
                    request = *unsent;
                }
                Err(failure) => {
                    deliver(!matches!(failure, Failure::Unprocessed));
                    let problem = failure.into_problem();
                    if problem == Problem::ResponseTimeout {
                        // It may be dead without anybody having noticed. What
                        // still runs on it may go on.
                        self.http2.borrow_mut().take();
                    }
                    return Err(problem);
                }
            }
        }
        let mut sender = self.connect_http2().await?;
        deliver(true);
        match self.exchange(sender.try_send_request(request), upload.as_deref()).await {
            Ok(response) => Ok((response, None)),
            Err(failure) => {
                deliver(matches!(failure, Failure::Sent(_)));
                Err(failure.into_problem())
            }
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
        self.idle.borrow_mut().retain(|idle| !idle.wire.sender.is_closed() && is_young(idle, now));
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
        let mut at = idle.len();
        while at > 0 {
            at -= 1;
            let candidate = &idle[at];
            if candidate.wire.sender.is_closed() || !is_young(candidate, now) {
                idle.remove(at);
            } else if candidate.wire.sender.is_ready() {
                return Some(idle.remove(at).wire);
            }
        }
        None
    }

    fn lease(self: &Rc<Self>, wire: Wire) -> Lease {
        Lease { wire, home: Rc::downgrade(self) }
    }

    /// One attempt on one connection.
    async fn exchange(
        &self,
        sending: impl Future<Output = SendResult>,
        upload: Option<&Upload>,
    ) -> Result<Response<Incoming>, Failure> {
        let started = self.clock.now();
        let mut sending = std::pin::pin!(sending);
        let result = loop {
            let frames = upload.map(Upload::frames);
            match tokio::time::timeout(self.timeouts.response, sending.as_mut()).await {
                Ok(result) => break result,
                // The upstream need not answer what is still being said.
                Err(_)
                    if upload.is_some_and(Upload::is_awaited)
                        || upload.map(Upload::frames) != frames => {}
                Err(_) => return Err(Failure::Sent(Problem::ResponseTimeout)),
            }
        };
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
                if is_refused_stream(&error) {
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

    async fn connect_http1(&self) -> Result<Wire, Problem> {
        match self.connect(tls::Upstream::http1).await? {
            Stream::Tls(io) => handshake_http1(io).await,
            Stream::Tcp(io) => handshake_http1(io).await,
            Stream::Unix(io) => handshake_http1(io).await,
        }
    }

    async fn connect_http2(&self) -> Result<http2::SendRequest<RequestBody>, Problem> {
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

impl Wire {
    fn delivery<'a>(&self, admission: Option<&'a Admission>) -> Delivery<'a> {
        let written = Arc::clone(&self.written);
        let before = written.load(Ordering::Relaxed);
        Delivery { admission, written, before }
    }
}

impl Drop for Delivery<'_> {
    fn drop(&mut self) {
        if let Some(admission) = self.admission
            && self.written.load(Ordering::Relaxed) != self.before
        {
            admission.set_delivered(true);
        }
    }
}

impl<T> Counted<T> {
    fn wrote(&self, polled: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(count)) = polled {
            self.written.fetch_add(*count as u64, Ordering::Relaxed);
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Counted<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Counted<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write(cx, buf);
        self.wrote(&polled);
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.wrote(&polled);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl Lease {
    /// Keeps the connection for another request.
    pub(super) fn give_back(self) {
        if let Some(home) = self.home.upgrade()
            && !self.wire.sender.is_closed()
        {
            let mut idle = home.idle.borrow_mut();
            if idle.len() < MAX_IDLE {
                let since = home.clock.now();
                idle.push(Idle { wire: self.wire, since });
            }
        }
    }
}

/// Why an attempt failed.
enum Failure {
    /// Nothing was written; the request is still here.
    Unsent(Box<Request<RequestBody>>),
    /// Something may have reached the upstream, or it is no use to try again.
    Sent(Problem),
    /// The upstream says that it did nothing about it; what of it was read from
    /// the client is gone.
    Unprocessed,
}

impl Failure {
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

/// Whether the upstream refused a stream without having looked at it (RFC 9113
/// section 8.7).
fn is_refused_stream(error: &hyper::Error) -> bool {
    let cause = error.source().and_then(|source| source.downcast_ref::<h2::Error>());
    cause.is_some_and(|error| {
        error.is_remote() && error.reason() == Some(h2::Reason::REFUSED_STREAM)
    })
}

/// The same request again, if it may be sent twice.
fn spare(request: &Request<RequestBody>) -> Option<Request<RequestBody>> {
    let idempotent = matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS | Method::PUT | Method::DELETE
    );
    if !idempotent || !request.body().is_end_stream() {
        return None;
    }
    let mut copy = Request::new(RequestBody::empty());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    *copy.version_mut() = Version::HTTP_11;
    Some(copy)
}

async fn handshake_http1<T>(io: T) -> Result<Wire, Problem>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let written = Arc::new(AtomicU64::new(0));
    let io = Counted { io, written: Arc::clone(&written) };
    let (sender, connection) = http1::Builder::new()
        .handshake(TokioIo::new(io))
        .await
        .map_err(|_| Problem::BadGateway(GatewayFault::Unreachable))?;
    spawn_local(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a connection to the upstream ended");
        }
    });
    Ok(Wire { sender, written })
}

async fn handshake_http2<T>(io: T) -> Result<http2::SendRequest<RequestBody>, Problem>
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
