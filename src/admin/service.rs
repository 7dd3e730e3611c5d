//! The rpcs of `tidegate.admin.v1.Admin`.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_core::Stream;
use futures_util::stream;
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use super::cluster::{Cluster, MeshView, Stopped};
use super::convert;
use super::listing::{Filter, Listing};
use crate::limiter::{BucketId, KeyTextError, Limit, LimitIndex, LimitSet};
use crate::replication::ReplicatedLimiter;
use crate::wire::tidegate::admin::v1 as pb;
use crate::wire::tidegate::admin::v1::admin_server::Admin;

/// Listings of buckets at the same time, since each holds an identity for every
/// bucket until its client has read them all.
const MAX_LISTINGS: usize = 8;

/// How long the mesh may take for one part of a listing.
const PATIENCE: Duration = Duration::from_secs(10);

/// Answers operators' questions.
pub struct AdminService<C> {
    limiter: Arc<ReplicatedLimiter>,
    cluster: Arc<C>,
    ipv6_prefix: u8,
    listings: Arc<Semaphore>,
}

impl<C: Cluster> AdminService<C> {
    /// A service that tells of the buckets of `limiter` in `cluster`. Addresses
    /// in questions are grouped by `ipv6_prefix`, as those of clients are.
    pub fn new(limiter: Arc<ReplicatedLimiter>, cluster: C, ipv6_prefix: u8) -> Self {
        Self {
            limiter,
            cluster: Arc::new(cluster),
            ipv6_prefix,
            listings: Arc::new(Semaphore::new(MAX_LISTINGS)),
        }
    }

    async fn mesh(&self) -> Result<MeshView, Status> {
        self.cluster.mesh().await.map_err(stopped)
    }

    /// The bucket that a request names, and the limit if the request names it.
    fn asked_for(
        &self,
        request: &pb::GetBucketRequest,
        limits: &LimitSet,
    ) -> Result<(BucketId, Option<LimitIndex>), Status> {
        let by_name = || find(limits, &request.limit);
        match &request.bucket {
            None => Err(invalid("bucket", "either a `key` or an `id` is needed")),
            Some(pb::get_bucket_request::Bucket::Id(id)) => {
                let limit = if request.limit.is_empty() { None } else { Some(by_name()?.0) };
                let id = convert::bucket_id(id)
                    .ok_or_else(|| invalid("id", "32 hexadecimal digits are needed"))?;
                Ok((id, limit))
            }
            Some(pb::get_bucket_request::Bucket::Key(key)) => {
                if request.limit.is_empty() {
                    return Err(invalid("limit", "a key needs the name of its limit"));
                }
                let (index, limit) = by_name()?;
                Ok((self.bucket_of(key, limit)?, Some(index)))
            }
        }
    }

    fn bucket_of(&self, key: &pb::Key, limit: &Limit) -> Result<BucketId, Status> {
        let mut values = Vec::with_capacity(key.parts.len());
        for (index, part) in key.parts.iter().enumerate() {
            values.push(match &part.value {
                Some(pb::key_value::Value::Text(text)) => Some(text.as_str()),
                Some(pb::key_value::Value::Missing(true)) => None,
                Some(pb::key_value::Value::Missing(false)) | None => {
                    let field = format!("key.parts[{index}]");
                    return Err(invalid(&field, "either a `text` or `missing: true` is needed"));
                }
            });
        }
        let canonical = limit.rule().key_from_parts(&values, self.ipv6_prefix);
        let canonical = canonical.map_err(|error| match &error {
            KeyTextError::Count { .. } => {
                let parts = limit.rule().parts_text();
                let parts = if parts.is_empty() { "no parts" } else { &parts };
                invalid("key.parts", &format!("{error}; limit `{}` has {parts}", limit.name()))
            }
            KeyTextError::Empty(_) | KeyTextError::Address(_) => {
                invalid("key.parts", &error.to_string())
            }
        })?;
        Ok(limit.bucket_id(canonical.as_bytes()))
    }
}

impl<C> fmt::Debug for AdminService<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminService").field("ipv6_prefix", &self.ipv6_prefix).finish()
    }
}

#[tonic::async_trait]
impl<C: Cluster> Admin for AdminService<C> {
    type ListBucketsStream =
        Pin<Box<dyn Stream<Item = Result<pb::ListBucketsResponse, Status>> + Send>>;

