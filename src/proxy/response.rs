//! Every answer that the proxy makes itself, and nothing else does.
//!
//! A person or program that speaks plain HTTP gets a problem document (RFC 9457);
//! a gRPC caller gets status 200 and a trailers-only answer with the code that
//! its library understands; HEAD gets no body. `Proxy-Status` (RFC 9209) says
//! that it was the proxy that spoke. Where there is no request to answer, because
//! what came is none or came too slowly, the answer is made here as bytes.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};

use super::fields::{Fields, LimitView, push_number};
use super::metrics::Outcome;
use super::request::is_grpc;
use crate::time::wall_clock;

static PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
static GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
static GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
static GRPC_PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
static PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");

/// Answered on a connection that is one too many.
pub(super) const OVERLOADED: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\n\
    content-type: application/problem+json\r\n\
    proxy-status: tidegate; error=connection_limit_reached\r\n\
    retry-after: 1\r\n\
    connection: close\r\n\
    content-length: 106\r\n\r\n\
    {\"type\":\"about:blank\",\"title\":\"Service Unavailable\",\"status\":503,\"detail\":\"too many connections are open\"}";

/// Why a request is not answered by the upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// 400: what is wrong with the request.
    BadRequest(&'static str),
    /// 400: the key part that a limit demands and the request lacks.
    MissingKeyPart(String),
    /// 404: no route takes the request, and there is no upstream for others.
    NoRoute,
    /// 405.
    MethodNotAllowed,
    /// 200: an OPTIONS that may go no further (`Max-Forwards: 0`).
    LastHop,
    /// 408: the request's body stopped coming.
    RequestTimeout,
    /// 408: the request's head stopped coming.
    HeadTimeout,
    /// 413.
    ContentTooLarge,
    /// 414: the first line alone is larger than a head may be.
    TargetTooLong,
    /// 417.
    ExpectationFailed,
    /// 431: the head has more fields than allowed.
    TooManyFields,
    /// 431: the head has more fields or bytes than allowed.
    HeadTooLarge,
    /// 501: what is not implemented.
    NotImplemented(&'static str),
    /// 503: too many requests wait for their tokens.
    TooManyWaiting {
        /// After how long this one would pass.
        due: Duration,
    },
    /// 503: as many requests as may be are on their way to the upstream.
    UpstreamBusy,
    /// 502.
    BadGateway(GatewayFault),
    /// 504: connecting took too long.
    ConnectTimeout,
    /// 504: the head of the answer took too long.
    ResponseTimeout,
}

/// How the upstream failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatewayFault {
    /// Nobody listens, or the way there is broken.
    Unreachable,
    /// Its certificate is not accepted, or it does not speak TLS.
    Tls,
    /// The connection ended before the answer.
    Closed,
    /// The answer was not HTTP.
    Protocol,
    /// It switched protocols unasked.
    UnaskedUpgrade,
}

/// What an answer must know of its request.
#[derive(Clone, Debug)]
pub struct Asker {
    head: bool,
    /// The content type, if it is one of gRPC's.
    grpc: Option<HeaderValue>,
}

/// Fields that an answer of our own has at most, usually.
const OWN_FIELDS: usize = 10;

/// Marks an answer that the proxy made; [`Outcome`] says why. A refusal by a limit has no
/// mark: refusals come in floods, and a mark costs three allocations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Synthetic(pub(super) Outcome);

struct Wording {
    status: StatusCode,
    title: &'static str,
    /// The error type of `Proxy-Status`; empty if nothing failed.
    error: &'static str,
    /// The gRPC status code.
    grpc: u8,
    outcome: Outcome,
}

impl Asker {
    /// Who sent the request with this method and these fields.
    pub fn new(method: &Method, headers: &HeaderMap) -> Self {
        let content_type = headers.get(CONTENT_TYPE);
        Self {
            head: *method == Method::HEAD,
            grpc: content_type.filter(|value| is_grpc(Some(value))).cloned(),
        }
    }
}

impl Problem {
    /// The answer to a request that met this problem.
    pub fn answer<B: From<Bytes>>(&self, asker: &Asker) -> Response<B> {
        let wording = self.wording();
        let detail = self.detail();
        let mut response = match &asker.grpc {
            Some(content_type) => grpc(content_type.clone(), wording.grpc, &detail),
            None if *self == Self::LastHop => Response::new(B::from(Bytes::new())),
            None => {
                let document = serde_json::json!({
                    "type": "about:blank",
                    "title": wording.title,
                    "status": wording.status.as_u16(),
                    "detail": detail,
                });
                document_response(wording.status, document.to_string(), asker)
            }
        };
        let headers = response.headers_mut();
        let status = if wording.error.is_empty() {
            Ok(HeaderValue::from_static("tidegate"))
        } else {
            HeaderValue::from_maybe_shared(format!("tidegate; error={}", wording.error))
        };
        if let Ok(value) = status {
            headers.insert(&PROXY_STATUS, value);
        }
        if matches!(self, Self::MethodNotAllowed | Self::LastHop) {
            let allowed = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";
            headers.insert(ALLOW, HeaderValue::from_static(allowed));
        }
        // How long another request takes nobody knows.
        let busy = (*self == Self::UpstreamBusy).then_some(Duration::ZERO);
        let waiting = if let Self::TooManyWaiting { due } = self { Some(*due) } else { None };
        if let Some(due) = waiting.or(busy) {
            let nanos = u64::try_from(due.as_nanos()).unwrap_or(u64::MAX);
            let (name, value) = match asker.grpc {
                Some(_) => (&GRPC_PUSHBACK, nanos.div_ceil(1_000_000)),
                None => (&RETRY_AFTER, nanos.div_ceil(1_000_000_000)),
            };
            headers.insert(name, HeaderValue::from(value.max(1)));
        }
        response.extensions_mut().insert(Synthetic(wording.outcome));
        response
    }

    fn detail(&self) -> String {
        match self {
            Self::BadRequest(what) | Self::NotImplemented(what) => (*what).to_owned(),
            Self::MissingKeyPart(part) => format!("the request lacks {part}"),
            Self::NoRoute => "no upstream is configured for this request".to_owned(),
            Self::MethodNotAllowed => "the method may not pass a proxy".to_owned(),
            Self::LastHop => "the request may go no further".to_owned(),
            Self::RequestTimeout => "the request's content stopped coming".to_owned(),
            Self::HeadTimeout => "the request's head stopped coming".to_owned(),
            Self::ContentTooLarge => "the request's content is too large".to_owned(),
            Self::TargetTooLong => "the request's first line is too long".to_owned(),
            Self::ExpectationFailed => "only 100-continue can be expected".to_owned(),
            Self::TooManyFields => "the request has too many fields".to_owned(),
            Self::TooManyWaiting { .. } => "too many requests wait already".to_owned(),
            Self::UpstreamBusy => {
                "as many requests as may be are on their way to the upstream".to_owned()
            }
            Self::HeadTooLarge => "the request's head is too large".to_owned(),
            Self::BadGateway(GatewayFault::Tls) => {
                "there is no TLS with the upstream that can be trusted".to_owned()
            }
            Self::BadGateway(GatewayFault::Unreachable) => {
                "the upstream cannot be reached".to_owned()
            }
            Self::BadGateway(GatewayFault::Closed) => {
                "the upstream closed the connection before it answered".to_owned()
            }
            Self::BadGateway(GatewayFault::Protocol) => {
                "the upstream's answer is not valid".to_owned()
            }
            Self::BadGateway(GatewayFault::UnaskedUpgrade) => {
                "the upstream switched protocols unasked".to_owned()
            }
            Self::ConnectTimeout => "connecting to the upstream took too long".to_owned(),
            Self::ResponseTimeout => "the upstream took too long to answer".to_owned(),
        }
    }

    fn wording(&self) -> Wording {
        const INVALID_ARGUMENT: u8 = 3;
        const DEADLINE_EXCEEDED: u8 = 4;
        const RESOURCE_EXHAUSTED: u8 = 8;
        const UNIMPLEMENTED: u8 = 12;
        const INTERNAL: u8 = 13;
        const UNAVAILABLE: u8 = 14;
        let (status, title, error, grpc, outcome) = match self {
            Self::BadRequest(_) | Self::MissingKeyPart(_) => (
                StatusCode::BAD_REQUEST,
                "Bad Request",
                "http_request_error",
                INVALID_ARGUMENT,
                Outcome::Rejected,
            ),
            Self::NoRoute => (
                StatusCode::NOT_FOUND,
                "Not Found",
                "destination_not_found",
                UNIMPLEMENTED,
                Outcome::Rejected,
            ),
            Self::MethodNotAllowed => (
                StatusCode::METHOD_NOT_ALLOWED,
                "Method Not Allowed",
                "http_request_denied",
                UNIMPLEMENTED,
                Outcome::Rejected,
            ),
            Self::LastHop => (StatusCode::OK, "OK", "", UNIMPLEMENTED, Outcome::Answered),
            Self::RequestTimeout | Self::HeadTimeout => (
                StatusCode::REQUEST_TIMEOUT,
                "Request Timeout",
                "http_request_error",
                DEADLINE_EXCEEDED,
                Outcome::Rejected,
            ),
            Self::ContentTooLarge => (
                StatusCode::PAYLOAD_TOO_LARGE,
                "Content Too Large",
                "http_request_error",
                RESOURCE_EXHAUSTED,
                Outcome::Rejected,
            ),
            Self::TargetTooLong => (
                StatusCode::URI_TOO_LONG,
                "URI Too Long",
                "http_request_error",
                RESOURCE_EXHAUSTED,
                Outcome::Rejected,
            ),
            Self::ExpectationFailed => (
                StatusCode::EXPECTATION_FAILED,
                "Expectation Failed",
                "http_request_error",
                INVALID_ARGUMENT,
                Outcome::Rejected,
            ),
            Self::TooManyFields | Self::HeadTooLarge => (
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "Request Header Fields Too Large",
                "http_request_error",
                RESOURCE_EXHAUSTED,
                Outcome::Rejected,
            ),
            Self::NotImplemented(_) => (
                StatusCode::NOT_IMPLEMENTED,
                "Not Implemented",
                "http_request_error",
                UNIMPLEMENTED,
                Outcome::Rejected,
            ),
            Self::TooManyWaiting { .. } => (
                StatusCode::SERVICE_UNAVAILABLE,
                "Service Unavailable",
                "http_request_denied",
                UNAVAILABLE,
                Outcome::Overloaded,
            ),
            Self::UpstreamBusy => (
                StatusCode::SERVICE_UNAVAILABLE,
                "Service Unavailable",
                "connection_limit_reached",
                UNAVAILABLE,
                Outcome::Overloaded,
            ),
            Self::BadGateway(fault) => {
                let (error, grpc) = match fault {
                    GatewayFault::Unreachable => ("destination_unavailable", UNAVAILABLE),
                    GatewayFault::Tls => ("tls_certificate_error", UNAVAILABLE),
                    GatewayFault::Closed => ("connection_terminated", UNAVAILABLE),
                    GatewayFault::Protocol => ("http_protocol_error", INTERNAL),
                    GatewayFault::UnaskedUpgrade => ("http_upgrade_failed", INTERNAL),
                };
                (StatusCode::BAD_GATEWAY, "Bad Gateway", error, grpc, Outcome::UpstreamFailed)
            }
            Self::ConnectTimeout => (
                StatusCode::GATEWAY_TIMEOUT,
                "Gateway Timeout",
                "connection_timeout",
                UNAVAILABLE,
                Outcome::UpstreamFailed,
            ),
            Self::ResponseTimeout => (
                StatusCode::GATEWAY_TIMEOUT,
                "Gateway Timeout",
                "http_response_timeout",
                DEADLINE_EXCEEDED,
                Outcome::UpstreamFailed,
            ),
        };
        Wording { status, title, error, grpc, outcome }
    }
}

/// The answer to what never became a request, as it goes out before the
/// connection is closed. It has a `Date`, which RFC 9110 section 6.6.1 demands of
/// answers below 500.
pub(super) fn unreadable(problem: &Problem) -> Vec<u8> {
    let response: Response<Bytes> = problem.answer(&Asker { head: false, grpc: None });
    let mut bytes = format!("HTTP/1.1 {}\r\n", response.status()).into_bytes();
    for (name, value) in response.headers() {
        for piece in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            bytes.extend_from_slice(piece);
        }
    }
    let (length, date) = (response.body().len(), httpdate::fmt_http_date(wall_clock()));
    bytes.extend_from_slice(
        format!("date: {date}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n").as_bytes(),
    );
    bytes.extend_from_slice(response.body());
    bytes
}

