//! How long a claim takes while another thread has been stopped in the middle of one.
//!
//! A second thread claims and releases without end. A signal interrupts it at a random moment; the
//! handler notes whether it was inside `claim`, and sleeps. Meanwhile the first thread claims and
//! releases, each claim timed. Only stops inside `claim` count. An allocator that locks makes the
//! first thread wait until the sleeper wakes: such stops are counted apart (`stops that held others
//! up`), because in the percentile one claim that waits long weighs no more than a short one.
//!
//! The package's only `unsafe` is here: installing the handler.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, compiler_fence};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::pthread::{Pthread, pthread_kill, pthread_self};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::allocator::{Allocator, scatter};
use crate::contenders::Contenders;
use crate::report::Figure;
use crate::workers::{cpus, median, pin};

/// How long the other thread is stopped.
const STOP: Duration = Duration::from_millis(1);
/// Stops inside `claim` that are wanted, and stops after which we give up.
const WANTED: usize = 100;
const MOST: usize = 1000;

const RUNNING: u8 = 0;
const STOPPED_OUTSIDE: u8 = 1;
const STOPPED_INSIDE: u8 = 2;

static INSIDE: AtomicBool = AtomicBool::new(false);
static VICTIM: AtomicU8 = AtomicU8::new(RUNNING);

extern "C" fn stop(_signal: i32) {
    let state = if INSIDE.load(Ordering::Relaxed) {
        STOPPED_INSIDE
    } else {
        STOPPED_OUTSIDE
    };
    VICTIM.store(state, Ordering::Release);
    thread::sleep(STOP); // no more than clock_nanosleep, which a handler may call
    VICTIM.store(RUNNING, Ordering::Release);
}

fn install() {
    let action = SigAction::new(
        SigHandler::Handler(stop),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    // SAFETY: the handler touches atomics and sleeps; both are allowed in a handler.
    unsafe { sigaction(Signal::SIGUSR1, &action) }.expect("SIGUSR1 may be handled");
}

#[derive(Debug, Default)]
struct Stops {
    inside: usize,
    all: usize,
    held_up: usize,
    nanoseconds: Vec<f64>,
}

/// For each contender: median and 99.9th percentile of a claim, and how often stops were as wanted.
pub fn run(num_blocks: u32, seed: u64, wanted: Option<usize>) {
    install();
    let contenders = Contenders::new(num_blocks, 2);
    for (who, allocator) in contenders.all() {
        let random = &mut fastrand::Rng::with_seed(seed);
        scatter(allocator, num_blocks, num_blocks / 2, random);
        let stops = measure(allocator, random, wanted.unwrap_or(WANTED));
        let print = |part: &str, unit: &str, value: f64| {
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
        print("stops", "stops", stops.all as f64);
        print("stops inside a claim", "stops", stops.inside as f64);
        print("stops that held others up", "stops", stops.held_up as f64);
        print("claims", "claims", stops.nanoseconds.len() as f64);
        let mut times = stops.nanoseconds;
        times.sort_by(f64::total_cmp);
        if !times.is_empty() {
            let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
            print("median", "ns", at(0.5));
            print("p99.9", "ns", at(0.999));
        }
    }
}

/// What a look at the clock adds to each time that is taken with two.
fn clock() -> f64 {
    let looks = (0..10_000).map(|_| {
        let start = Instant::now();
        start.elapsed().as_nanos() as f64
    });
    median(looks.collect())
}

fn measure(allocator: &dyn Allocator, random: &mut fastrand::Rng, wanted: usize) -> Stops {
    let cpus = cpus();
    let ended = AtomicBool::new(false);
    let victim = AtomicU64::new(0);
    let mut stops = Stops::default();
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(1, &cpus);
            victim.store(pthread_self() as u64, Ordering::Release);
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
        pin(0, &cpus);
        let clock = clock();
        let id = loop {
            match victim.load(Ordering::Acquire) {
                0 => thread::yield_now(),
                id => break id,
            }
        };
        while stops.inside < wanted && stops.all < 10 * wanted.max(MOST / 10) {
            // It runs for a while between stops, of random length.
            let pause = Duration::from_nanos(random.u64(20_000..200_000));
            let start = Instant::now();
            while start.elapsed() < pause {
                std::hint::spin_loop();
            }
            pthread_kill(id as Pthread, Signal::SIGUSR1).expect("the thread lives");
            one_stop(allocator, clock, &mut stops);
        }
        ended.store(true, Ordering::Relaxed);
    });
    stops
}

/// Claims and releases from when the other thread is stopped until it runs again.
fn one_stop(allocator: &dyn Allocator, clock: f64, stops: &mut Stops) {
    let inside = loop {
        match VICTIM.load(Ordering::Acquire) {
            RUNNING => std::hint::spin_loop(),
            state => break state == STOPPED_INSIDE,
        }
    };
    let before = stops.nanoseconds.len();
    while VICTIM.load(Ordering::Acquire) != RUNNING {
        let start = Instant::now();
        let block = allocator.claim(0);
        let took = start.elapsed();
        allocator.release(0, block.expect("half of the blocks are empty"));
        stops
            .nanoseconds
            .push((took.as_nanos() as f64 - clock).max(1.0));
    }
    stops.all += 1;
    if inside {
        stops.inside += 1;
        let longest = stops.nanoseconds[before..]
            .iter()
            .copied()
            .fold(0.0, f64::max);
        stops.held_up += usize::from(longest > STOP.as_nanos() as f64 / 2.0);
    } else {
        stops.nanoseconds.truncate(before);
    }
}
