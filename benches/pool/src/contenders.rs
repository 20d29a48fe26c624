//! All contenders side by side, each over the same number of blocks.

use crate::allocator::Allocator;
use crate::ours::Ours;
use crate::rivals::{Buddy, LockedList, Queue, TaggedStack};

/// One of each.
pub struct Contenders {
    pub ours: Ours,
    pub list: LockedList,
    pub queue: Queue,
    pub stack: TaggedStack,
    pub buddy: Buddy,
    #[cfg(feature = "llfree")]
    pub llfree: crate::llfree::LlFree,
}

/// How the contenders are called in the output.
pub mod name {
    pub const OURS: &str = "kvmmu";
    pub const LIST: &str = "Mutex<Vec>";
    pub const QUEUE: &str = "ArrayQueue";
    pub const STACK: &str = "tagged Treiber stack";
    pub const BUDDY: &str = "buddy_system_allocator";
    #[cfg(feature = "llfree")]
    pub const LLFREE: &str = "LLFree";
}

impl Contenders {
    /// All blocks empty. `threads`: how many will use each at a time.
    pub fn new(num_blocks: u32, threads: usize) -> Self {
        let _ = threads; // only LLFree has to know
        Self {
            ours: Ours::new(num_blocks),
            list: LockedList::new(num_blocks),
            queue: Queue::new(num_blocks),
            stack: TaggedStack::new(num_blocks),
            buddy: Buddy::new(num_blocks),
            #[cfg(feature = "llfree")]
            llfree: crate::llfree::LlFree::new(num_blocks, threads),
        }
    }

    /// With their names.
    pub fn all(&self) -> Vec<(&'static str, &dyn Allocator)> {
        vec![
            (name::OURS, &self.ours),
            (name::LIST, &self.list),
            (name::QUEUE, &self.queue),
            (name::STACK, &self.stack),
            (name::BUDDY, &self.buddy),
            #[cfg(feature = "llfree")]
            (name::LLFREE, &self.llfree),
        ]
    }
}

/// A load for each contender that hands out single blocks, compiled for it (no dynamic call inside).
#[macro_export]
macro_rules! loads_of_all {
    ($of:expr, |$allocator:ident| $load:expr) => {{
        use $crate::contenders::name;
        let mut loads = $crate::loads_of_those_with_pages!($of, |$allocator| $load);
        let $allocator = &$of.list;
        loads.push((name::LIST, Box::new($load)));
        let $allocator = &$of.queue;
        loads.push((name::QUEUE, Box::new($load)));
        let $allocator = &$of.stack;
        loads.push((name::STACK, Box::new($load)));
        loads
    }};
}

/// The same for each contender that hands out pages.
#[macro_export]
macro_rules! loads_of_those_with_pages {
    ($of:expr, |$allocator:ident| $load:expr) => {{
        use $crate::contenders::name;
        let mut loads: Vec<(&'static str, Box<dyn $crate::workers::Load + '_>)> = Vec::new();
        let $allocator = &$of.ours;
        loads.push((name::OURS, Box::new($load)));
        let $allocator = &$of.buddy;
        loads.push((name::BUDDY, Box::new($load)));
        #[cfg(feature = "llfree")]
        {
            let $allocator = &$of.llfree;
            loads.push((name::LLFREE, Box::new($load)));
        }
        loads
    }};
}
