//! The reverse map: block to the page-table entries that map it.
//!
//! ```text
//!  word of a block   0                  no mapping
//!                    vbn + 1            exactly one (a virtual block number has 36 bits)
//!                    bit 63 | line      several: a chain of lines of up to seven each
//! ```
//!
//! The word of a private block is stored by its sequence alone; as soon as a block may be known to
//! a second thread (published or shared) its word and its chain change only under the shared lock.

use crate::error::Result;
use crate::sync::{AtomicU64, Ordering, zeroed_u64};

const NONE: u32 = u32::MAX;
const CHAIN: u64 = 1 << 63;
const LINE: usize = 7;

/// Virtual block number: sequence slot and logical block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Vbn(u64);

impl Vbn {
    pub(crate) fn new(slot: u32, index: u32) -> Self {
        Vbn(u64::from(slot) << 18 | u64::from(index))
    }
    pub(crate) fn slot(self) -> u32 {
        (self.0 >> 18) as u32
    }
    pub(crate) fn index(self) -> u32 {
        (self.0 & 0x3_ffff) as u32
    }
}

/// One cache line of mappings.
#[derive(Debug, Clone, Copy)]
struct Line {
    vbns: [u64; LINE],
    len: u32,
    next: u32,
}

/// Chains of the blocks that are mapped more than once; behind the shared lock.
#[derive(Debug, Default)]
pub(crate) struct Chains {
    lines: Vec<Line>,
    free: Vec<u32>,
}

impl Chains {
    fn allocate(&mut self, first: u64, next: u32) -> u32 {
        let mut line = Line {
            vbns: [0; LINE],
            len: 1,
            next,
        };
        line.vbns[0] = first;
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

    fn each(&self, head: u32) -> impl Iterator<Item = u64> + '_ {
        let line = |at: u32| self.lines.get(at as usize);
        std::iter::successors(line(head), move |at| line(at.next))
            .flat_map(|line| line.vbns[..line.len as usize].iter().copied())
    }
}

/// Word of every block.
#[derive(Debug)]
pub(crate) struct Reverse {
    words: Box<[AtomicU64]>,
}

impl Reverse {
    pub(crate) fn new(num_blocks: u32) -> Result<Self> {
        let words = zeroed_u64(num_blocks as usize)?;
        Ok(Self { words })
    }

    fn load(&self, block: u32) -> u64 {
        self.words[block as usize].load(Ordering::Relaxed)
    }

    // Relaxed everywhere: a word belongs to one sequence or to the shared lock, and both hand over
    // by their own locks.
    fn store(&self, block: u32, word: u64) {
        self.words[block as usize].store(word, Ordering::Relaxed);
    }

    /// The only mapping of a block that was not mapped.
    pub(crate) fn set_only(&self, block: u32, vbn: Vbn) {
        debug_assert_eq!(self.load(block), 0);
        self.store(block, vbn.0 + 1);
    }

    /// Forgets the only mapping of a private block.
    pub(crate) fn clear_only(&self, block: u32) {
        debug_assert!(self.load(block) != 0 && self.load(block) & CHAIN == 0);
        self.store(block, 0);
    }

    pub(crate) fn add(&self, chains: &mut Chains, block: u32, vbn: Vbn) {
        let word = self.load(block);
        if word == 0 {
            return self.store(block, vbn.0 + 1);
        }
        if word & CHAIN == 0 {
            let head = chains.allocate(word - 1, NONE);
            let line = &mut chains.lines[head as usize];
            line.vbns[1] = vbn.0;
            line.len = 2;
            return self.store(block, CHAIN | u64::from(head));
        }
        let head = (word & !CHAIN) as u32;
        let line = &mut chains.lines[head as usize];
        if (line.len as usize) < LINE {
            line.vbns[line.len as usize] = vbn.0;
            line.len += 1;
        } else {
            let head = chains.allocate(vbn.0, head);
            self.store(block, CHAIN | u64::from(head));
        }
    }

    pub(crate) fn remove(&self, chains: &mut Chains, block: u32, vbn: Vbn) {
        let word = self.load(block);
        if word & CHAIN == 0 {
            assert_eq!(word, vbn.0 + 1, "block {block} is not mapped by {vbn:?}");
            return self.store(block, 0);
        }
        let head = (word & !CHAIN) as u32;
        let mut at = head;
        let place = loop {
            let line = &chains.lines[at as usize];
            if let Some(i) = line.vbns[..line.len as usize]
                .iter()
                .position(|&v| v == vbn.0)
            {
                break i;
            }
            at = line.next;
            assert_ne!(at, NONE, "block {block} is not mapped by {vbn:?}");
        };
        // The last of the head line takes the place; only the head line is ever not full.
        let Line { len, next, vbns } = chains.lines[head as usize];
        chains.lines[at as usize].vbns[place] = vbns[len as usize - 1];
        chains.lines[head as usize].len = len - 1;
        let alone = |line: &Line| line.len == 1 && line.next == NONE;
        if len == 1 {
            chains.free.push(head);
            self.store(block, CHAIN | u64::from(next));
        } else if alone(&chains.lines[head as usize]) {
            chains.free.push(head);
            self.store(block, chains.lines[head as usize].vbns[0] + 1);
        }
    }

    /// Appends every mapping of a block to `out`.
    pub(crate) fn mappings(&self, chains: &Chains, block: u32, out: &mut Vec<Vbn>) {
        match self.load(block) {
            0 => {}
            word if word & CHAIN == 0 => out.push(Vbn(word - 1)),
            word => out.extend(chains.each((word & !CHAIN) as u32).map(Vbn)),
        }
    }

    /// All mappings of `old` are now mappings of `new`, which had none.
    pub(crate) fn transfer(&self, old: u32, new: u32) {
        debug_assert_eq!(self.load(new), 0);
        self.store(new, self.load(old));
        self.store(old, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn mappings_are_a_bag(ops in proptest::collection::vec((0u32..2, 0u32..24, any::<bool>()), 1..200)) {
            let reverse = Reverse::new(3).unwrap();
            let mut chains = Chains::default();
            let mut model = [Vec::new(), Vec::new()];
            for (block, index, add) in ops {
                let vbn = Vbn::new(index / 5, index);
                let held = &mut model[block as usize];
                let at = held.iter().position(|&v| v == vbn);
                match (add, at) {
                    (true, None) => { reverse.add(&mut chains, block, vbn); held.push(vbn); }
                    (false, Some(i)) => { reverse.remove(&mut chains, block, vbn); held.remove(i); }
                    _ => {}
                }
                for (block, held) in model.iter_mut().enumerate() {
                    let mut seen = Vec::new();
                    reverse.mappings(&chains, block as u32, &mut seen);
                    seen.sort();
                    held.sort();
                    prop_assert_eq!(&seen, held);
                }
            }
            let mut seen = Vec::new();
            reverse.transfer(0, 2);
            reverse.mappings(&chains, 2, &mut seen);
            seen.sort();
            prop_assert_eq!(&seen, &model[0]);
        }
    }
}
