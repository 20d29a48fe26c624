//! Which blocks to move so that the available ones come to lie together.
//!
//! Here live plans as plain values: a picture of the pool in, pairs of source and destination out.
//! Never here: the pool itself, atomics, when to plan (triggers, budgets in time), carrying a plan
//! out. Nothing is kept between two passes; each plans from scratch.
//!
//! # Algorithms
//! **Place.** Behind block tables order does not matter, so a run of n needs exactly the moves that
//! empty it, and the best place is the one with the fewest movable blocks among those without a
//! stuck one: a sliding count over all places, exact. Spans without a stuck block are found as
//! Boyer and Moore (1977) find words, from the far end of the window backwards, so that a stuck
//! block skips up to n places. Inside a span 64 places at a time are passed over (then 8) where all that
//! leaves the window, with nothing entering it, would not bring the count below the best known.
//!
//! **Order.** A budget empties the run from its longest available stretch outwards, on the side where
//! the next block joins the longer stretch. So each move lengthens that stretch. A longer one elsewhere may
//! lose blocks to destinations meanwhile, but only at its ends until the fuller windows are full: windows it
//! covers are the emptiest of all.
//!
//! **Destinations.** Empty blocks in the fullest windows first (empty windows stay empty longest),
//! then cached blocks, least recently used first.
//!
//! # Passes converge
//! A pass of m moves takes m blocks out of its run. Any other place loses at most those m, so a
//! place that needed more still does not need less, and one that needed as many is not preferred
//! (the lowest start wins, before as after). In a pool at rest the run therefore stays where it is, and
//! passes of any size add up to the least number of moves that a single pass would make. Each block that
//! others take into use between passes adds at most one move: the sum of all moves is at most the
//! cost of the first plan plus the number of blocks taken since, as long as nothing becomes stuck and
//! the length asked for does not grow.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::measure::{self, WINDOW, longest};

const WORD: u32 = u64::BITS;
const WINDOW_WORDS: usize = (WINDOW / WORD) as usize;

/// A picture of the pool: for each block at most one bit among the four sets.
///
/// Block `b` is bit `b % 64` of word `b / 64`; each slice holds at least `num_blocks` bits, and bits from
/// `num_blocks` on are ignored. A block with no bit is stuck: pinned, leased, destined, fenced,
/// offline or not settled.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot<'a> {
    /// Blocks in the pool.
    pub num_blocks: u32,
    /// Empty blocks.
    pub empty: &'a [u64],
    /// Evictable cached blocks. They count as available and need no move: evicting is enough.
    pub cached: &'a [u64],
    /// Blocks in use that may move.
    pub movable: &'a [u64],
    /// Blocks that will be empty soon (fenced). A run may be planned over them, but they are neither
    /// available yet nor a destination.
    pub soon: &'a [u64],
}

/// One pass: moves, and what the pool looks like once they are done.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// First block of the run aimed at.
    pub start: u32,
    /// Length of the run aimed at, in blocks; 0 when there is none to aim at.
    pub len: u32,
    /// The moves, `[source, destination]`, in the order that helps most when only the first are made.
    /// No block appears twice. Neighbouring sources go to neighbouring destinations where
    /// destinations lie together.
    pub pairs: Vec<[u32; 2]>,
    /// Moves that the run still needs after these.
    pub remaining: u32,
    /// Longest run of available blocks after the moves.
    pub predicted_run: u32,
    /// Fragmentation ratio over the available blocks after the moves.
    pub predicted_ratio: f64,
}

/// Why no moves whatever make a run that long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Impossible {
    /// Fewer blocks are available than the run has.
    #[error("need {need} contiguous, available {available}")]
    TooFewAvailable {
        /// Blocks asked for.
        need: u32,
        /// Empty and evictable cached blocks.
        available: u32,
    },
    /// Blocks that may not move cut the pool into spans that are all shorter.
    #[error(
        "need {need} contiguous, largest span without a block that may not move {largest_span}"
    )]
    NoSpan {
        /// Blocks asked for.
        need: u32,
        /// Length of the longest stretch of available and movable blocks.
        largest_span: u32,
    },
    /// Blocks that may not move lie in too many aligned groups.
    #[error("need {need} groups of {size} blocks, {movable} without a block that may not move")]
    TooFewGroups {
        /// Groups asked for.
        need: u32,
        /// Groups without a stuck block.
        movable: u32,
        /// Blocks of a group.
        size: u32,
    },
}

/// Plans at most `max_moves` moves towards a run of `n` available blocks, where it takes the fewest.
///
/// `lru` yields cached blocks, the least recently used first. It is read only when empty blocks run
/// out and only as far as needed; what it yields that is not a cached block outside the run is skipped.
/// When it ends too early, what is possible is planned and `remaining` counts the rest.
///
/// # Errors
/// [`Impossible`] when no number of moves makes such a run.
pub fn free_run(
    s: &Snapshot,
    n: u32,
    max_moves: u32,
    lru: &mut dyn Iterator<Item = u32>,
) -> Result<Planned, Impossible> {
    let pool = Pool::new(s);
    let available = count(&pool.now, 0..s.num_blocks);
    if available < n {
        return Err(Impossible::TooFewAvailable { need: n, available });
    }
    match fewest_live(&pool, n) {
        Some(start) => Ok(evacuate(pool, start..start + n, max_moves, lru)),
        None => Err(Impossible::NoSpan {
            need: n,
            largest_span: longest(&pool.settled, s.num_blocks).largest,
        }),
    }
}

