//! How long a claim takes while another thread has been stopped in the middle of one.
//!
//! A second thread claims and releases without end. A signal interrupts it at a random moment; the
//! handler notes whether it was inside `claim`, and sleeps. Meanwhile the first thread claims and
//! releases, each claim timed. Only stops inside `claim` count. An allocator that locks makes the
//! first thread wait until the sleeper wakes: such stops are counted apart (`held up`), because in a
//! percentile one claim that waits for a whole stop weighs no more than a short one. A long claim
//! during which the first thread neither slept on its own accord nor burned its core is none: there
//! the kernel gave the core to somebody else. `machine` is the clock alone, timed the same way.
//!
//! The package's only `unsafe` is here: installing the handler.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, compiler_fence};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::pthread::{Pthread, pthread_kill, pthread_self};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::allocator::{Allocator, scatter};
use crate::contenders::Contenders;
use crate::report::Figure;
use crate::workers::{cpus, pin};

/// How long the other thread is stopped.
const STOP: Duration = Duration::from_millis(1);
/// Stops inside `claim` that are wanted, and how many may be tried for one of them.
const WANTED: usize = 100;
const TRIES: usize = 20;

const RUNNING: u8 = 0;
const STOPPED_OUTSIDE: u8 = 1;
const STOPPED_INSIDE: u8 = 2;

static INSIDE: AtomicBool = AtomicBool::new(false);
static OTHER: AtomicU8 = AtomicU8::new(RUNNING);
/// Stops that are over: one that nobody saw must not be waited for.
static OVER: AtomicU64 = AtomicU64::new(0);

extern "C" fn stop(_signal: i32) {
    let state = if INSIDE.load(Ordering::Relaxed) {
        STOPPED_INSIDE
    } else {
        STOPPED_OUTSIDE
    };
    OTHER.store(state, Ordering::Release);
    thread::sleep(STOP); // no more than clock_nanosleep
    OTHER.store(RUNNING, Ordering::Release);
    OVER.fetch_add(1, Ordering::Release);
}

fn install() {
    let action = SigAction::new(
        SigHandler::Handler(stop),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    // SAFETY: the handler touches atomics and sleeps: nothing that it could have interrupted halfway.
    unsafe { sigaction(Signal::SIGUSR1, &action) }.expect("SIGUSR1 may be handled");
}

/// Times by the nanosecond. Of fixed size, so that noting a time costs the next one nothing.
struct Times {
    /// How many took so many nanoseconds; the last cell has those that took longer.
    counts: Vec<u64>,
}

impl Times {
    fn new() -> Self {
        Self {
            counts: vec![0; 1 << 16],
        }
    }

    fn note(&mut self, time: Duration) {
        let cell = (time.as_nanos() as usize).min(self.counts.len() - 1);
        self.counts[cell] += 1;
    }

    fn add(&mut self, others: &Times) {
        for (mine, other) in self.counts.iter_mut().zip(&others.counts) {
            *mine += other;
        }
    }

    fn len(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The time that this share of all does not exceed. The clock may tick in steps of many
    /// nanoseconds; within a step times count as evenly spread.
    fn quantile(&self, share: f64) -> f64 {
        let ticks = || (0..self.counts.len()).filter(|&cell| self.counts[cell] > 0);
        let step = ticks().zip(ticks().skip(1)).map(|(a, b)| b - a).min();
        let step = step.unwrap_or(1) as f64;
        let mut left = share * self.len() as f64;
        for cell in ticks() {
            let here = self.counts[cell] as f64;
            if here >= left {
                return cell as f64 + step * (left / here - 0.5);
            }
            left -= here;
        }
        f64::NAN
    }
}

/// What a contender's stops came to.
struct Stops {
    all: usize,
    inside: usize,
    held_up: usize,
    times: Times,
}

/// For each contender: median and 99.9th percentile of a claim, and what became of the stops.
pub fn run(num_blocks: u32, seed: u64, wanted: Option<usize>) {
    install();
    let contenders = Contenders::new(num_blocks, 2);
    pin(0, &cpus());
    let clock = clock_alone();
    let print = |who: &str, part: &str, unit: &str, value: f64| {
        let figure = Figure {
            measure: "a claim while another is stopped in one",
            pattern: "repeat",
            threads: 2,
            who,
            part,
            unit,
        };
        figure.print(value);
    };
    let quantiles = |who: &str, times: &Times| {
        // What two looks at the clock cost is no part of a claim.
        let net = |share| (times.quantile(share) - clock.quantile(0.5)).max(0.0);
        print(who, "median", "ns", net(0.5));
        print(who, "p99.9", "ns", net(0.999));
    };
    quantiles("machine", &clock);
    for (who, allocator) in contenders.all() {
        let random = &mut fastrand::Rng::with_seed(seed);
        scatter(allocator, num_blocks, num_blocks / 2, random);
        let stops = measure(allocator, random, wanted.unwrap_or(WANTED));
        print(who, "stops", "stops", stops.all as f64);
        print(who, "inside a claim", "stops", stops.inside as f64);
        print(who, "held up", "stops", stops.held_up as f64);
        print(who, "claims", "claims", stops.times.len() as f64);
        if stops.inside > 0 {
            quantiles(who, &stops.times);
        }
    }
}

fn clock_alone() -> Times {
    let mut times = Times::new();
    for _ in 0..200_000 {
        let start = Instant::now();
        times.note(start.elapsed());
    }
    times
}

fn measure(allocator: &dyn Allocator, random: &mut fastrand::Rng, wanted: usize) -> Stops {
    let cpus = cpus();
    let ended = AtomicBool::new(false);
    let other = AtomicU64::new(0);
    let mut stops = Stops {
        all: 0,
        inside: 0,
        held_up: 0,
        times: Times::new(),
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(1, &cpus);
            other.store(pthread_self() as u64, Ordering::Release);
            while !ended.load(Ordering::Relaxed) {
                INSIDE.store(true, Ordering::Relaxed);
                // The handler runs on this thread: keeping the compiler from moving the flag suffices.
                compiler_fence(Ordering::SeqCst);
                let block = allocator.claim(1);
                compiler_fence(Ordering::SeqCst);
                INSIDE.store(false, Ordering::Relaxed);
                allocator.release(1, block.expect("half of the blocks are empty"));
            }
        });
        let id = loop {
            match other.load(Ordering::Acquire) {
                0 => thread::yield_now(),
                id => break id,
            }
        };
        while stops.inside < wanted && stops.all < TRIES * wanted {
            // It runs for a while between stops, of random length.
            let pause = Duration::from_nanos(random.u64(20_000..200_000));
            let start = Instant::now();
            while start.elapsed() < pause {
                std::hint::spin_loop();
            }
            let over = OVER.load(Ordering::Acquire);
            pthread_kill(id as Pthread, Signal::SIGUSR1).expect("the thread lives");
            one_stop(allocator, over, &mut stops);
            while OVER.load(Ordering::Acquire) == over {
                std::hint::spin_loop();
            }
        }
        ended.store(true, Ordering::Relaxed);
    });
    stops
}

