//! Reads the state for measuring and planning, and plans what a caller wishes.
//!
//! What lives here: [`Measure`], the goals, what a planner is shown. What never lives here: when to
//! plan without being asked (`background`), which moves (`plan`, `windows`, `gather`).

use std::collections::HashSet;
use std::sync::OnceLock;

use super::measure::WINDOW;
use super::windows::{self, Group, Lore, Neighbours, Picture, Sets, Source, Together};
use super::{gather, measure, plan};
use crate::error::{Error, Result};
use crate::pool::Pool;
use crate::sequence::{Quote, Shape, When};
use crate::state::{Mmu, Sequence, Shared};
use crate::sync::lock;

/// A sequence with more scattered blocks than so many passes move is gathered into room made ahead.
const AHEAD: u32 = 2;
/// What of such a pass makes room, in eighths (with 2 or 4 a scattered sequence took more passes).
const ROOM: u32 = 3;

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
    /// So many free windows: aligned groups of 512 available blocks.
    HugePages(u32),
    /// So many free aligned groups of a size.
    Groups {
        /// Blocks of a group.
        size: u32,
        /// Groups.
        groups: u32,
    },
    /// A sequence in few runs.
    Gather(i64),
    /// What the default trigger found to do.
    Background,
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
    /// Of the moves of the default trigger: those that empty windows, make huge pages, gather runs.
    pub parts: [u32; 3],
    pub(super) after: After,
}

/// The pool after a plan; counted when somebody asks.
#[derive(Debug, Clone)]
pub(super) struct After {
    /// Available blocks.
    bits: Vec<u64>,
    num_blocks: u32,
    longest: OnceLock<measure::Longest>,
}

impl PartialEq for After {
    fn eq(&self, other: &Self) -> bool {
        (self.num_blocks, &self.bits) == (other.num_blocks, &other.bits)
    }
}

impl Plan {
    fn longest(&self) -> &measure::Longest {
        let after = &self.after;
        (after.longest).get_or_init(|| measure::longest(&after.bits, after.num_blocks))
    }

    /// Largest run of available blocks after the moves.
    pub fn predicted_run(&self) -> u32 {
        self.longest().largest
    }

    /// Ratio over available blocks after them.
    pub fn predicted_ratio(&self) -> f64 {
        measure::ratio(self.longest().largest, self.longest().total)
    }

