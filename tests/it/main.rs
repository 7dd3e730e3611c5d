//! Whole parts of the product in one process, over real sockets on port 0.

#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on has failed, and nothing outside this binary reads it"
)]

mod harness;

mod proxy_clients;
mod proxy_grpc;
mod proxy_headers;
mod proxy_http;
mod proxy_life;
mod proxy_limits;
mod proxy_security;
