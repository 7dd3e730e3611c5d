//! Convert: frames between the wire and the domain.
//!
//! Encoding cannot fail. Decoding is total: whatever bytes a stranger sends
//! become a [`Frame`] or a [`Malformed`] that names the field. Fields and bodies
//! that this version does not know are skipped; a frame without a known body is
//! a heartbeat.

use std::fmt;

use bytes::Bytes;

use crate::limiter::BucketId;
use crate::replication::{
    Body, Contribution, Entry, Frame, Hello, Incarnation, LimitDeclaration, LimitEpoch, LimitPause,
    PauseLeft, Row, Snapshot, Update,
};
use crate::wire::tidegate::peer::v1 as wire;

/// Entries of an update and rows of a snapshot at most.
const MAX_ITEMS: usize = 65_536;
/// Limits that a Hello declares at most.
const MAX_LIMITS: usize = 1_000;
/// Addresses that a Hello hints at, at most.
const MAX_HINTS: usize = 1_024;
/// Origins of a row at most.
const MAX_CONTRIBUTIONS: usize = 4_096;
/// Bytes of any text, and of a key, at most.
const MAX_BYTES: usize = 256;

/// A frame that breaks the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` {fault}")]
pub struct Malformed {
    /// Message and field, as in the protocol's definition.
    pub field: &'static str,
    /// What is wrong with it.
    pub fault: Fault,
}

/// What is wrong with a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It has another length than the only one allowed.
    Length {
        /// How long it is.
        bytes: usize,
        /// How long it has to be.
        wanted: usize,
    },
    /// It is longer than allowed.
    TooLong {
        /// How long it is.
        bytes: usize,
        /// How long it may be.
        most: usize,
    },
    /// It has more elements than allowed.
    TooMany {
        /// How many there are.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// It is not a number from zero up.
    NoRate,
    /// It was never given to a bucket.
    Unknown {
        /// The number.
        name: u32,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { bytes, wanted } => write!(f, "has {bytes} bytes, not {wanted}"),
            Self::TooLong { bytes, most } => write!(f, "has {bytes} bytes, above {most}"),
            Self::TooMany { count, most } => write!(f, "has {count} elements, above {most}"),
            Self::NoRate => f.write_str("is not a number from zero up"),
            Self::Unknown { name } => write!(f, "stands for no bucket: {name}"),
        }
    }
}

/// A frame for the wire.
pub(super) fn encode(frame: Frame) -> wire::Frame {
    let Frame { seq, ack, stamp_ms, echo_ms, held_ms, body } = frame;
    let body = match body {
        Body::Heartbeat => None,
        Body::Hello(hello) => Some(wire::frame::Body::Hello(encode_hello(hello))),
        Body::Update(Update { entries, limit_epochs, limit_pauses }) => {
            Some(wire::frame::Body::Update(wire::Update {
                entries: entries.into_iter().map(encode_entry).collect(),
                limit_epochs: limit_epochs
                    .into_iter()
                    .map(|LimitEpoch { limit, epoch }| wire::LimitEpoch { limit, epoch })
                    .collect(),
                limit_pauses: limit_pauses.into_iter().map(encode_limit_pause).collect(),
            }))
        }
        Body::SnapshotRequest { first_meeting } => {
            let request = wire::SnapshotRequest { first_meeting };
            Some(wire::frame::Body::SnapshotRequest(request))
        }
        Body::Snapshot(Snapshot { rows, last, joining }) => {
            Some(wire::frame::Body::Snapshot(wire::Snapshot {
                rows: rows.into_iter().map(encode_row).collect(),
                limit_epochs: Vec::new(),
                last,
                joining,
            }))
        }
        Body::Goodbye(reason) => Some(wire::frame::Body::Goodbye(wire::Goodbye { reason })),
    };
    wire::Frame { seq, ack, stamp_ms, echo_ms, held_ms, body }
}

fn encode_hello(hello: Hello) -> wire::Hello {
    let Hello {
        version,
        oldest_version,
        group,
        incarnation,
        name,
        address,
        limits,
        peers,
        joining,
        revision,
    } = hello;
    let limits = limits.into_iter().map(|limit| {
        let LimitDeclaration { name, parts, tokens, period_ms, burst } = limit;
        wire::Limit { name, parts, tokens, period_ms, burst }
    });
    wire::Hello {
        version,
        oldest_version,
        group,
        incarnation: encode_id(incarnation.to_bytes()),
        name,
        limits: limits.collect(),
        peers,
        address,
        joining,
        revision,
    }
}

