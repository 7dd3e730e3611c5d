//! What one side does not read, the other cannot go on sending: memory is bounded
//! however large a body is.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use crate::harness::{PATIENCE, Reply, Setup, Upstream};

/// More than all buffers of the kernel on the way hold, by far.
const BODY: usize = 256 * 1024 * 1024;
const BOUND: usize = BODY / 4;
/// A write that does not go on for so long is stuck. On a slow machine it may only be
/// slow, which makes the test weaker and never makes it fail.
const STUCK: Duration = Duration::from_millis(500);

/// Writes until `total` bytes are out or nothing goes on; returns how many are.
fn write_until_stuck(io: &mut TcpStream, total: usize) -> usize {
    let piece = vec![b'x'; 64 * 1024];
    io.set_write_timeout(Some(STUCK)).unwrap();
    let mut written = 0;
    while written < total {
        match io.write(&piece[..piece.len().min(total - written)]) {
            Ok(count) => written += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("after {written} bytes: {error}"),
        }
    }
    io.set_write_timeout(Some(PATIENCE)).unwrap();
    written
}

fn write(io: &mut TcpStream, mut left: usize) {
    let piece = vec![b'x'; 64 * 1024];
    while left > 0 {
        let count = left.min(piece.len());
        io.write_all(&piece[..count]).unwrap();
        left -= count;
    }
}

/// Reads so many bytes, or all that come.
fn read(io: &mut TcpStream, total: usize) -> usize {
    let mut buffer = vec![0; 64 * 1024];
    let mut count = 0;
    while count < total {
        match io.read(&mut buffer).unwrap() {
            0 => break,
            more => count += more,
        }
    }
    count
}

fn connect(to: SocketAddr) -> TcpStream {
    let io = TcpStream::connect(to).unwrap();
    io.set_read_timeout(Some(PATIENCE)).unwrap();
    io
}

/// Reads a head byte by byte, so that nothing of what follows is taken.
fn head(io: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        io.read_exact(&mut byte).unwrap();
        bytes.push(byte[0]);
    }
    String::from_utf8(bytes).unwrap()
}

#[test]
fn an_upload_that_the_upstream_does_not_read_is_not_taken_from_the_client() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (proceed, gate) = mpsc::channel();
    let upstream = thread::spawn(move || {
        let (mut io, _) = listener.accept().unwrap();
        io.set_read_timeout(Some(PATIENCE)).unwrap();
        head(&mut io);
        gate.recv().unwrap();
        let count = read(&mut io, BODY);
        let answer = format!("HTTP/1.1 200 OK\r\nX-Read: {count}\r\nContent-Length: 0\r\n\r\n");
        io.write_all(answer.as_bytes()).unwrap();
    });
    let proxy = Setup::before_url(&url).start();
    let mut client = connect(proxy.address);
    let request = format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {BODY}\r\n\r\n");
    client.write_all(request.as_bytes()).unwrap();
    let taken = write_until_stuck(&mut client, BODY);
    assert!(taken < BOUND, "{taken} bytes were taken that nobody reads");
    // It was only held up: all of it arrives.
    proceed.send(()).unwrap();
    write(&mut client, BODY - taken);
    let answer = head(&mut client);
    assert!(answer.contains(&format!("x-read: {BODY}\r\n")), "{answer}");
    upstream.join().unwrap();
}

#[test]
fn an_answer_that_the_client_does_not_read_is_not_taken_from_the_upstream() {
    let (told, taken) = mpsc::channel();
    let told = Mutex::new(told);
    let upstream = Upstream::scripted(move |_| {
        let told = told.lock().unwrap().clone();
        Reply::Take(Box::new(move |mut io, _| {
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY}\r\n\r\n");
            io.write_all(head.as_bytes()).unwrap();
            let taken = write_until_stuck(&mut io, BODY);
            told.send(taken).unwrap();
            write(&mut io, BODY - taken);
        }))
    });
    let proxy = Setup::before(&upstream).start();
    let mut client = connect(proxy.address);
    client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let taken = taken.recv_timeout(6 * PATIENCE).unwrap();
    assert!(taken < BOUND, "{taken} bytes were taken that nobody reads");
    let answer = head(&mut client);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(read(&mut client, BODY), BODY);
}
