//! Compaction: how scattered the available blocks are, which moves gather them, and the transaction
//! that carries moves out safely.
//!
//! - `measure` and `plan` are pure functions over bit words;
//! - `survey` reads the state for them and holds the default trigger;
//! - `transaction` is `begin`, `commit` and `abort`;
//! - `give_back` takes whole groups of blocks offline, and brings them back;
//! - `moves` is what travels to whoever copies.
//!
//! What never lives here: copying.

mod give_back;
mod groups;
pub mod measure;
mod moves;
pub mod plan;
mod survey;
mod transaction;

pub use moves::Moves;
pub use survey::{Goal, Measure, Plan};
