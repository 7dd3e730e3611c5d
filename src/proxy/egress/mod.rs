//! Egress: requests that go to somebody else's service, each by a route to one of
//! several named upstreams.
//!
//! A route is chosen before any limit is asked, from the request as the client sent
//! it, and kept in the request's extensions: rules see the upstream's name, and
//! forwarding finds the way there. What no route takes goes to `proxy.upstream`,
//! whose name is [`DEFAULT`].

mod config;
mod credentials;
mod destination;
mod feedback;
mod gate;
mod routes;

pub use config::{EgressConfig, RouteConfig, UpstreamConfig, UpstreamsConfig};
pub(super) use credentials::Credential;
pub use credentials::InjectConfig;
pub(super) use destination::{Destination, Destinations, Followed};
pub(super) use feedback::Feedback;
pub use feedback::{FeedbackConfig, RefusingStatus, XRateLimit};
pub(super) use gate::{Gate, InFlight, Permit, Queued};
pub(super) use routes::{Route, Routed, Routes, gate_of, upstream_of, wait_of_route};

/// What `proxy.upstream` is called where upstreams are named.
pub const DEFAULT: &str = "default";
