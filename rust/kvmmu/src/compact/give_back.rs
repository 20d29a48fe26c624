//! Memory given back: whole groups of blocks leave the pool, and come back.
//!
//! What lives here: which groups go offline and which blocks come back, with the cached blocks and the
//! holds that are in the way. What never lives here: bytes (whoever owns the memory unmaps it, after
//! `take_offline` and before `bring_online`), and the moves that empty a group (`plan_shrink` is a plan like any other).
//!
//! A *granule* is an aligned group of blocks whose bytes fill whole pages of the memory below; how
//! many blocks that is, the storage knows. Here it is only a number.
//!
//! Of the groups in which every block is available those go first that lose the fewest cached blocks;
//! among these those outside of the anchor region, then the least recently used, then the highest:
//! what stays lies together at the low end, and comes back from the low end on.

use std::cmp::Reverse;
use std::ops::Range;

use super::Plan;
use super::plan::count as ones;
use crate::error::{Error, Result};
use crate::pool::{State, WINDOW};
use crate::state::{Mmu, Shared};
use crate::stats::count;

impl Mmu {
    /// Takes blocks offline, in whole aligned groups of `size`, until `n` or more are: only groups
    /// whose blocks are all available; cached ones are evicted, holds are broken. Returns the blocks,
    /// ascending: nobody touches their memory until [`Mmu::bring_online`]. Fewer than `n`: there are no more
    /// such groups ([`Mmu::plan_shrink`] makes some).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`]: a size of 0.
    pub fn take_offline(&self, n: u32, size: u32) -> Result<Vec<u32>> {
        check_size(size)?;
        let _rest = self.rest();
        let mut shared = self.shared();
        let free = self.free_groups(&shared, size);
        let wanted = n.div_ceil(size) as usize;
        let mut gone = Vec::new();
        for group in free.into_iter().take(wanted) {
            self.clear_group(&mut shared, group.clone());
            // Nobody is in a call: what was available a moment ago is empty now.
            let taken = self.pool.offline(group.start, size);
            taken.expect("an available group is empty once its cached blocks and holds are gone");
            gone.extend(group);
        }
        gone.sort_unstable();
        count(&self.stats.given_back, gone.len());
        Ok(gone)
    }

    /// A plan towards `n` available blocks in whole aligned groups of `size`, or as many as there can
    /// be; at most `max_moves` moves now.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`]: a size of 0. [`Error::OutOfBlocks`]: fewer blocks than one group has
    /// are available. [`Error::Fragmented`]: a block that may not move lies in each group.
    pub fn plan_shrink(&self, n: u32, size: u32, max_moves: u32) -> Result<Plan> {
        check_size(size)?;
        let most = self.states().available / size;
        let groups = n.div_ceil(size).min(most).max(1);
        match self.plan_groups(size, groups, max_moves) {
            // Blocks that may not move lie in some of them: one is better than none.
            Err(_) if groups > 1 => self.plan_groups(size, 1, max_moves),
            planned => planned,
        }
    }

    /// The blocks that come back next when `n` are wanted, ascending: those that are offline in the
    /// lowest aligned groups of `size` blocks. Changes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`]: a size of 0.
    pub fn offline_blocks(&self, n: u32, size: u32) -> Result<Vec<u32>> {
        check_size(size)?;
        let _gate = self.enter();
        let left = self.pool.states().offline.min(n);
        let mut found: Vec<u32> = Vec::new();
        let mut first = 0;
        while first < self.config.span() && (found.len() as u32) < left {
            let group = first..first.saturating_add(size).min(self.config.span());
            first = group.end;
            found.extend(group.filter(|&block| self.pool.state(block) == State::Offline));
        }
        Ok(found)
    }

    /// Brings blocks back that [`Mmu::take_offline`] took offline; their memory is there again. All or
    /// none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBlock`] names the first block that is not offline, or is listed twice.
    pub fn bring_online(&self, blocks: &[i64]) -> Result<()> {
        let _rest = self.rest();
        let mut sorted = Vec::with_capacity(blocks.len());
        for &block in blocks {
            let offline = |block: &u32| {
                *block < self.config.span()
                    && *block != self.null_block()
                    && self.pool.state(*block) == State::Offline
            };
            match u32::try_from(block).ok().filter(offline) {
                Some(block) => sorted.push(block),
                None => {
                    return Err(Error::InvalidBlock {
                        block: block as u64,
                        reason: "is not offline",
                    });
                }
            }
        }
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|two| two[0] == two[1]) {
            return Err(Error::InvalidBlock {
                block: u64::from(twice[0]),
                reason: "is listed twice",
            });
        }
        for run in sorted.chunk_by(|&a, &b| a + 1 == b) {
            self.pool.online(run[0], run.len() as u32)?;
        }
        count(&self.stats.taken_back, sorted.len());
        Ok(())
    }

    /// Blocks that are not offline.
    pub(crate) fn online(&self) -> u32 {
        self.config.num_blocks - self.pool.states().offline
    }

    /// Complete groups whose blocks are all available, in the order in which they go (see the module).
    fn free_groups(&self, shared: &Shared, size: u32) -> Vec<Range<u32>> {
        let evictable = self.pool.evictable_bits();
        let mut available = self.pool.available_bits();
        for block in self.holds.blocks() {
            available[(block / 64) as usize] |= 1 << (block % 64);
        }
        let mut found = Vec::new();
        for group in self.groups(size) {
            if ones(&available, group.clone()) < size {
                continue;
            }
            let cached = ones(&evictable, group.clone());
            let windows = group.start / WINDOW..group.end.div_ceil(WINDOW);
            let used = match cached {
                0 => 0,
                _ => windows
                    .map(|at| shared.used[at as usize])
                    .max()
                    .unwrap_or(0),
            };
            let anchor = group.end > self.pool.anchor_from();
            found.push(((cached, anchor, used, Reverse(group.start)), group));
        }
        found.sort_unstable_by_key(|&(order, _)| order);
        found.into_iter().map(|(_, group)| group).collect()
    }

    /// Complete aligned groups of blocks without the null block.
    fn groups(&self, size: u32) -> impl Iterator<Item = Range<u32>> + '_ {
        let complete = 0..self.config.span() / size;
        let groups = complete.map(move |at| at * size..(at + 1) * size);
        groups.filter(|group| !group.contains(&self.null_block()))
    }

    /// Evicts the cached blocks of an available group and breaks the holds in it.
    fn clear_group(&self, shared: &mut Shared, group: Range<u32>) {
        self.evict_among(shared, group.clone());
        if self.holds.total() == 0 {
            return;
        }
        for (held, slot) in self.holds.largest() {
            if held.start < group.end && group.start < held.end && self.drop_hold(slot) > 0 {
                count(&self.stats.holds_broken, 1);
            }
        }
    }
}

fn check_size(size: u32) -> Result<()> {
    if size > 0 {
        return Ok(());
    }
    let message = "granule = 0: allowed is a whole number of blocks from 1";
    Err(Error::InvalidConfig(message.into()))
}
