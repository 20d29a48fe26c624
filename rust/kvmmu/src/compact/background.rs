//! When blocks move without being asked, and what for.
//!
//! What lives here: the default trigger and the stages of one pass. What never lives here: which
//! moves empty a window, make a huge page or gather a sequence (`windows`, `promote`, `gather`).
//!
//! First of all what somebody was refused ([`Error::Fragmented`](crate::Error::Fragmented)) is made. Else a
//! pass has a budget of moves, and spends it in this order:
//! 1. windows: once a huge page was missed or free windows are below
//!    [`Config::windows_below`](crate::Config::windows_below) of what the available blocks could make, until
//!    they are a little above. Only windows at most half full are emptied (after a miss, up to seven
//!    eighths). In the guarantee mode instead: what is owed;
//! 2. huge pages: a region of a long sequence that lies in pieces is moved into a free window (before
//!    the windows, if one is half filled already);
//! 3. runs: sequences in many runs are gathered, as far as a move saves
//!    [`Config::gather_least`](crate::Config::gather_least) runs.
//!
//! When nothing of this is to be done: the ratio, if the caller set
//! [`Config::compaction_start`](crate::Config::compaction_start).

use super::measure::{self, WINDOW};
use super::survey::Sight;
use super::windows::{Emptied, Held, Lore, Picture};
use super::{Goal, Plan, gather};
use crate::state::{Mmu, Shared, Wish};
use crate::sync::{Ordering, lock};

/// Windows with more live blocks are not emptied in the background; nor those with more of the second
/// when a huge page was missed.
const MOST_LIVE: u32 = WINDOW / 2;
const MOST_LIVE_MISSED: u32 = WINDOW * 7 / 8;
/// Where no huge page was missed, what belongs together is not cut into smaller pieces.
const FINEST: u32 = 8;
/// The trigger is on because a huge page was missed.
const MISSED: u32 = 2;
/// Under the guarantee other purposes move nothing once moves are one in so many frees.
const SPENT: u64 = 4;
/// Sequences in fewer runs are left alone.
const GATHER_FROM: u32 = 4;
/// How many sequences a pass looks at to gather one.
const GATHER_LOOKS: u32 = 1;
/// The trigger stops when the share of free windows is so much above where it starts.
const HYSTERESIS: f64 = 0.05;

impl Mmu {
    /// The default trigger: a plan of at most `budget_blocks` moves, and at most `most`, when memory
    /// asks for it.
    pub fn plan_compaction(&self, most: Option<u32>) -> Option<Plan> {
        let mut budget = self.config.budget_blocks.min(most.unwrap_or(u32::MAX));
        if self.config.guarantee.is_some() {
            // Never more moves than frees, whatever they are for.
            budget = budget.min(u32::try_from(self.unanswered_frees()).unwrap_or(u32::MAX));
        }
        let plan = self.for_refused(budget).or_else(|| self.background(budget));
        plan.or_else(|| self.by_ratio(budget))
    }

    /// What somebody was refused is made, whatever the trigger says, until it is there or cannot be.
    fn for_refused(&self, budget: u32) -> Option<Plan> {
        if budget == 0 {
            return None;
        }
        let wish = self.wishes.next()?;
        let plan = match wish {
            Wish::Run(run) => self.plan_free_run(run, budget),
            Wish::Windows(windows) => self.plan_huge_pages(windows, budget),
        };
        let plan = plan.ok().filter(|plan| {
            let moves = plan.pairs.len() as u32;
            moves > 0 && self.wishes.spend(moves)
        });
        if plan.is_none() {
            self.wishes.end(wish);
        }
        plan
    }

    /// Whether a run of `n` blocks is to be had now, by evicting at most.
    pub fn ready(&self, n: u32) -> bool {
        self.measure().available.largest >= n
    }

