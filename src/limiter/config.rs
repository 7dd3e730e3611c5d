//! The `limiter` and `limits` sections, and how a limit is compiled from its
//! text.
//!
//! Each value is checked while it is read; [`LimitConfig::compile`] checks what
//! only shows when values are put together.

use std::borrow::Cow;
use std::collections::HashMap;
use std::str::FromStr;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::key::BucketId;
use super::limit::{Limit, LimitSpec, Mode};
use super::path::PathPattern;
use super::quota::{Quota, Rate};
use super::rule::{Condition, KeyPart, Missing, Rule, Source};
use super::tokens::Tokens;
use crate::settings::{
    DurationText, Fault, NOT_SUPPORTED, NameText, NetworkText, PathSegment, Whole, text,
};

/// How much memory buckets may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Limiter")]
pub struct LimiterConfig {
    /// Buckets kept at most. Default: 1000000.
    #[serde(with = "BucketCount")]
    pub max_buckets: usize,
    /// A bucket may go when it is full again and unused this long. Default: 10s.
    #[serde(with = "DurationText")]
    pub idle_expiry: Duration,
}

// Bucket indices are 32 bits wide on the wire and in the store's estimates.
type BucketCount = Whole<1, 4_294_967_295>;

impl Default for LimiterConfig {
    fn default() -> Self {
        Self { max_buckets: 1_000_000, idle_expiry: Duration::from_secs(10) }
    }
}

/// One limit: which requests it applies to, which bucket each uses, and how much
/// that bucket gives.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Limit")]
pub struct LimitConfig {
    /// The limit's identity among all replicas. Required.
    #[serde(default)]
    #[schemars(required)]
    pub name: Option<LimitName>,
    /// The requests it applies to; all that is named must hold. Default: all.
    #[serde(default, rename = "match")]
    pub condition: ConditionConfig,
    /// Requests that are exempt: those that meet any element. Default: none.
    #[serde(default)]
    pub exempt: Vec<ConditionConfig>,
    /// What tells one bucket from another; `[]` is one bucket for all.
    /// Default: `[client_ip]`.
    #[serde(default = "default_key")]
    pub key: Vec<KeyPartConfig>,
    /// What happens when a key part is absent or empty. Default: shared.
    #[serde(default, with = "MissingText")]
    pub missing: Missing,
    /// Tokens that come back per period. Required.
    #[serde(default)]
    #[schemars(required)]
    pub rate: Option<RateText>,
    /// Tokens that a bucket holds, 1 to 10^12. Default: the N of the rate.
    #[serde(default)]
    pub burst: Option<Burst>,
    /// Tokens that one request costs, 1 up to the burst. Default: 1.
    #[serde(default)]
    pub cost: Cost,
    /// Other quotas for single keys. Default: none.
    #[serde(default)]
    pub overrides: Vec<OverrideConfig>,
    /// Refuse requests, or only report. Default: enforce.
    #[serde(default, with = "ModeText")]
    pub mode: Mode,
    /// Whether answers tell the limit's state. Default: true.
    #[serde(default = "default_expose")]
    pub expose: bool,
    /// How long a request may be held for its token. Default: 0s, the only value
    /// that this version supports.
    #[serde(default)]
    pub max_wait: NoWait,
    /// What holds when replicas lose sight of each other. Default: frozen, the
    /// only value that this version supports.
    #[serde(default)]
    pub partition: Partition,
}

fn default_key() -> Vec<KeyPartConfig> {
    vec![KeyPartConfig(KeyPart::new(Source::ClientIp, false))]
}

const fn default_expose() -> bool {
    true
}

impl LimitConfig {
    /// A limit on all requests, with every other setting at its default.
    pub fn new(name: String, key: Vec<KeyPart>, rate: Rate, burst: Option<u64>) -> Self {
        Self {
            name: Some(LimitName(name)),
            condition: ConditionConfig::default(),
            exempt: Vec::new(),
            key: key.into_iter().map(KeyPartConfig).collect(),
            missing: Missing::default(),
            rate: Some(RateText(rate)),
            burst: burst.map(Burst),
            cost: Cost::default(),
            overrides: Vec::new(),
            mode: Mode::default(),
            expose: default_expose(),
            max_wait: NoWait,
            partition: Partition::default(),
        }
    }

