//! `tidegate buckets`: how full buckets are, and who spent from them.

use std::io::Write;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::client::{ClientArgs, Error, seconds};
use super::table::{Side, render, span, tokens};
use crate::wire::tidegate::admin::v1 as pb;

/// What a part is called that requests lack, here as in the answers.
const MISSING: &str = "(none)";

/// Arguments of `tidegate buckets`.
#[derive(Clone, Debug, Args)]
pub struct BucketsArgs {
    /// What to do
    #[command(subcommand)]
    pub command: BucketsCommand,
}

/// What to do with buckets.
#[derive(Clone, Debug, Subcommand)]
pub enum BucketsCommand {
    /// List the buckets that the replica has in memory; all others are full
    List(ListArgs),
    /// Show one bucket
    Get(GetArgs),
    /// Show the keys with the most refused requests or the most spent tokens
    Top(TopArgs),
    /// Make a bucket, or all buckets of a limit, full again on every replica
    Reset(ChoiceArgs),
    /// Close a bucket, or all buckets of a limit, on every replica for a while
    Pause(PauseArgs),
    /// Open what was closed, by `pause` or because the upstream asked for it
    Resume(ChoiceArgs),
}

/// Arguments of `tidegate buckets pause`.
#[derive(Clone, Debug, Args)]
pub struct PauseArgs {
    /// For how long, such as `10m`; 24h at most
    #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
    pub time: Duration,
    /// Which buckets
    #[command(flatten)]
    pub choice: ChoiceArgs,
}

/// Which buckets are meant: arguments of `tidegate buckets reset`, `pause` and
/// `resume`.
#[derive(Clone, Debug, Args)]
pub struct ChoiceArgs {
    /// The limit's name
    #[arg(required_unless_present = "id")]
    pub limit: Option<String>,
    /// The key's values, as for `get`
    #[arg(value_name = "KEY_PART", conflicts_with_all = ["id", "all"])]
    pub key: Vec<String>,
    /// The bucket's identity, 32 hexadecimal digits, in place of a key
    #[arg(long, value_name = "HEX", conflicts_with = "all")]
    pub id: Option<String>,
    /// All buckets of the limit
    #[arg(long)]
    pub all: bool,
    /// Where to ask, and how to print
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `tidegate buckets top`.
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// Only buckets of this limit
    #[arg(long, value_name = "NAME")]
    pub limit: Option<String>,
    /// What counts
    #[arg(long, value_enum, default_value_t)]
    pub by: By,
    /// At most this many, up to 1000
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: u32,
    /// Where to ask, and how to print
    #[command(flatten)]
    pub client: ClientArgs,
}

/// What buckets are ranked by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// Requests that the replica refused
    #[default]
    Refused,
    /// Tokens that all replicas spent
    Spent,
}

/// Arguments of `tidegate buckets list`.
#[derive(Clone, Debug, Args)]
pub struct ListArgs {
    /// Only buckets of this limit
    #[arg(long, value_name = "NAME")]
    pub limit: Option<String>,
    /// Only buckets whose key begins with this text
    #[arg(long, value_name = "TEXT")]
    pub prefix: Option<String>,
    /// Only buckets that are not full
    #[arg(long)]
    pub not_full: bool,
    /// At most this many
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max: Option<u32>,
    /// Where to ask, and how to print
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `tidegate buckets get`.
#[derive(Clone, Debug, Args)]
pub struct GetArgs {
    /// The limit's name
    #[arg(required_unless_present = "id")]
    pub limit: Option<String>,
    /// The key's values, one for each part of the limit's key; `(none)` for a part
    /// that the requests lack; put `--` before values that begin with a hyphen
    #[arg(value_name = "KEY_PART", conflicts_with = "id")]
    pub key: Vec<String>,
    /// The bucket's identity, 32 hexadecimal digits, in place of a key
    #[arg(long, value_name = "HEX")]
    pub id: Option<String>,
    /// Where to ask, and how to print
    #[command(flatten)]
    pub client: ClientArgs,
}

/// A bucket in JSON. Amounts are in tokens, or in millionths of one where the
/// name says so.
#[derive(Debug, Serialize)]
pub(super) struct Bucket {
    limit: String,
    id: String,
    key: Vec<KeyPart>,
    key_known: bool,
    level: f64,
    level_micro_tokens: i64,
    burst: f64,
    burst_micro_tokens: i64,
    rate: Rate,
    next_token_seconds: Option<f64>,
    full_seconds: Option<f64>,
    spent: Vec<Spent>,
    admitted: u64,
    refused: u64,
    waiting: u64,
    awaited: f64,
    paused_seconds: Option<f64>,
    unsent: f64,
    heard_seconds_ago: Option<f64>,
    knowledge: Knowledge,
    #[serde(skip)]
    source: pb::Bucket,
}

/// A rate in JSON.
#[derive(Debug, Serialize)]
pub(super) struct Rate {
    pub(super) text: String,
    tokens: u64,
    period_seconds: f64,
}

#[derive(Debug, Serialize)]
pub(super) struct KeyPart {
    source: String,
    kind: &'static str,
    text: String,
}

#[derive(Debug, Serialize)]
struct Spent {
    incarnation: String,
    name: String,
    tokens: f64,
    is_self: bool,
}

/// How much of the cluster the answer knows.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Knowledge {
    age_seconds: Option<f64>,
    live_peers: u32,
    suspect_peers: u32,
    #[serde(skip)]
    age: Option<prost_types::Duration>,
}

