//! The order of eviction: lists through block numbers, one a class of use; and the victims that
//! were chosen next.
//!
//! What lives here: the lists, their ageing, the choice that was made. What never lives here: who
//! chooses and by what (`state/evict.rs`), how often a block was used ([`super::Index`]).
//!
//! The lowest class goes first, within a class the least recently used. With [`Eviction::Lru`]
//! there is one class. With [`Eviction::Lfu`] a block enters the class of the bit length of its
//! uses, as in the multi-queue algorithm (Zhou, Philbin, Li: USENIX ATC 2001). What was used much
//! long ago must not stay for ever: after as many evictions as blocks stand here, all uses are
//! halved, as TinyLFU does after a sample of accesses (Einziger, Friedman, Manes: ACM Transactions
//! on Storage 13(4), 2017). Halving makes every bit length one less, so the lists move down by one
//! and the lowest two become one: O(1), and no block is touched.
//!
//! Blocks of one sequence are entered last block first, so a leaf stands before its parent: whoever
//! used the leaf used the parent as well, and entered it later; so the parent's class is not lower.
//! A pin can hold a leaf longer than its parent; [`super::Index::behind`] keeps the order of
//! eviction right then.

use crate::config::Eviction;
use crate::error::Result;
use crate::sync::filled;

const NONE: u32 = u32::MAX;
/// Classes of use; uses are counted as far as the highest needs.
const CLASSES: usize = 16;
/// Most uses that are counted.
pub(super) const MAX_USES: u16 = (1 << (CLASSES - 1)) - 1;

/// One class, least recently used first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct List {
    oldest: u32,
    newest: u32,
}

const EMPTY: List = List {
    oldest: NONE,
    newest: NONE,
};

/// The order of eviction.
#[derive(Debug)]
pub(crate) struct Order {
    policy: Eviction,
    /// Neighbours of a block in its list: (older, newer). Meaningful only for blocks in a list.
    links: Box<[(u32, u32)]>,
    classes: [List; CLASSES],
    /// Blocks in all lists.
    len: u32,
    /// How often uses were halved.
    age: u64,
    /// Evictions since then.
    evicted: u32,
    /// Victims that were chosen, the next one last. Those that have left the order since, or have
    /// left and come back, are no longer in `chosen`.
    victims: Vec<u32>,
    /// A bit a block: it stands in `victims` and in the order since.
    chosen: Box<[u64]>,
    /// The class that they were chosen from.
    class: usize,
}

impl Order {
    pub(crate) fn new(num_blocks: usize, policy: Eviction) -> Result<Self> {
        Ok(Self {
            policy,
            links: filled((NONE, NONE), num_blocks)?,
            classes: [EMPTY; CLASSES],
            len: 0,
            age: 0,
            evicted: 0,
            victims: Vec::new(),
            chosen: filled(0, num_blocks.div_ceil(64))?,
            class: 0,
        })
    }

    /// Whether uses matter.
    pub(super) fn counts_uses(&self) -> bool {
        self.policy == Eviction::Lfu
    }

    /// How often uses were halved.
    pub(super) fn age(&self) -> u64 {
        self.age
    }

    /// Blocks in the order.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The class that a block enters after so many uses.
    pub(super) fn class_of(&self, uses: u16) -> usize {
        match self.policy {
            Eviction::Lru => 0,
            Eviction::Lfu => (u16::BITS - uses.min(MAX_USES).leading_zeros()) as usize,
        }
    }

    /// Enters a block as the most recently used of its class.
    pub(super) fn push(&mut self, block: u32, uses: u16) {
        let class = self.class_of(uses);
        if class < self.class {
            self.forget_victims(); // it goes before them
        }
        let list = &mut self.classes[class];
        let older = std::mem::replace(&mut list.newest, block);
        match older {
            NONE => list.oldest = block,
            older => self.links[older as usize].1 = block,
        }
        self.links[block as usize] = (older, NONE);
        self.len += 1;
    }

    /// Takes a block out.
    pub(crate) fn remove(&mut self, block: u32) {
        let (older, newer) = self.links[block as usize];
        self.join(older, newer, block);
        self.len -= 1;
        self.set_chosen(block, false);
    }

    /// Puts `new` into the place of `old`.
    pub(crate) fn replace(&mut self, old: u32, new: u32) {
        let (older, newer) = self.links[old as usize];
        self.links[new as usize] = (older, newer);
        match older {
            NONE => self.list_with(|list| list.oldest == old).oldest = new,
            older => self.links[older as usize].1 = new,
        }
        match newer {
            NONE => self.list_with(|list| list.newest == old).newest = new,
            newer => self.links[newer as usize].0 = new,
        }
        self.set_chosen(old, false);
    }

    /// Makes the neighbours of `block` each other's.
    fn join(&mut self, older: u32, newer: u32, block: u32) {
        match older {
            NONE => self.list_with(|list| list.oldest == block).oldest = newer,
            older => self.links[older as usize].1 = newer,
        }
        match newer {
            NONE => self.list_with(|list| list.newest == block).newest = older,
            newer => self.links[newer as usize].0 = older,
        }
    }

