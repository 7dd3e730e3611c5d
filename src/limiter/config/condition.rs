//! Conditions on requests.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use super::super::path::PathPattern;
use super::super::rule::Condition;
use super::text::{is_token, notation};
use crate::settings::{NameText, NetworkText};

/// Which requests; all that is named must hold.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Condition")]
pub struct ConditionConfig {
    /// The name of the upstream that the request is for; `default` is
    /// `proxy.upstream`.
    upstream: Option<UpstreamName>,
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
    /// The requests for the upstream called `name`.
    pub(super) fn for_upstream(name: String) -> Self {
        Self { upstream: Some(UpstreamName(name)), ..Self::default() }
    }

    /// The upstream that it names.
    pub fn upstream(&self) -> Option<&str> {
        self.upstream.as_ref().map(|name| name.0.as_str())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.upstream.is_none()
            && self.path.is_none()
            && self.methods.is_none()
            && self.host.is_none()
            && self.headers.0.is_empty()
            && self.cidrs.is_none()
    }

    /// The condition that this text means.
    pub fn compile(&self) -> Condition {
        Condition {
            upstream: self.upstream.as_ref().map(|name| name.0.clone()),
            path: self.path.as_ref().map(|path| path.0.clone()),
            methods: self.methods.iter().flatten().map(|method| method.0.clone()).collect(),
            host: self.host.as_ref().map(|host| host.0.clone()),
            headers: self.headers.0.clone(),
            cidrs: self.cidrs.iter().flatten().map(|net| net.network()).collect(),
        }
    }
}

/// The name of an upstream.
#[derive(Clone, Debug)]
struct UpstreamName(String);

notation!(
    UpstreamName,
    "the name of an upstream",
    |text| {
        if NameText::is_valid(&text) { Ok(Self(text)) } else { Err(NameText::refusal(&text)) }
    },
    { "type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$", "examples": ["acme"] }
);

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

/// Header names in lower case, each with one value, in the order of the file.
#[derive(Clone, Debug, Default)]
struct HeaderValues(Vec<(String, String)>);

impl<'de> Deserialize<'de> for HeaderValues {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = HeaderValues;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
pub(super) struct HeaderText(pub(super) String);

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
