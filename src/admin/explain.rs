//! Explanations: from a request in words to what would become of it.

use std::net::IpAddr;
use std::time::Duration;

use http::header::HOST;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use tonic::Status;

use super::convert;
use super::question::invalid;
use crate::limiter::{
    Applicability, Check, Condition, Decision, Due, Exclusion, Explanation, Field, Limit, Outcome,
};
use crate::proxy::{Asking, Foreseen, Found};
use crate::wire::tidegate::admin::v1 as pb;

/// The head of the request that is described, and where it would come from.
pub(super) fn request(request: pb::ExplainRequest) -> Result<(Parts, Asking), Status> {
    let method = match request.method.as_str() {
        "" => Method::GET,
        name => Method::from_bytes(name.as_bytes())
            .map_err(|_| invalid("method", "it is not a method"))?,
    };
    let target = request.target.parse::<Uri>().ok();
    let target = target.filter(|uri| uri.scheme().is_some() || request.target.starts_with('/'));
    let target = target.ok_or_else(|| invalid("target", "a path or an absolute URL is needed"))?;
    let mut headers = HeaderMap::new();
    for (index, header) in request.headers.iter().enumerate() {
        let name = HeaderName::from_bytes(header.name.as_bytes())
            .map_err(|_| invalid(&format!("headers[{index}].name"), "it is not a field name"))?;
        let value = HeaderValue::from_bytes(header.value.as_bytes())
            .map_err(|_| invalid(&format!("headers[{index}].value"), "it is not a field value"))?;
        headers.append(name, value);
    }
    let authority = target.authority().map_or("localhost", |authority| authority.as_str());
    if !request.host.is_empty() {
        let host = HeaderValue::from_str(&request.host)
            .map_err(|_| invalid("host", "it is not a host"))?;
        headers.insert(HOST, host);
    } else if target.authority().is_some() || !headers.contains_key(HOST) {
        let host =
            HeaderValue::from_str(authority).map_err(|_| invalid("target", "it has no host"))?;
        headers.insert(HOST, host);
    }
    let path = target.path_and_query().cloned();
    let uri = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    let (mut parts, ()) = Request::new(()).into_parts();
    (parts.method, parts.uri, parts.headers) = (method, uri, headers);
    Ok((parts, asking(&request.client_address, &request.peer_address)?))
}

fn asking(client: &str, peer: &str) -> Result<Asking, Status> {
    let address = |field, text: &str| {
        text.parse::<IpAddr>().map_err(|_| invalid(field, "it is not an IP address"))
    };
    match (client, peer) {
        ("", "") => Err(invalid("client_address", "it or `peer_address` is needed")),
        ("", peer) => Ok(Asking::Peer(address("peer_address", peer)?)),
        (client, "") => Ok(Asking::Client(address("client_address", client)?)),
        (_, _) => Err(invalid("peer_address", "it and `client_address` exclude each other")),
    }
}

/// What would become of a request that was sent with `method`.
pub(super) fn response(
    method: &Method,
    foreseen: &Foreseen,
    knowledge: pb::Knowledge,
) -> pb::ExplainResponse {
    let refused_by = foreseen.explanation.as_ref().and_then(|explanation| {
        let check = explanation.decision.refusal()?;
        explanation.in_force.get(check.limit).map(|limit| limit.name().to_owned())
    });
    let (status, set, body) = match &foreseen.answer {
        None => (0, &foreseen.fields, String::new()),
        Some(answer) => {
            let body = String::from_utf8_lossy(answer.body()).into_owned();
            (u32::from(answer.status().as_u16()), answer.headers(), body)
        }
    };
    pb::ExplainResponse {
        client: Some(pb::ExplainedClient {
            address: foreseen.client.ip().to_string(),
            group: foreseen.client.to_string(),
            found: found(foreseen.found),
        }),
        path: foreseen.path.escape_ascii().to_string(),
        limits: foreseen
            .explanation
            .as_ref()
            .map_or_else(Vec::new, |explanation| limits(method, foreseen, explanation)),
        answer: Some(pb::Answer {
            forwarded: foreseen.answer.is_none(),
            status,
            headers: set
                .iter()
                .map(|(name, value)| pb::Header {
                    name: name.to_string(),
                    value: String::from_utf8_lossy(value.as_bytes()).into_owned(),
                })
                .collect(),
            body,
            refused_by: refused_by.unwrap_or_default(),
            held_for: foreseen.held_for.map(convert::span),
        }),
        knowledge: Some(knowledge),
        note: foreseen.note.to_owned(),
        upstream: foreseen.upstream.clone(),
        route: foreseen.route.and_then(|route| u32::try_from(route).ok()),
    }
}

