//! The rpcs of `tidegate.admin.v1.Admin`.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_core::Stream;
use futures_util::stream;
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};
use tracing::info;

use super::cluster::{Cluster, MeshView};
use super::listing::{Filter, GROUP, Listing};
use super::question::{self, Chosen, Named, Target, invalid, no_bucket, stopped};
use super::top::busiest;
use super::watch::{Subject, Watch};
use super::{convert, explain};
use crate::limiter::{BucketId, KeyBuf, Limit, LimitIndex, PauseOrder};
use crate::proxy::Preview;
use crate::replication::{BucketView, Companion, ReplicatedLimiter, Reset};
use crate::telemetry::log;
use crate::time::Timestamp;
use crate::wire::tidegate::admin::v1 as pb;
use crate::wire::tidegate::admin::v1::admin_server::Admin;

/// Listings of buckets at the same time, since each holds an identity for every
/// bucket until its client has read them all.
const MAX_LISTINGS: usize = 8;

/// How long the mesh may take for one part of a listing.
const PATIENCE: Duration = Duration::from_secs(10);

/// Watches at the same time.
const MAX_WATCHES: usize = 16;

/// The shortest time between two looks at one bucket, and at all of them.
const WATCH_BUCKET: Duration = Duration::from_millis(100);
const WATCH_ALL: Duration = Duration::from_millis(500);

/// Answers operators' questions.
pub struct AdminService<C> {
    means: Arc<Means<C>>,
    log: Option<log::Control>,
    configuration: Option<Arc<dyn Fn() -> Configuration + Send + Sync>>,
    listings: Arc<Semaphore>,
    watches: Arc<Semaphore>,
}

/// What every question is answered from.
pub(super) struct Means<C> {
    pub(super) limiter: Arc<ReplicatedLimiter>,
    pub(super) cluster: C,
    pub(super) preview: Preview<Companion>,
}

/// The configuration in force, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// The whole of it with every default, as YAML.
    pub yaml: String,
    /// A hash of the file; empty for flags.
    pub hash: String,
    /// The file it came from; empty for flags.
    pub file: String,
    /// When it was put in force.
    pub loaded_at: SystemTime,
    /// Why the last attempt to load another one failed, and when, if that was
    /// after this one was put in force.
    pub last_error: Option<(String, SystemTime)>,
    /// Changes in the file that need a restart.
    pub needs_restart: Vec<String>,
}

impl<C: Cluster> AdminService<C> {
    /// A service that tells of the buckets of `limiter` in `cluster`, and of what
    /// `preview` foresees. Addresses in questions are grouped as those of
    /// clients are.
    pub fn new(limiter: Arc<ReplicatedLimiter>, cluster: C, preview: Preview<Companion>) -> Self {
        Self {
            means: Arc::new(Means { limiter, cluster, preview }),
            log: None,
            configuration: None,
            listings: Arc::new(Semaphore::new(MAX_LISTINGS)),
            watches: Arc::new(Semaphore::new(MAX_WATCHES)),
        }
    }

    /// The same, which also changes what is logged.
    #[must_use]
    pub fn with_log(self, log: Option<log::Control>) -> Self {
        Self { log, ..self }
    }

    /// The same, which also tells of the configuration.
    #[must_use]
    pub fn with_configuration(
        self,
        configuration: impl Fn() -> Configuration + Send + Sync + 'static,
    ) -> Self {
        Self { configuration: Some(Arc::new(configuration)), ..self }
    }

    async fn mesh(&self) -> Result<MeshView, Status> {
        self.means.cluster.mesh().await.map_err(stopped)
    }

    async fn buckets(&self, ids: Vec<BucketId>) -> Result<Vec<Option<BucketView>>, Status> {
        self.means.cluster.buckets(ids).await.map_err(stopped)
    }

    fn ipv6_prefix(&self) -> u8 {
        self.means.preview.ipv6_prefix()
    }

    /// The buckets that a question chooses, of a limit in force.
    fn chosen(&self, limit: &str, chosen: Option<Chosen<'_>>) -> Result<Target, Status> {
        let known = |id| self.means.limiter.store().with_existing(id, |slot| slot.limit);
        question::chosen(limit, chosen, &self.means.limiter.limits(), self.ipv6_prefix(), known)
    }

