//! `close`, `truncate`, `release_before`: the end of a sequence, of its tail or of its front.

use crate::error::{Error, Result};
use crate::pool::Placement;
use crate::state::{Mmu, NONE, Sequence, Shared};
use crate::stats::count;
use crate::table::Stretch;

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
        let pages = self.stretches(shared, sequence, from, mapped);
        let last = if from > sequence.first {
            self.table.block(sequence.space, from - 1)
        } else {
            NONE
        };
        self.forget(sequence, last, &pages);
        sequence.last = last;
        self.table
            .unmap(sequence.space, from, mapped, sequence.first..from);
        self.release_pages(shared, pages);
    }

    /// Releases the blocks in front of a token, for attention that looks back only so far: their
    /// places in rows name the null block from then on, and prompts still find them while they are
    /// cached. Returns how many were released.
    ///
    /// Acts as far as tokens are settled; the last settled block stays, and one more if the next block
    /// is still to be published behind it.
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
        self.cut_before(&mut shared, slot, &mut sequence, to);
        let pages = self.stretches(&mut shared, &sequence, first, to);
        self.forget(&mut sequence, NONE, &pages);
        let next = self.table.block(sequence.space, to);
        let before = self.table.block(sequence.space, to - 1);
        // The run that the border cuts in two counts on both sides.
        sequence.runs += u32::from(next == before + 1);
        self.table.unmap(sequence.space, first, to, to..mapped);
        sequence.first = to;
        sequence.version = sequence.version.wrapping_add(1);
        self.release_pages(&mut shared, pages);
        count(&self.stats.released_before, (to - first) as usize);
        Ok(to - first)
    }

    /// What maps `from..to` now, for [`Mmu::release_pages`].
    fn stretches(
        &self,
        shared: &mut Shared,
        sequence: &Sequence,
        from: u32,
        to: u32,
    ) -> Vec<Stretch> {
        let mut pages = std::mem::take(&mut shared.unmapping);
        self.table
            .each_stretch(sequence.space, from, to, |stretch| pages.push(stretch));
        pages
    }

    /// A sequence no longer counts pages and their runs, the first of them behind block `before`.
    fn forget(&self, sequence: &mut Sequence, mut before: u32, pages: &[Stretch]) {
        for stretch in pages {
            let blocks = stretch.blocks();
            sequence.pages[stretch.page.order as usize] -= stretch.n;
            sequence.runs -= u32::from(before == NONE || blocks.start != before + 1);
            before = blocks.end - 1;
        }
    }

    /// Releases the blocks of pages that are no longer mapped, last first: a leaf enters the order
    /// of eviction before its parent.
    fn release_pages(&self, shared: &mut Shared, mut pages: Vec<Stretch>) {
        // No step ends between asking for the fence and waiting behind it.
        let steps = self.steps();
        let fence = steps.fence();
        let blocks = pages.iter().map(|stretch| stretch.blocks().len()).sum();
        let mut empty = Vec::with_capacity(blocks);
        let mut last = Vec::new();
        let mut freed = 0;
        for stretch in pages.drain(..).rev() {
            let order = stretch.page.order;
            let entries = stretch.entries();
            let blocks = stretch.blocks();
            if self.pool.all_private(blocks.clone()) {
                entries.for_each(|(number, _)| self.reverse.clear_only((order, number)));
                freed += blocks.len();
                if fence.is_none() {
                    self.pool.unstick(blocks.clone());
                    empty.extend(blocks.rev());
                    continue;
                }
                for block in blocks.rev() {
                    self.let_go(shared, fence, block, &mut empty);
                }
            } else {
                for (number, loc) in entries {
                    self.reverse
                        .remove(&mut shared.chains, (order, number), loc);
                }
                self.pool.release_pairs(blocks, |block| last.push(block));
                for block in last.drain(..).rev() {
                    self.release(shared, fence, block, &mut empty);
                }
            }
        }
        shared.unmapping = pages;
        count(&self.stats.freed_blocks, freed);
        if self.config.placement != Placement::Fifo {
            sort(&mut empty); // neighbours go together
        }
        self.pool.give(&empty);
    }
}

/// Sorts blocks, each of which comes once: by a bitmap, where they lie all over a part of the pool
/// that is not much larger than they are many.
fn sort(blocks: &mut Vec<u32>) {
    if blocks.is_sorted_by(|a, b| a > b) {
        return blocks.reverse();
    }
    let (least, most) = blocks.iter().fold((u32::MAX, 0), |(least, most), &block| {
        (least.min(block), most.max(block))
    });
    let first = least / 64;
    let words = (most / 64).saturating_sub(first) as usize + 1;
    if words > blocks.len() {
        return blocks.sort_unstable();
    }
    let mut bits = vec![0u64; words];
    for &block in &*blocks {
        bits[(block / 64 - first) as usize] |= 1 << (block % 64);
    }
    blocks.clear();
    for (word, at) in bits.into_iter().zip(first..) {
        let mut left = word;
        while left != 0 {
            blocks.push(at * 64 + left.trailing_zeros());
            left &= left - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blocks_come_out_in_order(
            spread in 1u32..5000,
            blocks in proptest::collection::hash_set(any::<u32>(), 0..300),
        ) {
            let blocks: std::collections::BTreeSet<u32> =
                blocks.into_iter().map(|block| block % spread).collect();
            let mut list: Vec<u32> = blocks.iter().copied().collect();
            for turn in [0, 1, list.len() / 2] {
                let turn = turn.min(list.len());
                list.rotate_left(turn);
                list.reverse();
                super::sort(&mut list);
                prop_assert!(list.iter().eq(&blocks));
            }
        }
    }
}
