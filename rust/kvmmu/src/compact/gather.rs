//! Which blocks of one sequence to move so that it lies in fewer runs.
//!
//! Here live plans for one sequence: its runs and a picture of the pool in, pairs of source and
//! destination out. Never here: which sequence, page tables.
//!
//! # Algorithm
//! Greedy, best runs saved a moved block first. A group of consecutive runs (in the order of the
//! sequence) is moved as a whole, if it is no longer than what is left of the budget, to
//! - empty blocks directly behind the run before it, or directly before the run behind it: it saves as
//!   many runs as it has;
//! - one empty run elsewhere, in a window with live blocks (or in a free one that may be opened): it
//!   saves one less.
//!
//! Where that is not enough and the caller wants it, room is made behind one of the runs by moving what
//! others have there ([`room`]); the next pass fills it. A sequence that takes many passes has room made with a
//! part of each pass from the start: else its blocks are moved to ever longer runs, several times each. In the
//! background emptying windows makes the room. No block moves twice in a pass, and a pass begins where the last one left off, since what it
//! gathered is a run now.

use std::cmp::Reverse;
use std::ops::Range;

use super::measure::WINDOW;
use super::windows::Picture;

/// Consecutive blocks of a sequence that lie together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Its first virtual block.
    pub at: u32,
    /// Its first physical block.
    pub block: u32,
    /// Blocks.
    pub len: u32,
    /// Whether all of them may move.
    pub movable: bool,
}

impl Run {
    fn end(&self) -> u32 {
        self.block + self.len
    }
}

/// The runs of blocks that are mapped from a virtual block on.
pub fn runs(at: u32, blocks: &[u32], mut movable: impl FnMut(u32) -> bool) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (at, &block) in (at..).zip(blocks) {
        match runs.last_mut() {
            Some(run) if run.end() == block => {
                run.len += 1;
                run.movable &= movable(block);
            }
            _ => runs.push(Run {
                at,
                block,
                len: 1,
                movable: movable(block),
            }),
        }
    }
    runs
}

/// Where a group of runs goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Behind,
    Before,
    Elsewhere,
}

/// A group of runs to move, `runs[first..=last]`.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    first: usize,
    last: usize,
    blocks: u32,
    saved: u32,
    place: Place,
}

impl Candidate {
    fn is_better(&self, other: &Option<Candidate>) -> bool {
        let Some(other) = other else { return true };
        let (mine, theirs) = (
            u64::from(self.saved) * u64::from(other.blocks),
            u64::from(other.saved) * u64::from(self.blocks),
        );
        (mine, self.blocks) > (theirs, other.blocks)
    }
}

/// Moves, at most `budget`, that bring a sequence into fewer runs, as long as each saves at least
/// `least` runs a block. `open`: free groups may be opened.
pub fn gather(
    picture: &mut Picture<'_>,
    runs: &mut Vec<Run>,
    budget: u32,
    least: f64,
    open: bool,
) -> Vec<[u32; 2]> {
    let mut pairs = Vec::new();
    picture.sort_targets();
    for run in runs.iter() {
        picture.read(run.block / WINDOW);
    }
    let mut most = budget;
    while (pairs.len() as u32) < budget && runs.len() > 1 {
        let left = budget - pairs.len() as u32;
        let Some(best) = best(picture, runs, left, most.min(left)) else {
            break;
        };
        if f64::from(best.saved) < least * f64::from(best.blocks) {
            break;
        }
        let Some(to) = place(picture, runs, &best, open) else {
            // No run is that long: a shorter group may find room.
            most = best.blocks / 2;
            if most < 2 {
                break;
            }
            continue;
        };
        let sources = runs[best.first..=best.last].iter();
        let sources = sources.flat_map(|run| run.block..run.end());
        let moved: Vec<[u32; 2]> = sources.zip(to..).map(|(from, to)| [from, to]).collect();
        picture.moved(&moved);
        pairs.extend(&moved);
        let at = runs[best.first].at;
        let merged = Run {
            at,
            block: to,
            len: best.blocks,
            // It stays where it is for this pass.
            movable: false,
        };
        runs.splice(best.first..=best.last, [merged]);
        join(runs, best.first);
    }
    pairs
}

/// Makes one run of what lies together around `at`.
fn join(runs: &mut Vec<Run>, at: usize) {
    for i in [at + 1, at] {
        if i > 0 && i < runs.len() && runs[i - 1].end() == runs[i].block {
            let run = runs.remove(i);
            runs[i - 1].len += run.len;
            runs[i - 1].movable &= run.movable;
        }
    }
}

