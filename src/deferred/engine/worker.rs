//! The only place that sends: load the record, take a token, commit the intent,
//! send, commit the outcome.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;

use super::super::carrier::{Call, Carrier, Fault, Route};
use super::super::machine::{Outcome, Seen, Step};
use super::super::message::{Answer, Request};
use super::super::metrics::Metrics;
use super::super::plan::{Plan, Rules};
use super::super::record::{Id, Kind, Record, State};
use super::super::store::{Change, Error, Store};
use crate::time::Clock;

/// What a worker needs beside the request.
pub(super) struct Work<C> {
    pub(super) id: Id,
    pub(super) upstream: Arc<str>,
    pub(super) carrier: Rc<C>,
    pub(super) store: Store,
    pub(super) clock: Clock,
    pub(super) metrics: Metrics,
    /// How many results of this upstream have yet to be asked for.
    pub(super) pending: usize,
    /// Set once its record may change: then it must not be interrupted.
    pub(super) busy: Rc<Cell<bool>>,
}

/// Counts a request that is at the upstream for as long as it exists.
struct Away<'a> {
    metrics: &'a Metrics,
    upstream: &'a Arc<str>,
    throttled: bool,
}

impl Drop for Away<'_> {
    fn drop(&mut self) {
        self.metrics.returned(self.upstream, self.throttled);
    }
}

impl<C: Carrier> Work<C> {
    /// Takes the request one step further; its record afterwards, or `None` if there
    /// is nothing to be done.
    ///
    /// # Errors
    /// If the store cannot be used. What was sent is then in doubt.
    pub(super) async fn run(self) -> Result<Option<Record>, Error> {
        let Some(record) = self.store.record(self.id)? else { return Ok(None) };
        if record.state.is_settled() {
            return Ok(Some(record));
        }
        let Some(request) = self.store.request(self.id)? else {
            return self.strand(record, "the request is not in the store").await;
        };
        let route = match self.carrier.route(&request, &record.upstream) {
            Ok(route) => route,
            Err(reason) => return self.strand(record, &reason).await,
        };
        if record.in_flight {
            self.metrics.crashes.inc();
            return self.settle(record, &route, Outcome::Lost, None).await;
        }
        let call = match call(&record, request, &route.plan, &self.upstream) {
            Ok(call) => call,
            Err(reason) => return self.strand(record, reason).await,
        };
        let permit = self.carrier.admit(&call).await;

        self.busy.set(true);
        let Ok(record) = record.claim(self.clock.wall()) else { return Ok(None) };
        self.store.commit(vec![Change::Update(record.clone(), None)]).await?;

        self.metrics.leaves(&self.upstream, record.state == State::Pending);
        let mut away = Away { metrics: &self.metrics, upstream: &self.upstream, throttled: false };
        let patience = call.timeout;
        let sent = timeout(patience, self.carrier.send(call, permit)).await;
        let (outcome, answer) = match sent {
            Ok(Ok(answer)) => {
                away.throttled = route.pause_on.contains(&answer.status);
                (Outcome::Answered(seen(&answer, &record, &route.plan)), Some(answer))
            }
            Ok(Err(Fault::Unsent(reason))) => (Outcome::Unsent(reason), None),
            Ok(Err(Fault::Unknown(reason))) => (Outcome::Unknown(reason), None),
            Err(_) => {
                let reason =
                    format!("no whole answer within {}", humantime::format_duration(patience));
                (Outcome::Unknown(reason), None)
            }
        };
        drop(away);
        self.settle(record, &route, outcome, answer).await
    }

    /// Commits what came of it.
    async fn settle(
        &self,
        record: Record,
        route: &Route,
        outcome: Outcome,
        answer: Option<Answer>,
    ) -> Result<Option<Record>, Error> {
        self.busy.set(true);
        let rate = self.carrier.capacity(&self.upstream).rate;
        let rules = Rules {
            plan: &route.plan,
            pause_on: &route.pause_on,
            stretch: stretch(self.pending, rate),
        };
        let Ok(Step { record, keep }) = record.settle(outcome, &rules, self.clock.wall()) else {
            return Ok(None);
        };
        let kept: Option<(Kind, Bytes)> =
            keep.zip(answer).map(|(kind, answer)| (kind, answer.encode().into()));
        self.store.commit(vec![Change::Update(record.clone(), kept)]).await?;
        Ok(Some(record))
    }

    /// Leaves the request to a person.
    async fn strand(&self, record: Record, reason: &str) -> Result<Option<Record>, Error> {
        self.busy.set(true);
        let Ok(record) = record.strand(reason, self.clock.wall()) else { return Ok(None) };
        self.store.commit(vec![Change::Update(record.clone(), None)]).await?;
        Ok(Some(record))
    }
}

