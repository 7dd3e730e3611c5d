//! Reads `src/` and holds it to the architecture: a module imports strictly
//! lower layers only, pure modules stay pure, clocks and spawning have one place
//! each. Code under `#[cfg(test)]` is free.
//!
//! The reading is by tokens, not by a full parser: comments and literals are
//! blanked, `use` trees are expanded, `self` and `super` are resolved.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::wildcard_enum_match_arm,
    reason = "a test may fail by a panic, and reads clocks and spawns as it likes"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The layers, lowest first. `src/lib.rs` documents the same table.
const LAYERS: &[(u8, &[&str])] = &[
    (0, &["time", "wire", "settings", "sync"]),
    (1, &["limiter", "runtime", "tls"]),
    (2, &["replication", "telemetry"]),
    (3, &["discovery", "deferred"]),
    (4, &["proxy", "peer"]),
    (5, &["admin"]),
    (6, &["config"]),
    (7, &["app"]),
    (8, &["main", "cli"]),
];

/// No I/O, no clock, no chance.
const PURE: &[&str] = &["limiter", "replication"];

/// What a pure module may use beside other pure modules.
const PURE_FOUNDATION: &[&str] = &["time", "settings", "sync"];

/// Words that a pure module does not say.
const IMPURE_WORDS: &[&str] = &[
    "tokio",
    "tokio_util",
    "tonic",
    "hyper",
    "hyper_util",
    "socket2",
    "hickory_resolver",
    "rand",
    "getrandom",
];

/// Paths that a pure module does not name; a final `~` stands for any ending.
const IMPURE_PATHS: &[&str] = &[
    "h2::~",
    "std::net::Tcp~",
    "std::net::Udp~",
    "std::net::ToSocketAddrs",
    "std::os",
    "std::fs",
    "std::io",
    "std::env",
    "std::process",
    "std::thread",
    "std::hash::RandomState",
    "std::collections::hash_map::RandomState",
];

/// Reading a clock.
const CLOCK_FILE: &str = "src/time.rs";
const CLOCK_PATHS: &[&str] =
    &["Instant::now", "SystemTime::now", "Instant::elapsed", "SystemTime::elapsed"];
const CLOCK_TYPES: &[&str] = &["Instant", "SystemTime"];

/// Starting a task or a thread.
const SPAWN_FILE: &str = "src/runtime/supervisor.rs";
const SPAWN_PATHS: &[&str] = &[
    "tokio::spawn",
    "tokio::task::spawn~",
    "task::spawn~",
    "std::thread::spawn",
    "std::thread::scope",
    "std::thread::Builder",
    "thread::spawn",
    "thread::scope",
    "thread::Builder",
    "Handle::current",
    "Handle::try_current",
];
const SPAWN_WORDS: &[&str] = &["JoinSet", "TaskTracker", "LocalSet", "spawn_blocking"];

/// Where an error may be anything.
const ANYHOW: &[&str] = &["app", "cli", "main"];

