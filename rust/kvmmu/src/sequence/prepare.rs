//! `prepare`: schedules the next tokens of a batch in a step and writes its rows. `export`: the
//! rows alone.

use super::rows::{RowBuffers, Rows, write_slots};
use super::write::Row;
use crate::error::{Error, Result};
use crate::state::{Entry, Mmu, Shared};
use crate::stats::count;
use crate::sync::MutexGuard;

impl Mmu {
    /// Schedules the next `query_lens[i]` tokens (`None`: one each) of every sequence in a step,
    /// and writes the rows. All or nothing over the whole batch.
    ///
    /// Tokens past the end of a sequence are appended, with values from `new_tokens` in row order;
    /// there must be exactly as many as the rows lack. `None`: their values are not known, and
    /// blocks that hold them are never published.
    ///
    /// Returns the copies (source, destination) to carry out before the step, and even if it is
    /// cancelled.
    ///
    /// Rows of pages: [`Error::Scattered`] if a row would not lie in whole pages. Where new blocks
    /// come to lie is known only when they have been claimed, so cached blocks may have been evicted
    /// for a call that is refused; nothing else has changed.
    pub fn prepare(
        &self,
        step: u64,
        ids: &[i64],
        query_lens: Option<&[i32]>,
        new_tokens: Option<&[i32]>,
        rows: &mut Rows,
        buffers: &mut RowBuffers<'_>,
    ) -> Result<Vec<[u32; 2]>> {
        rows.check(self, ids.len(), buffers)?;
        let _gate = self.enter();
        let mut batch = self.batch(ids, query_lens, rows)?;
        let lacking: u64 = (batch.iter())
            .map(|row| u64::from(row.tokens_after - row.sequence.tokens))
            .sum();
        if let Some(tokens) = new_tokens
            && tokens.len() as u64 != lacking
        {
            let given = tokens.len();
            return Err(Error::InvalidConfig(format!(
                "new_tokens has {given} tokens, the rows lack {lacking}"
            )));
        }
        let total = batch.iter().map(|row| u64::from(row.to - row.from)).sum();
        rows.check_tokens(total)?;

        let mut done = 0;
        let claimed = self.claim_for(step, &mut batch, &mut done);
        let (mut shared, into, mut steps) = match claimed {
            Ok(claimed) => claimed,
            Err(error) => {
                let error = self.shrink_back(&mut batch, error);
                self.trim(&batch[..done]);
                return Err(error);
            }
        };
        if let Err(error) = self.check_new_pages(&batch, &into, rows) {
            count(&self.stats.freed_blocks, into.len());
            self.pool.give(&into);
            let error = self.shrink_back(&mut batch, error);
            self.trim(&batch);
            return Err(error);
        }

        // From here on nothing fails.
        rows.begin();
        let mut copies = Vec::new();
        let (mut into, mut tokens) = (into.into_iter(), new_tokens);
        let step_state = steps.get(step).expect("checked by the claim");
        step_state.prepared = true;
        let entries = &mut step_state.entries;
        let mut at = 0;
        for (i, row) in batch.iter_mut().enumerate() {
            let entry = Entry {
                slot: row.slot,
                generation: row.sequence.generation,
                from: row.from,
                to: row.to,
                tokens_before: row.sequence.tokens,
                tokens_after: row.tokens_after,
                unknown_before: row.sequence.unknown_from,
            };
            let own = tokens.map(|all| {
                let (own, rest) = all.split_at((row.tokens_after - row.sequence.tokens) as usize);
                tokens = Some(rest);
                own
            });
            self.grow(
                Some(step),
                row,
                shared.as_deref_mut(),
                &mut into,
                own,
                &mut copies,
            );
            row.sequence.scheduled = row.to;
            row.sequence.unsettled_to = row.sequence.unsettled_to.max(row.to);
            if entry.from < entry.to || entry.tokens_before < entry.tokens_after {
                entries.push(entry);
            }

            rows.write(self, i, row.id, &row.sequence, buffers);
            buffers.query_start_loc[i] = at as i32;
            let end = at + (row.to - row.from) as usize;
            let slots = &mut buffers.slot_mapping[at..end];
            write_slots(self, &row.sequence, row.from, row.to, slots);
            at = end;
        }
        rows.pad_rows(ids.len(), buffers);
        rows.pad_slots(ids.len(), at, buffers);
        // Sequences before steps: whoever finds the new entries finds their sequences free.
        drop(batch);
        drop(steps);
        Ok(copies)
    }

