//! A configuration from flags, for a first try without a file.
//!
//! A limit is written `[NAME:]PART[,PART...]=RATE[:BURST]`, such as
//! `client_ip=100/min` or `per-key:header:x-api-key,path=10/s:20`. Without a
//! name it is called after its parts. Without parts, as in `all:=1000/s`, there
//! is one bucket for all requests.

use super::Config;
use super::problem::{LoadError, Problem};
use crate::limiter::config::{Burst, KeyPartConfig, LimitConfig, LimiterConfig};
use crate::limiter::{KeyPart, Limit, LimitSet, Rate};
use crate::settings::NameText;
use crate::{admin, peer, proxy, telemetry};

/// The configuration that `--upstream` and every `--limit` ask for, with all
/// other settings at their defaults.
///
/// # Errors
/// With everything that is wrong with the flags.
pub fn from_flags(upstream: &str, limits: &[String]) -> Result<Config, LoadError> {
    let mut problems = Vec::new();
    let problem = |path: String, message: String| Problem { place: None, path, message };
    let proxy = upstream
        .parse()
        .map(proxy::Config::new)
        .map_err(|e: proxy::UpstreamError| {
            problems.push(problem("--upstream".to_owned(), e.to_string()));
        })
        .ok();
    let faults = proxy.as_ref().map(proxy::Config::faults).unwrap_or_default();
    problems.extend(faults.into_iter().map(|f| problem("--upstream".to_owned(), f.message)));
    let mut configs: Vec<LimitConfig> = Vec::new();
    let mut compiled = Vec::new();
    for text in limits {
        let flag = format!("--limit {text}");
        let config = match limit(text) {
            Ok(config) => config,
            Err(message) => {
                problems.push(problem(flag, message));
                continue;
            }
        };
        if configs.iter().any(|other| other.name == config.name) {
            let message = "another limit has this name; write NAME: in front of one";
            problems.push(problem(flag.clone(), message.to_owned()));
        }
        let sync_interval = peer::Config::default().sync_interval;
        match config.compile(proxy::Config::default_ipv6_prefix(), sync_interval) {
            Ok(spec) => compiled.push(Limit::new(spec)),
            Err(faults) => {
                problems.extend(faults.into_iter().map(|f| problem(flag.clone(), f.message)));
            }
        }
        configs.push(config);
    }
    match proxy {
        Some(proxy) if problems.is_empty() => Ok(Config {
            proxy,
            upstreams: proxy::UpstreamsConfig::default(),
            egress: proxy::EgressConfig::default(),
            limiter: LimiterConfig::default(),
            limits: configs,
            replication: peer::Config::default(),
            admin: admin::Config::default(),
            telemetry: telemetry::Config::default(),
            of_upstreams: Vec::new(),
            compiled: LimitSet::new(compiled),
            hash: None,
        }),
        _ => Err(LoadError::new("command line", problems)),
    }
}

fn limit(text: &str) -> Result<LimitConfig, String> {
    let (key, quota) = text
        .split_once('=')
        .ok_or("write [NAME:]PART[,PART...]=RATE[:BURST], such as client_ip=100/min")?;
    let (rate, burst) = match quota.split_once(':') {
        Some((rate, burst)) => (rate, Some(burst)),
        None => (quota, None),
    };
    let rate: Rate = rate.parse().map_err(|e: crate::limiter::RateError| e.to_string())?;
    let burst: Option<Burst> = burst.map(str::parse).transpose()?;
    let (name, parts) = match key.split_once(':') {
        Some((kind, _)) if KeyPartConfig::KINDS.contains(&kind) => (None, key),
        Some((name, parts)) => (Some(name), parts),
        None => (None, key),
    };
    let parts: Vec<KeyPart> = parts
        .split(',')
        .filter(|_| !parts.is_empty())
        .map(|part| part.parse().map(|part: KeyPartConfig| part.0))
        .collect::<Result<_, _>>()?;
    let name = match name {
        Some(name) => name.to_owned(),
        None if parts.is_empty() => "all".to_owned(),
        None => {
            let parts: Vec<String> = parts.iter().map(KeyPart::to_string).collect();
            parts.join(".").replace(':', "-")
        }
    };
    if !NameText::is_valid(&name) {
        return Err(format!("{}: write NAME: in front", NameText::refusal(&name)));
    }
    Ok(LimitConfig::new(name, parts, rate, burst.map(|burst| burst.0)))
}
