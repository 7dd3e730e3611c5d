//! Contacts: which addresses to dial, and when.
//!
//! Discovery lists addresses, and peers name those of their own sessions as
//! hints; a session tells which incarnation answers there. A hint is followed a
//! few times only, so that an address that is gone is not kept alive by hearsay.
//! An address that refuses or does not answer is tried again with exponential
//! backoff and jitter. Whether an address is this replica itself is known only
//! from the incarnation that answers, never from the address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use super::frame::Incarnation;
use crate::time::Timestamp;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// Refusals in a row after which nobody lives at an address.
const REFUSALS_UNTIL_DEAD: u32 = 2;
/// Failures in a row after which a hint is forgotten.
const HINT_FAILURES: u32 = 3;
/// Hints at most, so that a peer cannot make this replica dial at random.
const MAX_HINTS: usize = 256;

/// How a dial failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DialFailure {
    /// The address refused the connection: nobody listens there.
    Refused,
    /// Anything else; somebody may live there.
    Other,
}

#[derive(Clone, Debug, Default)]
struct Contact {
    /// Discovery names it; otherwise it is only a hint.
    listed: bool,
    answered_by: Option<Incarnation>,
    is_self: bool,
    dialling: bool,
    failures: u32,
    refusals: u32,
    next: Timestamp,
}

/// The addresses that discovery lists.
#[derive(Debug)]
pub(super) struct Contacts {
    me: Incarnation,
    all: BTreeMap<SocketAddr, Contact>,
}

impl Contacts {
    pub(super) const fn new(me: Incarnation) -> Self {
        Self { me, all: BTreeMap::new() }
    }

    /// Follows the set that discovery lists now.
    pub(super) fn list(&mut self, addresses: &BTreeSet<SocketAddr>) {
        self.all.retain(|address, contact| {
            // What was listed and is no more is gone, and no hint either.
            let stays = addresses.contains(address) || !contact.listed;
            contact.listed = addresses.contains(address);
            stays
        });
        for address in addresses {
            self.all.entry(*address).or_default().listed = true;
        }
    }

