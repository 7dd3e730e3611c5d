//! Explanations (layer 1, pure): what would be decided, and why, without a trace.
//!
//! The steps are those of a real decision, on copies of the buckets.

use std::sync::Arc;

use smallvec::SmallVec;

use super::key::BucketId;
use super::limit::{LimitIndex, LimitSet};
use super::request::Attributes;
use super::rule::Exclusion;
use super::slot::Slot;
use super::tokens::Tokens;
use super::wait::Asking;
use super::{Charge, Companion, Decision, Event, Ground, Limiter, Part, Quota, Verdict};
use crate::time::Timestamp;

/// What would become of a request, and each limit's part in it.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// What [`Limiter::decide`] would answer at the same moment. Only when memory
    /// is full can a new bucket turn out lower, because another one goes for it.
    pub decision: Decision,
    /// Every limit in the order of the configuration.
    pub limits: Vec<(LimitIndex, Applicability)>,
    /// The limits in force at that moment, to which the indices refer.
    pub in_force: Arc<LimitSet>,
}

/// What a limit has to do with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applicability {
    /// It applies.
    Applies {
        /// The canonical key.
        key: Vec<u8>,
        /// The bucket it names.
        bucket: BucketId,
        /// Whether the bucket exists. One that does not is full, or as full as
        /// the limit's floor.
        exists: bool,
        /// The bucket's level before the request.
        level: Tokens,
        /// What the request costs there.
        cost: Tokens,
        /// The index in [`Decision::checks`]; none if another limit refuses the
        /// request for a missing part, so that no bucket is asked.
        check: Option<usize>,
    },
    /// The request is not one of its requests.
    Excluded(Exclusion),
    /// The key part of this index is missing, and the limit is skipped then.
    Skipped(usize),
    /// The key part of this index is missing, and the limit refuses then.
    Denied(usize),
}

/// Copies of buckets, made when they are first asked for.
struct Trial<S>(Vec<(BucketId, Slot<S>, Quota)>);

impl<S: Clone> Trial<S> {
    fn slot<C: Companion<State = S>>(
        &mut self,
        limiter: &Limiter<C>,
        charge: &Charge<'_>,
        now: Timestamp,
    ) -> (&mut Slot<S>, &Quota) {
        let known = self.0.iter().position(|(id, ..)| *id == charge.bucket);
        let index = known.unwrap_or_else(|| {
            let copy = limiter.with_existing(charge.bucket, |slot, quota| (slot.copy(), *quota));
            let (slot, quota) = copy.unwrap_or_else(|| {
                let (limit, quota) = (charge.limit, charge.limit.quota(charge.bucket));
                let start = limiter.floors.would_start(charge.index, limit, quota, now);
                (Slot::new(charge.index, limit.revision(), start, None, 0), *quota)
            });
            self.0.push((charge.bucket, slot, quota));
            self.0.len() - 1
        });
        let (_, slot, quota) = &mut self.0[index];
        (slot, quota)
    }
}

impl<C: Companion> Ground<C> for Trial<C::State> {
    fn at<R>(
        &mut self,
        limiter: &Limiter<C>,
        charge: &Charge<'_>,
        now: Timestamp,
        f: impl FnOnce(&mut Slot<C::State>, &Quota) -> R,
    ) -> R {
        let (slot, quota) = self.slot(limiter, charge, now);
        f(slot, quota)
    }

    fn happened(
        _: &Limiter<C>,
        _: Event,
        _: BucketId,
        _: &mut Slot<C::State>,
        _: &Quota,
        _: Timestamp,
    ) {
    }
}

