//! Huge pages made by moving: a region of a long sequence that lies in pieces is moved into a free
//! window, a pass at a time (as the Linux kernel's khugepaged collapses small pages).
//!
//! What lives here: which region goes next, and how far its window is filled. What never lives here:
//! mapping it as one page (the commit does, as soon as it can: `state/mapping.rs`).
//!
//! One window is filled at a time. Until a block of it is filled it is *held*, as what a sequence
//! keeps to grow into: it counts as empty, and a claim that would otherwise fail, or miss a huge page,
//! takes it away. Then, or when the sequence has changed, the rest of the region stays where it is: what
//! has moved lies in one run all the same, and nothing needs to be undone.

use super::measure::WINDOW;
use super::windows::Picture;
use crate::pool::{Placement, Zone};
use crate::state::{Filling, Mmu, Sequence, Shared};
use crate::sync::lock;

/// Of how many windows one is kept free for new sequences, and how many at most.
const KEPT: u32 = 50;
const MOST_KEPT: u32 = 2;

impl Mmu {
    /// Free windows that are not filled by moving.
    pub(super) fn kept_windows(&self) -> u32 {
        (self.config.num_blocks / WINDOW / KEPT).min(MOST_KEPT)
    }

    /// The next moves that fill the window that is being filled, at most `budget`; none when it is full
    /// or cannot be filled.
    pub(super) fn continue_window(
        &self,
        shared: &mut Shared,
        picture: &Picture<'_>,
        budget: u32,
    ) -> Vec<[u32; 2]> {
        let Some(filling) = shared.filling.filter(|_| budget > 0) else {
            return Vec::new();
        };
        self.continue_filling(&filling, picture, budget)
            .unwrap_or_else(|| {
                self.stop_filling(shared);
                Vec::new()
            })
    }

    /// The first moves that fill a free window with a region, if there are both.
    pub(super) fn start_window(
        &self,
        shared: &mut Shared,
        picture: &mut Picture<'_>,
        budget: u32,
    ) -> Vec<[u32; 2]> {
        let pages = self.config.page_orders.bits() >> 9 & 1 != 0;
        if !pages || self.config.placement != Placement::AddressOrder || budget == 0 {
            return Vec::new();
        }
        if shared.filling.is_none() {
            shared.filling = self.start_filling(shared, picture);
        }
        self.continue_window(shared, picture, budget)
    }

    /// `None`: it is done, or cannot go on.
    fn continue_filling(
        &self,
        filling: &Filling,
        picture: &Picture<'_>,
        budget: u32,
    ) -> Option<Vec<[u32; 2]>> {
        let held = self.holds.of(self.filling_slot());
        let done = held.start.checked_sub(filling.window)?;
        if held.is_empty() || held.end != filling.window + WINDOW {
            return None;
        }
        let sequence = lock(&self.slots[filling.slot as usize]);
        if !sequence.open || sequence.generation != filling.generation {
            return None;
        }
        let first = self.region_of(&sequence, filling.region)?;
        let space = sequence.space;
        if done > 0 && self.table.block(space, first + done - 1) != held.start - 1 {
            return None; // what was moved has changed since, or an abort left a gap
        }
        let n = (held.len() as u32).min(budget);
        let sources = self.table.blocks(space, first + done, first + done + n);
        let movable = |&block: &u32| picture.may_move(block);
        let n = sources.iter().take_while(|block| movable(block)).count();
        let pairs = sources[..n].iter().zip(held);
        (n > 0).then(|| pairs.map(|(&from, to)| [from, to]).collect())
    }

    /// First logical block of a region, if it is complete.
    fn region_of(&self, sequence: &Sequence, region: u32) -> Option<u32> {
        let space = sequence.space;
        let mapped = space.virtual_of(self.blocks_for(sequence.tokens));
        let at = region * WINDOW;
        let complete = at >= space.virtual_of(sequence.first) && at + WINDOW <= mapped;
        complete.then(|| space.logical_of(at))
    }

    fn start_filling(&self, shared: &mut Shared, picture: &mut Picture<'_>) -> Option<Filling> {
        if picture.free() <= self.kept_windows() {
            return None;
        }
        let mut filling = self.used_slots().find_map(|(slot, cell)| {
            let sequence = lock(cell);
            let region = self.region_in_pieces(&sequence, picture)?;
            Some(Filling {
                slot,
                generation: sequence.generation,
                region,
                window: 0,
            })
        })?;
        if self.config.placement == Placement::AddressOrder {
            // It evicts, and breaks holds.
            picture.read_all();
            self.make_windows(shared, 1);
        }
        if !self.pool.reserve(WINDOW) {
            return None;
        }
        let Some(window) = self.pool.take_window(Zone::Body) else {
            self.pool.unreserve(WINDOW);
            return None;
        };
        filling.window = window;
        self.keep(self.filling_slot(), window..window + WINDOW);
        Some(filling)
    }

    /// The first complete region of a sequence that could be a huge page, is none, and may move.
    fn region_in_pieces(&self, sequence: &Sequence, picture: &Picture<'_>) -> Option<u32> {
        let mapped = self.blocks_for(sequence.tokens);
        if !sequence.open || sequence.regions(mapped) <= sequence.pages[9] {
            return None;
        }
        let orders = self.orders_of(sequence, sequence.tokens);
        if orders >> 9 & 1 == 0 {
            return None;
        }
        let space = sequence.space;
        let from = space.virtual_of(sequence.first).div_ceil(WINDOW);
        (from..space.virtual_of(mapped) / WINDOW).find(|region| {
            let first = space.logical_of(region * WINDOW);
            if self.table.page(space, first).order == 9 {
                return false;
            }
            let blocks = self.table.blocks(space, first, first + WINDOW);
            blocks.iter().all(|&block| picture.may_move(block))
        })
    }

    /// Nothing more goes into the window that was being filled.
    pub(super) fn stop_filling(&self, shared: &mut Shared) {
        shared.filling = None;
        self.drop_hold(self.filling_slot());
    }

    /// The slot of holds that stands for the window being filled.
    pub(crate) fn filling_slot(&self) -> u32 {
        self.config.max_sequences
    }
}