    /// The limit that this text means. `ipv6_prefix` is the number of leading
    /// bits by which IPv6 clients are grouped.
    ///
    /// # Errors
    /// Every fault that shows when the values are put together, with paths from
    /// the limit down.
    pub fn compile(&self, ipv6_prefix: u8) -> Result<LimitSpec, Vec<Fault>> {
        let mut faults = Vec::new();
        if self.name.is_none() {
            faults.push(Fault::new(["name".into()], "is required"));
        }
        if self.rate.is_none() {
            faults.push(Fault::new(["rate".into()], "is required, such as 100/min"));
        }
        for (index, part) in self.key.iter().enumerate() {
            if self.key[..index].iter().any(|p| p.0.source() == part.0.source()) {
                let message = format!("`{}` is in the key already", part.0);
                faults.push(Fault::new(["key".into(), index.into()], message));
            }
        }
        for (index, exempt) in self.exempt.iter().enumerate() {
            if exempt.is_empty() {
                let message = "an element without conditions would exempt every request";
                faults.push(Fault::new(["exempt".into(), index.into()], message));
            }
        }
        let rule = Rule {
            condition: self.condition.compile(),
            exempt: self.exempt.iter().map(ConditionConfig::compile).collect(),
            key: self.key.iter().map(|part| part.0.clone()).collect(),
            missing: self.missing,
        };
        let quota = self.rate.and_then(|rate| {
            self.quota(rate, self.burst, &[])
                .map_err(|fault| faults.push(fault.given(&["burst", "cost", "rate"])))
                .ok()
        });
        let name = self.name.as_ref().map(|name| name.0.clone()).unwrap_or_default();
        let overrides = self.compile_overrides(&name, &rule, ipv6_prefix, &mut faults);
        match (quota, Tokens::from_whole(self.cost.0)) {
            (Some(quota), Some(cost)) if faults.is_empty() => Ok(LimitSpec {
                name,
                rule,
                quota,
                cost,
                overrides,
                mode: self.mode,
                expose: self.expose,
            }),
            _ => Err(faults),
        }
    }

    fn compile_overrides(
        &self,
        name: &str,
        rule: &Rule,
        ipv6_prefix: u8,
        faults: &mut Vec<Fault>,
    ) -> HashMap<BucketId, Quota> {
        let seed = Limit::seed(name, rule);
        let mut overrides = HashMap::new();
        for (index, element) in self.overrides.iter().enumerate() {
            let at: [PathSegment; 2] = ["overrides".into(), index.into()];
            let path = |field: &'static str| [at[0], at[1], field.into()];
            let quota = match element.rate {
                None => {
                    faults.push(Fault::new(path("rate"), "is required, such as 1000/min"));
                    None
                }
                Some(rate) => self
                    .quota(rate, element.burst, &at)
                    .map_err(|fault| faults.push(fault.given(&["cost"])))
                    .ok(),
            };
            let Some(values) = &element.key else {
                let message = "is required: one value for each part of the limit's key";
                faults.push(Fault::new(path("key"), message));
                continue;
            };
            let values: Vec<&str> = values.iter().map(|value| value.0.as_str()).collect();
            let key = other_group(rule, &values, ipv6_prefix).map_or_else(
                || rule.key_from_text(&values, ipv6_prefix).map_err(|e| e.to_string()),
                Err,
            );
            match (key, quota) {
                (Err(message), _) => {
                    faults.push(Fault::new(path("key"), message).given(&["key"]));
                }
                (Ok(key), Some(quota)) => {
                    if overrides.insert(seed.id(key.as_bytes()), quota).is_some() {
                        let message = "another override names the same bucket";
                        faults.push(Fault::new(path("key"), message).given(&["key"]));
                    }
                }
                (Ok(_), None) => {}
            }
        }
        overrides
    }

