//! What is kept of a request while it is sent over HTTP/2, so that it can be sent once
//! more when the upstream says that it did nothing about it (RFC 9113 section 8.7).
//! That holds for every method, but only as long as nothing was taken from the body,
//! which is never kept.
//!
//! What held one request is used for others, so that keeping costs no allocation.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderName, HeaderValue, Method, Request, Uri, Version};
use http_body::{Body, Frame, SizeHint};

use super::body::{RequestBody, UploadFault};

/// How many unused places are kept, and with room for how many fields.
const MAX_UNUSED: usize = 64;
const MAX_FIELDS: usize = 32;

/// The places of one thread.
#[derive(Debug, Default)]
pub(super) struct Lender {
    unused: RefCell<Vec<Rc<Kept>>>,
}

/// A request that is being sent.
#[derive(Debug)]
pub(super) struct Loan<'a> {
    home: &'a Lender,
    kept: Rc<Kept>,
    method: Method,
    target: Option<PathAndQuery>,
}

/// The body of a request that is being sent. Who kept the request may take it back.
#[derive(Debug)]
pub(super) struct Lent(Rc<Kept>);

#[derive(Debug)]
struct Kept {
    body: RefCell<RequestBody>,
    fields: RefCell<Vec<(HeaderName, HeaderValue)>>,
}

impl Lender {
    /// Notes what `request` says, and returns it in the form in which it can be sent.
    pub(super) fn lend(&self, request: Request<RequestBody>) -> (Loan<'_>, Request<Lent>) {
        let (parts, body) = request.into_parts();
        let kept = self.unused.borrow_mut().pop().unwrap_or_else(|| Rc::new(Kept::empty()));
        kept.body.replace(body);
        let fields = parts.headers.iter().map(|(name, value)| (name.clone(), value.clone()));
        kept.fields.borrow_mut().extend(fields);
        let lent = Lent(Rc::clone(&kept));
        let (method, target) = (parts.method.clone(), parts.uri.path_and_query().cloned());
        (Loan { home: self, kept, method, target }, Request::from_parts(parts, lent))
    }
}

impl Loan<'_> {
    /// The same request, its target in origin form; `None` if something was taken from
    /// its body. The former one has no body any more, and this one cannot be had again.
    pub(super) fn call_in(&mut self) -> Option<Request<Lent>> {
        if self.kept.body.borrow().is_touched() {
            return None;
        }
        let kept = Rc::new(Kept::empty());
        kept.body.swap(&self.kept.body);
        let mut request = Request::new(Lent(Rc::clone(&kept)));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.target.take().map_or_else(Uri::default, Uri::from);
        *request.version_mut() = Version::HTTP_2;
        for (name, value) in self.kept.fields.borrow_mut().drain(..) {
            request.headers_mut().append(name, value);
        }
        self.kept = kept;
        Some(request)
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        // Otherwise the body is still being sent.
        if let Some(kept) = Rc::get_mut(&mut self.kept) {
            *kept = Kept { fields: std::mem::take(&mut kept.fields), ..Kept::empty() };
            kept.fields.get_mut().clear();
            let mut unused = self.home.unused.borrow_mut();
            if unused.len() < MAX_UNUSED && kept.fields.get_mut().capacity() <= MAX_FIELDS {
                unused.push(Rc::clone(&self.kept));
            }
        }
    }
}

impl Kept {
    fn empty() -> Self {
        Self { body: RefCell::new(RequestBody::empty()), fields: RefCell::default() }
    }
}

impl Body for Lent {
    type Data = Bytes;
    type Error = UploadFault;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadFault>>> {
        Pin::new(&mut *self.0.body.borrow_mut()).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.body.borrow().is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.body.borrow().size_hint()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // Nobody asks for more, so that nobody waits for the client.
        self.0.body.borrow().stop_waiting();
    }
}
