//! Who serves the calls of an engine, and how each empties windows.
//!
//! What lives here: kvmmu as engines use it ([`Managed`]), an allocator that a page is asked of for
//! each complete region of a prompt ([`Placed`]), and for one that can claim a given block the moves
//! that make windows free ([`Movable`]). What never lives here: figures; who holds what
//! ([`crate::memory`]).

use std::collections::HashMap;

use kvmmu::{Config, Keys, Mmu, Rows, Tables};

use crate::allocator::{Exact, Pages};
use crate::memory::{Memory, WINDOW};
use crate::serving::{Call, Load};

const HUGE: u32 = WINDOW.ilog2();

/// A sequence that grows: to so many tokens, from so many blocks to so many.
#[derive(Debug, Clone, Copy)]
pub struct Growth {
    pub sequence: i64,
    pub tokens: u32,
    pub from: usize,
    pub to: usize,
}

/// Serves calls. Blocks are appended in the order of the sequence.
pub trait Player {
    /// The blocks of a prompt of so many tokens; `memory` as it was before.
    fn open(&mut self, sequence: i64, tokens: u32, blocks: usize, memory: &Memory) -> Vec<u32>;

    /// The new blocks of each sequence that grows in a step.
    fn grow(&mut self, rows: &[Growth]) -> Vec<Vec<u32>>;

    /// A sequence ends that has these blocks.
    fn close(&mut self, sequence: i64, blocks: &[u32]);

    /// Moves blocks until so many windows are free: (source, destination) each, as they were made.
    /// None: it cannot.
    fn free_windows(&mut self, windows: usize, memory: &Memory) -> Option<Vec<[u32; 2]>>;

    /// Huge pages that it had to be shown: it had said that there are none.
    fn shown(&self) -> usize {
        0
    }
}

/// kvmmu itself, without a prefix cache: what is closed is empty.
pub struct Managed {
    mmu: Mmu,
    rows: Rows,
    tables: Tables,
    /// By number: its id, tokens scheduled.
    sequences: HashMap<i64, (i64, u32)>,
}

impl Managed {
    /// Room for the longest batch and sequence of a load. Defaults, page orders 0, 2 and 9 among them,
    /// but for what `change` says.
    pub fn new(load: &Load, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(load.blocks, load.block_size);
        config.prefix_caching = false;
        change(&mut config);
        let mmu = Mmu::new(config).expect("a valid configuration");
        let (rows, width, tokens) = extent(load);
        let rows = Rows::new(&mmu, rows, width, tokens).expect("a load is not that large");
        let tables = rows.buffers();
        Self {
            mmu,
            rows,
            tables,
            sequences: HashMap::new(),
        }
    }
}

/// Rows of the largest batch, blocks of the longest sequence, most tokens that a step writes.
fn extent(load: &Load) -> (usize, usize, usize) {
    let (mut rows, mut longest, mut most) = (1, 1, 1);
    let mut scheduled = HashMap::new();
    for call in &load.calls {
        match call {
            Call::Open { sequence, tokens } => {
                longest = longest.max(*tokens);
                scheduled.insert(*sequence, 0);
            }
            Call::Grow(batch) => {
                rows = rows.max(batch.len());
                let mut sum = 0;
                for &(sequence, tokens) in batch {
                    longest = longest.max(tokens);
                    sum += tokens - scheduled.insert(sequence, tokens).unwrap_or(0);
                }
                most = most.max(sum);
            }
            Call::Close { sequence } => {
                scheduled.remove(sequence);
            }
        }
    }
    (rows, load.blocks_of(longest) as usize, most as usize)
}

impl Player for Managed {
    fn open(&mut self, sequence: i64, tokens: u32, blocks: usize, _memory: &Memory) -> Vec<u32> {
        let prompt = vec![0; tokens as usize];
        let id = (self.mmu.open(&prompt, Keys::default())).expect("the engine had room");
        self.sequences.insert(sequence, (id, 0));
        let table = self.mmu.block_table(id).expect("it was just opened");
        assert_eq!(table.len(), blocks);
        table
    }

    fn grow(&mut self, rows: &[Growth]) -> Vec<Vec<u32>> {
        let (mut ids, mut lens, mut new) = (Vec::new(), Vec::new(), 0);
        for row in rows {
            let (id, scheduled) = self.sequences.get_mut(&row.sequence).expect("it is open");
            let tokens = row.tokens;
            new += tokens - self.mmu.info(*id).expect("it is open").num_tokens;
            ids.push(*id);
            lens.push((tokens - *scheduled) as i32);
            *scheduled = tokens;
        }
        let (new, tables) = (vec![0; new as usize], &mut self.tables.borrow());
        let step = self.mmu.begin_step();
        let copies = (self.mmu)
            .prepare(step, &ids, Some(&lens), Some(&new), &mut self.rows, tables)
            .expect("the engine had room");
        assert!(copies.is_empty(), "nobody shares anything");
        self.mmu.written(step).expect("a step in flight");
        self.mmu.end_step(step).expect("a step in flight");
        let tables = ids.iter().map(|&id| self.mmu.block_table(id));
        let grown = tables.zip(rows).map(|(table, row)| {
            let table = table.expect("it is open");
            assert_eq!(table.len(), row.to);
            table[row.from..].to_vec()
        });
        grown.collect()
    }

    fn close(&mut self, sequence: i64, blocks: &[u32]) {
        let (id, _) = self.sequences.remove(&sequence).expect("it is open");
        let table = self.mmu.block_table(id).expect("it is open");
        assert_eq!(table, blocks, "kvmmu maps other blocks than it handed out");
        self.mmu.close(id).expect("it is open");
        if self.sequences.is_empty() {
            self.mmu.validate(None).expect("every invariant holds");
        }
    }

