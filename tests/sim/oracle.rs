//! The ideal: one central token bucket that sees every arrival at once, and how
//! far a cluster is from it.

/// A token bucket in floating point, written apart from the product's so that
/// the two cannot share a fault.
#[derive(Clone)]
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

    fn advance(&mut self, now: u64) {
        let passed = now.saturating_sub(self.at) as f64 / 1e9;
        self.level = self.burst.min(self.level + self.rate * passed);
        self.at = self.at.max(now);
    }

    pub(crate) fn admit(&mut self, now: u64, cost: f64) -> bool {
        self.advance(now);
        let admitted = self.level >= cost - 1e-9;
        if admitted {
            self.level -= cost;
        }
        admitted
    }

    /// Takes `cost`, whether it is there or not; returns how far below zero that is.
    pub(crate) fn force(&mut self, now: u64, cost: f64) -> f64 {
        self.advance(now);
        self.level -= cost;
        -self.level
    }

    fn give_back(&mut self, cost: f64) {
        self.level = self.burst.min(self.level + cost);
    }

    fn reset(&mut self, now: u64) {
        self.advance(now);
        self.level = self.burst;
    }

    /// Another quota; what was missing is missing still.
    fn change(&mut self, now: u64, rate: f64, burst: f64) {
        self.advance(now);
        let missing = self.burst - self.level;
        let lowest = self.level.min(0.0);
        (self.rate, self.burst) = (rate, burst);
        self.level = (burst - missing).clamp(lowest, burst);
    }
}

/// What a run did, beside the ideal.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    /// Tokens admitted above what the ideal bucket admitted, in percent.
    pub(crate) over: f64,
    /// Tokens not admitted although the ideal bucket did, in percent.
    pub(crate) under: f64,
    /// The difference in tokens.
    pub(crate) difference: f64,
    /// Most admitted in any second above rate + burst, in percent of that.
    pub(crate) worst_second: f64,
    /// The first second beside the ideal's, in percent.
    pub(crate) first_second: f64,
    /// The same in tokens.
    pub(crate) first_second_tokens: f64,
    /// Tokens above r t + b in the worst window of any length.
    pub(crate) excess: f64,
    /// Jain's index of the replicas' admission ratios.
    pub(crate) jain: f64,
    /// Entries sent for each replica and second.
    pub(crate) entries: f64,
    /// Bytes of updates and heartbeats for each replica and second.
    pub(crate) bytes: f64,
    /// Admitted in the window of the fault, as a part of the ideal's.
    pub(crate) during: Option<f64>,
    /// The same for the three seconds after it.
    pub(crate) after: Option<f64>,
    /// The same from three seconds after it on.
    pub(crate) settled: Option<f64>,
}

/// What a cluster sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) entries: u64,
    pub(crate) bytes: u64,
}

/// Collects arrivals and verdicts.
pub(crate) struct Tally {
    rate: f64,
    burst: f64,
    ideal: Ideal,
    /// Only what was admitted; below zero where that was too much.
    conformance: Ideal,
    excess: f64,
    replica_conformance: Vec<Ideal>,
    /// The worst of any replica alone.
    pub(crate) replica_excess: f64,
    ideal_at: Vec<(u64, u64)>,
    admitted_at: Vec<(u64, u64)>,
    per_replica: Vec<(u64, u64)>,
    /// Replicas' ratios count from here on.
    pub(crate) ratios_from: u64,
    /// When the load ended.
    pub(crate) ended: u64,
    pub(crate) traffic: Traffic,
    pub(crate) window: Option<(u64, u64)>,
}

impl Tally {
    pub(crate) fn new(rate: f64, burst: f64, replicas: usize) -> Self {
        Self {
            rate,
            burst,
            ideal: Ideal::new(rate, burst),
            conformance: Ideal::new(rate, burst),
            excess: 0.0,
            replica_conformance: vec![Ideal::new(rate, burst); replicas],
            replica_excess: 0.0,
            ideal_at: Vec::new(),
            admitted_at: Vec::new(),
            per_replica: vec![(0, 0); replicas],
            ratios_from: 0,
            ended: 0,
            traffic: Traffic::default(),
            window: None,
        }
    }

