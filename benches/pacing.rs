//! What waiting for tokens costs and how even it is: `cargo bench --bench pacing`.
//!
//! Pace: requests that always wait, through the layer that the proxy uses; how late
//! each passes after its token was there. Memory, each in a process of its own: the
//! places of so many requests in a line; so many requests that wait, whole; and as
//! many on which an upstream is working.

#![allow(clippy::print_stdout, clippy::expect_used, reason = "a measurement tells its numbers")]

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::{Future, pending};
use std::pin::Pin;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};
use http::{Request, Response};
use prometheus_client::registry::Registry;
use tidegate::limiter::{
    Alone, Client, Crowding, Limit, LimitSet, LimitSpec, Limiter, Quota, Rule, TokenBucket, Tokens,
    Turn,
};
use tidegate::proxy::{Enforcer, HeaderStyle, HttpRequest, Metrics, RateLimitLayer};
use tidegate::time::Clock;
use tower::{Layer, Service, ServiceExt};

const CLIENTS: usize = 200;
const WAITING: usize = 100_000;

fn main() {
    let role = std::env::args().find(|arg| arg.starts_with("memory-"));
    match role.as_deref() {
        Some("memory-waiting") => println!("{}", memory("1/h", 1)),
        Some("memory-places") => println!("{}", places()),
        Some("memory-running") => println!("{}", memory("1000000/s", 1_000_000)),
        Some(_) | None => {
            for (rate, burst, seconds) in [("1000/s", 20, 10), ("100/s", 2, 10), ("10/s", 2, 20)] {
                pace(rate, burst, seconds);
            }
            for role in ["memory-places", "memory-waiting", "memory-running"] {
                let bytes = measured(role);
                println!(
                    "{WAITING} {role}: {:.1} MiB, {} B each",
                    bytes as f64 / f64::from(1 << 20),
                    bytes / WAITING as u64
                );
            }
        }
    }
}

fn enforcer(rate: &str, burst: u64, clock: Clock) -> Arc<Enforcer<Alone>> {
    let quota = Quota::try_new(rate.parse().expect("a rate"), burst).expect("a quota");
    let max_wait = Duration::from_secs(1_000_000_000);
    let spec = LimitSpec { max_wait, ..LimitSpec::new("p", Rule::default(), quota) };
    let limits = LimitSet::new([Limit::new(spec)]);
    let metrics = Metrics::register(&mut Registry::default(), &limits);
    let bounds = Crowding { in_all: 2 * WAITING, per_bucket: 2 * WAITING };
    let limiter = Limiter::new(limits, 1000, Alone).with_crowding(bounds);
    Arc::new(Enforcer::new(Arc::new(limiter), clock, metrics, HeaderStyle::Standard))
}

fn client(_: &http::request::Parts) -> Client {
    Client::new([127, 0, 0, 1].into(), 64)
}

fn request() -> Request<()> {
    Request::get("/v1/transfers").header("host", "localhost").body(()).expect("a request")
}

