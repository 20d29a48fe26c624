//! Many threads at once, while moves run.
//!
//! Six threads open, prepare, fork, truncate and close sequences of their own over shared prompts; one
//! plans, begins, copies and commits or aborts moves all the while; one pins, evicts, measures and
//! validates. Steps and the flip of a commit exclude each other, as in an engine; nothing else does.
//! Every written position is read back. The seed is fixed; `KVMMU_SEED` replaces it, and it is
//! printed.

use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use kvmmu::{Config, Error, Keys, Mmu, Plan, Rows};

const BLOCKS: usize = 256;
const SIZE: usize = 4;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// Between two turns of whoever stops all others: a writer that takes its lock again at once would
/// starve the readers, for the lock is not fair.
fn rest() {
    std::thread::sleep(std::time::Duration::from_micros(100));
}

struct World {
    mmu: Mmu,
    guaranteed: bool,
    memory: Vec<AtomicU64>,
    /// Read by steps, written by whoever flips tables.
    flip: RwLock<()>,
    done: AtomicBool,
    moved: AtomicUsize,
}

fn word(tokens: &[i32]) -> u64 {
    tokens.iter().fold(7, |hash: u64, &token| {
        (hash ^ token as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(23)
    })
}

impl World {
    fn copy(&self, pairs: &[[u32; 2]]) {
        for &[source, destination] in pairs {
            for at in 0..SIZE {
                let word = self.memory[source as usize * SIZE + at].load(Ordering::Relaxed);
                self.memory[destination as usize * SIZE + at].store(word, Ordering::Relaxed);
            }
        }
    }

    fn engine(&self, thread: u64, seed: u64, rounds: usize) {
        let mut random = Random(seed ^ (thread << 32));
        let mut rows = Rows::new(&self.mmu, 4, BLOCKS, 256).unwrap();
        let mut tables = rows.buffers();
        let mut open: Vec<(i64, Vec<i32>, usize)> = Vec::new();
        let mut token = 1000 * (thread as i32 + 1);
        for _ in 0..rounds {
            match random.below(8) {
                0 | 1 if open.len() < 4 => {
                    let shared = random.below(3) as i32;
                    let len = random.below(30) as i32;
                    let tokens: Vec<i32> = (0..len).map(|i| i / 9 * shared + i).collect();
                    match self.mmu.open(&tokens, Keys::default()) {
                        Ok(id) => {
                            let cached = self.mmu.info(id).unwrap().num_cached_tokens as usize;
                            open.push((id, tokens, cached));
                        }
                        Err(error) => assert!(matches!(error, Error::OutOfBlocks { .. })),
                    }
                }
                2 if !open.is_empty() => {
                    let (id, ..) = open.swap_remove(random.below(open.len() as u64) as usize);
                    self.mmu.close(id).unwrap();
                }
                3 if !open.is_empty() && open.len() < 4 => {
                    let (id, tokens, written) =
                        open[random.below(open.len() as u64) as usize].clone();
                    open.push((self.mmu.fork(id).unwrap(), tokens, written));
                }
                4 if !open.is_empty() => {
                    let at = random.below(open.len() as u64) as usize;
                    let (id, tokens, written) = &mut open[at];
                    let to = random.below(tokens.len() as u64 + 1) as usize;
                    self.mmu.truncate(*id, to as u32).unwrap();
                    tokens.truncate(to);
                    *written = (*written).min(to);
                }
                _ if !open.is_empty() => {
                    let _steps = self.flip.read().unwrap();
                    let ids: Vec<i64> = open.iter().map(|seq| seq.0).collect();
                    let lens: Vec<i32> = open
                        .iter()
                        .map(|seq| (seq.1.len() - seq.2) as i32 + 1)
                        .collect();
                    let new: Vec<i32> = (0..ids.len() as i32).map(|i| token + i).collect();
                    token += ids.len() as i32;
                    let step = self.mmu.begin_step();
                    let prepared = self.mmu.prepare(
                        step,
                        &ids,
                        Some(&lens),
                        Some(&new),
                        &mut rows,
                        &mut tables.borrow(),
                    );
                    if let Ok(copies) = prepared {
                        self.copy(&copies);
                        let mut at = 0;
                        for (row, (seq, new)) in open.iter_mut().zip(new).enumerate() {
                            seq.1.push(new);
                            for position in seq.2..seq.1.len() {
                                let slot = tables.slot_mapping[at] as usize;
                                self.memory[slot]
                                    .store(word(&seq.1[..=position]), Ordering::Relaxed);
                                at += 1;
                            }
                            seq.2 = seq.1.len();
                            for position in 0..seq.2 {
                                let block =
                                    tables.block_table[row * BLOCKS + position / SIZE] as usize;
                                let found = self.memory[block * SIZE + position % SIZE]
                                    .load(Ordering::Relaxed);
                                assert_eq!(
                                    found,
                                    word(&seq.1[..=position]),
                                    "thread {thread}, sequence {}, position {position}",
                                    seq.0
                                );
                            }
                        }
                        self.mmu.written(step).unwrap();
                    }
                    self.mmu.end_step(step).unwrap();
                }
                _ => {}
            }
        }
        for (id, ..) in open {
            self.mmu.close(id).unwrap();
        }
    }

    /// A plan of any goal; none when it cannot be reached now. Under the guarantee what it asks for.
    fn plan(&self, random: &mut Random) -> Option<Plan> {
        let sequences = self.mmu.sequences();
        match random.below(8) {
            _ if self.guaranteed => self.mmu.plan_compaction(None),
            0 | 1 => self.mmu.plan_below(0.02, 16).ok(),
            2 => self.mmu.plan_free_run(8 + random.below(56) as u32, 16).ok(),
            3 => self
                .mmu
                .plan_huge_pages(1 + random.below(2) as u32, 64)
                .ok(),
            4 => self.mmu.plan_groups(8, 1 + random.below(9) as u32, 16).ok(),
            5 | 6 => (sequences.first()).and_then(|&id| self.mmu.plan_gather(id, 16).ok()),
            _ => self.mmu.plan_compaction(None),
        }
    }

    fn compactor(&self, seed: u64) {
        let mut random = Random(seed);
        while !self.done.load(Ordering::Relaxed) {
            // The copy reads sources that nobody writes: between begin and commit no step runs.
            let _flip = self.flip.write().unwrap();
            let Some(plan) = self.plan(&mut random) else {
                drop(_flip);
                rest();
                continue;
            };
            let moves = self.mmu.begin(&plan).unwrap();
            self.copy(moves.pairs());
            if random.below(4) == 0 {
                self.mmu.abort(&moves).unwrap();
            } else {
                self.moved
                    .fetch_add(self.mmu.commit(&moves).unwrap() as usize, Ordering::Relaxed);
            }
            drop(_flip);
            rest();
        }
    }

    /// Gives memory back and takes it back; meanwhile it is somebody else's, who writes into it.
    fn keeper(&self, seed: u64, blocks: u32) {
        let mut random = Random(seed);
        while !self.done.load(Ordering::Relaxed) {
            let granule = [1, 4, 16][random.below(3) as usize];
            let wanted = 1 + random.below(u64::from(blocks) / 8) as u32;
            let away = self.mmu.take_offline(wanted, granule).unwrap();
            let slots = || {
                away.iter()
                    .flat_map(|&b| b as usize * SIZE..(b as usize + 1) * SIZE)
            };
            slots().for_each(|slot| self.memory[slot].store(u64::MAX, Ordering::Relaxed));
            rest();
            assert!(slots().all(|slot| self.memory[slot].load(Ordering::Relaxed) == u64::MAX));
            let away: Vec<i64> = away.into_iter().map(i64::from).collect();
            let (some, others) = away.split_at(random.below(away.len() as u64 + 1) as usize);
            for part in [others, some] {
                self.mmu.bring_online(part).unwrap();
            }
            rest();
        }
    }

    fn observer(&self, seed: u64) {
        let mut random = Random(seed);
        while !self.done.load(Ordering::Relaxed) {
            let block = random.below(BLOCKS as u64) as i64;
            if self.mmu.pin(&[block]).is_ok() {
                std::thread::yield_now();
                self.mmu.unpin(&[block]).unwrap();
            }
            self.mmu.evict(random.below(3) as u32);
            self.mmu.measure();
            self.mmu.validate(None).unwrap();
            rest();
        }
    }
}

/// Kind 49 of the list of hazards, with far more operations than it asks for.
#[test]
fn eight_threads_read_their_own_bytes_while_moves_run() {
    let rounds = std::env::var("KVMMU_ROUNDS").map_or(100_000, |rounds| rounds.parse().unwrap());
    let moved = eight_threads(BLOCKS as u32, None, rounds);
    assert!(moved > 0);
}

/// The same under the guarantee, in a pool of several windows: `validate` compares moves with frees.
#[test]
fn eight_threads_keep_the_guarantee_while_moves_run() {
    let rounds = std::env::var("KVMMU_ROUNDS").map_or(10_000, |rounds| rounds.parse().unwrap());
    eight_threads(4 * 512 + 100, Some(0), rounds);
}

fn eight_threads(blocks: u32, guarantee: Option<u32>, rounds: usize) -> usize {
    let seed = std::env::var("KVMMU_SEED").map_or(20_261_129, |seed| seed.parse().unwrap());
    println!("KVMMU_SEED={seed} KVMMU_ROUNDS={rounds}");
    let mut config = Config::new(blocks, SIZE as u32);
    config.max_sequences = 64;
    config.guarantee = guarantee;
    let world = World {
        mmu: Mmu::new(config).unwrap(),
        guaranteed: guarantee.is_some(),
        memory: (0..(blocks as usize + 1) * SIZE)
            .map(|_| AtomicU64::new(0))
            .collect(),
        flip: RwLock::new(()),
        done: AtomicBool::new(false),
        moved: AtomicUsize::new(0),
    };
    std::thread::scope(|scope| {
        let world = &world;
        let helpers = [
            scope.spawn(move || world.compactor(seed + 1)),
            scope.spawn(move || world.observer(seed + 2)),
            scope.spawn(move || world.keeper(seed + 3, blocks)),
        ];
        let engines: Vec<_> = (0..6)
            .map(|t| scope.spawn(move || world.engine(t, seed, rounds)))
            .collect();
        let results: Vec<_> = engines.into_iter().map(|engine| engine.join()).collect();
        world.done.store(true, Ordering::Relaxed);
        for result in results {
            result.unwrap();
        }
        for helper in helpers {
            helper.join().unwrap();
        }
    });
    world.mmu.validate(None).unwrap();
    world.mmu.evict(u32::MAX);
    assert_eq!(world.mmu.states().empty, blocks);
    let moved = world.moved.load(Ordering::Relaxed);
    println!("{moved} blocks moved");
    moved
}

/// An append that is always refused takes nothing away for a moment that others would miss.
#[test]
fn a_refused_claim_makes_no_other_claim_fail() {
    let mmu = Mmu::new(Config::new(64, 1)).unwrap();
    let id = mmu.open(&[1; 15], Keys::default()).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..300_000 {
                mmu.append(id, &[7; 55]).unwrap_err();
            }
            done.store(true, Ordering::Relaxed);
        });
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let id = mmu.open(&[1], Keys::default()).unwrap();
                mmu.close(id).unwrap();
            }
        });
    });
    mmu.validate(None).unwrap();
}

