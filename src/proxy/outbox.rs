//! What the requests of one turn write leaves at its end, all at once.
//!
//! A thread that handles twenty events one by one goes twenty times from the kernel's
//! receiving code through its own to the kernel's sending code, and none of them stays in
//! the processor's caches. So small writes are collected, and a task that runs when all
//! that was ready has had its turn hands them to the kernel, one after the other. That is
//! worth a copy, and a request that comes alone waits for nothing.
//!
//! A socket says that what it collected is flushed, since nothing that follows depends on
//! when it leaves: a later write waits if there is too much, closing waits for all of it,
//! and an error shows with the next write, or as the end of what is read.

use std::cell::RefCell;
use std::fmt;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A larger write leaves at once: copying it would cost more than is won.
const MAX_WRITE: usize = 8 * 1024;
/// What a socket collects at most.
const MAX_COLLECTED: usize = 16 * 1024;

/// Empty buffers that are kept for the next writes.
const MAX_SPARE: usize = 64;

thread_local! {
    static OUTBOX: Outbox = const { Outbox::new() };
}

/// The sockets of a thread that have something to send.
struct Outbox {
    full: RefCell<Vec<Arc<dyn Flush>>>,
    /// Who sends it.
    task: RefCell<Option<Waker>>,
    /// The one used last is used first, since the caches know it.
    spare: RefCell<Vec<Vec<u8>>>,
}

trait Flush: Send + Sync {
    /// Sends what was collected. Ready when there is no more to do.
    fn poll_send(&self, cx: &mut Context<'_>) -> Poll<()>;
}

/// A socket whose small writes are collected.
pub(super) struct Collecting<T: AsyncWrite + Unpin + Send + 'static>(Arc<Mutex<Inner<T>>>);

struct Inner<T> {
    /// `None` once it was taken.
    io: Option<T>,
    collected: Vec<u8>,
    /// How much of that was sent.
    sent: usize,
    /// It is in the outbox.
    listed: bool,
    error: Option<io::Error>,
    /// Who waits until it can be written to. A socket wakes only who looked last, and that
    /// may have been the outbox.
    waiting: Option<Waker>,
}

/// Sends what the sockets of this thread collect, for as long as it is polled. Without it
/// nothing is collected.
pub(super) async fn send_collected() {
    /// Ends collecting when nobody sends any more.
    struct Closing;

    impl Drop for Closing {
        fn drop(&mut self) {
            let _ = OUTBOX.try_with(|outbox| outbox.task.borrow_mut().take());
        }
    }

    let _closing = Closing;
    let mut turn = Vec::new();
    poll_fn(|cx| {
        OUTBOX.with(|outbox| outbox.send(&mut turn, cx));
        Poll::<()>::Pending
    })
    .await;
}

impl Outbox {
    const fn new() -> Self {
        Self {
            full: RefCell::new(Vec::new()),
            task: RefCell::new(None),
            spare: RefCell::new(Vec::new()),
        }
    }

    /// Sends what is there; `turn` is empty and stays so.
    fn send(&self, turn: &mut Vec<Arc<dyn Flush>>, cx: &mut Context<'_>) {
        {
            let mut task = self.task.borrow_mut();
            if task.as_ref().is_none_or(|task| !task.will_wake(cx.waker())) {
                *task = Some(cx.waker().clone());
            }
        }
        std::mem::swap(&mut *self.full.borrow_mut(), turn);
        turn.retain(|socket| socket.poll_send(cx).is_pending());
        self.full.borrow_mut().append(turn);
    }

    fn wake(&self) {
        if let Some(task) = &*self.task.borrow() {
            task.wake_by_ref();
        }
    }

    fn is_open(&self) -> bool {
        self.task.borrow().is_some()
    }

    fn recycle(&self, buffer: Vec<u8>) {
        let mut spare = self.spare.borrow_mut();
        if spare.len() < MAX_SPARE {
            spare.push(buffer);
        }
    }
}

impl<T: AsyncWrite + Unpin> Inner<T> {
    fn io(&mut self) -> io::Result<Pin<&mut T>> {
        self.io.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Sends what was collected.
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(error) = self.error.take() {
            return Poll::Ready(Err(error));
        }
        while self.sent < self.collected.len() {
            let Some(io) = &mut self.io else { break };
            match ready!(Pin::new(io).poll_write(cx, &self.collected[self.sent..]))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => self.sent += count,
            }
        }
        self.empty();
        match &mut self.io {
            Some(io) => Pin::new(io).poll_flush(cx),
            None => Poll::Ready(Ok(())),
        }
    }

    /// The same for the socket's user, who is woken also if the outbox sends the rest.
    fn poll_drain_for(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = self.poll_drain(cx);
        self.noting(cx, polled)
    }

