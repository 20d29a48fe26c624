//! Reading the page table.
//!
//! What lives here: walks by the writer of a space (or under its lock), and [`Table::look`], which
//! needs no lock at all. What never lives here: changes.

use std::ops::Range;

use super::{Loc, Pte, Space, Table};
use crate::sync::{AtomicU64, Ordering};

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
}

/// A part of a sequence whose entries follow each other: one larger page, or single blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece<'a> {
    /// The first page.
    pub(crate) page: Page,
    /// Where its blocks lie.
    pub(crate) blocks: Blocks<'a>,
}

impl Piece<'_> {
    /// Numbers of its pages, if its blocks are consecutive.
    pub(crate) fn numbers(&self) -> Range<u32> {
        let first = self.page.number();
        match self.blocks {
            Blocks::Run(n) => first..first + (n >> self.page.order),
            Blocks::Each(_) => first..first,
        }
    }
}

/// The physical blocks of a [`Piece`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocks<'a> {
    /// They are consecutive: from the first one on.
    Run(u32),
    /// They lie anywhere.
    Each(&'a [u32]),
}

/// What maps a range of a sequence, in order. (A buffer, to be used again.)
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pieces: Vec<Part>,
    blocks: Vec<u32>,
}

#[derive(Debug)]
struct Part {
    page: Page,
    /// Blocks.
    n: u32,
    /// Where they begin among those of all pieces; none: they are consecutive.
    at: Option<u32>,
}

impl Pieces {
    /// Each piece, from either end.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = Piece<'_>> {
        self.pieces.iter().map(|&Part { page, n, at }| {
            let blocks = match at {
                None => Blocks::Run(n),
                Some(at) => Blocks::Each(&self.blocks[at as usize..(at + n) as usize]),
            };
            Piece { page, blocks }
        })
    }

    /// Forgets all of them and keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
        self.blocks.clear();
    }

    fn page(&mut self, page: Page, n: u32) {
        self.pieces.push(Part { page, n, at: None });
    }

    /// The last `n` blocks are single blocks anywhere, in the table whose entries begin at `table`;
    /// with those that came before in it.
    fn list(&mut self, page: Page, n: u32, table: Loc) {
        match self.pieces.last_mut() {
            Some(last) if last.at.is_some() && page.loc > table => last.n += n,
            _ => {
                let at = Some(self.blocks.len() as u32 - n);
                self.pieces.push(Part { page, n, at });
            }
        }
    }

    /// Single blocks that are consecutive, in the table whose entries begin at `table`; with those
    /// that came before in it, if they follow them.
    fn run(&mut self, page: Page, n: u32, table: Loc) {
        if page.loc > table
            && let Some(last) = self.pieces.last_mut()
            && last.at.is_none()
            && last.page.order == 0
            && last.page.block + last.n == page.block
            && last.page.loc + last.n == page.loc
        {
            last.n += n;
            return;
        }
        self.page(page, n);
    }
}

impl<const FANOUT: u32, const NEAR: usize> Table<FANOUT, NEAR> {
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
            (pte, upper.node(), (at % FANOUT) & !((1 << pte.order()) - 1))
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

    /// What maps `from..to`, all mapped, appended to `pieces`: single blocks as many at once as there
    /// can be. Entries are looked at in groups, and what is not a run as a whole is a list: a branch
    /// at each border between runs would cost more where blocks lie scattered than it saves.
    pub(crate) fn pieces(&self, space: Space, from: u32, to: u32, pieces: &mut Pieces) {
        /// Entries that are looked at together.
        const GROUP: u32 = 64;
        let mut at = from;
        while at < to {
            let inside = space.virtual_of(at) % FANOUT;
            let upper = self.load(space.node, space.virtual_of(at) / FANOUT);
            if upper.is_leaf() {
                let page = self.page(space, at);
                at = page.index + FANOUT;
                pieces.page(page, FANOUT);
                continue;
            }
            let end = at + (FANOUT - inside).min(to - at);
            let table = Self::loc(upper.node(), 0);
            while at < end {
                let loc = table + space.virtual_of(at) % FANOUT;
                let n = (GROUP - loc % GROUP).min(end - at);
                let entries = &self.entries[loc as usize..(loc + n) as usize];
                // Acquire, here and below: as in `load`.
                let load = |entry: &AtomicU64| Pte(entry.load(Ordering::Acquire));
                let first = load(&entries[0]).block();
                let page = Page {
                    index: at,
                    block: first,
                    order: 0,
                    loc,
                };
                // Nearly all that is no run shows it at its end.
                let last = load(&entries[entries.len() - 1]);
                if last == Pte::leaf(first.wrapping_add(n - 1), 0) {
                    let (mut differ, mut expected) = (0, Pte::leaf(first, 0));
                    for entry in entries {
                        differ |= load(entry).0 ^ expected.0;
                        expected = expected.next();
                    }
                    if differ == 0 {
                        pieces.run(page, n, table);
                        at += n;
                        continue;
                    }
                }
                let mut orders = 0;
                let blocks = entries.iter().map(|entry| {
                    let pte = load(entry);
                    orders |= pte.order();
                    pte.block()
                });
                let start = pieces.blocks.len();
                pieces.blocks.extend(blocks);
                if orders != 0 {
                    pieces.blocks.truncate(start);
                    let behind = at + n;
                    while at < behind {
                        let page = self.page(space, at);
                        at = page.index + (1 << page.order);
                        match page.order {
                            0 => pieces.run(page, 1, table),
                            order => pieces.page(page, 1 << order),
                        }
                    }
                    continue;
                }
                pieces.list(page, n, table);
                at += n;
            }
        }
    }

