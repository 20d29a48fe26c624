//! Virtual memory: a four-level page table, 512 entries a node, like x86-64's.
//!
//! | file | what lives there |
//! |---|---|
//! | `mod` | nodes: who has which, in which of its lives; making and closing address spaces |
//! | `pte` | the layout of an entry |
//! | `pages` | mapping, remapping, splitting, promoting, unmapping: by the one writer of a space |
//! | `walk` | reading: by the writer, and by anybody without a lock |
//! | `ways` | a line a slot: which sequence has it, and the way to its first tables |
//!
//! What never lives here: who owns a block, why it moves, the reverse map.
//!
//! One virtual block number has 36 bits:
//!
//! ```text
//!  [ sequence slot: 9 + 9 | huge index: 9 | block index: 9 ]
//!      level 4   level 3      level 2         level 1
//! ```
//!
//! so 262,144 address spaces of 262,144 blocks each. Logical block `l` of a sequence is virtual
//! block `l + offset`, with an offset below 512 that is chosen when the sequence is opened: so a
//! part of it can be aligned as the physical pages are that it shares. An entry of level 2 maps a
//! huge page or names a node of level 1; other page sizes are an order in the entries of level 1.
//!
//! # Synchronization
//!
//! Entries are atomics. Each space has one writer. A reader that holds no lock sees an entry before
//! or after a change, never half of it. Nodes are reused, and each life of a node has a generation,
//! which the entry that names it carries: a reader looks at the entries above again after it has
//! read, and an entry that is unchanged says that the node was the same all the time ([`walk`]). A
//! generation has 27 bits: a reader would have to sleep while one node is given away 134 million
//! times, and wake at just that life.
//!
//! Nodes come from one preallocated array (`free` is a short lock, taken once in 512 blocks). An
//! array larger than needed costs address space, not memory: pages are touched on first use. A huge
//! page keeps a node in reserve, untouched, so that a split never fails.

mod pages;
mod pte;
mod walk;
mod ways;

use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Mutex, Ordering, lock, zeroed_u64};

pub(crate) use pte::NODE_BITS;
pub use pte::Pte;
pub(crate) use walk::{Blocks, Leaf, Page, Piece, Pieces};
use ways::Ways;

const ROOT: u32 = 0;
/// In the word of a node: its place in the tree, and its generation above that.
const PLACE_BITS: u32 = 37;
const GENERATIONS: u64 = (1 << (64 - PLACE_BITS)) - 1;

#[derive(Debug)]
struct Free {
    /// Nodes given back.
    reused: Vec<u32>,
    /// Nodes at or above this were never used.
    fresh: u32,
}

/// The page table of all sequences, with `FANOUT` entries a node and a copy of the first `NEAR` entries
/// of each level 2 in the line of its slot: 512 and 6, or fewer for model checkers, whose worlds must
/// be small.
#[derive(Debug)]
pub struct Table<const FANOUT: u32 = 512, const NEAR: usize = 6> {
    entries: Box<[AtomicU64]>,
    /// Where readers without a lock begin.
    ways: Ways<NEAR>,
    /// A word a node: generation, and (slot, huge index) of what it holds.
    lives: Box<[AtomicU64]>,
    nodes: u32,
    free: Mutex<Free>,
}

/// The level-2 node of one address space, where its walks begin, the virtual block of its first
/// logical block, and whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    node: u32,
    offset: u32,
    slot: u32,
}

impl Space {
    /// No address space.
    pub(crate) const NONE: Space = Space {
        node: u32::MAX,
        offset: 0,
        slot: u32::MAX,
    };

    /// Virtual block of logical block 0.
    pub(crate) fn offset(self) -> u32 {
        self.offset
    }

    /// Virtual block of a logical one.
    pub(crate) fn virtual_of(self, index: u32) -> u32 {
        index + self.offset
    }

    /// Logical block of a virtual one.
    pub(crate) fn logical_of(self, at: u32) -> u32 {
        at - self.offset
    }
}

