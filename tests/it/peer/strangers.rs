//! What strangers and broken peers can do to a mesh: nothing beyond their own
//! stream. Frames are made by hand here, with the generated client.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use prost::Message as _;
use tidegate::wire::tidegate::peer::v1 as wire;
use tidegate::wire::tidegate::peer::v1::replication_client::ReplicationClient;
use tidegate::wire::tidegate::peer::v1::replication_server::{Replication, ReplicationServer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::harness::replica::{Replica, Spec, agreed, own_group};
use crate::harness::until;

/// A peer that says whatever it is told to say.
struct Stranger {
    frames: mpsc::Sender<wire::Frame>,
    inbound: Streaming<wire::Frame>,
    seq: u64,
}

impl Stranger {
    /// Opens a stream with `first` as its first frame.
    async fn begin(replica: &Replica, first: wire::Frame) -> Result<Self, Status> {
        let channel = Channel::from_shared(format!("http://{}", replica.address)).unwrap();
        let channel = channel.connect().await.unwrap();
        let mut client = ReplicationClient::new(channel);
        let (frames, outgoing) = mpsc::channel(8);
        frames.send(first).await.unwrap();
        let answer = client.exchange(ReceiverStream::new(outgoing)).await?;
        Ok(Self { frames, inbound: answer.into_inner(), seq: 1 })
    }

    /// A session that was begun in order.
    async fn welcome(replica: &Replica, id: u8) -> Self {
        let mut stranger = Self::begin(replica, says(hello(replica, id))).await.unwrap();
        let first = stranger.inbound.message().await.unwrap().unwrap();
        assert!(matches!(first.body, Some(wire::frame::Body::Hello(_))), "{first:?}");
        stranger
    }

    async fn say(&mut self, body: wire::frame::Body) {
        self.seq += 1;
        let frame = wire::Frame { seq: self.seq, body: Some(body), ..Default::default() };
        self.frames.send(frame).await.unwrap();
    }

    /// Reads until the replica ends the stream.
    async fn ended(mut self) -> Status {
        loop {
            match self.inbound.message().await {
                Ok(Some(_)) => {}
                Ok(None) => return Status::ok("ended in order"),
                Err(status) => return status,
            }
        }
    }
}

fn hello(replica: &Replica, id: u8) -> wire::Hello {
    let limits = replica.limiter.limits();
    let (_, limit) = limits.iter().next().unwrap();
    let quota = limit.default_quota();
    wire::Hello {
        version: 1,
        oldest_version: 1,
        group: own_group(),
        incarnation: Bytes::from(vec![id; 16]),
        name: format!("stranger {id}"),
        limits: vec![wire::Limit {
            name: limit.name().to_owned(),
            parts: limit.parts_hash(),
            tokens: quota.rate().tokens(),
            period_ms: quota.rate().period_ms().into(),
            burst: quota.burst().micros().unsigned_abs(),
        }],
        ..Default::default()
    }
}

fn says(hello: wire::Hello) -> wire::Frame {
    wire::Frame { seq: 1, body: Some(wire::frame::Body::Hello(hello)), ..Default::default() }
}

fn update(entries: Vec<wire::Entry>) -> wire::frame::Body {
    wire::frame::Body::Update(wire::Update { entries, ..Default::default() })
}

/// An entry that spends `spent` tokens from the bucket of `key`.
fn entry(replica: &Replica, key: &str, spent: u64) -> wire::Entry {
    wire::Entry {
        bucket: Bytes::copy_from_slice(&replica.bucket_id(key).to_bytes()),
        generation: 1,
        flush: 1,
        spent: spent * 1_000_000,
        fresh_spent: spent * 1_000_000,
        level: 1_000_000,
        ..Default::default()
    }
}

fn refusals(replica: &Replica, reason: &str) -> f64 {
    replica.metric(&format!("peer_refusals_total{{reason=\"{reason}\"}}"))
}

/// The replica goes on: it takes another peer, and what that spends.
async fn still_works(replica: &Replica) {
    let peer = Replica::start(Spec::new("honest", "100/d"), [replica.address]).await;
    peer.joined().await;
    let left = replica.remaining("honest").await;
    assert_eq!(peer.spend("honest", 1), 1);
    agreed(&[replica, &peer], "honest", left - 1).await;
}

async fn victim() -> Replica {
    Replica::start(Spec::new("victim", "100/d"), []).await
}

#[tokio::test]
async fn a_well_behaved_stranger_is_a_peer() {
    let replica = victim().await;
    let mut stranger = Stranger::welcome(&replica, 7).await;
    stranger.say(update(vec![entry(&replica, "k", 30)])).await;
    agreed(&[&replica], "k", 70).await;
    assert_eq!(replica.peers().await[0].name, "stranger 7");
    stranger.say(wire::frame::Body::Goodbye(wire::Goodbye { reason: "done".to_owned() })).await;
    assert_eq!(stranger.ended().await.code(), Code::Ok);
    assert_eq!(replica.peers().await, []);
    assert_eq!(replica.remaining("k").await, 70);
}

#[tokio::test]
async fn another_group_or_version_is_refused_with_the_reason() {
    let replica = victim().await;
    let other = wire::Hello { group: "other".to_owned(), ..hello(&replica, 1) };
    let newer = wire::Hello { version: 9, oldest_version: 8, ..hello(&replica, 1) };
    let older = wire::Hello { version: 0, oldest_version: 0, ..hello(&replica, 1) };
    for (hello, message) in [
        (other, format!("group `other` is not `{}`", own_group())),
        (newer, "protocol versions 8 to 9 and 1 to 1 do not meet".to_owned()),
        (older, "protocol versions 0 to 0 and 1 to 1 do not meet".to_owned()),
    ] {
        let status = Stranger::begin(&replica, says(hello)).await.err().unwrap();
        assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, message.as_str()));
    }
    assert!(refusals(&replica, "group") >= 1.0);
    assert_eq!(refusals(&replica, "version"), 2.0);
    assert_eq!(replica.peers().await, []);
    still_works(&replica).await;
}

