//! How a route's requests are delivered: how often, how far apart, and how their
//! result is asked for.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::settings::{DurationText, Fault, PathSegment, Whole};

/// How deferred requests are delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What happens to one of which it is not known whether it arrived.
    pub delivery: Delivery,
    /// The request itself.
    pub create: Tries,
    /// How its result is asked for; with `None` a good answer to the request is its
    /// end.
    pub poll: Option<Poll>,
    /// When it is given up, after it was accepted.
    pub expires: Duration,
}

impl Plan {
    /// When a request is given up unless said otherwise.
    pub const DEFAULT_EXPIRES: Duration = Duration::from_secs(86_400);
}

/// What happens to a request of which it is not known whether it arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Delivery {
    /// It is sent again, with the same key.
    #[default]
    AtLeastOnce,
    /// It becomes stale, and a person looks.
    AtMostOnce,
}

/// How often something is tried, and how far apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Tries {
    /// How often at most, 1 to 1000. Default: 5.
    #[serde(with = "Whole::<1, 1000>")]
    pub attempts: u32,
    /// How long one may take, from the connection to the end of the answer.
    /// Default: 10s.
    #[serde(with = "DurationText")]
    pub timeout: Duration,
    /// The pauses between them.
    pub backoff: Backoff,
}

impl Default for Tries {
    fn default() -> Self {
        Self { attempts: 5, timeout: Duration::from_secs(10), backoff: Backoff::default() }
    }
}

/// The pauses between tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Backoff {
    /// The first one. Default: 2s.
    #[serde(with = "DurationText")]
    pub first: Duration,
    /// How they grow. Default: linear.
    pub shape: Shape,
    /// The longest one. Default: 5m.
    #[serde(with = "DurationText")]
    pub max: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_secs(2), shape: Shape::Linear, max: Duration::from_secs(300) }
    }
}

/// How pauses grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// The first, twice the first, three times the first.
    #[default]
    Linear,
    /// Each is twice the one before.
    Exponential,
}

impl Backoff {
    /// The pause after the `n`th try, counted from 1.
    pub fn after(&self, n: u32) -> Duration {
        let factor = match self.shape {
            Shape::Linear => n,
            Shape::Exponential => 1_u32.checked_shl(n.saturating_sub(1)).unwrap_or(u32::MAX),
        };
        self.first.saturating_mul(factor.max(1)).min(self.max.max(self.first))
    }
}

/// How the result is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Poll {
    /// The path to ask at with GET; `{id}` stands for what the upstream calls it.
    pub path: String,
    /// Where in the answer to the request that id is: a JSON pointer (RFC 6901).
    /// Default: /id.
    #[serde(default = "Poll::default_id")]
    pub id: String,
    /// Where in an answer to the question its state is: a JSON pointer.
    /// Default: /status.
    #[serde(default = "Poll::default_status")]
    pub status: String,
    /// States that mean that it is done. Default: completed.
    #[serde(default = "Poll::default_completed")]
    pub completed: Vec<String>,
    /// States that mean that it failed. Default: failed.
    #[serde(default = "Poll::default_failed")]
    pub failed: Vec<String>,
    /// How often to ask at most, 1 to 1000. Default: 10.
    #[serde(default = "Poll::default_attempts", with = "Whole::<1, 1000>")]
    pub attempts: u32,
    /// How long one answer may take. Default: 10s.
    #[serde(default = "Poll::default_timeout", with = "DurationText")]
    pub timeout: Duration,
    /// The pauses before asking.
    #[serde(default)]
    pub backoff: Backoff,
}

/// Where the id stands in [`Poll::path`].
pub const ID_PLACE: &str = "{id}";

impl Poll {
    fn default_id() -> String {
        "/id".to_owned()
    }

    fn default_status() -> String {
        "/status".to_owned()
    }

    fn default_completed() -> Vec<String> {
        vec!["completed".to_owned()]
    }

    fn default_failed() -> Vec<String> {
        vec!["failed".to_owned()]
    }

    const fn default_attempts() -> u32 {
        10
    }

    const fn default_timeout() -> Duration {
        Duration::from_secs(10)
    }

    /// Asking at `path`, all else by default.
    pub fn at(path: &str) -> Self {
        Self {
            path: path.to_owned(),
            id: Self::default_id(),
            status: Self::default_status(),
            completed: Self::default_completed(),
            failed: Self::default_failed(),
            attempts: Self::default_attempts(),
            timeout: Self::default_timeout(),
            backoff: Backoff::default(),
        }
    }

