//! One connection of HTTP/1 to the upstream, driven by whoever uses it.
//!
//! The HTTP implementation wants each of its connections polled. A task of its own for
//! that would cost a request four turns of the scheduler: there and back for the head,
//! and for the body. So the task that waits for the answer does it, and while nobody
//! does the connection is idle, and nothing happens on it that the next look at it
//! would not find.
//!
//! One case needs a task: an answer that begins before the request has ended. Its
//! client may be slow to take it, and the rest of the request must go on meanwhile.

use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::coop::has_budget_remaining;

use super::admission::Admission;
use super::body::{RequestBody, Upload};
use super::outbox::Collecting;
use super::response::{GatewayFault, Problem};
use super::upstream::Upstream;
use crate::runtime::spawn_local;

pub(super) type SendResult<B> = Result<Response<Incoming>, TrySendError<Request<B>>>;

/// A connection, with the number of bytes that were written to it.
pub(super) struct Wire {
    sender: http1::SendRequest<RequestBody>,
    driver: Driver,
    /// The request that was sent last is under way.
    asked: bool,
    written: Arc<AtomicU64>,
}

/// What a connection does.
struct Driver {
    /// `None` when it is over.
    connection: Option<Pin<Box<dyn Future<Output = hyper::Result<()>>>>>,
    /// Somebody will be woken by what happens on it.
    heard: bool,
}

/// A socket that counts what is written to it.
struct Counted<T> {
    io: T,
    written: Arc<AtomicU64>,
}

/// Notes at its end whether something of a request was written.
pub(super) struct Delivery<'a> {
    admission: Option<&'a Admission>,
    written: Arc<AtomicU64>,
    before: u64,
}

/// A connection in use. It goes back when the answer was read to its end, and is
/// closed if this is dropped before.
pub(super) struct Lease {
    wire: Wire,
    home: Weak<Upstream>,
}

impl Driver {
    fn poll(&mut self, cx: &mut Context<'_>) {
        self.heard = true;
        if let Some(connection) = &mut self.connection
            && let Poll::Ready(result) = connection.as_mut().poll(cx)
        {
            self.connection = None;
            if let Err(error) = result {
                tracing::debug!(%error, "a connection to the upstream ended");
            }
        }
    }

    /// The same, and nobody will be woken for what happens next.
    fn look(&mut self) {
        self.poll(&mut Context::from_waker(Waker::noop()));
        self.heard = false;
    }

    /// Polls for what `next` gets from the connection.
    ///
    /// Usually something has come and is all that is waited for. So it is looked at
    /// first without leaving a waker behind, which what is done next would wake, and
    /// the next one who uses the connection.
    fn poll_for<R>(
        &mut self,
        cx: &mut Context<'_>,
        next: &mut dyn FnMut(&mut Context<'_>) -> Poll<R>,
    ) -> Poll<R> {
        let silent = &mut Context::from_waker(Waker::noop());
        if let Poll::Ready(result) = next(silent) {
            return Poll::Ready(result);
        }
        self.look();
        if let Poll::Ready(result) = next(silent) {
            return Poll::Ready(result);
        }
        self.poll(cx);
        next(cx)
    }
}

impl Wire {
    /// Begins to speak HTTP/1 on `io`.
    ///
    /// # Errors
    /// If that is not possible.
    pub(super) async fn begin<T>(io: T) -> Result<Self, Problem>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let written = Arc::new(AtomicU64::new(0));
        let io = Collecting::new(Counted { io, written: Arc::clone(&written) });
        let (sender, connection) = http1::Builder::new()
            .handshake(TokioIo::new(io))
            .await
            .map_err(|_| Problem::BadGateway(GatewayFault::Unreachable))?;
        let driver =
            Driver { connection: Some(Box::pin(connection.with_upgrades())), heard: false };
        Ok(Self { sender, driver, asked: false, written })
    }

    /// Whether it can take a request.
    pub(super) fn is_idle(&self) -> bool {
        self.sender.is_ready()
    }

    /// Whether it is over, as far as is known.
    pub(super) fn is_closed(&self) -> bool {
        self.driver.connection.is_none() || self.sender.is_closed()
    }

    /// Takes note of what has happened on it. Nobody is woken for what will happen.
    pub(super) fn look(&mut self) {
        self.driver.look();
    }

    /// Sends `request`. What comes of it is for [`poll_answer`](Self::poll_answer).
    pub(super) fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> impl Future<Output = SendResult<RequestBody>> + use<> {
        self.asked = false;
        self.sender.try_send_request(request)
    }

    /// Drives the connection until `sending` is ready.
    pub(super) fn poll_answer(
        &mut self,
        mut sending: Pin<&mut impl Future<Output = SendResult<RequestBody>>>,
        cx: &mut Context<'_>,
    ) -> Poll<SendResult<RequestBody>> {
        if self.asked {
            let mut sent = |cx: &mut Context<'_>| sending.as_mut().poll(cx);
            return self.driver.poll_for(cx, &mut sent);
        }
        // Only what is done here makes it ready, so that it need not wake this task.
        self.asked = true;
        self.driver.poll(cx);
        let polled = sending.poll(&mut Context::from_waker(Waker::noop()));
        if polled.is_pending() && !has_budget_remaining() {
            cx.waker().wake_by_ref();
        }
        polled
    }

    /// Notes what is written from now on.
    pub(super) fn delivery<'a>(&self, admission: Option<&'a Admission>) -> Delivery<'a> {
        let written = Arc::clone(&self.written);
        let before = written.load(Ordering::Relaxed);
        Delivery { admission, written, before }
    }

    /// Lends it to the answer that comes on it. `None` if it goes on by itself and goes
    /// `home` then: the request, which is told of by `upload`, has not ended.
    pub(super) fn lend(self, home: &Rc<Upstream>, upload: Option<&Upload>) -> Option<Lease> {
        let home = Rc::downgrade(home);
        if upload.is_some_and(|upload| !upload.has_ended()) {
            self.go_on(home);
            None
        } else {
            Some(Lease { wire: self, home })
        }
    }

    /// Drives the connection in a task of its own until it is idle or over.
    fn go_on(mut self, home: Weak<Upstream>) {
        spawn_local(async move {
            poll_fn(|cx| {
                self.driver.poll(cx);
                if self.is_closed() || self.is_idle() { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            if let Some(home) = home.upgrade() {
                home.take_back(self);
            }
        });
    }
}

impl Lease {
    /// Polls for what `next` reads from the answer's body, and drives the connection.
    pub(super) fn poll_with<R>(
        &mut self,
        cx: &mut Context<'_>,
        mut next: impl FnMut(&mut Context<'_>) -> Poll<R>,
    ) -> Poll<R> {
        self.wire.driver.poll_for(cx, &mut next)
    }

    /// Keeps the connection for another request.
    pub(super) fn give_back(mut self) {
        if self.wire.driver.heard {
            self.wire.look();
        }
        if self.wire.is_closed() {
            return;
        }
        if !self.wire.is_idle() {
            self.wire.go_on(self.home);
        } else if let Some(home) = self.home.upgrade() {
            home.take_back(self.wire);
        }
    }

    /// Leaves the connection to whoever it was upgraded for.
    pub(super) fn upgraded(self) {
        self.wire.go_on(self.home);
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("closed", &self.is_closed()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").finish_non_exhaustive()
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