/// Runs `tidegate buckets`.
///
/// # Errors
/// If the replica cannot be reached, refuses, or the answer cannot be written.
pub async fn run(args: BucketsArgs, out: &mut (dyn Write + Send)) -> Result<(), Error> {
    match args.command {
        BucketsCommand::List(args) => list(args, out).await,
        BucketsCommand::Get(args) => get(args, out).await,
        BucketsCommand::Top(args) => top(args, out).await,
        BucketsCommand::Reset(args) => reset(args, out).await,
        BucketsCommand::Pause(args) => pause(args, out).await,
        BucketsCommand::Resume(args) => resume(args, out).await,
    }
}

async fn list(args: ListArgs, out: &mut (dyn Write + Send)) -> Result<(), Error> {
    let request = pb::ListBucketsRequest {
        limit: args.limit.unwrap_or_default(),
        key_prefix: args.prefix.unwrap_or_default(),
        max_count: args.max.unwrap_or(0),
        only_not_full: args.not_full,
    };
    let client = args.client;
    let failed = |status| client.failed(&status);
    let mut admin = client.connect().await?;
    let mut stream = admin.list_buckets(request).await.map_err(failed)?.into_inner();
    let mut buckets = Vec::new();
    let mut known = Knowledge::from(pb::Knowledge::default());
    while let Some(message) = stream.message().await.map_err(failed)? {
        known = Knowledge::from(message.knowledge.unwrap_or_default());
        buckets.extend(message.buckets.into_iter().map(|b| Bucket::new(b, &known)));
    }
    buckets.sort_by_cached_key(|bucket| (bucket.limit.clone(), bucket.key_text()));
    client.print(out, &buckets, |buckets| {
        // The table is of the moment of its last message.
        format!("{}\n\n{} bucket(s); {}", list_table(buckets), buckets.len(), known.text())
    })
}

async fn get(args: GetArgs, out: &mut (dyn Write + Send)) -> Result<(), Error> {
    let bucket = match args.id {
        Some(id) => pb::get_bucket_request::Bucket::Id(id),
        None => pb::get_bucket_request::Bucket::Key(key(args.key)),
    };
    let request =
        pb::GetBucketRequest { limit: args.limit.unwrap_or_default(), bucket: Some(bucket) };
    let client = args.client;
    let mut admin = client.connect().await?;
    let answer = admin.get_bucket(request).await.map_err(|status| client.failed(&status))?;
    let answer = answer.into_inner();
    let knowledge = Knowledge::from(answer.knowledge.unwrap_or_default());
    let bucket = Bucket::new(answer.bucket.unwrap_or_default(), &knowledge);
    client.print(out, &bucket, get_table)
}

/// A key by its values.
fn key(values: Vec<String>) -> pb::Key {
    let parts = values.into_iter().map(|text| pb::KeyValue {
        value: Some(match text.as_str() {
            MISSING => pb::key_value::Value::Missing(true),
            _ => pb::key_value::Value::Text(text),
        }),
    });
    pb::Key { parts: parts.collect() }
}

