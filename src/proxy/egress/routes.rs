//! Which way a request goes.

use std::sync::Arc;
use std::time::Duration;

use http::uri::{PathAndQuery, Uri};
use http::{HeaderName, request};

use super::super::request::HttpRequest;
use super::config::EgressConfig;
use super::{DEFAULT, Destination, Gate};
use crate::limiter::{Attributes as _, Condition};

/// All routes, in the order in which they are tried.
#[derive(Debug, Default)]
pub(in super::super) struct Routes(Vec<Arc<Route>>);

/// The way of some requests.
#[derive(Debug)]
pub(in super::super) struct Route {
    /// Its index among the routes.
    pub(in super::super) index: usize,
    condition: Condition,
    /// The upstream's name.
    pub(in super::super) upstream: String,
    /// Its place among the named upstreams; `None`: it is the default.
    pub(in super::super) place: Option<usize>,
    /// Lets so many requests be on their way to it.
    gate: Option<Arc<Gate>>,
    /// How long requests may wait, in place of what the limits say.
    pub(in super::super) max_wait: Option<Duration>,
    strip: Option<String>,
}

/// In the extensions of a request that takes a route.
#[derive(Clone, Debug)]
pub(in super::super) struct Routed(pub(in super::super) Arc<Route>);

impl Routes {
    /// The routes of `egress` to the upstreams in `named`.
    pub(in super::super) fn new(egress: &EgressConfig, named: &[Arc<Destination>]) -> Self {
        let routes = egress.routes.iter().enumerate().map(|(index, route)| {
            let place = named.iter().position(|to| to.name == route.upstream);
            Arc::new(Route {
                index,
                condition: route.condition.compile(),
                upstream: route.upstream.clone(),
                place,
                gate: place.and_then(|place| named[place].gate.clone()),
                max_wait: route.max_wait.map(|wait| wait.0),
                strip: route.strip.as_ref().map(|prefix| prefix.0.clone()),
            })
        });
        Self(routes.collect())
    }

    /// Whether there are none, so that every request goes to the default upstream.
    pub(in super::super) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The route of `request`, whose head is `parts`.
    pub(in super::super) fn find(
        &self,
        parts: &request::Parts,
        request: &HttpRequest<'_>,
    ) -> Option<&Arc<Route>> {
        self.0.iter().find(|route| route.takes(parts, request))
    }

    /// Whether a route looks at the field `name`.
    pub(in super::super) fn look_at(&self, name: &HeaderName) -> bool {
        let headers = self.0.iter().flat_map(|route| &route.condition.headers);
        headers.into_iter().any(|(field, _)| field == name.as_str())
    }
}

impl Route {
    fn takes(&self, parts: &request::Parts, request: &HttpRequest<'_>) -> bool {
        // Both as sent, because that is what is taken away, and as rules see it, so
        // that dot segments do not lead out of it.
        let begins = self.strip.as_ref().is_none_or(|prefix| {
            let (prefix, sent) = (prefix.as_bytes(), parts.uri.path().as_bytes());
            below(sent, prefix).is_some() && below(request.path(), prefix).is_some()
        });
        begins && self.condition.matches(request)
    }

    /// Takes away from `uri` what the upstream is not to see.
    pub(in super::super) fn strip(&self, uri: &mut Uri) {
        let Some(prefix) = &self.strip else { return };
        let Some(target) = uri.path_and_query() else { return };
        if below(target.path().as_bytes(), prefix.as_bytes()).is_none() {
            return;
        }
        let rest = &target.as_str()[prefix.len()..];
        let rest: Result<PathAndQuery, _> =
            if rest.starts_with('/') { rest.parse() } else { format!("/{rest}").parse() };
        // What follows a whole segment of a target is one itself.
        if let Ok(rest) = rest {
            *uri = Uri::from(rest);
        }
    }
}

/// What follows the whole segments `prefix` in `path`.
fn below<'a>(path: &'a [u8], prefix: &[u8]) -> Option<&'a [u8]> {
    path.strip_prefix(prefix).filter(|rest| matches!(rest.first(), None | Some(b'/')))
}

/// The name of the upstream of the request with the head `parts`.
pub(in super::super) fn upstream_of(parts: &request::Parts) -> &str {
    parts.extensions.get::<Routed>().map_or(DEFAULT, |routed| &routed.0.upstream)
}

/// The gate of the upstream that a request with the head `parts` goes to.
pub(in super::super) fn gate_of(parts: &request::Parts) -> Option<&Arc<Gate>> {
    parts.extensions.get::<Routed>()?.0.gate.as_ref()
}

/// How long a request with the head `parts` may wait, if its route says so.
pub(in super::super) fn wait_of_route(parts: &request::Parts) -> Option<Duration> {
    parts.extensions.get::<Routed>().and_then(|routed| routed.0.max_wait)
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use crate::limiter::Client;

    /// The upstream of a request by `routes`, and what it is asked for.
    fn route(routes: &serde_json::Value, target: &str) -> Option<(String, String)> {
        let egress: EgressConfig =
            serde_json::from_value(serde_json::json!({ "routes": routes })).unwrap();
        let routes = Routes::new(&egress, &[]);
        let (mut parts, ()) = Request::get(target).body(()).unwrap().into_parts();
        let client = Client::new([127, 0, 0, 1].into(), 64);
        let route = Arc::clone(routes.find(&parts, &HttpRequest::new(&parts, client))?);
        route.strip(&mut parts.uri);
        Some((route.upstream.clone(), parts.uri.to_string()))
    }

    #[test]
    fn the_first_route_that_matches_counts() {
        let routes = serde_json::json!([
            { "match": { "path": "/a/b" }, "upstream": "one" },
            { "match": { "path": "/a/" }, "upstream": "two" },
            { "match": { "methods": ["GET"], "path": "/c" }, "upstream": "default" },
        ]);
        let to = |target: &str| route(&routes, target).map(|(upstream, _)| upstream);
        assert_eq!(to("/a/b").as_deref(), Some("one"));
        assert_eq!(to("/a/x/../b?q").as_deref(), Some("one"));
        assert_eq!(to("/a/b/c").as_deref(), Some("two"));
        assert_eq!(to("/c").as_deref(), Some("default"));
        assert_eq!(to("/"), None);
    }

    #[test]
    fn a_stripped_prefix_is_whole_segments_of_the_path_as_sent() {
        let routes = serde_json::json!([{ "strip": "/acme/v1", "upstream": "acme" }]);
        let to = |target: &str| route(&routes, target).map(|(_, target)| target);
        for (target, sent) in [
            ("/acme/v1", "/"),
            ("/acme/v1/", "/"),
            ("/acme/v1?x=/acme/v1", "/?x=/acme/v1"),
            ("/acme/v1/a%2Fb//c?d", "/a%2Fb//c?d"),
            ("/acme/v1/acme/v1", "/acme/v1"),
            ("/acme/v1/./x", "/./x"),
        ] {
            assert_eq!(to(target).as_deref(), Some(sent), "{target}");
        }
        for other in ["/acme/v10", "/acme", "/", "/x/acme/v1", "/acme/v1/../x", "/%61cme/v1/x"] {
            assert_eq!(to(other), None, "{other}");
        }
    }
}
