//! Which sequence has a slot now: what tells the id of one that is gone from one that is there.
//!
//! What lives here: a generation a slot, and [`Lives::look`], the look-up by id that needs no lock.
//! What never lives here: ids as the user knows them, and who gets which slot ([`crate::state`]).
//!
//! # Synchronization
//!
//! A slot is reused, and so is its address space: [`Table::look`] answers for whoever has the slot.
//! `begin` is called before anything is mapped in the slot, `end` after all is unmapped and before
//! the space is given back. A reader that finds its generation before and after the look has
//! therefore seen an entry of its own sequence, or none: generations of a slot only grow, so that one
//! seen twice was there all the while.

use super::Table;
use crate::error::Result;
use crate::sync::{AtomicU64, Ordering, zeroed_u64};

/// Generation of the sequence in each slot, 0 while there is none.
#[derive(Debug)]
pub struct Lives {
    generations: Box<[AtomicU64]>,
}

impl Lives {
    /// For so many slots, none of which is taken.
    pub fn new(slots: u32) -> Result<Self> {
        Ok(Self {
            generations: zeroed_u64(slots as usize)?,
        })
    }

    /// A sequence begins, of a generation that this slot never had.
    pub fn begin(&self, slot: u32, generation: u64) {
        // Release: pairs with the Acquire in `is`.
        self.generations[slot as usize].store(generation, Ordering::Release);
    }

    /// The sequence in a slot has ended.
    pub fn end(&self, slot: u32) {
        // Release: pairs with the Acquire in `is`.
        self.generations[slot as usize].store(0, Ordering::Release);
    }

    /// Whether a slot has a sequence of this generation now. No lock.
    pub fn is(&self, slot: u32, generation: u64) -> bool {
        // Acquire: pairs with the Release in `begin` and `end`: what they came after was done.
        let now = self.generations.get(slot as usize);
        now.is_some_and(|now| now.load(Ordering::Acquire) == generation)
    }

    /// Physical block of a logical block of the sequence of this generation, whatever is going on.
    /// `None`: nothing is mapped there, or the sequence is not open. It was true at some moment of
    /// the call.
    pub fn look<const FANOUT: u32>(
        &self,
        table: &Table<FANOUT>,
        (slot, generation): (u32, u64),
        index: u32,
    ) -> Option<u32> {
        if !self.is(slot, generation) {
            return None;
        }
        let block = table.look(slot, index);
        // Still the same sequence: then the entry was its own.
        block.filter(|_| self.is(slot, generation))
    }
}
