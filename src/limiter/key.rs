//! Keys and bucket identities (layer 1, pure).
//!
//! A key is the tuple of values that names a bucket inside its limit, in one
//! canonical encoding: parts are tagged and their lengths written out, so that
//! no two tuples share an encoding whatever bytes a client sends. Secret parts
//! and long tuples are kept only as a hash.
//!
//! A [`BucketId`] is the fixed 128-bit identity by which replicas speak of a
//! bucket: SipHash-2-4 with 128-bit output over the canonical key, under a hash
//! key derived with BLAKE3 from the limit's name and key parts. It is the same
//! on every replica and version. Whoever could make two keys collide would only
//! make them share one bucket.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use siphasher::sip128::SipHasher24;
use smallvec::SmallVec;

use super::request::Client;

/// The 128-bit identity of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BucketId(u128);

impl BucketId {
    /// The identity with these bytes (little-endian).
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_le_bytes(bytes))
    }

    /// The bytes of the identity (little-endian).
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }
}

impl fmt::Display for BucketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0.swap_bytes())
    }
}

impl fmt::Debug for BucketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BucketId({self})")
    }
}

/// The hash key of one limit's bucket identities.
#[derive(Clone, Copy, Debug)]
pub struct IdentitySeed(SipHasher24);

impl IdentitySeed {
    /// The seed for a limit called `name` with key parts described by `parts`.
    pub fn new(name: &str, parts: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("tidegate bucket identity v1");
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hasher.update(parts.as_bytes());
        let mut seed = [0; 16];
        seed.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self(SipHasher24::new_with_key(&seed))
    }

    /// The identity of the bucket that `key` names.
    pub fn id(&self, key: &[u8]) -> BucketId {
        let hash = self.0.hash(key);
        BucketId((u128::from(hash.h2) << 64) | u128::from(hash.h1))
    }
}

const MISSING: u8 = 0;
const IPV4: u8 = 1;
const IPV6: u8 = 2;
const TEXT: u8 = 3;
const LIST: u8 = 4;
const SECRET: u8 = 5;
const LONG: u8 = 6;

/// A tuple whose encoding is longer than this is kept only as a hash.
pub const MAX_KEY_BYTES: usize = 128;

/// Builds the canonical encoding of a key without allocating for usual sizes.
#[derive(Clone, Debug, Default)]
pub struct KeyBuf(SmallVec<[u8; 192]>);

impl KeyBuf {
    /// An empty tuple.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets all parts.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Drops all bytes from `length` on.
    pub(super) fn truncate(&mut self, length: usize) {
        self.0.truncate(length);
    }

    /// Adds a part that the request does not have.
    pub fn push_missing(&mut self) {
        self.0.push(MISSING);
    }

    /// Adds a client's address, grouped by its prefix.
    pub fn push_client(&mut self, client: Client) {
        match client.group() {
            IpAddr::V4(ip) => {
                self.0.push(IPV4);
                self.0.extend_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                self.0.push(IPV6);
                self.0.push(client.ipv6_prefix());
                self.0.extend_from_slice(&ip.octets());
            }
        }
    }

    /// Adds one text value.
    pub fn push_text(&mut self, value: &[u8]) {
        self.0.push(TEXT);
        self.push_bytes(value);
    }

