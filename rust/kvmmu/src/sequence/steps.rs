//! `begin_step`, `written`, `cancel`, `end_step`: the life of a step.
//!
//! ```text
//!  begin_step -> prepare (any number of times) -> written | cancel -> end_step
//! ```
//! Any number of steps may be in flight. `written` settles what the step scheduled and publishes the
//! blocks that are now full; `cancel` takes it back; `end_step` is the fence: the device has
//! finished it.

use crate::error::{Error, Result};
use crate::pool::Word;
use crate::state::{Entry, Mmu, Sequence, Shared};
use crate::stats::count;
use crate::sync::MutexGuard;

/// The unsettled entries of a step with their sequences locked. An entry whose sequence was closed
/// has none.
struct Unsettled<'a> {
    entries: Vec<Entry>,
    /// Index into `sequences` of each entry.
    owners: Vec<Option<usize>>,
    sequences: Vec<MutexGuard<'a, Sequence>>,
}

impl Mmu {
    /// Begins a step and returns its number.
    pub fn begin_step(&self) -> u64 {
        self.steps().begin()
    }

    /// Steps in flight.
    pub fn steps_in_flight(&self) -> usize {
        self.steps().count()
    }

    /// The step has finished on the device: blocks that waited for it become empty or evictable.
    /// Whatever it scheduled must have been `written` or `cancel`led.
    pub fn end_step(&self, step: u64) -> Result<()> {
        let _gate = self.enter();
        let mut shared = self.shared();
        let mut steps = self.steps();
        steps.end(step)?;
        self.cool_down(&mut shared, &steps);
        Ok(())
    }

    /// All that the step scheduled has been written: publishes the blocks that are now full.
    pub fn written(&self, step: u64) -> Result<()> {
        let _gate = self.enter();
        let mut held = self.take_unsettled(step)?;
        let mut expected: Vec<u32> = held.sequences.iter().map(|seq| seq.written).collect();
        for (entry, owner) in held.entries.iter().zip(&held.owners) {
            let Some(owner) = *owner else { continue };
            if entry.from == entry.to {
                continue; // a truncation has taken it back
            }
            if entry.from > expected[owner] {
                let reason = format!(
                    "positions {} to {} of a sequence were scheduled before and are not settled",
                    expected[owner], entry.from
                );
                return Err(self.put_back(step, held, reason));
            }
            expected[owner] = expected[owner].max(entry.to);
        }
        let size = self.config.block_size;
        let mut shared = None;
        for (sequence, written) in held.sequences.iter_mut().zip(expected) {
            let before = sequence.written;
            sequence.written = written;
            sequence.settle();
            let full = written.min(sequence.unknown_from) / size;
            if self.config.prefix_caching && full > sequence.published {
                let shared = shared.get_or_insert_with(|| self.shared());
                self.publish(sequence, full, shared);
            }
            // Pages that have become complete.
            let (from, to) = (before / size, written / size);
            let orders = self.orders_of(sequence, sequence.tokens);
            if from < to && orders != 1 {
                let shared = shared.get_or_insert_with(|| self.shared());
                self.promote(shared, sequence, from, to, orders);
            }
        }
        drop(shared);
        self.stop_awaiting_if_settled(step);
        Ok(())
    }

    /// Offers the blocks of a sequence up to `full` to the prefix index.
    fn publish(&self, sequence: &mut Sequence, full: u32, shared: &mut Shared) {
        let first = sequence.published;
        if first > 0 && first <= sequence.first {
            return; // the block that the next would stand behind was released
        }
        let mut parent = (first > 0).then(|| self.table.block(sequence.space, first - 1));
        for (index, mut block) in (first..full).zip(self.table.blocks(sequence.space, first, full))
        {
            if !shared.index.is_published(block) {
                let key = sequence.key(index);
                if !shared.index.publish(&self.tokens, block, parent, key) {
                    break; // the chain is broken: nothing behind it could be found
                }
                match self.equal_block(shared, block) {
                    Some(first) => {
                        self.merge(sequence, shared, index, (block, first));
                        block = first;
                    }
                    None => {
                        self.pool.set_word(block, self.pool.word(block).published());
                        count(&self.stats.published_blocks, 1);
                    }
                }
            }
            parent = Some(block);
            sequence.published = index + 1;
        }
    }

    /// A block with the same content that was published before, which a private block is to be given
    /// up for.
    fn equal_block(&self, shared: &Shared, block: u32) -> Option<u32> {
        if !self.config.dedup || self.pool.word(block) != Word::PRIVATE {
            return None;
        }
        let first = shared.index.first_with(block);
        let wanted = first != block
            && !shared.awaited.contains_key(&block)
            && self.pool.word(first).retained().is_some();
        wanted.then_some(first)
    }

