//! `tidegate explain`: what would become of a request, and why.

use std::io::Write;
use std::net::IpAddr;
use std::str::FromStr;

use clap::Args;
use serde::Serialize;

use super::buckets::{KeyPart, Knowledge, key_text, until};
use super::client::{ClientArgs, Error, seconds};
use super::table::{Side, render, tokens};
use crate::wire::tidegate::admin::v1 as pb;

/// Arguments of `tidegate explain`.
#[derive(Clone, Debug, Args)]
pub struct ExplainArgs {
    /// The method
    #[arg(short = 'X', long, value_name = "METHOD", default_value = "GET")]
    pub method: String,
    /// A header, as `name: value`; may be repeated
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    pub headers: Vec<Header>,
    /// The host. Default: that of the URL or of the headers, or `localhost`
    #[arg(long, value_name = "HOST")]
    pub host: Option<String>,
    /// The client's address, however it would be known
    #[arg(long, value_name = "IP", conflicts_with = "peer")]
    pub client: Option<IpAddr>,
    /// The connection's address, from which the client is found as it would be for
    /// a real request. Default, without --client: 127.0.0.1
    #[arg(long, value_name = "IP")]
    pub peer: Option<IpAddr>,
    /// A path with its query, or a URL
    #[arg(value_name = "URL_OR_PATH")]
    pub target: String,
    /// Where to ask, and how to print
    #[command(flatten)]
    pub ask: ClientArgs,
}

/// A header in the arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    name: String,
    value: String,
}

impl FromStr for Header {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once(':').ok_or_else(|| "write `name: value`".to_owned())?;
        Ok(Self { name: name.trim().to_owned(), value: value.trim().to_owned() })
    }
}

/// The answer in JSON. Amounts are in tokens.
#[derive(Debug, Serialize)]
struct Explanation {
    client: Client,
    path: String,
    /// None if it would go nowhere.
    upstream: Option<String>,
    /// The index of the route that leads there.
    route: Option<u32>,
    limits: Vec<Limit>,
    answer: Answer,
    note: String,
    knowledge: Knowledge,
}

#[derive(Debug, Serialize)]
struct Client {
    address: String,
    group: String,
    found: String,
}

#[derive(Debug, Serialize)]
struct Limit {
    limit: String,
    mode: &'static str,
    verdict: &'static str,
    reason: String,
    /// None if the limit does not apply.
    bucket: Option<Bucket>,
}

#[derive(Debug, Serialize)]
struct Bucket {
    id: String,
    key: Vec<KeyPart>,
    exists: bool,
    level: f64,
    burst: f64,
    rate: String,
    cost: f64,
    due_seconds: Option<f64>,
    paused_seconds: Option<f64>,
    #[serde(skip)]
    source: pb::ExplainedLimit,
}

#[derive(Debug, Serialize)]
struct Answer {
    forwarded: bool,
    status: Option<u32>,
    headers: Vec<(String, String)>,
    body: String,
    refused_by: Option<String>,
    held_seconds: Option<f64>,
    #[serde(skip)]
    held_for: Option<prost_types::Duration>,
}

/// Runs `tidegate explain`.
///
/// # Errors
/// If the replica cannot be reached, refuses, or the answer cannot be written.
pub async fn run(args: ExplainArgs, out: &mut (dyn Write + Send)) -> Result<(), Error> {
    let text = |ip: Option<IpAddr>| ip.map_or_else(String::new, |ip| ip.to_string());
    let peer = match (args.client, args.peer) {
        (None, None) => Some(IpAddr::from([127, 0, 0, 1])),
        (_, peer) => peer,
    };
    let request = pb::ExplainRequest {
        method: args.method,
        target: args.target,
        host: args.host.unwrap_or_default(),
        headers: args
            .headers
            .into_iter()
            .map(|header| pb::Header { name: header.name, value: header.value })
            .collect(),
        client_address: text(args.client),
        peer_address: text(peer),
    };
    let client = args.ask;
    let mut admin = client.connect().await?;
    let answer = admin.explain(request).await.map_err(|status| client.failed(&status))?;
    client.print(out, &Explanation::from(answer.into_inner()), table)
}

