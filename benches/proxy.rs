//! What a proxied request costs of the CPU, beside other proxies that do the same:
//! `cargo bench --bench proxy`, or with the proxies alone on one CPU
//! `taskset -c 0 cargo bench --bench proxy -- --cpu 1`.
//!
//! Each proxy forwards to an upstream of 1 KiB answers and has one limit for each value of
//! a header, which is never reached, and in a second process always. It is asked over
//! connections that each send the next request when the answer has come. What is compared
//! is the CPU time of the proxy for each request, within rounds in which all take their
//! turn: the machine's other work then meets all of them. nginx and HAProxy take part if
//! they are in PATH, and other builds with `--also NAME=PATH`.

#![allow(
    clippy::print_stdout,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a measurement tells its numbers, takes time and needs a thread"
)]

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const WARM: Duration = Duration::from_millis(300);
const PAUSE: Duration = Duration::from_millis(100);
/// Values of the header.
const KEYS: usize = 100;

struct Options {
    cpu: Option<String>,
    connections: usize,
    seconds: f64,
    rounds: usize,
    also: Vec<(String, String)>,
}

impl Options {
    fn read() -> Self {
        let mut options =
            Self { cpu: None, connections: 64, seconds: 1.0, rounds: 7, also: Vec::new() };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().expect("a value behind each option");
            match word.as_str() {
                "--cpu" => options.cpu = Some(value()),
                "--connections" => options.connections = value().parse().expect("a number"),
                "--seconds" => options.seconds = value().parse().expect("a number"),
                "--rounds" => options.rounds = value().parse().expect("a number"),
                "--also" => {
                    let value = value();
                    let (name, path) = value.split_once('=').expect("NAME=PATH");
                    options.also.push((name.to_owned(), path.to_owned()));
                }
                // What cargo says itself.
                _ => {}
            }
        }
        options
    }
}

/// A proxy in one of the two modes.
struct Proxy {
    name: String,
    refuses: bool,
    process: Child,
    port: u16,
    /// Microseconds for a request and requests in a second, by round.
    rounds: Vec<(f64, f64)>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("its number").port()
}

/// Writes what the program needs into `folder`; returns its arguments.
fn arguments(kind: &str, refuses: bool, port: u16, upstream: u16, folder: &Path) -> Vec<String> {
    let file = folder.join(format!("{kind}-{port}"));
    let path = file.display().to_string();
    let text = match kind {
        "nginx" => format!(
            "daemon off; master_process off; worker_processes 1; pid {path}.pid;\n\
             error_log stderr crit;\nevents {{ worker_connections 4096; }}\nhttp {{\n\
             access_log off; keepalive_requests 100000000; limit_req_status 429;\n\
             limit_req_log_level info; client_body_temp_path {path}.1; proxy_temp_path {path}.2;\n\
             fastcgi_temp_path {path}.3; uwsgi_temp_path {path}.4; scgi_temp_path {path}.5;\n\
             limit_req_zone $http_x_api_key zone=keys:16m rate={};\n\
             upstream up {{ server 127.0.0.1:{upstream}; keepalive 512;\n\
             keepalive_requests 100000000; }}\n\
             proxy_http_version 1.1; proxy_set_header Connection \"\";\n\
             server {{ listen 127.0.0.1:{port}; location / {{\n\
             limit_req zone=keys{}; proxy_pass http://up; }} }} }}\n",
            if refuses { "1r/s" } else { "1000000r/s" },
            if refuses { "" } else { " burst=1000000 nodelay" },
        ),
        "haproxy" => format!(
            "global\n nbthread 1\n maxconn 8192\ndefaults\n mode http\n timeout connect 5s\n \
             timeout client 60s\n timeout server 60s\n http-reuse always\n\
             backend up\n server s 127.0.0.1:{upstream} pool-max-conn 1024\n\
             backend keys\n stick-table type string len 32 size 1m expire 60s store \
             http_req_rate(1s)\nfrontend front\n bind 127.0.0.1:{port}\n \
             http-request track-sc0 req.hdr(x-api-key) table keys\n \
             http-request deny deny_status 429 if {{ sc_http_req_rate(0) gt {} }}\n \
             default_backend up\n",
            if refuses { 1 } else { 10_000_000 },
        ),
        _ => {
            let amount = if refuses { 1 } else { 1_000_000 };
            format!(
                "proxy: {{ listen: '127.0.0.1:{port}', upstream: 'http://127.0.0.1:{upstream}' }}\n\
                 limits:\n  - {{ name: per-key, key: [header:x-api-key], rate: {amount}/s, \
                 burst: {amount} }}\n\
                 admin: {{ listen: '127.0.0.1:0' }}\ntelemetry: {{ listen: '127.0.0.1:0' }}\n"
            )
        }
    };
    fs::write(&file, text).expect("a file for the configuration");
    let arguments: &[&str] = match kind {
        "nginx" => &["-e", "stderr", "-p", "/", "-c"],
        "haproxy" => &["-db", "-f"],
        _ => &["run", "-c"],
    };
    arguments.iter().map(ToString::to_string).chain([path]).collect()
}

