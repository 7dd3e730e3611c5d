//! Catalog: how a peer's limits map to this replica's.
//!
//! Entries name a limit by its index in the sender's Hello. A limit that only
//! one side has is normal while a configuration rolls out; one whose key parts
//! differ names other buckets and is left alone; one with another quota shares
//! its buckets, but their levels are not compared.

use std::collections::BTreeSet;

use super::frame::LimitDeclaration;
use crate::limiter::{Limit, LimitIndex, LimitSet};

/// One of the peer's limits, seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mapped {
    pub(super) index: LimitIndex,
    pub(super) same_quota: bool,
    /// The peer's quota refills faster.
    pub(super) larger_quota: bool,
}

/// All of a peer's limits, seen from here.
#[derive(Clone, Debug, Default)]
pub(super) struct Catalog {
    mapped: Vec<Option<Mapped>>,
    mismatches: Vec<String>,
}

impl Catalog {
    pub(super) fn new(theirs: &[LimitDeclaration], ours: &LimitSet) -> Self {
        let mut mismatches = Vec::new();
        let mut mapped = Vec::with_capacity(theirs.len());
        for declared in theirs {
            // A place that the peer keeps empty.
            if declared.name.is_empty() {
                mapped.push(None);
                continue;
            }
            let Some((index, limit)) = ours.find_identity(&declared.name) else {
                mismatches.push(format!("{}: not configured here", declared.name));
                mapped.push(None);
                continue;
            };
            if limit.parts_hash() != declared.parts {
                mismatches.push(format!("{}: other key parts", limit.name()));
                mapped.push(None);
                continue;
            }
            let quota = limit.default_quota();
            let same_quota = quota.rate().tokens() == declared.tokens
                && u64::from(quota.rate().period_ms()) == declared.period_ms
                && u64::try_from(quota.burst().micros()) == Ok(declared.burst);
            if !same_quota {
                mismatches.push(format!("{}: other quota", limit.name()));
            }
            let ours = u128::from(quota.rate().tokens()) * u128::from(declared.period_ms);
            let theirs = u128::from(declared.tokens) * u128::from(quota.rate().period_ms());
            mapped.push(Some(Mapped { index, same_quota, larger_quota: theirs > ours }));
        }
        for (_, limit) in ours.iter() {
            if !theirs.iter().any(|declared| declared.name == limit.identity()) {
                mismatches.push(format!("{}: not configured there", limit.name()));
            }
        }
        Self { mapped, mismatches }
    }

    /// The limit here that the peer calls by `index`.
    pub(super) fn map(&self, index: u32) -> Option<Mapped> {
        self.mapped.get(usize::try_from(index).ok()?).copied().flatten()
    }

    /// Whether this maps limits that `before` did not.
    pub(super) fn maps_more_than(&self, before: &Self) -> bool {
        let indices = |catalog: &Self| -> BTreeSet<LimitIndex> {
            catalog.mapped.iter().flatten().map(|mapped| mapped.index).collect()
        };
        !indices(self).is_subset(&indices(before))
    }

    /// What differs, for people: `limit: how`.
    pub(super) fn mismatches(&self) -> &[String] {
        &self.mismatches
    }
}

/// This replica's limits, as it declares them: one for each index, by the names
/// that identities are derived from. A place whose limit was removed has no
/// name, which nobody has.
pub(super) fn declare(limits: &LimitSet) -> Vec<LimitDeclaration> {
    let declare = |limit: Option<&Limit>| {
        let Some(limit) = limit else {
            return LimitDeclaration {
                name: String::new(),
                parts: 0,
                tokens: 0,
                period_ms: 0,
                burst: 0,
            };
        };
        let quota = limit.default_quota();
        LimitDeclaration {
            name: limit.identity().to_owned(),
            parts: limit.parts_hash(),
            tokens: quota.rate().tokens(),
            period_ms: quota.rate().period_ms().into(),
            burst: quota.burst().micros().unsigned_abs(),
        }
    };
    limits.places().map(declare).collect()
}
