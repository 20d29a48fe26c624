//! Plain values that the manager returns.

use kvmmu::compact::measure::Runs;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyUntypedArrayMethods};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::{core_error, error};
use crate::repr;

/// Pairs of block numbers as an array of shape [n, 2]. `as_element` is the identity, or the cast
/// to int32: block numbers are below 2^31.
pub fn pairs<'py, T: numpy::Element>(
    py: Python<'py>,
    pairs: &[[u32; 2]],
    as_element: impl Fn(u32) -> T,
) -> Bound<'py, PyArray2<T>> {
    let flat: Vec<T> = pairs
        .iter()
        .flatten()
        .map(|&block| as_element(block))
        .collect();
    let array = numpy::ndarray::Array2::from_shape_vec((pairs.len(), 2), flat);
    array.expect("two numbers a pair").into_pyarray(py)
}

/// Counts by state, as a dict.
pub fn states<'py>(py: Python<'py>, states: &kvmmu::States) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item(intern!(py, "empty"), states.empty)?;
    dict.set_item(intern!(py, "destined"), states.destined)?;
    dict.set_item(intern!(py, "in_use"), states.in_use)?;
    dict.set_item(intern!(py, "cached"), states.cached)?;
    dict.set_item(intern!(py, "fenced"), states.fenced)?;
    dict.set_item(intern!(py, "offline"), states.offline)?;
    dict.set_item(intern!(py, "available"), states.available)?;
    dict.set_item(intern!(py, "held"), states.held)?;
    Ok(dict)
}

/// Numbers by page order, those that are not 0, as a dict.
fn by_order<'py>(py: Python<'py>, numbers: &[u64]) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (order, &n) in numbers.iter().enumerate().filter(|&(_, &n)| n > 0) {
        dict.set_item(order, n)?;
    }
    Ok(dict)
}

/// Block numbers as int32: they are below 2^31.
pub fn blocks(py: Python<'_>, blocks: Vec<u32>) -> Bound<'_, PyArray1<i32>> {
    let blocks: Vec<i32> = blocks.into_iter().map(|block| block as i32).collect();
    blocks.into_pyarray(py)
}

/// Copies to carry out, int32 [c, 2]. Nearly always there are none: that array is made once, and
/// holds nothing that anybody could change.
pub fn copies<'py>(py: Python<'py>, found: &[[u32; 2]]) -> Bound<'py, PyArray2<i32>> {
    static NONE: PyOnceLock<Py<PyArray2<i32>>> = PyOnceLock::new();
    let make = |found: &[[u32; 2]]| pairs(py, found, |block| block as i32);
    if found.is_empty() {
        let none = NONE.get_or_init(py, || make(&[]).unbind());
        return none.bind(py).clone();
    }
    make(found)
}

#[doc = text!("SequenceInfo")]
#[pyclass(frozen, module = "kvmmu._core")]
pub struct SequenceInfo(pub kvmmu::SequenceInfo);

#[pymethods]
impl SequenceInfo {
    #[doc = text!("SequenceInfo.num_tokens")]
    #[getter]
    fn num_tokens(&self) -> u32 {
        self.0.num_tokens
    }
    #[doc = text!("SequenceInfo.num_cached_tokens")]
    #[getter]
    fn num_cached_tokens(&self) -> u32 {
        self.0.num_cached_tokens
    }
    #[doc = text!("SequenceInfo.num_scheduled")]
    #[getter]
    fn num_scheduled(&self) -> u32 {
        self.0.num_scheduled
    }
    #[doc = text!("SequenceInfo.num_written")]
    #[getter]
    fn num_written(&self) -> u32 {
        self.0.num_written
    }
    #[doc = text!("SequenceInfo.num_blocks")]
    #[getter]
    fn num_blocks(&self) -> u32 {
        self.0.num_blocks
    }
    #[doc = text!("SequenceInfo.num_runs")]
    #[getter]
    fn num_runs(&self) -> u32 {
        self.0.num_runs
    }
    #[doc = text!("SequenceInfo.num_released")]
    #[getter]
    fn num_released(&self) -> u32 {
        self.0.num_released
    }
    #[doc = text!("SequenceInfo.pages")]
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        by_order(py, &self.0.pages.map(u64::from))
    }
    #[doc = text!("SequenceInfo.regions")]
    #[getter]
    fn regions(&self) -> u32 {
        self.0.regions
    }
    #[doc = text!("SequenceInfo.held")]
    #[getter]
    fn held(&self) -> u32 {
        self.0.held
    }
    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let attributes = [
            "num_tokens",
            "num_cached_tokens",
            "num_scheduled",
            "num_written",
            "num_blocks",
            "num_runs",
            "num_released",
            "pages",
            "regions",
            "held",
        ];
        repr::with_attributes(slf, String::new(), &attributes)
    }
}

