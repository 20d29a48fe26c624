//! Registered output buffers.
//!
//! What lives here: the caller's arrays, checked and lent to one call at a time. What never lives
//! here: what stands in them.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvmmu::{Cascade, CascadeLevel, DirtyRow, RowBuffers, Rows, Unit};
use numpy::{
    IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadwriteArray1, PyUntypedArrayMethods,
};
use pyo3::prelude::*;

use crate::convert::describe;
use crate::errors::error;
use crate::repr;

#[doc = text!("BlockTables")]
#[pyclass(frozen, module = "kvmmu._core")]
pub struct BlockTables {
    block_table: Py<PyArray2<i32>>,
    seq_lens: Py<PyArray1<i32>>,
    slot_mapping: Py<PyArray1<i64>>,
    query_start_loc: Py<PyArray1<i32>>,
    rows: Mutex<Rows>,
    null_entry: i32,
    kernel_block_size: u32,
    page_order: u32,
    num_rows: AtomicUsize,
    num_tokens: AtomicUsize,
    /// Of the recorded call that registered them.
    pub number: u64,
}

#[doc = text!("DirtyRows")]
#[pyclass(frozen, module = "kvmmu._core")]
pub struct DirtyRows {
    rows: Py<PyArray1<i32>>,
    start: Py<PyArray1<i32>>,
    stop: Py<PyArray1<i32>>,
    generation: Py<PyArray1<i64>>,
}

#[pymethods]
impl DirtyRows {
    #[doc = text!("DirtyRows.rows")]
    #[getter]
    fn rows<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.rows.bind(py).clone()
    }
    #[doc = text!("DirtyRows.start")]
    #[getter]
    fn start<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.start.bind(py).clone()
    }
    #[doc = text!("DirtyRows.stop")]
    #[getter]
    fn stop<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.stop.bind(py).clone()
    }
    #[doc = text!("DirtyRows.generation")]
    #[getter]
    fn generation<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        self.generation.bind(py).clone()
    }
    fn __len__(&self, py: Python<'_>) -> usize {
        self.rows.bind(py).len()
    }
    fn __repr__(&self, py: Python<'_>) -> String {
        format!("DirtyRows({})", repr::counted(self.__len__(py), "row"))
    }
}

/// Why the tables cannot be lent.
enum Busy {
    Rows,
    Arrays,
}

fn checked<'py, A>(value: &Bound<'py, PyAny>, name: &str, wanted: &str) -> PyResult<Bound<'py, A>>
where
    A: pyo3::PyTypeCheck,
    Bound<'py, A>: PyUntypedArrayMethods<'py>,
{
    match value.cast::<A>() {
        Ok(array) if array.is_c_contiguous() => Ok(array.clone()),
        _ => {
            let message = format!(
                "{name} is {}: allowed is {wanted}, C-contiguous; np.zeros makes one",
                describe(value)
            );
            Err(error(value.py(), "InvalidConfig", message, &[]))
        }
    }
}