#[test]
fn the_source_keeps_to_the_architecture() {
    let files = source_files();
    assert!(files.len() > 10, "only {} files were found", files.len());
    let violations = violations_in_tree(&files);
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

#[test]
fn the_table_in_the_documentation_is_the_one_enforced() {
    let text = fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let (layers, pure) = documented_layers(&text);
    let enforced: BTreeMap<u8, BTreeSet<String>> = LAYERS
        .iter()
        .map(|(layer, names)| (*layer, names.iter().map(ToString::to_string).collect()))
        .collect();
    assert_eq!(layers, enforced);
    assert_eq!(pure, PURE.iter().map(ToString::to_string).collect());
}

#[test]
fn every_module_of_the_crate_has_a_layer() {
    let text = fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let modules = declared_modules(&text);
    assert!(modules.contains(&"limiter".to_owned()), "{modules:?}");
    for module in modules {
        assert!(layer(&module).is_some(), "`{module}` is not in the table");
    }
}

// Each rule has texts that must fail; a rule without a failing text proves
// nothing.

#[test]
fn an_import_that_points_up_or_sideways_is_found() {
    for (file, text) in [
        ("src/proxy/service.rs", "use crate::config::Config;"),
        ("src/proxy/service.rs", "use crate::peer::Mesh;"),
        ("src/proxy/mod.rs", "use crate::{limiter::Limiter, admin};"),
        (
            "src/proxy/mod.rs",
            "use crate::{\n    limiter::{Check, Decision},\n    app::{self, Bound},\n};",
        ),
        ("src/proxy/mod.rs", "pub use crate::config as c;"),
        ("src/proxy/mod.rs", "use super::config::Config;"),
        ("src/proxy/a/b.rs", "use super::super::super::config::Config;"),
        ("src/proxy/mod.rs", "mod inner { use super::super::config::Config; }"),
        ("src/proxy/mod.rs", "fn f() -> crate::config::Config { todo!() }"),
        ("src/proxy/mod.rs", "fn f() { let x = <crate::app::App as Default>::default(); }"),
        ("src/proxy/mod.rs", "use self::super::config::Config;"),
        ("src/proxy/mod.rs", "use crate::*;"),
        ("src/proxy/mod.rs", "use crate::{self as all};"),
        ("src/proxy/mod.rs", "use crate::nowhere::X;"),
        ("src/time.rs", "use crate::runtime::Drain;"),
        ("src/config/mod.rs", "use crate::app;"),
        ("src/nowhere/mod.rs", "struct X;"),
        ("src/limiter/mod.rs", "use crate::runtime::Drain;"),
    ] {
        assert_fails(file, text, "layer");
    }
    for (file, text) in [
        ("src/proxy/mod.rs", "use crate::{limiter::Limiter, time::{Clock, Timestamp}};"),
        ("src/proxy/service.rs", "use super::headers::Fields; use crate::proxy::Config;"),
        ("src/proxy/a/b.rs", "use super::super::config::Limits;"),
        ("src/proxy/mod.rs", "mod inner { use super::config::Config; }"),
        ("src/proxy/mod.rs", "// use crate::config::Config;\nconst X: &str = \"crate::config\";"),
        (
            "src/proxy/mod.rs",
            "/* /* crate::app */ crate::config */ const X: &str = r#\"\"crate::app\"#;",
        ),
        ("src/proxy/mod.rs", "pub(in crate::proxy) struct X; pub(crate) struct Y;"),
        ("src/proxy/mod.rs", "#[cfg(test)]\nmod tests {\n    use crate::app::App;\n}"),
        ("src/proxy/mod.rs", "#[cfg(test)]\nuse crate::app::App;"),
        ("src/main.rs", "use tidegate::cli; fn f<'a>(x: &'a str) -> char { '\"' }"),
    ] {
        assert_passes(file, text);
    }
    // What follows a test module is judged again.
    assert_fails(
        "src/proxy/mod.rs",
        "#[cfg(test)]\n#[allow(x)]\nfn f(x: [u8; 2]) { '}'; \"}\"; }\nuse crate::app::App;",
        "layer",
    );
}

#[test]
fn an_impure_word_in_a_pure_module_is_found() {
    for text in [
        "use tokio::sync::watch;",
        "use h2::client;",
        "fn f(s: tonic::Status) {}",
        "use hyper::Request;",
        "use std::net::{IpAddr, TcpStream};",
        "fn f() { std::net::UdpSocket::bind(\"\"); }",
        "use std::{fs, sync::Arc};",
        "use std::thread;",
        "use std::*;",
        "fn f() -> u8 { rand::random() }",
        "fn f() { getrandom::fill(&mut []); }",
        "use crate::wire::x;",
    ] {
        assert_fails("src/limiter/mod.rs", text, "pure");
        assert_fails("src/replication/ledger.rs", text, "pure");
    }
    assert_fails("src/settings.rs", "use std::fs;", "pure");
    assert_fails("src/replication/mod.rs", "use crate::telemetry::Metrics;", "pure");
    assert_passes("src/limiter/mod.rs", "use std::net::{IpAddr, Ipv4Addr}; use crate::time::X;");
    assert_passes("src/replication/mod.rs", "use crate::limiter::BucketId; use std::{fmt, sync};");
    assert_passes("src/limiter/mod.rs", "#[cfg(test)] mod tests { use std::fs; }");
    assert_passes("src/proxy/mod.rs", "use tokio::net::TcpStream; use std::fs;");
}

#[test]
fn a_clock_read_elsewhere_is_found() {
    for text in [
        "fn f() { let t = std::time::Instant::now(); }",
        "use std::time::Instant; fn f() { Instant::now(); }",
        "fn f() { tokio::time::Instant::now(); }",
        "fn f() { std::time::SystemTime::now(); }",
        "use std::time::Instant as I; fn f() { I::now(); }",
        "use std::time::{Duration, SystemTime as S};",
        "fn f(t: Instant) { t.elapsed(); }",
        "fn f(t: Instant) { t\n    .elapsed(); }",
        "fn f(t: &[Instant]) { t.iter().map(Instant::elapsed); }",
    ] {
        assert_fails("src/peer/session.rs", text, "clock");
        assert_fails("src/limiter/mod.rs", text, "clock");
        assert_passes(CLOCK_FILE, text);
    }
    assert_passes(
        "src/peer/mod.rs",
        "use tokio::time::{Instant, sleep_until}; fn f(t: Instant) {}",
    );
}

#[test]
fn spawning_elsewhere_is_found() {
    for text in [
        "fn f() { tokio::spawn(async {}); }",
        "use tokio::spawn;",
        "use tokio::{spawn, sync::watch};",
        "use tokio::*;",
        "fn f() { tokio::task::spawn_blocking(|| ()); }",
        "use tokio::task; fn f() { task::spawn_local(async {}); }",
        "use tokio::task::JoinSet;",
        "fn f() { ::std::thread::spawn(|| ()); }",
        "use std::thread; fn f() { thread::Builder::new(); }",
        "fn f() { tokio::runtime::Handle::current().spawn(async {}); }",
        "use tokio_util::task::TaskTracker;",
    ] {
        assert_fails("src/proxy/listener.rs", text, "spawn");
        assert_passes(SPAWN_FILE, text);
    }
    assert_passes("src/proxy/listener.rs", "use crate::runtime::{Supervisor, spawn_local};");
    assert_passes("src/app.rs", "fn f(s: &Supervisor) { s.spawn(\"mesh\", OnExit::Fail, g()); }");
    assert_passes("src/proxy/mod.rs", "#[cfg(test)] mod tests { fn f() { tokio::spawn(g()); } }");
}

#[test]
fn anyhow_below_the_composition_is_found() {
    for text in ["use anyhow::Context;", "fn f() -> anyhow::Result<()> { Ok(()) }", "use anyhow;"] {
        assert_fails("src/config/mod.rs", text, "anyhow");
        assert_fails("src/admin/http.rs", text, "anyhow");
        for file in ["src/app.rs", "src/cli/run.rs", "src/main.rs"] {
            assert_passes(file, text);
        }
    }
}

#[test]
fn files_that_are_only_for_tests_are_free_and_others_are_not() {
    let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
    let files = [
        file("src/limiter/mod.rs", "#[cfg(test)]\nmod testing;\nmod store;"),
        file("src/limiter/testing.rs", "use std::fs;"),
        file("src/limiter/store.rs", "use std::fs;\n#[cfg(test)]\nmod tests;"),
        file("src/limiter/store/tests.rs", "use crate::app::App;"),
    ];
    let violations = violations_in_tree(&files);
    assert_eq!(violations.len(), 1, "{violations:?}");
    assert!(violations[0].starts_with("src/limiter/store.rs"), "{violations:?}");
}

#[test]
fn a_table_that_differs_is_seen() {
    let text = "//! | 1 | `limiter` (pure), `other` | x |\n//! | 0 | `time` | y |\n";
    let (layers, pure) = documented_layers(text);
    assert_eq!(layers[&1], ["limiter".to_owned(), "other".to_owned()].into());
    assert_eq!(layers[&0], ["time".to_owned()].into());
    assert_eq!(pure, ["limiter".to_owned()].into());
}

fn assert_fails(file: &str, text: &str, rule: &str) {
    let found = violations(file, text);
    let rule = format!(": {rule}: ");
    assert!(found.iter().any(|v| v.contains(&rule)), "{file}: `{text}` gave {found:?}");
}

fn assert_passes(file: &str, text: &str) {
    let found = violations(file, text);
    assert!(found.is_empty(), "{file}: `{text}` gave {found:?}");
}

// The rules.

fn violations_in_tree(files: &[(String, String)]) -> Vec<String> {
    let test_only: BTreeSet<String> =
        files.iter().flat_map(|(file, text)| test_only_files(file, text)).collect();
    let is_free = |file: &str| {
        test_only
            .iter()
            .any(|free| file == format!("{free}.rs") || file.starts_with(&format!("{free}/")))
    };
    files
        .iter()
        .filter(|(file, _)| file != "src/lib.rs" && !is_free(file))
        .flat_map(|(file, text)| violations(file, text))
        .collect()
}

/// Every violation of one file, as `file: rule: what`.
fn violations(file: &str, text: &str) -> Vec<String> {
    let module = module_of(file);
    let own = module[0].as_str();
    let tokens = tokens(&without_tests(&blanked(text)));
    let words: BTreeSet<&str> = tokens.iter().map(String::as_str).collect();
    let paths = paths(&tokens, &module, file == "src/main.rs");
    let mut found = Vec::new();
    let mut report = |rule: &str, what: &str| found.push(format!("{file}: {rule}: {what}"));

    let Some(own_layer) = layer(own) else {
        report("layer", &format!("`{own}` is not in the table"));
        return found;
    };
    let pure = PURE.contains(&own) || own == "settings";
    for path in paths.iter().filter(|path| path.segments[0] == "crate") {
        let shown = path.segments.join("::");
        let Some(other) = path.segments.get(1).filter(|name| *name != "*") else {
            report("layer", &format!("`{shown}` hides which module is meant"));
            continue;
        };
        if other == own {
            continue;
        }
        if own == "main" {
            // The binary stands above the library, its neighbour included.
            continue;
        }
        match layer(other) {
            None => report("layer", &format!("`{shown}`: `{other}` is not in the table")),
            Some(layer) if layer >= own_layer => {
                report("layer", &format!("`{shown}` is of layer {layer}, `{own}` of {own_layer}"));
            }
            Some(_) => {}
        }
        if pure && !PURE.contains(&other.as_str()) && !PURE_FOUNDATION.contains(&other.as_str()) {
            report("pure", &format!("`{shown}` is not pure"));
            report("layer", &format!("`{shown}` is out of reach of a pure module"));
        }
    }

    if pure {
        for word in IMPURE_WORDS.iter().filter(|word| words.contains(**word)) {
            report("pure", &format!("`{word}`"));
        }
        for path in paths.iter().filter(|path| path.names_any(IMPURE_PATHS)) {
            report("pure", &path.segments.join("::"));
        }
    }
    if file != CLOCK_FILE {
        for path in &paths {
            let renamed = path.alias && path.ends_with_any(CLOCK_TYPES);
            if renamed || path.names_any(CLOCK_PATHS) {
                report("clock", &path.segments.join("::"));
            }
        }
        if tokens.windows(2).any(|pair| pair[0] == "." && pair[1] == "elapsed") {
            report("clock", "`.elapsed()`");
        }
    }
    if file != SPAWN_FILE {
        for word in SPAWN_WORDS.iter().filter(|word| words.contains(**word)) {
            report("spawn", &format!("`{word}`"));
        }
        for path in paths.iter().filter(|path| path.names_any(SPAWN_PATHS)) {
            report("spawn", &path.segments.join("::"));
        }
    }
    if !ANYHOW.contains(&own) && words.contains("anyhow") {
        report("anyhow", "is for the composition and the commands");
    }
    found
}

fn layer(module: &str) -> Option<u8> {
    LAYERS.iter().find(|(_, names)| names.contains(&module)).map(|(layer, _)| *layer)
}

/// The table of the crate's documentation, and the modules it calls pure.
fn documented_layers(text: &str) -> (BTreeMap<u8, BTreeSet<String>>, BTreeSet<String>) {
    let mut layers: BTreeMap<u8, BTreeSet<String>> = BTreeMap::new();
    let mut pure = BTreeSet::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("//! |")) {
        let mut cells = line.split('|').map(str::trim);
        let Some(layer) = cells.next().and_then(|cell| cell.parse().ok()) else { continue };
        for module in cells.next().unwrap().split(',') {
            let name = module.split('`').nth(1).unwrap().to_owned();
            if module.contains("(pure)") {
                pure.insert(name.clone());
            }
            assert!(layers.entry(layer).or_default().insert(name), "twice in {line}");
        }
    }
    (layers, pure)
}

