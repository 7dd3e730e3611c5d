//! The `tls` fields of the configuration.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::NamePattern;

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
