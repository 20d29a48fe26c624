//! Physical memory: who holds which block.
//!
//! What lives here: the lines (one bit a block: empty or not), the state words, the two index
//! bitmaps that measuring and planning read, and the counters. What never lives here: sequences,
//! tokens, the order of eviction.
//!
//! # One truth
//!
//! The line bit is the truth of *empty or not*; for a block that is not empty the state word
//! ([`word`]) is the truth of the rest. Everything else is an index, claimed before and repaired
//! after:
//!
//! ```text
//! lines      1 bit   set: not empty. Bits past the end are set for ever
//! words      32 bit  see word.rs; 0 while the block is empty or private
//! evictable  1 bit   cached, in the eviction order, not under a move: counts as available
//! stuck      1 bit   must not be planned as a source: fenced, destined, offline, moving, pinned,
//!                    or cached but not yet evictable
//! empty      count   empty blocks that nobody has reserved
//! ```
//!
//! | from | to | how (linearisation point) | who may |
//! |---|---|---|---|
//! | empty | in use, destined | `fetch_or` on the line | holder of a reservation |
//! | in use | empty, fenced | `fetch_and` on the line; store of the word | last reference |
//! | in use | cached, and back | store of the word | under the shared lock |
//! | cached | empty, in use | store of the word, then the line | under the shared lock |
//! | destined | in use, cached, empty | store of the word | the transaction |
//!
//! Words of blocks that more than one thread may know (published, shared, pinned, moving) change
//! only under the shared lock of [`crate::state::Mmu`]; a private block's word is 0 and belongs to
//! its sequence. So no word is ever changed by two threads at once, and reading one needs no lock.
//!
//! # Progress
//!
//! A claim first reserves a number of blocks from `empty` (a compare-and-swap loop), then collects
//! that many bits. `empty` is raised only after the bits are clear, so as many clear bits exist as
//! are reserved: the collecting loop ends, whatever other threads do (lock-free). Claims are all or
//! nothing because the reservation is.
//!
//! There is no ABA: a bit that was cleared and set again between a load and the `fetch_or` is
//! simply not among the bits that the `fetch_or` won.

mod placement;
mod word;

use crate::error::Result;
use crate::sync::{AtomicU32, AtomicU64, Ordering, zeroed_u32, zeroed_u64};

pub use placement::Placement;
use placement::Scatter;
pub(crate) use word::Word;
pub use word::{MAX_REFERENCES, State};

/// Number of blocks in each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct States {
    /// Nobody's.
    pub empty: u32,
    /// Destinations of moves in flight.
    pub destined: u32,
    /// Referenced at least once.
    pub in_use: u32,
    /// Kept by the prefix index alone.
    pub cached: u32,
    /// Released, but a step in flight may still touch them.
    pub fenced: u32,
    /// Given back.
    pub offline: u32,
    /// `empty` + the cached ones that may be evicted now.
    pub available: u32,
}

/// The physical blocks.
#[derive(Debug)]
pub(crate) struct Pool {
    /// Numbers 0 .. span; one of them may be reserved for ever (a null block that is not the last).
    span: u32,
    usable: u32,
    lines: Box<[AtomicU64]>,
    words: Box<[AtomicU32]>,
    evictable: Box<[AtomicU64]>,
    stuck: Box<[AtomicU64]>,
    empty: AtomicU32,
    counts: [AtomicU32; 5],
    num_evictable: AtomicU32,
    /// Where the search for an empty block starts: no empty block lies in a lower word, unless
    /// another thread released one in this moment (then it is found by going round).
    first: AtomicU32,
    scatter: Option<Scatter>,
}

fn place(block: u32) -> (usize, u64) {
    ((block / 64) as usize, 1 << (block % 64))
}

impl Pool {
    pub(crate) fn new(span: u32, reserved: Option<u32>, placement: Placement) -> Result<Self> {
        let words = span.div_ceil(64) as usize;
        let (lines, stuck) = (zeroed_u64(words)?, zeroed_u64(words)?);
        let rest = span % 64;
        if rest != 0 {
            lines[words - 1].store(!0 << rest, Ordering::Relaxed);
        }
        if let Some(reserved) = reserved {
            set_bit(&lines, reserved, true);
            set_bit(&stuck, reserved, true);
        }
        let usable = span - u32::from(reserved.is_some());
        Ok(Self {
            span,
            usable,
            lines,
            words: zeroed_u32(span as usize)?,
            evictable: zeroed_u64(words)?,
            stuck,
            empty: AtomicU32::new(usable),
            counts: Default::default(),
            num_evictable: AtomicU32::new(0),
            first: AtomicU32::new(0),
            scatter: match placement {
                Placement::AddressOrder => None,
                Placement::Scatter { seed } => Some(Scatter::new(seed)),
            },
        })
    }

