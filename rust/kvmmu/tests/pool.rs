//! The pool against a model: every public verb, in pools of every small geometry of windows, with
//! a recount after every operation; and the same verbs by several threads at once.
//!
//! `KVMMU_SEED` replays a thread run, `PROPTEST_CASES` lengthens the property test.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};

use kvmmu::{End, Error, Placement, Pool, PoolConfig, State, Zone};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Op {
    Claim,
    Batch(u32, bool),
    Page(u32, bool),
    Run(u32),
    Exact(u32, u32),
    Like(Vec<u32>),
    For(u32, u32),
    Release(u32),
    ReleaseBatch(Vec<u32>),
    ReleaseHeld(usize, u32),
    ReleasePage(usize),
    ReleaseFor(u32),
    Retain(Vec<u32>),
    Revive(Vec<u32>),
    Publish(Vec<u32>),
    Evict(u32),
    Destine(Vec<u32>),
    Undo(Vec<u32>),
    Arrive(Vec<u32>),
    Offline(u32, u32),
    Online(u32, u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// References, and whether published.
    Shared(u32, bool),
    Owner(u32),
    Destined,
    Offline,
}

/// What the pool must be: blocks that are not empty.
#[derive(Debug, Default)]
struct Model {
    span: u32,
    null: Option<u32>,
    held: BTreeMap<u32, Held>,
    pages: Vec<(u32, u32)>,
}

impl Model {
    fn empty(&self) -> Vec<u32> {
        let null = |block: &u32| Some(*block) != self.null;
        (0..self.span)
            .filter(null)
            .filter(|block| !self.held.contains_key(block))
            .collect()
    }

    fn longest(&self) -> u32 {
        let (mut best, mut run, mut last) = (0, 0, u32::MAX - 1);
        for block in self.empty() {
            run = if block == last + 1 { run + 1 } else { 1 };
            best = best.max(run);
            last = block;
        }
        best
    }

    fn has_page(&self, order: u32) -> bool {
        let empty: BTreeSet<u32> = self.empty().into_iter().collect();
        (0..self.span)
            .step_by(1 << order)
            .any(|first| (first..first + (1 << order)).all(|block| empty.contains(&block)))
    }

    fn claimed(&mut self, blocks: &[u32], how: Held) {
        for &block in blocks {
            assert!(
                block < self.span && Some(block) != self.null,
                "block {block} of nowhere"
            );
            assert_eq!(
                self.held.insert(block, how),
                None,
                "block {block} handed out twice"
            );
        }
    }

    /// What a release of these blocks makes of the model; `None` when it must be refused.
    fn released(&self, blocks: &[u32]) -> Option<BTreeMap<u32, Held>> {
        let mut held = self.held.clone();
        for block in blocks {
            match held.get(block).copied() {
                Some(Held::Shared(n @ 1.., published)) => {
                    if n == 1 && !published {
                        held.remove(block);
                    } else {
                        held.insert(*block, Held::Shared(n - 1, published));
                    }
                }
                _ => return None,
            }
        }
        Some(held)
    }
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let few = || prop::collection::vec(0u32..70, 0..6);
    let op = prop_oneof![
        4 => Just(Op::Claim),
        4 => (0u32..40, any::<bool>()).prop_map(|(n, anchor)| Op::Batch(n, anchor)),
        3 => (0u32..6, any::<bool>()).prop_map(|(order, anchor)| Op::Page(order, anchor)),
        2 => (0u32..30).prop_map(Op::Run),
        2 => (0u32..70, 0u32..20).prop_map(|(first, n)| Op::Exact(first, n)),
        2 => prop::collection::vec(0u32..12, 0..5).prop_map(Op::Like),
        1 => (0u32..3, 0u32..5).prop_map(|(owner, n)| Op::For(owner, n)),
        4 => (0u32..70).prop_map(Op::Release),
        2 => few().prop_map(Op::ReleaseBatch),
        6 => (any::<usize>(), 1u32..24).prop_map(|(at, n)| Op::ReleaseHeld(at, n)),
        3 => any::<usize>().prop_map(Op::ReleasePage),
        1 => (0u32..3).prop_map(Op::ReleaseFor),
        2 => few().prop_map(Op::Retain),
        2 => few().prop_map(Op::Revive),
        2 => few().prop_map(Op::Publish),
        2 => (0u32..70).prop_map(Op::Evict),
        1 => few().prop_map(Op::Destine),
        1 => few().prop_map(Op::Undo),
        1 => few().prop_map(Op::Arrive),
        1 => (0u32..70, 0u32..10).prop_map(|(first, n)| Op::Offline(first, n)),
        1 => (0u32..70, 0u32..10).prop_map(|(first, n)| Op::Online(first, n)),
    ];
    prop::collection::vec(op, 1..60)
}

fn zone(anchor: bool) -> Zone {
    if anchor { Zone::Anchor } else { Zone::Body }
}

/// Runs operations on a pool and on the model, and holds one against the other after each.
fn check<const BITS: u32, const WORDS: usize>(
    config: &PoolConfig,
    ops: &[Op],
) -> Result<(), TestCaseError> {
    let pool = Pool::<BITS, WORDS>::new(config).unwrap();
    let null = (config.null_block < config.num_blocks).then_some(config.null_block);
    let mut model = Model {
        span: config.num_blocks + u32::from(null.is_some()),
        null,
        ..Model::default()
    };
    for op in ops {
        step(&pool, &mut model, config, op)?;
        if let Err(broken) = pool.audit() {
            return Err(TestCaseError::fail(format!("after {op:?}: {broken}")));
        }
        for block in 0..model.span {
            let want = match model.held.get(&block) {
                Some(Held::Shared(n, _)) => *n,
                Some(Held::Owner(_)) => 1,
                _ => 0,
            };
            if Some(block) != null {
                prop_assert_eq!(pool.references(block).unwrap(), want, "{:?}, {}", op, block);
            }
        }
        let cached = |held: &&Held| matches!(held, Held::Shared(0, _));
        let states = pool.states();
        prop_assert_eq!(states.empty as usize, model.empty().len());
        let num_cached = model.held.values().filter(cached).count();
        prop_assert_eq!(states.cached as usize, num_cached);
        prop_assert_eq!(states.available, states.empty + states.cached);
    }
    Ok(())
}

fn step<const BITS: u32, const WORDS: usize>(
    pool: &Pool<BITS, WORDS>,
    model: &mut Model,
    config: &PoolConfig,
    op: &Op,
) -> Result<(), TestCaseError> {
    let empty = model.empty();
    let private = Held::Shared(1, false);
    let max_order = Pool::<BITS, WORDS>::MAX_ORDER;
    match op {
        Op::Claim => {
            let got = pool.claim();
            prop_assert_eq!(got.is_some(), !empty.is_empty());
            if config.placement == Placement::AddressOrder
                && config.small_from == End::Low
                && config.anchor == 0.0
            {
                prop_assert_eq!(got, empty.first().copied(), "not the lowest");
            }
            model.claimed(got.as_slice(), private);
        }
        Op::Batch(n, anchor) => {
            let mut out = vec![7];
            let done = pool.claim_batch_in(zone(*anchor), *n, &mut out);
            prop_assert_eq!(done.is_ok(), *n as usize <= empty.len());
            prop_assert_eq!(out.len() as u32, if done.is_ok() { n + 1 } else { 1 });
            if let Err(error) = done {
                let told = matches!(error, Error::OutOfBlocks { needed, available, .. }
                    if needed == u64::from(*n) && available == empty.len() as u64);
                prop_assert!(told, "{}", error);
            }
            model.claimed(&out[1..], private);
        }
        Op::Page(order, anchor) => {
            let got = pool.claim_page_in(zone(*anchor), *order);
            let there = *order <= max_order && model.has_page(*order);
            prop_assert_eq!(got.is_some(), there, "order {}", order);
            if let Some(first) = got {
                prop_assert_eq!(first % (1 << order), 0);
                model.claimed(&(first..first + (1 << order)).collect::<Vec<_>>(), private);
                model.pages.push((first, *order));
            }
        }
        Op::Run(n) => {
            let got = pool.claim_run(*n);
            prop_assert_eq!(
                got.is_some(),
                *n > 0 && *n <= model.longest(),
                "run of {}",
                n
            );
            if let Some(first) = got {
                model.claimed(&(first..first + n).collect::<Vec<_>>(), private);
            }
        }
        Op::Exact(first, n) => {
            let range: Vec<u32> = (*first..first + n).collect();
            let there = *n > 0 && range.iter().all(|block| empty.contains(block));
            prop_assert_eq!(pool.claim_exact(*first, *n), there);
            if there {
                model.claimed(&range, private);
            }
        }
        Op::Like(lengths) => {
            let mut out = Vec::new();
            let done = pool.claim_like(lengths, &mut out).is_ok();
            let sum = lengths.iter().sum::<u32>() as usize;
            prop_assert_eq!(done, sum <= empty.len());
            prop_assert_eq!(out.len(), if done { sum } else { 0 });
            // The first run is whole if any place could hold it.
            let head = lengths.iter().find(|&&n| n > 0).copied().unwrap_or(0);
            if done && head > 0 && head <= model.longest() {
                let whole = out[..head as usize]
                    .windows(2)
                    .all(|two| two[1] == two[0] + 1);
                prop_assert!(whole, "{:?} of {:?}", out, lengths);
            }
            model.claimed(&out, private);
        }
        Op::For(owner, n) => {
            let mut out = Vec::new();
            let done = pool.claim_for(Zone::Body, *owner, *n, &mut out).is_ok();
            prop_assert_eq!(done, *n as usize <= empty.len());
            model.claimed(&out, Held::Owner(*owner));
        }
        Op::Release(block) => {
            let want = model.released(&[*block]);
            prop_assert_eq!(pool.release(*block).is_ok(), want.is_some());
            model.held = want.unwrap_or(std::mem::take(&mut model.held));
        }
        Op::ReleaseBatch(blocks) => release_batch(pool, model, blocks)?,
        Op::ReleaseHeld(at, n) => {
            let held: Vec<u32> = model.held.keys().copied().collect();
            if !held.is_empty() {
                let start = at % held.len();
                let end = held.len().min(start + *n as usize);
                release_batch(pool, model, &held[start..end])?;
            }
        }
        Op::ReleasePage(at) => {
            if !model.pages.is_empty() {
                let at = at % model.pages.len();
                let (first, order) = model.pages.swap_remove(at);
                let blocks: Vec<u32> = (first..first + (1 << order)).collect();
                let want = model.released(&blocks);
                let done = pool.release_page(first, order);
                prop_assert_eq!(done.is_ok(), want.is_some(), "page {} of {}", first, order);
                model.held = want.unwrap_or(std::mem::take(&mut model.held));
            }
        }
        Op::ReleaseFor(owner) => {
            let held = model.held.iter();
            let mine: Vec<u32> = held
                .filter(|(_, held)| **held == Held::Owner(*owner))
                .map(|(block, _)| *block)
                .collect();
            if let Some(&first) = mine.first() {
                prop_assert!(pool.release_for(owner + 1, &mine).is_err());
                prop_assert!(pool.release_for(*owner, &[first, first]).is_err());
            }
            prop_assert!(pool.release_for(*owner, &mine).is_ok());
            model.held.retain(|block, _| !mine.contains(block));
        }
        Op::Retain(blocks) => {
            let mut held = model.held.clone();
            let mut good = true;
            for block in blocks {
                match held.get_mut(block) {
                    Some(Held::Shared(n @ 1.., _)) => *n += 1,
                    _ => good = false,
                }
            }
            prop_assert_eq!(pool.retain(blocks).is_ok(), good);
            if good {
                model.held = held;
            }
        }
        Op::Revive(blocks) => {
            let mut held = model.held.clone();
            let mut good = true;
            for block in blocks {
                match held.get_mut(block) {
                    Some(Held::Shared(n, true)) => *n += 1,
                    _ => good = false,
                }
            }
            prop_assert_eq!(pool.revive(blocks).is_ok(), good);
            if good {
                model.held = held;
            }
        }
        Op::Publish(blocks) => {
            let may = |block: &u32| matches!(model.held.get(block), Some(Held::Shared(1.., _)));
            let good = blocks.iter().all(may);
            prop_assert_eq!(pool.publish(blocks).is_ok(), good);
            if good {
                for block in blocks {
                    if let Some(Held::Shared(_, published)) = model.held.get_mut(block) {
                        *published = true;
                    }
                }
            }
        }
        Op::Evict(block) => {
            let cached = model.held.get(block) == Some(&Held::Shared(0, true));
            prop_assert_eq!(pool.evict(*block), cached);
            if cached {
                model.held.remove(block);
            }
        }
        Op::Destine(blocks) => {
            let distinct: BTreeSet<u32> = blocks.iter().copied().collect();
            let there = distinct.len() == blocks.len() && blocks.iter().all(|b| empty.contains(b));
            prop_assert_eq!(pool.destine(blocks).is_ok(), there);
            if there {
                model.claimed(blocks, Held::Destined);
            }
        }
        Op::Undo(blocks) | Op::Arrive(blocks) => {
            let distinct: BTreeSet<u32> = blocks.iter().copied().collect();
            let destined = |block| model.held.get(block) == Some(&Held::Destined);
            let there = distinct.len() == blocks.len() && blocks.iter().all(destined);
            let undo = matches!(op, Op::Undo(_));
            let done = if undo {
                pool.undo(blocks)
            } else {
                pool.arrive(blocks)
            };
            prop_assert_eq!(done.is_ok(), there);
            for block in blocks.iter().filter(|_| there) {
                match undo {
                    true => model.held.remove(block),
                    false => model.held.insert(*block, private),
                };
            }
        }
        Op::Offline(first, n) => {
            let range: Vec<u32> = (*first..first + n).collect();
            let there = *n > 0 && range.iter().all(|block| empty.contains(block));
            prop_assert_eq!(pool.offline(*first, *n).is_ok(), there);
            if there {
                model.claimed(&range, Held::Offline);
            }
        }
        Op::Online(first, n) => {
            let mut range = *first..first + n;
            let offline = |block| model.held.get(&block) == Some(&Held::Offline);
            let there = *n > 0 && range.clone().all(offline);
            prop_assert_eq!(pool.online(*first, *n).is_ok(), there);
            if there {
                range.all(|block| model.held.remove(&block).is_some());
            }
        }
    }
    Ok(())
}

fn release_batch<const BITS: u32, const WORDS: usize>(
    pool: &Pool<BITS, WORDS>,
    model: &mut Model,
    blocks: &[u32],
) -> Result<(), TestCaseError> {
    let want = model.released(blocks);
    let done = pool.release_batch(blocks);
    prop_assert_eq!(done.is_ok(), want.is_some(), "{:?}: {:?}", blocks, done);
    if let Some(held) = want {
        model.held = held;
    }
    Ok(())
}

fn configs() -> impl Strategy<Value = PoolConfig> {
    let placement = prop_oneof![
        3 => Just(Placement::AddressOrder),
        1 => Just(Placement::Fullest),
        1 => Just(Placement::Fifo),
        1 => (0u64..9).prop_map(|seed| Placement::Scatter { seed }),
    ];
    let end = prop_oneof![Just(End::Low), Just(End::High)];
    let anchor = prop_oneof![Just(0.0), Just(0.3)];
    (
        1u32..70,
        any::<prop::sample::Index>(),
        any::<bool>(),
        placement,
        end,
        anchor,
    )
        .prop_map(
            |(num_blocks, null, middle, placement, small_from, anchor)| PoolConfig {
                null_block: if middle {
                    null.index(num_blocks as usize) as u32
                } else {
                    num_blocks
                },
                placement,
                small_from,
                anchor,
                ..PoolConfig::new(num_blocks)
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig {
        // The whole file takes a few seconds; `PROPTEST_CASES` overrides it.
        cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(2000),
        ..ProptestConfig::default()
    })]

    #[test]
    fn small_windows_agree_with_the_model(config in configs(), ops in ops()) {
        check::<4, 2>(&config, &ops)?;
        check::<8, 4>(&config, &ops)?;
    }

    #[test]
    fn the_shipped_geometry_agrees_with_the_model(config in configs(), ops in ops()) {
        check::<64, 8>(&config, &ops)?;
    }
}

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * u128::from(n)) >> 64) as u32
    }
}

