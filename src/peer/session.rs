//! Session: one stream to one peer.
//!
//! Frames that leave go through a channel of one place, which the mesh fills
//! only when it is free and tonic empties when HTTP/2 has window. Frames that
//! arrive are read by a task of their own and handed to the mesh as events.

use std::error::Error as _;
use std::fmt;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;
use tokio::sync::{Notify, mpsc, oneshot};
use tonic::{Code, Status, Streaming};

use super::codec::{Decoder, Encoder};
use super::convert::Malformed;
use crate::replication::{DialFailure, Frame, Hello, Refusal, SessionId, Side};
use crate::wire::tidegate::peer::v1 as wire;

/// Largest message in either direction.
pub(super) const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;
/// How long the first frame of each side may take.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// HTTP/2 pings on a silent connection, and how long their answer may take.
/// Heartbeats find a silent peer sooner; pings end its connection.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(10);
pub(super) const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// What a stream and a connection may hold that nobody has read yet.
pub(super) const STREAM_WINDOW: u32 = 256 * 1024;
pub(super) const CONNECTION_WINDOW: u32 = 512 * 1024;

/// What the mesh learns from sessions and dials.
#[derive(Debug)]
pub(super) enum Event {
    /// A peer said Hello.
    Open(Box<Open>),
    /// A frame arrived.
    Frame(SessionId, Frame),
    /// The stream ended.
    Ended(SessionId, End),
    /// A dial did not lead to a Hello.
    DialFailed(SocketAddr, DialFailure),
}

/// A peer that said Hello and asks for a session.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) side: Side,
    /// The other end of the connection; a label for logs.
    pub(super) remote: SocketAddr,
    pub(super) hello: Hello,
    pub(super) stamp_ms: u64,
    pub(super) outlet: Outlet,
    pub(super) answer: oneshot::Sender<Result<Opening, Denial>>,
}

/// A session that the mesh opened.
#[derive(Debug)]
pub(super) struct Opening {
    pub(super) id: SessionId,
    /// Closed when the mesh ends the session.
    pub(super) over: oneshot::Receiver<()>,
}

/// Why the mesh did not open a session.
#[derive(Debug)]
pub(super) enum Denial {
    /// The engine refuses. Some refusals are answered with this replica's own
    /// Hello first, so that the dialler learns who lives at the address.
    Refused { refusal: Refusal, hello: Option<Box<Frame>> },
    /// This replica is cut off from its peers on purpose.
    Partitioned,
}

/// How a stream ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// By the peer, in order.
    Closed,
    /// By the peer with a status, or with the connection.
    Failed(String),
    /// By the peer, which did not understand what this replica said.
    Rejected(String),
    /// A message was larger than [`MAX_MESSAGE_BYTES`].
    Oversized,
    /// A message was not a frame at all.
    Undecodable(String),
    /// A frame broke the protocol.
    Malformed(Malformed),
}

impl From<Status> for End {
    fn from(status: Status) -> Self {
        let code = status.code();
        if code == Code::OutOfRange {
            Self::Oversized
        } else if code == Code::Internal && status.source().is_none() {
            // What the transport reports has a source, what the decoder says has
            // none; peers never answer with this code.
            Self::Undecodable(status.message().to_owned())
        } else if code == Code::InvalidArgument {
            Self::Rejected(format!("rejected by the peer: {}", status.message()))
        } else {
            Self::Failed(format!("{code:?}: {}", status.message()))
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed by the peer"),
            Self::Failed(reason) | Self::Rejected(reason) | Self::Undecodable(reason) => {
                f.write_str(reason)
            }
            Self::Oversized => write!(f, "a message is larger than {MAX_MESSAGE_BYTES} bytes"),
            Self::Malformed(malformed) => malformed.fmt(f),
        }
    }
}

/// What both ends of the outgoing channel share.
#[derive(Debug)]
struct Shared {
    /// The mesh found the channel full and wants to know when it is not.
    wanted: AtomicBool,
    /// Wakes the mesh.
    room: Arc<Notify>,
    /// What the stream ends with, if not in order.
    last: Mutex<Option<Status>>,
}

/// The mesh's end of the outgoing channel. Dropping it ends the stream.
#[derive(Debug)]
pub(super) struct Outlet {
    frames: mpsc::Sender<Frame>,
    shared: Arc<Shared>,
}

/// tonic's end of the outgoing channel.
#[derive(Debug)]
pub(super) struct Outgoing {
    frames: mpsc::Receiver<Frame>,
    codec: Encoder,
    shared: Arc<Shared>,
}

