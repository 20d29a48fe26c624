//! What stands between Python and an object of the core: panics and forks.
//!
//! What lives here: [`Guard`]. What never lives here: any verb.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pyo3::prelude::*;

use crate::errors::{core_error, error};
use crate::values::internal;

/// An object of the core, which refuses work after a panic and in a forked child.
pub struct Guard<T> {
    pub core: T,
    /// What users call it.
    name: &'static str,
    /// Set by the first panic: the core may be half changed, so nothing touches it again.
    poisoned: AtomicBool,
    /// Forks of the process before this object was made.
    forks: u64,
}

/// How often this process has become a child.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Runs in every child, right after `fork`.
#[pyfunction]
pub fn _after_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("unknown panic")
        .to_owned()
}

impl<T: Sync> Guard<T> {
    /// Makes the object.
    pub fn new(
        py: Python<'_>,
        name: &'static str,
        make: impl FnOnce() -> kvmmu::Result<T>,
    ) -> PyResult<Self> {
        let core = catch_unwind(AssertUnwindSafe(make))
            .map_err(|panic| internal(py, panic_text(&*panic)))?
            .map_err(|failed| core_error(py, failed))?;
        Ok(Self {
            core,
            name,
            poisoned: AtomicBool::new(false),
            forks: FORKS.load(Ordering::Relaxed),
        })
    }

    /// Calls the core; a panic poisons this object and comes back as its text.
    pub fn guarded<R>(&self, call: impl FnOnce(&T) -> R) -> Result<R, String> {
        if self.poisoned.load(Ordering::Acquire) {
            return Err(format!(
                "an earlier call ended in an internal error; this {} refuses further work",
                self.name
            ));
        }
        catch_unwind(AssertUnwindSafe(|| call(&self.core))).map_err(|panic| {
            self.poisoned.store(true, Ordering::Release);
            format!("the core panicked: {}", panic_text(&*panic))
        })
    }

    /// A lock may be held for ever by a thread that this process does not have.
    pub fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.forks == FORKS.load(Ordering::Relaxed) {
            return Ok(());
        }
        let message = format!(
            "this {} was made before the process forked: make one in each process",
            self.name
        );
        Err(error(py, "UsedAfterFork", message, &[]))
    }

    /// A short call that cannot fail.
    pub fn get<R>(&self, py: Python<'_>, call: impl FnOnce(&T) -> R) -> PyResult<R> {
        self.check_process(py)?;
        self.guarded(call).map_err(|text| internal(py, text))
    }

    /// What came of a guarded call.
    pub fn outcome<R>(
        &self,
        py: Python<'_>,
        result: Result<kvmmu::Result<R>, String>,
    ) -> PyResult<R> {
        result
            .map_err(|text| internal(py, text))?
            .map_err(|failed| core_error(py, failed))
    }

    /// A short call.
    pub fn call<R>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&T) -> kvmmu::Result<R>,
    ) -> PyResult<R> {
        self.get(py, call)?.map_err(|failed| core_error(py, failed))
    }

    /// A call that may take more than a few microseconds and reads no memory of the caller's: other
    /// Python threads run meanwhile.
    pub fn long<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&T) -> kvmmu::Result<R> + Send,
    ) -> PyResult<R> {
        self.check_process(py)?;
        let result = py.detach(|| self.guarded(call));
        self.outcome(py, result)
    }
}
