//! A client's connection: its bytes, what it is doing, and when it has been
//! doing it for too long.
//!
//! The HTTP implementation knows one timer for idling and for sending a request
//! head; these are two different things here. A connection owes a whole head
//! within the header timeout, from the first byte on (and from being accepted
//! on: who connects has something to say); between requests, and while it does
//! not take what is written to it, it may idle for the idle timeout. While a
//! request is served neither applies.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

use super::config::Timeouts;
use crate::time::{Clock, Timestamp};

/// How much of a refused request's body is read, so that a client which writes
/// all before it reads sees its answer.
const LINGER_BYTES: usize = 8 * 1024 * 1024;
/// How long a connection may linger after its last answer.
const LINGER_TIME: Duration = Duration::from_secs(5);

/// How long a new connection may take to send its first request when the process
/// is about to go: who connected in the last moment has something to say.
const FIRST_REQUEST: Duration = Duration::from_millis(250);

/// What a connection is doing. Written and read by the one thread that serves
/// it; atomic only because an upgraded connection must be `Send`.
#[derive(Debug)]
pub(super) struct Activity {
    clock: Clock,
    phase: AtomicU8,
    since: AtomicU64,
    exchanges: AtomicU32,
    /// Nanoseconds since when nothing could be written, 0 if it can.
    blocked_since: AtomicU64,
    http2: AtomicBool,
    unread_body: AtomicBool,
    /// The socket, once HTTP is done with it.
    leftover: Mutex<Option<TcpStream>>,
}

/// Neither a head nor silence.
const FRESH: u8 = 0;
/// A request head has begun.
const HEAD: u8 = 1;
/// At least one exchange is running.
const BUSY: u8 = 2;
/// Between exchanges.
const IDLE: u8 = 3;

/// One request and its answer; its end is noticed when this is dropped.
#[derive(Debug)]
pub(super) struct Exchange(Arc<Activity>);

/// A client's socket that notes what happens on it.
#[derive(Debug)]
pub(super) struct ClientStream {
    /// `None` only while it is being dropped.
    io: Option<TcpStream>,
    activity: Arc<Activity>,
}

/// The timer of a connection. Armed lazily: a deadline that moves back costs
/// nothing until the old one has passed.
#[derive(Debug, Default)]
pub(super) struct Watchdog {
    armed: Option<(Timestamp, Pin<Box<Sleep>>)>,
}

impl Activity {
    pub(super) fn new(clock: Clock) -> Self {
        let now = clock.now();
        Self {
            clock,
            phase: AtomicU8::new(FRESH),
            since: AtomicU64::new(now.as_nanos()),
            exchanges: AtomicU32::new(0),
            blocked_since: AtomicU64::new(0),
            http2: AtomicBool::new(false),
            unread_body: AtomicBool::new(false),
            leftover: Mutex::new(None),
        }
    }

    /// Notes that a request has come.
    pub(super) fn begin(self: &Arc<Self>, http2: bool) -> Exchange {
        if http2 {
            self.http2.store(true, Ordering::Relaxed);
        }
        let running = self.exchanges.load(Ordering::Relaxed);
        self.exchanges.store(running + 1, Ordering::Relaxed);
        self.phase.store(BUSY, Ordering::Relaxed);
        Exchange(Arc::clone(self))
    }

    /// Notes that a request's body will not be read to its end, after which an
    /// HTTP/1 connection cannot go on.
    pub(super) fn leave_body_unread(&self) {
        self.unread_body.store(true, Ordering::Relaxed);
    }

    /// Whether a body was left unread.
    pub(super) fn has_unread_body(&self) -> bool {
        self.unread_body.load(Ordering::Relaxed)
    }

    /// For how long a first request may still be on its way.
    pub(super) fn grace(&self) -> Duration {
        if self.phase.load(Ordering::Relaxed) != FRESH {
            return Duration::ZERO;
        }
        let since = Timestamp::from_nanos(self.since.load(Ordering::Relaxed));
        since.plus(FIRST_REQUEST).since(self.clock.now())
    }

