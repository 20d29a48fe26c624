//! Who holds which block, as the measure itself keeps it.
//!
//! What lives here: every sequence's blocks, live blocks a window, and what it would take to empty
//! windows. What never lives here: an allocator; nothing here believes one.

use std::collections::HashMap;

/// Blocks of a window: a huge page.
pub const WINDOW: usize = 512;

/// Blocks of sequences, and whose each is.
pub struct Memory {
    owners: Vec<Option<(i64, usize)>>,
    live: Vec<usize>,
    sequences: HashMap<i64, Vec<u32>>,
    held: usize,
}

impl Memory {
    /// Nobody holds anything. Blocks behind the last whole window are in no window.
    pub fn new(num_blocks: u32) -> Self {
        let num_blocks = num_blocks as usize;
        Self {
            owners: vec![None; num_blocks],
            live: vec![0; num_blocks / WINDOW],
            sequences: HashMap::new(),
            held: 0,
        }
    }

    /// A sequence got more blocks. Panics if one of them is somebody's: it was handed out twice.
    pub fn claimed(&mut self, sequence: i64, blocks: &[u32]) {
        let own = self.sequences.entry(sequence).or_default();
        for &block in blocks {
            let owner = &mut self.owners[block as usize];
            assert!(owner.is_none(), "block {block} was handed out twice");
            *owner = Some((sequence, own.len()));
            own.push(block);
            if let Some(live) = self.live.get_mut(block as usize / WINDOW) {
                *live += 1;
            }
        }
        self.held += blocks.len();
    }

    /// A sequence ends: the blocks that it had, in order.
    pub fn released(&mut self, sequence: i64) -> Vec<u32> {
        let blocks = self.sequences.remove(&sequence).unwrap_or_default();
        for &block in &blocks {
            self.owners[block as usize] = None;
            if let Some(live) = self.live.get_mut(block as usize / WINDOW) {
                *live -= 1;
            }
        }
        self.held -= blocks.len();
        blocks
    }

    /// A block was moved. Panics unless the one was held and the other was not.
    pub fn moved(&mut self, source: u32, destination: u32) {
        let owner = self.owners[source as usize].take();
        let (sequence, index) = owner.expect("a block that is held");
        let blocks = self.sequences.get_mut(&sequence).expect("an owner is open");
        blocks[index] = destination;
        let owner = &mut self.owners[destination as usize];
        assert!(owner.is_none(), "block {destination} was handed out twice");
        *owner = Some((sequence, index));
        for (block, change) in [(source, -1), (destination, 1)] {
            if let Some(live) = self.live.get_mut(block as usize / WINDOW) {
                *live = live.wrapping_add_signed(change);
            }
        }
    }

    /// The blocks of an open sequence, in order.
    pub fn blocks(&self, sequence: i64) -> &[u32] {
        &self.sequences[&sequence]
    }

    /// Whether somebody holds a block.
    pub fn is_held(&self, block: u32) -> bool {
        self.owners[block as usize].is_some()
    }

    /// Live blocks of each window.
    pub fn live(&self) -> &[usize] {
        &self.live
    }

    /// Blocks that nobody holds.
    pub fn empty(&self) -> usize {
        self.owners.len() - self.held
    }

    /// Windows without a live block.
    pub fn free_windows(&self) -> usize {
        self.live.iter().filter(|&&live| live == 0).count()
    }

    /// The windows with the fewest live blocks, so many of them, the fewest first.
    ///
    /// While `k` windows' worth of blocks are empty none of them is full, so none lies under a huge
    /// page, and there is room elsewhere for what moves out of them.
    pub fn cheapest(&self, k: usize) -> Vec<usize> {
        let mut windows: Vec<usize> = (0..self.live.len()).collect();
        windows.sort_by_key(|&window| self.live[window]);
        windows.truncate(k);
        windows
    }

    /// The least moves that make so many windows free, window by window: how many live blocks each of
    /// the cheapest has.
    pub fn moves_for(&self, k: usize) -> Vec<usize> {
        let windows = self.cheapest(k).into_iter();
        windows.map(|window| self.live[window]).collect()
    }
}

/// Whether 512 blocks are a huge page: consecutive and aligned.
pub fn is_huge_page(blocks: &[u32]) -> bool {
    blocks.len() == WINDOW
        && (blocks[0] as usize).is_multiple_of(WINDOW)
        && blocks.windows(2).all(|pair| pair[1] == pair[0] + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_are_counted_by_the_live_blocks_of_the_cheapest_windows() {
        let mut memory = Memory::new(4 * WINDOW as u32);
        memory.claimed(1, &(0..512).collect::<Vec<_>>());
        memory.claimed(2, &[512, 513, 1024]);
        assert_eq!(memory.free_windows(), 1);
        assert_eq!(memory.moves_for(3), [0, 1, 2]);
        assert_eq!(memory.empty(), 3 * WINDOW - 3);
        memory.moved(1024, 514);
        assert_eq!(memory.blocks(2), [512, 513, 514]);
        assert_eq!(memory.moves_for(3), [0, 0, 3]);
        assert_eq!(memory.released(2), [512, 513, 514]);
        assert_eq!(memory.free_windows(), 3);
        assert!(!memory.is_held(512));
    }

    #[test]
    #[should_panic(expected = "block 7 was handed out twice")]
    fn a_block_that_is_handed_out_twice_is_noticed() {
        let mut memory = Memory::new(1024);
        memory.claimed(1, &[7]);
        memory.claimed(2, &[8, 7]);
    }

    #[test]
    fn a_huge_page_is_consecutive_and_aligned() {
        let run = |first: u32| (first..first + 512).collect::<Vec<_>>();
        assert!(is_huge_page(&run(1024)));
        assert!(!is_huge_page(&run(1)));
        assert!(!is_huge_page(&run(1024)[..511]));
        let mut broken = run(0);
        broken.swap(3, 4);
        assert!(!is_huge_page(&broken));
    }
}
