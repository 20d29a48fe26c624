//! The pool under stress: every public verb by several threads at once, against a map of holders;
//! and ten million random operations by one thread, against a model, with a recount.
//!
//! What lives here: programs as long as one likes. What never lives here: small programs whose
//! every execution is looked at (`tests/loom.rs`).
//!
//!     cargo run --release -p kvmmu --example stress -- [threads|model|race] [--seconds N]
//!         [--operations N] [--threads N] [--seed N]
//!
//! Without a name all three run. Everything is drawn from the seed, which is printed; the schedule of
//! the threads is the machine's. Ends with status 101 and the reason at the first fault.
//!
//! `race` is the experiment that shows what claims over several words must not do: two threads that
//! share one home claim and release aligned pages of orders 7 and 8 (two and four words of a line).

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvmmu::{End, Placement, Pool, PoolConfig, Zone};

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * u128::from(n)) >> 64) as u32
    }
}

#[derive(Debug, Clone, Copy)]
struct Settings {
    seconds: f64,
    operations: u64,
    threads: u32,
    seed: u64,
}

/// What one claim brought, and how it is to be given back.
enum Held {
    Blocks(Vec<u32>),
    Page(u32, u32),
    Owned(u32, Vec<u32>),
    Offline(u32, u32),
}

impl Held {
    fn blocks(&self) -> Vec<u32> {
        match self {
            Held::Blocks(blocks) | Held::Owned(_, blocks) => blocks.clone(),
            Held::Page(first, order) => (*first..first + (1 << order)).collect(),
            Held::Offline(first, n) => (*first..first + n).collect(),
        }
    }
}

/// A pool, and for each block how many references its holders know of.
struct World<const BITS: u32, const WORDS: usize> {
    pool: Pool<BITS, WORDS>,
    holders: Vec<AtomicU32>,
    /// Blocks that were published; what stands here may have been evicted since.
    known: Vec<AtomicU32>,
}

impl<const BITS: u32, const WORDS: usize> World<BITS, WORDS> {
    fn new(config: &PoolConfig) -> Self {
        let words = |n: u32, value| (0..n).map(|_| AtomicU32::new(value)).collect();
        Self {
            pool: Pool::new(config).unwrap(),
            holders: words(config.num_blocks, 0),
            known: words(8, u32::MAX),
        }
    }

    fn n(&self) -> u32 {
        self.holders.len() as u32
    }

    /// Blocks that were handed out: nobody may have them.
    fn own(&self, blocks: &[u32]) {
        for &block in blocks {
            let before = self.holders[block as usize].fetch_add(1, Ordering::Relaxed);
            assert_eq!(before, 0, "block {block} is handed out twice");
        }
    }

    /// Blocks that are about to be given back by somebody who alone holds them.
    fn disown(&self, blocks: &[u32]) {
        for &block in blocks {
            let before = self.holders[block as usize].fetch_sub(1, Ordering::Relaxed);
            assert_eq!(before, 1, "block {block} has another holder");
        }
    }

    /// One claim of some kind.
    fn claim(&self, rng: &mut Rng) -> Option<Held> {
        let most = (self.n() / 6).max(1);
        let n = 1 + rng.below(most);
        let zone = if rng.below(4) == 0 {
            Zone::Anchor
        } else {
            Zone::Body
        };
        let mut out = Vec::new();
        let held = match rng.below(9) {
            0 | 1 => {
                out.push(self.pool.claim()?);
                Held::Blocks(out)
            }
            2 => {
                self.pool.claim_batch_in(zone, n, &mut out).ok()?;
                assert_eq!(out.len() as u32, n);
                Held::Blocks(out)
            }
            3 => {
                let order = rng.below(Pool::<BITS, WORDS>::MAX_ORDER + 1);
                let first = self.pool.claim_page_in(zone, order)?;
                assert_eq!(
                    first % (1 << order),
                    0,
                    "a page of order {order} at {first}"
                );
                Held::Page(first, order)
            }
            4 => {
                let first = self.pool.claim_run_in(zone, n)?;
                Held::Blocks((first..first + n).collect())
            }
            5 => {
                let first = rng.below(self.n());
                if !self.pool.claim_exact(first, n) {
                    return None;
                }
                Held::Blocks((first..first + n).collect())
            }
            6 => {
                let lengths = [n / 2, 1, n / 3];
                self.pool.claim_like(&lengths, &mut out).ok()?;
                assert_eq!(out.len() as u32, lengths.iter().sum::<u32>());
                Held::Blocks(out)
            }
            7 => {
                let owner = rng.below(1000);
                self.pool.claim_for(zone, owner, n, &mut out).ok()?;
                Held::Owned(owner, out)
            }
            _ => {
                let first = rng.below(self.n());
                let n = n.min(16);
                self.pool.offline(first, n).ok()?;
                Held::Offline(first, n)
            }
        };
        self.own(&held.blocks());
        Some(held)
    }

