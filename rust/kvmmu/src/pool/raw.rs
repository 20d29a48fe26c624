//! The public verbs: blocks without sequences, for engines that keep their own books.
//!
//! What lives here: checks of what is given, and the transitions of state words by exchange, which
//! need no lock. What never lives here: bits and credits.
//!
//! **What a block number cannot tell.** A release names a block, not the claim that it ends. Once
//! the block was handed out again, a second release of the first holder looks like the first of the
//! second, and is believed. So a release can name an owner: [`Pool::claim_for`] writes a number of
//! the caller's choice beside each block, and [`Pool::release_for`] ends exactly that claim.

use std::ops::Range;

use super::give::Group;
use super::physical::Physical;
use super::states::Change;
use super::word::{TAGS, both_released, both_retained};
use super::{End, Fit, MAX_OWNER, MAX_REFERENCES, Placement, Pool, State, Word, Zone};
use crate::config::MAX_BLOCKS;
use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering, lock};

/// Settings of a [`Pool`].
#[derive(Debug, Clone, PartialEq)]
pub struct PoolConfig {
    /// Usable blocks, 1 ..= [`MAX_BLOCKS`].
    pub num_blocks: u32,
    /// A block that is never handed out, `0 ..= num_blocks`; by default `num_blocks`, one behind
    /// the last.
    pub null_block: u32,
    /// Where new blocks are taken from.
    pub placement: Placement,
    /// From which end single blocks and batches are taken. Whole windows come from the low end.
    pub small_from: End,
    /// Share of the pool's windows that is the anchor region, 0 to below 1: see [`Zone`].
    pub anchor: f64,
}

impl PoolConfig {
    /// The defaults for a pool of `num_blocks` blocks: address order from the low end, and no
    /// anchor region.
    pub fn new(num_blocks: u32) -> Self {
        Self {
            num_blocks,
            null_block: num_blocks,
            placement: Placement::AddressOrder,
            small_from: End::Low,
            anchor: 0.0,
        }
    }

    fn check(&self) -> Result<()> {
        let allowed = |text: String| Err(Error::InvalidConfig(text));
        let (n, null) = (self.num_blocks, self.null_block);
        if !(1..=MAX_BLOCKS).contains(&n) {
            return allowed(format!("num_blocks = {n}: allowed is 1 to {MAX_BLOCKS}"));
        }
        if null > n {
            return allowed(format!("null_block = {null}: allowed is 0 to {n}"));
        }
        check_anchor(self.anchor)
    }
}

/// The share of an anchor region.
pub(crate) fn check_anchor(anchor: f64) -> Result<()> {
    if (0.0..1.0).contains(&anchor) {
        return Ok(());
    }
    Err(Error::InvalidConfig(format!(
        "anchor = {anchor}: allowed is 0 to below 1"
    )))
}

impl<const BITS: u32, const WORDS: usize> Pool<BITS, WORDS> {
    /// Blocks a window, the largest aligned page.
    pub const WINDOW: u32 = BITS * WORDS as u32;
    /// Order of the page that fills a window.
    pub const MAX_ORDER: u32 = Self::WINDOW.trailing_zeros();

    /// A pool of empty blocks.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] names the setting and what is allowed, or the bytes that are not to
    /// be had.
    pub fn new(config: &PoolConfig) -> Result<Self> {
        config.check()?;
        let inside = config.null_block < config.num_blocks;
        Self::build(
            config.num_blocks + u32::from(inside),
            inside.then_some(config.null_block),
            config.placement,
            config.small_from,
            config.anchor,
        )
    }

    // -- claiming ----------------------------------------------------------------------------

    /// Claims one block. `None`: none is empty.
    pub fn claim(&self) -> Option<u32> {
        let home = self.home();
        let Some(fifo) = &self.fifo else {
            return self.physical.claim_one(home);
        };
        let mut fifo = lock(fifo);
        let mut one = Vec::with_capacity(1);
        if self.physical.reserve(home, 1) {
            self.take_oldest(&mut fifo, 1, &mut one);
        }
        one.pop()
    }

    /// Claims `n` blocks, appended to `out`: all or none, in few long runs as far as the placement
    /// goes; ascending with [`Placement::AddressOrder`] and one thread.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBlocks`].
    pub fn claim_batch(&self, n: u32, out: &mut Vec<u32>) -> Result<()> {
        self.claim_batch_in(Zone::Body, n, out)
    }