    /// The list that a block is an end of. What is evicted is found at once.
    fn list_with(&mut self, end: impl Fn(&List) -> bool) -> &mut List {
        let mut lists = self.classes.iter_mut();
        lists.find(|list| end(list)).expect("a block at an end")
    }

    /// A block was evicted: perhaps the time to halve all uses.
    pub(crate) fn count_eviction(&mut self) {
        if !self.counts_uses() {
            return;
        }
        self.evicted += 1;
        if self.evicted < self.len {
            return;
        }
        self.evicted = 0;
        self.age += 1;
        self.forget_victims();
        let [lowest, second, ..] = self.classes;
        let joined = match (lowest, second) {
            (EMPTY, list) | (list, EMPTY) => list,
            _ => {
                self.links[lowest.newest as usize].1 = second.oldest;
                self.links[second.oldest as usize].0 = lowest.newest;
                List {
                    oldest: lowest.oldest,
                    newest: second.newest,
                }
            }
        };
        self.classes.rotate_left(1);
        self.classes[0] = joined;
        self.classes[CLASSES - 1] = EMPTY;
    }

    fn list(&self, list: List) -> impl Iterator<Item = u32> + '_ {
        let next = |block: u32| (block != NONE).then_some(block);
        std::iter::successors(next(list.oldest), move |&block| {
            next(self.links[block as usize].1)
        })
    }

    /// All blocks, first those that go first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.classes.iter().flat_map(|&list| self.list(list))
    }

    /// At most `most` blocks of the lowest class in which any `may` be evicted, and the class.
    pub(crate) fn oldest(&self, most: usize, may: impl Fn(u32) -> bool) -> (usize, Vec<u32>) {
        for (class, &list) in self.classes.iter().enumerate() {
            let blocks = self.list(list).filter(|&block| may(block)).take(most);
            let found: Vec<u32> = blocks.collect();
            if !found.is_empty() {
                return (class, found);
            }
        }
        (0, Vec::new())
    }

    // -- victims -----------------------------------------------------------------------------

    /// The next of the victims that were chosen.
    pub(crate) fn next_victim(&mut self) -> Option<u32> {
        while let Some(&block) = self.victims.last() {
            if self.is_chosen(block) {
                return Some(block);
            }
            self.victims.pop();
        }
        None
    }

    /// Chooses victims of a class, the first to go first, instead of those chosen before.
    pub(crate) fn choose(&mut self, class: usize, victims: impl DoubleEndedIterator<Item = u32>) {
        self.forget_victims();
        self.class = class;
        victims.rev().for_each(|block| self.choose_first(block));
    }

    /// Chooses one that goes before all others.
    pub(crate) fn choose_first(&mut self, block: u32) {
        self.set_chosen(block, true);
        self.victims.push(block);
    }

    /// The next victim may not be evicted now.
    pub(crate) fn pass_over(&mut self) {
        if let Some(block) = self.victims.pop() {
            self.set_chosen(block, false);
        }
    }

    fn forget_victims(&mut self) {
        self.class = 0;
        while !self.victims.is_empty() {
            self.pass_over();
        }
    }

    fn is_chosen(&self, block: u32) -> bool {
        self.chosen[block as usize / 64] >> (block % 64) & 1 == 1
    }

    fn set_chosen(&mut self, block: u32, on: bool) {
        let (word, bit) = (&mut self.chosen[block as usize / 64], 1 << (block % 64));
        if on { *word |= bit } else { *word &= !bit }
    }

    // -- checks ------------------------------------------------------------------------------

    /// Every link agrees with its neighbour's, every number with a recount; each block with its
    /// class goes to `each`.
    pub(super) fn check(
        &self,
        mut each: impl FnMut(u32, usize) -> std::result::Result<(), String>,
    ) -> std::result::Result<(), String> {
        let mut ordered = vec![false; self.links.len()];
        let mut len = 0;
        for (class, &list) in self.classes.iter().enumerate() {
            let mut before = NONE;
            for block in self.list(list) {
                if std::mem::replace(&mut ordered[block as usize], true) {
                    return Err(format!(
                        "block {block} stands twice in the order of eviction"
                    ));
                }
                if self.links[block as usize].0 != before {
                    return Err(format!(
                        "block {block} follows {before} in the order of eviction and says {}",
                        self.links[block as usize].0
                    ));
                }
                each(block, class)?;
                before = block;
                len += 1;
            }
            if list.newest != before {
                return Err(format!(
                    "class {class} ends with block {before}, it says {}",
                    list.newest
                ));
            }
        }
        if len != self.len {
            return Err(format!(
                "{len} blocks in the order of eviction, it says {}",
                self.len
            ));
        }
        for block in 0..self.links.len() as u32 {
            if self.is_chosen(block) && !(ordered[block as usize] && self.victims.contains(&block))
            {
                return Err(format!(
                    "block {block} is chosen as a victim and could not go"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_list_keeps_its_order_through_removal_and_replacement() {
        let mut order = Order::new(8, Eviction::Lru).unwrap();
        for block in [3, 1, 4, 6] {
            order.push(block, block as u16);
        }
        order.remove(1);
        order.replace(3, 7);
        order.replace(6, 0);
        order.push(3, 0);
        assert_eq!(order.iter().collect::<Vec<_>>(), [7, 4, 0, 3]);
        for block in [7, 3, 4, 0] {
            order.remove(block);
        }
        assert_eq!(order.iter().next(), None);
        order.push(5, 0);
        assert_eq!(order.iter().collect::<Vec<_>>(), [5]);
    }

    #[test]
    fn a_turnover_of_the_cache_lets_every_class_fall_by_one() {
        let mut order = Order::new(8, Eviction::Lfu).unwrap();
        for (block, uses) in [(0, 4), (1, 0), (2, 1), (3, 3), (4, 0)] {
            order.push(block, uses);
        }
        assert_eq!(order.iter().collect::<Vec<_>>(), [1, 4, 2, 3, 0]);
        (0..4).for_each(|_| order.count_eviction());
        assert_eq!(order.age(), 0);
        order.count_eviction();
        assert_eq!(order.age(), 1);
        // 2 is now where 1 and 4 are, 3 was used 1 time and 0 twice.
        order.push(5, 0);
        order.push(6, 1);
        assert_eq!(order.iter().collect::<Vec<_>>(), [1, 4, 2, 5, 3, 6, 0]);
    }

    #[test]
    fn a_chosen_victim_that_was_used_since_is_no_victim() {
        let mut order = Order::new(8, Eviction::Lfu).unwrap();
        for block in 0..4 {
            order.push(block, 0);
        }
        order.choose(0, [2, 0, 1].into_iter());
        order.remove(2);
        order.push(2, 0);
        assert_eq!(order.next_victim(), Some(0));
        order.replace(0, 7);
        assert_eq!(order.next_victim(), Some(1));
        order.choose_first(3);
        assert_eq!(order.next_victim(), Some(3));
        order.pass_over();
        order.pass_over();
        assert_eq!(order.next_victim(), None);
        // A block of a lower class goes before what was chosen.
        for block in [1, 2, 3, 7] {
            order.remove(block);
            order.push(block, 1);
        }
        order.choose(1, [1].into_iter());
        order.push(5, 1);
        assert_eq!(order.next_victim(), Some(1));
        order.push(6, 0);
        assert_eq!(order.next_victim(), None);
    }

    proptest! {
        /// Against lists of lists: pushes, removals, replacements and evictions at random.
        #[test]
        fn the_lists_are_those_of_a_plain_model(
            lfu in any::<bool>(),
            ops in proptest::collection::vec((0u8..8, 0u32..12, 0u32..12, 0u16..40), 1..200),
        ) {
            let policy = if lfu { Eviction::Lfu } else { Eviction::Lru };
            let mut order = Order::new(12, policy).unwrap();
            let mut model: Vec<Vec<u32>> = vec![Vec::new(); CLASSES];
            let mut evicted = 0;
            for (op, a, b, uses) in ops {
                let at = |model: &[Vec<u32>], block| {
                    let within = |list: &Vec<u32>| list.iter().position(|&other| other == block);
                    model.iter().enumerate().find_map(|(i, list)| Some((i, within(list)?)))
                };
                match (op, at(&model, a), at(&model, b)) {
                    (0..4, None, _) => {
                        order.push(a, uses);
                        let class = if lfu { 16 - uses.leading_zeros() as usize } else { 0 };
                        model[class].push(a);
                    }
                    (4, Some((class, index)), None) => {
                        order.replace(a, b);
                        model[class][index] = b;
                    }
                    (5, Some((class, index)), _) => {
                        order.remove(a);
                        model[class].remove(index);
                    }
                    (6.., ..) => {
                        let oldest = order.oldest(1, |_| true).1;
                        let first = model.iter_mut().find(|list| !list.is_empty());
                        prop_assert_eq!(oldest.first().copied(), first.map(|list| list.remove(0)));
                        let Some(&block) = oldest.first() else { continue };
                        order.remove(block);
                        order.count_eviction();
                        evicted += 1;
                        if lfu && evicted >= model.iter().flatten().count() {
                            evicted = 0;
                            let lowest = model.remove(0);
                            model[0].splice(0..0, lowest);
                            model.push(Vec::new());
                        }
                    }
                    _ => {}
                }
                order.check(|_, _| Ok(())).unwrap();
                let expected: Vec<u32> = model.iter().flatten().copied().collect();
                prop_assert_eq!(order.iter().collect::<Vec<_>>(), expected);
            }
        }
    }
}