    /// Where to ask for what the upstream calls `id`: the id as one segment of the
    /// path, whatever it contains.
    pub fn target(&self, id: &str) -> String {
        const KEPT: &percent_encoding::AsciiSet =
            &percent_encoding::NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
        // A segment of dots would name another path.
        let encoded = match id {
            "." => "%2E".to_owned(),
            ".." => "%2E%2E".to_owned(),
            id => percent_encoding::utf8_percent_encode(id, KEPT).to_string(),
        };
        self.path.replace(ID_PLACE, &encoded)
    }

    /// Faults of settings that can each be read.
    pub fn faults(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        let mut fault = |field: &'static str, message: String| {
            faults.push(Fault::new([PathSegment::Field(field)], message));
        };
        let visible = self.path.bytes().all(|b| b.is_ascii_graphic() && b != b'#');
        if !self.path.starts_with('/') || !visible {
            fault(
                "path",
                format!("`{}` is not a path: write it as in /v1/things/{{id}}", self.path),
            );
        } else if self.path.matches(ID_PLACE).count() != 1 {
            fault("path", format!("`{}` must name {{id}} once", self.path));
        }
        for (field, pointer) in [("id", &self.id), ("status", &self.status)] {
            if !is_pointer(pointer) {
                let message = format!("`{pointer}` is not a JSON pointer: write it as in /data/id");
                fault(field, message);
            }
        }
        if self.completed.is_empty() {
            fault("completed", "names no state, so that nothing could ever complete".to_owned());
        }
        if let Some(both) = self.failed.iter().find(|state| self.completed.contains(state)) {
            fault("failed", format!("`{both}` also means that it is completed"));
        }
        faults
    }
}

/// Whether `text` is a pointer into a document, and not to all of it.
fn is_pointer(text: &str) -> bool {
    let escapes_are_known =
        text.split('~').skip(1).all(|rest| rest.starts_with('0') || rest.starts_with('1'));
    text.starts_with('/') && escapes_are_known
}

/// What is to be known of the way to the upstream to judge an answer.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// How the request is delivered.
    pub plan: &'a Plan,
    /// Statuses by which the upstream says that there were too many requests.
    pub pause_on: &'a [u16],
    /// The least time between two questions for one result, so that all questions
    /// together take no more than half of what the upstream allows.
    pub stretch: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_as_they_are_told_to() {
        let seconds =
            |backoff: Backoff| [1, 2, 3, 10, 200, u32::MAX].map(|n| backoff.after(n).as_secs());
        let linear = Backoff::default();
        assert_eq!(seconds(linear), [2, 4, 6, 20, 300, 300]);
        let exponential = Backoff { shape: Shape::Exponential, ..linear };
        assert_eq!(seconds(exponential), [2, 4, 8, 300, 300, 300]);
        // A longest pause below the first is no reason to hurry.
        let odd = Backoff { max: Duration::from_secs(1), ..linear };
        assert_eq!(seconds(odd), [2; 6]);
    }

    #[test]
    fn an_id_of_the_upstream_stays_one_segment_of_the_path() {
        let poll = Poll::at("/v1/transfers/{id}?full=1");
        for (id, target) in [
            ("tr_1-2.3~4", "/v1/transfers/tr_1-2.3~4?full=1"),
            ("../../admin", "/v1/transfers/..%2F..%2Fadmin?full=1"),
            ("..", "/v1/transfers/%2E%2E?full=1"),
            ("a b?c#d%\r\n\u{e9}", "/v1/transfers/a%20b%3Fc%23d%25%0D%0A%C3%A9?full=1"),
            ("{id}", "/v1/transfers/%7Bid%7D?full=1"),
        ] {
            assert_eq!(poll.target(id), target);
        }
    }

    #[test]
    fn polls_that_cannot_be_are_told_by_field() {
        let sound = Poll::at("/v1/{id}");
        assert!(sound.faults().is_empty());
        let faults = |poll: Poll| poll.faults().iter().map(|f| f.path.clone()).collect::<Vec<_>>();
        for path in ["v1/{id}", "/v1", "/{id}/{id}", "/a b/{id}", "/{id}#x", ""] {
            assert_eq!(faults(Poll::at(path)), [["path".into()]], "{path}");
        }
        for pointer in ["", "id", "/a~2b", "/a~"] {
            let poll = Poll { id: pointer.to_owned(), ..sound.clone() };
            assert_eq!(faults(poll), [["id".into()]], "{pointer}");
        }
        assert_eq!(faults(Poll { completed: vec![], ..sound.clone() }), [["completed".into()]]);
        let both = Poll { failed: sound.completed.clone(), ..sound };
        assert_eq!(faults(both), [["failed".into()]]);
    }
}
