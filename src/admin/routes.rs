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

use super::connection::Caller;
use super::guard::Guard;

/// Services by name. Cheap to clone.
#[derive(Clone)]
pub(super) struct Routes {
    services: Arc<Vec<(&'static str, Grpc)>>,
    /// What every call must have but those of the open service.
    guard: Arc<Guard>,
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
    /// Every service is guarded but `open`.
    pub(super) fn new(
        services: impl IntoIterator<Item = (&'static str, Grpc)>,
        guard: Arc<Guard>,
        open: &'static str,
    ) -> Self {
        Self { services: Arc::new(services.into_iter().collect()), guard, open }
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
        let certified =
            || request.extensions().get::<Caller>().is_some_and(Caller::has_certificate);
        if name != self.open
            && let Err(status) = self.guard.check(request.headers(), certified)
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
