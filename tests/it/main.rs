//! The integration tests: everything in process, every socket on port 0.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::wildcard_enum_match_arm,
    reason = "a test may fail by a panic, and reads clocks and spawns as it likes"
)]

mod harness;
mod peer;
