//! The rules of HTTP/2 for a server (RFC 9113), by a client that breaks them.

use std::time::Duration;

use crate::harness::frames::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, End, FrameClient, GOAWAY, HEADERS, PADDED,
    PING, PREFACE, PRIORITY, PUSH_PROMISE, RST_STREAM, SETTINGS, STATUS_200, WINDOW_UPDATE, block,
    frame, get, head,
};
use crate::harness::{Reply, Setup, Upstream, eventually, limit};

const PROTOCOL_ERROR: u32 = 1;
const FLOW_CONTROL_ERROR: u32 = 3;
const STREAM_CLOSED: u32 = 5;
const FRAME_SIZE_ERROR: u32 = 6;
const COMPRESSION_ERROR: u32 = 9;
const ENHANCE_YOUR_CALM: u32 = 11;

const OPEN: u8 = END_HEADERS;
const WHOLE: u8 = END_HEADERS | END_STREAM;

fn setting(id: u16, value: u32) -> Vec<u8> {
    let payload = [&id.to_be_bytes()[..], &value.to_be_bytes()].concat();
    frame(SETTINGS, 0, 0, &payload)
}

fn post(stream: u32, fields: &[(&str, &str)]) -> Vec<u8> {
    frame(HEADERS, OPEN, stream, &head("POST", "/", fields))
}

