//! Where requests can go: an upstream with all that is prepared for it once, for
//! all threads.

use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use prometheus_client::metrics::counter::Counter;

use super::super::config::{self, Upstream, UpstreamHost};
use super::super::metrics::Metrics;
use super::{
    Credential, DEFAULT, Feedback, FeedbackConfig, Gate, InjectConfig, RefusingStatus,
    UpstreamsConfig,
};
use crate::time::wall_clock;
use crate::tls;

/// An upstream, ready to be connected to.
#[derive(Debug)]
pub(in super::super) struct Destination {
    /// What routes and metrics call it.
    pub(in super::super) name: String,
    pub(in super::super) upstream: Upstream,
    pub(in super::super) tls: Option<tls::Upstream>,
    /// What stands in `Host` when a client of HTTP/1.0 sent none, or always.
    pub(in super::super) host: HeaderValue,
    pub(in super::super) replaces_host: bool,
    /// What its requests get when they are sent.
    pub(in super::super) credentials: Vec<Credential>,
    /// Lets so many requests be on their way to it.
    pub(in super::super) gate: Option<Arc<Gate>>,
    /// How often it refused a request because it had too many.
    pub(in super::super) refusals: Counter,
    /// How its word is taken; `None`: it is not listened to.
    pub(in super::super) hearing: Option<Hearing>,
}

/// How an upstream's word is taken.
#[derive(Debug)]
pub(in super::super) struct Hearing {
    pause_on: Vec<RefusingStatus>,
    config: FeedbackConfig,
}

impl Hearing {
    /// What the head of an answer says.
    pub(in super::super) fn read(&self, status: StatusCode, headers: &HeaderMap) -> Feedback {
        let now = wall_clock();
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // Nanoseconds of a clock are as good as chance.
        let jitter = since.subsec_nanos() % 1000;
        Feedback::read(status, headers, &self.pause_on, &self.config, now, jitter)
    }
}

/// A file that an upstream needs and that may change.
#[derive(Clone, Debug)]
pub(in super::super) struct Followed {
    to: Arc<Destination>,
    /// The index of the credential; `None`: the CAs.
    credential: Option<usize>,
}

/// All of them.
#[derive(Clone, Debug)]
pub(in super::super) struct Destinations {
    /// For requests without a route.
    pub(in super::super) default: Option<Arc<Destination>>,
    /// The others, in the order of their names.
    pub(in super::super) named: Vec<Arc<Destination>>,
}

impl Destination {
    /// Prepares the upstream of requests without a route.
    ///
    /// # Errors
    /// If no CA can be trusted for TLS.
    pub(in super::super) fn default(config: &config::Config) -> io::Result<Option<Self>> {
        let Some(upstream) = config.upstream.clone() else { return Ok(None) };
        let replaces_host = config.upstream_host == UpstreamHost::Upstream;
        let tls = upstream.tls(config.upstream_ca.as_deref()).map_err(io::Error::other)?;
        Ok(Some(Self {
            name: DEFAULT.to_owned(),
            host: host(&upstream),
            upstream,
            tls,
            replaces_host,
            credentials: Vec::new(),
            gate: None,
            refusals: Counter::default(),
            hearing: None,
        }))
    }

    /// Prepares the named upstreams.
    ///
    /// # Errors
    /// If no CA can be trusted for the TLS of one, or a file has no credential; the
    /// error names the setting.
    pub(in super::super) fn named(
        configs: &UpstreamsConfig,
        metrics: &Metrics,
    ) -> io::Result<Vec<Arc<Self>>> {
        let prepare = |(name, config): (&String, &super::UpstreamConfig)| {
            let tls = config
                .url
                .tls(config.ca.as_deref())
                .map_err(|error| io::Error::other(format!("{name}.ca: {error}")))?;
            let load = |(header, inject): (&String, &InjectConfig)| {
                Credential::load(header, inject)
                    .map_err(|error| io::Error::other(format!("{name}.inject.{header}: {error}")))
            };
            let credentials = config.inject.iter().map(load).collect::<io::Result<_>>()?;
            Ok(Arc::new(Self {
                name: name.clone(),
                upstream: config.url.clone(),
                tls,
                host: host(&config.url),
                replaces_host: config.host == UpstreamHost::Upstream,
                credentials,
                gate: Some(Arc::new(Gate::new(
                    config.max_in_flight.map_or(usize::MAX, |most| most.0),
                    metrics.in_flight(name),
                ))),
                refusals: metrics.refusals(name),
                hearing: Some(Hearing {
                    pause_on: config.pause_on.clone(),
                    config: config.feedback,
                }),
            }))
        };
        configs.iter().map(prepare).collect()
    }
}

impl Destinations {
    pub(in super::super) fn all(&self) -> impl Iterator<Item = &Arc<Destination>> {
        self.default.iter().chain(&self.named)
    }

    /// The files that may change.
    pub(in super::super) fn followed(&self) -> Vec<Followed> {
        let of = |to: &Arc<Destination>| {
            let ca = to.tls.as_ref().is_some_and(tls::Upstream::has_file).then_some(None);
            let indices = 0..to.credentials.len();
            let secrets = indices.filter(|index| to.credentials[*index].has_file()).map(Some);
            let files: Vec<Option<usize>> = ca.into_iter().chain(secrets).collect();
            let to = Arc::clone(to);
            files.into_iter().map(move |credential| Followed { to: Arc::clone(&to), credential })
        };
        self.all().flat_map(of).collect()
    }

    /// Whether requests to any of them get a header of this name.
    pub(in super::super) fn inject(&self, name: &HeaderName) -> bool {
        self.all().flat_map(|to| &to.credentials).any(|credential| credential.name == *name)
    }
}

impl Followed {
    /// What the file is, for logs.
    pub(in super::super) fn what(&self) -> String {
        let upstream = &self.to.name;
        match self.credential.and_then(|index| self.to.credentials.get(index)) {
            Some(credential) => format!("upstream {upstream}: {}", credential.name),
            None => format!("upstream {upstream}: CAs"),
        }
    }

    /// Whether it is a credential.
    pub(in super::super) const fn is_credential(&self) -> bool {
        self.credential.is_some()
    }

    /// Reads the file again; whether it changed.
    ///
    /// # Errors
    /// If it cannot be used, in words; what it said before stays.
    pub(in super::super) fn refresh(&self) -> Result<bool, String> {
        match self.credential.and_then(|index| self.to.credentials.get(index)) {
            Some(credential) => credential.refresh().map_err(|error| error.to_string()),
            None => {
                let tls = self.to.tls.as_ref();
                tls.map_or(Ok(false), tls::Upstream::refresh).map_err(|error| error.to_string())
            }
        }
    }
}

fn host(upstream: &Upstream) -> HeaderValue {
    match upstream {
        Upstream::Http { authority } => host_field(authority, ":80"),
        Upstream::Https { authority } => host_field(authority, ":443"),
        Upstream::Unix(_) => HeaderValue::from_static("localhost"),
    }
}

/// An authority as `Host` has it, without the scheme's own port.
fn host_field(authority: &str, usual_port: &str) -> HeaderValue {
    let host = authority.strip_suffix(usual_port).unwrap_or(authority);
    HeaderValue::from_str(host).unwrap_or(HeaderValue::from_static("localhost"))
}
