//! Command line (layer 8): arguments to commands to exit status.
//!
//! Data goes to stdout, everything else to stderr.

use std::io::{self, IsTerminal as _, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

use crate::telemetry;

pub mod buckets;
mod check;
pub mod client;
mod demo;
pub mod explain;
pub mod limits;
pub mod log;
pub mod peers;
mod run;
mod schema;
mod table;
pub mod top;

/// How a command ends, as `sysexits.h` counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// Anything without a code of its own.
    Failure = 1,
    /// Wrong arguments.
    Usage = 2,
    /// The admin server cannot be reached.
    Unavailable = 69,
    /// The configuration is bad.
    Config = 78,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// A rate-limiting reverse proxy whose replicas enforce one limit together.
#[derive(Debug, Parser)]
#[command(name = "tidegate", version, arg_required_else_help = true)]
pub struct Args {
    /// How log lines are written to stderr.
    #[arg(long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    pub log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object in each line.
    Json,
}

impl From<LogFormat> for telemetry::LogFormat {
    fn from(format: LogFormat) -> Self {
        match format {
            LogFormat::Text => Self::Text,
            LogFormat::Json => Self::Json,
        }
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a replica, from a configuration file or from flags.
    Run(run::Args),
    /// See three replicas enforce one limit together, on this machine.
    Demo(demo::Args),
    /// Check a configuration file and show its limits.
    Check(check::Args),
    /// Print the JSON Schema of the configuration file.
    Schema,
    /// Ask a running replica for its buckets.
    Buckets(buckets::BucketsArgs),
    /// Ask a running replica for its limits.
    Limits(limits::LimitsArgs),
    /// Ask a running replica for its peers.
    Peers(peers::PeersArgs),
    /// Ask a running replica what would become of a request, and why.
    Explain(explain::ExplainArgs),
    /// Watch the limits and the busiest keys of a running replica.
    Top(top::TopArgs),
    /// Change what a running replica logs.
    Log(log::LogArgs),
}

/// Runs the command.
pub fn run(args: Args) -> ExitCode {
    let result = match args.command {
        Command::Run(run) => run::run(&run, args.log_format),
        Command::Demo(demo) => demo::run(&demo, args.log_format),
        Command::Check(args) => check::run(&args),
        Command::Schema => schema::run(),
        Command::Buckets(args) => ask(async |out| buckets::run(args, out).await),
        Command::Limits(args) => ask(async |out| limits::run(args, out).await),
        Command::Peers(args) => ask(async |out| peers::run(args, out).await),
        Command::Explain(args) => ask(async |out| explain::run(args, out).await),
        Command::Top(args) => {
            let live = io::stdout().is_terminal();
            ask(async |out| top::run(args, out, live).await)
        }
        Command::Log(args) => ask(async |out| log::run(args, out).await),
    };
    match result {
        Ok(exit) => exit.into(),
        Err(error) => {
            say(&format!("tidegate: {error:#}"));
            Exit::Failure.into()
        }
    }
}

/// Asks a running replica and prints what it says.
fn ask(
    question: impl AsyncFnOnce(&mut (dyn Write + Send)) -> Result<(), client::Error>,
) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match runtime.block_on(question(&mut io::stdout())) {
        Ok(()) => Ok(Exit::Done),
        Err(error) => {
            say(&format!("tidegate: {error}"));
            Ok(error.exit())
        }
    }
}

/// Writes `text` and a line end to stdout.
///
/// # Errors
/// If stdout cannot be written, except that its reader may stop reading.
fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(anyhow::Error::new(error).context("cannot write to stdout"))
        }
        _ => Ok(()),
    }
}

/// Writes `text` and a line end to stderr, which nobody need be reading.
fn say(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}
