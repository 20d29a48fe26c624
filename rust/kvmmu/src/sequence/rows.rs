//! The rows that an attention kernel reads, and what is already in them.
//!
//! Buffers are the caller's and never change address. A row remembers which sequence it holds, at
//! which version and up to which block, so that a decode step writes only what is new.

use crate::error::{Error, Result};
use crate::state::{Mmu, NONE, Sequence};

/// Borrowed output buffers of one call.
#[derive(Debug)]
pub struct RowBuffers<'a> {
    /// `[rows, width]`: physical blocks, the null block where there is none.
    pub block_table: &'a mut [i32],
    /// `[rows]`: tokens scheduled so far, 0 in unused rows.
    pub seq_lens: &'a mut [i32],
    /// `[tokens]`: physical block x block size + offset of every token of the step; unused entries
    /// point into the null block.
    pub slot_mapping: &'a mut [i64],
    /// `[rows + 1]`: where each row's tokens begin in `slot_mapping`; repeats its last value.
    pub query_start_loc: &'a mut [i32],
}

/// Output buffers that own their memory, for use from Rust.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Tables {
    pub block_table: Vec<i32>,
    pub seq_lens: Vec<i32>,
    pub slot_mapping: Vec<i64>,
    pub query_start_loc: Vec<i32>,
}

impl Tables {
    /// The buffers, for one call.
    pub fn borrow(&mut self) -> RowBuffers<'_> {
        RowBuffers {
            block_table: &mut self.block_table,
            seq_lens: &mut self.seq_lens,
            slot_mapping: &mut self.slot_mapping,
            query_start_loc: &mut self.query_start_loc,
        }
    }
}

/// What one row holds.
#[derive(Debug, Clone, Copy)]
struct Held {
    sequence: i64,
    version: u32,
    blocks: u32,
    /// Its length as written.
    tokens: i32,
}

const NOTHING: Held = Held {
    sequence: 0,
    version: 0,
    blocks: 0,
    tokens: 0,
};

/// Registered rows: their shape and what is in them.
#[derive(Debug)]
pub struct Rows {
    uid: u64,
    null_block: u32,
    block_size: u32,
    width: usize,
    max_tokens: usize,
    held: Vec<Held>,
    num_rows: usize,
    num_tokens: usize,
}

impl Rows {
    /// Rows for `rows` sequences of at most `width` blocks, and steps of at most `max_tokens`
    /// tokens.
    pub fn new(mmu: &Mmu, rows: usize, width: usize, max_tokens: usize) -> Result<Self> {
        for (name, value) in [
            ("rows", rows),
            ("blocks a row", width),
            ("tokens a step", max_tokens),
        ] {
            if value == 0 || i32::try_from(value).is_err() {
                return Err(Error::InvalidConfig(format!(
                    "{value} {name}: allowed is 1 to {}",
                    i32::MAX
                )));
            }
        }
        Ok(Self {
            uid: mmu.uid,
            null_block: mmu.null_block(),
            block_size: mmu.config.block_size,
            width,
            max_tokens,
            held: vec![NOTHING; rows],
            num_rows: 0,
            num_tokens: 0,
        })
    }

    /// Fresh buffers of this shape.
    pub fn buffers(&self) -> Tables {
        let mut tables = Tables {
            block_table: vec![0; self.held.len() * self.width],
            seq_lens: vec![0; self.held.len()],
            slot_mapping: vec![0; self.max_tokens],
            query_start_loc: vec![0; self.held.len() + 1],
        };
        self.clear(&mut tables.borrow());
        tables
    }

    /// Makes buffers say that nothing is in them; to be called once when they are registered.
    pub fn clear(&self, buffers: &mut RowBuffers<'_>) {
        buffers.block_table.fill(self.null_block as i32);
        buffers.seq_lens.fill(0);
        buffers.slot_mapping.fill(self.null_slot());
        buffers.query_start_loc.fill(0);
    }

    fn null_slot(&self) -> i64 {
        i64::from(self.null_block) * i64::from(self.block_size)
    }

    /// Rows of the last `prepare` or `export`.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Tokens of the last `prepare`.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Refuses a batch of so many rows that does not fit, buffers that are not of this shape, and
    /// another manager.
    pub fn check(&self, mmu: &Mmu, batch: usize, buffers: &RowBuffers<'_>) -> Result<()> {
        if self.uid != mmu.uid {
            return Err(Error::InvalidConfig(
                "these rows belong to another manager".into(),
            ));
        }
        let rows = self.held.len();
        let shapes = [
            ("block_table", buffers.block_table.len(), rows * self.width),
            ("seq_lens", buffers.seq_lens.len(), rows),
            ("slot_mapping", buffers.slot_mapping.len(), self.max_tokens),
            ("query_start_loc", buffers.query_start_loc.len(), rows + 1),
        ];
        if let Some((name, is, wanted)) = shapes.into_iter().find(|&(_, is, wanted)| is != wanted) {
            return Err(Error::InvalidConfig(format!(
                "{name} has {is} elements, registered were {wanted}"
            )));
        }
        if batch > rows {
            let (needed, limit) = (batch as u64, rows as u64);
            return Err(Error::LimitExceeded {
                what: "rows of the batch",
                needed,
                limit,
            });
        }
        Ok(())
    }

    pub(super) fn check_width(&self, blocks: u32) -> Result<()> {
        if blocks as usize > self.width {
            let (needed, limit) = (u64::from(blocks), self.width as u64);
            return Err(Error::LimitExceeded {
                what: "blocks of one row",
                needed,
                limit,
            });
        }
        Ok(())
    }

