//! The `proxy` section.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use http::uri::Authority;
use ipnet::IpNet;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use super::cors::Cors;
use crate::runtime::ListenAddr;
use crate::settings::{
    DurationOrZeroText, DurationText, Fault, Networks, OrNone, SizeOrNoneText, SizeText, Whole,
    text,
};
use crate::tls;

/// The proxy: where requests come from and go to, and how much of them is borne.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Proxy")]
pub struct Config {
    /// Address for HTTP/1.1 and HTTP/2. Default: `[::]:8080`.
    #[serde(default = "Config::default_listen")]
    pub listen: ListenAddr,
    /// Certificates for TLS with clients, over which HTTP/2 and HTTP/1.1 are offered.
    /// Default: none, without TLS.
    #[serde(default, with = "OrNone::<tls::Serving>")]
    pub tls: Option<tls::Serving>,
    /// Where admitted requests go that no route takes: `http://HOST[:PORT]`,
    /// `https://HOST[:PORT]` or `unix:/path`. Required, unless there are routes;
    /// without it such requests are answered 404.
    #[serde(default, with = "OrNone::<Upstream>")]
    pub upstream: Option<Upstream>,
    /// File with the CAs that sign the certificate of an upstream with `https://`,
    /// PEM. Default: none, those that the system trusts.
    #[serde(default, with = "OrNone::<PathBuf>")]
    pub upstream_ca: Option<PathBuf>,
    /// The `Host` that the upstream gets. Default: client.
    #[serde(default)]
    pub upstream_host: UpstreamHost,
    /// Networks whose `X-Forwarded-For` and `Forwarded` are believed, and what
    /// they say on the cost of a request. Default: none.
    #[serde(default, with = "Networks")]
    pub trusted_proxies: Vec<IpNet>,
    /// Whether every connection of a trusted proxy begins with the PROXY
    /// protocol, version 1 or 2, which names the client. One that does not is
    /// closed; others are plain. Default: false.
    #[serde(default)]
    pub proxy_protocol: bool,
    /// Leading bits of an IPv6 address by which clients are grouped, 0 to 128.
    /// Default: 64.
    #[serde(default = "Config::default_ipv6_prefix", with = "Ipv6Prefix")]
    pub ipv6_prefix: u8,
    /// Which rate limit fields answers carry. Default: standard.
    #[serde(default)]
    pub headers: HeaderStyle,
    /// Which pages may read the proxy's own answers, such as a refusal.
    /// Default: none.
    #[serde(default)]
    pub cors: Cors,
    /// How long each step of an exchange may take.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// How much one client or request may use.
    #[serde(default)]
    pub max: Maxima,
    /// Keep serving this long after SIGTERM, while endpoints are updated.
    /// Default: 5s.
    #[serde(default = "Config::default_drain_delay", with = "DurationOrZeroText")]
    pub drain_delay: Duration,
    /// After that, let running requests finish for at most this long.
    /// Default: 20s.
    #[serde(default = "Config::default_drain_timeout", with = "DurationOrZeroText")]
    pub drain_timeout: Duration,
}

type Ipv6Prefix = Whole<0, 128>;

impl Config {
    /// All defaults, in front of `upstream`.
    pub fn new(upstream: Upstream) -> Self {
        Self { upstream: Some(upstream), ..Self::routed() }
    }

    /// All defaults, without an upstream: every request needs a route.
    pub fn routed() -> Self {
        Self {
            listen: Self::default_listen(),
            tls: None,
            upstream: None,
            upstream_ca: None,
            upstream_host: UpstreamHost::default(),
            trusted_proxies: Vec::new(),
            proxy_protocol: false,
            ipv6_prefix: Self::default_ipv6_prefix(),
            headers: HeaderStyle::default(),
            cors: Cors::default(),
            timeouts: Timeouts::default(),
            max: Maxima::default(),
            drain_delay: Self::default_drain_delay(),
            drain_timeout: Self::default_drain_timeout(),
        }
    }

