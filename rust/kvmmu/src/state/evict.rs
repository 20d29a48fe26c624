//! Eviction: which cached block goes next, and how it leaves the index.
//!
//! What lives here: the choice of victims, the way in and out of the order of eviction. What never
//! lives here: the order itself ([`crate::prefix`]), and who asks for the blocks.
//!
//! Page-aware eviction: of the blocks that go first anyway (a tenth of them, in one class of use)
//! those go first whose windows have the fewest live blocks, neither empty nor evictable. A block
//! that others stand behind takes them along, before it. Victims are chosen many at once, so that
//! one eviction of a decode step costs no walk over a tenth of the cache: see [`Breadth`].

use super::{Mmu, Shared};
use crate::pool::{State, WINDOW, Word};
use crate::stats::count;

/// Least blocks that are looked at for victims, if there are so many.
const LOOK: u32 = 2048;
/// Of this many blocks that were looked at, one is chosen even if fewer are wanted.
const SHARE: usize = 8;

/// How many blocks a choice of victims looks at, and how many of them it chooses.
///
/// One by one, `n` victims out of the oldest tenth would be chosen among `n` blocks and a tenth: so
/// many are looked at, but at most four a victim, or [`LOOK`]. Of those, one in [`SHARE`] is chosen,
/// or `n`: what is left over serves the next evictions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Breadth {
    look: usize,
    choose: usize,
}

impl Breadth {
    /// For `n` victims among `evictable` blocks.
    fn new(n: u32, evictable: u32) -> Self {
        let most = n.saturating_mul(4).max(LOOK);
        let look = n.saturating_add(evictable.div_ceil(10)).min(most) as usize;
        Self {
            look,
            choose: (look / SHARE).max(n as usize),
        }
    }
}

impl Mmu {
    /// Drops the next `n` evictable blocks, which are private to the caller then, and so is the
    /// second list: blocks that could no longer be found without them.
    pub(crate) fn evict_oldest(&self, shared: &mut Shared, n: u32) -> (Vec<u32>, Vec<u32>) {
        let (mut evicted, mut spare) = (Vec::with_capacity(n as usize), Vec::new());
        for left in (1..=n).rev() {
            evicted.push(spare.pop().unwrap_or_else(|| {
                let block = self.next_victim(shared, left);
                let block = block.expect("fewer evictable blocks than were counted");
                self.evict_block(shared, block, &mut spare);
                block
            }));
        }
        (evicted, spare)
    }

    /// The evictable block that goes next when `n` are wanted, leaves before what they stand behind.
    pub(crate) fn next_victim(&self, shared: &mut Shared, n: u32) -> Option<u32> {
        let may = |block: u32| self.pool.is_evictable(block);
        loop {
            let Some(block) = shared.index.order().next_victim() else {
                if !self.choose_victims(shared, n) {
                    return None;
                }
                continue;
            };
            if !may(block) {
                shared.index.order().pass_over(); // it has begun to move
            } else if let Some(behind) = shared.index.behind(block, may) {
                shared.index.order().choose_first(behind);
            } else {
                return Some(block);
            }
        }
    }

    /// Chooses the victims that go next, `n` of them or more. False when there is none.
    fn choose_victims(&self, shared: &mut Shared, n: u32) -> bool {
        let may = |block: u32| self.pool.is_evictable(block);
        let order = shared.index.order();
        if !self.config.page_aware {
            let (class, oldest) = order.oldest(1, may);
            order.choose(class, oldest.into_iter());
        } else {
            let breadth = Breadth::new(n, order.len());
            let (class, oldest) = order.oldest(breadth.look, may);
            let mut victims = self.by_window(&oldest);
            victims.truncate(breadth.choose);
            order.choose(class, victims.into_iter());
        }
        order.next_victim().is_some()
    }

