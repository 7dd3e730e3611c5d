//! The token that calls must carry, from a file that may change.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use arc_swap::ArcSwap;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use tonic::Status;

/// Fewest and most characters of a token.
const LENGTH: std::ops::RangeInclusive<usize> = 16..=4096;

/// What calls must carry as `authorization: Bearer TOKEN`. Only its hash is kept;
/// hashes are compared in constant time.
#[derive(Debug)]
pub(super) struct Token {
    path: PathBuf,
    hash: ArcSwap<blake3::Hash>,
}

/// A file that has no token, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("token file {}: {reason}", path.display())]
pub struct TokenError {
    path: PathBuf,
    reason: String,
}

impl Token {
    /// Reads the file.
    ///
    /// # Errors
    /// If it has no token.
    pub(super) fn load(path: &Path) -> Result<Self, TokenError> {
        let hash = ArcSwap::from_pointee(read(path)?);
        Ok(Self { path: path.to_owned(), hash })
    }

    /// Reads the file again; whether it has another token, which counts from now on.
    ///
    /// # Errors
    /// If it has none; the old one stays.
    pub(super) fn refresh(&self) -> Result<bool, TokenError> {
        let hash = read(&self.path)?;
        let is_new = hash != **self.hash.load();
        if is_new {
            self.hash.store(hash.into());
        }
        Ok(is_new)
    }

    /// Whether a call may be answered.
    ///
    /// # Errors
    /// UNAUTHENTICATED without the token.
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<(), Status> {
        let Some(value) = headers.get(AUTHORIZATION) else {
            return Err(Status::unauthenticated(
                "a token is needed: `authorization: Bearer TOKEN`",
            ));
        };
        let given = value.as_bytes().split_at_checked(7);
        let given = given.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "));
        match given {
            Some((_, token)) if blake3::hash(token.trim_ascii()) == **self.hash.load() => Ok(()),
            Some(_) => Err(Status::unauthenticated("the token is another one")),
            None => Err(Status::unauthenticated("the authorization is not `Bearer TOKEN`")),
        }
    }
}

/// The token of a file, without the white space around it.
///
/// # Errors
/// If it has none.
pub fn token(path: &Path) -> Result<String, TokenError> {
    let fault = |reason: String| TokenError { path: path.to_owned(), reason };
    let mut bytes = Vec::new();
    fs::File::open(path)
        .and_then(|file| file.take(2 * *LENGTH.end() as u64).read_to_end(&mut bytes))
        .map_err(|error| fault(error.to_string()))?;
    let token = bytes.trim_ascii();
    if !LENGTH.contains(&token.len()) {
        let (least, most) = (LENGTH.start(), LENGTH.end());
        return Err(fault(format!("{} characters, not {least} to {most}", token.len())));
    }
    match String::from_utf8(token.to_vec()) {
        Ok(token) if token.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(token),
        Ok(_) | Err(_) => Err(fault("a token is one word of visible ASCII".to_owned())),
    }
}

fn read(path: &Path) -> Result<blake3::Hash, TokenError> {
    token(path).map(|token| blake3::hash(token.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_long_word_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let reason = |content: &[u8]| {
            fs::write(&path, content).unwrap();
            token(&path).map_err(|fault| fault.reason)
        };
        assert_eq!(reason(b" 0123456789abcdef\r\n").unwrap(), "0123456789abcdef");
        assert!(reason(b"0123456789abcde\n").unwrap_err().contains("15 characters, not 16 to"));
        assert!(reason(&[b'a'; 5000]).unwrap_err().contains("5000 characters"));
        for text in [&b"0123456789 abcdef"[..], b"0123456789abcde\xff", b"0123456789abcde\n0"] {
            assert!(reason(text).unwrap_err().contains("one word"), "{text:?}");
        }
        let fault = token(&dir.path().join("none")).unwrap_err().to_string();
        assert!(fault.starts_with("token file /") && fault.contains("none: "), "{fault}");
    }

    #[test]
    fn a_file_without_a_token_leaves_the_old_one_in_force() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        let token = Token::load(&path).unwrap();
        let opens = |word: &str| {
            let value = format!("Bearer {word}").parse().unwrap();
            token.check(&[(AUTHORIZATION, value)].into_iter().collect()).is_ok()
        };
        assert_eq!(token.refresh(), Ok(false));
        fs::write(&path, "short").unwrap();
        assert!(token.refresh().is_err() && token.refresh().is_err());
        assert!(opens("0123456789abcdef"));
        fs::write(&path, "fedcba9876543210").unwrap();
        assert_eq!((token.refresh(), token.refresh()), (Ok(true), Ok(false)));
        assert!(opens("fedcba9876543210") && !opens("0123456789abcdef"));
    }

    #[test]
    fn only_the_token_opens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        let token = Token::load(&path).unwrap();
        let check = |value: Option<&str>| {
            let headers = value.map(|value| (AUTHORIZATION, value.parse().unwrap()));
            token.check(&headers.into_iter().collect()).map_err(|status| status.code())
        };
        for good in ["Bearer 0123456789abcdef", "bearer  0123456789abcdef"] {
            assert_eq!(check(Some(good)), Ok(()), "{good}");
        }
        for bad in ["Bearer 0123456789abcdee", "Bearer ", "Bearer", "0123456789abcdef", "Basic a"] {
            assert_eq!(check(Some(bad)), Err(tonic::Code::Unauthenticated), "{bad}");
        }
        assert_eq!(check(None), Err(tonic::Code::Unauthenticated));
    }
}
