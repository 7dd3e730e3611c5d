//! What an upstream's answers say of how much it still bears, read without
//! trusting them: nonsense says nothing, what is far off is cut, and nothing ever
//! gives tokens.
//!
//! Read are `Retry-After` (RFC 9110 section 10.2.3) of an answer that refuses,
//! `RateLimit` (draft-ietf-httpapi-ratelimit-headers) and the fields of its older
//! drafts, and, if asked for, `X-RateLimit-*`, which say no two things alike.

use std::time::{Duration, SystemTime};

use http::header::{DATE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, StatusCode};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use crate::settings::{DurationText, text};

static RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
static REMAINING: HeaderName = HeaderName::from_static("ratelimit-remaining");
static RESET: HeaderName = HeaderName::from_static("ratelimit-reset");
static X_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
static X_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// The shortest pause after a refusal, and the one after a refusal that does not say
/// how long to wait.
const SHORTEST: Duration = Duration::from_secs(1);

/// How an upstream's word is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Feedback")]
pub struct FeedbackConfig {
    /// The longest pause that the upstream can ask for. Default: 15m.
    #[serde(with = "DurationText")]
    pub retry_after_max: Duration,
    /// Whether `X-RateLimit-Remaining` and `X-RateLimit-Reset` count, and what the
    /// latter is: seconds since 1970 or from now. Default: off.
    pub x_ratelimit: XRateLimit,
}

impl Default for FeedbackConfig {
    fn default() -> Self {
        Self { retry_after_max: Duration::from_secs(15 * 60), x_ratelimit: XRateLimit::Off }
    }
}

/// What `X-RateLimit-Reset` says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum XRateLimit {
    /// It is not looked at.
    #[default]
    // Tools that read YAML 1.1 turn `off` into `false`.
    #[serde(alias = "false")]
    Off,
    /// Seconds since 1970.
    Epoch,
    /// Seconds from now on.
    Delta,
}

/// A status of an answer that refuses a request, 400 to 599.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusingStatus(pub StatusCode);

impl<'de> Deserialize<'de> for RefusingStatus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = text(deserializer, "a status such as 429")?;
        let status = text.parse::<StatusCode>().ok();
        status
            .filter(|status| status.is_client_error() || status.is_server_error())
            .map(Self)
            .ok_or_else(|| de::Error::custom(format!("`{text}` is not a status from 400 to 599")))
    }
}

impl Serialize for RefusingStatus {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u16(self.0.as_u16())
    }
}

impl JsonSchema for RefusingStatus {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "RefusingStatus".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "integer", "minimum": 400, "maximum": 599, "examples": [429, 503] })
    }
}

/// What an answer says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Feedback {
    /// The upstream refused the request, and did nothing about it.
    pub(in super::super) refused: bool,
    /// It wants no request for so long.
    pub(in super::super) pause: Option<Duration>,
    /// It bears so many more, if not none.
    pub(in super::super) left: Option<u64>,
}

impl Feedback {
    /// Reads the head of an answer that came at `now`. A pause is made longer by up to
    /// a tenth, by `jitter` from 0 to 999, so that not all who were told the same come
    /// back in the same moment, and none too early.
    pub(in super::super) fn read(
        status: StatusCode,
        headers: &HeaderMap,
        pause_on: &[RefusingStatus],
        config: &FeedbackConfig,
        now: SystemTime,
        jitter: u32,
    ) -> Self {
        let refused = pause_on.iter().any(|on| on.0 == status);
        // The upstream's times are by its own clock.
        let here = headers.get(DATE).and_then(|date| date.to_str().ok());
        let now = here.and_then(|date| httpdate::parse_http_date(date).ok()).unwrap_or(now);
        let mut feedback = Self { refused, ..Self::default() };
        if refused {
            let asked = headers.get_all(RETRY_AFTER).iter();
            let asked = asked.filter_map(|value| retry_after(value.to_str().ok()?.trim(), now));
            feedback.pause = Some(asked.max().unwrap_or(SHORTEST).max(SHORTEST));
        }
        for (left, reset) in quotas(headers, config.x_ratelimit, now) {
            match (left, reset) {
                (0, Some(reset)) if !reset.is_zero() => {
                    feedback.pause = Some(feedback.pause.unwrap_or_default().max(reset));
                }
                (0, _) => {}
                (left, _) => {
                    feedback.left = Some(feedback.left.map_or(left, |other| other.min(left)));
                }
            }
        }
        feedback.pause = feedback.pause.map(|pause| {
            let pause = pause.min(config.retry_after_max);
            pause.saturating_add(pause * jitter.min(999) / 10_000)
        });
        feedback
    }
}

/// The time that a value of `Retry-After` asks for: seconds, or the moment of a date.
fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    if let Some(seconds) = whole(value) {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    // One that has passed asks for nothing.
    Some(date.duration_since(now).unwrap_or_default())
}

