//! What every physical block is, as arrays: the memory as a picture shows it.
//!
//! What lives here: [`BlockMap`] and how it is taken. What never lives here: figures made of it
//! (`compact/measure.rs` has those), and anything that changes a block.

use crate::pool::State;
use crate::state::{Mmu, Shared, id};
use crate::sync::lock;

/// What every physical block is, by its number, at one moment.
///
/// All arrays have one entry a block, the null block among them where it is not behind the last.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockMap {
    /// [`BlockMap::EMPTY`], `DESTINED`, `IN_USE`, `CACHED`, `FENCED`, `OFFLINE` or `NULL`. Blocks
    /// kept behind a sequence to grow into are empty.
    pub states: Vec<u8>,
    /// Mappings, pins, leases and moves; 0 unless in use, and of a cached block under a move 1.
    pub references: Vec<u32>,
    /// A sequence that maps it, -1 if none does. Of several, one that maps it by the largest page.
    pub sequences: Vec<i64>,
    /// Which of the logical blocks of that sequence it is; -1.
    pub logical: Vec<i32>,
    /// log2 of the blocks of the page that it is mapped by there; -1.
    pub orders: Vec<i8>,
    /// [`BlockMap::HELD`], `PINNED`, `LEASED`, `MOVING`, `PUBLISHED`, `EVICTABLE`, added up.
    pub flags: Vec<u8>,
}

impl BlockMap {
    /// Nobody's.
    pub const EMPTY: u8 = 0;
    /// Destination of a move in flight.
    pub const DESTINED: u8 = 1;
    /// Referenced at least once.
    pub const IN_USE: u8 = 2;
    /// Kept by the prefix index alone.
    pub const CACHED: u8 = 3;
    /// Released, but a step in flight may still touch it.
    pub const FENCED: u8 = 4;
    /// Given back.
    pub const OFFLINE: u8 = 5;
    /// The null block.
    pub const NULL: u8 = 6;

    /// Kept behind a sequence to grow into.
    pub const HELD: u8 = 1;
    /// Pinned, by something else than a lease.
    pub const PINNED: u8 = 2;
    /// A transfer holds it.
    pub const LEASED: u8 = 4;
    /// Source of a move in flight.
    pub const MOVING: u8 = 8;
    /// In the prefix index.
    pub const PUBLISHED: u8 = 16;
    /// Cached, and may be evicted now.
    pub const EVICTABLE: u8 = 32;

    fn of_no_blocks(n: usize) -> Self {
        Self {
            states: vec![Self::NULL; n],
            references: vec![0; n],
            sequences: vec![-1; n],
            logical: vec![-1; n],
            orders: vec![-1; n],
            flags: vec![0; n],
        }
    }
}

/// The number of a state in [`BlockMap::states`].
fn code(state: State) -> u8 {
    match state {
        State::Empty => BlockMap::EMPTY,
        State::Destined => BlockMap::DESTINED,
        State::InUse => BlockMap::IN_USE,
        State::Cached => BlockMap::CACHED,
        State::Fenced => BlockMap::FENCED,
        State::Offline => BlockMap::OFFLINE,
    }
}

impl Mmu {
    /// What every block is, at one moment: the state is at rest meanwhile, as for
    /// [`Mmu::measure`], so no verb is seen half done. (What a step in flight has not been told of
    /// is not in it: contents that a kernel is writing, copies under way.) O(blocks), however often
    /// each is shared.
    pub fn block_map(&self) -> BlockMap {
        let _rest = self.rest();
        let shared = self.shared();
        self.block_map_at_rest(&shared)
    }

    pub(crate) fn block_map_at_rest(&self, shared: &Shared) -> BlockMap {
        let mut map = BlockMap::of_no_blocks(self.config.span() as usize);
        self.fill_states(&mut map);
        for block in self.holds.blocks() {
            let at = block as usize;
            map.states[at] = BlockMap::EMPTY;
            map.references[at] = 0;
            map.flags[at] = BlockMap::HELD;
        }
        for (&block, &pins) in &shared.pins {
            let leases = shared.leased.get(&block).copied().unwrap_or(0);
            let flags = &mut map.flags[block as usize];
            *flags |= if pins > leases { BlockMap::PINNED } else { 0 };
            *flags |= if leases > 0 { BlockMap::LEASED } else { 0 };
        }
        self.fill_mappings(shared, &mut map);
        map
    }