// Reading.

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every file of `src/`, its path from the root of the repository and its text.
fn source_files() -> Vec<(String, String)> {
    fn walk(directory: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    let root = root();
    let mut files = Vec::new();
    walk(&root.join("src"), &mut files);
    files.sort();
    files
        .iter()
        .map(|path| {
            let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
            (name, fs::read_to_string(path).unwrap())
        })
        .collect()
}

/// `src/a/b.rs` and `src/a/b/mod.rs` are `["a", "b"]`.
fn module_of(file: &str) -> Vec<String> {
    let path = file.strip_prefix("src/").unwrap().strip_suffix(".rs").unwrap();
    path.strip_suffix("/mod").unwrap_or(path).split('/').map(str::to_owned).collect()
}

/// Where the children of a file's module are, without `.rs`.
fn test_only_files(file: &str, text: &str) -> Vec<String> {
    let directory = format!("src/{}", module_of(file).join("/"));
    let text = blanked(text);
    let mut children = Vec::new();
    for (start, end) in test_items(&text) {
        children.extend(declared_modules(&text[start..end]));
    }
    children.iter().map(|child| format!("{directory}/{child}")).collect()
}

/// The names of `mod name;`.
fn declared_modules(text: &str) -> Vec<String> {
    let tokens = tokens(&blanked(text));
    let declarations = tokens.windows(3).filter(|w| w[0] == "mod" && w[2] == ";");
    declarations.map(|window| window[1].clone()).collect()
}

/// The text with comments and the inside of literals replaced by blanks, byte
/// for byte.
fn blanked(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = literal_or_comment_end(bytes, at);
        for byte in &mut out[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end.max(at + 1);
    }
    String::from_utf8(out).unwrap()
}

/// The end of the comment or literal that starts at `at`, or `at` if none does.
fn literal_or_comment_end(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let in_word = at > 0 && is_word(bytes[at - 1]);
    if rest.starts_with(b"//") {
        return at + rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
    }
    if rest.starts_with(b"/*") {
        let (mut depth, mut end) = (0, 0);
        while end < rest.len() {
            if rest[end..].starts_with(b"/*") {
                depth += 1;
                end += 2;
            } else if rest[end..].starts_with(b"*/") {
                depth -= 1;
                end += 2;
                if depth == 0 {
                    break;
                }
            } else {
                end += 1;
            }
        }
        return at + end;
    }
    // r"", br"", cr"", with any number of #.
    let prefix = [&b"r"[..], b"br", b"cr"].into_iter().find(|p| !in_word && rest.starts_with(p));
    if let Some(prefix) = prefix {
        let hashes = rest[prefix.len()..].iter().take_while(|byte| **byte == b'#').count();
        let open = prefix.len() + hashes;
        if rest.get(open) == Some(&b'"') {
            let close = [&b"\""[..], &b"#".repeat(hashes)].concat();
            let inside = &rest[open + 1..];
            let length = inside.windows(close.len()).position(|window| window == close).unwrap();
            return at + open + 1 + length + close.len();
        }
    }
    if rest[0] == b'"' {
        return at + quoted_end(rest, b'"');
    }
    if rest[0] == b'\'' {
        // A lifetime has no closing quote after one character.
        let character = std::str::from_utf8(&rest[1..]).unwrap().chars().next();
        let length = character.map_or(0, char::len_utf8);
        if character == Some('\\') || rest.get(1 + length) == Some(&b'\'') {
            return at + quoted_end(rest, b'\'');
        }
    }
    at
}

fn quoted_end(rest: &[u8], quote: u8) -> usize {
    let mut end = 1;
    while end < rest.len() && rest[end] != quote {
        end += if rest[end] == b'\\' { 2 } else { 1 };
    }
    (end + 1).min(rest.len())
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

/// The blanked text without the items that exist in tests only.
fn without_tests(text: &str) -> String {
    let mut kept = String::new();
    let mut from = 0;
    for (start, end) in test_items(text) {
        kept.push_str(&text[from..start]);
        from = end;
    }
    kept.push_str(&text[from..]);
    kept
}

/// Where the items under `#[cfg(test)]` are in a blanked text.
fn test_items(text: &str) -> Vec<(usize, usize)> {
    let mut items = Vec::new();
    let mut from = 0;
    while let Some(start) = text[from..].find("#[cfg(test)]").map(|at| from + at) {
        let end = start + item_length(&text.as_bytes()[start..]);
        items.push((start, end));
        from = end;
    }
    items
}

/// The length of an item with its attributes: up to the `;` or `}` that ends it.
fn item_length(bytes: &[u8]) -> usize {
    let mut depth = 0_usize;
    for (at, byte) in bytes.iter().enumerate() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' => depth -= 1,
            b'}' => {
                depth -= 1;
                // A `use` ends with its semicolon.
                if depth == 0 && bytes.get(at + 1) != Some(&b';') {
                    return at + 1;
                }
            }
            b';' if depth == 0 => return at + 1,
            _ => {}
        }
    }
    bytes.len()
}