impl<C: Companion> Limiter<C> {
    /// Says what [`decide`](Self::decide) would answer to `request` at `now` and
    /// why. Spends nothing and makes no bucket.
    pub fn explain(&self, request: &impl Attributes, now: Timestamp) -> Explanation {
        let limits = self.limits.load_full();
        let mut trial = Trial(Vec::new());
        let mut charges: Vec<Charge<'_>> = Vec::new();
        let mut explained = Vec::new();
        let mut denied = None;
        for (index, limit) in limits.iter() {
            let applicability = match Part::of(index, limit, request) {
                Part::Charged(charge) => {
                    let exists = self.store.with_existing(charge.bucket, |_| ()).is_some();
                    let (slot, quota) = trial.slot(self, &charge, now);
                    self.companion.advance(slot, quota, now);
                    let applies = Applicability::Applies {
                        key: charge.key.as_bytes().to_vec(),
                        bucket: charge.bucket,
                        exists,
                        level: slot.bucket.level(),
                        cost: charge.cost,
                        check: Some(charges.len()),
                    };
                    charges.push(charge);
                    applies
                }
                Part::Excluded(exclusion) => Applicability::Excluded(exclusion),
                Part::Skipped(part) => Applicability::Skipped(part),
                Part::Denied(part) => {
                    denied.get_or_insert((index, part));
                    Applicability::Denied(part)
                }
            };
            explained.push((index, applicability));
        }
        let decision = match denied {
            None => self.charge(&mut trial, &charges, Asking::NEWCOMER, now),
            Some((limit, part)) => {
                // A decision ends there, before any bucket is asked.
                for (_, applicability) in &mut explained {
                    if let Applicability::Applies { check, .. } = applicability {
                        *check = None;
                    }
                }
                let verdict = Verdict::MissingPart { limit, part };
                Decision { verdict, checks: SmallVec::new() }
            }
        };
        drop(charges);
        Explanation { decision, limits: explained, in_force: limits }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::FakeRequest;
    use super::super::{
        Alone, Check, Condition, Field, KeyPart, Limit, LimitSet, LimitSpec, Missing, Mode,
        PathPattern, Rule, Source,
    };
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_000_000);

    fn limit(name: &str, burst: u64, cost: u64, rule: Rule) -> LimitSpec {
        LimitSpec {
            cost: Tokens::from_whole(cost).unwrap().into(),
            ..LimitSpec::new(name, rule, Quota::try_new("3/s".parse().unwrap(), burst).unwrap())
        }
    }

    fn by(source: Source, missing: Missing) -> Rule {
        Rule { key: vec![KeyPart::new(source, false)], missing, ..Rule::default() }
    }

    fn limiter(specs: impl IntoIterator<Item = LimitSpec>) -> Limiter<Alone> {
        Limiter::new(LimitSet::new(specs.into_iter().map(Limit::new)), 1_000_000, Alone)
    }

    #[test]
    fn each_limit_says_why_it_does_not_apply() {
        let path = Condition {
            path: Some(PathPattern::try_new("/api/").unwrap()),
            methods: vec!["GET".into()],
            ..Condition::default()
        };
        let header = Condition {
            headers: vec![("x-a".into(), "1".into()), ("x-b".into(), "2".into())],
            ..Condition::default()
        };
        let inside =
            Condition { cidrs: vec!["127.0.0.0/8".parse().unwrap()], ..Condition::default() };
        let on = |condition| Rule { condition, ..Rule::default() };
        let limiter = limiter([
            limit("path", 5, 1, on(path)),
            limit("header", 5, 1, on(header)),
            limit("exempt", 5, 1, Rule { exempt: vec![inside], ..Rule::default() }),
            limit("skip", 5, 1, by(Source::Header("x-k".into()), Missing::Skip)),
            limit("client", 5, 2, by(Source::ClientIp, Missing::Shared)),
        ]);
        let request = FakeRequest::get("/api/x").with_method("PUT").with_header("x-a", "1");
        let explanation = limiter.explain(&request, NOW);
        let parts: Vec<_> = explanation.limits.into_iter().map(|(_, part)| part).collect();
        assert_eq!(
            parts[..4],
            [
                Applicability::Excluded(Exclusion::Unmatched(Field::Method)),
                Applicability::Excluded(Exclusion::Unmatched(Field::Header(1))),
                Applicability::Excluded(Exclusion::Exempt(0)),
                Applicability::Skipped(0),
            ]
        );
        let Applicability::Applies { exists: false, level, check: Some(0), .. } = &parts[4] else {
            panic!("{:?}", parts[4]);
        };
        assert_eq!(*level, Tokens::from_whole(5).unwrap());
        assert_eq!(explanation.decision.checks[0].level, Tokens::from_whole(3).unwrap());
        assert!(limiter.store().is_empty());
    }

