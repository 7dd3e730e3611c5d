//! The admin listener: the admin service, `grpc.health.v1` and reflection on one
//! port.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{self, HealthServer};
use tonic_health::server::{HealthReporter, HealthService};

use super::cluster::Cluster;
use super::connection;
use super::guard::Guard;
use super::metrics::Metrics;
use super::routes::{Routes, route};
use super::service::AdminService;
use super::token::{Token, TokenError};
use crate::runtime::{Drain, ListenAddr, Stage, follow_files};
use crate::tls;
use crate::wire;
use crate::wire::tidegate::admin::v1::admin_server::{AdminServer as Grpc, SERVICE_NAME};

/// Largest request; every request is a few names and values.
const MAX_REQUEST_BYTES: usize = 64 * 1024;

/// How often a connection is asked whether it lives, and how long it may take to
/// answer. Also ends one that sends a frame byte by byte.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(10));

/// What strangers may take of the admin listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Connections at the same time; more wait to be accepted.
    pub connections: usize,
    /// How long a connection may take to begin with HTTP/2's preface.
    pub preface: Duration,
    /// How long an answer may take to begin.
    pub request: Duration,
    /// Calls at the same time on one connection.
    pub streams: u32,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            connections: 512,
            preface: Duration::from_secs(10),
            request: Duration::from_secs(10),
            streams: 64,
        }
    }
}

/// The listener, bound but not yet answering.
#[derive(Debug)]
pub struct AdminServer {
    listener: TcpListener,
    bounds: Bounds,
    health: Health,
    guard: Guard,
    tls: Option<(Arc<tls::Server>, Metrics)>,
}

/// What `grpc.health.v1` answers. Cheap to clone.
///
/// The service without a name stands for the whole replica: it is NOT_SERVING
/// until [`Health::set_serving`] says otherwise, and for good once the process
/// announces that it leaves. `tidegate.admin.v1.Admin` is
/// SERVING whenever it answers at all.
#[derive(Clone, Debug)]
pub struct Health {
    reporter: HealthReporter,
    leaving: Arc<AtomicBool>,
}

/// Why the admin listener cannot run.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The socket cannot be used on this runtime.
    #[error("the admin socket cannot be used: {0}")]
    Socket(#[from] io::Error),
    /// The descriptors that were compiled in cannot be read.
    #[error("the descriptors for reflection cannot be read: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The gRPC server ended.
    #[error("the admin server ended: {0}")]
    Server(#[from] tonic::transport::Error),
}

impl AdminServer {
    /// Binds the socket and returns the address that it got.
    ///
    /// # Errors
    /// If it cannot be bound; the text names the address.
    pub fn bind(listen: ListenAddr) -> io::Result<(Self, SocketAddr)> {
        let listener = listen.bind(false)?;
        let address = listener.local_addr()?;
        let health = Health { reporter: HealthReporter::new(), leaving: Arc::default() };
        // Nobody else has the reporter yet, so that this does not wait.
        let _ = health.set_serving(false).now_or_never();
        Ok((
            Self {
                listener,
                bounds: Bounds::default(),
                health,
                guard: Guard::default(),
                tls: None,
            },
            address,
        ))
    }

    /// The same, where every call but those of health must carry the token of a file.
    ///
    /// # Errors
    /// If the file has none.
    pub fn with_token(self, path: &Path) -> Result<Self, TokenError> {
        let token = Some(Token::load(path)?);
        Ok(Self { guard: Guard { token, ..self.guard }, ..self })
    }

    /// The same over TLS. If CAs of clients are named, a client's certificate is enough
    /// in place of the token, and one of both is needed.
    ///
    /// # Errors
    /// If a file cannot be used.
    pub fn with_tls(self, files: tls::Serving, metrics: Metrics) -> Result<Self, tls::Error> {
        let guard = Guard { certificates: files.client_ca.is_some(), ..self.guard };
        let tls = tls::Server::load(files, tls::Clients::Asked, &[b"h2"])?;
        Ok(Self { guard, tls: Some((Arc::new(tls), metrics)), ..self })
    }

    /// The same with other bounds.
    #[must_use]
    pub fn with_bounds(self, bounds: Bounds) -> Self {
        Self { bounds, ..self }
    }

    /// Says what the health service answers.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Answers until the process aborts; from the announcement of its leaving on,
    /// its health is NOT_SERVING. Its end waits for nobody: what is still open
    /// then is cut.
    ///
    /// # Errors
    /// If the socket or the descriptors cannot be used.
    pub async fn run<C: Cluster>(
        self,
        service: AdminService<C>,
        drain: Drain,
    ) -> Result<(), ServerError> {
        let Self { listener, bounds, health, guard, tls } = self;
        let guard = Arc::new(guard);
        let listener = tokio::net::TcpListener::from_std(listener)?;
        health.reporter.set_service_status(SERVICE_NAME, ServingStatus::Serving).await;

        let end = CancellationToken::new();
        let connections = connection::accept(
            listener,
            tls.as_ref().map(|(tls, _)| Arc::clone(tls)),
            bounds.connections,
            bounds.preface,
            end.clone(),
        );
        let services = [
            route(Grpc::new(service).max_decoding_message_size(MAX_REQUEST_BYTES)),
            route(HealthServer::new(HealthService::from_health_reporter(health.reporter.clone()))),
            route(reflection().build_v1()?),
            route(reflection().build_v1alpha()?),
        ];
        let services = Routes::new(services, Arc::clone(&guard), health_server::SERVICE_NAME);
        let server = Server::builder()
            .timeout(bounds.request)
            .max_concurrent_streams(bounds.streams)
            .http2_max_header_list_size(16 * 1024)
            .http2_keepalive_interval(Some(KEEP_ALIVE.0))
            .http2_keepalive_timeout(Some(KEEP_ALIVE.1));
        // Dropping the guard cuts every connection, also when this future is
        // dropped before its end.
        let _cut = end.clone().drop_guard();
        let aborting = drain.reached(Stage::Aborting);
        let served = server.serve_with_incoming_shutdown(services, connections, async {
            aborting.await;
            end.cancel();
        });
        let leaving = async {
            drain.reached(Stage::Announcing).await;
            health.leaving.store(true, Ordering::Release);
            health.set_serving(false).await;
            std::future::pending().await
        };
        let token = async {
            match &guard.token {
                Some(token) => follow_files("admin.token_file", || token.refresh(), |_| {}).await,
                None => std::future::pending().await,
            }
        };
        let certificate = async {
            let Some((tls, metrics)) = &tls else { return std::future::pending().await };
            metrics.certificate(tls.not_after());
            let told = |change| {
                metrics.certificate_read(change);
                metrics.certificate(tls.not_after());
            };
            follow_files("admin.tls", || tls.refresh(), told).await;
        };
        tokio::select! {
            served = served => Ok(served?),
            () = leaving => Ok(()),
            () = token => Ok(()),
            () = certificate => Ok(()),
        }
    }
}

impl Health {
    /// Whether the replica takes traffic: SERVING or NOT_SERVING.
    pub async fn set_serving(&self, serving: bool) {
        let serving = serving && !self.leaving.load(Ordering::Acquire);
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        self.reporter.set_service_status("", status).await;
    }
}

/// Reflection on the services that are here; the peers' protocol is described in
/// the same descriptors but served elsewhere.
fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(wire::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .with_service_name(SERVICE_NAME)
        .with_service_name(health_server::SERVICE_NAME)
        .with_service_name("grpc.reflection.v1.ServerReflection")
        .with_service_name("grpc.reflection.v1alpha.ServerReflection")
}
