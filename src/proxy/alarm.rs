//! A timer for deadlines that usually are not reached: it stays armed from one
//! deadline to the next, so that one which is later than the one before costs a
//! comparison instead of a place in the runtime's timers.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::time::{Sleep, sleep};

use crate::time::{Clock, Timestamp};

/// The timer, and what it is armed for: never later than what it is asked for.
#[derive(Debug, Default)]
pub(super) struct Alarm(Option<(Timestamp, Pin<Box<Sleep>>)>);

impl Alarm {
    /// Ready when `clock` has reached `deadline`. Otherwise the task of `cx` is woken
    /// then, or earlier for nothing.
    pub(super) fn poll_due(
        &mut self,
        deadline: Timestamp,
        clock: &Clock,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        loop {
            if let Some((armed, sleep)) = &mut self.0
                && *armed <= deadline
            {
                ready!(sleep.as_mut().poll(cx));
                self.0 = None;
                if clock.now() >= deadline {
                    return Poll::Ready(());
                }
            }
            let wait = deadline.since(clock.now());
            self.0 = Some((deadline, Box::pin(sleep(wait))));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A clock that follows the paused time of the runtime.
    struct Times {
        clock: Clock,
        now: u64,
    }

    impl Times {
        async fn pass(&mut self, millis: u64) {
            tokio::time::advance(Duration::from_millis(millis)).await;
            self.now += millis;
            self.clock.set(Timestamp::from_millis(self.now));
        }
    }

    fn is_due(alarm: &mut Alarm, deadline: u64, times: &Times) -> bool {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        alarm.poll_due(Timestamp::from_millis(deadline), &times.clock, &mut cx).is_ready()
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_that_moves_rings_at_its_last_place() {
        let mut times = Times { clock: Clock::manual(Timestamp::ZERO), now: 0 };
        let mut alarm = Alarm::default();
        assert!(!is_due(&mut alarm, 100, &times));
        times.pass(90).await;
        // Later: the old one is kept, rings for nothing and is set anew.
        assert!(!is_due(&mut alarm, 190, &times));
        times.pass(20).await;
        assert!(!is_due(&mut alarm, 190, &times));
        // Earlier: it must not ring too late.
        assert!(!is_due(&mut alarm, 150, &times));
        times.pass(39).await;
        assert!(!is_due(&mut alarm, 150, &times));
        times.pass(2).await;
        assert!(is_due(&mut alarm, 150, &times));
        assert!(!is_due(&mut alarm, 500, &times));
    }
}
