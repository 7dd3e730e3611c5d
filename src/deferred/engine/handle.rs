//! The way to the engine for all who are not it.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::super::machine::Unfit;
use super::super::message::{Answer, Request};
use super::super::record::{Digest, Id, Kind, Record, State};
use super::super::store::{Error as StoreError, Store};

/// What is to be deferred.
#[derive(Debug)]
pub struct Submission {
    /// Where it goes.
    pub upstream: String,
    /// When it is given up.
    pub expires: Duration,
    /// The request.
    pub request: Request,
    /// Who sent it.
    pub owner: Digest,
    /// What it says.
    pub payload: Digest,
    /// The key under which its sender may ask again.
    pub claim: Option<Digest>,
}

/// It is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Its record, as it is now.
    pub record: Record,
    /// Whether it was known already, under the same key.
    pub replayed: bool,
    /// How many requests to the same upstream are in front of it.
    pub ahead: u64,
}

/// Why it is not.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The same key came with another request. That one is not touched.
    #[error("the key is that of another request")]
    KeyReused,
    /// There are as many requests as may be.
    #[error("the store is full")]
    Full,
    /// The process is leaving.
    #[error("the process is leaving")]
    Leaving,
    /// The store cannot be used. Whether the request is kept is not known.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a request was not changed.
#[derive(Debug, thiserror::Error)]
pub enum Unchanged {
    /// There is none with this id.
    #[error("there is no such request")]
    Unknown,
    /// It is in the wrong state.
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// The process is leaving.
    #[error("the process is leaving")]
    Leaving,
    /// The store cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A request as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// What is known of it.
    pub record: Record,
    /// How many are in front of it, if it is due and waits for others.
    pub ahead: Option<u64>,
}

/// What is to be done to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Take it back.
    Cancel,
    /// Ask for its result anew.
    Recheck,
    /// Send it anew.
    Resend {
        /// Under a key that the upstream has not seen.
        fresh_key: bool,
    },
}

/// Which requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Those in one of these states; none given means all.
    pub states: Vec<State>,
    /// Those for this upstream.
    pub upstream: Option<String>,
    /// Those at least this old.
    pub min_age: Duration,
    /// Those after this one.
    pub after: Option<Id>,
    /// So many at most.
    pub count: usize,
}

#[derive(Debug)]
pub(super) enum Command {
    Accept(Box<Submission>, oneshot::Sender<Result<Accepted, Refused>>),
    Look(Id, oneshot::Sender<Result<Option<View>, StoreError>>),
    Watch(Id, oneshot::Sender<()>),
    Change(Id, Order, oneshot::Sender<Result<Record, Unchanged>>),
}

/// Speaks to the engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(super) store: Store,
    pub(super) commands: mpsc::UnboundedSender<Command>,
}

impl Handle {
    /// Keeps a request to deliver it later. When this returns, it is synced.
    ///
    /// # Errors
    /// If it is not kept, or not surely.
    pub async fn accept(&self, submission: Submission) -> Result<Accepted, Refused> {
        let (reply, heard) = oneshot::channel();
        let command = Command::Accept(Box::new(submission), reply);
        self.commands.send(command).map_err(|_| Refused::Leaving)?;
        heard.await.unwrap_or(Err(Refused::Leaving))
    }

    /// The request as it is now.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub async fn look(&self, id: Id) -> Result<Option<View>, StoreError> {
        let (reply, heard) = oneshot::channel();
        if self.commands.send(Command::Look(id, reply)).is_ok()
            && let Ok(view) = heard.await
        {
            return view;
        }
        // The engine has ended; what it knew is in the store.
        Ok(self.store.record(id)?.map(|record| View { record, ahead: None }))
    }

    /// Waits until the request is settled, or unknown, or the engine ends. Safe to
    /// cancel.
    pub async fn settled(&self, id: Id) {
        let (reply, heard) = oneshot::channel();
        if self.commands.send(Command::Watch(id, reply)).is_ok() {
            let _ = heard.await;
        }
    }

    /// An answer of the upstream, as it came.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn answer(&self, id: Id, kind: Kind) -> Result<Option<Answer>, StoreError> {
        self.store.answer(id, kind)
    }

    /// Changes a request; its record afterwards, when that is synced.
    ///
    /// # Errors
    /// If it was not changed, or not surely.
    pub async fn change(&self, id: Id, order: Order) -> Result<Record, Unchanged> {
        let (reply, heard) = oneshot::channel();
        let command = Command::Change(id, order, reply);
        self.commands.send(command).map_err(|_| Unchanged::Leaving)?;
        heard.await.unwrap_or(Err(Unchanged::Leaving))
    }

    /// The records that `filter` describes, oldest first.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn list(
        &self,
        filter: &Filter,
        now: crate::time::WallTime,
    ) -> Result<Vec<Record>, StoreError> {
        let mut found = Vec::new();
        if filter.count == 0 {
            return Ok(found);
        }
        self.store.each_record(filter.after, |record| {
            let fits = (filter.states.is_empty() || filter.states.contains(&record.state))
                && filter.upstream.as_ref().is_none_or(|name| *name == record.upstream)
                && now.since(record.created) >= filter.min_age;
            if fits {
                found.push(record);
            }
            found.len() < filter.count
        })?;
        Ok(found)
    }

    /// Whether nothing is accepted or sent any more because the store could not be
    /// written.
    pub fn is_closed(&self) -> bool {
        self.store.is_closed()
    }
}
