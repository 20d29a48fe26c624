//! The CPU mover of kvmmu.
