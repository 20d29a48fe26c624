//! Leases: what a transfer holds on blocks until it reports done, in any order, once.
//!
//! A leased block stays where it is and what it is: it is not moved, not evicted, and not reused when
//! its sequence is closed. A sequence that writes into one copies it first.

use crate::error::{Error, Result};
use crate::state::Mmu;

/// A lease that was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Its number, for [`Mmu::end_lease`].
    pub id: u64,
    /// The blocks that it holds, in the order of the sequence.
    pub blocks: Vec<u32>,
}

impl Mmu {
    /// Holds the blocks of the tokens `from..to` of a sequence until [`Mmu::end_lease`].
    pub fn lease(&self, id: i64, from: u32, to: u32) -> Result<Lease> {
        let _rest = self.rest();
        let (_, sequence) = self.sequence(id)?;
        if from > to || to > sequence.tokens {
            return Err(Error::InvalidConfig(format!(
                "lease of tokens {from} to {to}: the sequence has {}",
                sequence.tokens
            )));
        }
        let released = sequence.first * self.config.block_size;
        if from < released && from < to {
            return Err(Error::InvalidConfig(format!(
                "lease of tokens {from} to {to}: the first {released} were released"
            )));
        }
        let first = from / self.config.block_size;
        let last = if from == to {
            first // no token, no block
        } else {
            self.blocks_for(to)
        };
        let blocks = self.table.blocks(sequence.space, first, last);
        let mut shared = self.shared();
        for &block in &blocks {
            self.hold(&mut shared, block);
            *shared.leased.entry(block).or_insert(0) += 1;
        }
        let id = shared.next_lease;
        shared.next_lease += 1;
        shared.leases.insert(id, blocks.clone());
        Ok(Lease { id, blocks })
    }

    /// The transfer is done, or given up. Each lease ends once: a second time is an error.
    pub fn end_lease(&self, lease: u64) -> Result<()> {
        let _rest = self.rest();
        let mut shared = self.shared();
        let Some(blocks) = shared.leases.remove(&lease) else {
            return Err(Error::InvalidLease { lease });
        };
        let steps = self.steps();
        let mut empty = Vec::new();
        for block in blocks {
            let leased = shared.leased.get_mut(&block).expect("it is leased");
            *leased -= 1;
            if *leased == 0 {
                shared.leased.remove(&block);
            }
            self.let_off(&mut shared, steps.fence(), block, &mut empty);
        }
        self.pool.give(&empty);
        Ok(())
    }

    /// Leases that have not ended.
    pub fn num_leases(&self) -> usize {
        self.shared().leases.len()
    }
}
