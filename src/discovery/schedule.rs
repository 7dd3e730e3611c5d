//! When to look again: a pure function, so that it can be tested without time.

use std::time::Duration;

/// Two lookups are at least this far apart, however many streams are lost.
pub(super) const REFRESH_GAP: Duration = Duration::from_millis(500);

/// The shortest period: a zero TTL must not become a flood.
const SHORTEST: Duration = Duration::from_secs(1);

/// The longest period, and so the bound on how long a new replica is unknown
/// beyond what caches on the way add.
const LONGEST: Duration = Duration::from_secs(5);

/// How long to wait after a round of lookups.
///
/// `ttl` is the smallest one of the answers, `None` when there was no address at
/// all, in which case the period doubles from the shortest to the longest with
/// the number of such rounds in a row (`fruitless`, from 1). The negative TTL of
/// the zone plays no part: a service whose first endpoint appears would stay
/// unknown for as long as the zone's administrator found right for typing errors.
pub(super) fn next_lookup(ttl: Option<Duration>, fruitless: u32) -> Duration {
    match ttl {
        Some(ttl) => ttl.clamp(SHORTEST, LONGEST),
        None => {
            let doublings = fruitless.saturating_sub(1).min(8);
            SHORTEST.saturating_mul(1 << doublings).min(LONGEST)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_period_is_the_ttl_between_one_and_five_seconds() {
        for (ttl, period) in [(0, 1), (1, 1), (3, 3), (5, 5), (30, 5), (86_400, 5)] {
            let next = next_lookup(Some(Duration::from_secs(ttl)), 0);
            assert_eq!(next, Duration::from_secs(period), "TTL {ttl}");
        }
    }

    #[test]
    fn rounds_without_an_address_back_off_to_five_seconds() {
        for (fruitless, period) in [(1, 1), (2, 2), (3, 4), (4, 5), (40, 5), (u32::MAX, 5)] {
            assert_eq!(next_lookup(None, fruitless), Duration::from_secs(period), "{fruitless}");
        }
    }
}
