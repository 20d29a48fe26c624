//! LLFree (Wrenger et al., USENIX ATC 2023) as a contender: its own `core` crate, from a checkout.

use llfree::{Alloc, Classing, FrameId, HUGE_ORDER, Init, LLFree, MetaData, Request};

use crate::allocator::{Allocator, Exact, Pages};

/// LLFree with its `simple` classes: small and huge frames apart, one reservation of each a thread.
pub struct LlFree {
    frames: LLFree<'static>,
    threads: usize,
    metadata_bytes: usize,
}

impl LlFree {
    /// All blocks empty. The metadata is never freed: LLFree borrows it for ever.
    pub fn new(num_blocks: u32, threads: usize) -> Self {
        let (classing, _) = Classing::simple(threads);
        let size = LLFree::metadata_size(&classing, num_blocks as usize);
        let metadata_bytes = size.local + size.trees + size.lower;
        let frames = LLFree::new(
            num_blocks as usize,
            Init::FreeAll,
            &classing,
            MetaData::alloc(&size),
        );
        Self {
            frames: frames.expect("LLFree takes any number of frames"),
            threads,
            metadata_bytes,
        }
    }

    /// Bytes of all its tables.
    pub fn metadata_bytes(&self) -> usize {
        self.metadata_bytes
    }

    /// As `Classing::simple` makes requests.
    fn request(&self, thread: usize, order: u32) -> Request {
        let order = order as usize;
        let class = llfree::Class(u8::from(order >= HUGE_ORDER));
        Request::new(order, class, Some(thread % self.threads))
    }
}

impl Allocator for LlFree {
    fn claim(&self, thread: usize) -> Option<u32> {
        self.claim_page(thread, 0)
    }

    fn release(&self, thread: usize, block: u32) {
        self.release_page(thread, block, 0);
    }
}

impl Pages for LlFree {
    fn claim_page(&self, thread: usize, order: u32) -> Option<u32> {
        let got = self.frames.get(None, self.request(thread, order));
        got.ok().map(|(frame, _)| frame.0 as u32)
    }

    fn release_page(&self, thread: usize, first: u32, order: u32) {
        self.frames
            .put(FrameId(first as usize), self.request(thread, order))
            .expect("a frame that is held");
    }
}

impl Exact for LlFree {
    /// Past the reservations, which are for claims that may take any frame; given up if one of them
    /// holds the frame's tree.
    fn claim_exact(&self, _thread: usize, first: u32, order: u32) -> bool {
        let frame = Some(FrameId(first as usize));
        let request = Request {
            local: None,
            ..self.request(0, order)
        };
        self.frames.get(frame, request).is_ok() || {
            self.frames.drain();
            self.frames.get(frame, request).is_ok()
        }
    }
}
