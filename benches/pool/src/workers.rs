//! How threads are timed: contenders in turn, all threads of a turn at once, medians over rounds.
//!
//! What lives here: pinned threads that meet before each turn, and the rounds. What never lives
//! here: what a contender does in its turn ([`crate::loads`]).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// One contender's work in its turn.
pub trait Load: Sync {
    /// Works for about `window` as thread number `thread`; nanoseconds a unit, one figure for each
    /// part that is timed apart.
    fn run(&self, thread: usize, window: Duration) -> Vec<f64>;
}

/// How long and how often.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Turns of each contender that count; one more, the first, does not.
    pub rounds: usize,
    /// Length of a turn.
    pub window: Duration,
}

/// Logical CPUs that this process may run on.
pub fn cpus() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else {
        return Vec::new();
    };
    (0..CpuSet::count())
        .filter(|&cpu| set.is_set(cpu).unwrap_or(false))
        .collect()
}

/// Keeps the calling thread on one of the CPUs; where that is refused it runs anywhere.
pub fn pin(thread: usize, cpus: &[usize]) {
    if let Some(&cpu) = cpus.get(thread % cpus.len().max(1)) {
        let mut set = CpuSet::new();
        if set.set(cpu).is_ok() {
            let _ = sched_setaffinity(Pid::from_raw(0), &set);
        }
    }
}

/// A barrier that does not sleep: a thread that has to be woken would start late.
struct Meeting {
    arrived: AtomicUsize,
    threads: usize,
}

impl Meeting {
    /// Returns when all threads have come `turn` times (from 1).
    fn wait(&self, turn: usize) {
        // AcqRel and Acquire: what was done before the meeting is seen after it.
        self.arrived.fetch_add(1, Ordering::AcqRel);
        let mut spins = 0u32;
        while self.arrived.load(Ordering::Acquire) < turn * self.threads {
            spins += 1;
            if spins.is_multiple_of(1 << 14) {
                thread::yield_now(); // another process may hold the core of the one we wait for
            }
            std::hint::spin_loop();
        }
    }
}

/// Keeps `threads` cores busy for a while: sleeping cores clock low and share a physical core.
pub fn warm(threads: usize, time: Duration) {
    let cpus = cpus();
    thread::scope(|scope| {
        for thread in 0..threads {
            let cpus = &cpus;
            scope.spawn(move || {
                pin(thread, cpus);
                let start = Instant::now();
                while start.elapsed() < time {
                    std::hint::spin_loop();
                }
            });
        }
    });
}

/// Runs every load once a round, in turn, on `threads` threads. For each load and part: the median
/// over the rounds of the mean over the threads.
pub fn measure(loads: &[&dyn Load], threads: usize, effort: Effort) -> Vec<Vec<f64>> {
    let cpus = cpus();
    let meeting = Meeting {
        arrived: AtomicUsize::new(0),
        threads,
    };
    let rounds_of = |thread: usize| {
        pin(thread, &cpus);
        let mut turn = 0;
        let mut found: Vec<Vec<Vec<f64>>> = vec![Vec::new(); loads.len()];
        for _ in 0..=effort.rounds {
            for (load, found) in loads.iter().zip(&mut found) {
                turn += 1;
                meeting.wait(turn);
                found.push(load.run(thread, effort.window));
            }
        }
        found
    };
    let by_thread: Vec<_> = thread::scope(|scope| {
        let rounds_of = &rounds_of;
        let running: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || rounds_of(thread)))
            .collect();
        running
            .into_iter()
            .map(|thread| thread.join().expect("a worker does not panic"))
            .collect()
    });
    let figure = |load: usize, part: usize| {
        let round = |round: usize| {
            by_thread
                .iter()
                .map(|found| found[load][round][part])
                .sum::<f64>()
                / threads as f64
        };
        median((1..=effort.rounds).map(round).collect())
    };
    (0..loads.len())
        .map(|load| {
            let parts = by_thread[0][load][0].len();
            (0..parts).map(|part| figure(load, part)).collect()
        })
        .collect()
}

/// The middle value.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
