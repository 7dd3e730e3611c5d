//! `${NAME}` and `${NAME:-default}` in values.

use std::borrow::Cow;

use serde_json::Value;

/// Why a reference to the environment cannot be replaced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum EnvError {
    #[error(
        "the environment variable `{0}` is not set, and there is no default: `${{{0}:-value}}`"
    )]
    Unset(String),
    #[error("`${{` without `}}`; for the text itself write `$${{`")]
    Open,
    #[error("`{0}` is not the name of an environment variable; for the text itself write `$${{`")]
    Name(String),
}

/// Replaces every reference in `text`. What a variable holds is taken as it is:
/// it is not searched for references and cannot change the file's structure.
/// An empty variable counts as unset where there is a default. `$${` stands for
/// the text `${`.
pub(super) fn substitute<'a>(
    text: &'a str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Cow<'a, str>, EnvError> {
    if !text.contains("${") {
        return Ok(Cow::Borrowed(text));
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        let (before, reference) = (&rest[..start], &rest[start + 2..]);
        if let Some(before) = before.strip_suffix('$') {
            out.push_str(before);
            out.push_str("${");
            rest = reference;
            continue;
        }
        out.push_str(before);
        let end = reference.find('}').ok_or(EnvError::Open)?;
        let (name, default) = match reference[..end].split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (&reference[..end], None),
        };
        if !is_name(name) {
            return Err(EnvError::Name(name.to_owned()));
        }
        match (env(name), default) {
            (Some(value), Some(default)) if value.is_empty() => out.push_str(default),
            (Some(value), _) => out.push_str(&value),
            (None, Some(default)) => out.push_str(default),
            (None, None) => return Err(EnvError::Unset(name.to_owned())),
        }
        rest = &reference[end + 1..];
    }
    out.push_str(rest);
    Ok(Cow::Owned(out))
}

/// The same value, in which no text would be taken for a reference.
pub(super) fn without_references(value: Value) -> Value {
    let escape = |text: String| text.replace("${", "$${");
    match value {
        Value::String(text) => Value::String(escape(text)),
        Value::Array(list) => list.into_iter().map(without_references).collect(),
        // Keys are never searched for references.
        Value::Object(fields) => {
            fields.into_iter().map(|(key, value)| (key, without_references(value))).collect()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value,
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str) -> Result<String, EnvError> {
        let env = |name: &str| match name {
            "A" => Some("1".to_owned()),
            "NESTED" => Some("${A}".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        substitute(text, &env).map(Cow::into_owned)
    }

    #[test]
    fn references_are_replaced_once() {
        for (text, expected) in [
            ("plain $A {A}", "plain $A {A}"),
            ("${A}/min", "1/min"),
            ("${A}${B:-2}${A}", "121"),
            ("${B:-}", ""),
            ("${EMPTY:-x}", "x"),
            ("${EMPTY}", ""),
            ("${NESTED}", "${A}"),
            ("$${A}", "${A}"),
            ("x${B:-a:-b}", "xa:-b"),
        ] {
            assert_eq!(run(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn what_cannot_be_replaced_is_an_error() {
        assert_eq!(run("${B}"), Err(EnvError::Unset("B".into())));
        assert_eq!(run("a ${A"), Err(EnvError::Open));
        assert_eq!(run("${}"), Err(EnvError::Name(String::new())));
        assert_eq!(run("${A B}"), Err(EnvError::Name("A B".into())));
        assert_eq!(run("${1}"), Err(EnvError::Name("1".into())));
        assert!(run("${B}").unwrap_err().to_string().contains("`${B:-value}`"));
    }
}
