//! Time (layer 0): the only file that reads a clock.
//!
//! Everything that decides takes a [`Timestamp`] as an argument, so that tests
//! and the simulation drive time themselves. Timestamps are monotonic: a step
//! of the wall clock changes no bucket.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// A moment of one process's monotonic clock, in nanoseconds since its origin.
///
/// Timestamps of different clocks cannot be compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The origin of the clock.
    pub const ZERO: Self = Self(0);

    /// The moment `nanos` nanoseconds after the origin.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// The moment `millis` milliseconds after the origin.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Whole milliseconds since the origin.
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Nanoseconds since `earlier`, zero if `earlier` is later.
    pub const fn nanos_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Time since `earlier`, zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.nanos_since(earlier))
    }

    /// This moment plus `nanos` nanoseconds, capped at the end of time.
    #[must_use]
    pub const fn plus_nanos(self, nanos: u64) -> Self {
        Self(self.0.saturating_add(nanos))
    }

    /// This moment plus `duration`, capped at the end of time.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        self.plus_nanos(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// A moment of the wall clock, in milliseconds since 1970-01-01 UTC.
///
/// What outlives a process is dated by it. It may step in either direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WallTime(u64);

impl WallTime {
    /// The moment `millis` milliseconds after 1970 began.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Milliseconds since 1970 began.
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// Time since `earlier`, zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }

    /// This moment plus `duration`, rounded up to milliseconds and capped at the
    /// last moment that can be written, in the year 9999.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        const LAST: u64 = 253_402_300_799_999;
        let millis = duration.as_nanos().div_ceil(1_000_000);
        Self(self.0.saturating_add(u64::try_from(millis).unwrap_or(u64::MAX)).min(LAST))
    }

    /// The moment of a system time; one before 1970 is the beginning of 1970.
    pub fn of(time: SystemTime) -> Self {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for WallTime {
    /// As RFC 3339 writes it, with milliseconds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = Self(0).plus(Duration::from_millis(self.0)).0;
        let time = SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
        humantime::format_rfc3339_millis(time).fmt(f)
    }
}

/// Where timestamps come from.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    Monotonic(Instant),
    Manual(Arc<AtomicU64>),
    Runtime(tokio::time::Instant),
}

impl Clock {
    /// A clock that follows the system's monotonic clock from now on.
    #[allow(clippy::disallowed_methods, reason = "this is the one place that reads a clock")]
    pub fn monotonic() -> Self {
        // The origin lies an hour back, so that code may subtract from a fresh
        // timestamp without reaching zero.
        let now = Instant::now();
        Self(Source::Monotonic(now.checked_sub(Duration::from_secs(3600)).unwrap_or(now)))
    }

    /// A clock that follows that of the async runtime, which a test may pause. Its
    /// wall clock begins with 2026.
    #[allow(clippy::disallowed_methods, reason = "this is the one place that reads a clock")]
    pub fn runtime() -> Self {
        Self(Source::Runtime(tokio::time::Instant::now()))
    }

    /// A clock that stands still until [`Clock::set`] moves it.
    pub fn manual(start: Timestamp) -> Self {
        Self(Source::Manual(Arc::new(AtomicU64::new(start.0))))
    }

    /// The current moment.
    #[allow(clippy::disallowed_methods, reason = "this is the one place that reads a clock")]
    pub fn now(&self) -> Timestamp {
        match &self.0 {
            Source::Monotonic(origin) => Timestamp(
                u64::try_from(Instant::now().saturating_duration_since(*origin).as_nanos())
                    .unwrap_or(u64::MAX),
            ),
            Source::Manual(nanos) => Timestamp(nanos.load(Ordering::Acquire)),
            Source::Runtime(origin) => {
                let passed = tokio::time::Instant::now().saturating_duration_since(*origin);
                Timestamp::ZERO.plus(Duration::from_secs(3600)).plus(passed)
            }
        }
    }

    /// The current moment of the wall clock. A manual clock's begins with 1970.
    pub fn wall(&self) -> WallTime {
        const BEGIN_OF_2026: WallTime = WallTime(1_767_225_600_000);
        match &self.0 {
            Source::Monotonic(_) => WallTime::of(wall_clock()),
            Source::Manual(_) => WallTime(self.now().as_millis()),
            Source::Runtime(_) => BEGIN_OF_2026.plus(self.now().since(Timestamp::ZERO)),
        }
    }

    /// Moves a manual clock forward to `to`; a real clock, or a moment in the
    /// past, is left alone.
    pub fn set(&self, to: Timestamp) {
        if let Source::Manual(nanos) = &self.0 {
            nanos.fetch_max(to.0, Ordering::AcqRel);
        }
    }
}

/// The wall clock, for `Date` fields, logs, and dates that others name. What else is
/// decided by it is only what outlives a process, through [`Clock::wall`].
#[allow(clippy::disallowed_methods, reason = "this is the one place that reads a clock")]
pub fn wall_clock() -> SystemTime {
    SystemTime::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_never_goes_back() {
        let clock = Clock::manual(Timestamp::from_nanos(5));
        clock.set(Timestamp::from_nanos(9));
        clock.set(Timestamp::from_nanos(7));
        assert_eq!(clock.now(), Timestamp::from_nanos(9));
    }

    #[test]
    fn a_wall_time_is_written_as_a_date_and_never_overflows() {
        let time = WallTime::from_millis(1_767_225_600_000);
        assert_eq!(time.to_string(), "2026-01-01T00:00:00.000Z");
        assert_eq!(time.plus(Duration::from_nanos(1)).as_millis(), 1_767_225_600_001);
        let last = "9999-12-31T23:59:59.999Z";
        assert_eq!(time.plus(Duration::MAX).to_string(), last);
        assert_eq!(WallTime::from_millis(u64::MAX).to_string(), last);
    }

    #[test]
    fn a_real_clock_advances() {
        let clock = Clock::monotonic();
        let first = clock.now();
        assert!(clock.now() >= first);
        assert_eq!(first.nanos_since(clock.now().plus_nanos(1)), 0);
    }
}