fn encode_entry(entry: Entry) -> wire::Entry {
    let Entry {
        bucket,
        limit,
        generation,
        epoch,
        flush,
        ack,
        spent,
        returned,
        fresh_spent,
        fresh_returned,
        level,
        elsewhere,
        demand,
        key,
        pause,
    } = entry;
    let (blocked_generation, blocked_ms, blocked_memory_ms) = encode_pause(pause);
    wire::Entry {
        bucket: encode_id(bucket.to_bytes()),
        limit,
        generation,
        epoch,
        flush,
        ack,
        spent,
        returned,
        fresh_spent,
        fresh_returned,
        level,
        elsewhere,
        demand: encode_demand(demand),
        key: key.map(Bytes::from).unwrap_or_default(),
        blocked_generation,
        blocked_ms,
        blocked_memory_ms,
        // What this version does not speak of.
        ..wire::Entry::default()
    }
}

fn encode_row(row: Row) -> wire::Row {
    let Row { bucket, limit, epoch, deficit, contributions, key, pause } = row;
    let (blocked_generation, blocked_ms, blocked_memory_ms) = encode_pause(pause);
    let contributions = contributions.into_iter().map(|contribution| {
        let Contribution { incarnation, generation, spent, returned, demand, unseen } =
            contribution;
        wire::Contribution {
            incarnation: encode_id(incarnation.to_bytes()),
            generation,
            spent,
            returned,
            demand: encode_demand(demand),
            unseen,
        }
    });
    wire::Row {
        bucket: encode_id(bucket.to_bytes()),
        limit,
        epoch,
        deficit,
        contributions: contributions.collect(),
        key: key.map(Bytes::from).unwrap_or_default(),
        blocked_generation,
        blocked_ms,
        blocked_memory_ms,
    }
}

fn encode_limit_pause(paused: LimitPause) -> wire::LimitPause {
    let LimitPause { limit, pause } = paused;
    let (blocked_generation, blocked_ms, blocked_memory_ms) = encode_pause(Some(pause));
    wire::LimitPause { limit, blocked_generation, blocked_ms, blocked_memory_ms }
}

fn encode_id(bytes: [u8; 16]) -> Bytes {
    Bytes::copy_from_slice(&bytes)
}

/// A frame from the wire.
///
/// # Errors
/// If a field is not what the protocol allows.
pub(super) fn decode(frame: wire::Frame) -> Result<Frame, Malformed> {
    let wire::Frame { seq, ack, stamp_ms, echo_ms, held_ms, body } = frame;
    let body = match body {
        None => Body::Heartbeat,
        Some(wire::frame::Body::Hello(hello)) => Body::Hello(decode_hello(hello)?),
        Some(wire::frame::Body::Update(update)) => {
            let wire::Update { entries, limit_epochs, limit_pauses } = update;
            few("Update.entries", entries.len(), MAX_ITEMS)?;
            few("Update.limit_epochs", limit_epochs.len(), MAX_LIMITS)?;
            few("Update.limit_pauses", limit_pauses.len(), MAX_LIMITS)?;
            let entries = entries.into_iter().map(decode_entry).collect::<Result<_, _>>()?;
            let limit_epochs = limit_epochs
                .into_iter()
                .map(|wire::LimitEpoch { limit, epoch }| LimitEpoch { limit, epoch })
                .collect();
            let limit_pauses = limit_pauses.into_iter().filter_map(decode_limit_pause).collect();
            Body::Update(Update { entries, limit_epochs, limit_pauses })
        }
        Some(wire::frame::Body::SnapshotRequest(request)) => {
            Body::SnapshotRequest { first_meeting: request.first_meeting }
        }
        Some(wire::frame::Body::Snapshot(snapshot)) => {
            let wire::Snapshot { rows, limit_epochs: _, last, joining } = snapshot;
            few("Snapshot.rows", rows.len(), MAX_ITEMS)?;
            let rows = rows.into_iter().map(decode_row).collect::<Result<_, _>>()?;
            Body::Snapshot(Snapshot { rows, last, joining })
        }
        Some(wire::frame::Body::Goodbye(wire::Goodbye { reason })) => {
            Body::Goodbye(short("Goodbye.reason", reason)?)
        }
    };
    Ok(Frame { seq, ack, stamp_ms, echo_ms, held_ms, body })
}

