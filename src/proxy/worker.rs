//! One thread of the proxy: its own listening socket, its own connections to the
//! upstream, and the client connections that the kernel gave it. Threads share
//! nothing but the limiter, the metrics and the number of open connections.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time::sleep;
use tower::Layer;

use super::body::WithBody;
use super::config::{self, Config};
use super::connection::{
    Activity, ClientStream, FIRST_REQUEST, Watchdog, dismiss, dismiss_at_once, linger,
};
use super::egress::{Destination, Destinations, Routes};
use super::forward::{Forward, Shared};
use super::handshake::{Begun, Handshakes, last_moment};
use super::headers::Peer;
use super::limit::{Enforcer, FindClient, RateLimitLayer};
use super::live::SharedLive;
use super::metrics::{Metrics, Outcome};
use super::request::is_keyed;
use super::response::{OVERLOADED, Problem, unreadable};
use super::service::{Edge, EdgeSettings};
use super::socket::ClientSocket;
use super::upstream::Upstream;
use super::{outbox, preamble};
use crate::limiter::{Client, Companion};
use crate::runtime::{Drain, Stage, spawn_local};
use crate::time::Clock;
use crate::tls;

/// Connections beyond the maximum that may take their time to hear so; more are
/// told at once or not at all.
const MAX_DISMISSED: usize = 64;
/// Connections a thread takes on when it closes its socket, so that a flood of
/// them does not keep it from serving.
const MAX_LAST: usize = 4096;
/// The pause after a first failure to accept; it doubles with every other.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Probes of the kernel find clients that vanished without a word.
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);
/// How often idle connections to the upstream are looked through.
const REAP_INTERVAL: Duration = Duration::from_secs(1);
/// Less is no buffer to the HTTP implementation.
const MIN_HEADER_BYTES: usize = 8192;
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(30);
const HTTP2_PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Streams that a client opened and reset before they were served. One more
/// ends the connection, so that a flood of them costs next to nothing.
const HTTP2_PENDING_RESETS: usize = 20;

/// What a client is told that does not speak TLS where it must.
const NO_TLS: &str = "HTTP without TLS was sent to a port with TLS: use https";

/// What a thread is made of, before it runs.
pub(super) struct Worker<C: Companion> {
    pub(super) listener: std::net::TcpListener,
    pub(super) serving: Option<Arc<tls::Server>>,
    pub(super) destinations: Destinations,
    pub(super) routes: Arc<Routes>,
    pub(super) config: Arc<Config>,
    pub(super) enforcer: Arc<Enforcer<C>>,
    pub(super) live: SharedLive,
    pub(super) clock: Clock,
    pub(super) access_log: bool,
    pub(super) metrics: Metrics,
    pub(super) open: Arc<AtomicUsize>,
    pub(super) drain: Drain,
}

/// Runs futures on the current thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocalExecutor;

impl<F> hyper::rt::Executor<F> for LocalExecutor
where
    F: Future + 'static,
{
    fn execute(&self, future: F) {
        spawn_local(async move {
            drop(future.await);
        });
    }
}

/// A client connection that counts as open until the last part of it is gone.
pub(super) struct OpenConnection {
    /// How many were open when this one came, itself included.
    count: usize,
    everywhere: Arc<AtomicUsize>,
    here: Rc<Here>,
    metrics: Metrics,
}

/// How far the process is with leaving, as one thread knows it: a copy that costs
/// no shared lock to look at.
pub(super) struct Leaving {
    stage: Cell<Stage>,
    closing: Notify,
}

impl Leaving {
    /// Follows `drain` from now on.
    fn follow(drain: Drain) -> Rc<Self> {
        let leaving = Rc::new(Self { stage: Cell::new(drain.stage()), closing: Notify::new() });
        let follower = Rc::clone(&leaving);
        spawn_local(async move {
            for stage in [Stage::Announcing, Stage::Closing] {
                drain.reached(stage).await;
                follower.stage.set(drain.stage());
            }
            follower.closing.notify_waiters();
        });
        leaving
    }

    /// The present stage.
    pub(super) fn stage(&self) -> Stage {
        self.stage.get()
    }

    /// Waits until no new work is to be taken on.
    async fn closing(&self) {
        let closing = self.closing.notified();
        if self.stage() < Stage::Closing {
            closing.await;
        }
    }
}

/// The connections of one thread.
#[derive(Default)]
struct Here {
    open: Cell<usize>,
    none_left: Notify,
}

