//! Watches: one bucket or the busiest of a limit, looked at again and again, as
//! long as the caller reads.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Interval, MissedTickBehavior};
use tonic::Status;

use super::cluster::Cluster;
use super::convert;
use super::question::stopped;
use super::service::Means;
use super::top::busiest;
use crate::limiter::{BucketId, LimitIndex};
use crate::wire::tidegate::admin::v1 as pb;

/// What is watched.
#[derive(Debug)]
pub(super) enum Subject {
    /// One bucket; the limit, if the question named it.
    Bucket(BucketId, Option<LimitIndex>),
    /// The busiest buckets of the limit of this name, or of all limits.
    Busiest {
        /// By name, because a limit's index may change.
        limit: Option<String>,
        by: pb::Ranking,
        count: usize,
    },
}

/// A watch under way.
pub(super) struct Watch<C> {
    means: Arc<Means<C>>,
    subject: Subject,
    interval: Interval,
    /// The bucket as it was told last.
    told: Option<Vec<pb::Bucket>>,
    _permit: OwnedSemaphorePermit,
}

impl<C: Cluster> Watch<C> {
    pub(super) fn new(
        means: Arc<Means<C>>,
        subject: Subject,
        interval: Duration,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        let mut interval = tokio::time::interval(interval);
        // A caller that reads slowly gets fewer messages, not the missed ones.
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { means, subject, interval, told: None, _permit: permit }
    }

    /// The next message.
    pub(super) async fn next(&mut self) -> Result<pb::WatchResponse, Status> {
        loop {
            self.interval.tick().await;
            let response = self.look().await?;
            if matches!(self.subject, Subject::Bucket(..)) {
                if self.told.as_ref().is_some_and(|told| same(told, &response.buckets)) {
                    continue;
                }
                self.told = Some(response.buckets.clone());
            }
            return Ok(response);
        }
    }

    async fn look(&self) -> Result<pb::WatchResponse, Status> {
        let means = &self.means;
        let limits = means.limiter.limits();
        let (ids, totals) = match &self.subject {
            Subject::Bucket(id, _) => (vec![*id], Vec::new()),
            Subject::Busiest { limit, by, count } => {
                let index = match limit {
                    None => None,
                    Some(name) => Some(super::question::find(&limits, name)?.0),
                };
                let found = busiest(&means.limiter, index, *by, *count);
                let watched =
                    limits.iter().filter(|(at, _)| index.is_none_or(|index| index == *at));
                let totals = watched.map(|(at, limit)| {
                    let buckets = found.by_limit.get(&at).copied().unwrap_or_default();
                    convert::totals(limit.name(), means.preview.totals(limit.name()), buckets)
                });
                let totals = totals.collect();
                (found.ids, totals)
            }
        };
        let named = match self.subject {
            Subject::Bucket(_, limit) => limit,
            Subject::Busiest { .. } => None,
        };
        let views = means.cluster.buckets(ids).await.map_err(stopped)?;
        let mesh = means.cluster.mesh().await.map_err(stopped)?;
        let buckets = views
            .iter()
            .flatten()
            .filter(|view| named.is_none_or(|named| named == view.limit))
            .filter_map(|view| convert::bucket(view, &limits, &mesh));
        Ok(pb::WatchResponse {
            buckets: buckets.collect(),
            knowledge: Some(convert::knowledge(&mesh)),
            totals,
        })
    }
}

/// Whether nothing has changed but the time since a peer was heard, and the rest of
/// a pause by what has passed.
fn same(told: &[pb::Bucket], now: &[pb::Bucket]) -> bool {
    let closed = |bucket: &pb::Bucket| bucket.paused_for.is_some();
    let ageless = |bucket: &pb::Bucket| {
        let next_token_in = bucket.next_token_in.filter(|_| !closed(bucket));
        pb::Bucket { heard_ago: None, paused_for: None, next_token_in, ..bucket.clone() }
    };
    told.iter().map(closed).eq(now.iter().map(closed))
        && told.iter().map(ageless).eq(now.iter().map(ageless))
}
