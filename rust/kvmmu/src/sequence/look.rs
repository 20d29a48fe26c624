//! Looking at sequences without changing them.

use crate::error::{Error, Result};
use crate::state::{Mmu, Sequence, SequenceInfo, id, parse};
use crate::sync::{Mutex, try_lock};

impl Mmu {
    /// Numbers about one sequence.
    pub fn info(&self, id: i64) -> Result<SequenceInfo> {
        let _gate = self.enter();
        let (slot, sequence) = self.sequence(id)?;
        let mapped = self.blocks_for(sequence.tokens);
        Ok(SequenceInfo {
            num_tokens: sequence.tokens,
            num_cached_tokens: sequence.cached,
            num_scheduled: sequence.scheduled,
            num_written: sequence.written,
            num_blocks: mapped,
            num_runs: sequence.runs,
            num_released: sequence.first,
            pages: sequence.pages,
            regions: sequence.regions(mapped),
            held: self.holds.of(slot).len() as u32,
        })
    }

    /// The complete aligned regions of 512 blocks of a sequence: the first logical block of each,
    /// and whether one page of order 9 maps it.
    pub fn regions(&self, id: i64) -> Result<Vec<(u32, bool)>> {
        let _gate = self.enter();
        let (_, sequence) = self.sequence(id)?;
        let n = sequence.regions(self.blocks_for(sequence.tokens));
        let space = sequence.space;
        let first = space.virtual_of(sequence.first).next_multiple_of(512);
        let region = |i: u32| {
            let index = space.logical_of(first + i * 512);
            (index, self.table.page(space, index).order == 9)
        };
        Ok((0..n).map(region).collect())
    }

    /// Physical blocks of a sequence, in order; the null block for those released from its front.
    pub fn block_table(&self, id: i64) -> Result<Vec<u32>> {
        let _gate = self.enter();
        let (_, sequence) = self.sequence(id)?;
        let mapped = self.blocks_for(sequence.tokens);
        let mut blocks = vec![self.null_block(); sequence.first as usize];
        let from = sequence.first;
        self.table
            .append_blocks(sequence.space, from, mapped, &mut blocks);
        Ok(blocks)
    }

    /// Physical block of a logical block, without any lock and whatever is going on: `None` when
    /// nothing is mapped there, or the sequence is not open. It was true at some moment of the call.
    pub fn look(&self, id: i64, index: u32) -> Option<u32> {
        let (generation, slot) = parse(id)?;
        self.table.look((slot, generation), index)
    }

    /// Token positions to slots (physical block x block size + offset).
    pub fn translate(&self, id: i64, positions: &[i64]) -> Result<Vec<i64>> {
        let _gate = self.enter();
        let (_, sequence) = self.sequence(id)?;
        let size = self.config.block_size;
        let released = sequence.first * size;
        let inside = i64::from(released)..i64::from(sequence.tokens);
        if let Some(position) = positions.iter().find(|at| !inside.contains(at)) {
            return Err(Error::InvalidConfig(format!(
                "position {position}: the sequence has tokens {released} to {}",
                inside.end - 1
            )));
        }
        let slot = |index: u32, offset: u32| {
            let block = self.table.block(sequence.space, index);
            i64::from(block) * i64::from(size) + i64::from(offset)
        };
        // They fit: all lie inside. A division is most of what a position costs.
        let each = positions.iter().map(|&at| at as u32);
        Ok(match size.is_power_of_two() {
            true => {
                let (shift, mask) = (size.trailing_zeros(), size - 1);
                each.map(|at| slot(at >> shift, at & mask)).collect()
            }
            false => each.map(|at| slot(at / size, at % size)).collect(),
        })
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
