//! Who the client is: the connection's address, unless the peer is a proxy that
//! is trusted to say for whom it speaks.
//!
//! Forwarding fields are lists that every hop appends to, so only their right
//! end can be believed: the walk begins there, passes hops that are trusted, and
//! stops at the last address that a trusted hop vouches for. Whatever a client
//! wrote itself is to the left of that. When a trusted peer sends both families,
//! `X-Forwarded-For` counts and `Forwarded` does not.

use std::net::{IpAddr, Ipv6Addr};

use http::HeaderMap;
use http::header::FORWARDED;
use ipnet::IpNet;

use super::headers::X_FORWARDED_FOR;
use crate::limiter::Client;

/// Whose word counts, and how addresses are grouped.
#[derive(Clone, Debug)]
pub struct Trust {
    proxies: Vec<IpNet>,
    ipv6_prefix: u8,
}

impl Trust {
    /// Believes the forwarding fields of peers in `proxies`, and groups IPv6
    /// clients by `ipv6_prefix` bits.
    pub fn new(proxies: Vec<IpNet>, ipv6_prefix: u8) -> Self {
        Self { proxies, ipv6_prefix }
    }

    /// Whether the word of `ip` counts.
    pub fn trusts(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        self.proxies.iter().any(|net| net.contains(&ip))
    }

    /// The client behind a connection from `peer` with these request fields.
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> Client {
        let peer = peer.to_canonical();
        let trusted = self.trusts(peer);
        let ip = if trusted { self.walk(peer, headers) } else { peer };
        let client = Client::new(ip, self.ipv6_prefix);
        if trusted { client.vouched_for() } else { client }
    }

    /// The last address that can be vouched for; `peer` is trusted.
    fn walk(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        if headers.contains_key(&X_FORWARDED_FOR) {
            self.pass_trusted(peer, lines_from_right(headers, &X_FORWARDED_FOR).map(address))
        } else {
            self.pass_trusted(peer, lines_from_right(headers, &FORWARDED).map(forwarded_for))
        }
    }

    /// Follows `hops` from the nearest on, while each is readable and trusted.
    fn pass_trusted(&self, peer: IpAddr, hops: impl Iterator<Item = Option<IpAddr>>) -> IpAddr {
        let mut vouched = peer;
        for hop in hops {
            let Some(ip) = hop else { break };
            vouched = ip.to_canonical();
            if !self.trusts(vouched) {
                break;
            }
        }
        vouched
    }
}

/// The elements of all lines of a list field, the last one first. Empty elements
/// mean nothing and are left out.
fn lines_from_right<'a>(
    headers: &'a HeaderMap,
    name: &http::HeaderName,
) -> impl Iterator<Item = &'a [u8]> {
    headers
        .get_all(name)
        .iter()
        .rev()
        .flat_map(|line| ElementsFromRight(Some(line.as_bytes())))
        .filter(|element| !element.is_empty())
}

/// Splits a line at its commas, from the right, outside quotes. If the elements
/// that the trusted proxies added are well-formed, nothing to the left of them
/// changes where they begin.
struct ElementsFromRight<'a>(Option<&'a [u8]>);

impl<'a> Iterator for ElementsFromRight<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let rest = self.0?;
        let mut quoted = false;
        let mut comma = None;
        for (at, byte) in rest.iter().enumerate().rev() {
            match byte {
                b'"' if !is_escaped(rest, at) => quoted = !quoted,
                b',' if !quoted => {
                    comma = Some(at);
                    break;
                }
                _ => {}
            }
        }
        let (left, element) = match comma {
            Some(at) => (Some(&rest[..at]), &rest[at + 1..]),
            None => (None, rest),
        };
        self.0 = left;
        Some(element.trim_ascii())
    }
}

/// Whether the byte at `at` follows a backslash that is not escaped itself.
fn is_escaped(text: &[u8], at: usize) -> bool {
    text[..at].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1
}

/// The address in the `for` parameter of one `Forwarded` element.
fn forwarded_for(element: &[u8]) -> Option<IpAddr> {
    let mut quoted = false;
    let mut found = None;
    let mut start = 0;
    for end in 0..=element.len() {
        match element.get(end) {
            Some(b'"') if !is_escaped(element, end) => quoted = !quoted,
            Some(b';') | None if !quoted => {
                let pair = element[start..end].trim_ascii();
                start = end + 1;
                let is_for = pair.get(..4).is_some_and(|name| name.eq_ignore_ascii_case(b"for="));
                if is_for && found.is_none() {
                    found = Some(&pair[4..]);
                }
            }
            // A quote that never ends.
            None => return None,
            Some(_) => {}
        }
    }
    let value = found?.trim_ascii();
    let value = value.strip_prefix(b"\"").and_then(|v| v.strip_suffix(b"\"")).unwrap_or(value);
    address(value)
}

/// An address with or without port, brackets and blanks. `None` for anything
/// else, such as `unknown` or an obfuscated name.
fn address(text: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(text).ok()?.trim_ascii();
    if let Some(rest) = text.strip_prefix('[') {
        let (ip, after) = rest.split_once(']')?;
        let port_follows = after.is_empty() || after.strip_prefix(':').is_some_and(is_port);
        return port_follows.then(|| ip.parse::<Ipv6Addr>().ok().map(IpAddr::V6)).flatten();
    }
    if let Ok(ip) = text.parse() {
        return Some(ip);
    }
    let (ip, port) = text.split_once(':')?;
    is_port(port).then(|| ip.parse().ok().map(IpAddr::V4)).flatten()
}

