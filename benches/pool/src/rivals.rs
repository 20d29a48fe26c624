//! What a team would write or take in place of kvmmu's pool.
//!
//! What lives here: a locked list, a lock-free queue, a lock-free stack, a buddy allocator. What
//! never lives here: LLFree (`crate::llfree`), whose source is not always there.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use buddy_system_allocator::LockedFrameAllocator;
use crossbeam_queue::ArrayQueue;

use crate::allocator::{Allocator, Pages};

/// A free list under a lock, last in, first out.
pub struct LockedList(Mutex<Vec<u32>>);

impl LockedList {
    /// All blocks empty, the lowest on top.
    pub fn new(num_blocks: u32) -> Self {
        Self(Mutex::new((0..num_blocks).rev().collect()))
    }

    fn list(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        self.0.lock().expect("no holder of the lock panics")
    }
}

impl Allocator for LockedList {
    fn claim(&self, _thread: usize) -> Option<u32> {
        self.list().pop()
    }

    fn release(&self, _thread: usize, block: u32) {
        self.list().push(block);
    }

    fn claim_batch(&self, _thread: usize, n: u32, out: &mut Vec<u32>) {
        let mut list = self.list();
        let rest = (list.len().checked_sub(n as usize)).expect("fewer empty blocks than asked");
        // From the top down, as that many single claims would return them.
        out.extend(list[rest..].iter().rev());
        list.truncate(rest);
    }

    fn release_batch(&self, _thread: usize, blocks: &[u32]) {
        self.list().extend_from_slice(blocks);
    }
}

/// crossbeam's bounded queue: first in, first out, as vLLM's list of free blocks.
pub struct Queue(ArrayQueue<u32>);

impl Queue {
    /// All blocks empty, the lowest first.
    pub fn new(num_blocks: u32) -> Self {
        let queue = ArrayQueue::new(num_blocks as usize);
        for block in 0..num_blocks {
            queue.push(block).expect("room for every block");
        }
        Self(queue)
    }
}

impl Allocator for Queue {
    fn claim(&self, _thread: usize) -> Option<u32> {
        self.0.pop()
    }

    fn release(&self, _thread: usize, block: u32) {
        self.0.push(block).expect("room for every block");
    }
}

/// Treiber's stack (IBM RJ 5118, 1986) over block numbers, with a tag against ABA.
///
/// ```text
/// head  63..32 tag, one more with every change    31..0 top block + 1, 0 when the stack is empty
/// next  block + 1 below this one, 0 at the bottom
/// ```
///
/// The tag wraps after 2^32 changes: a pop that sleeps through exactly that many would go wrong.
pub struct TaggedStack {
    head: AtomicU64,
    next: Box<[AtomicU32]>,
}

impl TaggedStack {
    /// All blocks empty, the lowest on top.
    pub fn new(num_blocks: u32) -> Self {
        let below = |block| {
            AtomicU32::new(if block + 1 == num_blocks {
                0
            } else {
                block + 2
            })
        };
        Self {
            head: AtomicU64::new(u64::from(num_blocks.min(1))),
            next: (0..num_blocks).map(below).collect(),
        }
    }

    /// Puts a chain, linked from `first` down to `last`, on top.
    fn push(&self, first: u32, last: u32) {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            self.next[last as usize].store(head as u32, Ordering::Relaxed);
            let new = tagged(head, first + 1);
            // Release: hands the links (and what was done to the blocks) to the Acquire in `claim`.
            let swap =
                (self.head).compare_exchange_weak(head, new, Ordering::Release, Ordering::Relaxed);
            match swap {
                Ok(_) => return,
                Err(seen) => head = seen,
            }
        }
    }
}

fn tagged(old_head: u64, top: u32) -> u64 {
    ((old_head >> 32).wrapping_add(1) << 32) | u64::from(top)
}