/// The answer to a request that a limit refuses. `due_nanos` is the time until
/// it would pass, `None` if it never will.
pub(super) fn refusal<B: From<Bytes>>(
    view: &LimitView,
    due_nanos: Option<u64>,
    fields: Option<Fields>,
    asker: &Asker,
) -> Response<B> {
    let mut response = match &asker.grpc {
        Some(content_type) => {
            let mut response = grpc(content_type.clone(), 8, "rate limit exceeded");
            let pushback = match due_nanos {
                Some(nanos) => HeaderValue::from(nanos.div_ceil(1_000_000).max(1)),
                // A negative value asks not to try again.
                None => HeaderValue::from_static("-1"),
            };
            response.headers_mut().insert(&GRPC_PUSHBACK, pushback);
            response
        }
        None => {
            let seconds = due_nanos.map(|nanos| nanos.div_ceil(1_000_000_000).max(1));
            let mut document = Vec::with_capacity(view.problem.len() + 36);
            document.extend_from_slice(view.problem.as_bytes());
            if let Some(seconds) = seconds {
                push_number(&mut document, b",\"retry_after\":", seconds);
            }
            document.push(b'}');
            let mut response = document_response(StatusCode::TOO_MANY_REQUESTS, document, asker);
            if let Some(seconds) = seconds {
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
            }
            response
        }
    };
    response.headers_mut().insert(&PROXY_STATUS, view.proxy_status.clone());
    if let Some(fields) = fields {
        fields.insert(response.headers_mut());
    }
    response
}

