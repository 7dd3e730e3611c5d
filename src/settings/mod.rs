//! Settings (layer 0): how values are written in a configuration file, and
//! where in it a problem is.
//!
//! Each `...Text` type stands for a notation: serde reads a field through it
//! (`#[serde(with = "...")]`), schemars describes the field by it. A value that
//! a setting cannot take is refused while it is read, so that the error has the
//! value's place in the file.

use std::fmt;

use serde::de::{Deserializer, Visitor};

mod later;
mod notation;
mod optional;

pub use later::NOT_SUPPORTED;
pub use notation::{
    DurationOrZeroText, DurationText, MAX_DURATION, NameText, NetworkText, Networks, OnOff,
    SizeOrNoneText, SizeText, Whole,
};

pub use optional::OrNone;

/// One step from the top of the configuration to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathSegment {
    /// The field of this name.
    Field(&'static str),
    /// The list element of this index, from 0.
    Index(usize),
}

impl From<&'static str> for PathSegment {
    fn from(field: &'static str) -> Self {
        Self::Field(field)
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
    /// Other fields of the checked settings without which this cannot be judged:
    /// where one of them is at fault itself, this is not worth reporting.
    pub given: &'static [&'static str],
}

impl Fault {
    /// A fault of the value at `path`.
    pub fn new(path: impl IntoIterator<Item = PathSegment>, message: impl Into<String>) -> Self {
        Self { path: path.into_iter().collect(), message: message.into(), given: &[] }
    }

    /// The same fault, which presumes that these fields are sound.
    #[must_use]
    pub const fn given(mut self, fields: &'static [&'static str]) -> Self {
        self.given = fields;
        self
    }
}

/// Reads one value as text, whatever the file's own idea of its type; `expected`
/// completes "expected ..." for a list or a map in its place.
///
/// # Errors
/// If there is no value, or not a single one.
pub fn text<'de, D: Deserializer<'de>>(
    deserializer: D,
    expected: &'static str,
) -> Result<String, D::Error> {
    struct Text(&'static str);
    impl Visitor<'_> for Text {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_str<E>(self, text: &str) -> Result<String, E> {
            Ok(text.to_owned())
        }

        fn visit_bool<E>(self, value: bool) -> Result<String, E> {
            Ok(value.to_string())
        }

        fn visit_u64<E>(self, value: u64) -> Result<String, E> {
            Ok(value.to_string())
        }

        fn visit_i64<E>(self, value: i64) -> Result<String, E> {
            Ok(value.to_string())
        }

        fn visit_f64<E>(self, value: f64) -> Result<String, E> {
            Ok(value.to_string())
        }
    }
    deserializer.deserialize_str(Text(expected))
}
