//! The pure Rust core of kvmmu.
