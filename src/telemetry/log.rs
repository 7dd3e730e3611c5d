//! The log: structured lines on standard error, so that standard output carries
//! data only.
//!
//! What is logged can be changed while the process runs. Lines of the access log
//! have the target [`ACCESS`]: whoever switches it on wants to see it, so that
//! they pass every filter that does not name them.

use std::fmt;
use std::io::{self, IsTerminal as _};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::{SubscriberInitExt as _, TryInitError};
use tracing_subscriber::{EnvFilter, Registry, fmt as lines, reload};

/// What is logged when nobody says otherwise.
const DEFAULT_FILTER: &str = "info";

/// The target of the access log's lines.
pub const ACCESS: &str = "access";

/// How a line is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object each, with the event's fields at the top.
    Json,
}

/// Changes what is logged. Cheap to clone.
#[derive(Clone)]
pub struct Control {
    handle: reload::Handle<EnvFilter, Registry>,
    text: Arc<Mutex<String>>,
}

/// Why there is no log, or no other one. Nothing was changed.
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
    /// The log has ended.
    #[error("the log has ended: {0}")]
    Ended(#[from] reload::Error),
    /// The process has a log already.
    #[error("the log is already set up: {0}")]
    Taken(#[from] TryInitError),
}

/// Starts the log of this process. `filter` is a list of directives such as
/// `info` or `warn,tidegate::peer=debug`.
///
/// # Errors
/// [`Error::Filter`] if it cannot be read, [`Error::Taken`] on a second call.
pub fn init(format: LogFormat, filter: Option<&str>) -> Result<Control, Error> {
    let ansi = io::stderr().is_terminal();
    let (subscriber, control) = subscriber(format, filter, ansi, io::stderr)?;
    subscriber.try_init()?;
    Ok(control)
}

impl Control {
    /// Logs what `filter` says from now on; returns the filter until now.
    ///
    /// # Errors
    /// [`Error::Filter`] if it cannot be read, [`Error::Ended`] if nothing is
    /// logged any more.
    pub fn set(&self, filter: &str) -> Result<String, Error> {
        let parsed = parse(filter)?;
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        self.handle.reload(parsed)?;
        Ok(std::mem::replace(&mut text, filter.to_owned()))
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").field("filter", &self.text).finish_non_exhaustive()
    }
}

fn parse(text: &str) -> Result<EnvFilter, Error> {
    let names_access = text
        .split(',')
        .any(|directive| directive.split(['=', '[', ':']).next().unwrap_or("").trim() == ACCESS);
    let whole = if names_access { text.to_owned() } else { format!("{text},{ACCESS}=info") };
    EnvFilter::try_new(whole).map_err(|source| Error::Filter { filter: text.to_owned(), source })
}

fn subscriber<W>(
    format: LogFormat,
    filter: Option<&str>,
    ansi: bool,
    writer: W,
) -> Result<(Box<dyn tracing::Subscriber + Send + Sync>, Control), Error>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let text = filter.unwrap_or(DEFAULT_FILTER);
    let (filter, handle) = reload::Layer::new(parse(text)?);
    let control = Control { handle, text: Arc::new(Mutex::new(text.to_owned())) };
    let lines = lines::layer().with_writer(writer);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(ansi).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_ansi(false).boxed(),
    };
    let subscriber = tracing_subscriber::registry().with(filter).with(lines);
    Ok((Box::new(subscriber), control))
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
        let (log, _) = subscriber(format, filter, false, move || writer.clone()).unwrap();
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
    fn what_is_logged_changes_at_once_and_a_bad_filter_changes_nothing() {
        let sink = Sink::default();
        let writer = sink.clone();
        let (log, control) =
            subscriber(LogFormat::Text, None, false, move || writer.clone()).unwrap();
        tracing::subscriber::with_default(log, || {
            tracing::debug!("one");
            assert_eq!(control.set("debug").unwrap(), "info");
            tracing::debug!("two");
            assert!(matches!(control.set("tidegate=loud"), Err(Error::Filter { .. })));
            tracing::debug!("three");
            assert_eq!(control.set("off").unwrap(), "debug");
            tracing::error!("four");
        });
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        let said = |word| text.lines().any(|line| line.ends_with(word));
        assert_eq!(["one", "two", "three", "four"].map(said), [false, true, true, false], "{text}");
        assert!(control.set("info").is_err(), "the log has ended");
    }

    #[test]
    fn the_access_log_passes_every_filter_that_does_not_name_it() {
        let passes = |filter| {
            let sink = Sink::default();
            let writer = sink.clone();
            let (log, _) =
                subscriber(LogFormat::Json, Some(filter), false, move || writer.clone()).unwrap();
            tracing::subscriber::with_default(log, || tracing::info!(target: ACCESS, "line"));
            !sink.0.lock().unwrap().is_empty()
        };
        assert!(passes("warn") && passes("off") && passes("tidegate::peer=debug"));
        assert!(!passes("info,access=off"));
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
