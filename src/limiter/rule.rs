//! Rules (layer 1, pure): which requests a limit applies to, and which bucket
//! each of them uses.

use std::fmt;

use ipnet::IpNet;
use smallvec::SmallVec;

use super::key::KeyBuf;
use super::path::{self, PathPattern};
use super::request::{Attributes, Client};

/// Conditions on a request; all that are given must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// The name of the upstream that the request is for.
    pub upstream: Option<String>,
    /// The normalised path.
    pub path: Option<PathPattern>,
    /// Any of these methods, as sent. Empty: any method.
    pub methods: Vec<String>,
    /// The host, in lower case and without port.
    pub host: Option<String>,
    /// Header names (lower case) with a value that one of their lines must have.
    pub headers: Vec<(String, String)>,
    /// Networks, one of which must hold the client's address. Empty: any.
    pub cidrs: Vec<IpNet>,
}

/// A condition's field that a request does not meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// The upstream that it is for.
    Upstream,
    /// Its path.
    Path,
    /// Its method.
    Method,
    /// Its host.
    Host,
    /// The header of this index in [`Condition::headers`].
    Header(usize),
    /// Its client's address.
    Client,
}

/// Why a limit does not apply to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exclusion {
    /// This field of the limit's condition does not hold.
    Unmatched(Field),
    /// The element of this index in [`Rule::exempt`] exempts it.
    Exempt(usize),
}

impl Condition {
    /// Whether `request` meets every condition.
    pub fn matches(&self, request: &impl Attributes) -> bool {
        self.unmet(request).is_none()
    }

    /// The first field that `request` does not meet, in the order in which they
    /// are declared.
    pub fn unmet(&self, request: &impl Attributes) -> Option<Field> {
        if self.upstream.as_ref().is_some_and(|name| name != request.upstream()) {
            return Some(Field::Upstream);
        }
        if self.path.as_ref().is_some_and(|path| !path.matches(request.path())) {
            return Some(Field::Path);
        }
        if !self.methods.is_empty() && self.methods.iter().all(|m| m != request.method()) {
            return Some(Field::Method);
        }
        if self.host.as_ref().is_some_and(|host| host != request.host()) {
            return Some(Field::Host);
        }
        let other = self.headers.iter().position(|(name, wanted)| {
            let mut found = false;
            request.header(name, &mut |value| found |= value == wanted.as_bytes());
            !found
        });
        if let Some(index) = other {
            return Some(Field::Header(index));
        }
        let ip = request.client().ip();
        if !self.cidrs.is_empty() && !self.cidrs.iter().any(|net| net.contains(&ip)) {
            return Some(Field::Client);
        }
        None
    }
}

/// Where one part of a key comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// The client's address group.
    ClientIp,
    /// A request header, by its name in lower case.
    Header(String),
    /// A cookie, by name.
    Cookie(String),
    /// A query parameter, by name.
    Query(String),
    /// The normalised path.
    Path,
    /// The method.
    Method,
    /// The host.
    Host,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClientIp => f.write_str("client_ip"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Cookie(name) => write!(f, "cookie:{name}"),
            Self::Query(name) => write!(f, "query:{name}"),
            Self::Path => f.write_str("path"),
            Self::Method => f.write_str("method"),
            Self::Host => f.write_str("host"),
        }
    }
}

/// One part of a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyPart {
    source: Source,
    secret: bool,
}

impl KeyPart {
    /// A part from `source`. Credentials (`authorization`, `proxy-authorization`,
    /// `cookie` and every cookie) are secret whether said so or not.
    pub fn new(source: Source, secret: bool) -> Self {
        let credential = match &source {
            Source::Cookie(_) => true,
            Source::Header(name) => {
                matches!(name.as_str(), "authorization" | "proxy-authorization" | "cookie")
            }
            Source::ClientIp | Source::Query(_) | Source::Path | Source::Method | Source::Host => {
                false
            }
        };
        Self { source, secret: secret || credential }
    }

    /// Where the part comes from.
    pub const fn source(&self) -> &Source {
        &self.source
    }

    /// Whether only a hash of the value is kept.
    pub const fn is_secret(&self) -> bool {
        self.secret
    }
}

impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

/// What happens to a request that lacks a key part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missing {
    /// All such requests share one bucket, distinct from any value.
    #[default]
    Shared,
    /// The client's address stands in.
    ClientIp,
    /// The limit does not apply.
    Skip,
    /// The request is refused with 400.
    Deny,
}

/// What the key parts made of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extracted {
    /// The key is in the buffer.
    Key,
    /// The part of this index is missing, so that the limit does not apply.
    Skipped(usize),
    /// The part of this index is missing and the limit denies that.
    Denied(usize),
}

