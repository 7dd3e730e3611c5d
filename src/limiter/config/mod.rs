//! The `limiter` and `limits` sections, and how a limit is compiled from its
//! text.
//!
//! Each value is checked while it is read; [`LimitConfig::compile`] checks what
//! only shows when values are put together.

use std::collections::HashMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod condition;
mod cost;
mod effective;
mod key;
mod text;
mod window;

pub use condition::ConditionConfig;
pub use cost::CostConfig;
pub use key::KeyPartConfig;
use key::ValueText;
pub use text::{Burst, LimitName, RateText};
use text::{MissingText, ModeText, PartitionText, WindowText};
pub use window::WindowConfig;

use super::key::BucketId;
use super::limit::{Limit, LimitSpec, Mode, Partition, Window};
use super::quota::Quota;
use super::quota::Rate;
use super::rule::{KeyPart, Missing, Rule, Source};
use super::tokens::Tokens;
use super::wait::Crowding;
use crate::settings::{DurationOrZeroText, DurationText, Fault, PathSegment, Whole};

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
    /// Requests that may wait for tokens at the same time. Default: 100000.
    #[serde(with = "WaiterCount")]
    pub max_waiting: usize,
    /// The same for one bucket. Default: 10000.
    #[serde(with = "WaiterCount")]
    pub max_waiting_per_bucket: usize,
}

// Far above what the memory of a sidecar holds, and no slip in the zeros.
type BucketCount = Whole<1, 4_294_967_295>;
type WaiterCount = Whole<0, 4_294_967_295>;

impl LimiterConfig {
    /// How many requests may wait.
    pub const fn crowding(&self) -> Crowding {
        Crowding { in_all: self.max_waiting, per_bucket: self.max_waiting_per_bucket }
    }
}

impl Default for LimiterConfig {
    fn default() -> Self {
        let Crowding { in_all, per_bucket } = Crowding::default();
        Self {
            max_buckets: 1_000_000,
            idle_expiry: Duration::from_secs(10),
            max_waiting: in_all,
            max_waiting_per_bucket: per_bucket,
        }
    }
}

