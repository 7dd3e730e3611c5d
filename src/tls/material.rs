//! Certificates and keys as they are in files.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::prelude::{FromDer as _, X509Certificate};

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
pub(super) fn key(path: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, Error> {
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

/// When a certificate ends, in seconds since 1970.
pub(super) fn not_after(path: &Path, certificate: &CertificateDer<'_>) -> Result<i64, Error> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|error| {
        Error::new(What::Certificate, path, format_args!("is no X.509 certificate: {error}"))
    })?;
    Ok(parsed.validity().not_after.timestamp())
}