    /// Empty blocks that nobody has reserved.
    pub(crate) fn empty(&self) -> u32 {
        // Acquire: pairs with the Release in `give`, so the bits behind this number are clear.
        self.empty.load(Ordering::Acquire)
    }

    pub(crate) fn num_evictable(&self) -> u32 {
        self.num_evictable.load(Ordering::Relaxed)
    }

    // -- claiming ----------------------------------------------------------------------------

    /// Reserves up to `n` empty blocks and returns how many.
    pub(crate) fn reserve_up_to(&self, n: u32) -> u32 {
        let mut empty = self.empty();
        loop {
            let got = empty.min(n);
            // AcqRel: Acquire pairs with the Release of `give` (the bits are clear), Release hands
            // the same on to the next reservation.
            match self.empty.compare_exchange_weak(
                empty,
                empty - got,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return got,
                Err(seen) => empty = seen,
            }
        }
    }

    /// Reserves exactly `n` empty blocks, or nothing: never a part for a moment, which others would
    /// miss meanwhile.
    pub(crate) fn reserve(&self, n: u32) -> bool {
        let mut empty = self.empty();
        while empty >= n {
            // AcqRel: as in `reserve_up_to`.
            match self.empty.compare_exchange_weak(
                empty,
                empty - n,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return true,
                Err(seen) => empty = seen,
            }
        }
        false
    }

    /// Gives a reservation back.
    pub(crate) fn unreserve(&self, n: u32) {
        // Release: pairs with the Acquire in `reserve_up_to`.
        self.empty.fetch_add(n, Ordering::Release);
    }

