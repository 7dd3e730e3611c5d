//! Between what is kept and the bytes of it in the store, in both directions.
//! Nothing is guessed: bytes that say something impossible are an error.

use std::net::IpAddr;

use bytes::Bytes;
use prost::Message as _;

use super::message::{Answer, Field, Request};
use super::record::{Attempts, Digest, Id, Record, State};
use crate::time::WallTime;
use crate::wire::tidegate::deferred::v1 as wire;

/// Bytes in the store that do not say what they should. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(String);

impl From<prost::DecodeError> for Malformed {
    fn from(error: prost::DecodeError) -> Self {
        Self(error.to_string())
    }
}

fn malformed<T>(what: &str) -> Result<T, Malformed> {
    Err(Malformed(format!("{what} is missing or impossible")))
}

impl Record {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        self.to_wire().encode_to_vec()
    }

    /// The record with these bytes.
    ///
    /// # Errors
    /// If they are none.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        Self::from_wire(wire::Record::decode(bytes)?)
    }

    /// As it is told to others.
    pub fn to_wire(&self) -> wire::Record {
        let digest = |digest: &Digest| Bytes::copy_from_slice(digest.as_bytes());
        let status = |status: Option<u16>| status.map_or(0, u32::from);
        wire::Record {
            id: Bytes::copy_from_slice(&self.id.as_u128().to_be_bytes()),
            state: state_to_wire(self.state).into(),
            in_flight: self.in_flight,
            reached: self.reached,
            upstream: self.upstream.clone(),
            created: self.created.as_millis(),
            updated: self.updated.as_millis(),
            expires: self.expires.as_millis(),
            due: self.due.as_millis(),
            creates: self.attempts.create,
            polls: self.attempts.poll,
            throttled: self.attempts.throttled,
            crashes: self.attempts.crashes,
            fresh_keys: self.fresh_keys,
            owner: digest(&self.owner),
            payload: digest(&self.payload),
            claim: self.claim.as_ref().map(digest).unwrap_or_default(),
            response_id: self.response_id.clone().unwrap_or_default(),
            reason: self.reason.clone().unwrap_or_default(),
            initial: status(self.initial),
            outcome: status(self.outcome),
            last: status(self.last),
        }
    }

    /// The record that was told.
    ///
    /// # Errors
    /// If it cannot be.
    pub fn from_wire(wire: wire::Record) -> Result<Self, Malformed> {
        let text = |text: String| (!text.is_empty()).then_some(text);
        let claim = if wire.claim.is_empty() { None } else { Some(digest(&wire.claim, "claim")?) };
        let Some(state) = state_from_wire(wire.state()) else { return malformed("the state") };
        let Ok(id) = <[u8; 16]>::try_from(wire.id.as_ref()) else { return malformed("the id") };
        if wire.upstream.is_empty() {
            return malformed("the upstream");
        }
        Ok(Self {
            id: Id::from_u128(u128::from_be_bytes(id)),
            state,
            in_flight: wire.in_flight,
            reached: wire.reached,
            upstream: wire.upstream,
            created: WallTime::from_millis(wire.created),
            updated: WallTime::from_millis(wire.updated),
            expires: WallTime::from_millis(wire.expires),
            due: WallTime::from_millis(wire.due),
            attempts: Attempts {
                create: wire.creates,
                poll: wire.polls,
                throttled: wire.throttled,
                crashes: wire.crashes,
            },
            fresh_keys: wire.fresh_keys,
            owner: digest(&wire.owner, "the owner")?,
            payload: digest(&wire.payload, "the payload")?,
            claim,
            response_id: text(wire.response_id),
            reason: text(wire.reason),
            initial: optional_status(wire.initial)?,
            outcome: optional_status(wire.outcome)?,
            last: optional_status(wire.last)?,
        })
    }
}

fn digest(bytes: &Bytes, what: &str) -> Result<Digest, Malformed> {
    match <[u8; 16]>::try_from(bytes.as_ref()) {
        Ok(bytes) => Ok(Digest::from_bytes(bytes)),
        Err(_) => malformed(what),
    }
}

fn optional_status(number: u32) -> Result<Option<u16>, Malformed> {
    if number == 0 { Ok(None) } else { status(number).map(Some) }
}

fn status(number: u32) -> Result<u16, Malformed> {
    match u16::try_from(number) {
        Ok(status @ 100..=999) => Ok(status),
        Ok(_) | Err(_) => malformed("the status of an answer"),
    }
}

const fn state_to_wire(state: State) -> wire::State {
    match state {
        State::Accepted => wire::State::Accepted,
        State::Pending => wire::State::Pending,
        State::Completed => wire::State::Completed,
        State::Failed => wire::State::Failed,
        State::Stale => wire::State::Stale,
        State::Canceled => wire::State::Canceled,
        State::Moved => wire::State::Moved,
    }
}

