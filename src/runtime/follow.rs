//! Following files: what was read from them is read again and again (layer 1).

use std::fmt;
use std::time::Duration;

use tracing::{error, info};

/// How often the files are looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How long after a look that found a fault the files are looked at once more. One
/// look alone may come in the middle of a write, or between two files of which one
/// is replaced and the other is not yet.
const SETTLE_TIME: Duration = Duration::from_millis(100);

/// What became of files that changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileChange {
    /// What they say now is in use.
    Replaced,
    /// They cannot be used, and what they said before stays in use.
    Refused,
}

/// Looks at files each second, without end, and logs what became of `what` they hold.
///
/// `refresh` reads them and puts what is new in use: `Ok(true)` if it did, `Ok(false)`
/// if they say what is in use already, and the fault for as long as it stands. A fault
/// is told once, and once more only after the files were sound or had another.
/// `told` hears of each change that is logged.
pub async fn follow_files<E: fmt::Display + PartialEq>(
    what: &str,
    mut refresh: impl FnMut() -> Result<bool, E>,
    mut told: impl FnMut(FileChange),
) {
    let mut refused: Option<E> = None;
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        let mut seen = refresh();
        if seen.as_ref().is_err_and(|fault| refused.as_ref() != Some(fault)) {
            tokio::time::sleep(SETTLE_TIME).await;
            seen = refresh();
        }
        match seen {
            Ok(false) => refused = None,
            Ok(true) => {
                refused = None;
                info!(what, "replaced: the files changed");
                told(FileChange::Replaced);
            }
            Err(fault) if refused.as_ref() == Some(&fault) => {}
            Err(fault) => {
                error!(what, reason = %fault, "the changed files are refused; what they said before stays in use");
                told(FileChange::Refused);
                refused = Some(fault);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// What is told when the looks, one after another, show `looks`.
    async fn told(looks: &[Result<bool, &'static str>]) -> Vec<FileChange> {
        let (at, told) = (RefCell::new(looks.iter()), RefCell::new(Vec::new()));
        let following = follow_files(
            "tests",
            || at.borrow_mut().next().copied().unwrap_or(Ok(false)),
            |change| told.borrow_mut().push(change),
        );
        let end = LOOK_INTERVAL * (u32::try_from(looks.len()).unwrap() + 2);
        assert!(tokio::time::timeout(end, following).await.is_err());
        assert_eq!(at.borrow().len(), 0, "all were looked at");
        told.into_inner()
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_told_and_the_same_content_is_not() {
        assert_eq!(told(&[Ok(false), Ok(false)]).await, []);
        let changes = told(&[Ok(true), Ok(false), Ok(true)]).await;
        assert_eq!(changes, [FileChange::Replaced; 2]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_fault_is_told_once_for_as_long_as_it_stands() {
        let changes = told(&[Err("a"), Err("a"), Err("a"), Err("a")]).await;
        assert_eq!(changes, [FileChange::Refused]);
        let changes = told(&[Err("a"), Err("a"), Err("a"), Err("b"), Err("b"), Err("b")]).await;
        assert_eq!(changes, [FileChange::Refused; 2]);
        // Another one in between, be it what was in use all the time.
        let again = [Err("a"), Err("a"), Ok(false), Err("a"), Err("a"), Ok(true)];
        let changes = told(&again).await;
        assert_eq!(changes, [FileChange::Refused, FileChange::Refused, FileChange::Replaced]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_fault_that_a_second_look_does_not_find_is_none() {
        assert_eq!(told(&[Err("half"), Ok(true)]).await, [FileChange::Replaced]);
        assert_eq!(told(&[Err("half"), Ok(false)]).await, []);
    }
}