    /// Turns a reservation of `n` blocks into `n` blocks, appended to `out`: private, ascending
    /// with [`Placement::AddressOrder`].
    pub(crate) fn take(&self, mut n: u32, out: &mut Vec<u32>) {
        if let Some(scatter) = &self.scatter {
            for _ in 0..n {
                let start = scatter.draw(self.span);
                out.push(self.take_from(start));
            }
            return;
        }
        let seen = self.first.load(Ordering::Relaxed);
        let mut at = seen as usize;
        while n > 0 {
            if at == self.lines.len() {
                at = 0;
            }
            n -= self.take_in_word(at, !0, n, out);
            if n > 0 {
                at += 1;
            }
        }
        // Only an index, and only moved if nobody lowered it meanwhile.
        let _ = self
            .first
            .compare_exchange(seen, at as u32, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Claims up to `n` clear bits of one word among `allowed`, lowest first.
    fn take_in_word(&self, at: usize, allowed: u64, n: u32, out: &mut Vec<u32>) -> u32 {
        let line = &self.lines[at];
        let clear = !line.load(Ordering::Relaxed) & allowed;
        if clear == 0 {
            return 0;
        }
        let mut mask = clear;
        while mask.count_ones() > n {
            // Drops the highest bits that are too many.
            mask &= !(1 << (63 - mask.leading_zeros()));
        }
        // AcqRel: Acquire pairs with the Release in `give`, so what the last owner did to the
        // block is before what the next one does; Release keeps the chain for the one after.
        let mut won = mask & !line.fetch_or(mask, Ordering::AcqRel);
        let count = won.count_ones();
        let base = at as u32 * 64;
        if won == !0 {
            out.extend(base..base + 64);
        } else {
            while won != 0 {
                out.push(base + won.trailing_zeros());
                won &= won - 1;
            }
        }
        count
    }

    /// Turns a reservation of one into the first empty block at or after `start`, going round.
    fn take_from(&self, start: u32) -> u32 {
        let (mut at, bit) = place(start);
        let mut allowed = !(bit - 1);
        let mut one = Vec::with_capacity(1);
        loop {
            if self.take_in_word(at, allowed, 1, &mut one) == 1 {
                return one[0];
            }
            allowed = !0;
            at = (at + 1) % self.lines.len();
        }
    }

    /// Claims exactly this block if it is empty.
    pub(crate) fn take_exact(&self, block: u32) -> bool {
        if !self.reserve(1) {
            return false;
        }
        let (at, bit) = place(block);
        // AcqRel: as in `take_in_word`.
        let won = self.lines[at].fetch_or(bit, Ordering::AcqRel) & bit == 0;
        if !won {
            self.unreserve(1);
        }
        won
    }

    /// Empties blocks that the caller owns alone and whose words are 0. Neighbours that share a
    /// word are cleared by one operation.
    pub(crate) fn give(&self, blocks: &[u32]) {
        let mut rest = blocks;
        let mut lowest = u32::MAX;
        while let Some(&head) = rest.first() {
            let (at, _) = place(head);
            let mut mask = 0;
            while let Some((&block, tail)) = rest.split_first() {
                let (word, bit) = place(block);
                if word != at {
                    break;
                }
                debug_assert_eq!(self.word(block), Word::PRIVATE);
                mask |= bit;
                rest = tail;
            }
            // AcqRel: Release pairs with the Acquire of the next claim of these blocks.
            let old = self.lines[at].fetch_and(!mask, Ordering::AcqRel);
            assert!(
                old & mask == mask,
                "released a block that was empty: word {at}, mask {mask:#x}"
            );
            lowest = lowest.min(at as u32);
        }
        if lowest != u32::MAX {
            self.first.fetch_min(lowest, Ordering::Relaxed);
            // Release: whoever sees the number sees the clear bits (Acquire in `reserve_up_to`).
            self.empty.fetch_add(blocks.len() as u32, Ordering::Release);
        }
    }

    // -- words -------------------------------------------------------------------------------

    /// The state word. 0 for an empty block as well: see [`Pool::is_empty`].
    pub(crate) fn word(&self, block: u32) -> Word {
        // Acquire: pairs with the Release in `set_word`.
        Word(self.words[block as usize].load(Ordering::Acquire))
    }

    /// Replaces the word of a block that is not empty; the caller may (see the module's table).
    pub(crate) fn set_word(&self, block: u32, word: Word) {
        let cell = &self.words[block as usize];
        let old = Word(cell.load(Ordering::Relaxed)).state();
        let new = word.state();
        if old != new {
            if old != State::InUse {
                self.counts[old as usize - 1].fetch_sub(1, Ordering::Relaxed);
            }
            if new != State::InUse {
                self.counts[new as usize - 1].fetch_add(1, Ordering::Relaxed);
            }
        }
        // Release: pairs with the Acquire in `word`.
        cell.store(word.0, Ordering::Release);
    }

    pub(crate) fn is_empty(&self, block: u32) -> bool {
        let (at, bit) = place(block);
        self.lines[at].load(Ordering::Acquire) & bit == 0
    }

    /// The state of any block.
    pub(crate) fn state(&self, block: u32) -> State {
        if self.is_empty(block) {
            State::Empty
        } else {
            self.word(block).state()
        }
    }

    /// Enters a block into the evictable index, or takes it out.
    pub(crate) fn set_evictable(&self, block: u32, on: bool) {
        if set_bit(&self.evictable, block, on) {
            if on {
                self.num_evictable.fetch_add(1, Ordering::Relaxed);
            } else {
                self.num_evictable.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn is_evictable(&self, block: u32) -> bool {
        let (at, bit) = place(block);
        self.evictable[at].load(Ordering::Relaxed) & bit != 0
    }

    /// Enters a block into the stuck index, or takes it out.
    pub(crate) fn set_stuck(&self, block: u32, on: bool) {
        set_bit(&self.stuck, block, on);
    }

    pub(crate) fn is_stuck(&self, block: u32) -> bool {
        let (at, bit) = place(block);
        self.stuck[at].load(Ordering::Relaxed) & bit != 0
    }

    // -- looking -----------------------------------------------------------------------------

    /// Counts by state. Exact at quiescence.
    pub(crate) fn states(&self) -> States {
        let count = |state: State| self.counts[state as usize - 1].load(Ordering::Relaxed);
        let empty = self.empty();
        let (destined, cached) = (count(State::Destined), count(State::Cached));
        let (fenced, offline) = (count(State::Fenced), count(State::Offline));
        States {
            empty,
            destined,
            in_use: self
                .usable
                .saturating_sub(empty + destined + cached + fenced + offline),
            cached,
            fenced,
            offline,
            available: empty + self.num_evictable(),
        }
    }

    /// Bits of the empty blocks.
    pub(crate) fn empty_bits(&self) -> Vec<u64> {
        self.lines
            .iter()
            .map(|line| !line.load(Ordering::Acquire))
            .collect()
    }

    /// Bits of the empty and of the evictable blocks.
    pub(crate) fn available_bits(&self) -> Vec<u64> {
        let lines = self.lines.iter().zip(&self.evictable);
        lines
            .map(|(line, ev)| !line.load(Ordering::Acquire) | ev.load(Ordering::Relaxed))
            .collect()
    }

    /// Bits of the evictable blocks.
    pub(crate) fn evictable_bits(&self) -> Vec<u64> {
        self.evictable
            .iter()
            .map(|ev| ev.load(Ordering::Relaxed))
            .collect()
    }

    /// Bits of the blocks in use that are not stuck. (Cached blocks are evictable or stuck.)
    pub(crate) fn movable_bits(&self) -> Vec<u64> {
        let mut bits: Vec<u64> = (self.lines.iter().zip(&self.evictable).zip(&self.stuck))
            .map(|((line, ev), stuck)| {
                line.load(Ordering::Acquire)
                    & !ev.load(Ordering::Relaxed)
                    & !stuck.load(Ordering::Relaxed)
            })
            .collect();
        let rest = self.span % 64;
        if rest != 0 {
            *bits.last_mut().expect("a pool has at least one block") &= !(!0 << rest);
        }
        bits
    }
}

fn set_bit(bits: &[AtomicU64], block: u32, on: bool) -> bool {
    let (at, bit) = place(block);
    // Relaxed: an index beside the truth; whoever decides by it looks at the word again.
    let old = if on {
        bits[at].fetch_or(bit, Ordering::Relaxed)
    } else {
        bits[at].fetch_and(!bit, Ordering::Relaxed)
    };
    (old & bit != 0) != on
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(pool: &Pool, n: u32) -> Option<Vec<u32>> {
        let mut out = Vec::new();
        pool.reserve(n).then(|| {
            pool.take(n, &mut out);
            out
        })
    }

    #[test]
    fn address_order_hands_out_the_lowest_blocks() {
        let pool = Pool::new(200, None, Placement::AddressOrder).unwrap();
        assert_eq!(claim(&pool, 130).unwrap(), (0..130).collect::<Vec<_>>());
        pool.give(&[3, 64, 65, 129]);
        assert_eq!(claim(&pool, 5).unwrap(), [3, 64, 65, 129, 130]);
        assert_eq!(claim(&pool, 69).unwrap(), (131..200).collect::<Vec<_>>());
        assert_eq!(claim(&pool, 1), None);
    }

    #[test]
    fn a_claim_that_fails_takes_nothing() {
        let pool = Pool::new(3, None, Placement::AddressOrder).unwrap();
        assert_eq!(claim(&pool, 4), None);
        assert_eq!((pool.empty(), pool.states().in_use), (3, 0));
        assert_eq!(claim(&pool, 3).unwrap().len(), 3);
    }

    #[test]
    fn scatter_hands_out_every_block_once() {
        let pool = Pool::new(77, None, Placement::Scatter { seed: 5 }).unwrap();
        let mut all = claim(&pool, 77).unwrap();
        assert_ne!(all[..4], [0, 1, 2, 3]);
        all.sort_unstable();
        assert_eq!(all, (0..77).collect::<Vec<_>>());
    }

    #[test]
    fn a_reserved_block_is_never_handed_out_or_movable() {
        let pool = Pool::new(70, Some(65), Placement::AddressOrder).unwrap();
        assert_eq!((pool.empty(), pool.states().in_use), (69, 0));
        let all = claim(&pool, 69).unwrap();
        assert!(!all.contains(&65) && claim(&pool, 1).is_none());
        assert_eq!(pool.movable_bits()[1], 0b11_1101);
        assert_eq!(pool.states().in_use, 69);
    }

    #[test]
    #[should_panic(expected = "released a block that was empty")]
    fn emptying_an_empty_block_is_refused() {
        Pool::new(8, None, Placement::AddressOrder)
            .unwrap()
            .give(&[2]);
    }

    #[test]
    fn an_exact_claim_takes_that_block_or_nothing() {
        let pool = Pool::new(8, None, Placement::AddressOrder).unwrap();
        assert!(pool.take_exact(5) && !pool.take_exact(5));
        assert_eq!(pool.empty(), 7);
        assert_eq!(claim(&pool, 7).unwrap(), [0, 1, 2, 3, 4, 6, 7]);
        assert!(!pool.take_exact(1));
    }

    #[test]
    fn two_threads_never_get_the_same_block() {
        let pool = Pool::new(1000, None, Placement::AddressOrder).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..2u32 {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..2000 {
                        let n = 1 + (round * 7 + thread * 3) % 300;
                        if let Some(blocks) = claim(pool, n) {
                            for &block in &blocks {
                                assert_eq!(pool.word(block), Word::PRIVATE);
                                pool.set_word(block, Word::DESTINED);
                            }
                            for &block in &blocks {
                                pool.set_word(block, Word::PRIVATE);
                            }
                            pool.give(&blocks);
                        }
                    }
                });
            }
        });
        assert_eq!(
            pool.states(),
            States {
                empty: 1000,
                available: 1000,
                ..States::default()
            }
        );
    }
}
