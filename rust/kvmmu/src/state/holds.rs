//! Holds: a few empty blocks behind the last run of a sequence, to grow in place.
//!
//! What lives here: which blocks each slot holds. What never lives here: when a hold is made, and
//! the decision to break one ([`super::Mmu`], `place`).
//!
//! ```text
//!  0..31   first block       32..63  how many; 0: no hold
//! ```
//!
//! A word is changed by exchanges alone: the sequence of the slot takes blocks from the front or
//! gives the rest up, anybody else may take the whole. Whoever's exchange succeeds has the blocks,
//! so nothing else needs to be known about a slot's sequence: no ABA, for a word that came back
//! says that just these blocks are held again.
//!
//! The last slot is no sequence's: it has what is left of the window that compaction fills.
//!
//! Held blocks are empty: they count as available, and a claim that would otherwise fail breaks the
//! largest holds. For the pool they are claimed.

use std::ops::Range;

use crate::error::Result;
use crate::sync::{AtomicU32, AtomicU64, Ordering, zeroed_u64};

#[derive(Debug)]
pub(crate) struct Holds {
    words: Box<[AtomicU64]>,
    /// Blocks in all of them. Exact at quiescence.
    total: AtomicU32,
}

fn pack(range: &Range<u32>) -> u64 {
    match range.len() as u64 {
        0 => 0,
        n => (n << 32) | u64::from(range.start),
    }
}

fn unpack(word: u64) -> Range<u32> {
    word as u32..word as u32 + (word >> 32) as u32
}

impl Holds {
    pub(crate) fn new(slots: u32) -> Result<Self> {
        Ok(Self {
            words: zeroed_u64(slots as usize)?,
            total: AtomicU32::new(0),
        })
    }

    /// Blocks in all holds.
    pub(crate) fn total(&self) -> u32 {
        // Relaxed: a statistic, exact at quiescence.
        self.total.load(Ordering::Relaxed)
    }

    /// What a slot holds.
    pub(crate) fn of(&self, slot: u32) -> Range<u32> {
        // Acquire: pairs with the exchanges.
        unpack(self.words[slot as usize].load(Ordering::Acquire))
    }

    /// A slot that holds nothing holds these blocks from now on. By its sequence alone.
    pub(crate) fn put(&self, slot: u32, range: Range<u32>) {
        if range.is_empty() {
            return;
        }
        // Before the word: who takes the blocks lowers a total that has them.
        self.total.fetch_add(range.len() as u32, Ordering::Relaxed);
        // Release: pairs with the Acquire of whoever takes them.
        self.words[slot as usize].store(pack(&range), Ordering::Release);
    }

    /// Takes up to `n` blocks that follow `last` from the front. By its sequence alone.
    pub(crate) fn take(&self, slot: u32, last: u32, n: u32) -> Range<u32> {
        let word = &self.words[slot as usize];
        // Acquire, and AcqRel below: the blocks are handed over.
        let mut seen = word.load(Ordering::Acquire);
        loop {
            let held = unpack(seen);
            let n = n.min(held.len() as u32);
            if n == 0 || held.start != last.wrapping_add(1) {
                return 0..0;
            }
            let rest = held.start + n..held.end;
            match word.compare_exchange(seen, pack(&rest), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    self.total.fetch_sub(n, Ordering::Relaxed);
                    return held.start..held.start + n;
                }
                Err(now) => seen = now,
            }
        }
    }

    /// Takes a hold away as a whole.
    pub(crate) fn clear(&self, slot: u32) -> Range<u32> {
        let word = &self.words[slot as usize];
        // Relaxed: most slots hold nothing, and the exchange decides.
        if word.load(Ordering::Relaxed) == 0 {
            return 0..0;
        }
        // AcqRel: the blocks are handed over.
        let held = unpack(word.swap(0, Ordering::AcqRel));
        self.total.fetch_sub(held.len() as u32, Ordering::Relaxed);
        held
    }

    /// The slot that holds a block.
    pub(crate) fn holder(&self, block: u32) -> Option<u32> {
        if self.total() == 0 {
            return None;
        }
        (0..self.words.len() as u32).find(|&slot| self.of(slot).contains(&block))
    }

    /// All blocks that are held now, those of the largest holds first.
    pub(crate) fn blocks(&self) -> Vec<u32> {
        let largest = self.largest().into_iter();
        largest.flat_map(|(range, _)| range).collect()
    }

    /// All holds that there are now: (blocks, slot), the largest first.
    pub(crate) fn largest(&self) -> Vec<(Range<u32>, u32)> {
        if self.total() == 0 {
            return Vec::new();
        }
        let all = (0..self.words.len() as u32).map(|slot| (self.of(slot), slot));
        let mut held: Vec<_> = all.filter(|(range, _)| !range.is_empty()).collect();
        held.sort_by_key(|(range, _)| std::cmp::Reverse(range.len()));
        held
    }
}

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn a_hold_is_taken_from_the_front_or_as_a_whole() {
        let holds = Holds::new(3).unwrap();
        holds.put(1, 10..14);
        holds.put(2, 20..28);
        assert_eq!(holds.take(1, 8, 1), 0..0);
        assert_eq!(holds.take(1, 9, 3), 10..13);
        assert_eq!(holds.of(1), 13..14);
        assert_eq!(holds.total(), 9);
        assert_eq!(holds.largest(), [(20..28, 2), (13..14, 1)]);
        assert_eq!(
            (holds.clear(2), holds.clear(2), holds.clear(0)),
            (20..28, 0..0, 0..0)
        );
        assert_eq!(holds.take(1, 12, 5), 13..14);
        assert_eq!((holds.total(), holds.of(1).len()), (0, 0));
    }
}
