//! The class `Pool`: blocks without sequences, one method a verb.

use std::ops::Deref;

use kvmmu::{PoolConfig, Zone};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::{self, array, blocks, count, integer, share};
use crate::errors::core_error;
use crate::guard::Guard;
use crate::values;

type Any<'a, 'py> = &'a Bound<'py, PyAny>;
type Core = kvmmu::Pool;

/// Hands out blocks: which of them are empty, and who holds the others.
#[pyclass(frozen, module = "kvmmu._core")]
pub struct Pool(Guard<Core>);

impl Deref for Pool {
    type Target = Guard<Core>;

    fn deref(&self) -> &Guard<Core> {
        &self.0
    }
}

fn zone(anchor: bool) -> Zone {
    if anchor { Zone::Anchor } else { Zone::Body }
}

fn owner(value: Any<'_, '_>) -> PyResult<u32> {
    integer(value, "owner", 0, i64::from(kvmmu::pool::MAX_OWNER)).map(|owner| owner as u32)
}

impl Pool {
    /// The first block of a shape of `needed` blocks, or why there is none.
    fn shape(
        &self,
        py: Python<'_>,
        needed: u32,
        claim: impl FnOnce(&Core) -> Option<u32> + Send,
    ) -> PyResult<u32> {
        self.long(py, |core| claim(core).ok_or_else(|| core.refusal(needed)))
    }
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (
        num_blocks, *, placement=None, null_block=None, anchor=None, seed=0
    ), text_signature = "(num_blocks, *, placement='address', null_block='last', anchor=0.0, seed=0)")]
    fn new(
        py: Python<'_>,
        num_blocks: Any<'_, '_>,
        placement: Option<Any<'_, '_>>,
        null_block: Option<Any<'_, '_>>,
        anchor: Option<Any<'_, '_>>,
        #[pyo3(from_py_with = convert::seed)] seed: i64,
    ) -> PyResult<Self> {
        let most = i64::from(kvmmu::MAX_BLOCKS);
        let num_blocks = integer(num_blocks, "num_blocks", 1, most)? as u32;
        let mut config = PoolConfig::new(num_blocks);
        config.placement = convert::placement(placement, seed)?;
        config.null_block = convert::null_block(null_block, num_blocks)?;
        if let Some(value) = anchor {
            config.anchor = share(value, "anchor")?;
        }
        Guard::new(py, "Pool", || Core::new(&config)).map(Self)
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.core.num_blocks()
    }
    #[getter]
    fn null_block(&self) -> u32 {
        self.core.null_block()
    }
    #[getter]
    fn anchor_from(&self) -> u32 {
        self.core.anchor_from()
    }

    // -- claiming ----------------------------------------------------------------------------

    #[pyo3(signature = (n=None, *, owner=None, anchor=false), text_signature = "($self, n=1, *, owner=None, anchor=False)")]
    fn claim<'py>(
        &self,
        py: Python<'py>,
        n: Option<Any<'_, 'py>>,
        owner: Option<Any<'_, 'py>>,
        anchor: bool,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let n = n.map_or(Ok(1), |n| count(n, "n", 0))?;
        let owner = owner.map(self::owner).transpose()?;
        let claim = |core: &Core| {
            let mut out = Vec::with_capacity(n.min(core.num_blocks()) as usize);
            match owner {
                Some(owner) => core.claim_for(zone(anchor), owner, n, &mut out),
                None => core.claim_batch_in(zone(anchor), n, &mut out),
            }?;
            Ok(out)
        };
        Ok(values::blocks(py, self.call(py, claim)?))
    }

    #[pyo3(signature = (order, *, anchor=false))]
    fn claim_page(&self, py: Python<'_>, order: Any<'_, '_>, anchor: bool) -> PyResult<u32> {
        let order = integer(order, "order", 0, i64::from(Core::MAX_ORDER))? as u32;
        self.shape(py, 1 << order, |core| {
            core.claim_page_in(zone(anchor), order)
        })
    }

    #[pyo3(signature = (n, *, anchor=false))]
    fn claim_run(&self, py: Python<'_>, n: Any<'_, '_>, anchor: bool) -> PyResult<u32> {
        let n = count(n, "n", 1)?;
        self.shape(py, n, |core| core.claim_run_in(zone(anchor), n))
    }

    fn claim_exact(&self, py: Python<'_>, first: Any<'_, '_>, n: Any<'_, '_>) -> PyResult<bool> {
        let (first, n) = (count(first, "first", 0)?, count(n, "n", 1)?);
        self.long(py, |core| Ok(core.claim_exact(first, n)))
    }

    fn claim_like<'py>(
        &self,
        py: Python<'py>,
        lengths: Any<'_, 'py>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let lengths = array::<i64>(lengths, "lengths")?;
        let whole = |&length: &i64| u32::try_from(length).ok();
        let found: Option<Vec<u32>> = lengths.slice().iter().map(whole).collect();
        let Some(lengths) = found else {
            let allowed = "allowed is an array of int64, each 0 to 4294967295";
            let message = format!("lengths = {:?}: {allowed}", lengths.slice());
            return Err(core_error(py, kvmmu::Error::InvalidConfig(message)));
        };
        let claim = |core: &Core| {
            let mut out = Vec::new();
            core.claim_like(&lengths, &mut out).map(|()| out)
        };
        Ok(values::blocks(py, self.long(py, claim)?))
    }

    // -- sharing and releasing ---------------------------------------------------------------

    fn retain(&self, py: Python<'_>, blocks: Any<'_, '_>) -> PyResult<()> {
        let array = array::<i32>(blocks, "blocks")?;
        self.call(py, |core| core.retain(self::blocks(array.slice())))
    }

    fn publish(&self, py: Python<'_>, blocks: Any<'_, '_>) -> PyResult<()> {
        let array = array::<i32>(blocks, "blocks")?;
        self.call(py, |core| core.publish(self::blocks(array.slice())))
    }

    fn revive(&self, py: Python<'_>, blocks: Any<'_, '_>) -> PyResult<()> {
        let array = array::<i32>(blocks, "blocks")?;
        self.call(py, |core| core.revive(self::blocks(array.slice())))
    }

    fn evict(&self, py: Python<'_>, block: Any<'_, '_>) -> PyResult<bool> {
        let block = count(block, "block", 0)?;
        self.get(py, |core| core.evict(block))
    }

    #[pyo3(signature = (blocks, *, owner=None))]
    fn release(
        &self,
        py: Python<'_>,
        blocks: Any<'_, '_>,
        owner: Option<Any<'_, '_>>,
    ) -> PyResult<()> {
        let array = array::<i32>(blocks, "blocks")?;
        let owner = owner.map(self::owner).transpose()?;
        let blocks = self::blocks(array.slice());
        self.call(py, |core| match owner {
            Some(owner) => core.release_for(owner, blocks),
            None => core.release_batch(blocks),
        })
    }

    fn release_page(&self, py: Python<'_>, first: Any<'_, '_>, order: Any<'_, '_>) -> PyResult<()> {
        let first = count(first, "first", 0)?;
        let order = integer(order, "order", 0, i64::from(Core::MAX_ORDER))? as u32;
        self.call(py, |core| core.release_page(first, order))
    }

    // -- destinations of moves ---------------------------------------------------------------

    fn destine(&self, py: Python<'_>, blocks: Any<'_, '_>) -> PyResult<()> {
        let array = array::<i32>(blocks, "blocks")?;
        self.call(py, |core| core.destine(self::blocks(array.slice())))
    }

    fn undo(&self, py: Python<'_>, blocks: Any<'_, '_>) -> PyResult<()> {
        let array = array::<i32>(blocks, "blocks")?;
        self.call(py, |core| core.undo(self::blocks(array.slice())))
    }

    fn arrive(&self, py: Python<'_>, blocks: Any<'_, '_>) -> PyResult<()> {
        let array = array::<i32>(blocks, "blocks")?;
        self.call(py, |core| core.arrive(self::blocks(array.slice())))
    }

    // -- offline -----------------------------------------------------------------------------

    fn offline(&self, py: Python<'_>, first: Any<'_, '_>, n: Any<'_, '_>) -> PyResult<()> {
        let (first, n) = (count(first, "first", 0)?, count(n, "n", 1)?);
        self.long(py, |core| core.offline(first, n))
    }

    fn online(&self, py: Python<'_>, first: Any<'_, '_>, n: Any<'_, '_>) -> PyResult<()> {
        let (first, n) = (count(first, "first", 0)?, count(n, "n", 1)?);
        self.long(py, |core| core.online(first, n))
    }

    // -- looking -----------------------------------------------------------------------------

    fn references(&self, py: Python<'_>, block: Any<'_, '_>) -> PyResult<u32> {
        let block = count(block, "block", 0)?;
        self.call(py, |core| core.references(block))
    }

    fn states<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        values::states(py, &self.get(py, |core| core.states())?)
    }

    fn free_windows(&self, py: Python<'_>) -> PyResult<u32> {
        self.long(py, |core| Ok(core.free_windows()))
    }

    fn largest_run(&self, py: Python<'_>) -> PyResult<u32> {
        self.long(py, |core| Ok(core.runs().largest))
    }

    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        self.check_process(py)?;
        let found = self.guarded(Core::audit).and_then(|audit| audit);
        found.map_err(|text| values::internal(py, text))
    }
}