#[tokio::test]
async fn a_replica_of_another_group_is_never_a_peer() {
    let replica = victim().await;
    let spec = Spec { group: "other".to_owned(), ..Spec::new("other", "100/d") };
    let other = Replica::start(spec, [replica.address]).await;
    until("it was refused twice", async || refusals(&replica, "group") >= 2.0).await;
    other.joined().await;
    assert_eq!((replica.peers().await, other.peers().await), (Vec::new(), Vec::new()));
}

#[tokio::test]
async fn the_first_frame_must_be_a_hello() {
    let replica = victim().await;
    let frames = [
        wire::Frame { seq: 1, ..Default::default() },
        wire::Frame { seq: 1, body: Some(update(Vec::new())), ..Default::default() },
    ];
    for frame in frames {
        let status = Stranger::begin(&replica, frame).await.err().unwrap();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert_eq!(status.message(), "the first frame must be a Hello");
    }
    let nobody = wire::Hello { incarnation: Bytes::new(), ..hello(&replica, 1) };
    let status = Stranger::begin(&replica, says(nobody)).await.err().unwrap();
    assert_eq!(status.message(), "`Hello.incarnation` has 0 bytes, not 16");
    assert_eq!((refusals(&replica, "no_hello"), refusals(&replica, "malformed")), (2.0, 1.0));
    still_works(&replica).await;
}

#[tokio::test]
async fn a_stranger_that_says_nothing_is_sent_away() {
    let replica = victim().await;
    let channel = Channel::from_shared(format!("http://{}", replica.address)).unwrap();
    let mut client = ReplicationClient::new(channel.connect().await.unwrap());
    let (_silent, outgoing) = mpsc::channel(1);
    let status = client.exchange(ReceiverStream::new(outgoing)).await.err().unwrap();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert_eq!(refusals(&replica, "no_hello"), 1.0);
    still_works(&replica).await;
}

