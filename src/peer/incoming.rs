//! Incoming: connections from diallers, bounded in number and in patience.
//!
//! A connection that has no session after a few seconds is closed, so that
//! strangers who connect and say nothing cannot keep peers out. Errors of
//! `accept` (such as too many open files) pause the loop and never end it.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;
use futures_util::stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;
use tonic::transport::server::Connected;
use tracing::{debug, warn};

use super::metrics::{Metrics, Reason};
use crate::tls::{self, Accepted};

/// Connections at most; one more is closed at once.
const MAX_CONNECTIONS: usize = 1_024;
/// How long a connection may be without ever having had a session.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause after an error of `accept`.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where a stream comes from.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    /// The other end of the connection. Never an identity.
    pub(super) remote: SocketAddr,
    greeted: Arc<AtomicBool>,
}

impl Origin {
    /// The connection has a session: it may stay.
    pub(super) fn greeted(&self) {
        self.greeted.store(true, Ordering::Relaxed);
    }
}

/// The connections that arrive at `listener`, without end.
pub(super) fn connections(
    listener: TcpListener,
    tls: Option<Arc<tls::Peers>>,
    metrics: Metrics,
) -> impl Stream<Item = io::Result<Connection>> {
    bounded(listener, tls, metrics, MAX_CONNECTIONS)
}

fn bounded(
    listener: TcpListener,
    tls: Option<Arc<tls::Peers>>,
    metrics: Metrics,
    most: usize,
) -> impl Stream<Item = io::Result<Connection>> {
    let places = Arc::new(Semaphore::new(most));
    stream::unfold((listener, places, tls, metrics), async |(listener, places, tls, metrics)| {
        let connection = loop {
            let (stream, remote) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    warn!(%error, "cannot accept a peer's connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                metrics.refused(Reason::TooMany);
                debug!(%remote, "too many connections");
                continue;
            };
            if let Err(error) = stream.set_nodelay(true) {
                debug!(%remote, %error, "the connection is already gone");
                continue;
            }
            let socket = match &tls {
                None => Accepted::plain(stream),
                // As the files say now.
                Some(tls) => {
                    let metrics = metrics.clone();
                    Accepted::greeting(stream, tls.server(), move |greeted| {
                        if let Err(error) = greeted {
                            metrics.refused(Reason::Tls);
                            warn!(%remote, reason = %error, "no TLS with a peer");
                        }
                    })
                }
            };
            break Connection::new(socket, remote, place);
        };
        Some((Ok(connection), (listener, places, tls, metrics)))
    })
}

/// A dialler's connection.
pub(super) struct Connection {
    socket: Accepted,
    origin: Origin,
    /// Until a session was opened.
    patience: Option<Pin<Box<Sleep>>>,
    _place: OwnedSemaphorePermit,
}

impl Connection {
    fn new(socket: Accepted, remote: SocketAddr, place: OwnedSemaphorePermit) -> Self {
        let origin = Origin { remote, greeted: Arc::new(AtomicBool::new(false)) };
        let patience = Some(Box::pin(tokio::time::sleep(PATIENCE)));
        Self { socket, origin, patience, _place: place }
    }
}

impl Connected for Connection {
    type ConnectInfo = Origin;

    fn connect_info(&self) -> Origin {
        self.origin.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(patience) = &mut self.patience {
            let over = patience.as_mut().poll(cx).is_ready();
            if self.origin.greeted.load(Ordering::Relaxed) {
                self.patience = None;
            } else if over {
                let error = io::Error::new(io::ErrorKind::TimedOut, "no session in time");
                return Poll::Ready(Err(error));
            }
        }
        Pin::new(&mut self.socket).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::StreamExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    async fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    // Paused time moves on by itself when nothing else is to be done.
    #[tokio::test(start_paused = true)]
    async fn a_connection_without_a_session_ends_and_one_with_a_session_stays() {
        let (listener, address) = listener().await;
        let mut incoming = pin!(connections(listener, None, Metrics::default()));
        let _silent = TcpStream::connect(address).await.unwrap();
        let mut connection = incoming.next().await.unwrap().unwrap();
        let error = connection.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);

        let mut peer = TcpStream::connect(address).await.unwrap();
        let mut connection = incoming.next().await.unwrap().unwrap();
        connection.connect_info().greeted();
        tokio::time::sleep(PATIENCE * 2).await;
        peer.write_u8(7).await.unwrap();
        assert_eq!(connection.read_u8().await.unwrap(), 7);
    }

    #[tokio::test]
    async fn a_connection_that_ends_makes_place_for_another() {
        let (listener, address) = listener().await;
        let metrics = Metrics::default();
        let mut incoming = pin!(bounded(listener, None, metrics, 1));
        let _first = TcpStream::connect(address).await.unwrap();
        let held = incoming.next().await.unwrap().unwrap();
        // Closed at once, while the acceptor waits for one that it may take.
        let mut second = TcpStream::connect(address).await.unwrap();
        tokio::select! {
            _ = incoming.next() => panic!("there was no place"),
            read = second.read_u8() => assert!(read.is_err()),
        }
        drop(held);
        let _third = TcpStream::connect(address).await.unwrap();
        incoming.next().await.unwrap().unwrap();
    }
}