    /// What maps `from..to`, all mapped, in order, each table visited once.
    pub(crate) fn leaves(
        &self,
        space: Space,
        from: u32,
        to: u32,
    ) -> impl Iterator<Item = Leaf<'_>> {
        let (mut at, end) = (space.virtual_of(from), space.virtual_of(to));
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let stop = end.min((at / FANOUT + 1) * FANOUT);
            let upper = self.load(space.node, at / FANOUT);
            let leaf = if upper.is_leaf() {
                let first = upper.block() + at % FANOUT;
                Leaf::Run(first..first + stop - at)
            } else {
                let start = Self::loc(upper.node(), at % FANOUT) as usize;
                Leaf::Entries(&self.entries[start..start + (stop - at) as usize])
            };
            at = stop;
            Some(leaf)
        })
    }

    /// Appends the physical blocks of `from..to`, all mapped.
    pub(crate) fn append_blocks(&self, space: Space, from: u32, to: u32, out: &mut Vec<u32>) {
        out.reserve(to.saturating_sub(from) as usize);
        for leaf in self.leaves(space, from, to) {
            match leaf {
                Leaf::Run(run) => out.extend(run),
                Leaf::Entries(entries) => out.extend(entries.iter().map(block)),
            }
        }
    }

    /// Physical blocks of `from..to`, all mapped.
    pub(crate) fn blocks(&self, space: Space, from: u32, to: u32) -> Vec<u32> {
        let mut out = Vec::new();
        self.append_blocks(space, from, to, &mut out);
        out
    }

    /// What the entries next to one of level 1 say, which maps `block`: the block mapped before it; how
    /// many of the `most` from it on map consecutive blocks; whether nothing is mapped behind these.
    /// `None`: they lie in other nodes.
    pub(crate) fn around(
        &self,
        loc: Loc,
        block: u32,
        most: u32,
    ) -> Option<(Option<u32>, u32, bool)> {
        let node = loc / FANOUT;
        let mapped = |at: u32| {
            let pte = self.load(node, at);
            pte.is_present().then(|| pte.block())
        };
        let at = loc % FANOUT;
        let before = mapped(at.checked_sub(1)?);
        let mut len = 1;
        while at + len < FANOUT {
            let next = mapped(at + len);
            if len == most || next != Some(block + len) {
                return Some((before, len, next.is_none()));
            }
            len += 1;
        }
        None
    }

    /// Whether a slot has a sequence of this generation now. No lock.
    pub fn is_open(&self, slot: u32, generation: u64) -> bool {
        let way = self.ways.of(slot);
        way.is_some_and(|way| way.life().generation() == generation)
    }

    /// Physical block of a logical block of the sequence of this generation (from 1 on) in a slot,
    /// without any lock, while anybody changes the table. `None`: it is not mapped, or the sequence is
    /// not open.
    ///
    /// What stands above the table of level 1 is read in the line of the slot, or behind that in the
    /// node of level 2; then the entry of level 1; then the entry that names the table once more. If
    /// that is unchanged it names the same life of the same node as at the first look, so that what was
    /// read in the node between the looks was its own: the answer was true when the last entry was read.
    /// The generation, too, is looked at again: a slot is reused, and so are its line and its nodes.
    /// Lock-free: another round is needed only because somebody changed something.
    pub fn look(&self, (slot, generation): (u32, u64), index: u32) -> Option<u32> {
        let way = self.ways.of(slot)?;
        loop {
            let life = way.life();
            if life.generation() != generation {
                return None;
            }
            let at = index.checked_add(life.offset())?;
            if at >= FANOUT * FANOUT {
                return None;
            }
            let above = match way.near(at / FANOUT) {
                Some(copy) => copy,
                None => {
                    let space = way.space();
                    self.entry(Self::loc(space.node(), at / FANOUT))
                }
            };
            // Acquire, both looks: as in `load`.
            let table = Pte(above.load(Ordering::Acquire));
            let found = if !table.is_present() {
                None
            } else if table.is_leaf() {
                Some(table.block() + at % FANOUT)
            } else {
                let pte = self.load(table.node(), at % FANOUT);
                if Pte(above.load(Ordering::Acquire)) != table {
                    continue;
                }
                pte.is_present().then(|| pte.block())
            };
            // Still the same sequence: then the entry was its own.
            if way.life() == life {
                return found;
            }
        }
    }

    /// Whether a line says what the nodes say of a space that is at rest, for checking.
    pub(crate) fn way_agrees(&self, space: Space, generation: u64) -> bool {
        let Some(way) = self.ways.of(space.slot) else {
            return false;
        };
        let life = way.life();
        let near = (0..).map_while(|index| Some((index, way.near(index)?)));
        let as_in_node = |(index, copy): (u32, &AtomicU64)| {
            Pte(copy.load(Ordering::Acquire)) == self.load(space.node, index)
        };
        (life.generation(), life.offset()) == (generation, space.offset)
            && way.space().node() == space.node
            && near.take(FANOUT as usize).all(as_in_node)
    }
}