#[doc = text!("Quote")]
#[pyclass(frozen, module = "kvmmu._core")]
pub struct Quote(pub kvmmu::Quote);

#[pymethods]
impl Quote {
    #[doc = text!("Quote.when")]
    #[getter]
    fn when(&self) -> &'static str {
        match self.0.when {
            kvmmu::When::Now => "now",
            kvmmu::When::Moves => "moves",
            kvmmu::When::Frees => "frees",
            kvmmu::When::Grows => "grows",
            kvmmu::When::Never => "never",
        }
    }
    #[doc = text!("Quote.moves")]
    #[getter]
    fn moves(&self) -> u32 {
        self.0.moves
    }
    #[doc = text!("Quote.needed")]
    #[getter]
    fn needed(&self) -> u32 {
        self.0.needed
    }
    #[doc = text!("Quote.available")]
    #[getter]
    fn available(&self) -> u32 {
        self.0.available
    }
    #[doc = text!("Quote.num_cached_tokens")]
    #[getter]
    fn num_cached_tokens(&self) -> u32 {
        self.0.num_cached_tokens
    }
    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let attributes = ["when", "moves", "needed", "available", "num_cached_tokens"];
        repr::with_attributes(slf, String::new(), &attributes)
    }
}

#[doc = text!("BlockMap")]
#[pyclass(frozen, module = "kvmmu._core")]
pub struct BlockMap {
    states: Py<PyArray1<u8>>,
    references: Py<PyArray1<i32>>,
    sequences: Py<PyArray1<i64>>,
    logical: Py<PyArray1<i32>>,
    orders: Py<PyArray1<i8>>,
    flags: Py<PyArray1<u8>>,
}

impl BlockMap {
    pub fn new(py: Python<'_>, map: kvmmu::BlockMap) -> Self {
        Self {
            states: map.states.into_pyarray(py).unbind(),
            references: blocks(py, map.references).unbind(), // below 2^27
            sequences: map.sequences.into_pyarray(py).unbind(),
            logical: map.logical.into_pyarray(py).unbind(),
            orders: map.orders.into_pyarray(py).unbind(),
            flags: map.flags.into_pyarray(py).unbind(),
        }
    }
}

#[pymethods]
impl BlockMap {
    #[classattr]
    const STATES: [&'static str; 7] = [
        "empty", "destined", "in_use", "cached", "fenced", "offline", "null",
    ];
    #[classattr]
    const HELD: u8 = kvmmu::BlockMap::HELD;
    #[classattr]
    const PINNED: u8 = kvmmu::BlockMap::PINNED;
    #[classattr]
    const LEASED: u8 = kvmmu::BlockMap::LEASED;
    #[classattr]
    const MOVING: u8 = kvmmu::BlockMap::MOVING;
    #[classattr]
    const PUBLISHED: u8 = kvmmu::BlockMap::PUBLISHED;
    #[classattr]
    const EVICTABLE: u8 = kvmmu::BlockMap::EVICTABLE;

