//! What answers tell about limits: the fields `RateLimit` and `RateLimit-Policy`
//! (draft-ietf-httpapi-ratelimit-headers) and their forerunners `X-RateLimit-*`.
//!
//! Everything that depends on the configuration alone is made once, when the
//! limits are loaded; a request only pays for the numbers that change.

use std::cmp::Ordering;
use std::fmt::Write as _;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::config::HeaderStyle;
use super::metrics::{LimitMetrics, Metrics};
use crate::limiter::{Check, Decision, Limit, LimitIndex, LimitSet, Mode, Quota, Verdict};

static RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
static RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
static LEGACY_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
static LEGACY_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
static LEGACY_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// Fields of older drafts, which would contradict ours.
static OLDER_DRAFTS: [HeaderName; 3] = [
    HeaderName::from_static("ratelimit-limit"),
    HeaderName::from_static("ratelimit-remaining"),
    HeaderName::from_static("ratelimit-reset"),
];

/// The limits in force, as answers present them.
#[derive(Debug)]
pub(super) struct Presentation {
    limits: Arc<LimitSet>,
    /// By the limits' indices.
    views: Vec<Option<LimitView>>,
}

/// One limit, as answers present it.
#[derive(Debug)]
pub(super) struct LimitView {
    pub(super) metrics: LimitMetrics,
    /// Whether clients may learn of it. A shadow limit never acts, so that
    /// telling of it would mislead.
    told: bool,
    /// Its name as a structured-field string, quotes and all.
    quoted_name: String,
    quota: Quota,
    policy: HeaderValue,
    /// The start of a refusal's document, up to the numbers.
    pub(super) problem: String,
    pub(super) proxy_status: HeaderValue,
}

/// The fields of one answer.
#[derive(Clone, Debug)]
pub(super) struct Fields {
    standard: Option<[HeaderValue; 2]>,
    legacy: Option<[HeaderValue; 3]>,
}

impl Presentation {
    pub(super) fn new(limits: Arc<LimitSet>, metrics: &Metrics) -> Self {
        let view = |limit: Option<&Limit>| limit.map(|limit| LimitView::new(limit, metrics));
        let views = limits.places().map(view).collect();
        Self { limits, views }
    }

    /// The limits that this presents.
    pub(super) const fn limits(&self) -> &Arc<LimitSet> {
        &self.limits
    }

    pub(super) fn view(&self, index: LimitIndex) -> Option<&LimitView> {
        self.views.get(index.0 as usize)?.as_ref()
    }

    pub(super) fn name(&self, index: LimitIndex) -> &str {
        self.limit(index).map_or("", Limit::name)
    }

    pub(super) fn limit(&self, index: LimitIndex) -> Option<&Limit> {
        self.limits.get(index)
    }

    /// The fields that tell of `decision`; `None` if no limit that is told of
    /// applied.
    pub(super) fn fields(&self, decision: &Decision, style: HeaderStyle) -> Option<Fields> {
        let (standard, legacy) = match style {
            HeaderStyle::Off => return None,
            HeaderStyle::Standard => (true, false),
            HeaderStyle::Legacy => (false, true),
            HeaderStyle::Both => (true, true),
        };
        let told = |check: &&Check| self.view(check.limit).is_some_and(|view| view.told);
        let nearest = match decision.verdict {
            Verdict::Refused(_) => decision.refusal().filter(told),
            Verdict::Admitted | Verdict::MissingPart { .. } => None,
        };
        let nearest =
            nearest.or_else(|| decision.checks.iter().filter(told).min_by(|a, b| exhaustion(a, b)));
        let nearest = nearest?;
        let remaining = nearest.left().whole();
        // Nanoseconds to whole seconds, never early. A blocked limit has no end
        // that could be told.
        let reset = nearest
            .full_in
            .filter(|_| !nearest.quota.rate().is_blocked())
            .map(|nanos| nanos.max(nearest.paused_for).div_ceil(1_000_000_000));
        let standard = if standard {
            let view = self.view(nearest.limit)?;
            let name = view.quoted_name.as_bytes();
            let length = name.len() + 3 + digits(remaining) + reset.map_or(0, |t| 3 + digits(t));
            // Of the exact length, or the value would be copied once more.
            let mut state = Vec::with_capacity(length);
            state.extend_from_slice(name);
            push_number(&mut state, b";r=", remaining);
            if let Some(reset) = reset {
                push_number(&mut state, b";t=", reset);
            }
            Some([self.policy(decision, told)?, value(state)?])
        } else {
            None
        };
        let legacy = if legacy {
            // What is never full again has no reset; the largest number says so.
            let reset = reset.unwrap_or(u64::from(u32::MAX));
            Some([
                HeaderValue::from(nearest.quota.burst().whole()),
                HeaderValue::from(remaining),
                HeaderValue::from(reset),
            ])
        } else {
            None
        };
        Some(Fields { standard, legacy })
    }