fn from_env(name: &str, default: u64) -> u64 {
    let value = std::env::var(name).ok();
    value.map_or(default, |text| text.parse().expect(name))
}

/// Threads claim and release in every shape; a map of owners says who has which block.
fn contend<const BITS: u32, const WORDS: usize>(placement: Placement, num_blocks: u32) {
    let seed = from_env("KVMMU_SEED", 1);
    let rounds = from_env("KVMMU_ROUNDS", 20_000);
    println!("KVMMU_SEED={seed} KVMMU_ROUNDS={rounds} {placement:?} {num_blocks}");
    let pool = Pool::<BITS, WORDS>::new(&PoolConfig {
        placement,
        ..PoolConfig::new(num_blocks)
    })
    .unwrap();
    let owners: Vec<AtomicU32> = (0..num_blocks).map(|_| AtomicU32::new(0)).collect();
    let (pool, owners) = (&pool, &owners);
    std::thread::scope(|scope| {
        for thread in 1..=4u32 {
            scope.spawn(move || {
                let mut rng = Rng(seed * 1000 + u64::from(thread));
                let mut held: Vec<Vec<u32>> = Vec::new();
                for _ in 0..rounds {
                    let release = held.len() > 6 || rng.below(100) < 45;
                    if release && !held.is_empty() {
                        let at = rng.below(held.len() as u32) as usize;
                        let blocks = held.swap_remove(at);
                        for &block in &blocks {
                            let before = owners[block as usize].swap(0, Ordering::Relaxed);
                            assert_eq!(before, thread, "block {block} had another owner");
                        }
                        match blocks.len() {
                            1 => pool.release(blocks[0]).unwrap(),
                            n if n.is_power_of_two()
                                && blocks[0].is_multiple_of(n as u32)
                                && blocks.windows(2).all(|two| two[1] == two[0] + 1)
                                && n.ilog2() <= Pool::<BITS, WORDS>::MAX_ORDER =>
                            {
                                pool.release_page(blocks[0], n.ilog2()).unwrap();
                            }
                            _ => pool.release_batch(&blocks).unwrap(),
                        }
                        continue;
                    }
                    let mut blocks = Vec::new();
                    let n = 1 + rng.below(num_blocks / 6);
                    match rng.below(7) {
                        0 | 1 => blocks.extend(pool.claim()),
                        2 => drop(pool.claim_batch(n, &mut blocks)),
                        3 => {
                            let order = rng.below(Pool::<BITS, WORDS>::MAX_ORDER + 1);
                            if let Some(first) = pool.claim_page(order) {
                                assert_eq!(first % (1 << order), 0);
                                blocks.extend(first..first + (1 << order));
                            }
                        }
                        4 => {
                            if let Some(first) = pool.claim_run(n) {
                                blocks.extend(first..first + n);
                            }
                        }
                        5 => {
                            let first = rng.below(num_blocks - n);
                            if pool.claim_exact(first, n) {
                                blocks.extend(first..first + n);
                            }
                        }
                        _ => drop(pool.claim_like(&[n / 2, 1, n / 3], &mut blocks)),
                    }
                    for &block in &blocks {
                        let before = owners[block as usize].swap(thread, Ordering::Relaxed);
                        assert_eq!(before, 0, "block {block} is handed out twice");
                    }
                    if !blocks.is_empty() {
                        held.push(blocks);
                    }
                }
                for blocks in held {
                    for &block in &blocks {
                        owners[block as usize].store(0, Ordering::Relaxed);
                    }
                    pool.release_batch(&blocks).unwrap();
                }
            });
        }
    });
    pool.audit().unwrap();
    assert_eq!(pool.empty(), num_blocks);
}

