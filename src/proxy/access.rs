//! The access log: one line for each request, written when its answer has gone
//! or can go no more.
//!
//! Buckets are named by their identities; of what a client sent, the line holds
//! the method, the path as sent without the query, and the client's group, never
//! a header, a cookie or a query.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::request::Parts;
use http::{Method, StatusCode};

use super::fields::Presentation;
use super::metrics::Outcome;
use crate::limiter::{self, Client, Decision, Verdict};
use crate::telemetry::log::ACCESS;
use crate::time::{Clock, Timestamp};

/// In the extensions of a request that will be logged: where the limit says what
/// it made of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Note(Arc<OnceLock<Judgement>>);

/// What the limits made of a request.
#[derive(Debug, Default)]
struct Judgement {
    verdict: &'static str,
    /// The limit that refused, or all that were charged.
    limits: String,
    /// Their buckets, in the same order.
    buckets: String,
    shadow_refused: String,
    client: String,
    /// How long it waited for its tokens.
    held: Duration,
}

/// A line of the log, which is written when this is dropped.
#[derive(Debug)]
pub(super) struct Line {
    clock: Clock,
    begun: Timestamp,
    method: Method,
    path: String,
    /// The name of the one it was for; empty if it was refused before that.
    upstream: String,
    note: Note,
    outcome: Outcome,
    status: u16,
    bytes: u64,
}

impl Note {
    /// Says what `decision` made of the request of `client`.
    pub(super) fn judge(
        &self,
        presentation: &Presentation,
        decision: &Decision,
        client: Client,
        held: Option<Duration>,
    ) {
        let held = held.unwrap_or_default();
        let join = |of: &dyn Fn(&limiter::Check) -> Option<String>| {
            decision.checks.iter().filter_map(of).collect::<Vec<_>>().join(",")
        };
        let name = |check: &limiter::Check| presentation.name(check.limit).to_owned();
        let with = |outcome| move |check: &limiter::Check| check.outcome == outcome;
        let (verdict, limits, buckets) = match decision.verdict {
            Verdict::Admitted => {
                let charged = with(limiter::Outcome::Admitted);
                let limits = join(&|check| charged(check).then(|| name(check)));
                let buckets = join(&|check| charged(check).then(|| check.bucket.to_string()));
                (if decision.checks.is_empty() { "unlimited" } else { "admitted" }, limits, buckets)
            }
            Verdict::Refused(_) => {
                let check = decision.refusal();
                let bucket = check.map_or_else(String::new, |check| check.bucket.to_string());
                ("refused", check.map_or_else(String::new, name), bucket)
            }
            Verdict::MissingPart { limit, .. } => {
                ("missing_part", presentation.name(limit).to_owned(), String::new())
            }
        };
        let shadow = with(limiter::Outcome::ShadowRefused);
        let shadow_refused = join(&|check| shadow(check).then(|| name(check)));
        let client = client.to_string();
        // A request is judged once.
        let _ = self.0.set(Judgement { verdict, limits, buckets, shadow_refused, client, held });
    }

    /// Says that the client of a request left that waited for this limit.
    pub(super) fn left(&self, limit: &str, held: Duration) {
        let limits = limit.to_owned();
        let _ = self.0.set(Judgement { verdict: "left", limits, held, ..Judgement::default() });
    }

    /// Says that a request could not wait, because too many do.
    pub(super) fn turned_away(
        &self,
        presentation: &Presentation,
        decision: &Decision,
        client: Client,
    ) {
        let check = decision.refusal();
        let _ = self.0.set(Judgement {
            verdict: "too_many_waiting",
            limits: check.map_or_else(String::new, |c| presentation.name(c.limit).to_owned()),
            buckets: check.map_or_else(String::new, |check| check.bucket.to_string()),
            client: client.to_string(),
            ..Judgement::default()
        });
    }
}

impl Line {
    /// The line of a request that has just come; leaves the note in its
    /// extensions.
    pub(super) fn begin(parts: &mut Parts, clock: &Clock) -> Box<Self> {
        let note = Note::default();
        parts.extensions.insert(note.clone());
        Box::new(Self {
            clock: clock.clone(),
            begun: clock.now(),
            method: parts.method.clone(),
            path: parts.uri.path().to_owned(),
            upstream: String::new(),
            note,
            outcome: Outcome::Cancelled,
            status: 0,
            bytes: 0,
        })
    }

    /// The request is for this upstream.
    pub(super) fn routed(&mut self, upstream: &str) {
        upstream.clone_into(&mut self.upstream);
    }

    /// The head of the answer goes out.
    pub(super) fn answered(&mut self, outcome: Outcome, status: StatusCode) {
        self.outcome = outcome;
        self.status = status.as_u16();
    }

    /// So much of the answer's content went out.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes as u64);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let none = Judgement { verdict: "not_asked", ..Judgement::default() };
        let judgement = self.note.0.get().unwrap_or(&none);
        let seconds = self.clock.now().since(self.begun).as_secs_f64();
        tracing::info!(
            target: ACCESS,
            method = %self.method,
            path = self.path,
            upstream = self.upstream,
            status = self.status,
            bytes = self.bytes,
            seconds,
            held = judgement.held.as_secs_f64(),
            outcome = self.outcome.label(),
            verdict = judgement.verdict,
            limit = judgement.limits,
            bucket = judgement.buckets,
            shadow_refused = judgement.shadow_refused,
            client = judgement.client,
            "request"
        );
    }
}
