//! Domain values as protobuf messages, and texts for people.

use std::time::Duration;

use super::cluster::MeshView;
use crate::limiter::{
    BucketId, Condition, Due, Field, KeyValue, Limit, LimitSet, Missing, Mode, Quota, Rate, Rule,
    TokenBucket, Tokens, key,
};
use crate::proxy::CheckTotals;
use crate::replication::{BucketView, Incarnation, PeerState, PeerView};
use crate::time::Timestamp;
use crate::wire::tidegate::admin::v1 as pb;

/// Longest label of a replica in an answer, in bytes; labels come from peers.
const MAX_LABEL: usize = 128;

/// A duration of `nanos` nanoseconds.
pub(super) fn duration(nanos: u64) -> prost_types::Duration {
    // Nanoseconds in a u64 are at most 584 years: both casts are exact.
    prost_types::Duration {
        seconds: (nanos / 1_000_000_000) as i64,
        nanos: (nanos % 1_000_000_000) as i32,
    }
}

/// A duration up to 584 years.
pub(super) fn span(time: Duration) -> prost_types::Duration {
    duration(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

pub(super) fn rate(rate: Rate) -> pb::Rate {
    let period = Duration::from_millis(u64::from(rate.period_ms()));
    pb::Rate { text: rate.to_string(), tokens: rate.tokens(), period: Some(span(period)) }
}

/// A limit, of which this replica has `buckets` buckets, all closed for `paused`
/// nanoseconds.
pub(super) fn limit(limit: &Limit, buckets: u64, paused: u64) -> pb::Limit {
    let quota = limit.default_quota();
    let rule = limit.rule();
    pb::Limit {
        name: limit.name().to_owned(),
        rate: Some(rate(quota.rate())),
        burst: quota.burst().as_f64(),
        burst_micros: quota.burst().micros(),
        key: rule
            .key
            .iter()
            .map(|part| pb::KeySource { source: part.to_string(), secret: part.is_secret() })
            .collect(),
        missing: match rule.missing {
            Missing::Shared => pb::Missing::Shared,
            Missing::ClientIp => pb::Missing::ClientIp,
            Missing::Skip => pb::Missing::Skip,
            Missing::Deny => pb::Missing::Deny,
        }
        .into(),
        mode: mode(limit.mode()).into(),
        cost: limit.cost().most().as_f64(),
        cost_micros: limit.cost().most().micros(),
        expose: limit.exposed(),
        overrides: u32::try_from(limit.overrides()).unwrap_or(u32::MAX),
        buckets,
        applies_to: condition(&rule.condition),
        exempt: rule.exempt.iter().map(condition).collect(),
        max_wait: (!limit.max_wait().is_zero()).then(|| span(limit.max_wait())),
        paused_for: paused_for(paused),
        strict_window: limit.keeps_window(),
    }
}

pub(super) const fn mode(mode: Mode) -> pb::Mode {
    match mode {
        Mode::Enforce => pb::Mode::Enforce,
        Mode::Shadow => pb::Mode::Shadow,
    }
}

/// A condition as text: what it names, in a fixed order; empty if it names
/// nothing, and so holds for every request.
pub(super) fn condition(condition: &Condition) -> String {
    let fields = [Field::Upstream, Field::Path, Field::Method, Field::Host].into_iter();
    let headers = (0..condition.headers.len()).map(Field::Header);
    let terms = fields.chain(headers).chain([Field::Client]).map(|field| term(condition, field));
    terms.filter(|term| !term.is_empty()).collect::<Vec<_>>().join(", ")
}

/// What a condition says of one field; empty if it says nothing.
pub(super) fn term(condition: &Condition, field: Field) -> String {
    let Condition { upstream, path, methods, host, headers, cidrs } = condition;
    match field {
        Field::Upstream => upstream.as_ref().map(|name| format!("upstream {name}")),
        Field::Path => path.as_ref().map(|path| format!("path {path}")),
        Field::Method => (!methods.is_empty()).then(|| format!("method {}", methods.join("|"))),
        Field::Host => host.as_ref().map(|host| format!("host {host}")),
        Field::Header(index) => {
            headers.get(index).map(|(name, value)| format!("header {name}={value}"))
        }
        Field::Client => (!cidrs.is_empty()).then(|| {
            let nets: Vec<String> = cidrs.iter().map(ToString::to_string).collect();
            format!("client {}", nets.join("|"))
        }),
    }
    .unwrap_or_default()
}

/// A bucket; `None` if its limit is not in force.
pub(super) fn bucket(view: &BucketView, limits: &LimitSet, mesh: &MeshView) -> Option<pb::Bucket> {
    let limit = limits.get(view.limit)?;
    let BucketView { quota, level, unsent, .. } = view;
    let now = TokenBucket::with_level(quota, *level, Timestamp::ZERO);
    Some(pb::Bucket {
        limit: limit.name().to_owned(),
        id: view.bucket.to_string(),
        key: view.key.as_deref().map_or_else(Vec::new, |key| key_parts(key, limit.rule())),
        key_known: view.key.is_some(),
        level: level.as_f64(),
        level_micros: level.micros(),
        burst: quota.burst().as_f64(),
        burst_micros: quota.burst().micros(),
        rate: Some(rate(quota.rate())),
        next_token_in: next_token(now, quota, view.paused_for).map(duration),
        full_in: now.full_in(quota).map(duration),
        spent: view.spent.iter().map(|(who, micros)| spent(*who, *micros, mesh)).collect(),
        admitted: view.admitted.into(),
        refused: view.refused.into(),
        unsent_micros: signed(*unsent),
        unsent: Tokens::from_micros(signed(*unsent)).as_f64(),
        heard_ago: view.heard_nanos_ago.map(duration),
        waiting: view.waiting as u64,
        awaited: view.awaited.as_f64(),
        awaited_micros: view.awaited.micros(),
        paused_for: paused_for(view.paused_for),
    })
}

/// The time until what is closed for so many nanoseconds opens; none if it is open.
pub(super) fn paused_for(nanos: u64) -> Option<prost_types::Duration> {
    (nanos > 0).then(|| duration(nanos))
}

/// Nanoseconds until a whole token can be had from a bucket that is closed for
/// `paused` nanoseconds; `None` if it never can.
fn next_token(bucket: TokenBucket, quota: &Quota, paused: u64) -> Option<u64> {
    let one = Tokens::from_micros(Tokens::MICRO);
    // A bucket whose rate is zero still gives what it holds.
    if bucket.level() >= one {
        return Some(paused);
    }
    match bucket.due(quota, one) {
        Due::Now => Some(paused),
        Due::In(nanos) => Some(nanos.max(paused)),
        Due::Never => None,
    }
}

fn spent(incarnation: Incarnation, micros: u64, mesh: &MeshView) -> pb::Spent {
    let is_self = incarnation == mesh.this.incarnation;
    let name = if is_self {
        mesh.this.name.as_str()
    } else {
        let peer = mesh.peers.iter().find(|peer| peer.incarnation == incarnation);
        peer.map_or("", |peer| peer.name.as_str())
    };
    pb::Spent {
        incarnation: incarnation.to_string(),
        name: label(name),
        tokens: Tokens::from_micros(signed(micros)).as_f64(),
        micros,
        is_self,
    }
}

/// The first [`MAX_LABEL`] bytes of `text`, in whole characters.
fn label(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_LABEL)].to_owned()
}