#[test]
fn errors_of_a_connection_end_it_with_their_code() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let half = frame(HEADERS, END_STREAM, 1, &head("GET", "/", &[]));
    let large = (1_u32 << 31) - 1;
    let mut wrong = Vec::new();
    for (what, bytes, code) in [
        // Section 4.2: the size of frames.
        ("a frame above the maximum", frame(DATA, 0, 1, &[0; 16_385]), FRAME_SIZE_ERROR),
        ("fields above the maximum", frame(HEADERS, WHOLE, 1, &[0; 16_385]), FRAME_SIZE_ERROR),
        // Section 4.3: the compression of fields.
        ("an unknown index", frame(HEADERS, WHOLE, 1, &[0xff, 0x7f]), COMPRESSION_ERROR),
        (
            "a table above the maximum",
            frame(HEADERS, WHOLE, 1, &[0x3f, 0xff, 0xff, 0x7f]),
            COMPRESSION_ERROR,
        ),
        // Section 5.1: the states of streams.
        ("data on an idle stream", frame(DATA, 0, 1, b"x"), PROTOCOL_ERROR),
        ("a reset of an idle stream", frame(RST_STREAM, 0, 1, &[0; 4]), PROTOCOL_ERROR),
        ("a window of an idle stream", frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1]), PROTOCOL_ERROR),
        // Section 5.1.1: the numbers of streams.
        ("an even stream", get(2), PROTOCOL_ERROR),
        ("a smaller stream", [get(5), get(3)].concat(), PROTOCOL_ERROR),
        // Section 6: each frame's own rules.
        ("data on stream 0", frame(DATA, 0, 0, b"x"), PROTOCOL_ERROR),
        ("more padding than data", frame(DATA, PADDED, 1, &[9, 0]), PROTOCOL_ERROR),
        ("fields on stream 0", get(0), PROTOCOL_ERROR),
        ("a priority on stream 0", frame(PRIORITY, 0, 0, &[0; 5]), PROTOCOL_ERROR),
        ("a reset of stream 0", frame(RST_STREAM, 0, 0, &[0; 4]), PROTOCOL_ERROR),
        (
            "a reset of 3 bytes",
            [post(1, &[]), frame(RST_STREAM, 0, 1, &[0; 3])].concat(),
            FRAME_SIZE_ERROR,
        ),
        ("settings of a stream", frame(SETTINGS, 0, 1, &[]), PROTOCOL_ERROR),
        ("settings that are acknowledged", frame(SETTINGS, ACK, 0, &[0; 6]), FRAME_SIZE_ERROR),
        ("settings of 5 bytes", frame(SETTINGS, 0, 0, &[0; 5]), FRAME_SIZE_ERROR),
        ("a push setting of 2", setting(2, 2), PROTOCOL_ERROR),
        ("a window above the maximum", setting(4, large + 1), FLOW_CONTROL_ERROR),
        ("a small frame size", setting(5, 16_383), PROTOCOL_ERROR),
        ("a large frame size", setting(5, 1 << 24), PROTOCOL_ERROR),
        ("a client that pushes", frame(PUSH_PROMISE, WHOLE, 1, &[0, 0, 0, 2]), PROTOCOL_ERROR),
        ("a ping of a stream", frame(PING, 0, 1, &[0; 8]), PROTOCOL_ERROR),
        ("a ping of 7 bytes", frame(PING, 0, 0, &[0; 7]), FRAME_SIZE_ERROR),
        ("a farewell of a stream", frame(GOAWAY, 0, 1, &[0; 8]), PROTOCOL_ERROR),
        ("a window of 0", frame(WINDOW_UPDATE, 0, 0, &[0; 4]), PROTOCOL_ERROR),
        ("a window of 3 bytes", frame(WINDOW_UPDATE, 0, 0, &[0; 3]), FRAME_SIZE_ERROR),
        (
            "a window that overflows",
            frame(WINDOW_UPDATE, 0, 0, &large.to_be_bytes()),
            FLOW_CONTROL_ERROR,
        ),
        ("a continuation of nothing", frame(CONTINUATION, OPEN, 1, b""), PROTOCOL_ERROR),
        (
            "a frame within a block",
            [half.clone(), frame(PING, 0, 0, &[0; 8])].concat(),
            PROTOCOL_ERROR,
        ),
        (
            "a continuation of another stream",
            [half, frame(CONTINUATION, OPEN, 3, b"")].concat(),
            PROTOCOL_ERROR,
        ),
    ] {
        let mut client = FrameClient::open(proxy.address);
        client.send(&bytes);
        let end = client.end_of(u32::MAX);
        // For faults in how a frame is written the library has one code only.
        let told = [code, PROTOCOL_ERROR].map(End::Goaway).contains(&end);
        if !told || client.next().is_some() {
            wrong.push(format!("{what}: {end:?} instead of {code}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(upstream.requests().iter().all(|seen| seen.line() == "GET / HTTP/1.1"));
    eventually("the end of all", || proxy.handle.connections() == 0);
}

#[test]
fn errors_of_a_stream_end_only_the_stream() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let whole = |fields: &[(&str, &str)]| frame(HEADERS, WHOLE, 1, &block(fields));
    let mut wrong = Vec::new();
    let (method, scheme) = ((":method", "GET"), (":scheme", "http"));
    let (authority, path) = ((":authority", "a"), (":path", "/bad"));
    let with = |field| whole(&[method, scheme, authority, path, field]);
    for (what, bytes) in [
        // Section 8.2: fields.
        ("a connection", with(("connection", "close"))),
        ("keep-alive", with(("keep-alive", "1"))),
        ("a proxy's connection", with(("proxy-connection", "close"))),
        ("a transfer coding", with(("transfer-encoding", "chunked"))),
        ("an upgrade", with(("upgrade", "h2c"))),
        ("a TE that is not trailers", with(("te", "gzip"))),
        // Section 8.3: pseudo-fields.
        ("one of answers", with((":status", "200"))),
        ("one behind a field", whole(&[method, scheme, authority, ("x-a", "1"), path])),
        ("two methods", whole(&[method, method, scheme, authority, path])),
        ("two paths", whole(&[method, scheme, authority, path, path])),
        ("no method", whole(&[scheme, authority, path])),
        ("no scheme", whole(&[method, authority, path])),
        ("no path", whole(&[method, scheme, authority])),
        ("an empty path", whole(&[method, scheme, authority, (":path", "")])),
        // RFC 8441 was not offered.
        ("a protocol", with((":protocol", "websocket"))),
        // Section 8.1.1: the length that was announced.
        (
            "more content than announced",
            [post(1, &[("content-length", "1")]), frame(DATA, END_STREAM, 1, b"xx")].concat(),
        ),
        (
            "less content than announced",
            [post(1, &[("content-length", "3")]), frame(DATA, END_STREAM, 1, b"xx")].concat(),
        ),
        ("no content though announced", with(("content-length", "1"))),
        // Section 8.1: trailers.
        (
            "trailers that do not end",
            [post(1, &[]), frame(HEADERS, OPEN, 1, &block(&[("x-a", "1")]))].concat(),
        ),
        // Section 6.9.
        (
            "a window that overflows",
            [post(1, &[]), frame(WINDOW_UPDATE, 0, 1, &[0x7f, 0xff, 0xff, 0xff])].concat(),
        ),
    ] {
        let mut client = FrameClient::open(proxy.address);
        assert!(client.send(&bytes));
        let end = client.end_of(1);
        let right = matches!(end, End::Reset(_) | End::Answer(0x8c));
        client.send(&get(3));
        let next = client.end_of(3);
        if !right || next != End::Answer(STATUS_200) {
            wrong.push(format!("{what}: {end:?}, then {next:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    for seen in upstream.requests() {
        assert_eq!(seen.line(), "GET / HTTP/1.1");
    }
}

/// Section 5.4 lets an error of a stream end the connection.
#[test]
fn errors_of_a_stream_that_cannot_be_read_end_the_connection() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let with = |field| frame(HEADERS, WHOLE, 1, &head("GET", "/bad", &[field]));
    for (what, bytes) in [
        ("a name in upper case", with(("X-A", "1"))),
        ("a name with a space", with(("x a", "1"))),
        ("a line end in a value", with(("x-a", "1\r\nx-b: 2"))),
        ("a NUL in a value", with(("x-a", "1\0"))),
        ("an unknown pseudo-field", with((":x", "1"))),
        ("a window of 0", [post(1, &[]), frame(WINDOW_UPDATE, 0, 1, &[0; 4])].concat()),
    ] {
        let mut client = FrameClient::open(proxy.address);
        client.send(&bytes);
        assert_eq!(client.end_of(1), End::Goaway(PROTOCOL_ERROR), "{what}");
        assert_eq!(client.next(), None, "{what}");
    }
    assert_eq!(upstream.count(), 0);
}

#[test]
fn pseudo_fields_among_trailers_reach_nobody() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let mut client = FrameClient::open(proxy.address);
    let trailers = block(&[(":path", "/other"), (":authority", "other")]);
    client.send(&[post(1, &[]), frame(HEADERS, WHOLE, 1, &trailers)].concat());
    client.end_of(1);
    assert_eq!(upstream.only().line(), "POST / HTTP/1.1");
    assert!(!upstream.all_bytes().contains("other"));
}

#[test]
fn what_is_allowed_is_borne() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let mut client = FrameClient::open(proxy.address);
    let settings = client.next_of(SETTINGS).unwrap();
    assert_eq!((settings.flags, settings.stream), (0, 0));
    let acknowledged = client.next_of(SETTINGS).unwrap();
    assert_eq!((acknowledged.flags, acknowledged.payload.len()), (ACK, 0));
    client.send(&setting(0x7777, 1));
    assert_eq!(client.next_of(SETTINGS).unwrap().flags, ACK);
    client.send(&frame(PING, 0, 0, b"12345678"));
    let pong = client.next_of(PING).unwrap();
    assert_eq!((pong.flags, pong.payload.as_slice()), (ACK, &b"12345678"[..]));
    // Kinds of frames and flags that nobody knows, priorities, padding.
    client.send(&frame(0x77, 0xff, 1, b"what"));
    client.send(&frame(PRIORITY, 0, 9, &[0, 0, 0, 1, 16]));
    client.send(&post(1, &[]));
    client.send(&frame(DATA, PADDED | END_STREAM | 0x40, 1, &[3, b'h', b'i', 0, 0, 0]));
    assert_eq!(client.end_of(1), End::Answer(STATUS_200));
    assert_eq!(upstream.only().body, b"hi");
    // A block in pieces, one of them empty.
    let fields = head("GET", "/pieces", &[]);
    client.send(&frame(HEADERS, END_STREAM, 3, &fields[..10]));
    client.send(&frame(CONTINUATION, 0, 3, b""));
    client.send(&frame(CONTINUATION, END_HEADERS, 3, &fields[10..]));
    assert_eq!(client.end_of(3), End::Answer(STATUS_200));
    // Who says farewell may still hear the end of what it asked for.
    client.send(&[get(5), frame(GOAWAY, 0, 0, &[0; 8])].concat());
    assert_eq!(client.end_of(5), End::Answer(STATUS_200));
    assert_eq!(upstream.count(), 3);
}

#[test]
fn a_preface_comes_whole_and_in_time() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .with(|config| config.timeouts.header = Duration::from_millis(300))
        .start();
    // Byte by byte it is as good as at once.
    let mut client = FrameClient::silent(proxy.address);
    for byte in [PREFACE, &frame(SETTINGS, 0, 0, &[]), &get(1)].concat() {
        client.send(&[byte]);
    }
    assert_eq!(client.end_of(1), End::Answer(STATUS_200));
    let mut other = FrameClient::silent(proxy.address);
    other.send(b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n");
    while other.next().is_some() {}
    assert_eq!(upstream.count(), 1);
    eventually("the end of the other", || proxy.handle.connections() == 1);
}

#[test]
fn se_g8_a_block_of_fields_that_does_not_end_ends_its_connection_in_time() {
    let upstream = Upstream::scripted(|received| match received.line() {
        "GET /long HTTP/1.1" => Reply::Silence,
        _ => Reply::Ok("ok"),
    });
    let proxy = Setup::before(&upstream)
        .with(|config| config.timeouts.header = Duration::from_secs(1))
        .start();
    let fields = head("GET", "/", &[]);
    for (what, bytes) in [
        ("a block without its end", frame(HEADERS, END_STREAM, 3, &fields)),
        ("half a frame", get(3)[..20].to_vec()),
    ] {
        let mut client = FrameClient::open(proxy.address);
        // A request that runs buys no time.
        client.send(&frame(HEADERS, WHOLE, 1, &head("GET", "/long", &[])));
        client.send(&bytes);
        assert_eq!(client.end_of(1), End::Closed, "{what}");
    }
    // Whole blocks are in time however many there are.
    let mut client = FrameClient::open(proxy.address);
    for turn in 0..20 {
        let stream = 2 * turn + 1;
        client.send(&frame(HEADERS, END_STREAM, stream, &fields));
        std::thread::sleep(Duration::from_millis(60));
        client.send(&frame(CONTINUATION, END_HEADERS, stream, b""));
        assert_eq!(client.end_of(stream), End::Answer(STATUS_200));
    }
}

#[test]
fn se_g7_a_block_of_fields_without_end_is_not_borne() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let piece = block(&[("x-field", &"x".repeat(100))]);
    for (what, payload) in [("fields", piece.repeat(100)), ("nothing", Vec::new())] {
        let mut client = FrameClient::open(proxy.address);
        client.send(&frame(HEADERS, END_STREAM, 1, &head("GET", "/", &[])));
        let more = frame(CONTINUATION, 0, 1, &payload);
        // A GiB of fields, or a million frames of nothing.
        let borne = (0..100_000).all(|_| client.send(&more));
        assert!(!borne, "{what}");
        assert!(matches!(client.end_of(1), End::Goaway(_) | End::Closed), "{what}");
    }
    assert_eq!(upstream.count(), 0);
    eventually("the end of all", || proxy.handle.connections() == 0);
}

#[test]
fn se_g7_fields_that_grow_when_they_are_read_are_too_large() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let mut client = FrameClient::open(proxy.address);
    let usual = head("GET", "/", &[]);
    // A field of 4,000 bytes that is kept in the table, and then named by one byte
    // a thousand times: four million bytes of fields in five thousand.
    let mut bomb = usual;
    bomb.extend([0x40, 3, b'x', b'-', b'a', 0x7f, 0xa1, 0x1e]);
    bomb.extend([b'x'; 4000]);
    bomb.extend([0xbe; 1000]);
    client.send(&frame(HEADERS, WHOLE, 1, &bomb));
    let end = client.end_of(1);
    assert!(!matches!(end, End::Answer(STATUS_200)), "{end:?}");
    assert_eq!(upstream.count(), 0);
    let mut other = FrameClient::open(proxy.address);
    other.send(&get(1));
    assert_eq!(other.end_of(1), End::Answer(STATUS_200));
}