    #[doc = text!("BlockMap.states")]
    #[getter]
    fn states(&self, py: Python<'_>) -> Py<PyArray1<u8>> {
        self.states.clone_ref(py)
    }
    #[doc = text!("BlockMap.references")]
    #[getter]
    fn references(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.references.clone_ref(py)
    }
    #[doc = text!("BlockMap.sequences")]
    #[getter]
    fn sequences(&self, py: Python<'_>) -> Py<PyArray1<i64>> {
        self.sequences.clone_ref(py)
    }
    #[doc = text!("BlockMap.logical")]
    #[getter]
    fn logical(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.logical.clone_ref(py)
    }
    #[doc = text!("BlockMap.orders")]
    #[getter]
    fn orders(&self, py: Python<'_>) -> Py<PyArray1<i8>> {
        self.orders.clone_ref(py)
    }
    #[doc = text!("BlockMap.flags")]
    #[getter]
    fn flags(&self, py: Python<'_>) -> Py<PyArray1<u8>> {
        self.flags.clone_ref(py)
    }
    fn __len__(&self, py: Python<'_>) -> usize {
        self.states.bind(py).len()
    }
    fn __repr__(&self, py: Python<'_>) -> String {
        format!("BlockMap({})", repr::counted(self.__len__(py), "block"))
    }
}

#[doc = text!("Measure")]
#[pyclass(frozen, module = "kvmmu._core")]
pub struct Measure(pub kvmmu::Measure);

impl Measure {
    fn available_runs(&self) -> &Runs {
        &self.0.available
    }
}

#[pymethods]
impl Measure {
    #[doc = text!("Measure.ratio_empty")]
    #[getter]
    fn ratio_empty(&self) -> f64 {
        self.0.ratio_empty()
    }
    #[doc = text!("Measure.ratio_available")]
    #[getter]
    fn ratio_available(&self) -> f64 {
        self.0.ratio_available()
    }
    #[doc = text!("Measure.empty")]
    #[getter]
    fn empty(&self) -> u32 {
        self.0.empty.total
    }
    #[doc = text!("Measure.available")]
    #[getter]
    fn available(&self) -> u32 {
        self.available_runs().total
    }
    #[doc = text!("Measure.largest_run_empty")]
    #[getter]
    fn largest_run_empty(&self) -> u32 {
        self.0.empty.largest
    }
    #[doc = text!("Measure.largest_run_available")]
    #[getter]
    fn largest_run_available(&self) -> u32 {
        self.available_runs().largest
    }
    #[doc = text!("Measure.free_windows")]
    #[getter]
    fn free_windows(&self) -> u32 {
        self.available_runs().free_windows
    }
    #[doc = text!("Measure.run_histogram")]
    #[getter]
    fn run_histogram<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        let histogram = self.available_runs().histogram;
        histogram.map(|runs| runs as i64).to_vec().into_pyarray(py)
    }
    #[doc = text!("Measure.sequences")]
    #[getter]
    fn sequences(&self) -> u32 {
        self.0.sequences
    }
    #[doc = text!("Measure.runs")]
    #[getter]
    fn runs(&self) -> u64 {
        self.0.runs
    }
    #[doc = text!("Measure.runs_per_sequence")]
    #[getter]
    fn runs_per_sequence(&self) -> f64 {
        self.0.runs_per_sequence()
    }
    #[doc = text!("Measure.unused_slots")]
    #[getter]
    fn unused_slots(&self) -> u64 {
        self.0.unused_slots
    }
    #[doc = text!("Measure.pages")]
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        by_order(py, &self.0.pages)
    }
    #[doc = text!("Measure.regions")]
    #[getter]
    fn regions(&self) -> u64 {
        self.0.regions
    }
    #[doc = text!("Measure.table_nodes")]
    #[getter]
    fn table_nodes(&self) -> u32 {
        self.0.table_nodes
    }
    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let attributes = [
            "ratio_empty",
            "ratio_available",
            "empty",
            "available",
            "largest_run_empty",
            "largest_run_available",
            "free_windows",
            "run_histogram",
            "sequences",
            "runs",
            "runs_per_sequence",
            "unused_slots",
            "pages",
            "regions",
            "table_nodes",
        ];
        repr::with_attributes(slf, String::new(), &attributes)
    }
}

