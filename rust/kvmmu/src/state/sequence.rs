//! What is known of one sequence beside its page table.

use crate::prefix::Keys;
use crate::state::ORDERS;
use crate::state::runs_behind;
use crate::table::Space;

pub(crate) const NONE: u32 = u32::MAX;

/// One sequence; behind the lock of its slot.
///
/// `written <= scheduled <= tokens`; `published` counts blocks.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// Counts the sequences that had this slot; part of the id.
    pub(crate) generation: u64,
    pub(crate) open: bool,
    pub(crate) space: Space,
    /// Tokens that have a place.
    pub(crate) tokens: u32,
    /// Tokens handed to a step.
    pub(crate) scheduled: u32,
    /// Tokens whose KV is known to be written.
    pub(crate) written: u32,
    /// Positions from `written` to here may be written by a step in flight, even if a truncation has
    /// taken them back since.
    pub(crate) unsettled_to: u32,
    /// Tokens found cached by `open`.
    pub(crate) cached: u32,
    /// First token whose value is not known; blocks from there on are never published.
    pub(crate) unknown_from: u32,
    /// Blocks offered to the prefix index so far.
    pub(crate) published: u32,
    /// Changes whenever an entry other than behind the end does; rows look at it.
    pub(crate) version: u32,
    /// First logical block that is mapped: what lay before was released.
    pub(crate) first: u32,
    /// Page orders that it may use whatever its length, a bit for each.
    pub(crate) orders: Option<u32>,
    /// Pages of each order.
    pub(crate) pages: [u32; ORDERS],
    /// Groups of consecutive physical blocks.
    pub(crate) runs: u32,
    /// Last physical block.
    pub(crate) last: u32,
    pub(crate) keys: Option<Box<Keys>>,
}

impl Sequence {
    pub(crate) fn closed() -> Self {
        Self {
            generation: 0,
            open: false,
            space: Space::NONE,
            tokens: 0,
            scheduled: 0,
            written: 0,
            unsettled_to: 0,
            cached: 0,
            unknown_from: NONE,
            published: 0,
            version: 0,
            first: 0,
            orders: None,
            pages: [0; ORDERS],
            runs: 0,
            last: NONE,
            keys: None,
        }
    }

    /// All that was scheduled is written: no step in flight writes any of its blocks.
    pub(crate) fn settle(&mut self) {
        if self.written == self.scheduled {
            self.unsettled_to = self.written;
        }
    }

    /// Logical blocks that a step in flight may be writing, of `mapped` ones.
    pub(crate) fn unsettled(&self, block_size: u32, mapped: u32) -> std::ops::Range<u32> {
        if self.written < self.unsettled_to {
            self.written / block_size..self.unsettled_to.div_ceil(block_size).min(mapped)
        } else {
            0..0
        }
    }

    /// Key of one of its blocks in the prefix index.
    pub(crate) fn key(&self, index: u32) -> Option<Box<[u8]>> {
        self.keys.as_ref().and_then(|keys| keys.of(index))
    }

    /// Counts blocks that were mapped behind the end.
    pub(crate) fn extended_by(&mut self, blocks: &[u32]) {
        self.runs += runs_behind(self.last, blocks);
        self.last = blocks.last().copied().unwrap_or(self.last);
    }

    /// Complete regions of 512 blocks, of `mapped` blocks.
    pub(crate) fn regions(&self, mapped: u32) -> u32 {
        let from = self.space.virtual_of(self.first).div_ceil(512);
        (self.space.virtual_of(mapped) / 512).saturating_sub(from)
    }
}

/// Bits of an id that are the slot; the generation has 45 above them, enough to open and close a
/// sequence every microsecond for a year.
const SLOT_BITS: u32 = 18;

/// Id of a sequence: generation and slot.
pub(crate) fn id(generation: u64, slot: u32) -> i64 {
    (generation << SLOT_BITS | u64::from(slot)) as i64
}

/// (generation, slot) of an id; nothing for what can never be one.
pub(crate) fn parse(id: i64) -> Option<(u64, u32)> {
    let slot = id as u32 & ((1 << SLOT_BITS) - 1);
    // Generations begin with 1.
    (id >= 1 << SLOT_BITS).then_some((id as u64 >> SLOT_BITS, slot))
}

/// Numbers about one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceInfo {
    /// Tokens that have a place.
    pub num_tokens: u32,
    /// Tokens found in the prefix index by `open`.
    pub num_cached_tokens: u32,
    /// Tokens handed to a step, or cached.
    pub num_scheduled: u32,
    /// Tokens whose KV is known to be written.
    pub num_written: u32,
    /// Blocks that it maps, and those released from its front.
    pub num_blocks: u32,
    /// Groups of consecutive physical blocks.
    pub num_runs: u32,
    /// Blocks released from its front.
    pub num_released: u32,
    /// Pages of each order that it maps.
    pub pages: [u32; ORDERS],
    /// Complete aligned regions of 512 blocks, each of which one huge page could map.
    pub regions: u32,
    /// Empty blocks kept behind it.
    pub held: u32,
}
