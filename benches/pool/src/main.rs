//! kvmmu's pool beside its rivals: speed, behaviour under a stopped thread, fragmentation.
//!
//! ```text
//! pool-bench [speed | stopped | fragmentation | pages | threads | metadata ...] [--blocks N] [--seed S]
//!            [--load FILE] [--threads N] [--rounds N] [--window-us N] [--warm-ms N] [--passes N] [--steps N] [--stops N]
//! ```
//!
//! Prints one JSON object a line ([`report`]); `benches/pool.py` makes the table of it. What lives
//! here: the arguments.

mod allocator;
mod contenders;
mod fragmentation;
#[cfg(feature = "llfree")]
mod llfree;
mod loads;
mod memory;
mod ours;
mod pages;
mod players;
mod report;
mod rivals;
mod serving;
mod speed;
mod stopped;
mod workers;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use lexopt::prelude::*;

use crate::workers::Effort;

/// Blocks of LLFree's experiment, at most: 256 windows.
const REPLACED_BLOCKS: u32 = 1 << 17;
/// Blocks of the churn, at most.
const CHURN_BLOCKS: u32 = 100_000;

#[derive(Debug)]
struct Options {
    measures: Vec<String>,
    blocks: u32,
    seed: u64,
    threads: usize,
    effort: Effort,
    warm: Duration,
    passes: usize,
    steps: Option<usize>,
    stops: Option<usize>,
    load: Option<PathBuf>,
}

fn parse() -> Result<Options, lexopt::Error> {
    let mut options = Options {
        measures: Vec::new(),
        blocks: 1 << 20,
        seed: 1,
        threads: 2,
        effort: Effort {
            rounds: 61,
            window: Duration::from_millis(1),
        },
        warm: Duration::from_secs(3),
        passes: 1000,
        steps: None,
        stops: None,
        load: None,
    };
    let mut parser = lexopt::Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Long("blocks") => options.blocks = parser.value()?.parse()?,
            Long("seed") => options.seed = parser.value()?.parse()?,
            Long("threads") => options.threads = parser.value()?.parse()?,
            Long("rounds") => options.effort.rounds = parser.value()?.parse()?,
            Long("window-us") => {
                options.effort.window = Duration::from_micros(parser.value()?.parse()?);
            }
            Long("warm-ms") => options.warm = Duration::from_millis(parser.value()?.parse()?),
            Long("passes") => options.passes = parser.value()?.parse()?,
            Long("steps") => options.steps = Some(parser.value()?.parse()?),
            Long("stops") => options.stops = Some(parser.value()?.parse()?),
            Long("load") => options.load = Some(parser.value()?.into()),
            Value(measure) => options.measures.push(measure.string()?),
            _ => return Err(argument.unexpected()),
        }
    }
    if options.blocks < 1 << 14 || options.threads == 0 || options.effort.rounds == 0 {
        return Err("at least 16384 blocks, 1 thread and 1 round".into());
    }
    Ok(options)
}

fn measure(name: &str, options: &Options) -> Result<(), String> {
    let Options {
        blocks,
        seed,
        threads,
        effort,
        ..
    } = *options;
    if matches!(name, "speed" | "threads" | "stopped") {
        workers::warm(threads, options.warm);
    }
    match name {
        "speed" => {
            let counts: Vec<usize> = (1..=threads.min(2)).collect();
            speed::run(blocks, &counts, seed, effort);
        }
        "threads" => {
            for threads in 1..=threads {
                speed::two_loops(threads, effort);
                speed::one_block(blocks, threads, seed, effort);
            }
        }
        "stopped" => stopped::run(blocks, seed, options.stops),
        "fragmentation" => {
            fragmentation::llfree_experiment(blocks.min(REPLACED_BLOCKS), seed, options.passes);
            fragmentation::churn(blocks.min(CHURN_BLOCKS), seed, options.steps);
        }
        "pages" => pages::run(options.load.as_deref().ok_or("pages needs --load FILE")?)?,
        "metadata" => metadata(blocks),
        _ => return Err(format!("nothing is called {name:?}")),
    }
    Ok(())
}

/// Bytes a block of each contender that says so.
fn metadata(blocks: u32) {
    let print = |who: &str, bytes: usize| {
        let figure = report::Figure {
            measure: "metadata",
            pattern: "a block",
            threads: 1,
            who,
            part: "all",
            unit: "bytes",
        };
        figure.print(bytes as f64 / f64::from(blocks));
    };
    print("kvmmu", ours::Ours::new(blocks).0.metadata_bytes());
    #[cfg(feature = "llfree")]
    print("LLFree", llfree::LlFree::new(blocks, 2).metadata_bytes());
}

fn main() -> ExitCode {
    let options = match parse() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("pool-bench: {error}");
            return ExitCode::from(2);
        }
    };
    for name in &options.measures {
        if let Err(error) = measure(name, &options) {
            eprintln!("pool-bench: {error}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
