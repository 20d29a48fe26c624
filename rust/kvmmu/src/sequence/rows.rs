//! The rows that an attention kernel reads, and what is already in them.
//!
//! Buffers are the caller's and never change address. A row remembers which sequence it holds, at
//! which version and up to which entry, so that a decode step writes only what is new.
//!
//! What lives here: rows, lengths and slots, what the last call wrote, and the CSR. What never lives
//! here: what an entry means (`unit`), groups of rows (`cascade`).

use super::unit::{Format, PageCheck, Unit};
use crate::error::{Error, Result};
use crate::state::{Mmu, NONE, Sequence};

/// Borrowed output buffers of one call.
#[derive(Debug)]
pub struct RowBuffers<'a> {
    /// `[rows, width]`: what stands for the row's blocks (see [`Unit`]) as far as its tokens have a
    /// place; the entry of the null block behind them.
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
    entries: u32,
    /// Its length as written.
    tokens: i32,
}

const NOTHING: Held = Held {
    sequence: 0,
    version: 0,
    entries: 0,
    tokens: 0,
};

/// Entries of one row that a call wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirtyRow {
    /// The row.
    pub row: u32,
    /// First entry written.
    pub start: u32,
    /// The entry behind the last one.
    pub stop: u32,
    /// Calls that wrote the row, this one included: who has seen all but this one needs only
    /// these entries, anybody else the whole row.
    pub generation: u64,
}

/// Registered rows: their shape and what is in them.
#[derive(Debug)]
pub struct Rows {
    uid: u64,
    null_block: u32,
    block_size: u32,
    format: Format,
    width: usize,
    max_tokens: usize,
    held: Vec<Held>,
    /// Calls that wrote each row.
    generations: Vec<u64>,
    /// What the last call wrote, in the order of rows.
    dirty: Vec<DirtyRow>,
    num_rows: usize,
    num_tokens: usize,
    /// Rows and lengths are those that the row starts were written for.
    starts_fit: bool,
}

impl Rows {
    /// Rows for `rows` sequences of at most `width` blocks, and steps of at most `max_tokens`
    /// tokens.
    pub fn new(mmu: &Mmu, rows: usize, width: usize, max_tokens: usize) -> Result<Self> {
        Self::of(mmu, Unit::Block, rows, width, max_tokens)
    }

