//! The `tls` fields of the configuration.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::NamePattern;
use crate::settings::{Fault, OrNone};

/// Certificates of mutual TLS, where each side checks the other.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "MutualTls")]
pub struct Mutual {
    /// File with this replica's certificate and those between it and the CA, PEM.
    pub cert: PathBuf,
    /// File with its private key, PEM.
    pub key: PathBuf,
    /// File with the certificates of the CAs that sign replicas, PEM.
    pub ca: PathBuf,
    /// Names of which the certificate of the other side must have one: DNS names,
    /// also `*.NAME` with one label for `*`, and URIs, also `URI/*`.
    pub names: Vec<NamePattern>,
}

/// The certificate of a port with TLS, and what its clients must have.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ServerTls")]
pub struct Serving {
    /// File with the certificate and those between it and the CA, PEM.
    pub cert: PathBuf,
    /// File with its private key, PEM.
    pub key: PathBuf,
    /// File with the certificates of the CAs that sign clients, PEM. Default: none,
    /// clients are not asked for a certificate.
    #[serde(default, with = "OrNone::<PathBuf>")]
    pub client_ca: Option<PathBuf>,
    /// Names of which a client's certificate must have one, as between peers.
    /// Default: none, any that the CA signed.
    #[serde(default)]
    pub names: Vec<NamePattern>,
}

impl Serving {
    /// Faults of settings that do not go together, in the section at `tls`.
    pub fn faults(&self) -> Vec<Fault> {
        if self.names.is_empty() || self.client_ca.is_some() {
            return Vec::new();
        }
        let message = "needs `client_ca`: without it no client is asked for a certificate";
        vec![Fault::new(["tls".into(), "names".into()], message).given(&["tls"])]
    }
}
