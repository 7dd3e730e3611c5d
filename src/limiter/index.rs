//! The index of rules (layer 1, pure): which limits may apply to a request, without
//! asking all of them.
//!
//! Each rule is found by one thing that its condition asks for: a path, a host, both,
//! an upstream, a value of a header, networks, or methods; by that which the fewest
//! other rules ask for. What the index finds is tried as it would be without it, in
//! the order of the configuration: it may name a limit that does not apply, and never
//! leaves out one that does.

use std::collections::HashMap;
use std::hash::Hash;

use foldhash::fast::FixedState;
use ipnet::IpNet;
use smallvec::SmallVec;

use super::request::Attributes;
use super::rule::{Condition, Rule};

/// Fewer limits are tried one by one.
const FEW: usize = 8;

/// Positions of limits in the order of the configuration.
type Positions = SmallVec<[u16; 2]>;
type Table<K> = HashMap<K, Positions, FixedState>;
/// What rules ask of one header.
type Values = Table<Box<[u8]>>;

/// Which limits a request may concern, rising.
pub(super) type Candidates = SmallVec<[u16; 16]>;

/// Something that a condition asks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Mark {
    Path(Box<[u8]>),
    Host(Box<str>),
    Both(Box<str>, Box<[u8]>),
    Upstream(Box<str>),
    Header(Box<str>, Box<[u8]>),
    Network(IpNet),
    Method(Box<str>),
}

/// Finds limits by what their conditions ask for.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    /// Limits that ask for nothing.
    always: Candidates,
    paths: Paths,
    hosts: Table<Box<str>>,
    both: HashMap<Box<str>, Paths, FixedState>,
    upstreams: Table<Box<str>>,
    headers: Vec<(Box<str>, Values)>,
    networks: Networks,
    methods: Table<Box<str>>,
}

/// Paths without their trailing slash, and how long they are.
#[derive(Clone, Debug, Default)]
struct Paths {
    lengths: Vec<usize>,
    at: Table<Box<[u8]>>,
}

/// Networks, and how long their prefixes are: of IPv4 and of IPv6.
#[derive(Clone, Debug, Default)]
struct Networks {
    lengths: [Vec<u8>; 2],
    at: Table<IpNet>,
}

impl Index {
    /// An index of `rules`, in the order of the configuration; `None` if there are
    /// few, or none of them asks for anything.
    pub(super) fn new<'a>(rules: impl Iterator<Item = &'a Rule> + Clone) -> Option<Self> {
        if rules.clone().count() <= FEW {
            return None;
        }
        let mut asked: HashMap<Mark, usize> = HashMap::new();
        for mark in rules.clone().flat_map(|rule| ways(&rule.condition)).flatten() {
            *asked.entry(mark).or_default() += 1;
        }
        let mut index = Self::default();
        let mut finds_any = false;
        for (position, rule) in (0u16..).zip(rules) {
            // The first of those that the fewest rules share.
            let crowd =
                |way: &Vec<Mark>| way.iter().filter_map(|mark| asked.get(mark)).max().copied();
            match ways(&rule.condition).into_iter().min_by_key(crowd) {
                Some(way) => {
                    finds_any = true;
                    way.into_iter().for_each(|mark| index.add(mark, position));
                }
                None => index.always.push(position),
            }
        }
        finds_any.then_some(index)
    }

    fn add(&mut self, mark: Mark, position: u16) {
        match mark {
            Mark::Path(path) => self.paths.add(path, position),
            Mark::Host(host) => self.hosts.entry(host).or_default().push(position),
            Mark::Both(host, path) => self.both.entry(host).or_default().add(path, position),
            Mark::Upstream(name) => self.upstreams.entry(name).or_default().push(position),
            Mark::Header(name, value) => {
                let known = self.headers.iter().position(|(known, _)| *known == name);
                let at = known.unwrap_or_else(|| {
                    self.headers.push((name, Table::default()));
                    self.headers.len() - 1
                });
                if let Some((_, values)) = self.headers.get_mut(at) {
                    values.entry(value).or_default().push(position);
                }
            }
            Mark::Network(network) => self.networks.add(network, position),
            Mark::Method(method) => self.methods.entry(method).or_default().push(position),
        }
    }

    /// The limits that may apply to `request`.
    pub(super) fn find(&self, request: &impl Attributes) -> Candidates {
        let mut found = self.always.clone();
        let mut add = |positions: Option<&Positions>| {
            found.extend_from_slice(positions.map_or(&[], |positions| positions.as_slice()));
        };
        self.paths.find(request, &mut add);
        if !self.hosts.is_empty() {
            add(self.hosts.get(request.host()));
        }
        if !self.both.is_empty()
            && let Some(paths) = self.both.get(request.host())
        {
            paths.find(request, &mut add);
        }
        if !self.upstreams.is_empty() {
            add(self.upstreams.get(request.upstream()));
        }
        for (name, values) in &self.headers {
            request.header(name, &mut |value| add(values.get(value)));
        }
        self.networks.find(request, &mut add);
        if !self.methods.is_empty() {
            add(self.methods.get(request.method()));
        }
        if found.len() > self.always.len() {
            found.sort_unstable();
            // A client may be in several networks of one rule.
            found.dedup();
        }
        found
    }
}