    async fn list_limits(
        &self,
        _: Request<pb::ListLimitsRequest>,
    ) -> Result<Response<pb::ListLimitsResponse>, Status> {
        let limits = self.limiter.limits();
        let mut buckets: HashMap<LimitIndex, u64> = HashMap::new();
        self.limiter.store().for_each(|_, slot| *buckets.entry(slot.limit).or_default() += 1);
        let limits = limits
            .iter()
            .map(|(index, limit)| {
                convert::limit(limit, buckets.get(&index).copied().unwrap_or_default())
            })
            .collect();
        Ok(Response::new(pb::ListLimitsResponse { limits }))
    }

    async fn get_bucket(
        &self,
        request: Request<pb::GetBucketRequest>,
    ) -> Result<Response<pb::GetBucketResponse>, Status> {
        let request = request.into_inner();
        let limits = self.limiter.limits();
        let (id, index) = self.asked_for(&request, &limits)?;
        let views = self.cluster.buckets(vec![id]).await.map_err(stopped)?;
        let mesh = self.mesh().await?;
        let view = views.into_iter().next().flatten();
        let view = view.filter(|view| index.is_none_or(|index| view.limit == index));
        let Some(bucket) = view.and_then(|view| convert::bucket(&view, &limits, &mesh)) else {
            return Err(no_bucket(id, index.and_then(|index| limits.get(index))));
        };
        Ok(Response::new(pb::GetBucketResponse {
            bucket: Some(bucket),
            knowledge: Some(convert::knowledge(&mesh)),
        }))
    }

    async fn list_buckets(
        &self,
        request: Request<pb::ListBucketsRequest>,
    ) -> Result<Response<Self::ListBucketsStream>, Status> {
        let request = request.into_inner();
        let limits = self.limiter.limits();
        let limit = match request.limit.as_str() {
            "" => None,
            name => Some(find(&limits, name)?.0),
        };
        let permit = Arc::clone(&self.listings).try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!(
                "{MAX_LISTINGS} listings of buckets are under way; try again when one has ended"
            ))
        })?;
        // Only identities are copied while a shard is locked.
        let mut ids = Vec::new();
        self.limiter.store().for_each(|id, slot| {
            if limit.is_none_or(|limit| slot.limit == limit) {
                ids.push(id);
            }
        });
        let listing = Listing {
            limiter: Arc::clone(&self.limiter),
            cluster: Arc::clone(&self.cluster),
            ids: ids.into_iter(),
            filter: Filter { key_prefix: request.key_prefix, only_not_full: request.only_not_full },
            left: match request.max_count {
                0 => usize::MAX,
                count => count as usize,
            },
            patience: PATIENCE,
            ready: VecDeque::new(),
            begun: false,
            _permit: permit,
        };
        let messages = stream::try_unfold(listing, |mut listing| async {
            Ok(listing.next().await?.map(|message| (message, listing)))
        });
        Ok(Response::new(Box::pin(messages)))
    }

    async fn list_peers(
        &self,
        _: Request<pb::ListPeersRequest>,
    ) -> Result<Response<pb::ListPeersResponse>, Status> {
        let unsent = self.cluster.unsent().await.map_err(stopped)?;
        Ok(Response::new(convert::peers(&self.mesh().await?, unsent)))
    }
}

fn find<'a>(limits: &'a LimitSet, name: &str) -> Result<(LimitIndex, &'a Limit), Status> {
    limits.find(name).ok_or_else(|| Status::not_found(format!("there is no limit `{name}`")))
}

fn no_bucket(id: BucketId, limit: Option<&Limit>) -> Status {
    let of = limit.map_or_else(String::new, |limit| format!(" of limit `{}`", limit.name()));
    let full = limit.map_or_else(String::new, |limit| {
        format!(" ({} of {} tokens)", limit.quota(id).burst(), limit.quota(id).burst())
    });
    Status::not_found(format!(
        "there is no bucket {id}{of} here: the key was not used lately, so its bucket is full{full}"
    ))
}

fn invalid(field: &str, reason: &str) -> Status {
    Status::invalid_argument(format!("{field}: {reason}"))
}

fn stopped(error: Stopped) -> Status {
    Status::unavailable(error.to_string())
}
