//! Huge pages for the prompts of a serving engine, and the moves that those would take which it does
//! not get.
//!
//! What lives here: the calls of one load served by every contender in turn, by one thread, and the
//! figures, all of them counted from the blocks that the measure itself holds ([`crate::memory`]). What
//! never lives here: who places and who moves ([`crate::players`]).
//!
//! *As placed* nothing moves. A complete region of 512 blocks of a prompt that is no huge page is
//! *missed*; what it would take is the live blocks of the cheapest window when the pages of this prompt
//! are claimed and its small blocks are not, of the next cheapest for its next missed region, and so
//! on. *On demand* windows are emptied before a prompt is claimed, as many as it lacks.

use std::path::Path;

use kvmmu::PageOrders;

use crate::memory::{Memory, WINDOW, is_huge_page};
use crate::ours::Ours;
use crate::players::{Growth, Managed, Movable, Placed, Player};
use crate::report::Figure;
use crate::rivals::Buddy;
use crate::serving::{Call, Load};

const MEASURE: &str = "huge pages of prompts";
/// Looks at the whole memory, evenly over the calls.
const LOOKS: usize = 1000;

/// A new player of each kind. LLFree, and a buddy allocator, take the rest of a prompt one by one or in
/// aligned pieces: neither is obviously what suits them.
fn players(load: &Load) -> Vec<(&'static str, Box<dyn Player>)> {
    let n = load.blocks;
    let buddy = |pieces| Box::new(Placed::new(Buddy::new(n), pieces));
    vec![
        ("kvmmu", Box::new(Managed::new(load, |_| ()))),
        (
            "kvmmu, no holds",
            Box::new(Managed::new(load, |config| config.hold_blocks = 0)),
        ),
        (
            "kvmmu, page orders 0 and 9",
            Box::new(Managed::new(load, |config| {
                config.page_orders = PageOrders::new(&[0, 9]).expect("0 is among them");
            })),
        ),
        #[cfg(feature = "llfree")]
        ("LLFree", llfree(n, false)),
        #[cfg(feature = "llfree")]
        (
            "LLFree, on its own",
            Box::new(Placed::new(crate::llfree::LlFree::new(n, 1), false)),
        ),
        #[cfg(feature = "llfree")]
        ("LLFree, aligned pieces", llfree(n, true)),
        (
            "kvmmu's pool alone",
            Box::new(Movable(Placed::new(Ours::new(n), false))),
        ),
        ("buddy_system_allocator", buddy(false)),
        ("buddy_system_allocator, aligned pieces", buddy(true)),
    ]
}

/// LLFree with its classes for small and huge frames and one reservation of each.
#[cfg(feature = "llfree")]
fn llfree(num_blocks: u32, pieces: bool) -> Box<dyn Player> {
    let frames = crate::llfree::LlFree::new(num_blocks, 1);
    Box::new(Movable(Placed::new(frames, pieces)))
}

/// Serves the load of a file.
pub fn run(file: &Path) -> Result<(), String> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("--load {}: {error}", file.display()))?;
    let load = Load::read(&text).map_err(|error| format!("--load {}: {error}", file.display()))?;
    for (who, mut player) in players(&load) {
        serve(&load, &mut *player, false)
            .expect("nothing is asked to move")
            .print(who, "as placed");
    }
    for (who, mut player) in players(&load) {
        if let Some(tally) = serve(&load, &mut *player, true) {
            tally.print(who, "on demand");
        }
    }
    Ok(())
}

/// What a load came to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    /// Complete regions of prompts, and those that are huge pages when the prompt is claimed.
    regions: usize,
    pages: usize,
    /// Of each missed one the moves that it would take.
    lacking: Vec<usize>,
    /// Huge pages of sequences at their end, those that came of growing among them.
    pages_at_end: usize,
    /// Sequences that have ended, and the runs that they lay in then.
    ended: usize,
    runs: usize,
    /// Windows that moves were to make, and the moves.
    made: usize,
    moved: usize,
    /// Over all looks: windows that the empty blocks could make, and the least moves for that; the same of
    /// half of them.
    possible: usize,
    moves_for_all: usize,
    halves: usize,
    moves_for_half: usize,
    /// Blocks held, over all looks, and the looks.
    held: usize,
    looks: usize,
    /// Pages that the player had to be shown.
    shown: usize,
}