    /// As [`Pool::claim_batch`], with a preference.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBlocks`].
    pub fn claim_batch_in(&self, zone: Zone, n: u32, out: &mut Vec<u32>) -> Result<()> {
        self.reserved_for(n)?;
        self.take(n, zone, Fit::Together, out);
        Ok(())
    }

    /// As [`Pool::claim_batch`], and writes `owner` beside each block: only
    /// [`Pool::release_for`] with the same number releases it. Such blocks cannot be shared.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBlocks`]; [`Error::LimitExceeded`] when `owner` is above [`MAX_OWNER`].
    pub fn claim_for(&self, zone: Zone, owner: u32, n: u32, out: &mut Vec<u32>) -> Result<()> {
        check_owner(owner)?;
        let first = out.len();
        self.claim_batch_in(zone, n, out)?;
        for &block in &out[first..] {
            self.set_word(block, Word::owned(owner));
        }
        Ok(())
    }

    /// Claims 2^order blocks that lie together, aligned to their number; returns the first.
    /// `None`: there is no such page, or the order is above [`Pool::MAX_ORDER`].
    pub fn claim_page(&self, order: u32) -> Option<u32> {
        self.claim_page_in(Zone::Body, order)
    }

    /// As [`Pool::claim_page`], with a preference.
    pub fn claim_page_in(&self, zone: Zone, order: u32) -> Option<u32> {
        match order {
            0 => self.claim(),
            order if order > Self::MAX_ORDER => None,
            _ => self.shaped(|| {
                let first = self.physical.claim_page(self.home(), order, zone)?;
                Some((first, first..first + (1 << order)))
            }),
        }
    }

    /// Claims `n` consecutive blocks, the lowest there are; returns the first. `None`: there is no
    /// such run, or `n` is 0.
    pub fn claim_run(&self, n: u32) -> Option<u32> {
        self.claim_run_in(Zone::Body, n)
    }

    /// As [`Pool::claim_run`], with a preference.
    pub fn claim_run_in(&self, zone: Zone, n: u32) -> Option<u32> {
        if n == 0 || n > self.physical.span {
            return None;
        }
        self.shaped(|| {
            let first = self.physical.claim_run(self.home(), n, zone)?;
            Some((first, first..first + n))
        })
    }

    /// Claims exactly the blocks `first .. first + n`, if all of them are empty.
    pub fn claim_exact(&self, first: u32, n: u32) -> bool {
        let Some(range) = self.range(first, n) else {
            return false;
        };
        let claimed = self.shaped(|| {
            let done = self.physical.claim_range(self.home(), range.clone());
            done.then(|| ((), range.clone()))
        });
        claimed.is_some()
    }

    /// Claims blocks in runs of these lengths, in their order, or as near as it goes: a run that is
    /// not to be had comes in the longest pieces that are. For the receiving end of a transfer, so
    /// that it needs few descriptors. All or none; appended to `out`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBlocks`].
    pub fn claim_like(&self, lengths: &[u32], out: &mut Vec<u32>) -> Result<()> {
        let sum: u64 = lengths.iter().map(|&n| u64::from(n)).sum();
        let start = out.len();
        let fifo = self.fifo.as_ref().map(lock);
        let home = self.home();
        let fits = u32::try_from(sum).is_ok();
        if !fits || !self.physical.claim_like(home, lengths, out) {
            return Err(self.out_of_blocks(sum));
        }
        if let Some(mut fifo) = fifo {
            out[start..].iter().for_each(|&block| fifo.remove(block));
        }
        Ok(())
    }

    // -- sharing -----------------------------------------------------------------------------

    /// One more reference for each block, by somebody who holds it. All or none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] names the first block that is not held, has
    /// [`MAX_REFERENCES`], or has an owner.
    pub fn retain(&self, blocks: &[u32]) -> Result<()> {
        self.all_held(blocks)?;
        let more = |word: Word| match word.retained() {
            Some(more) if word.state() == State::InUse => Change::To(more),
            _ => Change::Refuse,
        };
        self.raise_each(blocks, both_retained, more)
    }

