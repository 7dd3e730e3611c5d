//! The `tidegate` program: arguments to a command to an exit status.

use std::process::ExitCode;

use clap::Parser;
use tidegate::cli;

fn main() -> ExitCode {
    cli::run(cli::Args::parse())
}