    /// Adds a part of several values, in order. No values are a missing part,
    /// one value is a text.
    pub fn push_values<'a>(&mut self, values: impl ExactSizeIterator<Item = &'a [u8]> + Clone) {
        match values.len() {
            0 => self.push_missing(),
            1 => values.for_each(|value| self.push_text(value)),
            count => {
                self.0.push(LIST);
                self.push_length(count);
                values.for_each(|value| self.push_bytes(value));
            }
        }
    }

    /// Replaces all that was added since the buffer had `start` bytes by its
    /// hash, so that a secret is kept nowhere.
    pub fn conceal(&mut self, start: usize) {
        let hash = digest(&self.0[start..]);
        self.0.truncate(start);
        self.0.push(SECRET);
        self.0.extend_from_slice(&hash);
    }

    /// Ends the tuple: one that is too long becomes its hash.
    pub fn finish(&mut self) {
        if self.0.len() > MAX_KEY_BYTES {
            let hash = digest(&self.0);
            self.0.clear();
            self.0.push(LONG);
            self.0.extend_from_slice(&hash);
        }
    }

    /// The encoding so far.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn push_bytes(&mut self, value: &[u8]) {
        self.push_length(value.len());
        self.0.extend_from_slice(value);
    }

    /// LEB128, so that the usual length costs one byte.
    fn push_length(&mut self, mut length: usize) {
        while length >= 0x80 {
            self.0.push((length & 0x7f) as u8 | 0x80);
            length >>= 7;
        }
        self.0.push(length as u8);
    }
}

fn digest(bytes: &[u8]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new_derive_key("tidegate key digest v1");
    hasher.update(bytes);
    let mut hash = [0; 16];
    hash.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    hash
}

/// One part of a key, read back for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyValue {
    /// The request did not have the part.
    Missing,
    /// A client's address group.
    Client(Client),
    /// One value.
    Text(Vec<u8>),
    /// Several values, in order.
    List(Vec<Vec<u8>>),
    /// A secret of which only the hash is kept.
    Secret([u8; 16]),
    /// A tuple too long to keep; stands for all parts.
    Long([u8; 16]),
}

impl fmt::Display for KeyValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = |f: &mut fmt::Formatter<'_>, bytes: &[u8]| {
            bytes.iter().try_for_each(|b| write!(f, "{b:02x}"))
        };
        match self {
            Self::Missing => f.write_str("(none)"),
            Self::Client(client) => client.fmt(f),
            Self::Text(value) => f.write_str(&value.escape_ascii().to_string()),
            Self::List(values) => {
                for (i, value) in values.iter().enumerate() {
                    if i > 0 {
                        f.write_str(", ")?;
                    }
                    f.write_str(&value.escape_ascii().to_string())?;
                }
                Ok(())
            }
            Self::Secret(hash) => {
                f.write_str("secret:")?;
                hex(f, hash)
            }
            Self::Long(hash) => {
                f.write_str("long:")?;
                hex(f, hash)
            }
        }
    }
}

/// Reads a canonical key back. `None` if the bytes are not one, which happens
/// only to bytes from elsewhere.
pub fn decode(mut bytes: &[u8]) -> Option<Vec<KeyValue>> {
    let mut parts = Vec::new();
    while let Some((tag, rest)) = bytes.split_first() {
        bytes = rest;
        parts.push(match *tag {
            MISSING => KeyValue::Missing,
            IPV4 => {
                let octets: [u8; 4] = take(&mut bytes, 4)?.try_into().ok()?;
                KeyValue::Client(Client::new(Ipv4Addr::from(octets).into(), 128))
            }
            IPV6 => {
                let prefix = *take(&mut bytes, 1)?.first()?;
                let octets: [u8; 16] = take(&mut bytes, 16)?.try_into().ok()?;
                KeyValue::Client(Client::new(Ipv6Addr::from(octets).into(), prefix))
            }
            TEXT => KeyValue::Text(take_value(&mut bytes)?.to_vec()),
            LIST => {
                let count = take_length(&mut bytes)?;
                let mut values = Vec::new();
                for _ in 0..count {
                    values.push(take_value(&mut bytes)?.to_vec());
                }
                KeyValue::List(values)
            }
            SECRET => KeyValue::Secret(take(&mut bytes, 16)?.try_into().ok()?),
            LONG => KeyValue::Long(take(&mut bytes, 16)?.try_into().ok()?),
            _ => return None,
        });
    }
    Some(parts)
}

/// Whether a canonical key may leave the process: it holds no secret's hash.
pub fn may_travel(key: &[u8]) -> bool {
    decode(key).is_some_and(|parts| {
        !parts.iter().any(|part| matches!(part, KeyValue::Secret(_) | KeyValue::Long(_)))
    })
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (head, rest) = bytes.split_at_checked(count)?;
    *bytes = rest;
    Some(head)
}

