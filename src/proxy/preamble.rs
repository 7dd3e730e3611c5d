//! The PROXY protocol, versions 1 and 2: a load balancer that passes bytes on
//! says in front of them whose they are
//! (<https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt>).
//!
//! It is read strictly, and only from peers that are trusted: of those every
//! connection must begin with it. Not a byte of what follows is taken.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tokio::io::{AsyncRead, AsyncReadExt};

/// What version 2 begins with.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// The longest line of version 1, its end included.
const MAX_LINE: usize = 107;

/// Why a connection cannot be served.
#[derive(Debug, thiserror::Error)]
pub(super) enum PreambleError {
    /// It ended, or broke.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// What it began with.
    #[error("the PROXY protocol is expected, but {0}")]
    Malformed(&'static str),
}

use PreambleError::Malformed;

/// Reads the preamble of a connection. `None` if it speaks for itself, as the
/// health checks of a load balancer do.
///
/// # Errors
/// If there is none, or it cannot be understood.
pub(super) async fn read_source(
    io: &mut (impl AsyncRead + Unpin),
) -> Result<Option<IpAddr>, PreambleError> {
    // Nothing is shorter, so that nothing of what follows is read.
    let mut start = [0; SIGNATURE.len()];
    io.read_exact(&mut start).await?;
    if start == SIGNATURE {
        return read_binary(io).await;
    }
    if !start.starts_with(b"PROXY ") {
        return Err(Malformed("the connection begins with something else"));
    }
    let mut line = start.to_vec();
    while !line.ends_with(b"\r\n") {
        if line.len() == MAX_LINE {
            return Err(Malformed("its line is too long"));
        }
        line.push(io.read_u8().await?);
    }
    line.truncate(line.len() - 2);
    parse_line(&line)
}

/// Version 1: `PROXY TCP4 SOURCE DESTINATION PORT PORT`.
fn parse_line(line: &[u8]) -> Result<Option<IpAddr>, PreambleError> {
    let line = std::str::from_utf8(line).map_err(|_| Malformed("its line is no text"))?;
    let mut words = line.split(' ').skip(1);
    let mut word = || words.next().unwrap_or_default();
    let family = word();
    if family == "UNKNOWN" {
        // What follows must be ignored.
        return Ok(None);
    }
    let [source, destination, from, to] = [word(), word(), word(), word()];
    let address = |text: &str| -> Option<IpAddr> {
        match family {
            "TCP4" => text.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
            "TCP6" => text.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
            _ => None,
        }
    };
    let is_port =
        |text: &str| text.bytes().all(|b| b.is_ascii_digit()) && text.parse::<u16>().is_ok();
    let source = address(source).filter(|_| {
        address(destination).is_some() && is_port(from) && is_port(to) && words.next().is_none()
    });
    source.map(Some).ok_or(Malformed("its line does not name two addresses and ports"))
}

/// Version 2, behind its signature.
async fn read_binary(io: &mut (impl AsyncRead + Unpin)) -> Result<Option<IpAddr>, PreambleError> {
    let [command, family] = [io.read_u8().await?, io.read_u8().await?];
    let length = usize::from(io.read_u16().await?);
    let mut content = vec![0; length];
    io.read_exact(&mut content).await?;
    match command {
        0x20 => return Ok(None),
        0x21 => {}
        _ => return Err(Malformed("its version or command is not known")),
    }
    let short = || Malformed("its addresses are too short");
    match family {
        // TCP over IPv4: two addresses of 4 bytes, two ports.
        0x11 if length >= 12 => {
            let bytes = content.first_chunk::<4>().ok_or_else(short)?;
            Ok(Some(Ipv4Addr::from(*bytes).into()))
        }
        // TCP over IPv6: two addresses of 16 bytes, two ports.
        0x21 if length >= 36 => {
            let bytes = content.first_chunk::<16>().ok_or_else(short)?;
            Ok(Some(Ipv6Addr::from(*bytes).into()))
        }
        0x11 | 0x21 => Err(short()),
        // Unspecified, or a Unix socket: no address to go by.
        0x00 | 0x31 => Ok(None),
        _ => Err(Malformed("its transport is not TCP")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What is made of `bytes`, and what is left of them.
    fn read(bytes: &[u8]) -> Result<(Option<String>, usize), PreambleError> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut rest = bytes;
        let source = runtime.block_on(read_source(&mut rest))?;
        Ok((source.map(|ip| ip.to_string()), rest.len()))
    }

    fn binary(command: u8, family: u8, content: &[u8]) -> Vec<u8> {
        let length = (content.len() as u16).to_be_bytes();
        [&SIGNATURE[..], &[command, family], &length, content].concat()
    }

    #[test]
    fn a_line_names_the_client_and_nothing_behind_it_is_read() {
        for (line, source) in [
            ("PROXY TCP4 203.0.113.7 192.0.2.1 56324 443", Some("203.0.113.7")),
            ("PROXY TCP6 2001:db8::7 2001:db8::1 1 65535", Some("2001:db8::7")),
            ("PROXY UNKNOWN", None),
            ("PROXY UNKNOWN ffff:f ffff:f 65535 65535", None),
        ] {
            let bytes = format!("{line}\r\nGET / HTTP/1.1\r\n");
            let (found, left) = read(bytes.as_bytes()).unwrap();
            assert_eq!((found.as_deref(), left), (source, 16), "{line}");
        }
    }

    #[test]
    fn a_line_that_is_not_exact_is_refused() {
        let long = format!("PROXY UNKNOWN {}\r\n", "x".repeat(200));
        for bytes in [
            "GET / HTTP/1.1\r\nhost: a\r\n\r\n",
            "PROXY TCP4 203.0.113.7 192.0.2.1 56324\r\n",
            "PROXY TCP4 203.0.113.7 192.0.2.1 56324 443 1\r\n",
            "PROXY TCP4 203.0.113.7  192.0.2.1 56324 443\r\n",
            "PROXY TCP4 203.0.113.7 192.0.2.1 56324 65536\r\n",
            "PROXY TCP4 203.0.113.7 192.0.2.1 +1 443\r\n",
            "PROXY TCP4 2001:db8::7 192.0.2.1 1 443\r\n",
            "PROXY TCP6 203.0.113.7 192.0.2.1 1 443\r\n",
            "PROXY TCP4 203.0.113.07 192.0.2.1 1 443\r\n",
            "PROXY UDP4 203.0.113.7 192.0.2.1 1 443\r\n",
            "PROXY  UNKNOWN\r\n",
            "PROXY \u{fc}\u{fc}\u{fc}\u{fc}\r\n",
            &long,
        ] {
            assert!(matches!(read(bytes.as_bytes()), Err(Malformed(_))), "{bytes}");
        }
        for cut in ["", "PROXY ", "PROXY TCP4 203.0.113.7 192.0.2.1 5"] {
            assert!(matches!(read(cut.as_bytes()), Err(PreambleError::Io(_))), "{cut}");
        }
    }

    #[test]
    fn the_binary_form_names_the_client() {
        let v4 = [203, 0, 113, 7, 192, 0, 2, 1, 0, 1, 0, 2];
        let mut v6 = Ipv6Addr::LOCALHOST.octets().to_vec();
        v6.extend([0; 20]);
        // Extensions follow the addresses.
        let extended = [&v4[..], &[4, 0, 1, 0]].concat();
        for (bytes, source) in [
            (binary(0x21, 0x11, &v4), Some("203.0.113.7")),
            (binary(0x21, 0x11, &extended), Some("203.0.113.7")),
            (binary(0x21, 0x21, &v6), Some("::1")),
            (binary(0x20, 0x00, &[]), None),
            (binary(0x20, 0x11, &v4), None),
            (binary(0x21, 0x00, &[]), None),
            (binary(0x21, 0x31, &[0; 216]), None),
        ] {
            let (found, left) = read(&[&bytes[..], b"GET"].concat()).unwrap();
            assert_eq!((found.as_deref(), left), (source, 3), "{bytes:?}");
        }
        for bytes in [
            binary(0x11, 0x11, &v4),
            binary(0x22, 0x11, &v4),
            binary(0x21, 0x12, &v4),
            binary(0x21, 0x41, &v4),
            binary(0x21, 0x11, &v4[..11]),
            binary(0x21, 0x21, &v6[..35]),
        ] {
            assert!(matches!(read(&bytes), Err(Malformed(_))), "{bytes:?}");
        }
        let cut = &binary(0x21, 0x11, &v4)[..20];
        assert!(matches!(read(cut), Err(PreambleError::Io(_))));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_preamble_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            start in prop::sample::select(vec![&b""[..], b"PROXY ", b"PROXY TCP4 ", &SIGNATURE]),
        ) {
            let _ = read(&[start, &bytes].concat());
        }
    }
}
