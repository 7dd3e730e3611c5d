//! What a request head must be before anything is decided about it: one valid
//! host, a method that a proxy may pass on, a framing that it understands.
//! A request that fails here reaches neither a limit nor the upstream.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::time::Duration;

use http::header::{
    ACCESS_CONTROL_REQUEST_METHOD, CONTENT_TYPE, COOKIE, EXPECT, HOST, MAX_FORWARDS, ORIGIN,
    TRANSFER_ENCODING,
};
use http::request::Parts;
use http::uri::{self, PathAndQuery, Uri};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Version};

use super::config::Maxima;
use super::egress::{DEFAULT, upstream_of};
use super::headers::Present;
use super::response::Problem;
use crate::limiter::{self, Attributes, Client};

/// A request as rules see it. What few rules ask for is brought into form when one does.
#[derive(Debug)]
pub struct HttpRequest<'a> {
    parts: &'a Parts,
    path: OnceCell<Cow<'a, [u8]>>,
    host: OnceCell<Cow<'a, str>>,
    client: Client,
}

/// With so few fields, looking at each is cheaper than finding one by its hash.
const FEW_FIELDS: usize = 16;

impl<'a> HttpRequest<'a> {
    /// The request with the head `parts`, sent on behalf of `client`.
    pub const fn new(parts: &'a Parts, client: Client) -> Self {
        Self { parts, path: OnceCell::new(), host: OnceCell::new(), client }
    }

    fn find_host(&self) -> Cow<'a, str> {
        let host = self
            .parts
            .uri
            .authority()
            .map(uri::Authority::as_str)
            .or_else(|| self.parts.headers.get(HOST).and_then(|host| host.to_str().ok()))
            .map_or("", without_port);
        if host.bytes().any(|b| b.is_ascii_uppercase()) {
            Cow::Owned(host.to_ascii_lowercase())
        } else {
            Cow::Borrowed(host)
        }
    }
}

impl Attributes for HttpRequest<'_> {
    fn method(&self) -> &str {
        self.parts.method.as_str()
    }

    fn path(&self) -> &[u8] {
        self.path.get_or_init(|| limiter::normalise(self.parts.uri.path().as_bytes()))
    }

    fn host(&self) -> &str {
        self.host.get_or_init(|| self.find_host())
    }

    fn client(&self) -> Client {
        self.client
    }

    fn header(&self, name: &str, each: &mut dyn FnMut(&[u8])) {
        let headers = &self.parts.headers;
        if headers.len() > FEW_FIELDS {
            headers.get_all(name).iter().for_each(|value| each(value.as_bytes()));
            return;
        }
        for (field, value) in headers {
            if field.as_str().eq_ignore_ascii_case(name) {
                each(value.as_bytes());
            }
        }
    }

    fn query(&self) -> &str {
        self.parts.uri.query().unwrap_or("")
    }

    fn upstream(&self) -> &str {
        upstream_of(self.parts)
    }
}

/// Whether a browser asks if it may send another request, which no limit counts. A
/// named upstream counts everything that it gets, and so do its limits.
pub(super) fn is_preflight(parts: &Parts) -> bool {
    parts.method == Method::OPTIONS
        && upstream_of(parts) == DEFAULT
        && parts.headers.contains_key(ORIGIN)
        && parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

static PREFER: HeaderName = HeaderName::from_static("prefer");

/// How long the client wants to wait at most (`Prefer: wait=N`, RFC 7240 section
/// 4.3). Of several the first counts; one that is no number of seconds is none.
pub(super) fn preferred_wait(headers: &HeaderMap) -> Option<Duration> {
    let preferences = headers
        .get_all(&PREFER)
        .iter()
        .filter_map(|line| line.to_str().ok())
        .flat_map(|line| line.split(','));
    let mut waits = preferences.filter_map(|preference| {
        // Parameters of a preference follow behind a semicolon.
        let preference = preference.split(';').next()?;
        let (name, value) = preference.split_once('=')?;
        name.trim().eq_ignore_ascii_case("wait").then(|| value.trim().trim_matches('"'))
    });
    let seconds = waits.next()?;
    if seconds.is_empty() || !seconds.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    // More digits than fit are a very long time.
    Some(Duration::from_secs(seconds.parse().unwrap_or(u64::from(u32::MAX))))
}

/// Whether the caller speaks gRPC, in any of its forms.
pub(super) fn is_grpc(content_type: Option<&HeaderValue>) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    content_type
        .and_then(|value| value.as_bytes().get(..GRPC.len()))
        .is_some_and(|start| start.eq_ignore_ascii_case(GRPC))
}

