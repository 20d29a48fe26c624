//! Virtual memory: a four-level page table, 512 entries a node, like x86-64's.
//!
//! What lives here: the nodes, and mapping, remapping, unmapping and walking in batches. What
//! never lives here: who owns a block, why it moves.
//!
//! One virtual block number has 36 bits:
//!
//! ```text
//!  [ sequence slot: 9 + 9 | huge index: 9 | block index: 9 ]
//!      level 4   level 3      level 2         level 1
//! ```
//!
//! so 262,144 address spaces of 262,144 blocks each. An entry of level 1 maps one block; the order
//! field and the leaf bit of level 2 are there for larger pages.
//!
//! # Synchronization
//!
//! Entries are atomics. `map` and `unmap` of one address space are called by its one writer; `remap`
//! is a compare-and-swap per entry, so a remap that lost against an unmap loses cleanly. A reader
//! that holds no lock sees an entry before or after a change, never half of it. Nodes are reused
//! only after every entry in them is absent again.
//!
//! Nodes come from one preallocated array (`free` is a short lock, taken once in 512 blocks). An
//! array larger than needed costs address space, not memory: pages are touched on first use.

mod pte;

use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Mutex, Ordering, lock, zeroed_u64};

pub use pte::Pte;

/// Entries of one node.
pub const FANOUT: u32 = 512;
const ROOT: u32 = 0;

#[derive(Debug)]
struct Free {
    /// Nodes given back.
    reused: Vec<u32>,
    /// Nodes at or above this were never used.
    fresh: u32,
}

/// The page table of all sequences.
#[derive(Debug)]
pub(crate) struct Table {
    entries: Box<[AtomicU64]>,
    nodes: u32,
    free: Mutex<Free>,
}

/// The level-2 node of one address space: where its walks begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Space(u32);

impl Space {
    /// No address space.
    pub(crate) const NONE: Space = Space(u32::MAX);
}

