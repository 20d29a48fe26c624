//! A decode step from Rust alone: 256 sequences of 512 blocks, one token each; rows, lengths and slots
//! are written.
//!
//! Prints `{"us": 12.3, "p99_us": 20.1}`: `prepare`, median and 99th percentile of 2,000 steps.
//!
//! ```text
//! cargo run --release -p kvmmu --example decode_step
//! ```

use std::time::Instant;

use kvmmu::{Config, Keys, Mmu, Rows};

const BATCH: u32 = 256;
const DEPTH: u32 = 512;
const BLOCK: u32 = 16;
const STEPS: usize = 2000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let width = DEPTH + STEPS as u32 / BLOCK + 2;
    let mut config = Config::new(BATCH * width, BLOCK);
    config.max_sequences = BATCH;
    let mmu = Mmu::new(config)?;
    let prompt = (DEPTH - 1) * BLOCK + 1;
    let mut one = Rows::new(&mmu, 1, width as usize, prompt as usize)?;
    let mut tables = one.buffers();
    let mut ids = Vec::new();
    for sequence in 0..BATCH {
        let tokens: Vec<i32> = (0..prompt)
            .map(|i| (i + sequence * prompt) as i32)
            .collect();
        let id = mmu.open(&tokens, Keys::default())?;
        let step = mmu.begin_step();
        let query = [prompt as i32];
        mmu.prepare(
            step,
            &[id],
            Some(&query),
            None,
            &mut one,
            &mut tables.borrow(),
        )?;
        mmu.written(step)?;
        mmu.end_step(step)?;
        ids.push(id);
    }
    let mut rows = Rows::new(&mmu, BATCH as usize, width as usize, BATCH as usize)?;
    let mut tables = rows.buffers();
    let mut times = Vec::with_capacity(STEPS);
    for token in 0..STEPS as i32 + 1 {
        let new = vec![token; BATCH as usize];
        let step = mmu.begin_step();
        let start = Instant::now();
        mmu.prepare(
            step,
            &ids,
            None,
            Some(&new),
            &mut rows,
            &mut tables.borrow(),
        )?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
        mmu.written(step)?;
        mmu.end_step(step)?;
    }
    times.remove(0); // it writes whole rows
    times.sort_by(f64::total_cmp);
    let (median, p99) = (times[STEPS / 2], times[STEPS * 99 / 100]);
    println!("{{\"us\": {median:.2}, \"p99_us\": {p99:.2}}}");
    Ok(())
}