fn take_value<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = take_length(bytes)?;
    take(bytes, length)
}

fn take_length(bytes: &mut &[u8]) -> Option<usize> {
    let mut length = 0usize;
    for shift in (0..28).step_by(7) {
        let byte = *take(bytes, 1)?.first()?;
        length |= usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(length);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn texts(values: &[&str]) -> Vec<u8> {
        let mut key = KeyBuf::new();
        values.iter().for_each(|v| key.push_text(v.as_bytes()));
        key.finish();
        key.as_bytes().to_vec()
    }

    /// Identities are a promise between versions: these values never change.
    #[test]
    fn identities_are_fixed() {
        let seed = IdentitySeed::new("per-client", "client_ip");
        let mut key = KeyBuf::new();
        key.push_client(Client::new("203.0.113.7".parse().unwrap(), 64));
        key.finish();
        assert_eq!(key.as_bytes(), [1, 203, 0, 113, 7]);
        assert_eq!(seed.id(key.as_bytes()).to_string(), "6601f0a7deebce9c7e5d0fd1d36f5969");
        assert_ne!(
            seed.id(key.as_bytes()),
            IdentitySeed::new("per-client", "header:x").id(key.as_bytes())
        );
    }

    #[test]
    fn kx_g9_no_two_combinations_collide() {
        let mut seen = HashSet::new();
        for inner in ["|", "/", ":", ",", "%7C", "\0", "\u{3}\u{1}"] {
            for pair in
                [["1".to_owned(), format!("2{inner}3")], [format!("1{inner}2"), "3".to_owned()]]
            {
                assert!(seen.insert(texts(&[&pair[0], &pair[1]])));
            }
        }
        assert!(seen.insert(texts(&["12", "3"])));
        assert!(seen.insert(texts(&["1", "23"])));
        assert!(seen.insert(texts(&["123"])));
        let mut list = KeyBuf::new();
        list.push_values([b"12".as_slice(), b"3"].into_iter());
        assert!(seen.insert(list.as_bytes().to_vec()));
    }

    #[test]
    fn an_address_never_equals_a_text() {
        let mut address = KeyBuf::new();
        address.push_client(Client::new("1.2.3.4".parse().unwrap(), 64));
        assert_ne!(address.as_bytes(), texts(&["1.2.3.4"]));
        let mut none = KeyBuf::new();
        none.push_missing();
        assert_ne!(none.as_bytes(), texts(&["none"]));
        assert_ne!(none.as_bytes(), texts(&[""]));
    }

    #[test]
    fn secrets_and_long_tuples_keep_no_text() {
        let mut key = KeyBuf::new();
        key.push_text(b"tenant");
        let start = key.as_bytes().len();
        key.push_text(b"hunter2");
        key.conceal(start);
        key.finish();
        assert!(!key.as_bytes().windows(7).any(|w| w == b"hunter2"));
        assert!(!may_travel(key.as_bytes()));
        let long = texts(&["x".repeat(200).as_str()]);
        assert_eq!(long.len(), 17);
        assert!(matches!(decode(&long).unwrap()[..], [KeyValue::Long(_)]));
        assert!(may_travel(&texts(&["plain"])));
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_read_back(parts in prop::collection::vec(prop::collection::vec(prop::collection::vec(any::<u8>(), 0..8), 0..4), 0..4)) {
            let mut key = KeyBuf::new();
            for values in &parts {
                key.push_values(values.iter().map(Vec::as_slice));
            }
            let back = decode(key.as_bytes()).unwrap();
            let expected: Vec<KeyValue> = parts.into_iter().map(|mut values| match values.len() {
                0 => KeyValue::Missing,
                1 => KeyValue::Text(values.remove(0)),
                _ => KeyValue::List(values),
            }).collect();
            prop_assert_eq!(back, expected);
        }

        #[test]
        fn foreign_bytes_are_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = decode(&bytes);
        }
    }
}
