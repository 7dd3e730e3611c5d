//! Where deferred requests lie: one redb file, read from anywhere, written by one
//! [`Writer`] that commits many changes with one sync.
//!
//! Invariants:
//! - a change is acknowledged only after it was synced;
//! - after a failed commit nothing is written any more in this life: what the file
//!   then holds is not known, so that writing on could contradict it;
//! - one process at a time has the file.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use redb::backends::FileBackend;
use redb::{
    Builder, Database, DatabaseError, ReadableDatabase as _, ReadableTableMetadata as _,
    StorageBackend, TableDefinition, WriteTransaction,
};
use tokio::sync::{mpsc, oneshot};

use super::codec::Malformed;
use super::message::{Answer, Request};
use super::metrics::Metrics;
use super::record::{Digest, Id, Kind, Record};
use crate::time::Clock;

const RECORDS: TableDefinition<'static, u128, &[u8]> = TableDefinition::new("records");
const REQUESTS: TableDefinition<'static, u128, &[u8]> = TableDefinition::new("requests");
const ANSWERS: TableDefinition<'static, (u128, u8), &[u8]> = TableDefinition::new("answers");
const CLAIMS: TableDefinition<'static, &[u8; 16], u128> = TableDefinition::new("claims");
const META: TableDefinition<'static, &str, u64> = TableDefinition::new("meta");

/// The format of the tables.
const FORMAT: u64 = 1;
/// Changes that one sync commits at most.
const MAX_BATCH: usize = 512;
/// What redb may keep in memory, in bytes.
const CACHE: usize = 8 << 20;
/// A file smaller than this is not worth compacting, in bytes.
const WORTH_COMPACTING: u64 = 16 << 20;

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be made, opened, or made private. Nothing was changed.
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// Another process has it open. Nothing was changed.
    #[error("{0}: another process uses it; each replica needs a file of its own")]
    InUse(PathBuf),
    /// What is in it cannot be read. Nothing was changed.
    #[error("{path}: {what}; move the file away to start without what it holds")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A later version wrote it. Nothing was changed.
    #[error("{path}: format {found} is of a later version, this one knows up to {FORMAT}")]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u64,
    },
    /// Reading failed.
    #[error("the store cannot be read: {0}")]
    Read(String),
    /// Nothing is written any more, because a commit failed. What was acknowledged
    /// before is safe; whether the change of which this is the answer was kept, the
    /// next start will tell.
    #[error("the store is closed because it could not be written")]
    Closed,
}

impl From<redb::Error> for Error {
    fn from(error: redb::Error) -> Self {
        Self::Read(error.to_string())
    }
}

impl From<Malformed> for Error {
    fn from(error: Malformed) -> Self {
        Self::Read(error.to_string())
    }
}

/// One change of the file. All changes of one commit happen, or none.
#[derive(Debug)]
pub enum Change {
    /// A new request, with the key that it claims, if any.
    Accept(Record, Bytes),
    /// A record has changed; an answer is kept, if there is one.
    Update(Record, Option<(Kind, Bytes)>),
    /// A record has changed, and the answers so far count no more.
    Renew(Record),
    /// A record with all that belongs to it is forgotten.
    Forget(Record),
}

/// The file, for reading, and the way to its writer. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store {
    database: Arc<Database>,
    commits: mpsc::UnboundedSender<Commit>,
    closed: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Commit {
    changes: Vec<Change>,
    done: oneshot::Sender<Result<(), Error>>,
}

/// Writes what it is told to. There is one for each file.
#[derive(Debug)]
pub struct Writer {
    database: Arc<Database>,
    commits: mpsc::UnboundedReceiver<Commit>,
    closed: Arc<AtomicBool>,
    clock: Clock,
    metrics: Metrics,
}

impl Store {
    /// Opens the file at `path`, or makes it. It can be read and written by its owner
    /// only.
    ///
    /// # Errors
    /// If the file cannot be used.
    pub fn open(path: &Path, clock: Clock, metrics: Metrics) -> Result<(Self, Writer), Error> {
        let file_error = |error| Error::File { path: path.to_owned(), error };
        if !path.exists() {
            Self::make(path, &clock, &metrics)?;
        }
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(file_error)?;
        let mut permissions = file.metadata().map_err(file_error)?.permissions();
        if permissions.mode() & 0o077 != 0 {
            permissions.set_mode(0o600);
            fs::set_permissions(path, permissions).map_err(file_error)?;
        }
        let backend = FileBackend::new(file).map_err(|error| opening(path, error))?;
        Self::open_on(path, backend, clock, metrics)
    }

