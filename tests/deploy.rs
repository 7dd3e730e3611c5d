//! Holds `deploy/` to the program: ports, names, probe paths, arguments and the
//! configuration in it. Each guard has a change that it must notice.
//!
//! `.ci/manifests` checks what a cluster would see: that the objects fit each
//! other. Here is what only the program knows.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::wildcard_enum_match_arm,
    reason = "a test may fail by a panic, and reads clocks and spawns as it likes"
)]

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser as _;
use serde_json::Value;
use tidegate::admin::{HttpServer, Pages, Status};
use tidegate::cli::Args;
use tidegate::config::{self, Config};
use tidegate::runtime::{DrainControl, Readiness};
use tidegate::telemetry::Metrics;

/// What an application may take to exit when it is told to.
const APP_EXIT: Duration = Duration::from_secs(5);

/// The files that are held to the program, by name.
#[derive(Clone)]
struct Files(BTreeMap<&'static str, String>);

impl Files {
    fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
        let files = [
            ("Dockerfile", "Dockerfile"),
            ("app.yaml", "kustomize/app/deployment.yaml"),
            ("kustomization.yaml", "kustomize/examples/sidecar/kustomization.yaml"),
            ("networkpolicy.yaml", "kustomize/components/mesh/networkpolicy.yaml"),
            ("peers.yaml", "kustomize/components/mesh/peers.yaml"),
            ("prestop.yaml", "kustomize/components/prestop/kustomization.yaml"),
            ("sidecar.yaml", "kustomize/components/sidecar/sidecar.yaml"),
            ("tidegate.yaml", "kustomize/examples/sidecar/tidegate.yaml"),
        ];
        Self(
            files
                .map(|(name, path)| (name, std::fs::read_to_string(root.join(path)).unwrap()))
                .into(),
        )
    }

    fn text(&self, name: &str) -> &str {
        &self.0[name]
    }

    fn yaml(&self, name: &str) -> Value {
        serde_saphyr::from_str(self.text(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// The same files with one change.
    fn with(&self, name: &'static str, from: &str, to: &str) -> Self {
        let text = self.text(name);
        assert!(text.contains(from), "{name} does not contain {from:?}");
        let mut changed = self.clone();
        changed.0.insert(name, text.replace(from, to));
        changed
    }

    /// Everything that does not fit.
    fn problems(&self) -> Vec<String> {
        let config = match self.config() {
            Ok(config) => config,
            Err(error) => return vec![error],
        };
        let mut problems = Vec::new();
        let mut expect = |holds: bool, what: String| {
            if !holds {
                problems.push(what);
            }
        };
        let ports = ports(&config);
        let deployment = self.yaml("sidecar.yaml");
        let example = self.yaml("kustomization.yaml");
        let pod = &deployment["spec"]["template"];
        let sidecar = named(&pod["spec"]["initContainers"], "tidegate");

        let named_ports: BTreeMap<&str, u64> = list(&sidecar["ports"])
            .map(|port| (string(&port["name"]), number(&port["containerPort"])))
            .collect();
        expect(named_ports == ports, format!("container ports {named_ports:?}, not {ports:?}"));

        for name in ["startupProbe", "readinessProbe", "livenessProbe"] {
            let probe = &sidecar[name]["httpGet"];
            expect(probe["port"] == "telemetry", format!("{name}: not on the telemetry port"));
            let path = string(&probe["path"]);
            expect(is_served(path), format!("{name}: nothing is served at {path}"));
            let wanted = if name == "livenessProbe" { "/livez" } else { "/readyz" };
            expect(path == wanted, format!("{name}: {path}, not {wanted}"));
        }
        let notes = &pod["metadata"]["annotations"];
        let scrape = string(&notes["prometheus.io/path"]);
        expect(is_served(scrape), format!("prometheus.io/path: nothing is served at {scrape}"));
        let port = string(&notes["prometheus.io/port"]);
        expect(port == ports["telemetry"].to_string(), format!("prometheus.io/port: {port}"));

        // Services: everybody to the proxy, replicas to each other.
        let target = self.patched("kustomization.yaml", "targetPort");
        expect(target == ports["proxy"], format!("the app's targetPort {target} is not the proxy"));
        let peers = self.yaml("peers.yaml");
        let target = &list(&peers["spec"]["ports"]).next().unwrap()["targetPort"];
        expect(*target == ports["peer"], format!("peers.yaml: targetPort {target}"));
        let generated: Vec<&Value> = list(&example["configMapGenerator"]).collect();
        let group = generated.iter().find_map(|map| {
            let literal = list(map.get("literals")?).next()?;
            string(literal).strip_prefix("group=")
        });
        let group = group.unwrap_or_default();
        expect(group == config.replication.group.as_str(), format!("the mesh label is {group}"));
        match &config.replication.peers {
            Some(tidegate::discovery::Config::Dns { name, port }) => {
                let service = string(&peers["metadata"]["name"]).replace("GROUP", group);
                expect(*name == service, format!("peers.dns is {name}, the service {service}"));
                expect(port.is_none(), "peers.port differs from replication.listen".to_owned());
            }
            other => expect(false, format!("the peers are not found by DNS but by {other:?}")),
        }

        // Every port that is for others, and none that is not.
        let policy = self.yaml("networkpolicy.yaml");
        let mut open: Vec<u64> = list(&policy["spec"]["ingress"])
            .flat_map(|rule| list(&rule["ports"]))
            .map(|port| number(&port["port"]))
            .collect();
        open.sort_unstable();
        let wanted = [ports["proxy"], ports["peer"], ports["telemetry"]];
        expect(open == wanted, format!("the network policy opens {open:?}, not {wanted:?}"));

        // The application is where the proxy expects it.
        let app = self.yaml("app.yaml");
        let app = list(&app["spec"]["template"]["spec"]["containers"]).next().unwrap();
        let port = number(&list(&app["ports"]).next().unwrap()["containerPort"]);
        let upstream = config.proxy.upstream.as_ref().unwrap().to_string();
        expect(
            upstream == format!("http://127.0.0.1:{port}"),
            format!("the upstream is {upstream}, the application at port {port}"),
        );

        let grace = Duration::from_secs(number(&pod["spec"]["terminationGracePeriodSeconds"]));
        let hook = self.patched("prestop.yaml", "lifecycle");
        let sleep = Duration::from_secs(number(&hook["preStop"]["sleep"]["seconds"]));
        let leaving = config.proxy.drain_delay + config.proxy.drain_timeout;
        let needed = sleep + APP_EXIT + leaving;
        expect(
            needed < grace,
            format!("leaving takes up to {needed:?}, the grace period is {grace:?}"),
        );
        expect(
            sidecar["lifecycle"]["preStop"].is_null(),
            "a preStop hook of the sidecar would run before the application has ended".to_owned(),
        );

        // As measured: a connection costs some 16 KiB beside the head that is being
        // read, a bucket that two peers use too some 950 bytes (docs/performance.md).
        let max = &config.proxy.max;
        let connections = max.connections as u64 * (max.header_bytes as u64 + (16 << 10));
        let buckets = config.limiter.max_buckets as u64 * 950;
        let needed = (connections + buckets + (32 << 20)) >> 20;
        let limit = string(&sidecar["resources"]["limits"]["memory"]);
        let mebibytes = limit.strip_suffix("Mi").and_then(|count| count.parse::<u64>().ok());
        expect(
            mebibytes.is_some_and(|limit| needed <= limit),
            format!("the memory limit is {limit}, clients can make it need {needed}Mi"),
        );

        // Arguments, and the file that they name.
        let arguments: Vec<&str> = list(&sidecar["args"]).map(string).collect();
        let docker = self.exec_form("CMD");
        for arguments in [&arguments, &docker.iter().map(String::as_str).collect::<Vec<_>>()] {
            let parsed = Args::try_parse_from([&["tidegate"], arguments.as_slice()].concat());
            expect(parsed.is_ok(), format!("{arguments:?}: {:?}", parsed.err()));
            let file = arguments.iter().skip_while(|argument| **argument != "-c").nth(1);
            let mount = &list(&sidecar["volumeMounts"]).next().unwrap()["mountPath"];
            let map = generated[0]["files"][0].clone();
            let mounted = format!("{}/{}", string(mount), string(&map));
            expect(
                file.copied() == Some(mounted.as_str()),
                format!("{arguments:?} read another file than {mounted}"),
            );
        }
        let entry = self.exec_form("ENTRYPOINT");
        expect(entry == ["/tidegate"], format!("the entry point is {entry:?}"));

        // The image serves the program's defaults.
        let defaults = config::from_flags("http://127.0.0.1:3000", &[]).unwrap();
        let mut wanted: Vec<u64> = self::ports(&defaults).into_values().collect();
        wanted.sort_unstable();
        let exposed: Vec<u64> = self
            .instruction("EXPOSE")
            .split_whitespace()
            .map(|port| port.parse().unwrap_or_default())
            .collect();
        expect(exposed == wanted, format!("the image exposes {exposed:?}, not {wanted:?}"));
        problems
    }

    /// The value that the patches of a kustomization put at a path that ends so.
    fn patched(&self, name: &str, end: &str) -> Value {
        let kustomization = self.yaml(name);
        let operations = list(&kustomization["patches"]).flat_map(|patch| {
            let patch: Value = serde_saphyr::from_str(string(&patch["patch"])).unwrap();
            list(&patch).cloned().collect::<Vec<_>>()
        });
        let mut found = operations.filter(|operation| string(&operation["path"]).ends_with(end));
        found.next().unwrap_or_else(|| panic!("{name} patches no {end}"))["value"].clone()
    }

    fn config(&self) -> Result<Config, String> {
        config::parse("tidegate.yaml", self.text("tidegate.yaml"), &|_| None)
            .map_err(|error| error.to_string())
    }

    /// The arguments of the last such instruction of the Dockerfile.
    fn instruction(&self, name: &str) -> &str {
        let lines = self.text("Dockerfile").lines();
        let found = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).next_back();
        found.unwrap_or_else(|| panic!("no {name} in the Dockerfile"))
    }

    fn exec_form(&self, name: &str) -> Vec<String> {
        serde_json::from_str(self.instruction(name)).unwrap()
    }
}

/// The listeners by the names of their container ports.
fn ports(config: &Config) -> BTreeMap<&'static str, u64> {
    let listeners = [
        ("proxy", config.proxy.listen),
        ("peer", config.replication.listen),
        ("admin", config.admin.listen),
        ("telemetry", config.telemetry.listen),
    ];
    listeners.map(|(name, listen)| (name, u64::from(listen.addr().port()))).into()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list")).iter()
}

fn named<'a>(values: &'a Value, name: &str) -> &'a Value {
    list(values).find(|value| value["name"] == name).unwrap_or_else(|| panic!("no {name}"))
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Whether the program's telemetry listener has a page there.
fn is_served(path: &str) -> bool {
    let (server, address) = HttpServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let pages = Pages {
        readiness: Readiness::new(),
        metrics: Arc::new(Metrics::new()),
        status: Arc::new(Status::default),
    };
    let (control, drain) = DrainControl::new();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(server.run(pages, drain)).unwrap();
    });
    let status = status_of(address, path);
    drop(control);
    thread.join().unwrap();
    status == 200
}

