//! What comes out: one JSON object a line.
//!
//! ```text
//! {"measure": "one block, half full", "pattern": "bulk", "threads": 2, "who": "kvmmu",
//!  "part": "claim", "unit": "ns", "value": 7.9}
//! ```
//!
//! What never lives here: goals and verdicts; `benches/pool.py` has those.

use serde_json::json;

/// What one figure is of.
#[derive(Debug, Clone, Copy)]
pub struct Figure<'a> {
    /// What was done, in which state of the pool.
    pub measure: &'a str,
    /// How it was done: `repeat`, `bulk`, `batch`, or a placement's trial.
    pub pattern: &'a str,
    /// Threads that did it at a time.
    pub threads: usize,
    /// The contender.
    pub who: &'a str,
    /// Which figure of several.
    pub part: &'a str,
    /// `ns`, `blocks`, `windows`, `bytes` or `share`.
    pub unit: &'a str,
}

impl Figure<'_> {
    /// Prints it.
    pub fn print(&self, value: f64) {
        let line = json!({
            "measure": self.measure,
            "pattern": self.pattern,
            "threads": self.threads,
            "who": self.who,
            "part": self.part,
            "unit": self.unit,
            "value": value,
        });
        println!("{line}");
    }
}