#[doc = text!("Plan")]
// Beside the plan the number of the recorded call that proposed it.
#[pyclass(frozen, module = "kvmmu._core")]
pub struct Plan(pub kvmmu::Plan, pub u64);

#[pymethods]
impl Plan {
    #[doc = text!("Plan.goal")]
    #[getter]
    fn goal(&self) -> String {
        match self.0.goal {
            kvmmu::Goal::FreeRun(n) => format!("free_run({n})"),
            kvmmu::Goal::Below(ratio) => format!("below({ratio})"),
            kvmmu::Goal::HugePages(k) => format!("huge_pages({k})"),
            kvmmu::Goal::Groups { size, groups } => format!("groups({size}, {groups})"),
            kvmmu::Goal::Gather(id) => format!("gather({id})"),
            kvmmu::Goal::Background => "background".into(),
        }
    }
    #[doc = text!("Plan.pairs")]
    #[getter]
    fn pairs<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray2<u32>> {
        pairs(py, &self.0.pairs, |block| block)
    }
    #[doc = text!("Plan.complete")]
    #[getter]
    fn complete(&self) -> bool {
        self.0.complete
    }
    #[doc = text!("Plan.remaining")]
    #[getter]
    fn remaining(&self) -> u32 {
        self.0.remaining
    }
    #[doc = text!("Plan.parts")]
    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (name, moves) in ["windows", "huge_pages", "runs"].iter().zip(self.0.parts) {
            dict.set_item(name, moves)?;
        }
        Ok(dict)
    }
    #[doc = text!("Plan.predicted_run")]
    #[getter]
    fn predicted_run(&self) -> u32 {
        self.0.predicted_run()
    }
    #[doc = text!("Plan.predicted_ratio")]
    #[getter]
    fn predicted_ratio(&self) -> f64 {
        self.0.predicted_ratio()
    }
    #[doc = text!("Plan.predicted_windows")]
    #[getter]
    fn predicted_windows(&self) -> u32 {
        self.0.predicted_windows()
    }
    fn __len__(&self) -> usize {
        self.0.pairs.len()
    }
    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let size = repr::counted(slf.get().__len__(), "move");
        let attributes = [
            "goal",
            "complete",
            "remaining",
            "parts",
            "predicted_run",
            "predicted_ratio",
            "predicted_windows",
        ];
        repr::with_attributes(slf, size, &attributes)
    }
}

#[doc = text!("Moves")]
#[pyclass(frozen, module = "kvmmu._core")]
pub struct Moves(pub kvmmu::Moves);

#[pymethods]
impl Moves {
    #[doc = text!("Moves.epoch")]
    #[getter]
    fn epoch(&self) -> u64 {
        self.0.epoch()
    }
    #[doc = text!("Moves.pairs")]
    #[getter]
    fn pairs<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray2<u32>> {
        pairs(py, self.0.pairs(), |block| block)
    }
    #[doc = text!("Moves.to_bytes")]
    fn to_bytes(&self) -> Vec<u8> {
        self.0.to_bytes()
    }
    #[doc = text!("Moves.from_bytes")]
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        kvmmu::Moves::from_bytes(data)
            .map(Self)
            .map_err(|error| core_error(py, error))
    }
    fn __len__(&self) -> usize {
        self.0.pairs().len()
    }
    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let size = repr::counted(slf.get().__len__(), "move");
        repr::with_attributes(slf, size, &["epoch"])
    }
}

#[doc = text!("Events")]
#[pyclass(frozen, module = "kvmmu._core")]
pub struct Events {
    found: kvmmu::Events,
    numbered: bool,
}