fn found(found: Found) -> String {
    match found {
        Found::Given => "as the question says".to_owned(),
        Found::Connection { ignored: false } => "the connection's address".to_owned(),
        Found::Connection { ignored: true } => {
            "the connection's address, which is no trusted proxy, so that its forwarding fields \
             are ignored"
                .to_owned()
        }
        Found::Forwarded(field) => format!("from {field}, of a trusted proxy"),
    }
}

fn limits(
    method: &Method,
    foreseen: &Foreseen,
    explanation: &Explanation,
) -> Vec<pb::ExplainedLimit> {
    let explained = explanation.limits.iter().filter_map(|(index, applicability)| {
        let limit = explanation.in_force.get(*index)?;
        let (verdict, reason) = match applicability {
            Applicability::Applies { check, .. } => {
                applies(&explanation.decision, *check, foreseen.held_for.is_some())
            }
            Applicability::Excluded(Exclusion::Unmatched(field)) => (
                pb::LimitVerdict::NotMatched,
                unmatched(&limit.rule().condition, *field, method, foreseen),
            ),
            Applicability::Excluded(Exclusion::Exempt(element)) => {
                let exempt = limit.rule().exempt.get(*element);
                let which = exempt.map_or_else(String::new, convert::condition);
                (pb::LimitVerdict::Exempt, format!("exempt: {which}"))
            }
            Applicability::Skipped(part) => (
                pb::LimitVerdict::Skipped,
                format!("{}, and the limit does not apply then", lacks(limit, *part)),
            ),
            Applicability::Denied(part) => (
                pb::LimitVerdict::Denied,
                format!("{}, and the limit refuses that with 400", lacks(limit, *part)),
            ),
        };
        let mut told = pb::ExplainedLimit {
            limit: limit.name().to_owned(),
            mode: convert::mode(limit.mode()).into(),
            verdict: verdict.into(),
            reason,
            ..pb::ExplainedLimit::default()
        };
        if let Applicability::Applies { key, bucket, exists, level, cost, check } = applicability {
            let check = check.and_then(|check| explanation.decision.checks.get(check));
            let quota = check.map_or(limit.quota(*bucket), |check| &check.quota);
            let cost = check.map_or(*cost, |check| check.cost);
            told.bucket_id = bucket.to_string();
            told.key = convert::key_parts(key, limit.rule());
            told.bucket_exists = *exists;
            told.paused_for = convert::paused_for(check.map_or(0, |check| check.paused_for));
            (told.level, told.level_micros) = (level.as_f64(), level.micros());
            (told.burst, told.burst_micros) = (quota.burst().as_f64(), quota.burst().micros());
            told.rate = Some(convert::rate(quota.rate()));
            (told.cost, told.cost_micros) = (cost.as_f64(), cost.micros());
            let taken = check.is_some_and(|check| check.outcome == Outcome::Admitted);
            let due = check
                .filter(|c| !taken && c.outcome != Outcome::NotCharged)
                .map_or(Due::Now, |check| check.due);
            told.due_in = match due {
                Due::Now => Some(convert::duration(0)),
                Due::In(nanos) => Some(convert::duration(nanos)),
                Due::Never => None,
            };
        }
        Some(told)
    });
    explained.collect()
}

