//! A replica whose file changes under it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, JoinHandle};

use tidegate::app::{Addresses, App, Handle, Options};
use tidegate::config::{self, reload::Status};
use tokio::sync::mpsc;

use crate::harness::{Connection, Upstream, eventually};

/// A replica in this process that follows its file; dropping it ends it.
struct Replica {
    file: PathBuf,
    addresses: Addresses,
    handle: Handle,
    stop: mpsc::Sender<&'static str>,
    thread: Option<JoinHandle<()>>,
}

impl Replica {
    /// Starts with the configuration in `file`.
    fn start(file: &Path) -> Self {
        let config = config::load(file, &|_| None).unwrap_or_else(|error| panic!("{error}"));
        let path = file.to_owned();
        let (stop, stopped) = mpsc::channel(2);
        let (started, bound) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let options = Options {
                    workers: 1,
                    name: "r".into(),
                    ip: Some([127, 0, 0, 1].into()),
                    addresses: None,
                };
                let (app, addresses) = App::bind(config, options).unwrap();
                let app = app.following(path).unwrap();
                started.send((addresses, app.handle())).unwrap();
                app.run(stopped).await.unwrap();
            });
        });
        let (addresses, handle) = bound.recv().unwrap();
        Self { file: file.to_owned(), addresses, handle, stop, thread: Some(thread) }
    }

    fn status(&self) -> Status {
        self.handle.config.borrow().clone()
    }

    /// Waits until what is in the file has been taken or refused.
    fn settle(&self, what: &str, done: impl Fn(&Status) -> bool) -> Status {
        eventually(what, || done(&self.status()));
        self.status()
    }

    /// Waits until another configuration than `before` is in force.
    fn reloaded(&self, before: &Status) -> Status {
        self.settle("the reload", |status| status.hash != before.hash)
    }

    /// The status codes of GETs of one key.
    fn statuses(&self, key: &str, count: usize) -> Vec<u16> {
        let mut connection = Connection::open(self.addresses.proxy);
        (0..count).map(|_| connection.get_with("/", &[("x-key", key)]).status).collect()
    }

    fn metrics(&self) -> String {
        Connection::open(self.addresses.telemetry).get("/metrics").text().to_owned()
    }

    fn assert_metric(&self, line: &str) {
        let metrics = self.metrics();
        assert!(metrics.lines().any(|l| l == line), "{line} is not in\n{metrics}");
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        // Either may be gone already when a test has failed.
        let _ = self.stop.try_send("the test is over");
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A file with these limits, in front of `upstream`.
fn text(upstream: &Upstream, proxy: &str, limits: &str) -> String {
    format!(
        "proxy: {{ listen: 127.0.0.1:0, upstream: 'http://{}', drain_delay: 0s{proxy} }}
limits: [{limits}]
replication: {{ listen: 127.0.0.1:0 }}
admin: {{ listen: 127.0.0.1:0 }}
telemetry: {{ listen: 127.0.0.1:0 }}
",
        upstream.address()
    )
}

fn by_key(name: &str, rate: &str) -> String {
    format!("{{ name: {name}, key: [header:x-key], rate: {rate} }}")
}

#[test]
fn cf_g1_a_file_that_changes_is_in_force_within_seconds() {
    let upstream = Upstream::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("limits.yaml");
    let with = |rate: &str| text(&upstream, "", &by_key("r", rate));
    fs::write(&file, with("100/h")).unwrap();
    let replica = Replica::start(&file);
    assert_eq!(replica.statuses("first", 3), [200, 200, 200]);

    let before = replica.status();
    let new = dir.path().join("new.tmp");
    fs::write(&new, with("1/h")).unwrap();
    fs::rename(&new, &replica.file).unwrap();
    let renamed = replica.reloaded(&before);
    assert_eq!(replica.statuses("renamed", 2), [200, 429]);
    assert_ne!(renamed.loaded_at, before.loaded_at);
    replica.assert_metric("tidegate_config_reloads_total{result=\"success\"} 1");
    let hash = renamed.hash.clone().unwrap();
    replica.assert_metric(&format!("tidegate_config_info{{hash=\"{hash}\"}} 1"));

    fs::write(&file, with("2/h")).unwrap();
    let rewritten = replica.reloaded(&renamed);
    assert_eq!(replica.statuses("rewritten", 3), [200, 200, 429]);

    fs::remove_file(&file).unwrap();
    fs::write(&file, with("3/h")).unwrap();
    replica.reloaded(&rewritten);
    assert_eq!(replica.statuses("made anew", 4), [200, 200, 200, 429]);
    replica.assert_metric("tidegate_config_reloads_total{result=\"success\"} 3");
    replica.assert_metric("tidegate_config_reloads_total{result=\"failure\"} 0");
}

#[test]
fn cf_g1_a_config_map_that_is_exchanged_is_in_force_within_seconds() {
    let upstream = Upstream::start();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for (version, rate) in [("..1", "9/h"), ("..2", "1/h")] {
        fs::create_dir(at(version)).unwrap();
        let text = text(&upstream, "", &by_key("r", rate));
        fs::write(at(version).join("limits.yaml"), text).unwrap();
    }
    symlink("..1", at("..data")).unwrap();
    symlink("..data/limits.yaml", at("limits.yaml")).unwrap();
    let replica = Replica::start(&at("limits.yaml"));
    let before = replica.status();
    symlink("..2", at("..data_tmp")).unwrap();
    fs::rename(at("..data_tmp"), at("..data")).unwrap();
    fs::remove_dir_all(at("..1")).unwrap();
    replica.reloaded(&before);
    assert_eq!(replica.statuses("k", 2), [200, 429]);
}

#[test]
fn cf_g3_a_bad_file_keeps_the_old_limits_and_shows() {
    let upstream = Upstream::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("limits.yaml");
    let good = text(&upstream, "", &by_key("r", "2/h"));
    fs::write(&file, &good).unwrap();
    let replica = Replica::start(&file);
    let before = replica.status();
    assert_eq!(replica.statuses("k", 3), [200, 200, 429]);

    let bad = text(&upstream, "", "{ name: r, rate: 9/h, max_burst: 3, rates: 1 }");
    fs::write(&file, bad).unwrap();
    let refused = replica.settle("the refusal", |status| status.last_error.is_some());
    let problems = refused.last_error.clone().unwrap();
    assert!(problems.contains(":2:32: limits[0].max_burst: unknown field"), "{problems}");
    assert_eq!(problems.lines().count(), 2);
    assert_eq!((&refused.hash, refused.loaded_at), (&before.hash, before.loaded_at));
    assert_eq!(replica.statuses("k", 1), [429]);
    replica.assert_metric("tidegate_config_reloads_total{result=\"failure\"} 1");

    // Cut in the middle of a write that never ends.
    fs::write(&file, &good[..good.len() / 2]).unwrap();
    let cut = replica.settle("the other refusal", |status| {
        status.last_error.as_ref().is_some_and(|error| *error != problems)
    });
    assert_eq!(cut.hash, before.hash);
    assert_eq!(replica.statuses("k", 1), [429]);

    fs::write(&file, good).unwrap();
    replica.settle("the repair", |status| status.last_error.is_none());
    assert_eq!(replica.statuses("k", 1), [429], "what was spent stays");
    replica.assert_metric("tidegate_config_reloads_total{result=\"failure\"} 2");
}

#[test]
fn a_hangup_reloads_at_once_and_says_what_needs_a_restart() {
    let upstream = Upstream::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("limits.yaml");
    let limit = "{ name: r, rate: 2/h }";
    fs::write(&file, text(&upstream, "", limit)).unwrap();
    let replica = Replica::start(&file);
    let before = replica.status();
    let proxy = ", trusted_proxies: [127.0.0.1], headers: off, max: { headers: 50 }";
    fs::write(
        &file,
        text(&upstream, proxy, limit).replace("admin:", "limiter: { max_buckets: 7 }\nadmin:"),
    )
    .unwrap();
    let pid = std::process::id().to_string();
    assert!(Command::new("kill").args(["-HUP", &pid]).status().unwrap().success());
    let after = replica.reloaded(&before);
    assert_eq!(after.needs_restart, ["proxy.max.headers", "limiter.max_buckets"]);
    let mut connection = Connection::open(replica.addresses.proxy);
    let answer = connection.get_with("/", &[("x-forwarded-for", "203.0.113.5")]);
    assert_eq!((answer.status, answer.field("ratelimit")), (200, None));
    let mut keys = Vec::new();
    replica.handle.limiter.store().for_each(|_, slot| keys.push(slot.key.clone().unwrap()));
    let keys = keys.iter().map(|key| tidegate::limiter::key::decode(key).unwrap()[0].to_string());
    assert_eq!(keys.collect::<Vec<_>>(), ["203.0.113.5"]);
}