    /// Windows of 512 blocks that are free after them.
    pub fn predicted_windows(&self) -> u32 {
        whole_windows(&self.after.bits, self.after.num_blocks)
    }
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
        let _rest = self.rest();
        let shared = self.shared();
        let sight = self.sight(&shared);
        let bits = sight.bits();
        let lru = &mut self.oldest(&shared, &sight);
        match plan::free_run(&bits.snapshot(), n, max_moves, lru) {
            Ok(planned) => {
                Ok(self.plan(Goal::FreeRun(n), planned, &sight, |p| p.predicted_run >= n))
            }
            Err(impossible) => Err(self.impossible(impossible)),
        }
    }

    /// Why no moves reach a goal, as an error of the manager.
    pub(super) fn impossible(&self, impossible: plan::Impossible) -> Error {
        let num_blocks = u64::from(self.online());
        let fragmented = |needed: u64, largest_run: u64| Error::Fragmented {
            needed,
            largest_run,
            available: u64::from(self.states().available),
            num_blocks,
        };
        match impossible {
            plan::Impossible::TooFewAvailable { need, available } => Error::OutOfBlocks {
                needed: u64::from(need),
                available: u64::from(available),
                num_blocks,
            },
            plan::Impossible::NoSpan { need, largest_span } => {
                fragmented(u64::from(need), u64::from(largest_span))
            }
            plan::Impossible::TooFewGroups {
                need,
                movable,
                size,
            } => fragmented(
                u64::from(need) * u64::from(size),
                u64::from(movable) * u64::from(size),
            ),
        }
    }

    /// A plan towards `k` free windows of 512 blocks, those that are free already among them, by the
    /// fewest moves; at most `max_moves` now.
    pub fn plan_huge_pages(&self, k: u32, max_moves: u32) -> Result<Plan> {
        self.plan_emptied(Goal::HugePages(k), (WINDOW, k), max_moves)
    }

    /// A plan towards so many free aligned groups of `size` blocks, those that are free already among
    /// them, by the fewest moves; at most `max_moves` now.
    pub fn plan_groups(&self, size: u32, groups: u32, max_moves: u32) -> Result<Plan> {
        if size == 0 || size > self.config.span() {
            return Err(Error::InvalidConfig(format!(
                "groups of {size} blocks: allowed is 1 to {}",
                self.config.span()
            )));
        }
        self.plan_emptied(Goal::Groups { size, groups }, (size, groups), max_moves)
    }

    fn plan_emptied(&self, goal: Goal, (size, k): (u32, u32), max_moves: u32) -> Result<Plan> {
        let _rest = self.rest();
        let shared = self.shared();
        let sight = self.sight(&shared);
        let mut picture = Picture::new(&sight, size, self.middle());
        let mut lore = Lore {
            lru: &mut self.oldest(&shared, &sight),
            neighbours: &self.neighbours(&shared),
        };
        let found = picture.empty_groups(k, max_moves, &mut lore);
        let emptied = found.map_err(|impossible| self.impossible(impossible))?;
        let complete = emptied.remaining == 0 && emptied.free >= k;
        Ok(self.planned(goal, emptied.pairs, emptied.remaining, complete, &sight))
    }

    /// A plan that brings a sequence into fewer runs, at most `max_moves` now. It is complete when no
    /// move saves a run. With what a pass leaves of its moves it makes room behind runs of the
    /// sequence, and the next one fills it.
    pub fn plan_gather(&self, id: i64, max_moves: u32) -> Result<Plan> {
        let _rest = self.rest();
        let shared = self.shared();
        let slot = self.sequence(id)?.0;
        let sight = self.sight(&shared);
        let mut picture = Picture::new(&sight, WINDOW, self.middle());
        let sequence = lock(&self.slots[slot as usize]);
        let mut runs = self.runs_of(&sequence, picture.which_may_move());
        drop(sequence);
        let mut lore = Lore {
            lru: &mut self.oldest(&shared, &sight),
            neighbours: &self.neighbours(&shared),
        };
        let mut make_room = |picture: &mut Picture<'_>, runs: &[gather::Run], most: u32| {
            let mut pairs: Vec<[u32; 2]> = Vec::new();
            while let left = most - pairs.len() as u32
                && left > 0
                && let Some(range) = gather::room(picture, runs, left)
            {
                let cleared = picture.clear(range, left, &mut lore);
                if cleared.is_empty() {
                    break;
                }
                picture.moved(&cleared);
                pairs.extend(cleared);
            }
            pairs
        };
        // A sequence that takes many passes is gathered into room that the pass before has made, or its
        // blocks would move from one short run to the next.
        let ahead = match gather::scattered(&runs) / AHEAD > max_moves {
            true => max_moves * ROOM / 8,
            false => 0,
        };
        let mut pairs = make_room(&mut picture, &runs, ahead);
        let left = max_moves - pairs.len() as u32;
        pairs.extend(gather::gather(&mut picture, &mut runs, left, 0.0, true));
        let mut remaining = gather::scattered(&runs);
        // More room with what is left.
        let left = max_moves - pairs.len() as u32;
        pairs.extend(make_room(&mut picture, &runs, left));
        let complete = pairs.is_empty();
        if complete {
            remaining = 0;
        }
        Ok(self.planned(Goal::Gather(id), pairs, remaining, complete, &sight))
    }

    /// The runs of a sequence, and which of them may move.
    pub(super) fn runs_of(
        &self,
        sequence: &Sequence,
        movable: impl FnMut(u32) -> bool,
    ) -> Vec<gather::Run> {
        let (space, mapped) = (sequence.space, self.blocks_for(sequence.tokens));
        let blocks = self.table.blocks(space, sequence.first, mapped);
        gather::runs(space.virtual_of(sequence.first), &blocks, movable)
    }

    /// Who maps the blocks that are to be moved next to what.
    pub(super) fn neighbours<'a>(&'a self, shared: &'a Shared) -> Mapped<'a> {
        Mapped { mmu: self, shared }
    }

    /// The quote with the moves that would make what is missing, if moves can.
    pub fn with_moves(&self, mut quote: Quote) -> Quote {
        let Shape { windows, run } = quote.shape;
        let plan = match (quote.when, windows, run) {
            (When::Frees, windows, _) if windows > 0 => self.plan_huge_pages(windows, 0),
            (When::Frees, _, run) if run > 0 => self.plan_free_run(run, 0),
            _ => return quote,
        };
        if let Ok(plan) = plan {
            quote.when = When::Moves;
            quote.moves = plan.remaining;
        }
        quote
    }

    /// log2 of the page size that moved pieces are kept aligned to.
    pub(super) fn middle(&self) -> u32 {
        self.config.page_orders.alignment()
    }

    /// A plan of these moves, with what the pool looks like after them.
    pub(super) fn planned(
        &self,
        goal: Goal,
        pairs: Vec<[u32; 2]>,
        remaining: u32,
        complete: bool,
        sight: &Sight<'_>,
    ) -> Plan {
        let mut after = self.pool.available_bits();
        (self.holds.blocks().iter()).for_each(|&block| set(&mut after, block, true));
        for &[source, destination] in &pairs {
            set(&mut after, destination, false);
            set(&mut after, source, true);
        }
        Plan {
            uid: self.uid,
            evicts: sight.evicted_by(&pairs),
            goal,
            complete,
            remaining,
            parts: [0; 3],
            after: After {
                bits: after,
                num_blocks: self.config.span(),
                longest: OnceLock::new(),
            },
            pairs,
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

    pub(super) fn below(&self, ratio: f64, max_moves: u32) -> Plan {
        let _rest = self.rest();
        let shared = self.shared();
        let sight = self.sight(&shared);
        let bits = sight.bits();
        let lru = &mut self.oldest(&shared, &sight);
        let planned = plan::below(&bits.snapshot(), ratio, max_moves, lru);
        self.plan(Goal::Below(ratio), planned, &sight, |p| {
            p.predicted_ratio < ratio
        })
    }

    fn plan(
        &self,
        goal: Goal,
        planned: plan::Planned,
        sight: &Sight,
        reached: impl FnOnce(&plan::Planned) -> bool,
    ) -> Plan {
        let complete = planned.remaining == 0 && reached(&planned);
        self.planned(goal, planned.pairs, planned.remaining, complete, sight)
    }

    /// What planning reads of the state at rest.
    pub(super) fn sight(&self, shared: &Shared) -> Sight<'_> {
        let held = self.holds.blocks();
        let filled = self.holds.of(self.filling_slot());
        let twice = shared.awaited.keys().copied();
        Sight {
            mmu: self,
            unsettled: self.unsettled(),
            held: Sparse::new(held.iter().copied()),
            soon: Sparse::new(shared.fenced_blocks()),
            twice: twice
                .filter(|&block| self.pool.is_evictable(block))
                .collect(),
            last: (held.into_iter())
                .filter(|block| !filled.contains(block))
                .collect(),
        }
    }

    /// Blocks that are evicted for a move, in their order; held ones go last.
    pub(super) fn oldest<'a>(
        &'a self,
        shared: &'a Shared,
        sight: &'a Sight<'_>,
    ) -> impl Iterator<Item = u32> + 'a {
        let evictable = |block: &u32| self.pool.is_evictable(*block);
        let cached = shared.index.oldest().filter(evictable);
        cached.chain(sight.last.iter().copied())
    }

    /// Blocks that a step in flight is writing, which stay where they are.
    fn unsettled(&self) -> Sparse {
        if self.steps().count() == 0 {
            return Sparse::default();
        }
        let mut blocks = Vec::new();
        for (_, cell) in self.used_slots() {
            let sequence = lock(cell);
            let mapped = self.blocks_for(sequence.tokens);
            let unsettled = sequence.unsettled(self.config.block_size, mapped);
            if sequence.open && !unsettled.is_empty() {
                let (from, to) = (unsettled.start, unsettled.end);
                self.table
                    .append_blocks(sequence.space, from, to, &mut blocks);
            }
        }
        Sparse::new(blocks.into_iter())
    }
}