    /// Notes whether the user waits, for as long as the outbox may look after him.
    fn noting<R>(&mut self, cx: &Context<'_>, polled: Poll<R>) -> Poll<R> {
        self.waiting = (polled.is_pending() && self.listed).then(|| cx.waker().clone());
        polled
    }

    /// Lets go of what was collected.
    fn empty(&mut self) {
        self.sent = 0;
        self.collected.clear();
        let buffer = std::mem::take(&mut self.collected);
        if buffer.capacity() > 0 {
            // Only a thread that ends has no outbox.
            let _ = OUTBOX.try_with(|outbox| outbox.recycle(buffer));
        }
    }
}

impl<T: AsyncWrite + Unpin + Send> Flush for Mutex<Inner<T>> {
    fn poll_send(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut inner = self.lock().unwrap_or_else(PoisonError::into_inner);
        let result = ready!(inner.poll_drain(cx));
        inner.listed = false;
        if let Some(waiting) = inner.waiting.take() {
            waiting.wake();
        }
        if let Err(error) = result {
            inner.empty();
            inner.error = Some(error);
        }
        Poll::Ready(())
    }
}

impl<T: AsyncWrite + Unpin + Send + 'static> Collecting<T> {
    pub(super) fn new(io: T) -> Self {
        let inner = Inner {
            io: Some(io),
            collected: Vec::new(),
            sent: 0,
            listed: false,
            error: None,
            waiting: None,
        };
        Self(Arc::new(Mutex::new(inner)))
    }

    /// Takes the socket, after an attempt to send what was collected.
    pub(super) fn take_socket(&self) -> Option<T> {
        let mut inner = self.inner();
        // Who cannot take it now would not have got it either.
        let _ = inner.poll_drain(&mut Context::from_waker(Waker::noop()));
        inner.io.take()
    }

    fn inner(&self) -> MutexGuard<'_, Inner<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn list(&self, inner: &mut Inner<T>) {
        let listed = std::mem::replace(&mut inner.listed, true);
        // Only a thread that ends has none, and with it the socket does.
        let _ = OUTBOX.try_with(|outbox| {
            if !listed {
                outbox.full.borrow_mut().push(Arc::clone(&self.0) as Arc<dyn Flush>);
            }
            // Also if it is listed: the socket's user may have sent what the outbox
            // waited with, and in its place have been woken.
            outbox.wake();
        });
    }
}

impl<T: AsyncWrite + Unpin + Send + 'static> Drop for Collecting<T> {
    fn drop(&mut self) {
        // The outbox must not keep it open. What was collected was given up.
        drop(self.inner().io.take());
    }
}

