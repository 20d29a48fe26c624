//! Compaction: how scattered the available blocks are.

pub mod measure;
