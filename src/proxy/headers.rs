//! What a proxy must do to the fields of a message before it passes it on:
//! RFC 9110 section 7.6 (what is meant for one connection only), RFC 9112
//! section 6 (framing) and the forwarding fields.
//!
//! The field `Connection` lets a client name fields that are not to be passed
//! on. What the proxy itself sets, keys on, or an upstream trusts cannot be
//! named away.

use std::net::IpAddr;

use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, FORWARDED, HOST, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, VIA,
};
use http::{HeaderMap, HeaderName, HeaderValue, Version};
use smallvec::SmallVec;

/// The de-facto list of the addresses a request passed.
pub(super) static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
static X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
static X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");
static KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
static PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
static HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

static HTTP: HeaderValue = HeaderValue::from_static("http");
static HTTPS: HeaderValue = HeaderValue::from_static("https");
static TRAILERS: HeaderValue = HeaderValue::from_static("trailers");
static CHUNKED: HeaderValue = HeaderValue::from_static("chunked");
static WEBSOCKET: HeaderValue = HeaderValue::from_static("websocket");
static CONNECTION_UPGRADE: HeaderValue = HeaderValue::from_static("upgrade");

/// The other end of a client connection, as the upstream is told of it.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) ip: IpAddr,
    /// Whether its word on whom it speaks for counts.
    pub(super) trusted: bool,
    /// Whether it speaks TLS.
    tls: bool,
    text: HeaderValue,
}

/// Which of the fields that a proxy has something to do with a message has. Looking
/// them up one by one costs more than all else that is done with them: most messages
/// have none or one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Present(u32);

impl Present {
    pub(super) const CONNECTION: Self = Self(1);
    pub(super) const CONTENT_LENGTH: Self = Self(1 << 1);
    pub(super) const TRANSFER_ENCODING: Self = Self(1 << 2);
    pub(super) const TRAILER: Self = Self(1 << 3);
    pub(super) const TE: Self = Self(1 << 4);
    pub(super) const UPGRADE: Self = Self(1 << 5);
    pub(super) const EXPECT: Self = Self(1 << 6);
    pub(super) const PROXY_AUTHORIZATION: Self = Self(1 << 7);
    pub(super) const PROXY_AUTHENTICATE: Self = Self(1 << 8);
    pub(super) const COOKIE: Self = Self(1 << 9);
    pub(super) const VIA: Self = Self(1 << 10);
    pub(super) const HOST: Self = Self(1 << 11);
    /// What tells how long a body is.
    pub(super) const FRAMING: Self = Self(Self::CONTENT_LENGTH.0 | Self::TRANSFER_ENCODING.0);
    /// Any that says for whom a request is forwarded, however it is spelled.
    pub(super) const FORWARDING: Self = Self(1 << 12);
    pub(super) const KEEP_ALIVE: Self = Self(1 << 13);
    pub(super) const PROXY_CONNECTION: Self = Self(1 << 14);
    pub(super) const HTTP2_SETTINGS: Self = Self(1 << 15);

    /// Those in `headers`.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        Self(headers.keys().fold(0, |set, name| set | Self::bit(name)))
    }

    /// Whether at least one of `fields` is there.
    pub(super) const fn has(self, fields: Self) -> bool {
        self.0 & fields.0 != 0
    }

    fn bit(name: &HeaderName) -> u32 {
        let field = match *name {
            CONNECTION => Self::CONNECTION,
            CONTENT_LENGTH => Self::CONTENT_LENGTH,
            TRANSFER_ENCODING => Self::TRANSFER_ENCODING,
            TRAILER => Self::TRAILER,
            TE => Self::TE,
            UPGRADE => Self::UPGRADE,
            EXPECT => Self::EXPECT,
            PROXY_AUTHORIZATION => Self::PROXY_AUTHORIZATION,
            PROXY_AUTHENTICATE => Self::PROXY_AUTHENTICATE,
            COOKIE => Self::COOKIE,
            VIA => Self::VIA,
            HOST => Self::HOST,
            FORWARDED => Self::FORWARDING,
            _ => match name.as_str() {
                "keep-alive" => Self::KEEP_ALIVE,
                "proxy-connection" => Self::PROXY_CONNECTION,
                "http2-settings" => Self::HTTP2_SETTINGS,
                other if is_forwarding(other) => Self::FORWARDING,
                _ => Self(0),
            },
        };
        field.0
    }
}

