//! Verbs on physical blocks: `pin`, `unpin`, `evict`, `references`.
//!
//! They work on blocks of any sequence, so they write the gate: no sequence is in a call meanwhile.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::pool::{MAX_REFERENCES, State};
use crate::state::{Mmu, Shared};

impl Mmu {
    fn checked(&self, block: i64) -> Result<u32> {
        match u32::try_from(block) {
            Ok(block) if block < self.config.span() && block != self.null_block() => Ok(block),
            _ => Err(Error::InvalidBlock {
                block: block as u64,
                reason: "no block of this pool has that number",
            }),
        }
    }

    /// Whether a block is kept behind a sequence to grow into.
    fn is_held(&self, block: u32) -> bool {
        self.pool.is_stuck(block) && self.holds.holder(block).is_some()
    }

    /// Takes one reference on each block, which must be in use or cached: it stays where it is and
    /// what it is until [`Mmu::unpin`]. A block may be listed several times. All or nothing.
    pub fn pin(&self, blocks: &[i64]) -> Result<()> {
        let _rest = self.rest();
        let mut wanted: HashMap<u32, u64> = HashMap::new();
        for &block in blocks {
            let block = self.checked(block)?;
            let pinnable = match self.pool.state(block) {
                State::InUse => self.pool.word(block).holders() > 0 && !self.is_held(block),
                state => state == State::Cached,
            };
            if !pinnable {
                let reason = "only a block in use or cached can be pinned";
                return Err(Error::InvalidBlock {
                    block: u64::from(block),
                    reason,
                });
            }
            let wanted = wanted.entry(block).or_insert(0);
            *wanted += 1;
            let needed = u64::from(self.pool.word(block).references()) + *wanted;
            let (what, limit) = ("references of one block", u64::from(MAX_REFERENCES));
            if needed > limit {
                return Err(Error::LimitExceeded {
                    what,
                    needed,
                    limit,
                });
            }
        }
        let mut shared = self.shared();
        for &block in blocks {
            self.hold(&mut shared, block as u32);
        }
        Ok(())
    }

    /// One more reference on a block that stays where and what it is: a move of it drops out.
    pub(super) fn hold(&self, shared: &mut Shared, block: u32) {
        if self.pool.word(block).is_moving() {
            self.drop_move(shared, block);
        }
        self.retain(shared, block);
        *shared.pins.entry(block).or_insert(0) += 1;
        self.refresh_stuck(shared, block);
    }

    /// One such reference less. Blocks that nobody holds any more are appended to `empty`.
    pub(super) fn let_off(
        &self,
        shared: &mut Shared,
        fence: Option<u64>,
        block: u32,
        empty: &mut Vec<u32>,
    ) {
        let pins = shared.pins.get_mut(&block).expect("it is held");
        *pins -= 1;
        if *pins == 0 {
            shared.pins.remove(&block);
        }
        let before = empty.len();
        self.release(shared, fence, block, empty);
        if empty.len() == before {
            self.refresh_stuck(shared, block);
        }
    }

    /// Gives references of [`Mmu::pin`] back. All or nothing.
    pub fn unpin(&self, blocks: &[i64]) -> Result<()> {
        let _rest = self.rest();
        let mut shared = self.shared();
        let mut wanted = HashMap::new();
        for &block in blocks {
            let block = self.checked(block)?;
            let wanted: &mut u32 = wanted.entry(block).or_insert(0);
            *wanted += 1;
            if shared.pins_of(block) < *wanted {
                let reason = "it has fewer pins than are given back";
                return Err(Error::InvalidBlock {
                    block: u64::from(block),
                    reason,
                });
            }
        }
        let steps = self.steps();
        let mut empty = Vec::new();
        for &block in blocks {
            self.let_off(&mut shared, steps.fence(), block as u32, &mut empty);
        }
        self.pool.give(&empty);
        Ok(())
    }

    /// Drops up to `n` cached blocks, in the order of eviction; returns how many.
    pub fn evict(&self, n: u32) -> u32 {
        let _rest = self.rest();
        let mut shared = self.shared();
        let (mut evicted, mut spare) = (0, Vec::new());
        while evicted + (spare.len() as u32) < n {
            if self.config.page_aware && shared.index.order().next_victim().is_none() {
                // What has gone must not count as live when the next victims are chosen.
                self.pool.give(&spare);
                evicted += spare.len() as u32;
                spare.clear();
            }
            let left = n - evicted - spare.len() as u32;
            let Some(block) = self.next_victim(&mut shared, left) else {
                break;
            };
            self.evict_block(&mut shared, block, &mut spare);
            spare.push(block);
        }
        self.pool.give(&spare);
        evicted + spare.len() as u32
    }

    /// References (mappings, pins, moves) of each block.
    pub fn references(&self, blocks: &[i64]) -> Result<Vec<u32>> {
        let _gate = self.enter();
        let each = |&block| {
            let block = self.checked(block)?;
            let empty = self.pool.is_empty(block) || self.is_held(block);
            Ok(if empty {
                0
            } else {
                self.pool.word(block).references()
            })
        };
        blocks.iter().map(each).collect()
    }

    /// The state of a block.
    pub fn state_of(&self, block: i64) -> Result<State> {
        let _gate = self.enter();
        let block = self.checked(block)?;
        Ok(match self.is_held(block) {
            true => State::Empty,
            false => self.pool.state(block),
        })
    }
}
