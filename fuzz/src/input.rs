//! Reads structured values from the bytes of a fuzzer. Missing bytes are zeroes,
//! so that every input means something.

/// What is left of an input.
#[derive(Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of `data`.
    pub const fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    /// Whether everything was read.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One byte.
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A number below `bound`, which is from 1 to 256.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound
    }

    /// Heads or tails.
    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// So many bytes.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.byte())
    }

    /// Any number; small ones, round ones and those at the ends of a range come
    /// often.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            0 => u64::MAX,
            1 => i64::MAX as u64,
            2 => u64::from(u32::MAX),
            3 => 1 << 48,
            4 => (1 << 48) - 1,
            5 => u64::from_le_bytes(self.array()),
            6 => u64::from(u32::from_le_bytes(self.array())),
            7..=31 => u64::from(u16::from_le_bytes(self.array())),
            32..=95 => u64::from(self.byte()) * 1_000_000,
            small => u64::from(small) - 96,
        }
    }

    /// The lower half of [`number`](Self::number).
    pub fn short(&mut self) -> u32 {
        self.number() as u32
    }

    /// At most 255 bytes.
    pub fn bytes(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()).min(self.0.len());
        let (head, rest) = self.0.split_at(length);
        self.0 = rest;
        head
    }

    /// Everything up to the next zero byte, which is read too.
    pub fn line(&mut self) -> &'a [u8] {
        let mut halves = self.0.splitn(2, |byte| *byte == 0);
        let line = halves.next().unwrap_or_default();
        self.0 = halves.next().unwrap_or_default();
        line
    }
}
