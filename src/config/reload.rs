//! What a running replica takes from a new configuration, and how it fared.
//!
//! `limits`, those of `upstreams`, and of `proxy` the fields `trusted_proxies`,
//! `headers` and `cors`, take effect at once, together or not at all. Whatever else
//! differs from what the replica was started with is named, and takes a restart.

use std::collections::BTreeSet;
use std::time::SystemTime;

use serde::Serialize;
use serde_json::Value;

use super::Config;
use super::problem::{LoadError, Problem};
use crate::limiter::{Limit, LimitSet};

/// How the configuration of a replica came about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// When the configuration in force was loaded.
    pub loaded_at: SystemTime,
    /// All of it, as [`Config::effective`] writes it.
    pub effective: String,
    /// Its [hash](Config::hash); `None` if it came from flags.
    pub hash: Option<String>,
    /// Why a newer one was refused, if the last one was: a line for each problem.
    pub last_error: Option<String>,
    /// When that was.
    pub last_error_at: Option<SystemTime>,
    /// The settings that are not in force as they are written, such as
    /// `proxy.listen`: they need a restart.
    pub needs_restart: Vec<String>,
}

/// Fields of `proxy` that change live.
const LIVE: [&str; 3] = ["trusted_proxies", "headers", "cors"];

impl Config {
    /// The settings in which `new` differs from this and that only a restart
    /// puts in force, such as `proxy.listen`.
    pub fn needs_restart(&self, new: &Self) -> Vec<String> {
        let mut paths = Vec::new();
        compare("proxy", &without_live(&self.proxy), &without_live(&new.proxy), &mut paths);
        compare(
            "upstreams",
            &without_limits(&self.upstreams),
            &without_limits(&new.upstreams),
            &mut paths,
        );
        compare("egress", &value(&self.egress), &value(&new.egress), &mut paths);
        compare("limiter", &value(&self.limiter), &value(&new.limiter), &mut paths);
        compare("replication", &value(&self.replication), &value(&new.replication), &mut paths);
        compare("admin", &value(&self.admin), &value(&new.admin), &mut paths);
        compare("telemetry", &value(&self.telemetry), &value(&new.telemetry), &mut paths);
        paths
    }

    /// The limits of this configuration in a replica that was started with
    /// `running`, whose grouping of clients goes on.
    ///
    /// # Errors
    /// If an override names a group of clients that there is not.
    pub fn limits_in(&self, running: &Self) -> Result<LimitSet, LoadError> {
        let prefix = running.proxy.ipv6_prefix;
        let sync_interval = running.replication.sync_interval;
        if self.proxy.ipv6_prefix == prefix && self.replication.sync_interval == sync_interval {
            return Ok(self.limits());
        }
        let (mut limits, mut problems) = (Vec::new(), Vec::new());
        for config in self.limits.iter().chain(&self.of_upstreams) {
            match config.compile(prefix, sync_interval) {
                Ok(spec) => limits.push(Limit::new(spec)),
                Err(faults) => problems.extend(faults.into_iter().map(|fault| Problem {
                    place: None,
                    path: "limits".to_owned(),
                    message: format!("{} (a new proxy.ipv6_prefix needs a restart)", fault.message),
                })),
            }
        }
        if problems.is_empty() {
            Ok(LimitSet::new(limits))
        } else {
            Err(LoadError::new("configuration", problems))
        }
    }
}

fn value(section: &impl Serialize) -> Value {
    // The notations of the configuration are all plain JSON.
    serde_json::to_value(section).unwrap_or_default()
}

fn without_live(proxy: &impl Serialize) -> Value {
    let mut value = value(proxy);
    if let Value::Object(fields) = &mut value {
        for name in LIVE {
            fields.shift_remove(name);
        }
    }
    value
}

/// The limits of upstreams change live.
fn without_limits(upstreams: &impl Serialize) -> Value {
    let mut value = value(upstreams);
    for upstream in value.as_object_mut().into_iter().flat_map(|map| map.values_mut()) {
        if let Value::Object(fields) = upstream {
            fields.shift_remove("limit");
        }
    }
    value
}

/// Adds the paths of the innermost maps' fields that differ.
fn compare(path: &str, old: &Value, new: &Value, paths: &mut Vec<String>) {
    if let (Value::Object(a), Value::Object(b)) = (old, new) {
        let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
        for name in names {
            let [a, b] = [a, b].map(|map| map.get(name).unwrap_or(&Value::Null));
            compare(&format!("{path}.{name}"), a, b, paths);
        }
    } else if old != new {
        paths.push(path.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    fn config(text: &str) -> Config {
        parse("t.yaml", text, &|_| None).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn what_needs_a_restart_is_named() {
        let old = config("proxy: { upstream: http://a }");
        for (text, named) in [
            ("proxy: { upstream: http://a, headers: off, trusted_proxies: [10.0.0.1] }", &[][..]),
            ("proxy: { upstream: http://a, cors: { allow_origins: ['*'] } }", &[]),
            ("proxy: { upstream: http://a }\nlimits: [{ name: a, rate: 1/s }]", &[]),
            (
                "proxy: { upstream: http://b, listen: '[::]:1', timeouts: { idle: 1s } }",
                &["proxy.listen", "proxy.timeouts.idle", "proxy.upstream"],
            ),
            (
                "proxy: { upstream: http://a }
upstreams: { b: { url: http://b, limit: { requests: 9, per: 1s } } }
egress: { routes: [{ upstream: b }] }",
                &["upstreams.b", "egress.routes"],
            ),
            (
                "proxy: { upstream: http://a }
limiter: { max_buckets: 7 }
replication: { peers: { dns: a }, insecure: true }
telemetry: { access_log: on }",
                &[
                    "limiter.max_buckets",
                    "replication.insecure",
                    "replication.peers",
                    "telemetry.access_log",
                ],
            ),
        ] {
            assert_eq!(old.needs_restart(&config(text)), named, "{text}");
        }
    }

    #[test]
    fn overrides_follow_the_groups_of_clients_that_there_are() {
        let of = |prefix: u8, key: &str| {
            config(&format!(
                "proxy: {{ upstream: http://a, ipv6_prefix: {prefix} }}
limits: [{{ name: a, rate: 1/s, overrides: [{{ key: ['{key}'], rate: 9/s }}] }}]"
            ))
        };
        let (running, new) = (of(64, "2001:db8:0:1::1"), of(48, "2001:db8::1"));
        let limits = new.limits_in(&running).unwrap();
        let (_, limit) = limits.find("a").unwrap();
        let key = limit.rule().key_from_text(&["2001:db8::7"], 64).unwrap();
        assert_eq!(limit.quota(limit.bucket_id(key.as_bytes())).burst().whole(), 9);
        let error = of(48, "2001:db8::/48").limits_in(&running).unwrap_err().to_string();
        assert!(error.contains("grouped by /64") && error.contains("restart"), "{error}");
    }
}
