//! `open`: a new sequence for a prompt, all of its blocks at once. And the questions before it.

use crate::error::{Error, Result};
use crate::pool::{Fit, Zone};
use crate::prefix::Keys;
use crate::state::{Mmu, Sequence, Shared, Vbn, id};
use crate::stats::count;

/// Whether [`Mmu::open`] would succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// At once.
    Now,
    /// After moves.
    Moves,
    /// When others have released enough.
    Frees,
    /// Never: larger than the pool or a limit.
    Never,
}

/// Answer of [`Mmu::quote`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quote {
    /// When `open` would succeed.
    pub when: When,
    /// Moves that it takes first.
    pub moves: u32,
    /// Blocks to claim beside the cached ones.
    pub needed: u32,
    /// Blocks that are empty or could be evicted for it.
    pub available: u32,
    /// Tokens found cached.
    pub num_cached_tokens: u32,
}

impl Mmu {
    /// Opens a sequence for a prompt and claims all of its blocks, or fails and changes nothing.
    ///
    /// The longest cached prefix of full blocks is mapped; at least the last token is left to
    /// compute. Returns the id of the sequence.
    pub fn open(&self, tokens: &[i32], keys: Keys) -> Result<i64> {
        self.open_in(Zone::Body, tokens, keys)
    }

    /// As [`Mmu::open`], with a preference where the new blocks lie: [`Zone::Anchor`] for a prompt
    /// that is expected to be shared and to stay, like a system prompt.
    pub fn open_in(&self, zone: Zone, tokens: &[i32], keys: Keys) -> Result<i64> {
        let _gate = self.enter();
        let blocks = self.checked_blocks(0, tokens.len())?;
        let (slot, mut sequence) = self.take_slot()?;
        let opened = self.fill(slot, &mut sequence, blocks, zone, tokens, keys);
        let id = id(sequence.generation, slot);
        match opened {
            Ok(()) => Ok(id),
            Err(error) => {
                self.give_slot(slot, sequence);
                Err(error)
            }
        }
    }

    /// Blocks of a sequence that grows from `tokens` by `more`, if it may.
    pub(super) fn checked_blocks(&self, tokens: u32, more: usize) -> Result<u32> {
        let total = u64::from(tokens) + more as u64;
        let needed = total.div_ceil(u64::from(self.config.block_size));
        let limit = u64::from(self.config.max_blocks_per_sequence);
        if needed > limit {
            return Err(Error::LimitExceeded {
                what: "blocks of one sequence",
                needed,
                limit,
            });
        }
        Ok(needed as u32)
    }

    fn fill(
        &self,
        slot: u32,
        sequence: &mut Sequence,
        blocks: u32,
        zone: Zone,
        tokens: &[i32],
        keys: Keys,
    ) -> Result<()> {
        self.table.reserve(sequence.space, 0, blocks)?;
        let mut shared = self.shared();
        let limit = self.matchable(tokens.len());
        let matched = self.matched_blocks(&mut shared, tokens, &keys, limit);
        let needed = blocks - matched.len() as u32;
        let reserved = match self.reserve(&shared, needed, self.evictable_among(&matched)) {
            Ok(reserved) => reserved,
            Err(error) => {
                self.table.trim(sequence.space, 0, blocks);
                return Err(error);
            }
        };
        // Referenced before anything is evicted for it.
        for (index, &block) in (0..).zip(&matched) {
            self.retain(&mut shared, block, Some(Vbn::new(slot, index)));
        }
        shared.index.used(&matched);
        let fresh = self.take(reserved, (zone, Fit::Together), Some(&mut shared));
        drop(shared);

        let start = matched.len() as u32;
        self.table.map(sequence.space, 0, &matched);
        self.table.map(sequence.space, start, &fresh);
        let chunks = tokens
            .chunks(self.config.block_size as usize)
            .skip(matched.len());
        for ((index, &block), tokens) in (start..).zip(&fresh).zip(chunks) {
            self.reverse.set_only(block, Vbn::new(slot, index));
            self.tokens.store(block, 0, tokens);
        }
        sequence.extended_by(&matched);
        sequence.extended_by(&fresh);
        sequence.tokens = tokens.len() as u32;
        sequence.cached = start * self.config.block_size;
        sequence.scheduled = sequence.cached;
        sequence.written = sequence.cached;
        sequence.published = start;
        let keyed = !keys.salt.is_empty() || !keys.extra.is_empty();
        sequence.keys = keyed.then(|| Box::new(keys));
        count(&self.stats.opened, 1);
        count(&self.stats.prefix_queried_blocks, limit);
        count(&self.stats.prefix_hit_blocks, matched.len());
        Ok(())
    }

    /// Full blocks of a prompt that may come from the cache: the last token is always computed.
    fn matchable(&self, tokens: usize) -> usize {
        tokens.saturating_sub(1) / self.config.block_size as usize
    }

    fn matched_blocks(
        &self,
        shared: &mut Shared,
        tokens: &[i32],
        keys: &Keys,
        limit: usize,
    ) -> Vec<u32> {
        let mut blocks = shared.index.walk(&self.tokens, tokens, keys, limit);
        let full = blocks
            .iter()
            .position(|&block| self.pool.word(block).retained().is_none());
        blocks.truncate(full.unwrap_or(blocks.len()));
        blocks
    }

    fn evictable_among(&self, blocks: &[u32]) -> u32 {
        blocks
            .iter()
            .filter(|&&block| self.pool.is_evictable(block))
            .count() as u32
    }

    /// Tokens of this prompt that `open` would find cached. Changes nothing.
    pub fn matched_tokens(&self, tokens: &[i32], keys: &Keys) -> u32 {
        let _gate = self.enter();
        let limit = self.matchable(tokens.len());
        let matched = self.matched_blocks(&mut self.shared(), tokens, keys, limit);
        matched.len() as u32 * self.config.block_size
    }

    /// Says whether `open` would succeed, without changing anything.
    pub fn quote(&self, tokens: &[i32], keys: &Keys) -> Quote {
        let _gate = self.enter();
        let mut shared = self.shared();
        let limit = self.matchable(tokens.len());
        let matched = self.matched_blocks(&mut shared, tokens, keys, limit);
        let total = tokens.len().div_ceil(self.config.block_size as usize);
        let needed = total - matched.len();
        let available =
            self.pool.empty() + self.pool.num_evictable() - self.evictable_among(&matched);
        let never = total > self.config.max_blocks_per_sequence as usize
            || !self.table.could_hold(total as u32);
        let when = if never {
            When::Never
        } else if needed > available as usize || !self.has_room(total as u32) {
            When::Frees
        } else {
            When::Now
        };
        Quote {
            when,
            moves: 0,
            needed: u32::try_from(needed).unwrap_or(u32::MAX),
            available,
            num_cached_tokens: matched.len() as u32 * self.config.block_size,
        }
    }
}
