//! Codec: the frames of one stream, with names instead of identities.
//!
//! A bucket's identity has 16 bytes, and most entries say again of a bucket what
//! an earlier one said. So the sender gives a bucket a small number, its name, and
//! from then on the name stands for the bucket, its limit, generation and epoch,
//! and the totals are told as what was added to the entry before. A stream keeps
//! order and loses nothing; a new one begins without names.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;

use crate::replication::Frame;
use crate::wire::tidegate::peer::v1 as wire;

use super::convert::{self, Fault, Malformed};

/// Names of a stream at most; the one given longest ago is given anew.
const MAX_NAMES: u32 = 16_384;

/// What a name stands for.
#[derive(Clone, Copy, Debug)]
struct Named {
    bucket: [u8; 16],
    limit: u32,
    generation: u32,
    epoch: u64,
    spent: u64,
    returned: u64,
}

impl Named {
    /// `None` if the identity is not one.
    fn of(entry: &wire::Entry) -> Option<Self> {
        Some(Self {
            bucket: entry.bucket.as_ref().try_into().ok()?,
            limit: entry.limit,
            generation: entry.generation,
            epoch: entry.epoch,
            spent: entry.spent,
            returned: entry.returned,
        })
    }

    /// Whether `next` continues where this entry ended: of the same life of the
    /// bucket, and with all that was added since as its fresh part.
    fn continues_as(&self, next: &Self, entry: &wire::Entry) -> bool {
        (self.bucket, self.limit, self.generation, self.epoch)
            == (next.bucket, next.limit, next.generation, next.epoch)
            && next.spent.checked_sub(self.spent) == Some(entry.fresh_spent)
            && next.returned.checked_sub(self.returned) == Some(entry.fresh_returned)
            && entry.key.is_empty()
    }
}

fn entries(frame: &mut wire::Frame) -> &mut [wire::Entry] {
    match &mut frame.body {
        Some(wire::frame::Body::Update(update)) => &mut update.entries,
        Some(_) | None => &mut [],
    }
}

/// The sending end of a stream.
#[derive(Debug, Default)]
pub struct Encoder {
    names: HashMap<[u8; 16], u32>,
    named: Vec<Named>,
    /// The place of the name that is given anew next.
    oldest: usize,
}

impl Encoder {
    /// The next frame of the stream, for the wire.
    pub fn encode(&mut self, frame: Frame) -> wire::Frame {
        let mut frame = convert::encode(frame);
        entries(&mut frame).iter_mut().for_each(|entry| self.shorten(entry));
        frame
    }

    fn shorten(&mut self, entry: &mut wire::Entry) {
        let Some(next) = Named::of(entry) else { return };
        let full = self.named.len() == MAX_NAMES as usize;
        let place = match self.names.entry(next.bucket) {
            Slot::Occupied(place) => *place.get() as usize,
            Slot::Vacant(place) => {
                let new = if full { self.oldest } else { self.named.len() };
                place.insert(new as u32);
                new
            }
        };
        entry.name = place as u32 + 1;
        match self.named.get_mut(place) {
            Some(known) if known.continues_as(&next, entry) => {
                *known = next;
                *entry = wire::Entry {
                    bucket: Default::default(),
                    limit: 0,
                    generation: 0,
                    epoch: 0,
                    spent: entry.fresh_spent,
                    returned: entry.fresh_returned,
                    fresh_spent: 0,
                    fresh_returned: 0,
                    ..std::mem::take(entry)
                };
            }
            Some(known) => {
                if known.bucket != next.bucket {
                    self.names.remove(&known.bucket);
                    self.oldest = (self.oldest + 1) % MAX_NAMES as usize;
                }
                *known = next;
            }
            None => self.named.push(next),
        }
    }
}

/// The receiving end of a stream.
#[derive(Debug, Default)]
pub struct Decoder {
    named: Vec<Option<Named>>,
}

impl Decoder {
    /// The next frame of the stream.
    ///
    /// # Errors
    /// If a field is not what the protocol allows.
    pub fn decode(&mut self, mut frame: wire::Frame) -> Result<Frame, Malformed> {
        entries(&mut frame).iter_mut().try_for_each(|entry| self.lengthen(entry))?;
        convert::decode(frame)
    }