/// Output arrays of one call: int32, one dimension, C-contiguous, writable, none over another.
fn outputs<'py, const N: usize>(
    values: [(&Bound<'py, PyAny>, &str); N],
) -> PyResult<[PyReadwriteArray1<'py, i32>; N]> {
    let mut found = Vec::with_capacity(N);
    for (value, name) in values {
        let array: Bound<'py, PyArray1<i32>> = checked(value, name, "int32 [n]")?;
        // `as_slice` says whether it is aligned too.
        let lent = (array.try_readwrite().ok()).filter(|lent| lent.as_slice().is_ok());
        found.push(lent.ok_or_else(|| {
            let message = format!("{name} must be writable, aligned and apart from the others");
            error(value.py(), "InvalidConfig", message, &[])
        })?);
    }
    Ok(found.try_into().expect("one for each"))
}

impl BlockTables {
    /// Checks the arrays, fills them as empty and keeps them.
    pub fn register(
        mmu: &kvmmu::Mmu,
        unit: Unit,
        block_table: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        query_start_loc: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let py = block_table.py();
        let table: Bound<'_, PyArray2<i32>> = checked(block_table, "block_table", "int32 [B, W]")?;
        let lens: Bound<'_, PyArray1<i32>> = checked(seq_lens, "seq_lens", "int32 [B]")?;
        let slots: Bound<'_, PyArray1<i64>> = checked(slot_mapping, "slot_mapping", "int64 [T]")?;
        let starts: Bound<'_, PyArray1<i32>> =
            checked(query_start_loc, "query_start_loc", "int32 [B + 1]")?;
        let (rows, width) = (table.shape()[0], table.shape()[1]);
        if lens.len() != rows || starts.len() != rows + 1 {
            let message = format!(
                "block_table has {rows} rows: seq_lens must have as many and query_start_loc one \
                 more, they have {} and {}",
                lens.len(),
                starts.len()
            );
            return Err(error(py, "InvalidConfig", message, &[]));
        }
        let rows = Rows::of(mmu, unit, rows, width, slots.len())
            .map_err(|failed| crate::errors::core_error(py, failed))?;
        let tables = Self {
            block_table: table.unbind(),
            seq_lens: lens.unbind(),
            slot_mapping: slots.unbind(),
            query_start_loc: starts.unbind(),
            null_entry: rows.null_entry(),
            kernel_block_size: rows.entry_tokens(),
            page_order: match unit {
                Unit::Page { order } => order,
                _ => 0,
            },
            rows: Mutex::new(rows),
            num_rows: AtomicUsize::new(0),
            num_tokens: AtomicUsize::new(0),
            number: 0,
        };
        tables.with(py, |rows, buffers| rows.clear(buffers))?;
        Ok(tables)
    }

    /// Rows, entries a row, slots.
    pub fn shape(&self, py: Python<'_>) -> [u32; 3] {
        let table = self.block_table.bind(py).shape();
        let sizes = [table[0], table[1], self.slot_mapping.bind(py).len()];
        sizes.map(|size| size as u32)
    }

    /// Lends rows and buffers to one call, which must not run Python: its locks are held meanwhile.
    pub fn with<T>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Rows, &mut RowBuffers<'_>) -> T,
    ) -> PyResult<T> {
        self.lend(py, call).map_err(|busy| {
            let (class, message) = match busy {
                Busy::Rows => ("ConcurrentUse", "these tables are in use by another call"),
                Busy::Arrays => (
                    "InvalidConfig",
                    "an array of these tables is given as an argument too, overlaps another, is not \
                     writable or is not aligned",
                ),
            };
            error(py, class, message.into(), &[])
        })
    }

    fn lend<T>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Rows, &mut RowBuffers<'_>) -> T,
    ) -> Result<T, Busy> {
        let mut rows = self.rows.try_lock().map_err(|_| Busy::Rows)?;
        let mut table = (self.block_table.bind(py).try_readwrite()).map_err(|_| Busy::Arrays)?;
        let mut lens = (self.seq_lens.bind(py).try_readwrite()).map_err(|_| Busy::Arrays)?;
        let mut slots = (self.slot_mapping.bind(py).try_readwrite()).map_err(|_| Busy::Arrays)?;
        let mut starts =
            (self.query_start_loc.bind(py).try_readwrite()).map_err(|_| Busy::Arrays)?;
        let mut buffers = RowBuffers {
            block_table: table.as_slice_mut().map_err(|_| Busy::Arrays)?,
            seq_lens: lens.as_slice_mut().map_err(|_| Busy::Arrays)?,
            slot_mapping: slots.as_slice_mut().map_err(|_| Busy::Arrays)?,
            query_start_loc: starts.as_slice_mut().map_err(|_| Busy::Arrays)?,
        };
        let result = call(&mut rows, &mut buffers);
        // Relaxed: two numbers to look at; the arrays are handed over by the caller's own order.
        self.num_rows.store(rows.num_rows(), Ordering::Relaxed);
        self.num_tokens.store(rows.num_tokens(), Ordering::Relaxed);
        Ok(result)
    }
}

