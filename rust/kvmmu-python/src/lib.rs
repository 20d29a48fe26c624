//! PyO3 binding.
use pyo3::prelude::*;
/// The core.
#[pymodule(gil_used = false)]
mod _core {}
