//! What the operating system knows about this process, read on each scrape.

use std::fmt;
use std::fs;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// Clock ticks a second in `/proc`. The kernel's interface fixes it at 100 on
/// the architectures that this program is built for, whatever the kernel's own
/// tick is.
const TICKS_PER_SECOND: f64 = 100.0;

/// Emits the `process_` metrics. One that cannot be read, which outside of Linux
/// is every one, is left out rather than given as zero.
#[derive(Debug)]
pub(super) struct ProcessCollector;

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let stat = fs::read_to_string("/proc/self/stat").ok().and_then(|text| Stat::parse(&text));
        if let Some(stat) = &stat {
            let cpu = ConstCounter::new(stat.cpu_ticks as f64 / TICKS_PER_SECOND);
            cpu.encode(encoder.encode_descriptor(
                "process_cpu_seconds",
                "Total user and system CPU time spent in seconds.",
                None,
                cpu.metric_type(),
            )?)?;
        }
        let booted = fs::read_to_string("/proc/stat").ok().and_then(|text| boot_time(&text));
        let started = stat
            .zip(booted)
            .map(|(stat, booted)| booted as f64 + stat.start_ticks as f64 / TICKS_PER_SECOND);
        let memory =
            fs::read_to_string("/proc/self/status").ok().and_then(|text| resident_bytes(&text));
        // The directory that is being read is open as well; it does not count.
        let files = fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() - 1);
        for (name, help, value) in [
            (
                "process_start_time_seconds",
                "Start time of the process since unix epoch in seconds.",
                started,
            ),
            (
                "process_resident_memory_bytes",
                "Resident memory size in bytes.",
                memory.map(|bytes| bytes as f64),
            ),
            (
                "process_open_fds",
                "Number of open file descriptors.",
                files.map(|files| files as f64),
            ),
        ] {
            if let Some(value) = value {
                let gauge = ConstGauge::new(value);
                gauge.encode(encoder.encode_descriptor(
                    name,
                    help,
                    None,
                    gauge.metric_type(),
                )?)?;
            }
        }
        Ok(())
    }
}

/// The fields of `/proc/self/stat` that matter, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    cpu_ticks: u64,
    /// Since the machine started.
    start_ticks: u64,
}

impl Stat {
    /// proc(5): the second field is the command in parentheses, which may hold
    /// any byte, so that counting starts after the last `)`.
    fn parse(text: &str) -> Option<Self> {
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self { cpu_ticks: field(14)?.checked_add(field(15)?)?, start_ticks: field(22)? })
    }
}

/// Seconds since the epoch at which the machine started, from `/proc/stat`.
fn boot_time(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

/// `VmRSS` of `/proc/self/status`, which is in KiB.
fn resident_bytes(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_with_blanks_and_parentheses_does_not_shift_the_fields() {
        let text = "42 (a) b (c) S 1 42 42 0 -1 4194304 99 0 0 0 1234 56 0 0 20 0 3 0 7890 1 2";
        assert_eq!(Stat::parse(text), Some(Stat { cpu_ticks: 1290, start_ticks: 7890 }));
        assert_eq!(Stat::parse("42 (short) S 1"), None);
    }

    #[test]
    fn the_other_files_are_read_by_name() {
        assert_eq!(boot_time("cpu 1 2\nbtime 1790000000\nprocesses 3\n"), Some(1_790_000_000));
        assert_eq!(resident_bytes("Name:\tx\nVmRSS:\t    2048 kB\n"), Some(2048 * 1024));
        assert_eq!(resident_bytes("Name:\tx\n"), None);
    }

    #[test]
    fn this_process_has_plausible_values() {
        let text = fs::read_to_string("/proc/self/stat").unwrap();
        assert!(Stat::parse(&text).unwrap().start_ticks > 0);
        let text = fs::read_to_string("/proc/self/status").unwrap();
        assert!(resident_bytes(&text).unwrap() > 100_000);
    }
}
