//! A setting that may be `none`.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{self, Deserialize, Deserializer, IntoDeserializer as _, Visitor};
use serde::ser::{Serialize, Serializer};

/// A value, or `none`, or nothing, which says the same.
#[derive(Debug)]
pub struct OrNone<T>(PhantomData<T>);

impl<T> OrNone<T> {
    /// Reads a value, `None` for `none`.
    ///
    /// # Errors
    /// If it is neither.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: Deserialize<'de>,
    {
        struct Either<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = Option<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value or `none`")
            }

            fn visit_unit<E>(self) -> Result<Option<T>, E> {
                Ok(None)
            }

            fn visit_none<E>(self) -> Result<Option<T>, E> {
                Ok(None)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Option<T>, E> {
                if text == "none" {
                    return Ok(None);
                }
                T::deserialize(text.into_deserializer()).map(Some)
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, list: A) -> Result<Option<T>, A::Error> {
                T::deserialize(SeqAccessDeserializer::new(list)).map(Some)
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Option<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Some)
            }
        }
        deserializer.deserialize_any(Either(PhantomData))
    }

    /// Writes the value as this notation reads it.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(value: &Option<T>, to: S) -> Result<S::Ok, S::Error>
    where
        T: Serialize,
    {
        match value {
            Some(value) => value.serialize(to),
            None => to.serialize_str("none"),
        }
    }
}

impl<T: JsonSchema> JsonSchema for OrNone<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("{}OrNone", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "anyOf": [generator.subschema_for::<T>(), { "enum": ["none", null] }],
        })
    }
}
