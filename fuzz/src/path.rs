//! Paths as rules see them.

use std::borrow::Cow;

use tidegate::limiter::{PathPattern, normalise};

/// Normalises a path, and reads it as a pattern.
pub fn run(data: &[u8]) {
    let normal = normalise(data);
    assert_eq!(normal.first(), Some(&b'/'));
    let inner = normal.strip_suffix(b"/").unwrap_or(&normal);
    for segment in inner.split(|byte| *byte == b'/').skip(1) {
        assert!(!matches!(segment, b"" | b"." | b".."), "{normal:?}");
    }
    // Escapes are decoded exactly once, so it is the escaped form that comes out
    // as itself again; and any path without escapes.
    assert_eq!(normalise(&escape(&normal)), normal);
    if !normal.iter().any(|byte| matches!(byte, b'%' | b'?' | b'#')) {
        assert!(matches!(normalise(&normal), Cow::Borrowed(again) if again == &*normal));
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(pattern) = PathPattern::try_new(text) else { return };
    assert!(pattern.matches(&normal), "{text:?} does not match itself");
    let shown = pattern.to_string();
    assert_eq!(
        PathPattern::try_new(&shown).as_ref(),
        Ok(&pattern),
        "{text:?} is shown as {shown:?}"
    );
}

/// Every byte as an escape, except slashes.
fn escape(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(3 * path.len());
    for byte in path {
        match byte {
            b'/' => out.push(b'/'),
            byte => out.extend_from_slice(format!("%{byte:02X}").as_bytes()),
        }
    }
    out
}
