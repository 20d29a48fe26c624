//! Every form of rows against a plain walk of the page table.
//!
//! Random sequences are opened, grown, forked, truncated, closed and moved. After each operation a
//! batch of them is prepared or exported into one of several registered buffers, each with a unit of
//! its own, and everything in the buffers is computed again from the blocks and lengths that the
//! manager tells of each sequence: rows, padding, CSR, groups of rows, and what was said to be dirty.

use kvmmu::{
    Cascade, CascadeLevel, Config, DirtyRow, Error, Keys, Mmu, Rows, States, Tables, Unit,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

const ROWS: usize = 5;
const SIZE: u32 = 4;

#[derive(Debug, Clone)]
enum Op {
    Open {
        shared: u8,
        len: u8,
    },
    Append {
        seq: u8,
        n: u8,
    },
    Fork(u8),
    Truncate {
        seq: u8,
        to: u8,
    },
    Close(u8),
    Move {
        run: u8,
    },
    Prepare {
        form: u8,
        seqs: Vec<u8>,
        query: Vec<u8>,
    },
    Export {
        form: u8,
        seqs: Vec<u8>,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let seqs = || proptest::collection::vec(any::<u8>(), 0..=ROWS);
    prop_oneof![
        4 => (0u8..40, 0u8..40).prop_map(|(shared, len)| Op::Open { shared, len }),
        2 => (any::<u8>(), 0u8..9).prop_map(|(seq, n)| Op::Append { seq, n }),
        3 => any::<u8>().prop_map(Op::Fork),
        2 => (any::<u8>(), 0u8..40).prop_map(|(seq, to)| Op::Truncate { seq, to }),
        2 => any::<u8>().prop_map(Op::Close),
        2 => any::<u8>().prop_map(|run| Op::Move { run }),
        8 => (any::<u8>(), seqs(), proptest::collection::vec(0u8..7, ROWS))
            .prop_map(|(form, seqs, query)| Op::Prepare { form, seqs, query }),
        8 => (any::<u8>(), seqs()).prop_map(|(form, seqs)| Op::Export { form, seqs }),
    ]
}

/// One set of registered buffers.
struct Form {
    unit: Unit,
    rows: Rows,
    tables: Tables,
    width: usize,
    /// Rows of the last call, and its query tokens: none after an export.
    ids: Vec<i64>,
    query: Option<Vec<usize>>,
    /// What a mirror has that follows the dirty rows only.
    mirror: Vec<i32>,
}

#[derive(Debug, Default)]
struct Seen {
    pages: u64,
    refused: u64,
    refused_late: u64,
    shared: u64,
    moved: u64,
}

struct World {
    mmu: Mmu,
    ids: Vec<i64>,
    forms: Vec<Form>,
    next: i32,
    seen: Seen,
}

/// Entries of a sequence by a plain walk: `Err` names the first group that is no page.
fn walk(mmu: &Mmu, unit: Unit, id: i64, tokens: u32) -> Result<Vec<i32>, u32> {
    let blocks = mmu.block_table(id).unwrap();
    let memory = mmu.config().num_blocks + 1;
    match unit {
        Unit::Block => Ok(blocks.iter().map(|&block| block as i32).collect()),
        Unit::KernelBlock { tokens: own } => Ok((0..tokens)
            .step_by(own as usize)
            .map(|at| ((blocks[(at / SIZE) as usize] * SIZE + at % SIZE) / own) as i32)
            .collect()),
        Unit::Page { order } => {
            let mut entries = Vec::new();
            for (group, blocks) in (0..).zip(blocks.chunks(1 << order)) {
                let whole = blocks.windows(2).all(|two| two[0] + 1 == two[1]);
                let end = blocks[0] + (1 << order);
                if !whole || blocks[0] % (1 << order) != 0 || end > memory {
                    return Err(group);
                }
                entries.push((blocks[0] >> order) as i32);
            }
            Ok(entries)
        }
    }
}

impl World {
    fn new(blocks: u32, null: u32) -> Self {
        let mut config = Config::new(blocks, SIZE);
        config.max_sequences = 12;
        config.null_block = null;
        let mmu = Mmu::new(config).unwrap();
        let units = [
            Unit::Block,
            Unit::KernelBlock { tokens: 1 },
            Unit::KernelBlock { tokens: 2 },
            Unit::KernelBlock { tokens: 4 },
            Unit::Page { order: 0 },
            Unit::Page { order: 1 },
            Unit::Page { order: 2 },
        ];
        let forms = units.into_iter().filter_map(|unit| {
            let width = (blocks * SIZE) as usize;
            let rows = Rows::of(&mmu, unit, ROWS, width, 64).ok()?;
            let tables = rows.buffers();
            let mirror = tables.block_table.clone();
            Some(Form {
                unit,
                rows,
                tables,
                width,
                ids: Vec::new(),
                query: Some(Vec::new()),
                mirror,
            })
        });
        let forms = forms.collect();
        Self {
            mmu,
            ids: Vec::new(),
            forms,
            next: 1000,
            seen: Seen::default(),
        }
    }

    fn pick(&self, choice: u8) -> Option<usize> {
        (!self.ids.is_empty()).then(|| choice as usize % self.ids.len())
    }

    /// Some sequences for one set of buffers; as a rule those that lie in its pages.
    fn some(&self, form: u8, choices: &[u8]) -> (usize, Vec<i64>) {
        let any = form.is_multiple_of(4);
        let form = form as usize / 4 % self.forms.len();
        let mut ids = Vec::new();
        for &choice in choices {
            let id = self.pick(choice).map(|at| self.ids[at]);
            ids.extend(
                id.filter(|id| {
                    !ids.contains(id) && (any || self.first_bad(form, &[*id]).is_none())
                }),
            );
        }
        (form, ids)
    }

    fn fresh(&mut self, n: usize) -> Vec<i32> {
        self.next += n as i32;
        (self.next - n as i32..self.next).collect()
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Open { shared, len } => {
                let mut tokens: Vec<i32> = (0..i32::from(shared)).collect();
                tokens.extend(self.fresh(len as usize));
                if let Ok(id) = self.mmu.open(&tokens, Keys::default()) {
                    self.ids.push(id);
                }
            }
            Op::Append { seq, n } => {
                let tokens = self.fresh(n as usize);
                if let Some(at) = self.pick(seq) {
                    let _ = self.mmu.append(self.ids[at], &tokens);
                }
            }
            Op::Fork(seq) => {
                if let Some(at) = self.pick(seq)
                    && let Ok(id) = self.mmu.fork(self.ids[at])
                {
                    self.ids.insert(at + 1, id);
                }
            }
            Op::Truncate { seq, to } => {
                if let Some(at) = self.pick(seq) {
                    let to = u32::from(to).min(self.mmu.info(self.ids[at]).unwrap().num_tokens);
                    self.mmu.truncate(self.ids[at], to).unwrap();
                }
            }
            Op::Close(seq) => {
                if let Some(at) = self.pick(seq) {
                    self.mmu.close(self.ids.remove(at)).unwrap();
                }
            }
            Op::Move { run } => self.moves(run),
            Op::Prepare { form, seqs, query } => self.prepare(form, &seqs, &query),
            Op::Export { form, seqs } => {
                let (form, ids) = self.some(form, &seqs);
                self.export(form, ids);
            }
        }
    }

    /// Moves blocks, and exports every set of buffers again: lengths and row starts stay.
    fn moves(&mut self, run: u8) {
        let most = self.mmu.measure().available.total;
        let Ok(plan) = self
            .mmu
            .plan_free_run(most.min(u32::from(run)).max(1), u32::MAX)
        else {
            return;
        };
        let open = |ids: &[i64]| ids.iter().all(|id| self.ids.contains(id));
        // Up to date first, so that what changes then is the move.
        let again: Vec<usize> = (0..self.forms.len())
            .filter(|&form| open(&self.forms[form].ids))
            .collect();
        let mut before = Vec::new();
        for &form in &again {
            let ids = self.forms[form].ids.clone();
            let done = self.export(form, ids);
            let csr = done.then(|| self.forms[form].csr());
            before.push((form, csr, self.forms[form].tables.clone()));
        }
        let moves = self.mmu.begin(&plan).unwrap();
        self.seen.moved += u64::from(self.mmu.commit(&moves).unwrap());
        for (form, csr, tables) in before {
            let ids = self.forms[form].ids.clone();
            if !self.export(form, ids) {
                continue;
            }
            let now = &self.forms[form].tables;
            assert_eq!(now.query_start_loc, tables.query_start_loc);
            assert_eq!(now.slot_mapping, tables.slot_mapping);
            if let Some((indptr, _, last)) = csr {
                assert_eq!(now.seq_lens, tables.seq_lens);
                let (now_indptr, _, now_last) = self.forms[form].csr();
                assert_eq!((now_indptr, now_last), (indptr, last));
            }
        }
    }

    /// What a call with these rows must answer if it does not fail for anything else.
    fn first_bad(&self, form: usize, ids: &[i64]) -> Option<(i64, u32)> {
        let unit = self.forms[form].unit;
        ids.iter().find_map(|&id| {
            let tokens = self.mmu.info(id).unwrap().num_tokens;
            walk(&self.mmu, unit, id, tokens)
                .err()
                .map(|group| (id, group))
        })
    }

    fn refused(&mut self, error: &Error, expected: Option<(i64, u32)>, form: usize, was: &Tables) {
        let now = &self.forms[form];
        assert_eq!(now.tables, *was, "a refused call wrote the buffers");
        let Error::Scattered {
            sequence,
            group,
            needed,
            in_place,
            ..
        } = *error
        else {
            assert!(expected.is_none() || matches!(error, Error::LimitExceeded { .. }));
            return;
        };
        self.seen.refused += 1;
        assert!(in_place < needed, "{error}");
        match expected {
            Some(expected) => assert_eq!((sequence, group), expected, "{error}"),
            None => self.seen.refused_late += 1,
        }
    }

    fn export(&mut self, form: usize, ids: Vec<i64>) -> bool {
        let expected = self.first_bad(form, &ids);
        let was = self.forms[form].tables.clone();
        let here = &mut self.forms[form];
        let done = self
            .mmu
            .export(&ids, &mut here.rows, &mut here.tables.borrow());
        if let Err(error) = done {
            assert!(matches!(error, Error::Scattered { .. }), "{error}");
            self.refused(&error, expected, form, &was);
            return false;
        }
        assert_eq!(expected, None);
        let fits = here.ids == ids && here.tables.seq_lens == was.seq_lens;
        here.query = here.query.take().filter(|_| fits);
        here.ids = ids;
        self.check(form, &was);
        true
    }

    fn prepare(&mut self, form: u8, seqs: &[u8], query: &[u8]) {
        let (form, ids) = self.some(form, seqs);
        let query: Vec<i32> = (ids.iter().zip(query))
            .map(|(&id, &query)| {
                let info = self.mmu.info(id).unwrap();
                let left = (info.num_tokens - info.num_scheduled) as i32;
                if left > 6 { left } else { i32::from(query) }
            })
            .collect();
        let lacking: i32 = (ids.iter().zip(&query))
            .map(|(&id, &query)| {
                let info = self.mmu.info(id).unwrap();
                (query - (info.num_tokens - info.num_scheduled) as i32).max(0)
            })
            .sum();
        let new = self.fresh(lacking as usize);
        let expected = self.first_bad(form, &ids);
        let step = self.mmu.begin_step();
        let before = self.mmu.states();
        let was = self.forms[form].tables.clone();
        let tables: Vec<_> = self
            .ids
            .iter()
            .map(|&id| self.mmu.block_table(id))
            .collect();
        let here = &mut self.forms[form];
        let done = self.mmu.prepare(
            step,
            &ids,
            Some(&query),
            Some(&new),
            &mut here.rows,
            &mut here.tables.borrow(),
        );
        match done {
            Ok(_) => {
                here.query = Some(query.iter().map(|&query| query as usize).collect());
                here.ids = ids;
                self.check(form, &was);
                self.mmu.written(step).unwrap();
            }
            Err(error) => {
                self.refused(&error, expected, form, &was);
                let now: Vec<_> = self
                    .ids
                    .iter()
                    .map(|&id| self.mmu.block_table(id))
                    .collect();
                assert_eq!(now, tables);
                let states = self.mmu.states();
                assert_eq!(states.available, before.available);
                assert_eq!(states.in_use, before.in_use);
            }
        }
        self.mmu.end_step(step).unwrap();
    }

    fn check(&mut self, form: usize, was: &Tables) {
        let here = &mut self.forms[form];
        let null = match here.unit {
            Unit::Block => self.mmu.null_block(),
            Unit::KernelBlock { tokens } => self.mmu.null_block() * (SIZE / tokens),
            Unit::Page { order } => self.mmu.null_block() >> order,
        } as i32;
        assert_eq!(here.rows.null_entry(), null);
        let mut plain = vec![null; ROWS * here.width];
        let mut lens = vec![0; ROWS];
        for (row, &id) in here.ids.iter().enumerate() {
            let info = self.mmu.info(id).unwrap();
            let entries = walk(&self.mmu, here.unit, id, info.num_tokens).unwrap();
            plain[row * here.width..][..entries.len()].copy_from_slice(&entries);
            lens[row] = info.num_scheduled as i32;
            if matches!(here.unit, Unit::Page { order: 1.. }) {
                assert!(!entries.contains(&null), "a row has the page of padding");
                self.seen.pages += u64::from(entries.len() > 1);
            }
        }
        assert_eq!(here.tables.block_table, plain);
        assert_eq!(here.tables.seq_lens, lens);
        here.check_dirty(was);
        here.check_csr();
        self.seen.shared += here.check_groups();
        let here = &mut self.forms[form];
        let buffers = &mut here.tables.borrow();
        self.mmu.validate(Some((&here.rows, buffers))).unwrap();
    }
}

impl Form {
    fn csr(&mut self) -> (Vec<i32>, Vec<i32>, Vec<i32>) {
        let n = self.ids.len();
        let (mut indptr, mut last) = (vec![-1; n + 1], vec![-1; n]);
        let mut indices = vec![-1; n * self.width];
        let buffers = self.tables.borrow();
        let count = self
            .rows
            .csr(&buffers, &mut indptr, &mut indices, &mut last)
            .unwrap();
        assert!(indices[count..].iter().all(|&entry| entry == -1));
        indices.truncate(count);
        (indptr, indices, last)
    }

    fn check_csr(&mut self) {
        let (indptr, indices, last) = self.csr();
        let unit = self.rows.entry_tokens() as i32;
        for row in 0..self.ids.len() {
            let (from, to) = (indptr[row] as usize, indptr[row + 1] as usize);
            let len = self.tables.seq_lens[row];
            assert_eq!((to - from) as i32, (len + unit - 1) / unit);
            let line = &self.tables.block_table[row * self.width..];
            assert_eq!(indices[from..to], line[..to - from]);
            let full = unit * ((to - from) as i32 - 1).max(0);
            assert_eq!(full + last[row], len);
            assert_eq!(last[row] == 0, len == 0);
        }
    }

    /// What was not said to be dirty has not changed, and a mirror that follows has everything.
    fn check_dirty(&mut self, was: &Tables) {
        let dirty = self.rows.dirty_rows();
        assert!(dirty.windows(2).all(|two| two[0].row < two[1].row));
        for row in 0..ROWS {
            let found = dirty.iter().find(|dirty| dirty.row as usize == row);
            let (start, stop) = found.map_or((0, 0), |dirty| (dirty.start, dirty.stop));
            assert!(found.is_none() || start < stop);
            for at in 0..self.width {
                let cell = row * self.width + at;
                let told = (start as usize..stop as usize).contains(&at);
                assert!(told || self.tables.block_table[cell] == was.block_table[cell]);
                if told {
                    self.mirror[cell] = self.tables.block_table[cell];
                }
            }
            if let Some(&DirtyRow { generation, .. }) = found {
                assert_eq!(generation, self.rows.generations()[row]);
                assert!(generation > 0);
            }
        }
        assert_eq!(self.mirror, self.tables.block_table);
    }

    /// Each row again from both levels. Returns the entries that are read once for several rows.
    fn check_groups(&mut self) -> u64 {
        let n = self.ids.len();
        let unit = self.rows.entry_tokens() as i32;
        let fill = |n: usize| vec![-1; n];
        let mut rows = fill(n + 1);
        let sizes = [n + 1, n + 1, n * self.width, n];
        let mut shared = sizes.map(fill);
        let mut own = sizes.map(fill);
        fn level(arrays: &mut [Vec<i32>; 4]) -> CascadeLevel<'_> {
            let [qo_indptr, kv_indptr, kv_indices, kv_last_page_len] = arrays;
            CascadeLevel {
                qo_indptr,
                kv_indptr,
                kv_indices,
                kv_last_page_len,
            }
        }
        let mut out = Cascade {
            row_indptr: &mut rows,
            shared: level(&mut shared),
            own: level(&mut own),
        };
        let buffers = self.tables.borrow();
        let found = self.rows.prefix_groups(&buffers, &mut out);
        let Some(query) = &self.query else {
            assert!(matches!(found, Err(Error::InvalidConfig(_))));
            assert!(rows.iter().all(|&row| row == -1));
            return 0;
        };
        let found = found.unwrap();
        assert_eq!(found.rows, n);
        assert_eq!((rows[0], rows[found.groups] as usize), (0, n));
        let starts = &self.tables.query_start_loc;
        let [qo, kv, indices, last] = &own;
        let [shared_qo, shared_kv, shared_indices, shared_last] = &shared;
        assert_eq!(qo[..], starts[..=n]);
        assert_eq!(kv[n] as usize, found.own);
        assert_eq!(shared_kv[found.groups] as usize, found.shared);
        let mut saved = 0;
        for group in 0..found.groups {
            let (first, end) = (rows[group] as usize, rows[group + 1] as usize);
            assert!(first < end);
            assert_eq!(shared_qo[group], starts[first]);
            assert_eq!(shared_qo[group + 1], starts[end]);
            let part = &shared_indices[shared_kv[group] as usize..shared_kv[group + 1] as usize];
            assert_eq!(part.is_empty(), end - first == 1);
            assert_eq!(shared_last[group], if part.is_empty() { 0 } else { unit });
            saved += part.len() * (end - first - 1);
            for row in first..end {
                let rest = &indices[kv[row] as usize..kv[row + 1] as usize];
                let len = self.tables.seq_lens[row];
                let whole: Vec<i32> = part.iter().chain(rest).copied().collect();
                assert_eq!(whole.len() as i32, (len + unit - 1) / unit);
                assert_eq!(
                    whole,
                    self.tables.block_table[row * self.width..][..whole.len()]
                );
                let before = len - query[row] as i32;
                assert!(
                    part.len() as i32 * unit <= before,
                    "a query is in the shared part"
                );
                let full = unit * (rest.len() as i32 - 1).max(0);
                assert_eq!(part.len() as i32 * unit + full + last[row], len);
            }
        }
        // Neighbours that share an entry are never both alone.
        for group in 1..found.groups {
            let (first, row, end) = (rows[group - 1], rows[group] as usize, rows[group + 1]);
            if row as i32 - first == 1 && end - row as i32 == 1 {
                let full = |row: usize| (self.tables.seq_lens[row] - query[row] as i32) / unit;
                let alike = self.tables.block_table[(row - 1) * self.width]
                    == self.tables.block_table[row * self.width];
                assert!(!alike || full(row - 1).min(full(row)) == 0);
            }
        }
        saved as u64
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_form_of_rows_is_what_a_plain_walk_says(
        blocks in 4u32..48,
        null in prop_oneof![2 => Just(u32::MAX), 2 => Just(0u32), 1 => 0u32..48],
        ops in proptest::collection::vec(op(), 1..60),
    ) {
        let mut world = World::new(blocks, null.min(blocks));
        for op in ops {
            world.apply(op);
        }
    }
}

/// The random operations reach what they are meant to reach.
#[test]
fn random_operations_reach_pages_refusals_groups_and_moves() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let mut totals: BTreeMap<&str, u64> = BTreeMap::new();
    for _ in 0..300 {
        let (blocks, ops) = (24u32..48, proptest::collection::vec(op(), 40..80))
            .new_tree(&mut runner)
            .unwrap()
            .current();
        let mut world = World::new(blocks, 0);
        for op in ops {
            world.apply(op);
        }
        let seen = world.seen;
        for (name, count) in [
            ("pages", seen.pages),
            ("refused", seen.refused),
            ("refused_late", seen.refused_late),
            ("shared", seen.shared),
            ("moved", seen.moved),
        ] {
            *totals.entry(name).or_default() += count;
        }
    }
    assert!(totals.values().all(|&count| count >= 20), "{totals:?}");
}