impl Paths {
    fn add(&mut self, path: Box<[u8]>, position: u16) {
        if let Err(at) = self.lengths.binary_search(&path.len()) {
            self.lengths.insert(at, path.len());
        }
        self.at.entry(path).or_default().push(position);
    }

    fn find(&self, request: &impl Attributes, add: &mut impl FnMut(Option<&Positions>)) {
        if self.lengths.is_empty() {
            return;
        }
        let path = request.path();
        for length in &self.lengths {
            let Some((start, rest)) = path.split_at_checked(*length) else { break };
            if matches!(rest, [] | [b'/', ..]) {
                add(self.at.get(start));
            }
        }
    }
}

impl Networks {
    fn add(&mut self, network: IpNet, position: u16) {
        let lengths = &mut self.lengths[usize::from(network.addr().is_ipv6())];
        if !lengths.contains(&network.prefix_len()) {
            lengths.push(network.prefix_len());
        }
        self.at.entry(network).or_default().push(position);
    }

    fn find(&self, request: &impl Attributes, add: &mut impl FnMut(Option<&Positions>)) {
        if self.at.is_empty() {
            return;
        }
        let ip = request.client().ip();
        for length in &self.lengths[usize::from(ip.is_ipv6())] {
            if let Ok(network) = IpNet::new(ip, *length) {
                add(self.at.get(&network.trunc()));
            }
        }
    }
}

