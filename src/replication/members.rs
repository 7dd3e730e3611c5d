//! Members: which origins are heard, as every check may see it.
//!
//! When a peer falls silent or is gone, all its buckets change. They are not
//! visited for that: a ledger that is touched next sees that the table has
//! another version and follows it.

use std::collections::BTreeMap;

use super::ledger::OriginId;
use crate::limiter::{LimitIndex, Partition};
use crate::time::Timestamp;

/// How an origin stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// It is heard, since this moment.
    Heard(Timestamp),
    /// A snapshot named it at this moment, and it was not met.
    Named(Timestamp),
    /// It is silent since this moment: its share stays reserved for `hold`
    /// nanoseconds, and is then released over as long again.
    Silent {
        /// Since when.
        since: Timestamp,
        /// For how long its share stays whole.
        hold: u64,
    },
}

impl Standing {
    /// Which part of its share a silent origin keeps at `now`.
    pub(super) fn kept(self, now: Timestamp) -> f64 {
        match self {
            Self::Heard(_) | Self::Named(_) => 1.0,
            Self::Silent { since, hold } => {
                let beyond = now.nanos_since(since).saturating_sub(hold) as f64;
                (1.0 - beyond / (hold as f64).max(1.0)).max(0.0)
            }
        }
    }
}

/// All origins that are not gone.
#[derive(Clone, Debug, Default)]
pub(super) struct Members {
    pub(super) version: u32,
    pub(super) standings: BTreeMap<OriginId, Standing>,
    /// Replicas that a strict limit counts with, this one included, and how many
    /// of them are not heard.
    pub(super) counted: u32,
    pub(super) silent: u32,
    /// What each limit does about silent replicas.
    pub(super) policies: BTreeMap<LimitIndex, Partition>,
    /// Some limit promises a window.
    pub(super) is_any_window: bool,
}

impl Members {
    pub(super) fn is_any_strict(&self) -> bool {
        self.policies.values().any(|policy| *policy == Partition::Strict)
    }

    pub(super) fn policy(&self, limit: LimitIndex) -> Partition {
        self.policies.get(&limit).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_share_is_held_and_then_released() {
        let since = Timestamp::from_millis(1000);
        let silent = Standing::Silent { since, hold: 30_000_000_000 };
        for (millis, kept) in
            [(1000, 1.0), (31_000, 1.0), (46_000, 0.5), (61_000, 0.0), (90_000, 0.0)]
        {
            assert_eq!(silent.kept(Timestamp::from_millis(millis)), kept, "{millis}");
        }
    }
}