    fn free_windows(&mut self, windows: usize, _memory: &Memory) -> Option<Vec<[u32; 2]>> {
        let plan = (self.mmu.plan_huge_pages(windows as u32, u32::MAX))
            .expect("all blocks may move and enough are empty");
        let moves = self.mmu.begin(&plan).expect("its own plan");
        let moved = self.mmu.commit(&moves).expect("its own moves");
        assert_eq!(moved as usize, moves.pairs().len(), "nothing else happened");
        Some(moves.pairs().to_vec())
    }
}

/// An allocator of pages: a huge one for each complete region of a prompt, as kvmmu does it, blocks
/// one by one for the rest, for regions that got none, and to grow.
pub struct Placed<A> {
    allocator: A,
    /// The rest of a prompt in aligned pieces, the largest first, instead of one by one.
    pieces: bool,
    /// First blocks of the huge pages of each sequence.
    pages: HashMap<i64, Vec<u32>>,
    shown: usize,
}

impl<A: Pages> Placed<A> {
    /// Over a new allocator.
    pub fn new(allocator: A, pieces: bool) -> Self {
        Self {
            allocator,
            pieces,
            pages: HashMap::new(),
            shown: 0,
        }
    }

    /// The pages first: small blocks would take their place. `again` is asked when the allocator says
    /// that there is none.
    fn claim(
        &mut self,
        sequence: i64,
        blocks: usize,
        again: impl Fn(&A) -> Option<u32>,
    ) -> Vec<u32> {
        let regions = blocks / WINDOW;
        let mut pages = Vec::with_capacity(regions);
        while pages.len() < regions {
            let page = self.allocator.claim_page(0, HUGE).or_else(|| {
                let found = again(&self.allocator);
                self.shown += usize::from(found.is_some());
                found
            });
            let Some(first) = page else { break };
            pages.push(first);
        }
        let mut out = Vec::with_capacity(blocks);
        for &first in &pages {
            out.extend(first..first + WINDOW as u32);
        }
        self.claim_rest(blocks - out.len(), &mut out);
        self.pages.insert(sequence, pages);
        out
    }

    fn claim_rest(&self, mut n: usize, out: &mut Vec<u32>) {
        let mut order = if self.pieces { HUGE - 1 } else { 0 };
        while n > 0 {
            if n >> order == 0 {
                order -= 1;
                continue;
            }
            match self.allocator.claim_page(0, order) {
                Some(first) => {
                    out.extend(first..first + (1 << order));
                    n -= 1 << order;
                }
                None => order = order.checked_sub(1).expect("the engine had room"),
            }
        }
    }
}

impl<A: Pages> Player for Placed<A> {
    fn open(&mut self, sequence: i64, _tokens: u32, blocks: usize, _memory: &Memory) -> Vec<u32> {
        self.claim(sequence, blocks, |_| None)
    }

    fn grow(&mut self, rows: &[Growth]) -> Vec<Vec<u32>> {
        let grown = rows.iter().map(|row| {
            let mut out = Vec::with_capacity(row.to - row.from);
            self.claim_rest(row.to - row.from, &mut out);
            out
        });
        grown.collect()
    }

    fn close(&mut self, sequence: i64, blocks: &[u32]) {
        let pages = self.pages.remove(&sequence).expect("it is open");
        for &first in &pages {
            self.allocator.release_page(0, first, HUGE);
        }
        for &block in &blocks[pages.len() * WINDOW..] {
            self.allocator.release(0, block);
        }
    }

    fn free_windows(&mut self, _windows: usize, _memory: &Memory) -> Option<Vec<[u32; 2]>> {
        None
    }
}

/// An allocator that can claim what it is told to, given every help: when it says that there is no
/// huge page it is shown the free windows, and its windows are emptied by the fewest moves: those with
/// the fewest live blocks, into the fullest others.
pub struct Movable<A>(pub Placed<A>);

impl<A: Exact> Player for Movable<A> {
    fn open(&mut self, sequence: i64, _tokens: u32, blocks: usize, memory: &Memory) -> Vec<u32> {
        let free = memory.cheapest(memory.free_windows());
        (self.0).claim(sequence, blocks, |allocator| {
            let mut firsts = free.iter().map(|window| (window * WINDOW) as u32);
            firsts.find(|&first| allocator.claim_exact(0, first, HUGE))
        })
    }

    fn grow(&mut self, rows: &[Growth]) -> Vec<Vec<u32>> {
        self.0.grow(rows)
    }

    fn close(&mut self, sequence: i64, blocks: &[u32]) {
        self.0.close(sequence, blocks);
    }

    fn free_windows(&mut self, windows: usize, memory: &Memory) -> Option<Vec<[u32; 2]>> {
        let chosen = memory.cheapest(windows);
        let mut others: Vec<usize> = (0..memory.live().len()).collect();
        others.retain(|window| !chosen.contains(window));
        others.sort_by_key(|&window| std::cmp::Reverse(memory.live()[window]));
        let blocks = |window: usize| (window * WINDOW) as u32..((window + 1) * WINDOW) as u32;
        let allocator = &self.0.allocator;
        let mut destinations = (others.into_iter().flat_map(blocks))
            .filter(|&block| !memory.is_held(block) && allocator.claim_exact(0, block, 0));
        let mut moves = Vec::new();
        for source in chosen.into_iter().flat_map(blocks) {
            if memory.is_held(source) {
                let destination = destinations.next().expect("there is room elsewhere");
                moves.push([source, destination]);
            }
        }
        for &[source, _] in &moves {
            allocator.release(0, source);
        }
        Some(moves)
    }

    fn shown(&self) -> usize {
        self.0.shown
    }
}
