//! Stands in for `Mmu::plan_groups` of `windows.rs` until that is merged; then this file goes.

use super::plan::count as ones;
use super::{Goal, Plan};
use crate::error::{Error, Result};
use crate::state::Mmu;

impl Mmu {
    /// A plan that makes the `groups` emptiest aligned groups of `size` blocks available.
    pub fn plan_groups(&self, size: u32, groups: u32, max_moves: u32) -> Result<Plan> {
        let _rest = self.rest();
        let held = self.holds.blocks();
        let mut evictable = self.pool.evictable_bits();
        for &block in &held {
            evictable[(block / 64) as usize] |= 1 << (block % 64);
        }
        let (empty, mut movable) = (self.pool.empty_bits(), self.pool.movable_bits());
        for block in 0..self.config.span() {
            if movable[(block / 64) as usize] >> (block % 64) & 1 == 1 && self.is_huge(block) {
                movable[(block / 64) as usize] &= !(1 << (block % 64));
            }
        }
        let complete = self.config.span() / size;
        let mut order = Vec::new();
        let available = self.states().available;
        let mut possible = 0;
        for at in 0..complete {
            let range = at * size..(at + 1) * size;
            let free = ones(&empty, range.clone()) + ones(&evictable, range.clone());
            let live = ones(&movable, range);
            if free + live == size {
                possible += 1;
                order.push((live, at));
            }
        }
        let num_blocks = u64::from(self.online());
        if possible < groups || available < groups * size {
            return Err(Error::Fragmented {
                needed: u64::from(groups * size),
                largest_run: u64::from(possible * size),
                available: u64::from(available),
                num_blocks,
            });
        }
        order.sort_unstable();
        order.truncate(groups as usize);
        let chosen: Vec<u32> = order.iter().map(|&(_, at)| at).collect();
        let bit = |bits: &[u64], block: u32| bits[(block / 64) as usize] >> (block % 64) & 1 == 1;
        let mut places: Vec<(u32, u32, u32)> = Vec::new();
        for block in 0..self.config.span() {
            let at = block / size;
            if chosen.contains(&at) {
                continue;
            }
            let range = at * size..((at + 1) * size).min(self.config.span());
            let live =
                range.len() as u32 - ones(&empty, range.clone()) - ones(&evictable, range.clone());
            if bit(&empty, block) {
                places.push((0, u32::MAX - live, block));
            } else if bit(&evictable, block) && live > 0 {
                places.push((1, u32::MAX - live, block));
            }
        }
        places.sort_unstable();
        let mut places = places.into_iter().map(|(_, _, block)| block);
        let mut pairs = Vec::new();
        let mut left = 0;
        for at in chosen {
            for block in (at * size..(at + 1) * size).filter(|&block| bit(&movable, block)) {
                match (pairs.len() < max_moves as usize)
                    .then(|| places.next())
                    .flatten()
                {
                    Some(place) => pairs.push([block, place]),
                    None => left += 1,
                }
            }
        }
        Ok(Plan {
            uid: self.uid,
            evicts: (pairs.iter().map(|pair: &[u32; 2]| pair[1]))
                .filter(|&block| bit(&evictable, block))
                .collect(),
            goal: Goal::FreeRun(size),
            complete: left == 0,
            remaining: left,
            predicted_run: 0,
            predicted_ratio: 0.0,
            pairs,
        })
    }
}