fn document_response<B: From<Bytes>>(
    status: StatusCode,
    document: impl Into<Bytes>,
    asker: &Asker,
) -> Response<B> {
    let body = if asker.head { Bytes::new() } else { document.into() };
    let mut response = Response::new(B::from(body));
    *response.status_mut() = status;
    // For all that comes, at once.
    response.headers_mut().reserve(OWN_FIELDS);
    response.headers_mut().insert(CONTENT_TYPE, PROBLEM_JSON.clone());
    response
}

/// A gRPC answer that is only its trailers.
fn grpc<B: From<Bytes>>(content_type: HeaderValue, code: u8, message: &str) -> Response<B> {
    let mut response = Response::new(B::from(Bytes::new()));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, content_type);
    headers.insert(&GRPC_STATUS, HeaderValue::from(u16::from(code)));
    let message = percent_encoding::utf8_percent_encode(message, GRPC_MESSAGE_ESCAPES).to_string();
    if let Ok(value) = HeaderValue::from_maybe_shared(message) {
        headers.insert(&GRPC_MESSAGE, value);
    }
    response
}

/// What a gRPC message cannot hold as it is.
const GRPC_MESSAGE_ESCAPES: &percent_encoding::AsciiSet = &percent_encoding::CONTROLS.add(b'%');

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn asker(method: &str, content_type: Option<&str>) -> Asker {
        let mut request = Request::builder().method(method);
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        let request = request.body(()).unwrap();
        Asker::new(request.method(), request.headers())
    }

    #[test]
    fn every_problem_is_told_in_the_form_the_asker_understands() {
        let problems = [
            Problem::BadRequest("no Host field"),
            Problem::MissingKeyPart("header:x-api-key".into()),
            Problem::MethodNotAllowed,
            Problem::RequestTimeout,
            Problem::HeadTimeout,
            Problem::ContentTooLarge,
            Problem::TargetTooLong,
            Problem::ExpectationFailed,
            Problem::TooManyFields,
            Problem::HeadTooLarge,
            Problem::NotImplemented("x"),
            Problem::BadGateway(GatewayFault::Unreachable),
            Problem::BadGateway(GatewayFault::Tls),
            Problem::ConnectTimeout,
            Problem::ResponseTimeout,
            Problem::TooManyWaiting { due: Duration::from_millis(1200) },
        ];
        for problem in problems {
            let plain: Response<Bytes> = problem.answer(&asker("GET", Some("text/plain")));
            let document: serde_json::Value = serde_json::from_slice(plain.body()).unwrap();
            assert_eq!(document["status"], plain.status().as_u16());
            assert!(plain.status().as_u16() >= 400);
            assert!(plain.headers().contains_key("proxy-status"));
            let says_when = matches!(problem, Problem::TooManyWaiting { .. });
            assert_eq!(plain.headers().get("retry-after").is_some_and(|v| v == "2"), says_when);
            let head: Response<Bytes> = problem.answer(&asker("HEAD", None));
            assert!(head.body().is_empty() && head.status() == plain.status());
            let grpc: Response<Bytes> = problem.answer(&asker("POST", Some("application/grpc")));
            assert!(grpc.status() == 200 && grpc.body().is_empty());
            assert_ne!(grpc.headers()["grpc-status"], "0");
        }
    }

    #[test]
    fn the_overload_answer_is_well_framed() {
        let text = std::str::from_utf8(OVERLOADED).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())));
        let document: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(document["status"], 503);
    }
}
