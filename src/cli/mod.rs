//! Command line (layer 8): arguments to commands to exit status.
//!
//! Data goes to stdout, everything else to stderr.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

pub mod buckets;
mod check;
pub mod client;
pub mod limits;
pub mod peers;
mod schema;
mod table;

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

#[derive(Debug, Subcommand)]
enum Command {
    /// Check a configuration file and show its limits.
    Check(check::Args),
    /// Print the JSON Schema of the configuration file.
    Schema,
}

/// Runs the command.
pub fn run(args: Args) -> ExitCode {
    let result = match args.command {
        Command::Check(args) => check::run(&args),
        Command::Schema => schema::run(),
    };
    match result {
        Ok(exit) => exit.into(),
        Err(error) => {
            say(&format!("tidegate: {error:#}"));
            Exit::Failure.into()
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
