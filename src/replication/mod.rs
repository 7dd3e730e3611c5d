//! Replication (layer 2, pure): what replicas owe each other.
//!
//! Every replica decides locally and at once; replicas exchange what they spent.
//! [`Companion`] is the hot path's side, [`Engine`] everything else: sessions,
//! frames, membership and the schedule. The engine does no I/O: frames and times
//! go in, frames come out. The mesh drives it over gRPC, the simulation over a
//! virtual network.
//!
//! Invariants:
//! - what an origin spent from a bucket is subtracted exactly once at every
//!   replica, whatever happens to frames;
//! - what is only held, or was refused, never leaves the process;
//! - no frame is queued: a stream without window leaves buckets pending, and
//!   when it opens again they are sent as they are then;
//! - no guard of one bucket is held while another is touched.

mod catalog;
mod companion;
mod contacts;
mod demand;
mod engine;
mod epochs;
mod frame;
mod ledger;
mod members;
mod pause;
mod peer;
mod rate;

pub use companion::Companion;
pub use contacts::DialFailure;
pub use engine::{
    BucketView, Engine, OLDEST_VERSION, Opened, Refusal, Reset, SessionId, Settings, Side, Stats,
    VERSION, Violation,
};
pub use frame::{
    Body, Contribution, Entry, Frame, Hello, Incarnation, LimitDeclaration, LimitEpoch, LimitPause,
    PauseLeft, Row, Snapshot, Update,
};
pub use ledger::{Ledger, Mark, OriginId};
pub use peer::{PeerState, PeerView};

/// The limiter whose buckets are replicated.
pub type ReplicatedLimiter = crate::limiter::Limiter<Companion>;
