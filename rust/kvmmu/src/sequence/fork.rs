//! `fork`: a second sequence over the same blocks.

use crate::error::{Error, Result};
use crate::pool::MAX_REFERENCES;
use crate::state::{Mmu, Sequence, id};
use crate::stats::count;
use crate::table::Blocks;

impl Mmu {
    /// A new sequence that shares every block; copies nothing. Positions that a step in flight has
    /// not yet written are left for the child to schedule itself.
    pub fn fork(&self, parent: i64) -> Result<i64> {
        let _gate = self.enter();
        let (_, parent) = self.sequence(parent)?;
        let (first, mapped) = (parent.first, self.blocks_for(parent.tokens));
        let (slot, mut child) = self.take_slot()?;
        child.space = self.table.shift(child.space, parent.space.offset());
        if let Err(error) = self.table.reserve(child.space, first, mapped, true) {
            self.give_slot(slot, child);
            return Err(error);
        }
        let mut shared = self.shared();
        let mut pieces = std::mem::take(&mut shared.pieces);
        self.table.pieces(parent.space, first, mapped, &mut pieces);
        let full = pieces.iter().any(|piece| match piece.blocks {
            Blocks::Run(n) => self.pool.any_full(piece.page.block..piece.page.block + n),
            Blocks::Each(blocks) => self.pool.any_of_full(blocks),
        });
        if full {
            pieces.clear();
            shared.pieces = pieces;
            self.table.trim(child.space, first, mapped, true);
            self.give_slot(slot, child);
            let limit = u64::from(MAX_REFERENCES);
            return Err(Error::LimitExceeded {
                what: "references of one block",
                needed: limit + 1,
                limit,
            });
        }
        for piece in pieces.iter() {
            self.retain_piece(&mut shared, piece);
            let loc = self.table.map_as(child.space, piece);
            let (order, chains) = (piece.page.order, &mut shared.chains);
            match piece.blocks {
                Blocks::Run(_) => {
                    let places = self.reverse.run(order, piece.numbers());
                    self.reverse.add_all(chains, order, places, loc);
                }
                Blocks::Each(blocks) => {
                    let places = self.reverse.each(blocks);
                    self.reverse.add_all(chains, 0, places, loc);
                }
            }
        }
        pieces.clear();
        shared.pieces = pieces;
        drop(shared);
        *child = Sequence {
            generation: child.generation,
            open: true,
            space: child.space,
            tokens: parent.tokens,
            scheduled: parent.written,
            written: parent.written,
            unsettled_to: parent.written,
            cached: 0,
            unknown_from: parent.unknown_from,
            published: parent.published,
            version: 0,
            first,
            orders: parent.orders,
            pages: parent.pages,
            runs: parent.runs,
            last: parent.last,
            keys: parent.keys.clone(),
        };
        count(&self.stats.forked, 1);
        Ok(id(child.generation, slot))
    }
}