/// Everything by which a rule of this condition can be found, the cheapest first: a
/// request that meets the condition has one of the marks of each.
fn ways(condition: &Condition) -> Vec<Vec<Mark>> {
    let mut ways = Vec::new();
    let path = || condition.path.as_ref().map(|path| Box::from(path.stem()));
    let host = || condition.host.as_deref().map(Box::from);
    ways.extend(path().map(|path| vec![Mark::Path(path)]));
    ways.extend(host().map(|host| vec![Mark::Host(host)]));
    ways.extend(host().zip(path()).map(|(host, path)| vec![Mark::Both(host, path)]));
    ways.extend(condition.upstream.as_deref().map(|name| vec![Mark::Upstream(name.into())]));
    for (name, value) in &condition.headers {
        ways.push(vec![Mark::Header(name.as_str().into(), value.as_bytes().into())]);
    }
    if !condition.cidrs.is_empty() {
        ways.push(condition.cidrs.iter().map(|network| Mark::Network(network.trunc())).collect());
    }
    if !condition.methods.is_empty() {
        ways.push(
            condition.methods.iter().map(|method| Mark::Method(method.as_str().into())).collect(),
        );
    }
    ways
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::path::PathPattern;
    use super::super::testing::FakeRequest;
    use super::super::{Limit, LimitSet, LimitSpec, Quota};
    use super::*;

    fn set(rules: impl IntoIterator<Item = Rule>) -> LimitSet {
        let quota = Quota::try_new("5/s".parse().unwrap(), 5).unwrap();
        LimitSet::new(
            rules
                .into_iter()
                .enumerate()
                .map(|(i, rule)| Limit::new(LimitSpec::new(format!("l{i}"), rule, quota))),
        )
    }

    fn applying(limits: &LimitSet, request: &FakeRequest) -> (Vec<u16>, usize) {
        let candidates: Vec<_> = limits.candidates(request).collect();
        let tried = candidates.len();
        let applying = candidates.into_iter().filter(|(_, limit)| limit.rule().applies(request));
        (applying.map(|(index, _)| index.0).collect(), tried)
    }

    fn on(condition: Condition) -> Rule {
        Rule { condition, ..Rule::default() }
    }

    #[test]
    fn of_a_thousand_limits_only_those_that_may_apply_are_tried() {
        let path = |text: String| Some(PathPattern::try_new(&text).unwrap());
        let kinds: [fn(usize) -> Condition; 5] = [
            |i| Condition {
                path: Some(PathPattern::try_new(&format!("/t{i}/")).unwrap()),
                ..Condition::default()
            },
            |i| Condition { host: Some(format!("t{i}.example")), ..Condition::default() },
            |i| Condition { headers: vec![("x-t".into(), format!("{i}"))], ..Condition::default() },
            |i| Condition {
                cidrs: vec![format!("10.{}.{}.0/24", i / 256, i % 256).parse().unwrap()],
                ..Condition::default()
            },
            |i| Condition { upstream: Some(format!("u{i}")), ..Condition::default() },
        ];
        let request = FakeRequest::get("/t700/x?y")
            .with_host("t700.example")
            .with_header("x-t", "700")
            .from("10.2.188.9")
            .routed_to("u700");
        for (kind, condition) in kinds.into_iter().enumerate() {
            let limits = set((0..1000).map(|i| on(condition(i))));
            assert_eq!(applying(&limits, &request), (vec![700], 1), "kind {kind}");
            // What all of them ask for beside it does not matter.
            let limits = set((0..1000).map(|i| {
                let mut condition = condition(i);
                condition.methods = vec!["GET".into(), "HEAD".into()];
                condition.path = condition.path.or_else(|| path("/t700/".into()));
                on(condition)
            }));
            assert_eq!(applying(&limits, &request), (vec![700], 1), "kind {kind}");
        }
        // Neither of two things tells rules apart, but both together do.
        let grid = |i: usize| Condition {
            path: path(format!("/p{}/", i / 32)),
            host: Some(format!("h{}", i % 32)),
            ..Condition::default()
        };
        let limits = set((0..1000).map(|i| on(grid(i))));
        let request = FakeRequest::get("/p20/x").with_host("h5");
        assert_eq!(applying(&limits, &request), (vec![645], 1));
    }

    fn conditions() -> impl Strategy<Value = Condition> {
        let path = prop::option::of("/[ab]{0,2}(/[ab]?){0,2}");
        let methods = prop::sample::subsequence(vec!["GET", "PUT", "POST"], 0..3);
        let host = prop::option::of("[ab]");
        let headers = prop::collection::vec(("x-[ab]", "[ab]?"), 0..3);
        let cidrs = prop::sample::subsequence(
            vec!["10.0.0.0/8", "10.1.2.3/16", "10.1.0.0/24", "0.0.0.0/0", "2001:db8::/32", "::/0"],
            0..3,
        );
        let upstream = prop::option::of("[ab]");
        (path, methods, host, headers, cidrs, upstream).prop_map(
            |(path, methods, host, headers, cidrs, upstream)| Condition {
                path: path.map(|path| PathPattern::try_new(&path).unwrap()),
                methods: methods.into_iter().map(Into::into).collect(),
                host,
                headers,
                cidrs: cidrs.into_iter().map(|net| net.parse().unwrap()).collect(),
                upstream,
            },
        )
    }

    fn rules() -> impl Strategy<Value = Rule> {
        (conditions(), prop::collection::vec(conditions(), 0..2))
            .prop_map(|(condition, exempt)| Rule { condition, exempt, ..Rule::default() })
    }

    fn requests() -> impl Strategy<Value = FakeRequest> {
        let path = "/[ab]{0,2}(/[ab]?){0,3}";
        let ip = prop::sample::select(vec![
            "10.1.0.1",
            "10.9.0.1",
            "192.0.2.1",
            "2001:db8::1",
            "fe80::1",
        ]);
        let headers = prop::collection::vec(("x-[ab]", "[ab]?"), 0..4);
        let method = prop::sample::select(vec!["GET", "PUT", "DELETE"]);
        (path, ip, headers, method, "[ab]?", "[ab]?").prop_map(
            |(path, ip, headers, method, host, upstream)| {
                let request = FakeRequest::get(&path).from(ip).with_method(method).with_host(&host);
                let request = request.routed_to(&upstream);
                headers.iter().fold(request, |request, (n, v)| request.with_header(n, v))
            },
        )
    }

    proptest! {
        /// Against asking every limit.
        #[test]
        fn the_index_finds_what_applies_in_the_order_of_the_file(
            rules in prop::collection::vec(rules(), 0..60),
            requests in prop::collection::vec(requests(), 1..20),
        ) {
            let limits = set(rules);
            for request in requests {
                let all = limits.iter().filter(|(_, limit)| limit.rule().applies(&request));
                let expected: Vec<u16> = all.map(|(index, _)| index.0).collect();
                prop_assert_eq!(applying(&limits, &request).0, expected);
            }
        }
    }
}