    /// One more reference for each of some published blocks, by somebody who found them in an index
    /// of contents: they may be in use or cached, and a cached one comes back into use. Against an
    /// eviction at the same time exactly one wins. All or none.
    ///
    /// The number says nothing about the contents. An index that evicts takes the entry out first;
    /// then whoever found the entry before and revives the block afterwards is told that it is gone.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] names the first block that is not published (any more), or has
    /// [`MAX_REFERENCES`].
    pub fn revive(&self, blocks: &[u32]) -> Result<()> {
        for &block in blocks {
            // A word that says published is of a block that is not empty.
            let inside = self.range(block, 1);
            inside.ok_or_else(|| invalid(block, "is not a block of this pool"))?;
        }
        let more = |word: Word| match word.retained() {
            Some(more) if word.is_published() => Change::To(more),
            _ => Change::Refuse,
        };
        self.raise_each(blocks, |_| None, more)
    }

    /// Changes all words or none: those changed before one that refuses give their reference back.
    fn raise_each(
        &self,
        blocks: &[u32],
        quick: impl Fn(u64) -> Option<u64>,
        more: impl Fn(Word) -> Change,
    ) -> Result<()> {
        let mut cached = Vec::new();
        let raised = self.change_each(blocks, quick, more, |block, old, _| {
            if old.state() == State::Cached {
                cached.push(block);
            }
        });
        cached.iter().for_each(|&block| self.index_evictable(block));
        raised.map_err(|at| {
            for &block in &blocks[..at] {
                self.drop_one(block).expect("this reference was just taken"); // undo
            }
            let block = blocks[at];
            let word = self.word(block);
            let reason = match word.state() {
                State::InUse if word.is_owned() => "is held by one owner and cannot be shared",
                State::InUse if word.references() == MAX_REFERENCES => {
                    "has all the references that it can have"
                }
                State::InUse => "is not published",
                State::Cached => "is cached, and not held",
                _ => "is not held",
            };
            invalid(block, reason)
        })
    }

    /// An error unless all of these are blocks of the pool that are not empty. From then on they
    /// are no part of a page that is released as one.
    fn all_held(&self, blocks: &[u32]) -> Result<Look> {
        let mut look = Look {
            ascending: true,
            plain: true,
        };
        let mut least = 0;
        let mut rest = blocks;
        while let Some((group, n)) = Physical::<BITS, WORDS>::group(rest) {
            for &block in [rest[n - 1]].iter().chain(&self.reserved) {
                if block >= self.physical.span {
                    return Err(invalid(block, "is not a block of this pool"));
                }
                if self.reserved == Some(block) && rest[..n].contains(&block) {
                    return Err(invalid(block, NULL));
                }
            }
            if let Some(block) = self.physical.empty_of(&group) {
                return Err(invalid(block, "is not held"));
            }
            if !self.physical.split(group.first / Self::WINDOW) {
                return Err(invalid(group.first, "is not held"));
            }
            look.ascending &= group.first >= least;
            look.plain &= group.dense && self.have_none(group.first, n, TAGS);
            least = rest[n - 1] + 1;
            rest = &rest[n..];
        }
        Ok(look)
    }

    /// An index of contents knows these blocks from now on: with their last reference they become
    /// cached instead of empty, until they are revived or evicted. All or none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] names the first block that is not in use or has an owner.
    pub fn publish(&self, blocks: &[u32]) -> Result<()> {
        let may = |word: Word| word.state() == State::InUse && !word.is_owned();
        for &block in blocks {
            self.held(block).map_err(|reason| invalid(block, reason))?;
            // A block whose word is to change is no part of a page that is released as one.
            if !may(self.word(block)) || !self.physical.split(block / Self::WINDOW) {
                return Err(invalid(block, "is not in use by holders that share it"));
            }
        }
        let publish = |word: Word| match may(word) {
            true => Change::To(word.published()),
            false => Change::Leave, // released since
        };
        let published = self.change_each(blocks, |_| None, publish, |_, _, _| {});
        published.expect("nothing is refused");
        Ok(())
    }

