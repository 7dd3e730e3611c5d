//! The `upstreams` and `egress` sections.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use http::StatusCode;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

use super::super::config::{self, Upstream, UpstreamHost};
use super::{DEFAULT, FeedbackConfig, InjectConfig, RefusingStatus};
use crate::limiter::config::{ConditionConfig, WindowConfig};
use crate::settings::{DurationOrZeroText, Fault, NameText, OrNone, Whole, text};

/// The named upstreams. Default: none.
pub type UpstreamsConfig = BTreeMap<String, UpstreamConfig>;

/// An upstream that routes name.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NamedUpstream")]
pub struct UpstreamConfig {
    /// Where its requests go: `http://HOST[:PORT]`, `https://HOST[:PORT]` or
    /// `unix:/path`. Required.
    pub url: Upstream,
    /// File with the CAs that sign the certificate of `https://`, PEM. Default:
    /// none, those that the system trusts.
    #[serde(default, with = "OrNone::<PathBuf>")]
    pub ca: Option<PathBuf>,
    /// The `Host` that it gets. Default: upstream.
    #[serde(default = "UpstreamConfig::default_host")]
    pub host: UpstreamHost,
    /// How much it bears: a limit of the upstream's name, with one bucket, on all
    /// requests that go there. Default: none.
    #[serde(default, with = "OrNone::<WindowConfig>")]
    pub limit: Option<WindowConfig>,
    /// Requests that each replica may have on their way there at the same time; others
    /// wait within the `max_wait` of their route, without tokens. Default: none, any
    /// number.
    #[serde(default, with = "OrNone::<InFlightMax>")]
    pub max_in_flight: Option<InFlightMax>,
    /// How its word on when to come back is taken.
    #[serde(default)]
    pub feedback: FeedbackConfig,
    /// The statuses by which it refuses a request because it has too many. They close
    /// its limits on all replicas for as long as it says, and the request waits and is
    /// sent again if it may. Default: 429, 503.
    #[serde(default = "UpstreamConfig::default_pause_on")]
    pub pause_on: Vec<RefusingStatus>,
    /// Headers that its requests get when they are sent, in place of what clients
    /// sent under their names, such as `authorization`. Default: none.
    #[serde(default)]
    pub inject: BTreeMap<String, InjectConfig>,
}

impl UpstreamConfig {
    const fn default_host() -> UpstreamHost {
        UpstreamHost::Upstream
    }

    fn default_pause_on() -> Vec<RefusingStatus> {
        [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].map(RefusingStatus).into()
    }

    /// Faults of settings that do not go together, and of those that do not go with
    /// the name or with `proxy`.
    pub fn faults(&self, name: &str, proxy: Option<&config::Config>) -> Vec<Fault> {
        let mut faults = Vec::new();
        if name == DEFAULT {
            faults.push(Fault::new([], "`default` is the name of `proxy.upstream`"));
        } else if !NameText::is_valid(name) {
            faults.push(Fault::new([], NameText::refusal(name)));
        }
        if self.ca.is_some() && !matches!(self.url, Upstream::Https { .. }) {
            let message = "goes with a url of `https://` only";
            faults.push(Fault::new(["ca".into()], message).given(&["url"]));
        }
        if let Some(fault) = proxy.and_then(|proxy| proxy.circle(&self.url)) {
            faults.push(Fault::new(["url".into()], fault));
        }
        faults
    }
}

/// Which requests go to which upstream.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Egress")]
pub struct EgressConfig {
    /// The first route that matches a request counts. Default: none, every request
    /// goes to `proxy.upstream`.
    pub routes: Vec<RouteConfig>,
}

/// The way of some requests.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Route")]
pub struct RouteConfig {
    /// The requests; all that is named must hold. Default: all.
    #[serde(default, rename = "match")]
    pub condition: ConditionConfig,
    /// The name of the upstream that gets them; `default` is `proxy.upstream`.
    /// Required.
    #[serde(with = "NameText")]
    pub upstream: String,
    /// How long a request may wait for the tokens of limits whose `match` names the
    /// upstream, in place of their own `max_wait`. Default: none, theirs holds.
    #[serde(default, with = "OrNone::<Wait>")]
    pub max_wait: Option<Wait>,
    /// The beginning of the path that is taken away before the request is sent, such
    /// as `/acme`. The route takes only requests whose path begins so. Default: none.
    #[serde(default, with = "OrNone::<Prefix>")]
    pub strip: Option<Prefix>,
}

/// How many requests may be on their way, 1 to 1000000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub struct InFlightMax(#[serde(with = "Whole::<1, 1_000_000>")] pub usize);

/// How long a request may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub struct Wait(#[serde(with = "DurationOrZeroText")] pub Duration);

/// The first segments of a path, `/a` or `/a/b`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Prefix(pub String);

impl<'de> Deserialize<'de> for Prefix {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = text(deserializer, "the beginning of a path, such as /acme")?;
        // What a path can be written as in more than one way is left out.
        let valid = text.strip_prefix('/').is_some_and(|rest| {
            rest.split('/').all(|segment| {
                !matches!(segment, "" | "." | "..")
                    && segment.bytes().all(|b| {
                        b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~')
                    })
            })
        });
        if valid {
            return Ok(Self(text));
        }
        Err(de::Error::custom(format!(
            "`{text}` is not the beginning of a path: write whole segments of letters, digits, \
             `-`, `.`, `_` and `~`, such as /acme"
        )))
    }
}

impl JsonSchema for Prefix {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Prefix".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "pattern": "^(/[A-Za-z0-9._~-]+)+$",
            "examples": ["/acme"],
        })
    }
}

impl RouteConfig {
    /// Faults of settings that do not go together.
    pub fn faults(&self) -> Vec<Fault> {
        let named = self.condition.upstream().is_some();
        let path = ["match".into(), "upstream".into()];
        let message = "a route says it by `upstream`, it cannot depend on it";
        named.then(|| Fault::new(path, message)).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_made_of_whole_plain_segments() {
        let read = |text: &str| serde_json::from_value::<Prefix>(serde_json::json!(text));
        for good in ["/a", "/a/b", "/v1.0/x_y~z-"] {
            assert_eq!(read(good).unwrap().0, good);
        }
        for bad in ["", "/", "a", "/a/", "//a", "/a//b", "/..", "/a/../b", "/.", "/%61", "/a?b"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
