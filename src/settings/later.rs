//! Settings whose time has not come: only the value that changes nothing is
//! accepted, so that nothing is accepted and ignored.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer, Visitor};
use serde::ser::Serializer;

/// What the error says about a setting whose time has not come.
pub const NOT_SUPPORTED: &str = "not supported by this version";

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
        struct Nothing;
        impl<'de> Visitor<'de> for Nothing {
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
        deserializer.deserialize_any(Nothing).map(|()| None)
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