/// Serves a load. None: the player cannot move blocks and was asked to.
fn serve(load: &Load, player: &mut dyn Player, on_demand: bool) -> Option<Tally> {
    let mut memory = Memory::new(load.blocks);
    let mut tally = Tally::default();
    let every = load.calls.len().div_ceil(LOOKS).max(1);
    for (number, call) in load.calls.iter().enumerate() {
        match call {
            &Call::Open { sequence, tokens } => {
                let blocks = load.blocks_of(tokens) as usize;
                if on_demand {
                    tally.make_windows(blocks / WINDOW, player, &mut memory)?;
                }
                let claimed = player.open(sequence, tokens, blocks, &memory);
                assert_eq!(claimed.len(), blocks);
                tally.opened(&claimed, &memory);
                memory.claimed(sequence, &claimed);
            }
            Call::Grow(rows) => {
                let growth = |&(sequence, tokens): &(i64, u32)| Growth {
                    sequence,
                    tokens,
                    from: memory.blocks(sequence).len(),
                    to: load.blocks_of(tokens) as usize,
                };
                let rows: Vec<Growth> = rows.iter().map(growth).collect();
                for (row, blocks) in rows.iter().zip(player.grow(&rows)) {
                    assert_eq!(blocks.len(), row.to - row.from);
                    memory.claimed(row.sequence, &blocks);
                }
            }
            &Call::Close { sequence } => {
                let blocks = memory.released(sequence);
                tally.pages_at_end += huge_pages(&blocks);
                tally.ended += 1;
                tally.runs += runs(&blocks);
                player.close(sequence, &blocks);
            }
        }
        if number % every == 0 {
            tally.look(&memory);
        }
    }
    tally.shown = player.shown();
    Some(tally)
}

/// Complete regions that are huge pages.
fn huge_pages(blocks: &[u32]) -> usize {
    let regions = blocks.chunks_exact(WINDOW);
    regions.filter(|region| is_huge_page(region)).count()
}

/// Stretches of blocks that follow one another.
fn runs(blocks: &[u32]) -> usize {
    let breaks = blocks.windows(2).filter(|pair| pair[1] != pair[0] + 1);
    1 + breaks.count()
}

impl Tally {
    /// Makes the free windows that a prompt of so many regions lacks.
    fn make_windows(
        &mut self,
        regions: usize,
        player: &mut dyn Player,
        memory: &mut Memory,
    ) -> Option<()> {
        let free = memory.free_windows();
        if regions <= free {
            return Some(());
        }
        let moves = player.free_windows(regions, memory)?;
        for &[source, destination] in &moves {
            memory.moved(source, destination);
        }
        assert!(memory.free_windows() >= regions, "too few windows are free");
        self.made += regions - free;
        self.moved += moves.len();
        Some(())
    }

    /// Counts what a prompt got; `memory` does not have its blocks yet.
    fn opened(&mut self, blocks: &[u32], memory: &Memory) {
        let regions = blocks.len() / WINDOW;
        let pages = huge_pages(blocks);
        self.regions += regions;
        self.pages += pages;
        let missed = regions - pages;
        if missed > 0 {
            let mut taken = vec![false; memory.live().len()];
            for region in blocks
                .chunks_exact(WINDOW)
                .filter(|region| is_huge_page(region))
            {
                taken[region[0] as usize / WINDOW] = true;
            }
            let rest = (memory.live().iter().zip(taken)).filter(|(_, taken)| !taken);
            let mut live: Vec<usize> = rest.map(|(&live, _)| live).collect();
            live.sort_unstable();
            self.lacking.extend(&live[..missed]);
        }
    }

    fn look(&mut self, memory: &Memory) {
        let possible = memory.empty() / WINDOW;
        let moves = memory.moves_for(possible);
        self.looks += 1;
        self.held += memory.live().len() * WINDOW - memory.empty();
        self.possible += possible;
        self.moves_for_all += moves.iter().sum::<usize>();
        self.halves += possible / 2;
        self.moves_for_half += moves[..possible / 2].iter().sum::<usize>();
    }

    fn print(mut self, who: &str, pattern: &str) {
        let figure = |part: &str, unit: &str, value: f64| {
            let figure = Figure {
                measure: MEASURE,
                pattern,
                threads: 1,
                who,
                part,
                unit,
            };
            figure.print(value);
        };
        let count = |part: &str, unit: &str, value: usize| figure(part, unit, value as f64);
        count("regions", "pages", self.regions);
        count("pages", "pages", self.pages);
        count("pages at the end", "pages", self.pages_at_end);
        count("shown", "pages", self.shown);
        figure("runs at the end", "runs", per(self.runs, self.ended));
        figure("held", "blocks", per(self.held, self.looks));
        self.lacking.sort_unstable();
        let missed = self.lacking.len();
        count("missed", "pages", missed);
        if missed > 0 {
            count("lacking, all", "moves", self.lacking.iter().sum());
            figure(
                "lacking, mean",
                "moves",
                per(self.lacking.iter().sum(), missed),
            );
            count("lacking, p50", "moves", self.lacking[(missed - 1) / 2]);
            count("lacking, p90", "moves", self.lacking[(missed - 1) * 9 / 10]);
        }
        count("made", "windows", self.made);
        count("moved", "moves", self.moved);
        if self.halves > 0 {
            figure(
                "every window",
                "moves",
                per(self.moves_for_all, self.possible),
            );
            figure(
                "half the windows",
                "moves",
                per(self.moves_for_half, self.halves),
            );
        }
    }
}

