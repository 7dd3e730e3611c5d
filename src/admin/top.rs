//! The busiest buckets: one pass over all of them with a heap of as many as are
//! wanted, so that the data path counts nothing for it that it does not count
//! anyway.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::limiter::{BucketId, LimitIndex};
use crate::replication::ReplicatedLimiter;
use crate::wire::tidegate::admin::v1 as pb;

/// What one pass found.
#[derive(Debug)]
pub(super) struct Busiest {
    /// The busiest first.
    pub(super) ids: Vec<BucketId>,
    /// Buckets that were compared.
    pub(super) compared: u64,
    /// Of each limit that was compared.
    pub(super) by_limit: HashMap<LimitIndex, u64>,
}

/// The `count` busiest buckets of `limit`, or of all limits. Buckets of equal
/// rank are ordered by their identities.
pub(super) fn busiest(
    limiter: &ReplicatedLimiter,
    limit: Option<LimitIndex>,
    by: pb::Ranking,
    count: usize,
) -> Busiest {
    let mut heap: BinaryHeap<Reverse<(u64, Reverse<BucketId>)>> = BinaryHeap::new();
    let mut by_limit: HashMap<LimitIndex, u64> = HashMap::new();
    limiter.store().for_each(|id, slot| {
        if limit.is_some_and(|limit| limit != slot.limit) {
            return;
        }
        *by_limit.entry(slot.limit).or_default() += 1;
        let rank = match by {
            pb::Ranking::Unspecified | pb::Ranking::Refused => u64::from(slot.refused),
            pb::Ranking::Spent => {
                let elsewhere = slot.companion.as_deref().map_or(0, |l| l.spent_elsewhere());
                slot.net().saturating_add(elsewhere)
            }
        };
        let entry = Reverse((rank, Reverse(id)));
        if rank == 0 || count == 0 {
            return;
        }
        if heap.len() < count {
            heap.push(entry);
        } else if heap.peek().is_some_and(|least| entry < *least) {
            heap.pop();
            heap.push(entry);
        }
    });
    Busiest {
        ids: heap.into_sorted_vec().into_iter().map(|Reverse((_, Reverse(id)))| id).collect(),
        compared: by_limit.values().sum(),
        by_limit,
    }
}
