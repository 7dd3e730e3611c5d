//! Settings (layer 0): how values are written in a configuration file, and
//! where in it a problem is.
//!
//! Each `...Text` type stands for a notation: serde reads a field through it
//! (`#[serde(with = "...")]`), schemars describes the field by it. A value that
//! a setting cannot take is refused while it is read, so that the error has the
//! value's place in the file.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, Unexpected, Visitor};
use serde::ser::Serializer;

/// One step from the top of the configuration to a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathSegment {
    /// The field of this name.
    Field(Cow<'static, str>),
    /// The list element of this index, from 0.
    Index(usize),
}

impl From<&'static str> for PathSegment {
    fn from(field: &'static str) -> Self {
        Self::Field(Cow::Borrowed(field))
    }
}

impl From<usize> for PathSegment {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}

/// A fault of settings that can each be read but do not go together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// From the settings that were checked to the value at fault.
    pub path: Vec<PathSegment>,
    /// What is wrong with it.
    pub message: String,
}

impl Fault {
    /// A fault of the value at `path`.
    pub fn new(path: impl IntoIterator<Item = PathSegment>, message: impl Into<String>) -> Self {
        Self { path: path.into_iter().collect(), message: message.into() }
    }

    /// The same fault, seen from `parent`.
    #[must_use]
    pub fn under(mut self, parent: impl IntoIterator<Item = PathSegment>) -> Self {
        self.path.splice(0..0, parent);
        self
    }
}

/// What the error says about a setting whose time has not come.
pub const NOT_SUPPORTED: &str = "not supported by this version";

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
        let text = String::deserialize(deserializer)?;
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
        Self::parse(&String::deserialize(deserializer)?)
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
        match String::deserialize(deserializer)?.as_str() {
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
        let text = String::deserialize(deserializer)?;
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
        match String::deserialize(deserializer)?.as_str() {
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

impl<'de> Deserialize<'de> for NetworkText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
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

/// A value for a setting of a later version. There is none, so a field of type
/// `Option<Unsupported>` is always `None`, and the file may only say `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsupported {}

impl Unsupported {
    /// Reads `none` or nothing.
    ///
    /// # Errors
    /// If the setting is set.
    pub fn deserialize<'de, D: Deserializer<'de>, T>(
        deserializer: D,
    ) -> Result<Option<T>, D::Error> {
        struct None_;
        impl<'de> Visitor<'de> for None_ {
            type Value = ();

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`none`")
            }

            fn visit_unit<E>(self) -> Result<(), E> {
                Ok(())
            }

            fn visit_none<E>(self) -> Result<(), E> {
                Ok(())
            }

            fn visit_bool<E: de::Error>(self, on: bool) -> Result<(), E> {
                if on { Err(E::custom(NOT_SUPPORTED)) } else { Ok(()) }
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<(), E> {
                if text == "none" { Ok(()) } else { Err(E::custom(NOT_SUPPORTED)) }
            }

            fn visit_u64<E: de::Error>(self, _: u64) -> Result<(), E> {
                Err(E::custom(NOT_SUPPORTED))
            }

            fn visit_i64<E: de::Error>(self, _: i64) -> Result<(), E> {
                Err(E::custom(NOT_SUPPORTED))
            }

            fn visit_f64<E: de::Error>(self, _: f64) -> Result<(), E> {
                Err(E::custom(NOT_SUPPORTED))
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, _: A) -> Result<(), A::Error> {
                Err(de::Error::custom(NOT_SUPPORTED))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, _: A) -> Result<(), A::Error> {
                Err(de::Error::custom(NOT_SUPPORTED))
            }
        }
        deserializer.deserialize_any(None_).map(|()| None)
    }

    /// Writes the value as this notation reads it.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer, T>(_: &Option<T>, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str("none")
    }
}

impl JsonSchema for Unsupported {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Unsupported".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "enum": ["none", null] })
    }
}

/// A switch for a feature of a later version: always off.
#[derive(Debug)]
pub enum OffOnly {}

impl OffOnly {
    /// Reads `false`.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
        if bool::deserialize(deserializer)? {
            return Err(de::Error::custom(NOT_SUPPORTED));
        }
        Ok(false)
    }

    /// Writes the value as this notation reads it.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(on: &bool, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bool(*on)
    }
}

impl JsonSchema for OffOnly {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "OffOnly".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "const": false })
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
        let text = String::deserialize(deserializer)?;
        if Self::is_valid(&text) {
            return Ok(text);
        }
        Err(de::Error::invalid_value(
            Unexpected::Str(&text),
            &"a name of 1 to 64 letters, digits, `.`, `_` and `-`",
        ))
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
