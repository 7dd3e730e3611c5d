//! A TCP relay between two replicas that can break the network.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What the relay does with bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Passes them on.
    Pass,
    /// Holds them back, as a network that loses packets for a while does; they
    /// arrive when it passes again.
    Stall,
    /// Loses them for good, and closes nothing: the other side has vanished. A
    /// connection that lost bytes is closed when the relay passes again.
    Swallow,
}

/// Listens on a port of its own and relays to one address.
#[derive(Debug)]
pub struct Relay {
    pub address: SocketAddr,
    mode: watch::Sender<Mode>,
    cuts: watch::Sender<u64>,
    passed: Arc<AtomicUsize>,
}

impl Relay {
    pub async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (mode, modes) = watch::channel(Mode::Pass);
        let (cuts, cut) = watch::channel(0);
        let passed = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&passed);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (modes, cut, count) = (modes.clone(), cut.clone(), Arc::clone(&count));
                tokio::spawn(async move {
                    let Ok(server) = TcpStream::connect(target).await else { return };
                    relay(client, server, modes, cut, count).await;
                });
            }
        });
        Self { address, mode, cuts, passed }
    }

    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Closes every connection; new ones are relayed.
    pub fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Bytes relayed so far.
    pub fn passed(&self) -> usize {
        self.passed.load(Ordering::Relaxed)
    }
}

async fn relay(
    client: TcpStream,
    server: TcpStream,
    modes: watch::Receiver<Mode>,
    mut cut: watch::Receiver<u64>,
    count: Arc<AtomicUsize>,
) {
    for stream in [&client, &server] {
        stream.set_nodelay(true).unwrap();
    }
    cut.mark_unchanged();
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = pump(from_client, to_server, modes.clone(), &count) => {}
        () = pump(from_server, to_client, modes, &count) => {}
        _ = cut.changed() => {}
    }
}

/// Relays one direction until it ends.
async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut modes: watch::Receiver<Mode>,
    count: &AtomicUsize,
) {
    let mut bytes = vec![0; 64 * 1024];
    let mut lost = false;
    loop {
        let read = tokio::select! {
            read = from.read(&mut bytes) => read,
            _ = modes.changed() => {
                if lost && *modes.borrow() == Mode::Pass {
                    return;
                }
                continue;
            }
        };
        let Ok(read @ 1..) = read else { return };
        if modes.wait_for(|mode| *mode != Mode::Stall).await.is_err() {
            return;
        }
        if lost || *modes.borrow() == Mode::Swallow {
            lost = true;
            continue;
        }
        if to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
        count.fetch_add(read, Ordering::Relaxed);
    }
}