/// One limit: which requests it applies to, which bucket each uses, and how much
/// that bucket gives.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Limit", extend("required" = ["name", "rate"]))]
pub struct LimitConfig {
    /// The limit's identity among all replicas. Required.
    #[serde(default)]
    #[schemars(required)]
    pub name: Option<LimitName>,
    /// The limit's first name, if it was renamed: it keeps the buckets that it
    /// had under that name, for as long as this stays here. Default: none.
    #[serde(default)]
    pub was: Option<LimitName>,
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
    /// What the rate promises. `strict`: never more than its N in any window as long as
    /// its period, over all replicas together. Default: bucket.
    #[serde(default, with = "WindowText")]
    pub window: Window,
    /// Tokens that a bucket holds, 1 to 10^12. Default: the N of the rate; of a strict
    /// window a twentieth of it, and 2 where that is less.
    #[serde(default)]
    pub burst: Option<Burst>,
    /// Tokens that one request costs, 1 up to the burst: a number; or a list of
    /// `{ match: ..., cost: N }` of which the first that matches counts, and 1 if
    /// none does; or `{ header: NAME, max: N }`. Default: 1.
    #[serde(default)]
    pub cost: CostConfig,
    /// Other quotas for single keys. Default: none.
    #[serde(default)]
    pub overrides: Vec<OverrideConfig>,
    /// Refuse requests, or only report. Default: enforce.
    #[serde(default, with = "ModeText")]
    pub mode: Mode,
    /// Whether answers tell the limit's state. Default: true.
    #[serde(default = "default_expose")]
    pub expose: bool,
    /// How long a request without room may wait for its tokens before it is
    /// refused. Default: 0s, it is refused at once.
    #[serde(default, with = "DurationOrZeroText")]
    pub max_wait: Duration,
    /// What holds when replicas lose sight of each other. Default: frozen, each
    /// goes on with the share that it had.
    #[serde(default, with = "PartitionText")]
    pub partition: Partition,
    /// The rate and the burst keep to a window already.
    #[serde(skip)]
    is_paced: bool,
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
            was: None,
            condition: ConditionConfig::default(),
            exempt: Vec::new(),
            key: key.into_iter().map(KeyPartConfig).collect(),
            missing: Missing::default(),
            rate: Some(RateText(rate)),
            window: Window::default(),
            burst: burst.map(Burst),
            cost: CostConfig::default(),
            overrides: Vec::new(),
            mode: Mode::default(),
            expose: default_expose(),
            max_wait: Duration::ZERO,
            partition: Partition::default(),
            is_paced: false,
        }
    }

    /// The limit of the upstream called `name`: one bucket for all requests to it,
    /// which never lets more than `window.requests` pass within `window.per`.
    ///
    /// # Errors
    /// If the numbers do not go together, with a path from the window down.
    pub fn of_upstream(
        name: &str,
        window: &WindowConfig,
        sync_interval: Duration,
    ) -> Result<Self, Fault> {
        let (rate, burst) = window.paced(sync_interval)?;
        let mut limit = Self::new(name.to_owned(), Vec::new(), rate, Some(burst));
        limit.condition = ConditionConfig::for_upstream(name.to_owned());
        limit.is_paced = true;
        Ok(limit)
    }

    /// The upstreams that its conditions name, with their paths from the limit down.
    pub fn upstreams(&self) -> Vec<(Vec<PathSegment>, &str)> {
        let mut named = Vec::new();
        if let Some(name) = self.condition.upstream() {
            named.push((vec!["match".into(), "upstream".into()], name));
        }
        for (index, exempt) in self.exempt.iter().enumerate() {
            if let Some(name) = exempt.upstream() {
                named.push((vec!["exempt".into(), index.into(), "upstream".into()], name));
            }
        }
        for (mut path, name) in self.cost.upstreams() {
            path.insert(0, "cost".into());
            named.push((path, name));
        }
        named
    }

    /// The limit that this text means. `ipv6_prefix` is the number of leading
    /// bits by which IPv6 clients are grouped, `sync_interval` the time within which
    /// replicas hear of each other, which a strict window leaves unused.
    ///
    /// # Errors
    /// Every fault that shows when the values are put together, with paths from
    /// the limit down.
    pub fn compile(
        &self,
        ipv6_prefix: u8,
        sync_interval: Duration,
    ) -> Result<LimitSpec, Vec<Fault>> {
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
            self.quota(rate, self.burst, sync_interval, &[])
                .map_err(|fault| faults.push(fault.given(&["burst", "cost", "rate"])))
                .ok()
        });
        let name = self.name.as_ref().map(|name| name.0.clone()).unwrap_or_default();
        let was = self.was.as_ref().map(|was| was.0.clone());
        if was.as_ref().is_some_and(|was| *was == name) {
            faults.push(Fault::new(["was".into()], "is the limit's present name: leave it out"));
        }
        let identity = was.as_ref().unwrap_or(&name);
        let overrides =
            self.compile_overrides(identity, &rule, ipv6_prefix, sync_interval, &mut faults);
        match (quota, self.cost.compile()) {
            (Some(quota), Some(cost)) if faults.is_empty() => Ok(LimitSpec {
                name,
                was,
                rule,
                quota,
                cost,
                overrides,
                mode: self.mode,
                expose: self.expose,
                partition: self.partition,
                max_wait: self.max_wait,
            }),
            _ => Err(faults),
        }
    }

    fn compile_overrides(
        &self,
        identity: &str,
        rule: &Rule,
        ipv6_prefix: u8,
        sync_interval: Duration,
        faults: &mut Vec<Fault>,
    ) -> HashMap<BucketId, Quota> {
        let seed = Limit::seed(identity, rule);
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
                    .quota(rate, element.burst, sync_interval, &at)
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
        sync_interval: Duration,
        at: &[PathSegment],
    ) -> Result<Quota, Fault> {
        let fault = |field: &'static str, message: String| {
            let mut path = at.to_vec();
            path.push(field.into());
            Err(Fault::new(path, message))
        };
        let strict = self.window == Window::Strict && !rate.0.is_blocked();
        let (rate, tokens) = if strict {
            let window = WindowConfig::of(rate.0, burst);
            if window.requests < 2 {
                return fault("rate", "a strict window needs 2 or more".to_owned());
            }
            match window.paced(sync_interval) {
                Ok((rate, tokens)) => (RateText(rate), tokens),
                Err(Fault { path, message, .. }) => {
                    let of_burst = path == ["burst".into()];
                    return fault(if of_burst { "burst" } else { "rate" }, message);
                }
            }
        } else {
            (rate, burst.map_or(rate.0.tokens(), |burst| burst.0))
        };
        if rate.0.is_blocked() && burst.is_some() {
            let message = format!("a rate of {} lets nothing pass: leave the burst out", rate.0);
            return fault("burst", message);
        }
        let Some(quota) = Quota::try_new(rate.0, tokens) else {
            return fault("burst", format!("{tokens} is not from 1 to {}", Tokens::MAX_WHOLE));
        };
        if !rate.0.is_blocked()
            && let Some(which) = self.cost.above(tokens)
        {
            let source = match (burst, strict) {
                (Some(_), _) => "",
                (None, false) => " (by default the N of the rate)",
                (None, true) => " (by default a twentieth of the N of the rate, or 2)",
            };
            let message = format!("{which}, above the burst of {tokens}{source}");
            return fault(if burst.is_some() { "burst" } else { "rate" }, message);
        }
        Ok(if strict || self.is_paced { quota.keeping_window() } else { quota })
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

/// Another quota for one key.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Override", extend("required" = ["key", "rate"]))]
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
