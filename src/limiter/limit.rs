//! Limits (layer 1, pure): a rule, a quota, and what happens at its end.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::cost::Cost;
use super::index::Index;
use super::key::{BucketId, IdentitySeed};
use super::quota::Quota;
use super::request::Attributes;
use super::rule::Rule;

/// What a limit does with a request for which it has no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Refuse it.
    #[default]
    Enforce,
    /// Count and report it, and let it pass.
    Shadow,
}

/// What a limit does about replicas that it does not hear.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Partition {
    /// Their share stays reserved at the rate at which they spent: the limit holds
    /// as long as demand stays where it was.
    #[default]
    Frozen,
    /// They are taken to spend at least an even share, and only this side's part
    /// of the level is given out: the limit holds whatever demand does, and part
    /// of it may go unused.
    Strict,
    /// They are left out of account: every part of a split network gives out the
    /// whole limit, and nothing goes unused.
    Open,
}

/// What a limit promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Window {
    /// A bucket: after a pause the burst and the rate may come together.
    #[default]
    Bucket,
    /// Never more than the N of the rate in any window as long as its period, over
    /// all replicas together.
    Strict,
}

/// Everything a limit is made of; [`Limit::new`] derives the rest.
#[derive(Clone, Debug)]
pub struct LimitSpec {
    /// What the limit is called.
    pub name: String,
    /// Its first name, if it was renamed: by that name replicas and buckets go
    /// on knowing it, so that a renamed limit keeps what was spent.
    pub was: Option<String>,
    /// Which requests, and which bucket.
    pub rule: Rule,
    /// The quota of every bucket without an override.
    pub quota: Quota,
    /// What one request costs.
    pub cost: Cost,
    /// Other quotas for single buckets.
    pub overrides: HashMap<BucketId, Quota>,
    /// Refuse, or only report.
    pub mode: Mode,
    /// Whether answers tell the limit's state.
    pub expose: bool,
    /// What happens while replicas are not heard.
    pub partition: Partition,
    /// How long a request may wait for its tokens before it is refused.
    pub max_wait: Duration,
}

impl LimitSpec {
    /// A limit that enforces, costs one token a request and has no overrides.
    pub fn new(name: impl Into<String>, rule: Rule, quota: Quota) -> Self {
        Self {
            name: name.into(),
            was: None,
            rule,
            quota,
            cost: Cost::Fixed(Cost::ONE),
            overrides: HashMap::new(),
            mode: Mode::Enforce,
            expose: true,
            partition: Partition::default(),
            max_wait: Duration::ZERO,
        }
    }

    /// The name from which bucket identities are derived.
    pub fn identity(&self) -> &str {
        self.was.as_deref().unwrap_or(&self.name)
    }
}

/// One limit, ready to be checked.
#[derive(Clone, Debug)]
pub struct Limit {
    spec: LimitSpec,
    seed: IdentitySeed,
    parts_hash: u64,
    revision: u16,
}

impl Limit {
    /// A limit with this content.
    pub fn new(spec: LimitSpec) -> Self {
        let parts = spec.rule.parts_text();
        let hash = blake3::hash(parts.as_bytes());
        let mut parts_hash = [0; 8];
        parts_hash.copy_from_slice(&hash.as_bytes()[..8]);
        Self {
            seed: Self::seed(spec.identity(), &spec.rule),
            parts_hash: u64::from_le_bytes(parts_hash),
            revision: 0,
            spec,
        }
    }

    /// How a limit of this [identity](LimitSpec::identity) and rule derives its
    /// buckets' identities.
    pub fn seed(identity: &str, rule: &Rule) -> IdentitySeed {
        IdentitySeed::new(identity, &rule.parts_text())
    }

    /// What the limit is called.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The name by which replicas and buckets know it: its first one.
    pub fn identity(&self) -> &str {
        self.spec.identity()
    }

    /// Grows by one whenever a reload changes the quota of any of its buckets.
    pub const fn revision(&self) -> u16 {
        self.revision
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

    /// What one request costs.
    pub const fn cost(&self) -> &Cost {
        &self.spec.cost
    }

    /// Refuse, or only report.
    pub const fn mode(&self) -> Mode {
        self.spec.mode
    }

    /// What happens while replicas are not heard.
    pub const fn partition(&self) -> Partition {
        self.spec.partition
    }

    /// Whether its buckets keep to a window: see [`Quota::keeping_window`].
    pub const fn keeps_window(&self) -> bool {
        self.spec.quota.keeps_window()
    }

    /// How long a request may wait for its tokens before it is refused.
    pub const fn max_wait(&self) -> Duration {
        self.spec.max_wait
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

/// A limit's index in its [`LimitSet`], the same for as long as the process
/// lives: a bucket refers to its limit by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LimitIndex(pub u16);

/// All limits of one configuration, in its order.
///
/// A set that [succeeds](Self::succeeding) another keeps its indices: a limit of
/// the same identity and key parts has the same index, one that is gone leaves
/// its place empty until it comes back, and a new one gets a new place.
#[derive(Clone, Debug, Default)]
pub struct LimitSet {
    places: Vec<Place>,
    /// The occupied places, in the order of the configuration.
    order: Vec<LimitIndex>,
    /// Finds those that may apply to a request, if they are many.
    rules: Option<Arc<Index>>,
}

/// Where a limit is, or was.
#[derive(Clone, Debug)]
struct Place {
    identity: String,
    parts_hash: u64,
    revision: u16,
    limit: Option<Arc<Limit>>,
}

/// A process has met more limits than replicas can tell each other of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "more than {} different limits since the start, removed ones included: restart to begin anew",
    LimitSet::MAX
)]
pub struct TooManyLimits;

impl LimitSet {
    /// Places at most, empty ones included.
    pub const MAX: usize = 1000;

