//! Asking the DNS: one name, both address families, no cache of our own.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures_util::future::join;
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{
    ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts,
};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::rr::{Name, RData, RecordType};
use hickory_resolver::system_conf::read_system_conf;

/// How long one try may take.
const TRY_TIMEOUT: Duration = Duration::from_secs(1);

/// The named port of a headless service on which peers listen.
const SERVICE: &str = "_peer._tcp";

/// Tries after the first.
const RETRIES: usize = 1;

/// The end of a question whatever the tries did: both over UDP and, for a cut
/// answer, over TCP.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(4);

/// The answer for one address family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// At least one address.
    Found {
        /// The addresses; IPv4-mapped ones appear as IPv4.
        addresses: BTreeSet<IpAddr>,
        /// The smallest TTL on the way to them.
        ttl: Duration,
    },
    /// The server says that there is none (NXDOMAIN or NODATA).
    Empty,
    /// Nothing is known: no answer, an error code, a cut or unreadable answer.
    Failed(String),
}

/// The port that a service gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Port {
    /// This one.
    Named(u16),
    /// It names none, or there is no such service.
    Unnamed,
    /// Nothing can be said: no answer, or several ports.
    Unknown,
}

/// The answers for a name.
#[derive(Debug)]
pub(super) struct Answers {
    /// Which candidate they are for.
    pub(super) candidate: usize,
    /// The A records.
    pub(super) v4: Answer,
    /// The AAAA records.
    pub(super) v6: Answer,
}

/// A resolver and how it expands a name that is not absolute.
pub(super) struct Resolver {
    resolver: TokioResolver,
    search: Vec<Name>,
    ndots: usize,
}

impl Resolver {
    /// A resolver that asks `server`, or, with `None`, those of the system with
    /// its search list and host file.
    ///
    /// # Errors
    /// A reason, if the system's configuration cannot be read.
    pub(super) fn try_new(server: Option<SocketAddr>) -> Result<Self, String> {
        match server {
            Some(server) => {
                let mut options = ResolverOpts::default();
                options.use_hosts_file = ResolveHosts::Never;
                Self::build(explicit(server), options)
            }
            None => {
                let (config, options) = read_system_conf().map_err(|error| error.to_string())?;
                Self::build(config, options)
            }
        }
    }

    fn build(config: ResolverConfig, mut options: ResolverOpts) -> Result<Self, String> {
        options.timeout = TRY_TIMEOUT;
        options.attempts = RETRIES;
        // The schedule of this module decides how old an answer may be. In
        // particular a negative answer must not outlive the moment.
        options.cache_size = 0;
        let mut search = config.search().to_vec();
        if search.is_empty() {
            search.extend(config.domain().cloned());
        }
        let ndots = options.ndots;
        let resolver = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
            .with_options(options)
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Self { resolver, search, ndots })
    }

    /// The absolute names to ask for `name`, in order.
    pub(super) fn candidates(&self, name: &Name) -> Vec<Name> {
        candidates(name, &self.search, self.ndots)
    }

    /// Asks for the first of `candidates` that has an address. `known` says that
    /// the first candidate is the one that had addresses before.
    pub(super) async fn lookup(&self, candidates: &[Name], known: bool) -> Answers {
        let mut search = Search { known, doubtful: None };
        for (candidate, name) in candidates.iter().enumerate() {
            let (v4, v6) =
                join(self.ask(name, RecordType::A), self.ask(name, RecordType::AAAA)).await;
            if let Some(answers) = search.settle(Answers { candidate, v4, v6 }) {
                return answers;
            }
        }
        search.end()
    }

    /// Asks which port the service `name` gives its named port `peer`: the SRV
    /// records `_peer._tcp.NAME`. All endpoints of a service have the same one.
    pub(super) async fn port(&self, name: &Name) -> Port {
        let Ok(service) = Name::from_ascii(SERVICE).and_then(|s| s.append_domain(name)) else {
            return Port::Unnamed;
        };
        let question = self.resolver.lookup(service, RecordType::SRV);
        let lookup = match tokio::time::timeout(QUESTION_TIMEOUT, question).await {
            Ok(Ok(lookup)) => lookup,
            Ok(Err(error)) if is_clean_negative(&error) => return Port::Unnamed,
            Ok(Err(_)) | Err(_) => return Port::Unknown,
        };
        let mut ports = lookup.answers().iter().filter_map(|record| port(&record.data));
        match ports.next() {
            Some(first) if ports.all(|port| port == first) => Port::Named(first),
            Some(_) => Port::Unknown,
            None => Port::Unnamed,
        }
    }

    async fn ask(&self, name: &Name, family: RecordType) -> Answer {
        let question = self.resolver.lookup(name.clone(), family);
        let lookup = match tokio::time::timeout(QUESTION_TIMEOUT, question).await {
            Ok(Ok(lookup)) => lookup,
            Ok(Err(error)) if is_clean_negative(&error) => return Answer::Empty,
            Ok(Err(error)) => return Answer::Failed(format!("{name} {family}: {error}")),
            Err(_) => return Answer::Failed(format!("{name} {family}: no answer in time")),
        };
        let mut addresses = BTreeSet::new();
        let mut ttl = u32::MAX;
        for record in lookup.answers() {
            // A CNAME on the way limits how long the whole holds.
            ttl = ttl.min(record.ttl);
            addresses.extend(address(&record.data));
        }
        if addresses.is_empty() {
            Answer::Empty
        } else {
            Answer::Found { addresses, ttl: Duration::from_secs(ttl.into()) }
        }
    }
}

