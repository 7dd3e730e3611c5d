//! The `replication` section.

use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::discovery;
use crate::runtime::ListenAddr;
use crate::settings::{DurationText, Fault, NameText, OrNone, Whole};
use crate::tls;

/// How many replicas there can be.
type ReplicaCount = Whole<0, 10_000>;

/// How replicas tell each other what they spent.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Replication")]
pub struct Config {
    /// Address for other replicas. Default: `[::]:9401`.
    pub listen: ListenAddr,
    /// Where the other replicas are found. Default: none, a lone replica.
    pub peers: Option<discovery::Config>,
    /// DNS server to ask, IP address and port. Default: the system's.
    #[schemars(with = "Option<ListenAddr>")]
    pub resolver: Option<SocketAddr>,
    /// Replicas of another group are refused, so that a wrong name cannot merge
    /// two products. Default: default.
    #[serde(with = "NameText")]
    pub group: String,
    /// A key whose requests stop has told its peers everything after this long.
    /// Default: 100ms.
    #[serde(with = "DurationText")]
    pub sync_interval: Duration,
    /// How long a starting replica waits for a peer's snapshot before it serves
    /// without. Default: 2s.
    #[serde(with = "DurationText")]
    pub join_timeout: Duration,
    /// How long the share of a silent peer that is still listed stays reserved.
    /// Default: 30s.
    #[serde(with = "DurationText")]
    pub share_hold: Duration,
    /// Replicas that a strict limit counts with while fewer were seen. Default: 0,
    /// those that were seen.
    #[serde(with = "ReplicaCount")]
    pub expected_replicas: u32,
    /// Certificates for mutual TLS between replicas. Default: none.
    #[serde(with = "OrNone::<tls::Mutual>")]
    pub tls: Option<tls::Mutual>,
    /// Speak to peers in plain text; must be said when there are peers and no
    /// TLS. Default: false.
    pub insecure: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv6Addr::UNSPECIFIED, 9401)).into(),
            peers: None,
            resolver: None,
            group: "default".to_owned(),
            sync_interval: Duration::from_millis(100),
            join_timeout: Duration::from_secs(2),
            share_hold: Duration::from_secs(30),
            expected_replicas: 0,
            tls: None,
            insecure: false,
        }
    }
}

impl Config {
    /// Faults of settings that do not go together.
    pub fn faults(&self) -> Vec<Fault> {
        let given: &[&str] = &["tls", "insecure"];
        let mut faults = Vec::new();
        match (&self.peers, &self.tls, self.insecure) {
            (Some(_), None, false) => faults.push(
                Fault::new(
                    ["peers".into()],
                    "with peers, either `tls` or `insecure: true` must be set",
                )
                .given(given),
            ),
            (_, Some(_), true) => faults.push(
                Fault::new(
                    ["insecure".into()],
                    "`tls` and `insecure: true` exclude each other: keep one",
                )
                .given(given),
            ),
            _ => {}
        }
        if self.tls.as_ref().is_some_and(|tls| tls.names.is_empty()) {
            let path = ["tls".into(), "names".into()];
            let message = "needs a name: without one every certificate of the CA would do";
            faults.push(Fault::new(path, message));
        }
        faults
    }
}