    /// The socket, if HTTP is done with it.
    pub(super) fn take_leftover(&self) -> Option<TcpStream> {
        self.leftover.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn enter(&self, phase: u8) {
        self.phase.store(phase, Ordering::Relaxed);
        self.since.store(self.clock.now().as_nanos(), Ordering::Relaxed);
    }

    fn received(&self, bytes: &[u8]) {
        match self.phase.load(Ordering::Relaxed) {
            // No HTTP/1 method begins like the preface of HTTP/2.
            FRESH if bytes.starts_with(b"PRI ") => {
                self.http2.store(true, Ordering::Relaxed);
                self.enter(IDLE);
            }
            // Frames of HTTP/2 need not belong to a request.
            IDLE if !self.http2.load(Ordering::Relaxed) => self.enter(HEAD),
            _ => {}
        }
    }

    fn wrote(&self, blocked: bool) {
        let since = self.blocked_since.load(Ordering::Relaxed);
        if blocked && since == 0 {
            self.blocked_since.store(self.clock.now().as_nanos().max(1), Ordering::Relaxed);
        } else if !blocked && since != 0 {
            self.blocked_since.store(0, Ordering::Relaxed);
        }
    }

    /// When the connection will have been at it for too long.
    fn deadline(&self, timeouts: &Timeouts) -> Option<Timestamp> {
        let blocked = match self.blocked_since.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(Timestamp::from_nanos(nanos).plus(timeouts.idle)),
        };
        let since = Timestamp::from_nanos(self.since.load(Ordering::Relaxed));
        let phase = match self.phase.load(Ordering::Relaxed) {
            BUSY => None,
            IDLE => Some(since.plus(timeouts.idle)),
            _ => Some(since.plus(timeouts.header)),
        };
        match (blocked, phase) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

impl Exchange {
    /// What the connection is doing.
    pub(super) fn activity(&self) -> &Activity {
        &self.0
    }

    /// Another part of the same exchange, which lasts as long as both.
    pub(super) fn share(&self) -> Self {
        self.0.begin(false)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let left = self.0.exchanges.load(Ordering::Relaxed).saturating_sub(1);
        self.0.exchanges.store(left, Ordering::Relaxed);
        if left == 0 {
            self.0.enter(IDLE);
        }
    }
}

impl Watchdog {
    /// Ready when the connection behind `activity` has been at it for too long.
    /// To be polled after the connection, by the same task.
    pub(super) fn poll_expired(
        &mut self,
        activity: &Activity,
        timeouts: &Timeouts,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        loop {
            let Some(deadline) = activity.deadline(timeouts) else {
                self.armed = None;
                return Poll::Pending;
            };
            match &mut self.armed {
                Some((armed, sleep)) if *armed <= deadline => {
                    if sleep.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    self.armed = None;
                    if activity.clock.now() >= deadline {
                        return Poll::Ready(());
                    }
                }
                _ => {
                    let wait = deadline.since(activity.clock.now());
                    self.armed = Some((deadline, Box::pin(tokio::time::sleep(wait))));
                }
            }
        }
    }
}

impl ClientStream {
    pub(super) const fn new(io: TcpStream, activity: Arc<Activity>) -> Self {
        Self { io: Some(io), activity }
    }

    fn io(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        self.io.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        let mut leftover = self.activity.leftover.lock().unwrap_or_else(PoisonError::into_inner);
        *leftover = self.io.take();
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = self.io()?.poll_read(cx, buf);
        if let Some(bytes) = buf.filled().get(before..).filter(|bytes| !bytes.is_empty()) {
            self.activity.received(bytes);
        }
        result
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = self.io()?.poll_write(cx, buf);
        self.activity.wrote(result.is_pending());
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = self.io()?.poll_write_vectored(cx, bufs);
        self.activity.wrote(result.is_pending());
        result
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io()?.poll_shutdown(cx)
    }
}

/// Ends a connection whose client may still be writing: says that no more will
/// come, and reads on for a while. Closing at once would make the kernel reset
/// the connection, and the client lose an answer that it has not read yet.
pub(super) async fn linger(mut io: TcpStream) {
    if io.shutdown().await.is_err() {
        return;
    }
    let discard = async {
        let mut buffer = vec![0; 16 * 1024];
        let mut left = LINGER_BYTES;
        while left > 0 {
            match io.read(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(count) => left = left.saturating_sub(count),
            }
        }
    };
    // Whoever is still writing after that has to do without.
    let _ = tokio::time::timeout(LINGER_TIME, discard).await;
}

/// Answers a connection that cannot be served, and ends it.
pub(super) async fn dismiss(mut io: TcpStream, answer: &'static [u8]) {
    if io.write_all(answer).await.is_ok() {
        linger(io).await;
    }
}
