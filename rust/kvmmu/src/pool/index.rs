//! A set of small numbers that is only a hint: which windows are worth a look.
//!
//! What lives here: one bit a number and one summary bit a word of 64, searched from either end.
//! What never lives here: any truth. Each index stands beside a truth that somebody else keeps.
//!
//! ```text
//! bits      1 bit a number   set: worth a look
//! summary   1 bit a word     set: that word may have a set bit
//! ```
//!
//! # The rule for users
//!
//! A bit may be set although there is nothing (a look finds out, and clears it), but for good it is
//! never clear although there is something. Two sides keep it so:
//!
//! - who *makes* something true: first changes the truth by a read-modify-write, then calls
//!   [`Index::set`];
//! - who *finds nothing*: calls [`Index::clear`], then reads the truth again **by a
//!   read-modify-write** (adding nothing is enough), and calls [`Index::set`] if there is something.
//!
//! Of the two read-modify-writes on the truth one is first. If it is the maker's, the finder's sees
//! the new truth and sets the bit again. If it is the finder's, the maker's (Acquire) synchronises
//! with it (Release), so the clearing happens before the maker looks at the bit, and it sets it. A plain load in the
//! place of the finder's would not do: both sides would store first and load then, and both loads
//! may be old (the store-buffer pattern). [`Index`] keeps its own summary over its bits by the
//! same rule.
//!
//! While a maker is between its two steps the bit may be missing. So a search that must succeed
//! goes over the truth itself after the index found nothing: no thread waits for another.
//!
//! There is no ABA: bits carry no identity, and each is set and cleared by itself.

use std::ops::Range;

use super::placement::End;
use crate::error::Result;
use crate::sync::{AtomicU64, Ordering, zeroed_u64};

/// See the module.
#[derive(Debug)]
pub struct Index {
    bits: Box<[AtomicU64]>,
    summary: Box<[AtomicU64]>,
    len: u32,
}

fn place(at: u32) -> (usize, u64) {
    ((at / 64) as usize, 1 << (at % 64))
}

impl Index {
    /// `len` numbers, none of them set.
    pub fn new(len: u32) -> Result<Self> {
        let words = len.div_ceil(64);
        Ok(Self {
            bits: zeroed_u64(words as usize)?,
            summary: zeroed_u64(words.div_ceil(64) as usize)?,
            len,
        })
    }

    /// There is something at `at`.
    pub fn set(&self, at: u32) {
        let (word, bit) = place(at);
        // Relaxed: whoever cleared the bit before our change of the truth happened before it
        // (see the module), so coherence shows its clearing here.
        if self.bits[word].load(Ordering::Relaxed) & bit != 0 {
            return;
        }
        // Acquire: the word's bits are the truth of its summary bit, and this is the maker's change
        // of it; pairs with the Release of the finder's reading again in `clear`.
        if self.bits[word].fetch_or(bit, Ordering::Acquire) == 0 {
            self.raise(word);
        }
    }

    /// A look at `at` found nothing. The caller reads the truth again afterwards.
    pub fn clear(&self, at: u32) {
        let (word, bit) = place(at);
        // Relaxed: the caller's reading again hands it on to makers.
        let old = self.bits[word].fetch_and(!bit, Ordering::Relaxed);
        if old == bit {
            let (above, mark) = place(word as u32);
            // Relaxed: the reading again below hands it on.
            self.summary[above].fetch_and(!mark, Ordering::Relaxed);
            // A read-modify-write on purpose (see the module). Release: pairs with `set`.
            if self.bits[word].fetch_or(0, Ordering::Release) != 0 {
                self.raise(word); // undo
            }
        }
    }

    fn raise(&self, word: usize) {
        let (above, mark) = place(word as u32);
        // Relaxed: as in `set`, one level up.
        if self.summary[above].load(Ordering::Relaxed) & mark == 0 {
            // Relaxed: a hint.
            self.summary[above].fetch_or(mark, Ordering::Relaxed);
        }
    }

