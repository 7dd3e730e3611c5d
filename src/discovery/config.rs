//! The `replication.peers` section.

use std::borrow::Cow;
use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};

use crate::settings::{Whole, text};

/// Where the peers are found.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(try_from = "Peers")]
pub enum Config {
    /// Every address behind a name, as a headless service publishes them.
    Dns {
        /// The name to look up, A and AAAA.
        name: String,
        /// The peers' port. `None`: the one that the service names `peer`, else that
        /// of `replication.listen`.
        port: Option<u16>,
    },
    /// A fixed list.
    Static(Vec<HostPort>),
}

/// Where the peers are found: exactly one of `dns` and `static`.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Peers {
    /// A name whose A and AAAA records are the peers: a headless service.
    #[serde(default)]
    dns: Option<DnsName>,
    /// The peers' port, with `dns` only. Default: the one that the service names
    /// `peer` (SRV), else the port of `replication.listen`.
    #[serde(default)]
    port: Option<Port>,
    /// A fixed list of `HOST:PORT`, in place of `dns`.
    #[serde(default, rename = "static")]
    fixed: Option<Vec<HostPort>>,
}

impl TryFrom<Peers> for Config {
    type Error = &'static str;

    fn try_from(peers: Peers) -> Result<Self, Self::Error> {
        match (peers.dns, peers.fixed) {
            (Some(name), None) => Ok(Self::Dns { name: name.0, port: peers.port.map(|p| p.0) }),
            (None, Some(_)) if peers.port.is_some() => {
                Err("`port` goes with `dns`; each address of `static` has its own port")
            }
            (None, Some(list)) => Ok(Self::Static(list)),
            (Some(_), Some(_)) => Err("`dns` and `static` exclude each other: keep one"),
            (None, None) => Err("needs `dns: NAME` or `static: [HOST:PORT]`"),
        }
    }
}

impl Serialize for Config {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self {
            Self::Dns { name, port } => {
                map.serialize_entry("dns", name)?;
                if let Some(port) = port {
                    map.serialize_entry("port", port)?;
                }
            }
            Self::Static(list) => map.serialize_entry("static", list)?,
        }
        map.end()
    }
}

/// A port that can be connected to.
#[derive(Clone, Copy, Deserialize, JsonSchema)]
#[serde(transparent)]
struct Port(#[serde(with = "PortNumber")] u16);

type PortNumber = Whole<1, 65_535>;

/// A host name that DNS can be asked for.
struct DnsName(String);

impl<'de> Deserialize<'de> for DnsName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = text(deserializer, "a DNS name")?;
        if is_host_name(&text) {
            return Ok(Self(text));
        }
        Err(de::Error::custom(format!("`{text}` is not a DNS name")))
    }
}

impl JsonSchema for DnsName {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "DnsName".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "pattern": r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?$",
            "examples": ["tidegate-peers.default.svc.cluster.local"],
        })
    }
}

fn is_host_name(text: &str) -> bool {
    let name = text.strip_suffix('.').unwrap_or(text);
    name.len() <= 253
        && name.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
        })
}

/// A host name or IP address with a port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostPort {
    /// A name, or an address without brackets.
    pub host: String,
    /// The port, not 0.
    pub port: u16,
}

/// Not a host with a port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not HOST:PORT, such as 10.0.0.7:9401 or [fd00::7]:9401")]
pub struct HostPortError(String);

impl FromStr for HostPort {
    type Err = HostPortError;

    fn from_str(text: &str) -> Result<Self, HostPortError> {
        let parse = || {
            let (host, port) = text.rsplit_once(':')?;
            let port = port.parse::<u16>().ok().filter(|p| *p != 0)?;
            let host = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
                Some(address) => address.parse::<Ipv6Addr>().is_ok().then_some(address)?,
                None => is_host_name(host).then_some(host)?,
            };
            Some(Self { host: host.to_owned(), port })
        };
        parse().ok_or_else(|| HostPortError(text.to_owned()))
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl<'de> Deserialize<'de> for HostPort {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text(deserializer, "HOST:PORT")?.parse().map_err(de::Error::custom)
    }
}

impl Serialize for HostPort {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl JsonSchema for HostPort {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "HostPort".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "pattern": r"^([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}$",
            "examples": ["10.0.0.7:9401", "[fd00::7]:9401"],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_with_ports_parse_and_print() {
        for text in ["10.0.0.7:9401", "[fd00::7]:9401", "tidegate-0.peers:1"] {
            assert_eq!(text.parse::<HostPort>().unwrap().to_string(), text);
        }
        for text in ["", "host", ":1", "host:0", "host:65536", "fd00::7:1", "a b:1", "http://a:1"] {
            assert!(text.parse::<HostPort>().is_err(), "{text}");
        }
    }
}
