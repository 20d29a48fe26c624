//! The only door to atomics and locks.
//!
//! What lives here: the names that the rest of the crate uses for shared memory, so that a model
//! checker can stand behind them. What never lives here: any algorithm.
//!
//! Locks are taken in this order, never the other way: gate, sequences, shared, steps. A lock is
//! never held while bytes of KV are copied.

use crate::error::{Error, Result};

pub(crate) use behind::*;
#[cfg(loom)]
mod watched;

/// A number that only tells things apart: it guards no memory, and no model is about it.
pub(crate) use std::sync::atomic::AtomicU64 as Serial;

/// The standard library.
#[cfg(not(any(loom, shuttle)))]
mod behind {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    pub(crate) use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
}

/// loom: every interleaving and every reading that the memory model allows, of small programs.
#[cfg(loom)]
mod behind {
    pub(crate) use super::watched::{AtomicU32, AtomicU64};
    pub(crate) use loom::sync::atomic::Ordering;
    pub(crate) use loom::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
}

/// shuttle: random schedules of larger programs, sequentially consistent.
#[cfg(shuttle)]
mod behind {
    pub(crate) use shuttle::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    pub(crate) use shuttle::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
}

/// Lets others get on: at first only the processor's other half, then the system's other threads.
pub(crate) fn relax(round: u32) {
    #[cfg(not(any(loom, shuttle)))]
    if round < 64 {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(shuttle)]
    shuttle::thread::yield_now();
    let _ = round;
}

/// A small number for each thread.
pub(crate) fn thread_number() -> usize {
    number::get()
}

/// Numbers of threads, in the order in which they first asked.
#[cfg(not(any(loom, shuttle)))]
mod number {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicUsize, Ordering};

    thread_local! {
        /// One more than the thread's number; 0 before it was asked for.
        static NUMBER: Cell<usize> = const { Cell::new(0) };
    }

    pub(crate) fn get() -> usize {
        match NUMBER.with(Cell::get) {
            0 => new(),
            number => number - 1,
        }
    }

    #[cold]
    fn new() -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        // Relaxed: only the number itself matters.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        NUMBER.with(|cell| cell.set(number + 1));
        number
    }
}

/// Numbers of threads, as a model gives them: so each execution is the same, and a model can seat
/// two threads together.
#[cfg(any(loom, shuttle))]
pub(crate) mod number {
    #[cfg(loom)]
    use loom::thread_local as local;
    #[cfg(shuttle)]
    use shuttle::thread_local as local;
    use std::cell::Cell;

    local! {
        static NUMBER: Cell<usize> = Cell::new(0);
    }

    pub(crate) fn get() -> usize {
        NUMBER.with(Cell::get)
    }

    pub(crate) fn set(number: usize) {
        NUMBER.with(|cell| cell.set(number));
    }
}

/// `n` zeroed words whose pages the operating system hands out on first touch.
#[cfg(not(any(loom, shuttle)))]
pub(crate) fn zeroed_u64(n: usize) -> Result<Box<[AtomicU64]>> {
    bytemuck::allocation::try_zeroed_slice_box(n).map_err(|()| no_memory(n, 8))
}

/// `n` zeroed words whose pages the operating system hands out on first touch.
#[cfg(not(any(loom, shuttle)))]
pub(crate) fn zeroed_u32(n: usize) -> Result<Box<[AtomicU32]>> {
    bytemuck::allocation::try_zeroed_slice_box(n).map_err(|()| no_memory(n, 4))
}

/// `n` zeroed words, for a model checker.
#[cfg(any(loom, shuttle))]
pub(crate) fn zeroed_u64(n: usize) -> Result<Box<[AtomicU64]>> {
    collected(n, |_| AtomicU64::new(0))
}

/// `n` zeroed words, for a model checker.
#[cfg(any(loom, shuttle))]
pub(crate) fn zeroed_u32(n: usize) -> Result<Box<[AtomicU32]>> {
    collected(n, |_| AtomicU32::new(0))
}

/// `n` values, made from their numbers.
pub(crate) fn collected<T>(n: usize, value: impl FnMut(usize) -> T) -> Result<Box<[T]>> {
    let mut out = reserved(n)?;
    out.extend((0..n).map(value));
    Ok(out.into())
}

/// `n` copies of a value.
pub(crate) fn filled<T: Clone>(value: T, n: usize) -> Result<Box<[T]>> {
    let mut out = reserved(n)?;
    out.resize(n, value);
    Ok(out.into())
}

/// An empty vector with room for `n`.
pub(crate) fn reserved<T>(n: usize) -> Result<Vec<T>> {
    let mut out = Vec::new();
    let room = out.try_reserve_exact(n);
    room.map_err(|_| no_memory(n, size_of::<T>()))?;
    Ok(out)
}

/// The error for memory that is not to be had.
pub(crate) fn no_memory(n: usize, bytes: usize) -> Error {
    let total = n.saturating_mul(bytes);
    Error::InvalidConfig(format!(
        "num_blocks, block_size, max_sequences, table_nodes: {total} bytes of memory are not to be had"
    ))
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
