//! Releases: bits are cleared, then credits rise.
//!
//! What lives here: emptying blocks. What never lives here: the question whether a block's last
//! reference is gone.
//!
//! A release takes effect when its bits are cleared, by one exchange a word, which fails if one of
//! them is clear already: of two threads that release the same block, one is told so. The credits
//! rise afterwards: a single block's in the seat of the thread if the block lies in its home, else
//! in the window's counter and the thread's wallet.

use super::homes::Home;
use super::physical::Physical;
use crate::sync::Ordering;

impl<const BITS: u32, const WORDS: usize> Physical<BITS, WORDS> {
    /// Empties one block. False: it is empty already, and nothing has changed.
    pub(crate) fn give_one(&self, home: &Home, block: u32) -> bool {
        let window = Self::window_of(block);
        let (at, bit) = Self::place(block);
        if !self.split(window) || !self.clear(at, bit) {
            return false;
        }
        let mut seat = home.seat();
        while seat.window() == Some(window) {
            match home.change(seat, seat.more(1)) {
                Ok(()) => return true,
                Err(seen) => seat = seen,
            }
        }
        self.raise(window, 1, 0);
        self.lower_hints(home, window);
        self.deposit(home, 1);
        true
    }

    /// Empties blocks, those that share a word by one exchange each. Those of them that were empty
    /// already are left alone and one of them is returned: another thread has released it.
    pub(crate) fn give(&self, home: &Home, blocks: &[u32]) -> Option<u32> {
        let mut wrong = None;
        let mut sum = 0;
        let mut rest = blocks;
        while let Some(&head) = rest.first() {
            let window = Self::window_of(head);
            let free = self.split(window);
            let mut n = 0;
            while let Some((at, mask, tail)) = Self::group(rest, window) {
                rest = tail;
                if free && self.clear(at, mask) {
                    n += mask.count_ones();
                    continue;
                }
                // One by one: those that are held go.
                let mut mask = mask;
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
            if n > 0 {
                self.raise(window, n, 0);
                self.lower_hints(home, window);
                sum += n;
            }
        }
        self.deposit(home, sum);
        wrong
    }

    /// The first of some ascending blocks that is empty.
    pub(crate) fn first_empty(&self, blocks: &[u32]) -> Option<u32> {
        let mut rest = blocks;
        while let Some(&head) = rest.first() {
            let (at, mask, tail) = Self::group(rest, Self::window_of(head))?;
            rest = tail;
            // Acquire: pairs with the release that cleared the bit.
            let clear = mask & !self.lines[at].load(Ordering::Acquire);
            if clear != 0 {
                return Some(at as u32 * BITS + clear.trailing_zeros());
            }
        }
        None
    }

    /// The first blocks of a list that share a word of a window: word, bits, and the rest. A block
    /// that comes twice in a row begins a new group.
    fn group(blocks: &[u32], window: u32) -> Option<(usize, u64, &[u32])> {
        let &head = blocks.first()?;
        if Self::window_of(head) != window {
            return None;
        }
        let (at, mut mask) = Self::place(head);
        if let Some((whole, rest)) = blocks.split_first_chunk::<64>()
            && BITS == 64
            && head % 64 == 0
        {
            // All 64 of them in order: no loop over bits. (Folded, so that it is vectorised.)
            let differ =
                |differ, (at, &block): (usize, &u32)| differ | (block ^ (head + at as u32));
            if whole.iter().enumerate().fold(0, differ) == 0 {
                return Some((at, !0, rest));
            }
        }
        let mut n = 1;
        for &block in &blocks[1..] {
            let (word, bit) = Self::place(block);
            if word != at || mask & bit != 0 {
                break;
            }
            mask |= bit;
            n += 1;
        }
        Some((at, mask, &blocks[n..]))
    }

    /// Clears bits that are all set. False: one of them is not, and nothing has changed.
    fn clear(&self, at: usize, mask: u64) -> bool {
        // Relaxed: the exchange decides.
        let mut line = self.lines[at].load(Ordering::Relaxed);
        while line & mask == mask {
            // AcqRel: Release pairs with the Acquire of the next claim of these blocks.
            match self.lines[at].compare_exchange(
                line,
                line & !mask,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(seen) => line = seen,
            }
        }
        false
    }
}
