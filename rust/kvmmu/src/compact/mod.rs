//! Compaction: how scattered the available blocks are, which moves gather them, and the transaction
//! that carries moves out safely.
//!
//! - `measure`, `plan` (one run), `windows` (aligned groups) and `gather` (one sequence) are pure
//!   functions over bit words;
//! - `survey` reads the state for them and plans what a caller wishes;
//! - `background` is what moves without being asked; `promote` the huge pages that it makes;
//! - `transaction` is `begin`, `commit` and `abort`;
//! - `give_back` takes whole groups of blocks offline, and brings them back;
//! - `moves` is what travels to whoever copies.
//!
//! What never lives here: copying.

mod background;
pub mod gather;
mod give_back;
pub mod measure;
mod moves;
pub mod plan;
mod promote;
mod survey;
mod transaction;
pub mod windows;

pub use moves::Moves;
pub use survey::{Goal, Measure, Plan};