    pub(super) fn check_tokens(&self, tokens: u64) -> Result<()> {
        let limit = self.max_tokens as u64;
        if tokens > limit {
            return Err(Error::LimitExceeded {
                what: "tokens of the step",
                needed: tokens,
                limit,
            });
        }
        Ok(())
    }

    /// Brings one row up to date.
    pub(super) fn write(
        &mut self,
        mmu: &Mmu,
        row: usize,
        id: i64,
        sequence: &Sequence,
        buffers: &mut RowBuffers<'_>,
    ) {
        let blocks = mmu.blocks_for(sequence.tokens);
        let held = &mut self.held[row];
        let same = held.sequence == id && held.version == sequence.version && held.blocks <= blocks;
        let from = if same { held.blocks } else { 0 };
        let stale = held.blocks;
        *held = Held {
            sequence: id,
            version: sequence.version,
            blocks,
            tokens: sequence.scheduled as i32,
        };
        let entries = &mut buffers.block_table[row * self.width..(row + 1) * self.width];
        if from + 1 == blocks {
            entries[from as usize] = sequence.last as i32;
        } else if from < blocks {
            let mut rest = &mut entries[from as usize..blocks as usize];
            for leaf in mmu.table.leaves(sequence.space, from, blocks) {
                let (here, tail) = rest.split_at_mut(leaf.len());
                leaf.write_to(here);
                rest = tail;
            }
        }
        if stale > blocks {
            entries[blocks as usize..stale as usize].fill(self.null_block as i32);
        }
        buffers.seq_lens[row] = sequence.scheduled as i32;
    }

    /// Clears the rows behind a batch.
    pub(super) fn pad_rows(&mut self, batch: usize, buffers: &mut RowBuffers<'_>) {
        for row in batch..self.num_rows {
            let blocks = self.held[row].blocks as usize;
            self.held[row] = NOTHING;
            let start = row * self.width;
            buffers.block_table[start..start + blocks].fill(self.null_block as i32);
            buffers.seq_lens[row] = 0;
        }
        self.num_rows = batch;
    }

    /// Clears the slots behind a step, and the row starts.
    pub(super) fn pad_slots(&mut self, batch: usize, tokens: usize, buffers: &mut RowBuffers<'_>) {
        if tokens < self.num_tokens {
            buffers.slot_mapping[tokens..self.num_tokens].fill(self.null_slot());
        }
        self.num_tokens = tokens;
        buffers.query_start_loc[batch..].fill(tokens as i32);
    }

    /// The rows as a CSR (FlashInfer's form): `indptr[i]..indptr[i + 1]` are the entries of row `i`
    /// in `indices`, `last_page_len[i]` the tokens in its last block (0 for an empty row). Counts
    /// the blocks of the tokens scheduled, not those that wait for later steps. Returns the entries
    /// written; what lies behind them in the buffers is untouched.
    ///
    /// `indptr` has one entry more than there are rows.
    pub fn csr(
        &self,
        buffers: &RowBuffers<'_>,
        indptr: &mut [i32],
        indices: &mut [i32],
        last_page_len: &mut [i32],
    ) -> Result<usize> {
        let (rows, size) = (self.num_rows, self.block_size);
        let lens = &buffers.seq_lens[..rows];
        let blocks = |len: i32| (len as u32).div_ceil(size) as usize;
        let needed: usize = lens.iter().map(|&len| blocks(len)).sum();
        let shapes = [
            ("indptr", indptr.len(), rows + 1),
            ("indices", indices.len(), needed),
            ("last_page_len", last_page_len.len(), rows),
        ];
        if let Some((what, limit, needed)) = shapes.into_iter().find(|&(_, is, least)| is < least) {
            let (needed, limit) = (needed as u64, limit as u64);
            return Err(Error::LimitExceeded {
                what,
                needed,
                limit,
            });
        }
        let mut at = 0;
        indptr[0] = 0;
        for (row, &len) in lens.iter().enumerate() {
            let (start, blocks) = (row * self.width, blocks(len));
            let entries = &buffers.block_table[start..start + blocks];
            indices[at..at + blocks].copy_from_slice(entries);
            at += blocks;
            indptr[row + 1] = at as i32;
            last_page_len[row] = len - (blocks.max(1) as u32 - 1) as i32 * size as i32;
        }
        Ok(at)
    }

    /// What each row that holds a sequence must hold, for checking: (row, sequence, version, blocks,
    /// length).
    pub(crate) fn held(&self) -> impl Iterator<Item = (usize, i64, u32, u32, i32)> + '_ {
        let each = |(row, held): (usize, &Held)| {
            (row, held.sequence, held.version, held.blocks, held.tokens)
        };
        self.held
            .iter()
            .enumerate()
            .map(each)
            .filter(|held| held.1 != NOTHING.sequence)
    }

    /// The slot of padding, for checking.
    pub(crate) fn padding(&self) -> i64 {
        self.null_slot()
    }

    /// Blocks a row and the null block, for checking.
    pub(crate) fn layout(&self) -> (usize, u32) {
        (self.width, self.null_block)
    }
}

/// Slots of the positions `from..to` of a sequence.
pub(super) fn write_slots(mmu: &Mmu, sequence: &Sequence, from: u32, to: u32, out: &mut [i64]) {
    debug_assert!(sequence.last != NONE || from == to);
    let size = mmu.config.block_size;
    let mapped = mmu.blocks_for(sequence.tokens);
    let mut at = from;
    let mut rest = out;
    while at < to {
        let end = to.min((at / size + 1) * size);
        let block = mmu.mapped_block(sequence, mapped, at / size);
        let (here, tail) = rest.split_at_mut((end - at) as usize);
        let start = i64::from(block) * i64::from(size) + i64::from(at % size);
        for (slot, entry) in (start..).zip(here) {
            *entry = slot;
        }
        rest = tail;
        at = end;
    }
}