    /// Faults of settings that do not go together.
    pub fn faults(&self) -> Vec<Fault> {
        let mut faults: Vec<Fault> = self.cors.fault().into_iter().collect();
        if self.proxy_protocol && self.trusted_proxies.is_empty() {
            let message = "needs `trusted_proxies`: only of those is the protocol read";
            faults.push(Fault::new(["proxy_protocol".into()], message).given(&["trusted_proxies"]));
        }
        faults.extend(self.tls.iter().flat_map(tls::Serving::faults));
        if self.upstream_ca.is_some() && !matches!(self.upstream, Some(Upstream::Https { .. })) {
            let message = "goes with an upstream of `https://` only";
            faults.push(Fault::new(["upstream_ca".into()], message).given(&["upstream"]));
        }
        if let Some(message) = self.upstream.as_ref().and_then(|upstream| self.circle(upstream)) {
            faults.push(Fault::new(["upstream".into()], message).given(&["listen"]));
        }
        faults
    }

    /// Why requests to `upstream` would come back, if they would.
    pub(super) fn circle(&self, upstream: &Upstream) -> Option<String> {
        upstream.is_served_at(self.listen.addr()).then(|| {
            format!(
                "`{upstream}` is the proxy's own address, {}: each request would go round in a \
                 circle",
                self.listen
            )
        })
    }

    fn default_listen() -> ListenAddr {
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, 8080)).into()
    }

    /// Leading bits by which IPv6 clients are grouped unless said otherwise.
    pub const fn default_ipv6_prefix() -> u8 {
        64
    }

    const fn default_drain_delay() -> Duration {
        Duration::from_secs(5)
    }

    const fn default_drain_timeout() -> Duration {
        Duration::from_secs(20)
    }
}

impl HeaderStyle {
    /// Every style, in the order of their discriminants.
    pub(super) const ALL: [Self; 4] = [Self::Standard, Self::Legacy, Self::Both, Self::Off];
}