    fn give(&self, held: Held) {
        self.disown(&held.blocks());
        match held {
            Held::Blocks(blocks) if blocks.len() == 1 => self.pool.release(blocks[0]).unwrap(),
            Held::Blocks(blocks) => self.pool.release_batch(&blocks).unwrap(),
            Held::Page(first, order) => self.pool.release_page(first, order).unwrap(),
            Held::Owned(owner, blocks) => {
                assert!(self.pool.release_for(owner + 1, &blocks).is_err());
                self.pool.release_for(owner, &blocks).unwrap();
            }
            Held::Offline(first, n) => self.pool.online(first, n).unwrap(),
        }
    }

    /// References come and go, blocks become cached, are revived or evicted.
    fn share(&self, rng: &mut Rng) {
        let slot = &self.known[rng.below(self.known.len() as u32) as usize];
        match rng.below(3) {
            0 => {
                let Some(block) = self.pool.claim() else {
                    return;
                };
                self.own(&[block]);
                self.pool.retain(&[block, block]).unwrap();
                // Published, it can be revived by whoever knows it from an earlier life: from then
                // on its holders are counted by those who revive it.
                self.disown(&[block]);
                self.pool.publish(&[block]).unwrap();
                self.pool.release_batch(&[block, block]).unwrap();
                self.pool.release(block).unwrap();
                let old = slot.swap(block, Ordering::AcqRel);
                if old < self.n() {
                    self.pool.evict(old);
                }
            }
            1 => {
                let block = slot.load(Ordering::Acquire);
                if block < self.n() && self.pool.revive(&[block]).is_ok() {
                    let holders = &self.holders[block as usize];
                    holders.fetch_add(1, Ordering::Relaxed);
                    self.pool.retain(&[block]).unwrap();
                    self.pool.release(block).unwrap();
                    let before = holders.fetch_sub(1, Ordering::Relaxed);
                    assert!(before >= 1, "block {block} lost a holder");
                    self.pool.release(block).unwrap();
                }
            }
            _ => {
                let block = slot.load(Ordering::Acquire);
                if block < self.n() {
                    self.pool.evict(block);
                }
            }
        }
    }

    fn turn(&self, rng: &mut Rng, held: &mut Vec<Held>) {
        let roll = rng.below(100);
        if roll < 20 {
            return self.share(rng);
        }
        if held.len() > 6 || roll < 55 {
            if !held.is_empty() {
                let at = rng.below(held.len() as u32) as usize;
                self.give(held.swap_remove(at));
            }
            return;
        }
        held.extend(self.claim(rng));
    }

    /// Everything is given back: nothing is missing.
    fn finish(&self) {
        self.pool.audit().unwrap();
        for block in 0..self.n() {
            self.pool.evict(block);
        }
        self.pool.audit().unwrap();
        assert_eq!(self.pool.empty(), self.n());
        let mut all = Vec::new();
        self.pool.claim_batch(self.n(), &mut all).unwrap();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..self.n()));
    }
}

/// All threads meet; nobody sleeps in a lock, which a sanitizer would not see into.
struct Meeting {
    arrived: AtomicUsize,
    round: AtomicUsize,
    threads: usize,
}

impl Meeting {
    /// Waits for all others; the last to come does `work` before anybody goes on.
    fn join(&self, work: impl FnOnce()) {
        let round = self.round.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            work();
            self.arrived.store(0, Ordering::Relaxed);
            self.round.store(round + 1, Ordering::Release);
        } else {
            while self.round.load(Ordering::Acquire) == round {
                std::thread::yield_now();
            }
        }
    }
}

fn placements() -> [Placement; 4] {
    let seed = 7;
    [
        Placement::AddressOrder,
        Placement::Fullest,
        Placement::Scatter { seed },
        Placement::Fifo,
    ]
}

/// Many threads, with a recount each time they all rest.
fn threads<const BITS: u32, const WORDS: usize>(
    settings: Settings,
    num_blocks: u32,
    placement: Placement,
    small_from: End,
) {
    let world = World::<BITS, WORDS>::new(&PoolConfig {
        placement,
        small_from,
        anchor: 0.3,
        ..PoolConfig::new(num_blocks)
    });
    let meeting = Meeting {
        arrived: AtomicUsize::new(0),
        round: AtomicUsize::new(0),
        threads: settings.threads as usize,
    };
    let end = Instant::now() + Duration::from_secs_f64(settings.seconds);
    let over = AtomicBool::new(false);
    let (world, meeting, over) = (&world, &meeting, &over);
    let total: u64 = std::thread::scope(|scope| {
        let spawn = |thread: u32| {
            scope.spawn(move || {
                let mut rng = Rng(settings.seed ^ u64::from(thread) << 40 ^ u64::from(num_blocks));
                let mut held = Vec::new();
                let mut turns = 0;
                while !over.load(Ordering::Acquire) {
                    for _ in 0..500 {
                        world.turn(&mut rng, &mut held);
                    }
                    turns += 500;
                    meeting.join(|| {
                        world.pool.audit().unwrap();
                        over.store(Instant::now() >= end, Ordering::Release);
                    });
                }
                held.into_iter().for_each(|held| world.give(held));
                turns
            })
        };
        let threads: Vec<_> = (0..settings.threads).map(spawn).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    });
    world.finish();
    println!("threads {BITS}x{WORDS} {num_blocks} {placement:?} {small_from:?}: {total} turns");
}