/// Where the entry of a page stands: a number that the reverse map can keep.
pub(crate) type Loc = u32;

impl<const FANOUT: u32, const NEAR: usize> Table<FANOUT, NEAR> {
    /// Order of a page that an entry of level 2 maps.
    pub(crate) const HUGE: u32 = FANOUT.ilog2();

    /// A table of so many nodes for so many slots, with no address space in it.
    pub fn new(nodes: u32, slots: u32) -> Result<Self> {
        let entries = zeroed_u64(nodes as usize * FANOUT as usize)?;
        let free = Free {
            reused: Vec::new(),
            fresh: ROOT + 1,
        };
        Ok(Self {
            entries,
            ways: Ways::new(slots)?,
            lives: zeroed_u64(nodes as usize)?,
            nodes,
            free: Mutex::new(free),
        })
    }

    /// Nodes of level 3 in use.
    pub(crate) fn upper_nodes(&self) -> u32 {
        (0..FANOUT)
            .filter(|&high| self.load(ROOT, high).is_present())
            .count() as u32
    }

    /// Whether an address space of so many blocks would fit if there were no other, wherever in
    /// its first table it begins.
    pub(crate) fn could_hold(&self, blocks: u32) -> bool {
        3 + blocks.div_ceil(FANOUT) <= self.nodes
    }

    /// Nodes in use, the root and those in reserve for splits included.
    pub(crate) fn nodes_in_use(&self) -> u32 {
        let free = lock(&self.free);
        free.fresh - free.reused.len() as u32
    }

    fn entry(&self, loc: Loc) -> &AtomicU64 {
        &self.entries[loc as usize]
    }

    fn loc(node: u32, index: u32) -> Loc {
        node * FANOUT + index
    }

    fn load(&self, node: u32, index: u32) -> Pte {
        // Acquire: pairs with the Release of `store`, so a child is seen with its entries. It also
        // keeps a second look at the entries above behind this one.
        Pte(self.entry(Self::loc(node, index)).load(Ordering::Acquire))
    }

    fn store(&self, node: u32, index: u32, pte: Pte) {
        // Release: pairs with the Acquire of `load`.
        self.entry(Self::loc(node, index))
            .store(pte.0, Ordering::Release);
    }

    /// Replaces an entry of level 2: in its node, and then where readers look for it. Who gives a node
    /// away that the old entry names does so behind this.
    fn store_table(&self, space: Space, index: u32, pte: Pte) {
        self.store(space.node, index, pte);
        self.ways.store_near(space.slot, index, pte);
    }

    /// A node begins another life: at this huge index of a slot, or as its level 2 (`None`).
    fn begin(&self, node: u32, slot: u32, huge: Option<u32>) -> Pte {
        let life = &self.lives[node as usize];
        // Relaxed, both: a node has one owner, and the lists hand it over by their lock. Who asks
        // whose an entry is holds the lock under which it came into the reverse map.
        let generation = ((life.load(Ordering::Relaxed) >> PLACE_BITS) + 1) & GENERATIONS;
        let place = u64::from(slot) << 10 | huge.map_or(0, |huge| u64::from(huge) << 1 | 1);
        life.store(generation << PLACE_BITS | place, Ordering::Relaxed);
        Pte::child(node, generation)
    }

    /// Slot and virtual block of the page whose entry stands at `loc`.
    pub(crate) fn whose(&self, loc: Loc) -> (u32, u32) {
        let (node, index) = (loc / FANOUT, loc % FANOUT);
        // Relaxed: see `begin`.
        let place = self.lives[node as usize].load(Ordering::Relaxed) & ((1 << PLACE_BITS) - 1);
        let slot = (place >> 10) as u32;
        let at = match place & 1 {
            0 => index * FANOUT,
            _ => (place >> 1 & 0x1ff) as u32 * FANOUT + index,
        };
        (slot, at)
    }

