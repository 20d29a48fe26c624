//! What one entry of a row names: a block, a part of one, or a page of several.
//!
//! What lives here: the arithmetic of entries, the entry of padding, and whether blocks lie as a
//! page needs them. What never lives here: which rows there are and what is in them.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::state::{Mmu, Sequence};
use crate::table::Leaf;

/// Largest order of a page: 512 blocks, a node of the page table.
const MAX_ORDER: u32 = 9;

/// What the entries of a row name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unit {
    /// Blocks: an entry is a block's number.
    #[default]
    Block,
    /// Kernel blocks of so many tokens, a divisor of the block size. With `r` of them a block,
    /// block `b` is the entries `b * r .. (b + 1) * r`.
    KernelBlock {
        /// Tokens of one.
        tokens: u32,
    },
    /// Pages of `2^order` blocks, consecutive and aligned in physical memory: an entry is a page's
    /// number, `block >> order`.
    Page {
        /// 0 to 9.
        order: u32,
    },
}

/// A unit, checked against a pool.
#[derive(Debug, Clone, Copy)]
pub(super) struct Format {
    /// Entries of one block; 1 unless they are parts.
    pub(super) parts: u32,
    /// log2 of the blocks of one entry; 0 unless they are pages.
    pub(super) order: u32,
    /// Tokens of one entry.
    pub(super) tokens: u32,
    /// The entry of padding.
    pub(super) null: u32,
    /// What a row has a limit of, for errors.
    pub(super) name: &'static str,
    /// Pages that lie wholly in physical memory.
    pages: u32,
}

impl Format {
    /// Refuses what the pool cannot be read by.
    pub(super) fn new(unit: Unit, config: &Config) -> Result<Self> {
        let (size, null) = (config.block_size, config.null_block);
        let block = Self {
            parts: 1,
            order: 0,
            tokens: size,
            null,
            name: "blocks of one row",
            pages: config.num_blocks + 1,
        };
        match unit {
            Unit::Block | Unit::Page { order: 0 } => Ok(block),
            Unit::KernelBlock { tokens } => {
                if tokens == 0 || !size.is_multiple_of(tokens) {
                    return Err(Error::InvalidConfig(format!(
                        "kernel_block_size = {tokens}: allowed is a divisor of the block size, \
                         {size}; larger ones are pages (page_order)"
                    )));
                }
                let parts = size / tokens;
                let entries = (u64::from(config.num_blocks) + 1) * u64::from(parts);
                if entries > i32::MAX as u64 + 1 {
                    return Err(Error::InvalidConfig(format!(
                        "kernel_block_size = {tokens}: {entries} kernel blocks have no int32 numbers"
                    )));
                }
                Ok(Self {
                    parts,
                    tokens,
                    null: null * parts,
                    name: if parts == 1 {
                        block.name
                    } else {
                        "kernel blocks of one row"
                    },
                    ..block
                })
            }
            Unit::Page { order } => {
                if order > MAX_ORDER {
                    return Err(Error::InvalidConfig(format!(
                        "page_order = {order}: allowed is 0 to {MAX_ORDER}"
                    )));
                }
                let pages = (config.num_blocks + 1) >> order;
                if !null.is_multiple_of(1 << order) || null >> order >= pages {
                    return Err(no_null_page(config, order));
                }
                Ok(Self {
                    order,
                    tokens: size << order,
                    null: null >> order,
                    name: "pages of one row",
                    pages,
                    ..block
                })
            }
        }
    }

    /// Entries of so many tokens.
    pub(super) fn entries(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.tokens)
    }

    /// The first logical block that an entry names.
    pub(super) fn block_of(&self, entry: u32) -> u32 {
        (entry / self.parts) << self.order
    }

    /// The entry that names a logical block which lies in `block`.
    pub(super) fn entry_at(&self, at: u32, block: u32) -> u32 {
        (block >> self.order) * self.parts + at % self.parts
    }

    /// Writes the entries of a row from `from` on; `row` ends behind the last. Where blocks have parts,
    /// all of the first block's are written.
    pub(super) fn write(&self, mmu: &Mmu, sequence: &Sequence, from: u32, row: &mut [i32]) {
        let (first, end) = (self.block_of(from), mmu.blocks_for(sequence.tokens));
        let mut rest = &mut row[(from / self.parts * self.parts) as usize..];
        if first + 1 == end {
            // Decoding: one block is new, and it is known without a walk.
            return self.write_blocks(std::iter::once(sequence.last), rest);
        }
        let mut at = first;
        if at < sequence.first {
            // What was released from the front: an entry of padding each.
            let entries = ((sequence.first - at) * self.parts) >> self.order;
            let (released, tail) = rest.split_at_mut(entries as usize);
            released.fill(self.null as i32);
            (at, rest) = (sequence.first, tail);
        }
        for leaf in mmu.table.leaves(sequence.space, at, end) {
            let next = at + leaf.len() as u32;
            let entries = if self.order == 0 {
                leaf.len() * self.parts as usize
            } else {
                (next.div_ceil(1 << self.order) - at.div_ceil(1 << self.order)) as usize
            };
            let (here, tail) = rest.split_at_mut(entries.min(rest.len()));
            match (self.parts, self.order) {
                (1, 0) => leaf.write_to(here),
                (1, order) => {
                    let size = 1usize << order;
                    let skip = (at as usize).next_multiple_of(size) - at as usize;
                    self.write_blocks(leaf.every(skip, size), here);
                }
                _ => self.write_blocks(leaf.blocks(), here),
            }
            (at, rest) = (next, tail);
        }
    }

    /// Writes what stands for blocks that follow one another, or for pages that begin with them.
    fn write_blocks(&self, blocks: impl Iterator<Item = u32>, row: &mut [i32]) {
        match self.parts {
            1 => {
                for (entry, block) in row.iter_mut().zip(blocks) {
                    *entry = (block >> self.order) as i32;
                }
            }
            // The usual ones with a length that the compiler knows.
            2 => write_parts::<2>(blocks, row),
            4 => write_parts::<4>(blocks, row),
            8 => write_parts::<8>(blocks, row),
            16 => write_parts::<16>(blocks, row),
            parts => {
                for (entries, block) in row.chunks_mut(parts as usize).zip(blocks) {
                    write_from(block * parts, entries);
                }
            }
        }
    }

    /// Looks whether blocks lie in pages, from the first block of one on.
    pub(crate) fn pages(&self) -> PageCheck {
        PageCheck {
            order: self.order,
            pages: self.pages,
            next: 0,
        }
    }
}

