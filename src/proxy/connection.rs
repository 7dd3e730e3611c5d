//! A client's connection: its bytes, what it is doing, and when it has been
//! doing it for too long.
//!
//! The HTTP implementation knows one timer for idling and for sending a request
//! head; these are two different things here. A connection owes a whole head
//! within the header timeout, from the first byte on (and from being accepted
//! on: who connects has something to say); between requests, and while it does
//! not take what is written to it, it may idle for the idle timeout. While a
//! request is served neither applies. A block of fields of HTTP/2 that has begun
//! is owed within the header timeout whatever else runs.
//!
//! What the HTTP implementation cannot read it would answer with a bare status.
//! That answer is not sent; which status it was is noted, so that the proxy can
//! answer in its own form.

use std::io;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt as _;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use super::alarm::Alarm;
use super::config::Timeouts;
use super::outbox::Collecting;
use super::protocol::{Blocks, Protocol};
use super::response::Problem;
use super::socket::ClientSocket;
use crate::time::{Clock, Timestamp};

/// How much of a refused request's body is read, so that a client which writes
/// all before it reads sees its answer.
const LINGER_BYTES: usize = 8 * 1024 * 1024;
/// How long a connection may linger after its last answer.
const LINGER_TIME: Duration = Duration::from_secs(5);

/// How long a new connection may take to send its first request when the process
/// is about to go: who connected in the last moment has something to say.
pub(super) const FIRST_REQUEST: Duration = Duration::from_millis(250);

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
    /// Nanoseconds since when a block of fields is unfinished, 0 if none is.
    block_since: AtomicU64,
    http2: AtomicBool,
    upgraded: AtomicBool,
    unread_body: AtomicBool,
    /// All that was written has left, and no exchange has begun since. Whatever
    /// HTTP/1 writes then is its own answer to bytes that are no request.
    quiet: AtomicBool,
    /// The status of that answer, 0 if there was none.
    refusal: AtomicU16,
    /// Bytes of the present head before its first line has ended.
    first_line: AtomicUsize,
    /// The socket, once HTTP is done with it.
    leftover: Mutex<Option<ClientSocket>>,
}

/// Neither a head nor silence.
const FRESH: u8 = 0;
/// A request head has begun.
const HEAD: u8 = 1;
/// At least one exchange is running.
const BUSY: u8 = 2;
/// Between exchanges.
const IDLE: u8 = 3;

/// The first line of the present head has ended.
const ENDED: usize = usize::MAX;

/// One request and its answer; its end is noticed when this is dropped.
#[derive(Debug)]
pub(super) struct Exchange(Arc<Activity>);

/// A client's socket that notes what happens on it.
#[derive(Debug)]
pub(super) struct ClientStream {
    io: Collecting<ClientSocket>,
    activity: Arc<Activity>,
    protocol: Protocol,
}

/// The timer of a connection.
#[derive(Debug, Default)]
pub(super) struct Watchdog(Alarm);

