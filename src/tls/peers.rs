//! Mutual TLS between replicas.

use std::sync::Arc;

use rustls::crypto::{self, CryptoProvider};
use rustls::{ClientConfig, ServerConfig};
use tracing::error;

use super::material::{self, Error, What};
use super::verifier::Verifier;
use super::versions::{Content, Versions};
use super::{Clients, Mutual};

/// What is spoken over TLS: HTTP/2.
const PROTOCOL: &[u8] = b"h2";

/// Both sides of mutual TLS, as the files say at present.
#[derive(Debug)]
pub struct Peers {
    files: Mutual,
    provider: Arc<CryptoProvider>,
    sides: Versions<Sides>,
}

#[derive(Debug)]
struct Sides {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    not_after: i64,
}

impl Peers {
    /// Reads the files.
    ///
    /// # Errors
    /// If one cannot be used. A certificate that has ended can, as there is nothing
    /// better, though peers refuse it.
    pub fn load(files: Mutual) -> Result<Self, Error> {
        let provider = Arc::new(crypto::aws_lc_rs::default_provider());
        let sides =
            Versions::load(read(&files)?, |content| Sides::new(&files, content, &provider))?;
        if let Err(fault) = material::check_end(&files.cert, sides.current().not_after) {
            error!(reason = %fault, "peers will refuse this certificate");
        }
        Ok(Self { files, provider, sides })
    }

    /// Reads the files again; whether they changed. What they say is used by the
    /// next handshake.
    ///
    /// # Errors
    /// If one cannot be used or the certificate has ended, for as long as that is so;
    /// nothing changed then.
    pub fn refresh(&self) -> Result<bool, Error> {
        let make = |content: &Content<3>| {
            let sides = Sides::new(&self.files, content, &self.provider)?;
            material::check_end(&self.files.cert, sides.not_after)?;
            Ok(sides)
        };
        self.sides.refresh(read(&self.files)?, make)
    }

    /// For who is dialled.
    pub fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.sides.current().server)
    }

    /// For who dials.
    pub fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.sides.current().client)
    }

    /// When the own certificate ends, in seconds since 1970.
    pub fn not_after(&self) -> i64 {
        self.sides.current().not_after
    }
}

/// The own certificate, its key, the CAs.
fn read(files: &Mutual) -> Result<Content<3>, Error> {
    Ok([
        material::read(What::Certificate, &files.cert)?,
        material::read(What::Key, &files.key)?,
        material::read(What::Ca, &files.ca)?,
    ])
}

impl Sides {
    fn new(
        files: &Mutual,
        [cert, key, ca]: &Content<3>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, Error> {
        let own = material::own(&files.cert, cert, &files.key, key)?;
        let (chain, key) = (own.chain, own.key);
        let unusable = |error| material::unusable(&files.cert, &files.key, &error);
        let verifier = Verifier::new(&files.ca, ca, &files.names, Clients::Required, provider)?;
        let verifier = Arc::new(verifier);
        let versions = rustls::ALL_VERSIONS;
        let mut server = ServerConfig::builder_with_provider(Arc::clone(provider))
            .with_protocol_versions(versions)
            .map_err(unusable)?
            .with_client_cert_verifier(Arc::clone(&verifier) as _)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(unusable)?;
        let mut client = ClientConfig::builder_with_provider(Arc::clone(provider))
            .with_protocol_versions(versions)
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(chain, key)
            .map_err(unusable)?;
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        // A session that is taken up again would not be checked by what the files say
        // now.
        server.send_tls13_tickets = 0;
        server.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        client.resumption = rustls::client::Resumption::disabled();
        let not_after = own.not_after;
        Ok(Self { server: Arc::new(server), client: Arc::new(client), not_after })
    }
}
