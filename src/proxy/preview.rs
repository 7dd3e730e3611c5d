//! What would become of a request: the steps of the data path without its
//! effects, for operators who ask.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::header::FORWARDED;
use http::request::Parts;
use http::{HeaderMap, Response};

use super::config::{Config, Maxima};
use super::egress::{Routed, Routes, wait_of_route};
use super::headers::X_FORWARDED_FOR;
use super::limit::{Enforcer, rejection};
use super::live::{Live, SharedLive};
use super::metrics::CheckTotals;
use super::request::{HttpRequest, admit, is_preflight, preferred_wait};
use super::response::{Asker, Problem};
use crate::limiter::{Attributes as _, Client, Companion, Explanation, Outlook};
use crate::time::Timestamp;

/// Foresees what a proxy would do. Cheap to clone.
#[derive(Debug)]
pub struct Preview<C: Companion> {
    enforcer: Arc<Enforcer<C>>,
    live: SharedLive,
    routes: Arc<Routes>,
    has_default: bool,
    ipv6_prefix: u8,
    max: Maxima,
}

/// Where a request would come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asking {
    /// On behalf of this client, however that would be known.
    Client(IpAddr),
    /// Over a connection from this address.
    Peer(IpAddr),
}

/// How the client was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The question names it.
    Given,
    /// It is the connection's address. `ignored`: the request names others, but
    /// the connection's address is not among the trusted proxies.
    Connection {
        /// Whether forwarding fields were ignored.
        ignored: bool,
    },
    /// A trusted proxy names it in the field of this name.
    Forwarded(&'static str),
}

/// What would become of a request.
#[derive(Debug)]
pub struct Foreseen {
    /// On whose behalf it would be sent.
    pub client: Client,
    /// How that was found.
    pub found: Found,
    /// The path as rules see it.
    pub path: Vec<u8>,
    /// The host as rules see it.
    pub host: String,
    /// The name of the upstream that it would go to; empty if there is none.
    pub upstream: String,
    /// The index of the route that leads there, if one does.
    pub route: Option<usize>,
    /// What the limits would make of it; none if they are not asked.
    pub explanation: Option<Explanation>,
    /// Why they are not asked, for people; empty if they are.
    pub note: &'static str,
    /// How long it would wait for its tokens; `None` if it would not.
    pub held_for: Option<Duration>,
    /// The proxy's own answer; `None` if the upstream would answer.
    pub answer: Option<Response<Bytes>>,
    /// Fields that would be set in the upstream's answer.
    pub fields: HeaderMap,
}

impl<C: Companion> Clone for Preview<C> {
    fn clone(&self) -> Self {
        Self {
            enforcer: Arc::clone(&self.enforcer),
            live: Arc::clone(&self.live),
            routes: Arc::clone(&self.routes),
            has_default: self.has_default,
            ipv6_prefix: self.ipv6_prefix,
            max: self.max,
        }
    }
}

impl<C: Companion> Preview<C> {
    /// Foresees what `enforcer` and the checks of `config` would do.
    pub fn new(enforcer: Arc<Enforcer<C>>, config: &Config) -> Self {
        let live = Arc::new(ArcSwap::from_pointee(Live::new(config)));
        Self::following(enforcer, config, live, Arc::default())
    }

    /// The same, with the settings that change while the proxy runs, and its routes.
    pub(super) fn following(
        enforcer: Arc<Enforcer<C>>,
        config: &Config,
        live: SharedLive,
        routes: Arc<Routes>,
    ) -> Self {
        let has_default = config.upstream.is_some();
        let Config { ipv6_prefix, max, .. } = *config;
        Self { enforcer, live, routes, has_default, ipv6_prefix, max }
    }

    /// By how many bits IPv6 clients are grouped.
    pub const fn ipv6_prefix(&self) -> u8 {
        self.ipv6_prefix
    }

    /// The moment at which it would be decided.
    pub fn now(&self) -> Timestamp {
        self.enforcer.now()
    }

