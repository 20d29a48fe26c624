//! The reverse map: block to the page-table entries that map it.
//!
//! One list a page of each configured order: the entries that map that page. A block is mapped by
//! the entries of its own list (order 0), and by those of every larger page that it lies in.
//!
//! ```text
//!  word of a page    0             no entry
//!                    loc + 1       exactly one: where it stands in the page table
//!                    all bits set  two, which stand in the page's place of a second array
//!                    bit 31 | line several: a chain of lines of up to 14 each
//! ```
//!
//! The second array is as long as the first and touched where pages are shared alone, so that a private
//! page costs no memory there, and no list of free places is kept for pairs.
//!
//! The word of a page whose blocks are private is stored by its sequence alone; as soon as a block
//! of it may be known to a second thread (published or shared) its words and chains change only
//! under the shared lock.

use std::ops::Range;

use crate::config::MAX_TABLE_NODES;
use crate::error::Result;
use crate::sync::{AtomicU32, AtomicU64, Ordering, zeroed_u32, zeroed_u64};
use crate::table::Loc;

const NONE: u32 = u32::MAX;
const CHAIN: u32 = 1 << 31;
/// No line has this number.
const PAIR: u32 = u32::MAX;
const LINE: usize = 14;
// One more than the place of any entry is neither of the two.
const _: () = assert!(MAX_TABLE_NODES as u64 * 512 < CHAIN as u64);
/// Orders that there may be.
pub(crate) const ORDERS: usize = 10;

/// One cache line of entries.
#[derive(Debug, Clone, Copy)]
struct Line {
    locs: [Loc; LINE],
    len: u32,
    next: u32,
}

/// Chains of the pages that are mapped more than twice; behind the shared lock.
#[derive(Debug, Default)]
pub(crate) struct Chains {
    lines: Vec<Line>,
    free: Vec<u32>,
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

    fn each(&self, head: u32) -> impl Iterator<Item = Loc> + '_ {
        let line = |at: u32| self.lines.get(at as usize);
        std::iter::successors(line(head), move |at| line(at.next))
            .flat_map(|line| line.locs[..line.len as usize].iter().copied())
    }
}

/// A page of one of the configured orders: order and number (first block divided by its size).
pub(crate) type PageOf = (u32, u32);

/// Whether a word says that exactly one entry maps the page.
fn is_one(word: u32) -> bool {
    // (0 wraps round: it is no entry.)
    word.wrapping_sub(1) < CHAIN - 1
}

fn pair([first, second]: [Loc; 2]) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

fn both(pair: u64) -> [Loc; 2] {
    [pair as u32, (pair >> 32) as u32]
}

/// Of two entries the one that stays when the other one goes; `None`: that one is neither.
fn kept([first, second]: [Loc; 2], loc: Loc) -> Option<Loc> {
    match loc {
        loc if loc == second => Some(first),
        loc if loc == first => Some(second),
        _ => None,
    }
}

/// The words of every page of one order, and the place of each for two entries.
#[derive(Debug, Default)]
struct Pages {
    words: Box<[AtomicU32]>,
    pairs: Box<[AtomicU64]>,
}

/// Where it stands who maps a page.
pub(crate) struct Place<'a> {
    page: u32,
    word: &'a AtomicU32,
    pair: &'a AtomicU64,
}

/// The words of every page of every configured order.
#[derive(Debug)]
pub(crate) struct Reverse {
    orders: [Pages; ORDERS],
}

impl Reverse {
    /// `orders`: a bit for each.
    pub(crate) fn new(num_blocks: u32, orders: u32) -> Result<Self> {
        let mut all: [Pages; ORDERS] = Default::default();
        for (order, pages) in all.iter_mut().enumerate() {
            if orders >> order & 1 != 0 {
                let n = num_blocks.div_ceil(1 << order) as usize;
                pages.words = zeroed_u32(n)?;
                pages.pairs = zeroed_u64(n)?;
            }
        }
        Ok(Self { orders: all })
    }