#[tokio::test]
async fn frames_that_break_the_protocol_end_their_session_only() {
    let replica = victim().await;
    let bad = [
        ("malformed", vec![wire::Entry { bucket: Bytes::new(), ..entry(&replica, "k", 1) }]),
        (
            "malformed",
            vec![wire::Entry { bucket: Bytes::new(), name: 9, ..entry(&replica, "k", 1) }],
        ),
        ("malformed", vec![wire::Entry { key: vec![0; 300].into(), ..entry(&replica, "k", 1) }]),
        ("violation", vec![wire::Entry { fresh_spent: u64::MAX, ..entry(&replica, "k", 1) }]),
        ("violation", vec![wire::Entry { key: vec![3, 1].into(), ..entry(&replica, "k", 1) }]),
        ("malformed", vec![entry(&replica, "k", 1); 65_537]),
    ];
    for (id, (reason, entries)) in bad.into_iter().enumerate() {
        let before = refusals(&replica, reason);
        let mut stranger = Stranger::welcome(&replica, id as u8).await;
        stranger.say(update(entries)).await;
        let status = stranger.ended().await;
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert_eq!(refusals(&replica, reason), before + 1.0, "{status}");
        let peers = replica.peers().await;
        assert!(!peers.iter().any(|peer| peer.connected), "{status}: {peers:#?}");
    }
    assert_eq!(replica.remaining("k").await, 100, "a broken frame was counted");
    still_works(&replica).await;
}

#[tokio::test]
async fn numbers_at_their_ends_are_survived() {
    let replica = victim().await;
    let mut stranger = Stranger::welcome(&replica, 1).await;
    let most = wire::Entry {
        spent: u64::MAX,
        returned: u64::MAX,
        fresh_spent: u64::MAX,
        fresh_returned: u64::MAX,
        epoch: (1 << 48) - 1,
        flush: u32::MAX,
        ack: u32::MAX,
        generation: u32::MAX,
        level: i64::MIN,
        ..entry(&replica, "k", 1)
    };
    let debt = wire::Entry {
        spent: u64::MAX,
        fresh_spent: u64::MAX,
        level: i64::MAX,
        ..entry(&replica, "debt", 1)
    };
    let again = wire::Entry { generation: 2, ..debt.clone() };
    let row = wire::Row {
        bucket: debt.bucket.clone(),
        deficit: u64::MAX,
        epoch: (1 << 48) - 1,
        contributions: vec![wire::Contribution {
            incarnation: vec![9; 16].into(),
            generation: u32::MAX,
            spent: u64::MAX,
            returned: 1,
            demand: f32::MAX,
            unseen: u64::MAX,
        }],
        ..Default::default()
    };
    stranger.say(update(vec![most, debt, again])).await;
    for last in [false, true] {
        let rows = vec![row.clone(); 3];
        let snapshot = wire::Snapshot { rows, last, ..Default::default() };
        stranger.say(wire::frame::Body::Snapshot(snapshot)).await;
    }
    let frame = wire::Frame {
        seq: u64::MAX,
        ack: u64::MAX,
        stamp_ms: u64::MAX,
        echo_ms: u64::MAX,
        held_ms: u32::MAX,
        body: None,
    };
    stranger.frames.send(frame).await.unwrap();
    until("all frames were taken", async || {
        replica.look(|engine, _| engine.stats().frames_received).await >= 4
    })
    .await;
    assert_eq!(replica.remaining("debt").await, 0);
    assert_eq!(replica.connected().await, 1);
    still_works(&replica).await;
}

#[tokio::test]
async fn entries_of_an_unknown_limit_are_skipped_and_the_session_stays() {
    let replica = victim().await;
    let mut stranger = Stranger::welcome(&replica, 1).await;
    let unknown = wire::Entry { limit: 5, ..entry(&replica, "k", 10) };
    stranger.say(update(vec![unknown, entry(&replica, "k", 20)])).await;
    agreed(&[&replica], "k", 80).await;
    assert_eq!(replica.look(|engine, _| engine.stats().entries_skipped).await, 1);
    assert_eq!(replica.connected().await, 1);
}

