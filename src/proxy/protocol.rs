//! What a client connection speaks, as its bytes tell, and whether a block of
//! fields of HTTP/2 is unfinished on it.
//!
//! The HTTP implementation bounds the size of such a block and not the time that
//! it takes. While it is unfinished nothing else may come (RFC 9113 section 6.10).

/// With what a client of HTTP/2 begins (RFC 9113 section 3.4). No method begins so.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEAD: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

/// Follows the bytes of one connection.
#[derive(Debug)]
pub(super) enum Protocol {
    /// So many bytes of the preface of HTTP/2 have come and nothing else.
    Unknown(usize),
    Http1,
    Http2(Frames),
}

/// Follows the frames of HTTP/2 by their heads.
#[derive(Debug, Default)]
pub(super) struct Frames {
    head: [u8; FRAME_HEAD],
    filled: usize,
    payload_left: usize,
    in_block: bool,
}

/// What some bytes meant for blocks of fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Blocks {
    /// At least one came to its end.
    pub(super) finished: bool,
    /// One is unfinished.
    pub(super) open: bool,
}

impl Protocol {
    pub(super) const fn new() -> Self {
        Self::Unknown(0)
    }

    /// Follows `bytes`, the next that came. `None`: they are not of HTTP/2, or
    /// it is not yet known.
    pub(super) fn follow(&mut self, bytes: &[u8]) -> Option<Blocks> {
        let mut rest = bytes;
        if let Self::Unknown(matched) = self {
            let wanted = &PREFACE[*matched..];
            let length = wanted.len().min(rest.len());
            if rest[..length] != wanted[..length] {
                *self = Self::Http1;
            } else if length == wanted.len() {
                rest = &rest[length..];
                *self = Self::Http2(Frames::default());
            } else {
                *matched += length;
            }
        }
        match self {
            Self::Http2(frames) => Some(frames.follow(rest)),
            Self::Unknown(_) | Self::Http1 => None,
        }
    }
}

impl Frames {
    fn follow(&mut self, mut bytes: &[u8]) -> Blocks {
        let mut finished = false;
        while !bytes.is_empty() {
            if self.filled < FRAME_HEAD {
                let count = bytes.len().min(FRAME_HEAD - self.filled);
                self.head[self.filled..self.filled + count].copy_from_slice(&bytes[..count]);
                self.filled += count;
                bytes = &bytes[count..];
                if self.filled < FRAME_HEAD {
                    break;
                }
                let [a, b, c, kind, ..] = self.head;
                self.payload_left = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
                self.in_block |= kind == HEADERS || kind == CONTINUATION;
            }
            let count = bytes.len().min(self.payload_left);
            self.payload_left -= count;
            bytes = &bytes[count..];
            if self.payload_left == 0 {
                let [.., kind, flags, _, _, _, _] = self.head;
                let ends = (kind == HEADERS || kind == CONTINUATION) && flags & END_HEADERS != 0;
                finished |= ends;
                self.in_block &= !ends;
                self.filled = 0;
            }
        }
        Blocks { finished, open: self.in_block }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, length: u8) -> Vec<u8> {
        let mut frame = vec![0, 0, length, kind, flags, 0, 0, 0, 1];
        frame.resize(FRAME_HEAD + usize::from(length), b'x');
        frame
    }

    #[test]
    fn only_the_whole_preface_is_http2() {
        let mut protocol = Protocol::new();
        for byte in &PREFACE[..PREFACE.len() - 1] {
            assert_eq!(protocol.follow(&[*byte]), None);
        }
        assert_eq!(protocol.follow(b"\n"), Some(Blocks::default()));
        for other in [&b"GET / HTTP/1.1\r\n"[..], b"PRI * HTTP/1.1\r\n", b"POST"] {
            let mut protocol = Protocol::new();
            assert_eq!(protocol.follow(other), None);
            assert!(matches!(protocol, Protocol::Http1));
            assert_eq!(protocol.follow(PREFACE), None);
        }
    }

    #[test]
    fn a_block_is_open_until_its_last_byte_however_the_bytes_are_cut() {
        let bytes = [
            PREFACE.to_vec(),
            frame(4, 0, 0),
            frame(HEADERS, END_HEADERS, 3),
            frame(HEADERS, 0, 0),
            frame(CONTINUATION, 0, 2),
            frame(CONTINUATION, END_HEADERS, 0),
            // A flag of the same value means something else elsewhere.
            frame(0, END_HEADERS, 5),
            frame(HEADERS, END_HEADERS, 4),
        ]
        .concat();
        for cut in 1..bytes.len() {
            let mut protocol = Protocol::new();
            let mut finished = 0;
            for piece in bytes.chunks(cut) {
                let blocks = protocol.follow(piece).unwrap_or_default();
                finished += usize::from(blocks.finished);
            }
            assert!((1..=3).contains(&finished), "{cut}");
            assert_eq!(protocol.follow(&[]), Some(Blocks::default()), "{cut}");
        }
        let mut protocol = Protocol::new();
        let mut open = Vec::new();
        for byte in &bytes {
            open.push(protocol.follow(&[*byte]).is_some_and(|blocks| blocks.open));
        }
        let turns = |from_to: [bool; 2]| open.windows(2).filter(|pair| **pair == from_to).count();
        assert_eq!((turns([false, true]), turns([true, false])), (3, 3));
    }
}