/// What the upstream needs to know about the body that follows a request head.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodyShape {
    /// There is none.
    pub(super) empty: bool,
    /// Its length is known.
    pub(super) exact: bool,
}

impl Peer {
    pub(super) fn new(ip: IpAddr, trusted: bool) -> Self {
        let ip = ip.to_canonical();
        Self { ip, trusted, tls: false, text: address_value(ip) }
    }

    /// The same peer, which speaks TLS or does not.
    pub(super) fn with_tls(self, tls: bool) -> Self {
        Self { tls, ..self }
    }

    /// The same peer, trusted or not.
    pub(super) fn with_trust(&self, trusted: bool) -> Self {
        Self { trusted, ..self.clone() }
    }
}

fn address_value(ip: IpAddr) -> HeaderValue {
    // The text of an address is always a valid field value.
    HeaderValue::from_maybe_shared(ip.to_string()).unwrap_or(HeaderValue::from_static("unknown"))
}

/// Whether the elements of the list field `name` include `token`.
pub(super) fn lists_token(headers: &HeaderMap, name: &HeaderName, token: &[u8]) -> bool {
    headers
        .get_all(name)
        .iter()
        .flat_map(|line| line.as_bytes().split(|b| *b == b','))
        .any(|element| element.trim_ascii().eq_ignore_ascii_case(token))
}

/// Whether a request head asks to become a WebSocket, the only protocol to which
/// a connection may switch.
pub(super) fn asks_for_websocket(parts: &http::request::Parts) -> bool {
    parts.version == Version::HTTP_11
        && parts.method == http::Method::GET
        && lists_token(&parts.headers, &CONNECTION, b"upgrade")
        && lists_token(&parts.headers, &UPGRADE, b"websocket")
}

/// Whether an answer agrees to become a WebSocket.
pub(super) fn agrees_to_websocket(headers: &HeaderMap) -> bool {
    lists_token(headers, &UPGRADE, b"websocket")
}

/// Says again that the connection becomes a WebSocket, since what the other side
/// said was meant for its own connection.
pub(super) fn insert_websocket(headers: &mut HeaderMap) {
    headers.insert(CONNECTION, CONNECTION_UPGRADE.clone());
    headers.insert(UPGRADE, WEBSOCKET.clone());
}

/// Prepares the fields of a request for the upstream. `keyed` says which fields
/// limits look at. Returns which fields there were before.
pub(super) fn prepare_request(
    headers: &mut HeaderMap,
    version: Version,
    body: BodyShape,
    keyed: &dyn Fn(&HeaderName) -> bool,
) -> Present {
    let present = Present::of(headers);
    let trailers = present.has(Present::TE) && lists_token(headers, &TE, b"trailers");
    let framed = present.has(Present::CONTENT_LENGTH);
    if present.has(Present::CONNECTION) {
        remove_nominated(headers, |name| is_protected(name) || keyed(name));
        headers.remove(CONNECTION);
    }
    remove_present(
        headers,
        present,
        [
            (Present::KEEP_ALIVE, &KEEP_ALIVE),
            (Present::PROXY_CONNECTION, &PROXY_CONNECTION),
            (Present::HTTP2_SETTINGS, &HTTP2_SETTINGS),
            (Present::TE, &TE),
            (Present::TRANSFER_ENCODING, &TRANSFER_ENCODING),
            (Present::UPGRADE, &UPGRADE),
            (Present::PROXY_AUTHORIZATION, &PROXY_AUTHORIZATION),
            (Present::EXPECT, &EXPECT),
        ],
    );
    if present.has(Present::TRAILER) {
        // Only behind a body of unknown length can there be any.
        if body.empty || body.exact || framed {
            headers.remove(TRAILER);
        } else if headers.contains_key(TRAILER) {
            restrict_trailers(headers, keyed);
        }
    }
    if trailers {
        headers.insert(TE, TRAILERS.clone());
    }
    // Without either field a GET would lose its body.
    if !body.empty && !body.exact && !framed {
        headers.insert(TRANSFER_ENCODING, CHUNKED.clone());
    }
    if present.has(Present::COOKIE) {
        join_cookies(headers);
    }
    append_via(headers, version, present);
    present
}

