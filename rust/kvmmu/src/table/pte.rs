//! One page-table entry: what maps one page of a sequence.
//!
//! ```text
//!   0      present
//!   1      leaf       (an entry of an upper level: set, it maps; clear, it names a child node)
//!   2..5   order      the page is 2^order blocks, naturally aligned
//!  16..47  block      first physical block of the page, or index of the child node
//! ```
//! An absent entry is 0.

const PRESENT: u64 = 1;
const LEAF: u64 = 2;
const ORDER_SHIFT: u32 = 2;
const BLOCK_SHIFT: u32 = 16;

/// A page-table entry, by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pte(pub(super) u64);

impl Pte {
    /// Maps nothing.
    pub const ABSENT: Pte = Pte(0);

    /// Maps the page of `2^order` blocks that starts at `block`.
    pub fn leaf(block: u32, order: u32) -> Self {
        debug_assert!(order <= 9 && block.is_multiple_of(1 << order));
        Pte(PRESENT | LEAF | (u64::from(order) << ORDER_SHIFT) | (u64::from(block) << BLOCK_SHIFT))
    }

    /// Names a node of the next level.
    pub(super) fn child(node: u32) -> Self {
        Pte(PRESENT | (u64::from(node) << BLOCK_SHIFT))
    }

    /// True unless absent.
    pub fn is_present(self) -> bool {
        self.0 & PRESENT != 0
    }

    /// True when the entry maps a page itself.
    pub fn is_leaf(self) -> bool {
        self.0 & LEAF != 0
    }

    /// log2 of the blocks that it maps.
    pub fn order(self) -> u32 {
        (self.0 >> ORDER_SHIFT) as u32 & 0xf
    }

    /// First physical block of the page (of an upper entry that is no leaf: the child node).
    pub fn block(self) -> u32 {
        (self.0 >> BLOCK_SHIFT) as u32
    }
}
