//! A small seeded generator, so that a seed names a run on every machine.

/// SplitMix64 (Steele, Lea, Flood 2014): 64 bits of state, good enough to draw
/// arrivals and jitter.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Time to the next arrival of a Poisson process, in nanoseconds.
    pub(crate) fn exponential_nanos(&mut self, per_second: f64) -> u64 {
        (-(1.0 - self.unit()).ln() / per_second * 1e9) as u64
    }
}