    fn fill_states(&self, map: &mut BlockMap) {
        for block in 0..self.config.span() {
            if block == self.null_block() {
                continue;
            }
            let at = block as usize;
            if self.pool.is_empty(block) {
                map.states[at] = BlockMap::EMPTY;
                continue;
            }
            let word = self.pool.word(block);
            map.states[at] = code(word.state());
            map.references[at] = word.references();
            let mut flags = if word.is_moving() {
                BlockMap::MOVING
            } else {
                0
            };
            if word.is_published() {
                flags |= BlockMap::PUBLISHED;
            }
            if self.pool.is_evictable(block) {
                flags |= BlockMap::EVICTABLE;
            }
            map.flags[at] = flags;
        }
    }

    /// By the reverse map: a page once, whoever shares it. Larger pages first, so that a block
    /// which several sizes map is said to lie in the largest.
    fn fill_mappings(&self, shared: &Shared, map: &mut BlockMap) {
        let sequences: Vec<_> = (self.used_slots())
            .map(|(slot, cell)| {
                let sequence = lock(cell);
                (id(sequence.generation, slot), sequence.space)
            })
            .collect();
        let orders: Vec<u32> = self.config.page_orders.iter().collect();
        for &order in orders.iter().rev() {
            let size = 1 << order;
            for page in 0..self.config.span() >> order {
                let Some(loc) = self.reverse.first(&shared.chains, (order, page)) else {
                    continue;
                };
                let (slot, at) = self.table.whose(loc);
                let (sequence, space) = sequences[slot as usize];
                let first = space.logical_of(at) as i32;
                let blocks = (page * size) as usize..((page + 1) * size) as usize;
                for (inside, block) in blocks.enumerate() {
                    if map.orders[block] < 0 {
                        map.sequences[block] = sequence;
                        map.logical[block] = first + inside as i32;
                        map.orders[block] = order as i8;
                    }
                }
            }
        }
    }
}

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    use super::*;
    use crate::{Config, Keys, Rows};

    #[test]
    fn a_map_tells_who_has_which_block_and_how() {
        let mut config = Config::new(16, 2);
        config.hold_blocks = 2;
        config.null_block = 3;
        let mmu = Mmu::new(config).expect("a sound configuration");
        let a = mmu.open(&[1; 8], Keys::default()).expect("there is room");
        let b = mmu.fork(a).expect("there is room");
        let table = mmu.block_table(a).expect("it is open");
        mmu.pin(&[i64::from(table[1])]).expect("it is in use");
        let lease = mmu.lease(b, 4, 6).expect("it is open");
        let map = mmu.block_map();
        assert_eq!(map.states.len(), 17);
        assert_eq!(map.states[3], BlockMap::NULL);
        for (logical, &block) in table.iter().enumerate() {
            let at = block as usize;
            assert_eq!(map.states[at], BlockMap::IN_USE);
            assert_eq!(map.logical[at], logical as i32);
            assert!([a, b].contains(&map.sequences[at]));
        }
        let references: Vec<u32> = table.iter().map(|&b| map.references[b as usize]).collect();
        assert_eq!(references, [2, 3, 3, 2]);
        let flags: Vec<u8> = table.iter().map(|&b| map.flags[b as usize]).collect();
        assert_eq!(flags, [0, BlockMap::PINNED, BlockMap::LEASED, 0]);
        assert_eq!(lease.blocks, [table[2]]);
        assert_eq!(mmu.validate(None), Ok(()));
    }

    #[test]
    fn a_map_tells_what_is_cached_held_and_on_its_way() {
        let mut config = Config::new(2048, 1);
        config.budget_blocks = 8;
        let mmu = Mmu::new(config).expect("a sound configuration");
        let mut rows = Rows::new(&mmu, 1, 1024, 1024).expect("sound rows");
        let mut tables = rows.buffers();
        let prompt: Vec<i32> = (0..600).collect();
        let a = mmu.open(&prompt, Keys::default()).expect("there is room");
        let held = mmu.block_map();
        let count = |map: &BlockMap, flag: u8| map.flags.iter().filter(|&&f| f & flag != 0).count();
        assert_eq!(count(&held, BlockMap::HELD), mmu.states().held as usize);
        assert!(mmu.states().held > 0);
        let step = mmu.begin_step();
        mmu.prepare(
            step,
            &[a],
            Some(&[600]),
            None,
            &mut rows,
            &mut tables.borrow(),
        )
        .expect("it fits");
        mmu.written(step).expect("it is in flight");
        mmu.close(a).expect("it is open");
        let cooling = mmu.block_map();
        assert_eq!(count(&cooling, BlockMap::PUBLISHED), 600);
        assert_eq!(count(&cooling, BlockMap::EVICTABLE), 0);
        mmu.end_step(step).expect("it is in flight");
        assert_eq!(count(&mmu.block_map(), BlockMap::EVICTABLE), 600);
        assert_eq!(mmu.validate(None), Ok(()));
    }
}