    /// The quota of these settings, found in the limit at `at`.
    fn quota(
        &self,
        rate: RateText,
        burst: Option<Burst>,
        at: &[PathSegment],
    ) -> Result<Quota, Fault> {
        let fault = |field: &'static str, message: String| {
            let mut path = at.to_vec();
            path.push(field.into());
            Err(Fault::new(path, message))
        };
        let tokens = burst.map_or(rate.0.tokens(), |burst| burst.0);
        if rate.0.is_blocked() && burst.is_some() {
            let message = format!("a rate of {} lets nothing pass: leave the burst out", rate.0);
            return fault("burst", message);
        }
        let Some(quota) = Quota::try_new(rate.0, tokens) else {
            return fault("burst", format!("{tokens} is not from 1 to {}", Tokens::MAX_WHOLE));
        };
        if !rate.0.is_blocked() && self.cost.0 > tokens {
            let source = if burst.is_some() { "" } else { " (by default the N of the rate)" };
            let message = format!(
                "no request would ever pass: each costs {}, above the burst of {tokens}{source}",
                self.cost.0
            );
            return fault(if burst.is_some() { "burst" } else { "rate" }, message);
        }
        Ok(quota)
    }
}

/// Why the values name a network that is no group of clients, if they do.
fn other_group(rule: &Rule, values: &[&str], ipv6_prefix: u8) -> Option<String> {
    rule.key.iter().zip(values).find_map(|(part, value)| {
        let (ip, prefix) = value.split_once('/').filter(|_| *part.source() == Source::ClientIp)?;
        let expected = if ip.contains(':') { ipv6_prefix } else { 32 };
        (prefix != expected.to_string()).then(|| {
            format!("`{value}`: clients are grouped by /{expected} here, so no bucket has this key")
        })
    })
}

/// Which requests; all that is named must hold.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Condition")]
pub struct ConditionConfig {
    /// The path: with a trailing `/` a prefix of whole segments, else exact.
    path: Option<PathText>,
    /// Any of these methods.
    methods: Option<Vec<MethodText>>,
    /// The host, without port.
    host: Option<HostText>,
    /// Headers with the value that one of their lines must have.
    headers: HeaderValues,
    /// Networks, one of which holds the client's address.
    cidrs: Option<Vec<NetworkText>>,
}

impl ConditionConfig {
    fn is_empty(&self) -> bool {
        self.path.is_none()
            && self.methods.is_none()
            && self.host.is_none()
            && self.headers.0.is_empty()
            && self.cidrs.is_none()
    }

    fn compile(&self) -> Condition {
        Condition {
            path: self.path.as_ref().map(|path| path.0.clone()),
            methods: self.methods.iter().flatten().map(|method| method.0.clone()).collect(),
            host: self.host.as_ref().map(|host| host.0.clone()),
            headers: self.headers.0.clone(),
            cidrs: self.cidrs.iter().flatten().map(|net| net.network()).collect(),
        }
    }
}

/// Another quota for one key.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Override")]
pub struct OverrideConfig {
    /// One value for each part of the limit's key. Required.
    #[serde(default)]
    #[schemars(required)]
    key: Option<Vec<ValueText>>,
    /// Tokens that come back per period. Required.
    #[serde(default)]
    #[schemars(required)]
    rate: Option<RateText>,
    /// Tokens that the bucket holds, 1 to 10^12. Default: the N of the rate.
    #[serde(default)]
    burst: Option<Burst>,
}

/// Declares how a type is written: what to call it when it is missing, how it
/// is parsed, and its JSON Schema.
macro_rules! notation {
    ($name:ident, $expected:literal, $parse:expr, $schema:tt) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let parse: fn(String) -> Result<Self, String> = $parse;
                parse(text(deserializer, $expected)?).map_err(de::Error::custom)
            }
        }

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    };
}

/// The name of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitName(pub String);

notation!(
    LimitName,
    "a name",
    |text| {
        if NameText::is_valid(&text) {
            Ok(Self(text))
        } else {
            Err(format!("`{text}` is not a name of 1 to 64 letters, digits, `.`, `_` and `-`"))
        }
    },
    { "type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$", "examples": ["per-client"] }
);

/// A rate as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateText(pub Rate);

notation!(
    RateText,
    "a rate such as 100/min",
    |text| text.parse().map(Self).map_err(|e: super::quota::RateError| e.to_string()),
    {
        "type": "string",
        "pattern": r"^\s*[0-9_]+\s*/\s*([a-zA-Z]+|[0-9]+\s*[a-zA-Z]+(\s*[0-9]+\s*[a-zA-Z]+)*)\s*$",
        "examples": ["100/min", "10/s", "5/10s", "1000/d", "0/s"],
    }
);