fn mmu(blocks: u32, null: u32) -> Mmu {
    let mut config = Config::new(blocks, SIZE);
    config.null_block = null;
    Mmu::new(config).unwrap()
}

#[test]
fn units_that_a_pool_cannot_be_read_by_are_refused() {
    let refuse = |mmu: &Mmu, unit: Unit| match Rows::of(mmu, unit, 1, 1, 1) {
        Err(Error::InvalidConfig(text)) => text,
        other => panic!("{unit:?}: {other:?}"),
    };
    let last = mmu(15, 15);
    for tokens in [0, 3, 8, 5, u32::MAX] {
        assert!(refuse(&last, Unit::KernelBlock { tokens }).contains("divisor"));
    }
    for order in [10, 11, 31, 32, u32::MAX] {
        assert!(refuse(&last, Unit::Page { order }).contains("0 to 9"));
    }
    // 16 blocks of memory; the null block is the last of its page, so a row could have that page.
    assert!(refuse(&last, Unit::Page { order: 2 }).contains("multiple of 4 up to 12"));
    // 13 blocks: the null block begins its page, memory does not hold it.
    assert!(refuse(&mmu(12, 12), Unit::Page { order: 2 }).contains("12 to 15"));
    assert!(refuse(&mmu(6, 0), Unit::Page { order: 3 }).contains("at least 7"));
    for (pool, order) in [
        (mmu(7, 0), 3),
        (mmu(15, 12), 2),
        (mmu(511, 0), 9),
        (last, 0),
    ] {
        assert!(Rows::of(&pool, Unit::Page { order }, 1, 1, 1).is_ok());
    }
}

