//! The admin service's view of the mesh.

use crate::admin::{Cluster, MeshView, ReplicaView, Stopped};
use crate::limiter::BucketId;
use crate::peer::MeshHandle;
use crate::replication::{BucketView, Reset};

/// Asks the mesh.
#[derive(Debug)]
pub(super) struct MeshCluster {
    mesh: MeshHandle,
    name: String,
    group: String,
}

impl MeshCluster {
    pub(super) fn new(mesh: MeshHandle, name: String, group: &str) -> Self {
        Self { mesh, name, group: group.to_owned() }
    }
}

impl Cluster for MeshCluster {
    async fn mesh(&self) -> Result<MeshView, Stopped> {
        let (name, group) = (self.name.clone(), self.group.clone());
        let view = self.mesh.inspect(|engine, now| MeshView {
            this: ReplicaView {
                incarnation: engine.incarnation(),
                name,
                address: engine.address().to_owned(),
                group,
                joined: engine.is_joined(),
            },
            peers: engine.peers(now),
            listed_addresses: engine.listed_addresses(),
        });
        view.await.map_err(|_| Stopped)
    }

    async fn unsent(&self) -> Result<u64, Stopped> {
        self.mesh.inspect(|engine, _| engine.unsent()).await.map_err(|_| Stopped)
    }

    async fn buckets(&self, ids: Vec<BucketId>) -> Result<Vec<Option<BucketView>>, Stopped> {
        let views = self
            .mesh
            .inspect(move |engine, now| ids.iter().map(|id| engine.bucket(*id, now)).collect());
        views.await.map_err(|_| Stopped)
    }

    async fn reset(&self, what: Reset) -> Result<Option<usize>, Stopped> {
        self.mesh.reset(what).await.map_err(|_| Stopped)
    }
}