    /// The same blocks, those in windows with the fewest live blocks first, else as they come.
    fn by_window(&self, blocks: &[u32]) -> Vec<u32> {
        const NONE: usize = usize::MAX;
        let windows = self.pool.span().div_ceil(WINDOW) as usize;
        let mut group_of = vec![NONE; windows];
        let mut groups: Vec<(u32, usize, usize)> = Vec::new(); // live, which, blocks
        for &block in blocks {
            let group = &mut group_of[(block / WINDOW) as usize];
            if *group == NONE {
                *group = groups.len();
                groups.push((self.pool.live_in(block / WINDOW), groups.len(), 0));
            }
            groups[*group].2 += 1;
        }
        groups.sort_unstable();
        let mut places = vec![0; groups.len()];
        let mut before = 0;
        for (_, group, size) in groups {
            places[group] = before;
            before += size;
        }
        let mut sorted = vec![0; blocks.len()];
        for &block in blocks {
            let place = &mut places[group_of[(block / WINDOW) as usize]];
            sorted[*place] = block;
            *place += 1;
        }
        sorted
    }

    /// Drops a cached, evictable block, which is private to the caller then.
    pub(crate) fn evict_block(&self, shared: &mut Shared, block: u32, spare: &mut Vec<u32>) {
        self.leave_cache(shared, block);
        self.pool.set_word(block, Word::PRIVATE);
        count(&self.stats.evicted_blocks, 1);
        self.withdraw(shared, block, spare);
        shared.index.order().count_eviction();
    }

    /// Takes a block out of the prefix index. What could no longer be found without it leaves too;
    /// of that, blocks that nobody holds are private to the caller and appended to `spare`.
    pub(crate) fn withdraw(&self, shared: &mut Shared, block: u32, spare: &mut Vec<u32>) {
        let mut dropped = Vec::new();
        let too_low = shared.index.withdraw(block, &mut dropped);
        if let Some(twin) = too_low
            && self.pool.word(twin).state() == State::Cached
            && !shared.cooling.contains_key(&twin)
        {
            // It was the spare copy, which goes first; now it is the only one.
            self.leave_cache(shared, twin);
            self.enter_order(shared, twin);
        }
        for block in dropped {
            let word = self.pool.word(block);
            let cooling = shared.cooling.get(&block).copied();
            if word.state() == State::Cached {
                self.leave_cache(shared, block);
                count(&self.stats.evicted_blocks, 1);
            }
            match (word.withdrawn(), cooling) {
                (Some(word), _) => {
                    self.pool.set_word(block, word);
                    self.refresh_stuck(shared, block);
                }
                (None, Some(step)) => self.fence(shared, step, block),
                (None, None) => {
                    self.pool.set_word(block, Word::PRIVATE);
                    spare.push(block);
                }
            }
        }
    }

    /// A cached block that no step can touch enters the order of eviction.
    pub(crate) fn enter_order(&self, shared: &mut Shared, block: u32) {
        shared.index.enter_order(block);
        shared.ages.enter(block);
        self.pool
            .set_evictable(block, !self.pool.word(block).is_moving());
    }

    /// A block of the order of eviction has moved: it keeps its place there.
    pub(crate) fn move_in_order(&self, shared: &mut Shared, old: u32, new: u32) {
        shared.index.order().replace(old, new);
        shared.ages.replace(old, new);
        self.pool.set_evictable(new, true);
    }

