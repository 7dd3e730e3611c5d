//! The telemetry listener over real sockets.

use std::future::Future;
use std::pin::Pin;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::runtime::DrainControl;

/// Longer than any of these tests may take, also by a paused clock.
const PATIENCE: Duration = Duration::from_secs(60);

fn pages() -> Pages {
    let status = || Status {
        replica: "pod-<1>".to_owned(),
        version: "1.2.3".to_owned(),
        uptime: Duration::from_millis(61_500),
        limits: 3,
        peers: vec![("connected", 2), ("dead", 1)],
    };
    Pages {
        readiness: Readiness::new(),
        metrics: Arc::new(Metrics::new()),
        status: Arc::new(status),
    }
}

/// Runs a server beside `test`, which gets its address and the drain's control.
async fn with_server<F, T>(pages: Pages, test: F)
where
    F: FnOnce(SocketAddr, Arc<DrainControl>) -> T,
    T: Future<Output = ()>,
{
    let (server, address) = HttpServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let (control, drain) = DrainControl::new();
    let control = Arc::new(control);
    let test = test(address, Arc::clone(&control));
    // Boxed as a supervised task is: it must be `Send`.
    let served: Pin<Box<dyn Future<Output = io::Result<()>> + Send>> =
        Box::pin(server.run(pages, drain));
    let (served, ()) = tokio::join!(served, async {
        tokio::time::timeout(PATIENCE, test).await.expect("the test hangs");
        // The server ends when the last of these is dropped.
        drop(control);
    });
    served.unwrap();
}

/// Sends `request` and reads until the server closes.
async fn exchange(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}

async fn get(address: SocketAddr, path: &str) -> String {
    exchange(address, &format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await
}

fn assert_status(response: &str, status: u16) {
    assert!(response.starts_with(&format!("HTTP/1.1 {status} ")), "{response}");
}

#[tokio::test]
async fn readiness_names_the_gates_that_are_shut() {
    let pages = pages();
    let (join, listeners) = (pages.readiness.gate("join"), pages.readiness.gate("listeners"));
    with_server(pages, |address, _control| async move {
        let response = get(address, "/readyz").await;
        assert_status(&response, 503);
        assert!(response.ends_with("\r\n\r\njoin\nlisteners\n"), "{response}");
        assert_status(&get(address, "/livez").await, 200);
        listeners.open();
        assert!(get(address, "/readyz").await.ends_with("\r\n\r\njoin\n"));
        join.open();
        let response = get(address, "/readyz?verbose").await;
        assert_status(&response, 200);
        assert!(response.ends_with("\r\n\r\nready\n"), "{response}");
    })
    .await;
}

#[tokio::test]
async fn lc_g4_a_draining_process_is_alive_and_not_ready_to_the_end() {
    let pages = pages();
    let readiness = pages.readiness.clone();
    with_server(pages, |address, control| async move {
        assert_status(&get(address, "/readyz").await, 200);
        let _shut = readiness.gate("draining");
        for stage in [Stage::Announcing, Stage::Closing] {
            control.advance(stage);
            assert_status(&get(address, "/livez").await, 200);
            let response = get(address, "/readyz").await;
            assert_status(&response, 503);
            assert!(response.ends_with("\r\n\r\ndraining\n"), "{response}");
        }
    })
    .await;
}

#[tokio::test]
async fn metrics_come_in_the_format_that_is_asked_for() {
    with_server(pages(), |address, _control| async move {
        let response = get(address, "/metrics").await;
        assert_status(&response, 200);
        assert!(response.contains("content-type: text/plain; version=0.0.4; charset=utf-8\r\n"));
        assert!(response.contains("\ntidegate_build_info{version="), "{response}");
        let response = exchange(
            address,
            "GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n\r\n",
        )
        .await;
        assert!(response.contains("content-type: application/openmetrics-text; version=1.0.0"));
        assert!(response.ends_with("# EOF\n"), "{response}");
    })
    .await;
}

#[tokio::test]
async fn the_status_page_shows_the_snapshot_escaped() {
    with_server(pages(), |address, _control| async move {
        let response = get(address, "/").await;
        assert_status(&response, 200);
        assert!(response.contains("content-type: text/html; charset=utf-8\r\n"));
        for cell in ["pod-&lt;1&gt;", "1.2.3", "1m 1s", "yes", "3", "2 connected, 1 dead"] {
            assert!(response.contains(&format!("<td>{cell}</td>")), "{cell} in {response}");
        }
    })
    .await;
}

#[tokio::test]
async fn other_paths_and_methods_are_refused() {
    with_server(pages(), |address, _control| async move {
        assert_status(&get(address, "/nothing").await, 404);
        let response = exchange(
            address,
            "POST /livez HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi",
        )
        .await;
        assert_status(&response, 405);
        assert!(response.contains("allow: GET, HEAD\r\n"), "{response}");
        assert_status(&exchange(address, "garbage\r\n\r\n").await, 400);
        let response =
            exchange(address, "HEAD /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
        assert_status(&response, 200);
        assert!(response.contains("content-length: 3\r\n"), "{response}");
        assert!(response.ends_with("\r\n\r\n"), "no body: {response}");
    })
    .await;
}

#[tokio::test]
async fn the_oldest_connection_goes_when_all_places_are_taken() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let pages = pages();
    let test = async {
        let mut oldest = TcpStream::connect(address).await.unwrap();
        let mut newer = TcpStream::connect(address).await.unwrap();
        assert_status(&get(address, "/livez").await, 200);
        assert_eq!(oldest.read(&mut [0; 1]).await.unwrap_or(0), 0, "closed for the probe");
        newer
            .write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut response = String::new();
        newer.read_to_string(&mut response).await.unwrap();
        assert_status(&response, 200);
    };
    tokio::select! {
        () = serve(&listener, &pages, 2) => {}
        () = test => {}
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_or_idle_connection_is_closed_after_the_header_timeout() {
    with_server(pages(), |address, _control| async move {
        let mut silent = TcpStream::connect(address).await.unwrap();
        let mut idle = TcpStream::connect(address).await.unwrap();
        idle.write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut response = String::new();
        idle.read_to_string(&mut response).await.unwrap();
        assert_status(&response, 200);
        assert_eq!(silent.read(&mut [0; 1]).await.unwrap_or(0), 0);
    })
    .await;
}

#[tokio::test]
async fn lc_g3_an_open_connection_does_not_hold_the_end() {
    let mut open = None;
    let slot = &mut open;
    with_server(pages(), |address, control| async move {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\nGET /li").await.unwrap();
        let mut first = [0; 16];
        stream.read_exact(&mut first).await.unwrap();
        *slot = Some(stream);
        control.advance(Stage::Aborting);
    })
    .await;
    let mut rest = Vec::new();
    // A reset is as good an end as a clean one.
    let _ = open.unwrap().read_to_end(&mut rest).await;
    assert!(String::from_utf8(rest).unwrap().ends_with("ok\n"));
}

#[test]
fn only_errors_of_one_connection_are_passed_over_at_once() {
    assert!(concerns_one_connection(&io::ErrorKind::ConnectionAborted.into()));
    assert!(!concerns_one_connection(&io::Error::from_raw_os_error(24)));
}
