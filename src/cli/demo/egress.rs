//! `tidegate demo --egress`: many callers of a service that bears so many requests in
//! any second and refuses those beyond. They wait at the replicas, which share what it
//! bears, and what is shown is the service's own count.

use std::collections::{BTreeSet, VecDeque};
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::client::conn::http1 as client;
use hyper::server::conn::http1 as server;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};

use super::{Replica, SAMPLE, meet, start};
use crate::cli::{Exit, print};
use crate::config;
use crate::runtime::{ListenAddr, OnExit, Signals, Supervisor};
use crate::time::{Clock, Timestamp};

/// What the service bears in any window.
const REQUESTS: usize = 50;
const WINDOW: Duration = Duration::from_secs(1);
/// Of these so many at once.
const BURST: u64 = 5;
/// Callers of each replica, all at once.
const CALLERS: u64 = 100;

/// The service, which counts strictly.
#[derive(Clone, Debug)]
struct Provider {
    clock: Clock,
    book: Arc<Mutex<Book>>,
}

#[derive(Debug, Default)]
struct Book {
    /// When the requests of the present window came.
    taken: VecDeque<Timestamp>,
    answered: u64,
    refused: u64,
    /// The most requests in any window.
    most: usize,
}

/// What became of the callers' requests.
#[derive(Debug, Default)]
struct Answers {
    good: AtomicU64,
    bad: AtomicU64,
}

impl Book {
    /// Whether a request that comes at `now` is borne.
    fn take(&mut self, now: Timestamp) -> bool {
        while self.taken.front().is_some_and(|at| now.since(*at) >= WINDOW) {
            self.taken.pop_front();
        }
        let borne = self.taken.len() < REQUESTS;
        if borne {
            self.taken.push_back(now);
            self.answered += 1;
            self.most = self.most.max(self.taken.len());
        } else {
            self.refused += 1;
        }
        borne
    }
}

