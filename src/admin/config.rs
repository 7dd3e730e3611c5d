//! The `admin` section.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::runtime::ListenAddr;
use crate::settings::{Fault, Unsupported};

/// The admin gRPC.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Admin")]
pub struct Config {
    /// Address for operators' tools; this version protects it by loopback only.
    /// Default: `127.0.0.1:9402`.
    pub listen: ListenAddr,
    /// File with the token that calls must carry. Default: none, the only value
    /// that this version supports.
    #[serde(with = "Unsupported")]
    pub token_file: Option<PathBuf>,
    /// Certificates for TLS. Default: none, the only value that this version
    /// supports.
    #[serde(with = "Unsupported")]
    pub tls: Option<Unsupported>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 9402)).into(),
            token_file: None,
            tls: None,
        }
    }
}

impl Config {
    /// Faults of settings that do not go together.
    pub fn faults(&self) -> Vec<Fault> {
        if self.listen.addr().ip().to_canonical().is_loopback() {
            return Vec::new();
        }
        vec![Fault::new(
            ["listen".into()],
            format!(
                "`{}` is not a loopback address; other addresses need `token_file` or `tls`, \
                 which are not supported by this version",
                self.listen
            ),
        )]
    }
}
