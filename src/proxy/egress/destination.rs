//! Where requests can go: an upstream with all that is prepared for it once, for
//! all threads.

use std::io;
use std::sync::Arc;

use http::HeaderValue;

use super::super::config::{self, Upstream, UpstreamHost};
use super::{DEFAULT, UpstreamsConfig};
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
        }))
    }

    /// Prepares the named upstreams.
    ///
    /// # Errors
    /// If no CA can be trusted for the TLS of one, which the error names.
    pub(in super::super) fn named(configs: &UpstreamsConfig) -> io::Result<Vec<Arc<Self>>> {
        let prepare = |(name, config): (&String, &super::UpstreamConfig)| {
            let tls = config
                .url
                .tls(config.ca.as_deref())
                .map_err(|error| io::Error::other(format!("{name}: {error}")))?;
            Ok(Arc::new(Self {
                name: name.clone(),
                upstream: config.url.clone(),
                tls,
                host: host(&config.url),
                replaces_host: config.host == UpstreamHost::Upstream,
            }))
        };
        configs.iter().map(prepare).collect()
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