/// Words, `::`, and single characters.
fn tokens(text: &str) -> Vec<String> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let length = if is_word(bytes[at]) {
            bytes[at..].iter().take_while(|byte| is_word(**byte)).count()
        } else if bytes[at..].starts_with(b"::") {
            2
        } else {
            1
        };
        if !bytes[at].is_ascii_whitespace() {
            tokens.push(text[at..at + length].to_owned());
        }
        at += length;
    }
    tokens
}

/// A path as the code names it, with `self` and `super` resolved to `crate`.
#[derive(Debug)]
struct NamedPath {
    segments: Vec<String>,
    /// Whether an import gives it another name.
    alias: bool,
}

impl NamedPath {
    /// Whether the path contains one of the patterns at any place, or takes in
    /// everything where a pattern goes on.
    fn names_any(&self, patterns: &[&str]) -> bool {
        patterns.iter().any(|pattern| {
            let pattern: Vec<&str> = pattern.split("::").collect();
            (0..self.segments.len()).any(|from| starts_with(&self.segments[from..], &pattern))
        })
    }

    fn ends_with_any(&self, names: &[&str]) -> bool {
        self.segments.last().is_some_and(|last| names.contains(&last.as_str()))
    }
}

fn starts_with(path: &[String], pattern: &[&str]) -> bool {
    for (index, wanted) in pattern.iter().enumerate() {
        match path.get(index).map(String::as_str) {
            Some("*") if index > 0 => return true,
            Some(segment) if segment == *wanted => {}
            Some(segment) => {
                return wanted.strip_suffix('~').is_some_and(|start| segment.starts_with(start));
            }
            None => return false,
        }
    }
    true
}

