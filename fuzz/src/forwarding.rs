//! Who the client is, by forwarding fields that anybody may have written.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::{HeaderMap, HeaderName, HeaderValue};
use ipnet::IpNet;
use tidegate::proxy::Trust;

use super::input::Input;

/// Finds the client of a request with any forwarding fields, and then behind a
/// trusted proxy that adds an element to them as the standard says.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let peer = address(&mut input);
    let prefix = input.byte() % 129;
    let mut proxies = Vec::new();
    for _ in 0..input.below(4) {
        let (base, length) = (address(&mut input), input.byte());
        let longest = if base.is_ipv4() { 32 } else { 128 };
        proxies.extend(IpNet::new(base, length % (longest + 1)));
    }
    let added = address(&mut input);
    let host_first = input.flag();
    let quoted = input.line().to_vec();
    let mut headers = HeaderMap::new();
    while !input.is_empty() {
        let name = if input.flag() { "x-forwarded-for" } else { "forwarded" };
        if let Ok(value) = HeaderValue::from_bytes(input.line()) {
            headers.append(HeaderName::from_static(name), value);
        }
    }
    check(&Trust::new(proxies.clone(), prefix), peer, &headers);

    // A proxy that is trusted says for whom it speaks: whatever stood there
    // before, that is the client, unless it is a proxy that is trusted as well.
    let proxies: Vec<IpNet> =
        proxies.into_iter().chain([IpNet::from(peer.to_canonical())]).collect();
    let trust = Trust::new(proxies, prefix);
    if trust.trusts(added) {
        return;
    }
    for name in ["x-forwarded-for", "forwarded"] {
        let element = match (name, added) {
            ("forwarded", IpAddr::V4(ip)) => format!("proto=http;For={ip}"),
            ("forwarded", IpAddr::V6(ip)) => format!("For=\"[{ip}]:80\""),
            (_, ip) => ip.to_string(),
        };
        let mut element = element.into_bytes();
        if name == "forwarded" {
            let mut host = b"host=\"".to_vec();
            for byte in &quoted {
                if matches!(byte, b'"' | b'\\') {
                    host.push(b'\\');
                }
                host.push(*byte);
            }
            host.push(b'"');
            let pairs = if host_first { [host, element] } else { [element, host] };
            element = pairs.join(b";".as_slice());
        }
        let Ok(element) = HeaderValue::from_bytes(&element) else { continue };
        let mut headers = headers.clone();
        if name == "forwarded" {
            headers.remove("x-forwarded-for");
        }
        let expect = |headers: &HeaderMap| {
            let client = trust.client(peer, headers);
            assert_eq!(client.ip(), added.to_canonical(), "{headers:?}");
        };
        // In a line of its own, and in the same as the last.
        let mut apart = headers.clone();
        apart.append(name, element.clone());
        expect(&apart);
        let before: Vec<&[u8]> = headers.get_all(name).iter().map(HeaderValue::as_bytes).collect();
        let joined =
            [before.join(b", ".as_slice()).as_slice(), element.as_bytes()].join(b", ".as_slice());
        if let Ok(joined) = HeaderValue::from_bytes(&joined) {
            headers.insert(name, joined);
            expect(&headers);
        }
    }
}

fn check(trust: &Trust, peer: IpAddr, headers: &HeaderMap) {
    let client = trust.client(peer, headers);
    assert_eq!(client.is_vouched_for(), trust.trusts(peer));
    if !trust.trusts(peer) {
        assert_eq!(client.ip(), peer.to_canonical(), "a stranger was believed");
    }
    // No address of a client is written in two ways.
    assert_eq!(client.ip(), client.ip().to_canonical());
}

fn address(input: &mut Input<'_>) -> IpAddr {
    match input.below(4) {
        0 => Ipv4Addr::new(10, 0, 0, input.byte()).into(),
        1 => Ipv4Addr::from(input.array::<4>()).into(),
        2 => Ipv4Addr::from(input.array::<4>()).to_ipv6_mapped().into(),
        _ => Ipv6Addr::from(input.array::<16>()).into(),
    }
}
