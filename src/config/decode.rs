//! From the tree to typed settings, with every problem at its place.
//!
//! serde stops at the first problem. So the value at fault is marked as broken
//! and passed over, and decoding starts again, until nothing is left to report.

use std::fmt;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::problem::{Place, Problem};
use super::suggest;
use super::tree::{Content, Node, join};

/// A file with more faults than this is not a configuration at all.
pub(super) const MAX_PROBLEMS: usize = 1000;

/// Decodes `node`; `None` if a problem left nothing to decode. Every problem is
/// added to `problems`.
pub(super) fn decode<'t, T: Deserialize<'t>>(
    node: &'t Node,
    problems: &mut Vec<Problem>,
) -> Option<T> {
    while !node.broken.get() && problems.len() < MAX_PROBLEMS {
        match T::deserialize(Value(node)) {
            Ok(value) => return Some(value),
            Err(error) => {
                let at = error.at.unwrap_or(node);
                at.broken.set(true);
                problems.extend(error.problem(node));
            }
        }
    }
    None
}

/// Reports fields of `node` that are not among `names`.
pub(super) fn refuse_unknown(node: &Node, names: &[&'static str], problems: &mut Vec<Problem>) {
    if let Content::Map(fields) = &node.content {
        for (name, value) in fields {
            if !names.contains(&name.as_str()) {
                value.broken.set(true);
                problems.push(Problem {
                    place: value.key_place,
                    ..value.problem(unknown(name, names))
                });
            }
        }
    }
}

fn unknown(name: &str, names: &[&str]) -> String {
    match suggest::nearest(name, names) {
        Some(nearest) => format!("unknown field; did you mean `{nearest}`?"),
        None => format!("unknown field; there are {}", suggest::list(names)),
    }
}

/// A problem on its way up to the value that it belongs to.
#[derive(Debug)]
struct DecodeError<'t> {
    at: Option<&'t Node>,
    /// Where, if not at the value itself.
    place: Option<Place>,
    /// A field that `at` lacks.
    missing: Option<&'static str>,
    message: String,
}

impl<'t> DecodeError<'t> {
    /// The innermost value wins.
    fn at(mut self, node: &'t Node) -> Self {
        self.at.get_or_insert(node);
        self
    }

    /// `None` if it only follows from a problem that is known already.
    fn problem(self, top: &Node) -> Option<Problem> {
        let node = self.at.unwrap_or(top);
        let mut problem = node.problem(self.message);
        if let Some(field) = self.missing {
            if node.field(field).is_some() {
                return None;
            }
            problem.path = join(&problem.path, field);
        }
        problem.place = self.place.or(problem.place);
        Some(problem)
    }
}

impl fmt::Display for DecodeError<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for DecodeError<'_> {}

impl de::Error for DecodeError<'_> {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self { at: None, place: None, missing: None, message: message.to_string() }
    }

    fn invalid_type(unexpected: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        let found = if let de::Unexpected::Str(text) = unexpected {
            format!("`{text}`")
        } else if matches!(unexpected, de::Unexpected::Unit | de::Unexpected::Option) {
            "nothing".to_owned()
        } else if unexpected == de::Unexpected::Seq {
            "a list".to_owned()
        } else if unexpected == de::Unexpected::Map {
            "a map".to_owned()
        } else {
            unexpected.to_string()
        };
        // serde's own words for what a struct or list is written as.
        let expected = match expected.to_string() {
            text if text.starts_with("struct ") => "a map".to_owned(),
            text if text == "a sequence" => "a list".to_owned(),
            text if text == "a boolean" => "true or false".to_owned(),
            text => text,
        };
        Self::custom(format!("expected {expected}, found {found}"))
    }

    fn missing_field(field: &'static str) -> Self {
        Self { missing: Some(field), ..Self::custom("is required") }
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Self::custom(unknown(field, expected))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        let hint = match suggest::nearest(variant, expected) {
            Some(nearest) => format!("did you mean `{nearest}`?"),
            None => format!("write {}", suggest::list(expected)),
        };
        Self::custom(format!("`{variant}` is not one of the choices; {hint}"))
    }
}