impl Table {
    pub(crate) fn new(nodes: u32) -> Result<Self> {
        let entries = zeroed_u64(nodes as usize * FANOUT as usize)?;
        let free = Free {
            reused: Vec::new(),
            fresh: ROOT + 1,
        };
        Ok(Self {
            entries,
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

    /// Whether an address space of so many blocks would fit if there were no other.
    pub(crate) fn could_hold(&self, blocks: u32) -> bool {
        3 + blocks.div_ceil(FANOUT) <= self.nodes
    }

    /// Nodes in use, the root included.
    pub(crate) fn nodes_in_use(&self) -> u32 {
        let free = lock(&self.free);
        free.fresh - free.reused.len() as u32
    }

    fn entry(&self, node: u32, index: u32) -> &AtomicU64 {
        &self.entries[node as usize * FANOUT as usize + index as usize]
    }

    fn load(&self, node: u32, index: u32) -> Pte {
        // Acquire: pairs with the Release of `store`, so a child is seen with its entries.
        Pte(self.entry(node, index).load(Ordering::Acquire))
    }

    fn store(&self, node: u32, index: u32, pte: Pte) {
        // Release: pairs with the Acquire of `load`.
        self.entry(node, index).store(pte.0, Ordering::Release);
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

    /// Makes the address space of a slot. Nodes of level 3 stay once they are made: 512 slots
    /// share one.
    pub(crate) fn open(&self, slot: u32) -> Result<Space> {
        let (high, low) = (slot / FANOUT, slot % FANOUT);
        let mut free = lock(&self.free);
        let upper = self.load(ROOT, high);
        let fresh_upper = !upper.is_present();
        let upper = if fresh_upper {
            self.allocate(&mut free)?
        } else {
            upper.block()
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
        self.store(upper, low, Pte::child(node));
        if fresh_upper {
            self.store(ROOT, high, Pte::child(upper));
        }
        Ok(Space(node))
    }

    /// Whether a slot could get an address space of so many blocks.
    pub(crate) fn has_room(&self, slot: u32, blocks: u32) -> bool {
        let upper = u32::from(!self.load(ROOT, slot / FANOUT).is_present());
        self.nodes_in_use() + upper + 1 + blocks.div_ceil(FANOUT) <= self.nodes
    }

    /// Finds the address space of a slot by walking from the root.
    pub(crate) fn space(&self, slot: u32) -> Option<Space> {
        let upper = self.load(ROOT, slot / FANOUT);
        let lower = if upper.is_present() {
            self.load(upper.block(), slot % FANOUT)
        } else {
            upper
        };
        lower.is_present().then(|| Space(lower.block()))
    }

    /// Gives the address space back; every block in it must be unmapped.
    pub(crate) fn close(&self, slot: u32, space: Space) {
        let upper = self.load(ROOT, slot / FANOUT);
        debug_assert_eq!(self.load(upper.block(), slot % FANOUT), Pte::child(space.0));
        self.store(upper.block(), slot % FANOUT, Pte::ABSENT);
        lock(&self.free).reused.push(space.0);
    }

    /// Makes sure that the blocks `from..to` can be mapped without failing. All or nothing.
    /// Blocks below `from` are mapped already.
    pub(crate) fn reserve(&self, space: Space, from: u32, to: u32) -> Result<()> {
        let (first, last) = (from.div_ceil(FANOUT), to.div_ceil(FANOUT));
        if first == last {
            return Ok(());
        }
        let mut free = lock(&self.free);
        for index in first..last {
            if self.load(space.0, index).is_present() {
                continue;
            }
            match self.allocate(&mut free) {
                Ok(node) => self.store(space.0, index, Pte::child(node)),
                Err(error) => {
                    drop(free);
                    self.trim(space, from, to);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Undoes [`Table::reserve`] for blocks that were not mapped after all.
    pub(crate) fn trim(&self, space: Space, from: u32, to: u32) {
        let (first, last) = (from.div_ceil(FANOUT), to.div_ceil(FANOUT));
        if first == last {
            return;
        }
        let mut free = lock(&self.free);
        for index in first..last {
            let child = self.load(space.0, index);
            if child.is_present() {
                self.store(space.0, index, Pte::ABSENT);
                free.reused.push(child.block());
            }
        }
    }

    /// Maps blocks from logical block `from` on; [`Table::reserve`] made room.
    pub(crate) fn map(&self, space: Space, from: u32, blocks: &[u32]) {
        let mut rest = blocks;
        let mut at = from;
        while !rest.is_empty() {
            let node = self.load(space.0, at / FANOUT).block();
            let (here, tail) = rest.split_at(rest.len().min((FANOUT - at % FANOUT) as usize));
            for (i, &block) in (at % FANOUT..).zip(here) {
                self.store(node, i, Pte::leaf(block, 0));
            }
            at += here.len() as u32;
            rest = tail;
        }
    }

    /// Replaces the block of one entry, unless it is no longer `old`.
    pub(crate) fn remap(&self, space: Space, index: u32, old: u32, new: u32) -> bool {
        let child = self.load(space.0, index / FANOUT);
        if !child.is_present() {
            return false;
        }
        // AcqRel: Release publishes the new block (pairs with the Acquire of `load`); Acquire sees
        // what the writer of the old entry did.
        self.entry(child.block(), index % FANOUT)
            .compare_exchange(
                Pte::leaf(old, 0).0,
                Pte::leaf(new, 0).0,
                Ordering::AcqRel,
                Ordering::Acquire,
            )
            .is_ok()
    }

    /// Unmaps `from..to`, the end of the address space, and gives back nodes that become empty.
    pub(crate) fn unmap(&self, space: Space, from: u32, to: u32) {
        let mut at = from;
        while at < to {
            let node = self.load(space.0, at / FANOUT).block();
            let end = to.min((at / FANOUT + 1) * FANOUT);
            for i in at..end {
                self.store(node, i % FANOUT, Pte::ABSENT);
            }
            at = end;
        }
        self.trim(space, from, to);
    }

    /// The entry of one logical block.
    pub(crate) fn get(&self, space: Space, index: u32) -> Pte {
        let upper = self.load(space.0, index / FANOUT);
        if upper.is_present() {
            self.load(upper.block(), index % FANOUT)
        } else {
            Pte::ABSENT
        }
    }

    /// Physical block of a logical block that is mapped.
    pub(crate) fn block(&self, space: Space, index: u32) -> u32 {
        let pte = self.get(space, index);
        debug_assert!(pte.is_present(), "logical block {index} is not mapped");
        pte.block()
    }

    /// What maps `from..to`, all mapped, in order, each leaf table visited once.
    pub(crate) fn leaves(
        &self,
        space: Space,
        from: u32,
        to: u32,
    ) -> impl Iterator<Item = Leaf<'_>> {
        let mut at = from;
        std::iter::from_fn(move || {
            if at >= to {
                return None;
            }
            let node = self.load(space.0, at / FANOUT).block();
            let end = to.min((at / FANOUT + 1) * FANOUT);
            let start = node as usize * FANOUT as usize + (at % FANOUT) as usize;
            let leaf = Leaf(&self.entries[start..start + (end - at) as usize]);
            at = end;
            Some(leaf)
        })
    }

    /// Physical blocks of `from..to`, all mapped, each leaf table visited once.
    pub(crate) fn blocks(
        &self,
        space: Space,
        from: u32,
        to: u32,
    ) -> impl Iterator<Item = u32> + '_ {
        self.leaves(space, from, to).flat_map(Leaf::blocks)
    }
}

/// What one leaf table says about consecutive logical blocks, all mapped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Leaf<'a>(&'a [AtomicU64]);

impl<'a> Leaf<'a> {
    /// Blocks that it maps.
    pub(crate) fn len(self) -> usize {
        self.0.len()
    }

    /// Their physical blocks, in order.
    pub(crate) fn blocks(self) -> impl Iterator<Item = u32> + 'a {
        // Acquire: as in `Table::load`.
        (self.0.iter()).map(|entry| Pte(entry.load(Ordering::Acquire)).block())
    }

    /// Every `step`th of them, from `skip` on: the others are not looked at.
    pub(crate) fn every(self, skip: usize, step: usize) -> impl Iterator<Item = u32> + 'a {
        // Acquire: as in `Table::load`.
        (self.0.iter().skip(skip).step_by(step))
            .map(|entry| Pte(entry.load(Ordering::Acquire)).block())
    }

    /// The same in groups of `size`, the last one as long as it is.
    pub(crate) fn groups(self, size: usize) -> impl Iterator<Item = Leaf<'a>> {
        self.0.chunks(size).map(Leaf)
    }

    /// Whether its blocks follow one another, and the first of them.
    pub(crate) fn run(self) -> (u32, bool) {
        let first = self.blocks().next().unwrap_or(0);
        let differ = (0u32..).zip(self.blocks()).fold(0, |differ, (i, block)| {
            differ | (block ^ first.wrapping_add(i))
        });
        (first, differ == 0)
    }

    /// The same, into a row of a table that kernels read, of as many entries.
    pub(crate) fn write_to(self, row: &mut [i32]) {
        // Eight at a time: atomics are not loaded together, but the end is looked for once.
        const AT_ONCE: usize = 8;
        // Acquire: as in `Table::load`.
        let block = |entry: &AtomicU64| Pte(entry.load(Ordering::Acquire)).block() as i32;
        let (eights, mut rows) = (self.0.chunks_exact(AT_ONCE), row.chunks_exact_mut(AT_ONCE));
        let rest = eights.remainder();
        for (entries, row) in eights.zip(&mut rows) {
            for i in 0..AT_ONCE {
                row[i] = block(&entries[i]);
            }
        }
        for (entry, row) in rest.iter().zip(rows.into_remainder()) {
            *row = block(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_around_the_roll_over_of_a_level_is_its_own() {
        let table = Table::new(1200).unwrap();
        let slots = [0, 1, 511, 512];
        let spaces: Vec<_> = slots
            .iter()
            .map(|&slot| table.open(slot).unwrap())
            .collect();
        let indices = [0, 1, 510, 511, 512, 513, 1023, 1024, 65_535];
        for (s, &space) in spaces.iter().enumerate() {
            table.reserve(space, 0, 65_536).unwrap();
            for (i, &index) in indices.iter().enumerate() {
                table.map(space, index, &[(s * 100 + i) as u32]);
            }
        }
        for (s, &space) in spaces.iter().enumerate() {
            assert_eq!(table.space(slots[s]), Some(space));
            for (i, &index) in indices.iter().enumerate() {
                assert_eq!(table.block(space, index), (s * 100 + i) as u32);
            }
            assert!(!table.get(space, 2).is_present());
        }
        assert_eq!(table.space(513), None);
    }

    #[test]
    fn a_reservation_that_fails_gives_its_nodes_back() {
        let table = Table::new(5).unwrap();
        let space = table.open(7).unwrap();
        table.reserve(space, 0, 512).unwrap();
        table.map(space, 0, &(0..512).collect::<Vec<_>>());
        let before = table.nodes_in_use();
        assert!(matches!(
            table.reserve(space, 512, 1537),
            Err(Error::OutOfTables { .. })
        ));
        assert_eq!(table.nodes_in_use(), before);
        table.reserve(space, 512, 1024).unwrap();
        assert!(matches!(table.open(8), Err(Error::OutOfTables { .. })));
    }

    #[test]
    fn nodes_come_back_when_their_last_block_is_unmapped() {
        let table = Table::new(16).unwrap();
        let space = table.open(0).unwrap();
        let before = table.nodes_in_use();
        table.reserve(space, 0, 1025).unwrap();
        table.map(space, 0, &(0..1025).collect::<Vec<_>>());
        assert_eq!(
            table.blocks(space, 500, 520).collect::<Vec<_>>(),
            (500..520).collect::<Vec<_>>()
        );
        assert_eq!(table.blocks(space, 3, 3).count(), 0);
        table.unmap(space, 1024, 1025);
        assert_eq!(table.nodes_in_use(), before + 2);
        table.unmap(space, 513, 1024);
        assert_eq!(table.nodes_in_use(), before + 2);
        table.unmap(space, 0, 513);
        assert_eq!(table.nodes_in_use(), before);
        table.close(0, space);
        assert_eq!(table.nodes_in_use(), before - 1);
    }

    #[test]
    fn a_remap_that_lost_changes_nothing() {
        let table = Table::new(8).unwrap();
        let space = table.open(0).unwrap();
        assert!(!table.remap(space, 0, 1, 2));
        table.reserve(space, 0, 1).unwrap();
        table.map(space, 0, &[4]);
        assert!(!table.remap(space, 0, 3, 9) && table.remap(space, 0, 4, 9));
        assert_eq!(table.block(space, 0), 9);
    }
}
