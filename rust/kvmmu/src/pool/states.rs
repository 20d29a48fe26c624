//! The state words of all blocks, and the two indices beside them.
//!
//! What lives here: reading and changing words, the counts by state, the bitmaps that measuring
//! and planning read. What never lives here: the layout of a word ([`super::word`]).

use std::ops::Range;

use super::physical::Physical;
use super::word::{
    MAX_REFERENCES, both_released, both_retained, may_be_full, not_simply_released,
    not_simply_retained,
};
use super::{Pool, State, WINDOW, Word};
use crate::sync::{AtomicU64, Ordering};

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
    /// Of `empty`: kept behind sequences to grow into, until somebody else needs them.
    pub held: u32,
}

impl<const BITS: u32, const WORDS: usize> Pool<BITS, WORDS> {
    /// The state word. 0 for an empty block as well: see [`Pool::is_empty`].
    pub(crate) fn word(&self, block: u32) -> Word {
        // Acquire: pairs with the Release of whoever changed it.
        half(
            self.words[block as usize / 2].load(Ordering::Acquire),
            block,
        )
    }

    /// Replaces the word of a block that is not empty; the caller alone may (see the module).
    pub(crate) fn set_word(&self, block: u32, word: Word) {
        let cell = &self.words[block as usize / 2];
        // Relaxed: nobody else changes this half.
        let old = half(cell.load(Ordering::Relaxed), block);
        // Release: pairs with the Acquire in `word`: who is the only holder left, and finds that
        // out without a lock, comes after what the others did. The other half stays as it is.
        cell.fetch_xor(difference(block, old, word), Ordering::Release);
        self.recount(old, word);
    }

