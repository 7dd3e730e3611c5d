//! Who may call: whoever has the token, or a certificate.

use http::HeaderMap;
use tonic::Status;

use super::token::Token;

/// What a call must have. Nothing, if there is neither.
#[derive(Debug, Default)]
pub(super) struct Guard {
    /// The token is enough.
    pub(super) token: Option<Token>,
    /// So is a certificate of a client that was accepted.
    pub(super) certificates: bool,
}

impl Guard {
    /// Whether a call may be answered; `certified` says whether it came over a connection
    /// whose client showed a certificate.
    ///
    /// # Errors
    /// UNAUTHENTICATED if not.
    pub(super) fn check(
        &self,
        headers: &HeaderMap,
        certified: impl FnOnce() -> bool,
    ) -> Result<(), Status> {
        if self.certificates && certified() {
            return Ok(());
        }
        match &self.token {
            Some(token) => token.check(headers),
            None if self.certificates => {
                Err(Status::unauthenticated("a client's certificate is needed"))
            }
            None => Ok(()),
        }
    }
}
