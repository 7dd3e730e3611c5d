//! Frames from strangers.

use prost::Message as _;
use tidegate::peer::{Decoder, Encoder};
use tidegate::wire::tidegate::peer::v1 as wire;

/// Reads the frame twice, as a stream that repeats itself; what is taken is sent on
/// as it was understood, on another stream.
pub fn run(data: &[u8]) {
    let Ok(sent) = wire::Frame::decode(data) else { return };
    let (mut from_peer, mut to_peer, mut at_peer) =
        (Decoder::default(), Encoder::default(), Decoder::default());
    for _ in 0..2 {
        let frame = match from_peer.decode(sent.clone()) {
            Ok(frame) => frame,
            Err(malformed) => {
                assert!(malformed.to_string().contains(malformed.field));
                return;
            }
        };
        let bytes = to_peer.encode(frame.clone()).encode_to_vec();
        let Ok(again) = wire::Frame::decode(bytes.as_slice()) else {
            panic!("what was encoded is not protobuf: {frame:?}");
        };
        assert_eq!(at_peer.decode(again), Ok(frame));
    }
}
