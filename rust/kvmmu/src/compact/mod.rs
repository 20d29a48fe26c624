//! Compaction: how scattered the available blocks are, and which moves gather them.
//!
//! [`measure`] counts runs, [`plan`] chooses moves. Both are pure functions over bit words: a plan
//! is a value, and nothing in here moves a byte or repoints a mapping.

pub mod measure;
pub mod plan;
