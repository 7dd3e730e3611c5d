//! Bodies on their way through. Neither is ever held in memory as a whole.

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::EXPECT;
use http::{Extensions, HeaderMap, Request, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::Sleep;

use super::access::Line;
use super::admission::{Admission, HandOver};
use super::again::Told;
use super::connection::Exchange;
use super::egress::InFlight;
use super::kept::{KEPT_BYTES, Kept, Replay};
use super::wire::Lease;
use crate::runtime::spawn_local;

/// A body this small that nobody wants is read, so that the connection lives on;
/// behind a larger one the connection is closed.
const DRAINED_BYTES: u64 = 64 * 1024;
/// How long that may take.
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// A request's body, read from the client. Most requests have none, and those that do
/// pass from hand to hand: so it is small.
#[derive(Debug)]
pub(super) struct RequestBody {
    /// `None` if it is empty.
    reading: Option<Box<Reading>>,
    /// What was kept of a body that is sent once more.
    replay: Option<Box<Replay>>,
    /// Not of the body, but the only thing of ours that comes with every request.
    admission: Option<Admission>,
}

/// A body that is being read.
#[derive(Debug)]
struct Reading {
    /// `None` once it ended or was given up.
    incoming: Option<Incoming>,
    upload: Arc<Upload>,
    exchange: Option<Exchange>,
    http1: bool,
    /// The client waits to be asked for the body.
    waits: bool,
    left: u64,
    /// `None`: the client may be silent for as long as it likes.
    patience: Option<Duration>,
    stall: Option<Pin<Box<Sleep>>>,
    /// Where what is read is kept, to be sent once more.
    kept: Option<Arc<Kept>>,
}

/// The [`Admission`] of a request comes with its body: extensions would cost an
/// allocation for their table and one for what is in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct WithBody;

/// How an upload is going, for whoever waits for an answer to it.
#[derive(Debug, Default)]
pub(super) struct Upload {
    fault: AtomicU8,
    frames: AtomicU64,
    awaited: AtomicBool,
    ended: AtomicBool,
}

/// What the client did wrong while it sent a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UploadFault {
    /// It broke off, or the framing is wrong.
    Broken,
    /// It is larger than allowed.
    TooLarge,
    /// It stopped coming.
    Stalled,
}

/// An answer's body: the upstream's, or one of our own.
#[derive(Debug)]
pub(super) struct Body {
    content: Content,
    exchange: Option<Exchange>,
    /// Its request is on its way to the upstream until it is gone.
    in_flight: Option<InFlight>,
    line: Option<Box<Line>>,
}

#[derive(Debug)]
enum Content {
    Own(Bytes),
    Upstream {
        incoming: Incoming,
        ended: bool,
        lease: Option<Lease>,
        /// It broke off, which is still to be told.
        broken: Option<hyper::Error>,
    },
}

impl RequestBody {
    pub(super) fn new(
        incoming: Incoming,
        headers: &HeaderMap,
        version: Version,
        exchange: &Exchange,
        max: Option<u64>,
        patience: Option<Duration>,
    ) -> Self {
        let reading = (!incoming.is_end_stream()).then(|| {
            Box::new(Reading {
                incoming: Some(incoming),
                upload: Arc::default(),
                exchange: Some(exchange.share()),
                http1: version < Version::HTTP_2,
                waits: headers.contains_key(EXPECT),
                left: max.unwrap_or(u64::MAX),
                patience,
                stall: None,
                kept: None,
            })
        });
        Self { reading, replay: None, admission: None }
    }

    /// The body of a request that has none.
    pub(super) const fn empty() -> Self {
        Self { reading: None, replay: None, admission: None }
    }

    /// A body that was sent before.
    pub(super) fn replaying(replay: Replay) -> Self {
        Self { replay: Some(Box::new(replay)), ..Self::empty() }
    }

    /// Keeps what is read from now on, so that the body can be sent once more. `None`
    /// if it is known to be too large for that.
    pub(super) fn keep(&mut self) -> Option<Arc<Kept>> {
        if let Some(replay) = &self.replay {
            return Some(Arc::clone(&replay.kept));
        }
        if self.size_hint().lower() > KEPT_BYTES as u64 {
            return None;
        }
        let kept = Arc::<Kept>::default();
        match &mut self.reading {
            Some(reading) => reading.kept = Some(Arc::clone(&kept)),
            None => kept.ended(),
        }
        Some(kept)
    }

    /// What came with the request, once.
    pub(super) fn take_admission(&mut self) -> Option<Admission> {
        self.admission.take()
    }

