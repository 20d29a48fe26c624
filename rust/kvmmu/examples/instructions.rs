//! What `scripts/instructions` counts the instructions of: one operation of the core, so many times.
//!
//! ```text
//! instructions OPERATION TIMES
//! ```
//!
//! Run twice under callgrind with different TIMES, the difference is what the operation itself takes:
//! set-up and the program's start drop out. One thread, no clock, no randomness: the count repeats.

use std::hint::black_box;

use kvmmu::pool::{Pool, PoolConfig};
use kvmmu::{Config, Keys, Mmu, Rows};

const BLOCKS: u32 = 1 << 16;
const BATCH: u32 = 8192;
const ROWS: u32 = 256;
const DEPTH: u32 = 64;
const BLOCK: u32 = 16;

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Half full: the lower half was claimed, then every second block of it given back in turn.
fn used_pool() -> Result<Pool, Box<dyn std::error::Error>> {
    let pool: Pool = Pool::new(&PoolConfig::new(BLOCKS))?;
    let mut held = Vec::new();
    pool.claim_batch(BLOCKS / 2, &mut held)?;
    for block in held.iter().step_by(2) {
        pool.release(*block)?;
    }
    Ok(pool)
}

fn one_block(times: u32) -> Outcome {
    let pool = used_pool()?;
    for _ in 0..times {
        let block = pool.claim().ok_or("the pool is empty")?;
        pool.release(black_box(block))?;
    }
    Ok(())
}

fn batch(times: u32) -> Outcome {
    let pool: Pool = Pool::new(&PoolConfig::new(BLOCKS))?;
    let mut held = Vec::with_capacity(BATCH as usize);
    for _ in 0..times {
        held.clear();
        pool.claim_batch(BATCH, &mut held)?;
        pool.release_batch(black_box(&held))?;
    }
    Ok(())
}

fn page(order: u32, times: u32) -> Outcome {
    let pool = used_pool()?;
    for _ in 0..times {
        let first = pool.claim_page(order).ok_or("no page is empty")?;
        pool.release_page(black_box(first), order)?;
    }
    Ok(())
}

/// A decode step: `prepare` of 256 rows and what belongs to it.
fn prepare(times: u32) -> Outcome {
    let width = DEPTH + times / BLOCK + 2;
    let mut config = Config::new(ROWS * width, BLOCK);
    config.max_sequences = ROWS;
    let mmu = Mmu::new(config)?;
    let prompt = (DEPTH - 1) * BLOCK + 1;
    let mut ids = Vec::new();
    for sequence in 0..ROWS {
        let tokens: Vec<i32> = (0..prompt)
            .map(|i| (i + sequence * prompt) as i32)
            .collect();
        ids.push(mmu.open(&tokens, Keys::default())?);
    }
    let all = (ROWS * prompt) as usize;
    let mut rows = Rows::new(&mmu, ROWS as usize, width as usize, all)?;
    let mut tables = rows.buffers();
    let queries = vec![prompt as i32; ROWS as usize];
    for token in 0..=times as i32 {
        let new = vec![token; ROWS as usize];
        let (query, new) = match token {
            0 => (Some(&queries[..]), None), // the prompts
            _ => (None, Some(&new[..])),
        };
        let step = mmu.begin_step();
        mmu.prepare(step, &ids, query, new, &mut rows, &mut tables.borrow())?;
        mmu.written(step)?;
        mmu.end_step(step)?;
    }
    Ok(())
}

fn main() -> Outcome {
    let mut arguments = std::env::args().skip(1);
    let (Some(operation), Some(times)) = (arguments.next(), arguments.next()) else {
        return Err("instructions OPERATION TIMES".into());
    };
    let times = times.parse()?;
    match operation.as_str() {
        "claim+release" => one_block(times),
        "batch" => batch(times),
        "page2" => page(2, times),
        "page9" => page(9, times),
        "step" => prepare(times),
        _ => Err(format!("no operation is called {operation:?}").into()),
    }
}
