//! What is sent and what is answered, as it is kept.

use std::net::IpAddr;

use bytes::Bytes;

/// A header field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name, in lower case.
    pub name: String,
    /// Its value.
    pub value: Bytes,
}

/// A request as its sender meant it: without the fields of the connection that it
/// came on, and without what is added when it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The method.
    pub method: String,
    /// Path and query.
    pub target: String,
    /// Fields, in order.
    pub fields: Vec<Field>,
    /// The content.
    pub body: Bytes,
    /// The client's address, by which limits know it.
    pub client: IpAddr,
    /// Whether a trusted proxy vouched for the client.
    pub vouched_for: bool,
    /// The key under which the upstream is to know it, if the sender gave one.
    pub key: Option<String>,
}

/// An answer of the upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status, 100 to 999.
    pub status: u16,
    /// Fields, in order, without those of the connection.
    pub fields: Vec<Field>,
    /// The content.
    pub body: Bytes,
}

impl Answer {
    /// The text or number at `pointer` (RFC 6901) in content that is JSON. `None` if
    /// there is none, or an empty one.
    pub fn at(&self, pointer: &str) -> Option<String> {
        let document: serde_json::Value = serde_json::from_slice(&self.body).ok()?;
        let text = match document.pointer(pointer)? {
            serde_json::Value::String(text) => text.clone(),
            serde_json::Value::Number(number) => number.to_string(),
            serde_json::Value::Null
            | serde_json::Value::Bool(_)
            | serde_json::Value::Array(_)
            | serde_json::Value::Object(_) => return None,
        };
        (!text.is_empty() && text.len() <= MAX_TEXT).then_some(text)
    }

    /// How long the upstream asks to stay away: `Retry-After` as seconds. Anything
    /// that is not a number of seconds says nothing here.
    pub fn retry_after(&self) -> Option<std::time::Duration> {
        let field = self.fields.iter().find(|field| field.name == "retry-after")?;
        let text = std::str::from_utf8(&field.value).ok()?.trim();
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| std::time::Duration::from_secs(text.parse().unwrap_or(u64::MAX)))
    }
}

/// The longest id or state that is taken from an answer, in bytes.
const MAX_TEXT: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_a_text_or_a_number_that_is_there() {
        let at = |body: &str, pointer: &str| {
            let answer = Answer { status: 201, fields: vec![], body: Bytes::from(body.to_owned()) };
            answer.at(pointer)
        };
        assert_eq!(at(r#"{"id":"a"}"#, "/id").unwrap(), "a");
        assert_eq!(at(r#"{"data":[{"id":17}]}"#, "/data/0/id").unwrap(), "17");
        assert_eq!(at(r#"{"id":18446744073709551615}"#, "/id").unwrap(), "18446744073709551615");
        for body in ["", "{}", r#"{"id":""}"#, r#"{"id":null}"#, r#"{"id":{}}"#, "<id>a</id>", "\0"]
        {
            assert_eq!(at(body, "/id"), None, "{body}");
        }
        let long = format!(r#"{{"id":"{}"}}"#, "x".repeat(MAX_TEXT + 1));
        assert_eq!(at(&long, "/id"), None);
    }

    #[test]
    fn only_whole_seconds_are_a_time_to_stay_away() {
        let after = |value: &str| {
            let value = Bytes::from(value.to_owned());
            let fields = vec![Field { name: "retry-after".to_owned(), value }];
            Answer { status: 429, fields, body: Bytes::new() }.retry_after().map(|d| d.as_secs())
        };
        assert_eq!(after("120"), Some(120));
        assert_eq!(after(" 0 "), Some(0));
        assert_eq!(after("99999999999999999999999"), Some(u64::MAX));
        for odd in ["", "-1", "1.5", "soon", "1e3", "Wed, 21 Oct 2015 07:28:00 GMT"] {
            assert_eq!(after(odd), None, "{odd}");
        }
    }
}
