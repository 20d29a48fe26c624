//! Looking at sequences without changing them.

use crate::error::{Error, Result};
use crate::state::{Mmu, Sequence, SequenceInfo, id};
use crate::sync::{Mutex, try_lock};

impl Mmu {
    /// Numbers about one sequence.
    pub fn info(&self, id: i64) -> Result<SequenceInfo> {
        let _gate = self.enter();
        let (_, sequence) = self.sequence(id)?;
        Ok(SequenceInfo {
            num_tokens: sequence.tokens,
            num_cached_tokens: sequence.cached,
            num_scheduled: sequence.scheduled,
            num_written: sequence.written,
            num_blocks: self.blocks_for(sequence.tokens),
            num_runs: sequence.runs,
        })
    }

    /// Physical blocks of a sequence, in order.
    pub fn block_table(&self, id: i64) -> Result<Vec<u32>> {
        let _gate = self.enter();
        let (_, sequence) = self.sequence(id)?;
        let mapped = self.blocks_for(sequence.tokens);
        Ok(self.table.blocks(sequence.space, 0, mapped).collect())
    }

    /// Token positions to slots (physical block x block size + offset).
    pub fn translate(&self, id: i64, positions: &[i64]) -> Result<Vec<i64>> {
        let _gate = self.enter();
        let (_, sequence) = self.sequence(id)?;
        let size = self.config.block_size;
        let each = |&position| match u32::try_from(position) {
            Ok(at) if at < sequence.tokens => {
                let block = self.table.block(sequence.space, at / size);
                Ok(i64::from(block) * i64::from(size) + i64::from(at % size))
            }
            _ => Err(Error::InvalidConfig(format!(
                "position {position}: the sequence has tokens 0 to {}",
                i64::from(sequence.tokens) - 1
            ))),
        };
        positions.iter().map(each).collect()
    }

    /// Ids of all open sequences.
    pub fn sequences(&self) -> Vec<i64> {
        let _rest = self.rest();
        let each = |(slot, cell): (u32, &Mutex<Sequence>)| {
            let sequence = try_lock(cell)?;
            sequence.open.then(|| id(sequence.generation, slot))
        };
        self.used_slots().filter_map(each).collect()
    }
}
