//! The whole core against a plain model, with contents.
//!
//! The model knows, for every sequence, its tokens and how many of them were written. Memory is an
//! array of words: a written position holds a word that depends on its whole prefix. After every
//! operation the core validates itself, and every written position of every sequence is read back
//! through its page table and through exported rows.
//!
//! A failing case prints its operations and is shrunk by proptest; `PROPTEST_CASES` sets how many
//! are tried.

use std::collections::{BTreeMap, VecDeque};

use kvmmu::{
    Config, Error, Eviction, Keys, Mmu, Moves, Opening, PageOrders, Placement, Plan, Rows, States,
    Tables, When,
};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Op {
    Open {
        prompt: u8,
        len: u8,
        salt: bool,
        /// 0: default, 1: the start contiguous, 2: single blocks, 3: huge pages or nothing.
        mode: u8,
    },
    ReleaseBefore {
        seq: u8,
        to: u8,
    },
    Append {
        seq: u8,
        n: u8,
    },
    Step {
        seqs: u8,
        query: u8,
        known: bool,
        end: End,
    },
    EndOldest,
    Fork(u8),
    Truncate {
        seq: u8,
        to: u8,
    },
    Close(u8),
    Pin(u8),
    Unpin,
    Lease {
        seq: u8,
        from: u8,
        to: u8,
    },
    EndLease(u8),
    Evict(u8),
    FreeRun {
        n: u8,
        max: u8,
        later: bool,
    },
    Below {
        percent: u8,
    },
    Goal {
        kind: u8,
        n: u8,
        max: u8,
    },
    Give {
        n: u8,
        size: u8,
    },
    Grow(u8),
    Commit,
    Abort,
    Export,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    Written,
    /// The device carries it out later, when it is the oldest in flight.
    Later,
    Cancelled,
}

fn op() -> impl Strategy<Value = Op> {
    let end = prop_oneof![
        4 => Just(End::Written),
        2 => Just(End::Later),
        1 => Just(End::Cancelled)
    ];
    prop_oneof![
        4 => (0u8..4, 0u8..14, prop::bool::weighted(0.1), prop_oneof![4 => Just(0u8), 1 => 1u8..4])
            .prop_map(|(prompt, len, salt, mode)| Op::Open { prompt, len, salt, mode }),
        1 => (any::<u8>(), any::<u8>()).prop_map(|(seq, to)| Op::ReleaseBefore { seq, to }),
        2 => (any::<u8>(), 0u8..6).prop_map(|(seq, n)| Op::Append { seq, n }),
        8 => (any::<u8>(), 0u8..6, prop::bool::weighted(0.9), end)
            .prop_map(|(seqs, query, known, end)| Op::Step { seqs, query, known, end }),
        3 => Just(Op::EndOldest),
        2 => any::<u8>().prop_map(Op::Fork),
        2 => (any::<u8>(), any::<u8>()).prop_map(|(seq, to)| Op::Truncate { seq, to }),
        3 => any::<u8>().prop_map(Op::Close),
        1 => any::<u8>().prop_map(Op::Pin),
        1 => Just(Op::Unpin),
        1 => (any::<u8>(), any::<u8>(), any::<u8>())
            .prop_map(|(seq, from, to)| Op::Lease { seq, from, to }),
        1 => any::<u8>().prop_map(Op::EndLease),
        1 => (0u8..4).prop_map(Op::Evict),
        5 => (0u8..6, 1u8..8, any::<bool>())
            .prop_map(|(n, max, later)| Op::FreeRun { n, max, later }),
        1 => (0u8..90).prop_map(|percent| Op::Below { percent }),
        3 => (0u8..4, any::<u8>(), 1u8..40).prop_map(|(kind, n, max)| Op::Goal { kind, n, max }),
        1 => (1u8..4, 1u8..5).prop_map(|(n, size)| Op::Give { n, size }),
        2 => (1u8..20).prop_map(Op::Grow),
        3 => Just(Op::Commit),
        1 => Just(Op::Abort),
        1 => Just(Op::Export),
    ]
}

#[derive(Debug, Clone)]
struct Seq {
    tokens: Vec<i32>,
    unknown_from: usize,
    salt: bool,
    written: usize,
    scheduled: usize,
    /// Tokens in front that were released.
    released: usize,
}