    /// Empties a cached block. False: it is not cached (any more), and nothing has changed.
    pub fn evict(&self, block: u32) -> bool {
        if self.held(block).is_err() {
            return false;
        }
        let word = self.word(block);
        if word != Word::CACHED || self.change_word(block, word, Word::PRIVATE).is_err() {
            return false;
        }
        // From here on the block is this thread's alone.
        self.index_evictable(block);
        self.give(&[block]);
        true
    }

    /// References of a block: 0 when it is empty or cached.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] for a number outside the pool.
    pub fn references(&self, block: u32) -> Result<u32> {
        self.range(block, 1)
            .ok_or_else(|| invalid(block, "is not a block of this pool"))?;
        Ok(match self.state(block) {
            State::InUse => self.word(block).references(),
            _ => 0,
        })
    }

    // -- releasing ---------------------------------------------------------------------------

    /// Gives one reference of a block back.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] when it is not held, or has an owner; nothing has changed.
    pub fn release(&self, block: u32) -> Result<()> {
        if block < self.physical.span
            && self.reserved != Some(block)
            && self.word(block) == Word::PRIVATE
            && self.fifo.is_none()
        {
            // Private or empty: the exchange on its line decides.
            let given = self.physical.give_one(self.home(), block);
            return if given {
                Ok(())
            } else {
                Err(invalid(block, "is not held"))
            };
        }
        self.releasable(block).map_err(|why| invalid(block, why))?;
        self.drop_one(block).map_err(|why| invalid(block, why))
    }

    /// Gives one reference of each block back; a block that is listed twice loses two.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] names a block that is not held (so often), or has an owner; nothing
    /// has changed. Only if another thread releases the same references in the same moment, which
    /// is one release too many, the blocks that were still held are released before the error.
    pub fn release_batch(&self, blocks: &[u32]) -> Result<()> {
        if let Some(groups) = self.private_groups(blocks) {
            return self.release_private(groups.iter().copied());
        }
        self.check_batch(blocks)?;
        let mut wrong = None;
        let mut empty = Vec::new();
        let less = |word: Word| match word.state() {
            State::InUse if !word.is_owned() => word.released().map_or(Change::Leave, Change::To),
            _ => Change::Refuse,
        };
        let mut rest = blocks;
        while let Err(at) =
            self.change_each(rest, both_released, less, |block, _, change| match change {
                Change::To(less) if less.state() == State::Cached => self.index_evictable(block),
                Change::Leave => empty.push(block),
                _ => {}
            })
        {
            // Another thread has released it since it was checked.
            wrong = Some(rest[at]);
            rest = &rest[at + 1..];
        }
        match wrong.or(self.give_all(&empty)) {
            None => Ok(()),
            Some(block) => Err(invalid(block, "is not held")),
        }
    }

    /// Blocks whose words are 0: the lines decide.
    fn release_private(&self, groups: impl Iterator<Item = Group> + Clone) -> Result<()> {
        let empty = |group| self.physical.empty_of(&group);
        let wrong = groups.clone().find_map(empty);
        match wrong.or_else(|| self.physical.give_each(self.home(), groups)) {
            None => Ok(()),
            Some(block) => Err(invalid(block, "is not held")),
        }
    }

    /// Whether `n` blocks from `first` on are private or empty.
    fn are_private(&self, first: u32, n: usize) -> bool {
        if first.is_multiple_of(2) && n.is_multiple_of(2) {
            return self.have_none(first, n, !0);
        }
        let mut blocks = first..first.saturating_add(n as u32);
        blocks.end <= self.physical.span && blocks.all(|block| self.word(block) == Word::PRIVATE)
    }

    /// Whether no pair of words of `n` blocks from `first` on, both even, has one of these bits.
    fn have_none(&self, first: u32, n: usize, mask: u64) -> bool {
        let pairs = self.words.get(first as usize / 2..(first as usize + n) / 2);
        // Acquire: pairs with the exchange that gave another reference back; what that holder did
        // to the block is before what its next owner does. Folded without a branch.
        let bits = |bits, pair: &AtomicU64| bits | pair.load(Ordering::Acquire);
        pairs.is_some_and(|pairs| pairs.iter().fold(0, bits) & mask == 0)
    }

