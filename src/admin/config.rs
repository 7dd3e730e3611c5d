//! The `admin` section.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::runtime::ListenAddr;
use crate::settings::{Fault, OrNone};
use crate::tls;

/// The admin gRPC.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Admin")]
pub struct Config {
    /// Address for operators' tools; any but a loopback address needs `token_file` or
    /// `tls.client_ca`. Default: `127.0.0.1:9402`.
    pub listen: ListenAddr,
    /// File with the token that every call but those of health must carry as
    /// `authorization: Bearer TOKEN`. Default: none.
    #[serde(with = "OrNone::<PathBuf>")]
    pub token_file: Option<PathBuf>,
    /// Certificates for TLS. With `client_ca`, which needs `names`, every call but those
    /// of health needs a client's certificate, or the token if there is one.
    /// Default: none, without TLS.
    #[serde(with = "OrNone::<tls::Serving>")]
    pub tls: Option<tls::Serving>,
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
        let mut faults: Vec<Fault> = self.tls.iter().flat_map(tls::Serving::faults).collect();
        let clients = self.tls.as_ref().filter(|tls| tls.client_ca.is_some());
        if clients.is_some_and(|tls| tls.names.is_empty()) {
            let message =
                "is required with `client_ca`: who else the CA signs would be an operator";
            faults.push(Fault::new(["tls".into(), "names".into()], message).given(&["tls"]));
        }
        let guarded = self.token_file.is_some() || clients.is_some();
        if !guarded && !self.listen.addr().ip().to_canonical().is_loopback() {
            let message = format!(
                "`{}` is not a loopback address; other addresses need `token_file` or \
                 `tls.client_ca`",
                self.listen
            );
            let given = &["token_file", "tls"];
            faults.push(Fault::new(["listen".into()], message).given(given));
        }
        faults
    }
}