/// A canonical key as its parts. One that cannot be read, which happens only to
/// bytes from elsewhere, has none.
pub(super) fn key_parts(canonical: &[u8], rule: &Rule) -> Vec<pb::KeyPart> {
    let parts = key::decode(canonical).unwrap_or_default();
    parts
        .iter()
        .enumerate()
        .map(|(index, value)| {
            let part = rule.key.get(index);
            let (kind, part) = match value {
                KeyValue::Missing => (pb::KeyKind::Missing, part),
                KeyValue::Client(_) => (pb::KeyKind::Address, part),
                KeyValue::Text(_) => (pb::KeyKind::Text, part),
                KeyValue::List(_) => (pb::KeyKind::List, part),
                KeyValue::Secret(_) => (pb::KeyKind::Secret, part),
                KeyValue::Long(_) => (pb::KeyKind::Long, None),
            };
            pb::KeyPart {
                source: part.map_or_else(String::new, ToString::to_string),
                kind: kind.into(),
                text: value.to_string(),
            }
        })
        .collect()
}

pub(super) fn totals(limit: &str, totals: CheckTotals, buckets: u64) -> pb::LimitTotals {
    pb::LimitTotals {
        limit: limit.to_owned(),
        admitted: totals.admitted,
        held: totals.held,
        refused: totals.refused,
        shadow_refused: totals.shadow_refused,
        not_charged: totals.not_charged,
        buckets,
    }
}

/// How much of the cluster is known.
pub(super) fn knowledge(mesh: &MeshView) -> pb::Knowledge {
    let live = mesh.peers.iter().filter(|peer| peer.state == PeerState::Live);
    let suspect = mesh.peers.iter().filter(|peer| peer.state == PeerState::Suspect);
    pb::Knowledge {
        age: live.clone().map(|peer| peer.heard_nanos_ago).max().map(duration),
        live_peers: count(live.count()),
        suspect_peers: count(suspect.count()),
    }
}

/// The mesh; this replica has not yet told its peers of `unsent` micro-tokens.
pub(super) fn peers(mesh: &MeshView, unsent: u64) -> pb::ListPeersResponse {
    let this = &mesh.this;
    let unsent = signed(unsent);
    pb::ListPeersResponse {
        this: Some(pb::Replica {
            incarnation: this.incarnation.to_string(),
            name: label(&this.name),
            address: this.address.clone(),
            group: this.group.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            joined: this.joined,
            unsent_micros: unsent,
            unsent: Tokens::from_micros(unsent).as_f64(),
        }),
        peers: mesh.peers.iter().map(peer).collect(),
        listed_addresses: count(mesh.listed_addresses),
    }
}