    /// How the upload is going; `None` for a request without a body.
    pub(super) fn upload(&self) -> Option<Arc<Upload>> {
        self.reading.as_ref().map(|reading| Arc::clone(&reading.upload))
    }

    /// Whether anything was taken from it, or went wrong with it.
    pub(super) fn is_touched(&self) -> bool {
        let upload = self.reading.as_ref().map(|reading| &reading.upload);
        upload.is_some_and(|upload| upload.frames() > 0 || upload.fault().is_some())
    }

    /// Notes that nobody waits for the client to send more of it.
    pub(super) fn stop_waiting(&self) {
        if let Some(reading) = &self.reading {
            reading.stop_waiting();
        }
    }
}

impl Reading {
    fn stop_waiting(&self) {
        self.upload.awaited.store(false, Ordering::Relaxed);
        self.upload.ended.store(true, Ordering::Relaxed);
    }

    fn fail(&mut self, fault: UploadFault) -> Poll<Option<Result<Frame<Bytes>, UploadFault>>> {
        self.upload.fail(fault);
        if self.http1
            && let Some(exchange) = &self.exchange
        {
            exchange.activity().leave_body_unread();
        }
        self.incoming = None;
        Poll::Ready(Some(Err(fault)))
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = UploadFault;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadFault>>> {
        match &mut self.reading {
            Some(reading) => reading.poll_frame(cx),
            None => {
                let piece = self.replay.as_mut().and_then(|replay| replay.pieces.next());
                Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let incoming = self.reading.as_ref().and_then(|reading| reading.incoming.as_ref());
        incoming.is_none_or(HttpBody::is_end_stream)
            && self.replay.as_ref().is_none_or(|replay| replay.pieces.len() == 0)
    }

    fn size_hint(&self) -> SizeHint {
        let incoming = self.reading.as_ref().and_then(|reading| reading.incoming.as_ref());
        let replayed = || {
            let pieces = self.replay.as_ref().map_or(&[][..], |replay| replay.pieces.as_slice());
            SizeHint::with_exact(pieces.iter().map(|piece| piece.len() as u64).sum())
        };
        incoming.map_or_else(replayed, HttpBody::size_hint)
    }
}

impl Reading {
    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadFault>>> {
        let Some(incoming) = &mut self.incoming else { return Poll::Ready(None) };
        let polled = Pin::new(&mut *incoming).poll_frame(cx);
        let ended = incoming.is_end_stream();
        self.upload.awaited.store(polled.is_pending(), Ordering::Relaxed);
        match polled {
            Poll::Ready(Some(Ok(frame))) => {
                self.stall = None;
                self.upload.frames.fetch_add(1, Ordering::Relaxed);
                if let Some(data) = frame.data_ref() {
                    let length = data.len() as u64;
                    match self.left.checked_sub(length) {
                        Some(left) => self.left = left,
                        None => return self.fail(UploadFault::TooLarge),
                    }
                }
                if let Some(kept) = &self.kept {
                    kept.read(&frame);
                    if ended {
                        kept.ended();
                    }
                }
                if frame.is_trailers() {
                    // Nothing can follow, and nobody may ask whether it does.
                    self.incoming = None;
                    self.exchange = None;
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(_))) => self.fail(UploadFault::Broken),
            Poll::Ready(None) => {
                self.incoming = None;
                self.exchange = None;
                if let Some(kept) = &self.kept {
                    kept.ended();
                }
                Poll::Ready(None)
            }
            Poll::Pending => {
                let Some(patience) = self.patience else { return Poll::Pending };
                let stall =
                    self.stall.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
                if stall.as_mut().poll(cx).is_ready() {
                    return self.fail(UploadFault::Stalled);
                }
                Poll::Pending
            }
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.stop_waiting();
        let Some(incoming) = self.incoming.take().filter(|body| !body.is_end_stream()) else {
            return;
        };
        if !self.http1 {
            return;
        }
        let exchange = self.exchange.take();
        // A client that waits to be asked must not be, or it would send the
        // body for nothing.
        let small = incoming.size_hint().exact().is_some_and(|length| length <= DRAINED_BYTES);
        if small && !self.waits {
            spawn_local(async move {
                // Whatever comes of it, the connection sees it too.
                let _ = tokio::time::timeout(DRAIN_TIME, drain(incoming)).await;
                drop(exchange);
            });
        } else if let Some(exchange) = exchange {
            exchange.activity().leave_body_unread();
        }
    }
}

impl HandOver<RequestBody> for WithBody {
    const REFUNDS: bool = true;

    fn told(&self, answer: &mut Extensions) -> Option<Told<RequestBody>> {
        answer.remove()
    }

    fn hand_over(&self, request: &mut Request<RequestBody>, admission: Admission) {
        request.body_mut().admission = Some(admission);
    }
}

async fn drain(mut incoming: Incoming) {
    while let Some(Ok(_)) = incoming.frame().await {}
}

impl Upload {
    fn fail(&self, fault: UploadFault) {
        let code = match fault {
            UploadFault::Broken => 1,
            UploadFault::TooLarge => 2,
            UploadFault::Stalled => 3,
        };
        self.fault.store(code, Ordering::Relaxed);
    }

    /// What the client did wrong, if it did.
    pub(super) fn fault(&self) -> Option<UploadFault> {
        match self.fault.load(Ordering::Relaxed) {
            1 => Some(UploadFault::Broken),
            2 => Some(UploadFault::TooLarge),
            3 => Some(UploadFault::Stalled),
            _ => None,
        }
    }

    /// Whether it is the client who is waited for, which has a bound of its own.
    pub(super) fn is_awaited(&self) -> bool {
        self.awaited.load(Ordering::Relaxed)
    }

    /// Whether nothing more of it will be sent on.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// How many pieces have come.
    pub(super) fn frames(&self) -> u64 {
        self.frames.load(Ordering::Relaxed)
    }
}

impl fmt::Display for UploadFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Broken => "the request's body broke off",
            Self::TooLarge => "the request's body is too large",
            Self::Stalled => "the request's body stopped coming",
        })
    }
}