/// The least time between two questions for one result if `pending` results have to
/// be asked for, so that the questions take half of `rate` at most.
fn stretch(pending: usize, rate: Option<f64>) -> Duration {
    let Some(rate) = rate.filter(|rate| *rate > 0.0) else { return Duration::ZERO };
    Duration::try_from_secs_f64(2.0 * pending as f64 / rate).unwrap_or(Duration::MAX)
}

/// What is sent next.
fn call(
    record: &Record,
    request: Request,
    plan: &Plan,
    upstream: &Arc<str>,
) -> Result<Call, &'static str> {
    let upstream = Arc::clone(upstream);
    if record.state != State::Pending {
        let key = request.key.clone().unwrap_or_else(|| record.id.to_string());
        let key = if record.fresh_keys == 0 { key } else { format!("{key}-{}", record.fresh_keys) };
        return Ok(Call { upstream, request, key: Some(key), timeout: plan.create.timeout });
    }
    let Some(poll) = &plan.poll else { return Err("the route does not ask for results any more") };
    let Some(id) = &record.response_id else { return Err("the upstream gave no id") };
    let fields = request.fields.into_iter().filter(|field| goes_with_a_poll(&field.name));
    let request = Request {
        method: "GET".to_owned(),
        target: poll.target(id),
        fields: fields.collect(),
        body: Bytes::new(),
        key: None,
        ..request
    };
    Ok(Call { upstream, request, key: None, timeout: poll.timeout })
}

/// Whether a field of the request also belongs to the questions for its result: who
/// asks does, what the content is does not.
fn goes_with_a_poll(name: &str) -> bool {
    !name.starts_with("content-")
        && !matches!(name, "idempotency-key" | "expect" | "prefer" | "trailer" | "digest")
        && !name.starts_with("if-")
}

fn seen(answer: &Answer, record: &Record, plan: &Plan) -> Seen {
    let polls = record.state == State::Pending;
    let at = |pointer: &str| answer.at(pointer);
    Seen {
        status: answer.status,
        id: plan.poll.as_ref().filter(|_| !polls).and_then(|poll| at(&poll.id)),
        progress: plan.poll.as_ref().filter(|_| polls).and_then(|poll| at(&poll.status)),
        retry_after: answer.retry_after(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deferred::message::Field;
    use crate::deferred::plan::Delivery;
    use crate::deferred::testing;

    #[test]
    fn questions_take_half_of_the_rate_at_most() {
        assert_eq!(stretch(100, Some(10.0)), Duration::from_secs(20));
        assert_eq!(stretch(0, Some(10.0)), Duration::ZERO);
        assert_eq!(stretch(100, None), Duration::ZERO);
        assert_eq!(stretch(100, Some(0.0)), Duration::ZERO);
        assert_eq!(stretch(1, Some(f64::MIN_POSITIVE)), Duration::MAX);
    }

    #[test]
    fn a_question_says_who_asks_and_not_what_was_sent() {
        let mut record = testing::record(1);
        let plan = testing::plan(Delivery::AtLeastOnce, true);
        let mut request = testing::request("{}");
        let field = |name: &str| Field { name: name.to_owned(), value: Bytes::from_static(b"x") };
        let names = ["authorization", "idempotency-key", "content-encoding", "accept", "if-match"];
        request.fields.extend(names.map(field));
        let upstream = Arc::from("bank");

        let create = call(&record, request.clone(), &plan, &upstream).unwrap();
        assert_eq!(create.request, request);
        assert_eq!(create.key.unwrap(), record.id.to_string());
        request.key = Some("order-17".to_owned());
        let create = call(&record, request.clone(), &plan, &upstream).unwrap();
        assert_eq!(create.key.unwrap(), "order-17");
        record.fresh_keys = 2;
        let create = call(&record, request.clone(), &plan, &upstream).unwrap();
        assert_eq!(create.key.unwrap(), "order-17-2");

        record.state = State::Pending;
        assert!(call(&record, request.clone(), &plan, &upstream).is_err());
        record.response_id = Some("tr/1".to_owned());
        let poll = call(&record, request, &plan, &upstream).unwrap();
        assert_eq!(poll.request.target, "/v1/transfers/tr%2F1");
        assert_eq!((poll.request.method.as_str(), poll.key), ("GET", None));
        assert!(poll.request.body.is_empty());
        let names: Vec<_> = poll.request.fields.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, ["authorization", "accept"]);
    }
}