/// What was reset, in JSON.
#[derive(Debug, Serialize)]
struct Reset {
    buckets: u64,
    knowledge: Knowledge,
}

async fn reset(args: ChoiceArgs, out: &mut (dyn Write + Send)) -> Result<(), Error> {
    use pb::reset_bucket_request::Bucket;
    let bucket = match args.id {
        Some(id) => Bucket::Id(id),
        None if args.all => Bucket::All(true),
        None => Bucket::Key(key(args.key)),
    };
    let request =
        pb::ResetBucketRequest { limit: args.limit.unwrap_or_default(), bucket: Some(bucket) };
    let client = args.client;
    let mut admin = client.connect().await?;
    let answer = admin.reset_bucket(request).await.map_err(|status| client.failed(&status))?;
    let answer = answer.into_inner();
    let knowledge = Knowledge::from(answer.knowledge.unwrap_or_default());
    client.print(out, &Reset { buckets: answer.buckets, knowledge }, |reset| {
        let told = reset.knowledge.told();
        format!("full again: {} bucket(s) of this replica, and those of {told}", reset.buckets)
    })
}

/// What was closed, in JSON.
#[derive(Debug, Serialize)]
struct Paused {
    seconds: f64,
    knowledge: Knowledge,
}

async fn pause(args: PauseArgs, out: &mut (dyn Write + Send)) -> Result<(), Error> {
    use pb::pause_request::Bucket;
    let PauseArgs { time, choice } = args;
    let request = pb::PauseRequest {
        bucket: Some(match choice.id {
            Some(id) => Bucket::Id(id),
            None if choice.all => Bucket::All(true),
            None => Bucket::Key(key(choice.key)),
        }),
        limit: choice.limit.unwrap_or_default(),
        // What a duration cannot hold is more than the server takes.
        pause_for: prost_types::Duration::try_from(time).ok(),
    };
    let client = choice.client;
    let mut admin = client.connect().await?;
    let answer = admin.pause(request).await.map_err(|status| client.failed(&status))?;
    let knowledge = Knowledge::from(answer.into_inner().knowledge.unwrap_or_default());
    let told = knowledge.told();
    client.print(out, &Paused { seconds: time.as_secs_f64(), knowledge }, |_| {
        format!("paused for {}: here, and on {told}", humantime::format_duration(time))
    })
}

/// What was opened, in JSON.
#[derive(Debug, Serialize)]
struct Resumed {
    /// It stays closed for so long, as all buckets of its limit are.
    paused_seconds: Option<f64>,
    knowledge: Knowledge,
}

async fn resume(args: ChoiceArgs, out: &mut (dyn Write + Send)) -> Result<(), Error> {
    use pb::resume_request::Bucket;
    let request = pb::ResumeRequest {
        bucket: Some(match args.id {
            Some(id) => Bucket::Id(id),
            None if args.all => Bucket::All(true),
            None => Bucket::Key(key(args.key)),
        }),
        limit: args.limit.unwrap_or_default(),
    };
    let client = args.client;
    let mut admin = client.connect().await?;
    let answer = admin.resume(request).await.map_err(|status| client.failed(&status))?;
    let answer = answer.into_inner();
    let left = answer.paused_for;
    let resumed = Resumed {
        paused_seconds: seconds(left.as_ref()),
        knowledge: Knowledge::from(answer.knowledge.unwrap_or_default()),
    };
    client.print(out, &resumed, |resumed| {
        let told = resumed.knowledge.told();
        match left.as_ref() {
            None => format!("resumed: here, and on {told}"),
            Some(_) => format!(
                "resumed: here, and on {told}; but all buckets of the limit are paused for \
                 another {} (`resume --all` opens them)",
                span(left.as_ref())
            ),
        }
    })
}

/// The busiest keys in JSON.
#[derive(Debug, Serialize)]
struct Top {
    buckets: Vec<Bucket>,
    compared: u64,
    dropped_not_full: u64,
}

