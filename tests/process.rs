//! The built program: exit status, log, signals, and what a crash leaves.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::wildcard_enum_match_arm,
    reason = "a test may fail by a panic, and reads clocks and spawns as it likes"
)]

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Output;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use tempfile::TempDir;

#[path = "it/harness/client.rs"]
#[allow(dead_code, unreachable_pub, missing_docs, reason = "shared with tests/it")]
mod client;
#[path = "process/program.rs"]
#[allow(unreachable_pub, missing_docs, reason = "nothing outside this binary reads it")]
mod program;
#[path = "it/harness/upstream.rs"]
#[allow(dead_code, unreachable_pub, missing_docs, reason = "shared with tests/it")]
mod upstream;

use client::{Connection, request};
use program::{Program, free_port, host, tidegate, tidegate_with, until};
use upstream::{Reply, Upstream};

/// How long anything may take before a test gives up.
const PATIENCE: Duration = Duration::from_secs(30);

/// A directory with a configuration file.
struct File {
    _directory: TempDir,
    path: PathBuf,
}

impl File {
    fn with(text: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tidegate.yaml");
        fs::write(&path, text).unwrap();
        Self { _directory: directory, path }
    }

    fn path(&self) -> &str {
        self.path.to_str().unwrap()
    }
}

/// A configuration on free ports with one bucket for all, and more lines.
fn config(upstream: &Upstream, rate: &str, proxy: &str, more: &str) -> File {
    File::with(&format!(
        "proxy: {{ listen: '127.0.0.1:0', upstream: 'http://{}', {proxy} }}\n\
         limits: [ {{ name: all, key: [], rate: {rate} }} ]\n\
         admin: {{ listen: '127.0.0.1:0' }}\n\
         telemetry: {{ listen: '127.0.0.1:0' }}\n\
         {more}\n",
        upstream.address()
    ))
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

/// An upstream that answers nothing until it is told to.
struct Held {
    upstream: Upstream,
    gate: Arc<(Mutex<bool>, Condvar)>,
}

impl Held {
    /// Holds requests for `/slow` only.
    fn new() -> Self {
        let gate = Arc::new((Mutex::new(false), Condvar::new()));
        let opened = Arc::clone(&gate);
        let upstream = Upstream::scripted(move |received| {
            if received.head.starts_with("GET /slow") {
                let (open, changed) = &*opened;
                drop(changed.wait_while(open.lock().unwrap(), |open| !*open).unwrap());
            }
            Reply::Ok("ok")
        });
        Self { upstream, gate }
    }

    fn release(&self) {
        let (open, changed) = &*self.gate;
        *open.lock().unwrap() = true;
        changed.notify_all();
    }
}

#[test]
fn what_is_done_ends_with_0_and_data_on_stdout() {
    let version = tidegate(&["--version"]);
    assert_eq!(code(&version), 0);
    assert_eq!(stdout(&version), format!("tidegate {}\n", env!("CARGO_PKG_VERSION")));

    let schema = tidegate(&["schema"]);
    assert_eq!(code(&schema), 0);
    let schema: serde_json::Value = serde_json::from_slice(&schema.stdout).unwrap();
    assert!(schema["properties"]["limits"].is_object());

    let file = File::with("proxy: { upstream: 'http://127.0.0.1:3000' }\n");
    let check = tidegate(&["check", "-c", file.path()]);
    assert_eq!((code(&check), stderr(&check)), (0, ""));
    assert_eq!(stdout(&check), format!("{}: ok, 0 limits\n", file.path()));
    let check = tidegate_with("TIDEGATE_CONFIG", file.path(), &["check"]);
    assert_eq!(code(&check), 0);
}

#[test]
fn wrong_arguments_end_with_2() {
    for args in [
        &[][..],
        &["no-such-command"],
        &["run"],
        &["run", "-c", "x", "--upstream", "http://127.0.0.1:1"],
        &["run", "--limit", "client_ip=1/s"],
        &["run", "--upstream", "http://127.0.0.1:1", "--workers", "0"],
        &["--log-format", "xml", "schema"],
        &["limits", "--admin", "nowhere"],
        &["demo", "--seconds", "0"],
    ] {
        let output = tidegate(args);
        assert_eq!(code(&output), 2, "{args:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{args:?}");
    }
    let run = ["run", "--upstream", "http://127.0.0.1:1"];
    let output = tidegate_with("TIDEGATE_LOG", "tidegate=loud", &run);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("tidegate=loud"), "{}", stderr(&output));
}

