//! The only door to atomics and locks.
//!
//! What lives here: the names that the rest of the crate uses for shared memory, so that a model
//! checker can stand behind them. What never lives here: any algorithm.
//!
//! Locks are taken in this order, never the other way: gate, sequences, shared, steps. A lock is
//! never held while bytes of KV are copied.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// `n` zeroed words whose pages the operating system hands out on first touch.
pub(crate) fn zeroed_u64(n: usize) -> Box<[AtomicU64]> {
    bytemuck::allocation::zeroed_slice_box(n)
}

/// `n` zeroed words whose pages the operating system hands out on first touch.
pub(crate) fn zeroed_u32(n: usize) -> Box<[AtomicU32]> {
    bytemuck::allocation::zeroed_slice_box(n)
}

/// Locks, and panics when an earlier panic left the data half changed: whoever embeds the core
/// catches the first panic and refuses further work.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .expect("a lock of the core was poisoned by an earlier panic")
}

/// `None` when another thread holds it. Panics as [`lock`] does.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(std::sync::TryLockError::WouldBlock) => None,
        Err(std::sync::TryLockError::Poisoned(_)) => {
            panic!("a lock of the core was poisoned by an earlier panic")
        }
    }
}
