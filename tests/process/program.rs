//! The built program as a child process.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use serde_json::Value;

use super::PATIENCE;
use super::client::{Answer, Connection};

/// Waits until `condition` holds.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "{what} did not come about");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// An address of loopback that no other test uses.
pub fn host(number: u8) -> Ipv4Addr {
    let pid = std::process::id();
    Ipv4Addr::new(127, 200 + (pid >> 8) as u8 % 50, pid as u8, number)
}

/// A free port of a host, below those that an address with port 0 gets, so that
/// it stays free.
pub fn free_port(host: Ipv4Addr) -> u16 {
    (20_000..30_000).find(|port| TcpListener::bind((host, *port)).is_ok()).unwrap()
}

fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("TIDEGATE_")) {
        command.env_remove(name);
    }
    command.env_remove("POD_NAME").env_remove("POD_IP").stdin(Stdio::null());
    command
}

/// Runs the program to its end.
pub fn tidegate(args: &[&str]) -> Output {
    command().args(args).output().unwrap()
}

/// The same with one more variable in its environment.
pub fn tidegate_with(name: &str, value: &str, args: &[&str]) -> Output {
    command().env(name, value).args(args).output().unwrap()
}

/// A running program. Dropping it kills it.
pub struct Program {
    child: Child,
    log: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl Program {
    /// `tidegate --log-format json run` with more arguments; returns when it
    /// listens.
    pub fn run(args: &[&str]) -> Self {
        Self::try_run(args).unwrap_or_else(|(status, last)| panic!("{status}: {last}"))
    }

    /// The same; how it ended and its last line if it does not come to listen.
    pub fn try_run(args: &[&str]) -> Result<Self, (ExitStatus, String)> {
        let mut program = Self::spawn(command().args(["--log-format", "json", "run"]).args(args));
        until("it listens or ends", || program.is_listening() || !program.is_running());
        if program.is_listening() { Ok(program) } else { Err(program.last_words()) }
    }

    /// Whether the last of its listeners was named.
    fn is_listening(&self) -> bool {
        self.find("listening", "listener", "telemetry").is_some()
    }

    /// The same with at most so many open files.
    pub fn run_with_files(files: usize, args: &[&str]) -> Self {
        let mut limited = Command::new("sh");
        limited.arg("-c").arg(format!("ulimit -n {files}; exec \"$@\"")).arg("sh");
        limited.arg(env!("CARGO_BIN_EXE_tidegate")).args(["--log-format", "json", "run"]);
        let program = Self::spawn(limited.args(args).stdin(Stdio::null()));
        until("it listens", || program.is_listening());
        program
    }

    /// The same with a library preloaded, and one more variable.
    pub fn run_preloaded(library: &str, variable: (&str, &str), args: &[&str]) -> Self {
        let mut command = command();
        command.env("LD_PRELOAD", library).env(variable.0, variable.1);
        let program = Self::spawn(command.args(["--log-format", "json", "run"]).args(args));
        until("it listens", || program.is_listening());
        program
    }

    fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let (stderr, lines) = (child.stderr.take().unwrap(), Arc::clone(&log));
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                lines.lock().unwrap().push(line);
            }
        });
        Self { child, log, reader: Some(reader) }
    }

    /// The log so far, each line of which is one JSON object.
    pub fn log(&self) -> Vec<Value> {
        let lines = self.log.lock().unwrap();
        let parse = |line: &String| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        // What a process says last, about its end, is for people.
        lines.iter().filter(|line| !line.starts_with("tidegate: ")).map(parse).collect()
    }

    /// The messages of the log so far.
    pub fn messages(&self) -> Vec<String> {
        let message = |line: Value| line["message"].as_str().unwrap().to_owned();
        self.log().into_iter().map(message).collect()
    }

    pub fn has_said(&self, message: &str) -> bool {
        self.messages().iter().any(|said| said == message)
    }

    fn find(&self, message: &str, field: &str, value: &str) -> Option<Value> {
        self.log().into_iter().find(|line| line["message"] == message && line[field] == value)
    }

    /// Where a listener is bound, as the log says.
    pub fn address(&self, listener: &str) -> SocketAddr {
        let line = self.find("listening", "listener", listener);
        let line = line.unwrap_or_else(|| panic!("no listener {listener} in {:#?}", self.log()));
        line["address"].as_str().unwrap().parse().unwrap()
    }

    pub fn connect(&self) -> Connection {
        Connection::open(self.address("proxy"))
    }

    pub fn get(&self, target: &str) -> Answer {
        self.connect().get(target)
    }

    pub fn telemetry(&self, target: &str) -> Answer {
        Connection::open(self.address("telemetry")).get(target)
    }

    pub fn ready(&self) {
        until("it is ready", || self.telemetry("/readyz").status == 200);
    }

    /// Asks it by a client subcommand, and reads the answer.
    pub fn ask(&self, args: &[&str]) -> Value {
        let admin = self.address("admin").to_string();
        let output = tidegate(&[args, &["-o", "json", "--admin", &admin]].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {error}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Sends a signal, such as `TERM`.
    pub fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let sent = Command::new("kill").args([&format!("-{name}"), &id]).status();
        assert!(sent.unwrap().success());
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits until it has ended; returns how, and its whole log.
    pub fn ended(mut self) -> (ExitStatus, Vec<Value>) {
        until("it ends", || !self.is_running());
        let status = self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        let mut data = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut data).unwrap();
        assert_eq!(data, "", "what is not data goes to stderr");
        (status, self.log())
    }

    /// Waits until it has ended; returns how, and its last line.
    pub fn last_words(mut self) -> (ExitStatus, String) {
        until("it ends", || !self.is_running());
        let status = self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        let last = self.log.lock().unwrap().last().cloned();
        (status, last.unwrap_or_default())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
