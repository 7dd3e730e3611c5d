//! Durations, sizes, numbers, switches, networks and names as text.

use std::borrow::Cow;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer};
use serde::ser::Serializer;

use super::text;

/// The longest duration that a setting may name.
pub const MAX_DURATION: Duration = Duration::from_secs(365 * 86_400);

/// A duration above zero, such as `1m 30s`; a number without a unit is refused.
#[derive(Debug)]
pub enum DurationText {}

impl DurationText {
    /// Reads the text of a duration from 1 ns to [`MAX_DURATION`].
    ///
    /// # Errors
    /// If it is not one.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let duration = DurationOrZeroText::deserialize(deserializer)?;
        if duration.is_zero() {
            return Err(de::Error::custom("must be longer than 0s"));
        }
        Ok(duration)
    }

    /// Writes the value as this notation reads it.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&humantime::format_duration(*value))
    }
}

impl JsonSchema for DurationText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        duration_schema(&["10s", "250ms", "1m 30s"])
    }
}

/// A duration that may be zero.
#[derive(Debug)]
pub enum DurationOrZeroText {}

impl DurationOrZeroText {
    /// Reads the text of a duration up to [`MAX_DURATION`].
    ///
    /// # Errors
    /// If it is not one.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let text = text(deserializer, "a duration such as 10s")?;
        let duration = humantime::parse_duration(&text).map_err(|_| {
            de::Error::custom(format!(
                "`{text}` is not a duration: write a number and a unit, such as 10s, 250ms or 1m"
            ))
        })?;
        if duration > MAX_DURATION {
            return Err(de::Error::custom(format!("`{text}` is longer than 365d")));
        }
        Ok(duration)
    }

    /// Writes the value as this notation reads it.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&humantime::format_duration(*value))
    }
}

impl JsonSchema for DurationOrZeroText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "DurationOrZero".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        duration_schema(&["5s", "0s", "1m 30s"])
    }
}

fn duration_schema(examples: &[&str]) -> Schema {
    json_schema!({
        "type": "string",
        "pattern": r"^\s*([0-9]+\s*[a-zA-Z]+\s*)+$|^0$",
        "examples": examples,
    })
}

/// A size in bytes from `MIN` to `MAX`, such as `64KiB`, `1MB` or `4096`.
#[derive(Debug)]
pub enum SizeText<const MIN: u64, const MAX: u64> {}

impl<const MIN: u64, const MAX: u64> SizeText<MIN, MAX> {
    /// Reads a size.
    ///
    /// # Errors
    /// If it is not one, or out of range.
    pub fn deserialize<'de, D: Deserializer<'de>, T: TryFrom<u64>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        Self::parse(&text(deserializer, "a size such as 64KiB")?)
    }

    fn parse<T: TryFrom<u64>, E: de::Error>(text: &str) -> Result<T, E> {
        let size: bytesize::ByteSize = text.parse().map_err(|_| {
            E::custom(format!("`{text}` is not a size: write bytes, such as 4096, 64KiB or 1MB"))
        })?;
        let bytes = size.as_u64();
        // A size beyond u64 is held at its end by the parser, so the end itself
        // is not taken for a size.
        T::try_from(bytes)
            .ok()
            .filter(|_| (MIN..=MAX).contains(&bytes) && bytes != u64::MAX)
            .ok_or_else(|| {
                let [min, max] =
                    [MIN, MAX].map(|n| bytesize::ByteSize(n).display().iec().to_string());
                E::custom(format!("`{text}` is not a size from {min} to {max}"))
            })
    }

    /// Writes the value as this notation reads it.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer, T: Copy + TryInto<u64>>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_u64((*value).try_into().unwrap_or(u64::MAX))
    }
}

const SIZE_PATTERN: &str = r"[0-9]+(\.[0-9]+)?\s*([kKmMgGtTpP]([iI]?[bB])?|[bB])?";

impl<const MIN: u64, const MAX: u64> JsonSchema for SizeText<MIN, MAX> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Size".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["string", "integer"],
            "pattern": format!("^{SIZE_PATTERN}$"),
            "minimum": MIN,
            "examples": ["64KiB", "1MiB", 65536],
        })
    }
}

/// A size in bytes, or `none` for no bound.
#[derive(Debug)]
pub enum SizeOrNoneText {}

impl SizeOrNoneText {
    /// Reads a size, `None` for `none`.
    ///
    /// # Errors
    /// If it is neither.
    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<u64>, D::Error> {
        match text(deserializer, "a size such as 10MiB, or `none`")?.as_str() {
            "none" => Ok(None),
            text => SizeText::<0, { u64::MAX }>::parse(text).map(Some),
        }
    }

