//! Fuzzes [`tidegate_fuzz::exchange`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tidegate_fuzz::exchange::run(data));
