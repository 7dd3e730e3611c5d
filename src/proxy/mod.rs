//! Proxy (layer 4): the data path.
//!
//! A request passes, from the outside in: the `connection` that keeps time, the
//! edge (`service`) that admits only what a proxy may forward, the [`RateLimit`],
//! and forwarding (`forward`) over the thread's own connections to the `upstream`.
//! Every answer that does not come from the upstream is made in `response`.
//!
//! Invariants:
//! - a request is charged once each time that it is sent, which is once unless a
//!   named upstream refuses it, and gets its tokens back exactly once if it never
//!   reached the upstream;
//! - a request that waits for its tokens has none, and leaves when its client does;
//! - what fails the edge reaches neither a limit nor the upstream;
//! - no body is held in memory as a whole;
//! - an error on one connection, or in accepting one, ends nothing else.
//!
//! Decisions that show outside:
//! - a connection beyond `max.connections` is answered 503 and closed, before it
//!   sends a request; in a flood it is closed without waiting for what it sends;
//! - with TLS, the PROXY protocol comes before the handshake, which has the time of a
//!   head; a client that speaks HTTP without TLS is told so with a 400, and one that
//!   is too many is cut off, since an answer would take a handshake;
//! - a head that does not come in time is answered 408; who has sent no byte of
//!   one is closed without a word;
//! - behind a refused request up to 64 KiB of a body of known length are read and
//!   the connection lives on; otherwise it is closed after its answer, but read on
//!   for at most 8 MiB and 5 s, so that the client gets to see the answer;
//! - a client that closes its sending side has left: what it asked for is given
//!   up, and stays charged if it had reached the upstream;
//! - interim answers (1xx) of the upstream are not passed on, except 101 to a
//!   WebSocket, the only protocol to which a connection may switch; the client's
//!   `Expect: 100-continue` is answered here;
//! - trailers of requests over HTTP/1 pass if `Trailer` announces them and neither
//!   the proxy nor a limit decides by such a field, those of answers always;
//! - the answer's head is due within `timeouts.response` after the last piece of
//!   the request's body; a body may pause for `timeouts.idle`.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use socket2::SockRef;
use tokio::sync::watch;

use crate::limiter::{Companion, Limiter};
use crate::runtime::{Drain, ListenAddr, Stage, Supervisor, follow_files};
use crate::time::Clock;
use crate::tls;

mod access;
mod admission;
mod again;
mod alarm;
mod body;
mod certificates;
mod client;
mod config;
mod connection;
mod cors;
mod egress;
mod fields;
mod forward;
mod handshake;
mod headers;
mod hold;
mod kept;
mod lent;
mod limit;
mod live;
mod metrics;
mod outbox;
mod preamble;
mod preview;
mod protocol;
mod request;
mod response;
mod service;
mod socket;
mod upstream;
mod wire;
mod worker;

pub use admission::{Admission, HandOver, InExtensions, NoRefunds};
pub use again::Told;
pub use client::Trust;
pub use config::{Config, HeaderStyle, Maxima, Timeouts, Upstream, UpstreamError, UpstreamHost};
pub use cors::{Cors, Origin};
pub use egress::{
    DEFAULT, EgressConfig, FeedbackConfig, InjectConfig, RefusingStatus, RouteConfig,
    UpstreamConfig, UpstreamsConfig, XRateLimit,
};
pub use limit::{Enforcer, FindClient, RateLimit, RateLimitFuture, RateLimitLayer};
pub use live::Tuner;
pub use metrics::{CheckTotals, Metrics, Outcome};
pub use preview::{Asking, Foreseen, Found, Preview};
pub use request::HttpRequest;
pub use response::{Asker, GatewayFault, Problem};

use egress::{Destination, Destinations, Followed, Routes};
use live::{Live, SharedLive};
use worker::Worker;

/// A proxy whose sockets are bound and that does not serve yet. Clients may
/// connect; the kernel keeps them waiting.
#[derive(Debug)]
pub struct Proxy<C: Companion> {
    listeners: Vec<std::net::TcpListener>,
    /// With clients.
    serving: Option<Arc<tls::Server>>,
    destinations: Destinations,
    routes: Arc<Routes>,
    config: Arc<Config>,
    enforcer: Arc<Enforcer<C>>,
    live: SharedLive,
    clock: Clock,
    metrics: Metrics,
    access_log: bool,
}

/// A proxy that serves. Dropping the handle changes nothing.
#[derive(Clone, Debug)]
pub struct Handle {
    open: Arc<AtomicUsize>,
    alive: watch::Receiver<()>,
}

impl<C: Companion> Proxy<C> {
    /// Binds a listener for each of `workers` threads (at least one), all on the
    /// address of `config`, and returns that address. With port 0 the first
    /// chooses one, which the others join.
    ///
    /// # Errors
    /// If the address cannot be bound, or another process listens there; or if the files
    /// of certificates cannot be used, or no CA is trusted for an upstream with TLS.
    pub fn bind(
        config: Config,
        limiter: Arc<Limiter<C>>,
        clock: Clock,
        metrics: Metrics,
        workers: usize,
    ) -> io::Result<(Self, SocketAddr)> {
        let default = Destination::default(&config)?.map(Arc::new);
        let serving = config.tls.clone().map(|files| {
            tls::Server::load(files, tls::Clients::Required, &[b"h2", b"http/1.1"]).map(Arc::new)
        });
        let serving = serving.transpose().map_err(io::Error::other)?;
        // The first one takes the address for itself, which fails while anybody
        // listens there, another proxy included. Only then is it shared.
        let first = config.listen.bind(false)?;
        SockRef::from(&first).set_reuse_port(true)?;
        let address = first.local_addr()?;
        let mut listeners = vec![first];
        for _ in 1..workers.max(1) {
            listeners.push(ListenAddr::from(address).bind(true)?);
        }
        let enforcer =
            Arc::new(Enforcer::new(limiter, clock.clone(), metrics.clone(), config.headers));
        let live = Arc::new(ArcSwap::from_pointee(Live::new(&config)));
        let proxy = Self {
            listeners,
            serving,
            destinations: Destinations { default, named: Vec::new() },
            routes: Arc::default(),
            config: Arc::new(config),
            enforcer,
            live,
            clock,
            metrics,
            access_log: false,
        };
        Ok((proxy, address))
    }