fn pace(rate: &str, burst: u64, seconds: u64) {
    let clock = Clock::monotonic();
    let passed = Rc::new(RefCell::new(Vec::new()));
    let (seen, by) = (Rc::clone(&passed), clock.clone());
    let inner = tower::service_fn(move |_: Request<()>| {
        seen.borrow_mut().push(by.now());
        async { Ok::<_, Infallible>(Response::new(Bytes::new())) }
    });
    let service = RateLimitLayer::new(enforcer(rate, burst, clock.clone()), client).layer(inner);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let start = clock.now();
    let done = Cell::new(false);
    runtime.expect("a runtime").block_on(async {
        let clients = (0..CLIENTS).map(|_| async {
            while !done.get() {
                let _ = service.clone().oneshot(request()).await;
                // One client's turn ends here, as a connection's does.
                tokio::task::yield_now().await;
            }
        });
        let mut clients: FuturesUnordered<_> = clients.collect();
        let time = tokio::time::sleep(Duration::from_secs(seconds));
        tokio::select! {
            () = time => done.set(true),
            _ = clients.next() => {}
        }
    });
    let passed = passed.borrow();
    let per_second = rate.parse::<tidegate::limiter::Rate>().expect("a rate").per_second();
    // How long each token was there before it was used.
    let quota = Quota::try_new(rate.parse().expect("a rate"), burst).expect("a quota");
    let one = Tokens::from_whole(1).expect("one");
    let mut bucket = TokenBucket::full(&quota, start);
    let mut late: Vec<f64> = Vec::new();
    for (n, at) in passed.iter().enumerate() {
        bucket.advance(&quota, *at);
        let surplus = bucket.level().minus(one).as_f64();
        // A debt would be the time between the decision and this clock.
        bucket.drain(one);
        if n >= burst as usize {
            late.push(surplus / per_second);
        }
    }
    late.sort_by(f64::total_cmp);
    let at = |part: f64| late[((late.len() - 1) as f64 * part) as usize] * 1e3;
    let first = burst as usize - 1;
    let time = passed[passed.len() - 1].since(passed[first]).as_secs_f64();
    let mean = (passed.len() - 1 - first) as f64 / time;
    println!(
        "{rate} burst {burst}, {CLIENTS} clients, {seconds} s: {} passed, mean {:+.4} %, late p50 \
         {:.2} ms, p99 {:.2} ms, most {:.2} ms",
        passed.len(),
        (mean / per_second - 1.0) * 100.0,
        at(0.5),
        at(0.99),
        at(1.0)
    );
}

/// Bytes that the places of so many requests in a line take, without the requests.
fn places() -> u64 {
    let enforcer = enforcer("1/h", 1, Clock::monotonic());
    let (limiter, now) = (enforcer.limiter(), Clock::monotonic().now());
    let (parts, ()) = request().into_parts();
    let request = HttpRequest::new(&parts, client(&parts));
    assert!(limiter.decide(&request, now).is_admitted());
    let mut waiters = Vec::with_capacity(WAITING);
    let before = resident();
    for _ in 0..WAITING {
        let decision = limiter.decide(&request, now);
        let mut waiter = limiter.hold(&decision, Duration::from_secs(3600), now).expect("room");
        let turn = limiter.try_again(&mut waiter, &request, Waker::noop(), now);
        assert!(matches!(turn, Turn::Waits(_)));
        waiters.push(waiter);
    }
    resident().saturating_sub(before)
}

/// Bytes that so many requests take, each polled once.
fn memory(rate: &str, burst: u64) -> u64 {
    type Answer = Pin<Box<dyn Future<Output = Result<Response<Bytes>, Infallible>>>>;
    let inner = tower::service_fn(|request: Request<()>| -> Answer {
        Box::pin(async move {
            let _kept = request;
            pending().await
        })
    });
    let layer = RateLimitLayer::new(enforcer(rate, burst, Clock::monotonic()), client).refunding();
    let mut service = layer.layer(inner);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let runtime = runtime.expect("a runtime");
    let _guard = runtime.enter();
    let mut context = Context::from_waker(Waker::noop());
    let mut futures = Vec::with_capacity(WAITING + 1);
    let mut begin = |futures: &mut Vec<_>| {
        let mut future = Box::pin(service.call(request()));
        assert!(future.as_mut().poll(&mut context).is_pending());
        futures.push(future);
    };
    // The first passes at once in either case.
    begin(&mut futures);
    let before = resident();
    for _ in 0..WAITING {
        begin(&mut futures);
    }
    resident().saturating_sub(before)
}

fn measured(role: &str) -> u64 {
    let program = std::env::current_exe().expect("this program");
    let output = Command::new(program).arg(role).output().expect("a process");
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().expect("a number")
}

/// Bytes of memory of this process.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}
