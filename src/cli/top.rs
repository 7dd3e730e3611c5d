//! `tidegate top`: limits and their busiest keys, live.
//!
//! On a terminal the view is drawn anew with every message until Ctrl-C;
//! elsewhere one snapshot is printed. Plain tables and four control sequences
//! are enough for it, and cost no dependency.

use std::collections::HashMap;
use std::io::{self, Write};
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::buckets::{Bucket, By, Knowledge, list_table};
use super::client::{ClientArgs, Error, Output};
use super::table::{Side, render};
use crate::wire::tidegate::admin::v1 as pb;

/// Another screen, no cursor, no line wrap; and all of it undone.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

/// Arguments of `tidegate top`.
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// Only this limit
    #[arg(long, value_name = "NAME")]
    pub limit: Option<String>,
    /// Which keys are the busiest
    #[arg(long, value_enum, default_value_t)]
    pub by: By,
    /// At most this many keys, up to 100
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10,
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub count: u32,
    /// Time between two looks
    #[arg(long, value_name = "DURATION", default_value = "1s",
          value_parser = humantime::parse_duration)]
    pub interval: Duration,
    /// Print one snapshot and end, as where there is no terminal
    #[arg(long)]
    pub once: bool,
    /// Where to ask, and how to print
    #[command(flatten)]
    pub client: ClientArgs,
}

/// One look in JSON.
#[derive(Debug, Serialize)]
struct Snapshot {
    limits: Vec<Totals>,
    keys: Vec<Bucket>,
    knowledge: Knowledge,
}

/// What a limit made of its requests on this replica.
#[derive(Clone, Debug, Serialize)]
struct Totals {
    limit: String,
    admitted: u64,
    held: u64,
    refused: u64,
    shadow_refused: u64,
    not_charged: u64,
    buckets: u64,
    /// Per second, since the last look.
    #[serde(skip)]
    rates: Option<(f64, f64)>,
}

/// Runs `tidegate top`; `live` says that `out` is a terminal.
///
/// # Errors
/// If the replica cannot be reached, refuses, or the answer cannot be written.
pub async fn run(args: TopArgs, out: &mut (dyn Write + Send), live: bool) -> Result<(), Error> {
    let interval = prost_types::Duration::try_from(args.interval)
        .map_err(|_| Error::Usage("--interval: it is too long".to_owned()))?;
    let request = pb::WatchRequest {
        limit: args.limit.unwrap_or_default(),
        bucket: None,
        interval: Some(interval),
        count: args.count,
        by: pb::Ranking::from(args.by).into(),
    };
    let client = args.client;
    let failed = |status| client.failed(&status);
    let mut admin = client.connect().await?;
    let mut stream = admin.watch(request).await.map_err(failed)?.into_inner();
    let live = live && !args.once && client.output == Output::Table;
    if !live {
        let message = stream.message().await.map_err(failed)?.unwrap_or_default();
        return client.print(out, &Snapshot::new(message, &mut HashMap::new(), None), view);
    }
    out.write_all(ENTER.as_bytes())?;
    let shown = async {
        let mut before = HashMap::new();
        let mut first = true;
        while let Some(message) = stream.message().await.map_err(failed)? {
            let since = (!first).then_some(args.interval);
            first = false;
            let text = view(&Snapshot::new(message, &mut before, since));
            draw(out, &text)?;
        }
        Ok(())
    };
    let ended = tokio::select! {
        shown = shown => shown,
        _ = tokio::signal::ctrl_c() => Ok(()),
    };
    out.write_all(LEAVE.as_bytes()).and_then(|()| out.flush())?;
    ended
}

/// Draws `text` over what was drawn before, without a moment of emptiness.
fn draw(out: &mut (dyn Write + Send), text: &str) -> io::Result<()> {
    let mut frame = String::from("\x1b[H");
    for line in text.lines() {
        frame.push_str(line);
        frame.push_str("\x1b[K\r\n");
    }
    frame.push_str("\x1b[J");
    out.write_all(frame.as_bytes())?;
    out.flush()
}

impl Snapshot {
    /// One look. `before` holds what was admitted and refused at the last, which
    /// was `since` ago.
    fn new(
        message: pb::WatchResponse,
        before: &mut HashMap<String, (u64, u64)>,
        since: Option<Duration>,
    ) -> Self {
        let knowledge = Knowledge::from(message.knowledge.unwrap_or_default());
        let limits = message.totals.into_iter().map(|totals| {
            // What waited was admitted in the end.
            let now = (totals.admitted.saturating_add(totals.held), totals.refused);
            let then = before.insert(totals.limit.clone(), now);
            let per_second = |now: u64, then: u64, since: Duration| {
                now.saturating_sub(then) as f64 / since.as_secs_f64()
            };
            Totals {
                rates: then.zip(since).map(|(then, since)| {
                    (per_second(now.0, then.0, since), per_second(now.1, then.1, since))
                }),
                limit: totals.limit,
                admitted: totals.admitted,
                held: totals.held,
                refused: totals.refused,
                shadow_refused: totals.shadow_refused,
                not_charged: totals.not_charged,
                buckets: totals.buckets,
            }
        });
        Self {
            limits: limits.collect(),
            keys: message.buckets.into_iter().map(|b| Bucket::new(b, &knowledge)).collect(),
            knowledge,
        }
    }
}

fn view(snapshot: &Snapshot) -> String {
    let rate = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
    let rows = snapshot.limits.iter().map(|totals| {
        vec![
            totals.limit.clone(),
            rate(totals.rates.map(|(admitted, _)| admitted)),
            rate(totals.rates.map(|(_, refused)| refused)),
            totals.admitted.to_string(),
            totals.held.to_string(),
            totals.refused.to_string(),
            totals.shadow_refused.to_string(),
            totals.not_charged.to_string(),
            totals.buckets.to_string(),
        ]
    });
    let columns = [
        ("LIMIT", Side::Left),
        ("ADMITTED/S", Side::Right),
        ("REFUSED/S", Side::Right),
        ("ADMITTED", Side::Right),
        ("HELD", Side::Right),
        ("REFUSED", Side::Right),
        ("SHADOW", Side::Right),
        ("NOT CHARGED", Side::Right),
        ("BUCKETS", Side::Right),
    ];
    let keys = if snapshot.keys.is_empty() {
        "no busy keys".to_owned()
    } else {
        list_table(&snapshot.keys)
    };
    let limits = render(&columns, rows.collect());
    format!("{limits}\n\n{keys}\n\n{}", snapshot.knowledge.text())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(admitted: u64, refused: u64) -> pb::WatchResponse {
        let totals = pb::LimitTotals {
            limit: "a".into(),
            admitted,
            refused,
            buckets: 2,
            ..pb::LimitTotals::default()
        };
        pb::WatchResponse { totals: vec![totals], ..pb::WatchResponse::default() }
    }

    #[test]
    fn rates_are_those_between_two_looks() {
        let mut before = HashMap::new();
        let first = Snapshot::new(message(10, 5), &mut before, None);
        assert_eq!(first.limits[0].rates, None);
        let second = Snapshot::new(message(30, 5), &mut before, Some(Duration::from_secs(2)));
        assert_eq!(second.limits[0].rates, Some((10.0, 0.0)));
        assert!(view(&second).contains("10.0"), "{}", view(&second));
    }

    #[test]
    fn a_frame_is_drawn_over_the_last_one() {
        let mut out = Vec::new();
        draw(&mut out, "a\nb").unwrap();
        assert_eq!(out, b"\x1b[Ha\x1b[K\r\nb\x1b[K\r\n\x1b[J");
    }
}
