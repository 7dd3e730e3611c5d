//! The ideal: one central token bucket that sees every arrival at once, and how
//! far a cluster is from it.

/// A token bucket in floating point, written apart from the product's so that
/// the two cannot share a fault.
pub(crate) struct Ideal {
    rate: f64,
    burst: f64,
    level: f64,
    at: u64,
}

impl Ideal {
    pub(crate) fn new(rate: f64, burst: f64) -> Self {
        Self { rate, burst, level: burst, at: 0 }
    }

    pub(crate) fn admit(&mut self, now: u64, cost: f64) -> bool {
        self.level = self.burst.min(self.level + self.rate * (now - self.at) as f64 / 1e9);
        self.at = now;
        let admitted = self.level >= cost - 1e-9;
        if admitted {
            self.level -= cost;
        }
        admitted
    }
}

/// What a run did, beside the ideal.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Tokens admitted above what the ideal bucket admitted, in percent.
    pub(crate) over: f64,
    /// Tokens not admitted although the ideal bucket did, in percent.
    pub(crate) under: f64,
    /// Most admitted in any second above rate + burst, in percent of that.
    pub(crate) worst_second: f64,
    /// The first second beside the ideal's, in percent.
    pub(crate) first_second: f64,
    /// Jain's index of the replicas' admission ratios.
    pub(crate) jain: f64,
    /// Entries sent for each replica and second.
    pub(crate) entries: f64,
}

/// Collects arrivals and verdicts.
pub(crate) struct Tally {
    rate: f64,
    burst: f64,
    ideal: Ideal,
    ideal_first_second: u64,
    ideal_total: u64,
    admitted_at: Vec<(u64, u64)>,
    per_replica: Vec<(u64, u64)>,
}

impl Tally {
    pub(crate) fn new(rate: f64, burst: f64, replicas: usize) -> Self {
        Self {
            rate,
            burst,
            ideal: Ideal::new(rate, burst),
            ideal_first_second: 0,
            ideal_total: 0,
            admitted_at: Vec::new(),
            per_replica: vec![(0, 0); replicas],
        }
    }

    /// An arrival `now` nanoseconds after the load began.
    pub(crate) fn arrival(&mut self, replica: usize, now: u64, cost: u64, admitted: bool) {
        if self.ideal.admit(now, cost as f64) {
            self.ideal_total += cost;
            if now < 1_000_000_000 {
                self.ideal_first_second += cost;
            }
        }
        if replica >= self.per_replica.len() {
            self.per_replica.resize(replica + 1, (0, 0));
        }
        self.per_replica[replica].0 += cost;
        if admitted {
            self.per_replica[replica].1 += cost;
            self.admitted_at.push((now, cost));
        }
    }

    /// Tokens admitted in `[from, to)`.
    pub(crate) fn admitted_between(&self, from: u64, to: u64) -> u64 {
        self.admitted_at.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, c)| c).sum()
    }

    pub(crate) fn report(&self, entries: u64, seconds: f64) -> Report {
        let admitted: u64 = self.admitted_at.iter().map(|(_, cost)| cost).sum();
        let ideal = self.ideal_total.max(1) as f64;
        let difference = (admitted as f64 - ideal) / ideal * 100.0;
        let first = self.admitted_between(0, 1_000_000_000) as f64;
        let first_ideal = self.ideal_first_second.max(1) as f64;
        let ratios: Vec<f64> = self
            .per_replica
            .iter()
            .filter(|(offered, _)| *offered > 0)
            .map(|(offered, admitted)| *admitted as f64 / *offered as f64)
            .collect();
        let (sum, squares) =
            ratios.iter().fold((0.0, 0.0), |(s, q), ratio| (s + ratio, q + ratio * ratio));
        let most = self.most_in_a_second() as f64;
        let allowed = self.rate + self.burst;
        Report {
            over: difference.max(0.0),
            under: (-difference).max(0.0),
            worst_second: ((most - allowed) / allowed * 100.0).max(0.0),
            first_second: (first - first_ideal) / first_ideal * 100.0,
            jain: if squares > 0.0 { sum * sum / (ratios.len() as f64 * squares) } else { 1.0 },
            entries: entries as f64 / seconds / ratios.len().max(1) as f64,
        }
    }

    fn most_in_a_second(&self) -> u64 {
        let (mut first, mut inside, mut most) = (0, 0, 0);
        for (at, cost) in &self.admitted_at {
            inside += cost;
            while self.admitted_at[first].0 + 1_000_000_000 <= *at {
                inside -= self.admitted_at[first].1;
                first += 1;
            }
            most = most.max(inside);
        }
        most
    }
}