#[test]
fn an_admin_server_that_is_not_there_ends_with_69() {
    let admin = format!("{0}:{1}", host(1), free_port(host(1)));
    for args in [&["limits"][..], &["peers"], &["buckets", "list"]] {
        let output = tidegate(&[args, &["--admin", &admin]].concat());
        assert_eq!(code(&output), 69, "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(&admin), "{}", stderr(&output));
        assert_eq!(stdout(&output), "");
    }
}

#[test]
fn cf_g3_a_bad_file_ends_with_78_and_every_fault_at_its_place() {
    let file = File::with(
        "proxy:\n  \
           listen: nowhere\n  \
           upstream: ftp://127.0.0.1:3000\n\
         limits:\n  \
           - { name: a, rate: 5, maxburst: 3 }\n  \
           - { name: b, rate: 5/min, burst: 0 }\n  \
           - { name: c, rate: 5/0s }\n  \
           - { name: d, rate: -5/min }\n  \
           - { name: e, rate: 5/min, match: { path: '/a/*/c' } }\n\
         replication: { peers: { dns: peers.test } }\n\
         surprise: 1\n",
    );
    for command in ["check", "run"] {
        let output = tidegate(&[command, "-c", file.path()]);
        let text = stderr(&output);
        assert_eq!(code(&output), 78, "{text}");
        assert_eq!(stdout(&output), "");
        for (place, word) in [
            ("2:11", "nowhere"),
            ("3:13", "ftp"),
            ("5:22", "rate"),
            ("5:25", "maxburst"),
            ("6:36", "burst"),
            ("7:22", "5/0s"),
            ("8:22", "-5"),
            ("9:44", "/a/*/c"),
            ("10:23", "insecure"),
            ("11:1", "surprise"),
        ] {
            let named = text.lines().any(|line| {
                line.contains(&format!("{}:{place}", file.path())) && line.contains(word)
            });
            assert!(named, "{command}: nothing about {word} at {place} in\n{text}");
        }
    }
    let missing = tidegate(&["run", "-c", "/no/such/file.yaml"]);
    assert_eq!(code(&missing), 78);
    assert!(stderr(&missing).contains("/no/such/file.yaml"), "{}", stderr(&missing));
}

#[test]
fn bad_flags_in_place_of_a_file_end_with_78() {
    for (upstream, limit, word) in [
        ("nonsense", "client_ip=1/s", "nonsense"),
        ("http://127.0.0.1:1", "client_ip=often", "often"),
        ("http://127.0.0.1:1", "shoe_size=1/s", "shoe_size"),
    ] {
        let output = tidegate(&["run", "--upstream", upstream, "--limit", limit]);
        assert_eq!(code(&output), 78, "{}", stderr(&output));
        assert!(stderr(&output).contains(word), "{}", stderr(&output));
    }
}

#[test]
fn a_limit_from_flags_is_served_at_the_default_ports() {
    let upstream = Upstream::start();
    let url = format!("http://{}", upstream.address());
    let program = Program::try_run(&["--upstream", &url, "--limit", "client_ip=3/40d"]);
    let program = match program {
        Ok(program) => program,
        // Another program of this machine has one of them, which must be named.
        Err((status, last)) => {
            assert_eq!(status.code(), Some(1), "{last}");
            let named = [":8080", ":9402", ":9403"].iter().any(|port| last.contains(port));
            assert!(named, "{last}");
            return;
        }
    };
    for (listener, port) in [("proxy", 8080), ("admin", 9402), ("telemetry", 9403)] {
        assert_eq!(program.address(listener).port(), port);
    }
    let mut connection = Connection::open(([127, 0, 0, 1], 8080).into());
    let statuses = [(); 4].map(|()| connection.get("/").status);
    assert_eq!(statuses, [200, 200, 200, 429]);
    assert_eq!(program.ask(&["limits"])[0]["name"], "client_ip");
}

#[test]
fn the_log_names_each_bound_address_in_one_structured_line() {
    let upstream = Upstream::start();
    let peers = "replication: { listen: '127.0.0.1:0', insecure: true, join_timeout: 1ms, \
                 peers: { static: ['127.0.0.1:1'] } }";
    let file = config(&upstream, "5/40d", "", peers);
    let program = Program::run(&["-c", file.path()]);
    program.ready();
    let log = program.log();
    let listening: Vec<_> = log.iter().filter(|line| line["message"] == "listening").collect();
    let names: Vec<_> = listening.iter().map(|line| line["listener"].as_str().unwrap()).collect();
    assert_eq!(names, ["proxy", "peer", "admin", "telemetry"]);
    for line in listening {
        let address: std::net::SocketAddr = line["address"].as_str().unwrap().parse().unwrap();
        assert_ne!(address.port(), 0);
        TcpStream::connect(address).unwrap();
    }
    for line in &log {
        for field in ["timestamp", "level", "message", "target"] {
            assert!(line[field].is_string(), "no {field} in {line}");
        }
    }
    assert_eq!(log[0]["message"], "starting");
}

#[test]
fn the_clients_show_what_a_replica_knows() {
    let upstream = Upstream::start();
    let file = config(&upstream, "5/40d", "", "");
    let program = Program::run(&["-c", file.path()]);
    program.ready();
    for status in [200, 200, 200, 200, 200, 429] {
        assert_eq!(program.get("/").status, status);
    }
    let limits = program.ask(&["limits"]);
    assert_eq!(limits[0]["rate"]["text"], "5/40d", "{limits}");
    let bucket = program.ask(&["buckets", "get", "all"]);
    assert_eq!(bucket["admitted"], 5, "{bucket}");
    assert_eq!(bucket["refused"], 1, "{bucket}");
    let buckets = program.ask(&["buckets", "list"]);
    assert_eq!(buckets.as_array().unwrap().len(), 1, "{buckets}");
    let peers = program.ask(&["peers"]);
    assert_eq!(peers["peers"].as_array().unwrap().len(), 0, "{peers}");

    let admin = program.address("admin").to_string();
    let unknown = tidegate(&["buckets", "get", "nothing", "--admin", &admin]);
    assert_eq!(code(&unknown), 1);
    assert!(stderr(&unknown).contains("nothing"), "{}", stderr(&unknown));
}

#[test]
fn ob_g3_the_access_log_says_who_refused_and_never_what_a_client_sent() {
    let upstream = Upstream::start();
    let more = "telemetry: { listen: '127.0.0.1:0', access_log: on }";
    let file = File::with(&format!(
        "proxy: {{ listen: '127.0.0.1:0', upstream: 'http://{}' }}\n\
         limits:\n\
         - {{ name: large, key: [], rate: 1000/40d }}\n\
         - {{ name: small, key: ['header:x-key', 'cookie:sid'], rate: 1/40d }}\n\
         - {{ name: trial, key: [], rate: 1/40d, mode: shadow }}\n\
         admin: {{ listen: '127.0.0.1:0' }}\n{more}\n",
        upstream.address()
    ));
    // Whoever switches it on sees it, whatever else is logged.
    let program = Program::run(&["-c", file.path()]);
    program.ready();
    let admin = program.address("admin").to_string();
    let changed = tidegate(&["log", "warn", "--admin", &admin]);
    assert_eq!(stdout(&changed), "the log filter is now `warn`; it was `info`\n");
    let fields = [("x-key", "k3y"), ("cookie", "sid=s3cr3t"), ("authorization", "hunter2")];
    let mut connection = program.connect();
    for status in [200, 429] {
        connection.send(request("GET", "/a%20b?token=q5ery", &fields, ""));
        assert_eq!(connection.answer().status, status);
    }
    connection.send(request("GET", "*", &[], ""));
    assert_eq!(connection.answer().status, 400);
    let lines = || -> Vec<serde_json::Value> {
        let log = program.log().into_iter();
        log.filter(|line| line["target"] == "access").collect()
    };
    until("three lines", || lines().len() == 3);
    let lines = lines();
    let (first, second, third) = (&lines[0], &lines[1], &lines[2]);
    assert_eq!(
        (&first["verdict"], &first["limit"]),
        (&"admitted".into(), &"large,small,trial".into())
    );
    assert_eq!((&first["status"], &first["outcome"]), (&200.into(), &"forwarded".into()));
    assert_eq!((&second["verdict"], &second["limit"]), (&"refused".into(), &"small".into()));
    assert_eq!((&second["status"], &second["outcome"]), (&429.into(), &"limited".into()));
    assert_eq!(second["shadow_refused"], "trial");
    assert_eq!((&first["held"], &second["held"]), (&0.0.into(), &0.0.into()));
    assert_eq!((&second["method"], &second["path"]), (&"GET".into(), &"/a%20b".into()));
    assert_eq!(second["client"], "127.0.0.1");
    assert!(second["bytes"].as_u64().unwrap() > 0 && second["seconds"].is_f64());
    // The bucket is named as everywhere else.
    let bucket = program.ask(&["buckets", "get", "--id", second["bucket"].as_str().unwrap()]);
    assert_eq!(bucket["limit"], "small");
    assert_eq!((&third["verdict"], &third["status"]), (&"not_asked".into(), &400.into()));
    let text = format!("{lines:?}");
    for secret in ["k3y", "s3cr3t", "hunter2", "q5ery"] {
        assert!(!text.contains(secret), "{secret} is in {text}");
    }
}

#[test]
fn without_an_access_log_requests_leave_no_line() {
    let upstream = Upstream::start();
    let file = config(&upstream, "5/40d", "", "");
    let program = Program::run(&["-c", file.path()]);
    program.ready();
    let before = program.log().len();
    assert_eq!(program.get("/").status, 200);
    program.signal("TERM");
    until("it leaves", || program.log().len() > before);
    assert!(program.log().iter().all(|line| line["target"] != "access"));
}

#[test]
fn the_program_explains_and_resets_and_shows_a_snapshot() {
    let upstream = Upstream::start();
    let file = config(&upstream, "1/40d", "", "");
    let program = Program::run(&["-c", file.path()]);
    program.ready();
    assert_eq!([program.get("/").status, program.get("/").status], [200, 429]);
    assert_eq!(program.ask(&["explain", "/"])["answer"]["refused_by"], "all");
    let top = program.ask(&["buckets", "top"]);
    assert_eq!(top["buckets"][0]["refused"], 1, "{top}");
    assert_eq!(program.ask(&["top"])["limits"][0]["refused"], 1);
    assert_eq!(program.ask(&["buckets", "reset", "all"])["buckets"], 1);
    assert_eq!(program.ask(&["explain", "/"])["answer"]["forwarded"], true);
    assert_eq!(program.get("/").status, 200);

    let admin = program.address("admin").to_string();
    let bad = tidegate(&["log", "tidegate=loud", "--admin", &admin]);
    assert_eq!(code(&bad), 2);
    assert!(stderr(&bad).contains("filter: "), "{}", stderr(&bad));
}

#[test]
fn a_port_in_use_is_named_and_ends_with_1() {
    let upstream = Upstream::start();
    let file = config(&upstream, "5/40d", "", "");
    let running = Program::run(&["-c", file.path(), "--workers", "2"]);
    let other = TcpListener::bind((host(1), 0)).unwrap();
    let held = [
        ("proxy", running.address("proxy")),
        ("admin", running.address("admin")),
        ("telemetry", running.address("telemetry")),
        ("replication", other.local_addr().unwrap()),
    ];
    for (section, address) in held {
        let text = fs::read_to_string(&file.path).unwrap();
        let text = if section == "replication" {
            let peers = "insecure: true, peers: { static: ['127.0.0.1:1'] }";
            format!("{text}replication: {{ listen: '{address}', {peers} }}\n")
        } else {
            let free = format!("{section}: {{ listen: '127.0.0.1:0'");
            assert!(text.contains(&free));
            text.replace(&free, &format!("{section}: {{ listen: '{address}'"))
        };
        let second = File::with(&text);
        let output = tidegate(&["run", "-c", second.path(), "--workers", "2"]);
        let error = stderr(&output);
        assert_eq!(code(&output), 1, "{section}: {error}");
        let last = error.lines().last().unwrap();
        assert!(last.starts_with(&format!("tidegate: {section}: ")), "{error}");
        assert!(last.contains(&address.to_string()), "{error}");
    }
    assert_eq!(running.get("/").status, 200);
}

#[test]
fn lc_g1_sigterm_finishes_what_runs_and_leaves_in_order() {
    let held = Held::new();
    let file = config(&held.upstream, "100/40d", "drain_delay: 100ms, drain_timeout: 20s", "");
    let program = Program::run(&["-c", file.path()]);
    program.ready();
    let mut kept = program.connect();
    assert_eq!(kept.get("/").field("connection"), None);
    let mut running = program.connect();
    running.send(request("GET", "/slow", &[], ""));
    until("it runs", || held.upstream.count() == 2);

    program.signal("TERM");
    until("it is leaving", || program.has_said("leaving: not ready, still serving"));
    let ready = program.telemetry("/readyz");
    assert_eq!((ready.status, ready.text()), (503, "draining\n"));
    assert_eq!(program.telemetry("/livez").status, 200);
    until("it lets no more in", || program.has_said("no new connections"));
    assert!(kept.is_ended(), "an idle connection is kept");
    held.release();
    let answer = running.answer();
    assert_eq!((answer.status, answer.text()), (200, "ok"));
    assert_eq!(answer.field("connection"), Some("close"));
    assert!(running.is_ended());

    let (status, log) = program.ended();
    assert_eq!(status.code(), Some(0));
    let messages: Vec<_> = log.iter().map(|line| line["message"].as_str().unwrap()).collect();
    let wanted = [
        "starting",
        "listening",
        "ready",
        "leaving: not ready, still serving",
        "no new connections",
        "left",
    ];
    let mut rest = messages.iter();
    for message in wanted {
        assert!(rest.any(|said| *said == message), "{message} is out of order in {messages:#?}");
    }
    assert_eq!(rest.count(), 0, "something comes after the end: {messages:#?}");
    let leaving = log.iter().find(|line| line["message"] == wanted[3]).unwrap();
    assert_eq!(leaving["reason"], "SIGTERM");
}

#[test]
fn lc_g2_a_kept_connection_is_told_to_close_while_the_replica_leaves() {
    let upstream = Upstream::start();
    let file = config(&upstream, "100/40d", "drain_delay: 1h", "");
    let program = Program::run(&["-c", file.path()]);
    program.ready();
    let mut kept = program.connect();
    assert_eq!(kept.get("/").field("connection"), None);
    program.signal("INT");
    until("it is leaving", || program.has_said("leaving: not ready, still serving"));
    until("the connection is told", || {
        let answer = kept.get("/");
        assert_eq!(answer.status, 200);
        answer.field("connection") == Some("close")
    });
    assert!(kept.is_ended());
    // New ones are still let in.
    assert_eq!(program.get("/").status, 200);
}

#[test]
fn a_second_signal_ends_at_once_with_1() {
    let held = Held::new();
    let file = config(&held.upstream, "100/40d", "drain_delay: 1h, drain_timeout: 1h", "");
    let program = Program::run(&["-c", file.path()]);
    program.ready();
    let mut running = program.connect();
    running.send(request("GET", "/slow", &[], ""));
    until("it runs", || held.upstream.count() == 1);
    program.signal("TERM");
    until("it is leaving", || program.has_said("leaving: not ready, still serving"));
    program.signal("TERM");
    let (status, last) = program.last_words();
    assert_eq!(status.code(), Some(1));
    assert!(last.starts_with("tidegate: SIGTERM again: left at once"), "{last}");
    held.release();
}

#[test]
fn lc_g3_connections_that_say_nothing_do_not_hold_up_the_end() {
    let upstream = Upstream::start();
    let file = config(&upstream, "100/40d", "drain_delay: 0s, drain_timeout: 2s", "");
    let program = Program::run(&["-c", file.path()]);
    program.ready();
    let silent: Vec<_> = (0..50).map(|_| program.connect()).collect();
    let mut idle: Vec<_> = (0..50).map(|_| program.connect()).collect();
    for connection in &mut idle {
        assert_eq!(connection.get("/").status, 200);
    }
    let mut half = program.connect();
    half.send("GET / HTTP/1.1\r\nHost: x\r\nX-Slow");
    program.signal("TERM");
    let (status, log) = program.ended();
    assert_eq!(status.code(), Some(0), "{log:#?}");
    drop(silent);
}

#[test]
fn what_a_killed_replica_told_stays_known_and_what_one_that_leaves_spent_too() {
    let upstream = Upstream::start();
    let port = free_port(host(11));
    let [a, b] = [11, 12].map(|number| format!("{}:{port}", host(number)));
    let file = |listen: &str| {
        let peers = format!(
            "replication: {{ listen: '{listen}', insecure: true, join_timeout: 20s, \
             peers: {{ static: ['{a}', '{b}'] }} }}"
        );
        config(&upstream, "100/40d", "drain_delay: 0s", &peers)
    };
    let (file_a, file_b) = (file(&a), file(&b));
    let first = Program::run(&["-c", file_a.path()]);
    let second = Program::run(&["-c", file_b.path()]);
    first.ready();
    second.ready();
    let spend = |program: &Program, count: usize| {
        let mut connection = program.connect();
        for _ in 0..count {
            assert_eq!(connection.get("/").status, 200);
        }
    };
    let left = |program: &Program| {
        let bucket = program.ask(&["buckets", "get", "all"]);
        bucket["level"].as_f64().unwrap().round() as i64
    };
    spend(&first, 30);
    spend(&second, 20);
    until("both know", || left(&first) == 50 && left(&second) == 50);

    second.signal("KILL");
    until("the loss is seen", || {
        let peers = first.ask(&["peers"]);
        let peers = peers["peers"].as_array().unwrap();
        peers.iter().all(|peer| peer["connected"] != true)
    });
    assert_eq!(left(&first), 50);
    spend(&first, 5);
    drop(second);

    // It comes back and knows; what it spends then counts beside what it spent.
    let second = Program::run(&["-c", file_b.path()]);
    second.ready();
    assert_eq!(left(&second), 45);
    spend(&second, 10);
    // The end is not held up until the news has gone out: it goes with it.
    second.signal("TERM");
    let (status, _) = second.ended();
    assert_eq!(status.code(), Some(0));
    assert_eq!(left(&first), 35);
}

/// A library that moves the wall clock of the program by the seconds in a file.
fn wall_clock(folder: &std::path::Path) -> String {
    let library = folder.join("wall_clock.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/process/wall_clock.c");
    let mut compiler = std::process::Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).arg("-ldl");
    assert!(compiler.status().unwrap().success(), "a C compiler is needed, as for linking");
    library.display().to_string()
}

