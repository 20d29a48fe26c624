//! The settings of an [`Mmu`](crate::Mmu), checked once.

use crate::error::{Error, Result};
use crate::pool::{Placement, check_anchor};
use crate::table::NODE_BITS;

/// Longest address space of one sequence: two levels of 512 entries.
pub const MAX_BLOCKS_PER_SEQUENCE: u32 = 512 * 512;
/// Sequence slots that the upper two levels can name.
pub const MAX_SEQUENCES: u32 = 512 * 512;
/// Largest page table: a number of 22 bits names a node. One less, so that 31 bits hold one more than the
/// place of any entry, as the reverse map writes it.
pub const MAX_TABLE_NODES: u32 = (1 << NODE_BITS) - 1;
/// Largest pool.
pub const MAX_BLOCKS: u32 = i32::MAX as u32 - 1;
/// Longest sequence whose virtual offset can be chosen: one table of 512 entries less.
const MAX_SHIFTED_BLOCKS: u32 = MAX_BLOCKS_PER_SEQUENCE - 512;
/// Most events that are kept.
pub const MAX_EVENTS: u32 = 1 << 24;
/// Largest block.
pub const MAX_BLOCK_SIZE: u32 = 4096;

/// The page sizes that a pool uses: orders 0 to 9, 0 always among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageOrders(u16);

impl PageOrders {
    /// Single blocks alone.
    pub const SINGLE: PageOrders = PageOrders(1);
    /// 1, 4 and 512 blocks.
    pub const DEFAULT: PageOrders = PageOrders(1 | 1 << 2 | 1 << 9);

    /// Pages of `2^order` blocks for each of these.
    pub fn new(orders: &[u32]) -> Result<Self> {
        let wrong = orders.iter().find(|&&order| order > 9);
        if let Some(order) = wrong {
            return Err(Error::InvalidConfig(format!(
                "page_orders: {order} is not allowed, orders are 0 to 9"
            )));
        }
        if !orders.contains(&0) {
            return Err(Error::InvalidConfig(format!(
                "page_orders = {orders:?}: 0 (single blocks) must be among them"
            )));
        }
        Ok(PageOrders(
            orders.iter().fold(0, |bits, order| bits | 1 << order),
        ))
    }

    /// A bit for each order.
    pub(crate) fn bits(self) -> u32 {
        u32::from(self.0)
    }

    /// The orders, ascending.
    pub fn iter(self) -> impl Iterator<Item = u32> {
        (0..10).filter(move |&order| self.0 >> order & 1 != 0)
    }

    /// log2 of the blocks that a run is aligned to: the largest page below a huge one.
    pub(crate) fn alignment(self) -> u32 {
        u32::from(self.0 & 0x1ff).ilog2()
    }
}

/// Which cached blocks are evicted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// The least recently used.
    Lru,
    /// The least frequently used, of those the least recently used. What was used much long ago
    /// counts less and less.
    Lfu,
}

/// Settings. [`Config::new`] gives the defaults; change fields, then build an
/// [`Mmu`](crate::Mmu) from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Usable blocks, 1 ..= [`MAX_BLOCKS`]. The null block is one more.
    pub num_blocks: u32,
    /// The block that padding points at, which is never handed out: `0 ..= num_blocks`. By default
    /// the last, `num_blocks`; engines that have one of their own say which.
    pub null_block: u32,
    /// Tokens a block, 1 ..= [`MAX_BLOCK_SIZE`].
    pub block_size: u32,
    /// Sequences open at once, 1 ..= [`MAX_SEQUENCES`].
    pub max_sequences: u32,
    /// Longest sequence in blocks; at most `num_blocks` and [`MAX_BLOCKS_PER_SEQUENCE`]. Above
    /// 261,632 no sequence is shifted against its pages ([`Config::page_orders`]).
    pub max_blocks_per_sequence: u32,
    /// Nodes (of 512 entries, 4 KiB each, touched on first use) of the page table, 4 ..=
    /// [`MAX_TABLE_NODES`].
    pub table_nodes: u32,
    /// Keep the blocks of closed sequences for later prompts.
    pub prefix_caching: bool,
    /// Which cached blocks are evicted first; what stands behind a prefix always before it.
    pub eviction: Eviction,
    /// Evict, of the tenth that goes first, the blocks in the windows with the fewest blocks that
    /// are neither empty nor evictable: so whole windows become empty.
    pub page_aware: bool,
    /// Where new blocks are taken from.
    pub placement: Placement,
    /// Share of the pool that is the anchor region, 0 to below 1: prompts that are expected to be
    /// shared and to stay go there first, everything else last.
    pub anchor: f64,
    /// Page sizes. With more than single blocks, pages of 512 blocks come from the low end of the
    /// pool and everything else from the high end.
    pub page_orders: PageOrders,
    /// A sequence of fewer tokens is mapped by single blocks.
    pub medium_from: u32,
    /// A sequence of at most so many tokens has no pages of 512 blocks.
    pub huge_from: u32,
    /// Empty blocks kept behind a sequence to grow into, at most; anybody who needs them gets them.
    /// Needs [`Placement::AddressOrder`].
    pub hold_blocks: u32,
    /// A block that is published while an equal one is known is given back, and the sequence maps
    /// the first (tokens are compared; the KV of the two may differ by rounding).
    pub dedup: bool,
    /// Most blocks that one compaction pass moves, at least 1.
    pub budget_blocks: u32,
    /// Compaction starts when free windows (of 512 blocks, empty or evictable) are below this share of
    /// what the available blocks could make; 0: never.
    pub windows_below: f64,
    /// Keep the guarantee: never more windows held than live blocks need plus one plus so many, and
    /// never more moves than frees (`docs/guarantee.md`). It takes the place of `windows_below`.
    pub guarantee: Option<u32>,
    /// Sequences are gathered in the background as far as a moved block saves so many runs; 0: never.
    pub gather_least: f64,
    /// Fragmentation ratio over available blocks above which compaction starts, in the place of
    /// `windows_below`: each would undo what the other does.
    pub compaction_start: Option<f64>,
    /// Ratio below which it stops again.
    pub compaction_stop: f64,
    /// Changes of the prefix index that are kept for [`Mmu::events`](crate::Mmu::events), at most
    /// [`MAX_EVENTS`]; 0: none are noted.
    pub events: u32,
}

