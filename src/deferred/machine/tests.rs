//! The table, row by row, and random events against it.

use super::*;
use crate::deferred::plan::Plan;
use crate::deferred::record::Attempts;
use crate::deferred::testing::{T0, at, plan, record};

const PAUSE_ON: &[u16] = &[429, 503];
const AT_LEAST: Delivery = Delivery::AtLeastOnce;
const AT_MOST: Delivery = Delivery::AtMostOnce;

fn seen(status: u16) -> Outcome {
    Outcome::Answered(Seen { status, id: None, progress: None, retry_after: None })
}

fn created(id: &str) -> Outcome {
    let id = Some(id.to_owned());
    Outcome::Answered(Seen { status: 201, id, progress: None, retry_after: None })
}

fn says(progress: &str) -> Outcome {
    let progress = Some(progress.to_owned());
    Outcome::Answered(Seen { status: 200, id: None, progress, retry_after: None })
}

fn unsent() -> Outcome {
    Outcome::Unsent("cannot be reached".to_owned())
}

fn unknown() -> Outcome {
    Outcome::Unknown("no answer".to_owned())
}

/// What becomes of a record in flight.
fn settle(record: Record, outcome: Outcome, plan: &Plan) -> Step {
    let rules = Rules { plan, pause_on: PAUSE_ON, stretch: Duration::ZERO };
    record.settle(outcome, &rules, T0).unwrap()
}

/// A record whose `n`th try is in flight.
fn sending(n: u32) -> Record {
    let attempts = Attempts { create: n, ..Attempts::default() };
    Record { in_flight: true, attempts, ..record(1) }
}

/// A record for whose result is asked the `n`th time.
fn asking(n: u32) -> Record {
    let attempts = Attempts { create: 1, poll: n, ..Attempts::default() };
    let (response_id, initial) = (Some("tr_1".to_owned()), Some(201));
    let state = State::Pending;
    Record { state, in_flight: true, reached: true, attempts, response_id, initial, ..record(1) }
}

fn waiting(record: Record) -> Record {
    Record { in_flight: false, ..record }
}

#[test]
fn rows_3_and_13_a_try_counts_before_it_is_made() {
    let claimed = record(1).claim(at(9)).unwrap();
    assert!(claimed.in_flight && !claimed.reached);
    assert_eq!((claimed.attempts.create, claimed.attempts.poll), (1, 0));
    assert_eq!(claimed.updated, at(9));
    let claimed = waiting(asking(3)).claim(T0).unwrap();
    assert_eq!((claimed.state, claimed.attempts.poll), (State::Pending, 4));
    assert_eq!(claimed.attempts.create, 1);
    assert!(sending(1).claim(T0).is_err(), "it is in flight");
}

#[test]
fn row_4_a_good_answer_completes_where_nothing_is_polled() {
    for status in [200, 201, 202, 204, 299] {
        let step = settle(sending(1), seen(status), &plan(AT_LEAST, false));
        assert_eq!((step.record.state, step.keep), (State::Completed, Some(Kind::Final)));
        assert_eq!((step.record.outcome, step.record.reason), (Some(status), None));
        assert!(!step.record.in_flight);
    }
}

#[test]
fn row_5_a_good_answer_with_an_id_is_polled() {
    let step = settle(sending(2), created("tr_1"), &plan(AT_LEAST, true));
    assert_eq!((step.record.state, step.keep), (State::Pending, Some(Kind::Initial)));
    assert_eq!(step.record.response_id.as_deref(), Some("tr_1"));
    assert_eq!((step.record.initial, step.record.outcome), (Some(201), None));
    assert_eq!((step.record.due, step.record.attempts.poll), (at(2), 0));
}

#[test]
fn row_6_an_answer_without_an_id_is_for_a_person_and_never_polled() {
    let step = settle(sending(1), seen(201), &plan(AT_LEAST, true));
    assert_eq!((step.record.state, step.keep), (State::Stale, Some(Kind::Initial)));
    assert_eq!(step.record.reason.as_deref(), Some("no id in create answer"));
    assert_eq!(step.record.response_id, None);
}

