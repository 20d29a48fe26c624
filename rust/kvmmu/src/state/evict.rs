//! Eviction: which cached block goes next, and how it leaves the index.
//!
//! What lives here: the choice of victims, the way in and out of the order of eviction. What never
//! lives here: the order itself ([`crate::prefix`]), and who asks for the blocks.

use super::{Mmu, Shared};
use crate::pool::{State, Word};
use crate::stats::count;

impl Mmu {
    /// Drops the least recently used evictable block; it is private to the caller then, and so are
    /// the blocks appended to `spare`, which could no longer be found without it.
    pub(super) fn evict_oldest(&self, shared: &mut Shared, spare: &mut Vec<u32>) -> u32 {
        let block = self.next_victim(shared);
        let block = block.expect("fewer evictable blocks than were counted");
        self.evict_block(shared, block, spare);
        block
    }

    /// The least recently used evictable block, leaves before what they stand behind.
    pub(crate) fn next_victim(&self, shared: &Shared) -> Option<u32> {
        let may = |block: u32| self.pool.is_evictable(block);
        let oldest = shared.index.oldest().find(|&block| may(block))?;
        Some(shared.index.leaf_of(oldest, may))
    }

    /// Drops a cached, evictable block, which is private to the caller then.
    pub(crate) fn evict_block(&self, shared: &mut Shared, block: u32, spare: &mut Vec<u32>) {
        self.leave_cache(shared, block);
        self.pool.set_word(block, Word::PRIVATE);
        count(&self.stats.evicted_blocks, 1);
        self.withdraw(shared, block, spare);
    }

    /// Takes a block out of the prefix index. What could no longer be found without it leaves too;
    /// of that, blocks that nobody holds are private to the caller and appended to `spare`.
    pub(crate) fn withdraw(&self, shared: &mut Shared, block: u32, spare: &mut Vec<u32>) {
        let mut dropped = Vec::new();
        shared.index.withdraw(block, &mut dropped);
        for block in dropped {
            let word = self.pool.word(block);
            let cooling = shared.cooling.get(&block).copied();
            if word.state() == State::Cached {
                self.leave_cache(shared, block);
                count(&self.stats.evicted_blocks, 1);
            }
            match (word.withdrawn(), cooling) {
                (Some(word), _) => {
                    self.pool.set_word(block, word);
                    self.refresh_stuck(shared, block);
                }
                (None, Some(step)) => self.fence(shared, step, block),
                (None, None) => {
                    self.pool.set_word(block, Word::PRIVATE);
                    spare.push(block);
                }
            }
        }
    }

    /// A cached block that no step can touch enters the order of eviction.
    pub(crate) fn enter_order(&self, shared: &mut Shared, block: u32) {
        shared.index.order().push(block);
        self.pool
            .set_evictable(block, !self.pool.word(block).is_moving());
    }

    /// A cached block is taken out of the order of eviction (its word still says cached).
    pub(crate) fn leave_cache(&self, shared: &mut Shared, block: u32) {
        if !self.stop_cooling(shared, block) {
            shared.index.order().remove(block);
            self.pool.set_evictable(block, false);
        }
    }
}