    /// What the limit called `name` made of its requests since the start.
    pub fn totals(&self, name: &str) -> CheckTotals {
        self.enforcer.totals(name)
    }

    /// What would become of a request with the head `parts`. Nothing is spent,
    /// counted or kept.
    pub fn foresee(&self, parts: Parts, asking: Asking) -> Foreseen {
        let (client, found) = self.client(asking, &parts.headers);
        let grant = self.live.load().cors.grant(&parts.headers);
        let mut foreseen = self.foresee_without_grant(parts, client, found);
        if let (Some(grant), Some(answer)) = (grant, &mut foreseen.answer) {
            grant.insert(answer.headers_mut());
        }
        foreseen
    }

    fn foresee_without_grant(&self, mut parts: Parts, client: Client, found: Found) -> Foreseen {
        let admitted = admit(&mut parts, &self.max);
        let route = self.routes.find(&parts, &HttpRequest::new(&parts, client)).map(Arc::clone);
        let index = route.as_ref().map(|route| route.index);
        let lost = route.is_none() && !self.has_default;
        if let Some(route) = route {
            parts.extensions.insert(Routed(route));
        }
        let request = HttpRequest::new(&parts, client);
        let mut foreseen = Foreseen {
            client,
            found,
            path: request.path().to_vec(),
            host: request.host().to_owned(),
            upstream: if lost { String::new() } else { request.upstream().to_owned() },
            route: index,
            explanation: None,
            note: "",
            held_for: None,
            answer: None,
            fields: HeaderMap::new(),
        };
        if let Err(problem) = admitted {
            foreseen.note = if problem == Problem::LastHop {
                "the request asks the proxy itself, which no limit counts"
            } else {
                "the request is refused before any limit is asked"
            };
            foreseen.answer = Some(problem.answer(&Asker::new(&parts.method, &parts.headers)));
            return foreseen;
        }
        if lost {
            foreseen.note = "no route takes it, and there is no `proxy.upstream`";
            let asker = Asker::new(&parts.method, &parts.headers);
            foreseen.answer = Some(Problem::NoRoute.answer(&asker));
            return foreseen;
        }
        if is_preflight(&parts) {
            foreseen.note = "a preflight of a browser is not limited";
            return foreseen;
        }
        let explanation = self.enforcer.limiter().explain(&request, self.enforcer.now());
        let presentation = self.enforcer.presentation();
        let mut fields = presentation.fields(&explanation.decision, self.enforcer.style());
        let asked = preferred_wait(&parts.headers);
        let wait = wait_of_route(&parts);
        match self.enforcer.limiter().outlook_on(wait, &explanation.decision, asked) {
            Outlook::Settled => {
                foreseen.answer =
                    rejection(&presentation, &explanation.decision, &mut fields, &parts);
                if let Some(fields) = fields {
                    fields.insert(&mut foreseen.fields);
                }
            }
            // What the fields will say then is not known yet.
            Outlook::Waits { due, .. } => foreseen.held_for = Some(due),
            Outlook::Crowded { due } => {
                let asker = Asker::new(&parts.method, &parts.headers);
                foreseen.answer = Some(Problem::TooManyWaiting { due }.answer(&asker));
            }
        }
        foreseen.explanation = Some(explanation);
        foreseen
    }

    fn client(&self, asking: Asking, headers: &HeaderMap) -> (Client, Found) {
        let peer = match asking {
            Asking::Client(ip) => return (Client::new(ip, self.ipv6_prefix), Found::Given),
            Asking::Peer(peer) => peer,
        };
        let live = self.live.load();
        let named = [&X_FORWARDED_FOR, &FORWARDED].into_iter().find(|n| headers.contains_key(*n));
        let found = match named {
            None => Found::Connection { ignored: false },
            Some(_) if !live.trust.trusts(peer) => Found::Connection { ignored: true },
            Some(name) if *name == X_FORWARDED_FOR => Found::Forwarded("X-Forwarded-For"),
            Some(_) => Found::Forwarded("Forwarded"),
        };
        (live.trust.client(peer, headers), found)
    }
}