    /// Closes or opens what was chosen. Returns the names of the limit and of the
    /// bucket, for the log.
    fn order(
        &self,
        target: &Target,
        order: PauseOrder,
        now: Timestamp,
    ) -> Result<(String, String), Status> {
        let limiter = &self.means.limiter;
        let limits = limiter.limits();
        let (index, done, bucket) = match target {
            Target::Limit(index) => {
                (*index, limiter.pause_limit(*index, order, now), "all".to_owned())
            }
            Target::Bucket(index, id, key) => {
                let key = key.as_ref().map(KeyBuf::as_bytes);
                // What is not there is open.
                let done = order == PauseOrder::Lift
                    && limiter.store().with_existing(*id, |_| ()).is_none()
                    || limiter.pause(*index, *id, key, order, now);
                (*index, done, id.to_string())
            }
        };
        let limit = limits.get(index).map_or("", Limit::name);
        if done {
            return Ok((limit.to_owned(), bucket));
        }
        // A reload, or a bucket that is another's by now.
        Err(Status::not_found(format!("limit `{limit}` has no bucket {bucket} any more")))
    }
}

impl<C> fmt::Debug for AdminService<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminService").finish_non_exhaustive()
    }
}

#[tonic::async_trait]
impl<C: Cluster> Admin for AdminService<C> {
    type ListBucketsStream =
        Pin<Box<dyn Stream<Item = Result<pb::ListBucketsResponse, Status>> + Send>>;
    type WatchStream = Pin<Box<dyn Stream<Item = Result<pb::WatchResponse, Status>> + Send>>;

    async fn list_limits(
        &self,
        _: Request<pb::ListLimitsRequest>,
    ) -> Result<Response<pb::ListLimitsResponse>, Status> {
        let limits = self.means.limiter.limits();
        let now = self.means.preview.now();
        let mut buckets: HashMap<LimitIndex, u64> = HashMap::new();
        self.means.limiter.store().for_each(|_, slot| *buckets.entry(slot.limit).or_default() += 1);
        let limits = limits
            .iter()
            .map(|(index, limit)| {
                let paused = self.means.limiter.companion().limit_paused_for(index, now);
                convert::limit(limit, buckets.get(&index).copied().unwrap_or_default(), paused)
            })
            .collect();
        Ok(Response::new(pb::ListLimitsResponse { limits }))
    }

