//! What is counted of files that are followed.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::runtime::FileChange;

/// Changes of some files, by what became of them. Cheap to clone.
#[derive(Clone, Debug)]
pub struct FileReads {
    success: Counter,
    failure: Counter,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    result: &'static str,
}

impl FileReads {
    /// Registers `NAME_total{result}` with a sample for each result: success, failure.
    pub fn register(registry: &mut Registry, name: &str, help: &str) -> Self {
        let reads = Family::<ResultLabels, Counter>::default();
        let counter = |result| reads.get_or_create_owned(&ResultLabels { result });
        let (success, failure) = (counter("success"), counter("failure"));
        registry.register(name, help, reads);
        Self { success, failure }
    }

    /// The files changed.
    pub fn count(&self, change: FileChange) {
        match change {
            FileChange::Replaced => &self.success,
            FileChange::Refused => &self.failure,
        }
        .inc();
    }
}
