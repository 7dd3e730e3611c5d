//! The handshake of TLS with clients, behind the PROXY protocol and before HTTP.
//!
//! A handshake is bounded in time, and a thread has a bounded number of them. Beyond
//! it the oldest one ends, and not the newest: who means it is done within
//! milliseconds, so that connections which never finish keep nobody out.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::certificates::{CertificateMetrics, Greeting};
use crate::tls;

/// Handshakes of one thread at the same time.
const MAX_RUNNING: usize = 256;

/// The handshakes of one thread.
#[derive(Debug)]
pub(super) struct Handshakes {
    tls: Arc<tls::Server>,
    metrics: CertificateMetrics,
    /// The oldest in front; each is told when it has to go.
    running: RefCell<VecDeque<Rc<Notify>>>,
}

/// What a client begins with.
pub(super) enum Begun {
    /// TLS stands.
    Tls(Box<TlsStream<TcpStream>>),
    /// Text, as HTTP without TLS is.
    Text(TcpStream),
    /// It left without a word.
    Gone,
    /// There is no TLS with it, and it was told so as TLS can.
    Failed,
}

/// Takes a handshake out of those that run.
struct Place<'a> {
    handshakes: &'a Handshakes,
    displaced: Rc<Notify>,
}

impl Handshakes {
    pub(super) fn new(tls: Arc<tls::Server>, metrics: CertificateMetrics) -> Self {
        Self { tls, metrics, running: RefCell::default() }
    }

    /// Begins with a client, for at most `most` and until `leaving` is over.
    pub(super) async fn begin(
        &self,
        io: TcpStream,
        most: Duration,
        leaving: impl Future<Output = ()>,
    ) -> Begun {
        let place = self.enter();
        tokio::select! {
            begun = self.greet(io) => begun,
            () = place.displaced.notified() => self.end(Greeting::Displaced),
            () = tokio::time::sleep(most) => self.end(Greeting::Late),
            () = leaving => self.end(Greeting::Late),
        }
    }

    async fn greet(&self, io: TcpStream) -> Begun {
        let mut first = [0];
        match io.peek(&mut first).await {
            Ok(0) | Err(_) => return Begun::Gone,
            // No record of TLS begins so.
            Ok(_) if first[0].is_ascii_alphabetic() => {
                self.metrics.greeted(Greeting::Text);
                return Begun::Text(io);
            }
            Ok(_) => {}
        }
        // As the files say now.
        match TlsAcceptor::from(self.tls.config()).accept(io).await {
            Ok(stream) => {
                self.metrics.greeted(Greeting::Done);
                Begun::Tls(Box::new(stream))
            }
            Err(error) => {
                tracing::debug!(reason = %error, "no TLS with a client");
                self.end(Greeting::Failed)
            }
        }
    }

    fn end(&self, how: Greeting) -> Begun {
        self.metrics.greeted(how);
        Begun::Failed
    }

    fn enter(&self) -> Place<'_> {
        let displaced = Rc::new(Notify::new());
        let mut running = self.running.borrow_mut();
        if running.len() >= MAX_RUNNING
            && let Some(oldest) = running.pop_front()
        {
            oldest.notify_one();
        }
        running.push_back(Rc::clone(&displaced));
        Place { handshakes: self, displaced }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut running = self.handshakes.running.borrow_mut();
        if let Some(at) = running.iter().position(|other| Rc::ptr_eq(other, &self.displaced)) {
            running.remove(at);
        }
    }
}

/// Waits until connections end, and a little longer: who connected in the last moment
/// has something to say.
pub(super) async fn last_moment(closing: impl Future<Output = ()>, grace: Duration) {
    closing.await;
    tokio::time::sleep(grace).await;
}
