//! Who carries requests to the upstream.

use std::sync::Arc;
use std::time::Duration;

use super::message::{Answer, Request};
use super::plan::Plan;

/// How the requests of one route go.
#[derive(Clone, Debug)]
pub struct Route {
    /// How they are delivered.
    pub plan: Arc<Plan>,
    /// Statuses by which the upstream says that there were too many requests.
    pub pause_on: Arc<[u16]>,
}

/// What an upstream bears.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// Requests at once.
    pub in_flight: usize,
    /// Requests per second, as far as a limit says so.
    pub rate: Option<f64>,
}

/// One sending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Where it goes.
    pub upstream: Arc<str>,
    /// What is sent.
    pub request: Request,
    /// The key under which the upstream is to know it; the same for each try. `None`
    /// for a question, which changes nothing.
    pub key: Option<String>,
    /// How long it may take, from the connection to the end of the answer.
    pub timeout: Duration,
}

/// Why a sending has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing left.
    Unsent(String),
    /// It may have arrived.
    Unknown(String),
}

/// Carries requests to the upstream, one by one.
pub trait Carrier {
    /// What one request may cost the upstream. Dropping it before the request is sent
    /// gives it back.
    type Permit;

    /// The route of a request to this upstream as things are now, or why there is
    /// none.
    ///
    /// # Errors
    /// What a person should read.
    fn route(&self, request: &Request, upstream: &str) -> Result<Route, String>;

    /// What the upstream bears.
    fn capacity(&self, upstream: &str) -> Capacity;

    /// Waits until the request may be sent. May be dropped at any time.
    fn admit(&self, call: &Call) -> impl Future<Output = Self::Permit>;

    /// Sends the request and reads the whole answer.
    fn send(&self, call: Call, permit: Self::Permit)
    -> impl Future<Output = Result<Answer, Fault>>;
}