#[test]
fn row_7_a_throttled_try_is_no_try() {
    for status in [429, 503] {
        for delivery in [AT_LEAST, AT_MOST] {
            let step = settle(sending(5), seen(status), &plan(delivery, true));
            assert_eq!((step.record.state, step.keep), (State::Accepted, None));
            assert_eq!((step.record.attempts.create, step.record.attempts.throttled), (4, 1));
            assert_eq!(step.record.due, at(1));
            assert!(!step.record.reached && !step.record.in_flight);
        }
    }
    for (asked, due) in [(0, 1), (30, 30), (36_000, 900), (u64::MAX, 900)] {
        let retry_after = Some(Duration::from_secs(asked));
        let outcome =
            Outcome::Answered(Seen { status: 429, id: None, progress: None, retry_after });
        let step = settle(sending(1), outcome, &plan(AT_LEAST, true));
        assert_eq!(step.record.due, at(due), "{asked}");
    }
}

#[test]
fn row_8_what_may_be_sent_again_is_after_a_pause_that_grows() {
    for (delivery, outcome, again) in [
        (AT_LEAST, unsent(), true),
        (AT_LEAST, seen(408), true),
        (AT_LEAST, seen(425), true),
        (AT_LEAST, seen(500), true),
        (AT_LEAST, seen(599), true),
        (AT_MOST, unsent(), true),
        (AT_MOST, seen(408), true),
        (AT_MOST, seen(425), true),
        (AT_MOST, seen(500), false),
        (AT_MOST, seen(502), false),
    ] {
        for n in 1..5 {
            let step = settle(sending(n), outcome.clone(), &plan(delivery, true));
            let expected = if again { State::Accepted } else { State::Stale };
            assert_eq!(step.record.state, expected, "{delivery:?} {outcome:?}");
            if again {
                assert_eq!(step.record.due, at(2 * u64::from(n)));
                assert_eq!(step.record.attempts.create, n);
            }
        }
    }
    // The upstream may ask for more time, and never for less.
    let outcome = |seconds| {
        let retry_after = Some(Duration::from_secs(seconds));
        Outcome::Answered(Seen { status: 500, id: None, progress: None, retry_after })
    };
    assert_eq!(settle(sending(2), outcome(60), &plan(AT_LEAST, true)).record.due, at(60));
    assert_eq!(settle(sending(2), outcome(1), &plan(AT_LEAST, true)).record.due, at(4));
}

#[test]
fn row_9_the_last_try_ends_it_at_once() {
    let step = settle(sending(5), seen(500), &plan(AT_LEAST, true));
    assert_eq!((step.record.state, step.keep), (State::Failed, Some(Kind::Final)));
    assert_eq!(step.record.outcome, Some(500));
    assert_eq!(step.record.reason.as_deref(), Some("5 tries: the upstream answered 500"));
    let step = settle(sending(5), unsent(), &plan(AT_MOST, true));
    assert_eq!((step.record.state, step.keep), (State::Failed, None));
    assert_eq!(step.record.reason.as_deref(), Some("5 tries: cannot be reached"));
    // What may have arrived is not called failed.
    let step = settle(sending(5), unknown(), &plan(AT_LEAST, true));
    assert_eq!(step.record.state, State::Stale);
    let reached = Record { reached: true, ..sending(5) };
    assert_eq!(settle(reached, unsent(), &plan(AT_LEAST, true)).record.state, State::Stale);
}

#[test]
fn row_10_any_other_answer_is_final() {
    for status in [100, 301, 302, 307, 400, 401, 403, 404, 409, 410, 422, 451, 499] {
        for delivery in [AT_LEAST, AT_MOST] {
            let step = settle(sending(1), seen(status), &plan(delivery, true));
            assert_eq!((step.record.state, step.keep), (State::Failed, Some(Kind::Final)));
            assert_eq!(step.record.outcome, Some(status));
        }
    }
}