impl Allocator for TaggedStack {
    fn claim(&self, _thread: usize) -> Option<u32> {
        // Acquire: pairs with the Release in `push`.
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let block = (head as u32).checked_sub(1)?;
            // May be stale; then the tag has moved on and the exchange fails.
            let below = self.next[block as usize].load(Ordering::Relaxed);
            let swap = (self.head).compare_exchange_weak(
                head,
                tagged(head, below),
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            match swap {
                Ok(_) => return Some(block),
                Err(seen) => head = seen,
            }
        }
    }

    fn release(&self, _thread: usize, block: u32) {
        self.push(block, block);
    }

    fn release_batch(&self, _thread: usize, blocks: &[u32]) {
        for pair in blocks.windows(2) {
            self.next[pair[0] as usize].store(pair[1] + 1, Ordering::Relaxed);
        }
        if let (Some(&first), Some(&last)) = (blocks.first(), blocks.last()) {
            self.push(first, last);
        }
    }
}

/// The crate `buddy_system_allocator`, under its own spin lock.
pub struct Buddy(LockedFrameAllocator);

impl Buddy {
    /// All blocks empty.
    pub fn new(num_blocks: u32) -> Self {
        let frames = LockedFrameAllocator::new();
        frames.lock().add_frame(0, num_blocks as usize);
        Self(frames)
    }
}

impl Allocator for Buddy {
    fn claim(&self, thread: usize) -> Option<u32> {
        self.claim_page(thread, 0)
    }

    fn release(&self, thread: usize, block: u32) {
        self.release_page(thread, block, 0);
    }
}

impl Pages for Buddy {
    fn claim_page(&self, _thread: usize, order: u32) -> Option<u32> {
        (self.0.lock().alloc(1 << order)).map(|first| first as u32)
    }

    fn release_page(&self, _thread: usize, first: u32, order: u32) {
        self.0.lock().dealloc(first as usize, 1 << order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: u32 = 1000;

    /// Every block once, by one, by batch, and by two threads at a time.
    fn hands_out_every_block_once(allocator: &impl Allocator) {
        for round in 0..3 {
            let mut all = Vec::new();
            allocator.claim_batch(0, 400, &mut all);
            all.extend(std::iter::from_fn(|| allocator.claim(0)));
            let mut sorted = all.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..BLOCKS).collect::<Vec<_>>(), "round {round}");
            let (batch, singles) = all.split_at(all.len() / 3);
            allocator.release_batch(0, batch);
            singles.iter().for_each(|&b| allocator.release(0, b));
        }
        let held: Vec<AtomicU32> = (0..BLOCKS).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let held = &held;
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let block = allocator.claim(thread).expect("two threads hold few");
                        let before = held[block as usize].swap(1, Ordering::AcqRel);
                        assert_eq!(before, 0, "block {block} was handed out twice");
                        held[block as usize].store(0, Ordering::Release);
                        allocator.release(thread, block);
                    }
                });
            }
        });
    }

    #[test]
    fn every_rival_hands_out_every_block_once() {
        hands_out_every_block_once(&LockedList::new(BLOCKS));
        hands_out_every_block_once(&Queue::new(BLOCKS));
        hands_out_every_block_once(&TaggedStack::new(BLOCKS));
        hands_out_every_block_once(&Buddy::new(BLOCKS));
        hands_out_every_block_once(&crate::ours::Ours::new(BLOCKS));
        #[cfg(feature = "llfree")]
        hands_out_every_block_once(&crate::llfree::LlFree::new(BLOCKS, 2));
    }

    #[test]
    fn pages_are_aligned_and_apart() {
        fn check(allocator: &impl Pages) {
            let mut firsts: Vec<u32> = std::iter::from_fn(|| allocator.claim_page(0, 2)).collect();
            firsts.sort_unstable();
            assert_eq!(firsts, (0..BLOCKS).step_by(4).collect::<Vec<_>>());
            firsts
                .iter()
                .for_each(|&first| allocator.release_page(0, first, 2));
        }
        check(&Buddy::new(BLOCKS));
        check(&crate::ours::Ours::new(BLOCKS));
        #[cfg(feature = "llfree")]
        check(&crate::llfree::LlFree::new(BLOCKS, 2));
    }
}
