//! Certificates and keys as they are in files.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::time::wall_clock;

/// Largest file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// What a file is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The own certificate.
    Certificate,
    /// The private key.
    Key,
    /// The certificates of CAs.
    Ca,
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Certificate => "certificate",
            Self::Key => "private key",
            Self::Ca => "CA certificates",
        })
    }
}

/// Files that cannot be used, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {}: {reason}", path.display())]
pub struct Error {
    /// What was looked for.
    pub what: What,
    /// Where.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

impl Error {
    pub(super) fn new(what: What, path: &Path, reason: impl fmt::Display) -> Self {
        Self { what, path: path.to_owned(), reason: reason.to_string() }
    }
}

/// The bytes of a file.
pub(super) fn read(what: What, path: &Path) -> Result<Vec<u8>, Error> {
    let fault = |reason: &dyn fmt::Display| Error::new(what, path, reason);
    let length = fs::metadata(path).map_err(|error| fault(&error))?.len();
    if length > MAX_FILE {
        return Err(fault(&format_args!("has {length} bytes, above {MAX_FILE}")));
    }
    fs::read(path).map_err(|error| fault(&error))
}

/// A chain of certificates, the own one first.
pub(super) fn certificates(
    what: What,
    path: &Path,
    bytes: &[u8],
) -> Result<Vec<CertificateDer<'static>>, Error> {
    let all: Vec<_> = CertificateDer::pem_slice_iter(bytes)
        .collect::<Result<_, _>>()
        .map_err(|error| Error::new(what, path, damage(&error)))?;
    if all.is_empty() {
        return Err(Error::new(what, path, "no certificate (PEM, `BEGIN CERTIFICATE`) is in it"));
    }
    Ok(all)
}

/// The first private key.
fn key(path: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, Error> {
    PrivateKeyDer::from_pem_slice(bytes).map_err(|error| {
        if matches!(error, pem::Error::NoItemsFound) {
            Error::new(What::Key, path, "no private key (PEM, `BEGIN PRIVATE KEY`) is in it")
        } else {
            Error::new(What::Key, path, damage(&error))
        }
    })
}

fn damage(error: &pem::Error) -> String {
    format!("is not sound PEM: {error}")
}

/// The CAs of a file.
pub(super) fn roots(path: &Path, bytes: &[u8]) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for (index, ca) in certificates(What::Ca, path, bytes)?.into_iter().enumerate() {
        roots.add(ca).map_err(|error| {
            Error::new(What::Ca, path, format_args!("certificate {}: {error}", index + 1))
        })?;
    }
    Ok(roots)
}

/// The own certificate with those between it and the CA, and its key.
pub(super) struct Own {
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
    /// When the certificate ends, in seconds since 1970.
    pub(super) not_after: i64,
}

/// Reads what is in the files of a certificate and of its key.
pub(super) fn own(
    cert_path: &Path,
    cert: &[u8],
    key_path: &Path,
    key_bytes: &[u8],
) -> Result<Own, Error> {
    let chain = certificates(What::Certificate, cert_path, cert)?;
    let key = key(key_path, key_bytes)?;
    let not_after = match chain.first() {
        Some(own) => not_after(cert_path, own)?,
        None => 0,
    };
    Ok(Own { chain, key, not_after })
}

/// Why a certificate and a key cannot be used together.
pub(super) fn unusable(cert: &Path, key: &Path, error: &rustls::Error) -> Error {
    if matches!(error, rustls::Error::InconsistentKeys(_)) {
        return Error::new(
            What::Key,
            key,
            format_args!("is not that of the certificate in {}", cert.display()),
        );
    }
    Error::new(What::Key, key, error)
}

/// Whether a certificate has not ended yet.
pub(super) fn check_end(cert: &Path, not_after: i64) -> Result<(), Error> {
    let now = wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    if u64::try_from(not_after).is_ok_and(|end| now <= end) {
        return Ok(());
    }
    let end = u64::try_from(not_after).unwrap_or_default();
    let end = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(end));
    Err(Error::new(What::Certificate, cert, format_args!("has ended, at {end}")))
}

fn not_after(path: &Path, certificate: &CertificateDer<'_>) -> Result<i64, Error> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|error| {
        Error::new(What::Certificate, path, format_args!("is no X.509 certificate: {error}"))
    })?;
    Ok(parsed.validity().not_after.timestamp())
}
