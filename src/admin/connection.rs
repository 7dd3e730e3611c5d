//! The connections of the admin listener: how many there may be, how long one
//! may take to say that it speaks HTTP/2, and that all end when the process does.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use futures_util::stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;
use tracing::{debug, warn};

use crate::tls::{self, Accepted};

/// The bytes of HTTP/2's client preface (RFC 9113, section 3.4).
const PREFACE_BYTES: usize = 24;

/// How long to wait after `accept` failed, most likely for want of files.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// Whose call it is, as far as the connection tells.
#[derive(Clone, Debug)]
pub(super) struct Caller(Arc<AtomicBool>);

impl Caller {
    /// Whether it showed a certificate that was accepted.
    pub(super) fn has_certificate(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// The connections that `listener` accepts, over TLS if there is `tls`: at most `most` at
/// a time, each ended unless its preface has come after `preface`, and all when `end` is
/// cancelled.
pub(super) fn accept(
    listener: TcpListener,
    tls: Option<Arc<tls::Server>>,
    most: usize,
    preface: Duration,
    end: CancellationToken,
) -> impl Stream<Item = io::Result<Connection>> {
    let places = Arc::new(Semaphore::new(most));
    stream::unfold((listener, tls, places, end), move |(listener, tls, places, end)| async move {
        // The semaphore is never closed; if it were, nobody would be let in.
        let place = Arc::clone(&places).acquire_owned().await.ok()?;
        let (stream, remote) = loop {
            match listener.accept().await {
                Ok(accepted) => break accepted,
                Err(error) => {
                    warn!(%error, "the admin listener cannot accept; trying again");
                    tokio::time::sleep(ACCEPT_BACKOFF).await;
                }
            }
        };
        // Without it small answers wait for acknowledgements; no reason to refuse.
        let _ = stream.set_nodelay(true);
        let ended = end.clone();
        let caller = Caller(Arc::default());
        let stream = match &tls {
            None => Accepted::plain(stream),
            // As the files say now.
            Some(tls) => {
                let shown = Arc::clone(&caller.0);
                Accepted::greeting(stream, tls.config(), move |greeted| match greeted {
                    Ok(certificate) => shown.store(certificate, Ordering::Release),
                    Err(error) => debug!(%remote, reason = %error, "no TLS with an operator"),
                })
            }
        };
        let connection = Connection {
            stream,
            caller,
            preface: Some(Box::pin(tokio::time::sleep(preface))),
            missing: PREFACE_BYTES,
            ended: Box::pin(ended.cancelled_owned()),
            _place: place,
        };
        Some((Ok(connection), (listener, tls, places, end)))
    })
}

/// One accepted connection.
pub(super) struct Connection {
    stream: Accepted,
    caller: Caller,
    /// Runs until the preface has come.
    preface: Option<Pin<Box<tokio::time::Sleep>>>,
    /// Bytes of the preface still to come.
    missing: usize,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
    _place: OwnedSemaphorePermit,
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.ended.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        if let Some(preface) = &mut self.preface
            && preface.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let read = buffer.filled().len().saturating_sub(before);
        self.missing = self.missing.saturating_sub(read);
        if self.missing == 0 {
            self.preface = None;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