fn is_port(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use proptest::prelude::*;

    fn client(trusted: &[&str], peer: &str, fields: &[(&'static str, &str)]) -> String {
        let trust = Trust::new(trusted.iter().map(|net| net.parse().unwrap()).collect(), 64);
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        trust.client(peer.parse().unwrap(), &headers).to_string()
    }

    const XFF: &str = "x-forwarded-for";

    #[test]
    fn kx_g4_an_untrusted_peer_speaks_for_itself() {
        assert_eq!(client(&[], "127.0.0.1", &[(XFF, "1.1.1.1")]), "127.0.0.1");
        let fields = [("forwarded", "for=1.1.1.1")];
        assert_eq!(client(&["10.0.0.0/8"], "127.0.0.1", &fields), "127.0.0.1");
    }

    #[test]
    fn kx_g5_the_walk_passes_trusted_hops_and_stops_behind_them() {
        let chain = [(XFF, "1.1.1.1, 2.2.2.2, 3.3.3.3")];
        for (trusted, expected) in [
            (&["127.0.0.1/32"][..], "3.3.3.3"),
            (&["127.0.0.1/32", "3.3.3.3/32"], "2.2.2.2"),
            (&["127.0.0.1/32", "3.3.3.3/32", "2.2.2.2/32"], "1.1.1.1"),
            (&["0.0.0.0/0"], "1.1.1.1"),
        ] {
            assert_eq!(client(trusted, "127.0.0.1", &chain), expected);
        }
        assert_eq!(client(&["127.0.0.1/32"], "127.0.0.1", &[]), "127.0.0.1");
    }

    #[test]
    fn kx_g6_ports_brackets_and_blanks_are_no_part_of_an_address() {
        for (written, expected) in [
            ("203.0.113.9:1001", "203.0.113.9"),
            (" 203.0.113.9 ", "203.0.113.9"),
            ("[2001:db8::9]:1", "2001:db8::/64"),
            ("[2001:db8::9]", "2001:db8::/64"),
            ("2001:db8::9", "2001:db8::/64"),
            ("::ffff:203.0.113.9", "203.0.113.9"),
        ] {
            assert_eq!(client(&["127.0.0.1/32"], "::ffff:127.0.0.1", &[(XFF, written)]), expected);
        }
    }

    #[test]
    fn kx_g11_every_line_counts_and_junk_to_the_left_does_not() {
        for junk in ["junk1", "9.9.9.9", "unknown, 1.2.3.4", ",,"] {
            let fields = [(XFF, junk), (XFF, "203.0.113.7")];
            assert_eq!(client(&["127.0.0.1/32"], "127.0.0.1", &fields), "203.0.113.7");
        }
    }

    #[test]
    fn kx_g12_an_unreadable_hop_ends_the_walk_at_the_last_vouched_address() {
        let long = "x".repeat(4096);
        for junk in [
            "198.51.100.1, unknown",
            "",
            ",,,",
            &long,
            "1.2.3.4:x",
            "[::1",
            "[::1]x",
            "fe80::1%eth0",
        ] {
            assert_eq!(client(&["127.0.0.1/32"], "127.0.0.1", &[(XFF, junk)]), "127.0.0.1");
        }
        let fields = [(XFF, "198.51.100.1, unknown, 10.0.0.1")];
        assert_eq!(client(&["127.0.0.1/32", "10.0.0.0/8"], "127.0.0.1", &fields), "10.0.0.1");
    }

    #[test]
    fn the_standard_field_is_read_where_the_other_is_absent() {
        for (written, expected) in [
            ("for=192.0.2.60;proto=http;by=203.0.113.43", "192.0.2.60"),
            ("proto=http; FOR=\"[2001:db8:cafe::17]:4711\"", "2001:db8:cafe::/64"),
            ("for=\"_hidden, 1.2.3.4\"", "127.0.0.1"),
            ("for=192.0.2.43, for=198.51.100.17", "198.51.100.17"),
            ("for=unknown", "127.0.0.1"),
            ("by=1.2.3.4", "127.0.0.1"),
        ] {
            let fields = [("forwarded", written)];
            assert_eq!(client(&["127.0.0.1/32"], "127.0.0.1", &fields), expected);
        }
        let both = [("forwarded", "for=1.1.1.1"), (XFF, "2.2.2.2")];
        assert_eq!(client(&["127.0.0.1/32"], "127.0.0.1", &both), "2.2.2.2");
    }

    #[test]
    fn quoted_text_of_a_trusted_proxy_says_nothing_of_the_client() {
        let trusted = ["127.0.0.1/32"];
        for (before, added) in [
            // Escaped quotes do not end the quoted text.
            ("for=6.6.6.6;a=\"", "for=203.0.113.7;host=\"a\\\"b\""),
            ("for=6.6.6.6", "for=203.0.113.7;host=\"\\\"\\\\\""),
            ("", "for=203.0.113.7;host=\"a\\\",for=6.6.6.6\""),
            // Nor are parameters inside of it any.
            ("", "host=\"a;for=6.6.6.6;b\";for=203.0.113.7"),
        ] {
            let line = format!("{before}, {added}");
            assert_eq!(client(&trusted, "127.0.0.1", &[("forwarded", &line)]), "203.0.113.7");
        }
        let open = [("forwarded", "for=6.6.6.6;host=\"a")];
        assert_eq!(client(&trusted, "127.0.0.1", &open), "127.0.0.1");
    }

    proptest! {
        #[test]
        fn what_stands_left_of_a_client_changes_nothing(junk in "[ -~]{0,40}") {
            let line = format!("{}, 203.0.113.7", junk.replace('"', ""));
            prop_assert_eq!(client(&["127.0.0.1/32"], "127.0.0.1", &[(XFF, &line)]), "203.0.113.7");
        }

        #[test]
        fn any_text_is_an_address_or_nothing(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = address(&bytes);
            let _ = forwarded_for(&bytes);
        }
    }
}
