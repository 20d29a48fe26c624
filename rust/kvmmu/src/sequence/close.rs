//! `close`, `truncate`, `release_before`: the end of a sequence, of its tail or of its front.

use crate::error::{Error, Result};
use crate::pool::Placement;
use crate::state::{Mmu, NONE, Sequence, Shared};
use crate::stats::count;
use crate::table::Page;

impl Mmu {
    /// Ends a sequence. Published blocks stay cached; the rest becomes empty, or fenced until the
    /// newest step prepared so far has ended.
    pub fn close(&self, id: i64) -> Result<()> {
        let _gate = self.enter();
        let (slot, mut sequence) = self.sequence(id)?;
        self.shorten(slot, &mut sequence, 0, &mut self.shared());
        self.drop_hold(slot);
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
        let released = sequence.first * self.config.block_size;
        if released > 0 && tokens <= released {
            return Err(Error::InvalidConfig(format!(
                "truncate to {tokens} tokens: the first {released} were released"
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
        self.drop_hold(slot);
        let from = kept.max(sequence.first);
        if from > sequence.first {
            self.cut_before(shared, slot, sequence, from);
        }
        let pages: Vec<Page> = self.table.pages(sequence.space, from, mapped).collect();
        let last = if from > sequence.first {
            self.table.block(sequence.space, from - 1)
        } else {
            NONE
        };
        self.forget(sequence, last, &pages);
        sequence.last = last;
        self.table
            .unmap(sequence.space, from, mapped, sequence.first..from);
        self.release_pages(shared, &pages);
    }

    /// Releases the blocks in front of a token, for attention that looks back only so far: their
    /// places in rows name the null block from then on, and prompts still find them while they are
    /// cached. Returns how many were released.
    ///
    /// Acts as far as tokens are settled; the last block stays, and one more if the next block is
    /// still to be published behind it.
    pub fn release_before(&self, id: i64, token: u32) -> Result<u32> {
        let _gate = self.enter();
        let (slot, mut sequence) = self.sequence(id)?;
        if token > sequence.tokens {
            return Err(Error::InvalidConfig(format!(
                "release before token {token}: the sequence has {}",
                sequence.tokens
            )));
        }
        let size = self.config.block_size;
        let mapped = self.blocks_for(sequence.tokens);
        let mut to = (token.min(sequence.written) / size).min(mapped.saturating_sub(1));
        if self.config.prefix_caching && sequence.published == sequence.written / size {
            to = to.min(sequence.published.saturating_sub(1));
        }
        let first = sequence.first;
        if to <= first {
            return Ok(0);
        }
        let mut shared = self.shared();
        self.cut_before(&mut shared, slot, &mut sequence, to);
        let pages: Vec<Page> = self.table.pages(sequence.space, first, to).collect();
        self.forget(&mut sequence, NONE, &pages);
        let next = self.table.block(sequence.space, to);
        let before = self.table.block(sequence.space, to - 1);
        // The run that the border cuts in two counts on both sides.
        sequence.runs += u32::from(next == before + 1);
        self.table.unmap(sequence.space, first, to, to..mapped);
        sequence.first = to;
        sequence.version = sequence.version.wrapping_add(1);
        self.release_pages(&mut shared, &pages);
        count(&self.stats.released_before, (to - first) as usize);
        Ok(to - first)
    }

    /// A sequence no longer counts pages and their runs, the first of them behind block `before`.
    fn forget(&self, sequence: &mut Sequence, mut before: u32, pages: &[Page]) {
        for page in pages {
            sequence.pages[page.order as usize] -= 1;
            sequence.runs -= u32::from(before == NONE || page.block != before + 1);
            before = page.block + (1 << page.order) - 1;
        }
    }

    /// Releases the blocks of pages that are no longer mapped, last first: a leaf enters the order
    /// of eviction before its parent.
    fn release_pages(&self, shared: &mut Shared, pages: &[Page]) {
        // No step ends between asking for the fence and waiting behind it.
        let steps = self.steps();
        let fence = steps.fence();
        let blocks = pages.iter().map(|page| 1 << page.order).sum();
        let mut empty = Vec::with_capacity(blocks);
        let mut freed = 0;
        for page in pages.iter().rev() {
            let of = (page.order, page.number());
            if self.pool.all_private(page.blocks()) {
                self.reverse.clear_only(of);
                freed += 1 << page.order;
                if fence.is_none() {
                    self.pool.unstick(page.blocks());
                    empty.extend(page.blocks().rev());
                    continue;
                }
                for block in page.blocks().rev() {
                    self.let_go(shared, fence, block, &mut empty);
                }
            } else {
                self.reverse.remove(&mut shared.chains, of, page.loc);
                let mut last = Vec::new();
                self.pool
                    .release_pairs(page.blocks(), |block| last.push(block));
                for block in last.into_iter().rev() {
                    self.release(shared, fence, block, &mut empty);
                }
            }
        }
        count(&self.stats.freed_blocks, freed);
        if self.config.placement != Placement::Fifo {
            empty.sort_unstable(); // neighbours go together
        }
        self.pool.give(&empty);
    }
}