    /// Locks the sequences of a batch and says what each will write.
    fn batch(&self, ids: &[i64], query_lens: Option<&[i32]>, rows: &Rows) -> Result<Vec<Row<'_>>> {
        if let Some(lens) = query_lens
            && lens.len() != ids.len()
        {
            let (lens, ids) = (lens.len(), ids.len());
            return Err(Error::InvalidConfig(format!(
                "query_lens has {lens} entries for {ids} sequences"
            )));
        }
        let mut batch = Vec::with_capacity(ids.len());
        for (i, &id) in ids.iter().enumerate() {
            let query = query_lens.map_or(1, |lens| lens[i]);
            let Ok(query) = u32::try_from(query) else {
                return Err(Error::InvalidConfig(format!(
                    "query_lens[{i}] = {query}: allowed is 0 or more"
                )));
            };
            let (slot, sequence) = self.sequence(id)?;
            let from = sequence.scheduled;
            self.checked_blocks(from, query as usize)?;
            let to = from + query;
            let tokens_after = to.max(sequence.tokens);
            rows.check_width(tokens_after)?;
            if rows.has_pages() {
                rows.check_pages(self, i, (id, &sequence), &[], &[])?;
            }
            batch.push(Row {
                id,
                slot,
                sequence,
                from,
                to,
                tokens_after,
                writes: Vec::new(),
                fresh: Vec::new(),
            });
        }
        Ok(batch)
    }

    /// Blocks that a row has, and will have.
    fn extent(&self, row: &Row<'_>) -> (u32, u32) {
        (
            self.blocks_for(row.sequence.tokens),
            self.blocks_for(row.tokens_after),
        )
    }

    /// Undoes the reservation of table nodes.
    fn trim(&self, batch: &[Row<'_>]) {
        for row in batch {
            let (from, to) = self.extent(row);
            self.table.trim(row.sequence.space, from, to, from == 0);
        }
    }

    /// Rows of pages: refuses a batch one of whose claimed blocks is not where a page needs it.
    fn check_new_pages(&self, batch: &[Row<'_>], into: &[u32], rows: &Rows) -> Result<()> {
        if !rows.has_pages() {
            return Ok(());
        }
        let mut rest = into;
        for (i, row) in batch.iter().enumerate() {
            let copies = row.writes.iter().filter(|write| write.2).count();
            let (own, others) = rest.split_at(copies);
            rest = others;
            let own = [own, &row.fresh].concat();
            rows.check_pages(self, i, (row.id, &row.sequence), &row.writes, &own)?;
        }
        Ok(())
    }

    /// Everything else that can fail: table nodes (`done` counts the rows that have theirs), the step,
    /// the blocks.
    #[allow(clippy::type_complexity)]
    fn claim_for<'a>(
        &'a self,
        step: u64,
        batch: &mut [Row<'_>],
        done: &mut usize,
    ) -> Result<(
        Option<MutexGuard<'a, Shared>>,
        Vec<u32>,
        MutexGuard<'a, crate::state::Steps>,
    )> {
        for row in batch.iter() {
            let (from, to) = self.extent(row);
            self.table
                .reserve(row.sequence.space, from, to, from == 0)?;
            *done += 1;
        }
        let mut shared = None;
        let needed = self.plan_writes(batch, &mut shared);
        let reserved = self.reserve_with(needed.copies + needed.growth, &mut shared)?;
        let mut steps = self.steps();
        if let Err(error) = steps.get(step) {
            self.unreserve(reserved);
            return Err(error);
        }
        let claim = self.complete(reserved, shared.as_deref_mut());
        let into = self.claim_rows(batch, &needed, claim, shared.as_deref_mut());
        Ok((shared, into, steps))
    }

    /// Brings rows and lengths up to date for these sequences, without scheduling anything. The
    /// slots stay as they are.
    pub fn export(&self, ids: &[i64], rows: &mut Rows, buffers: &mut RowBuffers<'_>) -> Result<()> {
        rows.check(self, ids.len(), buffers)?;
        let _gate = self.enter();
        let mut sequences = Vec::with_capacity(ids.len());
        for &id in ids {
            let (_, sequence) = self.sequence(id)?;
            rows.check_width(sequence.tokens)?;
            if rows.has_pages() {
                rows.check_pages(self, sequences.len(), (id, &sequence), &[], &[])?;
            }
            sequences.push(sequence);
        }
        rows.begin();
        for (i, (&id, sequence)) in ids.iter().zip(&sequences).enumerate() {
            rows.write(self, i, id, sequence, buffers);
        }
        rows.pad_rows(ids.len(), buffers);
        Ok(())
    }
}
