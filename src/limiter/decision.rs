//! Decisions (layer 1, pure): a refusal is data, not an error.

use smallvec::SmallVec;

use super::bucket::Due;
use super::key::BucketId;
use super::limit::LimitIndex;
use super::quota::Quota;
use super::tokens::Tokens;

/// What a limit made of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It had room and was charged.
    Admitted,
    /// It had no room and refuses the request.
    Refused,
    /// It had room, but another limit refused, so nothing was taken.
    NotCharged,
    /// It had no room but only reports.
    ShadowRefused,
}

/// One limit's part in a decision.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Which limit.
    pub limit: LimitIndex,
    /// Which of its buckets.
    pub bucket: BucketId,
    /// Which life of the bucket was charged.
    pub life: u32,
    /// What the request costs there.
    pub cost: Tokens,
    /// The bucket's quota.
    pub quota: Quota,
    /// What came of it.
    pub outcome: Outcome,
    /// The bucket's level afterwards.
    pub level: Tokens,
    /// When the cost will be there (for a refusal), or is there.
    pub due: Due,
    /// Nanoseconds until the bucket is full, `None` if it never is.
    pub full_in: Option<u64>,
    /// Nanoseconds until the bucket opens, 0 if it is open.
    pub paused_for: u64,
}

impl Check {
    /// What can be had of the level at once: of a closed bucket nothing.
    pub fn left(&self) -> Tokens {
        if self.paused_for > 0 { self.level.min(Tokens::ZERO) } else { self.level }
    }
}

/// What becomes of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may pass; its checks were charged.
    Admitted,
    /// It may not pass now. The index is that of the check that is due last,
    /// in [`Decision::checks`].
    Refused(usize),
    /// A part of this limit's key is missing, which the limit denies.
    MissingPart {
        /// The limit that denies it.
        limit: LimitIndex,
        /// The index of the part in its key.
        part: usize,
    },
}

/// The decision on one request: the verdict, and every limit that applied.
#[derive(Clone, Debug)]
pub struct Decision {
    /// What becomes of the request.
    pub verdict: Verdict,
    /// One check for each limit that applied, in the order of the configuration.
    pub checks: SmallVec<[Check; 2]>,
}

impl Decision {
    /// Whether the request may pass.
    pub fn is_admitted(&self) -> bool {
        self.verdict == Verdict::Admitted
    }

    /// The check that refuses the request, if one does.
    pub fn refusal(&self) -> Option<&Check> {
        match self.verdict {
            Verdict::Refused(index) => self.checks.get(index),
            Verdict::Admitted | Verdict::MissingPart { .. } => None,
        }
    }
}