/// The verdict of a limit that applies.
fn applies(decision: &Decision, check: Option<usize>, held: bool) -> (pb::LimitVerdict, String) {
    let Some(check) = check.and_then(|check| decision.checks.get(check)) else {
        let reason = "another limit refuses the request for a part that is missing";
        return (pb::LimitVerdict::NotCharged, reason.to_owned());
    };
    match check.outcome {
        Outcome::Admitted => (pb::LimitVerdict::Admitted, "it has room".to_owned()),
        Outcome::Refused if held => {
            let reason = format!("{}; the request waits", no_room(check));
            (pb::LimitVerdict::Held, reason)
        }
        Outcome::Refused if check.left() >= check.cost => {
            (pb::LimitVerdict::Refused, "other requests wait for what it has".to_owned())
        }
        Outcome::Refused => (pb::LimitVerdict::Refused, no_room(check)),
        Outcome::NotCharged if held => {
            (pb::LimitVerdict::NotCharged, "it has room, but another limit has not yet".to_owned())
        }
        Outcome::NotCharged => {
            (pb::LimitVerdict::NotCharged, "it has room, but another limit refuses".to_owned())
        }
        Outcome::ShadowRefused => {
            let reason = format!("{}; it only reports", no_room(check));
            (pb::LimitVerdict::ShadowRefused, reason)
        }
    }
}

fn no_room(check: &Check) -> String {
    let cost = check.cost;
    if check.paused_for > 0 {
        // In whole milliseconds: nobody reads the rest.
        let left = Duration::from_millis(check.paused_for.div_ceil(1_000_000));
        return format!("it is paused for another {}", humantime::format_duration(left));
    }
    match check.due {
        Due::Never => format!("it never has {cost} token(s)"),
        Due::In(_) | Due::Now => format!("it lacks the {cost} token(s) that the request costs"),
    }
}

fn lacks(limit: &Limit, part: usize) -> String {
    let part = limit.rule().key.get(part).map_or_else(String::new, ToString::to_string);
    format!("the request lacks {part}")
}

/// Which condition does not hold. Values of headers are not repeated.
fn unmatched(condition: &Condition, field: Field, method: &Method, foreseen: &Foreseen) -> String {
    let wanted = convert::term(condition, field);
    match field {
        Field::Upstream => format!("not {wanted}: it is {}", foreseen.upstream),
        Field::Path => format!("not {wanted}: it is {}", foreseen.path.escape_ascii()),
        Field::Method => format!("not {wanted}: it is {method}"),
        Field::Host => format!("not {wanted}: it is {}", foreseen.host.escape_default()),
        Field::Header(_) => format!("not {wanted}"),
        Field::Client => format!("not {wanted}: it is {}", foreseen.client.ip()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(target: &str, host: &str, headers: &[(&str, &str)]) -> Result<Parts, String> {
        let headers = headers
            .iter()
            .map(|(name, value)| pb::Header { name: (*name).into(), value: (*value).into() })
            .collect();
        let question = pb::ExplainRequest {
            target: target.into(),
            host: host.into(),
            headers,
            client_address: "192.0.2.1".into(),
            ..pb::ExplainRequest::default()
        };
        request(question).map(|(parts, _)| parts).map_err(|status| status.message().to_owned())
    }

    #[test]
    fn the_host_is_the_one_named_last_in_the_question() {
        let host = |parts: Parts| parts.headers[HOST].to_str().unwrap().to_owned();
        assert_eq!(host(asked("/", "", &[]).unwrap()), "localhost");
        assert_eq!(host(asked("/", "", &[("Host", "a")]).unwrap()), "a");
        assert_eq!(host(asked("http://b:1/x", "", &[("Host", "a")]).unwrap()), "b:1");
        assert_eq!(host(asked("http://b:1/x", "c", &[("Host", "a")]).unwrap()), "c");
        let parts = asked("http://b/x?q=1", "", &[]).unwrap();
        assert_eq!((parts.uri.to_string().as_str(), parts.method), ("/x?q=1", Method::GET));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (target, host, headers, field) in [
            ("", "", vec![], "target: "),
            ("api", "", vec![], "target: "),
            ("/a b", "", vec![], "target: "),
            ("/", "a\nb", vec![], "host: "),
            ("/", "", vec![("a", "1"), ("b b", "1")], "headers[1].name: "),
            ("/", "", vec![("a", "\n")], "headers[0].value: "),
        ] {
            let error = asked(target, host, &headers).unwrap_err();
            assert!(error.starts_with(field), "{target} {host} {headers:?}: {error}");
        }
        assert!(asking("", "").is_err() && asking("1.2.3.4", "1.2.3.4").is_err());
        assert_eq!(asking("", "::1").unwrap(), Asking::Peer("::1".parse().unwrap()));
    }
}