fn block(entry: &AtomicU64) -> u32 {
    // Acquire: as in `Table::load`.
    Pte(entry.load(Ordering::Acquire)).block()
}

/// What one entry of level 2 says about consecutive logical blocks, all mapped.
#[derive(Debug, Clone)]
pub(crate) enum Leaf<'a> {
    /// They lie in one huge page.
    Run(Range<u32>),
    /// They are these entries of level 1.
    Entries(&'a [AtomicU64]),
}

impl<'a> Leaf<'a> {
    /// Blocks that it maps.
    pub(crate) fn len(&self) -> usize {
        match self {
            Leaf::Run(run) => run.len(),
            Leaf::Entries(entries) => entries.len(),
        }
    }

    /// Their physical blocks, in order.
    pub(crate) fn blocks(self) -> impl Iterator<Item = u32> + 'a {
        self.every(0, 1)
    }

    /// Every `step`th of them, from `skip` on: the others are not looked at.
    pub(crate) fn every(self, skip: usize, step: usize) -> impl Iterator<Item = u32> + 'a {
        let (run, entries) = match self {
            Leaf::Run(run) => (run, &[][..]),
            Leaf::Entries(entries) => (0..0, entries),
        };
        let run = run.skip(skip).step_by(step);
        run.chain(entries.iter().skip(skip).step_by(step).map(block))
    }

    /// The same in groups of `size`, the last one as long as it is.
    pub(crate) fn groups(self, size: usize) -> impl Iterator<Item = Leaf<'a>> {
        let (run, entries) = match self {
            Leaf::Run(run) => (run, &[][..]),
            Leaf::Entries(entries) => (0..0, entries),
        };
        let end = run.end;
        let cut = move |first: u32| Leaf::Run(first..end.min(first + size as u32));
        let runs = run.step_by(size).map(cut);
        runs.chain(entries.chunks(size).map(Leaf::Entries))
    }

    /// The first of its blocks, and whether the others follow it.
    pub(crate) fn run(&self) -> (u32, bool) {
        match self {
            Leaf::Run(run) => (run.start, true),
            Leaf::Entries(entries) => {
                let first = entries.first().map_or(0, block);
                let differ = (0u32..).zip(*entries).fold(0, |differ, (i, entry)| {
                    differ | (block(entry) ^ first.wrapping_add(i))
                });
                (first, differ == 0)
            }
        }
    }

    /// The same, into a row of a table that kernels read, of as many entries.
    pub(crate) fn write_to(self, row: &mut [i32]) {
        let entries = match self {
            Leaf::Run(run) => {
                for (entry, block) in row.iter_mut().zip(run) {
                    *entry = block as i32;
                }
                return;
            }
            Leaf::Entries(entries) => entries,
        };
        // Eight at a time: atomics are not loaded together, but the end is looked for once.
        const AT_ONCE: usize = 8;
        let (eights, mut rows) = (entries.chunks_exact(AT_ONCE), row.chunks_exact_mut(AT_ONCE));
        let rest = eights.remainder();
        for (entries, row) in eights.zip(&mut rows) {
            for i in 0..AT_ONCE {
                row[i] = block(&entries[i]) as i32;
            }
        }
        for (entry, row) in rest.iter().zip(rows.into_remainder()) {
            *row = block(entry) as i32;
        }
    }
}