/// What is left of each quota that the fields tell, and how long until it is fresh.
fn quotas(headers: &HeaderMap, x: XRateLimit, now: SystemTime) -> Vec<(u64, Option<Duration>)> {
    let mut quotas = Vec::new();
    for line in headers.get_all(&RATELIMIT) {
        let Ok(line) = line.to_str() else { continue };
        for item in split_unquoted(line, ',') {
            let mut parameters = split_unquoted(item, ';').skip(1).filter_map(|parameter| {
                let (name, value) = parameter.split_once('=')?;
                Some((name.trim(), whole(value.trim())?))
            });
            let (mut left, mut reset) = (None, None);
            for (name, value) in parameters.by_ref() {
                match name {
                    "r" => left = Some(value),
                    "t" => reset = Some(Duration::from_secs(value)),
                    _ => {}
                }
            }
            quotas.extend(left.map(|left| (left, reset)));
        }
    }
    let number = |name: &HeaderName| -> Option<u64> {
        // Several windows in one field come with parameters; the first is in force.
        let value = headers.get(name)?.to_str().ok()?;
        whole(value.split([',', ';']).next()?.trim())
    };
    if let Some(left) = number(&REMAINING) {
        quotas.push((left, number(&RESET).map(Duration::from_secs)));
    }
    let since_1970 = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let x_reset = match x {
        XRateLimit::Off => return quotas,
        // One that has passed, as a number of seconds from now would seem to be, says
        // nothing.
        XRateLimit::Epoch => {
            number(&X_RESET).map(|at| Duration::from_secs(at).saturating_sub(since_1970))
        }
        XRateLimit::Delta => number(&X_RESET).map(Duration::from_secs),
    };
    quotas.extend(number(&X_REMAINING).map(|left| (left, x_reset)));
    quotas
}

