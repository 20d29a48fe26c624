//! The settings of an [`Mmu`](crate::Mmu), checked once.

use crate::error::{Error, Result};
use crate::pool::{Placement, check_anchor};

/// Longest address space of one sequence: two levels of 512 entries.
pub const MAX_BLOCKS_PER_SEQUENCE: u32 = 512 * 512;
/// Sequence slots that the upper two levels can name.
pub const MAX_SEQUENCES: u32 = 512 * 512;
/// Largest pool.
pub const MAX_BLOCKS: u32 = i32::MAX as u32 - 1;
/// Largest block.
pub const MAX_BLOCK_SIZE: u32 = 4096;

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
    /// Longest sequence in blocks; at most `num_blocks` and [`MAX_BLOCKS_PER_SEQUENCE`].
    pub max_blocks_per_sequence: u32,
    /// Nodes (of 512 entries, 4 KiB each, touched on first use) of the page table.
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
    /// Most blocks that one compaction pass moves, at least 1.
    pub budget_blocks: u32,
    /// Fragmentation ratio over available blocks above which compaction starts.
    pub compaction_start: f64,
    /// Ratio below which it stops again.
    pub compaction_stop: f64,
}

impl Config {
    /// The defaults for a pool of `num_blocks` blocks of `block_size` tokens.
    pub fn new(num_blocks: u32, block_size: u32) -> Self {
        let mut config = Self {
            num_blocks,
            null_block: num_blocks,
            block_size,
            max_sequences: 1024,
            max_blocks_per_sequence: num_blocks.min(MAX_BLOCKS_PER_SEQUENCE),
            table_nodes: 0,
            prefix_caching: true,
            eviction: Eviction::Lru,
            page_aware: true,
            placement: Placement::AddressOrder,
            anchor: 0.15,
            budget_blocks: 32,
            compaction_start: 0.35,
            compaction_stop: 0.30,
        };
        config.table_nodes = config.default_table_nodes();
        config
    }

    /// Block numbers that the pool spans, a null block among them included.
    pub(crate) fn span(&self) -> u32 {
        self.num_blocks + u32::from(self.null_block < self.num_blocks)
    }

    /// Nodes that every mix of sequences can live with, or 65,536 (256 MiB of address space,
    /// touched on first use) where that would be more.
    pub fn default_table_nodes(&self) -> u32 {
        let leaves = u64::from(self.max_blocks_per_sequence.div_ceil(512));
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
        range("table_nodes", self.table_nodes, 4, 1 << 24)?;
        range("budget_blocks", self.budget_blocks, 1, MAX_BLOCKS)?;
        check_anchor(self.anchor)?;
        let (start, stop) = (self.compaction_start, self.compaction_stop);
        if !(0.0..=1.0).contains(&start) {
            return Err(Error::InvalidConfig(format!(
                "compaction_start = {start}: allowed is 0 to 1"
            )));
        }
        if !(0.0..=start).contains(&stop) {
            return Err(Error::InvalidConfig(format!(
                "compaction_stop = {stop}: allowed is 0 to compaction_start ({start})"
            )));
        }
        Ok(())
    }
}
