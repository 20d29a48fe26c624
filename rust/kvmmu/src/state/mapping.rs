//! Mappings: the page table and the reverse map, changed together.
//!
//! What lives here: which page sizes a range of blocks is mapped in, splitting, promoting, and the
//! counts that a sequence keeps of its pages and runs. What never lives here: where blocks come from
//! and what becomes of them.
//!
//! A page of order k is 2^k consecutive blocks, aligned physically and virtually. References are
//! counted by block all the same: a word is half a byte of work when a page is mapped (two words are
//! one addition), and a block of a page can be shared, published, pinned and moved by itself without
//! a split of anybody else's mapping.

use super::{Mmu, NONE, PageOf, Sequence, Shared};
use crate::stats::count;
use crate::table::{Loc, Page, Table};

const HUGE: u32 = Table::<512>::HUGE;

impl Mmu {
    /// Page orders that a sequence of so many tokens may use, a bit for each.
    pub(crate) fn orders_for(&self, tokens: u32) -> u32 {
        let orders = self.config.page_orders.bits();
        if tokens < self.config.medium_from {
            1
        } else if tokens <= self.config.huge_from {
            orders & !(1 << HUGE)
        } else {
            orders
        }
    }

    /// Maps blocks that nobody else knows behind the end.
    pub(crate) fn map_private(
        &self,
        sequence: &mut Sequence,
        from: u32,
        blocks: &[u32],
        orders: u32,
    ) {
        self.map_blocks(sequence, from, blocks, orders, |page, loc| {
            self.reverse.set_only(page, loc);
        });
    }

    /// Maps blocks that others may map too behind the end; their words count it already.
    pub(crate) fn map_shared(
        &self,
        shared: &mut Shared,
        sequence: &mut Sequence,
        from: u32,
        blocks: &[u32],
        orders: u32,
    ) {
        self.map_blocks(sequence, from, blocks, orders, |page, loc| {
            self.reverse.add(&mut shared.chains, page, loc);
        });
    }

    fn map_blocks(
        &self,
        sequence: &mut Sequence,
        from: u32,
        blocks: &[u32],
        orders: u32,
        mut note: impl FnMut(PageOf, Loc),
    ) {
        sequence.extended_by(blocks);
        let space = sequence.space;
        let mut small = 0;
        if orders != 1 {
            let mut at = 0;
            while at < blocks.len() {
                let order = largest_page(space.virtual_of(from + at as u32), &blocks[at..], orders);
                if order == 0 {
                    at += 1;
                    continue;
                }
                self.map_small(sequence, from + small as u32, &blocks[small..at], &mut note);
                let block = blocks[at];
                let loc = self.table.map(space, from + at as u32, block, order);
                note((order, block >> order), loc);
                sequence.pages[order as usize] += 1;
                at += 1 << order;
                small = at;
            }
        }
        self.map_small(sequence, from + small as u32, &blocks[small..], &mut note);
    }

    fn map_small(
        &self,
        sequence: &mut Sequence,
        from: u32,
        blocks: &[u32],
        note: &mut impl FnMut(PageOf, Loc),
    ) {
        sequence.pages[0] += blocks.len() as u32;
        let placed = |block, loc| note((0, block), loc);
        self.table.map_each(sequence.space, from, blocks, placed);
    }

    /// Cuts pages of a sequence until one begins at a logical block that is mapped.
    pub(crate) fn cut_before(&self, shared: &mut Shared, sequence: &mut Sequence, index: u32) {
        self.cut_until(shared, sequence, index, |page| page.index == index);
    }

    /// Cuts pages of a sequence until a logical block is a page of its own.
    fn cut_out(&self, shared: &mut Shared, sequence: &mut Sequence, index: u32) {
        self.cut_until(shared, sequence, index, |page| page.order == 0);
    }

    /// Cuts the page that a logical block lies in until it is as wanted.
    fn cut_until(
        &self,
        shared: &mut Shared,
        sequence: &mut Sequence,
        index: u32,
        wanted: impl Fn(&Page) -> bool,
    ) {
        loop {
            let page = self.table.page(sequence.space, index);
            if wanted(&page) {
                return;
            }
            self.split(shared, sequence, page);
        }
    }

    /// Cuts a page into those of the next smaller order.
    fn split(&self, shared: &mut Shared, sequence: &mut Sequence, page: Page) {
        let smaller = self.config.page_orders.bits() & ((1 << page.order) - 1);
        let order = smaller.ilog2();
        let chains = &mut shared.chains;
        self.reverse
            .remove(chains, (page.order, page.number()), page.loc);
        self.table.split(sequence.space, page.index, order);
        for i in 0..1 << (page.order - order) {
            let part = self.table.page(sequence.space, page.index + (i << order));
            self.reverse.add(chains, (order, part.number()), part.loc);
        }
        sequence.pages[page.order as usize] -= 1;
        sequence.pages[order as usize] += 1 << (page.order - order);
        count(&self.stats.splits, 1);
    }

    /// Makes larger pages of those that have become consecutive and aligned, as far as they end in
    /// the logical blocks `from..to`.
    pub(crate) fn promote(
        &self,
        shared: &mut Shared,
        sequence: &mut Sequence,
        from: u32,
        to: u32,
        orders: u32,
    ) {
        let space = sequence.space;
        let first = space.virtual_of(sequence.first);
        let (from, to) = (space.virtual_of(from), space.virtual_of(to));
        let mut orders = orders & !1;
        while orders != 0 {
            let order = orders.trailing_zeros();
            orders &= orders - 1;
            let size = 1 << order;
            let mut end = (from / size + 1) * size;
            while end <= to {
                if end - size >= first {
                    self.promote_one(shared, sequence, space.logical_of(end - size), order);
                }
                end += size;
            }
        }
    }

