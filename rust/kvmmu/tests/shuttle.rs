//! Random schedules, sequentially consistent, of programs that are too long for `loom.rs`: the pool
//! with its counts, and the transaction of moves against fork, append, export, match, evict and close.
//!
//! What lives here: three or four threads of some dozens of operations. What never lives here: weak
//! memory (`loom.rs`), real threads (`pool.rs`, `threads.rs`, `examples/stress.rs`).
//!
//!     RUSTFLAGS="--cfg shuttle" cargo test -p kvmmu --test shuttle
//!
//! Each test runs under a uniformly random scheduler and under PCT (Burckhardt et al., ASPLOS 2010) of
//! depth 3. `KVMMU_SEED` (printed) is the seed of both, `KVMMU_SCHEDULES` how many schedules each
//! runs. A failure prints its schedule, which `shuttle::replay` takes.
#![cfg(shuttle)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvmmu::model::this_is_thread;
use kvmmu::{Config, Error, Keys, Mmu, Placement, Plan, Pool, PoolConfig, Rows, Tables, Zone};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::RwLock;
use shuttle::{Runner, thread};

fn from_env(name: &str, default: u64) -> u64 {
    let value = std::env::var(name).ok();
    value.map_or(default, |text| text.parse().expect(name))
}

fn check(program: impl Fn() + Send + Sync + 'static) {
    let seed = from_env("KVMMU_SEED", 1);
    let schedules = from_env("KVMMU_SCHEDULES", 300) as usize;
    println!("KVMMU_SEED={seed} KVMMU_SCHEDULES={schedules}");
    let program = Arc::new(program);
    let (random, pct) = (Arc::clone(&program), program);
    Runner::new(
        RandomScheduler::new_from_seed(seed, schedules),
        Default::default(),
    )
    .run(move || random());
    Runner::new(
        PctScheduler::new_from_seed(seed, 3, schedules),
        Default::default(),
    )
    .run(move || pct());
}

fn below(n: u32) -> u32 {
    thread_rng().gen_range(0..n)
}