    fn background(&self, budget: u32) -> Option<Plan> {
        let _rest = self.rest();
        let mut shared = self.shared();
        let mut sight = self.sight(&shared);
        if shared.filling.is_some() && self.is_over_the_bound(&sight) {
            // The window that is being filled is one too many by now.
            self.stop_filling(&mut shared);
            sight = self.sight(&shared);
        }
        let mut picture = Picture::new(&sight, WINDOW, self.middle());
        if let Some(filling) = shared.filling {
            picture.keep(filling.window / WINDOW);
            // It may be given up below, and its blocks become empty.
            picture.read(filling.window / WINDOW);
        }
        // A window that is half filled is of use to nobody, so it comes first.
        let mut held = Vec::new();
        if shared.filling.is_some() {
            let most = budget.min(self.left_by_guarantee(&picture, 0));
            held = self.continue_window(&mut shared, &picture, most);
            picture.moved(&held);
        }
        let left = budget - held.len() as u32;
        let emptied = self.make_free_windows(&mut shared, &sight, &mut picture, left);
        let (mut pairs, remaining) = (emptied.pairs, emptied.remaining);
        let windows = pairs.len();
        let spent = (windows + held.len()) as u32;
        let budget = budget.min(spent + self.left_by_guarantee(&picture, spent));
        if held.is_empty() && self.may_fill(&picture) {
            held = self.start_window(&mut shared, &mut picture, budget - spent);
            picture.moved(&held);
            if let Some(filling) = shared.filling {
                // Its blocks were empty when the state was read; now they are held.
                picture.spare(filling.window..filling.window + WINDOW);
            }
        }
        pairs.extend(&held);
        if self.config.gather_least > 0.0 {
            if self.config.compaction_start.is_some() {
                // Else the ratio would have what was gathered moved back, and so for ever.
                picture.spare_longest();
            }
            let left = budget - pairs.len() as u32;
            pairs.extend(self.gather_some(&mut shared, &mut picture, left));
        }
        if pairs.is_empty() {
            return None;
        }
        let complete = remaining == 0;
        let mut plan = self.planned(Goal::Background, pairs, remaining, complete, &sight);
        let gathered = plan.pairs.len() - windows - held.len();
        plan.parts = [windows, held.len(), gathered].map(|n| n as u32);
        // The window was empty when the state was read.
        plan.evicts.extend(held.iter().map(|pair| pair[1]));
        Some(plan)
    }

    fn make_free_windows(
        &self,
        shared: &mut Shared,
        sight: &Sight<'_>,
        picture: &mut Picture<'_>,
        budget: u32,
    ) -> Emptied {
        // Relaxed: a counter.
        let missed = self.stats.huge_missed.load(Ordering::Relaxed);
        if missed > shared.missed {
            shared.missed = missed;
            self.compacting.store(MISSED, Ordering::Relaxed);
        }
        let mut lore = Lore {
            lru: &mut self.oldest(shared, sight),
            neighbours: &self.neighbours(shared),
        };
        match self.config.guarantee {
            Some(slack) => picture.keep_guarantee(slack, budget, &mut lore),
            None => self.more_windows(picture, budget, &mut lore),
        }
    }

    /// Moves that the guarantee leaves for other purposes: as long as all moves are less than a quarter of
    /// the frees, those that were never answered by a move, less what is owed and what the next window
    /// may cost. So moves never outnumber frees, whatever they are for.
    fn left_by_guarantee(&self, picture: &Picture<'_>, planned: u32) -> u32 {
        let Some(slack) = self.config.guarantee else {
            return u32::MAX / 2;
        };
        let (frees, moves) = self.frees_and_moves();
        let moves = moves + u64::from(planned);
        let reserved = u64::from(picture.held(slack).owed + WINDOW);
        let left = frees.saturating_sub(moves + reserved);
        let left = left.min((frees / SPENT).saturating_sub(moves));
        u32::try_from(left).unwrap_or(u32::MAX / 2)
    }

    /// Frees less moves.
    fn unanswered_frees(&self) -> u64 {
        let (frees, moves) = self.frees_and_moves();
        frees.saturating_sub(moves)
    }

    fn frees_and_moves(&self) -> (u64, u64) {
        let stats = self.stats();
        let moves = stats.moves_begun - stats.moves_aborted - stats.moves_dropped;
        (stats.freed_blocks + stats.left_cached, moves)
    }