fn best(picture: &Picture<'_>, runs: &[Run], left: u32, elsewhere: u32) -> Option<Candidate> {
    let mut best: Option<Candidate> = None;
    for first in 0..runs.len() {
        if !runs[first].movable || runs[first].len > left {
            continue;
        }
        let behind = match first {
            0 => 0,
            _ => picture.empty_from(runs[first - 1].end(), left),
        };
        let mut blocks = 0;
        for last in first..runs.len() {
            if !runs[last].movable || blocks + runs[last].len > left {
                break;
            }
            blocks += runs[last].len;
            let n = (last - first) as u32;
            let mut consider = |saved, place| {
                let candidate = Candidate {
                    first,
                    last,
                    blocks,
                    saved,
                    place,
                };
                if saved > 0 && candidate.is_better(&best) {
                    best = Some(candidate);
                }
            };
            if blocks <= behind {
                consider(n + 1, Place::Behind);
            }
            if let Some(next) = runs.get(last + 1)
                && picture.empty_before(next.block, blocks)
            {
                consider(n + 1, Place::Before);
            }
            if blocks <= elsewhere {
                consider(n, Place::Elsewhere);
            }
        }
        // As good as it gets: a run saved by every move.
        if best.is_some_and(|best| best.saved >= best.blocks && best.blocks == left) {
            break;
        }
    }
    best
}

fn place(
    picture: &mut Picture<'_>,
    runs: &[Run],
    candidate: &Candidate,
    open: bool,
) -> Option<u32> {
    let n = candidate.blocks;
    let first = &runs[candidate.first];
    match candidate.place {
        Place::Behind => Some(runs[candidate.first - 1].end()),
        Place::Before => Some(runs[candidate.last + 1].block - n),
        Place::Elsewhere => {
            let found = picture.take_run(n, first.at);
            if found.is_some() || !open || !picture.open_group() {
                return found;
            }
            picture.take_run(n, first.at)
        }
    }
}

/// Moves a block, in quarters, then the longest run.
type Order = (u64, Reverse<u32>);

/// Where room behind a run would let the next ones follow it: the blocks to clear, which are none of the
/// sequence's own. The place that takes the fewest moves a block, the longest run on ties.
pub fn room(picture: &Picture<'_>, runs: &[Run], most: u32) -> Option<Range<u32>> {
    let mut own: Vec<u32> = runs.iter().map(|run| run.block).collect();
    own.sort_unstable();
    let mut best: Option<(Order, Range<u32>)> = None;
    for pair in runs.windows(2) {
        let (run, next) = (pair[0], pair[1]);
        if !next.movable || next.len > most {
            continue;
        }
        let start = run.end();
        let ours = own.partition_point(|&block| block < start);
        let end = own.get(ours).copied().unwrap_or(u32::MAX);
        let end = end.min(start.saturating_add(most));
        let end = picture.first_stuck(start..end).unwrap_or(end);
        if end - start < next.len {
            continue;
        }
        let moves = u64::from(picture.movable_in(start..end));
        // In quarters: a long run is worth a little more.
        let cost = 4 * moves / u64::from(end - start);
        let order = (cost, Reverse(run.len));
        if moves > 0 && best.as_ref().is_none_or(|(least, _)| order < *least) {
            best = Some((order, start..end));
        }
    }
    best.map(|(_, range)| range)
}

