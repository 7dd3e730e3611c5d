//! What of the configuration changes while the proxy runs.

use std::sync::Arc;

use arc_swap::ArcSwap;

use super::client::Trust;
use super::config::Config;
use super::cors::Cors;
use super::limit::Enforcer;
use crate::limiter::Companion;

/// The settings in force. Read for every request, so that what has changed holds
/// on connections that are already open.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) trust: Trust,
    pub(super) cors: Cors,
}

/// All threads read the same.
pub(super) type SharedLive = Arc<ArcSwap<Live>>;

/// Changes a proxy while it runs. Cheap to clone.
#[derive(Debug)]
pub struct Tuner<C: Companion> {
    pub(super) live: SharedLive,
    pub(super) enforcer: Arc<Enforcer<C>>,
}

impl Live {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            trust: Trust::new(config.trusted_proxies.clone(), config.ipv6_prefix),
            cors: config.cors.clone(),
        }
    }
}

impl<C: Companion> Tuner<C> {
    /// Puts `trusted_proxies`, `headers` and `cors` of `config` in force, with
    /// its `ipv6_prefix`; nothing else of it is looked at. To be called after the
    /// limiter's limits were replaced.
    pub fn apply(&self, config: &Config) {
        self.live.store(Arc::new(Live::new(config)));
        self.enforcer.set_style(config.headers);
        // Limits that are new are counted from now on.
        self.enforcer.refresh();
    }
}

impl<C: Companion> Clone for Tuner<C> {
    fn clone(&self) -> Self {
        Self { live: Arc::clone(&self.live), enforcer: Arc::clone(&self.enforcer) }
    }
}