fn table(explanation: &Explanation) -> String {
    let line = |name: &str, value: String| vec![name.to_owned(), value];
    let client = &explanation.client;
    let (address, group) = (&client.address, &client.group);
    let grouped = if address == group { String::new() } else { format!(", as {group}") };
    let mut facts = vec![
        line("client", format!("{address}{grouped}: {}", client.found)),
        line("path", explanation.path.clone()),
    ];
    if let Some(upstream) = &explanation.upstream {
        let way = explanation
            .route
            .map_or_else(String::new, |route| format!(", by egress.routes[{route}]"));
        facts.push(line("upstream", format!("{upstream}{way}")));
    }
    if !explanation.note.is_empty() {
        facts.push(line("note", explanation.note.clone()));
    }
    let answer = &explanation.answer;
    let status = answer.status.map_or_else(String::new, |status| status.to_string());
    facts.push(line(
        "answer",
        match (&answer.refused_by, answer.forwarded) {
            (Some(limit), true) => format!(
                "the upstream's, after about {} for {limit}",
                until(answer.held_for.as_ref())
            ),
            (Some(limit), false) => format!("{status}, refused by {limit}"),
            (None, true) => "the upstream's".to_owned(),
            (None, false) => status,
        },
    ));
    facts.extend(answer.headers.iter().map(|(name, value)| line("", format!("{name}: {value}"))));
    facts.push(line("knowledge", explanation.knowledge.text()));
    let rows = explanation.limits.iter().map(|limit| {
        let of = |text: &dyn Fn(&Bucket) -> String| {
            limit.bucket.as_ref().map_or_else(|| "-".to_owned(), text)
        };
        vec![
            limit.limit.clone(),
            limit.verdict.to_owned(),
            of(&|bucket| key_text(&bucket.key)),
            of(&|bucket| tokens(bucket.source.level_micros)),
            of(&|bucket| tokens(bucket.source.burst_micros)),
            of(&|bucket| bucket.rate.clone()),
            of(&|bucket| tokens(bucket.source.cost_micros)),
            of(&|bucket| until(bucket.source.due_in.as_ref())),
            limit.reason.clone(),
        ]
    });
    let rows: Vec<_> = rows.collect();
    let facts = render(&[("", Side::Left), ("", Side::Left)], facts);
    if rows.is_empty() {
        return facts;
    }
    let columns = [
        ("LIMIT", Side::Left),
        ("VERDICT", Side::Left),
        ("KEY", Side::Left),
        ("LEVEL", Side::Right),
        ("BURST", Side::Right),
        ("RATE", Side::Right),
        ("COST", Side::Right),
        ("DUE", Side::Right),
        ("WHY", Side::Left),
    ];
    format!("{facts}\n\n{}", render(&columns, rows))
}

impl From<pb::ExplainResponse> for Explanation {
    fn from(answer: pb::ExplainResponse) -> Self {
        let client = answer.client.unwrap_or_default();
        let given = answer.answer.unwrap_or_default();
        Self {
            client: Client { address: client.address, group: client.group, found: client.found },
            path: answer.path,
            upstream: (!answer.upstream.is_empty()).then_some(answer.upstream),
            route: answer.route,
            limits: answer.limits.into_iter().map(Limit::from).collect(),
            answer: Answer {
                forwarded: given.forwarded,
                status: (given.status > 0).then_some(given.status),
                headers: given.headers.into_iter().map(|h| (h.name, h.value)).collect(),
                body: given.body,
                refused_by: (!given.refused_by.is_empty()).then_some(given.refused_by),
                held_seconds: seconds(given.held_for.as_ref()),
                held_for: given.held_for,
            },
            note: answer.note,
            knowledge: Knowledge::from(answer.knowledge.unwrap_or_default()),
        }
    }
}

impl From<pb::ExplainedLimit> for Limit {
    fn from(limit: pb::ExplainedLimit) -> Self {
        let source = limit.clone();
        Self {
            mode: match limit.mode() {
                pb::Mode::Enforce => "enforce",
                pb::Mode::Shadow => "shadow",
                pb::Mode::Unspecified => "unknown",
            },
            verdict: match limit.verdict() {
                pb::LimitVerdict::Admitted => "admitted",
                pb::LimitVerdict::Refused => "refused",
                pb::LimitVerdict::NotCharged => "not charged",
                pb::LimitVerdict::ShadowRefused => "shadow refused",
                pb::LimitVerdict::NotMatched => "no match",
                pb::LimitVerdict::Exempt => "exempt",
                pb::LimitVerdict::Skipped => "skipped",
                pb::LimitVerdict::Denied => "denied",
                pb::LimitVerdict::Held => "held",
                pb::LimitVerdict::Unspecified => "unknown",
            },
            bucket: (!limit.bucket_id.is_empty()).then(|| Bucket {
                id: limit.bucket_id,
                key: limit.key.into_iter().map(KeyPart::from).collect(),
                exists: limit.bucket_exists,
                level: limit.level,
                burst: limit.burst,
                rate: limit.rate.unwrap_or_default().text,
                cost: limit.cost,
                due_seconds: seconds(limit.due_in.as_ref()),
                paused_seconds: seconds(limit.paused_for.as_ref()),
                source,
            }),
            limit: limit.limit,
            reason: limit.reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_a_name_and_a_value() {
        let header: Header = "X-Api-Key:  a: b ".parse().unwrap();
        assert_eq!((header.name.as_str(), header.value.as_str()), ("X-Api-Key", "a: b"));
        assert!("x-api-key".parse::<Header>().is_err());
    }
}
