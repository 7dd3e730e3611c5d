//! Fuzzes [`tidegate_fuzz::config`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tidegate_fuzz::config::run(data));
