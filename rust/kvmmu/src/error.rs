//! What can go wrong, with the numbers that decided.
//!
//! Every error is returned before anything has changed.

use thiserror::Error;

/// All errors of the core.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// Not enough available blocks.
    #[error("need {needed} blocks, {available} available of {num_blocks}")]
    OutOfBlocks {
        /// Blocks to claim.
        needed: u64,
        /// Empty blocks and cached ones that could be evicted for it.
        available: u64,
        /// Blocks in the pool, those given back not counted.
        num_blocks: u64,
    },
    /// Enough blocks are available, in the wrong shape.
    #[error(
        "need {needed} contiguous blocks, largest run {largest_run}, {available} available of {num_blocks}"
    )]
    Fragmented {
        /// Length of the run that was asked for.
        needed: u64,
        /// Longest run that exists or could be made by moves.
        largest_run: u64,
        /// Available blocks.
        available: u64,
        /// Blocks in the pool, those given back not counted.
        num_blocks: u64,
    },
    /// Blocks of a sequence do not lie as rows of pages need them: all blocks of a page consecutive,
    /// from an aligned place on.
    #[error(
        "sequence {sequence}, page {group} of 2^{order} blocks: the first {in_place} of its {needed} \
         blocks are in place, the next is not; pages need consecutive blocks from an aligned place \
         on, {available} available of {num_blocks}"
    )]
    Scattered {
        /// The sequence.
        sequence: i64,
        /// Which of its groups of `2^order` logical blocks is the first that is not a page.
        group: u32,
        /// log2 of the blocks of a page.
        order: u32,
        /// Blocks that the sequence has in this group.
        needed: u32,
        /// Blocks of the group, from its first on, that are in place.
        in_place: u32,
        /// Available blocks.
        available: u32,
        /// Blocks in the pool, those given back not counted.
        num_blocks: u32,
    },
    /// The preallocated nodes of the page table, or the sequence slots, are used up.
    #[error("out of {what}: all {capacity} are in use")]
    OutOfTables {
        /// Which of them.
        what: &'static str,
        /// How many there are.
        capacity: u64,
    },
    /// No open sequence has this id.
    #[error("unknown sequence {sequence}")]
    UnknownSequence {
        /// The id that was given.
        sequence: i64,
    },
    /// Another thread works on the sequence, or it is listed twice in one batch.
    #[error("sequence {sequence} is in use by another call, or listed twice in this one")]
    ConcurrentUse {
        /// The id that was given.
        sequence: i64,
    },
    /// A fixed limit would be passed.
    #[error("{what}: need {needed}, limit {limit}")]
    LimitExceeded {
        /// What the limit is on.
        what: &'static str,
        /// What the call needs.
        needed: u64,
        /// What there is.
        limit: u64,
    },
    /// A setting or an argument that is not allowed.
    #[error("{0}")]
    InvalidConfig(String),
    /// A block is not in a state that allows this.
    #[error("block {block}: {reason}")]
    InvalidBlock {
        /// The block.
        block: u64,
        /// Why not.
        reason: &'static str,
    },
    /// A step that is unknown, has ended, or is used out of order.
    #[error("step {step}: {reason}")]
    InvalidStep {
        /// The step.
        step: u64,
        /// Why not.
        reason: String,
    },
    /// A lease that is unknown or has ended.
    #[error("lease {lease} is unknown or has ended already")]
    InvalidLease {
        /// The lease.
        lease: u64,
    },
    /// Moves that cannot be begun, committed or read.
    #[error("{0}")]
    InvalidPlan(String),
}

/// Result of every fallible call of the core.
pub type Result<T> = std::result::Result<T, Error>;