/// Which requests, and which bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// The requests the limit applies to.
    pub condition: Condition,
    /// Requests that are exempt: any of these exempts.
    pub exempt: Vec<Condition>,
    /// The parts of the key, in order. Empty: one bucket for all.
    pub key: Vec<KeyPart>,
    /// What happens when a part is absent or empty.
    pub missing: Missing,
}

impl Rule {
    /// Whether the limit applies to `request`.
    pub fn applies(&self, request: &impl Attributes) -> bool {
        self.exclusion(request).is_none()
    }

    /// Why the limit does not apply to `request`; `None` if it does.
    pub fn exclusion(&self, request: &impl Attributes) -> Option<Exclusion> {
        if let Some(field) = self.condition.unmet(request) {
            return Some(Exclusion::Unmatched(field));
        }
        self.exempt.iter().position(|c| c.matches(request)).map(Exclusion::Exempt)
    }

    /// Writes the canonical key of `request` into `key`, which is cleared first.
    pub fn extract(&self, request: &impl Attributes, key: &mut KeyBuf) -> Extracted {
        key.clear();
        for (index, part) in self.key.iter().enumerate() {
            let start = key.as_bytes().len();
            if push_part(&part.source, request, key) {
                if part.secret {
                    key.conceal(start);
                }
                continue;
            }
            match self.missing {
                Missing::Shared => key.push_missing(),
                Missing::ClientIp => key.push_client(request.client()),
                Missing::Skip => return Extracted::Skipped(index),
                Missing::Deny => return Extracted::Denied(index),
            }
        }
        key.finish();
        Extracted::Key
    }

    /// The canonical key for values given as text, one for each part, normalised
    /// as a request's would be. Used for overrides and operators' questions.
    ///
    /// # Errors
    /// If the number of values is not the number of parts, a value is empty, or
    /// one for `client_ip` is not an address.
    pub fn key_from_text(
        &self,
        values: &[impl AsRef<str>],
        ipv6_prefix: u8,
    ) -> Result<KeyBuf, KeyTextError> {
        let values: SmallVec<[Option<&str>; 4]> =
            values.iter().map(|value| Some(value.as_ref())).collect();
        self.key_from_parts(&values, ipv6_prefix)
    }

    /// As [`key_from_text`](Self::key_from_text), with `None` for a part that
    /// the requests lack and that the limit shares.
    ///
    /// # Errors
    /// As [`key_from_text`](Self::key_from_text).
    pub fn key_from_parts(
        &self,
        values: &[Option<&str>],
        ipv6_prefix: u8,
    ) -> Result<KeyBuf, KeyTextError> {
        if values.len() != self.key.len() {
            return Err(KeyTextError::Count { expected: self.key.len(), got: values.len() });
        }
        let mut key = KeyBuf::new();
        for (part, value) in self.key.iter().zip(values) {
            let Some(value) = *value else {
                key.push_missing();
                continue;
            };
            let start = key.as_bytes().len();
            if value.is_empty() {
                return Err(KeyTextError::Empty(part.to_string()));
            }
            match &part.source {
                Source::ClientIp => {
                    let text = value.split_once('/').map_or(value, |(ip, _)| ip);
                    let ip = text.parse().map_err(|_| KeyTextError::Address(value.to_owned()))?;
                    key.push_client(Client::new(ip, ipv6_prefix));
                }
                Source::Path => key.push_text(&path::normalise(value.as_bytes())),
                Source::Host => key.push_text(value.to_ascii_lowercase().as_bytes()),
                Source::Header(_) | Source::Cookie(_) | Source::Query(_) | Source::Method => {
                    key.push_text(value.as_bytes());
                }
            }
            if part.secret {
                key.conceal(start);
            }
        }
        key.finish();
        Ok(key)
    }

    /// The key parts as text, `client_ip,header:x-api-key`: part of the identity
    /// of every bucket.
    pub fn parts_text(&self) -> String {
        let parts: Vec<String> = self.key.iter().map(KeyPart::to_string).collect();
        parts.join(",")
    }
}

/// Why values given as text do not make a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyTextError {
    /// Wrong number of values.
    #[error("the key has {expected} part(s), but {got} value(s) were given")]
    Count {
        /// Parts of the key.
        expected: usize,
        /// Values given.
        got: usize,
    },
    /// An empty value, which no bucket has.
    #[error("the value for `{0}` is empty; an empty part counts as missing")]
    Empty(String),
    /// Not an IP address.
    #[error("`{0}` is not an IP address")]
    Address(String),
}