/// What is prepared in a step while another thread settles it is settled now or later, never lost.
#[test]
fn settling_a_step_loses_nothing_that_is_prepared_meanwhile() {
    let mmu = Mmu::new(Config::new(256, 4)).unwrap();
    let mut tables = [(); 2].map(|()| {
        let rows = Rows::new(&mmu, 1, 16, 64).unwrap();
        let buffers = rows.buffers();
        (rows, buffers)
    });
    let [first, second] = &mut tables;
    for round in 0..3000 {
        let [a, b] = [3, 30].map(|n| mmu.open(&vec![round; n], Keys::default()).unwrap());
        let step = mmu.begin_step();
        mmu.prepare(
            step,
            &[a],
            Some(&[3]),
            None,
            &mut first.0,
            &mut first.1.borrow(),
        )
        .unwrap();
        let go = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                go.wait();
                mmu.written(step).unwrap();
            });
            scope.spawn(|| {
                go.wait();
                mmu.prepare(
                    step,
                    &[b],
                    Some(&[30]),
                    None,
                    &mut second.0,
                    &mut second.1.borrow(),
                )
                .unwrap();
            });
        });
        mmu.validate(None).unwrap();
        mmu.written(step).unwrap();
        for id in [a, b] {
            let info = mmu.info(id).unwrap();
            assert_eq!(info.num_written, info.num_scheduled);
            mmu.close(id).unwrap();
        }
        mmu.end_step(step).unwrap();
        mmu.evict(u32::MAX);
    }
}
