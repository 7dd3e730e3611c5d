//! Certificates for tests: CAs, and what they sign, as files in a directory.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tempfile::TempDir;
use tidegate::tls::{Mutual, Serving};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

/// A CA that exists for one test.
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pub pem: String,
}

impl Ca {
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// A certificate and its key, both PEM, for `name`: a DNS name or a URI.
    pub fn sign(&self, name: &str) -> (String, String) {
        self.sign_as(name, |_| {})
    }

    /// A certificate that was over long ago.
    pub fn sign_expired(&self, name: &str) -> (String, String) {
        self.sign_as(name, |params| params.not_after = rcgen::date_time_ymd(2001, 1, 1))
    }

    /// A certificate that is over some seconds from now.
    pub fn sign_for(&self, name: &str, time: std::time::Duration) -> (String, String) {
        self.sign_as(name, |params| {
            params.not_after = (std::time::SystemTime::now() + time).into();
        })
    }

    fn sign_as(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        let name = name.to_owned();
        params.subject_alt_names = vec![if name.contains("://") {
            SanType::URI(name.try_into().unwrap())
        } else {
            SanType::DnsName(name.try_into().unwrap())
        }];
        change(&mut params);
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

/// A listener that takes TLS off and passes the bytes on, speaking what it is told
/// to. Ends with the process.
pub fn terminator(
    to: SocketAddr,
    (cert, key): &(String, String),
    protocols: &[&[u8]],
) -> SocketAddr {
    let chain = CertificateDer::pem_slice_iter(cert.as_bytes()).collect::<Result<_, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            while let Ok((io, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let Ok(mut tls) = acceptor.accept(io).await else { return };
                    let mut plain = TcpStream::connect(to).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut tls, &mut plain).await;
                });
            }
        });
    });
    address
}

/// The files of one replica.
pub struct Files(TempDir);

impl Files {
    pub fn new((cert, key): &(String, String), ca: &str) -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        files.write("tls.crt", cert);
        files.write("tls.key", key);
        files.write("ca.crt", ca);
        files
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Replaces a file at once, as a rename does.
    pub fn write(&self, name: &str, content: &str) {
        let new = self.path().join("new");
        fs::write(&new, content).unwrap();
        fs::rename(new, self.path().join(name)).unwrap();
    }

    /// The certificate for a port; clients need one of this CA if `client_ca`.
    pub fn serving(&self, client_ca: bool, names: &[&str]) -> Serving {
        Serving {
            cert: self.path().join("tls.crt"),
            key: self.path().join("tls.key"),
            client_ca: client_ca.then(|| self.path().join("ca.crt")),
            names: names.iter().map(|name| name.parse().unwrap()).collect(),
        }
    }

    pub fn mutual(&self, names: &[&str]) -> Mutual {
        Mutual {
            cert: self.path().join("tls.crt"),
            key: self.path().join("tls.key"),
            ca: self.path().join("ca.crt"),
            names: names.iter().map(|name| name.parse().unwrap()).collect(),
        }
    }
}