impl Provider {
    fn start(clock: Clock, supervisor: &Supervisor) -> std::io::Result<(Self, SocketAddr)> {
        let any = ListenAddr::from(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let listener = TcpListener::from_std(any.bind(false)?)?;
        let address = listener.local_addr()?;
        let provider = Self { clock, book: Arc::default() };
        let (tasks, this) = (supervisor.clone(), provider.clone());
        supervisor.spawn("provider", OnExit::Fail, async move {
            // A failed accept (no more files) ends the demo, which says so.
            while let Ok((stream, _)) = listener.accept().await {
                let this = this.clone();
                let service = service_fn(move |_| {
                    let answer = this.answer();
                    async move { Ok::<_, Infallible>(answer) }
                });
                let connection = server::Builder::new()
                    .timer(TokioTimer::new())
                    .serve_connection(TokioIo::new(stream), service);
                tasks.spawn("provider connection", OnExit::Ignore, async move {
                    // The proxy may end a connection at any time.
                    let _ = connection.await;
                });
            }
        });
        Ok((provider, address))
    }

    fn answer(&self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::from("done\n"));
        if !self.book(|book| book.take(self.clock.now())) {
            *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }

    fn book<R>(&self, f: impl FnOnce(&mut Book) -> R) -> R {
        f(&mut self.book.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Runs the demo with `count` replicas until all callers have their answers, or for
/// `seconds` at most.
pub(super) async fn show(count: usize, seconds: Option<u64>) -> anyhow::Result<Exit> {
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let clock = Clock::monotonic();
    let (supervisor, mut failures) = Supervisor::new();
    let (provider, address) = Provider::start(clock.clone(), &supervisor)?;
    let (ended_in, mut ended) = mpsc::channel(count);
    let (addresses, listed) = watch::channel(BTreeSet::new());
    let mut replicas = Vec::new();
    for index in 0..count {
        let config = config::parse("demo", &text(address, count > 1), &|_| None)?;
        replicas.push(start(config, index, &listed, &supervisor, &ended_in)?);
    }
    addresses.send_replace(replicas.iter().filter_map(|r| r.addresses.peer).collect());
    meet(&replicas).await?;
    print(&introduction(&replicas))?;

    let answers = Arc::<Answers>::default();
    for proxy in replicas.iter().map(|replica| replica.addresses.proxy) {
        for _ in 0..CALLERS {
            let (answers, tasks) = (Arc::clone(&answers), supervisor.clone());
            supervisor.spawn("caller", OnExit::Ignore, async move {
                let good = call(proxy, &tasks).await == Some(StatusCode::OK);
                let count = if good { &answers.good } else { &answers.bad };
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
    }
    let callers = CALLERS * count as u64;
    let started = clock.now();
    let (mut ticks, mut shown, mut before) = (interval(SAMPLE), 0, 0);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = signals.next() => break,
            Some(failure) = failures.recv() => bail!("{failure}"),
            Some(result) = ended.recv() => {
                result?;
                bail!("a replica has ended");
            }
        }
        let back = answers.good.load(Ordering::Relaxed) + answers.bad.load(Ordering::Relaxed);
        let elapsed = clock.now().since(started).as_secs();
        if elapsed > shown || back == callers {
            shown = elapsed;
            let (answered, refused) = provider.book(|book| (book.answered, book.refused));
            let waiting: usize = replicas.iter().map(|r| r.handle.limiter.waiting()).sum();
            let new = answered - before;
            before = answered;
            print(&format!("{elapsed:>5} s {new:>15} {refused:>14} {waiting:>14}"))?;
        }
        if back == callers || seconds.is_some_and(|seconds| elapsed >= seconds) {
            break;
        }
    }
    let (answered, refused, most) = provider.book(|book| (book.answered, book.refused, book.most));
    let good = answers.good.load(Ordering::Relaxed);
    print(&format!(
        "\n{good} of {callers} callers got their answer. The provider answered {answered} requests \
         and refused {refused}; it had at most {most} in any second, of the {REQUESTS} that it bears."
    ))?;
    for replica in &replicas {
        // One that has ended needs no telling.
        let _ = replica.stop.try_send("the demo ends");
    }
    for _ in &replicas {
        if let Some(result) = ended.recv().await {
            result?;
        }
    }
    Ok(Exit::Done)
}

/// One request over a connection of its own; `None` if it breaks.
async fn call(proxy: SocketAddr, tasks: &Supervisor) -> Option<StatusCode> {
    let stream = TcpStream::connect(proxy).await.ok()?;
    let (mut sender, connection) = client::handshake(TokioIo::new(stream)).await.ok()?;
    tasks.spawn("caller's connection", OnExit::Ignore, async move {
        let _ = connection.await;
    });
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.uri_mut() = http::Uri::from_static("/provider/pay");
    request.headers_mut().insert(header::HOST, HeaderValue::from_static("demo"));
    let answer = sender.send_request(request).await.ok()?;
    let status = answer.status();
    answer.into_body().collect().await.ok()?;
    Some(status)
}

fn text(provider: SocketAddr, peers: bool) -> String {
    let replication = if peers {
        "replication: { listen: '127.0.0.1:0', insecure: true, peers: { static: ['127.0.0.1:1'] } }"
    } else {
        ""
    };
    format!(
        "proxy: {{ listen: '127.0.0.1:0', drain_delay: 1ms, drain_timeout: 1s }}\n\
         upstreams:\n  provider:\n    url: 'http://{provider}'\n    \
         limit: {{ requests: {REQUESTS}, per: {}, burst: {BURST} }}\n\
         egress: {{ routes: [{{ strip: /provider, upstream: provider, max_wait: 10m }}] }}\n\
         admin: {{ listen: '127.0.0.1:0' }}\n\
         telemetry: {{ listen: '127.0.0.1:0' }}\n\
         {replication}\n",
        humantime::format_duration(WINDOW),
    )
}

fn introduction(replicas: &[Replica]) -> String {
    let mut text = format!(
        "{} replicas stand in front of a provider that bears {REQUESTS} requests in any second and\n\
         answers 429 beyond that. {CALLERS} callers come to each replica at once.\n\n",
        replicas.len(),
    );
    for (index, replica) in replicas.iter().enumerate() {
        let (proxy, admin) = (replica.addresses.proxy, replica.addresses.admin);
        text += &format!("  replica {}   proxy {proxy}   admin {admin}\n", index + 1);
    }
    text + "\n           the provider   the provider          waiting\n   \
              time       answered  refused so far     at the replicas"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_provider_counts_any_window() {
        let mut book = Book::default();
        let at = |millis| Timestamp::from_millis(1000 + millis);
        assert!((0..REQUESTS as u64).all(|i| book.take(at(10 * i))));
        assert!(!book.take(at(999)));
        assert!(book.take(at(1000)), "the first one is a second old");
        assert!(!book.take(at(1000)));
        assert_eq!((book.answered, book.refused, book.most), (51, 2, 50));
    }

    #[test]
    fn the_configuration_of_the_demo_is_sound() {
        for peers in [false, true] {
            let config = config::parse("demo", &text(([127, 0, 0, 1], 9).into(), peers), &|_| None);
            assert_eq!(config.unwrap().limits().len(), 1);
        }
    }
}
