//! Request attributes (layer 1, pure): what a rule may look at.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// What rules and keys read from a request. Implemented once for HTTP requests
/// in the proxy, and by hand in tests.
pub trait Attributes {
    /// The method, as sent.
    fn method(&self) -> &str;
    /// The normalised path (see [`super::path::normalise`]).
    fn path(&self) -> &[u8];
    /// The host in lower case, without port; empty if there is none.
    fn host(&self) -> &str;
    /// The client, as far as it can be vouched for.
    fn client(&self) -> Client;
    /// Calls `each` with every value of the header `name` (lower case), in order.
    fn header(&self, name: &str, each: &mut dyn FnMut(&[u8]));
    /// The query without its question mark, as sent; empty if there is none.
    fn query(&self) -> &str;
    /// The name of the upstream that it is for; empty where there is only one.
    fn upstream(&self) -> &str {
        ""
    }
}

/// A client address and the prefix length by which IPv6 addresses are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Client {
    ip: IpAddr,
    ipv6_prefix: u8,
    vouched_for: bool,
}

impl Client {
    /// `ip` as a client; IPv4-mapped IPv6 is IPv4, a prefix above 128 is 128.
    pub fn new(ip: IpAddr, ipv6_prefix: u8) -> Self {
        Self { ip: ip.to_canonical(), ipv6_prefix: ipv6_prefix.min(128), vouched_for: false }
    }

    /// The same client, whose request came through a trusted proxy.
    #[must_use]
    pub const fn vouched_for(mut self) -> Self {
        self.vouched_for = true;
        self
    }

    /// Whether the request came through a trusted proxy, so that what only such
    /// a proxy may say, as on the cost, is believed.
    pub const fn is_vouched_for(&self) -> bool {
        self.vouched_for
    }

    /// The full address.
    pub const fn ip(&self) -> IpAddr {
        self.ip
    }

    /// The address that stands for the client's group: an IPv4 address itself,
    /// an IPv6 address with all bits below the prefix cleared.
    pub fn group(&self) -> IpAddr {
        match self.ip {
            IpAddr::V4(_) => self.ip,
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.ipv6_prefix)).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from(u128::from(v6) & mask))
            }
        }
    }

    /// The prefix length by which IPv6 addresses are grouped.
    pub const fn ipv6_prefix(&self) -> u8 {
        self.ipv6_prefix
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group() {
            IpAddr::V6(group) if self.ipv6_prefix < 128 => {
                write!(f, "{group}/{}", self.ipv6_prefix)
            }
            ip @ (IpAddr::V4(_) | IpAddr::V6(_)) => write!(f, "{ip}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_grouped_by_prefix() {
        for (ip, prefix, group) in [
            ("2001:db8:1:2:3::1", 64, "2001:db8:1:2::/64"),
            ("2001:db8:1:2:3::1", 128, "2001:db8:1:2:3::1"),
            ("2001:db8:1:2:3::1", 0, "::/0"),
            ("203.0.113.9", 64, "203.0.113.9"),
            ("::ffff:203.0.113.9", 64, "203.0.113.9"),
        ] {
            assert_eq!(Client::new(ip.parse().unwrap(), prefix).to_string(), group);
        }
    }
}
