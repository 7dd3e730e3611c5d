//! The log: structured lines on standard error, so that standard output carries
//! data only.

use std::fmt;
use std::io::{self, IsTerminal as _};
use std::str::FromStr;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::util::{SubscriberInitExt as _, TryInitError};

/// What is logged when nobody says otherwise.
const DEFAULT_FILTER: &str = "info";

/// How a line is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object each, with the event's fields at the top.
    Json,
}

/// Why there is no log. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The filter is no list of `target=level` directives.
    #[error("bad log filter `{filter}`: {source}")]
    Filter {
        /// The filter as given.
        filter: String,
        /// What is wrong with it.
        source: ParseError,
    },
    /// The process has a log already.
    #[error("the log is already set up: {0}")]
    Taken(#[from] TryInitError),
}

/// Starts the log of this process. `filter` is a list of directives such as
/// `info` or `warn,tidegate::peer=debug`.
///
/// # Errors
/// [`Error::Filter`] if it cannot be read, [`Error::Taken`] on a second call.
pub fn init(format: LogFormat, filter: Option<&str>) -> Result<(), Error> {
    let ansi = io::stderr().is_terminal();
    subscriber(format, filter, ansi, io::stderr)?.try_init()?;
    Ok(())
}

fn subscriber<W>(
    format: LogFormat,
    filter: Option<&str>,
    ansi: bool,
    writer: W,
) -> Result<Box<dyn tracing::Subscriber + Send + Sync>, Error>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let text = filter.unwrap_or(DEFAULT_FILTER);
    let filter = EnvFilter::try_new(text)
        .map_err(|source| Error::Filter { filter: text.to_owned(), source })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    Ok(match format {
        LogFormat::Text => Box::new(builder.with_ansi(ansi).finish()),
        LogFormat::Json => Box::new(builder.json().flatten_event(true).with_ansi(false).finish()),
    })
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("`{other}` is neither `text` nor `json`")),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: LogFormat, filter: Option<&str>) -> String {
        let sink = Sink::default();
        let writer = sink.clone();
        let log = subscriber(format, filter, false, move || writer.clone()).unwrap();
        tracing::subscriber::with_default(log, || {
            tracing::info!(listener = "proxy", port = 8080, "bound");
            tracing::debug!("detail");
        });
        String::from_utf8(sink.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn json_lines_have_the_fields_at_the_top() {
        let text = logged(LogFormat::Json, None);
        assert_eq!(text.lines().count(), 1, "debug is off by default: {text}");
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["message"], "bound");
        assert_eq!(line["listener"], "proxy");
        assert_eq!(line["port"], 8080);
        assert_eq!(line["level"], "INFO");
    }

    #[test]
    fn text_lines_carry_no_escapes_unless_for_a_terminal() {
        let text = logged(LogFormat::Text, Some("debug"));
        assert!(text.contains("bound") && text.contains("detail"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn a_bad_filter_is_named() {
        let error = init(LogFormat::Text, Some("tidegate=loud")).unwrap_err();
        assert!(error.to_string().starts_with("bad log filter `tidegate=loud`"), "{error}");
    }

    #[test]
    fn the_format_has_two_names() {
        for name in ["text", "json"] {
            assert_eq!(name.parse::<LogFormat>().unwrap().to_string(), name);
        }
        assert!("xml".parse::<LogFormat>().is_err());
    }
}