    /// Replaces the word if it is still `old`; else tells what it is.
    pub(crate) fn change_word(&self, block: u32, old: Word, new: Word) -> Result<(), Word> {
        let cell = &self.words[block as usize / 2];
        // Acquire, and AcqRel below: what one holder did to the block is before what the next one
        // does.
        let mut pair = cell.load(Ordering::Acquire);
        loop {
            let now = half(pair, block);
            if now != old {
                return Err(now);
            }
            match cell.compare_exchange(
                pair,
                pair ^ difference(block, old, new),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    self.recount(old, new);
                    return Ok(());
                }
                Err(seen) => pair = seen,
            }
        }
    }

    /// Changes the words of some blocks, neighbours two at a time. `quick` may say at once what
    /// becomes of a pair, if neither state changes; else `changed` hears of each change.
    /// A block whose word may not be changed ends it: its place is returned, and those before it
    /// were changed.
    pub(crate) fn change_each(
        &self,
        blocks: &[u32],
        quick: impl Fn(u64) -> Option<u64>,
        change: impl Fn(Word) -> Change,
        mut changed: impl FnMut(u32, Word, Change),
    ) -> Result<(), usize> {
        let mut at = 0;
        while let Some(&block) = blocks.get(at) {
            let two = block.is_multiple_of(2) && blocks.get(at + 1) == Some(&(block + 1));
            let cell = &self.words[block as usize / 2];
            // Acquire, and AcqRel below: as in `change_word`.
            let mut pair = cell.load(Ordering::Acquire);
            if two && let Some(new) = quick(pair) {
                // Release on success: both blocks keep a holder, and the last one reads them again.
                match cell.compare_exchange(pair, new, Ordering::Release, Ordering::Acquire) {
                    Ok(_) => {
                        at += 2;
                        continue;
                    }
                    Err(seen) => pair = seen,
                }
            }
            let done = loop {
                let a = change(half(pair, block));
                if a == Change::Refuse {
                    return Err(at);
                }
                // A neighbour that refuses has its own turn.
                let b = two.then(|| change(half(pair, block + 1)));
                let b = b.filter(|&b| b != Change::Refuse);
                let flip = |block: u32, change: Change| match change {
                    Change::To(new) => difference(block, half(pair, block), new),
                    _ => 0,
                };
                let bits = flip(block, a) | b.map_or(0, |b| flip(block + 1, b));
                if bits == 0 {
                    break (a, b);
                }
                match cell.compare_exchange(pair, pair ^ bits, Ordering::AcqRel, Ordering::Acquire)
                {
                    Ok(_) => break (a, b),
                    Err(seen) => pair = seen,
                }
            };
            for (block, change) in [(block, Some(done.0)), (block + 1, done.1)] {
                if let Some(change) = change {
                    let old = half(pair, block);
                    if let Change::To(new) = change {
                        self.recount(old, new);
                    }
                    changed(block, old, change);
                }
            }
            at += 1 + usize::from(done.1.is_some());
        }
        Ok(())
    }

    /// One more holder of each block of a range that is plainly in use, neighbours two at a time;
    /// `other` hears of the rest. Under the lock that guards the words of shared blocks; no
    /// block of the range is anybody's who works without it.
    pub(crate) fn retain_pairs(&self, blocks: Range<u32>, other: impl FnMut(u32)) {
        self.change_pairs(blocks, both_retained, other);
    }

    /// One holder less of each block that keeps one; else as [`Pool::retain_pairs`].
    pub(crate) fn release_pairs(&self, blocks: Range<u32>, other: impl FnMut(u32)) {
        self.change_pairs(blocks, both_released, other);
    }

    /// As [`Pool::retain_pairs`], of blocks anywhere; all of them are `other` if one is.
    pub(crate) fn retain_each(&self, blocks: &[u32], other: impl FnMut(u32)) {
        if self.any(blocks, not_simply_retained) {
            return blocks.iter().copied().for_each(other);
        }
        for &block in blocks {
            self.change_half(block, |pair, one| pair + one);
        }
    }

    /// As [`Pool::release_pairs`], of blocks anywhere; all of them are `other` if one is.
    pub(crate) fn release_each(&self, blocks: &[u32], other: impl FnMut(u32)) {
        if self.any(blocks, not_simply_released) {
            return blocks.iter().copied().for_each(other);
        }
        for &block in blocks {
            self.change_half(block, |pair, one| pair - one);
        }
    }

    /// Whether a question about their words has bits for an answer with one of these blocks.
    /// (Folded without a branch, so that the loads do not wait for each other.)
    fn any(&self, blocks: &[u32], bits: impl Fn(Word) -> u32) -> bool {
        // Relaxed: as in `change_pairs`, or the words are of private blocks.
        let word = |block: u32| {
            half(
                self.words[block as usize / 2].load(Ordering::Relaxed),
                block,
            )
        };
        let bits = |or, &block: &u32| or | bits(word(block));
        blocks.iter().fold(0, bits) != 0
    }

    fn change_half(&self, block: u32, change: impl Fn(u64, u64) -> u64) {
        let cell = &self.words[block as usize / 2];
        // Relaxed and Release: as in `change_pairs`.
        let pair = cell.load(Ordering::Relaxed);
        cell.store(change(pair, 1 << (32 * (block % 2))), Ordering::Release);
    }

    fn change_pairs(
        &self,
        blocks: Range<u32>,
        change: impl Fn(u64) -> Option<u64>,
        mut other: impl FnMut(u32),
    ) {
        let mut at = blocks.start;
        while at < blocks.end {
            let cell = &self.words[at as usize / 2];
            // Relaxed: the lock hands the words on, and nobody changes them without it.
            let pair = cell.load(Ordering::Relaxed);
            let two = at.is_multiple_of(2) && at + 1 < blocks.end;
            if let Some(new) = two.then(|| change(pair)).flatten() {
                // Release: somebody without the lock may ask whether a neighbour is private.
                cell.store(new, Ordering::Release);
                at += 2;
                continue;
            }
            // One alone: beside it stands, for this question, a block that is held twice.
            let mask = u64::from(u32::MAX) << (32 * (at % 2));
            let alone = pair & mask | (1 | 1 << 32) & !mask;
            match change(alone) {
                Some(new) => cell.store(new & mask | pair & !mask, Ordering::Release),
                None => other(at),
            }
            at += 1;
        }
    }

    /// Whether a block of a range has as many references as can be.
    pub(crate) fn any_full(&self, blocks: Range<u32>) -> bool {
        let full = |block| self.word(block).references() == MAX_REFERENCES;
        let pairs = &self.words[blocks.start as usize / 2..blocks.end.div_ceil(2) as usize];
        // Relaxed: under the same lock. Whoever is far from it is seen to be at once.
        let may_be = |or, pair: &AtomicU64| or | may_be_full(pair.load(Ordering::Relaxed));
        pairs.iter().fold(0, may_be) != 0 && blocks.into_iter().any(full)
    }

    /// As [`Pool::any_full`], of blocks anywhere.
    pub(crate) fn any_of_full(&self, blocks: &[u32]) -> bool {
        let full = |&block: &u32| self.word(block).references() == MAX_REFERENCES;
        self.any(blocks, |word| may_be_full(word.0.into()) as u32) && blocks.iter().any(full)
    }

    /// As [`Pool::all_private`], of blocks anywhere.
    pub(crate) fn each_private(&self, blocks: &[u32]) -> bool {
        !self.any(blocks, |word| word.0)
    }

    /// Whether the words of all blocks of a range are 0: private, as their owner knows that they are
    /// not empty.
    pub(crate) fn all_private(&self, blocks: Range<u32>) -> bool {
        if !blocks.start.is_multiple_of(2) || !blocks.end.is_multiple_of(2) {
            return blocks
                .into_iter()
                .all(|block| self.word(block) == Word::PRIVATE);
        }
        // Relaxed: the words of private blocks are their owner's; any other is not 0.
        let or = |or, pair: &AtomicU64| or | pair.load(Ordering::Relaxed);
        let pairs = &self.words[blocks.start as usize / 2..blocks.end as usize / 2];
        pairs.iter().fold(0, or) == 0
    }

    fn recount(&self, old: Word, new: Word) {
        if old.same_state(new) {
            return;
        }
        let (old, new) = (old.state(), new.state());
        if old != new {
            // Relaxed, both: statistics, exact at quiescence.
            if old != State::InUse {
                self.counts[old as usize - 1].fetch_sub(1, Ordering::Relaxed);
            }
            if new != State::InUse {
                self.counts[new as usize - 1].fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn is_empty(&self, block: u32) -> bool {
        self.physical.is_empty(block)
    }

    /// The state of a block of the pool.
    pub(crate) fn state(&self, block: u32) -> State {
        if self.is_empty(block) {
            State::Empty
        } else {
            self.word(block).state()
        }
    }

    pub(crate) fn num_evictable(&self) -> u32 {
        self.num_evictable.load(Ordering::Relaxed)
    }

    /// Enters a block into the evictable index, or takes it out.
    pub(crate) fn set_evictable(&self, block: u32, on: bool) {
        if set_bit(&self.evictable, block, on) {
            self.count_indexed(block, 1, on);
            // Relaxed, both: as for the counts.
            if on {
                self.num_evictable.fetch_add(1, Ordering::Relaxed);
            } else {
                self.num_evictable.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Makes the evictable index say what the word says, for blocks whose words change without a
    /// lock: whoever changed the word last comes here after that, and finds what others left.
    pub(crate) fn index_evictable(&self, block: u32) {
        loop {
            let cached = |word: Word| word.state() == State::Cached;
            let on = cached(self.word(block));
            self.set_evictable(block, on);
            if cached(self.word(block)) == on {
                return;
            }
        }
    }

    pub(crate) fn is_evictable(&self, block: u32) -> bool {
        // Relaxed: an index; whoever decides by it looks at the word again.
        bit(&self.evictable, block, Ordering::Relaxed)
    }

    /// Enters a block into the stuck index, or takes it out.
    pub(crate) fn set_stuck(&self, block: u32, on: bool) {
        if self.is_stuck(block) != on && set_bit(&self.stuck, block, on) {
            self.count_indexed(block, 1 << 16, on);
        }
    }

    /// The bits of a window change by one.
    fn count_indexed(&self, block: u32, one: u32, on: bool) {
        let cell = &self.indexed[(block / Self::WINDOW) as usize];
        // Relaxed: sums that are exact at quiescence. A half may be below 0 until then, and borrows
        // from the other what it gives back.
        cell.fetch_add(if on { one } else { one.wrapping_neg() }, Ordering::Relaxed);
    }

    /// Bits of a window in the indices: evictable, stuck. Exact at quiescence.
    pub(crate) fn indexed_in(&self, window: u32) -> (u32, u32) {
        // Relaxed: as above.
        let both = self.indexed[window as usize].load(Ordering::Relaxed);
        (both & 0xffff, both >> 16)
    }

    /// Holds the counts of the indices by window against a recount. Only when nobody else is at work.
    pub(crate) fn audit_indexed(&self) -> std::result::Result<(), String> {
        for window in 0..self.indexed.len() as u32 {
            let end = self.span().min((window + 1) * Self::WINDOW);
            let count = |is: &dyn Fn(u32) -> bool| {
                let blocks = window * Self::WINDOW..end;
                blocks.filter(|&block| is(block)).count() as u32
            };
            let found = (
                count(&|block| self.is_evictable(block)),
                count(&|block| self.is_stuck(block)),
            );
            let known = self.indexed_in(window);
            if known != found {
                return Err(format!(
                    "window {window}: evictable and stuck {found:?}, counted are {known:?}"
                ));
            }
        }
        Ok(())
    }

    /// Takes the blocks of a range out of the stuck index.
    pub(crate) fn unstick(&self, blocks: Range<u32>) {
        for at in blocks.start / 64..blocks.end.div_ceil(64) {
            // Relaxed: the caller owns the blocks, and asks about their bits alone.
            if self.stuck[at as usize].load(Ordering::Relaxed) != 0 {
                for block in blocks.start.max(at * 64)..blocks.end.min((at + 1) * 64) {
                    self.set_stuck(block, false);
                }
            }
        }
    }

    pub(crate) fn is_stuck(&self, block: u32) -> bool {
        // Relaxed: as in `is_evictable`.
        bit(&self.stuck, block, Ordering::Relaxed)
    }

    /// Counts by state. Exact at quiescence.
    pub fn states(&self) -> States {
        // Relaxed: statistics.
        let count = |state: State| self.counts[state as usize - 1].load(Ordering::Relaxed);
        let empty = self.empty();
        let (destined, cached) = (count(State::Destined), count(State::Cached));
        let (fenced, offline) = (count(State::Fenced), count(State::Offline));
        States {
            empty,
            destined,
            in_use: self
                .usable()
                .saturating_sub(empty + destined + cached + fenced + offline),
            cached,
            fenced,
            offline,
            available: empty + self.num_evictable(),
            held: 0,
        }
    }

    /// Block numbers, the null block among them if it is not behind the last.
    pub(crate) fn span(&self) -> u32 {
        self.physical.span
    }

    /// Blocks that can be handed out.
    pub(crate) fn usable(&self) -> u32 {
        self.physical.span - u32::from(self.reserved.is_some())
    }
}

/// Bitmaps of 64 blocks a word, whatever the geometry would be in a model checker.
impl Pool {
    /// Bits of the empty blocks.
    pub(crate) fn empty_bits(&self) -> Vec<u64> {
        let lines = self.lines();
        lines.map(|line| !line).collect()
    }

    /// Bits of the empty and of the evictable blocks.
    pub(crate) fn available_bits(&self) -> Vec<u64> {
        let lines = self.lines().zip(&self.evictable);
        lines
            .map(|(line, ev)| !line | ev.load(Ordering::Relaxed))
            .collect()
    }

    /// Words of 64 blocks: those that are not empty (among them what lies behind the last block), the
    /// evictable ones, the stuck ones.
    pub(crate) fn sets(&self, at: usize) -> [u64; 3] {
        // Relaxed, all: whoever decides by it looks again, or has the pool at rest.
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        [
            load(&self.physical.lines[at]),
            load(&self.evictable[at]),
            load(&self.stuck[at]),
        ]
    }

    /// Of each window: (empty, evictable, stuck) blocks. Exact at quiescence.
    pub(crate) fn counts_by_window(&self) -> impl Iterator<Item = (u32, u32, u32)> {
        let empty = self.physical.empty_by_window().into_iter();
        (0..).zip(empty).map(|(window, empty)| {
            let (evictable, stuck) = self.indexed_in(window);
            (empty, evictable, stuck)
        })
    }

    /// Bits of the evictable blocks.
    pub(crate) fn evictable_bits(&self) -> Vec<u64> {
        self.evictable
            .iter()
            .map(|ev| ev.load(Ordering::Relaxed))
            .collect()
    }

    /// Blocks of a window that are neither empty nor evictable.
    pub(crate) fn live_in(&self, window: u32) -> u32 {
        let words = Physical::<64, 8>::words_of(window);
        // Relaxed, both: whoever decides by it has to live with what changes meanwhile.
        let ones = |words: &[AtomicU64]| {
            let each = words
                .iter()
                .map(|word| word.load(Ordering::Relaxed).count_ones());
            each.sum::<u32>()
        };
        let held = ones(&self.physical.lines[words.clone()]);
        let known = self.evictable.len();
        let evictable = ones(&self.evictable[words.start..words.end.min(known)]);
        let first = window * WINDOW;
        let outside = (first + WINDOW).saturating_sub(self.physical.span);
        let null = self.reserved.is_some_and(|block| block / WINDOW == window);
        held.saturating_sub(evictable + outside + u32::from(null))
    }

    /// Windows in which every block is empty or evictable: (evictable, window).
    pub(crate) fn idle_windows(&self) -> Vec<(u32, u32)> {
        let cached = |window| {
            let mut cached = 0;
            for (line, evictable) in self.window(window) {
                if line & !evictable != 0 {
                    return None;
                }
                cached += evictable.count_ones();
            }
            Some((cached, window))
        };
        (0..self.physical.span / 512).filter_map(cached).collect()
    }

    /// Windows with live blocks that have a run of `n` blocks, empty or evictable.
    pub(crate) fn windows_with_room(&self, n: u32) -> Vec<u32> {
        let room = |&window: &u32| {
            let mut bits = [0; 8];
            for (bits, (line, evictable)) in bits.iter_mut().zip(self.window(window)) {
                *bits = !line | evictable;
            }
            let available: u32 = bits.iter().map(|word| word.count_ones()).sum();
            (n..WINDOW).contains(&available)
                && crate::compact::measure::longest(&bits, WINDOW).largest >= n
        };
        let windows = 0..self.physical.span / WINDOW;
        windows.filter(room).collect()
    }

    /// Lines of a window, and the bits of its evictable blocks.
    fn window(&self, window: u32) -> impl Iterator<Item = (u64, u64)> + '_ {
        let words = window as usize * 8..(window as usize + 1) * 8;
        let none = std::iter::repeat(0);
        // Relaxed, both: whoever decides by it looks again, or lives with what changes meanwhile.
        let lines = words
            .clone()
            .map(|at| self.physical.lines[at].load(Ordering::Relaxed));
        let end = words.end.min(self.evictable.len());
        let evictable = self.evictable[words.start.min(end)..end].iter();
        lines.zip(evictable.map(|ev| ev.load(Ordering::Relaxed)).chain(none))
    }

    /// The lines, as far as there are blocks.
    fn lines(&self) -> impl Iterator<Item = u64> {
        let words = self.physical.span.div_ceil(64) as usize;
        // Relaxed: a survey; whoever claims what it shows acquires then.
        let load = |line: &AtomicU64| line.load(Ordering::Relaxed);
        self.physical.lines[..words].iter().map(load)
    }
}

/// What is to become of a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// This.
    To(Word),
    /// It stays, and the block is handled otherwise.
    Leave,
    /// It may not be changed.
    Refuse,
}

/// The word of a block in its pair.
fn half(pair: u64, block: u32) -> Word {
    Word((pair >> (32 * (block % 2))) as u32)
}

/// The bits of a pair that differ when a block's word changes.
fn difference(block: u32, old: Word, new: Word) -> u64 {
    u64::from(old.0 ^ new.0) << (32 * (block % 2))
}

fn place(block: u32) -> (usize, u64) {
    ((block / 64) as usize, 1 << (block % 64))
}

fn bit(bits: &[AtomicU64], block: u32, ordering: Ordering) -> bool {
    let (at, bit) = place(block);
    bits[at].load(ordering) & bit != 0
}

fn set_bit(bits: &[AtomicU64], block: u32, on: bool) -> bool {
    let (at, bit) = place(block);
    // AcqRel: in `index_evictable` the word is read again after this, and whoever changed it
    // before comes here after us; elsewhere the caller has the shared lock.
    let old = if on {
        bits[at].fetch_or(bit, Ordering::AcqRel)
    } else {
        bits[at].fetch_and(!bit, Ordering::AcqRel)
    };
    (old & bit != 0) != on
}
