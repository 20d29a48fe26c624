//! The tokens of every block, by physical block: what a prefix hit is compared with.
//!
//! A block's tokens are written by the one sequence that may write the block, before it is
//! published, and read by others only after. They travel with the block when it moves.

use crate::error::Result;
use crate::sync::{AtomicU32, Ordering, zeroed_u32};

/// Token ids, `block_size` a block (int32 as bits).
#[derive(Debug)]
pub(crate) struct Tokens {
    block_size: usize,
    ids: Box<[AtomicU32]>,
}

impl Tokens {
    /// Room for `num_blocks` blocks; none when nobody will look.
    pub(crate) fn new(num_blocks: u32, block_size: u32, wanted: bool) -> Result<Self> {
        let block_size = block_size as usize;
        let room = if wanted {
            num_blocks as usize * block_size
        } else {
            0
        };
        let ids = zeroed_u32(room)?;
        Ok(Self { block_size, ids })
    }

    fn of(&self, block: u32) -> &[AtomicU32] {
        let start = block as usize * self.block_size;
        &self.ids[start..start + self.block_size]
    }

    /// Stores tokens from `offset` of a block on.
    pub(crate) fn store(&self, block: u32, offset: usize, tokens: &[i32]) {
        if self.ids.is_empty() {
            return;
        }
        // Relaxed: the shared lock that publishes the block hands them to readers.
        for (cell, &token) in self.of(block)[offset..].iter().zip(tokens) {
            cell.store(token as u32, Ordering::Relaxed);
        }
    }

    /// Copies the first `len` tokens of a block to another.
    pub(crate) fn copy(&self, source: u32, destination: u32, len: usize) {
        if self.ids.is_empty() {
            return;
        }
        for (from, to) in self.of(source)[..len].iter().zip(self.of(destination)) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Appends all tokens of a block to `out`.
    pub(crate) fn read(&self, block: u32, out: &mut Vec<i32>) {
        out.extend(
            self.of(block)
                .iter()
                .map(|cell| cell.load(Ordering::Relaxed) as i32),
        );
    }

    /// Whether a block holds exactly these tokens.
    pub(crate) fn equal(&self, block: u32, tokens: &[i32]) -> bool {
        let differs = (self.of(block).iter().zip(tokens)).fold(0, |acc, (cell, &token)| {
            acc | (cell.load(Ordering::Relaxed) ^ token as u32)
        });
        differs == 0 && tokens.len() == self.block_size
    }
}
