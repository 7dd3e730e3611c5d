//! A replica whose file changes under it.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, JoinHandle};

use tidegate::app::{Addresses, App, Handle, Options};
use tidegate::config::{self, reload::Status};
use tidegate::wire::tidegate::admin::v1::ListBucketsRequest;
use tidegate::wire::tidegate::admin::v1::admin_client::AdminClient;
use tokio::sync::{mpsc, watch};

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
        Self::start_among(file, None)
    }

    /// Starts with the peers that `addresses` lists.
    fn start_among(file: &Path, addresses: Option<watch::Receiver<BTreeSet<SocketAddr>>>) -> Self {
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
                    addresses,
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

    /// The tokens left for a key of the limit called `name`.
    fn left(&self, name: &str, key: &str) -> Option<u64> {
        let limits = self.handle.limiter.limits();
        let (_, limit) = limits.find(name)?;
        let id = limit.bucket_id(limit.rule().key_from_text(&[key], 64).unwrap().as_bytes());
        self.handle.limiter.with_existing(id, |slot, _| slot.bucket.level().whole())
    }

    /// Lists the one bucket that there is, as often as said: level and burst in
    /// micro-tokens.
    fn listed(&self, times: usize) -> Vec<(i64, i64)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let address = format!("http://{}", self.addresses.admin);
            let mut client = AdminClient::connect(address).await.unwrap();
            let mut listed = Vec::new();
            for _ in 0..times {
                let answer = client.list_buckets(ListBucketsRequest::default()).await.unwrap();
                let mut stream = answer.into_inner();
                while let Some(message) = stream.message().await.unwrap() {
                    listed.extend(message.buckets.iter().map(|b| (b.level_micros, b.burst_micros)));
                }
            }
            listed
        })
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
    replica.handle.limiter.store().for_each(|_, slot| keys.push(slot.key().unwrap().to_vec()));
    let keys = keys.iter().map(|key| tidegate::limiter::key::decode(key).unwrap()[0].to_string());
    assert_eq!(keys.collect::<Vec<_>>(), ["203.0.113.5"]);
}

#[test]
fn a_renamed_and_raised_limit_rolls_out_replica_by_replica() {
    let upstream = Upstream::start();
    let dir = tempfile::tempdir().unwrap();
    let files = ["a.yaml", "b.yaml"].map(|name| dir.path().join(name));
    let with = |limit: &str| {
        text(&upstream, "", limit).replace(
            "replication: {",
            "replication: { peers: { static: ['127.0.0.1:9'] }, insecure: true, join_timeout: 100ms,",
        )
    };
    let (listed, addresses) = watch::channel(BTreeSet::new());
    let replicas = files.each_ref().map(|file| {
        fs::write(file, with(&by_key("old", "10/40d"))).unwrap();
        Replica::start_among(file, Some(addresses.clone()))
    });
    let [a, b] = &replicas;
    listed.send_replace(replicas.iter().filter_map(|r| r.addresses.peer).collect());
    eventually("the session", || {
        replicas.iter().all(|r| r.metrics().contains("tidegate_peers{state=\"live\"} 1"))
    });
    assert_eq!(a.statuses("k", 4), [200; 4]);
    eventually("what the first spent", || b.left("old", "k") == Some(6));

    let new = with("{ name: new, was: old, key: [header:x-key], rate: 20/40d }");
    let before = a.status();
    fs::write(&files[0], &new).unwrap();
    a.reloaded(&before);
    assert_eq!(a.left("new", "k"), Some(16), "the deficit stays");
    // One bucket for both, by both names and under both quotas.
    assert_eq!(a.statuses("k", 3), [200; 3]);
    eventually("what the renamed one spent", || b.left("old", "k") == Some(3));
    assert_eq!(b.statuses("k", 1), [200]);
    eventually("what the old one spent", || a.left("new", "k") == Some(12));

    let before = b.status();
    fs::write(&files[1], &new).unwrap();
    b.reloaded(&before);
    assert_eq!(b.left("new", "k"), Some(12));
    assert_eq!(b.statuses("k", 13).iter().filter(|status| **status == 200).count(), 12);
    eventually("that nothing is left", || a.left("new", "k") == Some(0));
    assert_eq!(a.statuses("k", 1), [429]);
}

#[test]
fn ad_g1_a_listing_shows_the_quota_in_force() {
    let upstream = Upstream::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("limits.yaml");
    let with = |n: u64| text(&upstream, "", &by_key("r", &format!("{n}/40d")));
    fs::write(&file, with(5)).unwrap();
    let replica = Replica::start(&file);
    let reload = |n| {
        let before = replica.status();
        fs::write(&file, with(n)).unwrap();
        replica.reloaded(&before);
    };
    // What came back meanwhile is less than a thousandth.
    let listed = |times| -> Vec<(i64, i64)> {
        let rows = replica.listed(times);
        rows.iter().map(|(level, burst)| (level / 1000, burst / 1000)).collect()
    };
    assert_eq!(replica.statuses("k", 5), [200; 5]);
    reload(50);
    assert_eq!(replica.statuses("k", 20), [200; 20]);
    assert_eq!(listed(1), [(25_000, 50_000)]);
    reload(3);
    assert_eq!(listed(100), [(0, 3000); 100]);
    assert_eq!(replica.statuses("k", 1), [429]);
}