    /// The limits in the order of the configuration. Names and identities must
    /// differ, which loading a configuration guarantees.
    pub fn new(limits: impl IntoIterator<Item = Limit>) -> Self {
        let places: Vec<Place> = limits.into_iter().map(Place::new).collect();
        let order = (0..places.len()).map(index_of).collect();
        Self { places, order, rules: None }.indexed()
    }

    /// The same with an index of its rules.
    fn indexed(mut self) -> Self {
        self.rules =
            Index::new(self.order.iter().filter_map(|index| Some(self.get(*index)?.rule())))
                .map(Arc::new);
        self
    }

    /// These limits, at the places that they have in `former`.
    ///
    /// # Errors
    /// If there are too many places then.
    pub fn succeeding(self, former: &Self) -> Result<Self, TooManyLimits> {
        let mut places: Vec<Place> =
            former.places.iter().map(|place| Place { limit: None, ..place.clone() }).collect();
        let mut order = Vec::with_capacity(self.order.len());
        for limit in self.order.iter().filter_map(|index| self.get(*index)) {
            let at = places.iter().position(|place| {
                place.parts_hash == limit.parts_hash && place.identity == limit.identity()
            });
            let at = match at {
                Some(at) => {
                    let index = index_of(at);
                    let same = former.get(index).is_some_and(|old| {
                        old.spec.quota == limit.spec.quota
                            && old.spec.overrides == limit.spec.overrides
                    });
                    let place = &mut places[at];
                    if !same {
                        place.revision = place.revision.wrapping_add(1);
                    }
                    let limit = Limit { revision: place.revision, ..limit.clone() };
                    place.limit = Some(Arc::new(limit));
                    index
                }
                None => {
                    places.push(Place::new(limit.clone()));
                    index_of(places.len() - 1)
                }
            };
            order.push(at);
        }
        if places.len() > Self::MAX {
            return Err(TooManyLimits);
        }
        Ok(Self { places, order, rules: None }.indexed())
    }

    /// Every limit with its index, in the order of the configuration.
    pub fn iter(&self) -> impl Iterator<Item = (LimitIndex, &Limit)> {
        self.order.iter().filter_map(|index| Some((*index, self.get(*index)?)))
    }

    /// Every limit that may apply to `request`, in the same order. Others do not.
    pub(super) fn candidates(
        &self,
        request: &impl Attributes,
    ) -> impl Iterator<Item = (LimitIndex, &Limit)> {
        let found = self.rules.as_ref().map(|rules| rules.find(request));
        let count = found.as_ref().map_or(self.order.len(), SmallVec::len);
        (0..count).filter_map(move |i| {
            let position = match &found {
                Some(found) => usize::from(*found.get(i)?),
                None => i,
            };
            let index = *self.order.get(position)?;
            Some((index, self.get(index)?))
        })
    }

    /// What is at each index, from 0 on.
    pub fn places(&self) -> impl ExactSizeIterator<Item = Option<&Limit>> {
        self.places.iter().map(|place| place.limit.as_deref())
    }

    /// The limit at `index`.
    pub fn get(&self, index: LimitIndex) -> Option<&Limit> {
        self.places.get(index.0 as usize)?.limit.as_deref()
    }

    /// The limit called `name`.
    pub fn find(&self, name: &str) -> Option<(LimitIndex, &Limit)> {
        self.iter().find(|(_, limit)| limit.name() == name)
    }

    /// The limit that replicas know as `identity`.
    pub fn find_identity(&self, identity: &str) -> Option<(LimitIndex, &Limit)> {
        self.iter().find(|(_, limit)| limit.identity() == identity)
    }

    /// How many limits there are.
    pub const fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}

impl Place {
    fn new(limit: Limit) -> Self {
        Self {
            identity: limit.identity().to_owned(),
            parts_hash: limit.parts_hash,
            revision: limit.revision,
            limit: Some(Arc::new(limit)),
        }
    }
}

/// Places are few: see [`LimitSet::MAX`].
const fn index_of(place: usize) -> LimitIndex {
    LimitIndex(place as u16)
}