    async fn get_bucket(
        &self,
        request: Request<pb::GetBucketRequest>,
    ) -> Result<Response<pb::GetBucketResponse>, Status> {
        let request = request.into_inner();
        let limits = self.means.limiter.limits();
        let named = request.bucket.as_ref().map(|bucket| match bucket {
            pb::get_bucket_request::Bucket::Key(key) => Named::Key(key),
            pb::get_bucket_request::Bucket::Id(id) => Named::Id(id),
        });
        let (id, index) = question::bucket(&request.limit, named, &limits, self.ipv6_prefix())?;
        let views = self.buckets(vec![id]).await?;
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
        let limits = self.means.limiter.limits();
        let limit = question::limit_or_all(&limits, &request.limit)?.map(|(index, _)| index);
        let permit = Arc::clone(&self.listings).try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!(
                "{MAX_LISTINGS} listings of buckets are under way; try again when one has ended"
            ))
        })?;
        // Only identities are copied while a shard is locked.
        let mut ids = Vec::new();
        self.means.limiter.store().for_each(|id, slot| {
            if limit.is_none_or(|limit| slot.limit == limit) {
                ids.push(id);
            }
        });
        let listing = Listing {
            means: Arc::clone(&self.means),
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
        let unsent = self.means.cluster.unsent().await.map_err(stopped)?;
        Ok(Response::new(convert::peers(&self.mesh().await?, unsent)))
    }

    async fn top_keys(
        &self,
        request: Request<pb::TopKeysRequest>,
    ) -> Result<Response<pb::TopKeysResponse>, Status> {
        let request = request.into_inner();
        let limits = self.means.limiter.limits();
        let limit = question::limit_or_all(&limits, &request.limit)?.map(|(index, _)| index);
        let by = question::ranking(request.by)?;
        let count = question::count("count", request.count, 10, 1000)?;
        let found = busiest(&self.means.limiter, limit, by, count);
        let mut buckets = Vec::new();
        let mesh = self.mesh().await?;
        for group in found.ids.chunks(GROUP) {
            let views = self.buckets(group.to_vec()).await?;
            let known = views.iter().flatten();
            buckets.extend(known.filter_map(|view| convert::bucket(view, &limits, &mesh)));
        }
        Ok(Response::new(pb::TopKeysResponse {
            buckets,
            knowledge: Some(convert::knowledge(&mesh)),
            compared: found.compared,
            dropped_not_full: self.means.limiter.evictions().1,
        }))
    }

    async fn reset_bucket(
        &self,
        request: Request<pb::ResetBucketRequest>,
    ) -> Result<Response<pb::ResetBucketResponse>, Status> {
        use pb::reset_bucket_request::Bucket;
        let pb::ResetBucketRequest { limit, bucket } = request.into_inner();
        let chosen = bucket.as_ref().map(|bucket| match bucket {
            Bucket::Key(key) => Chosen::One(Named::Key(key)),
            Bucket::Id(id) => Chosen::One(Named::Id(id)),
            Bucket::All(all) => Chosen::All(*all),
        });
        let what = match self.chosen(&limit, chosen)? {
            Target::Limit(index) => Reset::Limit(index),
            Target::Bucket(index, _, Some(key)) => Reset::Key(index, key),
            Target::Bucket(index, id, None) => Reset::Bucket(index, id),
        };
        let limits = self.means.limiter.limits();
        let of = match &what {
            Reset::Key(index, _) | Reset::Bucket(index, _) | Reset::Limit(index) => *index,
        };
        let of = limits.get(of).map_or("", Limit::name);
        let one = match &what {
            Reset::Key(index, key) => {
                limits.get(*index).map(|limit| limit.bucket_id(key.as_bytes()))
            }
            Reset::Bucket(_, id) => Some(*id),
            Reset::Limit(_) => None,
        };
        let bucket = one.map_or_else(|| "all".to_owned(), |id| id.to_string());
        let reset = self.means.cluster.reset(what).await.map_err(stopped)?;
        let Some(buckets) = reset else {
            return Err(Status::not_found(format!("there is no limit `{of}` any more")));
        };
        info!(limit = of, bucket, buckets, "reset by an operator");
        Ok(Response::new(pb::ResetBucketResponse {
            buckets: buckets as u64,
            knowledge: Some(convert::knowledge(&self.mesh().await?)),
        }))
    }

    async fn pause(
        &self,
        request: Request<pb::PauseRequest>,
    ) -> Result<Response<pb::PauseResponse>, Status> {
        use pb::pause_request::Bucket;
        let pb::PauseRequest { limit, bucket, pause_for } = request.into_inner();
        let chosen = bucket.as_ref().map(|bucket| match bucket {
            Bucket::Key(key) => Chosen::One(Named::Key(key)),
            Bucket::Id(id) => Chosen::One(Named::Id(id)),
            Bucket::All(all) => Chosen::All(*all),
        });
        let target = self.chosen(&limit, chosen)?;
        let time = question::pause(pause_for)?;
        let now = self.means.preview.now();
        let (limit, bucket) = self.order(&target, PauseOrder::Until(now.plus(time)), now)?;
        let seconds = time.as_secs_f64();
        info!(limit, bucket, seconds, "paused by an operator");
        let knowledge = Some(convert::knowledge(&self.mesh().await?));
        Ok(Response::new(pb::PauseResponse { knowledge }))
    }

    async fn resume(
        &self,
        request: Request<pb::ResumeRequest>,
    ) -> Result<Response<pb::ResumeResponse>, Status> {
        use pb::resume_request::Bucket;
        let pb::ResumeRequest { limit, bucket } = request.into_inner();
        let chosen = bucket.as_ref().map(|bucket| match bucket {
            Bucket::Key(key) => Chosen::One(Named::Key(key)),
            Bucket::Id(id) => Chosen::One(Named::Id(id)),
            Bucket::All(all) => Chosen::All(*all),
        });
        let target = self.chosen(&limit, chosen)?;
        let now = self.means.preview.now();
        let (limit, bucket) = self.order(&target, PauseOrder::Lift, now)?;
        info!(limit, bucket, "resumed by an operator");
        let left = match target {
            Target::Limit(_) => 0,
            Target::Bucket(index, ..) => {
                self.means.limiter.companion().limit_paused_for(index, now)
            }
        };
        Ok(Response::new(pb::ResumeResponse {
            paused_for: convert::paused_for(left),
            knowledge: Some(convert::knowledge(&self.mesh().await?)),
        }))
    }

    async fn explain(
        &self,
        request: Request<pb::ExplainRequest>,
    ) -> Result<Response<pb::ExplainResponse>, Status> {
        let (parts, asking) = explain::request(request.into_inner())?;
        let method = parts.method.clone();
        let mesh = self.mesh().await?;
        let foreseen = self.means.preview.foresee(parts, asking);
        let response = explain::response(&method, &foreseen, convert::knowledge(&mesh));
        Ok(Response::new(response))
    }

    async fn watch(
        &self,
        request: Request<pb::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let request = request.into_inner();
        let limits = self.means.limiter.limits();
        let named = request.bucket.as_ref().map(|bucket| match bucket {
            pb::watch_request::Bucket::Key(key) => Named::Key(key),
            pb::watch_request::Bucket::Id(id) => Named::Id(id),
        });
        let (subject, least) = if named.is_some() {
            let (id, limit) = question::bucket(&request.limit, named, &limits, self.ipv6_prefix())?;
            (Subject::Bucket(id, limit), WATCH_BUCKET)
        } else {
            let limit = question::limit_or_all(&limits, &request.limit)?;
            let subject = Subject::Busiest {
                limit: limit.map(|(_, name)| name),
                by: question::ranking(request.by)?,
                count: question::count("count", request.count, 10, 100)?,
            };
            (subject, WATCH_ALL)
        };
        let interval = question::interval(request.interval, least)?;
        let permit = Arc::clone(&self.watches).try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!(
                "{MAX_WATCHES} watches are under way; try again when one has ended"
            ))
        })?;
        let watch = Watch::new(Arc::clone(&self.means), subject, interval, permit);
        let messages =
            stream::try_unfold(watch, |mut watch| async { Ok(Some((watch.next().await?, watch))) });
        Ok(Response::new(Box::pin(messages)))
    }

    async fn get_config(
        &self,
        _: Request<pb::GetConfigRequest>,
    ) -> Result<Response<pb::GetConfigResponse>, Status> {
        let Some(configuration) = &self.configuration else {
            return Err(Status::failed_precondition("this process has no configuration to show"));
        };
        let Configuration { yaml, hash, file, loaded_at, last_error, needs_restart } =
            configuration();
        let (last_error, last_error_at) = last_error.unzip();
        Ok(Response::new(pb::GetConfigResponse {
            yaml,
            hash,
            file,
            loaded_at: Some(loaded_at.into()),
            last_error: last_error.unwrap_or_default(),
            last_error_at: last_error_at.map(Into::into),
            needs_restart,
        }))
    }

    async fn set_log_filter(
        &self,
        request: Request<pb::SetLogFilterRequest>,
    ) -> Result<Response<pb::SetLogFilterResponse>, Status> {
        let filter = request.into_inner().filter;
        if filter.trim().is_empty() {
            return Err(invalid("filter", "it is empty; `off` logs nothing"));
        }
        let Some(log) = &self.log else {
            return Err(Status::failed_precondition("this process has no log to change"));
        };
        let previous = log.set(&filter).map_err(|error| match &error {
            log::Error::Filter { .. } => invalid("filter", &error.to_string()),
            log::Error::Ended(_) | log::Error::Taken(_) => {
                Status::failed_precondition(error.to_string())
            }
        })?;
        info!(%previous, %filter, "what is logged was changed by an operator");
        Ok(Response::new(pb::SetLogFilterResponse { previous }))
    }
}
