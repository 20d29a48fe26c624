//! The reverse map: block to the page-table entries that map it.
//!
//! One list a page of each configured order: the entries that map that page. A block is mapped by
//! the entries of its own list (order 0), and by those of every larger page that it lies in.
//!
//! ```text
//!  word of a page    0                  no entry
//!                    loc + 1            exactly one: where it stands in the page table
//!                    bit 31 | line      several: a chain of lines of up to 14 each
//!                    bits 31, 30 | pair two, which never were more: a line would be 64 bytes
//! ```
//!
//! The word of a page whose blocks are private is stored by its sequence alone; as soon as a block
//! of it may be known to a second thread (published or shared) its words and chains change only
//! under the shared lock.

use crate::error::Result;
use crate::sync::{AtomicU32, Ordering, zeroed_u32};
use crate::table::Loc;

const NONE: u32 = u32::MAX;
const CHAIN: u32 = 1 << 31;
const PAIR: u32 = 1 << 30;
const LINE: usize = 14;
/// Orders that there may be.
pub(crate) const ORDERS: usize = 10;

/// One cache line of entries.
#[derive(Debug, Clone, Copy)]
struct Line {
    locs: [Loc; LINE],
    len: u32,
    next: u32,
}

/// Chains of the pages that are mapped more than once; behind the shared lock.
#[derive(Debug, Default)]
pub(crate) struct Chains {
    lines: Vec<Line>,
    free: Vec<u32>,
    pairs: Vec<[Loc; 2]>,
    free_pairs: Vec<u32>,
}

impl Chains {
    fn allocate(&mut self, first: Loc, next: u32) -> u32 {
        let mut line = Line {
            locs: [0; LINE],
            len: 1,
            next,
        };
        line.locs[0] = first;
        match self.free.pop() {
            Some(at) => {
                self.lines[at as usize] = line;
                at
            }
            None => {
                self.lines.push(line);
                self.lines.len() as u32 - 1
            }
        }
    }

    /// The word of a page that these two map.
    fn pair(&mut self, both: [Loc; 2]) -> u32 {
        let at = match self.free_pairs.pop() {
            Some(at) => {
                self.pairs[at as usize] = both;
                at
            }
            None => {
                self.pairs.push(both);
                self.pairs.len() as u32 - 1
            }
        };
        CHAIN | PAIR | at
    }

    /// The pair that a word names, if it names one.
    fn pair_of(&self, word: u32) -> Option<(u32, [Loc; 2])> {
        let at = word & !(CHAIN | PAIR);
        (word & (CHAIN | PAIR) == CHAIN | PAIR).then(|| (at, self.pairs[at as usize]))
    }

    fn each(&self, head: u32) -> impl Iterator<Item = Loc> + '_ {
        let line = |at: u32| self.lines.get(at as usize);
        std::iter::successors(line(head), move |at| line(at.next))
            .flat_map(|line| line.locs[..line.len as usize].iter().copied())
    }
}

/// A page of one of the configured orders: order and number (first block divided by its size).
pub(crate) type PageOf = (u32, u32);

/// The words of every page of every configured order.
#[derive(Debug)]
pub(crate) struct Reverse {
    words: [Box<[AtomicU32]>; ORDERS],
}

impl Reverse {
    /// `orders`: a bit for each.
    pub(crate) fn new(num_blocks: u32, orders: u32) -> Result<Self> {
        let mut words: [Box<[AtomicU32]>; ORDERS] = Default::default();
        for (order, words) in words.iter_mut().enumerate() {
            if orders >> order & 1 != 0 {
                *words = zeroed_u32(num_blocks.div_ceil(1 << order) as usize)?;
            }
        }
        Ok(Self { words })
    }

    fn load(&self, (order, page): PageOf) -> u32 {
        self.words[order as usize][page as usize].load(Ordering::Relaxed)
    }

    // Relaxed everywhere: a word belongs to one sequence or to the shared lock, and both hand over
    // by their own locks.
    fn store(&self, (order, page): PageOf, word: u32) {
        self.words[order as usize][page as usize].store(word, Ordering::Relaxed);
    }

    /// The only mapping of a page that was not mapped.
    pub(crate) fn set_only(&self, page: PageOf, loc: Loc) {
        debug_assert_eq!(self.load(page), 0);
        self.store(page, loc + 1);
    }

    /// Forgets the only mapping of a private page.
    pub(crate) fn clear_only(&self, page: PageOf) {
        debug_assert!(self.load(page) != 0 && self.load(page) & CHAIN == 0);
        self.store(page, 0);
    }

    pub(crate) fn add(&self, chains: &mut Chains, page: PageOf, loc: Loc) {
        let word = self.load(page);
        if word == 0 {
            return self.store(page, loc + 1);
        }
        if word & CHAIN == 0 {
            return self.store(page, chains.pair([word - 1, loc]));
        }
        if let Some((at, [first, second])) = chains.pair_of(word) {
            chains.free_pairs.push(at);
            let head = chains.allocate(first, NONE);
            let line = &mut chains.lines[head as usize];
            line.locs[1..3].copy_from_slice(&[second, loc]);
            line.len = 3;
            return self.store(page, CHAIN | head);
        }
        let head = word & !CHAIN;
        let line = &mut chains.lines[head as usize];
        if (line.len as usize) < LINE {
            line.locs[line.len as usize] = loc;
            line.len += 1;
        } else {
            let head = chains.allocate(loc, head);
            self.store(page, CHAIN | head);
        }
    }

