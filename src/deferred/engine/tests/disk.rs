//! A disk in memory that keeps for sure only what was synced, and whose power can
//! be cut before any operation.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use redb::StorageBackend;

#[derive(Clone, Debug)]
pub(super) struct Disk(Arc<Mutex<Platters>>);

#[derive(Debug, Default)]
struct Platters {
    /// What readers see.
    cache: Vec<u8>,
    /// What was synced.
    durable: Vec<u8>,
    /// What was written since, in order.
    unsynced: Vec<Write>,
    /// Operations until the power fails.
    left: Option<u64>,
    operations: u64,
    full: bool,
}

#[derive(Clone, Debug)]
enum Write {
    At(usize, Vec<u8>),
    Length(usize),
}

/// The smallest part of a write that is made as a whole.
const SECTOR: usize = 512;

impl Disk {
    pub(super) fn new() -> Self {
        Self(Arc::default())
    }

    fn platters(&self) -> MutexGuard<'_, Platters> {
        self.0.lock().unwrap()
    }

    /// Lets the power fail after this many operations.
    pub(super) fn cut_after(&self, operations: u64) {
        self.platters().left = Some(operations);
    }

    /// How many operations there were.
    pub(super) fn operations(&self) -> u64 {
        self.platters().operations
    }

    pub(super) fn is_cut(&self) -> bool {
        self.platters().left == Some(0)
    }

    /// Lets nothing be written.
    pub(super) fn fill(&self) {
        self.platters().full = true;
    }

    pub(super) fn empty(&self) {
        self.platters().full = false;
    }

    /// The disk as it is found after a loss of power: of what was not synced any part
    /// may be there, chosen by `seed`.
    pub(super) fn without_power(&self, seed: u64) -> Self {
        let platters = self.platters();
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut dice = |n: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % n
        };
        let mut found = platters.durable.clone();
        for write in &platters.unsynced {
            match write {
                Write::Length(length) if dice(2) == 0 => found.resize(*length, 0),
                Write::Length(_) => {}
                Write::At(at, data) => {
                    for (index, sector) in data.chunks(SECTOR).enumerate() {
                        if dice(2) == 0 {
                            put(&mut found, at + index * SECTOR, sector);
                        }
                    }
                }
            }
        }
        let platters = Platters { cache: found.clone(), durable: found, ..Platters::default() };
        Self(Arc::new(Mutex::new(platters)))
    }
}

fn put(bytes: &mut Vec<u8>, at: usize, data: &[u8]) {
    if bytes.len() < at + data.len() {
        bytes.resize(at + data.len(), 0);
    }
    bytes[at..at + data.len()].copy_from_slice(data);
}

impl Platters {
    fn operate(&mut self) -> io::Result<()> {
        self.operations += 1;
        match &mut self.left {
            Some(0) => Err(io::Error::other("the power is off")),
            Some(left) => {
                *left -= 1;
                if *left == 0 { Err(io::Error::other("the power is off")) } else { Ok(()) }
            }
            None if self.full => Err(io::ErrorKind::StorageFull.into()),
            None => Ok(()),
        }
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.platters().cache.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let platters = self.platters();
        let from = usize::try_from(offset).unwrap();
        let Some(bytes) = platters.cache.get(from..from + out.len()) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        out.copy_from_slice(bytes);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut platters = self.platters();
        platters.operate()?;
        let len = usize::try_from(len).unwrap();
        platters.cache.resize(len, 0);
        platters.unsynced.push(Write::Length(len));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut platters = self.platters();
        platters.operate()?;
        let writes = std::mem::take(&mut platters.unsynced);
        for write in writes {
            match write {
                Write::Length(length) => platters.durable.resize(length, 0),
                Write::At(at, data) => put(&mut platters.durable, at, &data),
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut platters = self.platters();
        let result = platters.operate();
        let at = usize::try_from(offset).unwrap();
        // The one that the power fails in may be made in part.
        if result.is_ok() || platters.left == Some(0) {
            platters.unsynced.push(Write::At(at, data.to_vec()));
        }
        result?;
        put(&mut platters.cache, at, data);
        Ok(())
    }
}
