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
use serde::Serialize;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use crate::admin;
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
    /// The admin gRPC to ask
    #[arg(
        long,
        env = "TIDEGATE_ADMIN",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:9402"
    )]
    pub admin: AdminAddr,
    /// File with the replica's admin token, if it wants one
    #[arg(long, env = "TIDEGATE_ADMIN_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// How to print the answer
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
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

/// The host and port of an admin listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminAddr(Authority);

impl FromStr for AdminAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse::<Authority>()
            .ok()
            .filter(|a| !a.host().is_empty() && a.port_u16().is_some() && !text.contains('@'))
            .map(Self)
            .ok_or_else(|| "write a host and a port, such as 127.0.0.1:9402".to_owned())
    }
}

impl fmt::Display for AdminAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
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
        let endpoint = Endpoint::from_shared(format!("http://{}", self.admin))
            .map_err(|error| Error::Usage(format!("--admin: {error}")))?
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(ANSWER_TIMEOUT);
        let channel =
            endpoint.connect().await.map_err(|error| self.unreachable(deepest(&error)))?;
        Ok(AdminClient::with_interceptor(channel, Bearer(bearer)))
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
                 TIDEGATE_ADMIN_TOKEN_FILE",
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
            output: Output::Json,
        }
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for text in ["127.0.0.1:9402", "localhost:1", "[::1]:9402", "pod-1.tidegate:9402"] {
            assert_eq!(text.parse::<AdminAddr>().unwrap().to_string(), text);
        }
        for text in ["", "127.0.0.1", ":9402", "http://127.0.0.1:9402", "a@b:1", "a:b", "a:70000"] {
            assert!(text.parse::<AdminAddr>().is_err(), "{text}");
        }
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