    fn load(&self, (order, page): PageOf) -> u32 {
        self.orders[order as usize].words[page as usize].load(Ordering::Relaxed)
    }

    // Relaxed everywhere: a word belongs to one sequence or to the shared lock, and both hand over
    // by their own locks; and so does the pair beside it.
    fn store(&self, (order, page): PageOf, word: u32) {
        self.orders[order as usize].words[page as usize].store(word, Ordering::Relaxed);
    }

    fn load_pair(&self, (order, page): PageOf) -> [Loc; 2] {
        both(self.orders[order as usize].pairs[page as usize].load(Ordering::Relaxed))
    }

    fn store_pair(&self, (order, page): PageOf, both: [Loc; 2]) {
        self.orders[order as usize].pairs[page as usize].store(pair(both), Ordering::Relaxed);
        self.store((order, page), PAIR);
    }

    /// The only mapping of a page that was not mapped.
    pub(crate) fn set_only(&self, page: PageOf, loc: Loc) {
        debug_assert_eq!(self.load(page), 0);
        self.store(page, loc + 1);
    }

    /// The places of pages that follow each other.
    pub(crate) fn run(&self, order: u32, pages: Range<u32>) -> impl Iterator<Item = Place<'_>> {
        let Pages { words, pairs } = &self.orders[order as usize];
        let run = pages.start as usize..pages.end as usize;
        let places = words[run.clone()].iter().zip(&pairs[run]);
        let place = |(page, (word, pair))| Place { page, word, pair };
        pages.zip(places).map(place)
    }

    /// The places of single blocks.
    pub(crate) fn each<'a>(&'a self, blocks: &'a [u32]) -> impl Iterator<Item = Place<'a>> {
        let Pages { words, pairs } = &self.orders[0];
        blocks.iter().map(|&page| Place {
            page,
            word: &words[page as usize],
            pair: &pairs[page as usize],
        })
    }

    /// Forgets the only mappings of private pages.
    pub(crate) fn clear_all<'a>(&self, places: impl Iterator<Item = Place<'a>>) {
        for Place { word, .. } in places {
            debug_assert!(is_one(word.load(Ordering::Relaxed)));
            word.store(0, Ordering::Relaxed);
        }
    }

    /// As [`Reverse::add`], of pages of one order, whose entries follow each other.
    pub(crate) fn add_all<'a>(
        &self,
        chains: &mut Chains,
        order: u32,
        places: impl Iterator<Item = Place<'a>>,
        mut loc: Loc,
    ) {
        for place in places {
            let one = place.word.load(Ordering::Relaxed);
            if is_one(one) {
                let both = pair([one - 1, loc]);
                place.pair.store(both, Ordering::Relaxed);
                place.word.store(PAIR, Ordering::Relaxed);
            } else {
                self.add(chains, (order, place.page), loc);
            }
            loc = loc.wrapping_add(1);
        }
    }

    /// As [`Reverse::remove`], of pages of one order, whose entries follow each other.
    pub(crate) fn remove_all<'a>(
        &self,
        chains: &mut Chains,
        order: u32,
        places: impl Iterator<Item = Place<'a>>,
        mut loc: Loc,
    ) {
        for place in places {
            let kept = match place.word.load(Ordering::Relaxed) {
                PAIR => kept(both(place.pair.load(Ordering::Relaxed)), loc),
                _ => None,
            };
            match kept {
                Some(kept) => place.word.store(kept + 1, Ordering::Relaxed),
                None => self.remove(chains, (order, place.page), loc),
            }
            loc = loc.wrapping_add(1);
        }
    }

    pub(crate) fn add(&self, chains: &mut Chains, page: PageOf, loc: Loc) {
        let word = self.load(page);
        if word == 0 {
            return self.store(page, loc + 1);
        }
        if is_one(word) {
            return self.store_pair(page, [word - 1, loc]);
        }
        if word == PAIR {
            let [first, second] = self.load_pair(page);
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
        if word == PAIR {
            let kept = kept(self.load_pair(page), loc);
            let kept = kept.unwrap_or_else(|| panic!("page {page:?} is not mapped by {loc}"));
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
            PAIR => out.extend(self.load_pair(page)),
            word if is_one(word) => out.push(word - 1),
            word => out.extend(chains.each(word & !CHAIN)),
        }
    }

    /// One of the entries that map a page.
    pub(crate) fn first(&self, chains: &Chains, page: PageOf) -> Option<Loc> {
        match self.load(page) {
            0 => None,
            PAIR => Some(self.load_pair(page)[0]),
            word if is_one(word) => Some(word - 1),
            word => chains.each(word & !CHAIN).next(),
        }
    }

    /// Pages of the configured orders that a block lies in, the largest first.
    pub(crate) fn pages_of(&self, block: u32) -> impl Iterator<Item = PageOf> + '_ {
        let orders = (0..ORDERS as u32).rev();
        orders
            .filter(|&order| !self.orders[order as usize].words.is_empty())
            .map(move |order| (order, block >> order))
    }

    /// All mappings of the block `old` by itself are now mappings of `new`, which had none.
    pub(crate) fn transfer(&self, old: u32, new: u32) {
        debug_assert_eq!(self.load((0, new)), 0);
        match self.load((0, old)) {
            PAIR => self.store_pair((0, new), self.load_pair((0, old))),
            word => self.store((0, new), word),
        }
        self.store((0, old), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_last_entry_of_the_largest_table_is_an_entry_like_any_other() {
        let last = MAX_TABLE_NODES * 512 - 1;
        let (reverse, mut chains) = (Reverse::new(1, 1).unwrap(), Chains::default());
        let mapped = |chains: &Chains| {
            let mut all = Vec::new();
            reverse.entries(chains, (0, 0), &mut all);
            all.sort();
            all
        };
        reverse.set_only((0, 0), last);
        assert_eq!(mapped(&chains), [last]);
        for loc in [7, 8] {
            reverse.add(&mut chains, (0, 0), loc);
        }
        assert_eq!(mapped(&chains), [7, 8, last]);
        for loc in [8, last, 7] {
            reverse.remove(&mut chains, (0, 0), loc);
        }
        assert!(!reverse.is_mapped((0, 0)));
    }

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
            // The same for many at once: other entries come to every page and go.
            for loc in [100, 200, 300] {
                let run = reverse.run(2, 0..3);
                reverse.add_all(&mut chains, 2, run, loc);
                reverse.add_all(&mut chains, 0, reverse.each(&[4, 1, 7]), loc + 50);
            }
            let extended = |held: &[u32], one: u32| {
                let mut all = [held, &[100 + one, 200 + one, 300 + one]].concat();
                all.sort();
                all
            };
            for (page, more) in pages.iter().zip([51, 1]) {
                let mut seen = Vec::new();
                reverse.entries(&chains, *page, &mut seen);
                seen.sort();
                prop_assert_eq!(seen, extended(&model[usize::from(page.0 == 2)], more));
            }
            for loc in [300, 100, 200] {
                reverse.remove_all(&mut chains, 2, reverse.run(2, 0..3), loc);
                reverse.remove_all(&mut chains, 0, reverse.each(&[4, 1, 7]), loc + 50);
            }
            prop_assert!([(2, 0), (2, 2), (0, 4), (0, 7)].iter().all(|&page| !reverse.is_mapped(page)));
            reverse.add(&mut chains, (0, 7), 5);
            reverse.clear_all(reverse.each(&[7]));
            prop_assert!(!reverse.is_mapped((0, 7)));
            let mut seen = Vec::new();
            reverse.transfer(1, 9);
            reverse.entries(&chains, (0, 9), &mut seen);
            seen.sort();
            prop_assert_eq!(&seen, &model[0]);
            prop_assert_eq!(reverse.pages_of(7).collect::<Vec<_>>(), [(2, 1), (0, 7)]);
        }
    }
}
