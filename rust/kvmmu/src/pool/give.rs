//! Releases: bits are cleared, then credits rise.
//!
//! What lives here: emptying blocks. What never lives here: the question whether a block's last
//! reference is gone.
//!
//! A release takes effect when its bits are cleared, by one exchange a word, which fails if one of
//! them is clear already: of two threads that release the same block, one is told so. The credits
//! rise afterwards: a single block's in the seat of the thread if the block lies in its home, else
//! in the window's counter and the thread's wallet.

use std::ops::Range;

use super::homes::Home;
use super::physical::Physical;
use crate::sync::Ordering;

/// Blocks that share a word of the lines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Group {
    /// The lowest.
    pub(crate) first: u32,
    /// All of them.
    pub(crate) mask: u64,
    /// They are consecutive.
    pub(crate) dense: bool,
}

impl<const BITS: u32, const WORDS: usize> Physical<BITS, WORDS> {
    /// Empties one block. False: it is empty already, and nothing has changed.
    pub(crate) fn give_one(&self, home: &Home, block: u32) -> bool {
        let (at, bit) = Self::place(block);
        self.give_word(home, at, bit)
    }

    /// Empties blocks of one word. False: one of them is empty already, and nothing has changed.
    pub(crate) fn give_word(&self, home: &Home, at: usize, mask: u64) -> bool {
        let window = (at / WORDS) as u32;
        if !self.split(window) || !self.clear(at, mask) {
            return false;
        }
        let n = self.credit(home, window, mask.count_ones());
        self.deposit(home, n);
        true
    }

    /// Empties blocks, those that share a word by one exchange each. Those of them that were empty
    /// already are left alone and one of them is returned: another thread has released it.
    pub(crate) fn give(&self, home: &Home, blocks: &[u32]) -> Option<u32> {
        self.give_each(home, Self::groups_of(blocks))
    }

    fn groups_of(blocks: &[u32]) -> impl Iterator<Item = Group> {
        let mut rest = blocks;
        std::iter::from_fn(move || {
            let (group, n) = Self::group(rest)?;
            rest = &rest[n..];
            Some(group)
        })
    }

    /// As [`Physical::give`].
    pub(crate) fn give_each(
        &self,
        home: &Home,
        groups: impl Iterator<Item = Group>,
    ) -> Option<u32> {
        let mut sum = 0;
        let wrong = self.clear_each(groups, |window, n| sum += self.credit(home, window, n));
        self.deposit(home, sum);
        wrong
    }

    /// As [`Physical::give`], of blocks in any order, each of which comes once; `before` sees each
    /// group that is about to be emptied.
    pub(crate) fn give_unsorted(
        &self,
        home: &Home,
        blocks: &mut [u32],
        before: impl Fn(&Group),
    ) -> Option<u32> {
        if blocks.is_sorted_by(|a, b| a > b) {
            blocks.reverse();
            return self.give_each(home, Self::groups_of(blocks).inspect(before));
        }
        let (least, most) = blocks.iter().fold((u32::MAX, 0), |(least, most), &block| {
            (least.min(block), most.max(block))
        });
        let first = (least / BITS) as usize;
        let words = ((most / BITS) as usize).saturating_sub(first) + 1;
        if words > blocks.len() {
            blocks.sort_unstable();
            return self.give_each(home, Self::groups_of(blocks).inspect(before));
        }
        // They lie all over a part of the pool that is not much larger than they are many.
        let mut masks = vec![0; words];
        for &block in &*blocks {
            let (at, bit) = Self::place(block);
            masks[at - first] |= bit;
        }
        let groups = masks.into_iter().zip(first as u32..);
        let groups = groups.filter(|&(mask, _)| mask != 0);
        let groups = groups.map(|(mask, at): (u64, u32)| Group {
            first: at * BITS + mask.trailing_zeros(),
            mask,
            dense: mask == Self::FULL,
        });
        self.give_each(home, groups.inspect(before))
    }

    /// As [`Physical::give`], but the blocks stay reserved for the caller.
    pub(crate) fn give_reserved(&self, blocks: &[u32]) -> Option<u32> {
        let raise = |window, n| self.raise(window, n, 0);
        self.clear_each(Self::groups_of(blocks), raise)
    }

    /// Clears the bits of blocks; `cleared` hears how many of a window, and raises its credits.
    fn clear_each(
        &self,
        groups: impl Iterator<Item = Group>,
        mut cleared: impl FnMut(u32, u32),
    ) -> Option<u32> {
        let mut wrong = None;
        // The window at hand, whether its blocks may be touched, and how many were cleared.
        let (mut window, mut free, mut n) = (u32::MAX, false, 0);
        let mut done = |window, n| {
            if n > 0 {
                cleared(window, n);
            }
        };
        for group in groups {
            let here = Self::window_of(group.first);
            if here != window {
                done(window, n);
                (window, free, n) = (here, self.split(here), 0);
            }
            let at = (group.first / BITS) as usize;
            if free && self.clear(at, group.mask) {
                n += group.mask.count_ones();
                continue;
            }
            // One by one: those that are held go.
            let mut mask = group.mask;
            while mask != 0 {
                let bit = mask & mask.wrapping_neg();
                mask &= mask - 1;
                if free && self.clear(at, bit) {
                    n += 1;
                } else {
                    wrong = Some(at as u32 * BITS + bit.trailing_zeros());
                }
            }
        }
        done(window, n);
        wrong
    }

