//! Handle: how the rest of the process speaks with the mesh.

use tokio::sync::{mpsc, oneshot, watch};

use crate::replication::{Engine, Reset};
use crate::time::Timestamp;

/// The mesh has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the mesh has ended")]
pub struct MeshGone;

/// Longest reason of a Goodbye, in bytes.
const MAX_REASON_BYTES: usize = 128;

/// What is run with the engine on the mesh's task.
pub(super) type Inspection = Box<dyn FnOnce(&Engine, Timestamp) + Send>;

/// What others ask of the mesh.
pub(super) enum Command {
    Inspect(Inspection),
    Reset { what: Reset, done: oneshot::Sender<Option<usize>> },
    Partition { cut: bool, done: oneshot::Sender<()> },
    Leave { reason: String, done: oneshot::Sender<()> },
    Reload { done: oneshot::Sender<()> },
}

/// Speaks with a running mesh. Cheap to clone.
#[derive(Clone, Debug)]
pub struct MeshHandle {
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) joined: watch::Receiver<bool>,
}

impl MeshHandle {
    /// Runs `look` with the engine, between two steps of the mesh, which waits
    /// for it: it must be short.
    ///
    /// # Errors
    /// If the mesh has ended.
    pub async fn inspect<R, F>(&self, look: F) -> Result<R, MeshGone>
    where
        R: Send + 'static,
        F: FnOnce(&Engine, Timestamp) -> R + Send + 'static,
    {
        let (sender, seen) = oneshot::channel();
        let inspection: Inspection = Box::new(move |engine, now| {
            // Whoever asked may have given up meanwhile.
            let _ = sender.send(look(engine, now));
        });
        self.commands.send(Command::Inspect(inspection)).await.map_err(|_| MeshGone)?;
        seen.await.map_err(|_| MeshGone)
    }

    /// Waits until this replica knows what its peers know, or has waited long
    /// enough for them.
    ///
    /// # Errors
    /// If the mesh ended before.
    pub async fn joined(&self) -> Result<(), MeshGone> {
        let mut joined = self.joined.clone();
        joined.wait_for(|joined| *joined).await.map(|_| ()).map_err(|_| MeshGone)
    }

    /// Looks at the limiter's limits anew, and tells every peer of them. To be
    /// called when they were replaced; returns when the engine goes by the new
    /// ones.
    ///
    /// # Errors
    /// If the mesh has ended.
    pub async fn reload(&self) -> Result<(), MeshGone> {
        let (done, finished) = oneshot::channel();
        self.commands.send(Command::Reload { done }).await.map_err(|_| MeshGone)?;
        finished.await.map_err(|_| MeshGone)
    }

    /// Makes buckets full again on every replica. Returns how many this replica
    /// had, or `None` if there is no such limit; peers are told at once, and those
    /// that cannot be reached when they can.
    ///
    /// # Errors
    /// If the mesh has ended.
    pub async fn reset(&self, what: Reset) -> Result<Option<usize>, MeshGone> {
        let (done, finished) = oneshot::channel();
        self.commands.send(Command::Reset { what, done }).await.map_err(|_| MeshGone)?;
        finished.await.map_err(|_| MeshGone)
    }

    /// Leaves for good: everything spent is told to every peer, followed by a
    /// Goodbye. Returns when all of them took it, after about a second at most,
    /// and at once if the mesh has already ended. To be called when nothing is
    /// spent any more.
    pub async fn leave(&self, reason: &str) {
        let mut end = reason.len().min(MAX_REASON_BYTES);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let (done, left) = oneshot::channel();
        let command = Command::Leave { reason: reason[..end].to_owned(), done };
        if self.commands.send(command).await.is_ok() {
            // An error means that the mesh ended, which is as good.
            let _ = left.await;
        }
    }

    /// For demonstrations and tests: with `true` cuts this replica off from all
    /// peers (sessions end, nobody is dialled, whoever dials is refused) until it
    /// is called with `false`. Returns when that is done.
    ///
    /// # Errors
    /// If the mesh has ended.
    pub async fn partition(&self, cut: bool) -> Result<(), MeshGone> {
        let (done, finished) = oneshot::channel();
        self.commands.send(Command::Partition { cut, done }).await.map_err(|_| MeshGone)?;
        finished.await.map_err(|_| MeshGone)
    }
}
