//! TLS of a port: its certificate, and what clients must have.

use std::sync::Arc;

use rustls::crypto::{self, CryptoProvider};
use rustls::server::NoServerSessionStorage;
use rustls::{ALL_VERSIONS, ServerConfig};
use tracing::error;

use super::Serving;
use super::material::{self, Error, What};
use super::verifier::Verifier;
use super::versions::{Content, Versions};

/// What is asked of clients where CAs for them are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// A certificate.
    Required,
    /// A certificate or none. One that is not accepted is refused all the same.
    Asked,
}

/// The side of a port, as the files say at present.
#[derive(Debug)]
pub struct Server {
    files: Serving,
    clients: Clients,
    protocols: &'static [&'static [u8]],
    provider: Arc<CryptoProvider>,
    side: Versions<Side>,
}

#[derive(Debug)]
struct Side {
    config: Arc<ServerConfig>,
    not_after: i64,
}

impl Server {
    /// Reads the files. `protocols` are those of ALPN, the preferred one first.
    ///
    /// # Errors
    /// If one cannot be used. A certificate that has ended can: clients refuse it, but
    /// there is nothing better, and another may come.
    pub fn load(
        files: Serving,
        clients: Clients,
        protocols: &'static [&'static [u8]],
    ) -> Result<Self, Error> {
        let provider = Arc::new(crypto::aws_lc_rs::default_provider());
        let make = |content: &Content<3>| Side::new(&files, clients, protocols, content, &provider);
        let side = Versions::load(read(&files)?, make)?;
        if let Err(fault) = material::check_end(&files.cert, side.current().not_after) {
            error!(reason = %fault, "clients will refuse this certificate");
        }
        Ok(Self { files, clients, protocols, provider, side })
    }

    /// Reads the files again; whether they changed. What they say is used by the
    /// next handshake.
    ///
    /// # Errors
    /// If one cannot be used or the certificate has ended, for as long as that is so;
    /// nothing changed then.
    pub fn refresh(&self) -> Result<bool, Error> {
        let make = |content: &Content<3>| {
            let Self { files, clients, protocols, provider, .. } = self;
            let side = Side::new(files, *clients, protocols, content, provider)?;
            material::check_end(&files.cert, side.not_after)?;
            Ok(side)
        };
        self.side.refresh(read(&self.files)?, make)
    }

    /// For the next handshake.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.side.current().config)
    }

    /// When the certificate ends, in seconds since 1970.
    pub fn not_after(&self) -> i64 {
        self.side.current().not_after
    }
}

/// The own certificate, its key, the CAs of clients.
fn read(files: &Serving) -> Result<Content<3>, Error> {
    Ok([
        material::read(What::Certificate, &files.cert)?,
        material::read(What::Key, &files.key)?,
        match &files.client_ca {
            Some(path) => material::read(What::Ca, path)?,
            None => Vec::new(),
        },
    ])
}

impl Side {
    fn new(
        files: &Serving,
        clients: Clients,
        protocols: &[&[u8]],
        [cert, key, ca]: &Content<3>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, Error> {
        let own = material::own(&files.cert, cert, &files.key, key)?;
        let builder = ServerConfig::builder_with_provider(Arc::clone(provider))
            .with_protocol_versions(ALL_VERSIONS)
            .map_err(|error| Error::new(What::Key, &files.key, error))?;
        let builder = match &files.client_ca {
            Some(path) => {
                let verifier = Verifier::new(path, ca, &files.names, clients, provider)?;
                builder.with_client_cert_verifier(Arc::new(verifier))
            }
            None => builder.with_no_client_auth(),
        };
        let mut config = builder
            .with_single_cert(own.chain, own.key)
            .map_err(|error| material::unusable(&files.cert, &files.key, &error))?;
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        if files.client_ca.is_some() {
            // A session that is taken up again would not be checked by what the files
            // say now.
            config.send_tls13_tickets = 0;
            config.session_storage = Arc::new(NoServerSessionStorage {});
        }
        Ok(Self { config: Arc::new(config), not_after: own.not_after })
    }
}