#[test]
fn rows_11_and_12_what_may_have_arrived_is_sent_again_or_left_to_a_person() {
    let step = settle(sending(1), unknown(), &plan(AT_LEAST, true));
    assert_eq!((step.record.state, step.record.due), (State::Accepted, at(2)));
    assert!(step.record.reached);
    let step = settle(sending(1), unknown(), &plan(AT_MOST, true));
    assert_eq!(step.record.state, State::Stale);
    assert_eq!(step.record.reason.as_deref(), Some("create outcome unknown"));
    let step = settle(sending(1), seen(500), &plan(AT_MOST, true));
    assert_eq!((step.record.state, step.keep), (State::Stale, Some(Kind::Last)));
    assert_eq!(step.record.last, Some(500));
}

#[test]
fn rows_14_and_15_the_upstream_says_how_it_ended() {
    let step = settle(asking(3), says("completed"), &plan(AT_LEAST, true));
    assert_eq!((step.record.state, step.keep), (State::Completed, Some(Kind::Final)));
    assert_eq!((step.record.initial, step.record.outcome), (Some(201), Some(200)));
    let step = settle(asking(3), says("failed"), &plan(AT_LEAST, true));
    assert_eq!((step.record.state, step.keep), (State::Failed, Some(Kind::Final)));
    assert_eq!(step.record.reason.as_deref(), Some("the upstream says failed"));
    // A good word in a bad answer does not count.
    let progress = Some("completed".to_owned());
    let outcome = Outcome::Answered(Seen { status: 404, id: None, progress, retry_after: None });
    assert_eq!(settle(asking(3), outcome, &plan(AT_LEAST, true)).record.state, State::Pending);
}

#[test]
fn rows_16_and_17_questions_go_on_until_there_were_enough() {
    for outcome in [says("processing"), seen(200), seen(404), seen(500), unsent(), unknown()] {
        let mut time = 2;
        for n in 1..10 {
            let step = settle(asking(n), outcome.clone(), &plan(AT_MOST, true));
            assert_eq!((step.record.state, step.record.attempts.poll), (State::Pending, n));
            let pause = 2 * (u64::from(n) + 1);
            assert_eq!(step.record.due, at(pause));
            time += pause;
        }
        assert_eq!(time, 110);
        let step = settle(asking(10), outcome, &plan(AT_MOST, true));
        assert_eq!(step.record.state, State::Stale);
        assert_eq!(step.record.reason.as_deref(), Some("10 polls"));
    }
    let step = settle(asking(10), says("processing"), &plan(AT_MOST, true));
    assert_eq!(
        (step.keep, step.record.outcome, step.record.last),
        (Some(Kind::Last), None, Some(200))
    );
    // While many are asked for, each is asked for less often.
    let plan = plan(AT_LEAST, true);
    let stretch = Duration::from_secs(50);
    let rules = Rules { plan: &plan, pause_on: PAUSE_ON, stretch };
    let step = asking(1).settle(seen(200), &rules, T0).unwrap();
    assert_eq!(step.record.due, at(50));
    assert_eq!(sending(1).settle(created("x"), &rules, T0).unwrap().record.due, at(50));
}

#[test]
fn row_18_a_throttled_question_is_none() {
    let step = settle(asking(10), seen(429), &plan(AT_LEAST, true));
    assert_eq!((step.record.state, step.record.attempts.poll), (State::Pending, 9));
    assert_eq!((step.record.attempts.throttled, step.record.due), (1, at(1)));
}

#[test]
fn rows_19_and_20_what_was_never_sent_fails_and_the_rest_is_for_a_person() {
    let expired = record(1).expire(at(86_400)).unwrap();
    assert_eq!((expired.state, expired.reason.as_deref()), (State::Failed, Some("expired")));
    let reached = Record { reached: true, ..record(1) };
    assert_eq!(reached.expire(T0).unwrap().state, State::Stale);
    assert_eq!(waiting(asking(1)).expire(T0).unwrap().state, State::Stale);
    assert!(sending(1).expire(T0).is_err(), "what is at the upstream is not interrupted");
}

