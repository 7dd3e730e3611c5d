//! Listening addresses (layer 1).

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{Serialize, Serializer};
use socket2::{Domain, Protocol, Socket, Type};

use crate::settings;

/// Connections that the kernel completes and keeps until they are accepted.
const BACKLOG: i32 = 1024;

/// Where a listener is to be bound: an IP address and a port, 0 for any free one.
///
/// `[::]` means every address of the host, IPv4 and IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenAddr(SocketAddr);

/// Not an IP address with a port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not an address to listen on: write an IP address and a port, such as 127.0.0.1:8080 or [::]:8080"
)]
pub struct ListenAddrError(String);

impl ListenAddr {
    /// The address and port as given, before binding.
    pub const fn addr(self) -> SocketAddr {
        self.0
    }

    /// Binds a non-blocking TCP listener and starts to listen.
    ///
    /// `[::]` takes IPv4 as well, and is `0.0.0.0` on a host without IPv6. With
    /// `reuse_port` other sockets that also ask for it may share the address.
    ///
    /// # Errors
    /// If the address cannot be bound; the text names the address.
    pub fn bind(self, reuse_port: bool) -> io::Result<TcpListener> {
        let bound = match bind(self.0, reuse_port) {
            Err(error) if self.0.ip().is_unspecified() && self.0.is_ipv6() && no_ipv6(&error) => {
                bind((Ipv4Addr::UNSPECIFIED, self.0.port()).into(), reuse_port)
            }
            other => other,
        };
        bound.map_err(|e| io::Error::new(e.kind(), format!("cannot listen on {self}: {e}")))
    }
}

fn bind(addr: SocketAddr, reuse_port: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    if addr.is_ipv6() {
        socket.set_only_v6(!addr.ip().is_unspecified())?;
    }
    // A port of a process that has just ended is free again at once.
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(reuse_port)?;
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Whether the host has no IPv6: no such sockets, or no such address.
fn no_ipv6(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrNotAvailable
        || error.kind() == io::ErrorKind::Unsupported
        || error.raw_os_error() == Some(EAFNOSUPPORT)
}

/// `EAFNOSUPPORT` on Linux, for which the standard library has no stable kind.
const EAFNOSUPPORT: i32 = 97;

impl From<SocketAddr> for ListenAddr {
    fn from(addr: SocketAddr) -> Self {
        Self(addr)
    }
}

impl FromStr for ListenAddr {
    type Err = ListenAddrError;

    fn from_str(text: &str) -> Result<Self, ListenAddrError> {
        text.parse().map(Self).map_err(|_| ListenAddrError(text.to_owned()))
    }
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<'de> Deserialize<'de> for ListenAddr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        settings::text(deserializer, "an address such as 127.0.0.1:8080")?
            .parse()
            .map_err(de::Error::custom)
    }
}

impl Serialize for ListenAddr {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl JsonSchema for ListenAddr {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "ListenAddr".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "pattern": r"^([0-9.]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}$",
            "examples": ["[::]:8080", "127.0.0.1:8080"],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn addresses_parse_and_print() {
        for text in ["127.0.0.1:80", "[::]:8080", "[::1]:0"] {
            assert_eq!(text.parse::<ListenAddr>().unwrap().to_string(), text);
        }
        for text in ["", "8080", ":8080", "localhost:80", "127.0.0.1", "::1:80", "1.2.3.4:65536"] {
            assert!(text.parse::<ListenAddr>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_address_in_use_is_named() {
        let held = "127.0.0.1:0".parse::<ListenAddr>().unwrap().bind(false).unwrap();
        let addr = held.local_addr().unwrap();
        let error = ListenAddr::from(addr).bind(false).unwrap_err();
        assert!(error.to_string().starts_with(&format!("cannot listen on {addr}: ")), "{error}");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn sockets_that_ask_for_it_share_a_port() {
        let first = "127.0.0.1:0".parse::<ListenAddr>().unwrap().bind(true).unwrap();
        ListenAddr::from(first.local_addr().unwrap()).bind(true).unwrap();
    }

    #[test]
    fn the_unspecified_address_takes_ipv4() {
        let listener = "[::]:0".parse::<ListenAddr>().unwrap().bind(false).unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    }
}
