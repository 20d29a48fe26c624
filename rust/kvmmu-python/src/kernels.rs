//! `kernel_names` and `kernel_source`: the CUDA kernels, as text.
//!
//! What lives here: the files of `kernels/`, embedded so that the wheel carries them, with their one
//! `#include` resolved. What never lives here: a compiler; `kvmmu.cuda` has them compiled on the
//! machine that runs them.

use std::borrow::Cow;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors::{Number, error};

const BLOCKS: &str = include_str!("../../../kernels/blocks.cuh");
const INCLUDE: &str = "#include \"blocks.cuh\"\n";

const KERNELS: [(&str, &str); 5] = [
    (
        "move_blocks",
        include_str!("../../../kernels/move_blocks.cu"),
    ),
    (
        "move_blocks_indirect",
        include_str!("../../../kernels/move_blocks_indirect.cu"),
    ),
    (
        "update_tables",
        include_str!("../../../kernels/update_tables.cu"),
    ),
    ("write_kv", include_str!("../../../kernels/write_kv.cu")),
    (
        "checksum_blocks",
        include_str!("../../../kernels/checksum_blocks.cu"),
    ),
];

#[doc = text!("kernel_names")]
#[pyfunction]
pub fn kernel_names(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
    PyTuple::new(py, KERNELS.map(|(name, _)| name))
}

// `#line` keeps messages of a compiler at the lines of the files.
#[doc = text!("kernel_source")]
#[pyfunction]
pub fn kernel_source(py: Python<'_>, name: &str) -> PyResult<Cow<'static, str>> {
    let Some((_, source)) = KERNELS.iter().find(|(known, _)| *known == name) else {
        let names = KERNELS.map(|(known, _)| known).join(", ");
        return Err(error(
            py,
            "InvalidConfig",
            format!("there is no kernel {name:?}; there are {names}"),
            &[("name", Number::Text(name.to_string()))],
        ));
    };
    let Some((head, tail)) = source.split_once(INCLUDE) else {
        return Ok(Cow::Borrowed(source));
    };
    let next = head.lines().count() + 2;
    Ok(Cow::Owned(format!(
        "{head}#line 1 \"blocks.cuh\"\n{BLOCKS}#line {next} \"{name}.cu\"\n{tail}"
    )))
}