/// Which rate limit fields answers carry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HeaderStyle {
    /// `RateLimit` and `RateLimit-Policy`.
    #[default]
    Standard,
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`.
    Legacy,
    /// Both families.
    Both,
    /// None; the upstream's own pass.
    // Tools that read YAML 1.1 turn `off` into `false`.
    #[serde(alias = "false")]
    Off,
}

/// How long each step of an exchange may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// For a client to send a whole request head. Default: 10s.
    #[serde(with = "DurationText")]
    pub header: Duration,
    /// For a connection without requests, and for a pause within a request's body,
    /// except that of a gRPC call. Default: 75s.
    #[serde(with = "DurationText")]
    pub idle: Duration,
    /// For connecting to the upstream. Default: 2s.
    #[serde(with = "DurationText")]
    pub connect: Duration,
    /// For the head of the upstream's answer, not counted while a body is awaited
    /// from the client. Default: 60s.
    #[serde(with = "DurationText")]
    pub response: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            header: Duration::from_secs(10),
            idle: Duration::from_secs(75),
            connect: Duration::from_secs(2),
            response: Duration::from_secs(60),
        }
    }
}

/// How much one client or request may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Maxima {
    /// Bytes of a request head, 8KiB to 16MiB. Default: 64KiB.
    #[serde(with = "HeaderBytes")]
    pub header_bytes: usize,
    /// Fields of a request head, 1 to 32768. Default: 100.
    #[serde(with = "HeaderCount")]
    pub headers: usize,
    /// Bytes of a request body, or `none`. Default: none.
    #[serde(with = "SizeOrNoneText")]
    pub body: Option<u64>,
    /// Client connections at once. Default: 10000.
    #[serde(with = "ConnectionCount")]
    pub connections: usize,
    /// Requests at once on one HTTP/2 connection. Default: 200.
    #[serde(with = "StreamCount")]
    pub streams: u32,
}

// Below 8 KiB the HTTP implementation has no buffer to work with.
type HeaderBytes = SizeText<8192, 16_777_216>;
// The most fields that a header map can hold.
type HeaderCount = Whole<1, 32_768>;
type ConnectionCount = Whole<1, 10_000_000>;
type StreamCount = Whole<1, 2_147_483_647>;

impl Default for Maxima {
    fn default() -> Self {
        Self { header_bytes: 65_536, headers: 100, body: None, connections: 10_000, streams: 200 }
    }
}

/// Whose name is in the `Host` that the upstream gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UpstreamHost {
    /// The one that the client sent.
    #[default]
    Client,
    /// The upstream's own, as a third party expects; the client's is in
    /// `X-Forwarded-Host`.
    Upstream,
}

/// Where admitted requests go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Upstream {
    /// HTTP over TCP.
    Http {
        /// `host:port`, with brackets around an IPv6 address.
        authority: String,
    },
    /// HTTP over TLS.
    Https {
        /// `host:port`, with brackets around an IPv6 address.
        authority: String,
    },
    /// HTTP over the Unix socket at this absolute path.
    Unix(PathBuf),
}

/// Why a text does not name an upstream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UpstreamError {
    /// Neither kind of address.
    #[error(
        "`{0}` is not an upstream: write http://HOST[:PORT], https://HOST[:PORT] or unix:/path/to/socket"
    )]
    Form(String),
    /// More than scheme, host and port.
    #[error("`{0}`: an upstream has no user, path, query or fragment, only http://HOST[:PORT]")]
    Extra(String),
    /// No host, or one that cannot be.
    #[error("`{0}` has no valid host and port")]
    Host(String),
    /// The socket's path is not absolute.
    #[error("`{0}`: the path of a Unix socket must be absolute, as in unix:/run/app.sock")]
    RelativeSocket(String),
}

impl FromStr for Upstream {
    type Err = UpstreamError;

    fn from_str(text: &str) -> Result<Self, UpstreamError> {
        let own = || text.to_owned();
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if !path.starts_with('/') || path.ends_with('/') || path.contains('\0') {
                return Err(UpstreamError::RelativeSocket(own()));
            }
            return Ok(Self::Unix(path.into()));
        }
        let (scheme, rest) = text.split_once("://").ok_or_else(|| UpstreamError::Form(own()))?;
        let secure = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            _ => return Err(UpstreamError::Form(own())),
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        if authority.contains(['/', '?', '#', '@']) {
            return Err(UpstreamError::Extra(own()));
        }
        let host = || UpstreamError::Host(own());
        let parsed: Authority = authority.parse().map_err(|_| host())?;
        let name = parsed.host();
        if name.is_empty() || !host_is_valid(name) {
            return Err(host());
        }
        // `http` takes any text after the colon for a port.
        let port = match authority[name.len()..].strip_prefix(':') {
            None if secure => 443,
            None => 80,
            Some(port) => port.parse::<u16>().ok().filter(|p| *p != 0).ok_or_else(host)?,
        };
        let authority = format!("{}:{port}", name.to_ascii_lowercase());
        Ok(if secure { Self::Https { authority } } else { Self::Http { authority } })
    }
}

impl Upstream {
    /// TLS to it, if that is asked for.
    ///
    /// # Errors
    /// If there is no CA to be trusted.
    pub(super) fn tls(&self, ca: Option<&Path>) -> Result<Option<tls::Upstream>, tls::Error> {
        let Self::Https { authority } = self else { return Ok(None) };
        let host = authority.rsplit_once(':').map_or(authority.as_str(), |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        tls::Upstream::load(host, ca).map(Some)
    }

    /// Whether a listener on `listen` certainly answers at this address. Names
    /// other than `localhost` are not looked up.
    fn is_served_at(&self, listen: SocketAddr) -> bool {
        let (Self::Http { authority } | Self::Https { authority }) = self else { return false };
        let at = match authority.strip_prefix("localhost:") {
            Some(port) if listen.is_ipv4() => format!("127.0.0.1:{port}"),
            Some(port) => format!("[::1]:{port}"),
            None => authority.clone(),
        };
        let Ok(at) = at.parse::<SocketAddr>() else { return false };
        if at.port() != listen.port() {
            return false;
        }
        let here = at.ip().is_loopback() || at.ip().is_unspecified();
        let both = at.is_ipv4() == listen.is_ipv4() || listen.is_ipv6();
        at.ip() == listen.ip()
            || (listen.ip().is_unspecified() && here && both)
            || (at.ip().is_unspecified()
                && listen.ip().is_loopback()
                && at.is_ipv4() == listen.is_ipv4())
    }
}

fn host_is_valid(host: &str) -> bool {
    match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => {
            host.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv4())
                || host
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        }
    }
}

impl fmt::Display for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http { authority } => write!(f, "http://{authority}"),
            Self::Https { authority } => write!(f, "https://{authority}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl<'de> Deserialize<'de> for Upstream {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text(deserializer, "an address such as http://127.0.0.1:3000")?
            .parse()
            .map_err(de::Error::custom)
    }
}

impl Serialize for Upstream {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl JsonSchema for Upstream {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Upstream".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "pattern": "^(https?://[^/?#@]+/?|unix:(//)?/.+)$",
            "examples": ["http://127.0.0.1:3000", "https://api.example.com", "unix:/run/app.sock"],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upstreams_parse_and_print() {
        for (text, printed) in [
            ("http://127.0.0.1:3000", "http://127.0.0.1:3000"),
            ("http://app", "http://app:80"),
            ("HTTP://App.Example/", "http://app.example:80"),
            ("http://[::1]:3000", "http://[::1]:3000"),
            ("unix:/run/app.sock", "unix:/run/app.sock"),
            ("unix:///run/app.sock", "unix:/run/app.sock"),
        ] {
            assert_eq!(text.parse::<Upstream>().unwrap().to_string(), printed);
        }
    }

    #[test]
    fn an_upstream_at_the_listener_is_seen() {
        let own = |upstream: &str, listen: &str| {
            upstream.parse::<Upstream>().unwrap().is_served_at(listen.parse().unwrap())
        };
        for (upstream, listen) in [
            ("http://127.0.0.1:8080", "[::]:8080"),
            ("http://[::1]:8080", "[::]:8080"),
            ("http://localhost:8080", "[::]:8080"),
            ("http://localhost:8080", "0.0.0.0:8080"),
            ("http://localhost:8080", "127.0.0.1:8080"),
            ("http://127.0.0.2", "0.0.0.0:80"),
            ("http://0.0.0.0:8080", "127.0.0.1:8080"),
            ("http://10.1.2.3:8080", "10.1.2.3:8080"),
        ] {
            assert!(own(upstream, listen), "{upstream} {listen}");
        }
        for (upstream, listen) in [
            ("http://127.0.0.1:3000", "[::]:8080"),
            ("http://[::1]:8080", "0.0.0.0:8080"),
            ("http://127.0.0.2:8080", "127.0.0.1:8080"),
            ("http://10.1.2.3:8080", "[::]:8080"),
            ("http://app:8080", "[::]:8080"),
            ("unix:/run/app.sock", "[::]:8080"),
        ] {
            assert!(!own(upstream, listen), "{upstream} {listen}");
        }
    }

    #[test]
    fn what_cannot_be_an_upstream_is_refused() {
        use UpstreamError::{Extra, Form, Host, RelativeSocket};
        let error = |text: &str| text.parse::<Upstream>().unwrap_err();
        for text in ["", "127.0.0.1:3000", "app", "ftp://app", "tcp://app:1"] {
            assert_eq!(error(text), Form(text.into()));
        }
        for text in ["http://a/b", "http://a?b", "http://a#b", "http://u:p@a", "http://a//"] {
            assert_eq!(error(text), Extra(text.into()));
        }
        for text in [
            "http://",
            "http://:80",
            "http://a:0",
            "http://a:65536",
            "http://a:x",
            "http://[::1",
            "http://a b",
            "http://a:",
            "http://::1",
        ] {
            assert_eq!(error(text), Host(text.into()));
        }
        for text in ["unix:", "unix:run/app.sock", "unix:/"] {
            assert_eq!(error(text), RelativeSocket(text.into()));
        }
    }

    #[test]
    fn an_upstream_with_tls_has_a_port_of_its_own_and_a_ca() {
        for (text, meant) in [
            ("https://API.example.com/", "https://api.example.com:443"),
            ("https://[::1]:8443", "https://[::1]:8443"),
        ] {
            let upstream: Upstream = text.parse().unwrap();
            assert_eq!(upstream.to_string(), meant);
            let missing = upstream.tls(Some(Path::new("/does/not/exist"))).unwrap_err();
            assert!(missing.to_string().starts_with("CA certificates /does/not/exist: "));
        }
        let mut config = Config::new("http://app".parse().unwrap());
        config.upstream_ca = Some("ca.crt".into());
        assert_eq!(config.faults()[0].path, ["upstream_ca".into()]);
        config.upstream = Some("https://app".parse().unwrap());
        assert_eq!(config.faults(), []);
    }
}
