//! Dialer: the side that connects.
//!
//! One dial is one task: it connects, says Hello, waits for the peer's Hello,
//! asks the mesh for a session and then reads the stream until it ends. Whatever
//! happens before the peer's Hello is reported as a failed dial, once.

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_stream::StreamExt as _;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status, Streaming};
use tower::{Service, service_fn};
use tracing::{debug, warn};

use super::convert;
use super::session::{
    self, CONNECTION_WINDOW, Event, HELLO_TIMEOUT, MAX_MESSAGE_BYTES, Open, Outlet, PING_INTERVAL,
    PING_TIMEOUT, Room, STREAM_WINDOW,
};
use crate::replication::{Body, DialFailure, Frame, Hello, Side};
use crate::time::Clock;
use crate::tls;
use crate::wire::tidegate::peer::v1 as wire;
use crate::wire::tidegate::peer::v1::replication_client::ReplicationClient;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// One attempt to reach the replica at an address.
#[derive(Debug)]
pub(super) struct Dial {
    pub(super) address: SocketAddr,
    /// What this replica says first.
    pub(super) greeting: Frame,
    pub(super) clock: Clock,
    pub(super) room: Arc<Notify>,
    pub(super) events: mpsc::Sender<Event>,
    pub(super) tls: Option<Arc<tls::Peers>>,
    /// Cancelled when the mesh ends.
    pub(super) stop: CancellationToken,
}

/// A connection with or without TLS.
type Io = TokioIo<Either<TcpStream, TlsStream<TcpStream>>>;

/// A peer that answered with its Hello.
struct Answered {
    /// Keeps the connection.
    client: ReplicationClient<Channel>,
    inbound: Streaming<wire::Frame>,
    outlet: Outlet,
    hello: Hello,
    stamp_ms: u64,
}

/// Why a dial did not lead to a Hello.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("cannot connect: {0}")]
    Connect(#[source] tonic::transport::Error),
    #[error("no Hello within {HELLO_TIMEOUT:?}")]
    Silent,
    #[error("the peer refuses: {0}")]
    Refused(Status),
    #[error("{0}")]
    Protocol(String),
}

impl Failure {
    /// What it says about whoever lives at the address.
    fn kind(&self) -> DialFailure {
        match self {
            Self::Connect(error) if is_refused(error) => DialFailure::Refused,
            Self::Connect(_) | Self::Silent | Self::Refused(_) | Self::Protocol(_) => {
                DialFailure::Other
            }
        }
    }

    fn log(&self, address: SocketAddr) {
        match self {
            // Two products, or two versions, under one name: somebody must act.
            Self::Refused(status) if status.code() == Code::FailedPrecondition => {
                warn!(%address, reason = status.message(), "peer refuses this replica");
            }
            // A certificate that is missing, over, or of somebody else.
            Self::Connect(error) if let Some(fault) = tls_fault(error) => {
                warn!(%address, reason = %fault, "no TLS with a peer");
            }
            Self::Connect(_) | Self::Silent | Self::Refused(_) | Self::Protocol(_) => {
                debug!(%address, reason = %self, "dial failed");
            }
        }
    }
}

/// Whether nobody listens at the address, as opposed to no answer.
fn is_refused(error: &(dyn Error + 'static)) -> bool {
    let is_io = error.downcast_ref::<io::Error>();
    is_io.is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        || error.source().is_some_and(is_refused)
}

/// What TLS found wrong, if it was that.
fn tls_fault<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    error
        .downcast_ref::<rustls::Error>()
        .or_else(|| tls_fault(error.downcast_ref::<io::Error>()?.get_ref()?))
        .or_else(|| error.source().and_then(tls_fault))
}

impl Dial {
    /// Dials, and serves the session that comes of it until it ends.
    pub(super) async fn run(mut self) {
        let stop = self.stop.clone();
        let Some(answered) = stop.run_until_cancelled(self.greet()).await else { return };
        let answered = match answered {
            Ok(answered) => answered,
            Err(failure) => {
                failure.log(self.address);
                let event = Event::DialFailed(self.address, failure.kind());
                // Nobody listens any more once the mesh has ended.
                let _ = self.events.send(event).await;
                return;
            }
        };
        let Answered { client, inbound, outlet, hello, stamp_ms } = answered;
        let side = Side::Dialled(self.address);
        let (answer, opening) = oneshot::channel();
        let remote = self.address;
        let open = Open { side, remote, hello, stamp_ms, outlet, answer };
        if self.events.send(Event::Open(Box::new(open))).await.is_err() {
            return;
        }
        if let Ok(Ok(opening)) = opening.await {
            session::read(inbound, opening, self.events).await;
        }
        drop(client);
    }

    /// Connects to the address, whatever tonic says; over TLS as the files say now.
    fn connector(
        &self,
    ) -> impl Service<Uri, Response = Io, Error = io::Error, Future: Send> + use<> {
        let address = self.address;
        let tls = self.tls.as_ref().map(|tls| TlsConnector::from(tls.client()));
        service_fn(move |_: Uri| {
            let tls = tls.clone();
            async move {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                let stream = match tls {
                    None => Either::Left(stream),
                    // Who answers is known by its certificate, not by its address.
                    Some(tls) => Either::Right(tls.connect(address.ip().into(), stream).await?),
                };
                Ok(TokioIo::new(stream))
            }
        })
    }

    async fn greet(&mut self) -> Result<Answered, Failure> {
        let channel = Endpoint::from_shared(format!("http://{}", self.address))
            .map_err(Failure::Connect)?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .connect_with_connector(self.connector())
            .await
            .map_err(Failure::Connect)?;
        let mut client = ReplicationClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        timeout(HELLO_TIMEOUT, async {
            let (outlet, outgoing) = session::channel(&self.room);
            // Connecting took its time, which is no part of the round trip.
            self.greeting.stamp_ms = self.clock.now().as_millis();
            if let Room::Free(permit) = outlet.room() {
                permit.send(self.greeting.clone());
            }
            let outgoing = outgoing.map_while(Result::ok);
            let answer = client.exchange(outgoing).await.map_err(Failure::Refused)?;
            let mut inbound = answer.into_inner();
            let first = inbound.message().await.map_err(Failure::Refused)?;
            let first = first.ok_or_else(|| Failure::Protocol("closed without a Hello".into()))?;
            let frame = convert::decode(first).map_err(|e| Failure::Protocol(e.to_string()))?;
            let stamp_ms = frame.stamp_ms;
            let Body::Hello(hello) = frame.body else {
                return Err(Failure::Protocol("the first frame is not a Hello".into()));
            };
            Ok(Answered { client, inbound, outlet, hello, stamp_ms })
        })
        .await
        .unwrap_or(Err(Failure::Silent))
    }
}
