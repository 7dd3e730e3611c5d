//! What the module's tests have in common.

use std::time::Duration;

use bytes::Bytes;

use super::message::{Answer, Field, Request};
use super::plan::{Backoff, Delivery, Plan, Poll, Tries};
use super::record::{Attempts, Digest, Id, Record, State};
use crate::time::WallTime;

pub(super) const T0: WallTime = WallTime::from_millis(1_767_229_200_000);

pub(super) fn at(seconds: u64) -> WallTime {
    T0.plus(Duration::from_secs(seconds))
}

pub(super) fn record(n: u128) -> Record {
    let nobody = Digest::of("tidegate test", &[b"nobody"]);
    Record {
        id: Id::new(T0, n),
        state: State::Accepted,
        in_flight: false,
        reached: false,
        upstream: "bank".to_owned(),
        created: T0,
        updated: T0,
        expires: at(86_400),
        due: T0,
        attempts: Attempts::default(),
        fresh_keys: 0,
        owner: nobody,
        payload: nobody,
        claim: None,
        response_id: None,
        reason: None,
        initial: None,
        outcome: None,
        last: None,
    }
}

pub(super) fn request(body: &str) -> Request {
    let value = Bytes::from_static(b"application/json");
    Request {
        method: "POST".to_owned(),
        target: "/v1/transfers".to_owned(),
        fields: vec![Field { name: "content-type".to_owned(), value }],
        body: Bytes::from(body.to_owned()),
        client: [127, 0, 0, 1].into(),
        vouched_for: false,
        key: None,
    }
}

pub(super) fn answer(status: u16, body: &str) -> Answer {
    let value = Bytes::from_static(b"application/json");
    let fields = vec![Field { name: "content-type".to_owned(), value }];
    Answer { status, fields, body: Bytes::from(body.to_owned()) }
}

pub(super) fn plan(delivery: Delivery, polls: bool) -> Plan {
    Plan {
        delivery,
        create: Tries {
            attempts: 5,
            timeout: Duration::from_secs(10),
            backoff: Backoff::default(),
        },
        poll: polls.then(|| Poll::at("/v1/transfers/{id}")),
        expires: Plan::DEFAULT_EXPIRES,
    }
}
