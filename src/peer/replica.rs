//! Replica: who this process is to its peers.

use std::net::{IpAddr, SocketAddr};

use crate::replication::Incarnation;

/// Who this process is to its peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// Its present life: the origin of all that it spends.
    pub incarnation: Incarnation,
    /// A label for people, such as the pod's name.
    pub name: String,
    /// The address at which peers reach it, if that is known. Only a hint.
    pub ip: Option<IpAddr>,
}

impl Replica {
    /// A new life of the replica called `name`.
    ///
    /// # Errors
    /// If the system has no random bits.
    pub fn try_new(name: String, ip: Option<IpAddr>) -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)?;
        Ok(Self { incarnation: Incarnation::from_bytes(bytes), name, ip })
    }

    /// Where it believes it can be dialled, given what its listener is bound to;
    /// empty if it cannot know.
    pub(super) fn address(&self, bound: SocketAddr) -> String {
        let known = Some(bound.ip()).filter(|ip| !ip.is_unspecified());
        self.ip
            .or(known)
            .map_or_else(String::new, |ip| SocketAddr::new(ip, bound.port()).to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_the_given_one_or_a_bound_one_that_means_something() {
        let mut replica = Replica::try_new("a".to_owned(), None).unwrap();
        assert_eq!(replica.address("0.0.0.0:9401".parse().unwrap()), "");
        assert_eq!(replica.address("127.0.0.1:9401".parse().unwrap()), "127.0.0.1:9401");
        replica.ip = Some("fd00::7".parse().unwrap());
        assert_eq!(replica.address("[::]:9401".parse().unwrap()), "[fd00::7]:9401");
    }

    #[test]
    fn every_life_is_another_one() {
        let lives = [(); 2].map(|()| Replica::try_new("a".to_owned(), None).unwrap().incarnation);
        assert_ne!(lives[0], lives[1]);
    }
}
