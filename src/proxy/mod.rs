//! Proxy (layer 4): the data path.
//!
//! A request passes, from the outside in: the `connection` that keeps time, the
//! edge (`service`) that admits only what a proxy may forward, the [`RateLimit`],
//! and forwarding (`forward`) over the thread's own connections to the `upstream`.
//! Every answer that does not come from the upstream is made in `response`.
//!
//! Invariants:
//! - a request is charged at most once, and gets its tokens back exactly once if
//!   it never reached the upstream;
//! - what fails the edge reaches neither a limit nor the upstream;
//! - no body is held in memory as a whole;
//! - an error on one connection, or in accepting one, ends nothing else.
//!
//! Decisions that show outside:
//! - a connection beyond `max.connections` is answered 503 and closed, before it
//!   sends a request;
//! - behind a refused request up to 64 KiB of a body of known length are read and
//!   the connection lives on; otherwise it is closed after its answer, but read on
//!   for at most 8 MiB and 5 s, so that the client gets to see the answer;
//! - a client that closes its sending side has left: what it asked for is given
//!   up, and stays charged if it had reached the upstream;
//! - interim answers (1xx) of the upstream are not passed on, except 101 to a
//!   WebSocket, the only protocol to which a connection may switch; the client's
//!   `Expect: 100-continue` is answered here;
//! - trailers of requests over HTTP/1 are dropped, those of answers are kept;
//! - the answer's head is due within `timeouts.response` after the last piece of
//!   the request's body; a body may pause for `timeouts.idle`.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;

use crate::limiter::{Companion, Limiter};
use crate::runtime::{Drain, ListenAddr, Supervisor};
use crate::time::Clock;

mod body;
mod client;
mod config;
mod connection;
mod fields;
mod forward;
mod headers;
mod limit;
mod metrics;
mod preview;
mod request;
mod response;
mod service;
mod upstream;
mod worker;

pub use client::Trust;
pub use config::{Config, HeaderStyle, Maxima, Timeouts, Upstream, UpstreamError};
pub use limit::{Admission, Enforcer, FindClient, RateLimit, RateLimitFuture, RateLimitLayer};
pub use metrics::{CheckTotals, Metrics, Outcome};
pub use preview::{Asking, Foreseen, Found, Preview};
pub use request::HttpRequest;
pub use response::{Asker, GatewayFault, Problem};

use worker::Worker;

/// A proxy whose sockets are bound and that does not serve yet. Clients may
/// connect; the kernel keeps them waiting.
#[derive(Debug)]
pub struct Proxy<C: Companion> {
    listeners: Vec<std::net::TcpListener>,
    config: Arc<Config>,
    enforcer: Arc<Enforcer<C>>,
    clock: Clock,
    metrics: Metrics,
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
    /// If the address cannot be bound.
    pub fn bind(
        config: Config,
        limiter: Arc<Limiter<C>>,
        clock: Clock,
        metrics: Metrics,
        workers: usize,
    ) -> io::Result<(Self, SocketAddr)> {
        let first = config.listen.bind(true)?;
        let address = first.local_addr()?;
        let mut listeners = vec![first];
        for _ in 1..workers.max(1) {
            listeners.push(ListenAddr::from(address).bind(true)?);
        }
        let enforcer =
            Arc::new(Enforcer::new(limiter, clock.clone(), metrics.clone(), config.headers));
        Ok((Self { listeners, config: Arc::new(config), enforcer, clock, metrics }, address))
    }

    /// Tells what it would do with requests.
    pub fn preview(&self) -> Preview<C> {
        Preview::new(Arc::clone(&self.enforcer), &self.config)
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
                config: Arc::clone(&self.config),
                enforcer: Arc::clone(&self.enforcer),
                clock: self.clock.clone(),
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
