//! Supervised tasks: the only place that spawns.
//!
//! Every long-lived task has a name and an [`OnExit`]. A critical task that ends
//! before the process wants to leave, by returning or by a panic, is a
//! [`Failure`] that ends the process with a non-zero status: a proxy without its
//! accept loop must not look alive.
//!
//! Tasks of one connection have no name, but they are counted by thread: one that
//! never ends shows in a number that only grows.

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tokio::runtime::{Builder, Handle, LocalOptions, RuntimeMetrics};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

/// How many tasks a thread of the data path runs before it asks the kernel for news
/// when it has more to do. Asking costs about as much as a few tasks do.
const TASKS_PER_LOOK: u32 = 61;

/// What the end of a task means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnExit {
    /// The process cannot go on without it.
    Fail,
    /// It may end at any time.
    Ignore,
}

/// A critical task that ended too early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The task's name.
    pub task: String,
    /// How it ended.
    pub reason: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "task `{}` ended: {}", self.task, self.reason)
    }
}

/// Spawns named tasks and learns of their end. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Supervisor {
    failures: mpsc::UnboundedSender<Failure>,
    tracker: TaskTracker,
    census: Census,
}

/// How many tasks the threads of a supervisor have. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Census(Arc<Mutex<Vec<(String, RuntimeMetrics)>>>);

impl Supervisor {
    /// A supervisor, and where the failures of its critical tasks arrive.
    pub fn new() -> (Self, mpsc::UnboundedReceiver<Failure>) {
        let (failures, receiver) = mpsc::unbounded_channel();
        (Self { failures, tracker: TaskTracker::new(), census: Census::default() }, receiver)
    }

    /// Counts the tasks of its threads, and as `main` those of the runtime in which it is
    /// asked, if it is in one.
    pub fn census(&self) -> Census {
        if let Ok(main) = Handle::try_current() {
            self.census.add("main".to_owned(), main.metrics());
        }
        self.census.clone()
    }

    /// Runs `task` on the current runtime.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    #[allow(clippy::disallowed_methods, reason = "this is the one place that spawns")]
    pub fn spawn<T>(&self, name: impl Into<String>, on_exit: OnExit, task: T)
    where
        T: Future<Output = ()> + Send + 'static,
    {
        let guard = self.guard(name.into(), on_exit);
        self.tracker.spawn(async move {
            task.await;
            guard.returned();
        });
    }

    /// Starts a thread that runs `work` on a single-threaded runtime of its own.
    /// The thread is critical unless it returns `Ok`.
    ///
    /// # Errors
    /// If the thread or its runtime cannot be made.
    pub fn spawn_thread<F, T>(&self, name: &str, work: F) -> io::Result<JoinHandle<()>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Future<Output = ()>,
    {
        let guard = self.guard(name.to_owned(), OnExit::Fail);
        // The runtime cannot leave the thread that makes it.
        let (made, making) = std::sync::mpsc::channel();
        let (census, counted) = (self.census.clone(), name.to_owned());
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let runtime = Builder::new_current_thread()
                .enable_all()
                .event_interval(TASKS_PER_LOOK)
                .build_local(LocalOptions::default());
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => {
                    // Whoever starts the thread waits for it.
                    let _ = made.send(error);
                    guard.finished();
                    return;
                }
            };
            census.add(counted, runtime.metrics());
            drop(made);
            runtime.block_on(async move { work().await });
            guard.finished();
        })?;
        match making.recv() {
            Ok(error) => Err(error),
            Err(_) => Ok(thread),
        }
    }

    /// Waits until every spawned task has ended. No more may be spawned.
    pub async fn finished(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }

    fn guard(&self, task: String, on_exit: OnExit) -> Guard {
        Guard { task, on_exit, failures: self.failures.clone() }
    }
}

impl Census {
    /// The name of each thread that was started, and how many tasks it has.
    pub fn tasks(&self) -> Vec<(String, usize)> {
        let threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        threads.iter().map(|(name, thread)| (name.clone(), thread.num_alive_tasks())).collect()
    }

    fn add(&self, name: String, thread: RuntimeMetrics) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((name, thread));
    }
}

/// Reports the end of a task, also when a panic drops it.
struct Guard {
    task: String,
    on_exit: OnExit,
    failures: mpsc::UnboundedSender<Failure>,
}

impl Guard {
    fn returned(mut self) {
        self.report("it returned");
        self.on_exit = OnExit::Ignore;
    }

    fn finished(mut self) {
        self.on_exit = OnExit::Ignore;
    }

    fn report(&self, reason: &str) {
        if self.on_exit == OnExit::Fail {
            // Nobody listens any more once the process is leaving.
            let _ =
                self.failures.send(Failure { task: self.task.clone(), reason: reason.to_owned() });
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.report("it panicked");
        }
    }
}

/// Runs a short-lived task (one connection) on the current thread, which must be one
/// of [`Supervisor::spawn_thread`].
///
/// # Panics
/// On another one.
#[allow(clippy::disallowed_methods, reason = "this is the one place that spawns")]
pub fn spawn_local(task: impl Future<Output = ()> + 'static) {
    drop(tokio::task::spawn_local(task));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_critical_task_that_ends_is_a_failure() {
        let (supervisor, mut failures) = Supervisor::new();
        supervisor.spawn("quiet", OnExit::Ignore, async {});
        supervisor.spawn("accept loop", OnExit::Fail, async {});
        let failure = failures.recv().await.unwrap();
        assert_eq!(failure.to_string(), "task `accept loop` ended: it returned");
    }

    #[tokio::test]
    async fn a_panic_is_a_failure() {
        let (supervisor, mut failures) = Supervisor::new();
        supervisor.spawn("mesh", OnExit::Fail, async { panic!("expected by the test") });
        assert_eq!(failures.recv().await.unwrap().reason, "it panicked");
    }

    #[tokio::test]
    async fn a_thread_that_panics_is_a_failure_and_one_that_finishes_is_not() {
        let (supervisor, mut failures) = Supervisor::new();
        let fine = supervisor.spawn_thread("fine", || async {}).unwrap();
        fine.join().unwrap();
        let broken =
            supervisor.spawn_thread("broken", || async { panic!("expected by the test") }).unwrap();
        assert!(broken.join().is_err());
        assert_eq!(failures.recv().await.unwrap().task, "broken");
        assert!(failures.try_recv().is_err());
    }

    #[test]
    fn the_tasks_of_a_thread_are_counted_until_they_end() {
        let (supervisor, _failures) = Supervisor::new();
        // Outside of any runtime there is no main one.
        let census = supervisor.census();
        let seen = census.clone();
        let thread = supervisor
            .spawn_thread("busy", move || async move {
                let (end, ended) = tokio::sync::oneshot::channel::<()>();
                let (left, gone) = tokio::sync::oneshot::channel::<()>();
                spawn_local(std::future::pending());
                spawn_local(async move {
                    let _ = ended.await;
                    drop(left);
                });
                assert_eq!(seen.tasks(), [("busy".to_owned(), 2)]);
                drop(end);
                assert!(gone.await.is_err());
                tokio::task::yield_now().await;
                assert_eq!(seen.tasks(), [("busy".to_owned(), 1)]);
            })
            .unwrap();
        thread.join().unwrap();
        assert_eq!(census.tasks(), [("busy".to_owned(), 0)], "what was left is dropped");
    }
}