    fn lengthen(&mut self, entry: &mut wire::Entry) -> Result<(), Malformed> {
        let unknown = Malformed { field: "Entry.name", fault: Fault::Unknown { name: entry.name } };
        let Some(place) = entry.name.checked_sub(1) else { return Ok(()) };
        if place >= MAX_NAMES {
            return Err(unknown);
        }
        let place = place as usize;
        if !entry.bucket.is_empty() {
            if place >= self.named.len() {
                self.named.resize(place + 1, None);
            }
            self.named[place] = Named::of(entry);
            return Ok(());
        }
        let Some(Some(known)) = self.named.get_mut(place) else { return Err(unknown) };
        known.spent = known.spent.saturating_add(entry.spent);
        known.returned = known.returned.saturating_add(entry.returned);
        *entry = wire::Entry {
            bucket: known.bucket.to_vec().into(),
            limit: known.limit,
            generation: known.generation,
            epoch: known.epoch,
            spent: known.spent,
            returned: known.returned,
            fresh_spent: entry.spent,
            fresh_returned: entry.returned,
            ..std::mem::take(entry)
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::limiter::BucketId;
    use crate::replication::{Body, Entry, Update};

    fn entry(bucket: u32, spent: u64, fresh: u64) -> Entry {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&bucket.to_be_bytes());
        Entry {
            bucket: BucketId::from_bytes(id),
            limit: 1,
            generation: 300,
            epoch: 2,
            flush: 200,
            ack: 190,
            spent,
            returned: 0,
            fresh_spent: fresh,
            fresh_returned: 0,
            level: 40_000_000,
            elsewhere: Some(90_000_000),
            demand: 0.125,
            key: None,
            pause: None,
        }
    }

    fn update(entries: Vec<Entry>) -> Frame {
        let body = Body::Update(Update { entries, ..Default::default() });
        Frame { seq: 1, ack: 0, stamp_ms: 0, echo_ms: 0, held_ms: 0, body }
    }

    /// Sends an entry by itself; returns its bytes.
    fn send(encoder: &mut Encoder, decoder: &mut Decoder, entry: &Entry) -> usize {
        let frame = encoder.encode(update(vec![entry.clone()]));
        let Some(wire::frame::Body::Update(sent)) = &frame.body else { panic!() };
        let bytes = sent.entries[0].encoded_len();
        assert_eq!(decoder.decode(frame), Ok(update(vec![entry.clone()])));
        bytes
    }

    #[test]
    fn an_entry_of_a_named_bucket_takes_less_than_thirty_bytes() {
        let (mut encoder, mut decoder) = (Encoder::default(), Decoder::default());
        let first = send(&mut encoder, &mut decoder, &entry(1, 700_000_000, 700_000_000));
        let again = send(&mut encoder, &mut decoder, &entry(1, 701_000_000, 1_000_000));
        assert_eq!((first, again), (60, 27));
    }

    #[test]
    fn what_does_not_continue_is_told_in_full() {
        let (mut encoder, mut decoder) = (Encoder::default(), Decoder::default());
        send(&mut encoder, &mut decoder, &entry(1, 700, 700));
        for other in [
            Entry { generation: 301, ..entry(1, 10, 10) },
            Entry { epoch: 3, ..entry(1, 20, 10) },
            Entry { limit: 2, ..entry(1, 30, 10) },
            // Fresh from before the last entry, and less than was told.
            entry(1, 40, 30),
            entry(1, 35, 0),
            Entry { key: Some(vec![1]), ..entry(1, 36, 1) },
        ] {
            assert!(send(&mut encoder, &mut decoder, &other) > 40, "{other:?}");
        }
    }

    #[test]
    fn more_buckets_than_names_are_told_as_well() {
        let (mut encoder, mut decoder) = (Encoder::default(), Decoder::default());
        for round in 1..4 {
            for bucket in 0..MAX_NAMES + 10 {
                send(&mut encoder, &mut decoder, &entry(bucket, 10 * round, 10));
            }
        }
        assert_eq!(encoder.named.len(), MAX_NAMES as usize);
        assert_eq!(encoder.names.len(), MAX_NAMES as usize);
        assert_eq!(decoder.named.len(), MAX_NAMES as usize);
    }

    #[test]
    fn a_name_that_was_never_given_is_malformed() {
        let named = |name| {
            let entry = wire::Entry { name, spent: 5, ..wire::Entry::default() };
            let update = wire::Update { entries: vec![entry], ..wire::Update::default() };
            let body = Some(wire::frame::Body::Update(update));
            wire::Frame { seq: 1, body, ..wire::Frame::default() }
        };
        for name in [1, 7, MAX_NAMES, MAX_NAMES + 1, u32::MAX] {
            let fault = Decoder::default().decode(named(name)).unwrap_err();
            assert_eq!(fault.to_string(), format!("`Entry.name` stands for no bucket: {name}"));
        }
        let fault = Decoder::default().decode(named(0)).unwrap_err();
        assert_eq!(fault.to_string(), "`Entry.bucket` has 0 bytes, not 16");
    }

    proptest! {
        #[test]
        fn a_stream_comes_back_as_it_went(
            steps in vec((0..5u32, 0..3u32, 0..4u64, 0..4u64, any::<bool>()), 1..60),
        ) {
            let (mut encoder, mut decoder) = (Encoder::default(), Decoder::default());
            let mut totals = [0; 5];
            for (bucket, generation, added, fresh, honest) in steps {
                let total = &mut totals[bucket as usize];
                *total += added;
                let fresh = if honest { added } else { fresh.min(*total) };
                let entry = Entry { generation, ..entry(bucket, *total, fresh) };
                send(&mut encoder, &mut decoder, &entry);
            }
        }
    }
}
