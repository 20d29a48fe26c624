//! The order of eviction: a doubly linked list through block numbers, least recently used first.
//!
//! Blocks of one sequence are entered last block first, so a leaf stands before its parent: whoever
//! used the leaf used the parent as well, and entered it later. A pin can hold a leaf longer than
//! its parent; [`super::Index::leaf_of`] keeps the order of eviction right then.

use crate::error::Result;
use crate::sync::filled;

const NONE: u32 = u32::MAX;

/// Least recently used first.
#[derive(Debug)]
pub(crate) struct Order {
    /// Neighbours of a block: (older, newer). Meaningful only for blocks in the list.
    links: Box<[(u32, u32)]>,
    oldest: u32,
    newest: u32,
}

impl Order {
    pub(crate) fn new(num_blocks: usize) -> Result<Self> {
        let links = filled((NONE, NONE), num_blocks)?;
        Ok(Self {
            links,
            oldest: NONE,
            newest: NONE,
        })
    }

    fn set_newer(&mut self, of: u32, newer: u32) {
        if of == NONE {
            self.oldest = newer
        } else {
            self.links[of as usize].1 = newer
        }
    }

    fn set_older(&mut self, of: u32, older: u32) {
        if of == NONE {
            self.newest = older
        } else {
            self.links[of as usize].0 = older
        }
    }

    /// Enters a block as the most recently used.
    pub(crate) fn push(&mut self, block: u32) {
        let older = self.newest;
        self.links[block as usize] = (older, NONE);
        self.set_newer(older, block);
        self.newest = block;
    }

    /// Takes a block out.
    pub(crate) fn remove(&mut self, block: u32) {
        let (older, newer) = self.links[block as usize];
        self.set_newer(older, newer);
        self.set_older(newer, older);
    }

    /// Puts `new` into the place of `old`.
    pub(crate) fn replace(&mut self, old: u32, new: u32) {
        let (older, newer) = self.links[old as usize];
        self.links[new as usize] = (older, newer);
        self.set_newer(older, new);
        self.set_older(newer, new);
    }

    /// All blocks, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let next = |block: u32| (block != NONE).then_some(block);
        std::iter::successors(next(self.oldest), move |&block| {
            next(self.links[block as usize].1)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_keeps_its_order_through_removal_and_replacement() {
        let mut order = Order::new(8).unwrap();
        for block in [3, 1, 4, 6] {
            order.push(block);
        }
        order.remove(1);
        order.replace(3, 7);
        order.replace(6, 0);
        order.push(3);
        assert_eq!(order.iter().collect::<Vec<_>>(), [7, 4, 0, 3]);
        for block in [7, 3, 4, 0] {
            order.remove(block);
        }
        assert_eq!(order.iter().next(), None);
        order.push(5);
        assert_eq!(order.iter().collect::<Vec<_>>(), [5]);
    }
}
