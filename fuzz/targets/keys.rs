//! Fuzzes [`tidegate_fuzz::keys`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tidegate_fuzz::keys::run(data));