    /// One of the blocks of a group that is empty.
    pub(crate) fn empty_of(&self, group: &Group) -> Option<u32> {
        let at = (group.first / BITS) as usize;
        // Relaxed: a first check; the exchange in `clear` decides.
        let clear = group.mask & !self.lines[at].load(Ordering::Relaxed);
        (clear != 0).then(|| at as u32 * BITS + clear.trailing_zeros())
    }

    /// The blocks of a range.
    pub(crate) fn groups(range: Range<u32>) -> impl Iterator<Item = Group> + Clone {
        Self::masks(range).map(|(at, mask)| Group {
            first: at as u32 * BITS + mask.trailing_zeros(),
            mask,
            dense: true,
        })
    }

    /// The first blocks of a list that share a word and ascend, and how many they are. A block that
    /// comes twice begins a new group.
    pub(crate) fn group(blocks: &[u32]) -> Option<(Group, usize)> {
        let &first = blocks.first()?;
        if let Some(whole) = blocks.first_chunk::<64>()
            && BITS == 64
            && first.is_multiple_of(64)
        {
            // All 64 of them in order: no loop over bits. (Folded, so that it is vectorised.)
            let differ = |differ, (at, &block): (usize, &u32)| {
                differ | (block ^ first.wrapping_add(at as u32))
            };
            if whole.iter().enumerate().fold(0, differ) == 0 {
                let (mask, dense) = (!0, true);
                return Some((Group { first, mask, dense }, 64));
            }
        }
        let (at, mut mask) = Self::place(first);
        let mut n = 1;
        for &block in &blocks[1..] {
            let (word, bit) = Self::place(block);
            if word != at || bit <= mask {
                break;
            }
            mask |= bit;
            n += 1;
        }
        let dense = false;
        Some((Group { first, mask, dense }, n))
    }

    /// Clears bits that are all set. False: one of them is not, and nothing has changed.
    fn clear(&self, at: usize, mask: u64) -> bool {
        // Relaxed: the exchange decides.
        let mut line = self.lines[at].load(Ordering::Relaxed);
        while line & mask == mask {
            // Release: pairs with the Acquire of the next claim of these blocks.
            match self.lines[at].compare_exchange(
                line,
                line & !mask,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(seen) => line = seen,
            }
        }
        false
    }
}

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    use proptest::prelude::*;

    use crate::pool::{Pool, PoolConfig, Word};

    proptest! {
        /// Lists that descend, that lie close together and that do not; stuck blocks among them.
        #[test]
        fn blocks_are_given_in_any_order(
            spread in 1u32..3000,
            blocks in proptest::collection::hash_set(any::<u32>(), 1..300),
            stuck in proptest::collection::vec(any::<prop::sample::Index>(), 0..9),
        ) {
            let pool = Pool::<64, 8>::new(&PoolConfig::new(3000)).unwrap();
            let blocks: std::collections::BTreeSet<u32> =
                blocks.into_iter().map(|block| block % spread).collect();
            let mut list: Vec<u32> = blocks.iter().copied().collect();
            for turn in [0, 1, list.len() / 2] {
                let turn = turn.min(list.len());
                list.rotate_left(turn);
                list.reverse();
                prop_assert!(list.iter().all(|&block| pool.claim_exact(block, 1)));
                for index in &stuck {
                    pool.set_stuck(*index.get(&list), true);
                }
                pool.give_unsorted(&mut list);
                prop_assert!(list.iter().all(|&block| pool.is_empty(block) && !pool.is_stuck(block)));
                pool.audit().unwrap();
            }
        }

        #[test]
        fn words_of_a_list_change_as_those_of_each(
            references in proptest::collection::vec(0u32..3, 1..40),
            published in any::<bool>(),
        ) {
            let pool = Pool::<64, 8>::new(&PoolConfig::new(40)).unwrap();
            let list: Vec<u32> = (0..references.len() as u32).rev().step_by(3).collect();
            let mut word = Word::PRIVATE;
            if published {
                word = word.published();
            }
            let words: Vec<Word> = list
                .iter()
                .map(|&block| Word(word.0 + references[block as usize]))
                .collect();
            pool.claim_batch(40, &mut Vec::new()).unwrap();
            for (&block, &word) in list.iter().zip(&words) {
                pool.set_word(block, word);
            }
            let plain = words.iter().all(|word| *word == Word::PRIVATE);
            prop_assert_eq!(pool.each_private(&list), plain);
            prop_assert!(!pool.any_of_full(&list));
            pool.retain_each(&list, |_| panic!("all of them are in use"));
            let more = |word: &Word| word.retained().unwrap();
            prop_assert!(list.iter().map(|&b| pool.word(b)).eq(words.iter().map(more)));
            pool.release_each(&list, |_| panic!("all of them keep a holder"));
            prop_assert!(list.iter().map(|&b| pool.word(b)).eq(words.iter().copied()));
            // Now one may be the last holder of some: then it is for the caller to say.
            let mut others = Vec::new();
            pool.release_each(&list, |block| others.push(block));
            if list.iter().any(|&block| references[block as usize] == 0) {
                prop_assert_eq!(&others, &list);
                prop_assert!(list.iter().map(|&b| pool.word(b)).eq(words.iter().copied()));
            } else {
                let less = |word: &Word| word.released().unwrap();
                prop_assert!(others.is_empty());
                prop_assert!(list.iter().map(|&b| pool.word(b)).eq(words.iter().map(less)));
            }
            let full = Word(crate::pool::MAX_REFERENCES - 1);
            pool.set_word(list[list.len() / 2], full);
            prop_assert!(pool.any_of_full(&list));
            let mut others = Vec::new();
            pool.retain_each(&list, |block| others.push(block));
            prop_assert_eq!(&others, &list);
        }
    }
}
