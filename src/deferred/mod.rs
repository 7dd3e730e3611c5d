//! Deferred delivery (layer 3): requests that were accepted and are sent later.
//!
//! A request is a [`Record`] beside what was sent, in one file (`store`). What
//! happens to it is decided by a pure state machine (`machine`), and is synced
//! before anybody sees its effect: before the 202 leaves, before the request is
//! sent, before its outcome is told. One task, the [`Engine`], owns all records and
//! sends through a [`Carrier`]; everybody else speaks to it through a [`Handle`].
//!
//! Invariants:
//! - what was acknowledged is found again after any end of the process, or of the
//!   power, for as long as the disk is there;
//! - a request is sent only with a token, and only after the intent was synced;
//! - all tries of a request carry the same key, until an operator asks for another;
//! - when a commit fails, nothing is accepted or sent any more.

mod carrier;
mod codec;
mod engine;
mod machine;
mod message;
mod metrics;
mod plan;
mod record;
mod store;
#[cfg(test)]
mod testing;

pub use carrier::{Call, Capacity, Carrier, Fault, Route};
pub use codec::Malformed;
pub use engine::{
    Accepted, Bounds, Engine, Filter, Handle, Order, Refused, Submission, Unchanged, View,
};
pub use machine::{KEEP_STALE, MAX_CRASHES, Outcome, Seen, Step, Unfit};
pub use message::{Answer, Field, Request};
pub use metrics::Metrics;
pub use plan::{Backoff, Delivery, ID_PLACE, Plan, Poll, Rules, Shape, Tries};
pub use record::{Attempts, Digest, Id, IdError, Kind, Record, State};
pub use store::{Change, Error, Store, Writer};
