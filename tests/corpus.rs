//! Replays the corpus of every fuzz target, which keeps what was once found from
//! coming back.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::wildcard_enum_match_arm,
    missing_docs,
    unreachable_pub,
    reason = "a test may fail by a panic; the targets are a library elsewhere"
)]

use std::fs;
use std::path::Path;

#[path = "../fuzz/src/lib.rs"]
mod targets;

fn replay(target: &str, run: fn(&[u8])) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut files: Vec<_> =
        fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "there is no corpus of {target}");
    for file in files {
        println!("{}", file.display());
        run(&fs::read(file).unwrap());
    }
}

#[test]
fn every_frame_of_the_corpus_is_read() {
    replay("frames", targets::frames::run);
}

#[test]
fn every_exchange_of_the_corpus_keeps_its_bounds() {
    replay("exchange", targets::exchange::run);
}

#[test]
fn every_path_of_the_corpus_is_normalised() {
    replay("path", targets::path::run);
}

#[test]
fn every_client_of_the_corpus_is_found() {
    replay("forwarding", targets::forwarding::run);
}

#[test]
fn every_key_of_the_corpus_is_its_own() {
    replay("keys", targets::keys::run);
}

#[test]
fn every_configuration_of_the_corpus_is_judged() {
    replay("config", targets::config::run);
}