#[pymethods]
impl BlockTables {
    #[doc = text!("BlockTables.block_table")]
    #[getter]
    fn block_table<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray2<i32>> {
        self.block_table.bind(py).clone()
    }
    #[doc = text!("BlockTables.seq_lens")]
    #[getter]
    fn seq_lens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.seq_lens.bind(py).clone()
    }
    #[doc = text!("BlockTables.slot_mapping")]
    #[getter]
    fn slot_mapping<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        self.slot_mapping.bind(py).clone()
    }
    #[doc = text!("BlockTables.query_start_loc")]
    #[getter]
    fn query_start_loc<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.query_start_loc.bind(py).clone()
    }
    #[doc = text!("BlockTables.csr")]
    fn csr(
        &self,
        py: Python<'_>,
        indptr: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        last_page_len: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let [mut indptr, mut indices, mut last] = outputs([
            (indptr, "indptr"),
            (indices, "indices"),
            (last_page_len, "last_page_len"),
        ])?;
        let (indptr, indices) = (indptr.as_slice_mut()?, indices.as_slice_mut()?);
        let last = last.as_slice_mut()?;
        let written = self.with(py, |rows, buffers| rows.csr(buffers, indptr, indices, last))?;
        let written = written.map_err(|failed| crate::errors::core_error(py, failed))?;
        Ok(written)
    }

    /// Returns (groups, rows, entries of level 0, entries of level 1).
    #[allow(clippy::too_many_arguments)]
    fn _prefix_groups(
        &self,
        py: Python<'_>,
        row_indptr: &Bound<'_, PyAny>,
        shared_qo_indptr: &Bound<'_, PyAny>,
        shared_kv_indptr: &Bound<'_, PyAny>,
        shared_kv_indices: &Bound<'_, PyAny>,
        shared_kv_last_page_len: &Bound<'_, PyAny>,
        own_qo_indptr: &Bound<'_, PyAny>,
        own_kv_indptr: &Bound<'_, PyAny>,
        own_kv_indices: &Bound<'_, PyAny>,
        own_kv_last_page_len: &Bound<'_, PyAny>,
    ) -> PyResult<(usize, usize, usize, usize)> {
        let mut lent = outputs([
            (row_indptr, "row_indptr"),
            (shared_qo_indptr, "qo_indptr of level 0"),
            (shared_kv_indptr, "kv_indptr of level 0"),
            (shared_kv_indices, "kv_indices of level 0"),
            (shared_kv_last_page_len, "kv_last_page_len of level 0"),
            (own_qo_indptr, "qo_indptr of level 1"),
            (own_kv_indptr, "kv_indptr of level 1"),
            (own_kv_indices, "kv_indices of level 1"),
            (own_kv_last_page_len, "kv_last_page_len of level 1"),
        ])?;
        let mut slices = lent
            .each_mut()
            .map(|array| array.as_slice_mut().expect("checked when it was lent"))
            .into_iter();
        let mut next = || slices.next().expect("there are nine");
        let row_indptr = next();
        let mut level = || CascadeLevel {
            qo_indptr: next(),
            kv_indptr: next(),
            kv_indices: next(),
            kv_last_page_len: next(),
        };
        let mut out = Cascade {
            row_indptr,
            shared: level(),
            own: level(),
        };
        let sizes = self.with(py, |rows, buffers| rows.prefix_groups(buffers, &mut out))?;
        let sizes = sizes.map_err(|failed| crate::errors::core_error(py, failed))?;
        Ok((sizes.groups, sizes.rows, sizes.shared, sizes.own))
    }

    #[doc = text!("BlockTables.dirty_rows")]
    fn dirty_rows(&self, py: Python<'_>) -> PyResult<DirtyRows> {
        let dirty = self.with(py, |rows, _| rows.dirty_rows().to_vec())?;
        let column = |of: fn(&DirtyRow) -> u32| {
            let column: Vec<i32> = dirty.iter().map(|row| of(row) as i32).collect();
            column.into_pyarray(py).unbind()
        };
        let generation: Vec<i64> = dirty.iter().map(|row| row.generation as i64).collect();
        Ok(DirtyRows {
            rows: column(|row| row.row),
            start: column(|row| row.start),
            stop: column(|row| row.stop),
            generation: generation.into_pyarray(py).unbind(),
        })
    }

    #[doc = text!("BlockTables.generations")]
    fn generations<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let found = self.with(py, |rows, _| {
            let all = rows.generations().iter();
            all.map(|&generation| generation as i64).collect::<Vec<_>>()
        })?;
        Ok(found.into_pyarray(py))
    }

    #[doc = text!("BlockTables.null_entry")]
    #[getter]
    fn null_entry(&self) -> i32 {
        self.null_entry
    }
    #[doc = text!("BlockTables.kernel_block_size")]
    #[getter]
    pub fn kernel_block_size(&self) -> u32 {
        self.kernel_block_size
    }
    #[doc = text!("BlockTables.page_order")]
    #[getter]
    pub fn page_order(&self) -> u32 {
        self.page_order
    }
    #[doc = text!("BlockTables.num_rows")]
    #[getter]
    fn num_rows(&self) -> usize {
        self.num_rows.load(Ordering::Relaxed)
    }
    #[doc = text!("BlockTables.num_tokens")]
    #[getter]
    fn num_tokens(&self) -> usize {
        self.num_tokens.load(Ordering::Relaxed)
    }
    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let [rows, width, slots] = slf.get().shape(slf.py());
        let size = format!("{rows} rows of {width} entries, {slots} slots");
        let attributes = [
            "num_rows",
            "num_tokens",
            "kernel_block_size",
            "page_order",
            "null_entry",
        ];
        repr::with_attributes(slf, size, &attributes)
    }
}
