//! How long ago cached blocks entered the order of eviction.
//!
//! What lives here: a clock that ticks with each block that enters, the time of each, and their sums
//! by window, so that a place can be chosen by what it would cost. What never lives here: the order
//! itself ([`crate::prefix`]), and who goes next (`evict.rs`, `sequence/place.rs`).

use crate::error::Result;
use crate::pool::WINDOW;
use crate::sync::filled;

/// Times of the blocks that stand in the order of eviction.
#[derive(Debug)]
pub(crate) struct Ages {
    /// Blocks that have entered the order.
    clock: u64,
    /// When a block entered; meaningful only for those in the order.
    entered: Box<[u64]>,
    windows: Box<[Window]>,
}

/// A window's blocks in the order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Window {
    blocks: u32,
    /// Sum of the times at which they entered.
    entered: u64,
}

impl Ages {
    /// `num_blocks`: blocks that may be cached; 0 when none is.
    pub(crate) fn new(num_blocks: u32) -> Result<Self> {
        Ok(Self {
            clock: 0,
            entered: filled(0, num_blocks as usize)?,
            windows: filled(Window::default(), num_blocks.div_ceil(WINDOW) as usize)?,
        })
    }

    /// A block enters the order.
    pub(crate) fn enter(&mut self, block: u32) {
        self.clock += 1;
        self.set(block, self.clock);
    }

    /// A block leaves the order.
    pub(crate) fn leave(&mut self, block: u32) {
        let window = &mut self.windows[(block / WINDOW) as usize];
        window.blocks -= 1;
        window.entered -= self.entered[block as usize];
    }

    /// A block of the order has moved.
    pub(crate) fn replace(&mut self, old: u32, new: u32) {
        self.leave(old);
        self.set(new, self.entered[old as usize]);
    }

    fn set(&mut self, block: u32, at: u64) {
        self.entered[block as usize] = at;
        let window = &mut self.windows[(block / WINDOW) as usize];
        window.blocks += 1;
        window.entered += at;
    }

    /// Blocks that have entered the order since this one did.
    pub(crate) fn of(&self, block: u32) -> u64 {
        self.clock - self.entered[block as usize]
    }

    /// The ages of a window's blocks in the order, added up.
    pub(crate) fn total(&self, window: u32) -> u64 {
        // A pool without prefixes has no such blocks.
        let window = self.windows.get(window as usize).copied();
        let Window { blocks, entered } = window.unwrap_or_default();
        u64::from(blocks) * self.clock - entered
    }

    /// The mean age of a window's blocks in the order, 0 where there are none.
    pub(crate) fn mean(&self, window: u32) -> u64 {
        let blocks = self
            .windows
            .get(window as usize)
            .map_or(0, |window| window.blocks);
        self.total(window) / u64::from(blocks.max(1))
    }

    /// Whether each window says what a recount of the blocks in the order gives.
    pub(crate) fn agree(&self, blocks: impl Iterator<Item = u32>) -> bool {
        let mut windows = vec![Window::default(); self.windows.len()];
        for block in blocks {
            let window = &mut windows[(block / WINDOW) as usize];
            window.blocks += 1;
            window.entered += self.entered[block as usize];
        }
        *windows == *self.windows
    }
}
