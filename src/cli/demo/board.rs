//! The demo's board: what was admitted and refused, beside the ideal.

use crate::limiter::{Quota, TokenBucket, Tokens};
use crate::time::Timestamp;

const ONE: Tokens = Tokens::from_micros(Tokens::MICRO);

/// Totals, and the ideal bucket that sees all requests.
#[derive(Debug)]
pub(super) struct Board {
    quota: Quota,
    bucket: TokenBucket,
    ideal: u64,
    admitted: Vec<u64>,
    refused: Vec<u64>,
    /// Totals when the last line was written.
    shown: (Vec<u64>, Vec<u64>, u64),
}

impl Board {
    pub(super) fn new(quota: Quota, replicas: usize, now: Timestamp) -> Self {
        let zero = vec![0; replicas];
        Self {
            quota,
            bucket: TokenBucket::full(&quota, now),
            ideal: 0,
            admitted: zero.clone(),
            refused: zero.clone(),
            shown: (zero.clone(), zero, 0),
        }
    }

    /// Takes the totals at `now`: what the upstream counted and what the replicas
    /// refused.
    pub(super) fn sample(&mut self, admitted: &[u64], refused: &[u64], now: Timestamp) {
        let before = sum(&self.admitted) + sum(&self.refused);
        self.admitted = admitted.to_vec();
        self.refused = refused.to_vec();
        let mut waiting = (sum(admitted) + sum(refused)).saturating_sub(before);
        // They came somewhere between two samples: before the refill, which a
        // full bucket would lose otherwise, and after it.
        for when in [self.bucket.advanced_at(), now] {
            self.bucket.advance(&self.quota, when);
            while waiting > 0 && self.bucket.try_take(ONE) {
                self.ideal += 1;
                waiting -= 1;
            }
        }
    }

    pub(super) fn header(&self) -> String {
        let mut top = "        ".to_owned();
        let mut line = "  time  ".to_owned();
        for replica in 1..=self.admitted.len() {
            top += &format!("  {:^17}", format!("replica {replica}"));
            line += "  admitted  refused";
        }
        top += &format!("  {:^17}", "all");
        line += "  admitted  refused     ideal";
        format!("{top}\n{line}")
    }

    /// One line for the second that just ended.
    pub(super) fn second(&mut self, elapsed: u64) -> String {
        let (admitted, refused, ideal) = &self.shown;
        let mut line = format!("{elapsed:>5} s ");
        let differences = self.admitted.iter().zip(admitted).zip(self.refused.iter().zip(refused));
        for ((a, a0), (r, r0)) in differences {
            line += &format!("  {:>8}  {:>7}", a - a0, r.saturating_sub(*r0));
        }
        line += &format!(
            "  {:>8}  {:>7}  {:>8}",
            sum(&self.admitted) - sum(admitted),
            sum(&self.refused).saturating_sub(sum(refused)),
            self.ideal - ideal
        );
        self.shown = (self.admitted.clone(), self.refused.clone(), self.ideal);
        line
    }

    /// What it all came to.
    pub(super) fn summary(&self) -> String {
        let (admitted, refused) = (sum(&self.admitted), sum(&self.refused));
        let mut text = format!(
            "\n{} requests: the upstream got {admitted}, {refused} were refused; \
             one ideal bucket would have admitted {}",
            admitted + refused,
            self.ideal
        );
        if self.ideal > 0 {
            let error = (admitted as f64 - self.ideal as f64) / self.ideal as f64 * 100.0;
            text += &format!(" ({error:+.2} %)");
        }
        text
    }
}

fn sum(counts: &[u64]) -> u64 {
    counts.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_board_compares_with_one_bucket_for_all() {
        let quota = Quota::try_new("10/s".parse().unwrap(), 10).unwrap();
        let mut board = Board::new(quota, 2, Timestamp::ZERO);
        board.sample(&[8, 8], &[0, 4], Timestamp::from_millis(100));
        assert_eq!(
            board.second(1),
            "    1 s          8        0         8        4        16        4        11"
        );
        board.sample(&[9, 8], &[0, 4], Timestamp::from_millis(1100));
        assert_eq!(
            board.second(2),
            "    2 s          1        0         0        0         1        0         1"
        );
        assert_eq!(
            board.summary(),
            "\n21 requests: the upstream got 17, 4 were refused; \
             one ideal bucket would have admitted 12 (+41.67 %)"
        );
    }
}