    /// A cached block is taken out of the order of eviction (its word still says cached).
    pub(crate) fn leave_cache(&self, shared: &mut Shared, block: u32) {
        if !self.stop_cooling(shared, block) {
            shared.index.order().remove(block);
            shared.ages.leave(block);
            self.pool.set_evictable(block, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{Config, Eviction, Keys, PageOrders, Placement, Rows};

    /// Blocks of one token, so a prompt is a chain of as many blocks.
    struct World {
        mmu: Mmu,
        rows: Rows,
    }

    impl World {
        fn new(mut config: Config) -> Self {
            config.max_sequences = config.num_blocks;
            // Where blocks lie is what these tests are about: first fit, block by block.
            config.page_orders = PageOrders::SINGLE;
            config.hold_blocks = 0;
            let mmu = Mmu::new(config).unwrap();
            let rows = Rows::new(&mmu, 1, 64, 64).unwrap();
            Self { mmu, rows }
        }

        fn of(num_blocks: u32, eviction: Eviction) -> Self {
            let mut config = Config::new(num_blocks, 1);
            config.eviction = eviction;
            Self::new(config)
        }

        fn open(&mut self, tokens: &[i32]) -> i64 {
            let id = self.mmu.open(tokens, Keys::default()).unwrap();
            let left = tokens.len() as i32 - self.mmu.info(id).unwrap().num_scheduled as i32;
            let mut tables = self.rows.buffers();
            let mut buffers = tables.borrow();
            let step = self.mmu.begin_step();
            let copies = self.mmu.prepare(
                step,
                &[id],
                Some(&[left]),
                None,
                &mut self.rows,
                &mut buffers,
            );
            assert_eq!(copies.unwrap(), [[0; 2]; 0]);
            self.mmu.written(step).unwrap();
            self.mmu.end_step(step).unwrap();
            id
        }

        fn serve(&mut self, tokens: &[i32]) {
            let id = self.open(tokens);
            self.mmu.close(id).unwrap();
        }

        /// Prompts that nobody had before, two blocks each.
        fn scan(&mut self, prompts: std::ops::Range<i32>) {
            for prompt in prompts {
                self.serve(&[1_000_000 + prompt, 0]);
            }
        }

        /// Blocks of these tokens that are found, the last one included.
        fn found(&self, tokens: &[i32]) -> u32 {
            let longer: Vec<i32> = tokens.iter().copied().chain([-1]).collect();
            self.mmu.matched_tokens(&longer, &Keys::default())
        }

        /// Of these prompts of one token, those that are no longer found.
        fn missing(&self, known: &[i32]) -> Vec<i32> {
            let gone = |&&token: &&i32| self.found(&[token]) == 0;
            known.iter().filter(gone).copied().collect()
        }
    }

    #[test]
    fn live_blocks_of_a_window_are_those_that_a_look_at_each_finds() {
        for null in [0, 700, 1300] {
            let mut config = Config::new(1300, 1);
            config.placement = Placement::Scatter { seed: 3 };
            config.null_block = null;
            let mut world = World::new(config);
            let ids: Vec<i64> = (0..1100).map(|token| world.open(&[token])).collect();
            for id in ids.iter().step_by(3) {
                world.mmu.close(*id).unwrap();
            }
            world.mmu.evict(150);
            let pool = &world.mmu.pool;
            for window in 0..3 {
                let blocks = window * WINDOW..((window + 1) * WINDOW).min(pool.span());
                let live = blocks
                    .filter(|&block| block != null)
                    .filter(|&block| !pool.is_empty(block) && !pool.is_evictable(block));
                assert_eq!(pool.live_in(window), live.count() as u32, "window {window}");
            }
        }
    }

    #[test]
    fn a_choice_looks_at_a_tenth_and_never_at_more_than_four_a_victim_or_2048() {
        let breadth = |n, evictable| {
            let Breadth { look, choose } = Breadth::new(n, evictable);
            (look, choose)
        };
        assert_eq!(breadth(1, 9), (2, 1));
        assert_eq!(breadth(1, 5_000), (501, 62));
        assert_eq!(breadth(1, 500_000), (2048, 256));
        assert_eq!(breadth(512, 50_000), (2048, 512));
        assert_eq!(breadth(8192, 50_000), (13_192, 8192));
        assert_eq!(breadth(u32::MAX, 50_000).1, u32::MAX as usize);
    }

    /// Every second block of window 0 is in use, one in eight of window 1, all others cached.
    #[test]
    fn of_blocks_of_one_age_those_in_the_window_with_the_fewest_live_ones_go_first() {
        for page_aware in [true, false] {
            let mut config = Config::new(1024, 1);
            (config.page_aware, config.anchor) = (page_aware, 0.0);
            let mut world = World::new(config);
            let ids: Vec<i64> = (0..1024).map(|token| world.open(&[token])).collect();
            for (block, id) in ids.iter().enumerate() {
                if !block.is_multiple_of(if block < 512 { 2 } else { 8 }) {
                    world.mmu.close(*id).unwrap();
                }
            }
            // The 256 of window 0 are the oldest, 448 of window 1 follow; 470 look at 541 of them.
            assert_eq!(world.mmu.evict(470), 470);
            let pool = &world.mmu.pool;
            let evictable = |window: u32| {
                let blocks = window * WINDOW..(window + 1) * WINDOW;
                blocks.filter(|&block| pool.is_evictable(block)).count()
            };
            let left = if page_aware { (71, 163) } else { (0, 234) };
            assert_eq!((evictable(0), evictable(1)), left);
            world.mmu.validate(None).unwrap();
        }
    }

    #[test]
    fn what_is_used_again_after_it_was_chosen_stays() {
        let mut world = World::of(1024, Eviction::Lru);
        (0..600).for_each(|token| world.serve(&[token]));
        assert_eq!(world.mmu.evict(1), 1); // looks at 61, chooses 7
        let known: Vec<i32> = (0..600).collect();
        assert_eq!(world.missing(&known), [0]);
        for token in [1, 3] {
            let id = world.open(&[token, 0]);
            world.mmu.close(id).unwrap();
        }
        assert_eq!(world.mmu.evict(3), 3);
        assert_eq!(world.missing(&known), [0, 2, 4, 5]);
        world.mmu.validate(None).unwrap();
    }

    #[test]
    fn a_prefix_that_was_used_often_outlives_a_scan_and_not_for_ever() {
        let hot: Vec<i32> = (0..8).collect();
        for (eviction, kept) in [(Eviction::Lru, 0), (Eviction::Lfu, 8)] {
            let mut world = World::of(64, eviction);
            (0..9).for_each(|turn| world.serve(&[hot.clone(), vec![100 + turn]].concat()));
            world.scan(0..60); // two blocks each: nearly twice the pool
            assert_eq!(world.found(&hot), kept, "{eviction:?}");
            world.mmu.validate(None).unwrap();
            // Eight uses are four bits: gone after four turnovers and one more.
            world.scan(60..300);
            assert_eq!(world.found(&hot), 0, "{eviction:?}");
            world.mmu.validate(None).unwrap();
        }
    }

    #[test]
    fn the_last_copy_of_a_content_stands_where_its_uses_put_it() {
        for uses in [1, 4] {
            let mut config = Config::new(64, 2);
            config.eviction = Eviction::Lfu;
            let mut world = World::new(config);
            // A prompt's last token is never found: each writes its own block.
            let (kept, copy) = (world.open(&[1, 2]), world.open(&[1, 2]));
            world.mmu.close(copy).unwrap();
            for turn in 0..uses {
                world.serve(&[1, 2, 100 + turn, 0]);
            }
            world.mmu.validate(None).unwrap();
            world.mmu.truncate(kept, 1).unwrap(); // writes its block anew, which others found
            let (mut tables, step) = (world.rows.buffers(), world.mmu.begin_step());
            let (ids, n, tokens) = ([kept], [1], [9]);
            let rows = &mut world.rows;
            world
                .mmu
                .prepare(
                    step,
                    &ids,
                    Some(&n),
                    Some(&tokens),
                    rows,
                    &mut tables.borrow(),
                )
                .unwrap();
            world.mmu.written(step).unwrap();
            world.mmu.end_step(step).unwrap();
            world.mmu.validate(None).unwrap();
            world.scan(0..62);
            assert_eq!(world.found(&[1, 2]), 2, "{uses} uses");
            world.mmu.validate(None).unwrap();
        }
    }

    #[test]
    fn a_moved_block_keeps_its_place_and_its_uses() {
        let hot: Vec<i32> = (0..8).collect();
        let mut world = World::of(64, Eviction::Lfu);
        let before = world.open(&[500, 501, 502]);
        (0..9).for_each(|turn| world.serve(&[hot.clone(), vec![100 + turn]].concat()));
        world.mmu.close(before).unwrap();
        assert_eq!(world.mmu.evict(12), 12); // all but the hot ones
        assert_eq!(world.found(&hot), 8);
        // Held, so that they are moved and not evicted; moves in flight leave no class behind.
        let held = world.open(&[hot.clone(), vec![9]].concat());
        let plan = world.mmu.plan_free_run(55, 64).unwrap();
        let moves = world.mmu.begin(&plan).unwrap();
        assert!(!moves.pairs().is_empty());
        world.mmu.close(held).unwrap();
        world.mmu.validate(None).unwrap();
        assert_eq!(
            world.mmu.commit(&moves).unwrap() as usize,
            moves.pairs().len()
        );
        world.mmu.validate(None).unwrap();
        world.scan(0..60);
        assert_eq!(world.found(&hot), 8);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

        /// Blocks without parents: the victims are those of a plain model.
        #[test]
        fn victims_are_those_that_a_plain_model_names(
            seed in any::<u64>(),
            opened in 600i32..1500,
            every in 2usize..6,
            batches in proptest::collection::vec(1u32..300, 1..6),
        ) {
            let mut config = Config::new(1600, 1);
            config.placement = Placement::Scatter { seed };
            let mut world = World::new(config);
            let ids: Vec<i64> = (0..opened).map(|token| world.open(&[token])).collect();
            let mut blocks = BTreeMap::new();
            let mut order: Vec<u32> = Vec::new();
            for (token, id) in ids.into_iter().enumerate() {
                if token % every != 0 {
                    let block = world.mmu.block_table(id).unwrap()[0];
                    blocks.insert(block, token as i32);
                    order.push(block);
                    world.mmu.close(id).unwrap();
                }
            }
            let mut chosen: Vec<u32> = Vec::new();
            for n in batches {
                let mut expected = Vec::new();
                for left in (1..=n).rev() {
                    if chosen.is_empty() {
                        let look = (left as usize + order.len().div_ceil(10)).min(2048);
                        let mut oldest = order[..look.min(order.len())].to_vec();
                        let first = oldest.clone();
                        let live = |block: u32| {
                            let pool = &world.mmu.pool;
                            let all = block / 512 * 512..(block / 512 * 512 + 512).min(1600);
                            let held = |block: &u32| {
                                !pool.is_empty(*block) && !pool.is_evictable(*block)
                            };
                            all.filter(held).count()
                        };
                        let at = |block: u32| first.iter().position(|b| b / 512 == block / 512);
                        oldest.sort_by_key(|&block| (live(block), at(block)));
                        oldest.truncate((look / 8).max(left as usize));
                        chosen = oldest;
                    }
                    if chosen.is_empty() {
                        break;
                    }
                    let block = chosen.remove(0);
                    order.retain(|&other| other != block);
                    expected.push(block);
                }
                prop_assert_eq!(world.mmu.evict(n) as usize, expected.len());
                for (block, token) in &blocks {
                    let kept = order.contains(block);
                    prop_assert_eq!(world.found(&[*token]), u32::from(kept), "block {}", block);
                }
            }
            world.mmu.validate(None).unwrap();
        }

        /// Whatever tree of prefixes is cached wherever, a block goes when nothing evictable
        /// stands behind it: so nothing but the victim is lost, and no pin is in the way.
        #[test]
        fn a_leaf_goes_before_what_it_stands_behind(
            seed in any::<u64>(),
            (lfu, page_aware) in any::<(bool, bool)>(),
            prompts in proptest::collection::vec((0i32..3, proptest::collection::vec(0i32..3, 1..40)), 40..160),
            reused in proptest::collection::vec(any::<prop::sample::Index>(), 0..60),
            batches in proptest::collection::vec(1u32..200, 1..12),
        ) {
            let mut config = Config::new(4096, 1);
            config.placement = Placement::Scatter { seed };
            config.page_aware = page_aware;
            if lfu {
                config.eviction = Eviction::Lfu;
            }
            let mut world = World::new(config);
            let mut open = Vec::new();
            for (close, prompt) in &prompts {
                let id = world.open(prompt);
                match close {
                    0 => open.push(id),
                    _ => world.mmu.close(id).unwrap(),
                }
            }
            for index in reused {
                world.serve(&[index.get(&prompts).1.clone(), vec![9]].concat());
            }
            for n in batches {
                let cached = world.mmu.states().cached;
                let lost = world.mmu.stats().evicted_blocks;
                let evicted = world.mmu.evict(n);
                prop_assert_eq!(evicted, n.min(cached));
                prop_assert_eq!(world.mmu.states().cached, cached - evicted);
                prop_assert_eq!(world.mmu.stats().evicted_blocks, lost + u64::from(evicted));
                world.mmu.validate(None).unwrap();
            }
            for id in open {
                world.mmu.close(id).unwrap();
            }
            world.mmu.evict(u32::MAX);
            prop_assert_eq!(world.mmu.states().empty, 4096);
        }
    }
}