/// Whether the request needs an upstream that speaks HTTP/2: gRPC, but not
/// gRPC-Web, which was made for HTTP/1.
pub(super) fn needs_http2(parts: &Parts) -> bool {
    if parts.version != Version::HTTP_2 {
        return false;
    }
    let content_type = parts.headers.get(CONTENT_TYPE);
    is_grpc(content_type)
        && content_type
            .is_some_and(|value| matches!(value.as_bytes().get(16), None | Some(b'+' | b';')))
}

/// Checks a request head and brings it into the one form in which it is decided
/// about and forwarded: the authority in `Host`, the target in origin form.
///
/// # Errors
/// The problem to answer with.
pub(super) fn admit(parts: &mut Parts, max: &Maxima) -> Result<(), Problem> {
    // A proxy that passed these on would become a tunnel or a mirror.
    if parts.method == Method::CONNECT || parts.method == Method::TRACE {
        return Err(Problem::MethodNotAllowed);
    }
    let present = Present::of(&parts.headers);
    check_count(parts, present, max.headers)?;
    check_host(parts)?;
    if present.has(Present::FRAMING) {
        check_framing(parts, max.body)?;
    }
    if present.has(Present::EXPECT)
        && parts
            .headers
            .get_all(EXPECT)
            .iter()
            .any(|v| !v.as_bytes().eq_ignore_ascii_case(b"100-continue"))
    {
        return Err(Problem::ExpectationFailed);
    }
    to_origin_form(parts)?;
    if parts.method == Method::OPTIONS { count_hop(&mut parts.headers) } else { Ok(()) }
}

/// HTTP/2 bounds the bytes of a head, not its fields. It may divide a cookie into
/// a line for each pair (RFC 9113 section 8.2.3); these count as one.
fn check_count(parts: &Parts, present: Present, max: usize) -> Result<(), Problem> {
    let crumbs =
        if present.has(Present::COOKIE) { parts.headers.get_all(COOKIE).iter().count() } else { 0 };
    let fields = parts.headers.len() - crumbs.saturating_sub(1);
    if fields > max { Err(Problem::TooManyFields) } else { Ok(()) }
}

fn check_host(parts: &mut Parts) -> Result<(), Problem> {
    let mut lines = parts.headers.get_all(HOST).iter();
    let host = lines.next();
    if lines.next().is_some() {
        return Err(Problem::BadRequest("more than one Host field"));
    }
    if host.is_some_and(|host| !is_valid_host(host.as_bytes())) {
        return Err(Problem::BadRequest("the Host field is not a host"));
    }
    let authority = parts.uri.authority();
    if authority.is_some_and(|authority| !is_valid_host(authority.as_str().as_bytes())) {
        return Err(Problem::BadRequest("the target is not a host"));
    }
    match (authority, host) {
        // An absolute target overrides Host (RFC 9112 section 3.2.2); in HTTP/2
        // the two must be the same (RFC 9113 section 8.3.1).
        (Some(authority), Some(host)) => {
            let same = host.as_bytes().eq_ignore_ascii_case(authority.as_str().as_bytes());
            if same {
                return Ok(());
            }
            if parts.version == Version::HTTP_2 {
                return Err(Problem::BadRequest("Host and :authority differ"));
            }
        }
        (Some(_), None) if parts.version == Version::HTTP_2 => {}
        (None, Some(_)) => return Ok(()),
        // HTTP/1.0 knows no Host; the upstream's own name will do.
        (Some(_) | None, None) if parts.version == Version::HTTP_10 => {}
        (Some(_) | None, None) => return Err(Problem::BadRequest("no Host field")),
    }
    if let Some(authority) = authority {
        let value = HeaderValue::from_str(authority.as_str())
            .map_err(|_| Problem::BadRequest("the target is not a host"))?;
        parts.headers.insert(HOST, value);
    }
    Ok(())
}

