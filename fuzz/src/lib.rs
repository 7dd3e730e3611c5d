//! What is fuzzed. Each module has a `run` that takes any bytes and panics if a
//! promise of the product does not hold. `targets/` gives them to libFuzzer;
//! `tests/corpus.rs` of the product runs them on the committed corpus.

pub mod config;
pub mod exchange;
pub mod forwarding;
pub mod frames;
pub mod input;
pub mod keys;
pub mod path;
