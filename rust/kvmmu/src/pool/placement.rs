//! Where new blocks are taken from: one small choice that can be swapped.
//!
//! A placement only says where a search starts; it never makes a claim fail.

use crate::sync::{AtomicU64, Ordering};

/// Where new blocks are taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Lowest address first: exact with one thread.
    AddressOrder,
    /// Pseudo-random from a seed: the worst case, for tests.
    Scatter {
        /// Seed of the sequence of places.
        seed: u64,
    },
}

/// Draws the places of [`Placement::Scatter`] (SplitMix64: Steele, Lea, Flood, OOPSLA 2014).
#[derive(Debug)]
pub(crate) struct Scatter {
    state: AtomicU64,
}

impl Scatter {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            state: AtomicU64::new(seed),
        }
    }

    /// A block number below `n`.
    pub(crate) fn draw(&self, n: u32) -> u32 {
        // Relaxed: only the value itself matters, no other memory hangs on it.
        let mut z = self
            .state
            .fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        ((u128::from(z) * u128::from(n)) >> 64) as u32
    }
}
