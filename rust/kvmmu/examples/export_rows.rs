//! Exports of a full table: 256 rows of 8192 blocks, every row of another sequence than before; and
//! of 256 rows that have one new block each.
//!
//! Prints `{"us": 1234.5, "memcpy_us": 567.8, "new_us": 6.7}`, medians: the whole table, a copy of
//! as many bytes, the new blocks alone.
//!
//! ```text
//! cargo run --release -p kvmmu --example export_rows
//! ```

use std::hint::black_box;
use std::time::Instant;

use kvmmu::{Config, Keys, Mmu, Rows};

const BATCH: u32 = 256;
const DEPTH: u32 = 8192;
const BLOCK: u32 = 16;
const ROUNDS: u32 = 25;

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64() * 1e6
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let width = DEPTH + ROUNDS + 1;
    let mut config = Config::new(BATCH * width, BLOCK);
    config.max_sequences = BATCH;
    config.prefix_caching = false;
    let mmu = Mmu::new(config)?;
    let prompt = vec![1; (DEPTH * BLOCK) as usize];
    let open = |_| mmu.open(&prompt, Keys::default());
    let mut ids = (0..BATCH).map(open).collect::<Result<Vec<i64>, _>>()?;
    let mut rows = Rows::new(&mmu, BATCH as usize, width as usize, 1)?;
    let mut tables = rows.buffers();
    let source = tables.block_table.clone();
    let mut target = vec![0; source.len()];
    let (mut whole, mut copy, mut new) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        ids.rotate_left(1);
        let mut buffers = tables.borrow();
        whole.push(timed(|| {
            mmu.export(&ids, &mut rows, &mut buffers).expect("it fits");
        }));
        copy.push(timed(|| {
            target.copy_from_slice(&source);
            black_box(&mut target);
        }));
    }
    for _ in 0..ROUNDS {
        for &id in &ids {
            mmu.append(id, &[1; BLOCK as usize])?;
        }
        let mut buffers = tables.borrow();
        new.push(timed(|| {
            mmu.export(&ids, &mut rows, &mut buffers).expect("it fits");
        }));
    }
    println!(
        "{{\"us\": {:.1}, \"memcpy_us\": {:.1}, \"new_us\": {:.2}}}",
        median(whole),
        median(copy),
        median(new)
    );
    Ok(())
}
