//! Credentials that requests get when they are sent: clients need not know them.
//!
//! A value comes from the environment or from a file, never from the configuration
//! itself, so that the configuration can be shown. A file is followed; one that
//! cannot be used changes nothing.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use arc_swap::ArcSwap;
use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::settings::Fault;

/// More than that is no credential.
const MAX_BYTES: u64 = 16 * 1024;

/// Where the value of a header comes from: `{ env: NAME }` or `{ file: PATH }`, and
/// what stands in front of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InjectConfig {
    #[serde(flatten)]
    written: Written,
    /// What the environment says.
    #[serde(skip)]
    value: Option<HeaderValue>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Inject")]
struct Written {
    /// The environment variable that holds it, read at the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("examples" = ["ACME_TOKEN"]))]
    env: Option<String>,
    /// The file that holds it, followed when it changes; blanks around it do not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("examples" = ["/etc/tidegate/acme-token"]))]
    file: Option<PathBuf>,
    /// What stands in front of it, such as `"Bearer "`; no secret. Default: nothing.
    #[serde(default)]
    #[schemars(extend("examples" = ["Bearer "]))]
    prefix: String,
}

impl<'de> Deserialize<'de> for InjectConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl<'de> Visitor<'de> for Form {
            type Value = Written;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("{ env: NAME } or { file: PATH }")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Written, A::Error> {
                Written::deserialize(MapAccessDeserializer::new(map))
            }

            // Errors are logged, and this may well be a secret.
            fn visit_str<E: de::Error>(self, _: &str) -> Result<Written, E> {
                Err(E::custom("a value is not written here: write { env: NAME } or { file: PATH }"))
            }
        }
        let written = deserializer.deserialize_any(Form)?;
        Ok(Self { written, value: None })
    }
}

impl JsonSchema for InjectConfig {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        Written::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        Written::json_schema(generator)
    }
}

impl InjectConfig {
    /// Takes the value from the environment, if it is to come from there. What is
    /// wrong with that, or with the header called `name`.
    pub fn resolve(&mut self, name: &str, env: &dyn Fn(&str) -> Option<String>) -> Vec<Fault> {
        let mut faults = Vec::new();
        match HeaderName::from_bytes(name.as_bytes()) {
            Err(_) => faults.push(Fault::new([], format!("`{name}` is not a header name"))),
            Ok(header) if is_framing(&header) => {
                let message = format!("`{name}` is the proxy's own to set");
                faults.push(Fault::new([], message));
            }
            Ok(_) => {}
        }
        let Written { env: variable, file, prefix } = &self.written;
        if !is_value(prefix) {
            faults.push(Fault::new(["prefix".into()], "cannot stand in a header"));
            return faults;
        }
        match (variable, file) {
            (Some(variable), None) => match env(variable) {
                None => {
                    let message = format!("the environment variable `{variable}` is not set");
                    faults.push(Fault::new(["env".into()], message));
                }
                Some(text) => match value(prefix, &text) {
                    Ok(value) => self.value = Some(value),
                    Err(reason) => {
                        let message = format!("the environment variable `{variable}` {reason}");
                        faults.push(Fault::new(["env".into()], message));
                    }
                },
            },
            (None, Some(_)) => {}
            (Some(_), Some(_)) => faults.push(Fault::new(["file".into()], "excludes `env`")),
            (None, None) => faults.push(Fault::new([], "needs `env` or `file`")),
        }
        faults
    }
}

/// One header and its present value.
#[derive(Debug)]
pub(in super::super) struct Credential {
    /// The header.
    pub(in super::super) name: HeaderName,
    prefix: String,
    /// None: it came from the environment.
    file: Option<PathBuf>,
    current: ArcSwap<HeaderValue>,
}

/// A file that holds no credential, and why. The content is not repeated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub(in super::super) struct CredentialError {
    path: PathBuf,
    reason: String,
}

impl Credential {
    /// The value that `config` names, for the header called `name`.
    ///
    /// # Errors
    /// If there is none.
    pub(in super::super) fn load(
        name: &str,
        config: &InjectConfig,
    ) -> Result<Self, CredentialError> {
        let Written { file, prefix, .. } = &config.written;
        let fault = |reason: &str| {
            let path = file.clone().unwrap_or_default();
            CredentialError { path, reason: reason.to_owned() }
        };
        let name = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| fault("the header's name is none"))?;
        let value = match (file, &config.value) {
            (Some(path), _) => read(prefix, path)?,
            (None, Some(value)) => value.clone(),
            (None, None) => return Err(fault("the environment does not hold it")),
        };
        let current = ArcSwap::from_pointee(value);
        Ok(Self { name, prefix: prefix.clone(), file: file.clone(), current })
    }

    /// Whether it comes from a file, which may change.
    pub(in super::super) const fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// Reads the file again, if there is one; whether it has another value, which
    /// counts from now on.
    ///
    /// # Errors
    /// If it has none; the old one stays.
    pub(in super::super) fn refresh(&self) -> Result<bool, CredentialError> {
        let Some(path) = &self.file else { return Ok(false) };
        let value = read(&self.prefix, path)?;
        let is_new = value != **self.current.load();
        if is_new {
            self.current.store(value.into());
        }
        Ok(is_new)
    }

    /// Puts it into `headers`, in place of what stands there under its name.
    pub(in super::super) fn insert(&self, headers: &mut HeaderMap) {
        headers.insert(&self.name, HeaderValue::clone(&self.current.load()));
    }
}

