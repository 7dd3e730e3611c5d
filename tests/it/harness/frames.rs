//! Either side of HTTP/2 in frames, so that it can break every rule.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use super::PATIENCE;

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PUSH_PROMISE: u8 = 5;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const END_STREAM: u8 = 1;
pub const ACK: u8 = 1;
pub const END_HEADERS: u8 = 4;
pub const PADDED: u8 = 8;

/// The first byte of the head of an answer with this status: an index into the
/// static table.
pub const STATUS_200: u8 = 0x88;

/// A frame as it was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

/// How a stream, or its whole connection, ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// An answer whose head begins with this byte.
    Answer(u8),
    /// RST_STREAM with this code.
    Reset(u32),
    /// GOAWAY with this code.
    Goaway(u32),
    /// The connection ended without a word.
    Closed,
}

/// A connection.
pub struct FrameClient {
    io: TcpStream,
    buffer: Vec<u8>,
}

pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = length[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// A field block of literals that are not indexed.
pub fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in fields {
        bytes.push(0);
        for text in [name, value] {
            let length = u8::try_from(text.len()).unwrap();
            assert!(length < 127);
            bytes.push(length);
            bytes.extend(text.as_bytes());
        }
    }
    bytes
}

/// The field block of a request with the usual pseudo-fields and others.
pub fn head(method: &str, path: &str, fields: &[(&str, &str)]) -> Vec<u8> {
    let usual =
        [(":method", method), (":scheme", "http"), (":authority", "app.example"), (":path", path)];
    block(&[&usual[..], fields].concat())
}

/// A request without a body.
pub fn get(stream: u32) -> Vec<u8> {
    frame(HEADERS, END_HEADERS | END_STREAM, stream, &head("GET", "/", &[]))
}

impl FrameClient {
    /// Connects, and sends nothing.
    pub fn silent(to: SocketAddr) -> Self {
        Self::on(TcpStream::connect(to).unwrap())
    }

    /// The server's side of the next connection, behind the prefaces.
    pub fn serve(listener: &TcpListener) -> Self {
        let mut server = Self::on(listener.accept().unwrap().0);
        while server.buffer.len() < PREFACE.len() {
            server.fill().unwrap();
        }
        assert_eq!(server.buffer.drain(..PREFACE.len()).collect::<Vec<_>>(), PREFACE);
        assert!(server.send(&[frame(SETTINGS, 0, 0, &[]), frame(SETTINGS, ACK, 0, &[])].concat()));
        server
    }

    fn on(io: TcpStream) -> Self {
        io.set_nodelay(true).unwrap();
        io.set_read_timeout(Some(PATIENCE)).unwrap();
        io.set_write_timeout(Some(PATIENCE)).unwrap();
        Self { io, buffer: Vec::new() }
    }

    /// Connects and sends the preface.
    pub fn open(to: SocketAddr) -> Self {
        let mut client = Self::silent(to);
        assert!(client.send(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()));
        client
    }

    /// Sends what the other side may no longer want; returns whether it all went.
    pub fn send(&mut self, bytes: &[u8]) -> bool {
        self.io.write_all(bytes).is_ok()
    }

    /// The next frame; `None` at the end of the connection.
    pub fn next(&mut self) -> Option<Frame> {
        while self.buffer.len() < 9 {
            self.fill()?;
        }
        let length = u32::from_be_bytes([0, self.buffer[0], self.buffer[1], self.buffer[2]]);
        let end = 9 + usize::try_from(length).unwrap();
        while self.buffer.len() < end {
            self.fill()?;
        }
        let bytes: Vec<u8> = self.buffer.drain(..end).collect();
        let stream = u32::from_be_bytes([bytes[5] & 0x7f, bytes[6], bytes[7], bytes[8]]);
        Some(Frame { kind: bytes[3], flags: bytes[4], stream, payload: bytes[9..].to_vec() })
    }

    /// The next frame of this kind, or the end.
    pub fn next_of(&mut self, kind: u8) -> Option<Frame> {
        loop {
            let frame = self.next()?;
            if frame.kind == kind {
                return Some(frame);
            }
        }
    }

    /// Waits until `stream` or the connection has ended.
    pub fn end_of(&mut self, stream: u32) -> End {
        let mut answer = None;
        loop {
            let Some(frame) = self.next() else { return End::Closed };
            let code = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
            match frame.kind {
                GOAWAY => return End::Goaway(code(&frame.payload[4..8])),
                RST_STREAM if frame.stream == stream && answer.is_none() => {
                    return End::Reset(code(&frame.payload));
                }
                HEADERS | DATA if frame.stream == stream => {
                    if frame.kind == HEADERS {
                        answer.get_or_insert(frame.payload[0]);
                    }
                    if frame.flags & END_STREAM != 0 {
                        return End::Answer(answer.unwrap());
                    }
                }
                _ => {}
            }
        }
    }

    fn fill(&mut self) -> Option<()> {
        let mut bytes = [0; 16 * 1024];
        match self.io.read(&mut bytes) {
            Ok(0) => None,
            Ok(count) => {
                self.buffer.extend_from_slice(&bytes[..count]);
                Some(())
            }
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("no frame in time: {error}"),
        }
    }
}
