//! Slots (layer 1, pure): what is kept of one bucket, in as few bytes as that takes.
//!
//! There may be a million of them. What a bucket needs that only one replica uses is
//! in the slot itself, 80 bytes; what few buckets have at a time is behind a pointer:
//! a line, tokens given back, and what a higher layer keeps.

use super::bucket::TokenBucket;
use super::limit::LimitIndex;
use super::line::{Calls, Line, Ticket};
use super::tokens::Tokens;

/// One bucket: its level, this replica's own ledger, and what a higher layer
/// keeps beside it.
#[derive(Debug)]
pub struct Slot<S> {
    /// The level, with everything known subtracted.
    pub bucket: TokenBucket,
    /// Which life of the bucket this is: another after it was dropped or reset.
    pub life: u32,
    /// Requests refused here, for operators.
    pub refused: u32,
    /// Requests admitted here, for operators.
    pub admitted: u32,
    /// Whole tokens that are held, unless that is said aside.
    held: u32,
    /// Which limit the bucket belongs to.
    pub limit: LimitIndex,
    /// The revision of that limit under whose quota the level stands.
    pub(super) revision: u16,
    /// Micro-tokens this replica admitted, ever growing.
    pub spent: u64,
    key: KeptKey,
    /// What a higher layer keeps beside the bucket.
    pub companion: Option<Box<S>>,
    aside: Option<Box<Aside>>,
}

/// What most buckets do not have.
#[derive(Debug, Default)]
struct Aside {
    /// Micro-tokens given back, ever growing and never above what was spent.
    returned: u64,
    /// Micro-tokens that are held, if they are no number of tokens that the slot
    /// has room for.
    held: u64,
    /// The requests that wait for it; none if there are none.
    line: Option<Line>,
}

/// A canonical key in sixteen bytes, and some more on the heap if it is long. An
/// address or a short text has room in it; the sizes on the heap are those of an
/// IPv6 group, of a UUID, and of anything.
#[derive(Clone, Debug, Default)]
enum KeptKey {
    #[default]
    None,
    Inline(Filled<14>),
    Short(Box<Filled<23>>),
    Middle(Box<Filled<39>>),
    Long(Box<Spilled>),
}

/// A text of `length` bytes.
#[derive(Clone, Debug)]
struct Filled<const N: usize> {
    length: u8,
    bytes: [u8; N],
}

/// Behind one more pointer, because its own takes two words.
#[derive(Clone, Debug)]
struct Spilled(Box<[u8]>);

impl<const N: usize> Filled<N> {
    fn try_new(text: &[u8]) -> Option<Self> {
        let mut bytes = [0; N];
        bytes.get_mut(..text.len())?.copy_from_slice(text);
        Some(Self { length: u8::try_from(text.len()).ok()?, bytes })
    }

    fn text(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.length)).unwrap_or(&self.bytes)
    }
}

impl KeptKey {
    fn new(text: &[u8]) -> Self {
        if let Some(filled) = Filled::try_new(text) {
            Self::Inline(filled)
        } else if let Some(filled) = Filled::try_new(text) {
            Self::Short(Box::new(filled))
        } else if let Some(filled) = Filled::try_new(text) {
            Self::Middle(Box::new(filled))
        } else {
            Self::Long(Box::new(Spilled(text.into())))
        }
    }

    fn text(&self) -> Option<&[u8]> {
        match self {
            Self::None => None,
            Self::Inline(filled) => Some(filled.text()),
            Self::Short(filled) => Some(filled.text()),
            Self::Middle(filled) => Some(filled.text()),
            Self::Long(spilled) => Some(&spilled.0),
        }
    }
}

impl<S> Slot<S> {
    pub(super) fn new(
        limit: LimitIndex,
        revision: u16,
        bucket: TokenBucket,
        key: Option<&[u8]>,
        life: u32,
    ) -> Self {
        Self {
            bucket,
            life,
            refused: 0,
            admitted: 0,
            held: 0,
            limit,
            revision,
            spent: 0,
            key: key.map_or(KeptKey::None, KeptKey::new),
            companion: None,
            aside: None,
        }
    }