/// What a world is made of.
#[derive(Debug, Clone)]
struct Setup {
    blocks: u32,
    block_size: u32,
    scatter: bool,
    null: u32,
    orders: Vec<u32>,
    medium_from: u32,
    huge_from: u32,
    hold: u32,
    dedup: bool,
    /// Prompts and queries are so many times as long.
    scale: i32,
}

impl Setup {
    /// A few single blocks.
    fn plain(blocks: u32, block_size: u32) -> Self {
        Setup {
            blocks,
            block_size,
            scatter: false,
            null: u32::MAX,
            orders: vec![0],
            medium_from: 0,
            huge_from: 0,
            hold: 0,
            dedup: false,
            scale: 1,
        }
    }
}

/// Small pools with any mix of page sizes.
fn small() -> impl Strategy<Value = Setup> {
    let pages = (
        proptest::collection::btree_set(1u32..7, 0..4),
        0u32..20,
        0u32..9,
        any::<bool>(),
        1i32..4,
    );
    let null = prop_oneof![3 => Just(u32::MAX), 1 => 0u32..24];
    (2u32..72, 1u32..5, prop::bool::weighted(0.2), null, pages).prop_map(
        |(blocks, block_size, scatter, null, (orders, medium_from, hold, dedup, scale))| Setup {
            blocks,
            block_size,
            scatter,
            null,
            orders: std::iter::once(0).chain(orders).collect(),
            medium_from,
            huge_from: medium_from,
            hold,
            dedup,
            scale,
        },
    )
}

/// Pools of a few windows, with huge pages.
fn huge() -> impl Strategy<Value = Setup> {
    let orders = prop_oneof![Just(vec![0, 9]), Just(vec![0, 2, 9]), Just(vec![0, 3, 9])];
    (1100u32..2600, orders, 0u32..9, any::<bool>(), 40i32..160).prop_map(
        |(blocks, orders, hold, dedup, scale)| Setup {
            orders,
            huge_from: 300,
            medium_from: 16,
            hold,
            dedup,
            scale,
            ..Setup::plain(blocks, 1)
        },
    )
}

/// States without a word on holds, which a call that fails may break.
fn plain(states: States) -> States {
    States { held: 0, ..states }
}

fn word(seq: &Seq, position: usize) -> u64 {
    let seed = if seq.salt { 17 } else { 3 };
    seq.tokens[..=position]
        .iter()
        .fold(seed, |hash: u64, &token| {
            (hash ^ token as u64)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(23)
        })
}

fn keys(salt: bool) -> Keys {
    let salt: &[u8] = if salt { b"tenant" } else { b"" };
    Keys {
        salt: salt.into(),
        ..Keys::default()
    }
}

/// A step that the device has not carried out yet.
struct Pending {
    step: u64,
    copies: Vec<[u32; 2]>,
    /// (slot, word).
    writes: Vec<(usize, u64)>,
    /// (sequence, from, to), clipped by truncation.
    entries: Vec<(i64, usize, usize)>,
}

struct World {
    mmu: Mmu,
    block_size: usize,
    memory: Vec<u64>,
    seqs: BTreeMap<i64, Seq>,
    rows: Rows,
    tables: Tables,
    in_flight: VecDeque<Pending>,
    moves: Vec<Moves>,
    plan: Option<Plan>,
    pins: Vec<i64>,
    leases: Vec<(u64, Vec<(usize, u64)>)>,
    next_token: i32,
    committed: u32,
    scale: i32,
}

const ROWS: usize = 4;

impl World {
    fn new(setup: &Setup) -> Self {
        let Setup {
            blocks, block_size, ..
        } = *setup;
        let mut config = Config::new(blocks, block_size);
        if blocks.is_multiple_of(2) {
            config.eviction = Eviction::Lfu;
        }
        config.max_sequences = 9;
        config.null_block = setup.null.min(blocks);
        config.page_orders = PageOrders::new(&setup.orders).unwrap();
        config.medium_from = setup.medium_from;
        config.huge_from = setup.huge_from;
        config.hold_blocks = setup.hold;
        config.dedup = setup.dedup;
        if setup.scatter {
            config.placement = Placement::Scatter { seed: 7 };
        }
        let mmu = Mmu::new(config).unwrap();
        let rows = Rows::new(&mmu, ROWS, blocks as usize, 64 * setup.scale as usize).unwrap();
        let tables = rows.buffers();
        let places = (blocks as usize + 1) * block_size as usize;
        Self {
            mmu,
            block_size: block_size as usize,
            memory: vec![0; places],
            seqs: BTreeMap::new(),
            rows,
            tables,
            in_flight: VecDeque::new(),
            moves: Vec::new(),
            plan: None,
            pins: Vec::new(),
            leases: Vec::new(),
            next_token: 1000,
            committed: 0,
            scale: setup.scale,
        }
    }