    fn allocate(&self, free: &mut Free) -> Result<u32> {
        if let Some(node) = free.reused.pop() {
            return Ok(node);
        }
        if free.fresh == self.nodes {
            return Err(Error::OutOfTables {
                what: "page-table nodes",
                capacity: u64::from(self.nodes),
            });
        }
        free.fresh += 1;
        Ok(free.fresh - 1)
    }

    /// Makes the address space of a slot for a sequence of a generation (from 1 on) that the slot never
    /// had, with offset 0. Nodes of level 3 stay once they are made: 512 slots share one.
    pub fn open(&self, slot: u32, generation: u64) -> Result<Space> {
        let (high, low) = (slot / FANOUT, slot % FANOUT);
        let mut free = lock(&self.free);
        let upper = self.load(ROOT, high);
        let fresh_upper = !upper.is_present();
        let upper = if fresh_upper {
            self.allocate(&mut free)?
        } else {
            upper.node()
        };
        let node = match self.allocate(&mut free) {
            Ok(node) => node,
            Err(error) => {
                if fresh_upper {
                    free.reused.push(upper);
                }
                return Err(error);
            }
        };
        debug_assert!(
            !self.load(upper, low).is_present(),
            "slot {slot} is open already"
        );
        let child = self.begin(node, slot, None);
        self.store(upper, low, child);
        if fresh_upper {
            self.store(ROOT, high, Pte::child(upper, 0));
        }
        self.ways.begin(slot, generation, child);
        Ok(Space {
            node,
            offset: 0,
            slot,
        })
    }

    /// Begins a space in which nothing is mapped at another virtual block.
    pub(crate) fn shift(&self, space: Space, offset: u32) -> Space {
        let slot = space.slot;
        let (upper, low) = (self.load(ROOT, slot / FANOUT).node(), slot % FANOUT);
        let child = self.load(upper, low);
        debug_assert!(child.node() == space.node && offset < FANOUT);
        self.store(upper, low, child.shifted(offset));
        self.ways.shift(slot, offset);
        Space { offset, ..space }
    }

    /// Whether a slot could get an address space of so many blocks.
    pub(crate) fn has_room(&self, slot: u32, blocks: u32) -> bool {
        let upper = u32::from(!self.load(ROOT, slot / FANOUT).is_present());
        self.nodes_in_use() + upper + 1 + blocks.div_ceil(FANOUT) <= self.nodes
    }

    /// Finds the address space of a slot by walking from the root.
    pub(crate) fn space(&self, slot: u32) -> Option<Space> {
        let lower = self.space_entry(slot);
        lower.is_present().then(|| Space {
            node: lower.node(),
            offset: lower.offset(),
            slot,
        })
    }

    /// The entry of level 3 of a slot.
    fn space_entry(&self, slot: u32) -> Pte {
        let upper = self.load(ROOT, slot / FANOUT);
        if upper.is_present() {
            self.load(upper.node(), slot % FANOUT)
        } else {
            upper
        }
    }

    /// Gives the address space back; every block in it must be unmapped.
    pub fn close(&self, space: Space) {
        let slot = space.slot;
        // First: who looks by id finds nothing before the node serves anybody else.
        self.ways.end(slot);
        let upper = self.load(ROOT, slot / FANOUT).node();
        debug_assert_eq!(self.load(upper, slot % FANOUT).node(), space.node);
        self.store(upper, slot % FANOUT, Pte::ABSENT);
        lock(&self.free).reused.push(space.node);
    }

    /// Tables of level 1 that `from..to` needs and the blocks below `from` do not have yet; `alone`:
    /// there are none.
    fn fresh_tables(space: Space, from: u32, to: u32, alone: bool) -> std::ops::Range<u32> {
        let first = match alone {
            true => space.virtual_of(from) / FANOUT,
            false => space.virtual_of(from).div_ceil(FANOUT),
        };
        if from == to {
            return first..first;
        }
        first..space.virtual_of(to).div_ceil(FANOUT).max(first)
    }

