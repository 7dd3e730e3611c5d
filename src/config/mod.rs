//! Configuration (layer 6): one field for each module's own configuration, read
//! from a YAML file or from flags.
//!
//! Invariants:
//! - a [`Config`] is sound: whatever cannot work was refused, unknown names and
//!   features of later versions included;
//! - every problem is reported at once, each with its place in the file.

use std::path::Path;
use std::time::Duration;

use schemars::{JsonSchema, Schema};

mod decode;
mod egress;
mod env;
mod flags;
mod problem;
pub mod reload;
mod source;
mod suggest;
#[cfg(test)]
mod tests;
mod tree;

use decode::{MAX_PROBLEMS, decode, refuse_unknown};
pub use flags::from_flags;
pub use problem::{LoadError, Place, Problem};
pub use source::{Look, Reading, Source, Watch};
use tree::{Content, Node};

use crate::limiter::config::{LimitConfig, LimiterConfig};
use crate::limiter::{Limit, LimitSet};
use crate::settings::Fault;
use crate::{admin, peer, proxy, telemetry};

/// Everything a replica is told at its start.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(deny_unknown_fields, title = "tidegate")]
pub struct Config {
    /// The proxy: where requests come from and go to.
    pub proxy: proxy::Config,
    /// Upstreams that routes name, each by its name. Default: none.
    #[schemars(default)]
    pub upstreams: proxy::UpstreamsConfig,
    /// Which requests go to which upstream.
    #[schemars(default)]
    pub egress: proxy::EgressConfig,
    /// How much memory buckets may use.
    #[schemars(default)]
    pub limiter: LimiterConfig,
    /// The limits. All that apply to a request must have room. Default: none.
    #[schemars(default)]
    pub limits: Vec<LimitConfig>,
    /// How replicas tell each other what they spent.
    #[schemars(default)]
    pub replication: peer::Config,
    /// The admin gRPC.
    #[schemars(default)]
    pub admin: admin::Config,
    /// Probes, metrics and the access log.
    #[schemars(default)]
    pub telemetry: telemetry::Config,
    /// Those of the upstreams.
    #[schemars(skip)]
    of_upstreams: Vec<LimitConfig>,
    #[schemars(skip)]
    compiled: LimitSet,
    /// Of the file; none for flags.
    #[schemars(skip)]
    hash: Option<String>,
}

const SECTIONS: [&str; 8] =
    ["proxy", "upstreams", "egress", "limiter", "limits", "replication", "admin", "telemetry"];

impl Config {
    /// The limits, ready to be checked.
    pub fn limits(&self) -> LimitSet {
        self.compiled.clone()
    }

    /// A hash of the file it was read from, 32 hexadecimal digits; `None` for
    /// flags.
    pub fn hash(&self) -> Option<&str> {
        self.hash.as_deref()
    }

    /// The whole configuration with every default, as YAML. Keys of overrides that
    /// are secret are not told.
    pub fn effective(&self) -> String {
        let limits: Vec<_> = self.limits.iter().map(LimitConfig::effective).collect();
        let whole = serde_json::json!({
            "proxy": self.proxy,
            "upstreams": self.upstreams,
            "egress": self.egress,
            "limiter": self.limiter,
            "limits": limits,
            "replication": self.replication,
            "admin": self.admin,
            "telemetry": self.telemetry,
        });
        let whole = env::without_references(whole);
        serde_saphyr::to_string(&whole).unwrap_or_default()
    }

    /// The JSON Schema of the file, for editors.
    pub fn schema() -> Schema {
        schemars::schema_for!(Self)
    }
}

/// Reads the configuration in the file `path`; `env` looks up the environment.
///
/// # Errors
/// If the file cannot be read, or with everything that is wrong with it.
pub fn load(path: &Path, env: &dyn Fn(&str) -> Option<String>) -> Result<Config, LoadError> {
    Source::new(path).read().parse(env)
}

