//! `tidegate schema`: the JSON Schema of the configuration file.

use super::{Exit, print};
use crate::config::Config;

pub(super) fn run() -> anyhow::Result<Exit> {
    print(&serde_json::to_string_pretty(&Config::schema())?)?;
    Ok(Exit::Done)
}