    /// Makes the file under another name and gives it its own when it is whole, so
    /// that a loss of power meanwhile leaves none rather than half of one.
    fn make(path: &Path, clock: &Clock, metrics: &Metrics) -> Result<(), Error> {
        let file_error = |error| Error::File { path: path.to_owned(), error };
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(format!(".{}", std::process::id()));
        let unfinished = PathBuf::from(unfinished);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(&unfinished).map_err(file_error)?;
        let backend = FileBackend::new(file).map_err(|error| opening(path, error))?;
        drop(Self::open_on(path, backend, clock.clone(), metrics.clone())?);
        // Unlike a renaming, this replaces nothing that another process just made.
        let named = match fs::hard_link(&unfinished, path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        };
        fs::remove_file(&unfinished).and(named).map_err(file_error)?;
        // The name of a file is not synced with the file.
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = File::open(parent.unwrap_or(Path::new("."))).map_err(file_error)?;
        directory.sync_all().map_err(file_error)
    }

    /// The same on any storage; `path` is for what errors say.
    ///
    /// # Errors
    /// If the storage cannot be used.
    pub fn open_on(
        path: &Path,
        storage: impl StorageBackend,
        clock: Clock,
        metrics: Metrics,
    ) -> Result<(Self, Writer), Error> {
        let size = storage.len().map_err(|error| Error::File { path: path.to_owned(), error })?;
        let mut database = Builder::new()
            .set_cache_size(CACHE)
            .create_with_backend(storage)
            .map_err(|error| opening(path, error))?;
        let corrupt =
            |error: redb::Error| Error::Corrupt { path: path.to_owned(), what: error.to_string() };
        let found = prepare(&database).map_err(corrupt)?;
        if found != FORMAT {
            return Err(Error::Newer { path: path.to_owned(), found });
        }
        if size > WORTH_COMPACTING && is_empty(&database).map_err(corrupt)? {
            database.compact().map_err(|error| corrupt(error.into()))?;
        }
        let database = Arc::new(database);
        let (commits, receiver) = mpsc::unbounded_channel();
        let closed = Arc::new(AtomicBool::new(false));
        let store = Self { database: Arc::clone(&database), commits, closed: Arc::clone(&closed) };
        Ok((store, Writer { database, commits: receiver, closed, clock, metrics }))
    }

    /// Makes `changes` together, and returns when they are synced.
    ///
    /// # Errors
    /// [`Error::Closed`] if they are not, or not surely.
    pub async fn commit(&self, changes: Vec<Change>) -> Result<(), Error> {
        let (done, heard) = oneshot::channel();
        self.commits.send(Commit { changes, done }).map_err(|_| Error::Closed)?;
        heard.await.unwrap_or(Err(Error::Closed))
    }

