//! Which browsers may read the answers that the proxy makes itself.
//!
//! A page of another origin cannot see a refusal, its status included, unless
//! the answer names that origin (the Fetch standard, CORS protocol). The
//! upstream does so for its own answers; for those that it never sees, such as
//! a 429, the proxy does. Preflights pass to the upstream, and are not limited.

use std::borrow::Cow;
use std::fmt;

use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS,
    ORIGIN, VARY,
};
use http::{HeaderMap, HeaderValue, uri};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use crate::settings::{Fault, text};

static EXPOSED: HeaderValue = HeaderValue::from_static(
    "retry-after, ratelimit, ratelimit-policy, \
     x-ratelimit-limit, x-ratelimit-remaining, x-ratelimit-reset",
);
static VARY_ORIGIN: HeaderValue = HeaderValue::from_static("origin");
static TRUE: HeaderValue = HeaderValue::from_static("true");
static ANY: HeaderValue = HeaderValue::from_static("*");

/// Which pages may read the proxy's own answers, such as a refusal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Cors {
    /// Origins such as `https://app.example.com`, or `*` for any. Default: none.
    pub allow_origins: Vec<Origin>,
    /// Whether pages may read them that sent their credentials along.
    /// Default: false.
    pub allow_credentials: bool,
}

/// An origin, or all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// `*`
    Any,
    /// This one, as browsers write it.
    One(HeaderValue),
}

/// What the answer to one request says on who may read it.
#[derive(Clone, Debug)]
pub(super) struct Grant {
    /// The origin to name, if the request's is allowed.
    origin: Option<HeaderValue>,
    credentials: bool,
}

impl Cors {
    /// Faults of settings that do not go together.
    pub(super) fn fault(&self) -> Option<Fault> {
        (self.allow_credentials && self.allow_origins.contains(&Origin::Any)).then(|| {
            Fault::new(
                ["cors".into(), "allow_credentials".into()],
                "browsers take no `*` for requests with credentials: list the origins",
            )
        })
    }

    /// What the answer to a request with these fields is to say; `None` if the
    /// proxy has no say in it.
    pub(super) fn grant(&self, headers: &HeaderMap) -> Option<Grant> {
        if self.allow_origins.is_empty() {
            return None;
        }
        let origin = headers.get(ORIGIN);
        let allowed = self.allow_origins.iter().find_map(|allowed| match allowed {
            Origin::Any => Some(ANY.clone()),
            Origin::One(one) => origin.filter(|origin| *origin == one).cloned(),
        });
        Some(Grant { origin: allowed, credentials: self.allow_credentials })
    }
}

impl Grant {
    /// Writes the fields of an answer.
    pub(super) fn insert(self, headers: &mut HeaderMap) {
        if self.origin.as_ref() != Some(&ANY) {
            headers.append(VARY, VARY_ORIGIN.clone());
        }
        if let Some(origin) = self.origin {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED.clone());
            if self.credentials {
                headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, TRUE.clone());
            }
        }
    }
}

impl std::str::FromStr for Origin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(Self::Any);
        }
        let refusal = || {
            format!(
                "`{text}` is not an origin: write scheme and host as browsers do, \
                 such as https://app.example.com or http://localhost:3000, or `*`"
            )
        };
        let (scheme, host) = text.split_once("://").ok_or_else(refusal)?;
        let is_scheme = !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric());
        let authority: uri::Authority = host.parse().map_err(|_| refusal())?;
        if !is_scheme || host.contains('@') || authority.host().is_empty() {
            return Err(refusal());
        }
        HeaderValue::from_str(&text.to_ascii_lowercase()).map(Self::One).map_err(|_| refusal())
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::One(one) => f.write_str(one.to_str().unwrap_or_default()),
        }
    }
}

impl<'de> Deserialize<'de> for Origin {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text(deserializer, "an origin such as https://app.example.com")?
            .parse()
            .map_err(de::Error::custom)
    }
}

impl Serialize for Origin {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl JsonSchema for Origin {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Origin".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "pattern": r"^(\*|[A-Za-z0-9]+://[^/?#@]+)$",
            "examples": ["https://app.example.com", "http://localhost:3000", "*"],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(cors: &Cors, origin: Option<&'static str>) -> Vec<(String, String)> {
        let mut request = HeaderMap::new();
        if let Some(origin) = origin {
            request.insert(ORIGIN, HeaderValue::from_static(origin));
        }
        let mut headers = HeaderMap::new();
        if let Some(grant) = cors.grant(&request) {
            grant.insert(&mut headers);
        }
        headers.remove(ACCESS_CONTROL_EXPOSE_HEADERS);
        headers.iter().map(|(k, v)| (k.to_string(), v.to_str().unwrap().to_owned())).collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn only_an_allowed_origin_is_named() {
        let app = "https://app.example.com";
        let cors = |origins: &[&str], allow_credentials| Cors {
            allow_origins: origins.iter().map(|origin| origin.parse().unwrap()).collect(),
            allow_credentials,
        };
        assert_eq!(answer(&Cors::default(), Some(app)), []);
        let one = cors(&["https://b", "HTTPS://App.Example.com"], false);
        let named = [("vary", "origin"), ("access-control-allow-origin", app)];
        assert_eq!(answer(&one, Some(app)), pairs(&named));
        for other in [None, Some("https://evil.example"), Some("null"), Some("http://b")] {
            assert_eq!(answer(&one, other), pairs(&[("vary", "origin")]), "{other:?}");
        }
        let any = [("access-control-allow-origin", "*")];
        assert_eq!(answer(&cors(&["*"], false), Some(app)), pairs(&any));
        let credentials = [&named[..], &[("access-control-allow-credentials", "true")]].concat();
        assert_eq!(answer(&cors(&[app], true), Some(app)), pairs(&credentials));
        assert!(cors(&["*"], true).fault().is_some() && cors(&[app], true).fault().is_none());
    }

    #[test]
    fn what_no_browser_sends_is_no_origin() {
        for text in ["", "app.example.com", "https://", "https://a/", "https://a/b", "://a", "null"]
        {
            assert!(text.parse::<Origin>().is_err(), "{text}");
        }
        for text in ["https://*.example.com/", "https://u@a", "https://a b", "htt ps://a"] {
            assert!(text.parse::<Origin>().is_err(), "{text}");
        }
    }
}
