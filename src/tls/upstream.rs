//! TLS to the upstream.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore, crypto};

use super::material::{self, Error, What};

/// What a connection to the upstream over TLS begins with.
#[derive(Clone, Debug)]
pub struct Upstream {
    /// For HTTP/1.1.
    pub http1: Arc<ClientConfig>,
    /// For HTTP/2.
    pub http2: Arc<ClientConfig>,
    /// Whose certificate it must have.
    pub name: ServerName<'static>,
}

impl Upstream {
    /// TLS to `host`, a name or an IP address, whose certificate a CA of `ca` signed,
    /// or else one that the system trusts.
    ///
    /// # Errors
    /// If there is no CA to be trusted, or the host cannot have a certificate.
    pub fn load(host: &str, ca: Option<&Path>) -> Result<Self, Error> {
        let roots = match ca {
            Some(path) => material::roots(path, &material::read(What::Ca, path)?)?,
            None => system_roots()?,
        };
        let provider = Arc::new(crypto::aws_lc_rs::default_provider());
        let unusable = |reason: &dyn std::fmt::Display| {
            Error::new(What::Ca, ca.unwrap_or(Path::new("of the system")), reason)
        };
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(&error))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let speaking = |protocol: &[u8]| {
            let mut config = config.clone();
            config.alpn_protocols = vec![protocol.to_vec()];
            Arc::new(config)
        };
        let name = ServerName::try_from(host.to_owned()).map_err(|error| unusable(&error))?;
        Ok(Self { http1: speaking(b"http/1.1"), http2: speaking(b"h2"), name })
    }
}

fn system_roots() -> Result<RootCertStore, Error> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // A store may have certificates that nobody can use; the others count.
    roots.add_parsable_certificates(found.certs);
    if !roots.is_empty() {
        return Ok(roots);
    }
    let reasons: Vec<String> = found.errors.iter().map(ToString::to_string).collect();
    let why = if reasons.is_empty() { "there are none".to_owned() } else { reasons.join("; ") };
    let path = Path::new("of the system");
    Err(Error::new(What::Ca, path, format_args!("{why}; `upstream_ca` can name a file instead")))
}
