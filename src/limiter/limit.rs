//! Limits (layer 1, pure): a rule, a quota, and what happens at its end.

use std::collections::HashMap;
use std::sync::Arc;

use super::key::{BucketId, IdentitySeed};
use super::quota::Quota;
use super::rule::Rule;
use super::tokens::Tokens;

/// What a limit does with a request for which it has no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Refuse it.
    #[default]
    Enforce,
    /// Count and report it, and let it pass.
    Shadow,
}

/// Everything a limit is made of; [`Limit::new`] derives the rest.
#[derive(Clone, Debug)]
pub struct LimitSpec {
    /// The limit's identity among all replicas.
    pub name: String,
    /// Which requests, and which bucket.
    pub rule: Rule,
    /// The quota of every bucket without an override.
    pub quota: Quota,
    /// Tokens one request costs.
    pub cost: Tokens,
    /// Other quotas for single buckets.
    pub overrides: HashMap<BucketId, Quota>,
    /// Refuse, or only report.
    pub mode: Mode,
    /// Whether answers tell the limit's state.
    pub expose: bool,
}

/// One limit, ready to be checked.
#[derive(Clone, Debug)]
pub struct Limit {
    spec: LimitSpec,
    seed: IdentitySeed,
    parts_hash: u64,
}

impl Limit {
    /// A limit with this content.
    pub fn new(spec: LimitSpec) -> Self {
        let parts = spec.rule.parts_text();
        let hash = blake3::hash(parts.as_bytes());
        let mut parts_hash = [0; 8];
        parts_hash.copy_from_slice(&hash.as_bytes()[..8]);
        Self {
            seed: Self::seed(&spec.name, &spec.rule),
            parts_hash: u64::from_le_bytes(parts_hash),
            spec,
        }
    }

    /// How a limit of this name and rule derives its buckets' identities.
    pub fn seed(name: &str, rule: &Rule) -> IdentitySeed {
        IdentitySeed::new(name, &rule.parts_text())
    }

    /// The limit's identity among all replicas.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Which requests, and which bucket.
    pub const fn rule(&self) -> &Rule {
        &self.spec.rule
    }

    /// The quota of buckets without an override.
    pub const fn default_quota(&self) -> &Quota {
        &self.spec.quota
    }

    /// The quota of one bucket.
    pub fn quota(&self, bucket: BucketId) -> &Quota {
        if self.spec.overrides.is_empty() {
            return &self.spec.quota;
        }
        self.spec.overrides.get(&bucket).unwrap_or(&self.spec.quota)
    }

    /// How many buckets have a quota of their own.
    pub fn overrides(&self) -> usize {
        self.spec.overrides.len()
    }

    /// Tokens one request costs.
    pub const fn cost(&self) -> Tokens {
        self.spec.cost
    }

    /// Refuse, or only report.
    pub const fn mode(&self) -> Mode {
        self.spec.mode
    }

    /// Whether answers tell the limit's state.
    pub const fn exposed(&self) -> bool {
        self.spec.expose
    }

    /// The identity of the bucket that a canonical key names.
    pub fn bucket_id(&self, key: &[u8]) -> BucketId {
        self.seed.id(key)
    }

    /// A hash of the key parts, by which replicas see that a limit of one name
    /// means the same buckets.
    pub const fn parts_hash(&self) -> u64 {
        self.parts_hash
    }
}

/// A limit's index in its [`LimitSet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LimitIndex(pub u32);

/// All limits of one configuration, in its order.
#[derive(Clone, Debug, Default)]
pub struct LimitSet {
    limits: Vec<Arc<Limit>>,
}

impl LimitSet {
    /// The limits in the order of the configuration. Names must differ, which
    /// loading a configuration guarantees.
    pub fn new(limits: impl IntoIterator<Item = Limit>) -> Self {
        Self { limits: limits.into_iter().map(Arc::new).collect() }
    }

    /// Every limit with its index.
    pub fn iter(&self) -> impl Iterator<Item = (LimitIndex, &Limit)> {
        self.limits.iter().enumerate().map(|(i, limit)| (LimitIndex(i as u32), limit.as_ref()))
    }

    /// The limit at `index`.
    pub fn get(&self, index: LimitIndex) -> Option<&Limit> {
        self.limits.get(index.0 as usize).map(Arc::as_ref)
    }

    /// The limit called `name`.
    pub fn find(&self, name: &str) -> Option<(LimitIndex, &Limit)> {
        self.iter().find(|(_, limit)| limit.name() == name)
    }

    /// How many limits there are.
    pub fn len(&self) -> usize {
        self.limits.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.limits.is_empty()
    }
}