/// Threads claim in every shape, share, publish, revive and evict; holders are counted beside.
fn contend<const BITS: u32, const WORDS: usize>(placement: Placement, num_blocks: u32) {
    let pool = Pool::<BITS, WORDS>::new(&PoolConfig {
        placement,
        ..PoolConfig::new(num_blocks)
    });
    let pool = Arc::new(pool.unwrap());
    let holders: Arc<Vec<AtomicU32>> =
        Arc::new((0..num_blocks).map(|_| AtomicU32::new(0)).collect());
    let threads: Vec<_> = (0..3)
        .map(|number| {
            let (pool, holders) = (Arc::clone(&pool), Arc::clone(&holders));
            thread::spawn(move || {
                this_is_thread(number);
                let mut held: Vec<Vec<u32>> = Vec::new();
                for _ in 0..12 {
                    let mut blocks = Vec::new();
                    let n = 1 + below(num_blocks / 2);
                    match below(9) {
                        0 => blocks.extend(pool.claim()),
                        1 => drop(pool.claim_batch(n, &mut blocks)),
                        2 => {
                            let order = below(Pool::<BITS, WORDS>::MAX_ORDER + 1);
                            let page = pool.claim_page_in(Zone::Body, order);
                            blocks.extend(page.into_iter().flat_map(|at| at..at + (1 << order)));
                        }
                        3 => blocks.extend(pool.claim_run(n).into_iter().flat_map(|at| at..at + n)),
                        4 => {
                            let first = below(num_blocks);
                            if pool.claim_exact(first, n) {
                                blocks.extend(first..first + n);
                            }
                        }
                        5 => {
                            // Any block: published by whom, cached or not, evicted or not.
                            let block = below(num_blocks);
                            if pool.revive(&[block]).is_ok() {
                                assert!(pool.references(block).unwrap() >= 1);
                                pool.release(block).unwrap();
                            }
                        }
                        6 => drop(pool.evict(below(num_blocks))),
                        _ => {
                            if let Some(blocks) = held.pop() {
                                for &block in &blocks {
                                    let before =
                                        holders[block as usize].fetch_sub(1, Ordering::Relaxed);
                                    assert_eq!(before, 1, "block {block} has another holder");
                                }
                                if below(3) == 0 {
                                    pool.publish(&blocks).unwrap();
                                }
                                pool.retain(&blocks).unwrap();
                                pool.release_batch(&blocks).unwrap();
                                pool.release_batch(&blocks).unwrap();
                            }
                        }
                    }
                    for &block in &blocks {
                        let before = holders[block as usize].fetch_add(1, Ordering::Relaxed);
                        assert_eq!(before, 0, "block {block} is handed out twice");
                    }
                    if !blocks.is_empty() {
                        held.push(blocks);
                    }
                }
                for blocks in held {
                    for &block in &blocks {
                        holders[block as usize].fetch_sub(1, Ordering::Relaxed);
                    }
                    pool.release_batch(&blocks).unwrap();
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    pool.audit().unwrap();
    for block in 0..num_blocks {
        pool.evict(block);
    }
    pool.audit().unwrap();
    assert_eq!(pool.empty(), num_blocks);
}

#[test]
fn blocks_and_references_add_up() {
    for placement in [
        Placement::AddressOrder,
        Placement::Fullest,
        Placement::Fifo,
        Placement::Scatter { seed: 3 },
    ] {
        check(move || contend::<4, 2>(placement, 14));
    }
}

const BLOCKS: usize = 24;
const SIZE: usize = 2;

/// What stands at a position: it depends on all tokens up to it.
fn word(tokens: &[i32]) -> u64 {
    tokens.iter().fold(7, |hash: u64, &token| {
        (hash ^ token as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(23)
    })
}

struct World {
    mmu: Mmu,
    memory: Vec<AtomicU64>,
    /// Read by steps, written by whoever copies and flips tables.
    flip: RwLock<()>,
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

    /// One token more for each sequence; all of them are read back.
    fn step(
        &self,
        rows: &mut Rows,
        tables: &mut Tables,
        open: &mut [(i64, Vec<i32>, usize)],
        token: i32,
    ) {
        let _steps = self.flip.read().unwrap();
        let ids: Vec<i64> = open.iter().map(|seq| seq.0).collect();
        let lens: Vec<i32> = (open.iter())
            .map(|seq| (seq.1.len() - seq.2) as i32 + 1)
            .collect();
        let new = vec![token; ids.len()];
        let step = self.mmu.begin_step();
        let prepared = self.mmu.prepare(
            step,
            &ids,
            Some(&lens),
            Some(&new),
            rows,
            &mut tables.borrow(),
        );
        match prepared {
            Ok(copies) => {
                self.copy(&copies);
                let mut at = 0;
                for (row, seq) in open.iter_mut().enumerate() {
                    seq.1.push(token);
                    for position in seq.2..seq.1.len() {
                        let slot = tables.slot_mapping[at] as usize;
                        self.memory[slot].store(word(&seq.1[..=position]), Ordering::Relaxed);
                        at += 1;
                    }
                    seq.2 = seq.1.len();
                    for position in 0..seq.2 {
                        let block = tables.block_table[row * BLOCKS + position / SIZE] as usize;
                        let found = &self.memory[block * SIZE + position % SIZE];
                        let found = found.load(Ordering::Relaxed);
                        assert_eq!(found, word(&seq.1[..=position]), "position {position}");
                    }
                }
                self.mmu.written(step).unwrap();
            }
            Err(error) => assert!(matches!(error, Error::OutOfBlocks { .. }), "{error}"),
        }
        self.mmu.end_step(step).unwrap();
    }

    /// What was written is read back through rows that were exported just now.
    fn read_back(&self, rows: &mut Rows, tables: &mut Tables, open: &[(i64, Vec<i32>, usize)]) {
        let ids: Vec<i64> = open.iter().map(|seq| seq.0).collect();
        self.mmu.export(&ids, rows, &mut tables.borrow()).unwrap();
        for (row, (_, tokens, written)) in open.iter().enumerate() {
            for position in 0..*written {
                let block = tables.block_table[row * BLOCKS + position / SIZE] as usize;
                let found = self.memory[block * SIZE + position % SIZE].load(Ordering::Relaxed);
                assert_eq!(found, word(&tokens[..=position]), "position {position}");
            }
        }
    }

    fn engine(&self, number: usize) {
        this_is_thread(number);
        let mut rows = Rows::new(&self.mmu, 4, BLOCKS, 64).unwrap();
        let mut tables = rows.buffers();
        let mut open: Vec<(i64, Vec<i32>, usize)> = Vec::new();
        for turn in 0..6 {
            match below(7) {
                0 if open.len() < 3 => {
                    let tokens: Vec<i32> = (0..below(9) as i32).collect();
                    match self.mmu.open(&tokens, Keys::default()) {
                        Ok(id) => {
                            let cached = self.mmu.info(id).unwrap().num_cached_tokens as usize;
                            open.push((id, tokens, cached));
                        }
                        Err(error) => assert!(matches!(error, Error::OutOfBlocks { .. })),
                    }
                }
                1 if !open.is_empty() && open.len() < 3 => {
                    let (id, tokens, written) = open[0].clone();
                    open.push((self.mmu.fork(id).unwrap(), tokens, written));
                }
                2 if !open.is_empty() => {
                    let at = below(open.len() as u32) as usize;
                    self.mmu.close(open.swap_remove(at).0).unwrap();
                }
                3 if !open.is_empty() => {
                    // Copies of an append are due before the tables flip again.
                    let _steps = self.flip.read().unwrap();
                    let seq = &mut open[0];
                    let new = [100 * (number as i32 + 1) + turn; 2];
                    match self.mmu.append(seq.0, &new) {
                        Ok(copies) => {
                            self.copy(&copies);
                            seq.1.extend(new);
                        }
                        Err(error) => assert!(matches!(error, Error::OutOfBlocks { .. })),
                    }
                }
                4 if !open.is_empty() => {
                    let _steps = self.flip.read().unwrap();
                    self.read_back(&mut rows, &mut tables, &open);
                }
                5 => {
                    let tokens: Vec<i32> = (0..9).collect();
                    let found = self.mmu.matched_tokens(&tokens, &Keys::default());
                    assert!(found < 9 && (found as usize).is_multiple_of(SIZE));
                    self.mmu.evict(below(4));
                }
                _ if !open.is_empty() => {
                    self.step(
                        &mut rows,
                        &mut tables,
                        &mut open,
                        100 * (number as i32 + 1) + turn,
                    );
                }
                _ => {}
            }
        }
        for (id, ..) in open {
            self.mmu.close(id).unwrap();
        }
    }

    /// A plan of any goal. None: it cannot be reached now.
    fn plan(&self) -> Option<Plan> {
        let some = self.mmu.sequences();
        match below(5) {
            0 => self.mmu.plan_below(0.02, 8).ok(),
            1 => self.mmu.plan_free_run(2 + below(8), 8).ok(),
            2 => self.mmu.plan_groups(4, 1 + below(3), 8).ok(),
            // Another thread may have closed it since.
            3 => (some.first()).and_then(|&id| self.mmu.plan_gather(id, 8).ok()),
            _ => self.mmu.plan_compaction(None),
        }
    }

    /// Plans, begins, copies, commits or aborts; what a commit moves was written before the gate.
    fn compactor(&self) {
        this_is_thread(1);
        for _ in 0..4 {
            let flip = self.flip.write().unwrap();
            if let Some(plan) = self.plan() {
                let moves = self.mmu.begin(&plan).unwrap();
                // Between begin and commit others open, fork, close and match.
                self.copy(moves.pairs());
                thread::yield_now();
                if below(3) == 0 {
                    self.mmu.abort(&moves).unwrap();
                } else {
                    self.mmu.commit(&moves).unwrap();
                }
            }
            drop(flip);
            self.mmu.evict(below(3));
        }
    }
}

#[test]
fn moves_meet_fork_append_export_match_and_evict() {
    moves_meet(None);
}

#[test]
fn moves_under_the_guarantee_meet_the_same() {
    moves_meet(Some(0));
}

fn moves_meet(guarantee: Option<u32>) {
    check(move || {
        let mut config = Config::new(BLOCKS as u32, SIZE as u32);
        config.guarantee = guarantee;
        config.max_sequences = 8;
        config.table_nodes = config.default_table_nodes();
        let world = Arc::new(World {
            mmu: Mmu::new(config).unwrap(),
            memory: (0..(BLOCKS + 1) * SIZE)
                .map(|_| AtomicU64::new(0))
                .collect(),
            flip: RwLock::new(()),
        });
        let mut threads = Vec::new();
        for number in [0, 2] {
            let world = Arc::clone(&world);
            threads.push(thread::spawn(move || world.engine(number)));
        }
        let compactor = Arc::clone(&world);
        threads.push(thread::spawn(move || compactor.compactor()));
        for thread in threads {
            thread.join().unwrap();
        }
        world.mmu.validate(None).unwrap();
        world.mmu.evict(u32::MAX);
        world.mmu.validate(None).unwrap();
        assert_eq!(world.mmu.states().empty, BLOCKS as u32);
    });
}
