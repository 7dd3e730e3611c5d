//! tidegate: a rate-limiting reverse proxy whose replicas enforce one limit
//! together, without a central store.
//!
//! A module imports strictly lower layers only; `tests/layers.rs` enforces it.
//!
//! | layer | modules | role |
//! |---|---|---|
//! | 8 | `main`, `cli` | arguments to commands to exit status |
//! | 7 | `app` | composition: binds every socket, owns start and stop |
//! | 6 | `config` | one field for each module's own configuration |
//! | 5 | `admin` | gRPC for operators, HTTP for the kubelet and Prometheus |
//! | 4 | `proxy`, `peer` | the data path; the mesh between replicas |
//! | 3 | `discovery`, `deferred` | who the peers are; requests that are sent later |
//! | 2 | `replication` (pure), `telemetry` | what replicas owe each other; log and metrics |
//! | 1 | `limiter` (pure), `runtime`, `tls` | may this request pass, and if not, when; process plumbing; certificates |
//! | 0 | `time`, `wire`, `settings`, `sync` | clock, generated code, notations of the configuration, what threads share |
//!
//! Pure modules have no tokio, tonic, hyper, sockets, files, randomness or
//! clock: time comes in as an argument, events go in, actions come out. That is
//! what lets `tests/sim` drive a whole cluster with a virtual clock.

pub mod settings;
mod sync;
pub mod time;
pub mod wire;

pub mod limiter;
pub mod runtime;
pub mod tls;

pub mod replication;
pub mod telemetry;

pub mod deferred;
pub mod discovery;

pub mod peer;
pub mod proxy;

pub mod admin;

pub mod config;

pub mod app;

pub mod cli;
