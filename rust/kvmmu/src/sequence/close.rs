//! `close`, `truncate`, `release_before`: the end of a sequence, of its tail or of its front.

use crate::error::{Error, Result};
use crate::pool::Placement;
use crate::state::{Mmu, NONE, Sequence, Shared, runs_behind};
use crate::stats::count;
use crate::table::{Blocks, Pieces};

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
            self.cut_before(shared, sequence, from);
        }
        let pieces = self.pieces(shared, sequence, from, mapped);
        let last = if from > sequence.first {
            self.table.block(sequence.space, from - 1)
        } else {
            NONE
        };
        self.forget(sequence, last, &pieces);
        sequence.last = last;
        self.table
            .unmap(sequence.space, from, mapped, sequence.first..from);
        self.release_pieces(shared, pieces);
    }

    /// Releases the blocks in front of a token, for attention that looks back only so far: their
    /// places in rows name the null block from then on, and prompts still find them while they are
    /// cached. Returns how many were released.
    ///
    /// Acts as far as tokens are settled; the last settled block stays, and one more if the next block
    /// is still to be published behind it.
    pub fn release_before(&self, id: i64, token: u32) -> Result<u32> {
        let _gate = self.enter();
        let (_, mut sequence) = self.sequence(id)?;
        if token > sequence.tokens {
            return Err(Error::InvalidConfig(format!(
                "release before token {token}: the sequence has {}",
                sequence.tokens
            )));
        }
        let size = self.config.block_size;
        let mapped = self.blocks_for(sequence.tokens);
        // A step in flight may be cancelled: then what is written is all that is left.
        let settled = self.blocks_for(sequence.written);
        let mut to = (token.min(sequence.written) / size).min(settled.saturating_sub(1));
        if self.config.prefix_caching && sequence.published == sequence.written / size {
            to = to.min(sequence.published.saturating_sub(1));
        }
        let first = sequence.first;
        if to <= first {
            return Ok(0);
        }
        let mut shared = self.shared();
        self.cut_before(&mut shared, &mut sequence, to);
        let pieces = self.pieces(&mut shared, &sequence, first, to);
        self.forget(&mut sequence, NONE, &pieces);
        let next = self.table.block(sequence.space, to);
        let before = self.table.block(sequence.space, to - 1);
        // The run that the border cuts in two counts on both sides.
        sequence.runs += u32::from(next == before + 1);
        self.table.unmap(sequence.space, first, to, to..mapped);
        sequence.first = to;
        sequence.version = sequence.version.wrapping_add(1);
        self.release_pieces(&mut shared, pieces);
        count(&self.stats.released_before, (to - first) as usize);
        Ok(to - first)
    }

    /// What maps `from..to` now, for [`Mmu::release_pieces`].
    fn pieces(&self, shared: &mut Shared, sequence: &Sequence, from: u32, to: u32) -> Pieces {
        let mut pieces = std::mem::take(&mut shared.pieces);
        self.table.pieces(sequence.space, from, to, &mut pieces);
        pieces
    }

    /// A sequence no longer counts pages and their runs, the first of them behind block `before`.
    fn forget(&self, sequence: &mut Sequence, mut before: u32, pieces: &Pieces) {
        for piece in pieces.iter() {
            let page = piece.page;
            match piece.blocks {
                Blocks::Run(n) => {
                    sequence.pages[page.order as usize] -= n >> page.order;
                    sequence.runs -= u32::from(before == NONE || page.block != before + 1);
                    before = page.block + n - 1;
                }
                Blocks::Each(blocks) => {
                    sequence.pages[0] -= blocks.len() as u32;
                    sequence.runs -= runs_behind(before, blocks);
                    before = blocks[blocks.len() - 1];
                }
            }
        }
    }

    /// Releases the blocks of what is no longer mapped, last first: a leaf enters the order of
    /// eviction before its parent.
    fn release_pieces(&self, shared: &mut Shared, mut pieces: Pieces) {
        // No step ends between asking for the fence and waiting behind it.
        let steps = self.steps();
        let fence = steps.fence();
        // Runs are emptied as such. (A list of the pool's keeps the order of release.)
        let in_order = self.config.placement == Placement::Fifo;
        let (mut empty, mut runs) = (Vec::new(), Vec::new());
        let mut last = Vec::new();
        let mut freed = 0;
        for piece in pieces.iter().rev() {
            let (page, chains) = (piece.page, &mut shared.chains);
            match piece.blocks {
                Blocks::Run(n) => {
                    let blocks = page.block..page.block + n;
                    let places = self.reverse.run(page.order, piece.numbers());
                    if self.pool.all_private(blocks.clone()) {
                        self.reverse.clear_all(places);
                        if fence.is_none() {
                            freed += n as usize;
                            match in_order {
                                true => empty.extend(blocks.rev()),
                                false => runs.push(blocks),
                            }
                            continue;
                        }
                        last.extend(blocks);
                    } else {
                        self.reverse
                            .remove_all(chains, page.order, places, page.loc);
                        self.pool.release_pairs(blocks, |block| last.push(block));
                    }
                }
                Blocks::Each(blocks) => {
                    let places = self.reverse.each(blocks);
                    if self.pool.each_private(blocks) {
                        self.reverse.clear_all(places);
                        if fence.is_none() {
                            freed += blocks.len();
                            empty.extend(blocks.iter().rev());
                            continue;
                        }
                        last.extend(blocks);
                    } else {
                        self.reverse.remove_all(chains, 0, places, page.loc);
                        self.pool.release_each(blocks, |block| last.push(block));
                    }
                }
            }
            for block in last.drain(..).rev() {
                self.release(shared, fence, block, &mut empty);
            }
        }
        pieces.clear();
        shared.pieces = pieces;
        count(&self.stats.freed_blocks, freed);
        if in_order {
            empty
                .iter()
                .for_each(|&block| self.pool.set_stuck(block, false));
            return self.pool.give(&empty);
        }
        self.pool.give_runs(runs.into_iter().rev());
        self.pool.give_unsorted(&mut empty);
    }
}