fn decode_hello(hello: wire::Hello) -> Result<Hello, Malformed> {
    let wire::Hello {
        version,
        oldest_version,
        group,
        incarnation,
        name,
        limits,
        peers,
        address,
        joining,
        revision,
    } = hello;
    few("Hello.limits", limits.len(), MAX_LIMITS)?;
    few("Hello.peers", peers.len(), MAX_HINTS)?;
    let limits = limits.into_iter().map(|limit| {
        let wire::Limit { name, parts, tokens, period_ms, burst } = limit;
        let name = short("Limit.name", name)?;
        Ok(LimitDeclaration { name, parts, tokens, period_ms, burst })
    });
    Ok(Hello {
        version,
        oldest_version,
        group: short("Hello.group", group)?,
        incarnation: Incarnation::from_bytes(id("Hello.incarnation", &incarnation)?),
        name: short("Hello.name", name)?,
        address: short("Hello.address", address)?,
        limits: limits.collect::<Result<_, _>>()?,
        peers: peers
            .into_iter()
            .map(|peer| short("Hello.peers", peer))
            .collect::<Result<_, _>>()?,
        joining,
        revision,
    })
}

fn decode_entry(entry: wire::Entry) -> Result<Entry, Malformed> {
    Ok(Entry {
        bucket: BucketId::from_bytes(id("Entry.bucket", &entry.bucket)?),
        limit: entry.limit,
        generation: entry.generation,
        epoch: entry.epoch,
        flush: entry.flush,
        ack: entry.ack,
        spent: entry.spent,
        returned: entry.returned,
        fresh_spent: entry.fresh_spent,
        fresh_returned: entry.fresh_returned,
        level: entry.level,
        elsewhere: entry.elsewhere,
        demand: decode_demand("Entry.demand", entry.demand)?,
        key: key("Entry.key", &entry.key)?,
        pause: decode_pause(entry.blocked_generation, entry.blocked_ms, entry.blocked_memory_ms),
    })
}

fn decode_row(row: wire::Row) -> Result<Row, Malformed> {
    few("Row.contributions", row.contributions.len(), MAX_CONTRIBUTIONS)?;
    let contributions = row.contributions.into_iter().map(|contribution| {
        let wire::Contribution { incarnation, generation, spent, returned, demand, unseen } =
            contribution;
        let incarnation = Incarnation::from_bytes(id("Contribution.incarnation", &incarnation)?);
        let demand = decode_demand("Contribution.demand", demand)?;
        Ok(Contribution { incarnation, generation, spent, returned, demand, unseen })
    });
    Ok(Row {
        bucket: BucketId::from_bytes(id("Row.bucket", &row.bucket)?),
        limit: row.limit,
        epoch: row.epoch,
        deficit: row.deficit,
        contributions: contributions.collect::<Result<_, _>>()?,
        key: key("Row.key", &row.key)?,
        pause: decode_pause(row.blocked_generation, row.blocked_ms, row.blocked_memory_ms),
    })
}

/// Generations of pauses begin at 1: 0 is no pause. A memory that is no longer than
/// the pause is not told.
fn encode_pause(pause: Option<PauseLeft>) -> (u64, u64, u64) {
    pause.map_or((0, 0, 0), |PauseLeft { generation, millis, remembered_millis }| {
        let memory = if remembered_millis > millis { remembered_millis } else { 0 };
        (generation, millis, memory)
    })
}

fn decode_pause(generation: u64, millis: u64, memory: u64) -> Option<PauseLeft> {
    let remembered_millis = memory.max(millis);
    (generation > 0).then_some(PauseLeft { generation, millis, remembered_millis })
}

fn decode_limit_pause(paused: wire::LimitPause) -> Option<LimitPause> {
    let wire::LimitPause { limit, blocked_generation, blocked_ms, blocked_memory_ms } = paused;
    let pause = decode_pause(blocked_generation, blocked_ms, blocked_memory_ms)?;
    Some(LimitPause { limit, pause })
}

