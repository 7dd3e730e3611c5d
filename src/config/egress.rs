//! The sections `upstreams` and `egress`, and what other sections say of upstreams.

use super::decode::decode;
use super::problem::Problem;
use super::tree::{Content, Node};
use super::{report, section, suggest};
use crate::limiter::config::LimitConfig;
use crate::peer;
use crate::proxy::{self, EgressConfig, UpstreamsConfig};

/// The two sections, and the limits of the upstreams.
#[derive(Debug, Default)]
pub(super) struct Egress {
    pub(super) upstreams: UpstreamsConfig,
    pub(super) egress: EgressConfig,
    pub(super) limits: Vec<LimitConfig>,
}

/// Reads the sections; `None` if `egress` cannot be read at all.
pub(super) fn assemble(
    root: &Node,
    proxy: Option<&proxy::Config>,
    replication: Option<&peer::Config>,
    env: &dyn Fn(&str) -> Option<String>,
    problems: &mut Vec<Problem>,
) -> Option<Egress> {
    let (upstreams, limits) = upstreams(root, proxy, replication, env, problems);
    let egress = section(root, "egress", problems, |_: &EgressConfig| Vec::new())?;
    let routes = root.field("egress").and_then(|egress| egress.field("routes"));
    for (route, node) in egress.routes.iter().zip(routes.into_iter().flat_map(Node::elements)) {
        report(node, route.faults(), problems);
        let path = ["upstream".into()];
        if route.upstream == proxy::DEFAULT {
            if proxy.is_some_and(|proxy| proxy.upstream.is_none()) && !is_broken(root) {
                let message = "`default` is `proxy.upstream`, which is not given";
                problems.push(node.problem_at(&path, message));
            }
        } else if let Some(message) = unknown(root, &route.upstream) {
            problems.push(node.problem_at(&path, message));
        }
    }
    Some(Egress { upstreams, egress, limits })
}

/// Whether an upstream for requests without a route is given and cannot be read.
pub(super) fn is_broken(root: &Node) -> bool {
    root.field("proxy").and_then(|proxy| proxy.field("upstream")).is_some_and(Node::is_tainted)
}

fn upstreams(
    root: &Node,
    proxy: Option<&proxy::Config>,
    replication: Option<&peer::Config>,
    env: &dyn Fn(&str) -> Option<String>,
    problems: &mut Vec<Problem>,
) -> (UpstreamsConfig, Vec<LimitConfig>) {
    let (mut upstreams, mut limits) = (UpstreamsConfig::new(), Vec::new());
    let Some(section) = root.field("upstreams") else { return (upstreams, limits) };
    let fields = match &section.content {
        Content::Map(fields) => fields.as_slice(),
        Content::Null => &[],
        Content::Scalar(_) | Content::List(_) => {
            if !section.broken.get() {
                problems.push(section.problem("expected a map from names to upstreams"));
            }
            &[]
        }
    };
    for (name, node) in fields {
        let Some(mut config) = decode::<proxy::UpstreamConfig>(node, problems) else { continue };
        report(node, config.faults(name, proxy), problems);
        for (header, inject) in &mut config.inject {
            let of = node.field("inject").and_then(|inject| inject.field(header));
            report(of.unwrap_or(node), inject.resolve(header, env), problems);
        }
        if let (Some(window), Some(replication)) = (&config.limit, replication) {
            match LimitConfig::of_upstream(name, window, replication.sync_interval) {
                Ok(limit) => limits.push(limit),
                Err(fault) => {
                    report(node.field("limit").unwrap_or(node), vec![fault], problems);
                }
            }
        }
        upstreams.insert(name.clone(), config);
    }
    (upstreams, limits)
}

/// Checks what `limits`, found in `nodes`, have to do with the upstreams in the file:
/// the names that they use, and that theirs are free.
pub(super) fn check_limits(
    root: &Node,
    limits: &[LimitConfig],
    nodes: &[&Node],
    problems: &mut Vec<Problem>,
) {
    for (limit, node) in limits.iter().zip(nodes) {
        for (path, name) in limit.upstreams() {
            if let Some(message) = unknown(root, name).filter(|_| name != proxy::DEFAULT) {
                problems.push(node.problem_at(&path, message));
            }
        }
        for (field, name) in [("name", &limit.name), ("was", &limit.was)] {
            let upstream = name.as_ref().and_then(|name| root.field("upstreams")?.field(&name.0));
            if let (Some(name), Some(of)) = (name, upstream.and_then(|node| node.field("limit"))) {
                let message = format!("`{}` is the name of {} already", name.0, of.path);
                problems.push(node.problem_at(&[field.into()], message));
            }
        }
    }
}

/// Why `name` is no upstream, if it is none.
fn unknown(root: &Node, name: &str) -> Option<String> {
    let section = root.field("upstreams");
    if section.is_some_and(|section| section.field(name).is_some() || section.broken.get()) {
        return None;
    }
    let names: Vec<&str> = match section.map(|section| &section.content) {
        Some(Content::Map(fields)) => fields.iter().map(|(name, _)| name.as_str()).collect(),
        Some(Content::Null | Content::Scalar(_) | Content::List(_)) | None => Vec::new(),
    };
    Some(match suggest::nearest(name, &names) {
        Some(nearest) => format!("there is no upstream `{name}`; did you mean `{nearest}`?"),
        None if names.is_empty() => format!("there is no upstream `{name}`: `upstreams` is empty"),
        None => format!("there is no upstream `{name}`; there are {}", suggest::list(&names)),
    })
}
