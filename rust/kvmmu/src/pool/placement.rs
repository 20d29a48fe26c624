//! Where new blocks are taken from: small choices that can be swapped.
//!
//! What lives here: the names of the choices, and the random one. What never lives here: claims; a
//! placement says where a search starts and never makes a claim fail
//! ([`super::claim`], `choose`).

use crate::sync::{AtomicU64, Ordering};

/// Where new blocks are taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Lowest address first: exact with one thread; with several, single blocks come from the
    /// lowest window that no other thread has made its home.
    AddressOrder,
    /// Of the next 64 windows with empty blocks the one with the fewest (as LLFree prefers windows
    /// that are partly used: Wrenger et al., USENIX ATC 2023).
    Fullest,
    /// In the order of release, as vLLM's `BlockPool` does: for comparison, and for hosts that
    /// expect its block numbers. Takes a lock, and 8 bytes more a block.
    Fifo,
    /// Pseudo-random from a seed: the worst case, for tests.
    Scatter {
        /// Seed of the sequence of places.
        seed: u64,
    },
}

impl Placement {
    /// What users call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::AddressOrder => "address",
            Self::Fullest => "fullest",
            Self::Fifo => "fifo",
            Self::Scatter { .. } => "scatter",
        }
    }
}

/// One end of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Small addresses first.
    Low,
    /// The highest window first; ascending within it.
    High,
}

/// A preference for one part of the pool. Soft: when nothing is left there, the other part serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zone {
    /// Everything below the anchor region.
    Body,
    /// The anchor region: the last share of the pool, for blocks that are expected to live long
    /// and be shared, so that they do not pin holes elsewhere.
    Anchor,
}

/// How the blocks of one claim belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    /// One sequence's: in few long runs, where the placement can.
    Together,
    /// Of as many sequences: single blocks, which fill the small holes.
    Apart,
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

    /// So many block numbers below `span`.
    pub(crate) fn draw(&self, n: u32, span: u32) -> Vec<u32> {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let all = STEP.wrapping_mul(n.into());
        // Relaxed: only the value itself matters, no other memory hangs on it.
        let first = self.state.fetch_add(all, Ordering::Relaxed);
        let place = |i: u32| {
            let mut z = first.wrapping_add(STEP.wrapping_mul(i.into()));
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
            ((u128::from(z) * u128::from(span)) >> 64) as u32
        };
        (0..n).map(place).collect()
    }
}
