//! Keys: which bucket a request names.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::{HeaderName, HeaderValue, Request};
use tidegate::limiter::key::{self, MAX_KEY_BYTES};
use tidegate::limiter::{Client, Extracted, KeyBuf, KeyPart, KeyValue, Missing, Rule, Source};
use tidegate::proxy::HttpRequest;

use super::input::Input;

/// Encodes tuples, reads foreign bytes, and takes keys out of requests.
pub fn run(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else { return };
    match first % 3 {
        0 => foreign(rest),
        1 => two_tuples(&mut Input::new(rest)),
        _ => request(&mut Input::new(rest)),
    }
}

/// Bytes that a peer says are a key.
fn foreign(bytes: &[u8]) {
    let Some(parts) = key::decode(bytes) else {
        assert!(!key::may_travel(bytes), "bytes that are no key would be told on");
        return;
    };
    // Written by the rules it may be shorter; it says the same.
    let again = key::decode(encode(&parts).as_bytes()).map(|parts| shown(&parts));
    assert_eq!(again, Some(shown(&parts)));
}

fn two_tuples(input: &mut Input<'_>) {
    let (one, other) = (tuple(input), tuple(input));
    let keys = [&one, &other].map(|tuple| encode(tuple));
    for (tuple, key) in [&one, &other].into_iter().zip(&keys) {
        assert_eq!(key::decode(key.as_bytes()).map(|parts| shown(&parts)), Some(shown(tuple)));
    }
    let same = one.len() == other.len() && one.iter().zip(&other).all(|(a, b)| is_same(a, b));
    assert_eq!(keys[0].as_bytes() == keys[1].as_bytes(), same, "{one:?} {other:?}");
    let keys = keys.map(|mut key| {
        key.finish();
        key
    });
    assert_eq!(keys[0].as_bytes() == keys[1].as_bytes(), same, "{one:?} {other:?}");
    for key in keys {
        assert!(key.as_bytes().len() <= MAX_KEY_BYTES);
    }
}

fn tuple(input: &mut Input<'_>) -> Vec<KeyValue> {
    let count = input.below(5);
    (0..count)
        .map(|_| match input.below(5) {
            0 => KeyValue::Missing,
            1 => KeyValue::Client(client(input)),
            2 => KeyValue::Text(input.bytes().to_vec()),
            3 => {
                let count = 2 + input.below(3);
                KeyValue::List((0..count).map(|_| input.bytes().to_vec()).collect())
            }
            _ => KeyValue::Text(input.array::<2>().to_vec()),
        })
        .collect()
}

fn client(input: &mut Input<'_>) -> Client {
    let ip: IpAddr = match input.below(3) {
        0 => Ipv4Addr::from(input.array::<4>()).into(),
        1 => Ipv4Addr::from(input.array::<4>()).to_ipv6_mapped().into(),
        _ => Ipv6Addr::from(input.array::<16>()).into(),
    };
    Client::new(ip, input.byte())
}

/// Whether two values of a part name the same bucket.
fn is_same(one: &KeyValue, other: &KeyValue) -> bool {
    match (one, other) {
        (KeyValue::Client(one), KeyValue::Client(other)) => {
            one.group() == other.group()
                && (one.ip().is_ipv4() || one.ipv6_prefix() == other.ipv6_prefix())
        }
        (one, other) => one == other,
    }
}

fn encode(parts: &[KeyValue]) -> KeyBuf {
    let mut key = KeyBuf::new();
    for part in parts {
        match part {
            KeyValue::Missing => key.push_missing(),
            KeyValue::Client(client) => key.push_client(*client),
            KeyValue::Text(value) => key.push_text(value),
            KeyValue::List(values) => key.push_values(values.iter().map(Vec::as_slice)),
            // What was hashed has no way back into a key.
            KeyValue::Secret(hash) | KeyValue::Long(hash) => key.push_text(hash),
        }
    }
    key
}