/// Removes those of `fields` that are there.
fn remove_present<const N: usize>(
    headers: &mut HeaderMap,
    present: Present,
    fields: [(Present, &HeaderName); N],
) {
    for (field, name) in fields {
        if present.has(field) {
            headers.remove(name);
        }
    }
}

/// Announces only those trailers that may pass: an upstream may read them as if
/// they had been in the head, so what the proxy says or decides by is not among
/// them. What is not announced is not sent.
fn restrict_trailers(headers: &mut HeaderMap, keyed: &dyn Fn(&HeaderName) -> bool) {
    let may_pass = |name: &HeaderName| {
        !is_protected(name)
            && ![CONNECTION, TE, TRAILER, UPGRADE, PROXY_AUTHORIZATION, EXPECT].contains(name)
            && ![&KEEP_ALIVE, &PROXY_CONNECTION, &HTTP2_SETTINGS].contains(&name)
            && !keyed(name)
    };
    let passing: SmallVec<[HeaderName; 2]> = headers
        .get_all(TRAILER)
        .iter()
        .flat_map(|line| line.as_bytes().split(|b| *b == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .filter(may_pass)
        .collect();
    headers.remove(TRAILER);
    for name in passing {
        headers.append(TRAILER, HeaderValue::from_name(name));
    }
}

/// Prepares the fields of an answer for the client.
pub(super) fn prepare_response(headers: &mut HeaderMap) {
    let present = Present::of(headers);
    if present.has(Present::CONNECTION) {
        remove_nominated(headers, |name| *name == CONTENT_LENGTH || *name == TRANSFER_ENCODING);
        headers.remove(CONNECTION);
    }
    if present.has(Present::TRANSFER_ENCODING) {
        headers.remove(TRANSFER_ENCODING);
        // The length was a lie, or an attempt at splitting answers.
        headers.remove(CONTENT_LENGTH);
    }
    remove_present(
        headers,
        present,
        [
            (Present::KEEP_ALIVE, &KEEP_ALIVE),
            (Present::PROXY_CONNECTION, &PROXY_CONNECTION),
            (Present::HTTP2_SETTINGS, &HTTP2_SETTINGS),
            (Present::TE, &TE),
            (Present::UPGRADE, &UPGRADE),
            (Present::PROXY_AUTHENTICATE, &PROXY_AUTHENTICATE),
        ],
    );
}

/// Removes every field that any line of `Connection` names, unless protected.
fn remove_nominated(headers: &mut HeaderMap, protected: impl Fn(&HeaderName) -> bool) {
    let named: SmallVec<[HeaderName; 2]> = headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|line| line.as_bytes().split(|b| *b == b','))
        .map(<[u8]>::trim_ascii)
        .filter(|token| {
            !token.eq_ignore_ascii_case(b"keep-alive") && !token.eq_ignore_ascii_case(b"close")
        })
        .filter_map(|token| HeaderName::from_bytes(token).ok())
        .filter(|name| !protected(name))
        .collect();
    for name in named {
        headers.remove(name);
    }
}

fn is_protected(name: &HeaderName) -> bool {
    [HOST, CONTENT_LENGTH, TRANSFER_ENCODING, AUTHORIZATION, COOKIE, VIA].contains(name)
        || is_forwarding(name.as_str())
}

/// Whether `name` is of the family that says for whom a request is forwarded.
/// Servers that hand fields to programs as variables do not tell `_` from `-`.
fn is_forwarding(name: &str) -> bool {
    const PREFIX: &str = "x-forwarded-";
    let same = |a: u8, b: u8| a == b || (a == b'_' && b == b'-');
    let matches = |text: &str, wanted: &str| {
        text.len() == wanted.len() && text.bytes().zip(wanted.bytes()).all(|(a, b)| same(a, b))
    };
    match name.as_bytes().first() {
        Some(b'f') => name == "forwarded",
        Some(b'x') => {
            matches(name, "x-real-ip")
                || name.get(..PREFIX.len()).is_some_and(|prefix| matches(prefix, PREFIX))
        }
        Some(_) | None => false,
    }
}

/// Says for whom the request is forwarded. From a peer that is not trusted the
/// whole family is replaced; a trusted one's is appended to. `present` is from before
/// anything was set. Returns whether a peer's word was ignored.
pub(super) fn set_forwarding(
    headers: &mut HeaderMap,
    present: Present,
    peer: &Peer,
    client: IpAddr,
) -> bool {
    let mut ignored = false;
    let real = if client == peer.ip { peer.text.clone() } else { address_value(client) };
    if !present.has(Present::FORWARDING) {
        headers.insert(&X_FORWARDED_FOR, peer.text.clone());
        let proto = if peer.tls { &HTTPS } else { &HTTP };
        headers.insert(&X_FORWARDED_PROTO, proto.clone());
        if let Some(host) = headers.get(HOST).cloned() {
            headers.insert(&X_FORWARDED_HOST, host);
        }
        headers.insert(&X_REAL_IP, real);
        return ignored;
    }
    if !peer.trusted {
        let untrue: SmallVec<[HeaderName; 4]> =
            headers.keys().filter(|name| is_forwarding(name.as_str())).cloned().collect();
        for name in untrue {
            ignored |= name == X_FORWARDED_FOR || name == FORWARDED;
            headers.remove(name);
        }
    }
    append_element(headers, &X_FORWARDED_FOR, &peer.text);
    if headers.contains_key(FORWARDED) {
        let proto = if peer.tls { ";proto=https" } else { "" };
        let node = match peer.ip {
            IpAddr::V4(ip) => format!("for={ip}{proto}"),
            IpAddr::V6(ip) => format!("for=\"[{ip}]\"{proto}"),
        };
        if let Ok(node) = HeaderValue::from_maybe_shared(node) {
            append_element(headers, &FORWARDED, &node);
        }
    }
    if !headers.contains_key(&X_FORWARDED_PROTO) {
        let proto = if peer.tls { &HTTPS } else { &HTTP };
        headers.insert(&X_FORWARDED_PROTO, proto.clone());
    }
    if !headers.contains_key(&X_FORWARDED_HOST)
        && let Some(host) = headers.get(HOST).cloned()
    {
        headers.insert(&X_FORWARDED_HOST, host);
    }
    headers.insert(&X_REAL_IP, real);
    ignored
}

/// Adds `element` to a list field, whose lines become one.
fn append_element(headers: &mut HeaderMap, name: &HeaderName, element: &HeaderValue) {
    let value = match join(headers, name, b", ") {
        Some(mut list) => {
            list.extend_from_slice(b", ");
            list.extend_from_slice(element.as_bytes());
            HeaderValue::from_maybe_shared(list).unwrap_or_else(|_| element.clone())
        }
        None => element.clone(),
    };
    headers.insert(name, value);
}

/// HTTP/2 clients may split their cookies over lines; HTTP/1 knows one line only
/// (RFC 9113 section 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(COOKIE).iter().nth(1).is_some()
        && let Some(line) = join(headers, &COOKIE, b"; ")
        && let Ok(value) = HeaderValue::from_maybe_shared(line)
    {
        headers.insert(COOKIE, value);
    }
}