impl OpenConnection {
    fn new(everywhere: &Arc<AtomicUsize>, here: &Rc<Here>, metrics: &Metrics) -> Self {
        let count = everywhere.fetch_add(1, Ordering::Relaxed) + 1;
        here.open.set(here.open.get() + 1);
        metrics.connections.inc();
        Self {
            count,
            everywhere: Arc::clone(everywhere),
            here: Rc::clone(here),
            metrics: metrics.clone(),
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.everywhere.fetch_sub(1, Ordering::Relaxed);
        self.metrics.connections.dec();
        let left = self.here.open.get().saturating_sub(1);
        self.here.open.set(left);
        if left == 0 {
            self.here.none_left.notify_waiters();
        }
    }
}

impl Here {
    async fn drained(&self) {
        loop {
            let none_left = self.none_left.notified();
            if self.open.get() == 0 {
                return;
            }
            none_left.await;
        }
    }
}

/// Finds the clients of one connection.
#[derive(Clone)]
struct ClientsOf {
    shared: Rc<Shared>,
    peer: IpAddr,
}

impl FindClient for ClientsOf {
    fn find(&self, parts: &http::request::Parts) -> Client {
        self.shared.live.load().trust.client(self.peer, &parts.headers)
    }
}

/// A running thread's means.
struct Running<C: Companion> {
    config: Arc<Config>,
    enforcer: Arc<Enforcer<C>>,
    clock: Clock,
    metrics: Metrics,
    everywhere: Arc<AtomicUsize>,
    here: Rc<Here>,
    dismissed: Rc<Cell<usize>>,
    drain: Drain,
    leaving: Rc<Leaving>,
    shared: Rc<Shared>,
    settings: Rc<EdgeSettings>,
    builder: Rc<auto::Builder<LocalExecutor>>,
    /// With TLS.
    handshakes: Option<Handshakes>,
}

impl<C: Companion> Worker<C> {
    /// Serves until the process is drained: accepts until it closes, then waits
    /// for what is open, until it aborts. What is still open when this returns
    /// ends with the thread.
    pub(super) async fn run(self) {
        let listener = match TcpListener::from_std(self.listener) {
            Ok(listener) => listener,
            Err(error) => {
                tracing::error!(%error, "a listener cannot be used");
                return;
            }
        };
        let config = self.config;
        let connect = |destination: &Arc<Destination>| {
            let (clock, metrics) = (self.clock.clone(), self.metrics.clone());
            Rc::new(Upstream::new(Arc::clone(destination), config.timeouts, clock, metrics))
        };
        let has_default = self.destinations.default.is_some();
        let limiter = Arc::clone(&self.enforcer);
        let (routes, destinations) = (Arc::clone(&self.routes), self.destinations.clone());
        let shared = Rc::new(Shared {
            default: self.destinations.default.as_ref().map(connect),
            named: self.destinations.named.iter().map(connect).collect(),
            live: Arc::clone(&self.live),
            metrics: self.metrics.clone(),
            drain: self.drain.clone(),
            is_keyed: Box::new(move |name| {
                is_keyed(&limiter.limiter().limits(), name)
                    || routes.look_at(name)
                    || destinations.inject(name)
            }),
        });
        let leaving = Leaving::follow(self.drain.clone());
        let running = Rc::new(Running {
            builder: Rc::new(server(&config)),
            handshakes: self
                .serving
                .map(|tls| Handshakes::new(tls, self.metrics.certificates.clone())),
            settings: Rc::new(EdgeSettings {
                max: config.max,
                patience: config.timeouts.idle,
                leaving: Rc::clone(&leaving),
                metrics: self.metrics.clone(),
                live: self.live,
                routes: self.routes,
                has_default,
                access_log: self.access_log.then(|| self.clock.clone()),
            }),
            leaving,
            config,
            enforcer: Arc::new(self.enforcer.for_thread()),
            clock: self.clock,
            metrics: self.metrics,
            everywhere: self.open,
            here: Rc::default(),
            dismissed: Rc::default(),
            drain: self.drain,
            shared,
        });
        spawn_local(outbox::send_collected());
        running.accept_all(listener).await;
        tokio::select! {
            () = running.here.drained() => {}
            () = running.drain.reached(Stage::Aborting) => {}
        }
        running.shared.upstreams().for_each(|upstream| upstream.close_idle());
    }
}

impl<C: Companion> Running<C> {
    async fn accept_all(self: &Rc<Self>, listener: TcpListener) {
        let mut closing = pin!(self.drain.reached(Stage::Closing));
        let mut reap = tokio::time::interval(REAP_INTERVAL);
        let mut pause = FIRST_PAUSE;
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut closing => break,
                _ = reap.tick() => {
                    self.shared.upstreams().for_each(|upstream| upstream.reap());
                    continue;
                }
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((io, peer)) => {
                    pause = FIRST_PAUSE;
                    self.accept(io, peer);
                }
                // The client has gone again, which says nothing about the next.
                Err(error) if is_of_connection(&error) => {}
                Err(error) => {
                    self.metrics.accept_errors.inc();
                    tracing::warn!(%error, "a connection cannot be accepted");
                    tokio::select! {
                        () = sleep(pause) => {}
                        () = &mut closing => break,
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
        // Whom the kernel has let in already would be cut off by closing now. It is
        // asked itself: the runtime may not have heard of them yet.
        let Ok(listener) = listener.into_std() else { return };
        for _ in 0..MAX_LAST {
            match listener.accept() {
                Ok((io, peer)) => {
                    let io = io.set_nonblocking(true).and_then(|()| TcpStream::from_std(io));
                    if let Ok(io) = io {
                        self.accept(io, peer);
                    }
                }
                Err(error) if is_of_connection(&error) => {}
                Err(_) => return,
            }
        }
    }

    fn accept(self: &Rc<Self>, io: TcpStream, peer: SocketAddr) {
        let open = Rc::new(OpenConnection::new(&self.everywhere, &self.here, &self.metrics));
        if open.count > self.config.max.connections {
            self.metrics.count(Outcome::Overloaded);
            // What is not TLS would be no answer, and a handshake is not worth it.
            if self.handshakes.is_none() {
                self.dismiss(ClientSocket::Plain(io));
            }
            return;
        }
        // Both only make things better: without them the connection still works.
        let _ = io.set_nodelay(true);
        let _ = SockRef::from(&io).set_tcp_keepalive(&TcpKeepalive::new().with_time(TCP_KEEPALIVE));
        let peer = peer.ip();
        if self.config.proxy_protocol && self.shared.live.load().trust.trusts(peer) {
            let this = Rc::clone(self);
            spawn_local(async move { this.serve_behind_preamble(io, peer, open).await });
        } else if self.handshakes.is_some() {
            let this = Rc::clone(self);
            spawn_local(async move { this.greet(io, peer, open).await });
        } else {
            self.serve(ClientSocket::Plain(io), peer, open);
        }
    }

    /// Serves a client behind a handshake, if there is to be one.
    async fn greet(&self, io: TcpStream, peer: IpAddr, open: Rc<OpenConnection>) {
        let Some(handshakes) = &self.handshakes else {
            self.serve(ClientSocket::Plain(io), peer, open);
            return;
        };
        let leaving = last_moment(self.leaving.closing(), FIRST_REQUEST);
        match handshakes.begin(io, self.config.timeouts.header, leaving).await {
            Begun::Tls(io) => self.serve(ClientSocket::Tls(io), peer, open),
            Begun::Text(io) => {
                self.metrics.count(Outcome::Rejected);
                dismiss(ClientSocket::Plain(io), &unreadable(&Problem::BadRequest(NO_TLS))).await;
            }
            Begun::Gone => {}
            Begun::Failed => self.metrics.count(Outcome::Rejected),
        }
    }

    /// Serves the client that the trusted `peer` names first.
    async fn serve_behind_preamble(
        &self,
        mut io: TcpStream,
        peer: IpAddr,
        open: Rc<OpenConnection>,
    ) {
        let reading = preamble::read_source(&mut io);
        let source = tokio::select! {
            source = tokio::time::timeout(self.config.timeouts.header, reading) => source,
            () = self.leaving.closing() => return,
        };
        match source {
            Ok(Ok(source)) => self.greet(io, source.unwrap_or(peer), open).await,
            Ok(Err(error)) => {
                self.metrics.count(Outcome::Rejected);
                tracing::debug!(%peer, %error, "a connection is refused");
            }
            Err(_) => self.metrics.count(Outcome::Rejected),
        }
    }

    /// Tells a client that it came too late.
    fn dismiss(&self, io: ClientSocket) {
        let dismissed = Rc::clone(&self.dismissed);
        if dismissed.get() < MAX_DISMISSED {
            dismissed.set(dismissed.get() + 1);
            spawn_local(async move {
                dismiss(io, OVERLOADED).await;
                dismissed.set(dismissed.get() - 1);
            });
        } else {
            dismiss_at_once(io, OVERLOADED);
        }
    }

    fn serve(&self, io: ClientSocket, peer: IpAddr, open: Rc<OpenConnection>) {
        let tls = io.is_tls();
        let activity = Arc::new(Activity::new(self.clock.clone()));
        let stream = ClientStream::new(io, Arc::clone(&activity));
        let forward = Forward::new(
            Rc::clone(&self.shared),
            // Whether it is trusted may change while it is connected.
            Rc::new(Peer::new(peer, false).with_tls(tls)),
            Rc::clone(&open),
        );
        let clients = ClientsOf { shared: Rc::clone(&self.shared), peer };
        let limited = RateLimitLayer::new(Arc::clone(&self.enforcer), clients)
            .refunding_through(WithBody)
            .layer(forward);
        let edge = Edge {
            inner: RefCell::new(limited),
            activity: Arc::clone(&activity),
            peer,
            settings: Rc::clone(&self.settings),
        };
        let (builder, leaving, timeouts, metrics) = (
            Rc::clone(&self.builder),
            Rc::clone(&self.leaving),
            self.config.timeouts,
            self.metrics.clone(),
        );
        let max_head = max_head(&self.config);
        spawn_local(async move {
            let io = TokioIo::new(stream);
            let end = {
                let mut connection = pin!(builder.serve_connection_with_upgrades(io, edge));
                let mut closing = pin!(leaving.closing());
                let (mut listening, mut told) = (false, false);
                let mut watchdog = Watchdog::default();
                let mut grace = None;
                std::future::poll_fn(|cx| {
                    // Polled once, so that this task is woken; after that a look
                    // at the stage is cheaper.
                    if !listening {
                        listening = true;
                        let _ = closing.as_mut().poll(cx);
                    }
                    loop {
                        if let Poll::Ready(result) = connection.as_mut().poll(cx) {
                            return Poll::Ready(match result {
                                Err(error) if is_unreadable(&*error) => End::Unreadable,
                                _ => End::Done,
                            });
                        }
                        if told || leaving.stage() < Stage::Closing {
                            break;
                        }
                        // A connection that has said nothing yet would be cut off.
                        let wait = activity.grace();
                        if !wait.is_zero() {
                            let grace = grace.get_or_insert_with(|| Box::pin(sleep(wait)));
                            if grace.as_mut().poll(cx).is_pending() {
                                break;
                            }
                        }
                        told = true;
                        connection.as_mut().graceful_shutdown();
                    }
                    watchdog.poll_expired(&activity, &timeouts, cx).map(|()| End::Late)
                })
                .await
            };
            let problem = match end {
                End::Done => None,
                End::Unreadable => activity.refusal(max_head),
                End::Late => activity.owes_head().then_some(Problem::HeadTimeout),
            };
            if matches!(end, End::Unreadable) || problem.is_some() {
                metrics.count(Outcome::Rejected);
            }
            match (activity.take_leftover(), problem) {
                // Who is slow is not given more time.
                (Some(io), Some(Problem::HeadTimeout)) => {
                    dismiss_at_once(io, &unreadable(&Problem::HeadTimeout));
                }
                (Some(io), Some(problem)) => dismiss(io, &unreadable(&problem)).await,
                (Some(io), None)
                    if activity.has_unread_body() || matches!(end, End::Unreadable) =>
                {
                    linger(io).await;
                }
                (Some(_) | None, _) => {}
            }
            drop(open);
        });
    }
}

/// How the service of a connection came to its end.
#[derive(Clone, Copy)]
enum End {
    /// Either side has finished with it.
    Done,
    /// What the client sent is no request.
    Unreadable,
    /// The client took too long.
    Late,
}

fn max_head(config: &Config) -> usize {
    config.max.header_bytes.max(MIN_HEADER_BYTES)
}

fn server(config: &Config) -> auto::Builder<LocalExecutor> {
    let mut builder = auto::Builder::new(LocalExecutor);
    builder
        .http1()
        .timer(TokioTimer::new())
        // The connection's own watchdog does this, and idling too.
        .header_read_timeout(None)
        .max_buf_size(max_head(config));
    // Any number but the usual one costs an allocation for each request.
    if config.max.headers != config::Maxima::default().headers {
        builder.http1().max_headers(config.max.headers);
    }
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(config.max.streams)
        .max_header_list_size(u32::try_from(config.max.header_bytes).unwrap_or(u32::MAX))
        .max_pending_accept_reset_streams(HTTP2_PENDING_RESETS)
        .keep_alive_interval(HTTP2_PING_INTERVAL)
        .keep_alive_timeout(HTTP2_PING_TIMEOUT);
    builder
}

/// Whether an error of `accept` concerns only the connection that it would have
/// returned.
fn is_of_connection(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionRefused
        || error.kind() == io::ErrorKind::ConnectionAborted
        || error.kind() == io::ErrorKind::ConnectionReset
}

/// Whether a connection ended because of what the client sent.
fn is_unreadable(error: &(dyn std::error::Error + 'static)) -> bool {
    error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_parse)
}