    /// Whether nothing is written any more because a commit failed.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The record with this id.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn record(&self, id: Id) -> Result<Option<Record>, Error> {
        let read = || -> Result<Option<Vec<u8>>, redb::Error> {
            let table = self.database.begin_read()?.open_table(RECORDS)?;
            Ok(table.get(id.as_u128())?.map(|guard| guard.value().to_vec()))
        };
        Ok(read()?.map(|bytes| Record::decode(&bytes)).transpose()?)
    }

    /// The request with this id.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn request(&self, id: Id) -> Result<Option<Request>, Error> {
        let read = || -> Result<Option<Bytes>, redb::Error> {
            let table = self.database.begin_read()?.open_table(REQUESTS)?;
            Ok(table.get(id.as_u128())?.map(|guard| Bytes::copy_from_slice(guard.value())))
        };
        Ok(read()?.map(Request::decode).transpose()?)
    }

    /// An answer to the request with this id.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn answer(&self, id: Id, kind: Kind) -> Result<Option<Answer>, Error> {
        let read = || -> Result<Option<Bytes>, redb::Error> {
            let table = self.database.begin_read()?.open_table(ANSWERS)?;
            let found = table.get((id.as_u128(), answer_number(kind)))?;
            Ok(found.map(|guard| Bytes::copy_from_slice(guard.value())))
        };
        Ok(read()?.map(Answer::decode).transpose()?)
    }

    /// Which request holds this claim.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn claimed(&self, claim: &Digest) -> Result<Option<Id>, Error> {
        let read = || -> Result<Option<u128>, redb::Error> {
            let table = self.database.begin_read()?.open_table(CLAIMS)?;
            Ok(table.get(claim.as_bytes())?.map(|guard| guard.value()))
        };
        Ok(read()?.map(Id::from_u128))
    }

    /// Calls `each` for every record with an id above `after`, in the order of their
    /// ids, which is that of their acceptance, until it returns false.
    ///
    /// # Errors
    /// If one cannot be read; the text names it.
    pub fn each_record(
        &self,
        after: Option<Id>,
        mut each: impl FnMut(Record) -> bool,
    ) -> Result<(), Error> {
        let from =
            after.map_or(std::ops::Bound::Unbounded, |id| std::ops::Bound::Excluded(id.as_u128()));
        let read = || -> Result<_, redb::Error> {
            let table = self.database.begin_read()?.open_table(RECORDS)?;
            Ok(table.range((from, std::ops::Bound::Unbounded))?)
        };
        for row in read()? {
            let (id, bytes) = row.map_err(|error| Error::Read(error.to_string()))?;
            let record = Record::decode(bytes.value()).map_err(|error| {
                Error::Read(format!("request {}: {error}", Id::from_u128(id.value())))
            })?;
            if !each(record) {
                break;
            }
        }
        Ok(())
    }
}

impl Writer {
    /// Writes until every [`Store`] of the file is gone. It blocks its thread while
    /// it syncs.
    pub async fn run(mut self) {
        let mut batch = Vec::new();
        while self.commits.recv_many(&mut batch, MAX_BATCH).await > 0 {
            let result = self.write(&batch);
            if let Err(error) = &result {
                if !self.closed.swap(true, Ordering::AcqRel) {
                    tracing::error!(%error, "the store of deferred requests cannot be written; \
                        nothing is accepted or sent any more");
                }
                self.metrics.store_closed.set(1);
            }
            for commit in batch.drain(..) {
                // Who asked may have left.
                let _ = commit.done.send(match &result {
                    Ok(()) => Ok(()),
                    Err(_) => Err(Error::Closed),
                });
            }
        }
    }

    fn write(&self, batch: &[Commit]) -> Result<(), redb::Error> {
        if self.closed.load(Ordering::Acquire) {
            return Err(redb::Error::DatabaseClosed);
        }
        let begun = self.clock.now();
        let transaction = self.database.begin_write()?;
        apply(&transaction, batch.iter().flat_map(|commit| &commit.changes))?;
        transaction.commit()?;
        self.metrics.committed(self.clock.now().since(begun));
        Ok(())
    }
}

fn apply<'a>(
    transaction: &WriteTransaction,
    changes: impl Iterator<Item = &'a Change>,
) -> Result<(), redb::Error> {
    let mut records = transaction.open_table(RECORDS)?;
    let mut requests = transaction.open_table(REQUESTS)?;
    let mut answers = transaction.open_table(ANSWERS)?;
    let mut claims = transaction.open_table(CLAIMS)?;
    for change in changes {
        match change {
            Change::Accept(record, request) => {
                records.insert(record.id.as_u128(), record.encode().as_slice())?;
                requests.insert(record.id.as_u128(), request.as_ref())?;
                if let Some(claim) = &record.claim {
                    claims.insert(claim.as_bytes(), record.id.as_u128())?;
                }
            }
            Change::Update(record, answer) => {
                records.insert(record.id.as_u128(), record.encode().as_slice())?;
                if let Some((kind, answer)) = answer {
                    let key = (record.id.as_u128(), answer_number(*kind));
                    answers.insert(key, answer.as_ref())?;
                }
            }
            Change::Renew(record) => {
                records.insert(record.id.as_u128(), record.encode().as_slice())?;
                for kind in Kind::ALL {
                    answers.remove((record.id.as_u128(), answer_number(kind)))?;
                }
            }
            Change::Forget(record) => {
                records.remove(record.id.as_u128())?;
                requests.remove(record.id.as_u128())?;
                for kind in Kind::ALL {
                    answers.remove((record.id.as_u128(), answer_number(kind)))?;
                }
                if let Some(claim) = &record.claim {
                    claims.remove(claim.as_bytes())?;
                }
            }
        }
    }
    Ok(())
}