#[test]
fn ba_g12_ba_g13_steps_of_the_wall_clock_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let library = wall_clock(folder.path());
    let offset = folder.path().join("offset");
    std::fs::write(&offset, "0").unwrap();
    let upstream = Upstream::start();
    let file = config(&upstream, "1/60s", "", "");
    let offset_name = offset.display().to_string();
    let variable = ("WALL_CLOCK_OFFSET", offset_name.as_str());
    let program = Program::run_preloaded(&library, variable, &["-c", file.path()]);
    program.ready();
    let date = |program: &Program| {
        let head = program.get("/").head;
        let date = head.lines().find_map(|line| line.strip_prefix("date: ").map(str::to_owned));
        date.unwrap_or_else(|| panic!("no date in {head}"))
    };
    assert_eq!(program.get("/").status, 200);
    let before = date(&program);
    for step in ["10800", "-10800", "7200", "-86400"] {
        std::fs::write(&offset, step).unwrap();
        // The step has arrived once the answers' date has moved by it.
        until("the wall clock has moved", || {
            date(&program)[..17] != before[..17] || date(&program)[17..19] != before[17..19]
        });
        let refused = program.get("/");
        assert_eq!(refused.status, 429, "after a step of {step} s");
        let retry: u64 = refused
            .head
            .lines()
            .find_map(|line| line.strip_prefix("retry-after: "))
            .unwrap()
            .parse()
            .unwrap();
        assert!((1..=60).contains(&retry), "{retry} after a step of {step} s");
    }
    assert_eq!(upstream.count(), 1);
}

