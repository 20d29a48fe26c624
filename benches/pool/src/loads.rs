//! What a contender does in its turn.
//!
//! `repeat` and `bulk` are the access patterns of LLFree's own benchmark: claim and release one at a
//! time; claim many one by one, then release them all one by one.

use std::hint::black_box;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::allocator::{Allocator, Unit};
use crate::workers::Load;

/// Claims between two looks at the clock: the look costs less than 1 % of them.
const STRIDE: u32 = 256;

fn nanoseconds(time: Duration, units: u64) -> f64 {
    time.as_secs_f64() * 1e9 / units as f64
}

/// Claims one and releases it. One part: the pair.
pub struct Repeat<'a, A, U>(&'a A, PhantomData<U>);

/// Claims `count` one by one, then releases them in the same order. Two parts: a claim, a release.
pub struct Bulk<'a, A, U>(&'a A, usize, PhantomData<U>);

/// Claims `count` by one call and releases them by one call. Two parts: a block each way.
pub struct Batch<'a, A>(pub &'a A, pub u32);

/// Takes one more reference of each block by one call and gives it back by one call: what a prefix
/// that is found again costs. Two parts: a block each way.
pub struct Shared<'a>(pub &'a kvmmu::pool::Pool, pub Vec<u32>);

/// Adds to a word that no other thread knows: what a second thread costs on this machine. One part.
pub struct PrivateLoop;

impl<'a, A, U> Repeat<'a, A, U> {
    pub fn new(allocator: &'a A) -> Self {
        Self(allocator, PhantomData)
    }
}

impl<'a, A, U> Bulk<'a, A, U> {
    pub fn new(allocator: &'a A, count: usize) -> Self {
        Self(allocator, count, PhantomData)
    }
}

impl<A: Allocator, U: Unit<A>> Load for Repeat<'_, A, U> {
    fn run(&self, thread: usize, window: Duration) -> Vec<f64> {
        let start = Instant::now();
        let mut pairs = 0;
        loop {
            for _ in 0..STRIDE {
                let first = U::claim(self.0, thread).expect("one is empty");
                U::release(self.0, thread, black_box(first));
            }
            pairs += u64::from(STRIDE);
            let spent = start.elapsed();
            if spent >= window {
                return vec![nanoseconds(spent, pairs)];
            }
        }
    }
}

impl<A: Allocator, U: Unit<A>> Load for Bulk<'_, A, U> {
    fn run(&self, thread: usize, window: Duration) -> Vec<f64> {
        let mut held = Vec::with_capacity(self.1);
        halves(window, self.1 as u64, || {
            held.clear();
            let start = Instant::now();
            for _ in 0..self.1 {
                held.push(U::claim(self.0, thread).expect("so many are empty"));
            }
            let claimed = Instant::now();
            for &first in &held {
                U::release(self.0, thread, first);
            }
            (claimed - start, claimed.elapsed())
        })
    }
}

impl<A: Allocator> Load for Batch<'_, A> {
    fn run(&self, thread: usize, window: Duration) -> Vec<f64> {
        let mut held = Vec::with_capacity(self.1 as usize);
        halves(window, u64::from(self.1), || {
            held.clear();
            let start = Instant::now();
            self.0.claim_batch(thread, self.1, &mut held);
            let claimed = Instant::now();
            self.0.release_batch(thread, black_box(&held));
            (claimed - start, claimed.elapsed())
        })
    }
}

impl Load for Shared<'_> {
    fn run(&self, _thread: usize, window: Duration) -> Vec<f64> {
        halves(window, self.1.len() as u64, || {
            let start = Instant::now();
            self.0.retain(&self.1).expect("blocks that are published");
            let retained = Instant::now();
            (self.0.release_batch(&self.1)).expect("references that were just taken");
            (retained - start, retained.elapsed())
        })
    }
}

/// Repeats `pass`, which says how long each of its halves took, for `window`.
fn halves(
    window: Duration,
    units: u64,
    mut pass: impl FnMut() -> (Duration, Duration),
) -> Vec<f64> {
    let (mut claiming, mut releasing, mut all) = (Duration::ZERO, Duration::ZERO, 0);
    while claiming + releasing < window {
        let (claim, release) = pass();
        claiming += claim;
        releasing += release;
        all += units;
    }
    vec![nanoseconds(claiming, all), nanoseconds(releasing, all)]
}

impl Load for PrivateLoop {
    fn run(&self, _thread: usize, window: Duration) -> Vec<f64> {
        // On this thread's own stack, far from any other thread's.
        let word = AtomicU64::new(0);
        let start = Instant::now();
        let mut adds = 0;
        loop {
            for _ in 0..STRIDE {
                black_box(&word).fetch_add(1, Ordering::Relaxed);
            }
            adds += u64::from(STRIDE);
            let spent = start.elapsed();
            if spent >= window {
                return vec![nanoseconds(spent, adds)];
            }
        }
    }
}