    /// A peer has a session with somebody at this address.
    pub(super) fn hint(&mut self, address: SocketAddr) {
        let hints = self.all.values().filter(|contact| !contact.listed).count();
        if hints < MAX_HINTS {
            self.all.entry(address).or_default();
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.values().filter(|contact| contact.listed && !contact.is_self).count()
    }

    /// Whether an address is listed at which `incarnation` answered.
    pub(super) fn lists(&self, incarnation: Incarnation) -> bool {
        self.all.values().any(|contact| contact.listed && contact.answered_by == Some(incarnation))
    }

    pub(super) fn is_listed(&self, address: &str) -> bool {
        let contact = address.parse().ok().and_then(|a: SocketAddr| self.all.get(&a));
        contact.is_some_and(|contact| contact.listed)
    }

    /// The addresses to dial now; each is dialled until it opens or fails.
    pub(super) fn due(
        &mut self,
        now: Timestamp,
        in_session: impl Fn(Incarnation) -> bool,
    ) -> Vec<SocketAddr> {
        let mut due = Vec::new();
        for (address, contact) in &mut self.all {
            let connected = contact.answered_by.is_some_and(&in_session);
            if !contact.is_self && !contact.dialling && !connected && contact.next <= now {
                contact.dialling = true;
                due.push(*address);
            }
        }
        due
    }

    /// When the next address is due.
    pub(super) fn next(&self, in_session: impl Fn(Incarnation) -> bool) -> Option<Timestamp> {
        self.all
            .values()
            .filter(|c| !c.is_self && !c.dialling && !c.answered_by.is_some_and(&in_session))
            .map(|c| c.next)
            .min()
    }

    /// `incarnation` answered at `address`. Returns another one that answered
    /// there before, which is therefore gone.
    pub(super) fn answered(
        &mut self,
        address: SocketAddr,
        incarnation: Incarnation,
        now: Timestamp,
    ) -> Option<Incarnation> {
        let me = self.me;
        let contact = self.all.get_mut(&address)?;
        let before = contact.answered_by.replace(incarnation);
        contact.dialling = false;
        contact.failures = 0;
        contact.refusals = 0;
        contact.is_self = incarnation == me;
        // If the session is lost at once, do not spin.
        contact.next = now.plus(FIRST_BACKOFF);
        before.filter(|old| *old != incarnation && *old != me)
    }

    /// Whether nobody lives at a listed address any more.
    pub(super) fn is_deserted(&self, address: SocketAddr) -> bool {
        self.all.get(&address).is_some_and(|contact| contact.refusals >= REFUSALS_UNTIL_DEAD)
    }

    /// A dial failed. Returns an incarnation that this shows to be gone.
    pub(super) fn failed(
        &mut self,
        address: SocketAddr,
        failure: DialFailure,
        now: Timestamp,
    ) -> Option<Incarnation> {
        let me = self.me;
        let contact = self.all.get_mut(&address)?;
        contact.dialling = false;
        contact.failures = contact.failures.saturating_add(1);
        contact.refusals = match failure {
            DialFailure::Refused => contact.refusals.saturating_add(1),
            DialFailure::Other => 0,
        };
        contact.next = now.plus(backoff(me, address, contact.failures));
        let gone =
            (contact.refusals >= REFUSALS_UNTIL_DEAD).then(|| contact.answered_by.take()).flatten();
        if !contact.listed && contact.failures >= HINT_FAILURES {
            self.all.remove(&address);
        }
        gone
    }
}

/// Exponential backoff of 100 ms to 5 s, less up to half of it. The jitter is a
/// hash and not a random number, so that the simulation repeats itself.
fn backoff(me: Incarnation, address: SocketAddr, failures: u32) -> Duration {
    let doubled = FIRST_BACKOFF.saturating_mul(1 << failures.saturating_sub(1).min(10));
    let full = doubled.min(MAX_BACKOFF);
    let seed = format!("{me}{address}{failures}");
    let hash = u32::from(blake3::hash(seed.as_bytes()).as_bytes()[0]);
    full - full * hash / 512
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> Incarnation {
        Incarnation::from_bytes([1; 16])
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn rp_g9_failures_back_off_with_jitter() {
        let mut contacts = Contacts::new(me());
        let (a, b) = (address("127.0.0.1:1"), address("127.0.0.2:1"));
        contacts.list(&[a, b].into());
        let mut now = Timestamp::ZERO;
        let mut attempts = 0;
        let mut together = 0;
        while now < Timestamp::from_millis(30_000) {
            let due = contacts.due(now, |_| false);
            together += usize::from(due.len() == 2);
            for address in due {
                attempts += 1;
                contacts.failed(address, DialFailure::Refused, now);
            }
            now = contacts.next(|_| false).unwrap();
        }
        assert!(attempts <= 2 * 20, "{attempts} attempts in 30 s");
        assert!(together <= 2, "the two were dialled at the same moment {together} times");
    }

    #[test]
    fn ds_g4_self_is_recognised_by_incarnation() {
        let mut contacts = Contacts::new(me());
        let a = address("127.0.0.1:1");
        contacts.list(&[a].into());
        assert_eq!(contacts.due(Timestamp::ZERO, |_| false), [a]);
        contacts.answered(a, me(), Timestamp::ZERO);
        assert_eq!(contacts.due(Timestamp::from_millis(60_000), |_| false), []);
        assert_eq!(contacts.len(), 0);
    }

    #[test]
    fn a_hint_is_followed_a_few_times_and_never_outlives_discovery() {
        let mut contacts = Contacts::new(me());
        let (listed, hint) = (address("127.0.0.1:1"), address("127.0.0.2:1"));
        contacts.list(&[listed].into());
        contacts.hint(hint);
        assert_eq!(contacts.due(Timestamp::ZERO, |_| false), [listed, hint]);
        assert_eq!(contacts.len(), 1, "a hint is nobody's word that a peer is there");
        for minute in 1..10 {
            contacts.failed(hint, DialFailure::Refused, Timestamp::from_millis(minute * 60_000));
        }
        let later = Timestamp::from_millis(3_600_000);
        assert!(!contacts.due(later, |_| false).contains(&hint));
        // Listed, and then no more.
        contacts.list(&[listed, hint].into());
        contacts.list(&[listed].into());
        assert!(!contacts.due(later, |_| false).contains(&hint));
    }

    #[test]
    fn another_incarnation_at_the_address_or_two_refusals_mean_dead() {
        let mut contacts = Contacts::new(me());
        let a = address("127.0.0.1:1");
        let (old, new) = (Incarnation::from_bytes([2; 16]), Incarnation::from_bytes([3; 16]));
        contacts.list(&[a].into());
        assert_eq!(contacts.answered(a, old, Timestamp::ZERO), None);
        assert_eq!(contacts.answered(a, new, Timestamp::ZERO), Some(old));
        assert_eq!(contacts.failed(a, DialFailure::Refused, Timestamp::ZERO), None);
        assert_eq!(contacts.failed(a, DialFailure::Other, Timestamp::ZERO), None);
        assert_eq!(contacts.failed(a, DialFailure::Refused, Timestamp::ZERO), None);
        assert_eq!(contacts.failed(a, DialFailure::Refused, Timestamp::ZERO), Some(new));
    }
}
