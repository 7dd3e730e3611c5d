//! The `admin` section.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::runtime::ListenAddr;
use crate::settings::{Fault, OrNone, Unsupported};

/// The admin gRPC.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Admin")]
pub struct Config {
    /// Address for operators' tools; any but a loopback address needs `token_file`.
    /// Default: `127.0.0.1:9402`.
    pub listen: ListenAddr,
    /// File with the token that every call but those of health must carry as
    /// `authorization: Bearer TOKEN`. Default: none.
    #[serde(with = "OrNone::<PathBuf>")]
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
        if self.listen.addr().ip().to_canonical().is_loopback() || self.token_file.is_some() {
            return Vec::new();
        }
        let message = format!(
            "`{}` is not a loopback address; other addresses need `token_file`",
            self.listen
        );
        vec![Fault::new(["listen".into()], message).given(&["token_file"])]
    }
}
