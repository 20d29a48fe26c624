//! Registered output buffers.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvmmu::{RowBuffers, Rows};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadwriteArray1, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::convert::describe;
use crate::errors::error;

/// The caller's arrays, kept alive, and what is in them.
#[pyclass(frozen, module = "kvmmu._core")]
pub struct BlockTables {
    block_table: Py<PyArray2<i32>>,
    seq_lens: Py<PyArray1<i32>>,
    slot_mapping: Py<PyArray1<i64>>,
    query_start_loc: Py<PyArray1<i32>>,
    rows: Mutex<Rows>,
    num_rows: AtomicUsize,
    num_tokens: AtomicUsize,
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
                "{name} is {}: allowed is {wanted}, C-contiguous",
                describe(value)
            );
            Err(error(value.py(), "InvalidConfig", message, &[]))
        }
    }
}

fn writable<'py>(array: &Bound<'py, PyArray1<i32>>) -> PyResult<PyReadwriteArray1<'py, i32>> {
    array.try_readwrite().map_err(|_| {
        let message = "indptr, indices and last_page_len must be writable and apart";
        error(array.py(), "InvalidConfig", message.into(), &[])
    })
}

impl BlockTables {
    /// Checks the arrays, fills them as empty and keeps them.
    pub fn register(
        mmu: &kvmmu::Mmu,
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
        let rows = Rows::new(mmu, rows, width, slots.len())
            .map_err(|failed| crate::errors::core_error(py, failed))?;
        let tables = Self {
            block_table: table.unbind(),
            seq_lens: lens.unbind(),
            slot_mapping: slots.unbind(),
            query_start_loc: starts.unbind(),
            rows: Mutex::new(rows),
            num_rows: AtomicUsize::new(0),
            num_tokens: AtomicUsize::new(0),
        };
        tables.with(py, |rows, buffers| rows.clear(buffers))?;
        Ok(tables)
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
    #[getter]
    fn block_table<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray2<i32>> {
        self.block_table.bind(py).clone()
    }
    #[getter]
    fn seq_lens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.seq_lens.bind(py).clone()
    }
    #[getter]
    fn slot_mapping<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        self.slot_mapping.bind(py).clone()
    }
    #[getter]
    fn query_start_loc<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.query_start_loc.bind(py).clone()
    }
    fn csr(
        &self,
        py: Python<'_>,
        indptr: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        last_page_len: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let [indptr, indices, last] = [
            (indptr, "indptr"),
            (indices, "indices"),
            (last_page_len, "last_page_len"),
        ]
        .map(|(value, name)| checked::<PyArray1<i32>>(value, name, "int32 [n]"));
        let (indptr, indices, last) = (indptr?, indices?, last?);
        let mut indptr = writable(&indptr)?;
        let mut indices = writable(&indices)?;
        let mut last = writable(&last)?;
        let (indptr, indices) = (indptr.as_slice_mut()?, indices.as_slice_mut()?);
        let last = last.as_slice_mut()?;
        let written = self.with(py, |rows, buffers| rows.csr(buffers, indptr, indices, last))?;
        let written = written.map_err(|failed| crate::errors::core_error(py, failed))?;
        Ok(written)
    }

    #[getter]
    fn num_rows(&self) -> usize {
        self.num_rows.load(Ordering::Relaxed)
    }
    #[getter]
    fn num_tokens(&self) -> usize {
        self.num_tokens.load(Ordering::Relaxed)
    }
}
