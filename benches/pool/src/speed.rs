//! How long a claim and a release take: one block, a page, a batch; by one thread and by several.

use crate::allocator::{Block, Page, fill, scatter};
use crate::contenders::{Contenders, name};
use crate::loads::{Batch, Bulk, PrivateLoop, Repeat, Shared};
use crate::ours::Ours;
use crate::report::Figure;
use crate::workers::{Effort, Load, measure};
use crate::{loads_of_all, loads_of_those_with_pages};

/// Blocks of a 128k prompt at 16 tokens a block.
const BATCH: u32 = 8192;
/// Blocks or pages that `bulk` holds at most; a thread holds a share of them.
const BULK: usize = 1024;
const BULK_HUGE: usize = 64;

type Named<'a> = Vec<(&'static str, Box<dyn Load + 'a>)>;

/// Everything here for each number of threads.
pub fn run(num_blocks: u32, threads: &[usize], seed: u64, effort: Effort) {
    for &threads in threads {
        two_loops(threads, effort);
        one_block(num_blocks, threads, seed, effort);
        pages(num_blocks, threads, effort);
        batches(num_blocks, threads, seed, effort);
    }
    published(num_blocks, effort);
}

/// The yardstick for several threads: what they cost each other while they share nothing.
pub fn two_loops(threads: usize, effort: Effort) {
    let private: Named = vec![("machine", Box::new(PrivateLoop))];
    print(
        "private loop",
        "repeat",
        threads,
        &["one add"],
        &private,
        effort,
    );
}

/// One block at a time from a pool that is half and 99 % full, scattered.
pub fn one_block(num_blocks: u32, threads: usize, seed: u64, effort: Effort) {
    for (measure, empty) in [
        ("one block, half full", num_blocks / 2),
        ("one block, 99 % full", num_blocks / 100),
    ] {
        let contenders = Contenders::new(num_blocks, threads);
        for (_, allocator) in contenders.all() {
            scatter(
                allocator,
                num_blocks,
                empty,
                &mut fastrand::Rng::with_seed(seed),
            );
        }
        let repeat = loads_of_all!(contenders, |a| Repeat::<_, Block>::new(a));
        print(measure, "repeat", threads, &["pair"], &repeat, effort);
        let count = BULK.min(empty as usize / 2) / threads;
        let bulk = loads_of_all!(contenders, |a| Bulk::<_, Block>::new(a, count));
        print(
            measure,
            "bulk",
            threads,
            &["claim", "release"],
            &bulk,
            effort,
        );
    }
}

fn pages(num_blocks: u32, threads: usize, effort: Effort) {
    let contenders = Contenders::new(num_blocks, threads);
    for (_, allocator) in contenders.all() {
        fill(allocator, num_blocks, num_blocks / 2);
    }
    let repeat = loads_of_those_with_pages!(contenders, |a| Repeat::<_, Page<2>>::new(a));
    print(
        "page of order 2",
        "repeat",
        threads,
        &["pair"],
        &repeat,
        effort,
    );
    let count = BULK / threads;
    let bulk = loads_of_those_with_pages!(contenders, |a| Bulk::<_, Page<2>>::new(a, count));
    print(
        "page of order 2",
        "bulk",
        threads,
        &["claim", "release"],
        &bulk,
        effort,
    );
    let repeat = loads_of_those_with_pages!(contenders, |a| Repeat::<_, Page<9>>::new(a));
    print(
        "page of order 9",
        "repeat",
        threads,
        &["pair"],
        &repeat,
        effort,
    );
    // Half of the empty pages at most, and each thread one.
    let count = (BULK_HUGE.min(num_blocks as usize / 2048) / threads).max(1);
    let bulk = loads_of_those_with_pages!(contenders, |a| Bulk::<_, Page<9>>::new(a, count));
    print(
        "page of order 9",
        "bulk",
        threads,
        &["claim", "release"],
        &bulk,
        effort,
    );
}

fn batches(num_blocks: u32, threads: usize, seed: u64, effort: Effort) {
    let n = BATCH.min(num_blocks / 4 / threads as u32);
    let parts = ["claim", "release"];
    let filled = Contenders::new(num_blocks, threads);
    for (_, allocator) in filled.all() {
        fill(allocator, num_blocks, num_blocks / 2);
    }
    let batch = loads_of_all!(filled, |a| Batch(a, n));
    print(
        &format!("batch of {n}, filled once"),
        "batch",
        threads,
        &parts,
        &batch,
        effort,
    );
    drop(batch);
    drop(filled);
    let scattered = Contenders::new(num_blocks, threads);
    for (_, allocator) in scattered.all() {
        scatter(
            allocator,
            num_blocks,
            num_blocks / 2,
            &mut fastrand::Rng::with_seed(seed),
        );
    }
    let batch = loads_of_all!(scattered, |a| Batch(a, n));
    print(
        &format!("batch of {n}, scattered"),
        "batch",
        threads,
        &parts,
        &batch,
        effort,
    );
}

/// Blocks that an index of contents knows: still held by somebody, and cached. Only ours counts
/// references.
fn published(num_blocks: u32, effort: Effort) {
    let n = BATCH.min(num_blocks / 4);
    for (state, cached) in [
        ("published and held", false),
        ("published and cached", true),
    ] {
        let Ours(pool) = Ours::new(num_blocks);
        let mut blocks = Vec::new();
        (pool.claim_batch(n, &mut blocks)).expect("a new pool has every block");
        pool.publish(&blocks).expect("blocks in use");
        if cached {
            pool.release_batch(&blocks).expect("blocks in use");
        }
        let load: Named = vec![(name::OURS, Box::new(Shared(&pool, blocks)))];
        let measure = format!("batch of {n}, {state}");
        print(&measure, "batch", 1, &["claim", "release"], &load, effort);
    }
}

fn print(of: &str, pattern: &str, threads: usize, parts: &[&str], named: &Named, effort: Effort) {
    let loads: Vec<&dyn Load> = named.iter().map(|(_, load)| &**load).collect();
    for ((who, _), values) in named.iter().zip(measure(&loads, threads, effort)) {
        for (part, value) in parts.iter().zip(values) {
            let figure = Figure {
                measure: of,
                pattern,
                threads,
                who,
                part,
                unit: "ns",
            };
            figure.print(value);
        }
    }
}
