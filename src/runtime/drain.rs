//! Drain: how a process tells its parts that it is leaving.

use tokio::sync::watch;

/// How far the process is with leaving. Stages only ever advance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Business as usual.
    #[default]
    Serving,
    /// Everything is still served, new connections too, but clients are told to
    /// go elsewhere.
    Announcing,
    /// No new connections; what runs may finish.
    Closing,
    /// Time is up: everything ends now.
    Aborting,
}

/// The side that decides. Dropping it aborts.
#[derive(Debug)]
pub struct DrainControl(watch::Sender<Stage>);

/// The side that listens; cheap to clone.
#[derive(Clone, Debug)]
pub struct Drain(watch::Receiver<Stage>);

impl DrainControl {
    /// A control and its first listener.
    pub fn new() -> (Self, Drain) {
        let (sender, receiver) = watch::channel(Stage::Serving);
        (Self(sender), Drain(receiver))
    }

    /// Moves on to `stage`; an earlier stage than the present one is ignored.
    pub fn advance(&self, stage: Stage) {
        self.0.send_if_modified(|current| {
            let moves = stage > *current;
            if moves {
                *current = stage;
            }
            moves
        });
    }
}

impl Drain {
    /// The present stage.
    pub fn stage(&self) -> Stage {
        if self.0.has_changed().is_err() { Stage::Aborting } else { *self.0.borrow() }
    }

    /// Waits until `stage` or a later one is reached. Safe to cancel.
    pub async fn reached(&self, stage: Stage) {
        let mut receiver = self.0.clone();
        // An error means that the control is gone, which is a reason to leave.
        let _ = receiver.wait_for(|current| *current >= stage).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stages_only_advance() {
        let (control, drain) = DrainControl::new();
        assert_eq!(drain.stage(), Stage::Serving);
        control.advance(Stage::Closing);
        control.advance(Stage::Announcing);
        drain.reached(Stage::Announcing).await;
        assert_eq!(drain.stage(), Stage::Closing);
        drop(control);
        drain.reached(Stage::Aborting).await;
        assert_eq!(drain.stage(), Stage::Aborting);
    }
}
