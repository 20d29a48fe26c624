//! `copy_blocks`, `release_pages`, `cpu_features`: the CPU mover as Python sees it.
//!
//! What lives here: reading the arrays, naming what is wrong with them, and letting go of the
//! interpreter while bytes move. The checks and the copy are those of `kvmmu_copy`.

use kvmmu_copy::{MoveError, Pages, Region, ReleaseError};
use numpy::{Element, PyArray2, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{Number, error};

/// The rows of a C-contiguous array `[n, K]`, copied: while the interpreter is released, another
/// thread may write to the array.
fn rows<T: Element + Copy, const K: usize>(
    value: &Bound<'_, PyAny>,
    name: &'static str,
    dtype: &str,
) -> PyResult<Vec<[T; K]>> {
    let refuse = |given: String| {
        let message = format!(
            "{name} must be a C-contiguous {dtype} array of shape [n, {K}], not {given}; \
             np.require({name}, np.{dtype}, \"C\") makes one of rows of numbers"
        );
        error(
            value.py(),
            "InvalidConfig",
            message,
            &[("argument", Number::Text(name.into()))],
        )
    };
    let Ok(array) = value.cast::<PyArray2<T>>() else {
        return Err(refuse(describe(value)?));
    };
    if array.shape()[1] != K || !array.is_c_contiguous() {
        return Err(refuse(describe(value)?));
    }
    let borrowed = array
        .try_readonly()
        .map_err(|reason| refuse(reason.to_string()))?;
    let flat = borrowed
        .as_slice()
        .map_err(|reason| refuse(reason.to_string()))?;
    let mut rows = Vec::with_capacity(flat.len() / K);
    for row in flat.chunks_exact(K) {
        let mut copied = [row[0]; K];
        copied.copy_from_slice(row);
        rows.push(copied);
    }
    Ok(rows)
}

/// What was given instead of the right array, for people.
fn describe(value: &Bound<'_, PyAny>) -> PyResult<String> {
    let Ok(array) = value.cast::<PyUntypedArray>() else {
        return Ok(value.get_type().name()?.to_string());
    };
    let order = if array.is_c_contiguous() {
        ""
    } else {
        ", not contiguous"
    };
    Ok(format!(
        "{} of shape {:?}{order}",
        array.dtype(),
        array.shape()
    ))
}

fn raise(py: Python<'_>, refused: MoveError) -> PyErr {
    let (class, numbers): (_, Vec<(&'static str, Number)>) = match refused {
        MoveError::UnknownBlock {
            index,
            block,
            num_blocks,
        } => (
            "InvalidBlock",
            vec![
                ("block", block.into()),
                ("index", index.into()),
                ("num_blocks", num_blocks.into()),
            ],
        ),
        MoveError::DuplicateDestination { block } => ("InvalidPlan", vec![("block", block.into())]),
        MoveError::SourceIsDestination { index, block } => (
            "InvalidPlan",
            vec![("block", block.into()), ("index", index.into())],
        ),
        MoveError::EmptyBlock { region } => ("InvalidConfig", vec![("region", region.into())]),
        MoveError::StrideTooSmall {
            region,
            stride,
            bytes,
        } => (
            "InvalidConfig",
            vec![
                ("region", region.into()),
                ("stride", stride.into()),
                ("block_bytes", bytes.into()),
            ],
        ),
        MoveError::RegionOverflow {
            region,
            address,
            stride,
            bytes,
            block,
        } => (
            "InvalidConfig",
            vec![
                ("region", region.into()),
                ("address", address.into()),
                ("stride", stride.into()),
                ("block_bytes", bytes.into()),
                ("block", block.into()),
            ],
        ),
    };
    error(py, class, refused.to_string(), &numbers)
}

#[doc = text!("copy_blocks")]
#[pyfunction]
pub fn copy_blocks(
    py: Python<'_>,
    regions: &Bound<'_, PyAny>,
    pairs: &Bound<'_, PyAny>,
    num_blocks: u32,
) -> PyResult<()> {
    let regions: Vec<[u64; 3]> = rows(regions, "regions", "uint64")?;
    let pairs: Vec<[u32; 2]> = rows(pairs, "pairs", "uint32")?;
    let regions: Vec<Region> = regions
        .into_iter()
        .map(|[address, stride, bytes]| Region {
            address: address as usize,
            stride,
            bytes,
        })
        .collect();
    py.detach(|| {
        kvmmu_copy::check_pairs(&pairs, num_blocks)?;
        // SAFETY: `check_pairs` accepted the pairs. That the regions are live and writable,
        // do not overlap, and have `num_blocks` blocks is what the caller answers for:
        // `kvmmu.Storage` checked it and keeps their owners alive, and a mover runs between the
        // begin and the commit of its moves, when nobody else touches sources or destinations.
        unsafe { kvmmu_copy::copy_blocks(&regions, &pairs) }
    })
    .map_err(|refused| raise(py, refused))
}

#[doc = text!("release_pages")]
#[pyfunction]
pub fn release_pages(py: Python<'_>, ranges: &Bound<'_, PyAny>) -> PyResult<u64> {
    let ranges: Vec<[u64; 2]> = rows(ranges, "ranges", "uint64")?;
    let ranges: Vec<Pages> = ranges
        .into_iter()
        .map(|[address, bytes]| Pages {
            address: address as usize,
            bytes: bytes as usize,
        })
        .collect();
    // SAFETY: that nobody needs what the pages hold is what the caller answers for: `kvmmu.KVCache`
    // gives back those of blocks that are offline, which no sequence has and no step in flight reads,
    // of tensors that it keeps alive.
    let released = py.detach(|| unsafe { kvmmu_copy::release_pages(&ranges) });
    released.map_err(|refused| {
        let range = |address: usize, bytes: usize| {
            vec![
                ("address", Number::from(address)),
                ("bytes", Number::from(bytes)),
            ]
        };
        let mut numbers = Vec::new();
        match &refused {
            ReleaseError::NoPages {
                address,
                bytes,
                page,
            } => {
                numbers = range(*address, *bytes);
                numbers.push(("page_bytes", (*page).into()));
            }
            ReleaseError::OtherMemory {
                address, bytes, at, ..
            } => {
                numbers = range(*address, *bytes);
                numbers.push(("at", (*at).into()));
            }
            ReleaseError::Refused {
                address,
                bytes,
                errno,
                ..
            } => {
                numbers = range(*address, *bytes);
                numbers.push(("errno", Number::Int((*errno).into())));
            }
            ReleaseError::Unsupported => {}
        }
        error(py, "NotReturnable", refused.to_string(), &numbers)
    })
}

#[doc = text!("page_bytes")]
#[pyfunction]
pub fn page_bytes() -> usize {
    kvmmu_copy::page_bytes()
}

#[doc = text!("cpu_features")]
#[pyfunction]
pub fn cpu_features(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let found = kvmmu_copy::features();
    let features = PyDict::new(py);
    features.set_item("avx2", found.avx2)?;
    features.set_item("non_temporal", found.non_temporal)?;
    Ok(features)
}
