//! What the subcommands that ask a running replica have in common: where it is,
//! how its answers are printed, and what can go wrong.

use std::error::Error as _;
use std::fmt;
use std::io::{self, Write};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use http::uri::Authority;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde::Serialize;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Status};
use tower::{Service, service_fn};

use crate::admin;
use crate::tls;
use crate::wire::tidegate::admin::v1::admin_client::AdminClient;

/// How long a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long an answer may take to begin.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// A client that carries the token, if there is one.
pub(super) type Client = AdminClient<InterceptedService<Channel, Bearer>>;

/// Puts the token on every call.
#[derive(Clone)]
pub(super) struct Bearer(Option<MetadataValue<Ascii>>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

/// Where the replica is, and how to print what it says.
#[derive(Clone, Debug, Args)]
pub struct ClientArgs {
    /// The admin gRPC to ask; over TLS if it begins with https://
    #[arg(
        long,
        env = "TIDEGATE_ADMIN",
        value_name = "[https://]HOST:PORT",
        default_value = "127.0.0.1:9402"
    )]
    pub admin: AdminAddr,
    /// File with the replica's admin token, if it wants one
    #[arg(long, env = "TIDEGATE_ADMIN_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// How to speak TLS with it
    #[command(flatten)]
    pub tls: TlsArgs,
    /// How to print the answer
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
}

/// How TLS is spoken with the replica.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct TlsArgs {
    /// File with the CAs that sign the replica's certificate; those of the system if none
    #[arg(long, env = "TIDEGATE_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// File with the certificate to show
    #[arg(long, env = "TIDEGATE_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// File with its private key
    #[arg(long, env = "TIDEGATE_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Name for which the replica's certificate must be, if not the host of --admin
    #[arg(long, env = "TIDEGATE_TLS_NAME", value_name = "NAME")]
    pub tls_name: Option<String>,
}

/// How an answer is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people
    #[default]
    Table,
    /// For programs: one JSON document
    Json,
}

/// The host and port of an admin listener, and whether it is one with TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminAddr {
    authority: Authority,
    tls: bool,
}

impl AdminAddr {
    /// The host without brackets.
    fn host(&self) -> &str {
        let host = self.authority.host();
        host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
    }
}

impl FromStr for AdminAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (tls, rest) = match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => (false, text),
        };
        rest.parse::<Authority>()
            .ok()
            .filter(|a| !a.host().is_empty() && a.port_u16().is_some() && !rest.contains('@'))
            .map(|authority| Self { authority, tls })
            .ok_or_else(|| {
                "write a host and a port, such as 127.0.0.1:9402 or https://pod-1:9402".to_owned()
            })
    }
}

impl fmt::Display for AdminAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tls {
            f.write_str("https://")?;
        }
        self.authority.fmt(f)
    }
}

/// Why a question to a replica was not answered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing answers there.
    #[error(
        "cannot reach the admin gRPC at {address}: {reason}\n\
         hint: is tidegate running, with `admin.listen` at that address? Another one is named by \
         --admin HOST:PORT or TIDEGATE_ADMIN; in Kubernetes, `kubectl port-forward POD 9402` \
         brings it here"
    )]
    Unreachable {
        /// Where it was looked for.
        address: String,
        /// What happened.
        reason: String,
    },
    /// The question makes no sense there.
    #[error("{0}")]
    Usage(String),
    /// The replica refused it.
    #[error("{0}")]
    Refused(String),
    /// The answer could not be printed.
    #[error("cannot write the answer: {0}")]
    Output(#[from] io::Error),
}

impl Error {
    /// How the command ends.
    pub const fn exit(&self) -> super::Exit {
        match self {
            Self::Unreachable { .. } => super::Exit::Unavailable,
            Self::Usage(_) => super::Exit::Usage,
            Self::Refused(_) | Self::Output(_) => super::Exit::Failure,
        }
    }
}

impl ClientArgs {
    /// A client of the replica; connects.
    pub(super) async fn connect(&self) -> Result<Client, Error> {
        let bearer = match &self.token_file {
            Some(path) => {
                let token = admin::token(path).map_err(|error| Error::Usage(error.to_string()))?;
                let value = format!("Bearer {token}").parse();
                Some(value.map_err(|_| Error::Usage("the token cannot be sent".to_owned()))?)
            }
            None => None,
        };
        let tls = self.tls()?;
        // Without a scheme of TLS, of which tonic would make its own idea.
        let endpoint = Endpoint::from_shared(format!("http://{}", self.admin.authority))
            .map_err(|error| Error::Usage(format!("--admin: {error}")))?
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(ANSWER_TIMEOUT);
        let connected = match tls {
            None => endpoint.connect().await,
            Some(tls) => endpoint.connect_with_connector(self.connector(tls)).await,
        };
        let channel = connected.map_err(|error| self.unreachable(deepest(&error)))?;
        Ok(AdminClient::with_interceptor(channel, Bearer(bearer)))
    }

    /// With what TLS begins and for whose certificate, if it is to be spoken.
    fn tls(&self) -> Result<Option<(TlsConnector, ServerName<'static>)>, Error> {
        let TlsArgs { tls_ca, tls_cert, tls_key, tls_name } = &self.tls;
        if !self.admin.tls {
            return if self.tls == TlsArgs::default() {
                Ok(None)
            } else {
                let hint = format!("write --admin https://{}", self.admin);
                Err(Error::Usage(format!("--tls-... go with an address of https:// only: {hint}")))
            };
        }
        let usage = |error: &dyn fmt::Display| Error::Usage(error.to_string());
        let identity = tls_cert.as_deref().zip(tls_key.as_deref());
        let identity = identity.map(|(cert, key)| tls::ClientIdentity { cert, key });
        let config = tls::client(tls_ca.as_deref(), identity).map_err(|error| usage(&error))?;
        let name = tls_name.as_deref().unwrap_or(self.admin.host()).to_owned();
        let name = ServerName::try_from(name).map_err(|error| usage(&error))?;
        Ok(Some((TlsConnector::from(config), name)))
    }

