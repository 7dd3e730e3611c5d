//! Path normalisation and patterns (layer 1, pure).
//!
//! Rules look at a normalised copy of the path, so that `/x/../private`,
//! `//private` and `/pr%69vate` are the same place; the upstream still gets the
//! path as it was sent. Percent escapes are decoded exactly once and case is
//! kept, because servers differ on both and a second decoding would merge paths
//! that no server merges.

use std::borrow::Cow;
use std::fmt::{self, Write as _};

/// The path that rules match: query and fragment off, percent-decoded once
/// (`%2F` counts as a slash), dot segments resolved, repeated slashes merged.
/// A path of none of these is borrowed. Never empty: the root is `/`.
pub fn normalise(path: &[u8]) -> Cow<'_, [u8]> {
    let end = path.iter().position(|b| matches!(b, b'?' | b'#')).unwrap_or(path.len());
    let path = &path[..end];
    if is_normal(path) {
        return Cow::Borrowed(path);
    }
    let decoded: Cow<'_, [u8]> = percent_encoding::percent_decode(path).into();
    let mut out = Vec::with_capacity(decoded.len() + 1);
    let mut segments = decoded.split(|b| *b == b'/').peekable();
    while let Some(segment) = segments.next() {
        let last = segments.peek().is_none();
        match segment {
            b"" | b"." => {
                if last {
                    push_slash(&mut out);
                }
            }
            b".." => {
                let parent = out.iter().rposition(|b| *b == b'/').unwrap_or(0);
                out.truncate(parent);
                if last {
                    push_slash(&mut out);
                }
            }
            name => {
                out.push(b'/');
                out.extend_from_slice(name);
            }
        }
    }
    if out.is_empty() {
        out.push(b'/');
    }
    Cow::Owned(out)
}

fn push_slash(out: &mut Vec<u8>) {
    if out.last() != Some(&b'/') {
        out.push(b'/');
    }
}

/// Whether normalising would change nothing; the common case, without copying.
fn is_normal(path: &[u8]) -> bool {
    if path.first() != Some(&b'/') {
        return false;
    }
    let mut previous = 0;
    for (i, byte) in path.iter().enumerate() {
        let starts_dot_or_empty = match byte {
            b'%' => return false,
            b'/' => previous == b'/',
            // A segment that begins with a dot: `.`, `..` or a plain name.
            b'.' => {
                previous == b'/'
                    && matches!(path[i + 1..], [] | [b'/', ..] | [b'.'] | [b'.', b'/', ..])
            }
            _ => false,
        };
        if starts_dot_or_empty {
            return false;
        }
        previous = *byte;
    }
    true
}

/// A path that a rule names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathPattern {
    /// Without trailing slash; empty for the root.
    stem: Vec<u8>,
    prefix: bool,
}

/// Why a path pattern is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// It does not begin with a slash.
    #[error("`{0}` must begin with `/`")]
    Relative(String),
    /// It uses pattern characters, which are not supported.
    #[error(
        "`{0}`: `{1}` is not supported in a path; end it with `/` to match a prefix of whole segments"
    )]
    Wildcard(String, char),
    /// It has a query or fragment, which a path never has.
    #[error("`{0}`: a path has no query and no fragment")]
    Query(String),
}

impl PathPattern {
    /// A pattern: with a trailing slash a prefix of whole segments, without it
    /// exact but for one trailing slash.
    ///
    /// # Errors
    /// If it is relative, or contains `*`, `{`, `?` or `#`.
    pub fn try_new(text: &str) -> Result<Self, PathError> {
        if !text.starts_with('/') {
            return Err(PathError::Relative(text.to_owned()));
        }
        if let Some(c) = text.chars().find(|c| matches!(c, '*' | '{')) {
            return Err(PathError::Wildcard(text.to_owned(), c));
        }
        if text.contains(['?', '#']) {
            return Err(PathError::Query(text.to_owned()));
        }
        let normal = normalise(text.as_bytes());
        let (stem, prefix) = match normal.strip_suffix(b"/") {
            Some(stem) => (stem.to_vec(), true),
            None => (normal.to_vec(), false),
        };
        Ok(Self { stem, prefix })
    }

    /// What every path that matches begins with, before its end or a slash.
    pub(super) fn stem(&self) -> &[u8] {
        &self.stem
    }

    /// Whether the normalised `path` matches.
    pub fn matches(&self, path: &[u8]) -> bool {
        match path.strip_prefix(self.stem.as_slice()) {
            Some(b"" | b"/") => true,
            Some([b'/', ..]) => self.prefix,
            Some(_) | None => false,
        }
    }
}

