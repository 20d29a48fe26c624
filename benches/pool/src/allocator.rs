//! What is measured: a set of numbered blocks that threads claim from and release to.
//!
//! What lives here: the traits and the filling of an allocator before it is measured. What never
//! lives here: an implementation ([`crate::ours`], [`crate::rivals`], `crate::llfree`) or a clock.

/// Hands out blocks `0 .. num_blocks` one by one or by the batch.
///
/// `thread` numbers the caller, from 0, below the number of threads that the allocator was made for.
/// Those that do not care ignore it.
pub trait Allocator: Send + Sync {
    /// One block; `None` if none is empty.
    fn claim(&self, thread: usize) -> Option<u32>;

    /// Gives a block back.
    fn release(&self, thread: usize, block: u32);

    /// Appends `n` blocks to `out`. Panics if there are too few: no measure asks for more.
    fn claim_batch(&self, thread: usize, n: u32, out: &mut Vec<u32>) {
        for _ in 0..n {
            out.push(self.claim(thread).expect("fewer empty blocks than asked"));
        }
    }

    /// Gives blocks back.
    fn release_batch(&self, thread: usize, blocks: &[u32]) {
        for &block in blocks {
            self.release(thread, block);
        }
    }
}

/// Hands out pages as well: `2^order` consecutive, naturally aligned blocks.
pub trait Pages: Allocator {
    /// The first block of a page; `None` if there is no empty one.
    fn claim_page(&self, thread: usize, order: u32) -> Option<u32>;

    /// Gives a page back.
    fn release_page(&self, thread: usize, first: u32, order: u32);
}

/// Claims what it is told to as well.
pub trait Exact: Pages {
    /// The page of `2^order` blocks that begins with `first`; false, and nothing is claimed, if a
    /// block of it is not empty or out of reach.
    fn claim_exact(&self, thread: usize, first: u32, order: u32) -> bool;
}

/// What one call claims and one call releases: a block or a page.
pub trait Unit<A: ?Sized>: Send + Sync {
    /// Claims one.
    fn claim(allocator: &A, thread: usize) -> Option<u32>;
    /// Releases it.
    fn release(allocator: &A, thread: usize, first: u32);
}

/// One block.
pub struct Block;

impl<A: Allocator> Unit<A> for Block {
    fn claim(allocator: &A, thread: usize) -> Option<u32> {
        allocator.claim(thread)
    }

    fn release(allocator: &A, thread: usize, first: u32) {
        allocator.release(thread, first);
    }
}

/// A page of `2^ORDER` blocks.
pub struct Page<const ORDER: u32>;

impl<A: Pages, const ORDER: u32> Unit<A> for Page<ORDER> {
    fn claim(allocator: &A, thread: usize) -> Option<u32> {
        allocator.claim_page(thread, ORDER)
    }

    fn release(allocator: &A, thread: usize, first: u32) {
        allocator.release_page(thread, first, ORDER);
    }
}

/// Claims all `num_blocks` and gives `empty` of them back, drawn at random: a pool long in use.
/// Returns the blocks that stay claimed, in random order.
pub fn scatter<A: Allocator + ?Sized>(
    allocator: &A,
    num_blocks: u32,
    empty: u32,
    random: &mut fastrand::Rng,
) -> Vec<u32> {
    let mut blocks = Vec::with_capacity(num_blocks as usize);
    allocator.claim_batch(0, num_blocks, &mut blocks);
    random.shuffle(&mut blocks);
    for block in blocks.drain(num_blocks as usize - empty as usize..) {
        allocator.release(0, block);
    }
    blocks
}

/// Claims blocks one by one until `empty` are left: a pool that was filled once.
pub fn fill<A: Allocator + ?Sized>(allocator: &A, num_blocks: u32, empty: u32) {
    for _ in empty..num_blocks {
        allocator.claim(0).expect("a new allocator has every block");
    }
}
