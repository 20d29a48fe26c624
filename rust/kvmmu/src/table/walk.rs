//! Reading the page table.
//!
//! What lives here: walks by the writer of a space (or under its lock), and [`Table::look`], which
//! needs no lock at all. What never lives here: changes.

use std::ops::Range;

use super::{Loc, Pte, ROOT, Space, Table};
use crate::sync::Ordering;

/// One page of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Page {
    /// Its first logical block.
    pub(crate) index: u32,
    /// Its first physical block.
    pub(crate) block: u32,
    /// It has `2^order` blocks.
    pub(crate) order: u32,
    /// Where its (first) entry stands.
    pub(crate) loc: Loc,
}

impl Page {
    /// Number among the pages of its order: what the reverse map calls it by.
    pub(crate) fn number(self) -> u32 {
        self.block >> self.order
    }

    /// Its physical blocks.
    pub(crate) fn blocks(self) -> Range<u32> {
        self.block..self.block + (1 << self.order)
    }
}

impl<const FANOUT: u32> Table<FANOUT> {
    /// The entry of one logical block, as if it were of level 1: it names the block itself.
    pub(crate) fn get(&self, space: Space, index: u32) -> Pte {
        let at = space.virtual_of(index);
        let upper = self.load(space.node, at / FANOUT);
        if !upper.is_present() {
            Pte::ABSENT
        } else if upper.is_leaf() {
            Pte::leaf(upper.block() + at % FANOUT, Self::HUGE)
        } else {
            self.load(upper.node(), at % FANOUT)
        }
    }

    /// Physical block of a logical block that is mapped.
    pub(crate) fn block(&self, space: Space, index: u32) -> u32 {
        let pte = self.get(space, index);
        debug_assert!(pte.is_present(), "logical block {index} is not mapped");
        pte.block()
    }

    /// The page that a logical block lies in; it is mapped.
    pub(crate) fn page(&self, space: Space, index: u32) -> Page {
        let at = space.virtual_of(index);
        let upper = self.load(space.node, at / FANOUT);
        debug_assert!(upper.is_present(), "logical block {index} is not mapped");
        let (pte, node, entry) = if upper.is_leaf() {
            (upper, space.node, at / FANOUT)
        } else {
            let pte = self.load(upper.node(), at % FANOUT);
            (pte, upper.node(), at % FANOUT & !((1 << pte.order()) - 1))
        };
        let inside = at & ((1 << pte.order()) - 1);
        // (A page may begin before logical block 0 never: pages lie within what is mapped.)
        Page {
            index: index - inside,
            block: if upper.is_leaf() {
                pte.block()
            } else {
                pte.block() - inside
            },
            order: pte.order(),
            loc: Self::loc(node, entry),
        }
    }

    /// The pages that hold the mapped blocks `from..to`, in order; the first and the last may reach
    /// beyond.
    pub(crate) fn pages(
        &self,
        space: Space,
        from: u32,
        to: u32,
    ) -> impl Iterator<Item = Page> + '_ {
        let mut at = from;
        std::iter::from_fn(move || {
            (at < to).then(|| {
                let page = self.page(space, at);
                at = page.index + (1 << page.order);
                page
            })
        })
    }

    /// Appends the physical blocks of `from..to`, all mapped.
    pub(crate) fn append_blocks(&self, space: Space, from: u32, to: u32, out: &mut Vec<u32>) {
        out.reserve((to - from) as usize);
        let (mut at, end) = (space.virtual_of(from), space.virtual_of(to));
        while at < end {
            let stop = end.min((at / FANOUT + 1) * FANOUT);
            let upper = self.load(space.node, at / FANOUT);
            let (low, n) = (at % FANOUT, stop - at);
            if upper.is_leaf() {
                let first = upper.block() + low;
                out.extend(first..first + n);
            } else {
                let start = Self::loc(upper.node(), low) as usize;
                let entries = &self.entries[start..start + n as usize];
                // Acquire: as in `load`.
                out.extend(
                    (entries.iter()).map(|entry| Pte(entry.load(Ordering::Acquire)).block()),
                );
            }
            at = stop;
        }
    }

    /// Physical blocks of `from..to`, all mapped.
    pub(crate) fn blocks(&self, space: Space, from: u32, to: u32) -> Vec<u32> {
        let mut out = Vec::new();
        self.append_blocks(space, from, to, &mut out);
        out
    }

    /// Physical block of a logical block of a slot, without any lock, while anybody changes the
    /// table. `None`: it is not mapped, or the slot is not open.
    ///
    /// Entries are read from the top down, then those that name nodes a second time. One that is
    /// unchanged names the same life of the same node as at the first look, so that what was read
    /// in the node between the looks was its own: the answer was true when the last entry was read.
    /// Lock-free: another look is needed only because somebody changed something.
    pub fn look(&self, slot: u32, index: u32) -> Option<u32> {
        let upper = self.load(ROOT, slot / FANOUT);
        if !upper.is_present() {
            return None; // nodes of level 3 stay
        }
        let low = slot % FANOUT;
        loop {
            let space = self.load(upper.node(), low);
            if !space.is_present() {
                return None;
            }
            let at = index + space.offset();
            if at >= FANOUT * FANOUT {
                return None;
            }
            let table = self.load(space.node(), at / FANOUT);
            let found = if !table.is_present() {
                None
            } else if table.is_leaf() {
                Some(table.block() + at % FANOUT)
            } else {
                let pte = self.load(table.node(), at % FANOUT);
                if self.load(space.node(), at / FANOUT) != table {
                    continue;
                }
                pte.is_present().then(|| pte.block())
            };
            if self.load(upper.node(), low) == space {
                return found;
            }
        }
    }
}