    /// A copy for questions, in whose line nobody waits to be woken.
    pub(super) fn copy(&self) -> Self
    where
        S: Clone,
    {
        let aside = self.aside.as_deref().map(|aside| {
            let line = aside.line.as_ref().map(Line::outline);
            Box::new(Aside { line, ..*aside })
        });
        Self {
            bucket: self.bucket,
            life: self.life,
            refused: self.refused,
            admitted: self.admitted,
            held: self.held,
            limit: self.limit,
            revision: self.revision,
            spent: self.spent,
            key: self.key.clone(),
            companion: self.companion.clone(),
            aside,
        }
    }

    /// The canonical key, unless nobody told it.
    pub fn key(&self) -> Option<&[u8]> {
        self.key.text()
    }

    /// Keeps `key`, if none is kept.
    pub(super) fn learn_key(&mut self, key: Option<&[u8]>) {
        if let (KeptKey::None, Some(key)) = (&self.key, key) {
            self.key = KeptKey::new(key);
        }
    }

    /// Micro-tokens given back, ever growing and never above `spent`.
    pub fn returned(&self) -> u64 {
        self.aside.as_deref().map_or(0, |aside| aside.returned)
    }

    /// Gives `micros` micro-tokens back.
    pub(super) fn give_back(&mut self, micros: u64) {
        self.aside_mut(|aside| aside.returned = aside.returned.saturating_add(micros));
    }

    /// Spent less returned, in micro-tokens.
    pub fn net(&self) -> u64 {
        self.spent.saturating_sub(self.returned())
    }

    /// Nothing was spent or given back.
    pub(crate) fn forget_spending(&mut self) {
        self.spent = 0;
        if self.aside.is_some() {
            self.aside_mut(|aside| aside.returned = 0);
        }
    }

    /// Micro-tokens taken from the level by requests that are still being
    /// decided; they are not yet spent and never replicated.
    pub fn held(&self) -> u64 {
        let aside = self.aside.as_deref().map_or(0, |aside| aside.held);
        aside.saturating_add(u64::from(self.held) * Tokens::MICRO as u64)
    }

    /// Holds `micros` micro-tokens more.
    pub(super) fn hold(&mut self, micros: u64) {
        self.set_held(self.held().saturating_add(micros));
    }

    /// Holds `micros` micro-tokens less.
    pub(super) fn release(&mut self, micros: u64) {
        self.set_held(self.held().saturating_sub(micros));
    }

    fn set_held(&mut self, micros: u64) {
        let token = Tokens::MICRO as u64;
        let whole = u32::try_from(micros / token).ok().filter(|_| micros.is_multiple_of(token));
        self.held = whole.unwrap_or(0);
        if whole.is_none() || self.aside.is_some() {
            self.aside_mut(|aside| aside.held = if whole.is_none() { micros } else { 0 });
        }
    }

    /// The level with what is only held added back.
    pub fn held_level(&self) -> Tokens {
        let held = i64::try_from(self.held()).unwrap_or(i64::MAX);
        self.bucket.level().plus(Tokens::from_micros(held))
    }

    /// Whether a request holds tokens of the bucket or waits for some, so that it
    /// must stay.
    pub(super) fn is_needed(&self) -> bool {
        self.held != 0
            || self.aside.as_deref().is_some_and(|aside| aside.held != 0 || aside.line.is_some())
    }

    /// How many requests wait for this bucket.
    pub fn waiting(&self) -> usize {
        self.line().map_or(0, Line::len)
    }

    /// What the requests that wait for this bucket cost.
    pub fn awaited(&self) -> Tokens {
        self.line().map_or(Tokens::ZERO, Line::cost)
    }

    /// Calls the request whose turn it is, because the level has risen or the
    /// bucket is open again.
    pub fn call_front(&self) -> Calls {
        self.line().map_or_else(Calls::default, Line::call_front)
    }

    /// Whether nobody older waits.
    pub(super) fn is_turn_of(&self, ticket: Ticket) -> bool {
        self.line().is_none_or(|line| line.front() >= ticket)
    }

