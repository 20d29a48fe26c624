//! The class `MMU`: one method a verb, each a conversion, a call and a conversion back.

use std::ops::Deref;

use kvmmu::{Config, Keys, Mmu, Opening, Zone};
use kvmmu_record::{Body, Recording};
use numpy::{IntoPyArray, PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::{self, array, count, integer, keys, optional, ratio, share};
use crate::errors::core_error;
use crate::guard::Guard;
use crate::tables::BlockTables;
use crate::values::{self, BlockMap, Events, Measure, Moves, Plan, Quote, SequenceInfo, internal};
use crate::verbs::{self, Times, Verb};

type Any<'a, 'py> = &'a Bound<'py, PyAny>;
/// First logical block of each region, and whether it is a huge page.
type Regions<'py> = (Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<bool>>);

/// Decides which sequence holds which block, and what moves where.
#[pyclass(frozen, module = "kvmmu._core")]
pub struct MMU {
    guard: Guard<Mmu>,
    times: Times,
    recording: Option<Recording>,
}

impl Deref for MMU {
    type Target = Guard<Mmu>;

    fn deref(&self) -> &Guard<Mmu> {
        &self.guard
    }
}

impl MMU {
    /// A call that changes what later ones find: timed and recorded, if somebody asked for that.
    /// `call` is given its number in the recording; `value` says what of its result later calls name.
    fn verb_of<R>(
        &self,
        py: Python<'_>,
        verb: Verb,
        arguments: impl FnOnce(&mut Body<'_>),
        value: impl FnOnce(&R) -> Option<u64>,
        call: impl FnOnce(u64) -> PyResult<R>,
    ) -> PyResult<R> {
        let _timed = self.times.start(verb);
        let Some(recording) = &self.recording else {
            return call(0);
        };
        self.check_process(py)?;
        let number = recording.call(verb as u8, arguments);
        let result = call(number);
        verbs::note_outcome(py, recording, number, &result, value);
        result
    }

    /// The same for a call of which no later one names anything.
    fn verb<R>(
        &self,
        py: Python<'_>,
        verb: Verb,
        arguments: impl FnOnce(&mut Body<'_>),
        call: impl FnOnce() -> PyResult<R>,
    ) -> PyResult<R> {
        self.verb_of(py, verb, arguments, |_| None, |_| call())
    }

    /// The same for a plan, which carries the number of the call.
    fn planned(
        &self,
        py: Python<'_>,
        verb: Verb,
        arguments: impl FnOnce(&mut Body<'_>),
        call: impl FnOnce(&Mmu) -> kvmmu::Result<kvmmu::Plan> + Send,
    ) -> PyResult<Plan> {
        let call = |number| Ok(Plan(self.long(py, call)?, number));
        self.verb_of(py, verb, arguments, |_| None, call)
    }
}

#[pymethods]
impl MMU {
    #[new]
    #[pyo3(signature = (
        num_blocks, block_size=None, *, max_sequences=None, max_blocks_per_sequence=None,
        null_block=None, table_nodes=None, prefix_caching=true, placement=None, budget_blocks=None,
        windows_below=None, guarantee=None, gather_least=None, compaction_start=None, compaction_stop=None, anchor=None, page_orders=None, medium_from=None,
        huge_from=None, hold_blocks=None, dedup=false, seed=0, eviction=None, page_aware=None,
        events=None, record=None
    ), text_signature = "(num_blocks, block_size=16, *, max_sequences=1024, \
        max_blocks_per_sequence=None, null_block='last', table_nodes=None, prefix_caching=True, placement='address', \
        budget_blocks=32, windows_below=0.8, guarantee=None, gather_least=0.1, compaction_start=None, compaction_stop=0.3, anchor=0.15, page_orders=(0, 2, 9), medium_from=512, huge_from=2048, \
        hold_blocks=8, dedup=False, seed=0, eviction='lru', page_aware=True, events=0, record=None)")]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        num_blocks: Any<'_, '_>,
        block_size: Option<Any<'_, '_>>,
        max_sequences: Option<Any<'_, '_>>,
        max_blocks_per_sequence: Option<Any<'_, '_>>,
        null_block: Option<Any<'_, '_>>,
        table_nodes: Option<Any<'_, '_>>,
        prefix_caching: bool,
        placement: Option<Any<'_, '_>>,
        budget_blocks: Option<Any<'_, '_>>,
        windows_below: Option<Any<'_, '_>>,
        guarantee: Option<Any<'_, '_>>,
        gather_least: Option<Any<'_, '_>>,
        compaction_start: Option<Any<'_, '_>>,
        compaction_stop: Option<Any<'_, '_>>,
        anchor: Option<Any<'_, '_>>,
        page_orders: Option<Any<'_, '_>>,
        medium_from: Option<Any<'_, '_>>,
        huge_from: Option<Any<'_, '_>>,
        hold_blocks: Option<Any<'_, '_>>,
        dedup: bool,
        #[pyo3(from_py_with = convert::seed)] seed: i64,
        eviction: Option<Any<'_, '_>>,
        page_aware: Option<Any<'_, '_>>,
        events: Option<Any<'_, '_>>,
        record: Option<Any<'_, '_>>,
    ) -> PyResult<Self> {
        let most_blocks = i64::from(kvmmu::MAX_BLOCKS);
        let whole = |value: Option<Any<'_, '_>>, name: &str, most: i64, default: u32| match value {
            Some(value) => integer(value, name, 1, most).map(|number| number as u32),
            None => Ok(default),
        };
        let num_blocks = integer(num_blocks, "num_blocks", 1, most_blocks)? as u32;
        let most = i64::from(kvmmu::MAX_BLOCK_SIZE);
        let block_size = whole(block_size, "block_size", most, 16)?;
        let mut config = Config::new(num_blocks, block_size);
        let most = i64::from(kvmmu::MAX_SEQUENCES);
        config.max_sequences = whole(max_sequences, "max_sequences", most, config.max_sequences)?;
        let longest = config.max_blocks_per_sequence;
        let most = num_blocks.min(kvmmu::MAX_BLOCKS_PER_SEQUENCE);
        config.max_blocks_per_sequence = whole(
            max_blocks_per_sequence,
            "max_blocks_per_sequence",
            i64::from(most),
            longest,
        )?;
        let nodes = config.default_table_nodes();
        config.table_nodes = whole(
            table_nodes,
            "table_nodes",
            i64::from(kvmmu::MAX_TABLE_NODES),
            nodes,
        )?;
        config.null_block = convert::null_block(null_block, num_blocks)?;
        config.prefix_caching = prefix_caching;
        config.placement = convert::placement(placement, seed)?;
        config.eviction = convert::eviction(eviction)?;
        if let Some(value) = page_aware {
            config.page_aware = convert::flag(value, "page_aware")?;
        }
        if let Some(value) = anchor {
            config.anchor = share(value, "anchor")?;
        }
        let budget = config.budget_blocks;
        config.budget_blocks = whole(budget_blocks, "budget_blocks", most_blocks, budget)?;
        config.page_orders = convert::page_orders(page_orders)?.unwrap_or(config.page_orders);
        let tokens = |value: Option<Any<'_, '_>>, name: &str, default: u32| match value {
            Some(value) => count(value, name, 0),
            None => Ok(default),
        };
        config.huge_from = tokens(huge_from, "huge_from", config.huge_from)?;
        let medium = config.medium_from.min(config.huge_from);
        config.medium_from = tokens(medium_from, "medium_from", medium)?;
        config.hold_blocks = tokens(hold_blocks, "hold_blocks", config.hold_blocks)?;
        config.dedup = dedup;
        if let Some(value) = windows_below {
            config.windows_below = ratio(value, "windows_below")?;
        }
        if let Some(value) = guarantee {
            config.guarantee = Some(count(value, "guarantee", 0)?);
        }
        if let Some(value) = gather_least {
            config.gather_least = ratio(value, "gather_least")?;
        }
        if let Some(value) = compaction_start {
            let start = ratio(value, "compaction_start")?;
            config.compaction_start = Some(start);
            config.compaction_stop = config.compaction_stop.min(start);
        }
        if let Some(value) = compaction_stop {
            config.compaction_stop = ratio(value, "compaction_stop")?;
        }
        if let Some(value) = events {
            let most = i64::from(kvmmu::MAX_EVENTS);
            config.events = integer(value, "events", 0, most)? as u32;
        }
        let record = verbs::wanted(record)?;
        let guard = Guard::new(py, "MMU", || Mmu::new(config))?;
        let begin = |name: String| verbs::begin(py, &name, guard.core.config());
        let recording = record.map(begin).transpose()?;
        Ok(Self {
            guard,
            times: Times::new(),
            recording,
        })
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.core.config().num_blocks
    }
    #[getter]
    fn block_size(&self) -> u32 {
        self.core.config().block_size
    }
    #[getter]
    fn null_block(&self) -> u32 {
        self.core.null_block()
    }
    #[getter]
    fn max_sequences(&self) -> u32 {
        self.core.config().max_sequences
    }
    #[getter]
    fn max_blocks_per_sequence(&self) -> u32 {
        self.core.config().max_blocks_per_sequence
    }
    #[getter]
    fn budget_blocks(&self) -> u32 {
        self.core.config().budget_blocks
    }

    // -- sequences ---------------------------------------------------------------------------

    #[getter]
    fn page_orders(&self) -> Vec<u32> {
        self.core.config().page_orders.iter().collect()
    }

    #[pyo3(signature = (
        tokens, *, salt=None, extra_keys=None, anchor=false, page_orders=None, require=None,
        contiguous=None
    ), text_signature = "($self, tokens, *, salt=None, extra_keys=None, anchor=False, \
        page_orders=None, require=None, contiguous=0)")]
    #[allow(clippy::too_many_arguments)]
    fn open(
        &self,
        py: Python<'_>,
        tokens: Any<'_, '_>,
        salt: Option<Any<'_, '_>>,
        extra_keys: Option<Any<'_, '_>>,
        anchor: bool,
        page_orders: Option<Any<'_, '_>>,
        require: Option<Any<'_, '_>>,
        contiguous: Option<Any<'_, '_>>,
    ) -> PyResult<i64> {
        let tokens = array::<i32>(tokens, "tokens")?;
        let (tokens, keys) = (tokens.slice(), keys(salt, extra_keys)?);
        let opening = opening(anchor, page_orders, require, contiguous)?;
        let kept = self.recording.as_ref().map(|_| keys.clone());
        let arguments = |body: &mut Body<'_>| {
            if let Some(keys) = &kept {
                noted_opening(body, tokens, keys, &opening);
            }
        };
        let id = |id: &i64| Some(*id as u64);
        self.verb_of(py, Verb::Open, arguments, id, |_| {
            self.call(py, |core| core.open_with(tokens, keys, opening))
        })
    }

    fn release_before(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = convert::sequence)] sequence: i64,
        token: Any<'_, '_>,
    ) -> PyResult<u32> {
        let token = count(token, "token", 0)?;
        let arguments = |body: &mut Body<'_>| noted(body, &[sequence as u64, token.into()]);
        self.verb(py, Verb::ReleaseBefore, arguments, || {
            self.long(py, |core| core.release_before(sequence, token))
        })
    }

    fn look(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = convert::sequence)] sequence: i64,
        block: Any<'_, '_>,
    ) -> PyResult<Option<u32>> {
        let index = count(block, "block", 0)?;
        self.get(py, |core| core.look(sequence, index))
    }

    fn append<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = convert::sequence)] sequence: i64,
        tokens: Any<'_, 'py>,
    ) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let tokens = array::<i32>(tokens, "tokens")?;
        let tokens = tokens.slice();
        let arguments = |body: &mut Body<'_>| {
            body.number(sequence as u64).words(tokens);
        };
        let copies = self.verb(py, Verb::Append, arguments, || {
            self.call(py, |core| core.append(sequence, tokens))
        })?;
        Ok(values::copies(py, &copies))
    }

    fn fork(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = convert::sequence)] sequence: i64,
    ) -> PyResult<i64> {
        let arguments = |body: &mut Body<'_>| noted(body, &[sequence as u64]);
        let id = |id: &i64| Some(*id as u64);
        self.verb_of(py, Verb::Fork, arguments, id, |_| {
            self.long(py, |core| core.fork(sequence))
        })
    }

    fn truncate(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = convert::sequence)] sequence: i64,
        num_tokens: Any<'_, '_>,
    ) -> PyResult<()> {
        let tokens = count(num_tokens, "num_tokens", 0)?;
        let arguments = |body: &mut Body<'_>| noted(body, &[sequence as u64, tokens.into()]);
        self.verb(py, Verb::Truncate, arguments, || {
            self.long(py, |core| core.truncate(sequence, tokens))
        })
    }

    fn close(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = convert::sequence)] sequence: i64,
    ) -> PyResult<()> {
        let arguments = |body: &mut Body<'_>| noted(body, &[sequence as u64]);
        self.verb(py, Verb::Close, arguments, || {
            self.long(py, |core| core.close(sequence))
        })
    }

    fn info(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = convert::sequence)] sequence: i64,
    ) -> PyResult<SequenceInfo> {
        self.call(py, |core| core.info(sequence)).map(SequenceInfo)
    }

    fn block_table<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = convert::sequence)] sequence: i64,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let blocks = self.call(py, |core| core.block_table(sequence))?;
        let blocks: Vec<i32> = blocks.into_iter().map(|block| block as i32).collect();
        Ok(blocks.into_pyarray(py))
    }

    fn regions<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = convert::sequence)] sequence: i64,
    ) -> PyResult<Regions<'py>> {
        let regions = self.call(py, |core| core.regions(sequence))?;
        let regions = regions
            .into_iter()
            .map(|(first, huge)| (first as i32, huge));
        let (first, huge): (Vec<i32>, Vec<bool>) = regions.unzip();
        Ok((first.into_pyarray(py), huge.into_pyarray(py)))
    }

    fn translate<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = convert::sequence)] sequence: i64,
        positions: Any<'_, 'py>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let positions = array::<i64>(positions, "positions")?;
        let slots = self.call(py, |core| core.translate(sequence, positions.slice()))?;
        Ok(slots.into_pyarray(py))
    }

    fn sequences<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        Ok(self.get(py, Mmu::sequences)?.into_pyarray(py))
    }

    #[pyo3(name = "match", signature = (tokens, *, salt=None, extra_keys=None))]
    fn match_(
        &self,
        py: Python<'_>,
        tokens: Any<'_, '_>,
        salt: Option<Any<'_, '_>>,
        extra_keys: Option<Any<'_, '_>>,
    ) -> PyResult<u32> {
        let tokens = array::<i32>(tokens, "tokens")?;
        let (tokens, keys) = (tokens.slice(), keys(salt, extra_keys)?);
        let _timed = self.times.start(Verb::Match);
        self.get(py, |core| core.matched_tokens(tokens, &keys))
    }

    #[pyo3(signature = (
        tokens, *, salt=None, extra_keys=None, page_orders=None, require=None, contiguous=None
    ), text_signature = "($self, tokens, *, salt=None, extra_keys=None, page_orders=None, \
        require=None, contiguous=0)")]
    #[allow(clippy::too_many_arguments)]
    fn quote(
        &self,
        py: Python<'_>,
        tokens: Any<'_, '_>,
        salt: Option<Any<'_, '_>>,
        extra_keys: Option<Any<'_, '_>>,
        page_orders: Option<Any<'_, '_>>,
        require: Option<Any<'_, '_>>,
        contiguous: Option<Any<'_, '_>>,
    ) -> PyResult<Quote> {
        let tokens = array::<i32>(tokens, "tokens")?;
        let (tokens, keys) = (tokens.slice(), keys(salt, extra_keys)?);
        let opening = opening(false, page_orders, require, contiguous)?;
        let _timed = self.times.start(Verb::Quote);
        self.call(py, |core| {
            core.quote_with(tokens, &keys, opening)
                .map(|quote| core.with_moves(quote))
        })
        .map(Quote)
    }

    // -- steps -------------------------------------------------------------------------------

    fn begin_step(&self, py: Python<'_>) -> PyResult<u64> {
        let number = |step: &u64| Some(*step);
        self.verb_of(
            py,
            Verb::BeginStep,
            |_| (),
            number,
            |_| self.get(py, Mmu::begin_step),
        )
    }

    #[pyo3(signature = (step, sequences, tables, *, query_lens=None, new_tokens=None))]
    fn prepare<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = convert::step)] step: u64,
        sequences: Any<'_, 'py>,
        tables: &BlockTables,
        query_lens: Option<Any<'_, 'py>>,
        new_tokens: Option<Any<'_, 'py>>,
    ) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let ids = array::<i64>(sequences, "sequences")?;
        let lens = optional::<i32>(query_lens, "query_lens")?;
        let new = optional::<i32>(new_tokens, "new_tokens")?;
        let (ids, lens) = (ids.slice(), lens.as_ref().map(|lens| lens.slice()));
        let new = new.as_ref().map(|new| new.slice());
        let arguments = |body: &mut Body<'_>| {
            body.number(step)
                .number(tables.number)
                .batch(ids)
                .optional_words(lens)
                .optional_words(new);
        };
        let copies = self.verb(py, Verb::Prepare, arguments, || {
            self.check_process(py)?;
            let copies = tables.with(py, |rows, buffers| {
                self.guarded(|core| core.prepare(step, ids, lens, new, rows, buffers))
            })?;
            self.outcome(py, copies)
        })?;
        Ok(values::copies(py, &copies))
    }

    fn written(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = convert::step)] step: u64,
    ) -> PyResult<()> {
        let arguments = |body: &mut Body<'_>| noted(body, &[step]);
        self.verb(py, Verb::Written, arguments, || {
            self.call(py, |core| core.written(step))
        })
    }

    fn cancel(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = convert::step)] step: u64,
    ) -> PyResult<()> {
        let arguments = |body: &mut Body<'_>| noted(body, &[step]);
        self.verb(py, Verb::Cancel, arguments, || {
            self.call(py, |core| core.cancel(step))
        })
    }

    fn end_step(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = convert::step)] step: u64,
    ) -> PyResult<()> {
        let arguments = |body: &mut Body<'_>| noted(body, &[step]);
        self.verb(py, Verb::EndStep, arguments, || {
            self.call(py, |core| core.end_step(step))
        })
    }

    fn steps_in_flight(&self, py: Python<'_>) -> PyResult<usize> {
        self.get(py, Mmu::steps_in_flight)
    }

    // -- tables ------------------------------------------------------------------------------

    #[pyo3(signature = (
        block_table, seq_lens, slot_mapping, query_start_loc, *, kernel_block_size=None,
        page_order=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn register_tables(
        &self,
        block_table: Any<'_, '_>,
        seq_lens: Any<'_, '_>,
        slot_mapping: Any<'_, '_>,
        query_start_loc: Any<'_, '_>,
        kernel_block_size: Option<Any<'_, '_>>,
        page_order: Option<Any<'_, '_>>,
    ) -> PyResult<BlockTables> {
        let py = block_table.py();
        let mut tables = BlockTables::register(
            &self.core,
            convert::unit(kernel_block_size, page_order, self.core.config().block_size)?,
            block_table,
            seq_lens,
            slot_mapping,
            query_start_loc,
        )?;
        let [rows, width, slots] = tables.shape(py);
        let numbers = [
            rows,
            width,
            slots,
            kernel_block_size.map_or(0, |_| tables.kernel_block_size()),
            page_order.map_or(0, |_| tables.page_order() + 1),
        ];
        let arguments = |body: &mut Body<'_>| noted(body, &numbers.map(u64::from));
        let number = |tables: &BlockTables| Some(tables.number);
        self.verb_of(py, Verb::RegisterTables, arguments, number, |number| {
            tables.number = number;
            Ok(tables)
        })
    }

    fn export(&self, py: Python<'_>, sequences: Any<'_, '_>, tables: &BlockTables) -> PyResult<()> {
        let ids = array::<i64>(sequences, "sequences")?;
        let ids = ids.slice();
        let arguments = |body: &mut Body<'_>| {
            body.number(tables.number).batch(ids);
        };
        self.verb(py, Verb::Export, arguments, || {
            self.check_process(py)?;
            let done = tables.with(py, |rows, buffers| {
                self.guarded(|core| core.export(ids, rows, buffers))
            })?;
            self.outcome(py, done)
        })
    }

    // -- blocks ------------------------------------------------------------------------------

    fn pin(&self, py: Python<'_>, blocks: Any<'_, '_>) -> PyResult<()> {
        let blocks = array::<i64>(blocks, "blocks")?;
        let blocks = blocks.slice();
        self.verb(
            py,
            Verb::Pin,
            |body: &mut Body<'_>| {
                body.longs(blocks);
            },
            || self.call(py, |core| core.pin(blocks)),
        )
    }

    fn unpin(&self, py: Python<'_>, blocks: Any<'_, '_>) -> PyResult<()> {
        let blocks = array::<i64>(blocks, "blocks")?;
        let blocks = blocks.slice();
        self.verb(
            py,
            Verb::Unpin,
            |body: &mut Body<'_>| {
                body.longs(blocks);
            },
            || self.call(py, |core| core.unpin(blocks)),
        )
    }

    fn lease<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = convert::sequence)] sequence: i64,
        start: Any<'_, '_>,
        stop: Any<'_, '_>,
    ) -> PyResult<(u64, Bound<'py, PyArray1<i64>>)> {
        let (start, stop) = (count(start, "start", 0)?, count(stop, "stop", 0)?);
        let arguments =
            |body: &mut Body<'_>| noted(body, &[sequence as u64, start.into(), stop.into()]);
        let id = |lease: &kvmmu::Lease| Some(lease.id);
        let lease = self.verb_of(py, Verb::Lease, arguments, id, |_| {
            self.call(py, |core| core.lease(sequence, start, stop))
        })?;
        Ok((lease.id, numbers(py, lease.blocks)))
    }

    fn end_lease(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = convert::lease)] lease: u64,
    ) -> PyResult<()> {
        let arguments = |body: &mut Body<'_>| noted(body, &[lease]);
        self.verb(py, Verb::EndLease, arguments, || {
            self.call(py, |core| core.end_lease(lease))
        })
    }

    fn num_leases(&self, py: Python<'_>) -> PyResult<usize> {
        self.get(py, Mmu::num_leases)
    }

    fn evict(&self, py: Python<'_>, num_blocks: Any<'_, '_>) -> PyResult<u32> {
        let n = count(num_blocks, "num_blocks", 0)?;
        let arguments = |body: &mut Body<'_>| noted(body, &[n.into()]);
        self.verb(py, Verb::Evict, arguments, || {
            self.long(py, |core| Ok(core.evict(n)))
        })
    }

    fn references<'py>(
        &self,
        py: Python<'py>,
        blocks: Any<'_, 'py>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let blocks = array::<i64>(blocks, "blocks")?;
        let references = self.call(py, |core| core.references(blocks.slice()))?;
        Ok(numbers(py, references))
    }

    fn states<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        values::states(py, &self.get(py, Mmu::states)?)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (name, value) in self.get(py, Mmu::stats)?.entries() {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    fn measure(&self, py: Python<'_>) -> PyResult<Measure> {
        self.long(py, |core| Ok(core.measure())).map(Measure)
    }

    fn block_map(&self, py: Python<'_>) -> PyResult<BlockMap> {
        let map = self.long(py, |core| Ok(core.block_map()))?;
        Ok(BlockMap::new(py, map))
    }

    #[getter]
    fn keeps_guarantee(&self) -> bool {
        self.core.config().guarantee.is_some()
    }

    fn time_operations(&self, every: Any<'_, '_>) -> PyResult<()> {
        self.times.set(integer(every, "every", 0, 1 << 20)? as u32);
        Ok(())
    }

    fn operation_times<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.times.read(py)
    }

    #[staticmethod]
    fn operation_time_bounds() -> Vec<f64> {
        Times::bounds()
    }

    fn events(&self, py: Python<'_>, since: Any<'_, '_>) -> PyResult<Events> {
        let since = integer(since, "since", 0, i64::MAX)? as u64;
        self.long(py, |core| core.events(since))
            .map(Events::numbered)
    }

    fn published(&self, py: Python<'_>) -> PyResult<Events> {
        self.long(py, |core| Ok(core.published()))
            .map(Events::unnumbered)
    }

    #[getter]
    fn recording<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(recording) = &self.recording else {
            return Ok(None);
        };
        self.check_process(py)?;
        let dict = PyDict::new(py);
        dict.set_item("file", recording.path())?;
        dict.set_item("bytes", recording.size())?;
        dict.set_item("failure", recording.failure())?;
        Ok(Some(dict))
    }

    fn flush_recording(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(recording) = &self.recording {
            self.check_process(py)?;
            py.detach(|| recording.flush());
        }
        Ok(())
    }

    // -- compaction --------------------------------------------------------------------------

    #[pyo3(signature = (num_blocks, *, max_blocks=None))]
    fn plan_free_run(
        &self,
        py: Python<'_>,
        num_blocks: Any<'_, '_>,
        max_blocks: Option<Any<'_, '_>>,
    ) -> PyResult<Plan> {
        let n = count(num_blocks, "num_blocks", 1)?;
        let most = limit(max_blocks)?;
        let arguments = |body: &mut Body<'_>| noted(body, &[n, most].map(u64::from));
        self.planned(py, Verb::PlanFreeRun, arguments, |core| {
            core.plan_free_run(n, most)
        })
    }

    #[pyo3(signature = (ratio, *, max_blocks=None))]
    fn plan_below(
        &self,
        py: Python<'_>,
        ratio: Any<'_, '_>,
        max_blocks: Option<Any<'_, '_>>,
    ) -> PyResult<Plan> {
        let (ratio, most) = (crate::convert::ratio(ratio, "ratio")?, limit(max_blocks)?);
        let arguments = |body: &mut Body<'_>| {
            body.float(ratio).number(most.into());
        };
        self.planned(py, Verb::PlanBelow, arguments, |core| {
            core.plan_below(ratio, most)
        })
    }

    #[pyo3(signature = (num_pages, *, max_blocks=None))]
    fn plan_huge_pages(
        &self,
        py: Python<'_>,
        num_pages: Any<'_, '_>,
        max_blocks: Option<Any<'_, '_>>,
    ) -> PyResult<Plan> {
        let (k, most) = (count(num_pages, "num_pages", 1)?, limit(max_blocks)?);
        let arguments = |body: &mut Body<'_>| noted(body, &[k, most].map(u64::from));
        self.planned(py, Verb::PlanHugePages, arguments, |core| {
            core.plan_huge_pages(k, most)
        })
    }

    #[pyo3(signature = (size, groups, *, max_blocks=None))]
    fn plan_groups(
        &self,
        py: Python<'_>,
        size: Any<'_, '_>,
        groups: Any<'_, '_>,
        max_blocks: Option<Any<'_, '_>>,
    ) -> PyResult<Plan> {
        let (size, k) = (count(size, "size", 1)?, count(groups, "groups", 1)?);
        let most = limit(max_blocks)?;
        let arguments = |body: &mut Body<'_>| noted(body, &[size, k, most].map(u64::from));
        self.planned(py, Verb::PlanGroups, arguments, |core| {
            core.plan_groups(size, k, most)
        })
    }

    #[pyo3(signature = (sequence, *, max_blocks=None))]
    fn plan_gather(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = convert::sequence)] sequence: i64,
        max_blocks: Option<Any<'_, '_>>,
    ) -> PyResult<Plan> {
        let most = limit(max_blocks)?;
        let arguments = |body: &mut Body<'_>| noted(body, &[sequence as u64, most.into()]);
        self.planned(py, Verb::PlanGather, arguments, |core| {
            core.plan_gather(sequence, most)
        })
    }

    #[pyo3(signature = (*, max_blocks=None))]
    fn plan_compaction(
        &self,
        py: Python<'_>,
        max_blocks: Option<Any<'_, '_>>,
    ) -> PyResult<Option<Plan>> {
        let most = limit(max_blocks)?;
        let arguments = |body: &mut Body<'_>| noted(body, &[most.into()]);
        self.verb_of(
            py,
            Verb::PlanCompaction,
            arguments,
            |_| None,
            |number| {
                let plan = self.long(py, |core| Ok(core.plan_compaction(Some(most))))?;
                Ok(plan.map(|plan| Plan(plan, number)))
            },
        )
    }

    fn ready(&self, py: Python<'_>, num_blocks: Any<'_, '_>) -> PyResult<bool> {
        let n = count(num_blocks, "num_blocks", 1)?;
        let arguments = |body: &mut Body<'_>| noted(body, &[n.into()]);
        self.verb(py, Verb::Ready, arguments, || {
            self.long(py, |core| Ok(core.ready(n)))
        })
    }

    fn guarantee<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let slack = self.core.config().guarantee.unwrap_or(0);
        let held = self.long(py, |core| Ok(core.held_windows(slack)))?;
        let dict = PyDict::new(py);
        dict.set_item("live", held.live)?;
        dict.set_item("windows", held.windows)?;
        dict.set_item("allowed", held.allowed)?;
        dict.set_item("owed", held.owed)?;
        dict.set_item("immovable", held.immovable)?;
        Ok(dict)
    }

    fn begin(&self, py: Python<'_>, plan: &Plan) -> PyResult<Moves> {
        let epoch = |moves: &Moves| Some(moves.0.epoch());
        self.verb_of(
            py,
            Verb::Begin,
            |body: &mut Body<'_>| {
                body.number(plan.1);
            },
            epoch,
            |_| self.long(py, |core| core.begin(&plan.0)).map(Moves),
        )
    }

    fn commit(&self, py: Python<'_>, moves: &Moves) -> PyResult<u32> {
        let arguments = |body: &mut Body<'_>| noted(body, &[moves.0.epoch()]);
        self.verb(py, Verb::Commit, arguments, || {
            self.long(py, |core| core.commit(&moves.0))
        })
    }

    fn abort(&self, py: Python<'_>, moves: &Moves) -> PyResult<()> {
        let arguments = |body: &mut Body<'_>| noted(body, &[moves.0.epoch()]);
        self.verb(py, Verb::Abort, arguments, || {
            self.long(py, |core| core.abort(&moves.0))
        })
    }

    // -- memory given back -------------------------------------------------------------------

    #[pyo3(signature = (num_blocks, *, granule=None, max_blocks=None),
        text_signature = "($self, num_blocks, *, granule=1, max_blocks=None)")]
    fn plan_shrink(
        &self,
        py: Python<'_>,
        num_blocks: Any<'_, '_>,
        granule: Option<Any<'_, '_>>,
        max_blocks: Option<Any<'_, '_>>,
    ) -> PyResult<Plan> {
        let (n, size) = (count(num_blocks, "num_blocks", 1)?, self::granule(granule)?);
        let most = limit(max_blocks)?;
        let arguments = |body: &mut Body<'_>| noted(body, &[n, size, most].map(u64::from));
        self.planned(py, Verb::PlanShrink, arguments, |core| {
            core.plan_shrink(n, size, most)
        })
    }

    #[pyo3(signature = (num_blocks, *, granule=None),
        text_signature = "($self, num_blocks, *, granule=1)")]
    fn shrink<'py>(
        &self,
        py: Python<'py>,
        num_blocks: Any<'_, '_>,
        granule: Option<Any<'_, '_>>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let (n, size) = (count(num_blocks, "num_blocks", 0)?, self::granule(granule)?);
        let arguments = |body: &mut Body<'_>| noted(body, &[n, size].map(u64::from));
        let gone = self.verb(py, Verb::Shrink, arguments, || {
            self.long(py, |core| core.take_offline(n, size))
        })?;
        Ok(numbers(py, gone))
    }

    #[pyo3(signature = (num_blocks=None, *, granule=None),
        text_signature = "($self, num_blocks=None, *, granule=1)")]
    fn offline_blocks<'py>(
        &self,
        py: Python<'py>,
        num_blocks: Option<Any<'_, '_>>,
        granule: Option<Any<'_, '_>>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let n = num_blocks.map_or(Ok(u32::MAX), |value| count(value, "num_blocks", 0))?;
        let size = self::granule(granule)?;
        let blocks = self.long(py, |core| core.offline_blocks(n, size))?;
        Ok(numbers(py, blocks))
    }

    fn grow(&self, py: Python<'_>, blocks: Any<'_, '_>) -> PyResult<()> {
        let blocks = array::<i64>(blocks, "blocks")?;
        let blocks = blocks.slice();
        self.verb(
            py,
            Verb::Grow,
            |body: &mut Body<'_>| {
                body.longs(blocks);
            },
            || self.call(py, |core| core.bring_online(blocks)),
        )
    }

    // -- checks ------------------------------------------------------------------------------

    #[pyo3(signature = (tables=None))]
    fn validate(&self, py: Python<'_>, tables: Option<&BlockTables>) -> PyResult<()> {
        self.check_process(py)?;
        let checked = match tables {
            None => self.guarded(|core| core.validate(None)),
            Some(tables) => {
                let fits = tables.with(py, |rows, buffers| rows.check(&self.core, 0, buffers))?;
                fits.map_err(|failed| core_error(py, failed))?;
                tables.with(py, |rows, buffers| {
                    self.guarded(|core| core.validate(Some((rows, buffers))))
                })?
            }
        };
        let checked = checked.map_err(|text| internal(py, text))?;
        checked.map_err(|broken| internal(py, broken.to_string()))
    }

    fn _panic_for_test(&self, py: Python<'_>) -> PyResult<()> {
        self.verb(
            py,
            Verb::Panic,
            |_| (),
            || self.get(py, |_| panic!("on purpose")),
        )
    }
}