/// Blocks in runs other than the longest: what would have to move at most.
pub fn scattered(runs: &[Run]) -> u32 {
    let total: u32 = runs.iter().map(|run| run.len).sum();
    total - runs.iter().map(|run| run.len).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::random;
    use super::super::windows::tests::{Model, State};
    use super::*;
    use proptest::prelude::*;

    /// The places of a sequence after moves.
    fn moved(blocks: &[u32], pairs: &[[u32; 2]]) -> Vec<u32> {
        let to = |block: &u32| {
            pairs
                .iter()
                .find(|pair| pair[0] == *block)
                .map(|pair| pair[1])
        };
        blocks
            .iter()
            .map(|block| to(block).unwrap_or(*block))
            .collect()
    }

    fn runs_of(model: &Model, at: u32, blocks: &[u32]) -> Vec<Run> {
        runs(at, blocks, |block| {
            model.states[block as usize] == State::Movable
        })
    }

    fn places(runs: &[Run]) -> Vec<(u32, u32, u32)> {
        runs.iter()
            .map(|run| (run.at, run.block, run.len))
            .collect()
    }

    fn states() -> impl Strategy<Value = Vec<State>> {
        let block = prop_oneof![
            4 => Just(State::Empty), 1 => Just(State::Cached), 6 => Just(State::Movable),
            1 => Just(State::Stuck)
        ];
        let stretch = (
            block,
            prop_oneof![4 => 1..3usize, 2 => 1..12usize, 1 => 1..70usize],
        );
        prop::collection::vec(stretch, 1..60).prop_map(|list| {
            list.into_iter()
                .flat_map(|(state, len)| vec![state; len])
                .collect()
        })
    }

    proptest! {
        #[test]
        fn a_sequence_never_lies_in_more_runs_and_lies_as_was_said(
            states in states(), size in prop_oneof![Just(8u32), Just(16), Just(64)], align in 0..3u32,
            budget in 0..60u32, least in prop_oneof![Just(0.0), Just(0.1), Just(0.5), Just(1.0)],
            open in any::<bool>(), share in 2..6u64, at in 0..2000u32, seed in 1..u64::MAX,
        ) {
            let mut model = Model::new(states, size);
            let mut seed = seed;
            // Some of the live blocks, also stuck ones, in stretches of any order.
            let live = (0..).zip(&model.states).filter(|(_, s)| matches!(s, State::Movable | State::Stuck));
            let mine: Vec<u32> = live.map(|(b, _)| b).filter(|_| !random(&mut seed).is_multiple_of(share)).collect();
            let mut pieces: Vec<&[u32]> = mine.chunks(1 + (seed % 5) as usize).collect();
            for i in (1..pieces.len()).rev() {
                pieces.swap(i, random(&mut seed) as usize % (i + 1));
            }
            let blocks = pieces.concat();
            let before = runs_of(&model, at, &blocks);
            let mut after = before.clone();
            let pairs = gather(&mut model.picture(align), &mut after, budget, least, open);
            prop_assert!(pairs.len() <= budget as usize);
            for pair in &pairs {
                prop_assert!(blocks.contains(&pair[0]), "nothing of others moves");
                prop_assert_eq!(model.states[pair[1] as usize], State::Empty);
                prop_assert!(open || !model.is_closed(pair[1] / size), "a free group is opened");
            }
            let now = moved(&blocks, &pairs);
            model.apply(&pairs);
            prop_assert_eq!(places(&after), places(&runs_of(&model, at, &now)));
            let saved = before.len() - after.len();
            prop_assert!(saved as f64 >= least * pairs.len() as f64, "{saved} by {} moves", pairs.len());
            prop_assert!(pairs.is_empty() || saved > 0);
            prop_assert!(pairs.len() as u32 <= scattered(&before) + before.iter().map(|r| r.len).max().unwrap_or(0));
        }
    }

    /// A sequence in single blocks, every fifth of three windows, and one window that is free.
    #[test]
    fn a_scattered_sequence_ends_in_one_run_with_each_block_moved_once() {
        const SIZE: u32 = 512;
        for budget in [1, 2, 7, 32, 600] {
            let mut blocks: Vec<u32> = (0..3 * SIZE).step_by(5).collect();
            let mut states = vec![State::Stuck; 4 * SIZE as usize];
            states[3 * SIZE as usize..].fill(State::Empty);
            blocks
                .iter()
                .for_each(|b| states[*b as usize] = State::Movable);
            let mut model = Model::new(states, SIZE);
            let mut moves = 0;
            loop {
                let mut runs = runs_of(&model, 0, &blocks);
                let before = runs.len();
                let pairs = gather(&mut model.picture(2), &mut runs, budget, 0.0, true);
                if pairs.is_empty() {
                    break;
                }
                assert!(runs.len() < before && pairs.len() <= budget as usize);
                blocks = moved(&blocks, &pairs);
                model.apply(&pairs);
                moves += pairs.len();
            }
            let runs = runs_of(&model, 0, &blocks).len();
            // A budget of one move brings no two blocks together.
            let expected = if budget == 1 { blocks.len() } else { 1 };
            assert_eq!(runs, expected, "budget {budget}");
            assert!(moves <= blocks.len(), "budget {budget}: {moves} moves");
        }
    }

    #[test]
    fn a_group_goes_behind_the_run_before_it_or_in_front_of_the_one_behind_it() {
        let model = Model::of("xx..#x#..xx#", 16);
        let mut runs = runs_of(&model, 0, &[0, 1, 5, 9, 10]);
        let pairs = gather(&mut model.picture(0), &mut runs, 9, 0.0, false);
        // Two runs saved by one move, wherever it goes; then nothing but the two long ones is left.
        assert_eq!(pairs[0], [5, 2]);
        let mut runs = runs_of(&model, 0, &[5, 9, 10]);
        let pairs = gather(&mut model.picture(0), &mut runs, 1, 0.0, false);
        assert_eq!((pairs, runs.len()), (vec![[5, 8]], 1));
    }
}
