//! Nanoseconds of one eviction, by policy and by how many are evicted at once.
//!
//! ```text
//! cargo run --release -p kvmmu --example evictions
//! ```
//!
//! A pool of 90,000 blocks holds 50,000 cached ones in chains of 100 that were closed at random;
//! the other blocks belong to chains that are open, so windows differ in their live blocks.
//! `Mmu::evict(n)` is timed alone, 20,000 blocks in all; then the cache is filled again. A call
//! longer than 1 ms was preempted, and does not count.

use std::time::Instant;

use kvmmu::{Config, Eviction, Keys, Mmu, Rows};

const BLOCKS: u32 = 90_000;
const CACHED: u32 = 50_000;
const CHAIN: u32 = 100;
const EVICTED: u32 = 20_000;
const ROUNDS: u32 = 7;
/// Nanoseconds.
const PREEMPTED: f64 = 1e6;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// SplitMix64 (Steele, Lea, Flood: OOPSLA 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * n as u128) >> 64) as usize
    }
}

struct World {
    mmu: Mmu,
    rows: Rows,
    random: Random,
    next: i32,
    open: Vec<i64>,
}

impl World {
    fn new(eviction: Eviction, page_aware: bool) -> Outcome<Self> {
        let mut config = Config::new(BLOCKS, 1);
        config.max_sequences = 2 * BLOCKS / CHAIN;
        (config.eviction, config.page_aware) = (eviction, page_aware);
        let mmu = Mmu::new(config)?;
        let rows = Rows::new(&mmu, 1, CHAIN as usize, CHAIN as usize)?;
        let (random, next, open) = (Random(7), 0, Vec::new());
        let mut world = Self {
            mmu,
            rows,
            random,
            next,
            open,
        };
        while world.mmu.states().empty >= CHAIN {
            world.open()?;
        }
        world.fill()?;
        Ok(world)
    }

    /// A chain of contents that nobody had before, written.
    fn open(&mut self) -> Outcome<()> {
        let tokens: Vec<i32> = (self.next..).take(CHAIN as usize).collect();
        self.next += CHAIN as i32;
        let id = self.mmu.open(&tokens, Keys::default())?;
        let mut tables = self.rows.buffers();
        let (rows, query) = (&mut self.rows, [CHAIN as i32]);
        let step = self.mmu.begin_step();
        self.mmu
            .prepare(step, &[id], Some(&query), None, rows, &mut tables.borrow())?;
        self.mmu.written(step)?;
        self.mmu.end_step(step)?;
        self.open.push(id);
        Ok(())
    }

    /// Opens chains in empty blocks and closes others until so many are cached.
    fn fill(&mut self) -> Outcome<()> {
        while self.mmu.states().cached < CACHED {
            if self.mmu.states().empty >= CHAIN {
                self.open()?;
            }
            let at = self.random.below(self.open.len());
            self.mmu.close(self.open.swap_remove(at))?;
        }
        Ok(())
    }

    /// Nanoseconds of each call.
    fn round(&mut self, n: u32, laps: &mut Vec<f64>) -> Outcome<()> {
        for _ in 0..EVICTED.div_ceil(n) {
            let start = Instant::now();
            let evicted = self.mmu.evict(n);
            let lap = start.elapsed().as_secs_f64() * 1e9;
            assert_eq!(evicted, n);
            if lap < PREEMPTED {
                laps.push(lap);
            }
        }
        self.fill()
    }
}

fn main() -> Outcome<()> {
    println!("policy  page-aware     n   ns/eviction   p50 us  p99 us  p99.9 us (one call)");
    for (name, eviction) in [("lru", Eviction::Lru), ("lfu", Eviction::Lfu)] {
        for n in [1, 16, 512] {
            for page_aware in [false, true] {
                let mut world = World::new(eviction, page_aware)?;
                let mut laps = Vec::new();
                for _ in 0..ROUNDS {
                    world.round(n, &mut laps)?;
                }
                laps.sort_by(f64::total_cmp);
                let mean = laps.iter().sum::<f64>() / (laps.len() as f64 * f64::from(n));
                let at = |share: f64| laps[(share * (laps.len() - 1) as f64) as usize] / 1e3;
                println!(
                    "{name:6}  {page_aware:10}  {n:4}   {mean:11.0}   {:6.2}  {:6.2}  {:8.2}",
                    at(0.5),
                    at(0.99),
                    at(0.999)
                );
            }
        }
    }
    Ok(())
}
