//! The Python binding of kvmmu: `kvmmu._core`. Conversion and errors, no logic.
//!
//! The contract, with the docs that users read, is `python/kvmmu/_core.pyi`; `build.rs` takes them
//! from there, and every item that Python sees carries its own.

// The docs of those items are Python's: an array `int32 [k, 2]` is no link.
#![allow(rustdoc::broken_intra_doc_links)]

use pyo3::prelude::*;

/// The docstring that `_core.pyi` has for a dotted name. It does not compile where there is none.
macro_rules! text {
    ($name:literal) => {
        include_str!(concat!(env!("OUT_DIR"), "/texts/", $name))
    };
}

mod convert;
mod copy;
mod errors;
mod guard;
mod kernels;
mod mmu;
mod pool;
mod repr;
mod tables;
mod values;
mod verbs;

#[doc = text!("_core")]
#[pymodule(gil_used = false)]
mod _core {
    use super::*;

    #[pymodule_export]
    use super::copy::{copy_blocks, cpu_features, page_bytes, release_pages};
    #[pymodule_export]
    use super::guard::_after_fork;
    #[pymodule_export]
    use super::kernels::{kernel_names, kernel_source};
    #[pymodule_export]
    use super::mmu::MMU;
    #[pymodule_export]
    use super::pool::Pool;
    #[pymodule_export]
    use super::tables::{BlockTables, DirtyRows};
    #[pymodule_export]
    use super::values::{BlockMap, Events, Measure, Moves, Plan, Quote, SequenceInfo};

    #[pymodule_export]
    use super::verbs::{_flush_recordings, _unpack_records};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let profile = if cfg!(debug_assertions) {
            "debug"
        } else {
            "release"
        };
        let (arch, system) = (std::env::consts::ARCH, std::env::consts::OS);
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        let keywords = pyo3::types::PyDict::new(module.py());
        keywords.set_item("after_in_child", module.getattr("_after_fork")?)?;
        let os = module.py().import("os")?;
        os.call_method("register_at_fork", (), Some(&keywords))?;
        let flush = module.getattr("_flush_recordings")?;
        module
            .py()
            .import("atexit")?
            .call_method1("register", (flush,))?;
        module.add("build", format!("{profile} {arch}-{system}"))
    }
}