/// Walks the candidates of one name.
///
/// A candidate that fails is passed over, but the whole is [`Answer::Empty`] only
/// if every candidate is. One that had addresses before and fails now ends the
/// walk: an address behind it would belong to another name.
struct Search {
    /// Whether the first candidate had addresses before.
    known: bool,
    /// The first candidate that failed.
    doubtful: Option<Answers>,
}

impl Search {
    /// Takes the answers of the next candidate, and gives them back if they end
    /// the walk.
    fn settle(&mut self, answers: Answers) -> Option<Answers> {
        let families = [&answers.v4, &answers.v6];
        let found = families.iter().any(|answer| matches!(answer, Answer::Found { .. }));
        let failed = families.iter().any(|answer| matches!(answer, Answer::Failed(_)));
        if found || (failed && self.known && answers.candidate == 0) {
            return Some(answers);
        }
        if failed && self.doubtful.is_none() {
            self.doubtful = Some(answers);
        }
        None
    }

    /// The answers when no candidate ended the walk.
    fn end(self) -> Answers {
        self.doubtful.unwrap_or(Answers { candidate: 0, v4: Answer::Empty, v6: Answer::Empty })
    }
}

fn explicit(server: SocketAddr) -> ResolverConfig {
    // TCP is there for answers that do not fit into a datagram: a service with
    // some dozens of endpoints has them.
    let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()]
        .into_iter()
        .map(|mut connection| {
            connection.port = server.port();
            connection
        })
        .collect();
    let server = NameServerConfig::new(server.ip(), true, connections);
    ResolverConfig::from_name_servers(vec![server])
}

/// Whether the server said that the name does not exist or has no such record.
/// A referral to other servers says neither.
fn is_clean_negative(error: &NetError) -> bool {
    matches!(error, NetError::Dns(DnsError::NoRecordsFound(none)) if none.ns.is_none())
}

#[allow(clippy::wildcard_enum_match_arm, reason = "only two of the DNS's many types matter")]
fn address(data: &RData) -> Option<IpAddr> {
    match data {
        RData::A(a) => Some(IpAddr::V4(a.0)),
        RData::AAAA(aaaa) => Some(IpAddr::V6(aaaa.0).to_canonical()),
        _ => None,
    }
}

#[allow(clippy::wildcard_enum_match_arm, reason = "only one of the DNS's many types matters")]
fn port(data: &RData) -> Option<u16> {
    match data {
        RData::SRV(srv) => Some(srv.port),
        _ => None,
    }
}