/// Looks at the blocks of a sequence one after the other. A page that is not full may end anywhere,
/// but begins and continues like any other.
#[derive(Debug)]
pub(crate) struct PageCheck {
    order: u32,
    pages: u32,
    /// Where the next block must be, within a page.
    next: u32,
}

impl PageCheck {
    /// The next logical block, `index`. `Err`: it is not in place; the blocks of its page that are.
    pub(crate) fn block(&mut self, index: u32, block: u32) -> std::result::Result<(), u32> {
        let place = index & ((1 << self.order) - 1);
        let fits = match place {
            0 => self.begins(block),
            _ => block == self.next,
        };
        self.next = block + 1;
        if fits { Ok(()) } else { Err(place) }
    }

    fn begins(&self, block: u32) -> bool {
        block.is_multiple_of(1 << self.order) && block >> self.order < self.pages
    }

    /// The next logical blocks, from `at` on. `Err`: the first that is not in place, and the blocks of
    /// its page that are.
    pub(super) fn leaf(&mut self, at: u32, leaf: Leaf<'_>) -> std::result::Result<(), (u32, u32)> {
        let size = 1 << self.order;
        let mut index = at;
        for group in leaf.groups(size) {
            let (first, runs) = group.run();
            if runs && self.begins(first) && (index as usize).is_multiple_of(size) {
                self.next = first + group.len() as u32;
                index += group.len() as u32;
                continue;
            }
            for block in group.blocks() {
                self.block(index, block)
                    .map_err(|in_place| (index, in_place))?;
                index += 1;
            }
        }
        Ok(())
    }
}

/// Numbers from `first` on. They fit: the largest was looked at when the unit was checked.
fn write_from(first: u32, entries: &mut [i32]) {
    for (i, entry) in (0u32..).zip(entries) {
        *entry = first.wrapping_add(i) as i32;
    }
}

/// `PARTS` entries of each block; fewer of the last.
fn write_parts<const PARTS: usize>(mut blocks: impl Iterator<Item = u32>, row: &mut [i32]) {
    let mut chunks = row.chunks_exact_mut(PARTS);
    // `chunks` first: it must not cost a block when it ends.
    for (entries, block) in (&mut chunks).zip(&mut blocks) {
        let first = block.wrapping_mul(PARTS as u32);
        for (i, entry) in entries.iter_mut().enumerate().take(PARTS) {
            *entry = first.wrapping_add(i as u32) as i32;
        }
    }
    let rest = chunks.into_remainder();
    if let (false, Some(block)) = (rest.is_empty(), blocks.next()) {
        write_from(block.wrapping_mul(PARTS as u32), rest);
    }
}

/// Padding must name a page that can be read and that no sequence ever has: the null block is its
/// first block, and memory (`num_blocks + 1` blocks) holds all of it.
fn no_null_page(config: &Config, order: u32) -> Error {
    let (null, size) = (config.null_block, 1u64 << order);
    let memory = u64::from(config.num_blocks) + 1;
    let first = u64::from(null) >> order << order;
    let last = first + size - 1;
    let wants = match memory >> order {
        0 => format!("num_blocks of at least {}", size - 1),
        1 => "null_block = 0".into(),
        pages => format!(
            "null_block = 0 or another multiple of {size} up to {}",
            (pages - 1) * size
        ),
    };
    Error::InvalidConfig(format!(
        "page_order = {order}: padding points at the page of the null block {null}, blocks {first} \
         to {last}; the null block must be its first, and the {memory} blocks of memory (the null \
         block among them) must hold all of it: allowed is {wants}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(num_blocks: u32, null_block: u32, block_size: u32) -> Config {
        let mut config = Config::new(num_blocks, block_size);
        config.null_block = null_block;
        config
    }

    #[test]
    fn the_null_page_is_whole_and_begins_with_the_null_block() {
        for num_blocks in 1..40 {
            for null in 0..=num_blocks {
                for order in 0..=9 {
                    let whole = (null..null + (1 << order)).all(|block| block <= num_blocks);
                    let legal = null % (1 << order) == 0 && whole;
                    let format = Format::new(Unit::Page { order }, &config(num_blocks, null, 16));
                    assert_eq!(format.is_ok(), legal, "{num_blocks} {null} {order}");
                    if let Ok(format) = format {
                        assert_eq!(format.null << order, null);
                    }
                }
            }
        }
    }

    #[test]
    fn kernel_blocks_have_numbers_of_31_bits() {
        let tokens = |tokens| Unit::KernelBlock { tokens };
        let last = config((1 << 29) - 1, (1 << 29) - 1, 16);
        let format = Format::new(tokens(4), &last).unwrap();
        assert_eq!(format.entry_at(3, (1 << 29) - 1), i32::MAX as u32);
        assert!(Format::new(tokens(2), &last).is_err());
        assert!(Format::new(tokens(4), &config(1 << 29, 0, 16)).is_err());
    }
}
