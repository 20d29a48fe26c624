//! Reads the state for measuring and planning, and decides when to plan by itself.

use std::collections::HashSet;

use super::{measure, plan};
use crate::error::{Error, Result};
use crate::pool::Pool;
use crate::state::Mmu;
use crate::sync::{Ordering, lock};

/// How scattered memory is.
#[derive(Debug, Clone, PartialEq)]
pub struct Measure {
    /// Runs of empty blocks.
    pub empty: measure::Runs,
    /// Runs of available blocks.
    pub available: measure::Runs,
    /// Open sequences that have blocks.
    pub sequences: u32,
    /// Their runs, added up.
    pub runs: u64,
    /// Token places in last blocks that no token takes.
    pub unused_slots: u64,
    /// Pages of each order that sequences map, added up.
    pub pages: [u64; 10],
    /// Complete aligned regions of 512 blocks of sequences, each of which one huge page could map.
    pub regions: u64,
    /// Nodes of the page table in use; those that huge pages keep in reserve are untouched.
    pub table_nodes: u32,
}

impl Measure {
    /// 1 - largest run / count, over empty blocks.
    pub fn ratio_empty(&self) -> f64 {
        measure::ratio(self.empty.largest, self.empty.total)
    }

    /// 1 - largest run / count, over available blocks.
    pub fn ratio_available(&self) -> f64 {
        measure::ratio(self.available.largest, self.available.total)
    }

    /// Mean runs of a sequence that has blocks.
    pub fn runs_per_sequence(&self) -> f64 {
        if self.sequences == 0 {
            0.0
        } else {
            self.runs as f64 / f64::from(self.sequences)
        }
    }
}

/// What a plan is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    /// One run of so many available blocks.
    FreeRun(u32),
    /// A fragmentation ratio over available blocks below this.
    Below(f64),
}

/// Proposed moves with their expected effect; a plain value.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub(super) uid: u64,
    /// Destinations that were cached when it was made; the others were empty.
    pub(super) evicts: HashSet<u32>,
    /// What it is for.
    pub goal: Goal,
    /// (source, destination) of every move.
    pub pairs: Vec<[u32; 2]>,
    /// Moves still to make after these; 0 when they reach the goal.
    pub remaining: u32,
    /// Whether the goal is reached after these moves.
    pub complete: bool,
    /// Largest run of available blocks after them.
    pub predicted_run: u32,
    /// Ratio over available blocks after them.
    pub predicted_ratio: f64,
}

impl Pool {
    /// The empty blocks in runs. O(blocks / 64).
    pub fn runs(&self) -> measure::Runs {
        measure::runs(&self.empty_bits(), self.span())
    }

    /// Why a claim of `needed` blocks that lie together was refused: [`Error::OutOfBlocks`] or
    /// [`Error::Fragmented`], by a look at the pool now.
    pub fn refusal(&self, needed: u32) -> Error {
        let runs = self.runs();
        let (needed, available) = (u64::from(needed), u64::from(runs.total));
        let num_blocks = u64::from(self.num_blocks() - self.states().offline);
        if available < needed {
            return Error::OutOfBlocks {
                needed,
                available,
                num_blocks,
            };
        }
        Error::Fragmented {
            needed,
            largest_run: u64::from(runs.largest),
            available,
            num_blocks,
        }
    }
}

impl Mmu {
    /// How scattered memory is now.
    pub fn measure(&self) -> Measure {
        let _rest = self.rest();
        let n = self.config.span();
        // Held blocks are empty: whoever needs them gets them.
        let held = self.holds.blocks();
        let with_held = |mut bits: Vec<u64>| {
            held.iter().for_each(|&block| set(&mut bits, block, true));
            bits
        };
        let mut measure = Measure {
            empty: measure::runs(&with_held(self.pool.empty_bits()), n),
            available: measure::runs(&with_held(self.pool.available_bits()), n),
            sequences: 0,
            runs: 0,
            unused_slots: 0,
            pages: [0; 10],
            regions: 0,
            table_nodes: self.table.nodes_in_use(),
        };
        let size = self.config.block_size;
        for (_, cell) in self.used_slots() {
            let sequence = lock(cell);
            if sequence.open && sequence.tokens > 0 {
                measure.sequences += 1;
                measure.runs += u64::from(sequence.runs);
                let mapped = self.blocks_for(sequence.tokens);
                for (sum, &pages) in measure.pages.iter_mut().zip(&sequence.pages) {
                    *sum += u64::from(pages);
                }
                measure.regions += u64::from(sequence.regions(mapped));
                let places = u64::from(mapped) * u64::from(size);
                measure.unused_slots += places - u64::from(sequence.tokens);
            }
        }
        measure
    }

