//! Starting, leaving, and surviving (LC).

use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use tidegate::runtime::Stage;

use crate::harness::{Connection, Reply, Setup, TestProxy, Upstream, eventually, limit, request};

fn finishes_within(proxy: &TestProxy, bound: Duration) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        tokio::time::timeout(bound, proxy.handle.finished()).await.expect("the proxy still runs");
    });
    assert_eq!(proxy.failure(), None);
}

#[test]
fn lc_g1_what_runs_may_finish() {
    let upstream = Upstream::scripted(|_| {
        std::thread::sleep(Duration::from_millis(400));
        Reply::Ok("ok")
    });
    let proxy = Setup::before(&upstream).workers(2).start();
    let mut connections: Vec<Connection> = (0..20).map(|_| proxy.connect()).collect();
    for connection in &mut connections {
        connection.send(request("GET", "/", &[], ""));
    }
    eventually("the requests", || upstream.count() == 20);
    proxy.drain(Stage::Closing);
    for connection in &mut connections {
        assert_eq!(connection.answer().status, 200);
    }
    finishes_within(&proxy, Duration::from_secs(1));
}

#[test]
fn lc_g2_a_leaving_proxy_says_so_and_then_closes() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    assert_eq!(connection.get("/").field("connection"), None);
    proxy.drain(Stage::Announcing);
    // New connections are still served, and told to go as well.
    eventually("the announcement", || {
        let got = proxy.connect().get("/");
        assert_eq!(got.status, 200);
        got.field("connection") == Some("close")
    });
    let got = connection.get("/");
    assert_eq!((got.status, got.field("connection")), (200, Some("close")));
    assert!(connection.is_ended());
}

#[test]
fn lc_g2_who_connected_in_the_last_moment_is_answered() {
    let upstream = Upstream::start();
    for round in 0..20 {
        let proxy = Setup::before(&upstream).workers(2).start();
        let mut connections: Vec<Connection> = (0..10).map(|_| proxy.connect()).collect();
        proxy.drain(Stage::Closing);
        for connection in &mut connections {
            assert!(connection.try_send(request("GET", "/", &[], "")), "round {round}");
        }
        for connection in &mut connections {
            assert_eq!(connection.answer().status, 200, "round {round}");
        }
        finishes_within(&proxy, Duration::from_secs(1));
    }
}

#[test]
fn lc_g3_idle_connections_close_at_once_and_slow_ones_do_not_hold_the_end_up() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let mut silent: Vec<Connection> = (0..20).map(|_| proxy.connect()).collect();
    let mut idle: Vec<Connection> = (0..20).map(|_| proxy.connect()).collect();
    for connection in &mut idle {
        assert_eq!(connection.get("/").status, 200);
    }
    let mut slow = proxy.connect();
    slow.send("GET / HT");
    eventually("the connections", || proxy.handle.connections() == 41);
    proxy.drain(Stage::Closing);
    for connection in silent.iter_mut().chain(&mut idle) {
        assert!(connection.is_ended());
    }
    eventually("the end of the idle", || proxy.handle.connections() <= 1);
    proxy.drain(Stage::Aborting);
    finishes_within(&proxy, Duration::from_secs(1));
    assert!(slow.is_ended());
    assert!(TcpStream::connect(proxy.address).is_err());
}

#[test]
fn lc_g3_a_websocket_ends_with_the_time_to_drain() {
    let upstream = Upstream::scripted(|_| {
        Reply::Take(Box::new(|mut io, _| {
            use std::io::{Read, Write};
            io.write_all(b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
                .unwrap();
            while io.read(&mut [0; 16]).is_ok_and(|count| count > 0) {}
        }))
    });
    let proxy = Setup::before(&upstream).start();
    let mut connection = proxy.connect();
    let fields = [("Connection", "upgrade"), ("Upgrade", "websocket")];
    assert_eq!(connection.get_with("/", &fields).status, 101);
    proxy.drain(Stage::Closing);
    connection.send("still here");
    assert_eq!(proxy.handle.connections(), 1);
    proxy.drain(Stage::Aborting);
    finishes_within(&proxy, Duration::from_secs(1));
    assert!(connection.is_ended());
}

#[test]
fn whatever_runs_when_the_time_is_up_ends() {
    let upstream = Upstream::scripted(|received| match received.line() {
        "GET /hang HTTP/1.1" => Reply::Silence,
        _ => Reply::Bytes(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello".to_vec()),
    });
    let proxy = Setup::before(&upstream).start();
    let mut connections: Vec<Connection> = (0..3).map(|_| proxy.connect()).collect();
    connections[0].send(request("GET", "/hang", &[], ""));
    connections[1].send(request("GET", "/half", &[], ""));
    connections[2].send("POST /upload HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nhello");
    eventually("the requests", || upstream.count() == 2 && upstream.connections() == 3);
    proxy.drain(Stage::Aborting);
    finishes_within(&proxy, Duration::from_secs(1));
    for connection in &mut connections {
        connection.rest();
    }
}

#[test]
fn lc_g5_the_upstream_may_come_later() {
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = held.local_addr().unwrap();
    drop(held);
    let proxy =
        Setup::before_url(&format!("http://{address}")).limit(limit("r", "1/h")).frozen().start();
    let mut connection = proxy.connect();
    assert_eq!(connection.get("/").status, 502);
    let upstream = Upstream::on(TcpListener::bind(address).unwrap(), |_| Reply::Ok("here"));
    assert_eq!(connection.get("/").text(), "here");
    assert_eq!(upstream.count(), 1);
}

#[test]
fn every_worker_serves_on_the_one_port() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).workers(3).limit(limit("r", "40/h")).frozen().start();
    let mut refused = 0;
    for _ in 0..50 {
        refused += usize::from(proxy.connect().get("/").status == 429);
    }
    assert_eq!((refused, upstream.count()), (10, 40));
    // With this many connections a worker without any would be a wonder.
    assert!(upstream.connections() > 1);
}

/// Set in the process that [`lc_g6_accepting_goes_on_after_it_failed`] starts.
const FEW_FILES: &str = "TIDEGATE_TEST_FEW_FILES";

#[test]
fn lc_g6_accepting_goes_on_after_it_failed() {
    if std::env::var_os(FEW_FILES).is_none() {
        // The bound on open files is the process's, so it needs one of its own.
        let test = "proxy_life::lc_g6_accepting_goes_on_after_it_failed";
        let shell = "ulimit -n 64; exec \"$0\" --exact \"$1\" --nocapture";
        let output = Command::new("sh")
            .args(["-c", shell])
            .arg(std::env::current_exe().unwrap())
            .arg(test)
            .env(FEW_FILES, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
        return;
    }
    let proxy = Setup::before_url("http://127.0.0.1:9").start();
    let mut connections = Vec::new();
    // Each of them takes a file on both sides, until none is left.
    while let Ok(io) = TcpStream::connect(proxy.address) {
        connections.push(io);
    }
    drop(connections.pop());
    eventually("a failure", || proxy.metric("tidegate_accept_errors_total") > 0.0);
    connections.clear();
    let started = Instant::now();
    assert_eq!(proxy.connect().get("/").status, 502);
    assert!(started.elapsed() < Duration::from_secs(2));
}