#[test]
fn lc_g6_too_many_connections_for_the_open_files_are_survived() {
    let upstream = Upstream::start();
    let file = config(&upstream, "1000/40d", "", "");
    let mut program = Program::run_with_files(128, &["-c", file.path(), "--workers", "1"]);
    program.ready();
    for listener in ["proxy", "admin", "telemetry"] {
        let address = program.address(listener);
        let crowd: Vec<_> = (0..300).map(|_| TcpStream::connect(address).unwrap()).collect();
        if listener == "proxy" {
            until("accepting fails", || program.has_said("a connection cannot be accepted"));
        }
        drop(crowd);
        assert_eq!(program.get("/").status, 200, "after a crowd at {listener}");
        assert_eq!(program.telemetry("/readyz").status, 200, "after a crowd at {listener}");
        assert_eq!(program.ask(&["limits"])[0]["name"], "all");
    }
    assert!(program.is_running());
}

#[test]
fn the_demo_of_egress_ends_when_every_caller_has_its_answer() {
    let output = tidegate(&["demo", "--egress", "--replicas", "2"]);
    let text = stdout(&output);
    assert_eq!(code(&output), 0, "{}\n{text}", stderr(&output));
    assert!(text.contains("200 of 200 callers got their answer"), "{text}");
    assert_eq!(code(&tidegate(&["demo", "--egress", "--load"])), 2);
}