impl Activity {
    pub(super) fn new(clock: Clock) -> Self {
        let now = clock.now();
        Self {
            clock,
            phase: AtomicU8::new(FRESH),
            since: AtomicU64::new(now.as_nanos()),
            exchanges: AtomicU32::new(0),
            blocked_since: AtomicU64::new(0),
            block_since: AtomicU64::new(0),
            http2: AtomicBool::new(false),
            upgraded: AtomicBool::new(false),
            unread_body: AtomicBool::new(false),
            quiet: AtomicBool::new(true),
            refusal: AtomicU16::new(0),
            first_line: AtomicUsize::new(0),
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
        self.quiet.store(false, Ordering::Relaxed);
        self.first_line.store(0, Ordering::Relaxed);
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
    pub(super) fn take_leftover(&self) -> Option<ClientSocket> {
        self.leftover.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn enter(&self, phase: u8) {
        self.phase.store(phase, Ordering::Relaxed);
        self.since.store(self.clock.now().as_nanos(), Ordering::Relaxed);
    }

    /// What is wrong with bytes that HTTP could not read as a request, if it
    /// could not. A head may have `max_head` bytes.
    pub(super) fn refusal(&self, max_head: usize) -> Option<Problem> {
        let first_line = self.first_line.load(Ordering::Relaxed);
        match self.refusal.load(Ordering::Relaxed) {
            0 => None,
            414 => Some(Problem::TargetTooLong),
            431 if first_line != ENDED && first_line >= max_head => Some(Problem::TargetTooLong),
            431 => Some(Problem::HeadTooLarge),
            _ => Some(Problem::BadRequest("what was sent is not an HTTP request")),
        }
    }

    /// Whether a head of HTTP/1 has begun and not ended.
    pub(super) fn owes_head(&self) -> bool {
        let phase = self.phase.load(Ordering::Relaxed);
        (phase == FRESH || phase == HEAD) && self.first_line.load(Ordering::Relaxed) > 0
    }

    fn received(&self, bytes: &[u8], blocks: Option<Blocks>) {
        let phase = self.phase.load(Ordering::Relaxed);
        if let Some(blocks) = blocks {
            // Frames of HTTP/2 need not belong to a request.
            if phase == FRESH {
                self.http2.store(true, Ordering::Relaxed);
                self.enter(IDLE);
            }
            let since = self.block_since.load(Ordering::Relaxed);
            if !blocks.open {
                self.block_since.store(0, Ordering::Relaxed);
            } else if blocks.finished || since == 0 {
                self.block_since.store(self.clock.now().as_nanos().max(1), Ordering::Relaxed);
            }
            return;
        }
        match phase {
            IDLE => self.enter(HEAD),
            FRESH | HEAD => {}
            _ => return,
        }
        let so_far = self.first_line.load(Ordering::Relaxed);
        if so_far != ENDED {
            let ended = bytes.contains(&b'\n');
            let so_far = if ended { ENDED } else { so_far + bytes.len() };
            self.first_line.store(so_far, Ordering::Relaxed);
        }
    }

    /// Whether `bytes`, about to be written, are an answer of the HTTP
    /// implementation's own; if so, it is noted.
    fn is_refusal(&self, bytes: &[u8]) -> bool {
        if !self.quiet.load(Ordering::Relaxed) || self.http2.load(Ordering::Relaxed) {
            return false;
        }
        let status = bytes.strip_prefix(b"HTTP/1.1 ").and_then(|rest| rest.get(..3));
        let status = status.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
        if let Some(status) = status {
            self.refusal.store(status, Ordering::Relaxed);
        }
        status.is_some()
    }

    fn is_refused(&self) -> bool {
        self.refusal.load(Ordering::Relaxed) != 0
    }

    /// Notes that the connection is no longer one of HTTP.
    pub(super) fn upgrade(&self) {
        self.upgraded.store(true, Ordering::Relaxed);
    }

    fn flushed(&self) {
        if self.exchanges.load(Ordering::Relaxed) == 0 && !self.upgraded.load(Ordering::Relaxed) {
            self.quiet.store(true, Ordering::Relaxed);
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
        let block = match self.block_since.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(Timestamp::from_nanos(nanos).plus(timeouts.header)),
        };
        [blocked, phase, block].into_iter().flatten().min()
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
        match activity.deadline(timeouts) {
            Some(deadline) => self.0.poll_due(deadline, &activity.clock, cx),
            // It stays armed: the next deadline will be a later one.
            None => Poll::Pending,
        }
    }
}

impl ClientStream {
    pub(super) fn new(io: ClientSocket, activity: Arc<Activity>) -> Self {
        Self { io: Collecting::new(io), activity, protocol: Protocol::new() }
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        let mut leftover = self.activity.leftover.lock().unwrap_or_else(PoisonError::into_inner);
        *leftover = self.io.take_socket();
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.io).poll_read(cx, buf);
        if let Some(bytes) = buf.filled().get(before..).filter(|bytes| !bytes.is_empty()) {
            let blocks = self.protocol.follow(bytes);
            self.activity.received(bytes, blocks);
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
        if self.activity.is_refusal(buf) {
            return Poll::Ready(Ok(buf.len()));
        }
        let result = Pin::new(&mut self.io).poll_write(cx, buf);
        self.activity.wrote(result.is_pending());
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if bufs.first().is_some_and(|first| self.activity.is_refusal(first)) {
            return Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()));
        }
        let result = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.activity.wrote(result.is_pending());
        result
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.io).poll_flush(cx);
        if result.is_ready() {
            self.activity.flushed();
        }
        result
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.activity.is_refused() {
            // The proxy's own answer is still to come.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Ends a connection whose client may still be writing: says that no more will
/// come, and reads on for a while. Closing at once would make the kernel reset
/// the connection, and the client lose an answer that it has not read yet.
pub(super) async fn linger(mut io: ClientSocket) {
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
pub(super) async fn dismiss(mut io: ClientSocket, answer: &[u8]) {
    let written = tokio::time::timeout(LINGER_TIME, io.write_all(answer)).await;
    if matches!(written, Ok(Ok(()))) {
        linger(io).await;
    }
}

/// The same for when there is no time for it: nothing is awaited, and the client
/// may lose the answer if it is still writing.
pub(super) fn dismiss_at_once(mut io: ClientSocket, answer: &[u8]) {
    // What was sent so far is taken, since closing on it would reset the connection.
    let mut unread = [MaybeUninit::uninit(); 4096];
    let _ = SockRef::from(io.tcp()).recv(&mut unread);
    if let ClientSocket::Plain(io) = &io {
        let io = SockRef::from(io);
        if io.send(answer).is_ok() {
            let _ = io.shutdown(Shutdown::Write);
        }
        return;
    }
    // Written by the first attempt, or not at all.
    let written = io.write_all(answer).now_or_never();
    if matches!(written, Some(Ok(()))) && io.flush().now_or_never().is_some() {
        let _ = io.shutdown().now_or_never();
        let _ = SockRef::from(io.tcp()).shutdown(Shutdown::Write);
    }
}
