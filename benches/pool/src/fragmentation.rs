//! What placement does to free memory: whole windows that stay free, runs that a batch gets.
//!
//! What lives here: LLFree's fragmentation experiment and a churn of sequences, each replayed alike
//! on every contender from one seed by one thread. Free windows are counted from the blocks that the
//! experiment itself holds, never by a contender.

use kvmmu::pool::Placement;

use crate::allocator::Allocator;
use crate::ours::Ours;
use crate::report::Figure;
use crate::rivals::{LockedList, Queue};

/// Blocks of a window: a huge page.
const WINDOW: usize = 512;

/// Which blocks are held; says so when one is handed out twice.
struct Held(Vec<bool>);

impl Held {
    fn claimed(&mut self, block: u32) {
        let held = &mut self.0[block as usize];
        assert!(!*held, "block {block} was handed out twice");
        *held = true;
    }

    fn released(&mut self, block: u32) {
        self.0[block as usize] = false;
    }

    fn free_windows(&self) -> usize {
        let whole = self.0.chunks_exact(WINDOW);
        whole
            .filter(|window| window.iter().all(|held| !held))
            .count()
    }
}

/// One new allocator of each kind; the first name is what `make` is called in the output.
fn contenders(num_blocks: u32, seed: u64) -> Vec<(&'static str, Box<dyn Allocator>)> {
    let placed =
        |placement| -> Box<dyn Allocator> { Box::new(Ours::placed(num_blocks, Some(placement))) };
    vec![
        ("kvmmu", Box::new(Ours::new(num_blocks))),
        ("kvmmu, address order", placed(Placement::AddressOrder)),
        ("kvmmu, fullest", placed(Placement::Fullest)),
        ("kvmmu, FIFO", placed(Placement::Fifo)),
        ("kvmmu, scatter", placed(Placement::Scatter { seed })),
        ("Mutex<Vec>", Box::new(LockedList::new(num_blocks))),
        ("FIFO list", Box::new(Queue::new(num_blocks))),
        #[cfg(feature = "llfree")]
        (
            "LLFree",
            Box::new(crate::llfree::LlFree::new(num_blocks, 1)),
        ),
    ]
}

/// LLFree's experiment (`eval/src/bin/frag.rs` of its repository), one thread: all blocks are claimed
/// one by one, a random share is released; then again and again a random tenth as many as were released
/// are replaced one by one: one block released, one claimed.
///
/// Printed: free windows after the release, after 8 passes (its default), 100 and all.
pub fn llfree_experiment(num_blocks: u32, seed: u64, passes: usize) {
    for percent in [50, 60, 70, 80, 90] {
        let empty = num_blocks as usize * (100 - percent) / 100;
        let measure = format!("random replacement at {percent} % fill");
        for (who, allocator) in contenders(num_blocks, seed) {
            let print = |part: &str, value: usize| {
                let figure = Figure {
                    measure: &measure,
                    pattern: "LLFree's experiment",
                    threads: 1,
                    who,
                    part,
                    unit: "windows",
                };
                figure.print(value as f64);
            };
            let mut random = fastrand::Rng::with_seed(seed);
            let mut held = Held(vec![false; num_blocks as usize]);
            let mut blocks: Vec<u32> = std::iter::from_fn(|| allocator.claim(0)).collect();
            assert_eq!(blocks.len(), num_blocks as usize, "{who} kept blocks back");
            blocks.iter().for_each(|&block| held.claimed(block));
            // Sorted first: every contender loses the same blocks.
            blocks.sort_unstable();
            random.shuffle(&mut blocks);
            for block in blocks.drain(num_blocks as usize - empty..) {
                held.released(block);
                allocator.release(0, block);
            }
            print("possible", empty / WINDOW);
            print("after the release", held.free_windows());
            for pass in 1..=passes {
                for _ in 0..empty / 10 {
                    let block = &mut blocks[random.usize(0..num_blocks as usize - empty)];
                    held.released(*block);
                    allocator.release(0, *block);
                    *block = allocator.claim(0).expect("one was just released");
                    held.claimed(*block);
                }
                if pass == 8 || pass == 100 || pass == passes {
                    print(&format!("after {pass} passes"), held.free_windows());
                }
            }
        }
    }
}

