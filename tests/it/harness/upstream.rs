//! An upstream that records every byte and connection, and answers by a script.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use super::client;

/// What the upstream does with a request.
pub enum Reply {
    /// Writes these bytes and waits for the next request.
    Bytes(Vec<u8>),
    /// Writes these bytes and closes.
    Last(Vec<u8>),
    /// Answers 200 with this text.
    Ok(&'static str),
    /// Says nothing and keeps the connection.
    Silence,
    /// Takes the connection over, with the bytes that came after the request.
    Take(Box<dyn FnOnce(TcpStream, Vec<u8>) + Send>),
}

/// A request as the upstream saw it.
#[derive(Clone, Debug)]
pub struct Received {
    /// Which connection it came on, from 0.
    pub connection: usize,
    /// Which request on that connection it was, from 0.
    pub index: usize,
    /// The head with its blank line.
    pub head: String,
    pub body: Vec<u8>,
    /// The lines behind the last chunk.
    pub trailers: String,
}

type Script = dyn Fn(&Received) -> Reply + Send + Sync;

/// A listening upstream.
pub struct Upstream {
    address: SocketAddr,
    log: Arc<Log>,
}

#[derive(Default)]
struct Log {
    requests: Mutex<Vec<Received>>,
    /// Every byte, by connection.
    bytes: Mutex<Vec<Vec<u8>>>,
    /// The connections that have ended.
    ended: Mutex<Vec<usize>>,
    stopped: AtomicBool,
}

impl Upstream {
    /// Answers every request with 200 and `ok`.
    pub fn start() -> Self {
        Self::scripted(|_| Reply::Ok("ok"))
    }

    /// Answers by `script`.
    pub fn scripted(script: impl Fn(&Received) -> Reply + Send + Sync + 'static) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").unwrap(), script)
    }

    /// Answers by `script` on a listener that exists.
    pub fn on(
        listener: TcpListener,
        script: impl Fn(&Received) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let log = Arc::new(Log::default());
        let script: Arc<Script> = Arc::new(script);
        let shared = Arc::clone(&log);
        thread::spawn(move || {
            for io in listener.incoming() {
                let Ok(io) = io else { continue };
                if shared.stopped.load(Ordering::SeqCst) {
                    return;
                }
                let connection = {
                    let mut bytes = shared.bytes.lock().unwrap();
                    bytes.push(Vec::new());
                    bytes.len() - 1
                };
                let (log, script) = (Arc::clone(&shared), Arc::clone(&script));
                thread::spawn(move || {
                    Session { io, log: &log, connection, buffer: Vec::new() }.run(&*script);
                    log.ended.lock().unwrap().push(connection);
                });
            }
        });
        Self { address, log }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Every request so far.
    pub fn requests(&self) -> Vec<Received> {
        self.log.requests.lock().unwrap().clone()
    }

    /// How many requests there were.
    pub fn count(&self) -> usize {
        self.log.requests.lock().unwrap().len()
    }

    /// The only request so far.
    pub fn only(&self) -> Received {
        let requests = self.requests();
        assert_eq!(requests.len(), 1, "{requests:#?}");
        requests[0].clone()
    }

    /// How many connections there were.
    pub fn connections(&self) -> usize {
        self.log.bytes.lock().unwrap().len()
    }

    /// How many of them have ended.
    pub fn ended(&self) -> usize {
        self.log.ended.lock().unwrap().len()
    }

    /// Every byte that came, of all connections one after another.
    pub fn all_bytes(&self) -> String {
        self.log.bytes.lock().unwrap().concat().escape_ascii().to_string()
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.log.stopped.store(true, Ordering::SeqCst);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
    }
}

impl Received {
    /// The value of a field that occurs at most once.
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut values = client::fields(&self.head, name);
        let first = values.next();
        assert!(values.next().is_none(), "{name} occurs twice in\n{}", self.head);
        first
    }

    /// The method and target.
    pub fn line(&self) -> &str {
        self.head.lines().next().unwrap()
    }
}

struct Session<'a> {
    io: TcpStream,
    log: &'a Log,
    connection: usize,
    buffer: Vec<u8>,
}

impl Session<'_> {
    fn run(mut self, script: &Script) {
        let _ = self.io.set_nodelay(true);
        for index in 0.. {
            let Some((head, body, trailers)) = self.request() else { return };
            let received = Received { connection: self.connection, index, head, body, trailers };
            self.log.requests.lock().unwrap().push(received.clone());
            let written = match script(&received) {
                Reply::Bytes(bytes) => self.io.write_all(&bytes),
                Reply::Ok(text) => {
                    let length = text.len();
                    let answer =
                        format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{text}");
                    self.io.write_all(answer.as_bytes())
                }
                Reply::Last(bytes) => {
                    let _ = self.io.write_all(&bytes);
                    return;
                }
                Reply::Silence => Ok(()),
                Reply::Take(take) => {
                    take(self.io, self.buffer);
                    return;
                }
            };
            if written.is_err() {
                return;
            }
        }
    }

    fn request(&mut self) -> Option<(String, Vec<u8>, String)> {
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            self.fill()?;
        };
        let head: Vec<u8> = self.buffer.drain(..end).collect();
        let head = String::from_utf8_lossy(&head).into_owned();
        let mut trailers = String::new();
        let body = if let Some(length) = client::field(&head, "content-length") {
            self.take(length.parse().ok()?)?
        } else if client::field(&head, "transfer-encoding").is_some() {
            self.chunks(&mut trailers)?
        } else {
            Vec::new()
        };
        Some((head, body, trailers))
    }

    fn chunks(&mut self, trailers: &mut String) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let size = usize::from_str_radix(self.line()?.trim(), 16).ok()?;
            if size == 0 {
                break;
            }
            body.extend(self.take(size)?);
            self.take(2)?;
        }
        loop {
            let line = self.line()?;
            if line == "\r\n" {
                return Some(body);
            }
            trailers.push_str(&line);
        }
    }

    fn line(&mut self) -> Option<String> {
        loop {
            if let Some(at) = self.buffer.iter().position(|b| *b == b'\n') {
                return String::from_utf8(self.buffer.drain(..=at).collect()).ok();
            }
            self.fill()?;
        }
    }

    fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < count {
            self.fill()?;
        }
        Some(self.buffer.drain(..count).collect())
    }

    fn fill(&mut self) -> Option<()> {
        let mut bytes = [0; 64 * 1024];
        let count = self.io.read(&mut bytes).ok().filter(|count| *count > 0)?;
        self.log.bytes.lock().unwrap()[self.connection].extend_from_slice(&bytes[..count]);
        self.buffer.extend_from_slice(&bytes[..count]);
        Some(())
    }
}
