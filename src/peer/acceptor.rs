//! Acceptor: the side that is dialled.
//!
//! A dialler's first frame must be its Hello, within two seconds. What the mesh
//! refuses is answered with a status. Where the dialler must learn who lives at
//! the address it dialled (this replica itself, or one it already has a session
//! with), the answer is this replica's Hello first and then the status: the
//! dialler then comes to the same conclusion by itself and stops dialling.

use std::net::TcpListener;
use std::sync::Arc;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};
use tracing::{error, warn};

use super::convert;
use super::incoming::{self, Origin};
use super::metrics::{Metrics, Reason};
use super::session::{
    self, CONNECTION_WINDOW, Denial, End, Event, HELLO_TIMEOUT, MAX_MESSAGE_BYTES, Open, Outgoing,
    PING_INTERVAL, PING_TIMEOUT, Room, STREAM_WINDOW,
};
use crate::replication::{Body, Refusal, Side};
use crate::runtime::{OnExit, Supervisor};
use crate::tls;
use crate::wire::tidegate::peer::v1 as wire;
use crate::wire::tidegate::peer::v1::replication_server::{Replication, ReplicationServer};

/// Streams that one connection may have at once; a peer needs one.
const MAX_STREAMS: u32 = 8;

/// The gRPC service.
#[derive(Debug)]
pub(super) struct Acceptor {
    pub(super) events: mpsc::Sender<Event>,
    pub(super) room: Arc<Notify>,
    pub(super) supervisor: Supervisor,
    pub(super) metrics: Metrics,
    /// Only peers with a certificate, if set.
    pub(super) tls: Option<Arc<tls::Peers>>,
}

impl Acceptor {
    /// Serves `listener` until `stop`, then until the streams have ended.
    pub(super) async fn serve(self, listener: TcpListener, stop: CancellationToken) {
        let listener = match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => {
                error!(%error, "the peer listener cannot be used");
                return;
            }
        };
        let incoming = incoming::connections(listener, self.tls.clone(), self.metrics.clone());
        let service = ReplicationServer::new(self)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let served = Server::builder()
            .http2_keepalive_interval(Some(PING_INTERVAL))
            .http2_keepalive_timeout(Some(PING_TIMEOUT))
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_concurrent_streams(MAX_STREAMS)
            .serve_with_incoming_shutdown(service, incoming, stop.cancelled())
            .await;
        if let Err(error) = served {
            error!(%error, "the peer listener ended");
        }
    }

    /// Refuses a stream before a session was asked for.
    fn reject(&self, origin: &Origin, reason: Reason, status: Status) -> Status {
        self.metrics.refused(reason);
        warn!(remote = %origin.remote, reason = status.message(), "peer refused");
        status
    }
}

#[tonic::async_trait]
impl Replication for Acceptor {
    type ExchangeStream = Outgoing;

    async fn exchange(
        &self,
        request: Request<Streaming<wire::Frame>>,
    ) -> Result<Response<Outgoing>, Status> {
        let Some(origin) = request.extensions().get::<Origin>().cloned() else {
            return Err(Status::internal("the connection is unknown"));
        };
        let mut inbound = request.into_inner();
        let first = match timeout(HELLO_TIMEOUT, inbound.message()).await {
            Err(_) => {
                let status =
                    Status::deadline_exceeded(format!("no Hello within {HELLO_TIMEOUT:?}"));
                return Err(self.reject(&origin, Reason::NoHello, status));
            }
            Ok(Err(status)) => {
                let end = End::from(status);
                let reason = Reason::of(&end);
                let status = Status::invalid_argument(end.to_string());
                return Err(match reason {
                    Some(reason) => self.reject(&origin, reason, status),
                    None => status,
                });
            }
            Ok(Ok(first)) => first,
        };
        let frame = first.map(convert::decode).transpose().map_err(|malformed| {
            let status = Status::invalid_argument(malformed.to_string());
            self.reject(&origin, Reason::Malformed, status)
        })?;
        let (hello, stamp_ms) = match frame.map(|frame| (frame.body, frame.stamp_ms)) {
            Some((Body::Hello(hello), stamp_ms)) => (hello, stamp_ms),
            Some(_) | None => {
                let status = Status::invalid_argument("the first frame must be a Hello");
                return Err(self.reject(&origin, Reason::NoHello, status));
            }
        };
        let (outlet, outgoing) = session::channel(&self.room);
        let (answer, opening) = oneshot::channel();
        let (side, remote) = (Side::Accepted, origin.remote);
        let open = Open { side, remote, hello, stamp_ms, outlet, answer };
        let gone = |()| Status::unavailable("this replica has left");
        self.events.send(Event::Open(Box::new(open))).await.map_err(|_| gone(()))?;
        match opening.await.map_err(|_| gone(()))? {
            Ok(opening) => {
                origin.greeted();
                let reader = session::read(inbound, opening, self.events.clone());
                self.supervisor.spawn("peer session", OnExit::Ignore, reader);
                Ok(Response::new(outgoing))
            }
            Err(Denial::Partitioned) => Err(Status::unavailable("this replica is cut off")),
            Err(Denial::Refused { refusal, hello: None }) => Err(status(&refusal)),
            Err(Denial::Refused { refusal, hello: Some(hello) }) => {
                let (outlet, outgoing) = session::channel(&self.room);
                if let Room::Free(permit) = outlet.room() {
                    permit.send(*hello);
                }
                outlet.end(status(&refusal));
                Ok(Response::new(outgoing))
            }
        }
    }
}

/// How a refusal is said over gRPC.
fn status(refusal: &Refusal) -> Status {
    let text = refusal.to_string();
    match refusal {
        Refusal::Myself | Refusal::Duplicate => Status::already_exists(text),
        Refusal::Group { .. } | Refusal::Version { .. } => Status::failed_precondition(text),
        Refusal::TooMany => Status::resource_exhausted(text),
        Refusal::Leaving => Status::unavailable(text),
    }
}
