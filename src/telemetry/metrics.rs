//! The registry of a process and its two text formats.

use std::fmt;

use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use super::process::ProcessCollector;

/// Prefix of every metric that is the product's own.
const PREFIX: &str = "tidegate";

/// The metrics of a process: its own under `tidegate_`, and those of the
/// operating system under their customary `process_` names.
#[derive(Debug)]
pub struct Metrics {
    own: Registry,
    process: Registry,
}

/// How a scrape is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus text, version 0.0.4.
    Prometheus,
    /// OpenMetrics, version 1.0.0.
    OpenMetrics,
}

impl Metrics {
    /// A registry with `tidegate_build_info` and the process metrics.
    pub fn new() -> Self {
        let mut own = Registry::with_prefix(PREFIX);
        let mut labels = vec![("version", env!("CARGO_PKG_VERSION"))];
        labels.extend(option_env!("TIDEGATE_COMMIT").map(|commit| ("commit", commit)));
        own.register("build", "The build that is running", Info::new(labels));
        let mut process = Registry::default();
        process.register_collector(Box::new(ProcessCollector));
        Self { own, process }
    }

    /// Where the modules register theirs, without the prefix and, for counters,
    /// without `_total`: both are added.
    pub fn registry(&mut self) -> &mut Registry {
        &mut self.own
    }

    /// The present values.
    ///
    /// # Errors
    /// If a metric refuses to be written, which those of this crate never do.
    pub fn encode(&self, format: Format) -> Result<String, fmt::Error> {
        let mut out = String::new();
        for registry in [&self.own, &self.process] {
            match format {
                Format::Prometheus => prometheus_text::encode(&mut out, registry)?,
                Format::OpenMetrics => text::encode_registry(&mut out, registry)?,
            }
        }
        match format {
            Format::Prometheus => {}
            Format::OpenMetrics => text::encode_eof(&mut out)?,
        }
        Ok(out)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Format {
    /// The format for a scrape with this `Accept` field: OpenMetrics if it is
    /// named with a weight above zero and at least that of plain text, which is
    /// how Prometheus asks for it; otherwise the older format, which everything
    /// reads.
    pub fn negotiate(accept: Option<&str>) -> Self {
        let weight = |wanted: &str| {
            let ranges = accept.unwrap_or_default().split(',');
            ranges.filter_map(|range| weight_of(range, wanted)).fold(0.0, f32::max)
        };
        let open = weight("application/openmetrics-text");
        if open > 0.0 && open >= weight("text/plain") {
            Self::OpenMetrics
        } else {
            Self::Prometheus
        }
    }

    /// The `Content-Type` of the answer.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => prometheus_text::CONTENT_TYPE,
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The weight of a media range of an `Accept` field if it names `wanted`. An
/// unreadable weight counts as zero.
fn weight_of(range: &str, wanted: &str) -> Option<f32> {
    let mut parts = range.split(';').map(str::trim);
    let named = parts.next().is_some_and(|name| name.eq_ignore_ascii_case(wanted));
    named.then(|| match parts.find_map(|part| part.strip_prefix("q=")) {
        Some(weight) => weight.parse().unwrap_or(0.0),
        None => 1.0,
    })
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::EncodeLabelSet;
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::family::Family;

    use super::*;

    #[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct Labels {
        limit: String,
    }

    fn sample() -> Metrics {
        let mut metrics = Metrics::new();
        let requests = Family::<Labels, Counter>::default();
        metrics.registry().register("requests", "Requests", requests.clone());
        requests.get_or_create(&Labels { limit: "a\"b\\c\nd".to_owned() }).inc();
        metrics
    }

    #[test]
    fn prometheus_text_has_the_customary_names() {
        let text = sample().encode(Format::Prometheus).unwrap();
        for line in [
            "# TYPE tidegate_requests_total counter\n",
            "# TYPE tidegate_build_info gauge\n",
            "# TYPE process_cpu_seconds_total counter\n",
            "# TYPE process_resident_memory_bytes gauge\n",
            "# TYPE process_open_fds gauge\n",
            "# TYPE process_start_time_seconds gauge\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        let version = env!("CARGO_PKG_VERSION");
        assert!(text.contains(&format!("tidegate_build_info{{version=\"{version}\"")), "{text}");
        assert!(!text.contains("# EOF"));
    }

    #[test]
    fn open_metrics_ends_once() {
        let text = sample().encode(Format::OpenMetrics).unwrap();
        assert!(text.contains("# TYPE tidegate_requests counter\n"), "{text}");
        assert!(text.contains("# TYPE process_cpu_seconds counter\n"), "{text}");
        assert_eq!(text.matches("# EOF\n").count(), 1);
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn ob_g2_a_label_with_quotes_and_newlines_stays_one_line() {
        for format in [Format::Prometheus, Format::OpenMetrics] {
            let text = sample().encode(format).unwrap();
            let line = r#"tidegate_requests_total{limit="a\"b\\c\nd"} 1"#;
            assert!(text.lines().any(|candidate| candidate == line), "{text}");
        }
    }

    #[test]
    fn the_format_follows_the_accept_field() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.6,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (accept, format) in [
            (Some(prometheus), Format::OpenMetrics),
            (Some("application/openmetrics-text; version=1.0.0"), Format::OpenMetrics),
            (
                Some("text/plain;version=0.0.4;q=0.9, application/openmetrics-text;q=0.2"),
                Format::Prometheus,
            ),
            (Some("application/openmetrics-text;q=0"), Format::Prometheus),
            (Some("application/openmetrics-text;q=x"), Format::Prometheus),
            (Some("*/*"), Format::Prometheus),
            (None, Format::Prometheus),
        ] {
            assert_eq!(Format::negotiate(accept), format, "{accept:?}");
        }
    }
}
