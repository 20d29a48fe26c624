//! `close` and `truncate`: the end of a sequence, or of its tail.
//!
//! Blocks are released last first: a leaf enters the order of eviction before its parent.

use crate::error::{Error, Result};
use crate::pool::Word;
use crate::state::{Mmu, NONE, Sequence, Shared, Vbn};
use crate::stats::count;

impl Mmu {
    /// Ends a sequence. Published blocks stay cached; the rest becomes empty, or fenced until the
    /// newest step prepared so far has ended.
    pub fn close(&self, id: i64) -> Result<()> {
        let _gate = self.enter();
        let (slot, mut sequence) = self.sequence(id)?;
        self.shorten(slot, &mut sequence, 0, &mut self.shared());
        self.give_slot(slot, sequence);
        count(&self.stats.closed, 1);
        Ok(())
    }

    /// Shortens a sequence to `tokens` and releases the blocks behind.
    pub fn truncate(&self, id: i64, tokens: u32) -> Result<()> {
        let _gate = self.enter();
        let (slot, mut sequence) = self.sequence(id)?;
        if tokens > sequence.tokens {
            return Err(Error::InvalidConfig(format!(
                "truncate to {tokens} tokens: the sequence has {}",
                sequence.tokens
            )));
        }
        self.shorten(slot, &mut sequence, tokens, &mut self.shared());
        self.steps().clip(slot, sequence.generation, tokens);
        Ok(())
    }

    /// Unmaps what lies behind `tokens`.
    pub(super) fn shorten(
        &self,
        slot: u32,
        sequence: &mut Sequence,
        tokens: u32,
        shared: &mut Shared,
    ) {
        let (kept, mapped) = (self.blocks_for(tokens), self.blocks_for(sequence.tokens));
        if kept < mapped {
            self.unmap_tail(slot, sequence, kept, mapped, shared);
        }
        sequence.tokens = tokens;
        sequence.scheduled = sequence.scheduled.min(tokens);
        sequence.written = sequence.written.min(tokens);
        sequence.cached = sequence.cached.min(tokens);
        sequence.published = sequence.published.min(tokens / self.config.block_size);
        if sequence.unknown_from >= tokens {
            sequence.unknown_from = NONE;
        }
        sequence.version = sequence.version.wrapping_add(1);
    }

    fn unmap_tail(
        &self,
        slot: u32,
        sequence: &mut Sequence,
        kept: u32,
        mapped: u32,
        shared: &mut Shared,
    ) {
        let blocks: Vec<u32> = self.table.blocks(sequence.space, kept, mapped).collect();
        let last = if kept > 0 {
            self.table.block(sequence.space, kept - 1)
        } else {
            NONE
        };
        let mut before = last;
        for &block in &blocks {
            sequence.runs -= u32::from(before == NONE || block != before + 1);
            before = block;
        }
        sequence.last = last;
        self.table.unmap(sequence.space, kept, mapped);

        // No step ends between asking for the fence and waiting behind it.
        let steps = self.steps();
        let fence = steps.fence();
        let mut empty = Vec::with_capacity(blocks.len());
        let mut freed = 0;
        for (index, &block) in (kept..mapped).zip(&blocks).rev() {
            if self.pool.word(block) == Word::PRIVATE {
                self.reverse.clear_only(block);
                freed += 1;
                self.let_go(shared, fence, block, &mut empty);
            } else {
                self.reverse
                    .remove(&mut shared.chains, block, Vbn::new(slot, index));
                self.release(shared, fence, block, &mut empty);
            }
        }
        count(&self.stats.freed_blocks, freed);
        self.pool.give(&empty);
    }
}
