//! Making the places to write writable: what `append` and `prepare` share.
//!
//! Two passes over a batch. `plan_writes` decides for every mapped block that will be written
//! whether it is written in place or copied first, and counts the blocks to claim; nothing changes.
//! After the claim `grow` cannot fail.
//!
//! A block is written in place when its sequence is the only holder (a move in flight does not
//! count: it drops out of its commit). A published one leaves the prefix index first. Any other
//! block is copied on write. The decisions stand because the shared lock is held from the first
//! pass to the end of the second whenever a block is not private.

use std::collections::HashMap;

use crate::pool::Word;
use crate::state::{Mmu, NONE, Sequence, Shared, Vbn};
use crate::stats::count;
use crate::sync::MutexGuard;

/// One sequence of a batch, and what is to be written in it.
pub(super) struct Row<'a> {
    pub(super) id: i64,
    pub(super) slot: u32,
    pub(super) sequence: MutexGuard<'a, Sequence>,
    /// Positions `from..to` will be written.
    pub(super) from: u32,
    pub(super) to: u32,
    /// Length after growing.
    pub(super) tokens_after: u32,
    /// Mapped blocks that are not private: (logical, physical, copy first).
    pub(super) writes: Vec<(u32, u32, bool)>,
}

impl Mmu {
    /// First pass: fills `writes` of every row and returns the blocks to claim. Takes the shared
    /// lock where a block is not private.
    pub(super) fn plan_writes<'a>(
        &'a self,
        rows: &mut [Row<'_>],
        shared: &mut Option<MutexGuard<'a, Shared>>,
    ) -> u32 {
        let mut needed = 0;
        let mut holders: HashMap<u32, u32> = HashMap::new();
        for row in rows {
            let mapped = self.blocks_for(row.sequence.tokens);
            needed += self.blocks_for(row.tokens_after) - mapped;
            if row.from == row.to {
                continue;
            }
            let first = row.from / self.config.block_size;
            for index in first..mapped.min(self.blocks_for(row.to)) {
                let block = self.mapped_block(&row.sequence, mapped, index);
                if self.pool.word(block) == Word::PRIVATE {
                    continue;
                }
                shared.get_or_insert_with(|| self.shared());
                let word = self.pool.word(block);
                let holders = holders.entry(block).or_insert_with(|| word.holders());
                let copy = *holders > 1;
                if copy {
                    *holders -= 1;
                    needed += 1;
                }
                row.writes.push((index, block, copy));
            }
        }
        needed
    }

    /// Physical block of a logical one; the last of `mapped` is known without a walk.
    pub(super) fn mapped_block(&self, sequence: &Sequence, mapped: u32, index: u32) -> u32 {
        if index + 1 == mapped {
            sequence.last
        } else {
            self.table.block(sequence.space, index)
        }
    }

    /// Second pass for one row: copies on write (which wait for the start of `step`), maps what is
    /// new, stores the tokens (`None`: not known). `fresh` yields the claimed blocks.
    pub(super) fn grow(
        &self,
        step: Option<u64>,
        row: &mut Row<'_>,
        mut shared: Option<&mut Shared>,
        fresh: &mut &[u32],
        tokens: Option<&[i32]>,
        copies: &mut Vec<[u32; 2]>,
    ) {
        let (slot, tokens_after) = (row.slot, row.tokens_after);
        let sequence = &mut *row.sequence;
        let mapped = self.blocks_for(sequence.tokens);
        for (index, block, copy) in std::mem::take(&mut row.writes) {
            let shared = shared.as_deref_mut().expect("locked by the first pass");
            sequence.published = sequence.published.min(index);
            if copy {
                let (new, rest) = fresh.split_first().expect("claimed for this");
                *fresh = rest;
                copies.push([block, *new]);
                let vbn = Vbn::new(slot, index);
                self.copy_on_write(sequence, shared, vbn, mapped, block, *new);
                if let Some(step) = step {
                    shared.awaited.insert(*new, step);
                    self.pool.set_stuck(*new, true);
                }
            } else {
                self.write_in_place(shared, block);
            }
        }
        let (new, rest) = fresh.split_at((self.blocks_for(tokens_after) - mapped) as usize);
        *fresh = rest;
        self.table.map(sequence.space, mapped, new);
        for (index, &block) in (mapped..).zip(new) {
            self.reverse.set_only(block, Vbn::new(slot, index));
        }
        sequence.extended_by(new);
        self.store_tokens(sequence, tokens_after, tokens);
    }

    fn copy_on_write(
        &self,
        sequence: &mut Sequence,
        shared: &mut Shared,
        vbn: Vbn,
        mapped: u32,
        block: u32,
        new: u32,
    ) {
        self.tokens
            .copy(block, new, self.config.block_size as usize);
        self.remap(sequence, mapped, vbn.index(), block, new);
        self.reverse.remove(&mut shared.chains, block, vbn);
        self.reverse.set_only(new, vbn);
        let word = self.pool.word(block).released();
        self.pool
            .set_word(block, word.expect("somebody else holds it too"));
        count(&self.stats.copied_on_write, 1);
    }

    /// The only holder of a block is about to write it.
    fn write_in_place(&self, shared: &mut Shared, block: u32) {
        let word = self.pool.word(block);
        if word.is_moving() {
            self.drop_move(shared, block);
        }
        if word.is_published() {
            self.pool
                .set_word(block, word.withdrawn().expect("it is mapped"));
            let mut spare = Vec::new();
            self.withdraw(shared, block, &mut spare);
            self.pool.give(&spare);
        }
    }

    /// Changes one entry of a sequence and what is known of its runs and its last block.
    pub(crate) fn remap(
        &self,
        sequence: &mut Sequence,
        mapped: u32,
        index: u32,
        old: u32,
        new: u32,
    ) {
        let before = (index > 0).then(|| self.table.block(sequence.space, index - 1));
        let after = (index + 1 < mapped).then(|| self.table.block(sequence.space, index + 1));
        let breaks = |block: u32| {
            u32::from(before.is_some_and(|before| before + 1 != block))
                + u32::from(after.is_some_and(|after| block + 1 != after))
        };
        sequence.runs = sequence.runs + breaks(new) - breaks(old);
        let done = self.table.remap(sequence.space, index, old, new);
        assert!(done, "entry {index} no longer maps block {old}");
        if after.is_none() {
            sequence.last = new;
        }
        sequence.version = sequence.version.wrapping_add(1);
    }

    fn store_tokens(&self, sequence: &mut Sequence, tokens_after: u32, tokens: Option<&[i32]>) {
        let (start, size) = (sequence.tokens, self.config.block_size);
        if tokens_after == start {
            return;
        }
        sequence.tokens = tokens_after;
        count(&self.stats.appended_tokens, (tokens_after - start) as usize);
        let Some(mut rest) = tokens else {
            if sequence.unknown_from == NONE {
                sequence.unknown_from = start;
            }
            return;
        };
        let mapped = self.blocks_for(tokens_after);
        let mut at = start;
        while !rest.is_empty() {
            let offset = at % size;
            let (here, tail) = rest.split_at(rest.len().min((size - offset) as usize));
            let block = self.mapped_block(sequence, mapped, at / size);
            self.tokens.store(block, offset as usize, here);
            at += here.len() as u32;
            rest = tail;
        }
    }
}
