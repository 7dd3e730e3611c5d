//! One name that is resolved again and again, and what is known of it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hickory_resolver::proto::rr::Name;

use super::lookup::{Answer, Answers, Port, Resolver};
use super::metrics::Outcome;

/// What one lookup of a target came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Report {
    /// For the counter.
    pub(super) outcome: Outcome,
    /// The smallest TTL of the addresses found.
    pub(super) ttl: Option<Duration>,
    /// Why the target failed, if it did.
    pub(super) reason: Option<String>,
}

/// A name, its port, and the last good answer for each address family.
#[derive(Debug)]
pub(super) struct Target {
    /// As configured, or the reason why it is no name.
    name: Result<Name, String>,
    port: u16,
    /// The port without the service's word; `None` if the port is fixed.
    default_port: Option<u16>,
    /// The absolute name that had addresses last time.
    known: Option<Name>,
    v4: BTreeSet<IpAddr>,
    v6: BTreeSet<IpAddr>,
    answered: bool,
}

impl Target {
    /// A target of which nothing is known yet.
    pub(super) fn new(host: &str, port: u16) -> Self {
        let name = Name::from_str_relaxed(host).map_err(|error| format!("`{host}`: {error}"));
        Self {
            name,
            port,
            default_port: None,
            known: None,
            v4: BTreeSet::new(),
            v6: BTreeSet::new(),
            answered: false,
        }
    }

    /// The same, whose port is what the service says, and else the present one.
    pub(super) fn with_port_of_service(self) -> Self {
        Self { default_port: Some(self.port), ..self }
    }

    /// The last good addresses.
    pub(super) fn addresses(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.v4.iter().chain(&self.v6).map(|address| SocketAddr::new(*address, self.port))
    }

    /// Whether a lookup ever succeeded, with addresses or without.
    pub(super) fn is_answered(&self) -> bool {
        self.answered
    }

    /// Asks once more and keeps what is good.
    pub(super) async fn look_up(&mut self, resolver: &Resolver) -> Report {
        let name = match &self.name {
            Ok(name) => name,
            Err(reason) => return Report::failed(reason.clone()),
        };
        let mut candidates = resolver.candidates(name);
        let known =
            self.known.as_ref().and_then(|known| candidates.iter().position(|c| c == known));
        if let Some(index) = known
            && let Some(ahead) = candidates.get_mut(..=index)
        {
            // Asking it first saves the rest of the search list, every time.
            ahead.rotate_right(1);
        }
        let answers = resolver.lookup(&candidates, known.is_some()).await;
        let name = candidates.into_iter().nth(answers.candidate);
        if let (Some(name), Some(default_port)) = (&name, self.default_port) {
            match resolver.port(name).await {
                Port::Named(port) => self.port = port,
                Port::Unnamed => self.port = default_port,
                // The last word stands.
                Port::Unknown => {}
            }
        }
        self.absorb(answers, name)
    }

    /// A family that failed keeps its last good addresses; one that answered,
    /// even with none, is replaced.
    fn absorb(&mut self, answers: Answers, name: Option<Name>) -> Report {
        let mut ttl: Option<Duration> = None;
        let mut reason = None;
        for (answer, last) in [(answers.v4, &mut self.v4), (answers.v6, &mut self.v6)] {
            match answer {
                Answer::Found { addresses, ttl: this } => {
                    *last = addresses;
                    ttl = Some(ttl.map_or(this, |other| other.min(this)));
                }
                Answer::Empty => last.clear(),
                Answer::Failed(why) => reason = Some(why),
            }
        }
        match (ttl, reason) {
            // A server that cannot answer for one family does not make the other
            // one's addresses doubtful.
            (Some(ttl), _) => {
                self.known = name;
                self.answered = true;
                Report { outcome: Outcome::Found, ttl: Some(ttl), reason: None }
            }
            (None, Some(reason)) => Report::failed(reason),
            (None, None) => {
                self.answered = true;
                Report { outcome: Outcome::Empty, ttl: None, reason: None }
            }
        }
    }
}

impl Report {
    /// The report of a target about which nothing could be learnt.
    pub(super) fn failed(reason: String) -> Self {
        Self { outcome: Outcome::Failed, ttl: None, reason: Some(reason) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(addresses: &[&str], ttl: u64) -> Answer {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        Answer::Found { addresses, ttl: Duration::from_secs(ttl) }
    }

    fn absorb(target: &mut Target, v4: Answer, v6: Answer) -> Report {
        target.absorb(Answers { candidate: 0, v4, v6 }, None)
    }

    fn known(target: &Target) -> Vec<String> {
        target.addresses().map(|address| address.to_string()).collect()
    }

    #[test]
    fn each_family_keeps_its_last_good_answer() {
        let mut target = Target::new("peers.test", 9401);
        let report = absorb(&mut target, found(&["127.0.0.11"], 30), found(&["::1"], 7));
        assert_eq!(report.ttl, Some(Duration::from_secs(7)));
        assert_eq!(known(&target), ["127.0.0.11:9401", "[::1]:9401"]);

        let failed = || Answer::Failed("timeout".to_owned());
        let report = absorb(&mut target, found(&["127.0.0.12"], 30), failed());
        assert_eq!(report.outcome, Outcome::Found);
        assert_eq!(known(&target), ["127.0.0.12:9401", "[::1]:9401"]);

        let report = absorb(&mut target, failed(), failed());
        assert_eq!(report, Report::failed("timeout".to_owned()));
        assert_eq!(known(&target), ["127.0.0.12:9401", "[::1]:9401"]);

        let report = absorb(&mut target, Answer::Empty, Answer::Empty);
        assert_eq!(report.outcome, Outcome::Empty);
        assert!(known(&target).is_empty());
    }

    #[test]
    fn a_half_answer_without_addresses_is_no_first_answer() {
        let mut target = Target::new("peers.test", 9401);
        let report = absorb(&mut target, Answer::Empty, Answer::Failed("refused".to_owned()));
        assert_eq!(report.outcome, Outcome::Failed);
        assert!(!target.is_answered());
        absorb(&mut target, Answer::Empty, Answer::Empty);
        assert!(target.is_answered());
    }
}
