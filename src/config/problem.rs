//! What is wrong with a configuration, and where.

use std::borrow::Cow;
use std::fmt;

/// A place in a file, both counted from 1; columns count characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The line.
    pub line: usize,
    /// The column.
    pub column: usize,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where in the file; `None` if it has no place there.
    pub place: Option<Place>,
    /// The setting, such as `limits[2].rate`; empty for the file as a whole.
    pub path: String,
    /// What is wrong with it.
    pub message: String,
}

/// A configuration that cannot be used. Nothing of it takes effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// The file's name, or `command line`.
    pub name: String,
    /// Everything that is wrong, in the order of the file.
    pub problems: Vec<Problem>,
}

impl LoadError {
    pub(super) fn new(name: &str, mut problems: Vec<Problem>) -> Self {
        problems.sort_by_key(|problem| problem.place);
        Self { name: name.to_owned(), problems }
    }
}

impl fmt::Display for LoadError {
    /// One line for each problem: `FILE:LINE:COLUMN: path.to.field: message`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            f.write_str(&self.name)?;
            if let Some(place) = problem.place {
                write!(f, ":{}:{}", place.line, place.column)?;
            }
            if !problem.path.is_empty() {
                write!(f, ": {}", printable(&problem.path))?;
            }
            write!(f, ": {}", printable(&problem.message))?;
        }
        Ok(())
    }
}

impl std::error::Error for LoadError {}

/// Keeps what is quoted from the file on its line, and off the terminal's
/// controls.
fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return text.into();
    }
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    text.chars().map(escape).collect()
}