/// Who maps blocks next to what, by the reverse map and the page table.
pub(super) struct Mapped<'a> {
    mmu: &'a Mmu,
    shared: &'a Shared,
}

impl Neighbours for Mapped<'_> {
    fn run(&self, block: u32, most: u32) -> Together {
        let (mmu, table) = (self.mmu, &self.mmu.table);
        let Some((page, loc)) = mmu.first_page(self.shared, block) else {
            return ().run(1, 1);
        };
        let inside = block - (page.1 << page.0);
        // Single entries mostly tell by themselves.
        let known = (page.0 < 9)
            .then(|| table.around(loc + inside, block, most))
            .flatten();
        let by_sequence = || {
            let (slot, at) = table.whose(loc);
            let sequence = lock(&mmu.slots[slot as usize]);
            let (space, index) = (sequence.space, sequence.space.logical_of(at + inside));
            let mapped = mmu.blocks_for(sequence.tokens);
            let before = (index > sequence.first).then(|| table.block(space, index - 1));
            let entries = table.leaves(space, index, mapped.min(index + most));
            let blocks = entries.flat_map(|entries| entries.blocks());
            let together = (block..).zip(blocks).take_while(|(at, block)| at == block);
            let len = together.count() as u32;
            (before, len, index + len == mapped)
        };
        let (before, len, ends) = known.unwrap_or_else(by_sequence);
        debug_assert_eq!((before, len, ends), by_sequence());
        let spare = match ends && mmu.has_holds() {
            true => mmu.config.hold_blocks,
            false => 0,
        };
        Together { len, before, spare }
    }
}

