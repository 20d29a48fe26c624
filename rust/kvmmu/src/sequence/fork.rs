//! `fork`: a second sequence over the same blocks.

use crate::error::{Error, Result};
use crate::pool::MAX_REFERENCES;
use crate::state::{Mmu, Sequence, Vbn, id};
use crate::stats::count;

impl Mmu {
    /// A new sequence that shares every block; copies nothing. Positions that a step in flight has
    /// not yet written are left for the child to schedule itself.
    pub fn fork(&self, parent: i64) -> Result<i64> {
        let _gate = self.enter();
        let (_, parent) = self.sequence(parent)?;
        let mapped = self.blocks_for(parent.tokens);
        let (slot, mut child) = self.take_slot()?;
        if let Err(error) = self.table.reserve(child.space, 0, mapped) {
            self.give_slot(slot, child);
            return Err(error);
        }
        let blocks: Vec<u32> = self.table.blocks(parent.space, 0, mapped).collect();
        let mut shared = self.shared();
        if blocks
            .iter()
            .any(|&block| self.pool.word(block).references() == MAX_REFERENCES)
        {
            self.table.trim(child.space, 0, mapped);
            self.give_slot(slot, child);
            let limit = u64::from(MAX_REFERENCES);
            return Err(Error::LimitExceeded {
                what: "references of one block",
                needed: limit + 1,
                limit,
            });
        }
        for (index, &block) in (0..).zip(&blocks) {
            self.retain(&mut shared, block, Some(Vbn::new(slot, index)));
        }
        drop(shared);
        self.table.map(child.space, 0, &blocks);
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
            runs: parent.runs,
            last: parent.last,
            keys: parent.keys.clone(),
        };
        count(&self.stats.forked, 1);
        Ok(id(child.generation, slot))
    }
}
