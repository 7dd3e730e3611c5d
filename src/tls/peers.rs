//! Mutual TLS between replicas.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{self, CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, OtherError,
    RootCertStore, ServerConfig, SignatureScheme,
};

use super::material::{self, Error, What};
use super::versions::{Content, Versions};
use super::{Mutual, NamePattern};

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
    /// If one cannot be used.
    pub fn load(files: Mutual) -> Result<Self, Error> {
        let provider = Arc::new(crypto::aws_lc_rs::default_provider());
        let sides =
            Versions::load(read(&files)?, |content| Sides::new(&files, content, &provider))?;
        Ok(Self { files, provider, sides })
    }

    /// Reads the files again; whether they changed. What they say is used by the
    /// next handshake.
    ///
    /// # Errors
    /// If one cannot be used, for as long as that is so; nothing changed then.
    pub fn refresh(&self) -> Result<bool, Error> {
        let make = |content: &Content<3>| Sides::new(&self.files, content, &self.provider);
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
        let chain = material::certificates(What::Certificate, &files.cert, cert)?;
        let key = material::key(&files.key, key)?;
        let roots = Arc::new(material::roots(&files.ca, ca)?);
        let not_after = match chain.first() {
            Some(own) => material::not_after(&files.cert, own)?,
            None => 0,
        };
        let unusable = |error: rustls::Error| Error::new(What::Key, &files.key, error);
        let verifier = Arc::new(Verifier::new(files, roots, provider)?);
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
        Ok(Self { server: Arc::new(server), client: Arc::new(client), not_after })
    }
}

/// Checks the other side: signed by the CA, valid now, and one of the names.
#[derive(Debug)]
struct Verifier {
    roots: Arc<RootCertStore>,
    clients: Arc<dyn ClientCertVerifier>,
    algorithms: WebPkiSupportedAlgorithms,
    names: Vec<NamePattern>,
}

/// The certificate is sound, but of somebody else.
#[derive(Debug)]
struct Stranger {
    has: Vec<String>,
    allowed: Vec<String>,
}

impl fmt::Display for Stranger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let allowed = self.allowed.join("`, `");
        match self.has.as_slice() {
            [] => write!(f, "it has no name, and `{allowed}` is allowed"),
            has => write!(f, "it is for `{}`, and `{allowed}` is allowed", has.join("`, `")),
        }
    }
}

impl std::error::Error for Stranger {}

impl Verifier {
    fn new(
        files: &Mutual,
        roots: Arc<RootCertStore>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, Error> {
        let clients =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(provider))
                .build()
                .map_err(|error| Error::new(What::Ca, &files.ca, error))?;
        let algorithms = provider.signature_verification_algorithms;
        Ok(Self { roots, clients, algorithms, names: files.names.clone() })
    }

    fn check_names(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let parsed = webpki::EndEntityCert::try_from(certificate)
            .map_err(|_| rustls::Error::InvalidCertificate(CertificateError::BadEncoding))?;
        let allowed =
            parsed.valid_dns_names().any(|dns| self.names.iter().any(|n| n.allows_dns(dns)))
                || parsed.valid_uri_names().any(|uri| self.names.iter().any(|n| n.allows_uri(uri)));
        if allowed {
            return Ok(());
        }
        let has = parsed.valid_dns_names().chain(parsed.valid_uri_names());
        let stranger = Stranger {
            has: has.map(str::to_owned).collect(),
            allowed: self.names.iter().map(ToString::to_string).collect(),
        };
        let error = CertificateError::Other(OtherError(Arc::new(stranger)));
        Err(rustls::Error::InvalidCertificate(error))
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(
            &parsed,
            &self.roots,
            intermediates,
            now,
            algorithms,
        )?;
        self.check_names(end_entity)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        crypto::verify_tls12_signature(message, cert, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        crypto::verify_tls13_signature(message, cert, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.clients.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.clients.verify_client_cert(end_entity, intermediates, now)?;
        self.check_names(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.clients.verify_tls12_signature(message, cert, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.clients.verify_tls13_signature(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.clients.supported_verify_schemes()
    }
}
