//! TLS to a server that is known by its name.

use std::path::Path;
use std::sync::Arc;

use rustls::{ClientConfig, crypto};

use super::material::{self, Error, What};
use super::upstream::trusted_roots;

/// What a client shows of itself: the file of its certificate and that of its key.
#[derive(Clone, Copy, Debug)]
pub struct ClientIdentity<'a> {
    /// The certificate and those between it and the CA, PEM.
    pub cert: &'a Path,
    /// Its private key, PEM.
    pub key: &'a Path,
}

/// TLS for HTTP/2 to a server whose certificate a CA of the file `ca` signed, or else
/// one that the system trusts.
///
/// # Errors
/// If a file cannot be used, or there is no CA to be trusted.
pub fn client(
    ca: Option<&Path>,
    identity: Option<ClientIdentity<'_>>,
) -> Result<Arc<ClientConfig>, Error> {
    let provider = Arc::new(crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::new(What::Ca, ca.unwrap_or(Path::new("of the system")), error))?
        .with_root_certificates(trusted_roots(ca)?);
    let mut config = match identity {
        Some(ClientIdentity { cert, key }) => {
            let certificate = material::read(What::Certificate, cert)?;
            let own = material::own(cert, &certificate, key, &material::read(What::Key, key)?)?;
            builder
                .with_client_auth_cert(own.chain, own.key)
                .map_err(|error| material::unusable(cert, key, &error))?
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}