    fn pick(&self, choice: u8) -> Option<i64> {
        let n = self.seqs.len();
        (n > 0).then(|| *self.seqs.keys().nth(choice as usize % n).unwrap())
    }

    fn copy(&mut self, pairs: &[[u32; 2]]) {
        for &[from, to] in pairs {
            let (from, size) = (from as usize * self.block_size, self.block_size);
            self.memory
                .copy_within(from..from + size, to as usize * size);
        }
    }

    fn step(&mut self, seqs: u8, query: u8, known: bool, end: End) {
        let mut ids: Vec<i64> = self.seqs.keys().copied().collect();
        ids.retain(|id| (seqs as i64 + id) % 3 != 0);
        ids.truncate(ROWS);
        // Mostly what a scheduler does: what is known and not scheduled, or one more.
        let lens: Vec<i32> = (ids.iter().enumerate())
            .map(|(i, id)| {
                let left = self.seqs[id].tokens.len() - self.seqs[id].scheduled;
                if left > 0 && i % 2 == 0 {
                    left as i32
                } else {
                    i32::from(query)
                        * if self.scale > 9 && i % 3 == 0 {
                            self.scale
                        } else {
                            1
                        }
                }
            })
            .collect();
        let mut after = self.seqs.clone();
        let mut new = Vec::new();
        for (id, &len) in ids.iter().zip(&lens) {
            let seq = after.get_mut(id).unwrap();
            let to = seq.scheduled + len as usize;
            if to > seq.tokens.len() && !known {
                seq.unknown_from = seq.unknown_from.min(seq.tokens.len());
            }
            while seq.tokens.len() < to {
                self.next_token += 1;
                seq.tokens.push(self.next_token);
                new.push(self.next_token);
            }
        }
        let step = self.mmu.begin_step();
        let before = plain(self.mmu.states());
        let given = known.then_some(&new[..]);
        let mut buffers = self.tables.borrow();
        let prepared =
            self.mmu
                .prepare(step, &ids, Some(&lens), given, &mut self.rows, &mut buffers);
        let copies = match prepared {
            Ok(copies) => copies,
            Err(error) => {
                assert!(
                    matches!(
                        error,
                        Error::OutOfBlocks { .. } | Error::LimitExceeded { .. }
                    ),
                    "{error}"
                );
                assert_eq!(
                    plain(self.mmu.states()),
                    before,
                    "a failed prepare changed something"
                );
                return self.mmu.end_step(step).unwrap();
            }
        };
        let mut pending = Pending {
            step,
            copies,
            writes: Vec::new(),
            entries: Vec::new(),
        };
        let mut at = 0;
        for (row, (&id, &len)) in ids.iter().zip(&lens).enumerate() {
            let seq = after.get_mut(&id).unwrap();
            assert_eq!(self.tables.query_start_loc[row] as usize, at);
            let from = seq.scheduled;
            seq.scheduled += len as usize;
            assert_eq!(self.tables.seq_lens[row] as usize, seq.scheduled);
            for position in from..seq.scheduled {
                let slot = self.tables.slot_mapping[at] as usize;
                pending.writes.push((slot, word(seq, position)));
                at += 1;
            }
            pending.entries.push((id, from, seq.scheduled));
        }
        if end == End::Cancelled {
            self.mmu.cancel(step).unwrap();
            // Its copies are to be made all the same, in their turn.
            pending.writes.clear();
            pending.entries = ids.iter().map(|&id| (id, 0, 0)).collect();
        } else {
            self.seqs = after;
        }
        self.in_flight.push_back(pending);
        if end != End::Later {
            self.drain();
        }
    }

