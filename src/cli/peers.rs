//! `tidegate peers`: this replica and those it knows.

use std::io::Write;

use clap::Args;
use serde::Serialize;

use super::client::{ClientArgs, Error, seconds};
use super::table::{Side, render, span};
use crate::wire::tidegate::admin::v1 as pb;

/// Arguments of `tidegate peers`.
#[derive(Clone, Debug, Args)]
pub struct PeersArgs {
    /// Where to ask, and how to print
    #[command(flatten)]
    pub client: ClientArgs,
}

/// The answer in JSON.
#[derive(Debug, Serialize)]
struct Peers {
    this: Replica,
    listed_addresses: u32,
    peers: Vec<Peer>,
}

#[derive(Debug, Serialize)]
struct Replica {
    incarnation: String,
    name: String,
    address: String,
    group: String,
    version: String,
    joined: bool,
    unsent: f64,
}

#[derive(Debug, Serialize)]
struct Peer {
    incarnation: String,
    name: String,
    address: String,
    state: &'static str,
    connected: bool,
    received_seconds_ago: Option<f64>,
    sent_seconds_ago: Option<f64>,
    round_trip_seconds: Option<f64>,
    pending_buckets: u64,
    mismatches: Vec<String>,
    #[serde(skip)]
    source: pb::Peer,
}

/// Runs `tidegate peers`.
///
/// # Errors
/// If the replica cannot be reached, refuses, or the answer cannot be written.
pub async fn run(args: PeersArgs, out: &mut (dyn Write + Send)) -> Result<(), Error> {
    let client = args.client;
    let mut admin = client.connect().await?;
    let answer = admin.list_peers(pb::ListPeersRequest {}).await;
    let answer = answer.map_err(|status| client.failed(&status))?.into_inner();
    client.print(out, &Peers::from(answer), table)
}

fn table(answer: &Peers) -> String {
    let Replica { incarnation, name, address, joined, .. } = &answer.this;
    let mut rows = vec![vec![
        or_dash(name),
        or_dash(address),
        incarnation.clone(),
        if *joined { "this" } else { "this, joining" }.to_owned(),
    ]];
    rows.extend(answer.peers.iter().map(|peer| {
        let pb = &peer.source;
        let lost = if peer.connected { "" } else { ", no session" };
        vec![
            or_dash(&peer.name),
            or_dash(&peer.address),
            peer.incarnation.clone(),
            format!("{}{lost}", peer.state),
            span(pb.received_ago.as_ref()),
            span(pb.sent_ago.as_ref()),
            span(pb.round_trip.as_ref()),
            peer.pending_buckets.to_string(),
            peer.mismatches.join("; "),
        ]
    }));
    render(
        &[
            ("NAME", Side::Left),
            ("ADDRESS", Side::Left),
            ("INCARNATION", Side::Left),
            ("STATE", Side::Left),
            ("RECEIVED", Side::Right),
            ("SENT", Side::Right),
            ("ROUND TRIP", Side::Right),
            ("PENDING", Side::Right),
            ("MISMATCHES", Side::Left),
        ],
        rows,
    )
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { "-" } else { text }.to_owned()
}

impl From<pb::ListPeersResponse> for Peers {
    fn from(answer: pb::ListPeersResponse) -> Self {
        let this = answer.this.unwrap_or_default();
        Self {
            this: Replica {
                incarnation: this.incarnation,
                name: this.name,
                address: this.address,
                group: this.group,
                version: this.version,
                joined: this.joined,
                unsent: this.unsent,
            },
            listed_addresses: answer.listed_addresses,
            peers: answer.peers.into_iter().map(Peer::from).collect(),
        }
    }
}

impl From<pb::Peer> for Peer {
    fn from(peer: pb::Peer) -> Self {
        let source = peer.clone();
        Self {
            state: match peer.state() {
                pb::PeerState::Live => "live",
                pb::PeerState::Suspect => "suspect",
                pb::PeerState::Unspecified => "unknown",
            },
            incarnation: peer.incarnation,
            name: peer.name,
            address: peer.address,
            connected: peer.connected,
            received_seconds_ago: seconds(peer.received_ago.as_ref()),
            sent_seconds_ago: seconds(peer.sent_ago.as_ref()),
            round_trip_seconds: seconds(peer.round_trip.as_ref()),
            pending_buckets: peer.pending_buckets,
            mismatches: peer.mismatches,
            source,
        }
    }
}