#[test]
fn row_21_a_stale_request_is_asked_for_anew() {
    let stale =
        Record { expires: at(5), ..settle(asking(10), seen(200), &plan(AT_LEAST, true)).record };
    let hour = Duration::from_secs(3600);
    let again = stale.clone().recheck(hour, at(100)).unwrap();
    assert_eq!((again.state, again.attempts.poll), (State::Pending, 0));
    assert_eq!((again.due, again.expires, again.reason), (at(100), at(3700), None));
    assert!(Record { response_id: None, ..stale.clone() }.recheck(hour, T0).is_err());
    assert!(Record { state: State::Failed, ..stale }.recheck(hour, T0).is_err());
}

#[test]
fn row_22_a_stale_or_failed_request_is_sent_anew_with_the_same_key() {
    let hour = Duration::from_secs(3600);
    for state in State::ALL {
        let old = Record { state, in_flight: false, ..asking(10) };
        let again = old.clone().resend(false, hour, at(100));
        let Ok(again) = again else {
            assert!(!matches!(state, State::Stale | State::Failed));
            continue;
        };
        assert!(matches!(state, State::Stale | State::Failed));
        assert_eq!(
            (again.state, again.attempts.create, again.attempts.poll),
            (State::Accepted, 0, 0)
        );
        assert_eq!((again.fresh_keys, again.response_id, again.initial), (0, None, None));
        assert!(again.reached, "it may have arrived before");
        assert_eq!(old.resend(true, hour, at(100)).unwrap().fresh_keys, 1);
    }
}

#[test]
fn row_23_only_what_was_not_sent_is_taken_back() {
    assert_eq!(record(1).cancel(T0).unwrap().state, State::Canceled);
    let error = sending(1).cancel(T0).unwrap_err();
    assert_eq!(error.to_string(), "the request is accepted and in flight");
    assert_eq!(waiting(asking(1)).cancel(T0).unwrap_err().to_string(), "the request is pending");
    for state in State::ALL.into_iter().filter(|state| state.is_settled()) {
        assert!(Record { state, ..record(1) }.cancel(T0).is_err(), "{state}");
    }
}

#[test]
fn rows_24_25_and_29_an_end_in_flight_is_an_unknown_outcome_and_three_are_enough() {
    let step = settle(sending(1), Outcome::Lost, &plan(AT_LEAST, true));
    assert_eq!((step.record.state, step.record.attempts.crashes), (State::Accepted, 1));
    assert!(step.record.reached);
    let step = settle(sending(1), Outcome::Lost, &plan(AT_MOST, true));
    assert_eq!(step.record.state, State::Stale);
    let step = settle(asking(1), Outcome::Lost, &plan(AT_MOST, true));
    assert_eq!((step.record.state, step.record.due), (State::Pending, at(4)));
    for two in [sending(1), asking(1)] {
        let attempts = Attempts { crashes: 2, ..two.attempts };
        let two = Record { attempts, ..two };
        let step = settle(two.clone(), Outcome::Lost, &plan(AT_LEAST, true));
        assert_eq!(step.record.state, State::Stale);
        assert_eq!(step.record.reason.as_deref(), Some("crash loop"));
        // An outcome of any kind breaks the row.
        let step = settle(two, seen(500), &plan(AT_LEAST, true));
        assert_eq!(step.record.attempts.crashes, 0);
    }
}

#[test]
fn row_27_what_waits_can_be_handed_over() {
    for waits in [record(1), waiting(asking(2))] {
        let moved = waits.clone().hand_over("pod-b", T0).unwrap();
        assert_eq!((moved.state, moved.reason.as_deref()), (State::Moved, Some("pod-b")));
        assert_eq!(moved.attempts, waits.attempts);
    }
    assert!(sending(1).hand_over("pod-b", T0).is_err());
}

#[test]
fn row_30_settled_requests_are_forgotten_and_stale_ones_late() {
    let retain = Duration::from_secs(3600);
    for state in State::ALL {
        let at_end = Record { state, updated: at(10), ..record(1) }.forgotten_at(retain);
        let expected = match state {
            State::Accepted | State::Pending => None,
            State::Stale => Some(at(10 + 30 * 86_400)),
            State::Completed | State::Failed | State::Canceled | State::Moved => Some(at(3610)),
        };
        assert_eq!(at_end, expected, "{state}");
    }
}