async fn top(args: TopArgs, out: &mut (dyn Write + Send)) -> Result<(), Error> {
    let request = pb::TopKeysRequest {
        limit: args.limit.unwrap_or_default(),
        by: pb::Ranking::from(args.by).into(),
        count: args.count,
    };
    let client = args.client;
    let mut admin = client.connect().await?;
    let answer = admin.top_keys(request).await.map_err(|status| client.failed(&status))?;
    let answer = answer.into_inner();
    let known = Knowledge::from(answer.knowledge.unwrap_or_default());
    let top = Top {
        buckets: answer.buckets.into_iter().map(|bucket| Bucket::new(bucket, &known)).collect(),
        compared: answer.compared,
        dropped_not_full: answer.dropped_not_full,
    };
    client.print(out, &top, |top| {
        let (table, shown) = (list_table(&top.buckets), top.buckets.len());
        let lost = match top.dropped_not_full {
            0 => String::new(),
            lost => format!("; {lost} bucket(s) that were in use had to go since the start"),
        };
        let compared = top.compared;
        format!("{table}\n\n{shown} of {compared} bucket(s){lost}; {}", known.text())
    })
}

impl From<By> for pb::Ranking {
    fn from(by: By) -> Self {
        match by {
            By::Refused => Self::Refused,
            By::Spent => Self::Spent,
        }
    }
}

pub(super) fn list_table(buckets: &[Bucket]) -> String {
    let rows = buckets.iter().map(|bucket| {
        let pb = &bucket.source;
        vec![
            bucket.limit.clone(),
            bucket.key_text(),
            tokens(pb.level_micros),
            tokens(pb.burst_micros),
            bucket.rate.text.clone(),
            until(pb.next_token_in.as_ref()),
            until(pb.full_in.as_ref()),
            paused_text(pb.paused_for.as_ref()),
            bucket.admitted.to_string(),
            bucket.refused.to_string(),
            tokens(bucket.spent_in_all()),
        ]
    });
    render(
        &[
            ("LIMIT", Side::Left),
            ("KEY", Side::Left),
            ("LEVEL", Side::Right),
            ("BURST", Side::Right),
            ("RATE", Side::Right),
            ("NEXT", Side::Right),
            ("FULL", Side::Right),
            ("PAUSED", Side::Right),
            ("ADMITTED", Side::Right),
            ("REFUSED", Side::Right),
            ("SPENT", Side::Right),
        ],
        rows.collect(),
    )
}

fn get_table(bucket: &Bucket) -> String {
    let pb = &bucket.source;
    let line = |name: &str, value: String| vec![name.to_owned(), value];
    let facts = vec![
        line("limit", bucket.limit.clone()),
        line("key", bucket.key_text()),
        line("id", bucket.id.clone()),
        line("level", format!("{} of {}", tokens(pb.level_micros), tokens(pb.burst_micros))),
        line("rate", bucket.rate.text.clone()),
        line("next token", until(pb.next_token_in.as_ref())),
        line("full", until(pb.full_in.as_ref())),
        line("admitted here", bucket.admitted.to_string()),
        line("refused here", bucket.refused.to_string()),
        line("waiting here", waiting_text(pb)),
        line("paused", paused_text(pb.paused_for.as_ref())),
        line("unsent", tokens(pb.unsent_micros)),
        line("knowledge", bucket.knowledge.text()),
    ];
    let spent = bucket.spent.iter().zip(&pb.spent).map(|(spent, pb)| {
        vec![
            spent.incarnation.clone(),
            spent.name.clone(),
            tokens(i64::try_from(pb.micros).unwrap_or(i64::MAX)),
            if spent.is_self { "this replica".to_owned() } else { String::new() },
        ]
    });
    format!(
        "{}\n\n{}",
        render(&[("", Side::Left), ("", Side::Left)], facts),
        render(
            &[
                ("INCARNATION", Side::Left),
                ("NAME", Side::Left),
                ("SPENT", Side::Right),
                ("", Side::Left)
            ],
            spent.collect(),
        )
    )
}

/// The requests that wait, and what they cost.
fn waiting_text(bucket: &pb::Bucket) -> String {
    match bucket.waiting {
        0 => "0".to_owned(),
        waiting => format!("{waiting}, for {} token(s)", tokens(bucket.awaited_micros)),
    }
}

/// For how long something is closed.
pub(super) fn paused_text(duration: Option<&prost_types::Duration>) -> String {
    duration.map_or_else(|| "no".to_owned(), |_| span(duration))
}

/// Time until something, where none means never.
pub(super) fn until(duration: Option<&prost_types::Duration>) -> String {
    match duration {
        None => "never".to_owned(),
        Some(d) if d.seconds == 0 && d.nanos == 0 => "now".to_owned(),
        Some(_) => span(duration),
    }
}