    /// The device carries out the oldest step in flight.
    fn finish_oldest(&mut self) {
        let Some(pending) = self.in_flight.pop_front() else {
            return;
        };
        self.copy(&pending.copies);
        for (slot, word) in pending.writes {
            self.memory[slot] = word;
        }
        self.mmu.written(pending.step).unwrap();
        for (id, from, to) in pending.entries {
            if let Some(seq) = self.seqs.get_mut(&id)
                && from < to
            {
                assert_eq!(seq.written, from);
                seq.written = to;
            }
        }
        self.mmu.end_step(pending.step).unwrap();
    }

    fn drain(&mut self) {
        while !self.in_flight.is_empty() {
            self.finish_oldest();
        }
    }

    fn apply(&mut self, op: Op) {
        let before = plain(self.mmu.states());
        let unchanged = |mmu: &Mmu| {
            assert_eq!(
                plain(mmu.states()),
                before,
                "a failed call changed something"
            )
        };
        match op {
            Op::Open {
                prompt,
                len,
                salt,
                mode,
            } => {
                // Prompts share prefixes: prompt p is 0, 1, 2, ... up to 3 p and then its own.
                let own = |i: i32| {
                    if i < 3 * i32::from(prompt) * self.scale {
                        i
                    } else {
                        i + 5000 * i32::from(prompt)
                    }
                };
                let tokens: Vec<i32> = (0..i32::from(len) * self.scale).map(own).collect();
                let quote = self.mmu.quote(&tokens, &keys(salt));
                let opening = Opening {
                    contiguous: if mode == 1 { 7 * self.scale as u32 } else { 0 },
                    page_orders: (mode == 2).then_some(PageOrders::SINGLE),
                    require_huge: mode == 3 && self.scale > 9,
                    ..Opening::default()
                };
                match self.mmu.open_with(&tokens, keys(salt), opening) {
                    Ok(id) => {
                        let info = self.mmu.info(id).unwrap();
                        let cached = info.num_cached_tokens as usize;
                        let blocks = self.mmu.block_table(id).unwrap();
                        assert_eq!(blocks.len(), tokens.len().div_ceil(self.block_size));
                        match mode {
                            1 => {
                                let n = (opening.contiguous as usize).div_ceil(self.block_size);
                                let start = &blocks[..n.min(blocks.len())];
                                assert!(start.windows(2).all(|pair| pair[0] + 1 == pair[1]));
                            }
                            3 if self.scale > 9 => assert_eq!(info.pages[9], info.regions),
                            2 => assert_eq!(info.pages[0] as usize, blocks.len()),
                            _ => {}
                        }
                        if mode % 2 == 0 {
                            assert_eq!(quote.when, When::Now);
                            assert_eq!(cached, quote.num_cached_tokens as usize);
                        }
                        assert!(cached < tokens.len() || tokens.is_empty());
                        let seq = Seq {
                            tokens,
                            unknown_from: usize::MAX,
                            salt,
                            written: cached,
                            scheduled: cached,
                            released: 0,
                        };
                        self.seqs.insert(id, seq);
                    }
                    Err(error) => {
                        if mode % 2 == 0 {
                            assert_ne!(quote.when, When::Now, "{error}");
                        }
                        // (A shape that was asked for may cost cached blocks in vain, and what
                        // moves meanwhile keeps those in use.)
                        let cached = |states: States| States {
                            empty: states.empty + states.cached,
                            cached: 0,
                            ..states
                        };
                        if self.moves.is_empty() {
                            assert_eq!(cached(plain(self.mmu.states())), cached(before));
                        }
                        if mode == 0 {
                            unchanged(&self.mmu);
                        }
                    }
                }
            }
            Op::ReleaseBefore { seq, to } => {
                let Some(id) = self.pick(seq) else { return };
                let seq = self.seqs.get_mut(&id).unwrap();
                let to = to as usize * self.scale as usize % (seq.tokens.len() + 1);
                let before = self.mmu.info(id).unwrap().num_released as usize;
                let released = self.mmu.release_before(id, to as u32).unwrap() as usize;
                let after = self.mmu.info(id).unwrap().num_released as usize;
                assert_eq!(before + released, after);
                seq.released = after * self.block_size;
                assert!(released == 0 || seq.released <= to.min(seq.written));
                // All that is settled but one or two blocks is released.
                let could = (to.min(seq.written) / self.block_size).saturating_sub(2);
                assert!(after >= could.min(after.max(could)), "{after} of {could}");
                let beyond = self.mmu.release_before(id, seq.tokens.len() as u32 + 1);
                assert!(matches!(beyond, Err(Error::InvalidConfig(_))));
            }
            Op::Append { seq, n } => {
                // Its copies are made at once, so what they read must be there.
                self.drain();
                let before = plain(self.mmu.states());
                let Some(id) = self.pick(seq) else { return };
                let tokens: Vec<i32> = (0..i32::from(n) * (1 + self.scale / 2))
                    .map(|i| self.next_token + i)
                    .collect();
                self.next_token += tokens.len() as i32;
                match self.mmu.append(id, &tokens) {
                    Ok(copies) => {
                        self.copy(&copies);
                        self.seqs.get_mut(&id).unwrap().tokens.extend(tokens);
                    }
                    Err(_) => assert_eq!(plain(self.mmu.states()), before),
                }
            }
            Op::Step {
                seqs,
                query,
                known,
                end,
            } => self.step(seqs, query, known, end),
            Op::EndOldest => {
                self.finish_oldest();
            }
            Op::Fork(seq) => {
                let Some(id) = self.pick(seq) else { return };
                match self.mmu.fork(id) {
                    Ok(child) => {
                        let mut seq = self.seqs[&id].clone();
                        seq.scheduled = seq.written;
                        self.seqs.insert(child, seq);
                        // What it reads may still wait for its parent's copies.
                        for step in &mut self.in_flight {
                            if step.entries.iter().any(|entry| entry.0 == id) {
                                step.entries.push((child, 0, 0));
                            }
                        }
                    }
                    Err(_) => unchanged(&self.mmu),
                }
            }
            Op::Truncate { seq, to } => {
                let Some(id) = self.pick(seq) else { return };
                let seq = self.seqs.get_mut(&id).unwrap();
                let to = to as usize * self.scale as usize % (seq.tokens.len() + 1);
                let truncated = self.mmu.truncate(id, to as u32);
                if seq.released > 0 && to <= seq.released {
                    assert!(matches!(truncated, Err(Error::InvalidConfig(_))));
                    return;
                }
                truncated.unwrap();
                seq.tokens.truncate(to);
                seq.written = seq.written.min(to);
                seq.scheduled = seq.scheduled.min(to);
                let entries = self.in_flight.iter_mut().flat_map(|step| &mut step.entries);
                for entry in entries.filter(|entry| entry.0 == id) {
                    *entry = (id, entry.1.min(to), entry.2.min(to));
                }
            }
            Op::Close(seq) => {
                let Some(id) = self.pick(seq) else { return };
                self.seqs.remove(&id);
                self.mmu.close(id).unwrap();
                assert_eq!(
                    self.mmu.close(id),
                    Err(Error::UnknownSequence { sequence: id })
                );
            }
            Op::Pin(block) => {
                let block = i64::from(u32::from(block) % self.mmu.config().num_blocks);
                match self.mmu.pin(&[block]) {
                    Ok(()) => self.pins.push(block),
                    Err(_) => unchanged(&self.mmu),
                }
            }
            Op::Unpin => {
                if let Some(block) = self.pins.pop() {
                    self.mmu.unpin(&[block]).unwrap();
                }
            }
            Op::Lease { seq, from, to } => {
                let Some(id) = self.pick(seq) else { return };
                let (len, released) = (self.seqs[&id].written, self.seqs[&id].released);
                let from = from as usize % (len + 1);
                let to = from + to as usize % (len + 1 - from);
                let lease = self.mmu.lease(id, from as u32, to as u32);
                if from < released && from < to {
                    assert!(matches!(lease, Err(Error::InvalidConfig(_))));
                    return;
                }
                let lease = lease.unwrap();
                // What it holds must read the same until it ends, whatever becomes of the sequence.
                let waiting = self.in_flight.iter().flat_map(|step| &step.entries);
                let size = self.block_size;
                let mut held = Vec::new();
                if !waiting.clone().any(|entry| entry.0 == id) {
                    for position in from..to {
                        let block = lease.blocks[position / size - from / size] as usize;
                        let slot = block * size + position % size;
                        held.push((slot, word(&self.seqs[&id], position)));
                    }
                }
                self.leases.push((lease.id, held));
            }
            Op::EndLease(choice) => {
                if !self.leases.is_empty() {
                    let (lease, _) = self.leases.remove(choice as usize % self.leases.len());
                    self.mmu.end_lease(lease).unwrap();
                    assert_eq!(
                        self.mmu.end_lease(lease),
                        Err(Error::InvalidLease { lease })
                    );
                }
            }
            Op::Evict(n) => {
                assert!(self.mmu.evict(u32::from(n)) <= u32::from(n));
            }
            Op::FreeRun { n, max, later } => {
                let measure = self.mmu.measure();
                let n = (measure.available.largest + u32::from(n)).min(measure.available.total);
                if let Ok(plan) = self.mmu.plan_free_run(n.max(1), u32::from(max)) {
                    if later {
                        self.plan = Some(plan);
                        return;
                    }
                    let moves = self.mmu.begin(&plan).unwrap();
                    assert_eq!(moves.pairs(), plan.pairs, "nothing happened in between");
                    self.copy(moves.pairs());
                    self.moves.push(moves);
                }
            }
            Op::Below { percent } => {
                let ratio = f64::from(percent) / 100.0;
                let plan = self.mmu.plan_below(ratio, 8).unwrap();
                let moves = self.mmu.begin(&plan).unwrap();
                self.copy(moves.pairs());
                let quiet = self.in_flight.is_empty() && self.moves.is_empty();
                assert_eq!(self.mmu.commit(&moves).unwrap() as usize, plan.pairs.len());
                if quiet {
                    let measure = self.mmu.measure();
                    assert_eq!(measure.available.largest, plan.predicted_run());
                    assert_eq!(measure.ratio_available(), plan.predicted_ratio());
                    assert!(!plan.complete || measure.ratio_available() < ratio);
                }
            }
            Op::Goal { kind, n, max } => {
                let max = u32::from(max);
                let plan = match kind {
                    0 => self.mmu.plan_huge_pages(u32::from(n % 3) + 1, max).ok(),
                    1 => {
                        let size = (u32::from(n % 8) + 1).min(self.mmu.config().num_blocks);
                        self.mmu.plan_groups(size, 2, max).ok()
                    }
                    2 => self
                        .pick(n)
                        .map(|id| self.mmu.plan_gather(id, max).unwrap()),
                    _ => self.mmu.plan_compaction(Some(max)),
                };
                let Some(plan) = plan else { return };
                assert!(plan.pairs.len() <= max as usize);
                let moves = self.mmu.begin(&plan).unwrap();
                assert_eq!(moves.pairs(), plan.pairs, "nothing happened in between");
                self.copy(moves.pairs());
                self.moves.push(moves);
            }
            Op::Give { n, size } => {
                let (n, size) = (u32::from(n), u32::from(size));
                if size <= self.mmu.config().num_blocks {
                    let gone = self.mmu.take_offline(n, size).unwrap();
                    assert!(gone.len() as u32 <= n.next_multiple_of(size));
                }
            }
            Op::Grow(n) => {
                let back = self.mmu.offline_blocks(u32::from(n), 1).unwrap();
                let back: Vec<i64> = back.into_iter().map(i64::from).collect();
                self.mmu.bring_online(&back).unwrap();
            }
            Op::Commit => {
                // A plan that has grown old loses only the moves that are no longer possible.
                if let Some(plan) = self.plan.take() {
                    let moves = self.mmu.begin(&plan).unwrap();
                    self.copy(moves.pairs());
                    self.moves.push(moves);
                } else if !self.moves.is_empty() {
                    self.committed += self.mmu.commit(&self.moves.remove(0)).unwrap();
                }
            }
            Op::Abort => {
                if !self.moves.is_empty() {
                    let moves = self.moves.remove(0);
                    self.mmu.abort(&moves).unwrap();
                    assert!(self.mmu.commit(&moves).is_err());
                }
            }
            Op::Export => {
                let ids: Vec<i64> = self.seqs.keys().copied().take(ROWS).collect();
                self.mmu
                    .export(&ids, &mut self.rows, &mut self.tables.borrow())
                    .unwrap();
                let width = self.tables.block_table.len() / ROWS;
                for (row, id) in ids.iter().enumerate() {
                    let mut entries = self.in_flight.iter().flat_map(|step| &step.entries);
                    if entries.any(|entry| entry.0 == *id) {
                        continue;
                    }
                    for position in self.seqs[id].released..self.seqs[id].written {
                        let at = row * width + position / self.block_size;
                        let block = self.tables.block_table[at] as usize;
                        let slot = block * self.block_size + position % self.block_size;
                        assert_eq!(self.memory[slot], word(&self.seqs[id], position));
                    }
                }
            }
        }
    }