impl fmt::Display for PathPattern {
    /// As it can be written in a configuration: what would mean something else there
    /// is escaped.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.stem.utf8_chunks() {
            for c in chunk.valid().chars() {
                if c.is_ascii_control() || matches!(c, '%' | '?' | '#' | '*' | '{') {
                    write!(f, "%{:02X}", u32::from(c))?;
                } else {
                    f.write_char(c)?;
                }
            }
            for byte in chunk.invalid() {
                write!(f, "%{byte:02X}")?;
            }
        }
        f.write_str(if self.prefix { "/" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn normal(path: &str) -> String {
        String::from_utf8(normalise(path.as_bytes()).into_owned()).unwrap()
    }

    #[test]
    fn se_g1_dot_segments_and_slashes_are_resolved() {
        for path in [
            "/private",
            "/x/../private",
            "/./private",
            "/x/%2e%2e/private",
            "/x/%2E./private",
            "//private",
            "/../../private",
            "/x//..//private",
            "/private?x=1",
            "/private#f",
            "/%2Fprivate",
            "private",
        ] {
            assert_eq!(normal(path), "/private", "{path}");
        }
        for path in ["/private/.", "/private/", "/private//", "/private/x/.."] {
            assert_eq!(normal(path), "/private/", "{path}");
        }
        assert_eq!(normal("/..hidden/.x/a..b/..."), "/..hidden/.x/a..b/...");
        assert_eq!(normal(""), "/");
        assert_eq!(normal("/.."), "/");
    }

    #[test]
    fn se_g2_escapes_are_decoded_once() {
        for path in ["/pr%69vate", "/%70rivate", "/%70%72ivate"] {
            assert_eq!(normal(path), "/private");
        }
        assert_eq!(normal("/%2570rivate"), "/%70rivate");
        assert_eq!(normal("/a%zz%"), "/a%zz%");
    }

    #[test]
    fn se_g3_an_exact_path_ignores_one_trailing_slash() {
        let login = PathPattern::try_new("/login").unwrap();
        for path in ["/login", "/login/", "/login?", "/login?x=1"] {
            assert!(login.matches(&normalise(path.as_bytes())), "{path}");
        }
        for path in ["/login/x", "/loginx", "/Login", "/"] {
            assert!(!login.matches(&normalise(path.as_bytes())), "{path}");
        }
    }

    #[test]
    fn a_trailing_slash_matches_whole_segments() {
        let api = PathPattern::try_new("/api/").unwrap();
        assert!(api.matches(b"/api") && api.matches(b"/api/") && api.matches(b"/api/x/y"));
        assert!(!api.matches(b"/apix") && !api.matches(b"/"));
        let root = PathPattern::try_new("/").unwrap();
        assert!(root.matches(b"/") && root.matches(b"/x"));
    }

    #[test]
    fn cf_g11_patterns_that_would_be_inert_are_refused() {
        for text in ["/a/*/c", "/a/{id}", "a/b", "", "/a?x=1", "/a#b"] {
            assert!(PathPattern::try_new(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_pattern_is_shown_as_it_can_be_written() {
        for (text, shown) in [
            ("/api//x/", "/api/x/"),
            ("/", "/"),
            ("/caf%C3%A9", "/caf\u{e9}"),
            ("/%2570rivate", "/%2570rivate"),
            ("/a%3Fb%23c%2Ad%7be", "/a%3Fb%23c%2Ad%7Be"),
            ("/%ff\t%0a", "/%FF%09%0A"),
        ] {
            let pattern = PathPattern::try_new(text).unwrap();
            assert_eq!(pattern.to_string(), shown);
            assert_eq!(PathPattern::try_new(shown).unwrap(), pattern);
        }
    }

    proptest! {
        /// What was normalised is either plain or still holds escapes that came
        /// from a doubly escaped path; segments are never empty or dots.
        #[test]
        fn normal_paths_have_no_dots_and_no_empty_segments(path in "[/.%2eEfF05a?#]{0,24}") {
            let normal = normalise(path.as_bytes());
            prop_assert_eq!(normal.first(), Some(&b'/'));
            let inner = normal.strip_suffix(b"/").unwrap_or(&normal);
            for segment in inner.split(|b| *b == b'/').skip(1) {
                prop_assert!(!matches!(segment, b"" | b"." | b".."), "{:?}", normal);
            }
        }

        /// The shortcut for plain paths agrees with the long way.
        #[test]
        fn the_shortcut_is_faithful(path in "/[/.a]{0,16}") {
            let long = normalise(format!("%2F{path}").as_bytes()).into_owned();
            prop_assert_eq!(normalise(path.as_bytes()).into_owned(), long);
        }
    }
}
