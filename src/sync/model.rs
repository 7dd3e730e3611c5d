//! A model of the queue for the scheduler of `--cfg shuttle`: the same methods, and
//! a step for each push and pop.

#![allow(missing_docs, clippy::expect_used, reason = "not a part of the product")]

use std::collections::VecDeque;

use shuttle::sync::Mutex;

#[derive(Debug)]
pub(crate) struct SegQueue<T>(Mutex<VecDeque<T>>);

impl<T> SegQueue<T> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    pub(crate) fn push(&self, value: T) {
        self.0.lock().expect("a lock").push_back(value);
    }

    pub(crate) fn pop(&self) -> Option<T> {
        self.0.lock().expect("a lock").pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().expect("a lock").is_empty()
    }
}
