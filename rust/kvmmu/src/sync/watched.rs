//! loom's atomics, watched more closely.
//!
//! What lives here: a thin coat around loom's types. What never lives here: anything that changes
//! what an operation does or orders.
//!
//! loom 0.7 remembers one last access of each atomic. Before it runs a store or an exchange of one
//! thread, it asks whether that last access was another thread's, and if so tries the two the other
//! way round. A thread that loads a word and then exchanges it, as every loop here does, hides the
//! earlier load of another thread behind its own, so the order *exchange, then the other's load*
//! is never tried (`rt/atomic.rs`, `last_dependent_access`). Therefore each atomic has a companion
//! here that every access, a load too, adds nothing to by a read-modify-write: of two accesses of
//! one atomic by two threads the later always finds the other's on the companion. It is relaxed, so
//! it orders nothing else.
//!
//! `KVMMU_WEAKEN=file:line:column:which:Relaxed` weakens one ordering while a model runs: the one of
//! that call, `which` 0 for the first ordering it names and 1 for the second (`scripts/mutate`).

use std::panic::Location;
use std::sync::LazyLock;

use loom::sync::atomic::{self, Ordering};

struct Weakened {
    file: String,
    at: (u32, u32),
    which: u32,
    to: Ordering,
}

static WEAKENED: LazyLock<Option<Weakened>> = LazyLock::new(|| {
    let text = std::env::var("KVMMU_WEAKEN").ok()?;
    let parts: Vec<&str> = text.split(':').collect();
    let [file, line, column, which, to] = parts[..] else {
        panic!("KVMMU_WEAKEN = {text}: not file:line:column:which:ordering");
    };
    Some(Weakened {
        file: file.to_owned(),
        at: (line.parse().expect("line"), column.parse().expect("column")),
        which: which.parse().expect("which"),
        to: match to {
            "Relaxed" => Ordering::Relaxed,
            "Acquire" => Ordering::Acquire,
            "Release" => Ordering::Release,
            _ => panic!("KVMMU_WEAKEN = {text}: {to} weakens nothing"),
        },
    })
});

/// The ordering that a call names, or what it is weakened to.
#[track_caller]
fn order(order: Ordering, which: u32) -> Ordering {
    match &*WEAKENED {
        Some(weakened) if weakened.which == which => {
            let here = Location::caller();
            let same = (here.line(), here.column()) == weakened.at
                && here.file().ends_with(&weakened.file);
            if same { weakened.to } else { order }
        }
        _ => order,
    }
}

macro_rules! watched {
    ($name:ident, $value:ty) => {
        #[derive(Debug)]
        pub(crate) struct $name {
            word: atomic::$name,
            accesses: atomic::AtomicU32,
        }

        #[allow(dead_code)] // Each type has every verb; not each is used.
        impl $name {
            pub(crate) fn new(value: $value) -> Self {
                Self {
                    word: atomic::$name::new(value),
                    accesses: atomic::AtomicU32::new(0),
                }
            }

            #[track_caller]
            fn touched(&self) -> &atomic::$name {
                self.accesses.fetch_add(0, Ordering::Relaxed);
                &self.word
            }

            #[track_caller]
            pub(crate) fn load(&self, order: Ordering) -> $value {
                self.touched().load(self::order(order, 0))
            }

            #[track_caller]
            pub(crate) fn store(&self, value: $value, order: Ordering) {
                self.touched().store(value, self::order(order, 0));
            }

            #[track_caller]
            pub(crate) fn swap(&self, value: $value, order: Ordering) -> $value {
                self.touched().swap(value, self::order(order, 0))
            }

            #[track_caller]
            pub(crate) fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                self.touched().fetch_add(value, self::order(order, 0))
            }

            #[track_caller]
            pub(crate) fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                self.touched().fetch_sub(value, self::order(order, 0))
            }

            #[track_caller]
            pub(crate) fn fetch_and(&self, value: $value, order: Ordering) -> $value {
                self.touched().fetch_and(value, self::order(order, 0))
            }

            #[track_caller]
            pub(crate) fn fetch_or(&self, value: $value, order: Ordering) -> $value {
                self.touched().fetch_or(value, self::order(order, 0))
            }

            #[track_caller]
            pub(crate) fn fetch_xor(&self, value: $value, order: Ordering) -> $value {
                self.touched().fetch_xor(value, self::order(order, 0))
            }

            #[track_caller]
            pub(crate) fn fetch_max(&self, value: $value, order: Ordering) -> $value {
                self.touched().fetch_max(value, self::order(order, 0))
            }

            #[track_caller]
            pub(crate) fn compare_exchange(
                &self,
                old: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                let (success, failure) = (self::order(success, 0), self::order(failure, 1));
                self.touched().compare_exchange(old, new, success, failure)
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new(0)
            }
        }
    };
}

watched!(AtomicU32, u32);
watched!(AtomicU64, u64);