    /// Writes the value as this notation reads it.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(value: &Option<u64>, to: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(bytes) => to.serialize_u64(*bytes),
            None => to.serialize_str("none"),
        }
    }
}

impl JsonSchema for SizeOrNoneText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "SizeOrNone".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["string", "integer"],
            "pattern": format!("^(none|{SIZE_PATTERN})$"),
            "minimum": 0,
            "examples": ["none", "10MiB"],
        })
    }
}

/// A whole number from `MIN` to `MAX`.
#[derive(Debug)]
pub enum Whole<const MIN: u64, const MAX: u64> {}

impl<const MIN: u64, const MAX: u64> Whole<MIN, MAX> {
    /// Reads a number.
    ///
    /// # Errors
    /// If it is not a whole number in range.
    pub fn deserialize<'de, D: Deserializer<'de>, T: TryFrom<u64>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        let text = text(deserializer, "a whole number")?;
        text.parse::<u64>()
            .ok()
            .filter(|n| (MIN..=MAX).contains(n))
            .and_then(|n| T::try_from(n).ok())
            .ok_or_else(|| {
                de::Error::custom(format!("`{text}` is not a whole number from {MIN} to {MAX}"))
            })
    }

    /// Writes the value as this notation reads it.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer, T: Copy + TryInto<u64>>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_u64((*value).try_into().unwrap_or(u64::MAX))
    }
}

impl<const MIN: u64, const MAX: u64> JsonSchema for Whole<MIN, MAX> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Whole".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "integer", "minimum": MIN, "maximum": MAX })
    }
}

/// `on` or `off`; also `true` or `false`, into which some tools turn them.
#[derive(Debug)]
pub enum OnOff {}

impl OnOff {
    /// Reads a switch.
    ///
    /// # Errors
    /// If it is neither on nor off.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
        match text(deserializer, "`on` or `off`")?.as_str() {
            "on" | "true" => Ok(true),
            "off" | "false" => Ok(false),
            text => Err(de::Error::custom(format!("`{text}` is neither `on` nor `off`"))),
        }
    }

    /// Writes the value as this notation reads it.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(on: &bool, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(if *on { "on" } else { "off" })
    }
}

impl JsonSchema for OnOff {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "OnOff".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "enum": ["on", "off", true, false] })
    }
}

/// A network such as `10.0.0.0/8`, or one address.
#[derive(Clone, Copy, Debug)]
pub struct NetworkText(IpNet);

impl NetworkText {
    /// The network, with all bits behind its prefix cleared.
    pub const fn network(self) -> IpNet {
        self.0
    }
}

impl<'de> Deserialize<'de> for NetworkText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = text(deserializer, "a network such as 10.0.0.0/8")?;
        text.parse()
            .or_else(|_| text.parse::<IpAddr>().map(IpNet::from))
            .map(|net: IpNet| Self(net.trunc()))
            .map_err(|_| {
                de::Error::custom(format!(
                    "`{text}` is not a network: write one such as 10.0.0.0/8 or fd00::/8"
                ))
            })
    }
}

impl JsonSchema for NetworkText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Network".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "pattern": r"^[0-9a-fA-F.:]+(/[0-9]{1,3})?$",
            "examples": ["10.0.0.0/8", "203.0.113.7", "fd00::/8"],
        })
    }
}

/// A list of networks.
#[derive(Debug)]
pub enum Networks {}

impl Networks {
    /// Reads a list of networks.
    ///
    /// # Errors
    /// If an element is not one.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<IpNet>, D::Error> {
        let list = Vec::<NetworkText>::deserialize(deserializer)?;
        Ok(list.into_iter().map(|net| net.0).collect())
    }

    /// Writes the value as this notation reads it.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(list: &[IpNet], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(list)
    }
}

impl JsonSchema for Networks {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Networks".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        Vec::<NetworkText>::json_schema(generator)
    }
}

/// A name of 1 to 64 letters, digits, `.`, `_` and `-`: safe in a metric label,
/// a structured field and a file name.
#[derive(Debug)]
pub enum NameText {}

impl NameText {
    /// Whether `text` is such a name.
    pub fn is_valid(text: &str) -> bool {
        (1..=64).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
    }

    /// Reads a name.
    ///
    /// # Errors
    /// If it is not one.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
        let text = text(deserializer, "a name")?;
        if Self::is_valid(&text) { Ok(text) } else { Err(de::Error::custom(Self::refusal(&text))) }
    }

    /// What is wrong with `text`.
    pub fn refusal(text: &str) -> String {
        format!("`{text}` is not a name of 1 to 64 letters, digits, `.`, `_` and `-`")
    }

    /// Writes the value as this notation reads it.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(name: &str, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(name)
    }
}

impl JsonSchema for NameText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Name".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$" })
    }
}