/// The capacity of a bucket, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Burst(pub u64);

impl FromStr for Burst {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        whole_tokens(text).map(Self)
    }
}

notation!(
    Burst,
    "a whole number of tokens",
    |text| text.parse(),
    { "type": "integer", "minimum": 1, "maximum": 1_000_000_000_000_u64 }
);

fn whole_tokens(text: &str) -> Result<u64, String> {
    text.parse()
        .ok()
        .filter(|tokens| (1..=Tokens::MAX_WHOLE).contains(tokens))
        .ok_or_else(|| format!("`{text}` is not a whole number from 1 to {}", Tokens::MAX_WHOLE))
}

/// What one request costs, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost(pub u64);

impl Default for Cost {
    fn default() -> Self {
        Self(1)
    }
}

impl<'de> Deserialize<'de> for Cost {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl<'de> Visitor<'de> for Number {
            type Value = Cost;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a whole number of tokens")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Cost, E> {
                whole_tokens(text).map(Cost).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<Cost, A::Error> {
                Err(de::Error::custom(format!("a list of costs is {NOT_SUPPORTED}")))
            }

            fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<Cost, A::Error> {
                Err(de::Error::custom(format!("a cost from a header is {NOT_SUPPORTED}")))
            }
        }
        deserializer.deserialize_any(Number)
    }
}

impl JsonSchema for Cost {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Cost".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "integer", "minimum": 1, "maximum": Tokens::MAX_WHOLE, "default": 1 })
    }
}

/// No time at all: requests are not held in this version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoWait;

notation!(
    NoWait,
    "a duration such as 0s",
    |text| match humantime::parse_duration(&text) {
        Ok(Duration::ZERO) => Ok(Self),
        Ok(_) => Err(format!("holding requests is {NOT_SUPPORTED}: only 0s is")),
        Err(_) => Err(format!("`{text}` is not a duration such as 0s")),
    },
    { "type": "string", "enum": ["0s"], "default": "0s" }
);

/// What holds when replicas lose sight of each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Partition {
    /// Each replica goes on with the share that it had.
    #[default]
    Frozen,
}

notation!(
    Partition,
    "`frozen`",
    |text| match text.as_str() {
        "frozen" => Ok(Self::Frozen),
        "strict" | "open" => Err(format!("`{text}` is {NOT_SUPPORTED}: only `frozen` is")),
        _ => Err(format!("`{text}` is not a behaviour: write frozen")),
    },
    { "type": "string", "enum": ["frozen"], "default": "frozen" }
);

/// How a [`Mode`] is written.
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(remote = "Mode", rename_all = "snake_case")]
enum ModeText {
    /// Refuse requests without room.
    Enforce,
    /// Count and report them, and let them pass.
    Shadow,
}

/// How a [`Missing`] is written.
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(remote = "Missing", rename_all = "snake_case")]
enum MissingText {
    /// All such requests share one bucket.
    Shared,
    /// The client's address stands in.
    ClientIp,
    /// The limit does not apply.
    Skip,
    /// The request is refused with 400.
    Deny,
}

/// A path pattern as text.
#[derive(Clone, Debug)]
struct PathText(PathPattern);

notation!(
    PathText,
    "a path such as /api/",
    |text| PathPattern::try_new(&text).map(Self).map_err(|e| e.to_string()),
    { "type": "string", "pattern": "^/[^*{?#]*$", "examples": ["/api/", "/login"] }
);

/// A method as text.
#[derive(Clone, Debug)]
struct MethodText(String);

/// The methods of RFC 9110 and RFC 5789, all in upper case.
const METHODS: [&str; 9] =
    ["CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"];

notation!(
    MethodText,
    "a method such as GET",
    |text| {
        let upper = text.to_ascii_uppercase();
        if !is_token(&text) {
            Err(format!("`{text}` is not a method"))
        } else if text != upper && METHODS.contains(&upper.as_str()) {
            Err(format!("`{text}` matches no request, case matters in methods: write {upper}"))
        } else {
            Ok(Self(text))
        }
    },
    { "type": "string", "pattern": "^[!#$%&'*+.^_`|~0-9A-Za-z-]+$", "examples": METHODS }
);