/// For people, and so that a hash and its bytes are the same, as are a list of
/// one value and the value.
fn shown(parts: &[KeyValue]) -> Vec<String> {
    parts
        .iter()
        .map(|part| match part {
            KeyValue::Secret(hash) | KeyValue::Long(hash) => {
                KeyValue::Text(hash.to_vec()).to_string()
            }
            KeyValue::List(values) if values.is_empty() => KeyValue::Missing.to_string(),
            KeyValue::Missing | KeyValue::Client(_) | KeyValue::Text(_) | KeyValue::List(_) => {
                part.to_string()
            }
        })
        .collect()
}

/// The key of a request, and the same key as an operator would ask for it.
fn request(input: &mut Input<'_>) {
    let sources = [
        Source::ClientIp,
        Source::Header("x-key".into()),
        Source::Header("authorization".into()),
        Source::Cookie("c".into()),
        Source::Query("q".into()),
        Source::Path,
        Source::Method,
        Source::Host,
    ];
    let count = input.below(5);
    let key: Vec<KeyPart> = (0..count)
        .map(|_| KeyPart::new(sources[input.below(sources.len())].clone(), input.byte() > 200))
        .collect();
    let missing = [Missing::Shared, Missing::ClientIp, Missing::Skip, Missing::Deny];
    let rule = Rule { key, missing: missing[input.below(4)], ..Rule::default() };
    let client = client(input);
    let target = String::from_utf8_lossy(input.line()).into_owned();
    let Ok(request) = Request::builder().uri(target.as_str()).body(()) else { return };
    let (mut parts, ()) = request.into_parts();
    while !input.is_empty() {
        let name = ["x-key", "authorization", "cookie", "host"][input.below(4)];
        if let Ok(value) = HeaderValue::from_bytes(input.line()) {
            parts.headers.append(HeaderName::from_static(name), value);
        }
    }
    let request = HttpRequest::new(&parts, client);
    let mut key = KeyBuf::new();
    match rule.extract(&request, &mut key) {
        Extracted::Key => {}
        Extracted::Skipped(part) => {
            assert!(rule.missing == Missing::Skip && part < rule.key.len());
            return;
        }
        Extracted::Denied(part) => {
            assert!(rule.missing == Missing::Deny && part < rule.key.len());
            return;
        }
    }
    assert!(key.as_bytes().len() <= MAX_KEY_BYTES);
    let Some(values) = key::decode(key.as_bytes()) else { panic!("{key:?} is no key") };
    if let [KeyValue::Long(_)] = values[..] {
        return;
    }
    assert_eq!(values.len(), rule.key.len());
    let mut texts = Vec::new();
    for (part, value) in rule.key.iter().zip(&values) {
        let text = match value {
            KeyValue::Missing => None,
            KeyValue::Client(client) if *part.source() == Source::ClientIp => {
                Some(client.to_string())
            }
            KeyValue::Text(text) => {
                assert!(!part.is_secret(), "a secret is kept: {key:?}");
                assert!(!text.is_empty(), "an empty part is a missing one");
                // A path is normalised, which it was already.
                match String::from_utf8(text.clone()) {
                    Ok(text) if *part.source() != Source::Path => Some(text),
                    Ok(_) | Err(_) => return,
                }
            }
            KeyValue::List(_) => {
                assert!(!part.is_secret(), "a secret is kept: {key:?}");
                return;
            }
            KeyValue::Client(_) | KeyValue::Secret(_) | KeyValue::Long(_) => return,
        };
        texts.push(text);
    }
    let texts: Vec<Option<&str>> = texts.iter().map(Option::as_deref).collect();
    match rule.key_from_parts(&texts, client.ipv6_prefix()) {
        Ok(asked) => assert_eq!(asked.as_bytes(), key.as_bytes(), "{texts:?}"),
        Err(error) => panic!("{texts:?}: {error}"),
    }
}
