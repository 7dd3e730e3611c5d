//! Who the other side may be: signed by a CA, valid now, and with a name that is
//! allowed.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{self, CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, OtherError, RootCertStore,
    SignatureScheme,
};

use super::material::{self, Error, What};
use super::{Clients, NamePattern};

/// Checks the certificate of the other side.
#[derive(Debug)]
pub(super) struct Verifier {
    roots: Arc<RootCertStore>,
    clients: Arc<dyn ClientCertVerifier>,
    algorithms: WebPkiSupportedAlgorithms,
    names: Vec<NamePattern>,
    of_clients: Clients,
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
    /// Trusts the CAs of the file at `path`, whose content is `ca`. Any name is allowed
    /// if `names` has none.
    pub(super) fn new(
        path: &Path,
        ca: &[u8],
        names: &[NamePattern],
        of_clients: Clients,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, Error> {
        let roots = Arc::new(material::roots(path, ca)?);
        let clients =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(provider))
                .build()
                .map_err(|error| Error::new(What::Ca, path, error))?;
        let algorithms = provider.signature_verification_algorithms;
        Ok(Self { roots, clients, algorithms, names: names.to_vec(), of_clients })
    }

    fn check_names(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        if self.names.is_empty() {
            return Ok(());
        }
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
    fn client_auth_mandatory(&self) -> bool {
        match self.of_clients {
            Clients::Required => true,
            Clients::Asked => false,
        }
    }

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
