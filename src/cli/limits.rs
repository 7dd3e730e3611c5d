//! `tidegate limits`: the limits in force.

use std::io::Write;

use clap::Args;
use serde::Serialize;

use super::buckets::{Rate, paused_text};
use super::client::{ClientArgs, Error, seconds};
use super::table::{Side, render, span, tokens};
use crate::wire::tidegate::admin::v1 as pb;

/// Arguments of `tidegate limits`.
#[derive(Clone, Debug, Args)]
pub struct LimitsArgs {
    /// Where to ask, and how to print
    #[command(flatten)]
    pub client: ClientArgs,
}

/// A limit in JSON.
#[derive(Debug, Serialize)]
struct Limit {
    name: String,
    rate: Rate,
    burst: f64,
    strict_window: bool,
    key: Vec<KeySource>,
    missing: &'static str,
    mode: &'static str,
    cost: f64,
    expose: bool,
    overrides: u32,
    max_wait_seconds: Option<f64>,
    paused_seconds: Option<f64>,
    buckets: u64,
    /// Empty: every request.
    applies_to: String,
    exempt: Vec<String>,
    #[serde(skip)]
    source: pb::Limit,
}

#[derive(Debug, Serialize)]
struct KeySource {
    source: String,
    secret: bool,
}

/// Runs `tidegate limits`.
///
/// # Errors
/// If the replica cannot be reached, refuses, or the answer cannot be written.
pub async fn run(args: LimitsArgs, out: &mut (dyn Write + Send)) -> Result<(), Error> {
    let client = args.client;
    let mut admin = client.connect().await?;
    let answer = admin.list_limits(pb::ListLimitsRequest {}).await;
    let answer = answer.map_err(|status| client.failed(&status))?.into_inner();
    let limits: Vec<Limit> = answer.limits.into_iter().map(Limit::from).collect();
    client.print(out, &limits, |limits| table(limits))
}

fn table(limits: &[Limit]) -> String {
    let rows = limits.iter().map(|limit| {
        let parts: Vec<&str> = limit.key.iter().map(|part| part.source.as_str()).collect();
        let pb = &limit.source;
        let applies_to = if limit.applies_to.is_empty() { "everything" } else { &limit.applies_to };
        let exempt = match limit.exempt.as_slice() {
            [] => String::new(),
            some => format!(" except ({})", some.join(") ")),
        };
        vec![
            limit.name.clone(),
            limit.rate.text.clone(),
            tokens(pb.burst_micros),
            tokens(pb.cost_micros),
            if parts.is_empty() { "(all)".to_owned() } else { parts.join(",") },
            limit.missing.to_owned(),
            limit.mode.to_owned(),
            if limit.expose { "yes" } else { "no" }.to_owned(),
            limit.overrides.to_string(),
            pb.max_wait.as_ref().map_or_else(|| "-".to_owned(), |time| span(Some(time))),
            paused_text(pb.paused_for.as_ref()),
            limit.buckets.to_string(),
            format!("{applies_to}{exempt}"),
        ]
    });
    render(
        &[
            ("LIMIT", Side::Left),
            ("RATE", Side::Right),
            ("BURST", Side::Right),
            ("COST", Side::Right),
            ("KEY", Side::Left),
            ("MISSING", Side::Left),
            ("MODE", Side::Left),
            ("EXPOSE", Side::Left),
            ("OVERRIDES", Side::Right),
            ("MAX WAIT", Side::Right),
            ("PAUSED", Side::Right),
            ("BUCKETS", Side::Right),
            ("APPLIES TO", Side::Left),
        ],
        rows.collect(),
    )
}

impl From<pb::Limit> for Limit {
    fn from(limit: pb::Limit) -> Self {
        let source = limit.clone();
        Self {
            missing: match limit.missing() {
                pb::Missing::Shared => "shared",
                pb::Missing::ClientIp => "client_ip",
                pb::Missing::Skip => "skip",
                pb::Missing::Deny => "deny",
                pb::Missing::Unspecified => "unknown",
            },
            mode: match limit.mode() {
                pb::Mode::Enforce => "enforce",
                pb::Mode::Shadow => "shadow",
                pb::Mode::Unspecified => "unknown",
            },
            name: limit.name,
            rate: Rate::from(limit.rate.unwrap_or_default()),
            burst: limit.burst,
            strict_window: limit.strict_window,
            key: limit
                .key
                .into_iter()
                .map(|part| KeySource { source: part.source, secret: part.secret })
                .collect(),
            cost: limit.cost,
            expose: limit.expose,
            overrides: limit.overrides,
            max_wait_seconds: seconds(limit.max_wait.as_ref()),
            paused_seconds: seconds(limit.paused_for.as_ref()),
            buckets: limit.buckets,
            applies_to: limit.applies_to,
            exempt: limit.exempt,
            source,
        }
    }
}
