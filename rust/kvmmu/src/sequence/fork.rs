//! `fork`: a second sequence over the same blocks.

use crate::error::{Error, Result};
use crate::pool::MAX_REFERENCES;
use crate::state::{Mmu, Sequence, id};
use crate::stats::count;

impl Mmu {
    /// A new sequence that shares every block; copies nothing. Positions that a step in flight has
    /// not yet written are left for the child to schedule itself.
    pub fn fork(&self, parent: i64) -> Result<i64> {
        let _gate = self.enter();
        let (_, parent) = self.sequence(parent)?;
        let (first, mapped) = (parent.first, self.blocks_for(parent.tokens));
        let (slot, mut child) = self.take_slot()?;
        child.space = self.table.shift(slot, child.space, parent.space.offset());
        if let Err(error) = self.table.reserve(slot, child.space, first, mapped, true) {
            self.give_slot(slot, child);
            return Err(error);
        }
        let mut shared = self.shared();
        let mut full = false;
        self.table
            .each_stretch(parent.space, first, mapped, |stretch| {
                full |= self.pool.any_full(stretch.blocks());
            });
        if full {
            self.table.trim(child.space, first, mapped, true);
            self.give_slot(slot, child);
            let limit = u64::from(MAX_REFERENCES);
            return Err(Error::LimitExceeded {
                what: "references of one block",
                needed: limit + 1,
                limit,
            });
        }
        self.table
            .each_stretch(parent.space, first, mapped, |stretch| {
                self.retain_range(&mut shared, stretch.blocks());
                let loc = self.table.map_as(child.space, stretch);
                let order = stretch.page.order;
                for ((number, _), loc) in stretch.entries().zip(loc..) {
                    self.reverse.add(&mut shared.chains, (order, number), loc);
                }
            });
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
