//! The yardstick of the benchmarks: how long one uncontended atomic add takes on this core, now.
//!
//! Prints `{"ns": 5.9}`, the median of 31 rounds of two million adds, after half a second of
//! warming up. Machines and minutes differ; figures divided by this one can be compared.
//!
//! ```text
//! cargo run --release -p kvmmu --example atomic_add
//! ```

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const ROUNDS: usize = 31;
const ADDS: u32 = 2_000_000;

fn nanoseconds_an_add(word: &AtomicU64) -> f64 {
    let start = Instant::now();
    for _ in 0..ADDS {
        black_box(word).fetch_add(1, Ordering::AcqRel);
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(ADDS)
}

fn main() {
    let word = AtomicU64::new(0);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(500) {
        nanoseconds_an_add(&word);
    }
    let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| nanoseconds_an_add(&word)).collect();
    rounds.sort_by(f64::total_cmp);
    println!("{{\"ns\": {:.3}}}", rounds[ROUNDS / 2]);
}