impl Bucket {
    pub(super) fn new(bucket: pb::Bucket, knowledge: &Knowledge) -> Self {
        let source = bucket.clone();
        Self {
            limit: bucket.limit,
            id: bucket.id,
            key: bucket.key.into_iter().map(KeyPart::from).collect(),
            key_known: bucket.key_known,
            level: bucket.level,
            level_micro_tokens: bucket.level_micros,
            burst: bucket.burst,
            burst_micro_tokens: bucket.burst_micros,
            rate: Rate::from(bucket.rate.unwrap_or_default()),
            next_token_seconds: seconds(bucket.next_token_in.as_ref()),
            full_seconds: seconds(bucket.full_in.as_ref()),
            spent: bucket
                .spent
                .into_iter()
                .map(|spent| Spent {
                    incarnation: spent.incarnation,
                    name: spent.name,
                    tokens: spent.tokens,
                    is_self: spent.is_self,
                })
                .collect(),
            admitted: bucket.admitted,
            refused: bucket.refused,
            waiting: bucket.waiting,
            awaited: bucket.awaited,
            paused_seconds: seconds(bucket.paused_for.as_ref()),
            unsent: bucket.unsent,
            heard_seconds_ago: seconds(bucket.heard_ago.as_ref()),
            knowledge: knowledge.clone(),
            source,
        }
    }

    /// The key for people: its values, or the identity if it is not known.
    fn key_text(&self) -> String {
        if !self.key_known {
            return format!("id:{}", self.id);
        }
        key_text(&self.key)
    }

    /// Micro-tokens that all replicas spent.
    fn spent_in_all(&self) -> i64 {
        let micros = self.source.spent.iter().fold(0_u64, |sum, s| sum.saturating_add(s.micros));
        i64::try_from(micros).unwrap_or(i64::MAX)
    }
}

/// A known key for people.
pub(super) fn key_text(key: &[KeyPart]) -> String {
    if key.is_empty() {
        return "(all)".to_owned();
    }
    let parts: Vec<&str> = key.iter().map(|part| part.text.as_str()).collect();
    parts.join(" ")
}

impl From<pb::KeyPart> for KeyPart {
    fn from(part: pb::KeyPart) -> Self {
        Self { kind: kind(part.kind()), source: part.source, text: part.text }
    }
}

const fn kind(kind: pb::KeyKind) -> &'static str {
    match kind {
        pb::KeyKind::Missing => "missing",
        pb::KeyKind::Address => "address",
        pb::KeyKind::Text => "text",
        pb::KeyKind::List => "list",
        pb::KeyKind::Secret => "secret",
        pb::KeyKind::Long => "long",
        pb::KeyKind::Unspecified => "unknown",
    }
}

impl From<pb::Rate> for Rate {
    fn from(rate: pb::Rate) -> Self {
        Self {
            period_seconds: seconds(rate.period.as_ref()).unwrap_or_default(),
            text: rate.text,
            tokens: rate.tokens,
        }
    }
}

impl From<pb::Knowledge> for Knowledge {
    fn from(knowledge: pb::Knowledge) -> Self {
        Self {
            age_seconds: seconds(knowledge.age.as_ref()),
            live_peers: knowledge.live_peers,
            suspect_peers: knowledge.suspect_peers,
            age: knowledge.age,
        }
    }
}

impl Knowledge {
    /// Who is told of what an operator changed.
    fn told(&self) -> String {
        let suspect = match self.suspect_peers {
            0 => String::new(),
            peers => format!("; {peers} peer(s) that are not heard are told when they are"),
        };
        format!("{} live peer(s){suspect}", self.live_peers)
    }

    pub(super) fn text(&self) -> String {
        let mut text = match (self.live_peers, self.suspect_peers) {
            (0, 0) => return "exact, no peers are known".to_owned(),
            (0, _) => "of this replica alone".to_owned(),
            (live, _) => {
                format!("up to {} old, {live} live peer(s)", span(self.age.as_ref()))
            }
        };
        if self.suspect_peers > 0 {
            text.push_str(&format!("; {} peer(s) are not heard", self.suspect_peers));
        }
        text
    }
}