/// A host to match, as text.
#[derive(Clone, Debug)]
struct HostText(String);

notation!(
    HostText,
    "a host such as api.example.com",
    |text| {
        let valid = !text.is_empty()
            && text.bytes().all(|b| {
                b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b'[' | b']' | b':')
            })
            && (text.starts_with('[') && text.ends_with(']') || !text.contains([':', '[', ']']));
        if valid {
            Ok(Self(text.to_ascii_lowercase()))
        } else {
            Err(format!("`{text}` is not a host: write a name or address without port or wildcard"))
        }
    },
    { "type": "string", "pattern": r"^([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])$", "examples": ["api.example.com"] }
);

/// The value of one key part, as text.
#[derive(Clone, Debug)]
struct ValueText(String);

notation!(
    ValueText,
    "a value",
    |text| if text.is_empty() { Err("is empty; an empty part counts as missing".to_owned()) } else { Ok(Self(text)) },
    { "type": ["string", "number", "boolean"], "examples": ["203.0.113.7"] }
);

/// Header names in lower case, each with one value, in the order of the file.
#[derive(Clone, Debug, Default)]
struct HeaderValues(Vec<(String, String)>);

impl<'de> Deserialize<'de> for HeaderValues {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = HeaderValues;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("header names with values, such as { x-env: prod }")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderValues, A::Error> {
                let mut pairs = Vec::new();
                while let Some((name, value)) = map.next_entry::<HeaderText, HeaderValueText>()? {
                    pairs.push((name.0, value.0));
                }
                Ok(HeaderValues(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

impl JsonSchema for HeaderValues {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "HeaderValues".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "additionalProperties": { "type": ["string", "number", "boolean"] },
            "examples": [{ "x-env": "prod" }],
        })
    }
}

/// The name of a header, in lower case.
#[derive(Clone, Debug)]
struct HeaderText(String);

notation!(
    HeaderText,
    "a header name",
    |text| if is_token(&text) { Ok(Self(text.to_ascii_lowercase())) } else { Err(format!("`{text}` is not a header name")) },
    { "type": "string", "pattern": "^[!#$%&'*+.^_`|~0-9A-Za-z-]+$", "examples": ["x-api-key"] }
);

/// A value that a header can have.
#[derive(Clone, Debug)]
struct HeaderValueText(String);

notation!(
    HeaderValueText,
    "a header value",
    |text| {
        // A parser takes blanks at either end for padding, so no request has them.
        if text.bytes().any(|b| b < b' ' && b != b'\t' || b == 0x7f) || text.trim() != text {
            Err(format!("`{}` is not a header value", text.escape_debug()))
        } else {
            Ok(Self(text))
        }
    },
    { "type": "string" }
);

/// One part of a key, written `client_ip`, `header:NAME` and so on, or as a map
/// `{ header: NAME, secret: true }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPartConfig(pub KeyPart);

const PARTS: &str = "client_ip, header:NAME, cookie:NAME, query:NAME, path, method or host";

impl KeyPartConfig {
    /// What stands in front of the name in a part that has one.
    pub const KINDS: [&str; 4] = ["header", "cookie", "query", "jwt"];
}

impl FromStr for KeyPartConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let source = match text {
            "client_ip" => Source::ClientIp,
            "path" => Source::Path,
            "method" => Source::Method,
            "host" => Source::Host,
            _ => match text.split_once(':') {
                Some((kind, name)) => named_source(kind, name)?
                    .ok_or_else(|| format!("`{text}` is not a key part: write {PARTS}"))?,
                None => return Err(format!("`{text}` is not a key part: write {PARTS}")),
            },
        };
        Ok(Self(KeyPart::new(source, false)))
    }
}

/// The source `kind:name`; `None` if there is no such kind.
fn named_source(kind: &str, name: &str) -> Result<Option<Source>, String> {
    Ok(Some(match kind {
        "header" if is_token(name) => Source::Header(name.to_ascii_lowercase()),
        "header" => return Err(format!("`{name}` is not a header name")),
        "cookie" if is_token(name) => Source::Cookie(name.to_owned()),
        "cookie" => return Err(format!("`{name}` is not the name of a cookie")),
        // A comma separates the parts in a limit's identity.
        "query" if !name.is_empty() && !name.contains(',') => Source::Query(name.to_owned()),
        "query" => return Err(format!("`{name}` is not the name of a query parameter")),
        "jwt" => return Err(format!("a claim of a JWT is {NOT_SUPPORTED}")),
        _ => return Ok(None),
    }))
}