/// An outgoing channel with one place. `room` is notified when the place gets
/// free after it was asked for in vain.
pub(super) fn channel(room: &Arc<Notify>) -> (Outlet, Outgoing) {
    let (sender, frames) = mpsc::channel(1);
    let shared = Arc::new(Shared {
        wanted: AtomicBool::new(false),
        room: Arc::clone(room),
        last: Mutex::new(None),
    });
    (
        Outlet { frames: sender, shared: Arc::clone(&shared) },
        Outgoing { frames, codec: Encoder::default(), shared },
    )
}

/// Whether a stream can take a frame.
#[derive(Debug)]
pub(super) enum Room<'a> {
    /// At once.
    Free(mpsc::Permit<'a, Frame>),
    /// Not now; the mesh is woken when it can.
    Full,
    /// Never again.
    Closed,
}

impl Outlet {
    /// The place for a frame, if it is free.
    pub(super) fn room(&self) -> Room<'_> {
        match self.frames.try_reserve() {
            Ok(permit) => Room::Free(permit),
            Err(mpsc::error::TrySendError::Closed(())) => Room::Closed,
            Err(mpsc::error::TrySendError::Full(())) => {
                self.shared.wanted.store(true, Ordering::SeqCst);
                // The place may have become free before that was said.
                match self.frames.try_reserve() {
                    Ok(permit) => Room::Free(permit),
                    Err(mpsc::error::TrySendError::Full(())) => Room::Full,
                    Err(mpsc::error::TrySendError::Closed(())) => Room::Closed,
                }
            }
        }
    }

    /// Ends the stream with `status` after the frame that may still wait.
    pub(super) fn end(self, status: Status) {
        *self.shared.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
    }
}

impl Stream for Outgoing {
    type Item = Result<wire::Frame, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.frames.poll_recv(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(frame)) => {
                if self.shared.wanted.swap(false, Ordering::SeqCst) {
                    self.shared.room.notify_one();
                }
                Poll::Ready(Some(Ok(self.codec.encode(frame))))
            }
            Poll::Ready(None) => {
                let last = self.shared.last.lock().unwrap_or_else(PoisonError::into_inner).take();
                Poll::Ready(last.map(Err))
            }
        }
    }
}

/// Hands every frame of `inbound` to the mesh until either ends.
pub(super) async fn read(
    mut inbound: Streaming<wire::Frame>,
    opening: Opening,
    events: mpsc::Sender<Event>,
) {
    let Opening { id, mut over } = opening;
    let mut codec = Decoder::default();
    let end = loop {
        let message = tokio::select! {
            _ = &mut over => return,
            message = inbound.message() => message,
        };
        let frame = match message {
            Ok(Some(frame)) => frame,
            Ok(None) => break End::Closed,
            Err(status) => break status.into(),
        };
        match codec.decode(frame) {
            Ok(frame) => {
                if events.send(Event::Frame(id, frame)).await.is_err() {
                    // The mesh is gone, and the session with it.
                    return;
                }
            }
            Err(malformed) => break End::Malformed(malformed),
        }
    };
    let _ = events.send(Event::Ended(id, end)).await;
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt as _, StreamExt as _};

    use super::*;
    use crate::replication::Body;

    fn frame(seq: u64) -> Frame {
        Frame { seq, ack: 0, stamp_ms: 0, echo_ms: 0, held_ms: 0, body: Body::Heartbeat }
    }

    fn put(outlet: &Outlet, seq: u64) -> bool {
        match outlet.room() {
            Room::Free(permit) => {
                permit.send(frame(seq));
                true
            }
            Room::Full | Room::Closed => false,
        }
    }

    #[tokio::test]
    async fn one_frame_waits_and_the_mesh_is_woken_only_if_it_wanted_more() {
        let room = Arc::new(Notify::new());
        let (outlet, mut outgoing) = channel(&room);
        assert!(put(&outlet, 1));
        assert_eq!(outgoing.next().await.unwrap().unwrap().seq, 1);
        assert_eq!(room.notified().now_or_never(), None, "nobody asked");
        assert!(put(&outlet, 2));
        assert!(!put(&outlet, 3), "a second frame must not be queued");
        assert_eq!(outgoing.next().await.unwrap().unwrap().seq, 2);
        room.notified().await;
        assert!(put(&outlet, 3));
    }

    #[tokio::test]
    async fn a_stream_ends_with_its_status_after_the_frame_that_waits() {
        let (outlet, mut outgoing) = channel(&Arc::new(Notify::new()));
        assert!(put(&outlet, 1));
        outlet.end(Status::invalid_argument("why"));
        assert!(outgoing.next().await.unwrap().is_ok());
        assert_eq!(outgoing.next().await.unwrap().unwrap_err().message(), "why");
        assert!(outgoing.next().await.is_none());
    }

    #[tokio::test]
    async fn a_stream_that_is_gone_has_no_room() {
        let (outlet, outgoing) = channel(&Arc::new(Notify::new()));
        drop(outgoing);
        assert!(matches!(outlet.room(), Room::Closed));
    }
}
