//! From an error of the core crates to the Python class that stands for it.
//!
//! The classes live in Python (`kvmmu/errors.py`), so that they pickle and can be caught without
//! the extension. What never lives here: the sentence or the numbers; who raises knows them.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule};

/// A value that decided, which becomes an attribute of the error.
#[derive(Clone, Debug)]
pub enum Number {
    /// Blocks, tokens, ids, bytes.
    Int(i64),
    /// Ratios.
    #[allow(
        dead_code,
        reason = "the binding of the MMU raises errors about ratios"
    )]
    Float(f64),
    /// Names of arguments, and what was given where that was no number.
    Text(String),
}

impl From<u32> for Number {
    fn from(value: u32) -> Self {
        Self::Int(value.into())
    }
}

impl From<u64> for Number {
    /// Numbers above `i64::MAX` are given as text, never wrapped.
    fn from(value: u64) -> Self {
        i64::try_from(value).map_or_else(|_| Self::Text(value.to_string()), Self::Int)
    }
}

impl From<usize> for Number {
    fn from(value: usize) -> Self {
        (value as u64).into()
    }
}

/// The error `kvmmu.errors.<class>(message, **numbers)`, ready to be raised.
///
/// `class` must be a name in `kvmmu.errors`; if it is not, or if that module cannot be imported,
/// the error that Python raised on the way comes back instead.
pub fn error(
    py: Python<'_>,
    class: &'static str,
    message: String,
    numbers: &[(&'static str, Number)],
) -> PyErr {
    build(py, class, message, numbers).unwrap_or_else(|error| error)
}

fn build(
    py: Python<'_>,
    class: &'static str,
    message: String,
    numbers: &[(&'static str, Number)],
) -> PyResult<PyErr> {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = ERRORS
        .get_or_try_init(py, || py.import("kvmmu.errors").map(Bound::unbind))?
        .bind(py);
    let keywords = PyDict::new(py);
    for (name, number) in numbers {
        match number {
            Number::Int(value) => keywords.set_item(name, value)?,
            Number::Float(value) => keywords.set_item(name, value)?,
            Number::Text(value) => keywords.set_item(name, value)?,
        }
    }
    let value = module.getattr(class)?.call((message,), Some(&keywords))?;
    Ok(PyErr::from_value(value))
}

/// The Python error for an error of the core.
pub fn core_error(py: Python<'_>, failed: kvmmu::Error) -> PyErr {
    use kvmmu::Error;
    let message = failed.to_string();
    match failed {
        Error::OutOfBlocks {
            needed,
            available,
            num_blocks,
        } => error(
            py,
            "OutOfBlocks",
            message,
            &[
                ("needed", needed.into()),
                ("available", available.into()),
                ("num_blocks", num_blocks.into()),
            ],
        ),
        Error::Fragmented {
            needed,
            largest_run,
            available,
            num_blocks,
        } => error(
            py,
            "Fragmented",
            message,
            &[
                ("needed", needed.into()),
                ("largest_run", largest_run.into()),
                ("available", available.into()),
                ("num_blocks", num_blocks.into()),
            ],
        ),
        Error::Scattered {
            sequence,
            group,
            order,
            needed,
            in_place,
            available,
            num_blocks,
        } => error(
            py,
            "Fragmented",
            message,
            &[
                ("sequence", Number::Int(sequence)),
                ("group", group.into()),
                ("page_order", order.into()),
                ("needed", needed.into()),
                ("largest_run", in_place.into()),
                ("available", available.into()),
                ("num_blocks", num_blocks.into()),
            ],
        ),
        Error::OutOfTables { capacity, .. } => {
            error(py, "OutOfTables", message, &[("capacity", capacity.into())])
        }
        Error::UnknownSequence { sequence } => error(
            py,
            "UnknownSequence",
            message,
            &[("sequence", Number::Int(sequence))],
        ),
        Error::ConcurrentUse { sequence } => error(
            py,
            "ConcurrentUse",
            message,
            &[("sequence", Number::Int(sequence))],
        ),
        Error::LimitExceeded { needed, limit, .. } => error(
            py,
            "LimitExceeded",
            message,
            &[("needed", needed.into()), ("limit", limit.into())],
        ),
        Error::InvalidBlock { block, .. } => error(
            py,
            "InvalidBlock",
            message,
            &[("block", Number::Int(block as i64))],
        ),
        Error::InvalidStep { step, .. } => {
            error(py, "InvalidStep", message, &[("step", step.into())])
        }
        Error::InvalidLease { lease } => {
            error(py, "InvalidLease", message, &[("lease", lease.into())])
        }
        Error::InvalidPlan(_) => error(py, "InvalidPlan", message, &[]),
        _ => error(py, "InvalidConfig", message, &[]),
    }
}
