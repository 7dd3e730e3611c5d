//! Metrics of the limiter and of the runtimes, read when they are asked for.

use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::replication::ReplicatedLimiter;
use crate::runtime::Census;

/// Registers `buckets` and `bucket_evictions_total{kind}`.
pub(super) fn register(registry: &mut Registry, limiter: &Arc<ReplicatedLimiter>) {
    registry.register_collector(Box::new(Buckets(Arc::clone(limiter))));
}

/// Registers `tasks{thread}`: those of the threads that `census` counts.
pub(super) fn register_tasks(registry: &mut Registry, census: Census) {
    registry.register_collector(Box::new(Tasks(census)));
}

#[derive(Debug)]
struct Tasks(Census);

impl Collector for Tasks {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut metric = encoder.encode_descriptor(
            "tasks",
            "Tasks that are alive, by the thread that runs them",
            None,
            ConstGauge::new(0_i64).metric_type(),
        )?;
        for (thread, tasks) in self.0.tasks() {
            let gauge = ConstGauge::new(i64::try_from(tasks).unwrap_or(i64::MAX));
            gauge.encode(metric.encode_family(&[("thread", thread.as_str())])?)?;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Buckets(Arc<ReplicatedLimiter>);

impl Collector for Buckets {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let count = ConstGauge::new(i64::try_from(self.0.store().len()).unwrap_or(i64::MAX));
        let metric = encoder.encode_descriptor(
            "buckets",
            "Buckets in memory; all others are full",
            None,
            count.metric_type(),
        )?;
        count.encode(metric)?;
        let (full, spent) = self.0.evictions();
        let kind = ConstCounter::new(full);
        let mut metric = encoder.encode_descriptor(
            "bucket_evictions",
            "Buckets that had to go for others, by what they were: full or spent",
            None,
            kind.metric_type(),
        )?;
        ConstCounter::new(full).encode(metric.encode_family(&[("kind", "full")])?)?;
        ConstCounter::new(spent).encode(metric.encode_family(&[("kind", "spent")])?)
    }
}