    /// Maps the block that was known first, and gives up the one that was just entered behind it.
    fn merge(
        &self,
        sequence: &mut Sequence,
        shared: &mut Shared,
        index: u32,
        (block, first): (u32, u32),
    ) {
        self.retain(shared, first);
        let mut dropped = Vec::new();
        shared.index.withdraw(block, &mut dropped);
        debug_assert!(dropped.is_empty(), "the first is still there");
        self.map_instead(sequence, shared, index, (block, first));
        let steps = self.steps();
        let mut empty = Vec::new();
        self.let_go(shared, steps.fence(), block, &mut empty);
        self.pool.give(&empty);
        count(&self.stats.deduplicated, 1);
        count(&self.stats.freed_blocks, 1);
    }

    /// Takes back what the step scheduled: lengths as before `prepare`, nothing published. Steps
    /// that overlap in a sequence are cancelled newest first.
    pub fn cancel(&self, step: u64) -> Result<()> {
        let _gate = self.enter();
        let mut held = self.take_unsettled(step)?;
        let state = |seq: &MutexGuard<'_, Sequence>| (seq.scheduled, seq.tokens);
        let mut expected: Vec<_> = held.sequences.iter().map(state).collect();
        for (entry, owner) in held.entries.iter().zip(&held.owners).rev() {
            let Some(owner) = *owner else { continue };
            let (scheduled, tokens) = expected[owner];
            let grew = entry.tokens_after != entry.tokens_before;
            if entry.from == entry.to && !grew {
                continue; // a truncation has taken it back already
            }
            if entry.to != scheduled || (grew && entry.tokens_after != tokens) {
                let reason = format!(
                    "a sequence has gone on to {scheduled} of {tokens} tokens since it was \
                     scheduled up to {} of {}: cancel the newest step first",
                    entry.to, entry.tokens_after
                );
                return Err(self.put_back(step, held, reason));
            }
            let tokens = if grew { entry.tokens_before } else { tokens };
            expected[owner] = (entry.from, tokens);
        }
        let mut shared = self.shared();
        for (entry, owner) in held.entries.iter().zip(&held.owners).rev() {
            let Some(owner) = *owner else { continue };
            let sequence = &mut held.sequences[owner];
            if entry.from == entry.to && entry.tokens_after == entry.tokens_before {
                sequence.settle();
                continue;
            }
            if entry.tokens_after != entry.tokens_before {
                self.shorten(entry.slot, sequence, entry.tokens_before, &mut shared);
                sequence.unknown_from = entry.unknown_before;
            }
            sequence.scheduled = entry.from;
            sequence.settle();
        }
        drop(shared);
        self.stop_awaiting_if_settled(step);
        Ok(())
    }

    /// The copies on write of a step have been made once all that it scheduled is settled.
    fn stop_awaiting_if_settled(&self, step: u64) {
        let mut shared = self.shared();
        let mut steps = self.steps();
        if steps.get(step).is_ok_and(|step| step.entries.is_empty()) {
            self.stop_awaiting(&mut shared, step);
        }
    }

    /// Takes the unsettled entries out of a step and locks their sequences. While these are locked
    /// no truncation clips the entries. (The sequences are only tried, so holding the steps meanwhile
    /// cannot deadlock.)
    fn take_unsettled(&self, step: u64) -> Result<Unsettled<'_>> {
        let mut steps = self.steps();
        let entries = &mut steps.get(step)?.entries;
        let mut sequences: Vec<MutexGuard<'_, Sequence>> = Vec::with_capacity(entries.len());
        let mut owners: Vec<Option<usize>> = Vec::with_capacity(entries.len());
        for (at, entry) in entries.iter().enumerate() {
            let owner = match self.sequence_if_open(entry.slot, entry.generation) {
                Ok(None) => None,
                Ok(Some(sequence)) => {
                    sequences.push(sequence);
                    Some(sequences.len() - 1)
                }
                Err(error) => {
                    // Perhaps locked by an earlier entry of this very step.
                    let earlier = (entries[..at].iter().zip(&owners))
                        .find(|(earlier, owner)| earlier.slot == entry.slot && owner.is_some());
                    let Some((earlier, owner)) = earlier else {
                        return Err(error);
                    };
                    owner.filter(|_| earlier.generation == entry.generation)
                }
            };
            owners.push(owner);
        }
        let entries = std::mem::take(entries);
        Ok(Unsettled {
            entries,
            owners,
            sequences,
        })
    }

    /// Puts entries back that could not be settled.
    fn put_back(&self, step: u64, held: Unsettled<'_>, reason: String) -> Error {
        if let Ok(step) = self.steps().get(step) {
            step.entries.splice(0..0, held.entries);
        }
        Error::InvalidStep { step, reason }
    }
}