/// Plans at most `max_moves` moves towards a fragmentation ratio strictly below `ratio`.
///
/// The run aimed at is the shortest that brings the ratio there, or the longest that stuck blocks allow
/// when none does. No moves when the ratio is below already; none for NaN. `lru` is read as in
/// [`free_run`].
pub fn below(
    s: &Snapshot,
    ratio: f64,
    max_moves: u32,
    lru: &mut dyn Iterator<Item = u32>,
) -> Planned {
    let pool = Pool::new(s);
    let now = longest(&pool.now, s.num_blocks);
    let wanted = if ratio.is_nan() {
        now.largest
    } else {
        shortest_below(ratio, now.total)
    };
    if now.largest >= wanted {
        return Planned {
            start: now.largest_start,
            len: now.largest,
            pairs: Vec::new(),
            remaining: 0,
            predicted_run: now.largest,
            predicted_ratio: measure::ratio(now.largest, now.total),
        };
    }
    let (len, start) = match fewest_live(&pool, wanted) {
        Some(start) => (wanted, start),
        None => {
            let span = longest(&pool.settled, s.num_blocks).largest;
            let start = fewest_live(&pool, span).expect("the longest span is a place for itself");
            (span, start)
        }
    };
    evacuate(pool, start..start + len, max_moves, lru)
}