/// Adds the values of `source` to `key`. `false`, and nothing added, if there is
/// none or all are empty.
fn push_part(source: &Source, request: &impl Attributes, key: &mut KeyBuf) -> bool {
    match source {
        Source::ClientIp => {
            key.push_client(request.client());
            true
        }
        Source::Header(name) => {
            // The common case of one value needs no list; only when a second
            // one appears are they gathered.
            let mut count = 0usize;
            let start = key.as_bytes().len();
            request.header(name, &mut |value| {
                count += 1;
                if count == 1 && !value.is_empty() {
                    key.push_text(value);
                }
            });
            match count {
                0 => false,
                1 => key.as_bytes().len() > start,
                _ => {
                    key.truncate(start);
                    let mut values: SmallVec<[Vec<u8>; 4]> = SmallVec::new();
                    request.header(name, &mut |value| values.push(value.to_vec()));
                    push_list(values.iter().map(Vec::as_slice), key)
                }
            }
        }
        Source::Cookie(name) => {
            let mut values: SmallVec<[Vec<u8>; 2]> = SmallVec::new();
            request.header("cookie", &mut |line| {
                for pair in line.split(|b| *b == b';') {
                    let pair = pair.trim_ascii();
                    if let Some(i) = pair.iter().position(|b| *b == b'=')
                        && pair[..i].trim_ascii() == name.as_bytes()
                    {
                        values.push(pair[i + 1..].trim_ascii().to_vec());
                    }
                }
            });
            push_list(values.iter().map(Vec::as_slice), key)
        }
        Source::Query(name) => {
            let mut values: SmallVec<[Vec<u8>; 2]> = SmallVec::new();
            for pair in request.query().split('&') {
                let (field, value) = pair.split_once('=').unwrap_or((pair, ""));
                if decode_form(field) == name.as_bytes() {
                    values.push(decode_form(value));
                }
            }
            push_list(values.iter().map(Vec::as_slice), key)
        }
        Source::Path => {
            key.push_text(request.path());
            true
        }
        Source::Method => {
            key.push_text(request.method().as_bytes());
            true
        }
        Source::Host => {
            let host = request.host();
            if !host.is_empty() {
                key.push_text(host.as_bytes());
            }
            !host.is_empty()
        }
    }
}

fn push_list<'a>(
    values: impl ExactSizeIterator<Item = &'a [u8]> + Clone,
    key: &mut KeyBuf,
) -> bool {
    if values.clone().all(<[u8]>::is_empty) {
        return false;
    }
    key.push_values(values);
    true
}

/// One field of a query: `+` is a blank, escapes are decoded.
fn decode_form(text: &str) -> Vec<u8> {
    let blanks: Vec<u8> = text.bytes().map(|b| if b == b'+' { b' ' } else { b }).collect();
    percent_encoding::percent_decode(&blanks).collect()
}

#[cfg(test)]
mod tests {
    use super::super::key::{KeyValue, decode};
    use super::super::testing::FakeRequest;
    use super::*;

    fn rule(parts: &[Source]) -> Rule {
        Rule {
            key: parts.iter().map(|s| KeyPart::new(s.clone(), false)).collect(),
            ..Rule::default()
        }
    }

    fn key_of(rule: &Rule, request: &FakeRequest) -> Vec<u8> {
        let mut key = KeyBuf::new();
        assert_eq!(rule.extract(request, &mut key), Extracted::Key);
        key.as_bytes().to_vec()
    }

    #[test]
    fn kx_g1_an_empty_value_is_an_absent_one() {
        let rule = rule(&[Source::Header("x-api-key".into())]);
        let absent = key_of(&rule, &FakeRequest::get("/"));
        let empty = key_of(&rule, &FakeRequest::get("/").with_header("x-api-key", ""));
        let twice = key_of(
            &rule,
            &FakeRequest::get("/").with_header("x-api-key", "").with_header("x-api-key", ""),
        );
        assert_eq!(absent, empty);
        assert_eq!(absent, twice);
        assert_eq!(decode(&absent).unwrap(), [KeyValue::Missing]);
        assert_ne!(absent, key_of(&rule, &FakeRequest::get("/").with_header("x-api-key", "none")));
    }

    #[test]
    fn a_missing_part_does_what_the_limit_says() {
        let mut rule = rule(&[Source::Method, Source::Header("x-a".into())]);
        let request = FakeRequest::get("/").from("203.0.113.5");
        let mut key = KeyBuf::new();
        for (missing, expected) in [
            (Missing::Shared, Extracted::Key),
            (Missing::ClientIp, Extracted::Key),
            (Missing::Skip, Extracted::Skipped(1)),
            (Missing::Deny, Extracted::Denied(1)),
        ] {
            rule.missing = missing;
            assert_eq!(rule.extract(&request, &mut key), expected, "{missing:?}");
        }
        rule.missing = Missing::ClientIp;
        let key = decode(&key_of(&rule, &request)).unwrap();
        assert_eq!(key[1].to_string(), "203.0.113.5");
    }