impl Events {
    /// Events that took place.
    pub fn numbered(found: kvmmu::Events) -> Self {
        Self {
            found,
            numbered: true,
        }
    }

    /// What is there now, which is no event.
    pub fn unnumbered(found: kvmmu::Events) -> Self {
        Self {
            found,
            numbered: false,
        }
    }

    fn each<'py, T: numpy::Element>(
        &self,
        py: Python<'py>,
        of: impl Fn(&kvmmu::Event) -> T,
    ) -> Bound<'py, PyArray1<T>> {
        let values: Vec<T> = self.found.events.iter().map(of).collect();
        values.into_pyarray(py)
    }

    fn words<'py>(
        &self,
        py: Python<'py>,
        of: impl Fn(&kvmmu::Event) -> u128,
    ) -> Bound<'py, PyArray2<u64>> {
        let halves = |event| [of(event) as u64, (of(event) >> 64) as u64];
        let flat: Vec<u64> = self.found.events.iter().flat_map(halves).collect();
        shaped(py, flat, 2)
    }
}

/// Rows of so many elements.
fn shaped<T: numpy::Element>(py: Python<'_>, flat: Vec<T>, width: usize) -> Bound<'_, PyArray2<T>> {
    let array = numpy::ndarray::Array2::from_shape_vec((flat.len() / width, width), flat);
    array.expect("whole rows").into_pyarray(py)
}

#[pymethods]
impl Events {
    #[classattr]
    const STORED: u8 = 0;
    #[classattr]
    const REMOVED: u8 = 1;
    #[classattr]
    const MOVED: u8 = 2;

    #[doc = text!("Events.lost")]
    #[getter]
    fn lost(&self) -> u64 {
        self.found.lost
    }
    #[doc = text!("Events.next")]
    #[getter]
    fn next(&self) -> u64 {
        self.found.next
    }
    #[doc = text!("Events.number")]
    #[getter]
    fn number<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        let count = self.found.events.len() as i64;
        let first = self.found.first as i64;
        let numbers: Vec<i64> = if self.numbered {
            (first..first + count).collect()
        } else {
            vec![-1; count as usize]
        };
        numbers.into_pyarray(py)
    }
    #[doc = text!("Events.kind")]
    #[getter]
    fn kind<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u8>> {
        self.each(py, |event| match event.kind {
            kvmmu::Kind::Stored => Self::STORED,
            kvmmu::Kind::Removed => Self::REMOVED,
            kvmmu::Kind::Moved => Self::MOVED,
        })
    }
    #[doc = text!("Events.block")]
    #[getter]
    fn block<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.each(py, |event| event.block as i32)
    }
    #[doc = text!("Events.moved_to")]
    #[getter]
    fn moved_to<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.each(py, |event| event.moved_to.map_or(-1, |block| block as i32))
    }
    #[doc = text!("Events.hash")]
    #[getter]
    fn hash<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray2<u64>> {
        self.words(py, |event| event.hash)
    }
    #[doc = text!("Events.parent")]
    #[getter]
    fn parent<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray2<u64>> {
        self.words(py, |event| event.parent)
    }
    #[doc = text!("Events.tokens")]
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray2<i32>> {
        shaped(py, self.found.tokens.clone(), self.found.block_size)
    }
    #[doc = text!("Events.keys")]
    #[getter]
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (index, event) in self.found.events.iter().enumerate() {
            if let Some((salt, extra)) = event.key() {
                let extra = extra.map(|bytes| PyBytes::new(py, bytes));
                dict.set_item(index, (PyBytes::new(py, salt), extra))?;
            }
        }
        Ok(dict)
    }
    fn __len__(&self) -> usize {
        self.found.events.len()
    }
    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let size = repr::counted(slf.get().__len__(), "event");
        repr::with_attributes(slf, size, &["lost", "next"])
    }
}

/// An error of the core that has no place for numbers.
pub fn internal(py: Python<'_>, message: String) -> PyErr {
    error(py, "InternalError", message, &[])
}