const fn state_from_wire(state: wire::State) -> Option<State> {
    match state {
        wire::State::Unspecified => None,
        wire::State::Accepted => Some(State::Accepted),
        wire::State::Pending => Some(State::Pending),
        wire::State::Completed => Some(State::Completed),
        wire::State::Failed => Some(State::Failed),
        wire::State::Stale => Some(State::Stale),
        wire::State::Canceled => Some(State::Canceled),
        wire::State::Moved => Some(State::Moved),
    }
}

impl Request {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let client = match self.client {
            IpAddr::V4(ip) => Bytes::copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => Bytes::copy_from_slice(&ip.octets()),
        };
        let wire = wire::Request {
            method: self.method.clone(),
            target: self.target.clone(),
            fields: self.fields.iter().map(field_to_wire).collect(),
            body: self.body.clone(),
            client,
            vouched_for: self.vouched_for,
            key: self.key.clone().unwrap_or_default(),
        };
        wire.encode_to_vec()
    }

    /// The request with these bytes.
    ///
    /// # Errors
    /// If they are none.
    pub fn decode(bytes: Bytes) -> Result<Self, Malformed> {
        let wire = wire::Request::decode(bytes)?;
        let client = if let Ok(octets) = <[u8; 4]>::try_from(wire.client.as_ref()) {
            IpAddr::from(octets)
        } else if let Ok(octets) = <[u8; 16]>::try_from(wire.client.as_ref()) {
            IpAddr::from(octets)
        } else {
            return malformed("the client's address");
        };
        if wire.method.is_empty() || wire.target.is_empty() {
            return malformed("the method or target");
        }
        Ok(Self {
            method: wire.method,
            target: wire.target,
            fields: wire.fields.into_iter().map(field_from_wire).collect(),
            body: wire.body,
            client,
            vouched_for: wire.vouched_for,
            key: (!wire.key.is_empty()).then_some(wire.key),
        })
    }
}

impl Answer {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let wire = wire::Answer {
            status: u32::from(self.status),
            fields: self.fields.iter().map(field_to_wire).collect(),
            body: self.body.clone(),
        };
        wire.encode_to_vec()
    }

    /// The answer with these bytes.
    ///
    /// # Errors
    /// If they are none.
    pub fn decode(bytes: Bytes) -> Result<Self, Malformed> {
        let wire = wire::Answer::decode(bytes)?;
        let status = status(wire.status)?;
        let fields = wire.fields.into_iter().map(field_from_wire).collect();
        Ok(Self { status, fields, body: wire.body })
    }
}

fn field_to_wire(field: &Field) -> wire::Field {
    wire::Field { name: field.name.clone(), value: field.value.clone() }
}

fn field_from_wire(field: wire::Field) -> Field {
    Field { name: field.name, value: field.value }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deferred::testing;

    #[test]
    fn what_is_kept_reads_back() {
        for state in State::ALL {
            let mut record = testing::record(7);
            record.state = state;
            record.claim = (state != State::Moved).then_some(record.owner);
            record.reason = Some("why".to_owned());
            record.outcome = Some(999);
            assert_eq!(Record::decode(&record.encode()).unwrap(), record);
        }
        let mut request = testing::request("a body");
        for client in ["192.0.2.1", "2001:db8::1"] {
            request.client = client.parse().unwrap();
            request.key = (client.len() > 9).then(|| "k-1".to_owned());
            assert_eq!(Request::decode(request.encode().into()).unwrap(), request);
        }
        let answer = testing::answer(201, r#"{"id":"tr_1"}"#);
        assert_eq!(Answer::decode(answer.encode().into()).unwrap(), answer);
    }

    #[test]
    fn bytes_that_say_something_impossible_are_an_error() {
        assert!(Record::decode(&[]).is_err());
        assert!(Record::decode(b"\xff\xff").is_err());
        let change = |change: fn(&mut wire::Record)| {
            let mut wire = testing::record(7).to_wire();
            change(&mut wire);
            Record::from_wire(wire).unwrap_err().to_string()
        };
        assert!(change(|w| w.state = 0).contains("state"));
        assert!(change(|w| w.state = 99).contains("state"));
        assert!(change(|w| w.id = Bytes::from_static(b"x")).contains("id"));
        assert!(change(|w| w.owner = Bytes::new()).contains("owner"));
        assert!(change(|w| w.claim = Bytes::from_static(b"x")).contains("claim"));
        assert!(change(|w| w.upstream.clear()).contains("upstream"));
        assert!(change(|w| w.initial = 99).contains("status"));
        assert!(change(|w| w.last = 70_000).contains("status"));
        assert!(Request::decode(Bytes::new()).is_err());
        assert!(Answer::decode(Bytes::new()).is_err());
    }
}