/// The state at rest as planning reads it: words of the pool when they are asked for, counts by window
/// where the pool keeps them. Whoever changes the pool meanwhile has read before what is to stay as it
/// was ([`Picture::read`]).
#[derive(Debug)]
pub(super) struct Sight<'a> {
    mmu: &'a Mmu,
    /// Blocks that a step in flight is writing.
    unsettled: Sparse,
    /// Held blocks. What is held can be had as what is cached can, and goes last of all.
    held: Sparse,
    /// Fenced blocks, which will be empty when their steps have ended: else the run that a pass has
    /// just emptied would look occupied to the next pass.
    soon: Sparse,
    /// Evictable blocks that are in the index of stuck ones besides.
    twice: Vec<u32>,
    /// Held blocks that may be taken from whoever holds them, in that order.
    last: Vec<u32>,
}

/// A few blocks of a pool.
#[derive(Debug, Default)]
struct Sparse {
    /// Words with bits, ascending.
    words: Vec<(u32, u64)>,
    /// A bit for each word of the pool that has any, so that all others are not searched for.
    known: Vec<u64>,
}

impl Sparse {
    fn new(blocks: impl Iterator<Item = u32>) -> Self {
        let mut words: Vec<(u32, u64)> = blocks.map(|b| (b / 64, 1 << (b % 64))).collect();
        words.sort_unstable();
        words.dedup_by(|next, word| {
            let same = next.0 == word.0;
            word.1 |= if same { next.1 } else { 0 };
            same
        });
        let last = words.last().map_or(0, |word| word.0 / 64 + 1);
        let mut known = vec![0; last as usize];
        for &(at, _) in &words {
            known[at as usize / 64] |= 1 << (at % 64);
        }
        Self { words, known }
    }

    /// Whether any of them lies in a window.
    fn is_in(&self, window: u32) -> bool {
        let first = window as usize * windows::WORDS;
        let known = self.known.get(first / 64).copied().unwrap_or(0);
        known >> (first % 64) & ((1 << windows::WORDS) - 1) != 0
    }

    fn word(&self, at: usize) -> u64 {
        let known = self.known.get(at / 64).copied().unwrap_or(0);
        if known >> (at % 64) & 1 == 0 {
            return 0;
        }
        let found = self.words.binary_search_by_key(&(at as u32), |word| word.0);
        found.map_or(0, |found| self.words[found].1)
    }

    /// Of each word: its window, and how many bits it has.
    fn counts(&self) -> impl Iterator<Item = (usize, u32)> {
        let window = |at: u32| (at * 64 / WINDOW) as usize;
        (self.words.iter()).map(move |&(at, word)| (window(at), word.count_ones()))
    }
}

