//! How a service behind the limit says that it delivered a request, without which the
//! request gets its tokens back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use http::{Extensions, Request};

use super::again::Told;

/// Comes with a request that was charged, if refunds are on: where the inner
/// service says whether it delivered the request.
#[derive(Clone, Debug, Default)]
pub struct Admission(Arc<AtomicBool>);

/// How the inner service gets the [`Admission`] of a request that was charged.
pub trait HandOver<B> {
    /// Whether requests that were not delivered get their tokens back at all.
    const REFUNDS: bool;

    /// Puts `admission` where the inner service looks for it.
    fn hand_over(&self, request: &mut Request<B>, admission: Admission);

    /// What the inner service says of the upstream's answer, taken from the answer's
    /// extensions.
    fn told(&self, _: &mut Extensions) -> Option<Told<B>> {
        None
    }
}

/// Tokens are never given back.
#[derive(Clone, Copy, Debug)]
pub struct NoRefunds;

/// The [`Admission`] is in the extensions of the request.
#[derive(Clone, Copy, Debug)]
pub struct InExtensions;

impl Admission {
    /// Says whether the request is in the hands of the one it is for. The last
    /// word before the answer counts.
    pub fn set_delivered(&self, delivered: bool) {
        self.0.store(delivered, Ordering::Relaxed);
    }

    /// The last word so far.
    pub(super) fn is_delivered(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl<B> HandOver<B> for NoRefunds {
    const REFUNDS: bool = false;

    fn hand_over(&self, _: &mut Request<B>, _: Admission) {}
}

impl<B> HandOver<B> for InExtensions {
    const REFUNDS: bool = true;

    fn hand_over(&self, request: &mut Request<B>, admission: Admission) {
        request.extensions_mut().insert(admission);
    }
}