/// The map form of a key part.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PartFields {
    #[serde(default)]
    header: Option<ValueText>,
    #[serde(default)]
    cookie: Option<ValueText>,
    #[serde(default)]
    query: Option<ValueText>,
    #[serde(default)]
    jwt: Option<ValueText>,
    #[serde(default)]
    secret: Option<bool>,
    // Named only so that the error can tell what is wrong with them.
    #[serde(default)]
    client_ip: Option<IgnoredAny>,
    #[serde(default)]
    path: Option<IgnoredAny>,
    #[serde(default)]
    method: Option<IgnoredAny>,
    #[serde(default)]
    host: Option<IgnoredAny>,
}

impl TryFrom<PartFields> for KeyPartConfig {
    type Error = String;

    fn try_from(fields: PartFields) -> Result<Self, String> {
        let plain = [
            ("client_ip", fields.client_ip),
            ("path", fields.path),
            ("method", fields.method),
            ("host", fields.host),
        ];
        let named = [
            ("header", fields.header),
            ("cookie", fields.cookie),
            ("query", fields.query),
            ("jwt", fields.jwt),
        ];
        let mut kinds: Vec<&str> = Vec::new();
        kinds.extend(named.iter().filter(|(_, name)| name.is_some()).map(|(kind, _)| kind));
        kinds.extend(plain.iter().filter(|(_, name)| name.is_some()).map(|(kind, _)| kind));
        if let [first, second, ..] = kinds[..] {
            return Err(format!(
                "`{first}` and `{second}` exclude each other in one part of a key; \
                 for a key of both write two parts"
            ));
        }
        let source = named.iter().find_map(|(kind, name)| Some((kind, name.as_ref()?)));
        let Some((kind, name)) = source else {
            return Err(match kinds.first() {
                Some(kind) => format!("write `{kind}` as plain text, not as a map"),
                None => "names no source: write such as { header: x-api-key, secret: true }".into(),
            });
        };
        let source =
            named_source(kind, &name.0)?.ok_or_else(|| format!("`{kind}` is no source"))?;
        let part = KeyPart::new(source, fields.secret.unwrap_or(false));
        if fields.secret == Some(false) && part.is_secret() {
            return Err(format!("`{part}` holds a credential and is always secret"));
        }
        Ok(Self(part))
    }
}

impl<'de> Deserialize<'de> for KeyPartConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Part;
        impl<'de> Visitor<'de> for Part {
            type Value = KeyPartConfig;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a key part such as client_ip or header:x-api-key")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<KeyPartConfig, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<KeyPartConfig, A::Error> {
                let fields = PartFields::deserialize(MapAccessDeserializer::new(map))?;
                fields.try_into().map_err(de::Error::custom)
            }
        }
        deserializer.deserialize_any(Part)
    }
}

impl JsonSchema for KeyPartConfig {
    fn schema_name() -> Cow<'static, str> {
        "KeyPart".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let named = |kind: &str| {
            json_schema!({
                "type": "object",
                "properties": {
                    kind: { "type": "string", "description": "Its name." },
                    "secret": {
                        "type": "boolean",
                        "description": "Keep only a hash of the value. Default: false, but true for cookies and credentials.",
                    },
                },
                "required": [kind],
                "additionalProperties": false,
            })
        };
        json_schema!({
            "description": "One part of a key.",
            "anyOf": [
                {
                    "type": "string",
                    "pattern": "^(client_ip|path|method|host|(header|cookie|query):.+)$",
                    "examples": [
                        "client_ip", "header:x-api-key", "cookie:session", "query:tenant",
                        "path", "method", "host",
                    ],
                },
                named("header"),
                named("cookie"),
                named("query"),
            ],
        })
    }
}

/// Whether `text` is a token of RFC 9110, as names of headers, cookies and
/// methods are.
fn is_token(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b))
}
