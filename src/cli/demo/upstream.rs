//! The demo's upstream: answers, and counts what it got through each replica.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http::{Request, Response, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

use crate::runtime::{ListenAddr, OnExit, Supervisor};

/// One listener for each replica, so that the upstream itself knows through
/// which of them a request came.
#[derive(Debug)]
pub(super) struct Upstream {
    doors: Vec<(SocketAddr, Arc<AtomicU64>)>,
}

impl Upstream {
    pub(super) fn start(replicas: usize, supervisor: &Supervisor) -> std::io::Result<Self> {
        let mut doors = Vec::new();
        for index in 0..replicas {
            let any = ListenAddr::from(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
            let listener = TcpListener::from_std(any.bind(false)?)?;
            let count = Arc::new(AtomicU64::new(0));
            doors.push((listener.local_addr()?, Arc::clone(&count)));
            let tasks = supervisor.clone();
            supervisor.spawn(format!("upstream {}", index + 1), OnExit::Fail, async move {
                // A failed accept (no more files) ends the demo, which says so.
                while let Ok((stream, _)) = listener.accept().await {
                    let count = Arc::clone(&count);
                    let service = service_fn(move |request| answer(request, Arc::clone(&count)));
                    let connection = http1::Builder::new()
                        .timer(TokioTimer::new())
                        .serve_connection(TokioIo::new(stream), service);
                    tasks.spawn("upstream connection", OnExit::Ignore, async move {
                        // The proxy may end a connection at any time.
                        let _ = connection.await;
                    });
                }
            });
        }
        Ok(Self { doors })
    }

    /// Where requests through the replica of this index go.
    pub(super) fn address(&self, index: usize) -> SocketAddr {
        self.doors[index].0
    }

    /// Requests so far, by replica.
    pub(super) fn counts(&self) -> Vec<u64> {
        self.doors.iter().map(|(_, count)| count.load(Ordering::Relaxed)).collect()
    }
}

async fn answer(
    request: Request<Incoming>,
    count: Arc<AtomicU64>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let number = count.fetch_add(1, Ordering::Relaxed) + 1;
    let text = format!("{} {} is request {number}\n", request.method(), request.uri().path());
    let mut response = Response::new(Full::from(text));
    let plain = header::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    Ok(response)
}
