//! The demo's load: a steady stream of requests over keep-alive connections.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::runtime::{OnExit, Supervisor};

/// Connections to each replica; a slow answer does not hold up the others.
const CONNECTIONS: u32 = 4;
/// How long after a failure a connection is tried again.
const RETRY: Duration = Duration::from_millis(200);

/// A running load; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Load(#[allow(dead_code, reason = "ends the load when dropped")] DropGuard);

impl Load {
    /// Offers `per_second` requests, evenly to all `proxies`.
    pub(super) fn start(proxies: &[SocketAddr], per_second: f64, supervisor: &Supervisor) -> Self {
        let end = CancellationToken::new();
        let each = per_second / (proxies.len() as f64 * f64::from(CONNECTIONS));
        for proxy in proxies.iter().copied() {
            for _ in 0..CONNECTIONS {
                let (end, tasks) = (end.clone(), supervisor.clone());
                supervisor.spawn("load", OnExit::Ignore, async move {
                    tokio::select! {
                        () = end.cancelled() => {}
                        () = offer(proxy, each, tasks) => {}
                    }
                });
            }
        }
        Self(end.drop_guard())
    }
}

/// Sends over one connection for ever, and connects again when it breaks.
async fn offer(proxy: SocketAddr, per_second: f64, tasks: Supervisor) {
    let mut ticks = interval(Duration::from_secs_f64(1.0 / per_second));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    loop {
        // Whatever breaks, the next connection may do better.
        if let Ok(stream) = TcpStream::connect(proxy).await {
            let _ = stream.set_nodelay(true);
            if let Ok((mut sender, connection)) = http1::handshake(TokioIo::new(stream)).await {
                tasks.spawn("load connection", OnExit::Ignore, async move {
                    let _ = connection.await;
                });
                loop {
                    ticks.tick().await;
                    let mut request = Request::new(Empty::<Bytes>::new());
                    let host = header::HeaderValue::from_static("demo");
                    request.headers_mut().insert(header::HOST, host);
                    let Ok(answer) = sender.send_request(request).await else { break };
                    if answer.into_body().collect().await.is_err() || sender.ready().await.is_err()
                    {
                        break;
                    }
                }
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}
