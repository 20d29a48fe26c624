//! Changing what is mapped: by the one writer of a space.
//!
//! What lives here: mapping, remapping, splitting, promoting and unmapping of pages. What never
//! lives here: the choice of a page size ([`crate::state`], `mapping`).
//!
//! Every change is one store for a reader: an entry of level 1 is replaced, or the entry of level 2
//! above entries that are complete. Splitting and promoting change the size of pages, never the
//! block of an entry.

use super::{Blocks, Loc, Piece, Pte, Space, Table};
use crate::sync::{AtomicU64, Ordering};

impl<const FANOUT: u32, const NEAR: usize> Table<FANOUT, NEAR> {
    /// Maps a page at a logical block where nothing is mapped; [`Table::reserve`] made room. Returns
    /// where its entry stands.
    pub fn map(&self, space: Space, index: u32, block: u32, order: u32) -> Loc {
        let at = space.virtual_of(index);
        debug_assert!(at.is_multiple_of(1 << order) && block.is_multiple_of(1 << order));
        let upper = self.load(space.node, at / FANOUT);
        debug_assert!(upper.is_present() && !upper.is_leaf());
        if order == Self::HUGE {
            let huge = Pte::huge(block, order, upper.node());
            self.store_table(space, at / FANOUT, huge);
            return Self::loc(space.node, at / FANOUT);
        }
        let (node, first) = (upper.node(), at % FANOUT);
        for i in 0..1 << order {
            self.store(node, first + i, Pte::leaf(block + i, order));
        }
        Self::loc(node, first)
    }

    /// Maps what another space of the same offset maps, as it does; returns where the first entry
    /// stands.
    pub(crate) fn map_as(&self, space: Space, piece: Piece<'_>) -> Loc {
        let Piece { page, blocks } = piece;
        if page.order > 0 {
            return self.map(space, page.index, page.block, page.order);
        }
        let at = space.virtual_of(page.index);
        let first = Self::loc(self.load(space.node, at / FANOUT).node(), at % FANOUT);
        let entries = &self.entries[first as usize..];
        // Release, both: as in `store`.
        let store = |(entry, block): (&AtomicU64, u32)| {
            entry.store(Pte::leaf(block, 0).0, Ordering::Release)
        };
        match blocks {
            Blocks::Run(n) => entries
                .iter()
                .zip(page.block..page.block + n)
                .for_each(store),
            Blocks::Each(blocks) => entries.iter().zip(blocks.iter().copied()).for_each(store),
        }
        first
    }

    /// Maps single blocks from a logical block on. `placed` hears of each where its entry stands.
    pub(crate) fn map_each(
        &self,
        space: Space,
        from: u32,
        blocks: &[u32],
        mut placed: impl FnMut(u32, Loc),
    ) {
        let mut rest = blocks;
        let mut at = space.virtual_of(from);
        while !rest.is_empty() {
            let node = self.load(space.node, at / FANOUT).node();
            let (here, tail) = rest.split_at(rest.len().min((FANOUT - at % FANOUT) as usize));
            let start = Self::loc(node, at % FANOUT);
            let entries = &self.entries[start as usize..start as usize + here.len()];
            for ((entry, &block), loc) in entries.iter().zip(here).zip(start..) {
                // Release: as in `store`.
                entry.store(Pte::leaf(block, 0).0, Ordering::Release);
                placed(block, loc);
            }
            at += here.len() as u32;
            rest = tail;
        }
    }

    /// Replaces the block of one entry that is a page of its own, unless it is no longer `old`.
    pub fn remap(&self, space: Space, index: u32, old: u32, new: u32) -> bool {
        let at = space.virtual_of(index);
        let child = self.load(space.node, at / FANOUT);
        if !child.is_present() || child.is_leaf() {
            return false;
        }
        // AcqRel: Release publishes the new block (pairs with the Acquire of `load`); Acquire sees
        // what the writer of the old entry did.
        self.entry(Self::loc(child.node(), at % FANOUT))
            .compare_exchange(
                Pte::leaf(old, 0).0,
                Pte::leaf(new, 0).0,
                Ordering::AcqRel,
                Ordering::Acquire,
            )
            .is_ok()
    }

    /// Cuts the page at a logical block into pages of a smaller order.
    pub fn split(&self, space: Space, index: u32, order: u32) {
        let page = self.page(space, index);
        debug_assert!(order < page.order);
        let at = space.virtual_of(page.index);
        let (node, first, n) = if page.order == Self::HUGE {
            let node = self.load(space.node, at / FANOUT).node();
            (node, 0, FANOUT)
        } else {
            let node = self.load(space.node, at / FANOUT).node();
            (node, at % FANOUT, 1 << page.order)
        };
        for i in 0..n {
            self.store(node, first + i, Pte::leaf(page.block + i, order));
        }
        if page.order == Self::HUGE {
            // Another life: a reader that looked at the node before it became a huge page's looks
            // again.
            let child = self.begin(node, space.slot, Some(at / FANOUT));
            self.store_table(space, at / FANOUT, child);
        }
    }

    /// Makes one page of smaller ones that are consecutive and aligned. Returns where its entry
    /// stands.
    pub fn promote(&self, space: Space, index: u32, order: u32) -> Loc {
        let at = space.virtual_of(index);
        let block = self.block(space, index);
        debug_assert!(at.is_multiple_of(1 << order) && block.is_multiple_of(1 << order));
        let node = self.load(space.node, at / FANOUT).node();
        if order == Self::HUGE {
            self.store_table(space, at / FANOUT, Pte::huge(block, order, node));
            // Behind the store: a reader that finds an entry gone looks at level 2 again.
            for i in 0..FANOUT {
                self.store(node, i, Pte::ABSENT);
            }
            return Self::loc(space.node, at / FANOUT);
        }
        for i in 0..1 << order {
            self.store(node, at % FANOUT + i, Pte::leaf(block + i, order));
        }
        Self::loc(node, at % FANOUT)
    }

    /// Unmaps `from..to`, whole pages that reach to one end of what is mapped, and gives back tables
    /// that become empty: `kept` says what is still mapped then.
    pub fn unmap(&self, space: Space, from: u32, to: u32, kept: std::ops::Range<u32>) {
        let (mut at, end) = (space.virtual_of(from), space.virtual_of(to));
        let (first, last) = (at / FANOUT, end.div_ceil(FANOUT));
        while at < end {
            let stop = end.min((at / FANOUT + 1) * FANOUT);
            let upper = self.load(space.node, at / FANOUT);
            if upper.is_leaf() {
                debug_assert!(at.is_multiple_of(FANOUT) && stop - at == FANOUT);
                // A table of level 1 without entries, until it is given back below.
                let node = upper.node();
                self.store_table(space, at / FANOUT, Pte::child(node, 0));
            } else {
                for i in at..stop {
                    self.store(upper.node(), i % FANOUT, Pte::ABSENT);
                }
            }
            at = stop;
        }
        if kept.is_empty() {
            return self.give_tables(space, first..last);
        }
        let busy =
            space.virtual_of(kept.start) / FANOUT..space.virtual_of(kept.end).div_ceil(FANOUT);
        self.give_tables(space, first..last.min(busy.start).max(first));
        self.give_tables(space, first.max(busy.end).min(last)..last);
    }
}
