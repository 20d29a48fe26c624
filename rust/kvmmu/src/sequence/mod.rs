//! The verbs on sequences, one file each.
//!
//! | file | verbs |
//! |---|---|
//! | `open` | `open`, `matched_tokens`, `quote` |
//! | `write` | what `append` and `prepare` share: making the places to write writable (copy-on-write) |
//! | `place` | where the blocks of a sequence come from: pages, runs, holds |
//! | `append` | `append` |
//! | `prepare` | `prepare`, `export`: schedule a batch and write its rows |
//! | `rows` | the rows themselves: what is already in them, what is to be written |
//! | `steps` | `begin_step`, `written`, `cancel`, `end_step` |
//! | `fork`, `close` | `fork`; `close`, `truncate`, `release_before` |
//! | `blocks` | `pin`, `unpin`, `evict`, `references` |
//! | `lease` | `lease`, `end_lease` |
//! | `look` | `info`, `block_table`, `translate`, `look`, `sequences` |
//!
//! What never lives here: moves, the layout of the state.

mod append;
mod blocks;
mod close;
mod fork;
mod lease;
mod look;
mod open;
mod place;
mod prepare;
mod rows;
mod steps;
mod write;

pub use lease::Lease;
pub use open::{Opening, Quote, When};
pub use rows::{RowBuffers, Rows, Tables};