/// The shortest run among `available` blocks with a ratio strictly below `wanted`; all of them when
/// none has.
fn shortest_below(wanted: f64, available: u32) -> u32 {
    let (mut low, mut high) = (0, available);
    while low < high {
        let middle = low + (high - low) / 2;
        if measure::ratio(middle, available) < wanted {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// The snapshot with the derived sets that planning reads.
struct Pool<'a> {
    snapshot: &'a Snapshot<'a>,
    /// Empty and cached blocks.
    now: Vec<u64>,
    /// These and the ones that will be empty soon: what needs no move.
    available: Vec<u64>,
    /// Blocks that may lie in a run aimed at: all but the stuck ones.
    settled: Vec<u64>,
}

impl<'a> Pool<'a> {
    fn new(s: &'a Snapshot<'a>) -> Self {
        let words = s.num_blocks.div_ceil(WORD) as usize;
        let (empty, cached) = (&s.empty[..words], &s.cached[..words]);
        let movable = &s.movable[..words];
        let soon = &s.soon[..words];
        let mut now: Vec<u64> = empty.iter().zip(cached).map(|(e, c)| e | c).collect();
        let mut available: Vec<u64> = now.iter().zip(soon).map(|(a, s)| a | s).collect();
        let mut settled: Vec<u64> = available.iter().zip(movable).map(|(a, m)| a | m).collect();
        debug_assert!(
            (0..words).all(|i| empty[i] & cached[i] | available[i] & movable[i] == 0),
            "a block is in one state"
        );
        for bits in [&mut now, &mut available, &mut settled] {
            if let Some(last) = bits.last_mut() {
                *last &= mask(words - 1, &(0..s.num_blocks));
            }
        }
        Pool {
            snapshot: s,
            now,
            available,
            settled,
        }
    }
}

/// The start of the `n` consecutive settled blocks with the fewest live ones, the lowest on ties.
fn fewest_live(pool: &Pool, n: u32) -> Option<u32> {
    let num_blocks = pool.snapshot.num_blocks;
    let mut best: Option<(u32, u32)> = None;
    let mut at = 0;
    // Blocks at..seen are known to be settled.
    let mut seen = 0;
    while n <= num_blocks - at {
        if let Some(stuck) = last_clear(&pool.settled, seen.max(at)..at + n) {
            seen = at + n;
            at = stuck + 1;
            continue;
        }
        let end = first_clear(&pool.settled, at + n..num_blocks);
        let bound = best.map_or(u32::MAX, |(live, _)| live);
        if let Some(found) = fewest_in_span(&pool.available, at..end, n, bound) {
            best = Some(found);
            if found.0 == 0 {
                break;
            }
        }
        if end == num_blocks {
            break;
        }
        at = end + 1;
        seen = at;
    }
    best.map(|(_, start)| start)
}

/// The lowest place of `n` blocks inside a span of live and available blocks that has the fewest live
/// ones, as (live, start), if these are fewer than `best`.
fn fewest_in_span(
    available: &[u64],
    span: Range<u32>,
    n: u32,
    mut best: u32,
) -> Option<(u32, u32)> {
    let last = span.end - n;
    let mut start = span.start;
    let mut live = n - count(available, start..start + n);
    let mut found = None;
    if live < best {
        best = live;
        found = Some((live, start));
    }
    while start < last && best > 0 {
        let steps = (last - start).min(WORD);
        let kept = u64::MAX >> (WORD - steps);
        let leaving = !word_at(available, start) & kept;
        let entering = !word_at(available, start + n) & kept;
        // The steps that change the count; where a live block leaves as one enters, none does.
        let (down, up) = (leaving & !entering, entering & !leaving);
        let after = live + up.count_ones() - down.count_ones();
        if live < best + down.count_ones() {
            if up == 0 {
                best = after;
                found = Some((after, start + (WORD - down.leading_zeros())));
            } else {
                let steps = Steps {
                    start,
                    live,
                    down,
                    up,
                };
                (best, found) = steps
                    .fewest(best)
                    .map_or((best, found), |it| (it.0, Some(it)));
            }
        }
        live = after;
        start += steps;
    }
    found
}

/// What 64 steps from place `start`, which holds `live` live blocks, do to that count.
struct Steps {
    start: u32,
    live: u32,
    down: u64,
    up: u64,
}

impl Steps {
    /// The first place on the way with the fewest live blocks, if these are fewer than `best`.
    fn fewest(self, mut best: u32) -> Option<(u32, u32)> {
        let mut live = self.live;
        let mut found = None;
        for (byte, (mut down, mut up)) in (self.down.to_le_bytes().into_iter())
            .zip(self.up.to_le_bytes())
            .enumerate()
        {
            let after = live + up.count_ones() - down.count_ones();
            if live < best + down.count_ones() {
                for step in 1..=8 {
                    live = live + u32::from(up & 1) - u32::from(down & 1);
                    (up, down) = (up >> 1, down >> 1);
                    if live < best {
                        best = live;
                        found = Some((live, self.start + 8 * byte as u32 + step));
                    }
                }
            }
            live = after;
        }
        found
    }
}

/// Plans the moves that empty `run`, which holds no stuck block.
fn evacuate(
    pool: Pool,
    run: Range<u32>,
    max_moves: u32,
    lru: &mut dyn Iterator<Item = u32>,
) -> Planned {
    let live = run.len() as u32 - count(&pool.available, run.clone());
    let destinations = destinations(&pool, &run, live.min(max_moves) as usize, lru);
    let sources = outward(&pool.available, &run, destinations.len());

    let mut after = pool.now;
    // Sources in order of address take destinations in the order these were found, so that runs stay
    // whole. The upper ones ascend as they are, the lower ones descend.
    let below = sources.iter().filter(|source| source.lower).count();
    let (mut lower, mut upper) = (below, below);
    let mut pairs = Vec::with_capacity(sources.len());
    for source in sources {
        let destination = if source.lower {
            lower -= 1;
            destinations[lower]
        } else {
            upper += 1;
            destinations[upper - 1]
        };
        set(&mut after, source.block);
        clear(&mut after, destination);
        pairs.push([source.block, destination]);
    }

    let predicted = longest(&after, pool.snapshot.num_blocks);
    Planned {
        start: run.start,
        len: run.len() as u32,
        remaining: live - pairs.len() as u32,
        pairs,
        predicted_run: predicted.largest,
        predicted_ratio: measure::ratio(predicted.largest, predicted.total),
    }
}

/// A live block in the run, and on which side of the stretch that grows.
struct Source {
    block: u32,
    lower: bool,
}

/// The first `wanted` live blocks of `run` from its longest available stretch outwards.
fn outward(available: &[u64], run: &Range<u32>, wanted: usize) -> Vec<Source> {
    let mut sources = Vec::with_capacity(wanted);
    if wanted == 0 {
        return sources;
    }
    let stretches: Vec<u64> = (run.clone().step_by(WORD as usize))
        .map(|at| word_at(available, at))
        .collect();
    let longest = longest(&stretches, run.len() as u32);
    let mut low = run.start + longest.largest_start;
    let mut high = low + longest.largest;

    // What lies behind the next live block on either side; none at the end of the run.
    let behind_low = |low: u32| (low > run.start).then(|| set_below(available, run.start..low - 1));
    let behind_high = |high: u32| (high < run.end).then(|| set_above(available, high + 1..run.end));
    let (mut lower, mut upper) = (behind_low(low), behind_high(high));
    while sources.len() < wanted {
        // None is less than any stretch; on ties the lower side goes first.
        if lower >= upper {
            let Some(joined) = lower else { break };
            low -= 1;
            sources.push(Source {
                block: low,
                lower: true,
            });
            low -= joined;
            lower = behind_low(low);
        } else {
            let Some(joined) = upper else { break };
            sources.push(Source {
                block: high,
                lower: false,
            });
            high += 1 + joined;
            upper = behind_high(high);
        }
    }
    sources
}

/// Up to `wanted` blocks outside `run` to move to: empty ones, those in the fullest windows first, then
/// cached ones.
fn destinations(
    pool: &Pool,
    run: &Range<u32>,
    wanted: usize,
    lru: &mut dyn Iterator<Item = u32>,
) -> Vec<u32> {
    let mut found = Vec::with_capacity(wanted);
    if wanted == 0 {
        return found;
    }
    let num_blocks = pool.snapshot.num_blocks;
    let words = pool.available.len();
    let eligible =
        |word: usize| pool.snapshot.empty[word] & mask(word, &(0..num_blocks)) & !mask(word, run);
    // Stuck blocks count as live: the window is theirs in any case.
    let mut windows: BinaryHeap<(u32, Reverse<usize>)> = (0..words)
        .step_by(WINDOW_WORDS)
        .filter(|&first| (first..words.min(first + WINDOW_WORDS)).any(|word| eligible(word) != 0))
        .map(|first| {
            let begin = first as u32 * WORD;
            let end = begin + WINDOW.min(num_blocks - begin);
            let live = end - begin - count(&pool.available, begin..end);
            (live, Reverse(first))
        })
        .collect();
    while let Some((_, Reverse(first))) = windows.pop() {
        for word in first..words.min(first + WINDOW_WORDS) {
            let mut bits = eligible(word);
            while bits != 0 {
                if found.len() == wanted {
                    return found;
                }
                found.push(word as u32 * WORD + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }
    if found.len() < wanted {
        let mut cached = pool.snapshot.cached[..words].to_vec();
        while found.len() < wanted {
            let Some(block) = lru.next() else { break };
            if block < num_blocks && !run.contains(&block) && is_set(&cached, block) {
                clear(&mut cached, block);
                found.push(block);
            }
        }
    }
    found
}

pub(super) fn is_set(words: &[u64], bit: u32) -> bool {
    words[(bit / WORD) as usize] >> (bit % WORD) & 1 == 1
}

pub(super) fn set(words: &mut [u64], bit: u32) {
    words[(bit / WORD) as usize] |= 1 << (bit % WORD);
}

pub(super) fn clear(words: &mut [u64], bit: u32) {
    words[(bit / WORD) as usize] &= !(1 << (bit % WORD));
}

/// The bits of word `word` that lie in `range`.
pub(super) fn mask(word: usize, range: &Range<u32>) -> u64 {
    let begin = word as u32 * WORD;
    let low = range.start.max(begin) - begin;
    let high = range.end.max(begin) - begin;
    let upto = |bits: u32| 1u64.checked_shl(bits).map_or(u64::MAX, |bit| bit - 1);
    upto(high) & !upto(low)
}

/// The 64 bits from bit `at` on; clear behind the last word.
#[inline]
fn word_at(words: &[u64], at: u32) -> u64 {
    let (word, shift) = ((at / WORD) as usize, at % WORD);
    let low = words.get(word).map_or(0, |w| w >> shift);
    // In two steps, since a shift by 64 (of the next word when `shift` is 0) is none.
    let high = words
        .get(word + 1)
        .map_or(0, |w| w << 1 << (WORD - 1 - shift));
    low | high
}

/// The words that `range` touches.
fn words_of(range: &Range<u32>) -> Range<usize> {
    if range.is_empty() {
        return 0..0;
    }
    (range.start / WORD) as usize..((range.end - 1) / WORD) as usize + 1
}

/// How many bits of `range` are set.
pub(super) fn count(words: &[u64], range: Range<u32>) -> u32 {
    let touched = words_of(&range);
    let Range { start, end } = touched;
    if end - start <= 2 {
        return touched
            .map(|i| (words[i] & mask(i, &range)).count_ones())
            .sum();
    }
    let ends = (words[start] & mask(start, &range)).count_ones()
        + (words[end - 1] & mask(end - 1, &range)).count_ones();
    let inner: u32 = words[start + 1..end - 1]
        .iter()
        .map(|w| w.count_ones())
        .sum();
    ends + inner
}

/// The first clear bit of `range`, its end when all are set.
fn first_clear(words: &[u64], range: Range<u32>) -> u32 {
    words_of(&range)
        .find_map(|i| {
            let clear = !words[i] & mask(i, &range);
            (clear != 0).then(|| i as u32 * WORD + clear.trailing_zeros())
        })
        .unwrap_or(range.end)
}

/// The last clear bit of `range`.
fn last_clear(words: &[u64], range: Range<u32>) -> Option<u32> {
    words_of(&range).rev().find_map(|i| {
        let clear = !words[i] & mask(i, &range);
        (clear != 0).then(|| i as u32 * WORD + WORD - 1 - clear.leading_zeros())
    })
}

/// How many set bits lie at the upper end of `range`.
fn set_below(words: &[u64], range: Range<u32>) -> u32 {
    let begin = last_clear(words, range.clone()).map_or(range.start, |clear| clear + 1);
    range.end - begin
}

/// How many set bits lie at the lower end of `range`.
fn set_above(words: &[u64], range: Range<u32>) -> u32 {
    first_clear(words, range.clone()) - range.start
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::{BTreeSet, VecDeque};

    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum State {
        Empty,
        Cached,
        Movable,
        Stuck,
    }
    use State::*;

    /// A pool as a list of states, with its words beside it.
    #[derive(Clone)]
    struct Model {
        states: Vec<State>,
        empty: Vec<u64>,
        cached: Vec<u64>,
        movable: Vec<u64>,
        soon: Vec<u64>,
    }

    impl Model {
        fn new(states: Vec<State>) -> Self {
            let words = |state| {
                // Garbage behind the last block: it must not matter.
                let mut words = vec![0u64; states.len() / 64 + 2];
                if state == Empty {
                    (states.len()..words.len() * 64).for_each(|b| set(&mut words, b as u32));
                }
                (0..states.len())
                    .filter(|b| states[*b] == state)
                    .for_each(|b| set(&mut words, b as u32));
                words
            };
            let (empty, cached, movable) = (words(Empty), words(Cached), words(Movable));
            let soon = vec![0; empty.len()];
            Model {
                states,
                empty,
                cached,
                movable,
                soon,
            }
        }

        fn snapshot(&self) -> Snapshot<'_> {
            Snapshot {
                num_blocks: self.states.len() as u32,
                empty: &self.empty,
                cached: &self.cached,
                movable: &self.movable,
                soon: &self.soon,
            }
        }

        fn all(&self, state: State) -> Vec<u32> {
            (0..self.states.len() as u32)
                .filter(|b| self.states[*b as usize] == state)
                .collect()
        }

        fn available(&self) -> u32 {
            (self.all(Empty).len() + self.all(Cached).len()) as u32
        }

        fn runs(&self) -> measure::Runs {
            let mut words = vec![0; self.states.len().div_ceil(64)];
            for (b, state) in self.states.iter().enumerate() {
                if matches!(state, Empty | Cached) {
                    set(&mut words, b as u32);
                }
            }
            measure::runs(&words, self.states.len() as u32)
        }

        fn free_run(&self, n: u32, max_moves: u32) -> Result<Planned, Impossible> {
            let lru = self.all(Cached);
            free_run(&self.snapshot(), n, max_moves, &mut lru.into_iter().rev())
        }

        fn below(&self, ratio: f64, max_moves: u32) -> Planned {
            let lru = self.all(Cached);
            below(
                &self.snapshot(),
                ratio,
                max_moves,
                &mut lru.into_iter().rev(),
            )
        }

        /// Carries a plan out, with every promise about pairs checked.
        fn apply(&mut self, plan: &Planned) {
            let run = plan.start..plan.start + plan.len;
            let mut states = self.states.clone();
            let mut touched = BTreeSet::new();
            for [source, destination] in &plan.pairs {
                assert!(
                    touched.insert(*source) && touched.insert(*destination),
                    "twice"
                );
                assert!(run.contains(source) && !run.contains(destination));
                assert_eq!(states[*source as usize], Movable);
                assert!(matches!(states[*destination as usize], Empty | Cached));
                states[*source as usize] = Empty;
                states[*destination as usize] = Movable;
            }
            let in_run = &states[run.start as usize..run.end as usize];
            assert!(!in_run.contains(&Stuck));
            let owed = in_run.iter().filter(|state| **state == Movable).count();
            assert_eq!(owed as u32, plan.remaining);
            let evicted = plan
                .pairs
                .iter()
                .any(|[_, d]| self.states[*d as usize] == Cached);
            let unused = (0..states.len() as u32)
                .any(|b| states[b as usize] == Empty && !run.contains(&b) && !touched.contains(&b));
            assert!(!(evicted && unused), "evicted while a block was empty");
            *self = Model::new(states);
            let after = self.runs();
            assert_eq!(plan.predicted_run, after.largest);
            assert_eq!(
                plan.predicted_ratio,
                measure::ratio(after.largest, after.total)
            );
        }

        /// Fewest movable blocks over all places, lowest first: (live, start).
        fn fewest_by_definition(&self, n: u32) -> Option<(usize, u32)> {
            let places = self.states.windows(n as usize).zip(0u32..);
            places
                .filter(|(place, _)| !place.contains(&Stuck))
                .map(|(place, at)| (place.iter().filter(|s| **s == Movable).count(), at))
                .min()
        }
    }

    pub(in super::super) fn random(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    }

    /// A pool in which of 16 blocks about so many are empty, cached and stuck.
    fn pool(blocks: usize, empty: u64, cached: u64, stuck: u64, seed: u64) -> Model {
        let mut seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let states = (0..blocks).map(|_| match random(&mut seed) >> 20 & 15 {
            x if x < empty => Empty,
            x if x < empty + cached => Cached,
            x if x < empty + cached + stuck => Stuck,
            _ => Movable,
        });
        Model::new(states.collect())
    }

    /// For each set of live blocks (a bit each): the fewest moves, of any kind and order, until
    /// `n` available blocks lie together.
    fn fewest_moves(blocks: u32, stuck: u32, n: u32) -> Vec<Option<u32>> {
        let mut fewest = vec![None; 1 << blocks];
        let mut queue = VecDeque::new();
        let free_run =
            |live: u32| (0..=blocks - n).any(|at| (live | stuck) & (((1 << n) - 1) << at) == 0);
        for live in (0..1u32 << blocks).filter(|live| live & stuck == 0 && free_run(*live)) {
            fewest[live as usize] = Some(0);
            queue.push_back(live);
        }
        while let Some(live) = queue.pop_front() {
            for from in (0..blocks).filter(|b| live >> b & 1 == 1) {
                for to in (0..blocks).filter(|b| (live | stuck) >> b & 1 == 0) {
                    let next = (live ^ 1 << from ^ 1 << to) as usize;
                    if fewest[next].is_none() {
                        fewest[next] = fewest[live as usize].map(|moves| moves + 1);
                        queue.push_back(next as u32);
                    }
                }
            }
        }
        fewest
    }

    #[test]
    fn no_order_of_moves_is_shorter_in_any_pool_of_seven_blocks() {
        const BLOCKS: u32 = 7;
        for stuck in 0..1u32 << BLOCKS {
            let fewest: Vec<_> = (1..=BLOCKS)
                .map(|n| fewest_moves(BLOCKS, stuck, n))
                .collect();
            for live in (0..1u32 << BLOCKS).filter(|live| live & stuck == 0) {
                let model = Model::new(
                    (0..BLOCKS)
                        .map(|b| match (live >> b & 1, stuck >> b & 1) {
                            (1, _) => Movable,
                            (_, 1) => Stuck,
                            _ if (live ^ stuck << 2) % (b + 3) < 2 => Cached,
                            _ => Empty,
                        })
                        .collect(),
                );
                for n in 1..=BLOCKS {
                    let expected = fewest[n as usize - 1][live as usize];
                    match model.free_run(n, u32::MAX) {
                        Ok(plan) => {
                            assert_eq!(
                                Some(plan.pairs.len() as u32),
                                expected,
                                "{:?}",
                                model.states
                            );
                            assert_eq!((plan.len, plan.remaining), (n, 0));
                            model.clone().apply(&plan);
                            assert!(plan.predicted_run >= n);
                        }
                        Err(_) => assert_eq!(expected, None, "{:?} {n}", model.states),
                    }
                }
                for percent in [0, 20, 35, 50, 90] {
                    let wanted = f64::from(percent) / 100.0;
                    let plan = model.below(wanted, u32::MAX);
                    model.clone().apply(&plan);
                    let moves = |n: u32| fewest[n as usize - 1][live as usize];
                    let reach = |n: &u32| measure::ratio(*n, model.available()) < wanted;
                    let now = model.runs();
                    let shortest = (1..=model.available()).find(reach);
                    let longest = (1..=model.available()).rev().find(|n| moves(*n).is_some());
                    let goal = shortest.filter(|n| moves(*n).is_some()).or(longest);
                    let reached = measure::ratio(now.largest, now.total) < wanted;
                    if let Some(goal) = goal.filter(|_| !reached) {
                        assert_eq!(Some(plan.pairs.len() as u32), moves(goal));
                        assert_eq!(plan.predicted_ratio < wanted, shortest == Some(goal));
                    } else {
                        assert!(plan.pairs.is_empty() && plan.remaining == 0);
                    }
                }
            }
        }
    }

    fn states() -> impl Strategy<Value = Vec<State>> {
        let block =
            prop_oneof![4 => Just(Empty), 2 => Just(Cached), 6 => Just(Movable), 1 => Just(Stuck)];
        let stretch = (
            block,
            prop_oneof![3 => 1..4usize, 2 => 1..80usize, 1 => 1..700usize],
        );
        prop::collection::vec(stretch, 1..60).prop_map(|list| {
            list.into_iter()
                .flat_map(|(state, len)| vec![state; len])
                .collect()
        })
    }

    #[test]
    fn a_run_may_lie_over_blocks_that_are_empty_soon_but_does_not_count_them() {
        // Blocks 0..3 are fenced, 3 and 5 live, 4 empty, 6..8 empty.
        let snapshot = Snapshot {
            num_blocks: 8,
            empty: &[0b1101_0000],
            cached: &[0],
            movable: &[0b0010_1000],
            soon: &[0b0000_0111],
        };
        let plan = below(&snapshot, 0.3, 9, &mut std::iter::empty());
        assert_eq!((plan.start, plan.len), (0, 3));
        assert_eq!((plan.pairs.len(), plan.predicted_run), (0, 2));
        assert!(plan.predicted_ratio > 0.3, "not reached yet");
        let plan = free_run(&snapshot, 4, 9, &mut std::iter::empty());
        assert_eq!(
            plan,
            Err(Impossible::TooFewAvailable {
                need: 4,
                available: 3
            })
        );
    }

    proptest! {
        #[test]
        fn the_place_is_the_lowest_with_the_fewest_live_blocks(
            states in prop_oneof![
                states(),
                prop::collection::vec(
                    prop_oneof![Just(Empty), Just(Cached), Just(Movable), Just(Stuck)], 1..=14),
            ],
            part in 0.0..1.2f64,
            budget in prop_oneof![0..40u32, Just(u32::MAX)],
        ) {
            let mut model = Model::new(states);
            let available = model.available();
            let n = ((part * f64::from(available)) as u32).max(1);
            match model.free_run(n, budget) {
                Ok(plan) => {
                    let (live, start) = model.fewest_by_definition(n).expect("a place was found");
                    prop_assert_eq!((plan.start, plan.len), (start, n));
                    prop_assert_eq!(plan.pairs.len(), live.min(budget as usize));
                    model.apply(&plan);
                }
                Err(Impossible::TooFewAvailable { need, available: found }) => {
                    prop_assert!(n > available);
                    prop_assert_eq!((need, found), (n, available));
                }
                Err(Impossible::NoSpan { need, largest_span }) => {
                    prop_assert_eq!(need, n);
                    prop_assert!(largest_span < n);
                    prop_assert!(largest_span == 0 || model.fewest_by_definition(largest_span).is_some());
                    prop_assert!(model.fewest_by_definition(largest_span + 1).is_none());
                }
                Err(other) => prop_assert!(false, "{other} of one run"),
            }
        }

        #[test]
        fn below_predicts_what_comes_of_it(states in states(), wanted in -0.1..1.1f64, budget in 0..100u32) {
            let mut model = Model::new(states);
            let plan = model.below(wanted, budget);
            prop_assert!(plan.pairs.len() <= budget as usize);
            let idle = plan.pairs.is_empty();
            prop_assert!(!idle || budget == 0 || plan.remaining == 0);
            model.apply(&plan);
        }

        #[test]
        fn each_move_lengthens_the_longest_stretch_in_the_run(states in states(), part in 0.1..1.0f64) {
            let model = Model::new(states);
            let n = ((part * f64::from(model.available())) as u32).max(1);
            let Ok(plan) = model.free_run(n, u32::MAX) else { return Ok(()) };
            let mut run = model.states[plan.start as usize..(plan.start + n) as usize].to_vec();
            let longest = |run: &[State]| run.split(|s| *s == Movable).map(<[_]>::len).max();
            for [source, _] in plan.pairs {
                let before = longest(&run);
                run[(source - plan.start) as usize] = Empty;
                prop_assert!(longest(&run) > before);
            }
        }

        #[test]
        fn empty_destinations_come_from_the_fullest_windows(states in states(), part in 0.1..1.0f64) {
            let model = Model::new(states);
            let n = ((part * f64::from(model.available())) as u32).max(1);
            let Ok(plan) = model.free_run(n, u32::MAX) else { return Ok(()) };
            let run = plan.start..plan.start + n;
            let mut expected = model.all(Empty);
            expected.retain(|b| !run.contains(b));
            expected.sort_by_key(|b| {
                let window = model.states.chunks(WINDOW as usize).nth((b / WINDOW) as usize);
                let live = window.expect("of this pool").iter().filter(|s| matches!(s, Movable | Stuck));
                (Reverse(live.count()), *b)
            });
            // `Model::free_run` calls the highest cached block the oldest.
            let mut cached = model.all(Cached);
            cached.retain(|b| !run.contains(b));
            expected.extend(cached.into_iter().rev());
            expected.truncate(plan.pairs.len());
            // Sources by address take them in that order.
            let mut pairs = plan.pairs;
            pairs.sort();
            prop_assert_eq!(pairs.iter().map(|p| p[1]).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn passes_of_any_size_add_up_to_one_pass() {
        for seed in 0..6 {
            for (n, budget) in [(500, 16), (500, 1), (1200, 16), (1200, 7)] {
                let mut model = pool(4096, 6, 2, 0, seed);
                let whole = model.free_run(n, u32::MAX).expect("enough is available");
                let (mut moves, mut passes, mut longest) = (0, 0, None);
                loop {
                    let plan = model.free_run(n, budget).expect("still possible");
                    assert_eq!(
                        plan.start, whole.start,
                        "seed {seed}: the run stays where it is"
                    );
                    if plan.pairs.is_empty() {
                        assert_eq!(plan.remaining, 0);
                        break;
                    }
                    model.apply(&plan);
                    let run = &model.states[whole.start as usize..(whole.start + n) as usize];
                    let grown = run.split(|s| *s == Movable).map(<[_]>::len).max();
                    assert!(grown > longest, "seed {seed}, pass {passes}");
                    longest = grown;
                    moves += plan.pairs.len();
                    passes += 1;
                }
                assert_eq!(moves, whole.pairs.len(), "seed {seed}");
                assert_eq!(passes, moves.div_ceil(budget as usize));
                assert!(model.runs().largest >= n);
            }
        }
    }

    #[test]
    fn passes_below_a_ratio_add_up_to_one_pass_and_then_rest() {
        for seed in 0..20 {
            let mut model = pool(3000, 5, 1, u64::from(seed > 10), seed);
            let whole = model.below(0.35, u32::MAX);
            let (mut moves, mut last) = (0, 1.0);
            for _ in 0..=whole.pairs.len().div_ceil(16) {
                let plan = model.below(0.35, 16);
                model.apply(&plan);
                moves += plan.pairs.len();
                assert!(
                    plan.predicted_ratio <= last,
                    "seed {seed}: the ratio does not rise"
                );
                last = plan.predicted_ratio;
            }
            assert_eq!(moves, whole.pairs.len(), "seed {seed}");
            let plan = model.below(0.35, 16);
            assert_eq!((plan.pairs.len(), plan.remaining), (0, 0));
            assert!(seed > 10 || plan.predicted_ratio < 0.35);
        }
    }

    #[test]
    fn under_churn_moves_stay_within_first_cost_plus_blocks_taken() {
        for seed in 1..4u64 {
            let mut model = pool(2048, 8, 0, 0, seed);
            let first = model.below(0.35, u32::MAX).pairs.len();
            let (mut moves, mut taken, mut state) = (0, 0, seed);
            for _ in 0..1000 {
                for _ in 0..2 {
                    let live = model.all(Movable);
                    let gone = live[random(&mut state) as usize % live.len()];
                    model.states[gone as usize] = Empty;
                    let empty = model.all(Empty);
                    let new = empty[random(&mut state) as usize % empty.len()];
                    model.states[new as usize] = Movable;
                    taken += 1;
                }
                model = Model::new(model.states);
                let plan = model.below(0.35, 16);
                model.apply(&plan);
                moves += plan.pairs.len();
            }
            assert!(
                moves <= first + taken,
                "seed {seed}: {moves} moves, {first} + {taken}"
            );
        }
    }

    #[test]
    fn two_blocks_freed_and_taken_again_a_thousand_times_cause_no_more_moves() {
        let mut model = pool(2048, 8, 0, 0, 3);
        let first = model.below(0.35, u32::MAX);
        let mut moves = 0;
        for step in 0..1000 {
            let plan = model.below(0.35, 16);
            model.apply(&plan);
            moves += plan.pairs.len();
            // The two lowest live blocks outside the run, back in the two lowest empty ones there.
            let outside = |b: &u32| !(plan.start..plan.start + plan.len).contains(b);
            let hot: Vec<u32> = model
                .all(Movable)
                .into_iter()
                .filter(outside)
                .take(2)
                .collect();
            hot.iter().for_each(|b| model.states[*b as usize] = Empty);
            let new: Vec<u32> = model
                .all(Empty)
                .into_iter()
                .filter(outside)
                .take(2)
                .collect();
            new.iter().for_each(|b| model.states[*b as usize] = Movable);
            model = Model::new(model.states);
            assert!(moves <= first.pairs.len(), "step {step}");
        }
        assert_eq!(moves, first.pairs.len());
    }

    #[test]
    fn one_big_hole_does_not_stop_progress() {
        let mut states = vec![Empty; 4096];
        states[0] = Movable;
        states[3000..].fill(Movable);
        let tight = Model::new(states.clone());
        assert_eq!(tight.free_run(2999, 1).map(|plan| plan.pairs.len()), Ok(0));
        // Room behind the hole: block 0 goes there.
        states[4000] = Empty;
        let mut model = Model::new(states);
        let plan = model.free_run(3000, 1).expect("3000 are available");
        assert_eq!(plan.pairs, [[0, 4000]]);
        model.apply(&plan);
        assert_eq!(plan.predicted_ratio, 0.0);
        // The same through a ratio that only a perfect pool meets.
        assert_eq!(tight.below(0.0, 16).pairs.len(), 0);
    }

    #[test]
    fn nothing_to_do_is_no_move() {
        // One sequence of two blocks in a pool of 64, however often it is asked.
        let mut states = vec![Empty; 64];
        states[..2].fill(Movable);
        let model = Model::new(states);
        for _ in 0..100 {
            assert_eq!(model.below(0.35, 16).pairs, [[0; 2]; 0]);
            assert_eq!(model.free_run(62, 16).map(|plan| plan.pairs.len()), Ok(0));
        }
        for states in [
            vec![],
            vec![Empty; 100],
            vec![Movable; 100],
            vec![Stuck; 100],
        ] {
            let mut model = Model::new(states);
            for wanted in [0.0, 0.35, 1.0, f64::NAN] {
                let plan = model.below(wanted, 16);
                assert_eq!((plan.pairs.len(), plan.remaining), (0, 0));
                model.apply(&plan);
            }
            let plan = model.free_run(0, 16).expect("nothing is always there");
            assert_eq!((plan.len, plan.pairs.len()), (0, 0));
        }
    }

    #[test]
    fn the_side_that_joins_the_longer_stretch_goes_first() {
        let text = b"xxxx..x......x.x....xxxxxxxx........";
        let states = text
            .iter()
            .map(|c| if *c == b'x' { Movable } else { Empty });
        let mut states: Vec<State> = states.collect();
        states[20..28].fill(Stuck);
        states[28..].fill(Empty);
        let model = Model::new(states);
        let plan = model.free_run(20, 4).expect("21 are available");
        assert_eq!((plan.start, plan.len, plan.remaining), (0, 20, 3));
        let sources: Vec<u32> = plan.pairs.iter().map(|pair| pair[0]).collect();
        assert_eq!(sources, [6, 13, 15, 3]);
        // By address, sources and destinations ascend together.
        assert_eq!(plan.pairs, [[6, 29], [13, 30], [15, 31], [3, 28]]);
    }

    #[test]
    fn of_two_equal_sides_the_lower_goes_first() {
        let mut states = vec![Empty; 10];
        (states[1], states[5], states[7]) = (Movable, Movable, Stuck);
        let plan = Model::new(states).free_run(7, 1).expect("7 are available");
        assert_eq!((plan.pairs, plan.remaining), (vec![[1, 8]], 1));
    }

    #[test]
    fn cached_blocks_go_oldest_first_and_only_when_no_empty_one_is_left() {
        let mut states = vec![Cached; 12];
        states[..3].copy_from_slice(&[Movable, Movable, Movable]);
        states[8..].copy_from_slice(&[Stuck, Empty, Cached, Cached]);
        let model = Model::new(states);
        // Oldest first: one inside the run, one that is not cached, one twice, one not of this pool.
        let mut lru = [4, 0, 11, 11, 99, 10].into_iter();
        let plan = free_run(&model.snapshot(), 8, 9, &mut lru).expect("8 are available");
        assert_eq!(plan.pairs, [[2, 10], [1, 11], [0, 9]]);
        // Read no further than needed.
        let mut lru = [10, 11].into_iter();
        let plan = free_run(&model.snapshot(), 8, 2, &mut lru).expect("8 are available");
        assert_eq!((plan.pairs, plan.remaining), (vec![[2, 10], [1, 9]], 1));
        assert_eq!(lru.next(), Some(11));
    }

    #[test]
    fn short_of_destinations_the_possible_is_planned_and_the_rest_counted() {
        let mut model = Model::new(vec![Movable, Movable, Empty, Empty, Stuck, Empty, Cached]);
        let plan = free_run(&model.snapshot(), 4, 9, &mut std::iter::empty());
        let plan = plan.expect("4 are available");
        assert_eq!((&plan.pairs[..], plan.remaining), (&[[1, 5]][..], 1));
        model.apply(&plan);
    }

    #[test]
    fn refusals_name_the_numbers() {
        let model = Model::new(vec![Empty, Movable, Stuck, Cached, Empty, Stuck, Cached]);
        let refusal = |n| model.free_run(n, 9).expect_err("impossible").to_string();
        assert_eq!(refusal(5), "need 5 contiguous, available 4");
        assert_eq!(
            refusal(3),
            "need 3 contiguous, largest span without a block that may not move 2"
        );
    }

    /// `cargo test --release -p kvmmu plan -- --ignored --nocapture`
    #[test]
    #[ignore = "prints timings, checks nothing"]
    fn timing() {
        for blocks in [90_000, 1_000_000] {
            let mut few = vec![Movable; blocks];
            few.chunks_mut(6000)
                .for_each(|chunk| chunk[..3000].fill(Empty));
            let mut falling = pool(blocks, 0, 0, 0, 1);
            for b in 0..blocks {
                // Ever fewer live blocks: no word can be passed over.
                if (b * 7919) % blocks < b {
                    falling.states[b] = Empty;
                }
            }
            let pools = [
                ("few runs", Model::new(few)),
                ("random", pool(blocks, 5, 2, 0, 1)),
                ("random, 1/16 stuck", pool(blocks, 5, 2, 1, 1)),
                ("ever emptier", Model::new(falling.states)),
            ];
            for (name, model) in pools {
                let lru = model.all(Cached);
                let s = model.snapshot();
                for (n, budget) in [
                    (32, 32),
                    (512, 32),
                    (8192, 32),
                    (blocks as u32 / 4, 32),
                    (8192, u32::MAX),
                ] {
                    let mut result = String::new();
                    let least = (0..50)
                        .map(|_| {
                            let mut lru = lru.iter().copied();
                            let begin = std::time::Instant::now();
                            let plan = free_run(std::hint::black_box(&s), n, budget, &mut lru);
                            let took = begin.elapsed();
                            result = plan.map_or_else(
                                |refusal| refusal.to_string(),
                                |plan| {
                                    format!("{} moves, {} remain", plan.pairs.len(), plan.remaining)
                                },
                            );
                            took
                        })
                        .min();
                    let least = least.expect("50 rounds");
                    println!("free_run({n}) of {blocks}, {name}: {least:?} ({result})");
                }
                let begin = std::time::Instant::now();
                let plan = below(&s, 0.35, 32, &mut lru.iter().copied());
                let took = begin.elapsed();
                println!(
                    "below(.35) of {blocks}, {name}: {took:?} once ({} remain)",
                    plan.remaining
                );
            }
        }
    }
}