#[test]
fn a_route_that_changed_leaves_the_request_to_a_person() {
    let step = settle(asking(1), seen(200), &plan(AT_LEAST, false));
    assert_eq!(step.record.state, State::Stale);
    let stranded = sending(1).strand("no route", T0).unwrap();
    assert!(stranded.reached && !stranded.in_flight);
    assert!(Record { state: State::Completed, ..record(1) }.strand("no route", T0).is_err());
}

/// What a request may be, told from its history alone.
#[derive(Default)]
struct Reference {
    sent: u32,
    asked: u32,
    may_have_arrived: bool,
    settled: Option<State>,
}

#[test]
fn random_events_keep_the_promises() {
    for seed in 1..=3000_u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut dice = |n: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % n
        };
        let delivery = if dice(2) == 0 { AT_LEAST } else { AT_MOST };
        let plan = plan(delivery, dice(3) != 0);
        let mut record = record(seed.into());
        let mut reference = Reference::default();
        for step in 0..60_u64 {
            let what = format!("seed {seed}, step {step}: {record:?}");
            let now = at(step);
            let before = record.clone();
            let event = dice(10);
            let next = match event {
                0..=3 => record.clone().claim(now).map(|record| Step { record, keep: None }),
                4..=6 => {
                    let outcome = match dice(9) {
                        0 => seen(429),
                        1 => seen(500),
                        2 => seen(404),
                        3 => created("x"),
                        4 => says("completed"),
                        5 => says("failed"),
                        6 => unsent(),
                        7 => unknown(),
                        _ => Outcome::Lost,
                    };
                    let rules = Rules { plan: &plan, pause_on: PAUSE_ON, stretch: Duration::ZERO };
                    let reaches = !matches!(outcome, Outcome::Unsent(_)) && outcome != seen(429);
                    let next = record.clone().settle(outcome, &rules, now);
                    reference.may_have_arrived |= next.is_ok() && reaches;
                    next
                }
                7 => record.clone().cancel(now).map(|record| Step { record, keep: None }),
                8 => record.clone().expire(now).map(|record| Step { record, keep: None }),
                _ => {
                    let again = if dice(2) == 0 {
                        record.clone().recheck(Duration::ZERO, now)
                    } else {
                        record.clone().resend(false, Duration::ZERO, now)
                    };
                    if let Ok(again) = &again {
                        reference.settled = None;
                        reference.asked = 0;
                        if again.state == State::Accepted {
                            reference.sent = 0;
                        }
                    }
                    again.map(|record| Step { record, keep: None })
                }
            };
            let Ok(Step { record: next, keep }) = next else {
                continue;
            };
            if event <= 3 {
                let polls = before.state == State::Pending;
                reference.sent += u32::from(!polls);
                reference.asked += u32::from(polls);
            }
            let throttled = next.attempts.throttled > before.attempts.throttled;
            if throttled && before.state == State::Pending {
                reference.asked -= 1;
            } else if throttled {
                reference.sent -= 1;
            }
            assert!(reference.settled.is_none(), "left its end by itself: {what}");
            assert_eq!(next.attempts.create, reference.sent, "{what}");
            assert_eq!(next.attempts.poll, reference.asked, "{what}");
            assert!(next.attempts.create <= 5 && next.attempts.poll <= 10, "{what}");
            assert_eq!((next.id, next.payload, next.fresh_keys), (before.id, before.payload, 0));
            assert_eq!(
                keep == Some(Kind::Final),
                next.outcome != before.outcome && next.outcome.is_some(),
                "{what}"
            );
            if event < 9 && before.initial.is_some() {
                assert_eq!(next.initial, before.initial, "the first answer was lost: {what}");
            }
            if next.state == State::Failed && next.outcome.is_none() {
                assert!(!reference.may_have_arrived, "called failed without a word: {what}");
            }
            if next.state == State::Canceled {
                assert!(!before.in_flight, "{what}");
            }
            if next.state.is_settled() {
                assert!(!next.in_flight, "{what}");
                reference.settled = Some(next.state);
            }
            record = next;
        }
    }
}