/// Demand travels in tokens per second; here it is in micro-tokens per nanosecond.
fn encode_demand(demand: f64) -> f32 {
    (demand * 1000.0) as f32
}

fn decode_demand(field: &'static str, demand: f32) -> Result<f64, Malformed> {
    if demand.is_finite() && demand >= 0.0 {
        Ok(f64::from(demand) / 1000.0)
    } else {
        Err(Malformed { field, fault: Fault::NoRate })
    }
}

fn id(field: &'static str, bytes: &Bytes) -> Result<[u8; 16], Malformed> {
    <[u8; 16]>::try_from(bytes.as_ref())
        .map_err(|_| Malformed { field, fault: Fault::Length { bytes: bytes.len(), wanted: 16 } })
}

/// No bytes are no key: the field has no presence of its own.
fn key(field: &'static str, bytes: &Bytes) -> Result<Option<Vec<u8>>, Malformed> {
    if bytes.len() > MAX_BYTES {
        let fault = Fault::TooLong { bytes: bytes.len(), most: MAX_BYTES };
        return Err(Malformed { field, fault });
    }
    Ok((!bytes.is_empty()).then(|| bytes.to_vec()))
}

fn short(field: &'static str, text: String) -> Result<String, Malformed> {
    if text.len() > MAX_BYTES {
        let fault = Fault::TooLong { bytes: text.len(), most: MAX_BYTES };
        return Err(Malformed { field, fault });
    }
    Ok(text)
}

