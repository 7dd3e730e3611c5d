//! Fuzzes [`tidegate_fuzz::path`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tidegate_fuzz::path::run(data));
