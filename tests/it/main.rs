//! The integration tests: everything in process, every socket on port 0.

mod discovery;
mod harness;
