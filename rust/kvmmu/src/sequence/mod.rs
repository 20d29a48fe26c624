//! The verbs on sequences, one file each.
//!
//! | file | verbs |
//! |---|---|
//! | `open` | `open`, `matched_tokens`, `quote` |
//! | `write` | what `append` and `prepare` share: making the places to write writable (copy-on-write) |
//! | `place` | where the blocks of a sequence come from: pages, runs, holds |
//! | `held` | the same in the guarantee mode: windows that are held first |
//! | `append` | `append` |
//! | `prepare` | `prepare`, `export`: schedule a batch and write its rows |
//! | `rows` | the rows themselves: what is already in them, what is to be written |
//! | `unit` | what one entry of a row names: a block, a part of one, a page |
//! | `cascade` | rows that begin with the same blocks, for cascade attention |
//! | `steps` | `begin_step`, `written`, `cancel`, `end_step` |
//! | `fork`, `close` | `fork`; `close`, `truncate`, `release_before` |
//! | `blocks` | `pin`, `unpin`, `evict`, `references` |
//! | `lease` | `lease`, `end_lease` |
//! | `events` | `events`, `published` |
//! | `look` | `info`, `block_table`, `translate`, `look`, `sequences` |
//!
//! What never lives here: moves, the layout of the state.

mod append;
mod blocks;
mod cascade;
mod close;
mod events;
mod fork;
mod held;
mod lease;
mod look;
mod open;
mod place;
mod prepare;
mod rows;
mod steps;
mod unit;
mod write;

pub use cascade::{Cascade, CascadeLevel, CascadeSizes};
pub use lease::Lease;
pub use open::{Opening, Quote, Shape, When};
pub use rows::{DirtyRow, RowBuffers, Rows, Tables};
pub use unit::Unit;