fn append_via(headers: &mut HeaderMap, version: Version, present: Present) {
    static HTTP_1: HeaderValue = HeaderValue::from_static("1.1 tidegate");
    static HTTP_1_0: HeaderValue = HeaderValue::from_static("1.0 tidegate");
    static HTTP_2: HeaderValue = HeaderValue::from_static("2.0 tidegate");
    let element = if version == Version::HTTP_2 {
        &HTTP_2
    } else if version == Version::HTTP_10 {
        &HTTP_1_0
    } else {
        &HTTP_1
    };
    if present.has(Present::VIA) {
        append_element(headers, &VIA, element);
    } else {
        headers.insert(VIA, element.clone());
    }
}

fn join(headers: &HeaderMap, name: &HeaderName, separator: &[u8]) -> Option<Vec<u8>> {
    let mut lines = headers.get_all(name).iter().map(HeaderValue::as_bytes);
    let mut list = lines.next()?.to_vec();
    for line in lines {
        list.extend_from_slice(separator);
        list.extend_from_slice(line);
    }
    Some(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    fn values(headers: &HeaderMap, name: &str) -> Vec<String> {
        headers.get_all(name).iter().map(|v| v.to_str().unwrap().to_owned()).collect()
    }

    const NO_BODY: BodyShape = BodyShape { empty: true, exact: true };

    #[test]
    fn se_g4_protected_fields_cannot_be_nominated_away() {
        let mut headers = map(&[
            ("connection", "x-forwarded-for, Host, X-Tenant"),
            ("connection", "authorization, x-gone, x-real-ip"),
            ("host", "a"),
            ("x-forwarded-for", "203.0.113.1"),
            ("x-real-ip", "203.0.113.1"),
            ("x-tenant", "t"),
            ("authorization", "Basic eA=="),
            ("x-gone", "1"),
        ]);
        prepare_request(&mut headers, Version::HTTP_11, NO_BODY, &|name| name == "x-tenant");
        for name in ["host", "x-forwarded-for", "x-real-ip", "x-tenant", "authorization"] {
            assert!(headers.contains_key(name), "{name}");
        }
        assert!(!headers.contains_key("x-gone") && !headers.contains_key("connection"));
    }

    #[test]
    fn each_field_of_interest_is_seen_and_no_other() {
        for (name, field) in [
            ("connection", Present::CONNECTION),
            ("content-length", Present::CONTENT_LENGTH),
            ("transfer-encoding", Present::TRANSFER_ENCODING),
            ("trailer", Present::TRAILER),
            ("te", Present::TE),
            ("upgrade", Present::UPGRADE),
            ("expect", Present::EXPECT),
            ("proxy-authorization", Present::PROXY_AUTHORIZATION),
            ("proxy-authenticate", Present::PROXY_AUTHENTICATE),
            ("cookie", Present::COOKIE),
            ("via", Present::VIA),
            ("host", Present::HOST),
            ("forwarded", Present::FORWARDING),
            ("x-real-ip", Present::FORWARDING),
            ("x_forwarded-for", Present::FORWARDING),
            ("x-forwarded-port", Present::FORWARDING),
            ("keep-alive", Present::KEEP_ALIVE),
            ("proxy-connection", Present::PROXY_CONNECTION),
            ("http2-settings", Present::HTTP2_SETTINGS),
        ] {
            let headers = map(&[("accept", "*/*"), (name, "x"), ("x-forward", "y")]);
            assert_eq!(Present::of(&headers), field, "{name}");
        }
        assert_eq!(Present::of(&map(&[("accept", "*/*"), ("x-real", "y")])), Present(0));
    }

    #[test]
    fn te_keeps_trailers_only() {
        for (te, kept) in [("trailers, deflate", true), ("gzip", false), ("Trailers", true)] {
            let mut headers = map(&[("te", te)]);
            prepare_request(&mut headers, Version::HTTP_2, NO_BODY, &|_| false);
            assert_eq!(headers.get(TE).is_some_and(|v| v == "trailers"), kept, "{te}");
        }
    }

    #[test]
    fn a_body_of_unknown_length_stays_chunked() {
        let unknown = BodyShape { empty: false, exact: false };
        let mut headers = map(&[("transfer-encoding", "chunked")]);
        prepare_request(&mut headers, Version::HTTP_11, unknown, &|_| false);
        assert_eq!(values(&headers, "transfer-encoding"), ["chunked"]);
        let mut headers = map(&[("cookie", "a=1"), ("cookie", "b=2"), ("via", "1.1 lb")]);
        prepare_request(&mut headers, Version::HTTP_2, NO_BODY, &|_| false);
        assert!(!headers.contains_key(TRANSFER_ENCODING));
        assert_eq!(values(&headers, "cookie"), ["a=1; b=2"]);
        assert_eq!(values(&headers, "via"), ["1.1 lb, 2.0 tidegate"]);
    }

    #[test]
    fn an_answer_framed_twice_keeps_no_length() {
        let mut headers = map(&[
            ("transfer-encoding", "chunked"),
            ("content-length", "5"),
            ("connection", "x-r, content-length"),
            ("x-r", "1"),
            ("trailer", "x-sum"),
        ]);
        prepare_response(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["trailer"]);
        let mut headers = map(&[("content-length", "5"), ("connection", "content-length")]);
        prepare_response(&mut headers);
        assert_eq!(values(&headers, "content-length"), ["5"]);
    }

    #[test]
    fn se_g10_an_untrusted_peer_says_nothing_about_forwarding() {
        let peer = Peer::new("127.0.0.2".parse().unwrap(), false);
        let mut headers = map(&[
            ("host", "a.example"),
            ("forwarded", "for=1.1.1.1"),
            ("x-forwarded-for", "1.1.1.1"),
            ("x-forwarded-port", "1"),
            ("x-forwarded-prefix", "/x"),
            ("x_forwarded_for", "1.1.1.1"),
            ("x-real-ip", "1.1.1.1"),
            ("x-forwarded-host", "evil"),
        ]);
        let present = Present::of(&headers);
        assert!(set_forwarding(&mut headers, present, &peer, peer.ip));
        assert_eq!(values(&headers, "x-forwarded-for"), ["127.0.0.2"]);
        assert_eq!(values(&headers, "x-forwarded-host"), ["a.example"]);
        assert_eq!(values(&headers, "x-forwarded-proto"), ["http"]);
        assert_eq!(values(&headers, "x-real-ip"), ["127.0.0.2"]);
        assert_eq!(headers.len(), 5);
    }

    #[test]
    fn who_speaks_tls_is_said_to_where_nothing_was_said() {
        for (tls, proto) in [(false, "http"), (true, "https")] {
            let peer = Peer::new("192.0.2.1".parse().unwrap(), false).with_tls(tls);
            let mut headers = map(&[("host", "a.example")]);
            let present = Present::of(&headers);
            set_forwarding(&mut headers, present, &peer, peer.ip);
            assert_eq!(values(&headers, "x-forwarded-proto"), [proto]);
        }
    }

    #[test]
    fn who_speaks_tls_is_said_to_unless_a_trusted_peer_knows_better() {
        let trusted = Peer::new("192.0.2.1".parse().unwrap(), true).with_tls(true);
        for (peer, proto) in [(trusted.with_trust(false), "https"), (trusted, "wss")] {
            let mut headers = map(&[("x-forwarded-proto", "wss"), ("forwarded", "for=1.1.1.1")]);
            let present = Present::of(&headers);
            set_forwarding(&mut headers, present, &peer, peer.ip);
            assert_eq!(values(&headers, "x-forwarded-proto"), [proto]);
            if peer.trusted {
                let elements = values(&headers, "forwarded");
                assert_eq!(elements, ["for=1.1.1.1, for=192.0.2.1;proto=https"]);
            }
        }
    }

    #[test]
    fn se_g10_a_trusted_peer_is_appended_once() {
        let peer = Peer::new("::1".parse().unwrap(), true);
        let mut headers = map(&[
            ("x-forwarded-for", "9.9.9.9"),
            ("x-forwarded-for", "203.0.113.5"),
            ("forwarded", "for=203.0.113.5"),
            ("x-forwarded-proto", "https"),
        ]);
        let present = Present::of(&headers);
        assert!(!set_forwarding(&mut headers, present, &peer, "203.0.113.5".parse().unwrap()));
        assert_eq!(values(&headers, "x-forwarded-for"), ["9.9.9.9, 203.0.113.5, ::1"]);
        assert_eq!(values(&headers, "forwarded"), ["for=203.0.113.5, for=\"[::1]\""]);
        assert_eq!(values(&headers, "x-forwarded-proto"), ["https"]);
        assert_eq!(values(&headers, "x-real-ip"), ["203.0.113.5"]);
    }
}