    /// Ascending blocks, each once, that are private or empty, as words and bits. `None`: they are
    /// something else.
    fn private_groups(&self, blocks: &[u32]) -> Option<Vec<Group>> {
        if self.fifo.is_some() || self.reserved.is_some_and(|null| blocks.contains(&null)) {
            return None;
        }
        let mut groups = Vec::with_capacity(blocks.len() / 32 + 1);
        let mut rest = blocks;
        let mut least = 0;
        while !rest.is_empty() {
            let (group, n) = Physical::<BITS, WORDS>::group(rest)?;
            let private = if group.dense {
                self.are_private(group.first, n)
            } else {
                rest[..n].iter().all(|&block| self.are_private(block, 1))
            };
            if !private || group.first < least {
                return None;
            }
            least = rest[n - 1] + 1;
            groups.push(group);
            rest = &rest[n..];
        }
        Some(groups)
    }

    /// An error unless every block can be released as often as it is listed.
    fn check_batch(&self, blocks: &[u32]) -> Result<()> {
        let Look { ascending, plain } = self.all_held(blocks)?;
        if ascending && plain {
            // Each once, and in use.
            return Ok(());
        }
        let mut sorted = blocks.to_vec();
        sorted.sort_unstable();
        for same in sorted.chunk_by(|a, b| a == b) {
            let block = same[0];
            self.releasable(block).map_err(|why| invalid(block, why))?;
            if (self.word(block).references() as usize) < same.len() {
                return Err(invalid(block, "is listed more often than it is held"));
            }
        }
        Ok(())
    }

    /// Releases blocks that were claimed for `owner`. All or none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] names the first block that this owner does not hold;
    /// [`Error::LimitExceeded`] when `owner` is above [`MAX_OWNER`].
    pub fn release_for(&self, owner: u32, blocks: &[u32]) -> Result<()> {
        check_owner(owner)?;
        let otherwise = "is not held by this owner";
        self.leave_state(blocks, Word::owned(owner), otherwise)?;
        self.give(blocks);
        Ok(())
    }

    /// Releases a page of private blocks, whether it was claimed as one or not.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] when `first` is not a multiple of 2^order, or as
    /// [`Pool::release_batch`].
    pub fn release_page(&self, first: u32, order: u32) -> Result<()> {
        let aligned = order <= Self::MAX_ORDER && first.is_multiple_of(1 << order);
        let range = self.range(first, 1 << order.min(Self::MAX_ORDER));
        let Some(range) = range.filter(|_| aligned) else {
            return Err(invalid(first, "begins no page of this order"));
        };
        if self.fifo.is_none() {
            let window = first / Self::WINDOW;
            if order == Self::MAX_ORDER && self.physical.release_window(self.home(), window) {
                return Ok(());
            }
            if self.are_private(first, range.len()) {
                if 1 << order < BITS {
                    let (at, bit) = Physical::<BITS, WORDS>::place(first);
                    let mask = ((1 << (1 << order)) - 1) * bit;
                    if self.physical.give_word(self.home(), at, mask) {
                        return Ok(());
                    }
                }
                return self.release_private(Physical::<BITS, WORDS>::groups(range));
            }
        }
        self.release_batch(&range.collect::<Vec<_>>())
    }

    // -- destinations of moves ---------------------------------------------------------------

    /// Claims exactly these blocks, which must be empty, as destinations of moves. All or none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] names the first block that is not empty.
    pub fn destine(&self, blocks: &[u32]) -> Result<()> {
        for (done, &block) in blocks.iter().enumerate() {
            if !self.claim_exact(block, 1) {
                self.undo(&blocks[..done]).expect("just destined"); // undo
                return Err(invalid(block, "is not empty"));
            }
            self.set_word(block, Word::DESTINED);
            self.set_stuck(block, true);
        }
        Ok(())
    }

    /// The moves do not take place: their destinations are empty again. All or none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] names the first block that is not destined.
    pub fn undo(&self, blocks: &[u32]) -> Result<()> {
        self.leave_state(blocks, Word::DESTINED, "is not destined")?;
        self.give(blocks);
        Ok(())
    }

    /// The moves have taken place: their destinations are in use, with one reference each. All or
    /// none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] names the first block that is not destined.
    pub fn arrive(&self, blocks: &[u32]) -> Result<()> {
        self.leave_state(blocks, Word::DESTINED, "is not destined")
    }