fn few(field: &'static str, count: usize, most: usize) -> Result<(), Malformed> {
    if count > most {
        return Err(Malformed { field, fault: Fault::TooMany { count, most } });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;

    fn incarnations() -> impl Strategy<Value = Incarnation> {
        any::<[u8; 16]>().prop_map(Incarnation::from_bytes)
    }

    fn buckets() -> impl Strategy<Value = BucketId> {
        any::<[u8; 16]>().prop_map(BucketId::from_bytes)
    }

    fn keys() -> impl Strategy<Value = Option<Vec<u8>>> {
        proptest::option::of(vec(any::<u8>(), 1..=MAX_BYTES))
    }

    fn hellos() -> impl Strategy<Value = Hello> {
        let limits = ("[a-z-]{0,20}", any::<[u64; 4]>()).prop_map(
            |(name, [parts, tokens, period_ms, burst])| LimitDeclaration {
                name,
                parts,
                tokens,
                period_ms,
                burst,
            },
        );
        let texts = (".{0,20}", ".{0,20}", ".{0,20}", vec(".{0,20}", 0..3));
        let numbers = (any::<[u32; 2]>(), any::<bool>(), any::<u64>());
        (texts, numbers, incarnations(), vec(limits, 0..4)).prop_map(
            |(
                (group, name, address, peers),
                (versions, joining, revision),
                incarnation,
                limits,
            )| {
                let [version, oldest_version] = versions;
                Hello {
                    version,
                    oldest_version,
                    group,
                    incarnation,
                    name,
                    address,
                    limits,
                    peers,
                    joining,
                    revision,
                }
            },
        )
    }

    fn entries() -> impl Strategy<Value = Entry> {
        let levels = (any::<i64>(), any::<Option<u64>>());
        let numbers = (any::<[u32; 4]>(), any::<[u64; 5]>(), levels, demands(), pauses());
        (buckets(), numbers, keys()).prop_map(
            |(bucket, ([limit, generation, flush, ack], totals, levels, demand, pause), key)| {
                let (level, elsewhere) = levels;
                let [epoch, spent, returned, fresh_spent, fresh_returned] = totals;
                Entry {
                    bucket,
                    limit,
                    generation,
                    epoch,
                    flush,
                    ack,
                    spent,
                    returned,
                    fresh_spent,
                    fresh_returned,
                    level,
                    elsewhere,
                    demand,
                    key,
                    pause,
                }
            },
        )
    }

    fn demands() -> impl Strategy<Value = f64> {
        (0.0..1e9f32).prop_map(|per_second| f64::from(per_second) / 1000.0)
    }

    fn pauses() -> impl Strategy<Value = Option<PauseLeft>> {
        proptest::option::of(pause())
    }

    fn pause() -> impl Strategy<Value = PauseLeft> {
        (1u64.., any::<u64>(), any::<u64>()).prop_map(|(generation, millis, longer)| {
            let remembered_millis = millis.max(longer);
            PauseLeft { generation, millis, remembered_millis }
        })
    }

    fn updates() -> impl Strategy<Value = Update> {
        let epochs =
            (any::<u32>(), any::<u64>()).prop_map(|(limit, epoch)| LimitEpoch { limit, epoch });
        let paused = (any::<u32>(), pause()).prop_map(|(limit, pause)| LimitPause { limit, pause });
        (vec(entries(), 0..5), vec(epochs, 0..3), vec(paused, 0..3)).prop_map(
            |(entries, limit_epochs, limit_pauses)| Update { entries, limit_epochs, limit_pauses },
        )
    }

    fn rows() -> impl Strategy<Value = Row> {
        let contributions = (incarnations(), any::<u32>(), any::<[u64; 3]>(), demands()).prop_map(
            |(incarnation, generation, [spent, returned, unseen], demand)| Contribution {
                incarnation,
                generation,
                spent,
                returned,
                demand,
                unseen,
            },
        );
        let numbers = (any::<u32>(), any::<[u64; 2]>(), pauses());
        (buckets(), numbers, vec(contributions, 0..4), keys()).prop_map(
            |(bucket, (limit, [epoch, deficit], pause), contributions, key)| Row {
                bucket,
                limit,
                epoch,
                deficit,
                contributions,
                key,
                pause,
            },
        )
    }

    fn frames() -> impl Strategy<Value = Frame> {
        let bodies = prop_oneof![
            Just(Body::Heartbeat),
            hellos().prop_map(Body::Hello),
            updates().prop_map(Body::Update),
            any::<bool>().prop_map(|first_meeting| Body::SnapshotRequest { first_meeting }),
            (vec(rows(), 0..5), any::<[bool; 2]>()).prop_map(|(rows, [last, joining])| {
                Body::Snapshot(Snapshot { rows, last, joining })
            }),
            ".{0,40}".prop_map(Body::Goodbye),
        ];
        (any::<[u64; 4]>(), any::<u32>(), bodies).prop_map(
            |([seq, ack, stamp_ms, echo_ms], held_ms, body)| Frame {
                seq,
                ack,
                stamp_ms,
                echo_ms,
                held_ms,
                body,
            },
        )
    }

    #[test]
    fn a_demand_that_is_no_rate_is_refused() {
        for demand in [f32::NAN, f32::INFINITY, -1.0] {
            let fault = decode_demand("Entry.demand", demand).unwrap_err();
            assert_eq!((fault.field, fault.fault), ("Entry.demand", Fault::NoRate));
        }
    }

    proptest! {
        #[test]
        fn a_frame_comes_back_as_it_went(frame in frames()) {
            let bytes = encode(frame.clone()).encode_to_vec();
            let decoded = wire::Frame::decode(bytes.as_slice()).unwrap();
            prop_assert_eq!(decode(decoded), Ok(frame));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..400)) {
            if let Ok(frame) = wire::Frame::decode(bytes.as_slice()) {
                let _ = decode(frame);
            }
        }

        /// Flipped bytes of a real frame reach deeper than noise does.
        #[test]
        fn damaged_frames_never_panic(
            frame in frames(),
            damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let mut bytes = encode(frame).encode_to_vec();
            for (place, value) in damage {
                if !bytes.is_empty() {
                    let place = place.index(bytes.len());
                    bytes[place] = value;
                }
            }
            if let Ok(frame) = wire::Frame::decode(bytes.as_slice()) {
                let _ = decode(frame);
            }
        }
    }

    fn with_body(body: wire::frame::Body) -> wire::Frame {
        wire::Frame { seq: 1, body: Some(body), ..wire::Frame::default() }
    }

    fn hello() -> wire::Hello {
        wire::Hello { incarnation: vec![7; 16].into(), ..wire::Hello::default() }
    }

    fn entry() -> wire::Entry {
        wire::Entry { bucket: vec![7; 16].into(), ..wire::Entry::default() }
    }

    fn update(entries: Vec<wire::Entry>) -> wire::Frame {
        with_body(wire::frame::Body::Update(wire::Update { entries, ..Default::default() }))
    }

    fn snapshot(rows: Vec<wire::Row>) -> wire::Frame {
        with_body(wire::frame::Body::Snapshot(wire::Snapshot { rows, ..Default::default() }))
    }

    #[test]
    fn a_malformed_frame_names_the_field() {
        let says_hello = |hello| with_body(wire::frame::Body::Hello(hello));
        let long = "x".repeat(257);
        let limit = |name: &str| wire::Limit { name: name.to_owned(), ..Default::default() };
        let row = || wire::Row { bucket: vec![7; 16].into(), ..Default::default() };
        let origin =
            |bytes| wire::Contribution { incarnation: vec![7; bytes].into(), ..Default::default() };
        let cases = [
            (says_hello(wire::Hello::default()), "`Hello.incarnation` has 0 bytes, not 16"),
            (
                says_hello(wire::Hello { group: long.clone(), ..hello() }),
                "`Hello.group` has 257 bytes, above 256",
            ),
            (
                says_hello(wire::Hello { name: long.clone(), ..hello() }),
                "`Hello.name` has 257 bytes, above 256",
            ),
            (
                says_hello(wire::Hello { address: long.clone(), ..hello() }),
                "`Hello.address` has 257 bytes, above 256",
            ),
            (
                says_hello(wire::Hello { peers: vec![long.clone()], ..hello() }),
                "`Hello.peers` has 257 bytes, above 256",
            ),
            (
                says_hello(wire::Hello { peers: vec![String::new(); 1_025], ..hello() }),
                "`Hello.peers` has 1025 elements, above 1024",
            ),
            (
                says_hello(wire::Hello { limits: vec![limit(&long)], ..hello() }),
                "`Limit.name` has 257 bytes, above 256",
            ),
            (
                says_hello(wire::Hello { limits: vec![limit("a"); 1_001], ..hello() }),
                "`Hello.limits` has 1001 elements, above 1000",
            ),
            (
                update(vec![entry(), wire::Entry { bucket: vec![7; 15].into(), ..entry() }]),
                "`Entry.bucket` has 15 bytes, not 16",
            ),
            (
                update(vec![wire::Entry { key: vec![7; 257].into(), ..entry() }]),
                "`Entry.key` has 257 bytes, above 256",
            ),
            (update(vec![entry(); 65_537]), "`Update.entries` has 65537 elements, above 65536"),
            (snapshot(vec![wire::Row::default()]), "`Row.bucket` has 0 bytes, not 16"),
            (snapshot(vec![row(); 65_537]), "`Snapshot.rows` has 65537 elements, above 65536"),
            (
                snapshot(vec![wire::Row { key: vec![7; 257].into(), ..row() }]),
                "`Row.key` has 257 bytes, above 256",
            ),
            (
                snapshot(vec![wire::Row { contributions: vec![origin(17)], ..row() }]),
                "`Contribution.incarnation` has 17 bytes, not 16",
            ),
            (
                snapshot(vec![wire::Row { contributions: vec![origin(16); 4_097], ..row() }]),
                "`Row.contributions` has 4097 elements, above 4096",
            ),
            (
                with_body(wire::frame::Body::Goodbye(wire::Goodbye { reason: long })),
                "`Goodbye.reason` has 257 bytes, above 256",
            ),
        ];
        for (frame, message) in cases {
            assert_eq!(decode(frame).unwrap_err().to_string(), message);
        }
        assert!(decode(says_hello(hello())).is_ok());
        assert!(decode(update(vec![entry(); 65_536])).is_ok());
    }

    #[test]
    fn what_a_newer_version_adds_is_skipped() {
        let heartbeat =
            Frame { seq: 3, ack: 0, stamp_ms: 0, echo_ms: 0, held_ms: 0, body: Body::Heartbeat };
        // Field 100, of length 2, is a body that this version does not know.
        let mut bytes = vec![0x08, 3];
        bytes.extend([0xa2, 0x06, 2, 1, 2]);
        let frame = wire::Frame::decode(bytes.as_slice()).unwrap();
        assert_eq!(decode(frame), Ok(heartbeat));
    }
}
