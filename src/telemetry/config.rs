//! The `telemetry` section.

use std::net::{Ipv6Addr, SocketAddr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::runtime::ListenAddr;
use crate::settings::OnOff;

/// Probes, metrics and the access log.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Telemetry")]
pub struct Config {
    /// Address for `/livez`, `/readyz` and `/metrics`. Default: `[::]:9403`.
    pub listen: ListenAddr,
    /// One log line for every request. Default: off.
    #[serde(with = "OnOff")]
    pub access_log: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { listen: SocketAddr::from((Ipv6Addr::UNSPECIFIED, 9403)).into(), access_log: false }
    }
}