#[test]
fn a_last_page_that_sticks_out_of_memory_is_refused() {
    // 14 blocks of memory: pages 0 (null), 1, 2; blocks 12 and 13 are in no whole page.
    let mmu = mmu(13, 0);
    let mut rows = Rows::of(&mmu, Unit::Page { order: 2 }, 1, 8, 1).unwrap();
    let mut tables = rows.buffers();
    let mut held = Vec::new();
    let one = loop {
        let id = mmu.open(&[1], Keys::default()).unwrap();
        if mmu.block_table(id).unwrap() == [12] {
            break id;
        }
        held.push(id);
    };
    let done = mmu.export(&[one], &mut rows, &mut tables.borrow());
    assert!(matches!(
        done,
        Err(Error::Scattered {
            group: 0,
            needed: 1,
            in_place: 0,
            ..
        })
    ));
    assert_eq!(tables, rows.buffers());
}

#[test]
fn an_append_that_misses_the_page_is_told_by_the_next_export_and_prepare() {
    // Three blocks from an aligned place on, behind as many others as it takes.
    let (mmu, first) = (0..4)
        .find_map(|others| {
            let mmu = mmu(31, 0);
            for _ in 0..others {
                mmu.open(&[1], Keys::default()).unwrap();
            }
            let first = mmu.open(&[1; 12], Keys::default()).unwrap();
            let aligned = mmu.block_table(first).unwrap()[0].is_multiple_of(4);
            aligned.then_some((mmu, first))
        })
        .unwrap();
    let blocks = mmu.block_table(first).unwrap();
    let mut rows = Rows::of(&mmu, Unit::Page { order: 2 }, 2, 8, 64).unwrap();
    let mut tables = rows.buffers();
    mmu.export(&[first], &mut rows, &mut tables.borrow())
        .unwrap();
    // Somebody else takes the block that the page lacks.
    let other = (0..27)
        .map_while(|_| mmu.open(&[2; 4], Keys::default()).ok())
        .find(|&id| mmu.block_table(id).unwrap() == [blocks[2] + 1]);
    assert!(other.is_some() && mmu.states().empty > 0);
    let was = tables.clone();
    let step = mmu.begin_step();
    let before = mmu.states();
    let prepared = mmu.prepare(
        step,
        &[first],
        Some(&[13]),
        Some(&[3]),
        &mut rows,
        &mut tables.borrow(),
    );
    assert!(matches!(
        prepared,
        Err(Error::Scattered {
            group: 0,
            needed: 4,
            in_place: 3,
            ..
        })
    ));
    // (A hold may be given up in vain: its blocks are empty either way.)
    let plain = |states: States| States { held: 0, ..states };
    assert_eq!((&tables, plain(mmu.states())), (&was, plain(before)));
    assert_eq!(mmu.block_table(first).unwrap(), blocks);
    mmu.end_step(step).unwrap();
    mmu.validate(Some((&rows, &tables.borrow()))).unwrap();
}

