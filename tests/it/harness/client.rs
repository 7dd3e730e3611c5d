//! A client that speaks bytes.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};

use socket2::{Domain, Socket, Type};

use super::PATIENCE;

/// A connection to the proxy.
pub struct Connection {
    io: TcpStream,
    buffer: Vec<u8>,
}

/// An HTTP/1 answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// The head as it came, with its blank line.
    pub head: String,
    pub body: Vec<u8>,
}

impl Connection {
    /// Connects from 127.0.0.1.
    pub fn open(to: SocketAddr) -> Self {
        Self::open_from([127, 0, 0, 1], to)
    }

    /// Connects from an address of 127/8.
    pub fn open_from(from: [u8; 4], to: SocketAddr) -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let from = SocketAddr::from((Ipv4Addr::from(from), 0));
        socket.bind(&from.into()).unwrap();
        socket.connect(&to.into()).unwrap();
        let io: TcpStream = socket.into();
        io.set_nodelay(true).unwrap();
        io.set_read_timeout(Some(PATIENCE)).unwrap();
        io.set_write_timeout(Some(PATIENCE)).unwrap();
        Self { io, buffer: Vec::new() }
    }

    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.io.write_all(bytes.as_ref()).unwrap();
    }

    /// Sends what the other side may no longer want; returns whether it all went.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.io.write_all(bytes.as_ref()).is_ok()
    }

    /// Ends this side of the connection.
    pub fn finish(&mut self) {
        self.io.shutdown(Shutdown::Write).unwrap();
    }

    /// Sends a GET and reads its answer.
    pub fn get(&mut self, target: &str) -> Answer {
        self.get_with(target, &[])
    }

    /// Sends a GET with more fields and reads its answer.
    pub fn get_with(&mut self, target: &str, fields: &[(&str, &str)]) -> Answer {
        self.send(request("GET", target, fields, ""));
        self.answer()
    }

    /// Sends a POST and reads its answer.
    pub fn post(&mut self, target: &str, fields: &[(&str, &str)], body: &str) -> Answer {
        self.send(request("POST", target, fields, body));
        self.answer()
    }

    /// Reads one answer to anything but HEAD.
    pub fn answer(&mut self) -> Answer {
        let head = self.head();
        let body = self.body(&head);
        Answer { status: status(&head), head, body }
    }

    /// Reads one answer without a body, as to HEAD.
    pub fn bodyless_answer(&mut self) -> Answer {
        let head = self.head();
        Answer { status: status(&head), head, body: Vec::new() }
    }

    /// Everything up to the end of the connection; a reset counts as one.
    pub fn rest(&mut self) -> Vec<u8> {
        while self.fill() {}
        std::mem::take(&mut self.buffer)
    }

    /// Whether the other side ends the connection without another byte.
    pub fn is_ended(&mut self) -> bool {
        self.rest().is_empty()
    }

    /// Reads exactly `count` bytes.
    pub fn exactly(&mut self, count: usize) -> Vec<u8> {
        while self.buffer.len() < count {
            assert!(self.fill(), "the connection ended after {:?}", self.buffer.escape_ascii());
        }
        self.buffer.drain(..count).collect()
    }

    fn head(&mut self) -> String {
        loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                return String::from_utf8(self.buffer.drain(..at + 4).collect()).unwrap();
            }
            assert!(self.fill(), "the connection ended after {:?}", self.buffer.escape_ascii());
        }
    }

    fn body(&mut self, head: &str) -> Vec<u8> {
        if matches!(status(head), 101 | 204 | 304) {
            return Vec::new();
        }
        if let Some(length) = field(head, "content-length") {
            return self.exactly(length.parse().unwrap());
        }
        if field(head, "transfer-encoding").is_some() {
            let mut body = Vec::new();
            loop {
                let size = usize::from_str_radix(self.line().trim(), 16).unwrap();
                if size == 0 {
                    while !self.line().trim().is_empty() {}
                    return body;
                }
                body.extend(self.exactly(size));
                self.exactly(2);
            }
        }
        self.rest()
    }

    fn line(&mut self) -> String {
        loop {
            if let Some(at) = self.buffer.iter().position(|b| *b == b'\n') {
                return String::from_utf8(self.buffer.drain(..=at).collect()).unwrap();
            }
            assert!(self.fill(), "the connection ended within a line");
        }
    }

    fn fill(&mut self) -> bool {
        let mut bytes = [0; 16 * 1024];
        match self.io.read(&mut bytes) {
            Ok(0) => false,
            Ok(count) => {
                self.buffer.extend_from_slice(&bytes[..count]);
                true
            }
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => false,
            Err(error) => panic!("no answer in time: {error}"),
        }
    }
}

impl Answer {
    /// The value of a field that occurs at most once.
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut values = fields(&self.head, name);
        let first = values.next();
        assert!(values.next().is_none(), "{name} occurs twice in\n{}", self.head);
        first
    }

    /// The body as text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    /// The body as a JSON document.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// The bytes of a request with a Host and, unless the body is empty, a length.
pub fn request(method: &str, target: &str, fields: &[(&str, &str)], body: &str) -> String {
    let mut text = format!("{method} {target} HTTP/1.1\r\nHost: app.example\r\n");
    for (name, value) in fields {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    if !body.is_empty() {
        text.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    text + "\r\n" + body
}

fn status(head: &str) -> u16 {
    head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("{head}"))
}

/// The values of a field in a message head.
pub fn fields<'a>(head: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    head.lines().skip(1).filter_map(move |line| {
        let (field, value) = line.split_once(':')?;
        field.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// The first value of a field in a message head.
pub fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    fields(head, name).next()
}