    /// Makes blocks private that have this word; the exchange decides between two callers.
    fn leave_state(&self, blocks: &[u32], word: Word, otherwise: &'static str) -> Result<()> {
        for (done, &block) in blocks.iter().enumerate() {
            let held = self.held(block);
            if held.is_err() || self.change_word(block, word, Word::PRIVATE).is_err() {
                for &block in &blocks[..done] {
                    self.set_word(block, word); // undo
                }
                return Err(invalid(block, otherwise));
            }
        }
        for &block in blocks {
            self.set_stuck(block, false);
        }
        Ok(())
    }

    // -- offline -----------------------------------------------------------------------------

    /// Takes exactly these blocks, which must be empty, out of the pool: their memory can be given
    /// back. All or none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] names the first block that is not empty.
    pub fn offline(&self, first: u32, n: u32) -> Result<()> {
        let range = self.range(first, n);
        let range = range.ok_or_else(|| invalid(first, "begins no such range of this pool"))?;
        if !self.claim_exact(first, n) {
            let held = range.into_iter().find(|&block| !self.is_empty(block));
            return Err(invalid(held.unwrap_or(first), "is not empty"));
        }
        for block in range {
            self.set_word(block, Word::OFFLINE);
            self.set_stuck(block, true);
        }
        Ok(())
    }

    /// Brings blocks back that were taken out by [`Pool::offline`]. All or none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] names the first block that is not offline.
    pub fn online(&self, first: u32, n: u32) -> Result<()> {
        let range = self.range(first, n);
        let range = range.ok_or_else(|| invalid(first, "begins no such range of this pool"))?;
        let blocks: Vec<u32> = range.collect();
        self.leave_state(&blocks, Word::OFFLINE, "is not offline")?;
        self.give(&blocks);
        Ok(())
    }

    // -- looking -----------------------------------------------------------------------------

    /// Blocks that can be handed out.
    pub fn num_blocks(&self) -> u32 {
        self.usable()
    }

    /// The block that is never handed out.
    pub fn null_block(&self) -> u32 {
        self.reserved.unwrap_or(self.physical.span)
    }

    /// Windows that are wholly empty.
    pub fn free_windows(&self) -> u32 {
        self.physical.free_windows()
    }

    /// First block of the anchor region; the number of blocks when there is none.
    pub fn anchor_from(&self) -> u32 {
        self.physical.anchor_from()
    }

    /// Bytes held beside the state words.
    pub fn metadata_bytes(&self) -> usize {
        let list = match &self.fifo {
            Some(_) => 8 * self.physical.span as usize,
            None => 0,
        };
        let indices = size_of_val(&*self.evictable) + size_of_val(&*self.stuck);
        self.physical.bytes() + indices + list
    }

    /// Recounts everything. Only when nobody else is at work.
    ///
    /// # Errors
    ///
    /// What is wrong, in words.
    pub fn audit(&self) -> std::result::Result<(), String> {
        self.audit_credits()?;
        let mut counts = [0; 6];
        for block in (0..self.physical.span).filter(|&block| Some(block) != self.reserved) {
            let (state, word) = (self.state(block), self.word(block));
            counts[state as usize] += 1;
            if state == State::Empty && word != Word::PRIVATE {
                return Err(format!("block {block} is empty and has the word {word:?}"));
            }
        }
        let s = self.states();
        let told = [s.empty, s.destined, s.in_use, s.cached, s.fenced, s.offline];
        let recount = [State::Empty, State::Destined, State::InUse, State::Cached]
            .into_iter()
            .chain([State::Fenced, State::Offline])
            .map(|state| counts[state as usize]);
        if !told.into_iter().eq(recount) {
            return Err(format!("counted {told:?}, recounted {counts:?}"));
        }
        Ok(())
    }

    /// Recounts what says which blocks are empty: counters, seats, wallets, indices.
    pub(crate) fn audit_credits(&self) -> std::result::Result<(), String> {
        self.physical.audit()
    }

    // -- beneath -----------------------------------------------------------------------------

    /// The range of `n` blocks from `first`, without the null block; `None` if it is none.
    fn range(&self, first: u32, n: u32) -> Option<Range<u32>> {
        let end = first.checked_add(n)?;
        let inside = n > 0 && end <= self.physical.span;
        let null = self
            .reserved
            .is_some_and(|null| (first..end).contains(&null));
        (inside && !null).then_some(first..end)
    }