#[test]
fn a_width_counts_entries() {
    let mmu = mmu(16, 16);
    let id = mmu.open(&[1; 9], Keys::default()).unwrap();
    for (tokens, entries) in [(1, 9), (2, 5), (4, 3)] {
        let unit = Unit::KernelBlock { tokens };
        let mut wide = Rows::of(&mmu, unit, 1, entries, 1).unwrap();
        let mut tables = wide.buffers();
        mmu.export(&[id], &mut wide, &mut tables.borrow()).unwrap();
        let mut narrow = Rows::of(&mmu, unit, 1, entries - 1, 1).unwrap();
        let mut tables = narrow.buffers();
        let refused = mmu.export(&[id], &mut narrow, &mut tables.borrow());
        let (needed, limit) = (entries as u64, entries as u64 - 1);
        assert!(matches!(
            refused,
            Err(Error::LimitExceeded { needed: n, limit: l, .. }) if (n, l) == (needed, limit)
        ));
        assert_eq!(tables, narrow.buffers());
    }
}

#[test]
fn a_prepare_into_pages_grows_in_place_and_refuses_to_copy_elsewhere() {
    let mmu = mmu(31, 0);
    let mut rows = Rows::of(&mmu, Unit::Page { order: 1 }, 2, 8, 64).unwrap();
    let mut tables = rows.buffers();
    let open = |n| mmu.open(&[1; 7][..n], Keys::default()).unwrap();
    let parent = ([7, 1, 7].into_iter().map(open))
        .filter(|&id| mmu.block_table(id).unwrap().len() == 2)
        .find(|&id| mmu.block_table(id).unwrap()[0].is_multiple_of(2))
        .unwrap();
    let step = |query: i32, rows: &mut Rows, tables: &mut Tables| {
        let step = mmu.begin_step();
        let new = vec![3; (query - left(&mmu, parent)).max(0) as usize];
        let (ids, query) = ([parent], [query]);
        let done = mmu.prepare(
            step,
            &ids,
            Some(&query),
            Some(&new),
            rows,
            &mut tables.borrow(),
        );
        if done.is_ok() {
            mmu.written(step).unwrap();
        }
        mmu.end_step(step).unwrap();
        done
    };
    step(7, &mut rows, &mut tables).unwrap();
    let block = mmu.block_table(parent).unwrap()[0];
    assert_eq!(tables.block_table[0] as u32, block / 2);
    // The child holds the block that the next token goes to: a copy would leave the page.
    let child = mmu.fork(parent).unwrap();
    let was = (tables.clone(), mmu.states(), mmu.block_table(parent));
    assert!(matches!(
        step(1, &mut rows, &mut tables),
        Err(Error::Scattered {
            group: 0,
            needed: 2,
            in_place: 1,
            ..
        })
    ));
    assert_eq!((tables.clone(), mmu.states(), mmu.block_table(parent)), was);
    mmu.close(child).unwrap();
    step(1, &mut rows, &mut tables).unwrap();
    mmu.validate(Some((&rows, &tables.borrow()))).unwrap();
}

fn left(mmu: &Mmu, id: i64) -> i32 {
    let info = mmu.info(id).unwrap();
    (info.num_tokens - info.num_scheduled) as i32
}
