//! A DNS server whose answers a test scripts.
//!
//! It answers over UDP and TCP on one loopback port, for every name alike, and
//! counts the questions. It ends when it is dropped.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hickory_server::proto::op::{Message, Query, ResponseCode};
use hickory_server::proto::rr::rdata::{A, AAAA, SOA, SRV};
use hickory_server::proto::rr::{Name, RData, Record, RecordType};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Longer than any question may take to come.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the server does with a question for an address.
#[derive(Clone, Debug)]
pub(crate) enum Script {
    /// Gives those of the addresses that are of the family asked for.
    Addresses {
        /// Both families may be mixed.
        addresses: BTreeSet<IpAddr>,
        /// Seconds.
        ttl: u32,
    },
    /// The same, but over UDP only the first few, marked as cut.
    CutOverUdp {
        /// Both families may be mixed.
        addresses: BTreeSet<IpAddr>,
        /// Seconds.
        ttl: u32,
    },
    /// The name does not exist; the zone asks to remember that for 300 s.
    NoSuchName,
    /// An error.
    ServerFailure,
    /// Nothing at all.
    Silent,
}

/// The server's handle.
pub(crate) struct DnsServer {
    address: SocketAddr,
    script: Arc<Mutex<Script>>,
    /// Ports of the service's endpoints, which SRV answers tell.
    ports: Arc<Mutex<Vec<u16>>>,
    asked: watch::Receiver<Asked>,
    _tasks: JoinSet<()>,
}

/// How many questions came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    /// For A records over UDP.
    pub(crate) a_over_udp: usize,
    /// Over TCP, of any type.
    pub(crate) over_tcp: usize,
}

#[derive(Clone)]
struct Shared {
    ports: Arc<Mutex<Vec<u16>>>,
    script: Arc<Mutex<Script>>,
    asked: Arc<watch::Sender<Asked>>,
}

impl Script {
    /// These addresses, for one second.
    pub(crate) fn addresses<const N: usize>(addresses: [&str; N]) -> Self {
        Self::Addresses { addresses: addresses.map(|text| text.parse().unwrap()).into(), ttl: 1 }
    }
}