fn status_of(address: SocketAddr, path: &str) -> u16 {
    let mut io = TcpStream::connect(address).unwrap();
    io.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: probe\r\nConnection: close\r\n\r\n");
    io.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    io.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn the_deployment_fits_the_program() {
    let problems = Files::read().problems();
    assert!(problems.is_empty(), "{problems:#?}");
}

#[test]
fn what_does_not_fit_is_noticed() {
    let files = Files::read();
    for (name, from, to, word) in [
        ("tidegate.yaml", "\"[::]:8080\"", "\"[::]:8081\"", "container ports"),
        ("tidegate.yaml", "127.0.0.1:9402", "0.0.0.0:9402", "loopback"),
        ("tidegate.yaml", "drain_timeout: 20s", "drain_timeout: 25s", "grace period"),
        ("tidegate.yaml", "rate: 100/min", "rate: 100", "is not a rate"),
        ("tidegate.yaml", "dns: tidegate-peers-echo", "dns: tidegate-peers", "peers.dns"),
        ("tidegate.yaml", "tidegate-peers-echo }", "tidegate-peers-echo, port: 1 }", "peers.port"),
        ("tidegate.yaml", "group: echo", "group: other", "mesh label"),
        ("tidegate.yaml", "127.0.0.1:3000", "127.0.0.1:3001", "the application at port 3000"),
        ("sidecar.yaml", "name: peer", "name: mesh", "container ports"),
        ("sidecar.yaml", "containerPort: 9403", "containerPort: 9404", "container ports"),
        ("sidecar.yaml", "path: /readyz", "path: /ready", "nothing is served at /ready"),
        ("sidecar.yaml", "path: /livez", "path: /readyz", "livenessProbe"),
        ("sidecar.yaml", "port: telemetry", "port: proxy", "not on the telemetry port"),
        ("sidecar.yaml", "io/path: /metrics", "io/path: /metric", "prometheus.io/path"),
        ("sidecar.yaml", "io/port: \"9403\"", "io/port: \"9402\"", "prometheus.io/port"),
        ("prestop.yaml", "seconds: 10", "seconds: 20", "grace period"),
        ("sidecar.yaml", "Seconds: 45", "Seconds: 40", "grace period"),
        ("sidecar.yaml", "--log-format, json", "--log-format, xml", "log-format"),
        ("sidecar.yaml", "args: [run, -c,", "args: [serve, -c,", "serve"),
        ("sidecar.yaml", "/etc/tidegate/tidegate.yaml", "/etc/t.yaml", "another file"),
        ("sidecar.yaml", "memory: 512Mi", "memory: 256Mi", "memory limit"),
        ("tidegate.yaml", "max_buckets: 200000", "max_buckets: 1000000", "memory limit"),
        ("kustomization.yaml", "[tidegate.yaml]", "[limits.yaml]", "another file"),
        ("networkpolicy.yaml", "port: 9403", "port: 9402", "network policy"),
        ("kustomization.yaml", "value: 8080", "value: 3000", "targetPort"),
        ("peers.yaml", "targetPort: 9401", "targetPort: 9402", "peers.yaml"),
        ("peers.yaml", "name: tidegate-peers-GROUP", "name: peers-GROUP", "peers.dns"),
        ("kustomization.yaml", "group=echo", "group=other", "mesh label"),
        ("app.yaml", "containerPort: 3000", "containerPort: 80", "the application at port 80"),
        ("Dockerfile", "EXPOSE 8080 9401", "EXPOSE 8080 9400", "exposes"),
        ("Dockerfile", "CMD [\"run\"", "CMD [\"start\"", "start"),
        ("Dockerfile", "ENTRYPOINT [\"/tidegate\"", "ENTRYPOINT [\"/bin/tidegate\"", "entry point"),
    ] {
        let problems = files.with(name, from, to).problems();
        let noticed = problems.iter().any(|problem| problem.contains(word));
        assert!(noticed, "{name}: {from} -> {to} was not noticed: {problems:#?}");
    }
}
