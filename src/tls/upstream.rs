//! TLS to the upstream.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore, crypto};

use super::material::{self, Error, What};
use super::versions::{Content, Versions};

/// What a connection to an upstream over TLS begins with.
#[derive(Debug)]
pub struct Upstream {
    /// Whose certificate it must have.
    name: ServerName<'static>,
    /// The file with the CAs; those of the system are read once.
    ca: Option<PathBuf>,
    protocols: Versions<Protocols>,
}

/// What is offered to the upstream, by what is to be spoken.
#[derive(Debug)]
struct Protocols {
    http1: Arc<ClientConfig>,
    http2: Arc<ClientConfig>,
}

impl Upstream {
    /// TLS to `host`, a name or an IP address, whose certificate a CA of `ca` signed,
    /// or else one that the system trusts.
    ///
    /// # Errors
    /// If there is no CA to be trusted, or the host cannot have a certificate.
    pub fn load(host: &str, ca: Option<&Path>) -> Result<Self, Error> {
        let name = ServerName::try_from(host.to_owned()).map_err(|error| unusable(ca, error))?;
        let protocols = match ca {
            Some(path) => Versions::load(read(path)?, |content| Protocols::of_file(path, content)),
            None => Versions::load([], |[]| Protocols::new(system_roots()?, None)),
        }?;
        Ok(Self { name, ca: ca.map(Path::to_owned), protocols })
    }

    /// Whether its CAs are in a file, which may change.
    pub fn has_file(&self) -> bool {
        self.ca.is_some()
    }

    /// Reads the file again, if there is one; whether it changed. What it says is
    /// used by the next handshake.
    ///
    /// # Errors
    /// If it cannot be used, for as long as that is so; nothing changed then.
    pub fn refresh(&self) -> Result<bool, Error> {
        let Some(path) = &self.ca else { return Ok(false) };
        self.protocols.refresh(read(path)?, |content| Protocols::of_file(path, content))
    }

    /// For HTTP/1.1.
    pub fn http1(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.protocols.current().http1)
    }

    /// For HTTP/2.
    pub fn http2(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.protocols.current().http2)
    }

    /// Whose certificate it must have.
    pub fn name(&self) -> ServerName<'static> {
        self.name.clone()
    }
}

impl Protocols {
    fn of_file(path: &Path, [ca]: &Content<1>) -> Result<Self, Error> {
        Self::new(material::roots(path, ca)?, Some(path))
    }

    fn new(roots: RootCertStore, ca: Option<&Path>) -> Result<Self, Error> {
        let provider = Arc::new(crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(ca, error))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let speaking = |protocol: &[u8]| {
            let mut config = config.clone();
            config.alpn_protocols = vec![protocol.to_vec()];
            Arc::new(config)
        };
        Ok(Self { http1: speaking(b"http/1.1"), http2: speaking(b"h2") })
    }
}

fn read(path: &Path) -> Result<Content<1>, Error> {
    Ok([material::read(What::Ca, path)?])
}

fn unusable(ca: Option<&Path>, reason: impl std::fmt::Display) -> Error {
    Error::new(What::Ca, ca.unwrap_or(Path::new("of the system")), reason)
}

/// The CAs of a file, or those that the system trusts.
pub(super) fn trusted_roots(ca: Option<&Path>) -> Result<RootCertStore, Error> {
    match ca {
        Some(path) => material::roots(path, &material::read(What::Ca, path)?),
        None => system_roots(),
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
    Err(Error::new(What::Ca, path, format_args!("{why}; name a file instead")))
}