    fn check(&mut self) {
        self.mmu
            .validate(Some((&self.rows, &self.tables.borrow())))
            .unwrap();
        for (lease, held) in &self.leases {
            for &(slot, word) in held {
                assert_eq!(self.memory[slot], word, "lease {lease}, slot {slot}");
            }
        }
        let waiting = |id: i64| {
            let mut entries = self.in_flight.iter().flat_map(|step| &step.entries);
            entries.any(|entry| entry.0 == id)
        };
        for (&id, seq) in &self.seqs {
            let info = self.mmu.info(id).unwrap();
            let lens = (info.num_tokens, info.num_scheduled, info.num_written);
            let model = (seq.tokens.len(), seq.scheduled, seq.written);
            assert_eq!(lens, (model.0 as u32, model.1 as u32, model.2 as u32));
            if waiting(id) {
                continue;
            }
            let positions: Vec<i64> = (seq.released as i64..seq.written as i64).collect();
            let slots = self.mmu.translate(id, &positions).unwrap();
            for (position, slot) in (seq.released..).zip(slots) {
                assert_eq!(
                    self.memory[slot as usize],
                    word(seq, position),
                    "sequence {id}, position {position}, slot {slot}"
                );
            }
        }
        let null = self.mmu.null_block() as usize * self.block_size;
        let null = null..null + self.block_size;
        assert!(
            self.memory[null].iter().all(|&word| word == 0),
            "somebody wrote the null block"
        );
    }