    /// An arrival `now` nanoseconds after the load began. A refunded one is given
    /// back by whoever admits it.
    pub(crate) fn arrival(
        &mut self,
        replica: usize,
        now: u64,
        cost: u64,
        refunded: bool,
        admitted: bool,
    ) {
        if self.ideal.admit(now, cost as f64) {
            if refunded {
                self.ideal.give_back(cost as f64);
            } else {
                self.ideal_at.push((now, cost));
            }
        }
        if replica >= self.per_replica.len() {
            self.per_replica.resize(replica + 1, (0, 0));
            let fresh = Ideal::new(self.rate, self.burst);
            self.replica_conformance.resize(replica + 1, fresh);
        }
        if now >= self.ratios_from {
            self.per_replica[replica].0 += cost;
        }
        if admitted {
            if now >= self.ratios_from {
                self.per_replica[replica].1 += cost;
            }
            if !refunded {
                self.admitted_at.push((now, cost));
                self.excess = self.excess.max(self.conformance.force(now, cost as f64));
                let alone = self.replica_conformance[replica].force(now, cost as f64);
                self.replica_excess = self.replica_excess.max(alone);
            }
        }
    }

    pub(crate) fn reset(&mut self, now: u64) {
        self.ideal.reset(now);
        self.conformance.reset(now);
    }

    pub(crate) fn change(&mut self, now: u64, rate: f64, burst: f64) {
        self.ideal.change(now, rate, burst);
        self.conformance.change(now, rate, burst);
        self.rate = self.rate.max(rate);
        self.burst = self.burst.max(burst);
    }

    /// Tokens admitted in `[from, to)`.
    pub(crate) fn admitted_between(&self, from: u64, to: u64) -> u64 {
        between(&self.admitted_at, from, to)
    }

    /// Admitted in `[from, to)`, as a part of what the ideal bucket admitted.
    pub(crate) fn part_of_ideal(&self, from: u64, to: u64) -> f64 {
        let ideal = between(&self.ideal_at, from, to);
        self.admitted_between(from, to) as f64 / ideal.max(1) as f64
    }

    pub(crate) fn report(&self) -> Report {
        const SECOND: u64 = 1_000_000_000;
        let admitted = self.admitted_between(0, u64::MAX) as f64;
        let ideal = between(&self.ideal_at, 0, u64::MAX).max(1) as f64;
        let difference = (admitted - ideal) / ideal * 100.0;
        let first = self.admitted_between(0, SECOND) as f64;
        let first_ideal = between(&self.ideal_at, 0, SECOND).max(1) as f64;
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
        let seconds = (self.ended.max(1) as f64 / 1e9) * ratios.len().max(1) as f64;
        Report {
            over: difference.max(0.0),
            under: (-difference).max(0.0),
            difference: admitted - ideal,
            worst_second: ((most - allowed) / allowed * 100.0).max(0.0),
            first_second: (first - first_ideal) / first_ideal * 100.0,
            first_second_tokens: first - first_ideal,
            excess: self.excess.max(0.0),
            jain: if squares > 0.0 { sum * sum / (ratios.len() as f64 * squares) } else { 1.0 },
            entries: self.traffic.entries as f64 / seconds,
            bytes: self.traffic.bytes as f64 / seconds,
            during: self.window.map(|(from, to)| self.part_of_ideal(from, to)),
            after: self.window.map(|(_, to)| self.part_of_ideal(to, to + 3 * SECOND)),
            settled: self.window.map(|(_, to)| self.part_of_ideal(to + 3 * SECOND, u64::MAX)),
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

fn between(all: &[(u64, u64)], from: u64, to: u64) -> u64 {
    let first = all.partition_point(|(at, _)| *at < from);
    let last = all.partition_point(|(at, _)| *at < to);
    all[first..last.max(first)].iter().map(|(_, cost)| cost).sum()
}