    #[test]
    fn repeated_values_are_one_ordered_value() {
        let rule = rule(&[Source::Header("x-a".into())]);
        let ab = FakeRequest::get("/").with_header("x-a", "a").with_header("x-a", "b");
        let ba = FakeRequest::get("/").with_header("x-a", "b").with_header("x-a", "a");
        let joined = FakeRequest::get("/").with_header("x-a", "a, b");
        assert_ne!(key_of(&rule, &ab), key_of(&rule, &ba));
        assert_ne!(key_of(&rule, &ab), key_of(&rule, &joined));
    }

    #[test]
    fn cookies_and_queries_are_parsed() {
        let rule = rule(&[Source::Query("tenant".into())]);
        let plain = key_of(&rule, &FakeRequest::get("/?x=1&tenant=a%20b"));
        assert_eq!(plain, key_of(&rule, &FakeRequest::get("/?tenant=a+b&y")));
        assert_ne!(plain, key_of(&rule, &FakeRequest::get("/?tenant=a+b&tenant=c")));

        let session = self::rule(&[Source::Cookie("sid".into())]);
        let one = key_of(&session, &FakeRequest::get("/").with_header("cookie", "a=1; sid=s3cr3t"));
        let crumbs = key_of(
            &session,
            &FakeRequest::get("/").with_header("cookie", "a=1").with_header("cookie", "sid=s3cr3t"),
        );
        assert_eq!(one, crumbs);
        assert!(matches!(decode(&one).unwrap()[..], [KeyValue::Secret(_)]));
    }

    #[test]
    fn credentials_are_always_secret() {
        for name in ["authorization", "proxy-authorization", "cookie"] {
            assert!(KeyPart::new(Source::Header(name.into()), false).is_secret());
        }
        assert!(KeyPart::new(Source::Cookie("a".into()), false).is_secret());
        assert!(!KeyPart::new(Source::Header("x-api-key".into()), false).is_secret());
    }

    #[test]
    fn text_values_make_the_same_key_as_a_request() {
        let rule = rule(&[Source::ClientIp, Source::Path, Source::Host, Source::Method]);
        let request =
            FakeRequest::get("/a/../b%20c").from("2001:db8:0:1::9").with_host("api.example.com");
        let text = ["2001:db8:0:1::77", "/b%20c", "API.example.com", "GET"];
        let from_text = rule.key_from_text(&text, 64).unwrap();
        assert_eq!(from_text.as_bytes(), key_of(&rule, &request));
        assert!(rule.key_from_text(&["1.2.3.4"], 64).is_err());
        assert!(rule.key_from_text(&["x", "/", "h", "GET"], 64).is_err());
        assert!(rule.key_from_text(&["1.2.3.4", "", "h", "GET"], 64).is_err());

        let rule = self::rule(&[Source::Method, Source::Header("x-a".into())]);
        let missing = rule.key_from_parts(&[Some("GET"), None], 64).unwrap();
        assert_eq!(missing.as_bytes(), key_of(&rule, &FakeRequest::get("/")));
    }

    #[test]
    fn all_named_conditions_must_hold() {
        let condition = Condition {
            upstream: Some("acme".into()),
            path: Some(PathPattern::try_new("/api/").unwrap()),
            methods: vec!["GET".into(), "POST".into()],
            host: Some("api.example.com".into()),
            headers: vec![("x-env".into(), "prod".into())],
            cidrs: vec!["10.1.0.0/16".parse().unwrap()],
        };
        let good = || {
            FakeRequest::get("/api/x")
                .with_host("api.example.com")
                .with_header("x-env", "test")
                .with_header("x-env", "prod")
                .from("10.1.2.3")
                .routed_to("acme")
        };
        assert!(condition.matches(&good()));
        assert!(!condition.matches(&good().routed_to("other")));
        assert!(!condition.matches(&good().with_method("PUT")));
        assert!(!condition.matches(&good().with_host("other.example.com")));
        assert!(!condition.matches(&good().from("10.2.0.1")));
        assert!(!condition.matches(&FakeRequest::get("/apix")));
        assert!(Condition::default().matches(&FakeRequest::get("/")));
        let rule = Rule { exempt: vec![condition], ..Rule::default() };
        assert!(!rule.applies(&good()));
        assert!(rule.applies(&good().from("10.2.0.1")));
    }
}