/// # Errors
/// If the file holds no value.
fn read(prefix: &str, path: &Path) -> Result<HeaderValue, CredentialError> {
    let fault = |reason: String| CredentialError { path: path.to_owned(), reason };
    let mut text = String::new();
    let file = File::open(path).map_err(|error| fault(error.to_string()))?;
    let read = file.take(MAX_BYTES + 1).read_to_string(&mut text);
    match read {
        Ok(length) if length as u64 <= MAX_BYTES => {}
        Ok(_) => return Err(fault(format!("it is larger than {MAX_BYTES} bytes"))),
        Err(error) => return Err(fault(error.to_string())),
    }
    value(prefix, &text).map_err(|reason| fault(format!("it {reason}")))
}

/// # Errors
/// What is wrong with `text`, which is not repeated.
fn value(prefix: &str, text: &str) -> Result<HeaderValue, &'static str> {
    let text = text.trim();
    if text.is_empty() {
        return Err("is empty");
    }
    if !is_value(text) {
        return Err("holds what cannot stand in a header");
    }
    let mut value = HeaderValue::try_from(format!("{prefix}{text}"))
        .map_err(|_| "holds what cannot stand in a header")?;
    value.set_sensitive(true);
    Ok(value)
}

fn is_value(text: &str) -> bool {
    text.bytes().all(|b| (b' '..0x7f).contains(&b))
}

/// What says where a message goes and where it ends.
fn is_framing(name: &HeaderName) -> bool {
    [CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE]
        .contains(name)
        || matches!(name.as_str(), "keep-alive" | "proxy-connection" | "http2-settings")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(json: serde_json::Value) -> InjectConfig {
        serde_json::from_value(json).unwrap()
    }

    fn env(name: &str) -> Option<String> {
        match name {
            "TOKEN" => Some("s3cr3t".to_owned()),
            "EMPTY" => Some(" ".to_owned()),
            "LINES" => Some("a\r\nb".to_owned()),
            _ => None,
        }
    }

    #[test]
    fn a_value_comes_from_the_environment_and_is_never_shown() {
        let mut inject = config(serde_json::json!({ "env": "TOKEN", "prefix": "Bearer " }));
        assert_eq!(inject.resolve("Authorization", &env), []);
        let credential = Credential::load("Authorization", &inject).unwrap();
        let mut headers = HeaderMap::new();
        headers.append("authorization", HeaderValue::from_static("one"));
        headers.append("authorization", HeaderValue::from_static("two"));
        credential.insert(&mut headers);
        let sent: Vec<_> = headers.get_all("authorization").iter().collect();
        assert_eq!(sent, ["Bearer s3cr3t"]);
        let shown = format!(
            "{inject:?} {credential:?} {headers:?} {}",
            serde_json::to_string(&inject).unwrap()
        );
        assert!(!shown.contains("s3cr3t"), "{shown}");
    }

    #[test]
    fn what_cannot_be_a_credential_is_a_fault_that_does_not_repeat_it() {
        for (json, name, wanted) in [
            (serde_json::json!({ "env": "NONE" }), "x-key", "`NONE` is not set"),
            (serde_json::json!({ "env": "EMPTY" }), "x-key", "is empty"),
            (serde_json::json!({ "env": "LINES" }), "x-key", "cannot stand in a header"),
            (serde_json::json!({ "env": "TOKEN", "prefix": "a\n" }), "x-key", "cannot stand"),
            (serde_json::json!({ "env": "TOKEN", "file": "x" }), "x-key", "excludes"),
            (serde_json::json!({}), "x-key", "needs"),
            (serde_json::json!({ "env": "TOKEN" }), "x key", "not a header name"),
            (serde_json::json!({ "env": "TOKEN" }), "Content-Length", "the proxy's own"),
        ] {
            let faults = config(json.clone()).resolve(name, &env);
            assert_eq!(faults.len(), 1, "{json}: {faults:?}");
            assert!(faults[0].message.contains(wanted), "{json}: {faults:?}");
        }
        let error = serde_json::from_value::<InjectConfig>(serde_json::json!("s3cr3t"));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("{ env: NAME }") && !error.contains("s3cr3t"), "{error}");
    }

    #[test]
    fn a_file_is_followed_and_one_without_a_value_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let inject = config(serde_json::json!({ "file": path, "prefix": "Key " }));
        assert!(Credential::load("x-key", &inject).is_err());
        std::fs::write(&path, "one\n").unwrap();
        let credential = Credential::load("x-key", &inject).unwrap();
        let sent = || {
            let mut headers = HeaderMap::new();
            credential.insert(&mut headers);
            headers["x-key"].to_str().unwrap().to_owned()
        };
        assert_eq!((credential.refresh(), sent()), (Ok(false), "Key one".to_owned()));
        std::fs::write(&path, " two ").unwrap();
        assert_eq!((credential.refresh(), sent()), (Ok(true), "Key two".to_owned()));
        let long = "x".repeat(MAX_BYTES as usize + 1);
        for bad in ["", "\n", "a\nb", "\u{e4}", &long] {
            std::fs::write(&path, bad).unwrap();
            let error = credential.refresh().unwrap_err();
            assert!(error.to_string().starts_with(&path.display().to_string()), "{error}");
            assert_eq!(sent(), "Key two");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(credential.refresh().is_err());
    }
}