fn start(
    name: &str,
    program: &str,
    refuses: bool,
    upstream: u16,
    options: &Options,
    folder: &Path,
) -> Option<Proxy> {
    let port = free_port();
    let mut command = match &options.cpu {
        Some(cpu) => {
            let mut command = Command::new("taskset");
            command.args(["-c", cpu, program]);
            command
        }
        None => Command::new(program),
    };
    command.args(arguments(name, refuses, port, upstream, folder));
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let process = quiet.spawn().ok()?;
    let mut proxy = Proxy { name: name.to_owned(), refuses, process, port, rounds: Vec::new() };
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(50));
        if std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Some(proxy);
        }
        if proxy.process.try_wait().is_ok_and(|ended| ended.is_some()) {
            break;
        }
    }
    println!("<!-- {name} does not start -->");
    None
}

/// CPU time of all threads so far.
fn cpu(process: &Child) -> Duration {
    let threads = fs::read_dir(format!("/proc/{}/task", process.id())).expect("its threads");
    let of = |thread: fs::DirEntry| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    };
    Duration::from_nanos(threads.flatten().filter_map(of).sum())
}

/// Reads one message with `Content-Length`; returns its status.
async fn read_answer(io: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<u16> {
    buffer.clear();
    loop {
        if io.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
        let Some(end) = buffer.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
        let head = std::str::from_utf8(&buffer[..end]).ok()?;
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
        });
        let whole = end + 4 + length.unwrap_or(0_usize);
        let status = head.get(9..12)?.parse().ok()?;
        while buffer.len() < whole {
            if io.read_buf(buffer).await.ok()? == 0 {
                return None;
            }
        }
        return Some(status);
    }
}

/// What the requests of one visit came to.
#[derive(Default)]
struct Count {
    over: AtomicBool,
    answered: AtomicU64,
    unexpected: AtomicU64,
}

async fn ask(port: u16, refuses: bool, mut key: usize, count: Arc<Count>) {
    let mut io = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.expect("a connection");
    io.set_nodelay(true).expect("no delay");
    let mut buffer = Vec::with_capacity(8192);
    while !count.over.load(Ordering::Relaxed) {
        key = (key * 31 + 7) % KEYS;
        let request = format!(
            "GET /v1/items?page=2 HTTP/1.1\r\nhost: api.example\r\nuser-agent: bench\r\n\
             accept: */*\r\nx-api-key: key-{key:05}\r\n\r\n"
        );
        io.write_all(request.as_bytes()).await.expect("a request");
        let status = read_answer(&mut io, &mut buffer).await.expect("an answer");
        count.answered.fetch_add(1, Ordering::Relaxed);
        if status != 200 && !(refuses && status == 429) {
            count.unexpected.fetch_add(1, Ordering::Relaxed);
        }
    }
}