impl Source for Sight<'_> {
    fn num_blocks(&self) -> u32 {
        self.mmu.config.span()
    }

    fn sets(&self, at: usize) -> Sets {
        let [taken, evictable, stuck] = self.mmu.pool.sets(at);
        let first = at as u32 * 64;
        let huge = self.mmu.is_huge(first);
        let movable = taken & !evictable & !stuck & !self.unsettled.word(at);
        let inside = u64::MAX >> (first + 64).saturating_sub(self.num_blocks());
        Sets {
            empty: !taken,
            cached: evictable | self.held.word(at),
            // Blocks of huge pages stay where they are.
            movable: if huge { 0 } else { movable & inside },
            soon: self.soon.word(at),
        }
    }

    fn window(&self, window: u32) -> [Sets; windows::WORDS] {
        let first = window as usize * windows::WORDS;
        if [&self.unsettled, &self.held, &self.soon]
            .iter()
            .any(|sparse| sparse.is_in(window))
        {
            return std::array::from_fn(|word| self.sets(first + word));
        }
        let movable = match self.mmu.is_huge(window * WINDOW) {
            true => 0,
            false => u64::MAX,
        };
        std::array::from_fn(|word| {
            let [taken, evictable, stuck] = self.mmu.pool.sets(first + word);
            let sets = Sets {
                empty: !taken,
                cached: evictable,
                movable: taken & !evictable & !stuck & movable,
                soon: 0,
            };
            debug_assert_eq!(sets, self.sets(first + word));
            sets
        })
    }

    fn windows(&self) -> Option<Vec<Group>> {
        let n = self.num_blocks();
        let counts = self.mmu.pool.counts_by_window();
        let mut windows: Vec<Group> = (0..n)
            .step_by(WINDOW as usize)
            .zip(counts)
            .map(|(first, (empty, evictable, stuck))| Group {
                // What is in both indices is added below.
                movable: WINDOW
                    .min(n - first)
                    .wrapping_sub(empty + evictable + stuck),
                stuck,
                soon: 0,
                available: empty + evictable,
                empty,
            })
            .collect();
        for &block in &self.twice {
            if self.mmu.pool.is_stuck(block) {
                let window = &mut windows[(block / WINDOW) as usize];
                window.stuck -= 1;
                window.movable = window.movable.wrapping_add(1);
            }
        }
        for (window, n) in self.held.counts() {
            windows[window].stuck -= n;
            windows[window].available += n;
        }
        for (window, n) in self.soon.counts() {
            windows[window].stuck -= n;
            windows[window].soon += n;
        }
        for &(at, word) in &self.unsettled.words {
            let [taken, evictable, stuck] = self.mmu.pool.sets(at as usize);
            let n = (word & taken & !evictable & !stuck).count_ones();
            let window = &mut windows[(at * 64 / WINDOW) as usize];
            window.movable -= n;
            window.stuck += n;
        }
        for (first, window) in (0..n).step_by(WINDOW as usize).zip(&mut windows) {
            if window.movable > 0 && self.mmu.is_huge(first) {
                window.stuck += std::mem::take(&mut window.movable);
            }
        }
        debug_assert!(
            (0..n)
                .step_by(WINDOW as usize)
                .map(|first| windows::count(self, first..n.min(first + WINDOW)))
                .eq(windows.iter().copied()),
            "counts by window that no recount finds"
        );
        Some(windows)
    }
}

/// The whole of a [`Sight`] as bits.
pub(super) struct Bits {
    num_blocks: u32,
    empty: Vec<u64>,
    cached: Vec<u64>,
    movable: Vec<u64>,
    soon: Vec<u64>,
}

impl Bits {
    fn snapshot(&self) -> plan::Snapshot<'_> {
        plan::Snapshot {
            num_blocks: self.num_blocks,
            empty: &self.empty,
            cached: &self.cached,
            movable: &self.movable,
            soon: &self.soon,
        }
    }
}

impl Sight<'_> {
    fn bits(&self) -> Bits {
        let words = self.num_blocks().div_ceil(64) as usize;
        let mut bits = Bits {
            num_blocks: self.num_blocks(),
            empty: Vec::with_capacity(words),
            cached: Vec::with_capacity(words),
            movable: Vec::with_capacity(words),
            soon: Vec::with_capacity(words),
        };
        for at in 0..words {
            let sets = self.sets(at);
            bits.empty.push(sets.empty);
            bits.cached.push(sets.cached);
            bits.movable.push(sets.movable);
            bits.soon.push(sets.soon);
        }
        bits
    }

    /// Destinations that are cached or held now.
    fn evicted_by(&self, pairs: &[[u32; 2]]) -> HashSet<u32> {
        let held = |block: u32| self.held.word((block / 64) as usize) >> (block % 64) & 1 == 1;
        let cached = |block: &u32| self.mmu.pool.is_evictable(*block) || held(*block);
        pairs.iter().map(|pair| pair[1]).filter(cached).collect()
    }
}

/// Windows of 512 set bits.
fn whole_windows(bits: &[u64], n: u32) -> u32 {
    let windows = bits.chunks_exact(8).take((n / WINDOW) as usize);
    let whole = |window: &&[u64]| window.iter().all(|&word| word == u64::MAX);
    windows.filter(whole).count() as u32
}

fn set(bits: &mut [u64], block: u32, on: bool) {
    let (at, bit) = ((block / 64) as usize, 1 << (block % 64));
    if on {
        bits[at] |= bit
    } else {
        bits[at] &= !bit
    }
}
