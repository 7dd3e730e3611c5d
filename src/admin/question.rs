//! What operators name in their questions, and what is wrong with it: NOT_FOUND
//! for a limit or bucket that does not exist, INVALID_ARGUMENT with the field in
//! front for what cannot be read.

use std::time::Duration;

use tonic::Status;

use super::cluster::Stopped;
use super::convert;
use crate::limiter::{BucketId, KeyBuf, KeyTextError, Limit, LimitIndex, LimitSet, PauseOrder};
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

/// Buckets as a question chooses them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Chosen<'a> {
    /// One.
    One(Named<'a>),
    /// All of the limit; must be true.
    All(bool),
}

/// Buckets of a limit in force.
#[allow(clippy::large_enum_variant, reason = "lives for one question")]
#[derive(Clone, Debug)]
pub(super) enum Target {
    /// All.
    Limit(LimitIndex),
    /// One, and its canonical key if the question names it so.
    Bucket(LimitIndex, BucketId, Option<KeyBuf>),
}

/// The buckets that a question chooses. `known` is the limit of a bucket in memory.
pub(super) fn chosen(
    limit: &str,
    chosen: Option<Chosen<'_>>,
    limits: &LimitSet,
    ipv6_prefix: u8,
    known: impl Fn(BucketId) -> Option<LimitIndex>,
) -> Result<Target, Status> {
    let named = || {
        if limit.is_empty() {
            return Err(invalid("limit", "the name of a limit is needed"));
        }
        find(limits, limit)
    };
    match chosen {
        None => Err(invalid("bucket", "a `key`, an `id` or `all: true` is needed")),
        Some(Chosen::All(false)) => Err(invalid("all", "it must be true")),
        Some(Chosen::All(true)) => Ok(Target::Limit(named()?.0)),
        Some(Chosen::One(Named::Key(key))) => {
            let (index, limit) = named()?;
            let key = canonical(key, limit, ipv6_prefix)?;
            Ok(Target::Bucket(index, limit.bucket_id(key.as_bytes()), Some(key)))
        }
        Some(Chosen::One(id @ Named::Id(_))) => {
            let (id, index) = bucket(limit, Some(id), limits, ipv6_prefix)?;
            match (index, known(id)) {
                (Some(index), None) => Ok(Target::Bucket(index, id, None)),
                (index, Some(known)) if index.is_none_or(|index| index == known) => {
                    Ok(Target::Bucket(known, id, None))
                }
                (index, _) => Err(no_bucket(id, index.and_then(|index| limits.get(index)))),
            }
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

/// For how long something is to be closed.
pub(super) fn pause(asked: Option<prost_types::Duration>) -> Result<Duration, Status> {
    let asked = asked.and_then(|asked| Duration::try_from(asked).ok());
    asked.filter(|time| !time.is_zero() && *time <= PauseOrder::LONGEST).ok_or_else(|| {
        let most = humantime::format_duration(PauseOrder::LONGEST);
        invalid("pause_for", &format!("a time above zero and up to {most} is needed"))
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