    /// More windows are held than the guarantee allows.
    fn is_over_the_bound(&self, sight: &Sight<'_>) -> bool {
        self.config.guarantee.is_some_and(|slack| {
            let picture = Picture::new(sight, WINDOW, self.middle());
            let held = picture.held(slack);
            held.windows > held.allowed
        })
    }

    /// A window may be filled: under the guarantee only as long as one more may be held.
    fn may_fill(&self, picture: &Picture<'_>) -> bool {
        self.config.guarantee.is_none_or(|slack| {
            let held = picture.held(slack);
            held.windows < held.allowed
        })
    }

    /// Brings sequences in many runs into fewer, some at a time, each in its turn.
    fn gather_some(
        &self,
        shared: &mut Shared,
        picture: &mut Picture<'_>,
        budget: u32,
    ) -> Vec<[u32; 2]> {
        let mut pairs = Vec::new();
        let used = self.used_slots().count() as u32;
        let mut looks = GATHER_LOOKS;
        for _ in 0..used {
            let left = budget - pairs.len() as u32;
            if left < 2 || looks == 0 {
                break;
            }
            shared.cursor = (shared.cursor + 1) % used;
            let sequence = lock(&self.slots[shared.cursor as usize]);
            if !sequence.open || sequence.runs < GATHER_FROM {
                continue;
            }
            looks -= 1;
            // What others share stays: they might have it moved back, and so for ever.
            let mut may_move = picture.which_may_move();
            let mut runs = self.runs_of(&sequence, |block| {
                may_move(block) && self.pool.word(block).holders() == 1
            });
            drop(may_move);
            drop(sequence);
            if let Some(last) = runs.last_mut() {
                // It grows where it lies: behind another it would soon begin anew.
                last.movable = false;
            }
            let least = self.config.gather_least;
            pairs.extend(gather::gather(picture, &mut runs, left, least, false));
        }
        pairs
    }

    /// Windows at most half full are emptied, while the trigger is on.
    fn more_windows(&self, picture: &mut Picture<'_>, budget: u32, lore: &mut Lore<'_>) -> Emptied {
        let possible = picture.available() / WINDOW;
        let free = picture.free();
        let wanted = |share: f64| (share * f64::from(possible)).ceil() as u32;
        // A ratio as trigger takes its place: the two would undo each other's work.
        let start = match self.config.compaction_start {
            None => self.config.windows_below,
            Some(_) => 0.0,
        };
        let stop = wanted((start + HYSTERESIS).min(1.0));
        // Relaxed: under the gate.
        if free < wanted(start) && self.compacting.load(Ordering::Relaxed) == 0 {
            self.compacting.store(1, Ordering::Relaxed);
        } else if free >= stop {
            self.compacting.store(0, Ordering::Relaxed);
        }
        if start == 0.0 || self.compacting.load(Ordering::Relaxed) == 0 {
            return Emptied {
                pairs: Vec::new(),
                remaining: 0,
                free,
            };
        }
        let most = match self.compacting.load(Ordering::Relaxed) == MISSED {
            true => (MOST_LIVE_MISSED, 1),
            false => (MOST_LIVE, FINEST),
        };
        picture.empty_at_most(stop, most, budget, lore)
    }

    /// The ratio over available blocks has passed `compaction_start`, until it has fallen below
    /// `compaction_stop`.
    fn by_ratio(&self, budget: u32) -> Option<Plan> {
        let start = self.config.compaction_start?;
        let ratio = {
            let _rest = self.rest();
            let longest = measure::longest(&self.pool.available_bits(), self.config.span());
            measure::ratio(longest.largest, longest.total)
        };
        if ratio > start {
            self.compacting_by_ratio.store(1, Ordering::Relaxed);
        } else if ratio < self.config.compaction_stop {
            self.compacting_by_ratio.store(0, Ordering::Relaxed);
        }
        if self.compacting_by_ratio.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let plan = self.below(self.config.compaction_stop, budget);
        (!plan.pairs.is_empty()).then_some(plan)
    }

    /// How the windows that are held stand against the bound of the guarantee, with `slack` windows
    /// more.
    pub fn held_windows(&self, slack: u32) -> Held {
        let _rest = self.rest();
        let sight = self.sight(&self.shared());
        Picture::new(&sight, WINDOW, self.middle()).held(slack)
    }
}
