//! The counter word of one window: how many credits it has, and who has it.
//!
//! What lives here: the bit layout, as pure functions. What never lives here: memory;
//! [`super::physical`] keeps the words.
//!
//! ```text
//!  29..21  barren    bit 20 + k: a search for an aligned page of order k found none, and nothing
//!                    was released into the window since
//!      18  BUSY      its whole page is being released: nobody else may touch the lines
//!      17  PAGE      claimed whole, as one page
//!      16  HOME      a thread's home: the rest of its credits are in the seat of that thread
//!  15..0   count     credits: empty blocks of the window that nobody has spoken for
//! ```
//!
//! | from | to | how (one compare-and-swap or addition) | who may |
//! |---|---|---|---|
//! | count c | c - n | n credits taken | holder of a reservation of n |
//! | count c | c + n | n credits raised | who cleared n bits, or took n credits and needs them not |
//! | free | HOME, count 0 or a rest | adopted | a thread without a home |
//! | HOME | free, count + seat | left | who took the seat's credits away |
//! | count = window | PAGE, count 0 | claimed whole | holder of a reservation of a window |
//! | PAGE | BUSY | release begins | owner of the page |
//! | BUSY | count = window | release ends | the same |
//! | PAGE | plain, count 0 | split: from now on single blocks | owner of a part |

/// Bits of the count.
pub(crate) const COUNT: u32 = 0xffff;
/// A thread's home.
pub(crate) const HOME: u32 = 1 << 16;
/// Claimed whole.
pub(crate) const PAGE: u32 = 1 << 17;
/// Being released whole.
pub(crate) const BUSY: u32 = 1 << 18;
/// All the barren bits.
pub(crate) const BARREN: u32 = 0x1ff << 21;

/// The barren bit of an order, 1 to 9.
pub(crate) fn barren(order: u32) -> u32 {
    debug_assert!((1..=9).contains(&order));
    1 << (20 + order)
}

/// Credits.
pub(crate) fn count(word: u32) -> u32 {
    word & COUNT
}