fn peer(view: &PeerView) -> pb::Peer {
    pb::Peer {
        incarnation: view.incarnation.to_string(),
        name: label(&view.name),
        address: label(&view.address),
        state: match view.state {
            PeerState::Live => pb::PeerState::Live,
            PeerState::Suspect => pb::PeerState::Suspect,
        }
        .into(),
        connected: view.connected,
        received_ago: Some(duration(view.heard_nanos_ago)),
        sent_ago: Some(duration(view.sent_nanos_ago)),
        round_trip: (view.round_trip_nanos > 0).then(|| duration(view.round_trip_nanos)),
        pending_buckets: view.pending as u64,
        mismatches: view.mismatches.clone(),
    }
}

/// The identity that 32 hexadecimal digits name.
pub(super) fn bucket_id(text: &str) -> Option<BucketId> {
    // `from_str_radix` would take a sign.
    if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(text, 16).ok().map(|id| BucketId::from_bytes(id.to_be_bytes()))
}

fn signed(micros: u64) -> i64 {
    i64::try_from(micros).unwrap_or(i64::MAX)
}

fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{KeyBuf, KeyPart, PathPattern, Source};

    #[test]
    fn an_identity_is_read_as_it_is_printed() {
        let id = BucketId::from_bytes(std::array::from_fn(|i| i as u8 + 1));
        assert_eq!(bucket_id(&id.to_string()), Some(id));
        assert_eq!(bucket_id(&id.to_string().to_uppercase()), Some(id));
        for text in ["", "0", "+102030405060708090a0b0c0d0e0f10", "zz"] {
            assert_eq!(bucket_id(text), None, "{text}");
        }
    }

    #[test]
    fn a_condition_reads_in_a_fixed_order() {
        let full = Condition {
            upstream: Some("acme".into()),
            path: Some(PathPattern::try_new("/api/").unwrap()),
            methods: vec!["GET".into(), "POST".into()],
            host: Some("api.example.com".into()),
            headers: vec![("x-env".into(), "prod".into())],
            cidrs: vec!["10.1.0.0/16".parse().unwrap(), "::1/128".parse().unwrap()],
        };
        assert_eq!(
            condition(&full),
            "upstream acme, path /api/, method GET|POST, host api.example.com, header x-env=prod, \
             client 10.1.0.0/16|::1/128"
        );
        assert_eq!(condition(&Condition::default()), "");
    }

    #[test]
    fn the_next_token_is_there_due_or_never() {
        let quota = |rate: &str, burst| Quota::try_new(rate.parse().unwrap(), burst).unwrap();
        let at = |quota: &Quota, micros| {
            next_token(
                TokenBucket::with_level(quota, Tokens::from_micros(micros), Timestamp::ZERO),
                quota,
                0,
            )
        };
        let two = quota("2/s", 2);
        assert_eq!(at(&two, 1_000_000), Some(0));
        assert_eq!(at(&two, 0), Some(500_000_000));
        assert_eq!(at(&two, -1_000_000), Some(1_000_000_000));
        let full = TokenBucket::full(&two, Timestamp::ZERO);
        assert_eq!(next_token(full, &two, 7), Some(7), "it refills while it is closed");
        let blocked = quota("0/s", 3);
        assert_eq!(at(&blocked, 2_000_000), Some(0));
        assert_eq!(at(&blocked, 500_000), None);
    }

    #[test]
    fn a_key_is_told_by_its_parts() {
        let rule = Rule {
            key: vec![
                KeyPart::new(Source::Header("x-a".into()), false),
                KeyPart::new(Source::Cookie("sid".into()), false),
            ],
            ..Rule::default()
        };
        let key = rule.key_from_parts(&[None, Some("s3cr3t")], 64).unwrap();
        let parts = key_parts(key.as_bytes(), &rule);
        assert_eq!(parts.len(), 2);
        assert_eq!((parts[0].source.as_str(), parts[0].text.as_str()), ("header:x-a", "(none)"));
        assert_eq!(parts[1].kind(), pb::KeyKind::Secret);
        assert!(!parts[1].text.contains("s3cr3t"));

        let mut long = KeyBuf::new();
        long.push_text(&[b'x'; 200]);
        long.finish();
        let parts = key_parts(long.as_bytes(), &rule);
        assert_eq!((parts[0].kind(), parts[0].source.as_str()), (pb::KeyKind::Long, ""));
        assert!(key_parts(&[255, 1, 2], &rule).is_empty());
    }

    #[test]
    fn labels_are_cut_between_characters() {
        assert_eq!(label("pod-1"), "pod-1");
        let long = "é".repeat(100);
        assert_eq!(label(&long), "é".repeat(64));
        assert_eq!(label(&format!("x{long}")).len(), 127);
    }
}