/// A whole number without sign; one with more digits than fit is the largest.
fn whole(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

/// The pieces between separators that are not within quotes.
fn split_unquoted(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let (mut quoted, mut escaped) = (false, false);
    text.split(move |c| {
        if escaped {
            escaped = false;
        } else if quoted && c == '\\' {
            escaped = true;
        } else if c == '"' {
            quoted = !quoted;
        }
        c == separator && !quoted
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    /// 2026-11-30T12:00:00Z.
    const NOW: u64 = 1_796_040_000;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn read_with(
        config: FeedbackConfig,
        status: u16,
        fields: &[(&'static str, &str)],
        jitter: u32,
    ) -> Feedback {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        let pause_on = [429, 503].map(|on| RefusingStatus(StatusCode::from_u16(on).unwrap()));
        let status = StatusCode::from_u16(status).unwrap();
        Feedback::read(status, &headers, &pause_on, &config, at(NOW), jitter)
    }

    fn read(status: u16, fields: &[(&'static str, &str)]) -> Feedback {
        read_with(FeedbackConfig::default(), status, fields, 0)
    }

    fn pause(fields: &[(&'static str, &str)]) -> f64 {
        let feedback = read(429, fields);
        assert!(feedback.refused);
        feedback.pause.unwrap().as_secs_f64()
    }

    #[test]
    fn retry_after_is_seconds_or_a_date_by_the_upstreams_clock() {
        let date = |offset: i64| httpdate::fmt_http_date(at(NOW.saturating_add_signed(offset)));
        assert_eq!(pause(&[("retry-after", "30")]), 30.0);
        assert_eq!(pause(&[("retry-after", " 030 ")]), 30.0);
        assert_eq!(pause(&[("retry-after", &date(90))]), 90.0);
        // Its clock is 60 s behind ours.
        assert_eq!(pause(&[("date", &date(-60)), ("retry-after", &date(30))]), 90.0);
        assert_eq!(pause(&[("date", "junk"), ("retry-after", &date(30))]), 30.0);
        assert_eq!(pause(&[("retry-after", "Monday, 30-Nov-26 12:00:07 GMT")]), 7.0);
        assert_eq!(pause(&[("retry-after", "Mon Nov 30 12:00:08 2026")]), 8.0);
        // Of several the longest.
        assert_eq!(pause(&[("retry-after", "5"), ("retry-after", "x"), ("retry-after", "9")]), 9.0);
    }

    #[test]
    fn nonsense_in_retry_after_pauses_shortly_and_the_far_future_at_most_the_maximum() {
        for odd in [
            "",
            "-1",
            "+5",
            "1.5",
            "1e3",
            "soon",
            "0x10",
            "30 s",
            "0",
            "NaN",
            "\u{663}",
            "Thu, 01 Jan 1970 00:00:00 GMT",
            "Mon, 30 Nov 2026 11:59:59 GMT",
            "Mon, 31 Feb 2027 00:00:00 GMT",
            "Mon, 30 Nov 2026",
        ] {
            let Ok(value) = HeaderValue::from_bytes(odd.as_bytes()) else { continue };
            let mut headers = HeaderMap::new();
            headers.insert("retry-after", value);
            let on = [RefusingStatus(StatusCode::TOO_MANY_REQUESTS)];
            let config = FeedbackConfig::default();
            let feedback =
                Feedback::read(StatusCode::TOO_MANY_REQUESTS, &headers, &on, &config, at(NOW), 0);
            assert_eq!(feedback.pause, Some(Duration::from_secs(1)), "{odd}");
        }
        assert_eq!(pause(&[]), 1.0);
        for far in [
            "901",
            "36000",
            "1796040000",
            "18446744073709551615",
            "99999999999999999999999999",
            "Fri, 31 Dec 9999 23:59:59 GMT",
        ] {
            assert_eq!(pause(&[("retry-after", far)]), 900.0, "{far}");
        }
    }

    #[test]
    fn jitter_makes_a_pause_longer_by_up_to_a_tenth_and_never_shorter() {
        let with = |jitter| {
            let fields = [("retry-after", "100")];
            read_with(FeedbackConfig::default(), 503, &fields, jitter).pause.unwrap()
        };
        assert_eq!(with(0), Duration::from_secs(100));
        assert_eq!(with(500), Duration::from_secs(105));
        for jitter in [1, 999, u32::MAX] {
            assert!(with(jitter) > with(0) && with(jitter) < Duration::from_secs(110), "{jitter}");
        }
    }

    #[test]
    fn a_status_that_does_not_pause_has_no_retry_after() {
        assert_eq!(read(200, &[("retry-after", "30")]), Feedback::default());
        assert_eq!(read(500, &[("retry-after", "30")]), Feedback::default());
        assert!(read(503, &[]).refused);
    }

    #[test]
    fn what_is_left_of_a_quota_is_told_and_an_empty_one_pauses_until_it_is_fresh() {
        let told = |fields: &[(&'static str, &str)]| {
            let Feedback { pause, left, .. } = read(200, fields);
            (pause.map(|pause| pause.as_secs()), left)
        };
        assert_eq!(told(&[("ratelimit", "\"default\";r=50;t=30")]), (None, Some(50)));
        assert_eq!(told(&[("ratelimit", "\"default\";r=0;t=30")]), (Some(30), None));
        assert_eq!(told(&[("ratelimit", "\"a\";r=9;t=1, \"b\";r=0;t=7")]), (Some(7), Some(9)));
        assert_eq!(
            told(&[("ratelimit", "\"a\";r=9"), ("ratelimit", "\"b\";r=4")]),
            (None, Some(4))
        );
        assert_eq!(told(&[("ratelimit", "\"a,;r=0;t=9\\\"\";r=3;t=1")]), (None, Some(3)));
        assert_eq!(
            told(&[("ratelimit-remaining", "0"), ("ratelimit-reset", "12")]),
            (Some(12), None)
        );
        assert_eq!(told(&[("ratelimit-remaining", "5, 5;w=1")]), (None, Some(5)));
        for junk in [
            "",
            "junk",
            "\"a\"",
            "\"a\";t=30",
            "\"a\";r=-1;t=3",
            "\"a\";r=0",
            "\"a\";r=x;t=1",
            "\"a;r=0;t=9",
            "\"a\";r=0;t=0",
        ] {
            assert_eq!(told(&[("ratelimit", junk)]), (None, None), "{junk}");
        }
        assert_eq!(told(&[("ratelimit", "\"a\";r=0;t=99999999999999999999")]), (Some(900), None));
        // With a refusal the longer of both holds.
        let both = read(429, &[("retry-after", "3"), ("ratelimit", "\"a\";r=0;t=8")]);
        assert_eq!(both.pause, Some(Duration::from_secs(8)));
    }

    #[test]
    fn the_fields_without_a_standard_count_only_as_configured() {
        let told = |x_ratelimit, reset: &str| {
            let config = FeedbackConfig { x_ratelimit, ..FeedbackConfig::default() };
            let fields = [("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", reset)];
            read_with(config, 200, &fields, 0).pause.map(|pause| pause.as_secs())
        };
        assert_eq!(told(XRateLimit::Off, "30"), None);
        assert_eq!(told(XRateLimit::Delta, "30"), Some(30));
        assert_eq!(told(XRateLimit::Epoch, "1796040030"), Some(30));
        // Neither is taken for the other: a moment as a time is cut, a time as a moment
        // has passed.
        assert_eq!(told(XRateLimit::Delta, "1796040030"), Some(900));
        assert_eq!(told(XRateLimit::Epoch, "30"), None);
        assert_eq!(told(XRateLimit::Epoch, "99999999999999999999"), Some(900));
    }

    proptest! {
        #[test]
        fn any_fields_are_read_and_no_pause_is_above_the_maximum(
            a in "[ -~]{0,60}", b in "[ -~]{0,40}", jitter in any::<u32>(),
        ) {
            let names = ["retry-after", "ratelimit", "date", "ratelimit-remaining"];
            let fields: Vec<_> = names.iter().flat_map(|name| [(*name, a.as_str()), (*name, b.as_str())]).collect();
            let pause = read_with(FeedbackConfig::default(), 429, &fields, jitter).pause.unwrap();
            prop_assert!(pause >= Duration::from_secs(1) && pause < Duration::from_secs(990));
        }
    }
}
