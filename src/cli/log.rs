//! `tidegate log`: changes what a running replica logs.

use std::io::Write;

use clap::Args;
use serde::Serialize;

use super::client::{ClientArgs, Error};
use crate::wire::tidegate::admin::v1 as pb;

/// Arguments of `tidegate log`.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// Directives such as `info` or `warn,tidegate::peer=debug`
    #[arg(value_name = "FILTER")]
    pub filter: String,
    /// Where to ask, and how to print
    #[command(flatten)]
    pub client: ClientArgs,
}

#[derive(Debug, Serialize)]
struct Changed {
    previous: String,
    filter: String,
}

/// Runs `tidegate log`.
///
/// # Errors
/// If the replica cannot be reached, refuses, or the answer cannot be written.
pub async fn run(args: LogArgs, out: &mut (dyn Write + Send)) -> Result<(), Error> {
    let client = args.client;
    let mut admin = client.connect().await?;
    let request = pb::SetLogFilterRequest { filter: args.filter.clone() };
    let answer = admin.set_log_filter(request).await.map_err(|status| client.failed(&status))?;
    let changed = Changed { previous: answer.into_inner().previous, filter: args.filter };
    client.print(out, &changed, |changed| {
        format!("the log filter is now `{}`; it was `{}`", changed.filter, changed.previous)
    })
}