fn per(sum: usize, count: usize) -> f64 {
    sum as f64 / count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOWS: u32 = 16;
    /// Tokens a block: kvmmu maps sequences of few tokens by small pages.
    const SIZE: u32 = 16;

    /// Hands out what it was told to, call by call.
    struct Scripted(Vec<Vec<u32>>);

    impl Player for Scripted {
        fn open(&mut self, _: i64, _: u32, _: usize, _: &Memory) -> Vec<u32> {
            self.0.remove(0)
        }

        fn grow(&mut self, rows: &[Growth]) -> Vec<Vec<u32>> {
            rows.iter().map(|_| self.0.remove(0)).collect()
        }

        fn close(&mut self, _: i64, _: &[u32]) {}

        fn free_windows(&mut self, _: usize, _: &Memory) -> Option<Vec<[u32; 2]>> {
            None
        }
    }

    #[test]
    fn missed_pages_are_charged_the_windows_that_are_cheapest_when_the_prompt_has_its_pages() {
        let load = "pool 2048 1\nopen 1 5\nopen 2 1540\ngrow 1 6\nclose 2\nclose 1\n";
        let load = Load::read(load).expect("a good load");
        // One live block in window 0, four in window 2; windows 1 and 3 are free.
        let few = vec![0, 1024, 1025, 1026, 1027];
        // A page, then 1,028 blocks that are none.
        let mut long: Vec<u32> = (512..1024).collect();
        long.extend(1537..2048);
        long.extend((1..512).chain(1028..1034));
        let mut player = Scripted(vec![few, long, vec![1536]]);
        let tally = serve(&load, &mut player, false).expect("nothing is asked to move");
        assert_eq!((tally.regions, tally.pages, tally.pages_at_end), (3, 1, 1));
        assert_eq!(tally.lacking, [0, 1], "window 3, then window 0");
        assert_eq!((tally.made, tally.moved), (0, 0));
        assert_eq!(
            (tally.ended, tally.runs),
            (2, 4 + 3),
            "0, 1024.., 1536; 512.., 1537.., 1.."
        );
        // Looks after each call: 5, 1545, 1546, 6 and 0 blocks are held.
        assert_eq!((tally.looks, tally.held), (5, 5 + 1545 + 1546 + 6));
        assert_eq!(tally.possible, 3 + 3 + 4);
        assert_eq!(tally.moves_for_all, 1 + 2);
    }

    /// Prompts from a few blocks to four windows in a pool that they nearly fill, growing and ending
    /// at random.
    fn random_load(seed: u64) -> Load {
        let mut random = fastrand::Rng::with_seed(seed);
        let blocks = WINDOWS * WINDOW as u32;
        let (mut calls, mut open, mut held) = (Vec::new(), Vec::<(i64, u32)>::new(), 0);
        for sequence in 0..400 {
            let most = if random.u8(..) < 60 { 2048 } else { 200 };
            let prompt = random.u32(1..=most);
            while held + prompt > blocks - 64 {
                let (sequence, own) = open.swap_remove(random.usize(..open.len()));
                held -= own;
                calls.push(Call::Close { sequence });
            }
            calls.push(Call::Open {
                sequence,
                tokens: prompt * SIZE,
            });
            open.push((sequence, prompt));
            held += prompt;
            let grown = open.len().min(16);
            calls.push(Call::Grow(
                (open.iter_mut().take(grown))
                    .map(|(sequence, own)| {
                        *own += 1;
                        (*sequence, *own * SIZE)
                    })
                    .collect(),
            ));
            held += grown as u32;
        }
        let ends = open
            .into_iter()
            .map(|(sequence, _)| Call::Close { sequence });
        calls.extend(ends);
        Load {
            blocks,
            block_size: SIZE,
            calls,
        }
    }

    #[test]
    fn everybody_serves_the_same_and_whoever_moves_on_demand_misses_no_page() {
        for seed in 0..4 {
            let load = random_load(seed);
            let (mut missed, mut regions) = (0, Vec::new());
            for (who, mut player) in players(&load) {
                let tally = serve(&load, &mut *player, false).expect("nothing is asked to move");
                assert_eq!(tally.regions - tally.pages, tally.lacking.len(), "{who}");
                assert!(tally.lacking.iter().all(|&moves| moves < WINDOW), "{who}");
                missed += tally.lacking.len();
                regions.push(tally.regions);
            }
            assert!(missed > 0, "seed {seed}: nobody misses a page in this load");
            assert!(regions.iter().all(|&n| n == regions[0] && n > 100));
            let mut movers = 0;
            for (who, mut player) in players(&load) {
                if let Some(tally) = serve(&load, &mut *player, true) {
                    assert_eq!(tally.pages, tally.regions, "{who}, seed {seed}");
                    assert!(tally.made <= tally.moved, "{who}, seed {seed}");
                    movers += 1;
                }
            }
            assert!(movers >= 2);
        }
    }
}
