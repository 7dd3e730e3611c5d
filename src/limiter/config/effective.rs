//! A limit written out with every default, for operators who ask what is in
//! force. Reading it back gives the same limit, except that keys of overrides
//! whose part is a secret are not told.

use serde::ser::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::super::cost::Cost;
use super::super::limit::{Mode, Partition, Window};
use super::super::quota::Rate;
use super::super::rule::{Condition, KeyPart, Missing};
use super::{ConditionConfig, LimitConfig, WindowConfig};

/// In place of a secret.
const MASKED: &str = "(secret)";

impl LimitConfig {
    /// All settings of the limit, as the configuration would write them.
    pub fn effective(&self) -> Value {
        let rate = self.rate.map(|rate| rate.0);
        let usual = |rate: Rate| match self.window {
            Window::Bucket => rate.tokens(),
            Window::Strict => WindowConfig::usual_burst(rate.tokens()),
        };
        let burst = self.burst.map(|burst| burst.0).or_else(|| rate.map(usual));
        let mut limit = json!({
            "name": self.name.as_ref().map(|name| &name.0),
            "match": condition(&self.condition.compile()),
            "exempt": self.exempt.iter().map(|c| condition(&c.compile())).collect::<Vec<_>>(),
            "key": self.key.iter().map(|part| key_part(&part.0)).collect::<Vec<_>>(),
            "missing": match self.missing {
                Missing::Shared => "shared",
                Missing::ClientIp => "client_ip",
                Missing::Skip => "skip",
                Missing::Deny => "deny",
            },
            "rate": rate.map(|rate| rate.to_string()),
            "window": match self.window {
                Window::Bucket => "bucket",
                Window::Strict => "strict",
            },
            "cost": self.cost.compile().map(|c| cost(&c)),
            "overrides": self.overrides.iter().map(|element| {
                let parts = self.key.iter().map(|part| part.0.is_secret());
                let values = element.key.iter().flatten().zip(parts).map(|(value, secret)| {
                    if secret { MASKED } else { value.0.as_str() }
                });
                let rate = element.rate.map(|rate| rate.0);
                let burst = element.burst.map(|b| b.0).or_else(|| rate.map(usual));
                let mut written = json!({
                    "key": values.collect::<Vec<_>>(),
                    "rate": rate.map(|rate| rate.to_string()),
                });
                add_burst(&mut written, burst);
                written
            }).collect::<Vec<_>>(),
            "mode": match self.mode {
                Mode::Enforce => "enforce",
                Mode::Shadow => "shadow",
            },
            "expose": self.expose,
            "max_wait": humantime::format_duration(self.max_wait).to_string(),
            "partition": match self.partition {
                Partition::Frozen => "frozen",
                Partition::Strict => "strict",
                Partition::Open => "open",
            },
        });
        add_burst(&mut limit, burst);
        if let (Some(was), Value::Object(fields)) = (&self.was, &mut limit) {
            fields.insert("was".to_owned(), json!(was.0));
        }
        limit
    }
}

/// As the configuration would write it.
impl Serialize for ConditionConfig {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        condition(&self.compile()).serialize(to)
    }
}

/// A blocked limit has no burst that could be written.
fn add_burst(written: &mut Value, burst: Option<u64>) {
    if let (Some(burst), Value::Object(fields)) = (burst.filter(|burst| *burst > 0), written) {
        fields.insert("burst".to_owned(), json!(burst));
    }
}

fn condition(condition: &Condition) -> Value {
    let mut fields = Map::new();
    let mut add = |name: &str, value: Value| fields.insert(name.to_owned(), value);
    if let Some(upstream) = &condition.upstream {
        add("upstream", json!(upstream));
    }
    if let Some(path) = &condition.path {
        add("path", json!(path.to_string()));
    }
    if !condition.methods.is_empty() {
        add("methods", json!(condition.methods));
    }
    if let Some(host) = &condition.host {
        add("host", json!(host));
    }
    if !condition.headers.is_empty() {
        let headers = condition.headers.iter().map(|(name, value)| (name.clone(), json!(value)));
        add("headers", Value::Object(headers.collect()));
    }
    if !condition.cidrs.is_empty() {
        add("cidrs", json!(condition.cidrs.iter().map(ToString::to_string).collect::<Vec<_>>()));
    }
    Value::Object(fields)
}

fn key_part(part: &KeyPart) -> Value {
    let text = part.to_string();
    match text.split_once(':') {
        Some((kind, name)) if part.is_secret() => json!({ kind: name, "secret": true }),
        Some(_) | None => json!(text),
    }
}

fn cost(cost: &Cost) -> Value {
    match cost {
        Cost::Fixed(cost) => json!(cost.whole()),
        Cost::Cases(cases) => cases
            .iter()
            .map(|(case, cost)| json!({ "match": condition(case), "cost": cost.whole() }))
            .collect(),
        Cost::Header { name, max } => json!({ "header": name, "max": max.whole() }),
    }
}
