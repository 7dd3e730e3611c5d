//! Several gRPC services on one port, told apart by the first segment of the path.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceExt as _};

use super::token::Token;

/// Services by name. Cheap to clone.
#[derive(Clone)]
pub(super) struct Routes {
    services: Arc<Vec<(&'static str, Grpc)>>,
    /// What every call must carry but those of the open service.
    token: Option<Arc<Token>>,
    open: &'static str,
}

type Grpc = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

/// One service under its name.
pub(super) fn route<S>(service: S) -> (&'static str, Grpc)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
        + NamedService
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    (S::NAME, BoxCloneSyncService::new(service))
}

impl Routes {
    /// With a token every service needs it but `open`.
    pub(super) fn new(
        services: impl IntoIterator<Item = (&'static str, Grpc)>,
        token: Option<Arc<Token>>,
        open: &'static str,
    ) -> Self {
        Self { services: Arc::new(services.into_iter().collect()), token, open }
    }
}

impl Service<Request<Body>> for Routes {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // A gRPC path is `/service/method`.
        let name = request.uri().path().split('/').nth(1).unwrap_or_default();
        if let Some(token) = &self.token
            && name != self.open
            && let Err(status) = token.check(request.headers())
        {
            return Box::pin(async move { Ok(status.into_http()) });
        }
        match self.services.iter().find(|(known, _)| *known == name) {
            Some((_, service)) => Box::pin(service.clone().oneshot(request)),
            None => {
                let status = Status::unimplemented(format!("there is no service `{name}` here"));
                Box::pin(async move { Ok(status.into_http()) })
            }
        }
    }
}