#[test]
fn threads_never_share_a_block() {
    for placement in [
        Placement::AddressOrder,
        Placement::Fullest,
        Placement::Fifo,
        Placement::Scatter { seed: 3 },
    ] {
        contend::<4, 2>(placement, 60);
        contend::<64, 8>(placement, 3000);
    }
}

#[test]
fn of_two_releases_of_one_block_one_is_refused() {
    let pool = Pool::<64, 8>::new(&PoolConfig::new(1200)).unwrap();
    for round in 0..2000u32 {
        let mut blocks = Vec::new();
        pool.claim_batch(1 + round % 200, &mut blocks).unwrap();
        let blocks = &blocks;
        let wins: u32 = std::thread::scope(|scope| {
            let pool = &pool;
            let release = move || {
                let won = |block: &&u32| pool.release(**block).is_ok();
                blocks.iter().filter(won).count() as u32
            };
            let threads = [scope.spawn(release), scope.spawn(release)];
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum()
        });
        assert_eq!(wins, blocks.len() as u32);
        pool.audit().unwrap();
        if round == 50 && std::env::var("KVMMU_ROUNDS").is_err() {
            break;
        }
    }
}

#[test]
fn a_cached_block_is_revived_or_evicted_never_both() {
    let pool = Pool::<64, 8>::new(&PoolConfig::new(64)).unwrap();
    for _ in 0..from_env("KVMMU_ROUNDS", 300) {
        let block = pool.claim().unwrap();
        pool.publish(&[block]).unwrap();
        pool.release(block).unwrap();
        assert_eq!((pool.states().cached, pool.references(block)), (1, Ok(0)));
        let (revived, evicted) = std::thread::scope(|scope| {
            let revived = scope.spawn(|| pool.revive(&[block]).is_ok());
            let evicted = scope.spawn(|| pool.evict(block));
            (revived.join().unwrap(), evicted.join().unwrap())
        });
        assert!(revived != evicted, "revived: {revived}, evicted: {evicted}");
        pool.audit().unwrap();
        if revived {
            pool.release(block).unwrap();
            assert!(pool.evict(block));
        }
        assert_eq!(pool.states().available, 64);
    }
}

