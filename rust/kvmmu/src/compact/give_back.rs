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
            let age: u64 = match cached {
                0 => 0,
                _ => windows.map(|at| shared.ages.mean(at)).sum(),
            };
            let anchor = group.end > self.pool.anchor_from();
            found.push(((cached, anchor, Reverse(age), Reverse(group.start)), group));
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

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Config, Keys, PageOrders, Placement, Rows, When};

    /// Blocks of one token, placed one by one from the low end on.
    fn config(num_blocks: u32) -> Config {
        let mut config = Config::new(num_blocks, 1);
        config.page_orders = PageOrders::SINGLE;
        config.hold_blocks = 0;
        config.anchor = 0.0;
        config.max_sequences = num_blocks;
        config
    }

    /// A sequence of these tokens, all written.
    fn open(mmu: &Mmu, tokens: &[i32]) -> i64 {
        let id = mmu.open(tokens, Keys::default()).unwrap();
        let left = tokens.len() as i32 - mmu.info(id).unwrap().num_scheduled as i32;
        let mut rows = Rows::new(mmu, 1, 64, 64).unwrap();
        let mut tables = rows.buffers();
        let step = mmu.begin_step();
        let lens = Some(&[left][..]);
        let copies = mmu.prepare(step, &[id], lens, None, &mut rows, &mut tables.borrow());
        assert_eq!(copies.unwrap(), [[0; 2]; 0]);
        mmu.written(step).unwrap();
        mmu.end_step(step).unwrap();
        id
    }

    fn ids(blocks: &[u32]) -> Vec<i64> {
        blocks.iter().map(|&block| i64::from(block)).collect()
    }

    /// Carries a plan out, as if somebody had copied.
    fn carry_out(mmu: &Mmu, plan: &Plan) -> u32 {
        let moves = mmu.begin(plan).unwrap();
        mmu.commit(&moves).unwrap()
    }

    #[test]
    fn the_highest_of_the_empty_groups_go_and_the_lowest_come_back_first() {
        let mmu = Mmu::new(config(30)).unwrap();
        open(&mmu, &[1, 2]);
        // Groups 0..8, .., 24..30: the last is not complete, the first is in use.
        assert_eq!(
            mmu.take_offline(9, 8).unwrap(),
            (8..24).collect::<Vec<u32>>()
        );
        assert_eq!(mmu.take_offline(1, 8).unwrap(), [0; 0]);
        let states = mmu.states();
        assert_eq!((states.offline, states.available), (16, 12));
        mmu.validate(None).unwrap();
        assert_eq!(
            mmu.offline_blocks(1, 8).unwrap(),
            (8..16).collect::<Vec<u32>>()
        );
        mmu.bring_online(&ids(&mmu.offline_blocks(1, 8).unwrap()))
            .unwrap();
        assert_eq!(
            mmu.offline_blocks(u32::MAX, 1).unwrap(),
            (16..24).collect::<Vec<u32>>()
        );
        mmu.validate(None).unwrap();
        mmu.bring_online(&ids(&mmu.offline_blocks(u32::MAX, 1).unwrap()))
            .unwrap();
        assert_eq!(mmu.states().empty, 28);
        let stats = mmu.stats();
        assert_eq!((stats.given_back, stats.taken_back), (16, 16));
        mmu.validate(None).unwrap();
    }

    #[test]
    fn the_group_that_loses_the_fewest_cached_blocks_goes_first() {
        let mmu = Mmu::new(config(24)).unwrap();
        // What was not written is empty afterwards, the rest is cached: 5, 2 and 3 of 8.
        let written = |token: i32| token % 8 < [5, 2, 3][token as usize / 8];
        let ids: Vec<i64> = (0..24)
            .map(|token| match written(token) {
                true => open(&mmu, &[token]),
                false => mmu.open(&[token], Keys::default()).unwrap(),
            })
            .collect();
        ids.iter().for_each(|&id| mmu.close(id).unwrap());
        assert_eq!(mmu.states().cached, 10);
        for (first, cached) in [(8, 8), (16, 5), (0, 0)] {
            let gone = mmu.take_offline(1, 8).unwrap();
            assert_eq!(gone, (first..first + 8).collect::<Vec<u32>>());
            assert_eq!(mmu.states().cached, cached);
            mmu.validate(None).unwrap();
        }
    }

    #[test]
    fn a_group_with_the_null_block_and_what_is_in_use_never_go() {
        let mut config = config(31);
        config.null_block = 9;
        let mmu = Mmu::new(config).unwrap();
        let id = open(&mmu, &[1]);
        let gone = mmu.take_offline(u32::MAX, 8).unwrap();
        assert_eq!(gone, (16..32).collect::<Vec<u32>>());
        assert_eq!(mmu.block_table(id).unwrap(), [0]);
        mmu.validate(None).unwrap();
        for wrong in [vec![9], vec![0], vec![32], vec![-1], vec![16, 17, 16]] {
            assert!(
                matches!(mmu.bring_online(&wrong), Err(Error::InvalidBlock { .. })),
                "{wrong:?}"
            );
        }
        assert_eq!(mmu.states().offline, 16);
        assert!(mmu.take_offline(1, 0).is_err() && mmu.offline_blocks(1, 0).is_err());
        assert!(mmu.plan_shrink(1, 0, 1).is_err());
    }

    #[test]
    fn holds_are_broken_and_the_anchor_region_goes_last() {
        let mut config = config(2048);
        config.hold_blocks = 8;
        config.anchor = 0.5;
        let mmu = Mmu::new(config).unwrap();
        let id = open(&mmu, &[1, 2, 3]);
        let held = mmu.states().held;
        assert!(held > 0);
        // Only the blocks of the sequence stay: its hold does not keep a group.
        let last = *mmu.block_table(id).unwrap().last().unwrap();
        let gone = mmu.take_offline(u32::MAX, 1).unwrap();
        assert_eq!(gone.len(), 2045);
        assert!(gone.contains(&(last + 1)));
        assert_eq!((mmu.states().held, mmu.stats().holds_broken), (0, 1));
        mmu.validate(None).unwrap();
        mmu.bring_online(&ids(&gone)).unwrap();
        let anchor_from = mmu.pool.anchor_from();
        assert!(anchor_from < 2048);
        let body = mmu.take_offline(512, 512).unwrap();
        assert!(body.iter().all(|&block| block < anchor_from));
    }

    #[test]
    fn what_is_offline_is_not_promised_to_anybody() {
        let mmu = Mmu::new(config(16)).unwrap();
        let tokens: Vec<i32> = (0..12).collect();
        assert_eq!(mmu.take_offline(8, 8).unwrap().len(), 8);
        let quote = mmu.quote(&tokens, &Keys::default());
        assert_eq!((quote.when, quote.available), (When::Grows, 8));
        let refused = mmu.open(&tokens, Keys::default());
        let wanted = Error::OutOfBlocks {
            needed: 12,
            available: 8,
            num_blocks: 8,
        };
        assert_eq!(refused, Err(wanted));
        mmu.validate(None).unwrap();
        mmu.bring_online(&ids(&mmu.offline_blocks(1, 8).unwrap()))
            .unwrap();
        assert_eq!(mmu.quote(&tokens, &Keys::default()).when, When::Now);
        open(&mmu, &tokens);
        mmu.validate(None).unwrap();
    }

    #[test]
    fn a_pinned_block_keeps_its_group() {
        let mmu = Mmu::new(config(16)).unwrap();
        let id = open(&mmu, &[1]);
        mmu.pin(&[0]).unwrap();
        mmu.close(id).unwrap();
        assert_eq!(mmu.take_offline(16, 8).unwrap().len(), 8);
        assert!(matches!(
            mmu.plan_shrink(8, 8, 8),
            Err(Error::OutOfBlocks { .. } | Error::Fragmented { .. })
        ));
        mmu.unpin(&[0]).unwrap();
        assert_eq!(mmu.take_offline(16, 8).unwrap().len(), 8);
        mmu.validate(None).unwrap();
        assert_eq!(mmu.states().offline, 16);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever lies where: as many groups go as have room for what lives, if nothing is stuck;
        /// sequences keep their length, and all comes back.
        #[test]
        fn groups_are_emptied_until_only_what_lives_is_left(
            seed in any::<u64>(),
            size in prop::sample::select(vec![1u32, 2, 4, 8, 16]),
            opened in 1i32..64,
            every in 1usize..6,
            caching in any::<bool>(),
        ) {
            let mut config = config(64);
            config.placement = Placement::Scatter { seed };
            config.prefix_caching = caching;
            let mmu = Mmu::new(config).unwrap();
            let mut kept = Vec::new();
            for token in 0..opened {
                let id = open(&mmu, &[token]);
                match token as usize % every {
                    0 => kept.push(id),
                    _ => mmu.close(id).unwrap(),
                }
            }
            let live = kept.len() as u32;
            let most = (64 - live) / size;
            let mut gone = mmu.take_offline(u32::MAX, size).unwrap().len() as u32;
            for _ in 0..64 {
                let Ok(plan) = mmu.plan_shrink(64, size, 5) else { break };
                let moved = carry_out(&mmu, &plan);
                mmu.validate(None).unwrap();
                let more = mmu.take_offline(u32::MAX, size).unwrap().len() as u32;
                gone += more;
                if moved + more == 0 {
                    break;
                }
            }
            mmu.validate(None).unwrap();
            prop_assert_eq!(gone, most * size);
            let states = mmu.states();
            prop_assert_eq!((states.in_use, states.offline), (live, gone));
            for &id in &kept {
                prop_assert_eq!(mmu.block_table(id).unwrap().len(), 1);
            }
            let back = mmu.offline_blocks(u32::MAX, size).unwrap();
            mmu.bring_online(&ids(&back)).unwrap();
            mmu.validate(None).unwrap();
            prop_assert_eq!(mmu.states().available, 64 - live);
        }
    }
}