#[test]
fn se_g11_empty_frames_without_end_are_not_borne() {
    let upstream = Upstream::scripted(|_| Reply::Silence);
    let proxy = Setup::before(&upstream).limit(limit("r", "9/h")).start();
    let mut client = FrameClient::open(proxy.address);
    client.send(&post(1, &[("content-length", "5")]));
    let empty = frame(DATA, 0, 1, b"").repeat(1000);
    let borne = (0..1000).all(|_| client.send(&empty));
    assert!(!borne);
    let end = client.end_of(1);
    assert!(matches!(end, End::Goaway(ENHANCE_YOUR_CALM) | End::Closed), "{end:?}");
    assert!(proxy.spent() <= 1);
    eventually("the end of it", || proxy.handle.connections() == 0);
}

#[test]
fn data_behind_the_end_of_a_stream_is_an_error() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let mut client = FrameClient::open(proxy.address);
    client.send(&[get(1), frame(DATA, END_STREAM, 1, b"late")].concat());
    let end = client.end_of(1);
    let right = matches!(end, End::Reset(STREAM_CLOSED) | End::Goaway(_));
    assert!(right, "{end:?}");
    assert!(!upstream.all_bytes().contains("late"));
}

#[test]
fn an_answer_framed_twice_is_delivered_by_its_chunks_over_http2_too() {
    let upstream = Upstream::scripted(|_| {
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n\
            5\r\nhello\r\n0\r\n\r\n";
        Reply::Bytes(answer.to_vec())
    });
    let proxy = Setup::before(&upstream).start();
    let mut client = FrameClient::open(proxy.address);
    client.send(&get(1));
    let data = client.next_of(DATA).unwrap();
    assert_eq!((data.stream, data.payload.as_slice()), (1, &b"hello"[..]));
}

#[test]
fn a_tunnel_is_refused_over_http2_too() {
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream).start();
    let mut client = FrameClient::open(proxy.address);
    let tunnel = block(&[(":method", "CONNECT"), (":authority", "a:443")]);
    client.send(&frame(HEADERS, OPEN, 1, &tunnel));
    let end = client.end_of(1);
    assert!(matches!(end, End::Answer(first) if first != STATUS_200), "{end:?}");
    client.send(&get(3));
    assert_eq!(client.end_of(3), End::Answer(STATUS_200));
    assert_eq!(upstream.only().line(), "GET / HTTP/1.1");
}