    /// The policies of all limits that applied and are told of.
    fn policy(&self, decision: &Decision, told: impl Fn(&&Check) -> bool) -> Option<HeaderValue> {
        let mut checks = decision.checks.iter().filter(told);
        let first = checks.next()?;
        let view = self.view(first.limit)?;
        let mut rest = checks.peekable();
        if rest.peek().is_none() && view.quota == first.quota {
            return Some(view.policy.clone());
        }
        let mut list = policy(&view.quoted_name, &first.quota);
        for check in rest {
            list.push_str(", ");
            list.push_str(&policy(&self.view(check.limit)?.quoted_name, &check.quota));
        }
        value(list)
    }
}

impl LimitView {
    fn new(limit: &Limit, metrics: &Metrics) -> Self {
        let quoted_name = sf_string(limit.name());
        let quota = *limit.default_quota();
        let told = limit.exposed() && limit.mode() == Mode::Enforce;
        let name = serde_json::Value::from(limit.name());
        let mut problem = String::from(
            "{\"type\":\"https://iana.org/assignments/http-problem-types#quota-exceeded\",\
             \"title\":\"Too Many Requests\",\"status\":429",
        );
        let proxy_status = if told {
            let detail = serde_json::Value::from(format!("the limit {} is reached", limit.name()));
            let _ = write!(
                problem,
                ",\"detail\":{detail},\"limit\":{name},\"violated-policies\":[{name}]"
            );
            value(format!("tidegate; error=http_request_denied; details={quoted_name}"))
        } else {
            problem.push_str(",\"detail\":\"a limit is reached\"");
            None
        };
        Self {
            metrics: metrics.limit(limit.name()),
            told,
            policy: value(policy(&quoted_name, &quota)).unwrap_or(HeaderValue::from_static("")),
            quoted_name,
            quota,
            problem,
            proxy_status: proxy_status
                .unwrap_or(HeaderValue::from_static("tidegate; error=http_request_denied")),
        }
    }
}

impl Fields {
    /// Writes the fields, in place of any that the upstream sent.
    pub(super) fn insert(self, headers: &mut HeaderMap) {
        if let Some([policy, state]) = self.standard {
            if headers.keys().any(|name| name.as_str().starts_with("ratelimit-")) {
                for name in &OLDER_DRAFTS {
                    headers.remove(name);
                }
            }
            headers.insert(&RATELIMIT_POLICY, policy);
            headers.insert(&RATELIMIT, state);
        }
        if let Some([limit, remaining, reset]) = self.legacy {
            headers.insert(&LEGACY_LIMIT, limit);
            headers.insert(&LEGACY_REMAINING, remaining);
            headers.insert(&LEGACY_RESET, reset);
        }
    }
}

/// Which of two checks has fewer requests left, in whole or in part; of equals,
/// the one that is full later.
fn exhaustion(a: &Check, b: &Check) -> Ordering {
    let left = |check: &Check, other: &Check| {
        i128::from(check.left().micros()) * i128::from(other.cost.micros().max(1))
    };
    let full_in = |check: &Check| check.full_in.unwrap_or(u64::MAX);
    left(a, b).cmp(&left(b, a)).then_with(|| full_in(b).cmp(&full_in(a)))
}

/// How many decimal digits `number` has.
const fn digits(number: u64) -> usize {
    match number.checked_ilog10() {
        Some(last) => last as usize + 1,
        None => 1,
    }
}

/// Writes `before` and `number` in decimal digits. Each answer has two: the formatting
/// of the standard library takes several times as long.
pub(super) fn push_number(text: &mut Vec<u8>, before: &[u8], mut number: u64) {
    text.extend_from_slice(before);
    let start = text.len();
    text.resize(start + digits(number), b'0');
    for digit in text[start..].iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
}

fn policy(quoted_name: &str, quota: &Quota) -> String {
    let mut text = format!("{quoted_name};q={}", quota.burst().whole());
    if let Some(window) = quota.fill_seconds().filter(|_| !quota.rate().is_blocked()) {
        let _ = write!(text, ";w={window}");
    }
    text
}

/// A structured-field string (RFC 9651 section 3.3.3); what it cannot hold
/// becomes a question mark.
fn sf_string(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            ' '..='~' => quoted.push(c),
            _ => quoted.push('?'),
        }
    }
    quoted.push('"');
    quoted
}

fn value(text: impl Into<Bytes>) -> Option<HeaderValue> {
    HeaderValue::from_maybe_shared(text.into()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_the_standard_library_does() {
        for number in [0, 1, 9, 10, 1_234_567, u64::from(u32::MAX), u64::MAX] {
            let mut text = Vec::new();
            push_number(&mut text, b"x=", number);
            assert_eq!(text, format!("x={number}").as_bytes());
            assert_eq!(digits(number), text.len() - 2);
        }
    }
}
