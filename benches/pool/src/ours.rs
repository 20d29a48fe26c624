//! kvmmu's pool as a contender.

use kvmmu::pool::{Placement, Pool, PoolConfig};

use crate::allocator::{Allocator, Exact, Pages};

/// kvmmu's pool; it knows its threads by itself.
pub struct Ours(pub Pool);

impl Ours {
    /// All blocks empty, default placement.
    pub fn new(num_blocks: u32) -> Self {
        Self::placed(num_blocks, None)
    }

    /// All blocks empty; `None` is the default placement.
    pub fn placed(num_blocks: u32, placement: Option<Placement>) -> Self {
        let mut config = PoolConfig::new(num_blocks);
        if let Some(placement) = placement {
            config.placement = placement;
        }
        Self(Pool::new(&config).expect("a valid configuration"))
    }
}

impl Allocator for Ours {
    fn claim(&self, _thread: usize) -> Option<u32> {
        self.0.claim()
    }

    fn release(&self, _thread: usize, block: u32) {
        self.0.release(block).expect("a block that is held");
    }

    fn claim_batch(&self, _thread: usize, n: u32, out: &mut Vec<u32>) {
        (self.0.claim_batch(n, out)).expect("fewer empty blocks than asked");
    }

    fn release_batch(&self, _thread: usize, blocks: &[u32]) {
        self.0.release_batch(blocks).expect("blocks that are held");
    }
}

impl Pages for Ours {
    fn claim_page(&self, _thread: usize, order: u32) -> Option<u32> {
        self.0.claim_page(order)
    }

    fn release_page(&self, _thread: usize, first: u32, order: u32) {
        (self.0.release_page(first, order)).expect("a page that is held");
    }
}

impl Exact for Ours {
    fn claim_exact(&self, _thread: usize, first: u32, order: u32) -> bool {
        self.0.claim_exact(first, 1 << order)
    }
}
