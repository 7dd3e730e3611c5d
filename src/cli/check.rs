//! `tidegate check`: is the file good, and what does it mean?

use std::fmt::Write;
use std::path::PathBuf;

use super::{Exit, print, say};
use crate::config::{self, Config};
use crate::limiter::{Cost, Mode};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The configuration file.
    #[arg(short, long, env = "TIDEGATE_CONFIG", value_name = "FILE")]
    config: PathBuf,
}

pub(super) fn run(args: &Args) -> anyhow::Result<Exit> {
    match config::load(&args.config, &|name| std::env::var(name).ok()) {
        Ok(config) => {
            print(&format!("{}: {}", args.config.display(), summary(&config)))?;
            Ok(Exit::Done)
        }
        Err(error) => {
            say(&error.to_string());
            Ok(Exit::Config)
        }
    }
}

/// `ok, N limits`, and a line for each limit with what is in effect.
fn summary(config: &Config) -> String {
    let limits = config.limits();
    let plural = if limits.len() == 1 { "" } else { "s" };
    let mut out = format!("ok, {} limit{plural}", limits.len());
    // Those of upstreams are behind those that are written out.
    let written = config.limits.iter().map(Some).chain(std::iter::repeat(None));
    for ((_, limit), text) in limits.iter().zip(written) {
        let quota = limit.default_quota();
        let key = match limit.rule().parts_text() {
            parts if parts.is_empty() => "none, one bucket for all".to_owned(),
            parts => parts,
        };
        let defaulted = text.is_some_and(|text| text.burst.is_none());
        let burst = match (quota.rate().is_blocked(), defaulted) {
            (true, _) => "none, blocks everything".to_owned(),
            (false, false) => quota.burst().to_string(),
            (false, true) => format!("{} (default: the N of the rate)", quota.burst()),
        };
        let mode = match limit.mode() {
            Mode::Enforce => "enforce",
            Mode::Shadow => "shadow",
        };
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "\n  {}: rate {}, burst {burst}, cost {}, key {key}, mode {mode}",
            limit.name(),
            quota.rate(),
            cost(limit.cost()),
        );
        if !limit.max_wait().is_zero() {
            let _ = write!(out, ", waits up to {}", humantime::format_duration(limit.max_wait()));
        }
        if limit.overrides() > 0 {
            let _ = write!(out, ", {} override(s)", limit.overrides());
        }
    }
    for (name, upstream) in &config.upstreams {
        let routes = config.egress.routes.iter().filter(|route| route.upstream == *name).count();
        let _ = write!(out, "\n  upstream {name}: {}, {routes} route(s)", upstream.url);
    }
    out
}

fn cost(cost: &Cost) -> String {
    match cost {
        Cost::Fixed(cost) => cost.to_string(),
        Cost::Cases(_) => format!("by case, {} at most", cost.most()),
        Cost::Header { name, max } => format!("as header:{name} says, {max} at most"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cf_g10_the_effective_burst_is_shown() {
        let flags = ["client_ip=6/60s", "all:=9/s:20", "blocked:path=0/s"].map(str::to_owned);
        let config = config::from_flags("http://127.0.0.1:3000", &flags).unwrap();
        assert_eq!(
            summary(&config),
            "ok, 3 limits\n  \
             client_ip: rate 6/min, burst 6 (default: the N of the rate), cost 1, key client_ip, mode enforce\n  \
             all: rate 9/s, burst 20, cost 1, key none, one bucket for all, mode enforce\n  \
             blocked: rate 0/s, burst none, blocks everything, cost 1, key path, mode enforce"
        );
    }

    #[test]
    fn the_limits_of_upstreams_are_shown_as_what_they_are_made_of() {
        let text = "upstreams: { acme: { url: https://acme.example, limit: { requests: 100, per: 10s } } }\n\
                    egress: { routes: [{ upstream: acme, strip: /acme }] }";
        let config = config::parse("t.yaml", text, &|_| None).unwrap();
        assert_eq!(
            summary(&config),
            "ok, 1 limit\n  \
             acme: rate 95/10100ms, burst 5, cost 1, key none, one bucket for all, mode enforce\n  \
             upstream acme: https://acme.example:443, 1 route(s)"
        );
    }
}