    /// The same, with routes to other upstreams.
    ///
    /// # Errors
    /// If no CA can be trusted for one with TLS.
    pub fn with_egress(
        mut self,
        upstreams: &UpstreamsConfig,
        egress: &EgressConfig,
    ) -> io::Result<Self> {
        self.destinations.named = Destination::named(upstreams, &self.metrics)?;
        self.routes = Arc::new(Routes::new(egress, &self.destinations.named));
        Ok(self)
    }

    /// The same, which logs a line for every request if `on`.
    #[must_use]
    pub fn with_access_log(self, on: bool) -> Self {
        Self { access_log: on, ..self }
    }

    /// What changes the proxy while it runs.
    pub fn tuner(&self) -> Tuner<C> {
        Tuner { live: Arc::clone(&self.live), enforcer: Arc::clone(&self.enforcer) }
    }

    /// Tells what it would do with requests.
    pub fn preview(&self) -> Preview<C> {
        let (live, routes) = (Arc::clone(&self.live), Arc::clone(&self.routes));
        Preview::following(Arc::clone(&self.enforcer), &self.config, live, routes)
    }

    /// Follow the files with CAs and credentials, one future for each, until `drain`
    /// aborts.
    pub fn follow_files(&self, drain: &Drain) -> Vec<impl Future<Output = ()> + Send + use<C>> {
        let follow = |file: Followed| {
            let (metrics, drain) = (self.metrics.clone(), drain.clone());
            async move {
                let what = file.what();
                let told = |change| metrics.file_read(file.is_credential(), change);
                tokio::select! {
                    () = follow_files(&what, || file.refresh(), told) => {}
                    () = drain.reached(Stage::Aborting) => {}
                }
            }
        };
        self.destinations.followed().into_iter().map(follow).collect()
    }

    /// Follows the files of the proxy's own certificate, until `drain` aborts. `None`
    /// without TLS.
    pub fn follow_certificate(
        &self,
        drain: &Drain,
    ) -> Option<impl Future<Output = ()> + Send + use<C>> {
        let tls = self.serving.clone()?;
        Some(certificates::follow(tls, self.metrics.certificates.clone(), drain.clone()))
    }

    /// Starts a thread for each listener. They end when `drain` is complete.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(self, supervisor: &Supervisor, drain: Drain) -> io::Result<Handle> {
        let open = Arc::new(AtomicUsize::new(0));
        let (running, alive) = watch::channel(());
        let running = Arc::new(running);
        for (index, listener) in self.listeners.into_iter().enumerate() {
            let worker = Worker {
                listener,
                serving: self.serving.clone(),
                destinations: self.destinations.clone(),
                routes: Arc::clone(&self.routes),
                config: Arc::clone(&self.config),
                enforcer: Arc::clone(&self.enforcer),
                live: Arc::clone(&self.live),
                clock: self.clock.clone(),
                access_log: self.access_log,
                metrics: self.metrics.clone(),
                open: Arc::clone(&open),
                drain: drain.clone(),
            };
            let running = Arc::clone(&running);
            supervisor.spawn_thread(&format!("proxy-{index}"), move || async move {
                worker.run().await;
                drop(running);
            })?;
        }
        Ok(Handle { open, alive })
    }
}

impl Handle {
    /// How many client connections are open.
    pub fn connections(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Waits until every thread has ended. Safe to cancel.
    pub async fn finished(&self) {
        let mut alive = self.alive.clone();
        // Nothing is ever sent; an error means that all senders are gone.
        while alive.changed().await.is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use prometheus_client::registry::Registry;

    use super::*;
    use crate::limiter::{Alone, LimitSet};

    fn bind(listen: ListenAddr, workers: usize) -> io::Result<(Proxy<Alone>, SocketAddr)> {
        let limits = LimitSet::new([]);
        let mut config = Config::new("http://127.0.0.1:1".parse().unwrap());
        config.listen = listen;
        let metrics = Metrics::register(&mut Registry::default(), &limits);
        let limiter = Arc::new(Limiter::new(limits, 1, Alone));
        Proxy::bind(config, limiter, Clock::monotonic(), metrics, workers)
    }

    #[test]
    fn threads_share_an_address_that_nobody_else_gets() {
        let (proxy, address) = bind("127.0.0.1:0".parse().unwrap(), 2).unwrap();
        for workers in [1, 2] {
            let error = bind(address.into(), workers).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{workers}");
            assert!(error.to_string().contains(&address.to_string()), "{error}");
        }
        // The kernel spreads connections by their addresses: that 64 of them all
        // meet one of two sockets does not happen.
        let clients: Vec<_> = (0..64).map(|_| TcpStream::connect(address).unwrap()).collect();
        let accepted = |listener: &std::net::TcpListener| {
            std::iter::from_fn(|| listener.accept().ok()).count()
        };
        let counts: Vec<_> = proxy.listeners.iter().map(accepted).collect();
        assert_eq!(counts.iter().sum::<usize>(), clients.len());
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
        drop(proxy);
        bind(address.into(), 2).unwrap();
    }
}