#[test]
fn the_demo_shows_three_replicas_and_ends_with_0() {
    let output = tidegate(&["demo", "--seconds", "2", "--load"]);
    let text = stdout(&output);
    assert_eq!(code(&output), 0, "{}\n{text}", stderr(&output));
    assert_eq!(stderr(&output), "");
    for needle in [
        "3 replicas enforce 100/s together",
        "replica 1   proxy 127.0.0.1:",
        "replica 3   proxy 127.0.0.1:",
        "curl -i http://127.0.0.1:",
        "admitted  refused     ideal",
        "    1 s ",
        "    2 s ",
    ] {
        assert!(text.contains(needle), "{needle} is missing in\n{text}");
    }
    let summary = text.lines().last().unwrap();
    let numbers: Vec<u64> = summary
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect();
    let [requests, admitted, refused, ideal, ..] = numbers[..] else { panic!("{summary}") };
    assert_eq!(requests, admitted + refused, "{summary}");
    assert!(refused > 0 && admitted > 0, "{summary}");
    // Generous: the figures themselves are measured elsewhere.
    assert!(admitted.abs_diff(ideal) * 5 <= ideal, "{summary}");

    let bad = tidegate(&["demo", "--limit", "often"]);
    assert_eq!(code(&bad), 78, "{}", stderr(&bad));
}

#[test]
fn nobody_who_reads_the_output_is_no_failure() {
    let mut child = std::process::Command::new("sh")
        .args(["-c", "\"$0\" schema | head -c 1 >/dev/null; exit 0"])
        .arg(env!("CARGO_BIN_EXE_tidegate"))
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut error = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut error).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(error, "");
}