impl StdError for UploadFault {}

impl Body {
    /// The upstream's body. `lease` is kept until it has ended.
    pub(super) fn upstream(incoming: Incoming, lease: Option<Lease>) -> Self {
        Self {
            content: Content::Upstream { incoming, ended: false, lease, broken: None },
            exchange: None,
            in_flight: None,
            line: None,
        }
    }

    /// Whether it is one of our own.
    pub(super) const fn is_own(&self) -> bool {
        matches!(self.content, Content::Own(_))
    }

    /// Its request is on its way until the body is gone.
    pub(super) fn travel(&mut self, in_flight: Option<InFlight>) {
        self.in_flight = in_flight;
    }

    /// Keeps `exchange` running until the body is gone.
    pub(super) fn hold(&mut self, exchange: Exchange) {
        self.exchange = Some(exchange);
    }

    /// Writes `line` to the access log when the body is gone.
    pub(super) fn log(&mut self, line: Box<Line>) {
        self.line = Some(line);
    }
}

impl From<Bytes> for Body {
    fn from(bytes: Bytes) -> Self {
        Self { content: Content::Own(bytes), exchange: None, in_flight: None, line: None }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = match &mut self.content {
            Content::Own(bytes) => {
                let bytes = std::mem::take(bytes);
                Poll::Ready((!bytes.is_empty()).then(|| Ok(Frame::data(bytes))))
            }
            Content::Upstream { incoming, ended, lease, broken } => {
                if let Some(error) = broken.take() {
                    return Poll::Ready(Some(Err(error)));
                }
                let mut next = |cx: &mut Context<'_>| Pin::new(&mut *incoming).poll_frame(cx);
                let polled = match lease {
                    Some(lease) => lease.poll_with(cx, next),
                    None => next(cx),
                };
                match polled {
                    Poll::Ready(Some(Ok(frame))) => {
                        *ended |= frame.is_trailers();
                        Poll::Ready(Some(Ok(frame)))
                    }
                    Poll::Ready(None) => {
                        *ended = true;
                        Poll::Ready(None)
                    }
                    // What came before must leave first: an error ends the client's
                    // connection with all that is still to be written.
                    Poll::Ready(Some(Err(error))) => {
                        *broken = Some(error);
                        cx.waker().wake_by_ref();
                        Poll::Pending
                    }
                    Poll::Pending => Poll::Pending,
                }
            }
        };
        if let Some(line) = &mut self.line
            && let Poll::Ready(Some(Ok(frame))) = &polled
        {
            line.sent(frame.data_ref().map_or(0, Bytes::len));
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Own(bytes) => bytes.is_empty(),
            Content::Upstream { incoming, .. } => incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Own(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Content::Upstream { incoming, .. } => incoming.size_hint(),
        }
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Content::Upstream { incoming, ended, lease, .. } = &mut self.content
            && (*ended || incoming.is_end_stream())
            && let Some(lease) = lease.take()
        {
            lease.give_back();
        }
    }
}
