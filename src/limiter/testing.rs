//! A request made by hand, for tests of rules and decisions.

use super::path;
use super::request::{Attributes, Client};

#[derive(Debug)]
pub(crate) struct FakeRequest {
    method: String,
    path: Vec<u8>,
    query: String,
    host: String,
    client: Client,
    headers: Vec<(String, String)>,
    upstream: String,
}

impl FakeRequest {
    pub(crate) fn get(target: &str) -> Self {
        let (_, query) = target.split_once('?').unwrap_or((target, ""));
        Self {
            method: "GET".into(),
            path: path::normalise(target.as_bytes()).into_owned(),
            query: query.into(),
            host: String::new(),
            client: Client::new([127, 0, 0, 1].into(), 64),
            headers: Vec::new(),
            upstream: String::new(),
        }
    }

    pub(crate) fn with_method(mut self, method: &str) -> Self {
        self.method = method.into();
        self
    }

    pub(crate) fn with_host(mut self, host: &str) -> Self {
        self.host = host.into();
        self
    }

    pub(crate) fn with_header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub(crate) fn routed_to(mut self, upstream: &str) -> Self {
        self.upstream = upstream.into();
        self
    }

    /// As if it came through a trusted proxy.
    pub(crate) fn vouched_for(mut self) -> Self {
        self.client = self.client.vouched_for();
        self
    }

    pub(crate) fn from(mut self, ip: &str) -> Self {
        self.client = Client::new(ip.parse().unwrap(), 64);
        self
    }
}

impl Attributes for FakeRequest {
    fn method(&self) -> &str {
        &self.method
    }

    fn path(&self) -> &[u8] {
        &self.path
    }

    fn host(&self) -> &str {
        &self.host
    }

    fn client(&self) -> Client {
        self.client
    }

    fn header(&self, name: &str, each: &mut dyn FnMut(&[u8])) {
        for (n, value) in &self.headers {
            if n == name {
                each(value.as_bytes());
            }
        }
    }

    fn query(&self) -> &str {
        &self.query
    }

    fn upstream(&self) -> &str {
        &self.upstream
    }
}
