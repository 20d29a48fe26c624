//! What every verb of the manager has around it: a stop watch for one call in so many, and the
//! flight recorder.
//!
//! What lives here: the verbs' names and numbers, [`Times`], and recording a call and what came of
//! it. What never lives here: what a verb does.

use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use kvmmu::{Config, Eviction, Placement};
use kvmmu_record::{Recording, Unwritten};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyString};

use crate::errors::error;

macro_rules! verbs {
    ($($number:literal $verb:ident $name:literal,)*) => {
        /// The verbs. Their numbers are those of the recorder's format, and never change.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Verb { $($verb = $number),* }

        const NAMES: &[&str] = &[$($name),*];
    };
}

verbs! {
    1 Open "open",
    2 Append "append",
    3 Fork "fork",
    4 Truncate "truncate",
    5 ReleaseBefore "release_before",
    6 Close "close",
    7 BeginStep "begin_step",
    8 Prepare "prepare",
    9 Written "written",
    10 Cancel "cancel",
    11 EndStep "end_step",
    12 RegisterTables "register_tables",
    13 Export "export",
    14 Pin "pin",
    15 Unpin "unpin",
    16 Lease "lease",
    17 EndLease "end_lease",
    18 Evict "evict",
    19 PlanFreeRun "plan_free_run",
    20 PlanBelow "plan_below",
    21 PlanHugePages "plan_huge_pages",
    22 PlanGroups "plan_groups",
    23 PlanGather "plan_gather",
    24 PlanCompaction "plan_compaction",
    25 PlanShrink "plan_shrink",
    26 Ready "ready",
    27 Begin "begin",
    28 Commit "commit",
    29 Abort "abort",
    30 Shrink "shrink",
    31 Grow "grow",
    32 Panic "_panic_for_test",
    33 Quote "quote",
    34 Match "match",
}

/// Upper bounds of the buckets in nanoseconds; one more bucket holds what took longer.
const BOUNDS: [u64; 19] = [
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    1_000_000_000,
];
/// The calls of a verb that is not timed are not counted either.
const OFF: u32 = u32::MAX;

#[derive(Debug)]
struct Watch {
    /// Calls until the next that is timed.
    left: AtomicU32,
    nanoseconds: AtomicU64,
    buckets: [AtomicU64; BOUNDS.len() + 1],
}

/// How long calls take, of about one in so many.
///
/// Relaxed throughout: the numbers stand for themselves. Two threads that count down at once time a
/// call more or less.
#[derive(Debug)]
pub struct Times {
    every: AtomicU32,
    verbs: Box<[Watch]>,
}

/// Times the call that it lives through.
pub struct Timed<'a>(Option<(&'a Watch, Instant)>);

impl Drop for Timed<'_> {
    fn drop(&mut self) {
        let Some((watch, start)) = &self.0 else {
            return;
        };
        let took = start.elapsed().as_nanos().min(u64::MAX.into()) as u64;
        let bucket = BOUNDS.partition_point(|&bound| bound < took);
        watch.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        watch.nanoseconds.fetch_add(took, Ordering::Relaxed);
    }
}

impl Times {
    /// Nothing is timed.
    pub fn new() -> Self {
        let watch = |_| Watch {
            left: AtomicU32::new(OFF),
            nanoseconds: AtomicU64::new(0),
            buckets: [const { AtomicU64::new(0) }; BOUNDS.len() + 1],
        };
        Self {
            every: AtomicU32::new(0),
            verbs: (0..NAMES.len()).map(watch).collect(),
        }
    }

    /// Times about one call in `every` of each verb from now on; 0: none.
    pub fn set(&self, every: u32) {
        self.every.store(every, Ordering::Relaxed);
        for (number, watch) in self.verbs.iter().enumerate() {
            watch
                .left
                .store(self.draw(number as u64), Ordering::Relaxed);
        }
    }

    /// Calls until the next that is timed: as many as `every` on average, and never the same number
    /// for long, for engines call in patterns. (Weyl's sequence through SplitMix64's finisher.)
    fn draw(&self, seed: u64) -> u32 {
        let every = u64::from(self.every.load(Ordering::Relaxed));
        if every == 0 {
            return OFF;
        }
        let mut mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (1 + (mixed ^ mixed >> 31) % (2 * every - 1)) as u32
    }

    /// A call of this verb begins.
    pub fn start(&self, verb: Verb) -> Timed<'_> {
        let watch = &self.verbs[verb as usize - 1];
        match watch.left.load(Ordering::Relaxed) {
            OFF => Timed(None),
            0 | 1 => {
                let now = Instant::now();
                let seed = watch.nanoseconds.load(Ordering::Relaxed) + verb as u64;
                watch.left.store(self.draw(seed), Ordering::Relaxed);
                Timed(Some((watch, now)))
            }
            left => {
                watch.left.store(left - 1, Ordering::Relaxed);
                Timed(None)
            }
        }
    }

    /// Verb to (calls by how long they took, seconds of all), without those never timed.
    pub fn read<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (name, watch) in NAMES.iter().zip(&self.verbs) {
            let load = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
            let buckets: Vec<u64> = watch.buckets.iter().map(load).collect();
            if buckets.iter().any(|&calls| calls > 0) {
                dict.set_item(name, (buckets, load(&watch.nanoseconds) as f64 * 1e-9))?;
            }
        }
        Ok(dict)
    }

    /// Upper bounds of the buckets, in seconds.
    pub fn bounds() -> Vec<f64> {
        BOUNDS.iter().map(|&bound| bound as f64 / 1e9).collect()
    }
}