async fn visit(proxy: &mut Proxy, options: &Options) {
    let count = Arc::new(Count::default());
    let asking: Vec<_> = (0..options.connections)
        .map(|n| tokio::spawn(ask(proxy.port, proxy.refuses, n, Arc::clone(&count))))
        .collect();
    tokio::time::sleep(WARM).await;
    let begun = (Instant::now(), cpu(&proxy.process), count.answered.load(Ordering::Relaxed));
    tokio::time::sleep(Duration::from_secs_f64(options.seconds)).await;
    let wall = begun.0.elapsed().as_secs_f64();
    let spent = (cpu(&proxy.process) - begun.1).as_secs_f64() * 1e6;
    let requests = (count.answered.load(Ordering::Relaxed) - begun.2) as f64;
    count.over.store(true, Ordering::Relaxed);
    for task in asking {
        task.await.expect("an end");
    }
    let unexpected = count.unexpected.load(Ordering::Relaxed);
    assert!(unexpected == 0, "{}: {unexpected} answers of another status", proxy.name);
    proxy.rounds.push((spent / requests, requests / wall));
    tokio::time::sleep(PAUSE).await;
}

/// Answers every request with 1 KiB.
async fn serve(listener: tokio::net::TcpListener) {
    let answer: Arc<[u8]> = [
        &b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 1024\r\n\r\n"[..],
        &[b'x'; 1024],
    ]
    .concat()
    .into();
    loop {
        let Ok((mut io, _)) = listener.accept().await else { continue };
        let answer = Arc::clone(&answer);
        tokio::spawn(async move {
            let _ = io.set_nodelay(true);
            let mut buffer = vec![0; 4096];
            // A request here fits into one segment.
            while io.read(&mut buffer).await.is_ok_and(|count| count > 0) {
                if io.write_all(&answer).await.is_err() {
                    return;
                }
            }
        });
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn table(proxies: &[Proxy], refuses: bool) {
    let of_mode: Vec<_> = proxies.iter().filter(|proxy| proxy.refuses == refuses).collect();
    let haproxy = of_mode.iter().find(|proxy| proxy.name == "haproxy");
    for proxy in &of_mode {
        let micros: Vec<f64> = proxy.rounds.iter().map(|round| round.0).collect();
        let ratio = haproxy.map_or_else(String::new, |haproxy| {
            let pairs = proxy.rounds.iter().zip(&haproxy.rounds);
            format!("{:.2}", median(pairs.map(|(ours, theirs)| ours.0 / theirs.0).collect()))
        });
        let least = micros.iter().copied().fold(f64::INFINITY, f64::min);
        let most = micros.iter().copied().fold(0.0, f64::max);
        println!(
            "| {} | {} | {ratio} | {:.1} ({least:.1} to {most:.1}) | {:.0} |",
            if refuses { "refused" } else { "passed" },
            proxy.name,
            median(micros),
            median(proxy.rounds.iter().map(|round| round.1).collect()),
        );
    }
}

fn main() {
    let options = Options::read();
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let listener = tokio::net::TcpListener::bind(address).await.expect("a port");
        let upstream = listener.local_addr().expect("its number").port();
        tokio::spawn(serve(listener));
        let mut programs = vec![("nginx".to_owned(), "nginx".to_owned())];
        programs.push(("haproxy".to_owned(), "haproxy".to_owned()));
        programs.push(("tidegate".to_owned(), env!("CARGO_BIN_EXE_tidegate").to_owned()));
        programs.extend(options.also.iter().cloned());
        let mut proxies = Vec::new();
        for (name, program) in &programs {
            for refuses in [false, true] {
                proxies.extend(start(name, program, refuses, upstream, &options, folder.path()));
            }
        }
        for round in 0..options.rounds {
            // In turn from either end.
            if round % 2 == 1 {
                proxies.reverse();
            }
            for proxy in &mut proxies {
                visit(proxy, &options).await;
            }
            if round % 2 == 1 {
                proxies.reverse();
            }
        }
        println!("{} connections, {} rounds\n", options.connections, options.rounds);
        println!("| requests | proxy | against HAProxy | us of CPU each | requests/s |");
        println!("|---|---|--:|--:|--:|");
        table(&proxies, false);
        table(&proxies, true);
    });
}
