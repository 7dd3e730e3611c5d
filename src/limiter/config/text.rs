//! How the scalars of a limit are written.

use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::limit::{Mode, Partition, Window};
use super::super::quota::{Rate, RateError};
use super::super::rule::Missing;
use super::super::tokens::Tokens;
use crate::settings::NameText;

/// Declares how a type is written: what to call it when it is missing, how it
/// is parsed, and its JSON Schema.
macro_rules! notation {
    ($name:ident, $expected:literal, $parse:expr, $schema:tt) => {
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let parse: fn(String) -> Result<Self, String> = $parse;
                parse($crate::settings::text(deserializer, $expected)?)
                    .map_err(serde::de::Error::custom)
            }
        }

        impl schemars::JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!($schema)
            }
        }
    };
}
pub(super) use notation;

/// The name of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitName(pub String);

notation!(
    LimitName,
    "a name",
    |text| {
        if NameText::is_valid(&text) { Ok(Self(text)) } else { Err(NameText::refusal(&text)) }
    },
    { "type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$", "examples": ["per-client"] }
);

/// A rate as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateText(pub Rate);

notation!(
    RateText,
    "a rate such as 100/min",
    |text| text.parse().map(Self).map_err(|e: RateError| e.to_string()),
    {
        "type": "string",
        "pattern": r"^\s*[0-9_]+\s*/\s*([a-zA-Z]+|[0-9]+\s*[a-zA-Z]+(\s*[0-9]+\s*[a-zA-Z]+)*)\s*$",
        "examples": ["100/min", "10/s", "5/10s", "1000/d", "0/s"],
    }
);

/// The capacity of a bucket, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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

pub(super) fn whole_tokens(text: &str) -> Result<u64, String> {
    text.parse()
        .ok()
        .filter(|tokens| (1..=Tokens::MAX_WHOLE).contains(tokens))
        .ok_or_else(|| format!("`{text}` is not a whole number from 1 to {}", Tokens::MAX_WHOLE))
}

/// How a [`Partition`] is written.
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(remote = "Partition", rename_all = "snake_case")]
pub(super) enum PartitionText {
    /// Each replica goes on with the share that it had.
    Frozen,
    /// Never more than an even share for each replica, whatever demand does.
    Strict,
    /// Every part of a split network gives out the whole limit.
    Open,
}

/// How a [`Window`] is written.
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(remote = "Window", rename_all = "snake_case")]
pub(super) enum WindowText {
    /// A token bucket of this rate and burst.
    Bucket,
    /// Never more than the N of the rate in any window as long as its period.
    Strict,
}

/// How a [`Mode`] is written.
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(remote = "Mode", rename_all = "snake_case")]
pub(super) enum ModeText {
    /// Refuse requests without room.
    Enforce,
    /// Count and report them, and let them pass.
    Shadow,
}

/// How a [`Missing`] is written.
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(remote = "Missing", rename_all = "snake_case")]
pub(super) enum MissingText {
    /// All such requests share one bucket.
    Shared,
    /// The client's address stands in.
    ClientIp,
    /// The limit does not apply.
    Skip,
    /// The request is refused with 400.
    Deny,
}

/// Whether `text` is a token of RFC 9110, as names of headers, cookies and
/// methods are.
pub(super) fn is_token(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b))
}