    fn reserved_for(&self, n: u32) -> Result<()> {
        if self.reserve(n) {
            return Ok(());
        }
        Err(self.out_of_blocks(u64::from(n)))
    }

    fn out_of_blocks(&self, needed: u64) -> Error {
        Error::OutOfBlocks {
            needed,
            available: u64::from(self.empty()),
            num_blocks: u64::from(self.usable() - self.states().offline),
        }
    }

    /// Runs a claim of a shape; with a free list, what it claimed leaves the list.
    pub(super) fn shaped<T>(&self, claim: impl FnOnce() -> Option<(T, Range<u32>)>) -> Option<T> {
        let fifo = self.fifo.as_ref().map(lock);
        let (value, blocks) = claim()?;
        if let Some(mut fifo) = fifo {
            blocks.for_each(|block| fifo.remove(block));
        }
        Some(value)
    }

    /// With `n` blocks reserved: claims those that have been empty longest.
    pub(super) fn take_oldest(&self, fifo: &mut super::Fifo, n: u32, out: &mut Vec<u32>) {
        for _ in 0..n {
            let block = fifo.pop().expect("fewer blocks listed than reserved");
            let taken = self.physical.take_range(block..block + 1);
            assert!(taken, "block {block} was listed and not empty");
            out.push(block);
        }
    }

    /// Empties blocks whose words are 0; returns one that was empty already.
    pub(super) fn give_all(&self, blocks: &[u32]) -> Option<u32> {
        let fifo = self.fifo.as_ref().map(lock);
        let wrong = self.physical.give(self.home(), blocks);
        if let Some(mut fifo) = fifo {
            blocks.iter().for_each(|&block| fifo.push(block));
        }
        wrong
    }

    /// An error unless the number is a block of the pool that is not empty.
    fn held(&self, block: u32) -> std::result::Result<(), &'static str> {
        if block >= self.physical.span {
            return Err("is not a block of this pool");
        }
        if self.reserved == Some(block) {
            return Err(NULL);
        }
        if self.is_empty(block) {
            return Err("is not held");
        }
        Ok(())
    }

    fn releasable(&self, block: u32) -> std::result::Result<(), &'static str> {
        self.held(block)?;
        let word = self.word(block);
        match word.state() {
            State::InUse if word.is_owned() => {
                Err("is held by an owner, which its release must name")
            }
            State::InUse => Ok(()),
            State::Cached => Err("is cached, and not held"),
            _ => Err("is not held"),
        }
    }

    /// One reference fewer, and the block with it when it was the last.
    fn drop_one(&self, block: u32) -> std::result::Result<(), &'static str> {
        if self.lower_one(block)? {
            return Ok(());
        }
        let given = match &self.fifo {
            None => self.physical.give_one(self.home(), block),
            Some(_) => self.give_all(&[block]).is_none(),
        };
        if given { Ok(()) } else { Err("is not held") }
    }

    /// One reference fewer. False: it was the last of a private block, which is now to be emptied.
    fn lower_one(&self, block: u32) -> std::result::Result<bool, &'static str> {
        let mut word = self.word(block);
        loop {
            if word.state() != State::InUse || word.is_owned() {
                return Err("is not held");
            }
            let Some(less) = word.released() else {
                return Ok(false);
            };
            match self.change_word(block, word, less) {
                Ok(()) => {
                    if less.state() == State::Cached {
                        self.index_evictable(block);
                    }
                    return Ok(true);
                }
                Err(seen) => word = seen,
            }
        }
    }
}

/// What a look at the blocks of a batch found.
struct Look {
    /// Each comes once, lowest first.
    ascending: bool,
    /// All are in use without an owner; false is only a suspicion.
    plain: bool,
}

const NULL: &str = "is the null block, which nobody holds";

fn invalid(block: u32, reason: &'static str) -> Error {
    Error::InvalidBlock {
        block: u64::from(block),
        reason,
    }
}

fn check_owner(owner: u32) -> Result<()> {
    if owner <= MAX_OWNER {
        return Ok(());
    }
    Err(Error::LimitExceeded {
        what: "owner",
        needed: u64::from(owner),
        limit: u64::from(MAX_OWNER),
    })
}
