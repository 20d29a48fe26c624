//! Which steps are in flight, and what each has scheduled.
//!
//! Steps are numbered as they begin. A block that is released while steps are in flight waits for the
//! newest one that was prepared, since that one may have been given its number; it is `fenced` until
//! all steps up to that one have ended.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

/// What one step scheduled in one sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) slot: u32,
    pub(crate) generation: u64,
    /// Positions `from..to` were scheduled.
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// Length before and after.
    pub(crate) tokens_before: u32,
    pub(crate) tokens_after: u32,
    /// First unknown token before.
    pub(crate) unknown_before: u32,
}

/// One step in flight.
#[derive(Debug, Default)]
pub(crate) struct Step {
    /// What it has scheduled and nobody has settled yet.
    pub(crate) entries: Vec<Entry>,
    /// It was given rows, and so the numbers of blocks.
    pub(crate) prepared: bool,
}

/// All steps in flight; behind the steps lock.
#[derive(Debug)]
pub(crate) struct Steps {
    next: u64,
    in_flight: BTreeMap<u64, Step>,
}

impl Steps {
    pub(crate) fn new() -> Self {
        Self {
            next: 1,
            in_flight: BTreeMap::new(),
        }
    }

    pub(crate) fn begin(&mut self) -> u64 {
        self.in_flight.insert(self.next, Step::default());
        self.next += 1;
        self.next - 1
    }

    pub(crate) fn get(&mut self, step: u64) -> Result<&mut Step> {
        match self.in_flight.get_mut(&step) {
            Some(found) => Ok(found),
            None if step > 0 && step < self.next => Err(Error::InvalidStep {
                step,
                reason: "has ended".into(),
            }),
            None => Err(Error::InvalidStep {
                step,
                reason: "was never begun".into(),
            }),
        }
    }

    /// Ends a settled step.
    pub(crate) fn end(&mut self, step: u64) -> Result<()> {
        let open = self.get(step)?.entries.len();
        if open > 0 {
            let reason =
                format!("scheduled {open} sequences that were neither written nor cancelled");
            return Err(Error::InvalidStep { step, reason });
        }
        self.in_flight.remove(&step);
        Ok(())
    }

    /// All that is scheduled and not settled.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &Entry> + '_ {
        self.in_flight.values().flat_map(|step| &step.entries)
    }

    pub(crate) fn count(&self) -> usize {
        self.in_flight.len()
    }

    /// The step that a block released now has to wait for: the newest that was given rows. One that
    /// has only begun knows no block yet.
    pub(crate) fn fence(&self) -> Option<u64> {
        let newest = self.in_flight.iter().rev().find(|(_, step)| step.prepared);
        newest.map(|(&number, _)| number)
    }

    /// Whether all steps up to this one have ended.
    pub(crate) fn has_passed(&self, step: u64) -> bool {
        self.in_flight
            .first_key_value()
            .is_none_or(|(&oldest, _)| oldest > step)
    }

    /// A sequence was truncated: steps in flight no longer answer for what lies behind its end.
    pub(crate) fn clip(&mut self, slot: u32, generation: u64, tokens: u32) {
        for step in self.in_flight.values_mut() {
            for entry in &mut step.entries {
                if (entry.slot, entry.generation) == (slot, generation) {
                    entry.from = entry.from.min(tokens);
                    entry.to = entry.to.min(tokens);
                    entry.tokens_before = entry.tokens_before.min(tokens);
                    entry.tokens_after = entry.tokens_after.min(tokens);
                }
            }
        }
    }
}