/// Reads the configuration in `text`, which problems call `name`.
///
/// # Errors
/// With everything that is wrong with it.
pub fn parse(
    name: &str,
    text: &str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Config, LoadError> {
    let mut problems = Vec::new();
    let hash = source::hash(text.as_bytes());
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let config = match tree::parse(text, env, &mut problems) {
        Ok(root) => assemble(&root, env, &mut problems),
        Err(problem) => {
            problems.push(problem);
            None
        }
    };
    if problems.len() >= MAX_PROBLEMS {
        problems.truncate(MAX_PROBLEMS);
        let message = format!("more than {MAX_PROBLEMS} problems; the rest is not shown");
        problems.push(Problem { place: None, path: String::new(), message });
    }
    match config {
        Some(config) if problems.is_empty() => Ok(Config { hash: Some(hash), ..config }),
        _ => Err(LoadError::new(name, problems)),
    }
}

fn assemble(
    root: &Node,
    env: &dyn Fn(&str) -> Option<String>,
    problems: &mut Vec<Problem>,
) -> Option<Config> {
    if !matches!(root.content, Content::Map(_) | Content::Null) {
        problems.push(root.problem("expected a map with the sections of a configuration"));
        return None;
    }
    refuse_unknown(root, &SECTIONS, problems);
    let proxy: Option<proxy::Config> = match root.field("proxy") {
        Some(node) => {
            let proxy = decode(node, problems);
            report(node, proxy.as_ref().map(proxy::Config::faults).unwrap_or_default(), problems);
            proxy
        }
        None => Some(proxy::Config::routed()),
    };
    let limiter = section(root, "limiter", problems, |_: &LimiterConfig| Vec::new());
    let replication = section(root, "replication", problems, peer::Config::faults);
    let admin = section(root, "admin", problems, admin::Config::faults);
    let telemetry = section(root, "telemetry", problems, |_: &telemetry::Config| Vec::new());
    let ipv6_prefix =
        proxy.as_ref().map_or(proxy::Config::default_ipv6_prefix(), |proxy| proxy.ipv6_prefix);
    let has_proxies = proxy.as_ref().is_none_or(|proxy| !proxy.trusted_proxies.is_empty());
    let egress = egress::assemble(root, proxy.as_ref(), replication.as_ref(), env, problems);
    let routed = egress.as_ref().is_none_or(|egress| !egress.egress.routes.is_empty())
        || root.field("egress").is_some_and(Node::is_tainted);
    if proxy.as_ref().is_some_and(|proxy| proxy.upstream.is_none())
        && !routed
        && !egress::is_broken(root)
    {
        let path = ["proxy".into(), "upstream".into()];
        problems.push(root.problem_at(&path, "is required, unless `egress` has routes"));
    }
    // What is wrong with the section was said.
    let sync_interval = replication.as_ref().map_or_else(
        || peer::Config::default().sync_interval,
        |replication| replication.sync_interval,
    );
    let (limits, mut compiled) = limits(root, ipv6_prefix, sync_interval, has_proxies, problems);
    let egress = egress?;
    for limit in &egress.limits {
        // Its numbers were checked, so that it has no faults.
        compiled.extend(limit.compile(ipv6_prefix, sync_interval).map(Limit::new));
    }
    if compiled.len() > LimitSet::MAX {
        let message = format!("more than {} limits, those of upstreams included", LimitSet::MAX);
        problems.push(root.problem_at(&["limits".into()], message));
    }
    Some(Config {
        proxy: proxy?,
        upstreams: egress.upstreams,
        egress: egress.egress,
        limiter: limiter?,
        limits,
        replication: replication?,
        admin: admin?,
        telemetry: telemetry?,
        of_upstreams: egress.limits,
        compiled: LimitSet::new(compiled),
        hash: None,
    })
}

/// An optional section, and what is wrong with it as a whole.
fn section<'t, T: Default + serde::Deserialize<'t>>(
    root: &'t Node,
    name: &'static str,
    problems: &mut Vec<Problem>,
    faults: impl Fn(&T) -> Vec<Fault>,
) -> Option<T> {
    let Some(node) = root.field(name) else { return Some(T::default()) };
    let value = decode(node, problems)?;
    report(node, faults(&value), problems);
    Some(value)
}

fn limits(
    root: &Node,
    ipv6_prefix: u8,
    sync_interval: Duration,
    has_proxies: bool,
    problems: &mut Vec<Problem>,
) -> (Vec<LimitConfig>, Vec<Limit>) {
    let (mut configs, mut compiled) = (Vec::new(), Vec::new());
    let Some(list) = root.field("limits") else { return (configs, compiled) };
    if !matches!(list.content, Content::List(_) | Content::Null) && !list.broken.get() {
        problems.push(list.problem("expected a list of limits"));
    }
    let mut names: Vec<(String, &Node)> = Vec::new();
    let mut nodes = Vec::new();
    for node in list.elements() {
        let Some(config) = decode::<LimitConfig>(node, problems) else { continue };
        match config.compile(ipv6_prefix, sync_interval) {
            Ok(spec) => compiled.push(Limit::new(spec)),
            Err(faults) => report(node, faults, problems),
        }
        if let Some(name) = &config.name {
            match names.iter().find(|(other, _)| *other == name.0) {
                Some((_, first)) => {
                    let message = format!("`{}` is the name of {} already", name.0, first.path);
                    problems.push(node.problem_at(&["name".into()], message));
                }
                None => names.push((name.0.clone(), node)),
            }
        }
        if config.cost.is_from_header() && !has_proxies {
            let message = "a cost from a header needs `proxy.trusted_proxies`: \
                           any client could write the header";
            problems.push(node.problem_at(&["cost".into()], message));
        }
        nodes.push(node);
        configs.push(config);
    }
    for (config, node) in configs.iter().zip(&nodes) {
        let Some(was) = &config.was else { continue };
        // Each set of buckets belongs to one limit.
        let owner = configs.iter().zip(&nodes).find(|(other, of)| {
            let first = other.was.as_ref().or(other.name.as_ref());
            !std::ptr::eq(*of, node) && first.is_some_and(|first| first == was)
        });
        if let Some((_, of)) = owner {
            let message = format!("the buckets of `{}` are those of {}", was.0, of.path);
            problems.push(node.problem_at(&["was".into()], message));
        }
    }
    egress::check_limits(root, &configs, &nodes, problems);
    (configs, compiled)
}

/// Adds faults of the settings in `node`, except those that only follow from
/// values that were refused already.
fn report(node: &Node, faults: Vec<Fault>, problems: &mut Vec<Problem>) {
    let tainted = |name: &&str| node.field(name).is_some_and(Node::is_tainted);
    for fault in faults {
        if !node.is_refused(&fault.path) && !fault.given.iter().any(tainted) {
            problems.push(node.problem_at(&fault.path, fault.message));
        }
    }
}
