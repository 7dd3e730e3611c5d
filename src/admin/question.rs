//! What operators name in their questions, and what is wrong with it: NOT_FOUND
//! for a limit or bucket that does not exist, INVALID_ARGUMENT with the field in
//! front for what cannot be read.

use std::time::Duration;

use tonic::Status;

use super::cluster::Stopped;
use super::convert;
use crate::limiter::{BucketId, KeyBuf, KeyTextError, Limit, LimitIndex, LimitSet};
use crate::wire::tidegate::admin::v1 as pb;

/// A bucket as a question names it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Named<'a> {
    /// By the values of its key.
    Key(&'a pb::Key),
    /// By its identity.
    Id(&'a str),
}

/// The limit called `name`; `None` for the empty name, which means all.
pub(super) fn limit_or_all(
    limits: &LimitSet,
    name: &str,
) -> Result<Option<(LimitIndex, String)>, Status> {
    if name.is_empty() {
        return Ok(None);
    }
    find(limits, name).map(|(index, limit)| Some((index, limit.name().to_owned())))
}

/// The limit called `name`.
pub(super) fn find<'a>(
    limits: &'a LimitSet,
    name: &str,
) -> Result<(LimitIndex, &'a Limit), Status> {
    limits.find(name).ok_or_else(|| Status::not_found(format!("there is no limit `{name}`")))
}

/// The bucket that a question names, and its limit if the question names one.
pub(super) fn bucket(
    limit: &str,
    named: Option<Named<'_>>,
    limits: &LimitSet,
    ipv6_prefix: u8,
) -> Result<(BucketId, Option<LimitIndex>), Status> {
    match named {
        None => Err(invalid("bucket", "either a `key` or an `id` is needed")),
        Some(Named::Id(id)) => {
            let limit = if limit.is_empty() { None } else { Some(find(limits, limit)?.0) };
            let id = convert::bucket_id(id)
                .ok_or_else(|| invalid("id", "32 hexadecimal digits are needed"))?;
            Ok((id, limit))
        }
        Some(Named::Key(key)) => {
            if limit.is_empty() {
                return Err(invalid("limit", "a key needs the name of its limit"));
            }
            let (index, limit) = find(limits, limit)?;
            let key = canonical(key, limit, ipv6_prefix)?;
            Ok((limit.bucket_id(key.as_bytes()), Some(index)))
        }
    }
}

/// The canonical key for values in a question.
pub(super) fn canonical(key: &pb::Key, limit: &Limit, ipv6_prefix: u8) -> Result<KeyBuf, Status> {
    let mut values = Vec::with_capacity(key.parts.len());
    for (index, part) in key.parts.iter().enumerate() {
        values.push(match &part.value {
            Some(pb::key_value::Value::Text(text)) => Some(text.as_str()),
            Some(pb::key_value::Value::Missing(true)) => None,
            Some(pb::key_value::Value::Missing(false)) | None => {
                let field = format!("key.parts[{index}]");
                return Err(invalid(&field, "either a `text` or `missing: true` is needed"));
            }
        });
    }
    limit.rule().key_from_parts(&values, ipv6_prefix).map_err(|error| match &error {
        KeyTextError::Count { .. } => {
            let parts = limit.rule().parts_text();
            let parts = if parts.is_empty() { "no parts" } else { &parts };
            invalid("key.parts", &format!("{error}; limit `{}` has {parts}", limit.name()))
        }
        KeyTextError::Empty(_) | KeyTextError::Address(_) => {
            invalid("key.parts", &error.to_string())
        }
    })
}

/// A number of things of which `most` may be asked for; 0 asks for `usual`.
pub(super) fn count(field: &str, asked: u32, usual: usize, most: usize) -> Result<usize, Status> {
    match asked as usize {
        0 => Ok(usual),
        count if count > most => Err(invalid(field, &format!("{most} at most"))),
        count => Ok(count),
    }
}

/// What buckets are to be ranked by.
pub(super) fn ranking(by: i32) -> Result<pb::Ranking, Status> {
    match pb::Ranking::try_from(by) {
        Ok(pb::Ranking::Unspecified | pb::Ranking::Refused) => Ok(pb::Ranking::Refused),
        Ok(pb::Ranking::Spent) => Ok(pb::Ranking::Spent),
        Err(_) => Err(invalid("by", "RANKING_REFUSED or RANKING_SPENT is needed")),
    }
}

/// A time between messages, from `least` to an hour.
pub(super) fn interval(
    asked: Option<prost_types::Duration>,
    least: Duration,
) -> Result<Duration, Status> {
    const MOST: Duration = Duration::from_secs(3600);
    let Some(asked) = asked else { return Ok(Duration::from_secs(1)) };
    let asked = Duration::try_from(asked).ok().filter(|asked| (least..=MOST).contains(asked));
    asked.ok_or_else(|| {
        let least = humantime::format_duration(least);
        invalid("interval", &format!("a time from {least} to 1h is needed"))
    })
}

/// No such bucket.
pub(super) fn no_bucket(id: BucketId, limit: Option<&Limit>) -> Status {
    let of = limit.map_or_else(String::new, |limit| format!(" of limit `{}`", limit.name()));
    let full = limit.map_or_else(String::new, |limit| {
        format!(" ({} of {} tokens)", limit.quota(id).burst(), limit.quota(id).burst())
    });
    Status::not_found(format!(
        "there is no bucket {id}{of} here: the key was not used lately, so its bucket is full{full}"
    ))
}

pub(super) fn invalid(field: &str, reason: &str) -> Status {
    Status::invalid_argument(format!("{field}: {reason}"))
}

pub(super) fn stopped(error: Stopped) -> Status {
    Status::unavailable(error.to_string())
}
