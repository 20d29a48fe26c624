//! Releases: bits are cleared, then credits rise.
//!
//! What lives here: emptying blocks. What never lives here: the question whether a block's last
//! reference is gone.
//!
//! A release takes effect when its bits are cleared, by one exchange a word, which fails if one of
//! them is clear already: of two threads that release the same block, one is told so. The credits
//! rise afterwards: a single block's in the seat of the thread if the block lies in its home, else
//! in the window's counter and the thread's wallet.

use std::ops::Range;

use super::homes::Home;
use super::physical::Physical;
use crate::sync::Ordering;

/// Blocks that share a word of the lines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Group {
    /// The lowest.
    pub(crate) first: u32,
    /// All of them.
    pub(crate) mask: u64,
    /// They are consecutive.
    pub(crate) dense: bool,
}

impl<const BITS: u32, const WORDS: usize> Physical<BITS, WORDS> {
    /// Empties one block. False: it is empty already, and nothing has changed.
    pub(crate) fn give_one(&self, home: &Home, block: u32) -> bool {
        let (at, bit) = Self::place(block);
        self.give_word(home, at, bit)
    }

    /// Empties blocks of one word. False: one of them is empty already, and nothing has changed.
    pub(crate) fn give_word(&self, home: &Home, at: usize, mask: u64) -> bool {
        let window = (at / WORDS) as u32;
        if !self.split(window) || !self.clear(at, mask) {
            return false;
        }
        let n = self.credit(home, window, mask.count_ones());
        self.deposit(home, n);
        true
    }

    /// Empties blocks, those that share a word by one exchange each. Those of them that were empty
    /// already are left alone and one of them is returned: another thread has released it.
    pub(crate) fn give(&self, home: &Home, blocks: &[u32]) -> Option<u32> {
        self.give_each(home, Self::groups_of(blocks))
    }

    fn groups_of(blocks: &[u32]) -> impl Iterator<Item = Group> {
        let mut rest = blocks;
        std::iter::from_fn(move || {
            let (group, n) = Self::group(rest)?;
            rest = &rest[n..];
            Some(group)
        })
    }

    /// As [`Physical::give`].
    pub(crate) fn give_each(
        &self,
        home: &Home,
        groups: impl Iterator<Item = Group>,
    ) -> Option<u32> {
        let mut sum = 0;
        let wrong = self.clear_each(groups, |window, n| sum += self.credit(home, window, n));
        self.deposit(home, sum);
        wrong
    }

    /// As [`Physical::give`], but the blocks stay reserved for the caller.
    pub(crate) fn give_reserved(&self, blocks: &[u32]) -> Option<u32> {
        let raise = |window, n| self.raise(window, n, 0);
        self.clear_each(Self::groups_of(blocks), raise)
    }

    /// Clears the bits of blocks; `cleared` hears how many of a window, and raises its credits.
    fn clear_each(
        &self,
        groups: impl Iterator<Item = Group>,
        mut cleared: impl FnMut(u32, u32),
    ) -> Option<u32> {
        let mut wrong = None;
        // The window at hand, whether its blocks may be touched, and how many were cleared.
        let (mut window, mut free, mut n) = (u32::MAX, false, 0);
        let mut done = |window, n| {
            if n > 0 {
                cleared(window, n);
            }
        };
        for group in groups {
            let here = Self::window_of(group.first);
            if here != window {
                done(window, n);
                (window, free, n) = (here, self.split(here), 0);
            }
            let at = (group.first / BITS) as usize;
            if free && self.clear(at, group.mask) {
                n += group.mask.count_ones();
                continue;
            }
            // One by one: those that are held go.
            let mut mask = group.mask;
            while mask != 0 {
                let bit = mask & mask.wrapping_neg();
                mask &= mask - 1;
                if free && self.clear(at, bit) {
                    n += 1;
                } else {
                    wrong = Some(at as u32 * BITS + bit.trailing_zeros());
                }
            }
        }
        done(window, n);
        wrong
    }

    /// One of the blocks of a group that is empty.
    pub(crate) fn empty_of(&self, group: &Group) -> Option<u32> {
        let at = (group.first / BITS) as usize;
        // Relaxed: a first check; the exchange in `clear` decides.
        let clear = group.mask & !self.lines[at].load(Ordering::Relaxed);
        (clear != 0).then(|| at as u32 * BITS + clear.trailing_zeros())
    }

    /// The blocks of a range.
    pub(crate) fn groups(range: Range<u32>) -> impl Iterator<Item = Group> + Clone {
        Self::masks(range).map(|(at, mask)| Group {
            first: at as u32 * BITS + mask.trailing_zeros(),
            mask,
            dense: true,
        })
    }

    /// The first blocks of a list that share a word and ascend, and how many they are. A block that
    /// comes twice begins a new group.
    pub(crate) fn group(blocks: &[u32]) -> Option<(Group, usize)> {
        let &first = blocks.first()?;
        if let Some(whole) = blocks.first_chunk::<64>()
            && BITS == 64
            && first.is_multiple_of(64)
        {
            // All 64 of them in order: no loop over bits. (Folded, so that it is vectorised.)
            let differ = |differ, (at, &block): (usize, &u32)| {
                differ | (block ^ first.wrapping_add(at as u32))
            };
            if whole.iter().enumerate().fold(0, differ) == 0 {
                let (mask, dense) = (!0, true);
                return Some((Group { first, mask, dense }, 64));
            }
        }
        let (at, mut mask) = Self::place(first);
        let mut n = 1;
        for &block in &blocks[1..] {
            let (word, bit) = Self::place(block);
            if word != at || bit <= mask {
                break;
            }
            mask |= bit;
            n += 1;
        }
        let dense = false;
        Some((Group { first, mask, dense }, n))
    }

    /// Clears bits that are all set. False: one of them is not, and nothing has changed.
    fn clear(&self, at: usize, mask: u64) -> bool {
        // Relaxed: the exchange decides.
        let mut line = self.lines[at].load(Ordering::Relaxed);
        while line & mask == mask {
            // Release: pairs with the Acquire of the next claim of these blocks.
            match self.lines[at].compare_exchange(
                line,
                line & !mask,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(seen) => line = seen,
            }
        }
        false
    }
}