impl DnsServer {
    /// Starts a server on a free port of 127.0.0.1.
    pub(crate) async fn start(script: Script) -> Self {
        let (udp, tcp) = loop {
            let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
            // The same port may be taken for UDP; then another one is tried.
            if let Ok(udp) = UdpSocket::bind(tcp.local_addr().unwrap()).await {
                break (udp, tcp);
            }
        };
        let address = tcp.local_addr().unwrap();
        let (sender, asked) = watch::channel(Asked::default());
        let script = Arc::new(Mutex::new(script));
        let ports = Arc::new(Mutex::new(Vec::new()));
        let shared = Shared {
            script: Arc::clone(&script),
            ports: Arc::clone(&ports),
            asked: Arc::new(sender),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(serve_udp(udp, shared.clone()));
        tasks.spawn(serve_tcp(tcp, shared));
        Self { address, script, ports, asked, _tasks: tasks }
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it answers from now on.
    pub(crate) fn set(&self, script: Script) {
        *self.script.lock().unwrap() = script;
    }

    /// The ports that SRV answers for `_peer._tcp` tell from now on.
    pub(crate) fn set_ports(&self, ports: &[u16]) {
        *self.ports.lock().unwrap() = ports.to_vec();
    }

    /// The questions so far.
    pub(crate) fn asked(&self) -> Asked {
        *self.asked.borrow()
    }

    /// Waits for `count` more questions for A records over UDP.
    pub(crate) async fn next_questions(&mut self, count: usize) {
        let wanted = self.asked().a_over_udp + count;
        let asked = self.asked.wait_for(|asked| asked.a_over_udp >= wanted);
        let asked = tokio::time::timeout(PATIENCE, asked).await;
        asked.unwrap_or_else(|_| panic!("fewer than {count} more questions came")).unwrap();
    }
}

impl Shared {
    /// The reply, or `None` for silence.
    fn reply(&self, request: &[u8], tcp: bool) -> Option<Vec<u8>> {
        let request = Message::from_vec(request).ok()?;
        let query = request.queries.first()?.clone();
        self.asked.send_modify(|asked| {
            if tcp {
                asked.over_tcp += 1;
            } else if query.query_type() == RecordType::A {
                asked.a_over_udp += 1;
            }
        });
        let mut reply = Message::response(request.metadata.id, request.metadata.op_code);
        reply.metadata.recursion_desired = request.metadata.recursion_desired;
        reply.metadata.recursion_available = true;
        reply.add_query(query.clone());
        let script = self.script.lock().unwrap().clone();
        if query.query_type() == RecordType::SRV && !matches!(script, Script::Silent) {
            self.fill_ports(&mut reply, &query);
            return Some(reply.to_vec().unwrap());
        }
        match script {
            Script::Addresses { addresses, ttl } => fill(&mut reply, &query, &addresses, ttl),
            Script::CutOverUdp { addresses, ttl } => {
                fill(&mut reply, &query, &addresses, ttl);
                if !tcp {
                    reply.answers.truncate(10);
                    reply.metadata.truncation = true;
                }
            }
            Script::NoSuchName => {
                reply.metadata.response_code = ResponseCode::NXDomain;
                reply.add_authority(start_of_authority());
            }
            Script::ServerFailure => reply.metadata.response_code = ResponseCode::ServFail,
            Script::Silent => return None,
        }
        Some(reply.to_vec().unwrap())
    }
}

impl Shared {
    fn fill_ports(&self, reply: &mut Message, query: &Query) {
        if query.name().to_ascii().starts_with("_peer._tcp.") {
            for (i, port) in self.ports.lock().unwrap().iter().enumerate() {
                let target = Name::from_ascii(format!("pod-{i}.peers.test.")).unwrap();
                let data = RData::SRV(SRV::new(0, 0, *port, target));
                reply.add_answer(Record::from_rdata(query.name().clone(), 5, data));
            }
        }
        if reply.answers.is_empty() {
            reply.add_authority(start_of_authority());
        }
    }
}

fn fill(reply: &mut Message, query: &Query, addresses: &BTreeSet<IpAddr>, ttl: u32) {
    for address in addresses {
        let data = match (address, query.query_type()) {
            (IpAddr::V4(address), RecordType::A) => RData::A(A(*address)),
            (IpAddr::V6(address), RecordType::AAAA) => RData::AAAA(AAAA(*address)),
            _ => continue,
        };
        reply.add_answer(Record::from_rdata(query.name().clone(), ttl, data));
    }
    if reply.answers.is_empty() {
        reply.add_authority(start_of_authority());
    }
}

fn start_of_authority() -> Record {
    let zone = Name::from_ascii("test.").unwrap();
    let soa = SOA::new(zone.clone(), zone.clone(), 1, 3600, 600, 86_400, 300);
    Record::from_rdata(zone, 300, RData::SOA(soa))
}

async fn serve_udp(socket: UdpSocket, shared: Shared) {
    let mut request = [0; 4096];
    loop {
        let (length, client) = socket.recv_from(&mut request).await.unwrap();
        if let Some(reply) = shared.reply(&request[..length], false) {
            socket.send_to(&reply, client).await.unwrap();
        }
    }
}

async fn serve_tcp(listener: TcpListener, shared: Shared) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        connections.spawn(serve_connection(stream, shared.clone()));
    }
}

async fn serve_connection(mut stream: TcpStream, shared: Shared) {
    // Each message follows its length; an error is the client's farewell.
    while let Ok(length) = stream.read_u16().await {
        let mut request = vec![0; usize::from(length)];
        if stream.read_exact(&mut request).await.is_err() {
            return;
        }
        if let Some(reply) = shared.reply(&request, true) {
            stream.write_u16(u16::try_from(reply.len()).unwrap()).await.unwrap();
            stream.write_all(&reply).await.unwrap();
        }
    }
}