/// A registered name, an IPv4 or a bracketed IPv6 address, and maybe a port.
/// Stricter than RFC 3986: what separates lists or names users is no host.
fn is_valid_host(host: &[u8]) -> bool {
    let is_port = |port: &[u8]| port.len() <= 5 && port.iter().all(u8::is_ascii_digit);
    if let Some(rest) = host.strip_prefix(b"[") {
        let Some(end) = rest.iter().position(|b| *b == b']') else { return false };
        let address = &rest[..end];
        let after = &rest[end + 1..];
        return !address.is_empty()
            && address.iter().all(|b| b.is_ascii_hexdigit() || matches!(b, b':' | b'.'))
            && (after.is_empty() || after.strip_prefix(b":").is_some_and(is_port));
    }
    let mut halves = host.splitn(2, |b| *b == b':');
    let name = halves.next().unwrap_or_default();
    !name.is_empty()
        && name.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~'))
        && halves.next().is_none_or(is_port)
}

fn without_port(host: &str) -> &str {
    let end_of_name = host.rfind(']').map_or(0, |at| at + 1);
    match host[end_of_name..].find(':') {
        Some(colon) => &host[..end_of_name + colon],
        None => host,
    }
}

fn check_framing(parts: &Parts, max_body: Option<u64>) -> Result<(), Problem> {
    let mut codings = parts
        .headers
        .get_all(TRANSFER_ENCODING)
        .iter()
        .flat_map(|line| line.as_bytes().split(|b| *b == b','))
        .map(<[u8]>::trim_ascii)
        .filter(|coding| !coding.is_empty());
    if let Some(coding) = codings.next()
        && (!coding.eq_ignore_ascii_case(b"chunked") || codings.next().is_some())
    {
        return Err(Problem::NotImplemented("only the transfer coding chunked is supported"));
    }
    let declared = parts.headers.get(http::header::CONTENT_LENGTH);
    let declared = declared.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if let (Some(declared), Some(max)) = (declared, max_body)
        && declared > max
    {
        return Err(Problem::ContentTooLarge);
    }
    Ok(())
}

fn to_origin_form(parts: &mut Parts) -> Result<(), Problem> {
    if parts.uri.path() == "*" && parts.method != Method::OPTIONS {
        return Err(Problem::BadRequest("only OPTIONS may have the target *"));
    }
    if parts.uri.scheme().is_none() && parts.uri.authority().is_none() {
        return Ok(());
    }
    if parts.uri.scheme().is_none() {
        return Err(Problem::BadRequest("only CONNECT may have a host as its target"));
    }
    if parts.uri.scheme_str().is_some_and(|scheme| scheme != "http" && scheme != "https") {
        return Err(Problem::BadRequest("the scheme of the target is not http"));
    }
    let target = parts.uri.path_and_query().cloned();
    let target = target.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let mut uri = uri::Parts::default();
    uri.path_and_query = Some(target);
    parts.uri =
        Uri::from_parts(uri).map_err(|_| Problem::BadRequest("the target is not a path"))?;
    Ok(())
}

/// Counts this proxy among those that `Max-Forwards` allows. What may go no further is
/// answered here (RFC 9110 section 7.6.2, which knows the field for OPTIONS and TRACE).
fn count_hop(headers: &mut HeaderMap) -> Result<(), Problem> {
    let mut lines = headers.get_all(MAX_FORWARDS).iter();
    let Some(left) = lines.next() else { return Ok(()) };
    let digits = left.to_str().ok().filter(|text| text.bytes().all(|b| b.is_ascii_digit()));
    let digits = digits.filter(|text| !text.is_empty() && lines.next().is_none());
    let digits = digits.ok_or(Problem::BadRequest("Max-Forwards is not one number"))?;
    // More digits than fit are more hops than there are; a smaller number may be passed on.
    match digits.parse().unwrap_or(u32::MAX).checked_sub(1) {
        Some(left) => {
            headers.insert(MAX_FORWARDS, HeaderValue::from(left));
            Ok(())
        }
        None => Err(Problem::LastHop),
    }
}