/// Makes the tables that are missing; the format of the file.
fn prepare(database: &Database) -> Result<u64, redb::Error> {
    let known = match database.begin_read()?.open_table(META) {
        Ok(table) => table.get("format")?.map(|guard| guard.value()),
        Err(redb::TableError::TableDoesNotExist(_)) => None,
        Err(error) => return Err(error.into()),
    };
    if let Some(found) = known {
        return Ok(found);
    }
    let transaction = database.begin_write()?;
    transaction.open_table(META)?.insert("format", FORMAT)?;
    apply(&transaction, std::iter::empty())?;
    transaction.commit()?;
    Ok(FORMAT)
}

/// Whether nothing is left of what made the file large. The pages are used again
/// anyway; this gives them back to the disk.
fn is_empty(database: &Database) -> Result<bool, redb::Error> {
    Ok(database.begin_read()?.open_table(RECORDS)?.is_empty()?)
}

fn opening(path: &Path, error: DatabaseError) -> Error {
    let path = path.to_owned();
    let in_use =
        matches!(error, DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch);
    if in_use {
        return Error::InUse(path);
    }
    if let DatabaseError::Storage(redb::StorageError::Io(error)) = error {
        // Of this kind is what is no store at all.
        if error.kind() == io::ErrorKind::InvalidData {
            return Error::Corrupt { path, what: error.to_string() };
        }
        return Error::File { path, error };
    }
    Error::Corrupt { path, what: error.to_string() }
}

const fn answer_number(kind: Kind) -> u8 {
    match kind {
        Kind::Initial => 0,
        Kind::Final => 1,
        Kind::Last => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deferred::testing::{record, request};

    fn open(path: &Path) -> Result<(Store, Writer), Error> {
        Store::open(path, Clock::monotonic(), Metrics::default())
    }

    #[tokio::test]
    async fn the_file_is_private_and_belongs_to_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("requests.redb");
        fs::write(&path, b"").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let (store, writer) = open(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let error = open(&path).unwrap_err();
        assert!(matches!(error, Error::InUse(_)), "{error}");
        assert!(error.to_string().contains("requests.redb: another process"), "{error}");

        let change = Change::Accept(record(1), request("{}").encode().into());
        let (result, ()) = tokio::join!(
            async {
                let result = store.commit(vec![change]).await;
                drop(store);
                result
            },
            writer.run()
        );
        result.unwrap();
        let (store, _writer) = open(&path).unwrap();
        assert_eq!(store.record(record(1).id).unwrap(), Some(record(1)));
        assert_eq!(store.request(record(1).id).unwrap(), Some(request("{}")));
    }

    #[test]
    fn what_is_no_store_is_named_and_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("requests.redb");
        let text = "this is not a database\n".repeat(1000);
        fs::write(&path, &text).unwrap();
        let error = open(&path).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error:?}");
        assert!(error.to_string().contains("move the file away"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        let missing = directory.path().join("missing/requests.redb");
        let error = open(&missing).unwrap_err();
        assert!(matches!(error, Error::File { .. }), "{error:?}");
        assert!(error.to_string().contains("missing/requests.redb: No such file"), "{error}");
    }

    #[test]
    fn a_file_of_a_later_version_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("requests.redb");
        let database = Database::create(&path).unwrap();
        let transaction = database.begin_write().unwrap();
        transaction.open_table(META).unwrap().insert("format", FORMAT + 1).unwrap();
        transaction.commit().unwrap();
        drop(database);
        let error = open(&path).unwrap_err();
        assert!(error.to_string().contains("format 2 is of a later version"), "{error}");
    }
}