#[test]
fn a_full_count_refuses_one_more_and_keeps_the_others() {
    let pool = Pool::<64, 8>::new(&PoolConfig::new(8)).unwrap();
    let (a, b) = (pool.claim().unwrap(), pool.claim().unwrap());
    for _ in 1..70_000 {
        pool.retain(&[a]).unwrap();
    }
    assert_eq!(pool.references(a), Ok(70_000));
    // All or none: the empty block 5 undoes the others.
    assert!(pool.retain(&[a, b, 5]).is_err());
    assert_eq!(
        (pool.references(a), pool.references(b)),
        (Ok(70_000), Ok(1))
    );
    assert!(pool.release_batch(&[b, b]).is_err());
    assert_eq!(pool.references(b), Ok(1));
}

#[test]
fn bad_settings_and_arguments_are_named() {
    let told = |config: PoolConfig| Pool::<64, 8>::new(&config).unwrap_err().to_string();
    let of = PoolConfig::new;
    assert!(told(of(0)).starts_with("num_blocks = 0: allowed is 1 to"));
    assert!(
        told(PoolConfig {
            null_block: 9,
            ..of(8)
        })
        .contains("null_block = 9")
    );
    for anchor in [1.0, -0.1, f64::NAN] {
        assert!(told(PoolConfig { anchor, ..of(8) }).contains("anchor"));
    }
    let pool = Pool::<64, 8>::new(&PoolConfig {
        null_block: 3,
        ..of(8)
    })
    .unwrap();
    for block in [3, 9, u32::MAX] {
        assert!(pool.release(block).is_err() && pool.release_batch(&[block]).is_err());
        assert!(!pool.claim_exact(block, 1) && pool.offline(block, 1).is_err());
    }
    assert!(
        pool.claim_for(Zone::Body, u32::MAX, 1, &mut Vec::new())
            .is_err()
    );
    assert_eq!(
        (pool.claim_page(10), pool.claim_page(u32::MAX)),
        (None, None)
    );
    assert!(pool.release_page(0, 40).is_err() && pool.release_page(1, 1).is_err());
    assert_eq!((pool.claim_run(0), pool.claim_run(u32::MAX)), (None, None));
    assert!(!pool.claim_exact(0, u32::MAX) && !pool.claim_exact(7, u32::MAX));
    assert!(
        pool.claim_like(&[u32::MAX, u32::MAX], &mut Vec::new())
            .is_err()
    );
    assert_eq!(pool.states().empty, 8);
    assert_eq!(State::Empty, State::Empty);
}
