//! The telemetry listener: probes, metrics and a status page over HTTP/1.1.
//!
//! Invariants:
//! - it answers from the moment it runs until the process aborts, also while the
//!   process drains, and its end waits for nobody;
//! - liveness depends on nothing but this loop, readiness on the gates alone;
//! - nobody can keep a probe out: with all places taken, the oldest connection
//!   goes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{AbortHandle, Abortable};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use http::header::{ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tracing::{debug, warn};

use crate::runtime::{Drain, ListenAddr, Readiness, Stage};
use crate::telemetry::{Format, Metrics};

/// Connections at the same time. Prometheus, the kubelet and a few people need
/// less than ten.
const MAX_CONNECTIONS: usize = 256;

/// How long the head of a request may take, and so how long a connection may
/// idle.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait after `accept` failed for want of files or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

const PLAIN: &str = "text/plain; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";

/// What the pages are made from.
#[derive(Clone)]
pub struct Pages {
    /// The gates of `/readyz`.
    pub readiness: Readiness,
    /// What `/metrics` gives.
    pub metrics: Arc<Metrics>,
    /// Takes the snapshot for `/`.
    pub status: Arc<dyn Fn() -> Status + Send + Sync>,
}

/// What the status page shows. It holds no key's value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// How this replica calls itself.
    pub replica: String,
    /// The program's version.
    pub version: String,
    /// Time since the start.
    pub uptime: Duration,
    /// How many limits are configured.
    pub limits: usize,
    /// How many peers there are in each state.
    pub peers: Vec<(&'static str, usize)>,
}

/// The listener, bound but not yet answering.
#[derive(Debug)]
pub struct HttpServer {
    listener: std::net::TcpListener,
}

impl HttpServer {
    /// Binds the socket and returns the address that it got.
    ///
    /// # Errors
    /// If it cannot be bound; the text names the address.
    pub fn bind(listen: ListenAddr) -> io::Result<(Self, SocketAddr)> {
        let listener = listen.bind(false)?;
        let address = listener.local_addr()?;
        Ok((Self { listener }, address))
    }

    /// Answers until the process aborts.
    ///
    /// # Errors
    /// If the socket cannot be used on this runtime. A failed `accept` is no
    /// error: it is logged and tried again.
    pub async fn run(self, pages: Pages, drain: Drain) -> io::Result<()> {
        let listener = TcpListener::from_std(self.listener)?;
        tokio::select! {
            () = drain.reached(Stage::Aborting) => {}
            () = serve(&listener, &pages, MAX_CONNECTIONS) => {}
        }
        Ok(())
    }
}

/// Accepts and serves for ever. The connections are part of this future, so that
/// dropping it ends them all.
async fn serve(listener: &TcpListener, pages: &Pages, max_connections: usize) {
    let mut connections = FuturesUnordered::new();
    let mut oldest_first: VecDeque<(u64, AbortHandle)> = VecDeque::new();
    let mut next_id = 0_u64;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(ended) = connections.next() => {
                oldest_first.retain(|(id, _)| *id != ended);
                continue;
            }
        };
        match accepted {
            Ok((stream, _)) => {
                if oldest_first.len() >= max_connections
                    && let Some((_, oldest)) = oldest_first.pop_front()
                {
                    oldest.abort();
                }
                let (handle, registration) = AbortHandle::new_pair();
                let id = next_id;
                next_id = next_id.wrapping_add(1);
                oldest_first.push_back((id, handle));
                let pages = pages.clone();
                connections.push(async move {
                    // Aborted or not, it has ended.
                    let _ = Abortable::new(connection(stream, pages), registration).await;
                    id
                });
            }
            Err(error) if concerns_one_connection(&error) => debug!(%error, "accept"),
            Err(error) => {
                warn!(%error, "the telemetry listener cannot accept; trying again");
                // Those that are connected go on, and free what is missing.
                let pause = tokio::time::sleep(ACCEPT_BACKOFF);
                tokio::pin!(pause);
                loop {
                    tokio::select! {
                        () = &mut pause => break,
                        Some(ended) = connections.next() => {
                            oldest_first.retain(|(id, _)| *id != ended);
                        }
                    }
                }
            }
        }
    }
}

/// Whether the error is about the connection that was to be accepted, so that the
/// next one may be accepted at once.
fn concerns_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}

async fn connection(stream: TcpStream, pages: Pages) {
    let service = service_fn(|request: Request<Incoming>| {
        let response = answer(&request, &pages);
        async move { Ok::<_, Infallible>(response) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(16 * 1024)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        debug!(%error, "telemetry connection");
    }
}

/// The answer to a request; its body is not read.
fn answer<B>(request: &Request<B>, pages: &Pages) -> Response<Full<Bytes>> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response = page(StatusCode::METHOD_NOT_ALLOWED, PLAIN, "GET and HEAD only\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    match request.uri().path() {
        "/livez" => page(StatusCode::OK, PLAIN, "ok\n"),
        "/readyz" => ready(&pages.readiness.waiting_for()),
        "/metrics" => {
            let accept = request.headers().get(ACCEPT).and_then(|value| value.to_str().ok());
            metrics(&pages.metrics, Format::negotiate(accept))
        }
        "/" => {
            let status = (pages.status)();
            page(StatusCode::OK, HTML, status.to_html(&pages.readiness.waiting_for()))
        }
        _ => page(StatusCode::NOT_FOUND, PLAIN, "/livez, /readyz, /metrics and / are here\n"),
    }
}

fn ready(waiting_for: &[&str]) -> Response<Full<Bytes>> {
    if waiting_for.is_empty() {
        return page(StatusCode::OK, PLAIN, "ready\n");
    }
    let mut body = waiting_for.join("\n");
    body.push('\n');
    page(StatusCode::SERVICE_UNAVAILABLE, PLAIN, body)
}

fn metrics(metrics: &Metrics, format: Format) -> Response<Full<Bytes>> {
    match metrics.encode(format) {
        Ok(text) => page(StatusCode::OK, format.content_type(), text),
        Err(error) => {
            warn!(%error, "the metrics cannot be written");
            page(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, "the metrics cannot be written\n")
        }
    }
}

fn page(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

impl Status {
    fn to_html(&self, waiting_for: &[&str]) -> String {
        let ready = if waiting_for.is_empty() {
            "yes".to_owned()
        } else {
            format!("no, waiting for {}", waiting_for.join(", "))
        };
        let mut peers: Vec<String> =
            self.peers.iter().map(|(state, count)| format!("{count} {state}")).collect();
        if peers.is_empty() {
            peers.push("none".to_owned());
        }
        let uptime = humantime::format_duration(Duration::from_secs(self.uptime.as_secs()));
        let mut html = String::from(
            "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>tidegate</title>\n\
             <h1>tidegate</h1>\n<table>\n",
        );
        for (name, value) in [
            ("replica", self.replica.clone()),
            ("version", self.version.clone()),
            ("uptime", uptime.to_string()),
            ("ready", ready),
            ("limits", self.limits.to_string()),
            ("peers", peers.join(", ")),
        ] {
            // Writing to a string cannot fail.
            let _ = writeln!(
                html,
                "<tr><th align=\"left\">{name}</th><td>{}</td></tr>",
                escape(&value)
            );
        }
        html.push_str("</table>\n<p><a href=\"/readyz\">readyz</a> <a href=\"/metrics\">metrics</a></p>\n</html>\n");
        html
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests;