/// Sequences of the churn.
const SEQUENCES: usize = 155;
/// Steps of the churn.
const STEPS: usize = 6000;
/// Sequences that grow by a block in each step: one in 16 of them fills its last block.
const GROWING: usize = SEQUENCES / 16;
/// Blocks of a batch whose runs are counted.
const BATCH: u32 = 256;
/// Over the last steps, every so many, a batch is tried.
const TRIED_STEPS: usize = 1000;
const TRIED_EVERY: usize = 10;

/// 6,000 steps at 75 % fill with 155 sequences. In a step some sequences grow by one block each; a
/// random one ends, and a new one comes, whose prompt is claimed as one batch: uniform from 1 to three
/// times the mean length, but never more than what is missing to 75 %. A sequence that ends gives its
/// blocks back last one first, as vLLM does.
///
/// Printed: the mean run of a batch of 256 (blocks that follow one another in the order handed out),
/// tried on the way over the last 1,000 steps; and free windows at the end.
pub fn churn(num_blocks: u32, seed: u64, steps: Option<usize>) {
    let steps = steps.unwrap_or(STEPS);
    for (who, allocator) in contenders(num_blocks, seed) {
        let mut churn = Churn {
            allocator: &*allocator,
            held: Held(vec![false; num_blocks as usize]),
            random: fastrand::Rng::with_seed(seed),
            target: num_blocks as usize * 3 / 4,
            live: 0,
            sequences: Vec::new(),
        };
        let fresh = BATCH as f64 / churn.runs_of_a_batch() as f64;
        for left in (1..=SEQUENCES).rev() {
            churn.open((churn.target - churn.live) / left);
        }
        let (mut tried, mut runs) = (0, 0);
        for step in 0..steps {
            churn.step();
            if step + TRIED_STEPS >= steps && step % TRIED_EVERY == 0 {
                tried += 1;
                runs += churn.runs_of_a_batch();
            }
        }
        let print = |part: &str, unit: &str, value: f64| {
            let figure = Figure {
                measure: "churn at 75 % fill",
                pattern: "churn",
                threads: 1,
                who,
                part,
                unit,
            };
            figure.print(value);
        };
        print("mean run, new pool", "blocks", fresh);
        print(
            "mean run",
            "blocks",
            (tried * BATCH as usize) as f64 / runs as f64,
        );
        print("free windows", "windows", churn.held.free_windows() as f64);
        let possible = (num_blocks as usize - churn.live) / WINDOW;
        print("possible", "windows", possible as f64);
    }
}

struct Churn<'a> {
    allocator: &'a dyn Allocator,
    held: Held,
    random: fastrand::Rng,
    target: usize,
    live: usize,
    sequences: Vec<Vec<u32>>,
}

impl Churn<'_> {
    fn open(&mut self, blocks: usize) {
        let mut claimed = Vec::with_capacity(blocks);
        self.allocator.claim_batch(0, blocks as u32, &mut claimed);
        claimed.iter().for_each(|&block| self.held.claimed(block));
        self.live += blocks;
        self.sequences.push(claimed);
    }

    fn step(&mut self) {
        for _ in 0..GROWING {
            let sequence = self.random.usize(0..self.sequences.len());
            let block = self.allocator.claim(0).expect("a quarter is empty");
            self.held.claimed(block);
            self.live += 1;
            self.sequences[sequence].push(block);
        }
        let ending = self.random.usize(0..self.sequences.len());
        let mut blocks = self.sequences.swap_remove(ending);
        blocks.iter().for_each(|&block| self.held.released(block));
        self.live -= blocks.len();
        blocks.reverse();
        self.allocator.release_batch(0, &blocks);
        let prompt = self.random.usize(1..=3 * self.target / SEQUENCES);
        let missing = self.target.saturating_sub(self.live).max(1);
        self.open(prompt.min(missing));
    }

    /// Runs of consecutive blocks in a batch of [`BATCH`], which is given back.
    fn runs_of_a_batch(&self) -> usize {
        let mut blocks = Vec::with_capacity(BATCH as usize);
        self.allocator.claim_batch(0, BATCH, &mut blocks);
        let breaks = blocks.windows(2).filter(|pair| pair[1] != pair[0] + 1);
        let runs = 1 + breaks.count();
        self.allocator.release_batch(0, &blocks);
        runs
    }
}