    /// Everything given back: nothing may be left behind.
    fn finish(&mut self) {
        for moves in std::mem::take(&mut self.moves) {
            self.mmu.abort(&moves).unwrap();
        }
        for id in std::mem::take(&mut self.seqs).into_keys() {
            self.mmu.close(id).unwrap();
        }
        self.mmu.unpin(&std::mem::take(&mut self.pins)).unwrap();
        for (lease, _) in std::mem::take(&mut self.leases) {
            self.mmu.end_lease(lease).unwrap();
        }
        self.drain();
        self.mmu.validate(None).unwrap();
        self.mmu.evict(u32::MAX);
        let gone = self.mmu.offline_blocks(u32::MAX, 1).unwrap();
        let gone: Vec<i64> = gone.into_iter().map(i64::from).collect();
        self.mmu.bring_online(&gone).unwrap();
        let states = self.mmu.states();
        assert_eq!(states.empty, self.mmu.config().num_blocks, "{states:?}");
    }
}

fn run(setup: &Setup, ops: Vec<Op>) {
    let mut world = World::new(setup);
    for op in ops {
        world.apply(op);
        world.check();
    }
    world.finish();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_sequence_reads_its_own_bytes(
        setup in small(),
        ops in proptest::collection::vec(op(), 1..60),
    ) {
        run(&setup, ops);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: ProptestConfig::default().cases / 4,
        ..ProptestConfig::default()
    })]
    #[test]
    fn every_sequence_reads_its_own_bytes_in_huge_pages(
        setup in huge(),
        ops in proptest::collection::vec(op(), 1..30),
    ) {
        run(&setup, ops);
    }
}

/// The random operations reach what they are meant to reach.
#[test]
fn random_operations_reach_every_kind_of_event() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let mut totals: BTreeMap<&str, u64> = BTreeMap::new();
    for round in 0..1500 {
        let ops = proptest::collection::vec(op(), 40..80);
        let (plain, small, huge, ops) = ((4u32..20, 1u32..5), small(), huge(), ops)
            .new_tree(&mut runner)
            .unwrap()
            .current();
        let setup = match round % 8 {
            0..4 => Setup::plain(plain.0, plain.1),
            6 | 7 => huge,
            _ => small,
        };
        let mut world = World::new(&setup);
        for op in ops {
            world.apply(op);
        }
        for (name, count) in world.mmu.stats().entries() {
            *totals.entry(name).or_default() += count;
        }
    }
    let missing: Vec<_> = totals.iter().filter(|(_, count)| **count < 20).collect();
    assert!(
        missing.is_empty(),
        "hardly ever reached: {missing:?} of {totals:?}"
    );
}