    /// What older requests that wait cost.
    pub(super) fn awaited_before(&self, ticket: Ticket) -> Tokens {
        self.line().map_or(Tokens::ZERO, |line| line.cost_before(ticket))
    }

    /// The requests that wait for it, so that a check pays one look.
    pub(super) fn line(&self) -> Option<&Line> {
        self.aside.as_deref().and_then(|aside| aside.line.as_ref())
    }

    /// The same, to be changed.
    pub(super) fn line_mut(&mut self) -> Option<&mut Line> {
        self.aside.as_deref_mut().and_then(|aside| aside.line.as_mut())
    }

    /// Begins a line.
    pub(super) fn begin_line(&mut self, line: Line) {
        self.aside_mut(|aside| aside.line = Some(line));
    }

    /// Ends the line.
    pub(super) fn take_line(&mut self) -> Option<Line> {
        self.aside.as_ref()?;
        self.aside_mut(|aside| aside.line.take())
    }

    /// Changes what lies aside, which goes when there is nothing.
    fn aside_mut<R>(&mut self, change: impl FnOnce(&mut Aside) -> R) -> R {
        let aside = self.aside.get_or_insert_default();
        let result = change(aside);
        if aside.returned == 0 && aside.held == 0 && aside.line.is_none() {
            self.aside = None;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::super::quota::Quota;
    use super::*;
    use crate::time::Timestamp;

    fn slot(key: Option<&[u8]>) -> Slot<()> {
        let quota = Quota::try_new("5/s".parse().unwrap(), 5).unwrap();
        Slot::new(LimitIndex(7), 3, TokenBucket::full(&quota, Timestamp::ZERO), key, 1)
    }

    #[test]
    fn a_slot_takes_eighty_bytes_whatever_lies_beside_it() {
        assert_eq!(size_of::<Slot<[u64; 100]>>(), 80);
    }

    #[test]
    fn keys_of_every_length_are_kept_as_they_are() {
        for length in 0..300 {
            let key: Vec<u8> = (0..length).map(|i| i as u8).collect();
            let slot = slot(Some(&key));
            assert_eq!(slot.key(), Some(key.as_slice()));
            assert_eq!(slot.copy().key(), Some(key.as_slice()));
        }
        let mut unknown = slot(None);
        assert_eq!(unknown.key(), None);
        unknown.learn_key(None);
        unknown.learn_key(Some(b"first"));
        unknown.learn_key(Some(b"second"));
        assert_eq!(unknown.key(), Some(b"first".as_slice()));
    }

    #[test]
    fn any_amount_can_be_held_and_nothing_is_left_of_it() {
        let token = Tokens::MICRO as u64;
        let amounts = [token, 1, u64::from(u32::MAX) * token, 3 * token, (1 << 40) * token, 7];
        let mut slot = slot(None);
        let mut sum = 0;
        for amount in amounts {
            slot.hold(amount);
            sum += amount;
            assert_eq!(slot.held(), sum);
            assert!(slot.is_needed());
        }
        for amount in amounts {
            slot.release(amount);
            sum -= amount;
            assert_eq!(slot.held(), sum);
        }
        assert!(!slot.is_needed() && slot.aside.is_none());
        // The usual amounts need no memory.
        slot.hold(5 * token);
        assert!(slot.is_needed() && slot.aside.is_none());
    }

    #[test]
    fn what_lies_aside_goes_when_there_is_nothing() {
        let mut slot = slot(None);
        slot.spent = 3_000_000;
        slot.give_back(1_000_000);
        assert_eq!((slot.returned(), slot.net()), (1_000_000, 2_000_000));
        slot.begin_line(Line::new(Ticket(1), Tokens::from_micros(5), Timestamp::ZERO));
        assert!(slot.is_needed());
        assert_eq!(slot.copy().awaited(), Tokens::from_micros(5));
        assert!(slot.take_line().is_some() && slot.take_line().is_none());
        assert!(!slot.is_needed());
        assert_eq!(slot.returned(), 1_000_000);
        slot.forget_spending();
        assert!(slot.aside.is_none());
        assert_eq!(slot.net(), 0);
    }
}
