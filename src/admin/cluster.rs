//! What the admin service needs to know of the cluster.

use std::future::Future;

use crate::limiter::BucketId;
use crate::replication::{BucketView, Incarnation, PeerView, Reset};

/// The cluster as this replica knows it. Implemented over the mesh.
pub trait Cluster: Send + Sync + 'static {
    /// The mesh at this moment. Called for every message of an answer, so that
    /// it must not look at buckets.
    fn mesh(&self) -> impl Future<Output = Result<MeshView, Stopped>> + Send;

    /// Micro-tokens over all buckets that peers have not been told of. May visit
    /// every bucket.
    fn unsent(&self) -> impl Future<Output = Result<u64, Stopped>> + Send;

    /// The buckets of these identities at one moment, one answer for each in the
    /// same order; `None` for a bucket that does not exist. Called with at most a
    /// few hundred identities at a time.
    fn buckets(
        &self,
        ids: Vec<BucketId>,
    ) -> impl Future<Output = Result<Vec<Option<BucketView>>, Stopped>> + Send;

    /// Makes buckets full again on every replica. Returns how many this replica
    /// had, or `None` if there is no such limit.
    fn reset(&self, what: Reset) -> impl Future<Output = Result<Option<usize>, Stopped>> + Send;
}

/// The mesh has ended, because the process is leaving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the mesh has stopped")]
pub struct Stopped;

/// This replica and its peers.
#[derive(Clone, Debug, PartialEq)]
pub struct MeshView {
    /// This replica.
    pub this: ReplicaView,
    /// Every peer that is known.
    pub peers: Vec<PeerView>,
    /// Addresses that discovery lists, this replica's own left out.
    pub listed_addresses: usize,
}

/// This replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaView {
    /// Its present life.
    pub incarnation: Incarnation,
    /// Its label.
    pub name: String,
    /// Where it believes it can be dialled; may be empty.
    pub address: String,
    /// Replicas of other groups are strangers.
    pub group: String,
    /// Whether it knows what its peers know, or has waited long enough.
    pub joined: bool,
}