// -- the flight recorder -------------------------------------------------------------------------

/// Recordings that must be written when the process ends, for Python does not drop all objects then.
static UNWRITTEN: Mutex<Vec<Unwritten>> = Mutex::new(Vec::new());

/// Runs when the process ends.
#[pyfunction]
pub fn _flush_recordings(py: Python<'_>) {
    py.detach(|| {
        let mut all = UNWRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(Unwritten::flush);
    });
}

/// The records of a stored frame.
#[pyfunction]
pub fn _unpack_records<'py>(
    py: Python<'py>,
    stored: &[u8],
    raw: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    match kvmmu_record::unpack(stored, raw) {
        Ok(records) => Ok(PyBytes::new(py, &records)),
        Err(reason) => Err(PyValueError::new_err(reason)),
    }
}

/// What `record` or else the variable `KVMMU_RECORD` asks for.
pub fn wanted(record: Option<&Bound<'_, PyAny>>) -> PyResult<Option<String>> {
    match record {
        None => {
            let name = std::env::var_os("KVMMU_RECORD").filter(|name| !name.is_empty());
            Ok(name.map(|name| name.to_string_lossy().into_owned()))
        }
        Some(value) => match (value.cast::<PyString>(), value.cast::<PyBool>()) {
            (Ok(name), _) if !name.to_str()?.is_empty() => Ok(Some(name.to_str()?.to_owned())),
            (_, Ok(flag)) if !flag.is_true() => Ok(None),
            _ => {
                let given = value.repr()?;
                let message = format!("record = {given}: allowed is the name of a file, or False");
                Err(error(value.py(), "InvalidConfig", message, &[]))
            }
        },
    }
}

/// Begins a recording of calls on a manager with these settings.
pub fn begin(py: Python<'_>, name: &str, config: &Config) -> PyResult<Recording> {
    let recording = Recording::create(Path::new(name), &head(config)).map_err(|failed| {
        let message = format!("record, KVMMU_RECORD: {name} cannot be written: {failed}");
        error(py, "InvalidConfig", message, &[])
    })?;
    let mut all = UNWRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    all.push(recording.unwritten());
    Ok(recording)
}

/// What the calls are made on: the arguments of `MMU`, as JSON.
fn head(config: &Config) -> String {
    let optional = |value: Option<String>| value.unwrap_or_else(|| "null".into());
    let seed = match config.placement {
        Placement::Scatter { seed } => seed as i64,
        _ => 0,
    };
    let eviction = match config.eviction {
        Eviction::Lru => "lru",
        Eviction::Lfu => "lfu",
    };
    let orders: Vec<u32> = config.page_orders.iter().collect();
    let fields = [
        ("num_blocks", config.num_blocks.to_string()),
        ("block_size", config.block_size.to_string()),
        ("max_sequences", config.max_sequences.to_string()),
        (
            "max_blocks_per_sequence",
            config.max_blocks_per_sequence.to_string(),
        ),
        ("null_block", config.null_block.to_string()),
        ("table_nodes", config.table_nodes.to_string()),
        ("prefix_caching", config.prefix_caching.to_string()),
        ("placement", format!("{:?}", config.placement.name())),
        ("budget_blocks", config.budget_blocks.to_string()),
        ("windows_below", config.windows_below.to_string()),
        (
            "guarantee",
            optional(config.guarantee.map(|n| n.to_string())),
        ),
        ("gather_least", config.gather_least.to_string()),
        (
            "compaction_start",
            optional(config.compaction_start.map(|start| start.to_string())),
        ),
        ("compaction_stop", config.compaction_stop.to_string()),
        ("anchor", config.anchor.to_string()),
        ("page_orders", format!("{orders:?}")),
        ("medium_from", config.medium_from.to_string()),
        ("huge_from", config.huge_from.to_string()),
        ("hold_blocks", config.hold_blocks.to_string()),
        ("dedup", config.dedup.to_string()),
        ("seed", seed.to_string()),
        ("eviction", format!("{eviction:?}")),
        ("page_aware", config.page_aware.to_string()),
        ("events", config.events.to_string()),
    ];
    let fields = fields.map(|(name, value)| format!("{name:?}: {value}"));
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "{{\"kvmmu\": {version:?}, \"mmu\": {{{}}}}}",
        fields.join(", ")
    )
}

/// What came of a recorded call: a number that later calls name, or the class of the error.
pub fn note_outcome<R>(
    py: Python<'_>,
    recording: &Recording,
    number: u64,
    result: &PyResult<R>,
    value: impl FnOnce(&R) -> Option<u64>,
) {
    match result {
        Ok(result) => {
            if let Some(value) = value(result) {
                recording.outcome(|body| {
                    body.number(number).number(0).number(value);
                });
            }
        }
        Err(failed) => {
            let class = failed.get_type(py).name();
            let class = class.map_or_else(|_| "?".into(), |name| name.to_string());
            recording.outcome(|body| {
                body.number(number).number(1).bytes(class.as_bytes());
            });
            if class == "InternalError" {
                py.detach(|| recording.flush());
            }
        }
    }
    if let Some(reason) = recording.new_failure() {
        let log = py.import("logging").and_then(|logging| {
            let log = logging.call_method1("getLogger", ("kvmmu",))?;
            let name = recording.path().display().to_string();
            log.call_method1("warning", ("%s is recorded no more: %s", name, reason))
        });
        drop(log); // whoever has a log that raises knows
    }
}
