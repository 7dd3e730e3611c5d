//! Names that a certificate may have.

use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use crate::settings::text;

/// Longest pattern, in bytes.
const MAX_LENGTH: usize = 256;

/// A DNS name, `*.` and a DNS name, a URI, or a URI and `/*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern {
    /// As it was written, DNS names in lower case.
    text: String,
}

impl NamePattern {
    fn is_uri(&self) -> bool {
        self.text.contains("://")
    }

    /// Whether the DNS name of a certificate is allowed. A certificate for
    /// `*.NAME` is allowed by the pattern `*.NAME` only.
    pub fn allows_dns(&self, name: &str) -> bool {
        if self.is_uri() {
            return false;
        }
        let name = name.strip_suffix('.').unwrap_or(name);
        if self.text.eq_ignore_ascii_case(name) {
            return true;
        }
        let (Some(parent), Some((label, rest))) =
            (self.text.strip_prefix("*."), name.split_once('.'))
        else {
            return false;
        };
        !label.is_empty() && label != "*" && rest.eq_ignore_ascii_case(parent)
    }

    /// Whether the URI of a certificate is allowed, such as a SPIFFE ID.
    pub fn allows_uri(&self, uri: &str) -> bool {
        if !self.is_uri() {
            return false;
        }
        match self.text.strip_suffix("/*") {
            Some(parent) => uri
                .strip_prefix(parent)
                .and_then(|rest| rest.strip_prefix('/'))
                .is_some_and(|rest| !rest.is_empty()),
            None => uri == self.text,
        }
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for NamePattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_sound = match text.split_once("://") {
            Some((scheme, rest)) => {
                let path = rest.strip_suffix("/*").unwrap_or(rest);
                !scheme.is_empty()
                    && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+.-".contains(&b))
                    && !path.is_empty()
                    && path.bytes().all(|b| b.is_ascii_graphic() && b != b'*')
            }
            None => {
                let name = text.strip_prefix("*.").unwrap_or(text);
                name.split('.').all(|label| {
                    (1..=63).contains(&label.len())
                        && !label.starts_with('-')
                        && !label.ends_with('-')
                        && label
                            .bytes()
                            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
                })
            }
        };
        if !is_sound || text.len() > MAX_LENGTH {
            return Err(format!("`{text}` is neither a DNS name, `*.NAME`, a URI nor `URI/*`"));
        }
        let is_uri = text.contains("://");
        Ok(Self { text: if is_uri { text.to_owned() } else { text.to_ascii_lowercase() } })
    }
}

impl<'de> Deserialize<'de> for NamePattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text(deserializer, "a name of certificates")?.parse().map_err(de::Error::custom)
    }
}

impl Serialize for NamePattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl JsonSchema for NamePattern {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "NamePattern".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "maxLength": MAX_LENGTH,
            "pattern": r"^((\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|[A-Za-z0-9+.-]+://[!-)+-~]+(/\*)?)$",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> NamePattern {
        text.parse().unwrap()
    }

    #[test]
    fn a_dns_pattern_allows_its_name_or_one_label_before_it() {
        let exact = pattern("Tidegate.default.svc");
        assert!(
            exact.allows_dns("tidegate.DEFAULT.svc") && exact.allows_dns("tidegate.default.svc.")
        );
        assert!(!exact.allows_dns("a.tidegate.default.svc") && !exact.allows_dns("default.svc"));
        let any = pattern("*.tidegate");
        assert!(any.allows_dns("a.tidegate") && any.allows_dns("*.tidegate"));
        for other in ["tidegate", ".tidegate", "a.b.tidegate", "a.tidegate.evil", "atidegate", "*"]
        {
            assert!(!any.allows_dns(other), "{other}");
        }
        // A certificate for more names than the pattern allows.
        assert!(!pattern("*.b.tidegate").allows_dns("*.tidegate"));
        assert!(!any.allows_uri("a.tidegate"));
    }

    #[test]
    fn a_uri_pattern_allows_its_uri_or_what_is_below_it() {
        let exact = pattern("spiffe://prod/ns/a/sa/b");
        assert!(exact.allows_uri("spiffe://prod/ns/a/sa/b"));
        assert!(!exact.allows_uri("spiffe://prod/ns/a/sa/bc") && !exact.allows_dns("prod"));
        let any = pattern("spiffe://prod/ns/a/*");
        assert!(any.allows_uri("spiffe://prod/ns/a/sa/b"));
        for other in ["spiffe://prod/ns/a", "spiffe://prod/ns/a/", "spiffe://prod/ns/ab/c"] {
            assert!(!any.allows_uri(other), "{other}");
        }
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for text in
            ["", "*", "*.", "a..b", "a.*", "*a.b", "-a", "a b", "://a", "spiffe://", "s://*/a"]
        {
            assert!(text.parse::<NamePattern>().is_err(), "{text}");
        }
    }
}