/// The rule of `resolv.conf`: a name with at least `ndots` dots is tried as it
/// stands before the search list, any other one after it. The resolver library
/// has it too, but reports only what the last candidate said.
fn candidates(name: &Name, search: &[Name], ndots: usize) -> Vec<Name> {
    let mut absolute = name.clone();
    absolute.set_fqdn(true);
    if name.is_fqdn() {
        return vec![absolute];
    }
    let expanded = search.iter().filter_map(|domain| {
        let mut candidate = name.clone().append_domain(domain).ok()?;
        candidate.set_fqdn(true);
        Some(candidate)
    });
    let dots = usize::from(name.num_labels()).saturating_sub(1);
    let mut names: Vec<Name> = Vec::with_capacity(search.len() + 1);
    if dots >= ndots {
        names.push(absolute);
        names.extend(expanded);
    } else {
        names.extend(expanded);
        names.push(absolute);
    }
    names
}

#[cfg(test)]
mod tests {
    use hickory_resolver::system_conf::parse_resolv_conf;

    use super::*;

    fn name(text: &str) -> Name {
        Name::from_str_relaxed(text).unwrap()
    }

    fn expand(text: &str, ndots: usize) -> Vec<String> {
        let search = [name("default.svc.cluster.local"), name("svc.cluster.local")];
        candidates(&name(text), &search, ndots).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_short_name_goes_through_the_search_list_first() {
        assert_eq!(
            expand("peers", 5),
            ["peers.default.svc.cluster.local.", "peers.svc.cluster.local.", "peers."]
        );
    }

    #[test]
    fn a_name_with_enough_dots_is_tried_as_it_stands_first() {
        assert_eq!(
            expand("peers.test", 1),
            [
                "peers.test.",
                "peers.test.default.svc.cluster.local.",
                "peers.test.svc.cluster.local."
            ]
        );
    }

    #[test]
    fn an_absolute_name_is_asked_alone() {
        assert_eq!(expand("peers.test.", 5), ["peers.test."]);
    }

    #[tokio::test]
    async fn the_search_list_and_ndots_of_the_system_apply() {
        let text = "search default.svc.cluster.local svc.cluster.local\n\
                    nameserver 127.0.0.1\noptions ndots:5\n";
        let (config, options) = parse_resolv_conf(text).unwrap();
        let resolver = Resolver::build(config, options).unwrap();
        let names = resolver.candidates(&name("peers.ns.svc.cluster.local"));
        assert_eq!(names.len(), 3);
        assert_eq!(names[2], name("peers.ns.svc.cluster.local."));
        assert_eq!(resolver.resolver.options().cache_size, 0);
    }

    /// How many candidates are asked, and which answer comes out, if candidate
    /// `n` gives `answers[n]` for A and nothing for AAAA.
    fn search<const N: usize>(answers: [Answer; N], known: bool) -> (usize, usize, Answer) {
        let mut search = Search { known, doubtful: None };
        for (candidate, v4) in answers.into_iter().enumerate() {
            let answers = Answers { candidate, v4, v6: Answer::Empty };
            if let Some(end) = search.settle(answers) {
                return (candidate + 1, end.candidate, end.v4);
            }
        }
        let end = search.end();
        (N, end.candidate, end.v4)
    }

    #[test]
    fn the_search_goes_on_until_an_address_is_found() {
        let found = || Answer::Found { addresses: BTreeSet::new(), ttl: TRY_TIMEOUT };
        let failed = || Answer::Failed("refused".to_owned());
        let empty = || Answer::Empty;
        assert_eq!(search([empty(), found(), empty()], false), (2, 1, found()));
        assert_eq!(search([failed(), found()], false), (2, 1, found()));
        assert_eq!(search([empty(), empty()], false), (2, 0, empty()));
        // One in doubt leaves the whole in doubt.
        assert_eq!(search([empty(), failed(), empty()], false), (3, 1, failed()));
        // The name that is known to be the right one fails: no other will do.
        assert_eq!(search([failed(), found()], true), (1, 0, failed()));
        assert_eq!(search([empty(), found()], true), (2, 1, found()));
    }
}