/// Reads one value. The type that is read decides what a scalar means, so that
/// `42` can be a name and `${BURST}` a number.
struct Value<'t>(&'t Node);

impl<'t> Deserializer<'t> for Value<'t> {
    type Error = DecodeError<'t>;

    fn deserialize_any<V: Visitor<'t>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        let result = match &self.0.content {
            Content::Null => visitor.visit_unit(),
            Content::Scalar(text) => visitor.visit_borrowed_str(text),
            Content::List(_) => {
                visitor.visit_seq(Elements(self.0.elements().collect::<Vec<_>>().into_iter()))
            }
            Content::Map(fields) => visitor.visit_map(Fields { rest: fields.iter(), value: None }),
        };
        result.map_err(|error| error.at(self.0))
    }

    fn deserialize_bool<V: Visitor<'t>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match &self.0.content {
            Content::Scalar(text) if text == "true" => visitor.visit_bool(true),
            Content::Scalar(text) if text == "false" => visitor.visit_bool(false),
            Content::Scalar(_) | Content::Null | Content::List(_) | Content::Map(_) => {
                self.deserialize_any(visitor)
            }
        }
    }

    fn deserialize_option<V: Visitor<'t>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match &self.0.content {
            Content::Null => visitor.visit_none(),
            Content::Scalar(_) | Content::List(_) | Content::Map(_) => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'t>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'t>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        let node = self.0;
        let result = match &node.content {
            Content::Scalar(text) => visitor.visit_enum(text.as_str().into_deserializer()),
            Content::Null | Content::List(_) | Content::Map(_) => {
                return self.deserialize_any(visitor);
            }
        };
        result.map_err(|error: Self::Error| error.at(node))
    }

    /// An empty section is one in which everything has its default.
    fn deserialize_struct<V: Visitor<'t>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        match &self.0.content {
            Content::Null => visitor
                .visit_map(Fields { rest: [].iter(), value: None })
                .map_err(|error| error.at(self.0)),
            // Derived code would take a list for the fields in their order.
            Content::List(_) => {
                let error: Self::Error = de::Error::invalid_type(de::Unexpected::Seq, &visitor);
                Err(error.at(self.0))
            }
            Content::Scalar(_) | Content::Map(_) => self.deserialize_any(visitor),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'t>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        <V: Visitor<'t>>
        i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier
    }
}

struct Elements<'t>(std::vec::IntoIter<&'t Node>);

impl<'t> de::SeqAccess<'t> for Elements<'t> {
    type Error = DecodeError<'t>;

    fn next_element_seed<T: DeserializeSeed<'t>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Self::Error> {
        self.0
            .next()
            .map(|node| seed.deserialize(Value(node)).map_err(|error| error.at(node)))
            .transpose()
    }
}

struct Fields<'t> {
    rest: std::slice::Iter<'t, (String, Node)>,
    value: Option<&'t Node>,
}

impl<'t> de::MapAccess<'t> for Fields<'t> {
    type Error = DecodeError<'t>;

    fn next_key_seed<K: DeserializeSeed<'t>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Self::Error> {
        let Some((key, node)) = self.rest.find(|(_, node)| !node.broken.get()) else {
            return Ok(None);
        };
        self.value = Some(node);
        let key = de::value::BorrowedStrDeserializer::new(key);
        seed.deserialize(key).map(Some).map_err(|mut error: Self::Error| {
            error.place = node.key_place;
            error.at(node)
        })
    }

    fn next_value_seed<V: DeserializeSeed<'t>>(
        &mut self,
        seed: V,
    ) -> Result<V::Value, Self::Error> {
        match self.value.take() {
            Some(node) => seed.deserialize(Value(node)).map_err(|error| error.at(node)),
            None => Err(de::Error::custom("a value was read before its key")),
        }
    }
}