impl<T: AsyncWrite + Unpin + Send + 'static> fmt::Debug for Collecting<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collecting").finish_non_exhaustive()
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> AsyncRead for Collecting<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.inner().io()?.poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin + Send + 'static> AsyncWrite for Collecting<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut inner = self.inner();
        let length = bufs.iter().map(|buf| buf.len()).sum();
        let collects = length <= MAX_WRITE && OUTBOX.try_with(Outbox::is_open).unwrap_or_default();
        if !collects || inner.collected.len() + length > MAX_COLLECTED {
            ready!(inner.poll_drain_for(cx))?;
        }
        if !collects {
            let polled = match bufs {
                [buf] => inner.io()?.poll_write(cx, buf),
                bufs => inner.io()?.poll_write_vectored(cx, bufs),
            };
            return inner.noting(cx, polled);
        }
        if let Some(error) = inner.error.take() {
            return Poll::Ready(Err(error));
        }
        if inner.collected.capacity() == 0 {
            let spare = OUTBOX.try_with(|outbox| outbox.spare.borrow_mut().pop());
            inner.collected = spare.ok().flatten().unwrap_or_default();
        }
        for buf in bufs {
            inner.collected.extend_from_slice(buf);
        }
        self.list(&mut inner);
        Poll::Ready(Ok(length))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.inner();
        if inner.listed { Poll::Ready(Ok(())) } else { inner.poll_drain_for(cx) }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.inner();
        ready!(inner.poll_drain_for(cx))?;
        let polled = inner.io()?.poll_shutdown(cx);
        inner.noting(cx, polled)
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::task::yield_now;
    use tokio::time::timeout;

    use super::*;

    /// Runs `test` beside a sender.
    async fn with_sender(test: impl Future<Output = ()>) {
        tokio::select! {
            biased;
            () = test => {}
            () = send_collected() => {}
        }
    }

    async fn read(peer: &mut DuplexStream, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        timeout(Duration::from_secs(30), peer.read_exact(&mut bytes)).await.unwrap().unwrap();
        bytes
    }

    fn has_come(peer: &mut DuplexStream) -> bool {
        let mut byte = [0];
        let mut buf = ReadBuf::new(&mut byte);
        let mut cx = Context::from_waker(Waker::noop());
        Pin::new(peer).poll_read(&mut cx, &mut buf).is_ready()
    }

    #[tokio::test]
    async fn small_writes_leave_when_the_turn_is_over() {
        let (ours, mut peer) = duplex(100_000);
        let mut socket = Collecting::new(ours);
        with_sender(async {
            // The sender has to be there first.
            yield_now().await;
            socket.write_all(b"one, ").await.unwrap();
            socket.write_all(b"two, ").await.unwrap();
            socket.flush().await.unwrap();
            assert!(!has_come(&mut peer));
            yield_now().await;
            assert_eq!(read(&mut peer, 10).await, b"one, two, ");
            // A large one overtakes nothing.
            let large = vec![b'x'; MAX_WRITE + 1];
            socket.write_all(b"three").await.unwrap();
            socket.write_all(&large).await.unwrap();
            assert_eq!(read(&mut peer, 5).await, b"three");
            assert_eq!(read(&mut peer, large.len()).await, large);
        })
        .await;
    }

    #[tokio::test]
    async fn what_does_not_fit_waits_and_keeps_its_order() {
        let (ours, mut peer) = duplex(7);
        let mut socket = Collecting::new(ours);
        let wanted: Vec<u8> = (0..100 * MAX_WRITE).map(|i| (i / 100) as u8).collect();
        with_sender(async {
            yield_now().await;
            let write = async {
                for piece in wanted.chunks(1000) {
                    socket.write_all(piece).await.unwrap();
                    let collected = socket.inner().collected.len();
                    assert!(collected <= MAX_COLLECTED, "{collected}");
                }
                socket.shutdown().await.unwrap();
            };
            let (got, ()) = tokio::join!(read(&mut peer, wanted.len()), write);
            assert!(got == wanted);
            assert_eq!(peer.read(&mut [0]).await.unwrap(), 0);
        })
        .await;
    }

    /// The sender and the writer are tasks of their own here, so that neither is polled
    /// for what wakes the other.
    #[tokio::test]
    #[allow(clippy::disallowed_methods, reason = "tasks that end with the test")]
    async fn a_small_write_after_a_large_one_that_waited_is_not_forgotten() {
        let (ours, mut peer) = duplex(64);
        let mut socket = Collecting::new(ours);
        tokio::spawn(send_collected());
        yield_now().await;
        socket.write_all(&[b'a'; 200]).await.unwrap();
        // The outbox finds that there is no room for all of it.
        yield_now().await;
        tokio::spawn(async move {
            // This one waits for the same room, and is woken in place of the outbox.
            socket.write_all(&[b'b'; MAX_WRITE + 1]).await.unwrap();
            socket.write_all(b"end").await.unwrap();
            socket.flush().await.unwrap();
            std::future::pending::<()>().await;
        });
        yield_now().await;
        let got = read(&mut peer, 200 + MAX_WRITE + 1 + 3).await;
        assert!(got.ends_with(b"bend"));
    }

    #[tokio::test]
    async fn taking_a_socket_sends_and_dropping_it_gives_up() {
        let (first, mut first_peer) = duplex(100);
        let (second, mut second_peer) = duplex(100);
        let (mut taken, mut dropped) = (Collecting::new(first), Collecting::new(second));
        with_sender(async {
            yield_now().await;
            taken.write_all(b"said").await.unwrap();
            dropped.write_all(b"unsaid").await.unwrap();
            let io = taken.take_socket().unwrap();
            drop(dropped);
            assert_eq!(read(&mut first_peer, 4).await, b"said");
            let mut rest = Vec::new();
            second_peer.read_to_end(&mut rest).await.unwrap();
            assert_eq!(rest, b"");
            drop(io);
        })
        .await;
    }

    #[tokio::test]
    async fn an_error_shows_with_the_next_write() {
        let (ours, peer) = duplex(100);
        let mut socket = Collecting::new(ours);
        with_sender(async {
            yield_now().await;
            drop(peer);
            socket.write_all(b"x").await.unwrap();
            yield_now().await;
            assert_eq!(socket.write(b"y").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        })
        .await;
    }

    #[tokio::test]
    async fn without_a_sender_nothing_is_collected() {
        let (ours, mut peer) = duplex(100);
        let mut socket = Collecting::new(ours);
        with_sender(yield_now()).await;
        socket.write_all(b"x").await.unwrap();
        assert!(has_come(&mut peer));
    }
}