/// Every path of two or more segments, and every path of an import.
fn paths(tokens: &[String], module: &[String], is_main: bool) -> Vec<NamedPath> {
    let mut reader = PathReader { tokens, at: 0, found: Vec::new() };
    let mut paths = Vec::new();
    // The inline modules around, each with the number of braces around it.
    let mut inline: Vec<(String, usize)> = Vec::new();
    let mut braces = 0;
    while let Some(token) = reader.peek(0) {
        match token {
            "{" => braces += 1,
            "}" => {
                braces -= 1;
                inline.retain(|(_, outside)| *outside < braces);
            }
            "mod" if reader.peek(2) == Some("{") => {
                inline.push((reader.tokens[reader.at + 1].clone(), braces));
            }
            _ => {}
        }
        if token == "use" && reader.peek(1) != Some("<") {
            reader.at += 1;
            reader.import(Vec::new());
        } else if is_name(token) && reader.starts_a_path() {
            reader.inline_path();
        } else {
            reader.at += 1;
        }
        for path in reader.found.drain(..) {
            let here = module.iter().chain(inline.iter().map(|(name, _)| name));
            paths.push(resolve(path, here.cloned().collect(), is_main));
        }
    }
    paths
}

fn is_name(token: &str) -> bool {
    token.bytes().all(is_word)
}