    /// A plan towards one run of `n` available blocks by the fewest moves, at most `max_moves` now.
    pub fn plan_free_run(&self, n: u32, max_moves: u32) -> Result<Plan> {
        let num_blocks = u64::from(self.online());
        let (found, cached) =
            self.survey(|snapshot, lru| plan::free_run(snapshot, n, max_moves, lru));
        match found {
            Ok(planned) => {
                Ok(self.plan(Goal::FreeRun(n), planned, &cached, |p| p.predicted_run >= n))
            }
            Err(plan::Impossible::TooFewAvailable { need, available }) => Err(Error::OutOfBlocks {
                needed: u64::from(need),
                available: u64::from(available),
                num_blocks,
            }),
            Err(plan::Impossible::NoSpan { need, largest_span }) => Err(Error::Fragmented {
                needed: u64::from(need),
                largest_run: u64::from(largest_span),
                available: u64::from(self.states().available),
                num_blocks,
            }),
        }
    }

    /// A plan towards a fragmentation ratio over available blocks below `ratio`.
    pub fn plan_below(&self, ratio: f64, max_moves: u32) -> Result<Plan> {
        if !(0.0..=1.0).contains(&ratio) {
            return Err(Error::InvalidConfig(format!(
                "ratio = {ratio}: allowed is 0 to 1"
            )));
        }
        Ok(self.below(ratio, max_moves))
    }

    fn below(&self, ratio: f64, max_moves: u32) -> Plan {
        let (planned, cached) =
            self.survey(|snapshot, lru| plan::below(snapshot, ratio, max_moves, lru));
        self.plan(Goal::Below(ratio), planned, &cached, |p| {
            p.predicted_ratio < ratio
        })
    }

    /// The default trigger: a plan of at most `budget_blocks` moves once the ratio over available
    /// blocks has passed `compaction_start`, until it has fallen below `compaction_stop`.
    pub fn plan_compaction(&self) -> Option<Plan> {
        let ratio = {
            let _rest = self.rest();
            let longest = measure::longest(&self.pool.available_bits(), self.config.span());
            measure::ratio(longest.largest, longest.total)
        };
        if ratio > self.config.compaction_start {
            self.compacting.store(1, Ordering::Relaxed);
        } else if ratio < self.config.compaction_stop {
            self.compacting.store(0, Ordering::Relaxed);
        }
        if self.compacting.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let plan = self.below(self.config.compaction_stop, self.config.budget_blocks);
        (!plan.pairs.is_empty()).then_some(plan)
    }

    fn plan(
        &self,
        goal: Goal,
        planned: plan::Planned,
        cached: &[u64],
        reached: impl FnOnce(&plan::Planned) -> bool,
    ) -> Plan {
        let complete = planned.remaining == 0 && reached(&planned);
        Plan {
            uid: self.uid,
            evicts: (planned.pairs.iter().map(|pair| pair[1]))
                .filter(|&block| cached[(block / 64) as usize] >> (block % 64) & 1 == 1)
                .collect(),
            goal,
            complete,
            remaining: planned.remaining,
            predicted_run: planned.predicted_run,
            predicted_ratio: planned.predicted_ratio,
            pairs: planned.pairs,
        }
    }

    /// Shows the state at rest to a planner. Also returns the bits of the cached blocks then.
    fn survey<T>(
        &self,
        planner: impl FnOnce(&plan::Snapshot<'_>, &mut dyn Iterator<Item = u32>) -> T,
    ) -> (T, Vec<u64>) {
        let _rest = self.rest();
        let shared = self.shared();
        let mut movable = self.pool.movable_bits();
        self.remove_unsettled(&mut movable);
        self.remove_huge(&mut movable);
        // What is held can be had as what is cached can, and goes last of all.
        let mut cached = self.pool.evictable_bits();
        let held = self.holds.blocks();
        held.iter().for_each(|&block| set(&mut cached, block, true));
        // Fenced blocks will be empty when their steps have ended: else the run that a pass has just
        // emptied would look occupied to the next pass.
        let mut soon = vec![0; cached.len()];
        shared
            .fenced_blocks()
            .for_each(|block| set(&mut soon, block, true));
        let empty = self.pool.empty_bits();
        let snapshot = plan::Snapshot {
            num_blocks: self.config.span(),
            empty: &empty,
            cached: &cached,
            movable: &movable,
            soon: &soon,
        };
        let mut oldest = shared
            .index
            .oldest()
            .filter(|&block| self.pool.is_evictable(block))
            .chain(held);
        let planned = planner(&snapshot, &mut oldest);
        (planned, cached)
    }

    /// Blocks of huge pages stay where they are.
    fn remove_huge(&self, movable: &mut [u64]) {
        for (at, bits) in movable.iter_mut().enumerate() {
            if *bits != 0 && self.is_huge(at as u32 * 64) {
                *bits = 0;
            }
        }
    }

    /// Blocks that a step in flight is writing stay where they are.
    fn remove_unsettled(&self, movable: &mut [u64]) {
        for (_, cell) in self.used_slots() {
            let sequence = lock(cell);
            let mapped = self.blocks_for(sequence.tokens);
            let unsettled = sequence.unsettled(self.config.block_size, mapped);
            if sequence.open && !unsettled.is_empty() {
                for block in (self.table).blocks(sequence.space, unsettled.start, unsettled.end) {
                    set(movable, block, false);
                }
            }
        }
    }
}

fn set(bits: &mut [u64], block: u32, on: bool) {
    let (at, bit) = ((block / 64) as usize, 1 << (block % 64));
    if on {
        bits[at] |= bit
    } else {
        bits[at] &= !bit
    }
}