    /// Makes larger pages around a logical block, of `mapped` ones, as far as its neighbours have become
    /// consecutive and aligned.
    pub(crate) fn promote_around(
        &self,
        shared: &mut Shared,
        sequence: &mut Sequence,
        (index, mapped): (u32, u32),
        orders: u32,
    ) {
        let space = sequence.space;
        let (first, end) = (space.virtual_of(sequence.first), space.virtual_of(mapped));
        let at = space.virtual_of(index);
        for order in (1..=HUGE).filter(|&order| orders >> order & 1 != 0) {
            let page = at >> order << order;
            if page >= first && page + (1 << order) <= end {
                self.promote_one(shared, sequence, space.logical_of(page), order);
            }
        }
    }

    fn promote_one(&self, shared: &mut Shared, sequence: &mut Sequence, index: u32, order: u32) {
        let (space, size) = (sequence.space, 1 << order);
        let first = self.table.block(space, index);
        let last = self.table.block(space, index + size - 1);
        if !first.is_multiple_of(size) || last != first + size - 1 {
            return;
        }
        let pages: Vec<Page> = self.table.pages(space, index, index + size).collect();
        let follows = |page: &Page| page.block == first + (page.index - index);
        if pages[0].order >= order || !pages.iter().all(follows) {
            return;
        }
        for page in &pages {
            let of = (page.order, page.number());
            self.reverse.remove(&mut shared.chains, of, page.loc);
            sequence.pages[page.order as usize] -= 1;
        }
        let loc = self.table.promote(space, index, order);
        self.reverse
            .add(&mut shared.chains, (order, first >> order), loc);
        sequence.pages[order as usize] += 1;
        count(&self.stats.promotions, 1);
    }

    /// Changes the block of one entry of a sequence, and what is known of its runs and its last
    /// block.
    pub(crate) fn remap(
        &self,
        shared: &mut Shared,
        sequence: &mut Sequence,
        index: u32,
        (old, new): (u32, u32),
    ) {
        self.cut_out(shared, sequence, index);
        let mapped = self.blocks_for(sequence.tokens);
        let before = (index > sequence.first).then(|| self.table.block(sequence.space, index - 1));
        let after = (index + 1 < mapped).then(|| self.table.block(sequence.space, index + 1));
        let breaks = |block: u32| {
            u32::from(before.is_some_and(|before| before + 1 != block))
                + u32::from(after.is_some_and(|after| block + 1 != after))
        };
        sequence.runs = sequence.runs + breaks(new) - breaks(old);
        let done = self.table.remap(sequence.space, index, old, new);
        assert!(done, "entry {index} no longer maps block {old}");
        if after.is_none() {
            sequence.last = new;
        }
        sequence.version = sequence.version.wrapping_add(1);
    }

    /// One of the pages that a block is mapped by, the largest, and where its (first) entry stands.
    pub(crate) fn first_page(&self, shared: &Shared, block: u32) -> Option<(PageOf, Loc)> {
        self.reverse
            .pages_of(block)
            .find_map(|page| Some((page, self.reverse.first(&shared.chains, page)?)))
    }

    /// Every place where a block is mapped: (slot, virtual block).
    pub(crate) fn mappings(&self, shared: &Shared, block: u32) -> Vec<(u32, u32)> {
        let mut entries = Vec::new();
        let mut found = Vec::new();
        for (order, page) in self.reverse.pages_of(block) {
            entries.clear();
            self.reverse
                .entries(&shared.chains, (order, page), &mut entries);
            let inside = block - (page << order);
            found.extend(entries.iter().map(|&loc| {
                let (slot, at) = self.table.whose(loc);
                (slot, at + inside)
            }));
        }
        found
    }
}

/// The largest order of a page that the first of these blocks begin, at a virtual block.
fn largest_page(at: u32, blocks: &[u32], orders: u32) -> u32 {
    let first = blocks[0];
    let most = (at.trailing_zeros().min(first.trailing_zeros())).min(blocks.len().ilog2());
    let mut orders = orders & ((2 << most.min(HUGE)) - 1) & !1;
    while orders != 0 {
        let order = orders.ilog2();
        let page = &blocks[..1 << order];
        // Folded, so that it is vectorised.
        let differ =
            |differ, (at, &block): (usize, &u32)| differ | (block ^ first.wrapping_add(at as u32));
        if page[page.len() - 1] == first + page.len() as u32 - 1
            && page.iter().enumerate().fold(0, differ) == 0
        {
            return order;
        }
        orders &= !(1 << order);
    }
    0
}

/// Runs among blocks, and the last, seen behind one that came before (`NONE`: nothing did).
pub(crate) fn runs_behind(before: u32, blocks: &[u32]) -> u32 {
    let Some(&first) = blocks.first() else {
        return 0;
    };
    let begins = |(&before, &block): (&u32, &u32)| u32::from(block != before.wrapping_add(1));
    let others: u32 = blocks.iter().zip(&blocks[1..]).map(begins).sum();
    u32::from(before == NONE || first != before + 1) + others
}