    #[test]
    fn a_denied_part_is_told_and_the_other_limits_are_still_explained() {
        let limiter = limiter([
            limit("client", 5, 1, by(Source::ClientIp, Missing::Shared)),
            limit("deny", 5, 1, by(Source::Header("x-k".into()), Missing::Deny)),
        ]);
        let explanation = limiter.explain(&FakeRequest::get("/"), NOW);
        let verdict = Verdict::MissingPart { limit: LimitIndex(1), part: 0 };
        assert_eq!(explanation.decision.verdict, verdict);
        assert!(matches!(explanation.limits[0].1, Applicability::Applies { check: None, .. }));
        assert_eq!(explanation.limits[1].1, Applicability::Denied(0));
    }

    #[test]
    fn the_floor_of_evicted_buckets_counts_as_it_does_for_a_decision() {
        let specs = [limit("k", 5, 1, by(Source::ClientIp, Missing::Shared))];
        let limiter = Limiter::new(LimitSet::new(specs.map(Limit::new)), 1, Alone);
        for _ in 0..5 {
            limiter.decide(&FakeRequest::get("/").from("192.0.2.1"), NOW);
        }
        limiter.decide(&FakeRequest::get("/").from("192.0.2.2"), NOW);
        // The first bucket went for the second, which started at its level.
        let explanation = limiter.explain(&FakeRequest::get("/").from("192.0.2.3"), NOW);
        assert!(!explanation.decision.is_admitted());
        assert_eq!(limiter.store().len(), 1);
        let later = NOW.plus(std::time::Duration::from_secs(2));
        assert!(
            limiter.explain(&FakeRequest::get("/").from("192.0.2.3"), later).decision.is_admitted()
        );
    }

    type Bucket = (BucketId, i64, u64, u32, u32);

    fn buckets(limiter: &Limiter<Alone>) -> Vec<Bucket> {
        let mut buckets = Vec::new();
        limiter.store().for_each(|id, slot| {
            let level = slot.bucket.level().micros();
            buckets.push((id, level, slot.spent, slot.admitted, slot.refused));
        });
        buckets.sort_unstable();
        buckets
    }

    proptest! {
        /// Whatever came before, an explanation is what is then decided, and
        /// leaves everything as it was.
        #[test]
        fn what_is_explained_is_what_is_decided(
            bursts in prop::collection::vec((1u64..6, 1u64..4, any::<bool>(), 0u8..4), 1..5),
            steps in prop::collection::vec((0u64..700, 0u8..3, any::<bool>()), 1..60),
        ) {
            let missing = [Missing::Shared, Missing::ClientIp, Missing::Skip, Missing::Deny];
            let limiter = limiter(bursts.iter().enumerate().map(|(i, (burst, cost, shadow, how))| {
                let source = if i % 2 == 0 { Source::ClientIp } else { Source::Header("x-k".into()) };
                let mut spec = limit(
                    &format!("l{i}"), *burst + cost, *cost, by(source, missing[usize::from(*how)]),
                );
                if *shadow {
                    spec.mode = Mode::Shadow;
                }
                spec
            }));
            let mut now = NOW;
            for (millis, client, with_key) in steps {
                now = now.plus(std::time::Duration::from_millis(millis));
                let mut request = FakeRequest::get("/").from(&format!("192.0.2.{client}"));
                if with_key {
                    request = request.with_header("x-k", "v");
                }
                let before = buckets(&limiter);
                let told = limiter.explain(&request, now).decision;
                prop_assert_eq!(before, buckets(&limiter));
                let made = limiter.decide(&request, now);
                prop_assert_eq!(told.verdict, made.verdict);
                // Which life of a bucket it is tells nobody anything beforehand.
                let lifeless = |decision: &Decision| {
                    let checks = decision.checks.iter();
                    checks.map(|c| format!("{:?}", Check { life: 0, ..*c })).collect::<Vec<_>>()
                };
                prop_assert_eq!(lifeless(&told), lifeless(&made));
            }
        }
    }
}
