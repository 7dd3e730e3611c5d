//! What is made of files, and made anew when their content changes.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;

use super::Error;

/// What is in some files.
pub(super) type Content<const N: usize> = [Vec<u8>; N];

/// What was made of the newest content that could be used.
#[derive(Debug)]
pub(super) struct Versions<T> {
    current: ArcSwap<T>,
    tried: Mutex<Tried>,
}

/// A hash of the content that was tried last, and why it could not be used.
#[derive(Debug)]
struct Tried {
    hash: blake3::Hash,
    fault: Option<Error>,
}

impl<T> Versions<T> {
    /// The first version.
    ///
    /// # Errors
    /// Those of `make`.
    pub(super) fn load<const N: usize>(
        content: Content<N>,
        make: impl FnOnce(&Content<N>) -> Result<T, Error>,
    ) -> Result<Self, Error> {
        let current = ArcSwap::from_pointee(make(&content)?);
        let tried = Mutex::new(Tried { hash: hash(&content), fault: None });
        Ok(Self { current, tried })
    }

    /// Makes another version if the content is not the one that was tried last;
    /// whether it did.
    ///
    /// # Errors
    /// Those of `make`, again for the same content. The version before stays.
    pub(super) fn refresh<const N: usize>(
        &self,
        content: Content<N>,
        make: impl FnOnce(&Content<N>) -> Result<T, Error>,
    ) -> Result<bool, Error> {
        let hash = hash(&content);
        let mut tried = self.tried.lock().unwrap_or_else(PoisonError::into_inner);
        if tried.hash == hash {
            return tried.fault.clone().map_or(Ok(false), Err);
        }
        let made = make(&content);
        *tried = Tried { hash, fault: made.as_ref().err().cloned() };
        self.current.store(Arc::new(made?));
        Ok(true)
    }

    pub(super) fn current(&self) -> arc_swap::Guard<Arc<T>> {
        self.current.load()
    }
}

fn hash<const N: usize>(content: &Content<N>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for file in content {
        hasher.update(&(file.len() as u64).to_le_bytes());
        hasher.update(file);
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use super::*;
    use crate::tls::What;

    #[test]
    fn content_is_made_use_of_once_and_its_fault_stands_until_it_changes() {
        let made = Cell::new(0);
        let make = |[a, b]: &Content<2>| {
            made.set(made.get() + 1);
            if a.is_empty() {
                return Err(Error::new(What::Key, Path::new("a"), "empty"));
            }
            Ok([a.as_slice(), b.as_slice()].concat())
        };
        let content = |a: &str, b: &str| [a.as_bytes().to_vec(), b.as_bytes().to_vec()];
        let versions = Versions::load(content("x", "y"), make).unwrap();
        let current = || String::from_utf8(versions.current().to_vec()).unwrap();
        assert_eq!(versions.refresh(content("x", "y"), make), Ok(false));
        // The same bytes, another file.
        assert_eq!(versions.refresh(content("xy", ""), make), Ok(true));
        assert_eq!((made.get(), current()), (2, "xy".to_owned()));
        for _ in 0..2 {
            assert_eq!(versions.refresh(content("", "z"), make).unwrap_err().reason, "empty");
        }
        assert_eq!((made.get(), current()), (3, "xy".to_owned()));
        assert_eq!(versions.refresh(content("z", ""), make), Ok(true));
        assert_eq!(current(), "z");
    }
}
