//! What a frame between replicas costs: `cargo bench --bench codec`.
//!
//! Each iteration is one entry on its way: encoded, written as protobuf, and on the other
//! side read and decoded. Frames of 30 entries are what a busy mesh sends.

use divan::counter::{BytesCount, ItemsCount};
use prost::Message as _;
use tidegate::limiter::BucketId;
use tidegate::peer::{Decoder, Encoder};
use tidegate::replication::{Body, Entry, Frame, Update};
use tidegate::wire::tidegate::peer::v1 as wire;

fn main() {
    divan::main();
}

/// What `round` more requests made of a bucket.
fn entry(bucket: u32, round: u32) -> Entry {
    let mut id = [0x5a; 16];
    id[..4].copy_from_slice(&bucket.to_be_bytes());
    Entry {
        bucket: BucketId::from_bytes(id),
        limit: 0,
        generation: 1,
        epoch: 0,
        flush: 10 + round,
        ack: 9 + round,
        spent: 1_000_000 * (u64::from(round) + 1),
        returned: 0,
        fresh_spent: 1_000_000,
        fresh_returned: 0,
        level: 40_000_000,
        elsewhere: Some(90_000_000),
        demand: 25.0,
        key: None,
        pause: None,
    }
}

/// Frames of so many entries, in turn for `buckets` buckets, each told of twice.
fn frames(entries: u32, buckets: u32) -> Vec<Frame> {
    let spoken = (0..2).flat_map(|round| (0..buckets).map(move |bucket| entry(bucket, round)));
    let spoken: Vec<_> = spoken.collect();
    let update = |(seq, entries): (usize, &[Entry])| {
        let body = Body::Update(Update { entries: entries.to_vec(), ..Update::default() });
        Frame { seq: seq as u64 + 1, ack: 1, stamp_ms: 1, echo_ms: 1, held_ms: 1, body }
    };
    spoken.chunks(entries as usize).enumerate().map(update).collect()
}

const BUCKETS: u32 = 3000;

fn sent(frames: Vec<Frame>) -> Vec<Vec<u8>> {
    let mut encoder = Encoder::default();
    frames.into_iter().map(|frame| encoder.encode(frame).encode_to_vec()).collect()
}

#[divan::bench(args = [1, 30])]
fn encode(bencher: divan::Bencher<'_, '_>, entries: u32) {
    let bytes: usize = sent(frames(entries, BUCKETS)).iter().map(Vec::len).sum();
    bencher
        .with_inputs(|| frames(entries, BUCKETS))
        .counter(ItemsCount::new(2 * BUCKETS))
        .counter(BytesCount::new(bytes))
        .bench_values(sent);
}

#[divan::bench(args = [1, 30])]
fn decode(bencher: divan::Bencher<'_, '_>, entries: u32) {
    let sent = sent(frames(entries, BUCKETS));
    let bytes: usize = sent.iter().map(Vec::len).sum();
    bencher.counter(ItemsCount::new(2 * BUCKETS)).counter(BytesCount::new(bytes)).bench_local(
        || {
            let mut decoder = Decoder::default();
            let frame =
                |bytes: &Vec<u8>| decoder.decode(wire::Frame::decode(bytes.as_slice()).ok()?).ok();
            sent.iter().filter_map(frame).count()
        },
    );
}
