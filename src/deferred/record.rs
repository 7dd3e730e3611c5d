//! What is known of one deferred request.

use std::fmt;
use std::str::FromStr;

use crate::time::WallTime;

/// Names a deferred request, everywhere and for good: a UUID of version 7 (RFC
/// 9562), 48 bits of time and 74 of chance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(u128);

/// Not the text of a UUID.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not an id: write 32 hexadecimal digits as in 01890a5d-ac96-774b-bcce-b302099a8057"
)]
pub struct IdError(String);

impl Id {
    /// The id of a request that came at `now`, with 74 of the bits of `chance`.
    pub const fn new(now: WallTime, chance: u128) -> Self {
        const CHANCE: u128 = (0xfff << 64) | (u128::MAX >> 66);
        const VERSION_AND_VARIANT: u128 = (7 << 76) | (0b10 << 62);
        let millis = (now.as_millis() as u128) & 0xffff_ffff_ffff;
        Self((millis << 80) | VERSION_AND_VARIANT | (chance & CHANCE))
    }

    /// The 128 bits.
    pub const fn as_u128(self) -> u128 {
        self.0
    }

    /// The id of these 128 bits, whatever made them.
    pub const fn from_u128(bits: u128) -> Self {
        Self(bits)
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = self.0;
        write!(
            f,
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            bits >> 96,
            (bits >> 80) & 0xffff,
            (bits >> 64) & 0xffff,
            (bits >> 48) & 0xffff,
            bits & 0xffff_ffff_ffff
        )
    }
}

impl FromStr for Id {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let bytes = text.as_bytes();
        let shaped = bytes.len() == 36
            && bytes.iter().enumerate().all(|(at, byte)| match at {
                8 | 13 | 18 | 23 => *byte == b'-',
                _ => byte.is_ascii_hexdigit(),
            });
        if !shaped {
            return Err(IdError(text.to_owned()));
        }
        u128::from_str_radix(&text.replace('-', ""), 16)
            .map(Self)
            .map_err(|_| IdError(text.to_owned()))
    }
}

/// 128 bits of BLAKE3, for what is compared and not told.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 16]);

impl Digest {
    /// The digest of `parts`, each with its length, for the purpose `context`.
    pub fn of(context: &'static str, parts: &[&[u8]]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        for part in parts {
            hasher.update(&(part.len() as u64).to_be_bytes());
            hasher.update(part);
        }
        let mut bytes = [0; 16];
        hasher.finalize_xof().fill(&mut bytes);
        Self(bytes)
    }

    /// The bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The digest with these bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// How far a deferred request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// It waits to be sent, or is being sent.
    Accepted,
    /// The upstream has it, and is asked for the result now and then.
    Pending,
    /// The upstream did it.
    Completed,
    /// The upstream did not do it, and never will.
    Failed,
    /// What became of it is not known; a person has to look.
    Stale,
    /// It was taken back before it was sent.
    Canceled,
    /// Another replica has it now.
    Moved,
}

impl State {
    /// Every state.
    pub const ALL: [Self; 7] = [
        Self::Accepted,
        Self::Pending,
        Self::Completed,
        Self::Failed,
        Self::Stale,
        Self::Canceled,
        Self::Moved,
    ];

    /// Whether nothing more happens by itself.
    pub const fn is_settled(self) -> bool {
        match self {
            Self::Accepted | Self::Pending => false,
            Self::Completed | Self::Failed | Self::Stale | Self::Canceled | Self::Moved => true,
        }
    }

    /// The state's name, as clients and operators see it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Pending => "pending",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Stale => "stale",
            Self::Canceled => "canceled",
            Self::Moved => "moved",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for State {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|state| state.name() == text).ok_or(())
    }
}

/// How often something was tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attempts {
    /// Sendings of the request itself, those not counted that the upstream refused
    /// because there were too many.
    pub create: u32,
    /// Questions for the result, likewise.
    pub poll: u32,
    /// Of both, those that the upstream refused because there were too many.
    pub throttled: u32,
    /// How often in a row the process or the worker ended while it was in flight.
    pub crashes: u32,
}

/// The part of a deferred request that changes; the request itself and the answers
/// lie beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its name.
    pub id: Id,
    /// How far it has come.
    pub state: State,
    /// Whether it is being sent, or its result asked for, right now.
    pub in_flight: bool,
    /// Whether the upstream may have acted on it.
    pub reached: bool,
    /// Where it goes.
    pub upstream: String,
    /// When it was accepted.
    pub created: WallTime,
    /// When it last changed.
    pub updated: WallTime,
    /// When it is given up.
    pub expires: WallTime,
    /// When its next step is to be taken.
    pub due: WallTime,
    /// How often it was tried.
    pub attempts: Attempts,
    /// How often an operator asked for a key that the upstream has not seen.
    pub fresh_keys: u32,
    /// Who sent it.
    pub owner: Digest,
    /// What it says: method, target and body.
    pub payload: Digest,
    /// The key under which its sender may ask again.
    pub claim: Option<Digest>,
    /// What the upstream calls it.
    pub response_id: Option<String>,
    /// Why it is in the state that it is in.
    pub reason: Option<String>,
    /// The status of the upstream's answer to the request, if that was not the end.
    pub initial: Option<u16>,
    /// The status of the answer that ended it.
    pub outcome: Option<u16>,
    /// The status of the last answer that decided nothing.
    pub last: Option<u16>,
}

/// Which answer of the upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// To the request itself, if that was not the end.
    Initial,
    /// The one that ended it.
    Final,
    /// The last one that decided nothing.
    Last,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Initial, Self::Final, Self::Last];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_a_uuid_of_version_7() {
        let now = WallTime::from_millis(0x0189_0a5d_ac96);
        assert_eq!(Id::new(now, 0).to_string(), "01890a5d-ac96-7000-8000-000000000000");
        assert_eq!(Id::new(now, u128::MAX).to_string(), "01890a5d-ac96-7fff-bfff-ffffffffffff");
        let text = "01890a5d-ac96-774b-bcce-b302099a8057";
        assert_eq!(text.parse::<Id>().unwrap().to_string(), text);
        assert_eq!(text.to_uppercase().parse::<Id>().unwrap().to_string(), text);
        for bad in [
            "",
            "01890a5dac96774bbcceb302099a8057",
            "01890a5d-ac96-774b-bcce-b302099a805",
            "01890a5d-ac96-774b-bcce-b302099a805g",
            "01890a5d-ac96-774b-bcce+b302099a8057",
            "+1890a5d-ac96-774b-bcce-b302099a8057",
            "../../../../../../../../../etc/passwd",
        ] {
            assert!(bad.parse::<Id>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_digest_tells_where_a_part_ends() {
        let of = |parts: &[&[u8]]| Digest::of("tidegate test", parts);
        assert_ne!(of(&[b"ab", b"c"]), of(&[b"a", b"bc"]));
        assert_ne!(of(&[b"a"]), Digest::of("tidegate another", &[b"a"]));
        assert_eq!(of(&[b"a", b""]), of(&[b"a", b""]));
    }

    #[test]
    fn states_have_names_that_read_back() {
        for state in State::ALL {
            assert_eq!(state.name().parse(), Ok(state));
        }
        assert_eq!("Stale".parse::<State>(), Err(()));
    }
}