/// Whether any limit looks at the field `name`.
pub(super) fn is_keyed(limits: &limiter::LimitSet, name: &HeaderName) -> bool {
    limits.iter().any(|(_, limit)| {
        let rule = limit.rule();
        let (cases, cost): (&[_], _) = match limit.cost() {
            limiter::Cost::Fixed(_) => (&[], None),
            limiter::Cost::Cases(cases) => (cases, None),
            limiter::Cost::Header { name, .. } => (&[], Some(name)),
        };
        let conditions = std::iter::once(&rule.condition)
            .chain(&rule.exempt)
            .chain(cases.iter().map(|(condition, _)| condition));
        cost.is_some_and(|field| field == name.as_str())
            || conditions
                .flat_map(|condition| &condition.headers)
                .any(|(field, _)| field == name.as_str())
            || rule.key.iter().any(|part| match part.source() {
                limiter::Source::Header(field) => field == name.as_str(),
                limiter::Source::Cookie(_)
                | limiter::Source::ClientIp
                | limiter::Source::Query(_)
                | limiter::Source::Path
                | limiter::Source::Method
                | limiter::Source::Host => false,
            })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn parts(version: Version, method: &str, uri: &str, fields: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().version(version).method(method).uri(uri);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn host_after(version: Version, uri: &str, fields: &[(&str, &str)]) -> Result<String, Problem> {
        let mut parts = parts(version, "GET", uri, fields);
        admit(&mut parts, &Maxima::default())?;
        assert!(parts.uri.authority().is_none());
        Ok(parts.headers.get(HOST).map_or("", |h| h.to_str().unwrap()).to_owned())
    }

    #[test]
    fn a_preferred_wait_is_a_number_of_seconds() {
        let wait = |lines: &[&str]| {
            let lines: Vec<_> = lines.iter().map(|line| ("prefer", *line)).collect();
            preferred_wait(&parts(Version::HTTP_11, "GET", "/", &lines).headers)
        };
        for (lines, seconds) in [
            (&["wait=10"][..], 10),
            (&["respond-async, Wait = \"7\"; x=y, wait=9"], 7),
            (&["return=minimal", "wait=0"], 0),
            (&["wait=99999999999999999999999"], 4_294_967_295),
        ] {
            assert_eq!(wait(lines), Some(Duration::from_secs(seconds)), "{lines:?}");
        }
        for none in ["", "wait", "wait=", "wait=-1", "wait=1.5", "wait=+1", "wait=1s", "waits=1"] {
            assert_eq!(wait(&[none]), None, "{none}");
        }
    }

    #[test]
    fn hp_g8_exactly_one_valid_host() {
        let h1 = |fields: &[(&str, &str)]| host_after(Version::HTTP_11, "/x", fields);
        assert_eq!(h1(&[("host", "a.example:8080")]).unwrap(), "a.example:8080");
        assert_eq!(h1(&[("host", "[::1]:80")]).unwrap(), "[::1]:80");
        for bad in ["", "a b", "a,b", "a@b", "a:x", "[::1", "[]", "a/b", "a:80:80", "a:123456"] {
            assert!(matches!(h1(&[("host", bad)]), Err(Problem::BadRequest(_))), "{bad}");
        }
        assert!(h1(&[]).is_err());
        assert!(h1(&[("host", "a"), ("host", "a")]).is_err());
        assert_eq!(host_after(Version::HTTP_10, "/x", &[]).unwrap(), "");
    }

    #[test]
    fn an_absolute_target_is_the_host() {
        let absolute = "http://real.example/x?y";
        let fields = [("host", "other.example")];
        assert_eq!(host_after(Version::HTTP_11, absolute, &fields).unwrap(), "real.example");
        assert_eq!(host_after(Version::HTTP_2, absolute, &[]).unwrap(), "real.example");
        assert!(host_after(Version::HTTP_2, absolute, &fields).is_err());
        assert!(host_after(Version::HTTP_11, absolute, &[]).is_err());
    }

    #[test]
    fn what_a_proxy_must_not_forward_is_refused() {
        let host = ("host", "a");
        let check = |method, uri, fields: &[(&str, &str)]| {
            let max = Maxima { body: Some(10), ..Maxima::default() };
            admit(&mut parts(Version::HTTP_11, method, uri, fields), &max)
        };
        assert!(matches!(check("CONNECT", "a:443", &[host]), Err(Problem::MethodNotAllowed)));
        assert!(matches!(check("TRACE", "/", &[host]), Err(Problem::MethodNotAllowed)));
        check("OPTIONS", "*", &[host]).unwrap();
        assert!(check("GET", "*", &[host]).is_err());
        assert!(check("GET", "a", &[host]).is_err());
        let coding = ("transfer-encoding", "gzip, chunked");
        assert!(matches!(check("POST", "/", &[host, coding]), Err(Problem::NotImplemented(_))));
        check("POST", "/", &[host, ("transfer-encoding", "Chunked")]).unwrap();
        let large = ("content-length", "11");
        assert!(matches!(check("POST", "/", &[host, large]), Err(Problem::ContentTooLarge)));
        let expect = ("expect", "200-maybe");
        assert!(matches!(check("POST", "/", &[host, expect]), Err(Problem::ExpectationFailed)));
    }

    #[test]
    fn every_hop_of_options_counts_and_the_last_one_answers() {
        let after = |method, lines: &[&str]| {
            let mut fields = vec![("host", "a")];
            fields.extend(lines.iter().map(|line| ("max-forwards", *line)));
            let mut parts = parts(Version::HTTP_11, method, "/", &fields);
            admit(&mut parts, &Maxima::default())?;
            let left = parts.headers.get_all(MAX_FORWARDS).iter();
            Ok(left.map(|value| value.to_str().unwrap().to_owned()).collect::<Vec<_>>())
        };
        for (lines, left) in [
            (&[][..], &[][..]),
            (&["1"], &["0"]),
            (&["010"], &["9"]),
            (&["4294967295"], &["4294967294"]),
            (&["99999999999999999999"], &["4294967294"]),
        ] {
            assert_eq!(after("OPTIONS", lines).unwrap(), left, "{lines:?}");
        }
        for lines in [&["0"][..], &["00"]] {
            assert_eq!(after("OPTIONS", lines), Err(Problem::LastHop), "{lines:?}");
        }
        for lines in [&[""][..], &["-1"], &["+1"], &["1.5"], &["1, 2"], &["x"], &["1", "1"]] {
            let refused = after("OPTIONS", lines);
            assert!(matches!(refused, Err(Problem::BadRequest(_))), "{lines:?}: {refused:?}");
        }
        // For other methods the field means nothing.
        assert_eq!(after("GET", &["0"]).unwrap(), ["0"]);
    }

    #[test]
    fn rules_see_the_host_without_port_and_in_lower_case() {
        let client = Client::new([127, 0, 0, 1].into(), 64);
        for (host, seen) in [("A.Example:80", "a.example"), ("[::1]:80", "[::1]"), ("b", "b")] {
            let parts = parts(Version::HTTP_11, "GET", "/x/../y?q=1", &[("host", host)]);
            let request = HttpRequest::new(&parts, client);
            assert_eq!(request.host(), seen);
            assert_eq!((request.path(), request.query()), (b"/y".as_slice(), "q=1"));
        }
    }

    #[test]
    fn rules_see_all_values_of_a_field_however_many_others_there_are() {
        let client = Client::new([127, 0, 0, 1].into(), 64);
        for others in [0, FEW_FIELDS - 2, FEW_FIELDS - 1, 3 * FEW_FIELDS] {
            let names: Vec<_> = (0..others).map(|n| format!("x-{n}")).collect();
            let mut fields = vec![("x-key", "a")];
            fields.extend(names.iter().map(|name| (name.as_str(), "other")));
            fields.push(("X-Key", "b"));
            let parts = parts(Version::HTTP_11, "GET", "/", &fields);
            let mut seen = Vec::new();
            let request = HttpRequest::new(&parts, client);
            request.header("x-key", &mut |value| seen.push(value.to_vec()));
            assert_eq!(seen, [b"a", b"b"], "{others}");
        }
    }

    #[test]
    fn grpc_is_told_from_its_relative_for_browsers() {
        for (version, content_type, expected) in [
            (Version::HTTP_2, "application/grpc", true),
            (Version::HTTP_2, "application/grpc+proto", true),
            (Version::HTTP_2, "application/grpc-web", false),
            (Version::HTTP_2, "application/json", false),
            (Version::HTTP_11, "application/grpc", false),
        ] {
            let parts = parts(version, "POST", "/", &[("content-type", content_type)]);
            assert_eq!(needs_http2(&parts), expected, "{content_type}");
        }
    }
}
