//! A line a slot: which sequence has it now, and the way to its first tables.
//!
//! What lives here: the line, and what its writer stores there. What never lives here: ids as the user
//! knows them, who gets which slot ([`crate::state`]), and the walk ([`Table::look`](super::Table::look)).
//!
//! ```text
//!   word 0   generation of the sequence << 9 | offset of its space; 0 while there is none
//!   word 1   entry of level 3: the node of level 2
//!   2 ..     copies of the first `NEAR` entries of level 2
//! ```
//! A reader without a lock that knows slot and generation finds all that stands above the table of
//! level 1 in this line, for the first 6 x 512 virtual blocks of a sequence; only for those behind them
//! does it read the node of level 2. Levels 3 and 4 serve nobody but the writer.
//!
//! # Synchronization
//!
//! Each line has one writer, that of its space. Word 0 is stored last when a sequence begins and first
//! when it ends, and generations of a slot only grow: so a reader that finds its generation before and
//! after what it reads has read its own sequence's way. The offset beside it is changed only while
//! nothing is mapped. A copy is stored behind the entry, and before the table that the entry named goes
//! to anybody else: the copy is what a reader looks at a second time ([`super::walk`]).

use super::Pte;
use crate::error::Result;
use crate::sync::{AtomicU64, Ordering, collected};

/// Bits of an offset, below those of the generation.
const OFFSET_BITS: u32 = 9;

/// The lines of all slots.
#[derive(Debug)]
pub(super) struct Ways<const NEAR: usize> {
    lines: Box<[Way<NEAR>]>,
}

/// A line: 64 bytes where there are 6 copies.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Way<const NEAR: usize> {
    life: AtomicU64,
    space: AtomicU64,
    near: [AtomicU64; NEAR],
}

/// Word 0 of a line, as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Life(u64);

impl Life {
    pub(super) fn generation(self) -> u64 {
        self.0 >> OFFSET_BITS
    }

    pub(super) fn offset(self) -> u32 {
        self.0 as u32 & ((1 << OFFSET_BITS) - 1)
    }
}

impl<const NEAR: usize> Way<NEAR> {
    pub(super) fn life(&self) -> Life {
        // Acquire: pairs with the Release of `begin`, `shift` and `end`: what they came after was done.
        Life(self.life.load(Ordering::Acquire))
    }

    /// The entry that names the node of level 2.
    pub(super) fn space(&self) -> Pte {
        // Acquire: pairs with the Release in `begin`. Who sees that of a later sequence sees then that
        // its own has ended.
        Pte(self.space.load(Ordering::Acquire))
    }

    /// The copy of an entry of level 2, if it has one.
    pub(super) fn near(&self, index: u32) -> Option<&AtomicU64> {
        self.near.get(index as usize)
    }
}

impl<const NEAR: usize> Ways<NEAR> {
    /// For so many slots, none of which is taken.
    pub(super) fn new(slots: u32) -> Result<Self> {
        let line = |_| Way {
            life: AtomicU64::new(0),
            space: AtomicU64::new(0),
            near: std::array::from_fn(|_| AtomicU64::new(0)),
        };
        Ok(Self {
            lines: collected(slots as usize, line)?,
        })
    }

    /// The line of a slot, if there is such a slot.
    pub(super) fn of(&self, slot: u32) -> Option<&Way<NEAR>> {
        self.lines.get(slot as usize)
    }

    fn line(&self, slot: u32) -> &Way<NEAR> {
        &self.lines[slot as usize]
    }

    /// A sequence begins, of a generation that this slot never had, with nothing mapped.
    pub(super) fn begin(&self, slot: u32, generation: u64, space: Pte) {
        debug_assert!(generation > 0 && generation >> (64 - OFFSET_BITS) == 0);
        let line = self.line(slot);
        // Release, both: pairs with the Acquire in `space` and in `life`.
        line.space.store(space.0, Ordering::Release);
        line.life
            .store(generation << OFFSET_BITS, Ordering::Release);
    }

    /// Nothing is mapped, and what will be begins elsewhere.
    pub(super) fn shift(&self, slot: u32, offset: u32) {
        let line = self.line(slot);
        // Relaxed: only the one writer changes it.
        let generation = Life(line.life.load(Ordering::Relaxed)).generation();
        let life = generation << OFFSET_BITS | u64::from(offset);
        // Release: pairs with the Acquire in `life`.
        line.life.store(life, Ordering::Release);
    }

    /// The sequence in a slot has ended; nothing is mapped.
    pub(super) fn end(&self, slot: u32) {
        let line = self.line(slot);
        // Release: pairs with the Acquire in `life`.
        line.life.store(0, Ordering::Release);
    }

    /// An entry of level 2 has changed.
    pub(super) fn store_near(&self, slot: u32, index: u32, pte: Pte) {
        if let Some(copy) = self.line(slot).near(index) {
            // Release: pairs with the Acquire of a look, so a table is seen with its entries.
            copy.store(pte.0, Ordering::Release);
        }
    }
}