    /// As [`Rows::new`], of another unit; `width` counts it.
    ///
    /// A row has an entry for each unit in which a token has a place, and no more: with kernel blocks
    /// of 4 tokens a sequence of 5 tokens has 2 entries, whatever the block size. Kernels read no
    /// entry behind a row's length, so what padding says only has to be memory that can be read. It
    /// is the null block's first kernel block (`null_block * r`), or its page (`null_block >> order`),
    /// which must begin with it and lie wholly in the `num_blocks + 1` blocks of memory: then no row
    /// ever has it.
    ///
    /// Pages need every page of a row consecutive and aligned in physical memory; the last one, if it
    /// is not full, consecutive from an aligned place on, in a page that lies wholly in memory. What
    /// stands in the rest of that page may be anybody's: kernels read and mask it.
    /// [`Mmu::prepare`] and [`Mmu::export`] refuse anything else ([`Error::Scattered`]).
    pub fn of(mmu: &Mmu, unit: Unit, rows: usize, width: usize, max_tokens: usize) -> Result<Self> {
        for (name, value) in [
            ("rows", rows),
            ("entries a row", width),
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
            format: Format::new(unit, &mmu.config)?,
            width,
            max_tokens,
            held: vec![NOTHING; rows],
            generations: vec![0; rows],
            dirty: Vec::with_capacity(rows),
            num_rows: 0,
            num_tokens: 0,
            starts_fit: true,
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
        buffers.block_table.fill(self.null_entry());
        buffers.seq_lens.fill(0);
        buffers.slot_mapping.fill(self.null_slot());
        buffers.query_start_loc.fill(0);
    }

    fn null_slot(&self) -> i64 {
        i64::from(self.null_block) * i64::from(self.block_size)
    }

    /// The entry of padding.
    pub fn null_entry(&self) -> i32 {
        self.format.null as i32
    }

    /// Tokens of one entry.
    pub fn entry_tokens(&self) -> u32 {
        self.format.tokens
    }

    /// Rows of which the last `prepare` or `export` that succeeded wrote entries, in order, and
    /// which entries. Lengths, slots and row starts are written by every call and not told here.
    pub fn dirty_rows(&self) -> &[DirtyRow] {
        &self.dirty
    }

    /// Calls that wrote entries of each row so far; only grows.
    pub fn generations(&self) -> &[u64] {
        &self.generations
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

    /// Refuses a row of so many tokens that is too wide.
    pub(super) fn check_width(&self, tokens: u32) -> Result<()> {
        let entries = self.format.entries(tokens);
        if entries as usize > self.width {
            let (needed, limit) = (u64::from(entries), self.width as u64);
            return Err(Error::LimitExceeded {
                what: self.format.name,
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

    /// Entries of a row that are as a sequence has them now.
    fn kept(&self, row: usize, id: i64, version: u32, entries: u32) -> u32 {
        let held = &self.held[row];
        let same = held.sequence == id && held.version == version && held.entries <= entries;
        if same { held.entries } else { 0 }
    }

    /// Entries are pages: rows must pass [`Rows::check_pages`].
    pub(super) fn has_pages(&self) -> bool {
        self.format.order > 0
    }

    /// Refuses a sequence that does not lie in whole pages. `writes` are the blocks (logical, physical, copy first) that a call is about to write, and `fresh` those
    /// that it has claimed for copies and then for growth.
    pub(super) fn check_pages(
        &self,
        mmu: &Mmu,
        row: usize,
        (id, sequence): (i64, &Sequence),
        writes: &[(u32, u32, bool)],
        fresh: &[u32],
    ) -> Result<()> {
        let order = self.format.order;
        let mapped = mmu.blocks_for(sequence.tokens);
        let mut copies = (writes.iter())
            .filter(|write| write.2)
            .map(|write| write.0)
            .peekable();
        let copied = copies.clone().count().min(fresh.len());
        let (own, grown) = fresh.split_at(copied);
        let end = mapped + grown.len() as u32;
        let scattered = |index: u32, in_place: u32| {
            let group = index >> order;
            Error::Scattered {
                sequence: id,
                group,
                order,
                needed: (end - (group << order)).min(1 << order),
                in_place,
                available: mmu.states().available,
                num_blocks: mmu.online(),
            }
        };
        // The last page that is known to be one may have grown since.
        let entries = self.format.entries(sequence.tokens);
        let known = self.kept(row, id, sequence.version, entries);
        let known = known.saturating_sub(1) << order;
        let first = copies
            .peek()
            .map_or(known, |&copy| known.min(copy >> order << order));
        // A page of which only a part was released has no number.
        let released = sequence.first;
        if released & ((1 << order) - 1) != 0 {
            return Err(scattered(released, 0));
        }
        let first = first.max(released);
        let mut look = self.format.pages();
        let (mut index, mut own) = (first, own.iter());
        for leaf in mmu.table.leaves(sequence.space, first, mapped) {
            if copies.peek().is_none() {
                let blocks = leaf.len() as u32;
                look.leaf(index, leaf)
                    .map_err(|(index, in_place)| scattered(index, in_place))?;
                index += blocks;
                continue;
            }
            for block in leaf.blocks() {
                let copy = copies.next_if_eq(&index).and_then(|_| own.next());
                let block = copy.map_or(block, |&copy| copy);
                look.block(index, block)
                    .map_err(|in_place| scattered(index, in_place))?;
                index += 1;
            }
        }
        for &block in grown {
            look.block(index, block)
                .map_err(|in_place| scattered(index, in_place))?;
            index += 1;
        }
        Ok(())
    }

    /// From here on a call that cannot fail writes.
    pub(super) fn begin(&mut self) {
        self.dirty.clear();
    }

    fn wrote(&mut self, row: usize, start: u32, stop: u32) {
        if start < stop {
            self.generations[row] += 1;
            self.dirty.push(DirtyRow {
                row: row as u32,
                start,
                stop,
                generation: self.generations[row],
            });
        }
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
        let entries = self.format.entries(sequence.tokens);
        let from = self.kept(row, id, sequence.version, entries);
        let held = self.held[row];
        self.held[row] = Held {
            sequence: id,
            version: sequence.version,
            entries,
            tokens: sequence.scheduled as i32,
        };
        self.starts_fit &= held.sequence == id && held.tokens == sequence.scheduled as i32;
        let stale = held.entries.max(entries);
        if from < stale {
            let line = &mut buffers.block_table[row * self.width..(row + 1) * self.width];
            if from < entries {
                self.format
                    .write(mmu, sequence, from, &mut line[..entries as usize]);
            }
            line[entries as usize..stale as usize].fill(self.format.null as i32);
            self.wrote(row, from, stale);
        }
        buffers.seq_lens[row] = sequence.scheduled as i32;
    }

    /// Clears the rows behind a batch.
    pub(super) fn pad_rows(&mut self, batch: usize, buffers: &mut RowBuffers<'_>) {
        self.starts_fit &= batch == self.num_rows;
        for row in batch..self.num_rows {
            let entries = self.held[row].entries;
            self.held[row] = NOTHING;
            let start = row * self.width;
            buffers.block_table[start..start + entries as usize].fill(self.null_entry());
            self.wrote(row, 0, entries);
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
        self.starts_fit = true;
    }

    /// The rows as a CSR (FlashInfer's form): `indptr[i]..indptr[i + 1]` are the entries of row `i`
    /// in `indices`, `last_page_len[i]` the tokens in its last one (0 for an empty row), kernel
    /// blocks and pages being what they are in the rows. Counts the tokens scheduled, not those that
    /// wait for later steps. Returns the entries written; what lies behind them in the buffers is
    /// untouched.
    ///
    /// `indptr` has one entry more than there are rows.
    pub fn csr(
        &self,
        buffers: &RowBuffers<'_>,
        indptr: &mut [i32],
        indices: &mut [i32],
        last_page_len: &mut [i32],
    ) -> Result<usize> {
        self.check_lengths(buffers)?;
        let rows = self.num_rows;
        let lens = &buffers.seq_lens[..rows];
        let entries = |len: i32| self.format.entries(len as u32) as usize;
        let needed: usize = lens.iter().map(|&len| entries(len)).sum();
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
            let (start, entries) = (row * self.width, entries(len));
            indices[at..at + entries].copy_from_slice(&buffers.block_table[start..start + entries]);
            at += entries;
            indptr[row + 1] = at as i32;
            last_page_len[row] = self.last_len(len, entries);
        }
        Ok(at)
    }

    /// Tokens in the last of some entries that hold `tokens`.
    pub(super) fn last_len(&self, tokens: i32, entries: usize) -> i32 {
        tokens - entries.saturating_sub(1) as i32 * self.format.tokens as i32
    }

    /// Refuses lengths that are not those which the rows were given.
    fn check_lengths(&self, buffers: &RowBuffers<'_>) -> Result<()> {
        let rows = self.held[..self.num_rows].iter().zip(&*buffers.seq_lens);
        match rows
            .enumerate()
            .find(|(_, (held, len))| held.tokens != **len)
        {
            None => Ok(()),
            Some((row, (held, len))) => Err(Error::InvalidConfig(format!(
                "seq_lens says {len} for row {row}, which was given {}: somebody else wrote it",
                held.tokens
            ))),
        }
    }

    /// Rows, and the entries of one that are full of tokens which came before the step's own; an
    /// error where the row starts are not those of the rows.
    pub(super) fn before_step(
        &self,
        buffers: &RowBuffers<'_>,
    ) -> Result<(usize, impl Fn(usize) -> usize)> {
        if !self.starts_fit {
            return Err(Error::InvalidConfig(
                "the rows are no longer those of the last prepare: query_start_loc is not theirs"
                    .into(),
            ));
        }
        self.check_lengths(buffers)?;
        let (lens, starts) = (&*buffers.seq_lens, &*buffers.query_start_loc);
        for row in 0..self.num_rows {
            let query = starts[row + 1].checked_sub(starts[row]);
            if !query.is_some_and(|query| (0..=lens[row]).contains(&query)) {
                return Err(Error::InvalidConfig(format!(
                    "query_start_loc says {} to {} for row {row} of {} tokens: somebody else wrote it",
                    starts[row],
                    starts[row + 1],
                    lens[row]
                )));
            }
        }
        let size = self.format.tokens;
        let full = move |row: usize| {
            let before = lens[row] - (starts[row + 1] - starts[row]);
            (before.max(0) as u32 / size) as usize
        };
        Ok((self.num_rows, full))
    }

    /// The entries of a row as far as its tokens are scheduled.
    pub(super) fn entries_of<'a>(&self, buffers: &'a RowBuffers<'_>, row: usize) -> &'a [i32] {
        let entries = self.format.entries(buffers.seq_lens[row] as u32) as usize;
        &buffers.block_table[row * self.width..][..entries]
    }

    /// What each row that holds a sequence must hold, for checking: (row, sequence, version, entries,
    /// length).
    pub(crate) fn held(&self) -> impl Iterator<Item = (usize, i64, u32, u32, i32)> + '_ {
        let each = |(row, held): (usize, &Held)| {
            (row, held.sequence, held.version, held.entries, held.tokens)
        };
        self.held
            .iter()
            .enumerate()
            .map(each)
            .filter(|held| held.1 != NOTHING.sequence)
    }

    /// What one entry must say, given the physical block of each logical one, for checking.
    pub(crate) fn entry(&self, at: u32, block: impl Fn(u32) -> u32) -> i32 {
        self.format.entry_at(at, block(self.format.block_of(at))) as i32
    }

    /// Looks at the blocks of a sequence in order, for checking.
    pub(crate) fn page_check(&self) -> PageCheck {
        self.format.pages()
    }

    /// The slot of padding, for checking.
    pub(crate) fn padding(&self) -> i64 {
        self.null_slot()
    }

    /// Entries a row and the entry of padding, for checking.
    pub(crate) fn layout(&self) -> (usize, u32) {
        (self.width, self.format.null)
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
