//! Limits in a few words.

use std::time::Duration;

use tidegate::limiter::{
    Cost, KeyPart, Limit, LimitSpec, Missing, Mode, PathPattern, Quota, Rule, Source,
};

/// A limit with a rate and its own burst, without a key.
pub struct LimitBuilder(LimitSpec);

/// A limit called `name` of `rate`, such as `3/min`; its burst is the same number.
pub fn limit(name: &str, rate: &str) -> LimitBuilder {
    let rate: tidegate::limiter::Rate = rate.parse().unwrap();
    let quota = Quota::try_new(rate, rate.tokens()).unwrap();
    LimitBuilder(LimitSpec::new(name, Rule::default(), quota))
}

impl LimitBuilder {
    pub fn burst(mut self, burst: u64) -> Self {
        self.0.quota = Quota::try_new(self.0.quota.rate(), burst).unwrap();
        self
    }

    pub fn on(mut self, path: &str) -> Self {
        self.0.rule.condition.path = Some(PathPattern::try_new(path).unwrap());
        self
    }

    pub fn by_client(self) -> Self {
        self.by(Source::ClientIp)
    }

    pub fn by_header(self, name: &str) -> Self {
        self.by(Source::Header(name.to_ascii_lowercase()))
    }

    fn by(mut self, source: Source) -> Self {
        self.0.rule.key.push(KeyPart::new(source, false));
        self
    }

    pub fn missing(mut self, missing: Missing) -> Self {
        self.0.rule.missing = missing;
        self
    }

    pub fn waiting(mut self, max_wait: Duration) -> Self {
        self.0.max_wait = max_wait;
        self
    }

    pub fn shadow(mut self) -> Self {
        self.0.mode = Mode::Shadow;
        self
    }

    pub fn hidden(mut self) -> Self {
        self.0.expose = false;
        self
    }

    pub fn costing(mut self, cost: Cost) -> Self {
        self.0.cost = cost;
        self
    }

    pub fn build(self) -> Limit {
        Limit::new(self.0)
    }
}
