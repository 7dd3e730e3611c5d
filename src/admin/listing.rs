//! One listing of buckets: made piece by piece, as fast as the client reads.
//!
//! Only identities are gathered at the start (16 bytes each). Everything else is
//! looked up when its message is due, so that a slow client holds neither locks
//! nor the buckets' content.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use std::vec;

use prost::Message as _;
use tokio::sync::OwnedSemaphorePermit;
use tonic::Status;

use super::cluster::{Cluster, MeshView};
use super::convert;
use super::service::Means;
use crate::limiter::BucketId;
use crate::replication::BucketView;
use crate::wire::tidegate::admin::v1 as pb;

/// Buckets asked for at once: few enough that the mesh is not kept from its work.
pub(super) const GROUP: usize = 128;
/// A message is sent once it has this many bytes of buckets,
const ENOUGH: usize = 64 * 1024;
/// and never has more than this, unless a single bucket does.
const MOST: usize = 192 * 1024;

/// Which buckets are wanted.
#[derive(Debug)]
pub(super) struct Filter {
    pub(super) key_prefix: String,
    pub(super) only_not_full: bool,
}

/// A listing under way.
pub(super) struct Listing<C> {
    pub(super) means: Arc<Means<C>>,
    pub(super) ids: vec::IntoIter<BucketId>,
    pub(super) filter: Filter,
    /// How many buckets may still be told.
    pub(super) left: usize,
    /// How long the mesh may take for one answer.
    pub(super) patience: Duration,
    /// Buckets that did not fit into the last message, with their encoded size.
    pub(super) ready: VecDeque<(pb::Bucket, usize)>,
    /// Whether a message was sent.
    pub(super) begun: bool,
    /// Listings at the same time are few.
    pub(super) _permit: OwnedSemaphorePermit,
}

impl<C: Cluster> Listing<C> {
    /// The next message; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<pb::ListBucketsResponse>, Status> {
        let done = self.ready.is_empty() && (self.ids.len() == 0 || self.left == 0);
        if done && self.begun {
            return Ok(None);
        }
        let response = self.step().await?;
        // What was looked at may all have been filtered out.
        let over = response.buckets.is_empty() && self.begun;
        self.begun = true;
        Ok((!over).then_some(response))
    }

    async fn step(&mut self) -> Result<pb::ListBucketsResponse, Status> {
        let patience = self.patience;
        let slow = |_| Status::deadline_exceeded("the mesh did not answer in time");
        let gone = |stopped: super::Stopped| Status::unavailable(stopped.to_string());
        let mesh = tokio::time::timeout(patience, self.means.cluster.mesh()).await.map_err(slow)?;
        let mesh = mesh.map_err(gone)?;
        let mut size: usize = self.ready.iter().map(|(_, size)| size).sum();
        while size < ENOUGH && self.left > 0 {
            let group: Vec<BucketId> = self.ids.by_ref().take(GROUP).collect();
            if group.is_empty() {
                break;
            }
            let views = tokio::time::timeout(patience, self.means.cluster.buckets(group)).await;
            size += self.take(views.map_err(slow)?.map_err(gone)?, &mesh);
        }
        let mut buckets = Vec::new();
        let mut sum = 0;
        while let Some((_, size)) = self.ready.front()
            && (buckets.is_empty() || sum + size <= MOST)
        {
            sum += size;
            buckets.extend(self.ready.pop_front().map(|(bucket, _)| bucket));
        }
        Ok(pb::ListBucketsResponse { buckets, knowledge: Some(convert::knowledge(&mesh)) })
    }

    /// Makes those of `views` that are wanted ready; returns their size.
    fn take(&mut self, views: Vec<Option<BucketView>>, mesh: &MeshView) -> usize {
        let limits = self.means.limiter.limits();
        let mut added = 0;
        for view in views.into_iter().flatten() {
            if self.left == 0 {
                break;
            }
            if self.filter.only_not_full && view.level >= view.quota.burst() {
                continue;
            }
            let Some(bucket) = convert::bucket(&view, &limits, mesh) else { continue };
            let prefix = self.filter.key_prefix.as_str();
            let starts = |bucket: &pb::Bucket| {
                bucket.key.first().is_some_and(|part| part.text.starts_with(prefix))
            };
            if !prefix.is_empty() && !starts(&bucket) {
                continue;
            }
            // The tag and the length of the field take a few bytes more.
            let size = bucket.encoded_len() + 6;
            added += size;
            self.left -= 1;
            self.ready.push_back((bucket, size));
        }
        added
    }
}