/// How a prompt is to be placed.
fn opening(
    anchor: bool,
    page_orders: Option<Any<'_, '_>>,
    require: Option<Any<'_, '_>>,
    contiguous: Option<Any<'_, '_>>,
) -> PyResult<Opening> {
    Ok(Opening {
        zone: if anchor { Zone::Anchor } else { Zone::Body },
        page_orders: convert::page_orders(page_orders)?,
        require_huge: match require {
            Some(value) => convert::word(value, "require", &["huge"])? == "huge",
            None => false,
        },
        contiguous: contiguous.map_or(Ok(0), |value| count(value, "contiguous", 0))?,
    })
}

/// Numbers as the arguments of a recorded call.
fn noted(body: &mut Body<'_>, numbers: &[u64]) {
    for &number in numbers {
        body.number(number);
    }
}

/// The arguments of a recorded `open`.
fn noted_opening(body: &mut Body<'_>, tokens: &[i32], keys: &Keys, opening: &Opening) {
    let mut extra: Vec<_> = keys.extra.iter().collect();
    extra.sort_unstable();
    body.words(tokens)
        .bytes(&keys.salt)
        .number(extra.len() as u64);
    for (&index, bytes) in extra {
        body.number(index.into()).bytes(bytes);
    }
    let orders =
        (opening.page_orders).map(|orders| orders.iter().fold(0, |bits, order| bits | 1 << order));
    body.flag(opening.zone == Zone::Anchor)
        .optional(orders)
        .flag(opening.require_huge)
        .number(opening.contiguous.into());
}

/// Most moves of one plan.
fn limit(max_blocks: Option<Any<'_, '_>>) -> PyResult<u32> {
    max_blocks.map_or(Ok(u32::MAX), |value| count(value, "max_blocks", 1))
}

/// Blocks of an aligned group that goes offline as a whole.
fn granule(value: Option<Any<'_, '_>>) -> PyResult<u32> {
    value.map_or(Ok(1), |value| count(value, "granule", 1))
}

/// Numbers as `int64 [n]`.
fn numbers(py: Python<'_>, found: Vec<u32>) -> Bound<'_, PyArray1<i64>> {
    let numbers: Vec<i64> = found.into_iter().map(i64::from).collect();
    numbers.into_pyarray(py)
}
