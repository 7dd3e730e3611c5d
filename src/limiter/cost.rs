//! Cost (layer 1, pure): how many tokens one request takes.

use super::request::Attributes;
use super::rule::Condition;
use super::tokens::Tokens;

/// What a request costs under one limit. Never zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cost {
    /// Every request the same.
    Fixed(Tokens),
    /// What the first condition that holds says; [`Cost::ONE`] if none does.
    Cases(Vec<(Condition, Tokens)>),
    /// What the header `name` (lower case) says, from one token to `max`.
    ///
    /// Only a trusted proxy's word counts ([`Client::is_vouched_for`]). Anything
    /// but one header line with a whole number of at least 1 costs `max`, so that
    /// leaving the header out, or writing nonsense, is never cheaper.
    ///
    /// [`Client::is_vouched_for`]: super::Client::is_vouched_for
    Header {
        /// The header, in lower case.
        name: String,
        /// The most that one request costs.
        max: Tokens,
    },
}

impl Cost {
    /// One token.
    pub const ONE: Tokens = Tokens::from_micros(Tokens::MICRO);

    /// What `request` costs.
    pub fn of(&self, request: &impl Attributes) -> Tokens {
        match self {
            Self::Fixed(cost) => *cost,
            Self::Cases(cases) => cases
                .iter()
                .find(|(condition, _)| condition.matches(request))
                .map_or(Self::ONE, |(_, cost)| *cost),
            Self::Header { name, max } => {
                if !request.client().is_vouched_for() {
                    return *max;
                }
                let (mut lines, mut read) = (0usize, None);
                request.header(name, &mut |value| {
                    lines += 1;
                    read = whole(value);
                });
                read.filter(|_| lines == 1).map_or(*max, |cost| cost.min(*max))
            }
        }
    }

    /// The most that one request can cost.
    pub fn most(&self) -> Tokens {
        match self {
            Self::Fixed(cost) => *cost,
            Self::Cases(cases) => {
                cases.iter().map(|(_, cost)| *cost).max().map_or(Self::ONE, |c| c.max(Self::ONE))
            }
            Self::Header { max, .. } => *max,
        }
    }
}

impl From<Tokens> for Cost {
    fn from(cost: Tokens) -> Self {
        Self::Fixed(cost)
    }
}

/// A whole number of tokens from 1 on; one that cannot be represented is the
/// largest that can.
fn whole(text: &[u8]) -> Option<Tokens> {
    let text = text.trim_ascii();
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = std::str::from_utf8(text).ok()?.parse::<u64>().unwrap_or(u64::MAX);
    Tokens::from_whole(number.min(Tokens::MAX_WHOLE)).filter(|cost| *cost > Tokens::ZERO)
}

#[cfg(test)]
mod tests {
    use super::super::path::PathPattern;
    use super::super::testing::FakeRequest;
    use super::*;

    const T: fn(u64) -> Tokens = |n| Tokens::from_whole(n).unwrap();

    #[test]
    fn the_first_case_that_holds_sets_the_cost() {
        let on = |path: &str| Condition {
            path: Some(PathPattern::try_new(path).unwrap()),
            ..Condition::default()
        };
        let cost = Cost::Cases(vec![(on("/a/b"), T(5)), (on("/a/"), T(3)), (on("/a/c"), T(9))]);
        for (path, expected) in [("/a/b", 5), ("/a/c", 3), ("/a", 3), ("/x", 1)] {
            assert_eq!(cost.of(&FakeRequest::get(path)), T(expected), "{path}");
        }
        assert_eq!(cost.most(), T(9));
        let all = Cost::Cases(vec![(on("/a/"), T(3)), (Condition::default(), T(2))]);
        assert_eq!(all.of(&FakeRequest::get("/x")), T(2));
        assert_eq!(Cost::Cases(Vec::new()).of(&FakeRequest::get("/")), T(1));
    }

    #[test]
    fn a_header_is_believed_only_within_its_bounds() {
        let cost = Cost::Header { name: "x-cost".into(), max: T(10) };
        for (written, expected) in [
            ("1", 1),
            ("7", 7),
            (" 7 ", 7),
            ("007", 7),
            ("10", 10),
            ("11", 10),
            ("99999999999999999999999", 10),
            ("0", 10),
            ("-1", 10),
            ("+1", 10),
            ("1.5", 10),
            ("1e0", 10),
            ("1,2", 10),
            ("", 10),
            ("one", 10),
        ] {
            let request = FakeRequest::get("/").with_header("x-cost", written);
            assert_eq!(cost.of(&request.vouched_for()), T(expected), "{written}");
        }
        assert_eq!(cost.of(&FakeRequest::get("/").vouched_for()), T(10));
        let twice = FakeRequest::get("/").with_header("x-cost", "1").with_header("x-cost", "1");
        assert_eq!(cost.of(&twice.vouched_for()), T(10));
    }

    #[test]
    fn an_untrusted_clients_word_on_its_cost_does_not_count() {
        let cost = Cost::Header { name: "x-cost".into(), max: T(10) };
        assert_eq!(cost.of(&FakeRequest::get("/").with_header("x-cost", "1")), T(10));
    }
}