/// One thread: what is claimed must be what is empty, after each of many operations.
fn model<const BITS: u32, const WORDS: usize>(
    settings: Settings,
    num_blocks: u32,
    placement: Placement,
) {
    let world = World::<BITS, WORDS>::new(&PoolConfig {
        placement,
        anchor: 0.3,
        ..PoolConfig::new(num_blocks)
    });
    let mut rng = Rng(settings.seed ^ u64::from(num_blocks));
    let mut held = Vec::new();
    let every = if num_blocks <= 64 {
        1
    } else {
        u64::from(num_blocks)
    };
    for turn in 0..settings.operations {
        world.turn(&mut rng, &mut held);
        if turn % every == 0 {
            world
                .pool
                .audit()
                .unwrap_or_else(|why| panic!("turn {turn}: {why}"));
            let mine: usize = held.iter().map(|held| held.blocks().len()).sum();
            let states = world.pool.states();
            let rest = states.empty + states.cached;
            assert_eq!(mine as u32 + rest, num_blocks, "turn {turn}");
        }
    }
    held.into_iter().for_each(|held| world.give(held));
    world.finish();
    let operations = settings.operations;
    println!(
        "model {BITS}x{WORDS} {num_blocks} {placement:?}: {operations} turns, audited every {every}"
    );
}

/// Two threads on one home, pages over several words.
fn race(settings: Settings) {
    let world = World::<64, 8>::new(&PoolConfig::new(4096));
    let (world, mut claims, mut missed) = (&world, 0, 0);
    // Threads take seats by number, modulo 32: thirty-one others sit between the two.
    std::thread::scope(|scope| {
        let work = move || {
            let (mut claims, mut missed) = (0u64, 0u64);
            let end = Instant::now() + Duration::from_secs_f64(settings.seconds);
            let mut rng = Rng(settings.seed);
            while Instant::now() < end {
                for _ in 0..100 {
                    let order = 7 + rng.below(2);
                    let Some(first) = world.pool.claim_page(order) else {
                        missed += 1;
                        continue;
                    };
                    let held = Held::Page(first, order);
                    world.own(&held.blocks());
                    world.give(held);
                    claims += 1;
                }
            }
            (claims, missed)
        };
        let first = scope.spawn(move || {
            let block = world.pool.claim().unwrap();
            world.pool.release(block).unwrap();
            for _ in 0..31 {
                std::thread::spawn(|| {
                    let pool = Pool::<64, 8>::new(&PoolConfig::new(1)).unwrap();
                    pool.claim().unwrap();
                })
                .join()
                .unwrap();
            }
            let second = scope.spawn(work);
            let (a, b) = (work(), second.join().unwrap());
            (a.0 + b.0, a.1 + b.1)
        });
        (claims, missed) = first.join().unwrap();
    });
    world.pool.audit().unwrap();
    assert_eq!(world.pool.empty(), 4096);
    println!("race: {claims} pages of orders 7 and 8, none handed out twice, {missed} not found");
}

fn main() {
    let mut settings = Settings {
        seconds: 1.0,
        operations: 10_000_000 / 32,
        threads: 4,
        seed: 1,
    };
    let mut parts = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let mut value = || {
            arguments
                .next()
                .unwrap_or_else(|| panic!("{name} needs a value"))
        };
        match name.as_str() {
            "--seconds" => settings.seconds = value().parse().expect("seconds"),
            "--operations" => settings.operations = value().parse().expect("operations"),
            "--threads" => settings.threads = value().parse().expect("threads"),
            "--seed" => settings.seed = value().parse().expect("seed"),
            "threads" | "model" | "race" => parts.push(name),
            _ => panic!(
                "{name} is none of threads, model, race, --seconds, --operations, --threads, --seed"
            ),
        }
    }
    println!("{settings:?}");
    let wanted = |name: &str| parts.is_empty() || parts.iter().any(|part| part == name);
    for placement in placements() {
        if wanted("model") {
            for num_blocks in [2, 15, 60] {
                model::<4, 2>(settings, num_blocks, placement);
                model::<8, 4>(settings, num_blocks, placement);
            }
            model::<64, 8>(settings, 60, placement);
            model::<64, 8>(settings, 3000, placement);
        }
        if wanted("threads") {
            for small_from in [End::Low, End::High] {
                threads::<4, 2>(settings, 16, placement, small_from);
                threads::<4, 2>(settings, 60, placement, small_from);
                threads::<64, 8>(settings, 600, placement, small_from);
                threads::<64, 8>(settings, 5000, placement, small_from);
            }
        }
    }
    if wanted("race") {
        race(settings);
    }
}
