//! A connection that was accepted, with or without TLS.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tokio_rustls::{Accept, TlsAcceptor};
use tokio_util::either::Either;

/// A connection whose handshake, if it is one of TLS, is part of its first read or
/// write, so that no listener waits for it.
pub struct Accepted {
    state: State,
    told: Option<Told>,
}

/// Hears once how the handshake ended: whether the client showed a certificate, which
/// was accepted then, or why there is no TLS.
type Told = Box<dyn FnOnce(Result<bool, &io::Error>) + Send>;

enum State {
    Greeting(Box<Accept<TcpStream>>),
    Open(Either<TcpStream, Box<TlsStream<TcpStream>>>),
    Failed,
}

impl Accepted {
    /// Without TLS.
    pub const fn plain(stream: TcpStream) -> Self {
        Self { state: State::Open(Either::Left(stream)), told: None }
    }

    /// With TLS. `told` hears once how the handshake ended: whether the client showed a
    /// certificate, which was accepted then, or why there is no TLS.
    pub fn greeting(
        stream: TcpStream,
        config: Arc<ServerConfig>,
        told: impl FnOnce(Result<bool, &io::Error>) + Send + 'static,
    ) -> Self {
        let accept = Box::new(TlsAcceptor::from(config).accept(stream));
        Self { state: State::Greeting(accept), told: Some(Box::new(told)) }
    }

    fn poll_stream(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<Pin<&mut (impl AsyncRead + AsyncWrite + use<>)>>> {
        if let State::Greeting(accept) = &mut self.state {
            let greeted = ready!(Pin::new(accept.as_mut()).poll(cx));
            let told = self.told.take();
            match greeted {
                Ok(stream) => {
                    let shown = stream.get_ref().1.peer_certificates().is_some();
                    told.into_iter().for_each(|told| told(Ok(shown)));
                    self.state = State::Open(Either::Right(Box::new(stream)));
                }
                Err(error) => {
                    told.into_iter().for_each(|told| told(Err(&error)));
                    self.state = State::Failed;
                    return Poll::Ready(Err(error));
                }
            }
        }
        Poll::Ready(match &mut self.state {
            State::Open(stream) => Ok(Pin::new(stream)),
            State::Greeting(_) | State::Failed => Err(io::ErrorKind::NotConnected.into()),
        })
    }
}

impl fmt::Debug for Accepted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accepted").finish_non_exhaustive()
    }
}

impl AsyncRead for Accepted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_stream(cx))?.poll_read(cx, buf)
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_stream(cx))?.poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_stream(cx))?.poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.state {
            State::Open(stream) => stream.is_write_vectored(),
            State::Greeting(_) | State::Failed => false,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_stream(cx))?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_stream(cx))?.poll_shutdown(cx)
    }
}
