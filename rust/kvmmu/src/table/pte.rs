//! One page-table entry: what maps one page of a sequence, or names the next table.
//!
//! What lives here: the bit layout. What never lives here: memory ([`super::Table`]).
//!
//! ```text
//!           leaf (maps)                         child (names a node)
//!   0       present                             present
//!   1       set                                 clear
//!   2..5    order: 2^order aligned blocks       -
//!   6..27   node kept for a split (level 2)     the node
//!  28..36   -                                   virtual offset (level 3)
//!  32..63   first physical block                37..63: generation of the node
//! ```
//! An absent entry is 0. Every entry of level 1 names its own block, whatever its order: a reader
//! never needs the others of its page (as with the contiguous hint of arm64).

const PRESENT: u64 = 1;
const LEAF: u64 = 2;
const ORDER_SHIFT: u32 = 2;
const NODE_SHIFT: u32 = 6;
const NODE_MASK: u64 = (1 << NODE_BITS) - 1;
const OFFSET_SHIFT: u32 = 28;
const OFFSET_MASK: u64 = 0x1ff;
const GENERATION_SHIFT: u32 = 37;
const BLOCK_SHIFT: u32 = 32;

/// Bits of a node number.
pub(crate) const NODE_BITS: u32 = 22;

/// A page-table entry, by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pte(pub(super) u64);

impl Pte {
    /// Maps nothing.
    pub const ABSENT: Pte = Pte(0);

    /// Maps one block of a page of `2^order`.
    pub fn leaf(block: u32, order: u32) -> Self {
        debug_assert!(order <= 9);
        Pte(PRESENT | LEAF | (u64::from(order) << ORDER_SHIFT) | (u64::from(block) << BLOCK_SHIFT))
    }

    /// Of a leaf: the same for the block behind it.
    pub(super) fn next(self) -> Self {
        Pte(self.0.wrapping_add(1 << BLOCK_SHIFT))
    }

    /// Maps the page of `2^order` blocks that starts at `block`; `node` is kept for a split.
    pub(super) fn huge(block: u32, order: u32, node: u32) -> Self {
        debug_assert!(block.is_multiple_of(1 << order));
        Pte(Pte::leaf(block, order).0 | (u64::from(node) << NODE_SHIFT))
    }

    /// Names a node of the next level, in one of its lives.
    pub(super) fn child(node: u32, generation: u64) -> Self {
        Pte(PRESENT | (u64::from(node) << NODE_SHIFT) | (generation << GENERATION_SHIFT))
    }

    /// A child whose logical blocks begin at this entry of its first table.
    pub(super) fn shifted(self, offset: u32) -> Self {
        let rest = self.0 & !(OFFSET_MASK << OFFSET_SHIFT);
        Pte(rest | (u64::from(offset) << OFFSET_SHIFT))
    }

    /// True unless absent.
    pub fn is_present(self) -> bool {
        self.0 & PRESENT != 0
    }

    /// True when the entry maps a page itself.
    pub fn is_leaf(self) -> bool {
        self.0 & LEAF != 0
    }

    /// log2 of the blocks of the page.
    pub fn order(self) -> u32 {
        (self.0 >> ORDER_SHIFT) as u32 & 0xf
    }

    /// Physical block (of a leaf).
    pub fn block(self) -> u32 {
        (self.0 >> BLOCK_SHIFT) as u32
    }

    /// The node that a child names, or that a huge leaf keeps.
    pub(super) fn node(self) -> u32 {
        (self.0 >> NODE_SHIFT & NODE_MASK) as u32
    }

    /// The offset of a child of level 3.
    pub(super) fn offset(self) -> u32 {
        (self.0 >> OFFSET_SHIFT & OFFSET_MASK) as u32
    }
}
