//! Readiness: named gates that must all be open.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// The gates of a process. Ready means that every gate is open.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<BTreeSet<&'static str>>>);

/// A gate that is shut until it is opened.
#[derive(Debug)]
pub struct Gate {
    readiness: Readiness,
    name: &'static str,
}

impl Readiness {
    /// No gates: ready.
    pub fn new() -> Self {
        Self::default()
    }

    /// Shuts a gate called `name`.
    pub fn gate(&self, name: &'static str) -> Gate {
        self.shut().insert(name);
        Gate { readiness: self.clone(), name }
    }

    /// The names of the gates that are still shut, in order.
    pub fn waiting_for(&self) -> Vec<&'static str> {
        self.shut().iter().copied().collect()
    }

    /// Whether every gate is open.
    pub fn is_ready(&self) -> bool {
        self.shut().is_empty()
    }

    fn shut(&self) -> std::sync::MutexGuard<'_, BTreeSet<&'static str>> {
        // A set of names is valid whatever a panicking holder did.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gate {
    /// Opens the gate for good.
    pub fn open(self) {
        self.readiness.shut().remove(self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_when_every_gate_is_open() {
        let readiness = Readiness::new();
        let (a, b) = (readiness.gate("a"), readiness.gate("b"));
        a.open();
        assert_eq!(readiness.waiting_for(), ["b"]);
        b.open();
        assert!(readiness.is_ready());
        drop(readiness.gate("drain"));
        assert!(!readiness.is_ready(), "a gate that is dropped stays shut");
    }
}