#[tokio::test]
async fn a_message_that_is_too_large_ends_its_session() {
    let replica = victim().await;
    let mut stranger = Stranger::welcome(&replica, 1).await;
    let reason = "x".repeat(5 * 1024 * 1024);
    stranger.say(wire::frame::Body::Goodbye(wire::Goodbye { reason })).await;
    let status = stranger.ended().await;
    assert_ne!(status.code(), Code::Ok, "{status}");
    until("it is counted", async || refusals(&replica, "oversized") == 1.0).await;
    assert_eq!(replica.connected().await, 0);
    still_works(&replica).await;
}

#[tokio::test]
async fn garbage_is_survived_at_every_level() {
    let replica = victim().await;
    // Not HTTP/2.
    let mut stream = TcpStream::connect(replica.address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut rest = Vec::new();
    // Whatever comes, it ends; a reset is as good.
    let _ = stream.read_to_end(&mut rest).await;
    // HTTP/2, and then noise.
    let mut stream = TcpStream::connect(replica.address).await.unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    stream.write_all(&[0xa5; 4096]).await.unwrap();
    let _ = stream.read_to_end(&mut rest).await;
    // gRPC, and a message that is no frame: a known field of another wire type.
    let channel = Channel::from_shared(format!("http://{}", replica.address)).unwrap();
    let mut client = tonic::client::Grpc::new(channel.connect().await.unwrap());
    client.ready().await.unwrap();
    let noise = wire::Goodbye { reason: "this is field 1, a number in a frame".to_owned() };
    assert!(wire::Frame::decode(noise.encode_to_vec().as_slice()).is_err());
    let path = "/tidegate.peer.v1.Replication/Exchange".parse().unwrap();
    let codec = tonic_prost::ProstCodec::<wire::Goodbye, wire::Frame>::default();
    let request = tonic::Request::new(tokio_stream::once(noise));
    let status = match client.streaming(request, path, codec).await {
        Ok(answer) => answer.into_inner().message().await.err().unwrap(),
        Err(status) => status,
    };
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert_eq!(refusals(&replica, "malformed"), 1.0);
    still_works(&replica).await;
}

/// Accepts every stream, says Hello, and then something that cannot be.
struct Broken {
    streams: AtomicUsize,
    hello: wire::Hello,
    entry: wire::Entry,
}

#[tonic::async_trait]
impl Replication for Broken {
    type ExchangeStream = ReceiverStream<Result<wire::Frame, Status>>;

    async fn exchange(
        &self,
        request: tonic::Request<Streaming<wire::Frame>>,
    ) -> Result<tonic::Response<Self::ExchangeStream>, Status> {
        self.streams.fetch_add(1, Ordering::Relaxed);
        let (frames, outgoing) = mpsc::channel(2);
        let broken = wire::Entry { fresh_spent: u64::MAX, ..self.entry.clone() };
        let bodies = [wire::frame::Body::Hello(self.hello.clone()), update(vec![broken])];
        for (seq, body) in (1..).zip(bodies) {
            let frame = wire::Frame { seq, body: Some(body), ..Default::default() };
            frames.send(Ok(frame)).await.unwrap();
        }
        tokio::spawn(async move {
            let mut inbound = request.into_inner();
            while let Ok(Some(_)) = inbound.message().await {}
            drop(frames);
        });
        Ok(tonic::Response::new(ReceiverStream::new(outgoing)))
    }
}

#[tokio::test]
async fn a_peer_that_always_breaks_the_protocol_is_not_dialled_again_and_again() {
    let replica = victim().await;
    let broken = Arc::new(Broken {
        streams: 0.into(),
        hello: hello(&replica, 1),
        entry: entry(&replica, "k", 1),
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    replica.list([listener.local_addr().unwrap()]);
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let service = ReplicationServer::from_arc(Arc::clone(&broken));
    tokio::spawn(tonic::transport::Server::builder().serve_with_incoming(service, incoming));
    until("it was found out", async || refusals(&replica, "violation") >= 1.0).await;
    // The engine believes that it dialled and failed, and backs off.
    until("it would have been dialled twice more", async || {
        replica.look(|engine, _| engine.stats().dial_failures).await >= 2
    })
    .await;
    assert_eq!(broken.streams.load(Ordering::Relaxed), 1);
    assert_eq!(replica.remaining("k").await, 100);
    still_works(&replica).await;
}
