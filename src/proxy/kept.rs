//! What is kept of a request's body so that it can be sent once more: pieces that are
//! shared with what is sent, up to a bound.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http_body::Frame;

/// Larger bodies are not kept.
pub(super) const KEPT_BYTES: usize = 64 * 1024;

/// What was read so far.
#[derive(Debug, Default)]
pub(super) struct Kept(Mutex<Keeping>);

#[derive(Debug)]
enum Keeping {
    /// More may come. So many bytes did.
    Part(Vec<Bytes>, usize),
    /// All of it.
    Whole(Vec<Bytes>),
    /// It is too large, has trailers, or broke off.
    Lost,
}

/// A body that is sent once more.
#[derive(Debug)]
pub(super) struct Replay {
    /// What is still to be sent.
    pub(super) pieces: std::vec::IntoIter<Bytes>,
    pub(super) kept: Arc<Kept>,
}

impl Default for Keeping {
    fn default() -> Self {
        Self::Part(Vec::new(), 0)
    }
}

impl Kept {
    /// Keeps the next piece.
    pub(super) fn read(&self, frame: &Frame<Bytes>) {
        let mut keeping = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Keeping::Part(pieces, length) = &mut *keeping else { return };
        match frame.data_ref() {
            Some(data) if *length + data.len() <= KEPT_BYTES => {
                *length += data.len();
                pieces.push(data.clone());
            }
            Some(_) | None => *keeping = Keeping::Lost,
        }
    }

    /// Nothing follows.
    pub(super) fn ended(&self) {
        let mut keeping = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Keeping::Part(pieces, _) = &mut *keeping {
            *keeping = Keeping::Whole(std::mem::take(pieces));
        }
    }

    /// The body once more, if all of it was kept.
    pub(super) fn replay(self: &Arc<Self>) -> Option<Replay> {
        let keeping = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Keeping::Whole(pieces) = &*keeping else { return None };
        Some(Replay { pieces: pieces.clone().into_iter(), kept: Arc::clone(self) })
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;

    use super::*;

    fn replayed(frames: Vec<Frame<Bytes>>, ended: bool) -> Option<usize> {
        let kept = Arc::new(Kept::default());
        frames.iter().for_each(|frame| kept.read(frame));
        if ended {
            kept.ended();
        }
        let again = kept.replay()?;
        assert!(kept.replay().is_some(), "as often as it takes");
        Some(again.pieces.map(|piece| piece.len()).sum())
    }

    #[test]
    fn only_a_whole_small_body_without_trailers_is_sent_once_more() {
        let data = |length: usize| Frame::data(Bytes::from(vec![0; length]));
        assert_eq!(replayed(vec![], true), Some(0));
        assert_eq!(replayed(vec![data(3), data(4)], true), Some(7));
        assert_eq!(replayed(vec![data(3), data(4)], false), None);
        assert_eq!(replayed(vec![data(KEPT_BYTES)], true), Some(KEPT_BYTES));
        assert_eq!(replayed(vec![data(KEPT_BYTES), data(1), data(1)], true), None);
        assert_eq!(replayed(vec![data(1), Frame::trailers(HeaderMap::new())], true), None);
    }
}