fn resolve(mut path: NamedPath, mut here: Vec<String>, is_main: bool) -> NamedPath {
    let first = path.segments.first().map(String::as_str);
    if first == Some("self") || first == Some("super") {
        let steps = path.segments.iter().take_while(|s| *s == "self" || *s == "super").count();
        for step in path.segments.drain(..steps) {
            if step == "super" {
                here.pop();
            }
        }
        here.insert(0, "crate".to_owned());
        here.append(&mut path.segments);
        path.segments = here;
    } else if is_main && first == Some("tidegate") {
        path.segments[0] = "crate".to_owned();
    }
    path
}

struct PathReader<'a> {
    tokens: &'a [String],
    at: usize,
    found: Vec<NamedPath>,
}

impl PathReader<'_> {
    fn peek(&self, ahead: usize) -> Option<&str> {
        self.tokens.get(self.at + ahead).map(String::as_str)
    }

    /// Whether the word here is the first of a path of several.
    fn starts_a_path(&self) -> bool {
        let before = |distance: usize| {
            self.at.checked_sub(distance).map(|index| self.tokens[index].as_str())
        };
        let continues = before(1) == Some("::")
            && before(2).is_some_and(|token| is_name(token) || token == ">");
        !continues && self.peek(1) == Some("::")
    }

    fn inline_path(&mut self) {
        let mut segments = Vec::new();
        while let Some(token) = self.peek(0).filter(|token| is_name(token)) {
            segments.push(token.to_owned());
            self.at += 1;
            if self.peek(0) != Some("::") {
                break;
            }
            self.at += 1;
        }
        self.found.push(NamedPath { segments, alias: false });
    }

    /// Reads a `use` tree and leaves its end (`;`, `,` or `}`) unread.
    fn import(&mut self, mut segments: Vec<String>) {
        while let Some(token) = self.peek(0).map(str::to_owned) {
            self.at += 1;
            match token.as_str() {
                "::" => {}
                "{" => {
                    while let Some(token) = self.peek(0) {
                        match token {
                            "}" => {
                                self.at += 1;
                                return;
                            }
                            "," => self.at += 1,
                            _ => self.import(segments.clone()),
                        }
                    }
                    return;
                }
                "self" if !segments.is_empty() => {}
                "as" => {
                    self.at += 1;
                    self.found.push(NamedPath { segments, alias: true });
                    return;
                }
                "," | "}" | ";" => {
                    self.at -= 1;
                    break;
                }
                _ => segments.push(token),
            }
        }
        self.found.push(NamedPath { segments, alias: false });
    }
}

#[test]
fn se_g11_the_lock_holds_an_http2_that_bounds_empty_frames() {
    let lock = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.lock")).unwrap();
    let version = lock.split("name = \"h2\"\nversion = \"").nth(1).unwrap();
    let parts: Vec<u32> =
        version.split('"').next().unwrap().split('.').map(|part| part.parse().unwrap()).collect();
    assert!(parts.as_slice() >= [0, 4, 16].as_slice(), "{parts:?} has RUSTSEC-2026-0258");
}
