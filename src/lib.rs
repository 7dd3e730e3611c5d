//! tidegate: a rate-limiting reverse proxy whose replicas enforce one limit
//! together, without a central store.
//!
//! A module imports strictly lower layers only; `tests/layers.rs` enforces it.
//!
//! | layer | modules | role |
//! |---|---|---|
//! | 9 | `main`, `cli` | arguments to commands to exit status |
//! | 8 | `app` | composition: binds every socket, owns start and stop |
//! | 7 | `config` | one field for each module's own configuration |
//! | 6 | `admin` | gRPC for operators, HTTP for the kubelet and Prometheus |
//! | 5 | `proxy`, `peer` | the data path; the mesh between replicas |
//! | 4 | `discovery` | who the peers are |
//! | 3 | `replication` (pure) | what replicas owe each other |
//! | 2 | `limiter` (pure), `telemetry` | may this request pass, and if not, when; log and metrics |
//! | 1 | `runtime` | process plumbing that knows no domain |
//! | 0 | `time`, `wire`, `settings` | clock, generated code, notations of settings |
//!
//! Pure modules have no tokio, tonic, hyper, sockets, files, randomness or
//! clock: time comes in as an argument, events go in, actions come out. That is
//! what lets `tests/sim` drive a whole cluster with a virtual clock.

pub mod settings;
pub mod time;
pub mod wire;

pub mod runtime;

pub mod limiter;
pub mod telemetry;

pub mod replication;

pub mod discovery;

pub mod peer;
pub mod proxy;

pub mod admin;

pub mod config;

pub mod app;

pub mod cli;