    /// The lowest number of a range that is set.
    pub fn next(&self, range: Range<u32>) -> Option<u32> {
        let end = range.end.min(self.len);
        if range.start >= end {
            return None;
        }
        let (first, bit) = place(range.start);
        // Relaxed, here and below: hints; whoever follows one asks the truth.
        let here = self.bits[first].load(Ordering::Relaxed) & !(bit - 1);
        let mut found = lowest(first, here);
        let mut word = first as u32 + 1;
        while found.is_none() {
            let (mut above, mark) = place(word);
            let mut marks = self.summary.get(above)?.load(Ordering::Relaxed) & !(mark - 1);
            while marks == 0 {
                above += 1;
                marks = self.summary.get(above)?.load(Ordering::Relaxed);
            }
            word = above as u32 * 64 + marks.trailing_zeros();
            let at = word as usize;
            found = lowest(at, self.bits.get(at)?.load(Ordering::Relaxed));
            word += 1;
        }
        found.filter(|&at| at < end)
    }

    /// The highest number of a range that is set.
    pub(crate) fn prev(&self, range: Range<u32>) -> Option<u32> {
        let end = range.end.min(self.len);
        if range.start >= end {
            return None;
        }
        let (last, bit) = place(end - 1);
        // Relaxed, here and below: as in `next`.
        let here = self.bits[last].load(Ordering::Relaxed) & (bit | (bit - 1));
        let mut found = highest(last, here);
        let mut word = last as u32;
        while found.is_none() {
            word = word.checked_sub(1)?;
            let (mut above, mark) = place(word);
            let mut marks = self.summary[above].load(Ordering::Relaxed) & (mark | (mark - 1));
            while marks == 0 {
                above = above.checked_sub(1)?;
                marks = self.summary[above].load(Ordering::Relaxed);
            }
            word = above as u32 * 64 + 63 - marks.leading_zeros();
            found = highest(
                word as usize,
                self.bits[word as usize].load(Ordering::Relaxed),
            );
        }
        found.filter(|&at| at >= range.start)
    }

    /// Looks at the numbers of a range that are set, from one end, until a look finds something.
    pub(crate) fn find_map<T>(
        &self,
        mut range: Range<u32>,
        from: End,
        mut look: impl FnMut(u32) -> Option<T>,
    ) -> Option<T> {
        loop {
            let at = match from {
                End::Low => self.next(range.clone())?,
                End::High => self.prev(range.clone())?,
            };
            if let Some(found) = look(at) {
                return Some(found);
            }
            match from {
                End::Low => range.start = at + 1,
                End::High => range.end = at,
            }
        }
    }

    /// How many are set.
    pub(crate) fn count(&self) -> u32 {
        // Relaxed: a hint.
        let ones = |word: &AtomicU64| word.load(Ordering::Relaxed).count_ones();
        self.bits.iter().map(ones).sum()
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        8 * (self.bits.len() + self.summary.len())
    }
}

fn lowest(word: usize, bits: u64) -> Option<u32> {
    (bits != 0).then(|| word as u32 * 64 + bits.trailing_zeros())
}

fn highest(word: usize, bits: u64) -> Option<u32> {
    (bits != 0).then(|| word as u32 * 64 + 63 - bits.leading_zeros())
}

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_found_from_both_ends() {
        let index = Index::new(10_000).unwrap();
        assert_eq!((index.next(0..10_000), index.prev(0..10_000)), (None, None));
        for at in [3, 64, 4095, 4096, 9_999] {
            index.set(at);
        }
        let mut up = Vec::new();
        while let Some(at) = index.next(up.last().map_or(0, |at| at + 1)..10_000) {
            up.push(at);
        }
        assert_eq!(up, [3, 64, 4095, 4096, 9_999]);
        let mut down = Vec::new();
        while let Some(at) = index.prev(0..down.last().copied().unwrap_or(10_000)) {
            down.push(at);
        }
        down.reverse();
        assert_eq!(down, up);
        assert_eq!(
            (index.next(65..4095), index.prev(4097..9_999)),
            (None, None)
        );
    }

    #[test]
    fn what_is_cleared_is_not_found() {
        let index = Index::new(300).unwrap();
        index.set(70);
        index.set(299);
        index.clear(70);
        assert_eq!((index.next(0..300), index.prev(0..299)), (Some(299), None));
        index.set(70);
        assert_eq!(index.next(0..300), Some(70));
    }
}
