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
    /// Drops the next evictable block, of which the caller wants `n`; it is private to the caller
    /// then, and so are the blocks appended to `spare`, which could no longer be found without it.
    pub(super) fn evict_next(&self, shared: &mut Shared, n: u32, spare: &mut Vec<u32>) -> u32 {
        let block = self.next_victim(shared, n);
        let block = block.expect("fewer evictable blocks than were counted");
        self.evict_block(shared, block, spare);
        block
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
        shared.index.withdraw(block, &mut dropped);
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
        self.pool
            .set_evictable(block, !self.pool.word(block).is_moving());
    }

    /// A cached block is taken out of the order of eviction (its word still says cached).
    pub(crate) fn leave_cache(&self, shared: &mut Shared, block: u32) {
        if !self.stop_cooling(shared, block) {
            shared.index.order().remove(block);
            self.pool.set_evictable(block, false);
        }
    }
}