/// What this thread has done so far.
struct Past {
    wall: Instant,
    processor: TimeVal,
    sleeps: i64,
}

impl Past {
    fn now() -> Self {
        let usage = getrusage(UsageWho::RUSAGE_THREAD).expect("a thread may ask about itself");
        Self {
            wall: Instant::now(),
            processor: usage.user_time() + usage.system_time(),
            sleeps: usage.voluntary_context_switches(),
        }
    }

    /// Whether a claim since then that took `longest` waited for the other thread: asleep, or
    /// spinning for longer than the core can have been somebody else's.
    fn waited(&self, longest: Duration) -> bool {
        let now = Past::now();
        let ran = (now.processor - self.processor).num_microseconds() as u64;
        let away = (now.wall - self.wall).saturating_sub(Duration::from_micros(ran));
        let slept = now.sleeps > self.sleeps;
        longest > STOP / 2 && (slept || longest.saturating_sub(away) > STOP / 4)
    }
}

/// Claims and releases from when the other thread is stopped until it runs again; `over` stops were
/// over when the signal was sent.
fn one_stop(allocator: &dyn Allocator, over: u64, stops: &mut Stops) {
    let past = Past::now();
    let inside = loop {
        match OTHER.load(Ordering::Acquire) {
            RUNNING if OVER.load(Ordering::Acquire) != over => return, // slept through it
            RUNNING => std::hint::spin_loop(),
            state => break state == STOPPED_INSIDE,
        }
    };
    let mut times = Times::new();
    let mut longest = Duration::ZERO;
    while OTHER.load(Ordering::Acquire) != RUNNING {
        let start = Instant::now();
        let block = allocator.claim(0);
        let took = start.elapsed();
        allocator.release(0, block.expect("half of the blocks are empty"));
        times.note(took);
        longest = longest.max(took);
    }
    stops.all += 1;
    if !inside {
        return;
    }
    stops.inside += 1;
    stops.held_up += usize::from(past.waited(longest));
    stops.times.add(&times);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_within_the_step_of_a_coarse_clock() {
        let mut times = Times::new();
        for (nanoseconds, count) in [(20, 25), (30, 50), (40, 25)] {
            for _ in 0..count {
                times.note(Duration::from_nanos(nanoseconds));
            }
        }
        assert_eq!(times.len(), 100);
        assert!((times.quantile(0.5) - 30.0).abs() < 1e-9);
        assert!((times.quantile(0.25) - 25.0).abs() < 1e-9);
        assert!((times.quantile(1.0) - 45.0).abs() < 1e-9);
    }
}
