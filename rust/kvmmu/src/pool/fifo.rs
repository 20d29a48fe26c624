//! The order of release, for [`super::Placement::Fifo`] alone.
//!
//! What lives here: a doubly linked list over block numbers, as vLLM's free list is one, so that a
//! block that is claimed out of turn can leave it. What never lives here: the truth about who is
//! empty; the list is kept under one lock, which every operation of such a pool holds throughout.

use crate::error::Result;
use crate::sync::filled;

const NIL: u32 = u32::MAX;
/// Not in the list.
const OUT: u32 = u32::MAX - 1;

/// See the module.
#[derive(Debug)]
pub(crate) struct Fifo {
    next: Box<[u32]>,
    prev: Box<[u32]>,
    head: u32,
    tail: u32,
}

impl Fifo {
    /// All blocks below `span` but the reserved one, ascending.
    pub(crate) fn new(span: u32, reserved: Option<u32>) -> Result<Self> {
        let mut list = Self {
            next: filled(OUT, span as usize)?,
            prev: filled(OUT, span as usize)?,
            head: NIL,
            tail: NIL,
        };
        for block in (0..span).filter(|&block| Some(block) != reserved) {
            list.push(block);
        }
        Ok(list)
    }

    /// Appends a block, if it is not in the list.
    pub(crate) fn push(&mut self, block: u32) {
        if self.next[block as usize] != OUT {
            return;
        }
        self.prev[block as usize] = self.tail;
        self.next[block as usize] = NIL;
        match self.tail {
            NIL => self.head = block,
            tail => self.next[tail as usize] = block,
        }
        self.tail = block;
    }

    /// Takes the oldest.
    pub(crate) fn pop(&mut self) -> Option<u32> {
        let block = self.head;
        (block != NIL).then(|| {
            self.remove(block);
            block
        })
    }

    /// Takes a block out, wherever it is.
    pub(crate) fn remove(&mut self, block: u32) {
        let (next, prev) = (self.next[block as usize], self.prev[block as usize]);
        if next == OUT {
            return;
        }
        match prev {
            NIL => self.head = next,
            prev => self.next[prev as usize] = next,
        }
        match next {
            NIL => self.tail = prev,
            next => self.prev[next as usize] = prev,
        }
        self.next[block as usize] = OUT;
        self.prev[block as usize] = OUT;
    }
}

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn blocks_leave_in_order_or_out_of_turn() {
        let mut list = Fifo::new(5, Some(2)).unwrap();
        list.remove(3);
        list.remove(3);
        assert_eq!(list.pop(), Some(0));
        list.push(3);
        list.push(0);
        list.remove(1);
        assert_eq!(
            [list.pop(), list.pop(), list.pop()],
            [Some(4), Some(3), Some(0)]
        );
        assert_eq!(list.pop(), None);
        list.push(2);
        assert_eq!(list.pop(), Some(2));
    }
}
