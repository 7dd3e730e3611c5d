//! The integration tests: whole parts of the product in one process, over real
//! sockets on port 0.

#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::wildcard_enum_match_arm,
    reason = "a test may fail by a panic, and reads clocks and spawns as it likes"
)]

mod harness;

mod admin;
mod admin_questions;
mod app_admin;
mod app_egress;
mod app_life;
mod app_limits;
mod app_mesh;
mod app_pacing;
mod config_reload;
mod discovery;
mod peer;
mod proxy_again;
mod proxy_clients;
mod proxy_corpus;
mod proxy_edges;
mod proxy_grpc;
mod proxy_headers;
mod proxy_http;
mod proxy_http2;
mod proxy_life;
mod proxy_limits;
mod proxy_pacing;
mod proxy_pressure;
mod proxy_routes;
mod proxy_security;
mod proxy_tls;
mod tls_ports;