impl Config {
    /// The defaults for a pool of `num_blocks` blocks of `block_size` tokens.
    pub fn new(num_blocks: u32, block_size: u32) -> Self {
        let mut config = Self {
            num_blocks,
            null_block: num_blocks,
            block_size,
            max_sequences: 1024,
            max_blocks_per_sequence: num_blocks.min(MAX_SHIFTED_BLOCKS),
            table_nodes: 0,
            prefix_caching: true,
            eviction: Eviction::Lru,
            page_aware: true,
            placement: Placement::AddressOrder,
            anchor: 0.15,
            page_orders: PageOrders::DEFAULT,
            medium_from: 512,
            huge_from: 2048,
            hold_blocks: 8,
            dedup: false,
            budget_blocks: 32,
            windows_below: 0.8,
            guarantee: None,
            gather_least: 0.1,
            compaction_start: None,
            compaction_stop: 0.30,
            events: 0,
        };
        config.table_nodes = config.default_table_nodes();
        config
    }

    /// Block numbers that the pool spans, a null block among them included.
    pub(crate) fn span(&self) -> u32 {
        self.num_blocks + u32::from(self.null_block < self.num_blocks)
    }

    /// Largest virtual offset of a sequence.
    pub(crate) fn most_shift(&self) -> u32 {
        (MAX_BLOCKS_PER_SEQUENCE - self.max_blocks_per_sequence).min(511)
    }

    /// Nodes that every mix of sequences can live with, or 65,536 (256 MiB of address space,
    /// touched on first use) where that would be more.
    pub fn default_table_nodes(&self) -> u32 {
        let leaves = u64::from((self.max_blocks_per_sequence + self.most_shift()).div_ceil(512));
        let worst = 1
            + u64::from(self.max_sequences.div_ceil(512))
            + u64::from(self.max_sequences) * (1 + leaves);
        let least = 3 + 2 * u64::from(self.max_sequences) + leaves;
        worst.min(least.max(65_536)) as u32
    }

    /// Checks every field; the error names the field, its value and what is allowed.
    pub fn check(&self) -> Result<()> {
        fn range(name: &str, value: u32, least: u32, most: u32) -> Result<()> {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(Error::InvalidConfig(format!(
                "{name} = {value}: allowed is {least} to {most}"
            )))
        }
        range("num_blocks", self.num_blocks, 1, MAX_BLOCKS)?;
        range("null_block", self.null_block, 0, self.num_blocks)?;
        range("block_size", self.block_size, 1, MAX_BLOCK_SIZE)?;
        range("max_sequences", self.max_sequences, 1, MAX_SEQUENCES)?;
        let longest = self.num_blocks.min(MAX_BLOCKS_PER_SEQUENCE);
        range(
            "max_blocks_per_sequence",
            self.max_blocks_per_sequence,
            1,
            longest,
        )?;
        range("table_nodes", self.table_nodes, 4, MAX_TABLE_NODES)?;
        range("medium_from", self.medium_from, 0, self.huge_from)?;
        range("hold_blocks", self.hold_blocks, 0, 512)?;
        range("budget_blocks", self.budget_blocks, 1, MAX_BLOCKS)?;
        range("events", self.events, 0, MAX_EVENTS)?;
        if self.events > 0 && !self.prefix_caching {
            return Err(Error::InvalidConfig(format!(
                "events = {} with prefix_caching = False: allowed is 0, for nothing is published",
                self.events
            )));
        }
        check_anchor(self.anchor)?;
        let share = |name: &str, value: f64, most: f64, text: &str| {
            if (0.0..=most).contains(&value) {
                return Ok(());
            }
            Err(Error::InvalidConfig(format!(
                "{name} = {value}: allowed is 0 to {text}"
            )))
        };
        if let Some(slack) = self.guarantee
            && self.placement != Placement::AddressOrder
        {
            return Err(Error::InvalidConfig(format!(
                "guarantee = {slack} with placement = \"{}\": allowed is \"{}\"",
                self.placement.name(),
                Placement::AddressOrder.name()
            )));
        }
        share("windows_below", self.windows_below, 1.0, "1")?;
        share("gather_least", self.gather_least, 1.0, "1")?;
        if let Some(start) = self.compaction_start {
            share("compaction_start", start, 1.0, "1")?;
        }
        let (most, text) = match self.compaction_start {
            Some(start) => (start, format!("compaction_start ({start})")),
            None => (1.0, "1".into()),
        };
        share("compaction_stop", self.compaction_stop, most, &text)?;
        Ok(())
    }
}
