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

use super::place::{Claim, Part, REGION};
use crate::error::Error;
use crate::pool::{Fit, Word, Zone};
use crate::state::{Mmu, NONE, Sequence, Shared};
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
    /// Blocks to map behind the end.
    pub(super) fresh: Vec<u32>,
}

/// What a batch claims.
#[derive(Debug, Default)]
pub(super) struct Needed {
    /// Blocks to copy into.
    pub(super) copies: u32,
    /// Blocks to map behind the ends, beside those that rows have.
    pub(super) growth: u32,
}

impl Mmu {
    /// First pass: fills `writes` of every row, lets rows grow in place, and returns the blocks to
    /// claim. Takes the shared lock where a block is not private.
    pub(super) fn plan_writes<'a>(
        &'a self,
        rows: &mut [Row<'_>],
        shared: &mut Option<MutexGuard<'a, Shared>>,
    ) -> Needed {
        let mut needed = Needed::default();
        let mut holders: HashMap<u32, u32> = HashMap::new();
        for row in rows {
            let mapped = self.blocks_for(row.sequence.tokens);
            let growth = self.growth(row);
            if growth > 0 && mapped > 0 && self.has_holds() {
                // As far as the region goes: behind its border a huge page may begin.
                let at = row.sequence.space.virtual_of(mapped);
                let here = growth.min(at.next_multiple_of(REGION) - at);
                self.grow_in_place(row.slot, row.sequence.last, here, &mut row.fresh);
            }
            needed.growth += growth - row.fresh.len() as u32;
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
                    needed.copies += 1;
                }
                row.writes.push((index, block, copy));
            }
        }
        needed
    }

    /// Gives back what rows had grown by, when the call fails: to their holds, if it was theirs. The
    /// error counts those blocks as needed and as available.
    pub(super) fn shrink_back(&self, rows: &mut [Row<'_>], error: Error) -> Error {
        let mut grown = 0;
        for row in rows {
            let mut fresh = std::mem::take(&mut row.fresh);
            grown += fresh.len();
            if !fresh.is_empty() {
                self.hold_again(row.slot, row.sequence.last, &mut fresh);
                self.pool.give(&fresh);
            }
        }
        count(&self.stats.freed_blocks, grown);
        match error {
            Error::OutOfBlocks {
                needed,
                available,
                num_blocks,
            } => Error::OutOfBlocks {
                needed: needed + grown as u64,
                available: available + grown as u64,
                num_blocks,
            },
            other => other,
        }
    }

    /// Claims what rows still lack, and the blocks to copy into, which are returned.
    pub(super) fn claim_rows(
        &self,
        rows: &mut [Row<'_>],
        needed: &Needed,
        mut claim: Claim,
        mut shared: Option<&mut Shared>,
    ) -> Vec<u32> {
        let mut copies = Vec::with_capacity(needed.copies as usize);
        let apart = (Zone::Body, Fit::Apart);
        self.take_any(&mut claim, needed.copies, apart, &mut copies);
        if needed.growth == 0 {
            return copies;
        }
        if self.is_plain() {
            // Decoding takes a block here and there; a long prompt's part takes many at once.
            let fit = match needed.growth as usize > rows.len() {
                true => Fit::Together,
                false => Fit::Apart,
            };
            let mut fresh = Vec::with_capacity(needed.growth as usize);
            self.take_any(&mut claim, needed.growth, (Zone::Body, fit), &mut fresh);
            let mut fresh = &fresh[..];
            for row in rows {
                let (own, rest) = fresh.split_at(self.growth(row) as usize);
                row.fresh.extend_from_slice(own);
                fresh = rest;
            }
            return copies;
        }
        for row in rows {
            let n = self.growth(row) - row.fresh.len() as u32;
            if n == 0 {
                continue;
            }
            let mapped = self.blocks_for(row.sequence.tokens) + row.fresh.len() as u32;
            let part = Part {
                at: row.sequence.space.virtual_of(mapped),
                n,
                orders: self.orders_of(&row.sequence, row.tokens_after),
                zone: Zone::Body,
                contiguous: 0,
                huge: false,
            };
            if let Some(shared) = shared.as_deref_mut() {
                self.make_room(shared, part);
            }
            let placed = self.place(&mut claim, part, false, &mut row.fresh);
            placed.expect("nothing was required");
            self.hold_behind(row.slot, *row.fresh.last().expect("just claimed"));
        }
        copies
    }

    /// Blocks that a row will have behind its end.
    fn growth(&self, row: &Row<'_>) -> u32 {
        self.blocks_for(row.tokens_after) - self.blocks_for(row.sequence.tokens)
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
    /// new, stores the tokens (`None`: not known). `into` yields the blocks to copy into.
    pub(super) fn grow(
        &self,
        step: Option<u64>,
        row: &mut Row<'_>,
        mut shared: Option<&mut Shared>,
        into: &mut impl Iterator<Item = u32>,
        tokens: Option<&[i32]>,
        copies: &mut Vec<[u32; 2]>,
    ) {
        let tokens_after = row.tokens_after;
        let sequence = &mut *row.sequence;
        let mapped = self.blocks_for(sequence.tokens);
        for (index, block, copy) in std::mem::take(&mut row.writes) {
            let shared = shared.as_deref_mut().expect("locked by the first pass");
            sequence.published = sequence.published.min(index);
            if copy {
                let new = into.next().expect("claimed for this");
                copies.push([block, new]);
                self.copy_on_write(sequence, shared, index, (block, new));
                if let Some(step) = step {
                    shared.awaited.insert(new, step);
                    self.pool.set_stuck(new, true);
                }
            } else {
                self.write_in_place(shared, block);
            }
        }
        if !row.fresh.is_empty() {
            let orders = self.orders_of(sequence, tokens_after);
            self.map_private(sequence, mapped, &row.fresh, orders);
        }
        self.store_tokens(sequence, tokens_after, tokens);
    }

    /// Page orders that a sequence may use at a length.
    pub(crate) fn orders_of(&self, sequence: &Sequence, tokens: u32) -> u32 {
        sequence.orders.unwrap_or_else(|| self.orders_for(tokens))
    }

    fn copy_on_write(
        &self,
        sequence: &mut Sequence,
        shared: &mut Shared,
        index: u32,
        (block, new): (u32, u32),
    ) {
        self.tokens
            .copy(block, new, self.config.block_size as usize);
        self.map_instead(sequence, shared, index, (block, new));
        let word = self.pool.word(block).released();
        self.pool
            .set_word(block, word.expect("somebody else holds it too"));
        count(&self.stats.copied_on_write, 1);
    }

    /// Maps another block in the place of one; references are the caller's.
    pub(super) fn map_instead(
        &self,
        sequence: &mut Sequence,
        shared: &mut Shared,
        index: u32,
        (block, new): (u32, u32),
    ) {
        self.remap(shared, sequence, index, (block, new));
        let loc = self.table.page(sequence.space, index).loc;
        self.reverse.remove(&mut shared.chains, (0, block), loc);
        self.reverse.add(&mut shared.chains, (0, new), loc);
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