    pub(crate) fn remove(&self, chains: &mut Chains, page: PageOf, loc: Loc) {
        let word = self.load(page);
        if word & CHAIN == 0 {
            assert_eq!(word, loc + 1, "page {page:?} is not mapped by {loc}");
            return self.store(page, 0);
        }
        if let Some((at, both)) = chains.pair_of(word) {
            let kept = both
                .iter()
                .position(|&other| other == loc)
                .map(|i| both[1 - i]);
            let kept = kept.unwrap_or_else(|| panic!("page {page:?} is not mapped by {loc}"));
            chains.free_pairs.push(at);
            return self.store(page, kept + 1);
        }
        let head = word & !CHAIN;
        let mut at = head;
        let place = loop {
            let line = &chains.lines[at as usize];
            if let Some(i) = line.locs[..line.len as usize]
                .iter()
                .position(|&l| l == loc)
            {
                break i;
            }
            at = line.next;
            assert_ne!(at, NONE, "page {page:?} is not mapped by {loc}");
        };
        // The last of the head line takes the place; only the head line is ever not full.
        let Line { len, next, locs } = chains.lines[head as usize];
        chains.lines[at as usize].locs[place] = locs[len as usize - 1];
        chains.lines[head as usize].len = len - 1;
        let alone = |line: &Line| line.len == 1 && line.next == NONE;
        if len == 1 {
            chains.free.push(head);
            self.store(page, CHAIN | next);
        } else if alone(&chains.lines[head as usize]) {
            chains.free.push(head);
            self.store(page, chains.lines[head as usize].locs[0] + 1);
        }
    }

    /// Whether any entry maps a page.
    pub(crate) fn is_mapped(&self, page: PageOf) -> bool {
        self.load(page) != 0
    }

    /// Appends every entry that maps a page.
    pub(crate) fn entries(&self, chains: &Chains, page: PageOf, out: &mut Vec<Loc>) {
        match self.load(page) {
            0 => {}
            word if word & CHAIN == 0 => out.push(word - 1),
            word => match chains.pair_of(word) {
                Some((_, both)) => out.extend(both),
                None => out.extend(chains.each(word & !CHAIN)),
            },
        }
    }

    /// One of the entries that map a page.
    pub(crate) fn first(&self, chains: &Chains, page: PageOf) -> Option<Loc> {
        match self.load(page) {
            0 => None,
            word if word & CHAIN == 0 => Some(word - 1),
            word => match chains.pair_of(word) {
                Some((_, both)) => Some(both[0]),
                None => chains.each(word & !CHAIN).next(),
            },
        }
    }

    /// Pages of the configured orders that a block lies in, the largest first.
    pub(crate) fn pages_of(&self, block: u32) -> impl Iterator<Item = PageOf> + '_ {
        let orders = (0..ORDERS as u32).rev();
        orders
            .filter(|&order| !self.words[order as usize].is_empty())
            .map(move |order| (order, block >> order))
    }

    /// All mappings of the block `old` by itself are now mappings of `new`, which had none.
    pub(crate) fn transfer(&self, old: u32, new: u32) {
        debug_assert_eq!(self.load((0, new)), 0);
        self.store((0, new), self.load((0, old)));
        self.store((0, old), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn mappings_are_a_bag(ops in proptest::collection::vec((0u32..2, 0u32..40, any::<bool>()), 1..300)) {
            let reverse = Reverse::new(12, 0b101).unwrap();
            let mut chains = Chains::default();
            let mut model = [Vec::new(), Vec::new()];
            let pages = [(0, 1), (2, 1)];
            for (page, loc, add) in ops {
                let held = &mut model[page as usize];
                let at = held.iter().position(|&l| l == loc);
                let which = pages[page as usize];
                match (add, at) {
                    (true, None) => { reverse.add(&mut chains, which, loc); held.push(loc); }
                    (false, Some(i)) => { reverse.remove(&mut chains, which, loc); held.remove(i); }
                    _ => {}
                }
                for (&page, held) in pages.iter().zip(&mut model) {
                    let mut seen = Vec::new();
                    reverse.entries(&chains, page, &mut seen);
                    seen.sort();
                    held.sort();
                    prop_assert_eq!(reverse.is_mapped(page), !held.is_empty());
                    prop_assert_eq!(&seen, &*held);
                }
            }
            let mut seen = Vec::new();
            reverse.transfer(1, 9);
            reverse.entries(&chains, (0, 9), &mut seen);
            seen.sort();
            prop_assert_eq!(&seen, &model[0]);
            prop_assert_eq!(reverse.pages_of(7).collect::<Vec<_>>(), [(2, 1), (0, 7)]);
        }
    }
}
