//! The core of kvmmu: a memory-management unit for the KV caches of LLM serving.
//!
//! The KV cache of a serving engine is cut into blocks of a few tokens. This crate decides which
//! sequence holds which block, which blocks two sequences share, which stay cached for later
//! prompts, and which move so that free memory becomes contiguous again. It never touches the bytes
//! of a block: it returns the copies to make as plain pairs of block numbers.
//!
//! ```
//! use kvmmu::{Config, Keys, Mmu, Rows};
//!
//! let mmu = Mmu::new(Config::new(64, 4))?;
//! let mut rows = Rows::new(&mmu, 2, 16, 32)?;
//! let mut tables = rows.buffers();
//!
//! // A prompt of nine tokens takes three blocks at once.
//! let id = mmu.open(&[1, 2, 3, 4, 5, 6, 7, 8, 9], Keys::default())?;
//!
//! // A step writes them all, then one more.
//! for (query, new) in [(9, &[][..]), (1, &[10][..])] {
//!     let step = mmu.begin_step();
//!     let copies = mmu.prepare(step, &[id], Some(&[query]), Some(new), &mut rows, &mut tables.borrow())?;
//!     assert!(copies.is_empty());
//!     // ... the engine writes KV to tables.slot_mapping here ...
//!     mmu.written(step)?;
//!     mmu.end_step(step)?;
//! }
//! assert_eq!(tables.block_table[..4], [0, 1, 2, 64]); // 64 is the null block
//!
//! // What was written is found again, except for the last token, which is always computed.
//! mmu.close(id)?;
//! assert_eq!(mmu.matched_tokens(&[1, 2, 3, 4, 5, 6, 7, 8], &Keys::default()), 4);
//! mmu.validate(None)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The house
//!
//! | room | what lives there |
//! |---|---|
//! | `sync` | the only door to atomics and locks |
//! | [`pool`] | physical memory: which block is empty, which state each is in |
//! | [`table`] | virtual memory: the four-level page table |
//! | [`prefix`] | which full blocks hold which tokens; the order of eviction |
//! | `state` | [`Mmu`] itself, its locks, and the block transitions that verbs share |
//! | [`sequence`] | the verbs on sequences: open, append, prepare, fork, truncate, close, steps |
//! | [`compact`] | measure, plan, and the transaction of moves |
//! | `block_map`, `validate` | the whole state at one look: as a picture, and recounted |
//!
//! Arrows go down only, as the table is written: a room uses rooms above it in the table.

#![forbid(unsafe_code)]

mod block_map;
pub mod compact;
mod config;
mod error;
pub mod pool;
pub mod prefix;
pub mod sequence;
mod state;
mod stats;
mod sync;
pub mod table;
mod validate;

pub use block_map::BlockMap;
pub use compact::{Goal, Measure, Moves, Plan};
pub use config::{
    Config, Eviction, MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_BLOCKS_PER_SEQUENCE, MAX_EVENTS,
    MAX_SEQUENCES, MAX_TABLE_NODES, PageOrders,
};
pub use error::{Error, Result};
pub use pool::{End, Placement, Pool, PoolConfig, State, States, Zone};
pub use prefix::{Event, Events, Keys, Kind};
pub use sequence::{
    Cascade, CascadeLevel, CascadeSizes, DirtyRow, Lease, Opening, Quote, RowBuffers, Rows, Shape,
    Tables, Unit, When,
};
pub use state::{Mmu, SequenceInfo};
pub use stats::StatsReading;
pub use validate::Broken;

/// What a model of several threads says about them (`tests/loom.rs`, `tests/shuttle.rs`).
#[cfg(any(loom, shuttle))]
#[doc(hidden)]
pub mod model {
    #[cfg(loom)]
    pub use crate::pool::Index;

    /// The calling thread is this one from now on: it sits in the pool's seat of this number,
    /// modulo their number, which is 2.
    pub fn this_is_thread(number: usize) {
        crate::sync::number::set(number);
    }
}