    /// Makes sure that the blocks `from..to` can be mapped without failing. All or nothing. The
    /// block before `from` is mapped, or nothing is (`alone`).
    pub fn reserve(&self, space: Space, from: u32, to: u32, alone: bool) -> Result<()> {
        let tables = Self::fresh_tables(space, from, to, alone);
        if tables.is_empty() {
            return Ok(());
        }
        let mut free = lock(&self.free);
        for index in tables {
            if self.load(space.node, index).is_present() {
                continue;
            }
            match self.allocate(&mut free) {
                Ok(node) => {
                    let child = self.begin(node, space.slot, Some(index));
                    self.store_table(space, index, child);
                }
                Err(error) => {
                    drop(free);
                    self.trim(space, from, to, alone);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Undoes [`Table::reserve`] for blocks that were not mapped after all, or are no longer.
    pub(crate) fn trim(&self, space: Space, from: u32, to: u32, alone: bool) {
        self.give_tables(space, Self::fresh_tables(space, from, to, alone));
    }

    /// Gives tables of level 1 back in which nothing is mapped.
    fn give_tables(&self, space: Space, tables: std::ops::Range<u32>) {
        if tables.is_empty() {
            return;
        }
        let mut free = lock(&self.free);
        for index in tables {
            let child = self.load(space.node, index);
            if child.is_present() {
                debug_assert!(!child.is_leaf());
                self.store_table(space, index, Pte::ABSENT);
                free.reused.push(child.node());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(table: &Table, space: Space, from: u32, blocks: &[u32]) {
        table.map_each(space, from, blocks, |_, _| {});
    }

    #[test]
    fn every_entry_around_the_roll_over_of_a_level_is_its_own() {
        let table = Table::<512>::new(1300, 1024).unwrap();
        let slots = [0, 1, 511, 512];
        let spaces: Vec<_> = slots
            .iter()
            .enumerate()
            .map(|(i, &slot)| {
                let space = table.open(slot, 1).unwrap();
                table.shift(space, i as u32 * 170)
            })
            .collect();
        let indices = [0, 1, 510, 511, 512, 513, 1023, 1024, 65_535];
        for (s, &space) in spaces.iter().enumerate() {
            table.reserve(space, 0, 65_536, true).unwrap();
            for (i, &index) in indices.iter().enumerate() {
                map(&table, space, index, &[(s * 100 + i) as u32]);
            }
        }
        for (s, &space) in spaces.iter().enumerate() {
            assert_eq!(table.space(slots[s]), Some(space));
            for (i, &index) in indices.iter().enumerate() {
                let block = (s * 100 + i) as u32;
                assert_eq!(table.block(space, index), block);
                assert_eq!(table.look((slots[s], 1), index), Some(block));
                let loc = table.page(space, index).loc;
                assert_eq!(table.whose(loc), (slots[s], space.virtual_of(index)));
            }
            assert!(!table.get(space, 2).is_present());
            assert_eq!(table.look((slots[s], 1), 2), None);
        }
        assert_eq!(table.space(513), None);
        assert_eq!(table.look((513, 1), 0), None);
        for beyond in [512 * 512, u32::MAX] {
            assert!(
                slots
                    .iter()
                    .all(|&slot| table.look((slot, 1), beyond).is_none())
            );
        }
    }

    #[test]
    fn a_reservation_that_fails_gives_its_nodes_back() {
        let table = Table::<512>::new(5, 16).unwrap();
        let space = table.open(7, 1).unwrap();
        table.reserve(space, 0, 512, true).unwrap();
        map(&table, space, 0, &(0..512).collect::<Vec<_>>());
        let before = table.nodes_in_use();
        assert!(matches!(
            table.reserve(space, 512, 1537, false),
            Err(Error::OutOfTables { .. })
        ));
        assert_eq!(table.nodes_in_use(), before);
        table.reserve(space, 512, 1024, false).unwrap();
        assert!(matches!(table.open(8, 1), Err(Error::OutOfTables { .. })));
    }

    /// What `pieces` says, a page at a time.
    fn pages_of(table: &Table, space: Space, from: u32, to: u32) -> Vec<Page> {
        let mut pieces = Pieces::default();
        table.pieces(space, from, to, &mut pieces);
        let mut pages = Vec::new();
        for Piece { page, blocks } in pieces.iter() {
            let size = 1 << page.order;
            let at = |i: u32, block: u32| Page {
                index: page.index + i * size,
                block,
                loc: page.loc + i,
                ..page
            };
            match blocks {
                Blocks::Run(n) => pages.extend((0..n / size).map(|i| at(i, page.block + i * size))),
                Blocks::Each(blocks) => pages.extend((0..).zip(blocks).map(|(i, &b)| at(i, b))),
            }
        }
        pages
    }

    #[test]
    fn pieces_are_the_pages_in_runs_and_lists() {
        let table = Table::<512>::new(16, 16).unwrap();
        let space = table.open(5, 1).unwrap();
        let space = table.shift(space, 500);
        table.reserve(space, 0, 3000, true).unwrap();
        // Runs that end in a group and with one, lists, pages of several orders among them.
        let mut at = 0;
        let lengths = [3, 9, 1, 1, 60, 64, 128, 5, 200, 1, 1, 1, 512 - 486 + 500];
        for (turn, n) in lengths.into_iter().enumerate() {
            let first = 10_000 + 700 * (turn as u32 * 7 % 13);
            map(&table, space, at, &(first..first + n).collect::<Vec<_>>());
            at += n;
        }
        assert!((space.virtual_of(at)).is_multiple_of(4));
        table.map(space, at, 40, 2);
        map(&table, space, at + 4, &[77, 3, 4, 5]);
        table.map(space, at + 8, 80, 2);
        at += 12;
        let next = space.logical_of(space.virtual_of(at).next_multiple_of(512));
        map(
            &table,
            space,
            at,
            &(0..next - at).map(|i| i * 2).collect::<Vec<_>>(),
        );
        table.map(space, next, 1024, 9);
        map(&table, space, next + 512, &[9, 8, 7]);
        at = next + 515;
        for (from, to) in [(0, at), (0, 1), (13, 14), (70, 700), (at - 520, at)] {
            let expected: Vec<_> = table.pages(space, from, to).collect();
            assert_eq!(pages_of(&table, space, from, to), expected, "{from}..{to}");
        }
        assert!(pages_of(&table, space, 7, 7).is_empty());
    }

    #[test]
    fn a_space_maps_what_another_maps() {
        let table = Table::<512>::new(16, 16).unwrap();
        let [one, other] = [1, 2].map(|slot| table.shift(table.open(slot, 1).unwrap(), 510));
        let blocks: Vec<u32> = (0..1500).map(|i| i * 3 % 1024 + i / 600).collect();
        // Nodes of the two in turn, so that those of neither follow each other.
        for to in [1, 400, 900, 1500] {
            for space in [one, other] {
                table.reserve(space, 0, to, true).unwrap();
            }
        }
        map(&table, one, 0, &(7..607).collect::<Vec<_>>());
        map(&table, one, 600, &blocks[600..]);
        let mut pieces = Pieces::default();
        table.pieces(one, 0, 1500, &mut pieces);
        for piece in pieces.iter() {
            let loc = table.map_as(other, piece);
            assert_eq!(table.whose(loc), (2, other.virtual_of(piece.page.index)));
        }
        assert_eq!(table.blocks(other, 0, 1500), table.blocks(one, 0, 1500));
    }

    #[test]
    fn nodes_come_back_when_their_last_block_is_unmapped() {
        let table = Table::<512>::new(16, 16).unwrap();
        let space = table.open(0, 1).unwrap();
        let before = table.nodes_in_use();
        table.reserve(space, 0, 1025, true).unwrap();
        map(&table, space, 0, &(0..1025).collect::<Vec<_>>());
        assert_eq!(
            table.blocks(space, 500, 520),
            (500..520).collect::<Vec<_>>()
        );
        assert_eq!(table.blocks(space, 3, 3), [0; 0]);
        table.unmap(space, 1024, 1025, 0..1024);
        assert_eq!(table.nodes_in_use(), before + 2);
        table.unmap(space, 513, 1024, 0..513);
        assert_eq!(table.nodes_in_use(), before + 2);
        table.unmap(space, 0, 513, 0..0);
        assert_eq!(table.nodes_in_use(), before);
        table.close(space);
        assert_eq!(table.nodes_in_use(), before - 1);
    }

    #[test]
    fn a_space_loses_tables_at_both_ends_and_never_one_that_it_uses() {
        let table = Table::<512>::new(16, 16).unwrap();
        let space = table.open(3, 1).unwrap();
        let space = table.shift(space, 500);
        let before = table.nodes_in_use();
        table.reserve(space, 0, 1000, true).unwrap();
        assert_eq!(table.nodes_in_use(), before + 3);
        map(&table, space, 0, &(0..1000).collect::<Vec<_>>());
        table.unmap(space, 0, 11, 11..1000);
        assert_eq!(table.nodes_in_use(), before + 3);
        table.unmap(space, 11, 12, 12..1000);
        assert_eq!(table.nodes_in_use(), before + 2);
        table.unmap(space, 12, 999, 999..1000);
        assert_eq!(table.nodes_in_use(), before + 1);
        assert_eq!(table.block(space, 999), 999);
        table.unmap(space, 999, 1000, 0..0);
        assert_eq!(table.nodes_in_use(), before);
    }

    #[test]
    fn a_remap_that_lost_changes_nothing() {
        let table = Table::<512>::new(8, 16).unwrap();
        let space = table.open(0, 1).unwrap();
        assert!(!table.remap(space, 0, 1, 2));
        table.reserve(space, 0, 1, true).unwrap();
        map(&table, space, 0, &[4]);
        assert!(!table.remap(space, 0, 3, 9) && table.remap(space, 0, 4, 9));
        assert_eq!(table.block(space, 0), 9);
    }

    #[test]
    fn pages_of_all_sizes_side_by_side() {
        let table = Table::<512>::new(8, 16).unwrap();
        let space = table.open(9, 1).unwrap();
        let space = table.shift(space, 508);
        table.reserve(space, 0, 4 + 512 + 10, true).unwrap();
        let quad = table.map(space, 0, 40, 2);
        let huge = table.map(space, 4, 1024, 9);
        let eight = table.map(space, 516, 8, 3);
        map(&table, space, 524, &[77, 3]);
        let pages: Vec<_> = table.pages(space, 1, 526).collect();
        let page = |index, block, order, loc| Page {
            index,
            block,
            order,
            loc,
        };
        assert_eq!(pages[0], page(0, 40, 2, quad));
        assert_eq!(pages[1], page(4, 1024, 9, huge));
        assert_eq!(pages[2], page(516, 8, 3, eight));
        assert_eq!(
            pages[3..].iter().map(|p| p.block).collect::<Vec<_>>(),
            [77, 3]
        );
        assert_eq!(table.whose(huge), (9, 512));
        let plain = |table: &Table| table.blocks(space, 0, 526);
        let before = plain(&table);
        let nodes = table.nodes_in_use();
        table.split(space, 300, 2);
        assert_eq!(plain(&table), before);
        assert_eq!(table.page(space, 300).order, 2);
        assert_eq!(table.promote(space, 4, 9), huge);
        assert_eq!(plain(&table), before);
        assert_eq!(table.nodes_in_use(), nodes);
        assert!((0..526).all(|at| table.look((9, 1), at) == Some(before[at as usize])));
        table.unmap(space, 4, 526, 0..4);
        assert_eq!(table.blocks(space, 0, 4), [40, 41, 42, 43]);
        assert_eq!(table.look((9, 1), 4), None);
        assert_eq!(table.nodes_in_use(), nodes - 2);
    }
}
