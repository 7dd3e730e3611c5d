//! Parts of keys, and values for them.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::super::rule::{KeyPart, Source};
use super::text::{is_token, notation};
use crate::settings::NOT_SUPPORTED;

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
    #[serde(default, deserialize_with = "present")]
    client_ip: bool,
    #[serde(default, deserialize_with = "present")]
    path: bool,
    #[serde(default, deserialize_with = "present")]
    method: bool,
    #[serde(default, deserialize_with = "present")]
    host: bool,
}

fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    IgnoredAny::deserialize(deserializer).map(|_| true)
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
        kinds.extend(plain.iter().filter(|(_, present)| *present).map(|(kind, _)| kind));
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

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

/// The value of one key part, as text.
#[derive(Clone, Debug)]
pub(super) struct ValueText(pub(super) String);

notation!(
    ValueText,
    "a value",
    |text| if text.is_empty() { Err("is empty; an empty part counts as missing".to_owned()) } else { Ok(Self(text)) },
    { "type": ["string", "number", "boolean"], "examples": ["203.0.113.7"] }
);