    /// Connects to the address over TLS.
    fn connector(
        &self,
        tls: (TlsConnector, ServerName<'static>),
    ) -> impl Service<Uri, Response = TokioIo<TlsStream<TcpStream>>, Error = io::Error, Future: Send>
    + Send
    + use<> {
        let address = self.admin.authority.as_str().to_owned();
        service_fn(move |_: Uri| {
            let (address, (tls, name)) = (address.clone(), tls.clone());
            async move {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Ok(TokioIo::new(tls.connect(name, stream).await?))
            }
        })
    }

    /// What a failed call means.
    pub(super) fn failed(&self, status: &Status) -> Error {
        // A status that came from the replica has no source.
        if let Some(source) = status.source() {
            return self.unreachable(deepest(source));
        }
        let message = status.message();
        let code = status.code();
        if code == Code::Unavailable {
            self.unreachable(message.to_owned())
        } else if code == Code::InvalidArgument {
            Error::Usage(message.to_owned())
        } else if code == Code::NotFound {
            Error::Refused(message.to_owned())
        } else if code == Code::Unauthenticated {
            Error::Refused(format!(
                "{}: {message}\nhint: name the file with the token by --token-file FILE or \
                 TIDEGATE_ADMIN_TOKEN_FILE, or a certificate by --tls-cert and --tls-key",
                self.admin
            ))
        } else if code == Code::Unimplemented {
            Error::Refused(format!(
                "the replica at {} is of another version and does not know the question",
                self.admin
            ))
        } else {
            Error::Refused(format!("{} answers {code:?}: {message}", self.admin))
        }
    }

    fn unreachable(&self, reason: String) -> Error {
        Error::Unreachable { address: self.admin.to_string(), reason }
    }

    /// Prints `document` as the arguments say, with `table` as the table.
    pub(super) fn print<T: Serialize>(
        &self,
        out: &mut dyn Write,
        document: &T,
        table: impl FnOnce(&T) -> String,
    ) -> Result<(), Error> {
        let text = match self.output {
            Output::Table => table(document),
            Output::Json => serde_json::to_string_pretty(document).map_err(io::Error::from)?,
        };
        match writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush()) {
            // The reader has seen enough.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => Ok(other?),
        }
    }
}

/// The last of the causes, which says most.
fn deepest(error: &(dyn std::error::Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

/// Seconds for JSON.
pub(super) fn seconds(duration: Option<&prost_types::Duration>) -> Option<f64> {
    duration.map(|d| d.seconds as f64 + f64::from(d.nanos) / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Full(io::ErrorKind);

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn args() -> ClientArgs {
        ClientArgs {
            admin: "127.0.0.1:9402".parse().unwrap(),
            token_file: None,
            tls: TlsArgs::default(),
            output: Output::Json,
        }
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for text in ["127.0.0.1:9402", "localhost:1", "[::1]:9402", "https://pod-1.tidegate:9402"] {
            assert_eq!(text.parse::<AdminAddr>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "127.0.0.1",
            ":9402",
            "ftp://127.0.0.1:9402",
            "https://a",
            "a@b:1",
            "a:b",
            "a:70000",
        ] {
            assert!(text.parse::<AdminAddr>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_belongs_to_tls_needs_an_address_with_tls() {
        assert_eq!("https://[::1]:9402".parse::<AdminAddr>().unwrap().host(), "::1");
        assert_eq!("http://a:1".parse::<AdminAddr>(), "a:1".parse());
        let tls = TlsArgs { tls_name: Some("a.ops".into()), ..TlsArgs::default() };
        let error = ClientArgs { tls, ..args() }.tls().map(drop).unwrap_err().to_string();
        assert!(error.contains("--admin https://127.0.0.1:9402"), "{error}");
        let tls = TlsArgs { tls_ca: Some("/does/not/exist".into()), ..TlsArgs::default() };
        let admin = "https://127.0.0.1:9402".parse().unwrap();
        let error = ClientArgs { admin, tls, ..args() }.tls().map(drop).unwrap_err();
        assert_eq!(error.exit(), super::super::Exit::Usage);
        assert!(error.to_string().starts_with("CA certificates /does/not/exist: "), "{error}");
    }

    #[test]
    fn a_broken_pipe_is_no_error_but_a_full_disk_is() {
        let table = |_: &[u8; 1]| String::new();
        args().print(&mut Full(io::ErrorKind::BrokenPipe), &[1], table).unwrap();
        let error = args().print(&mut Full(io::ErrorKind::StorageFull), &[1], table).unwrap_err();
        assert_eq!(error.exit(), super::super::Exit::Failure);
    }

    #[test]
    fn statuses_become_exit_codes() {
        for (status, code) in [
            (Status::not_found("no limit"), 1),
            (Status::invalid_argument("id: bad"), 2),
            (Status::unavailable("leaving"), 69),
            (Status::unimplemented(""), 1),
            (Status::internal("bug"), 1),
            (Status::from_error(Box::new(io::Error::from(io::ErrorKind::ConnectionReset))), 69),
        ] {
            assert_eq!(args().failed(&status).exit() as u8, code, "{status:?}");
        }
        let text = args().failed(&Status::unavailable("leaving")).to_string();
        assert!(text.contains("127.0.0.1:9402: leaving\nhint: "), "{text}");
    }
}
