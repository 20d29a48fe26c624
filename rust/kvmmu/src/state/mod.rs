//! The state that every verb works on: one struct, and the few block transitions that several
//! verbs share.
//!
//! What lives here: [`Mmu`], its locks, and how a block is claimed, released, fenced (evicted:
//! `evict.rs`). What never lives here: a verb. Those are one file each in [`crate::sequence`] and
//! [`crate::compact`].
//!
//! # Synchronization
//!
//! - `gate`: every verb on a sequence reads it; whatever needs the whole state at rest (planning,
//!   beginning and committing moves, measuring, validating) writes it. So a row export and a commit
//!   exclude each other, and no verb sees half a commit.
//! - `slots[i]`: one writer a sequence. A verb tries the lock; who finds it taken gets
//!   [`Error::ConcurrentUse`]. Under a written gate all of them are free.
//! - `shared`: prefix index, mapping chains, pins, moves. Every change to the word of a block that
//!   more than one thread may know happens under it. The append path of private blocks never takes
//!   it.
//! - `steps`: which steps are in flight, and what each has scheduled. Whoever releases blocks holds it
//!   meanwhile, so that no step ends between asking for the fence and waiting behind it.
//!
//! Order: gate, slots, shared, steps.

mod ages;
mod evict;
mod holds;
mod mapping;
mod reverse;
mod sequence;
mod steps;
mod wishes;

use std::cmp::Reverse as Descending;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::pool::{End, Pool, State, States, Word};
use crate::prefix::{Index, Tokens};
use crate::stats::{Stats, StatsReading, count};
use crate::sync::{
    AtomicU32, Mutex, MutexGuard, Ordering, RwLock, RwLockReadGuard, RwLockWriteGuard, Serial,
    lock, try_lock,
};
use crate::table::{Blocks, Piece, Pieces, Table};

pub(crate) use ages::Ages;
use holds::Holds;
pub(crate) use mapping::runs_behind;
pub(crate) use reverse::{Chains, ORDERS, PageOf, Reverse};
pub use sequence::SequenceInfo;
pub(crate) use sequence::{NONE, Sequence, id, parse};
pub(crate) use steps::{Entry, Steps};
pub(crate) use wishes::Wish;
use wishes::Wishes;

/// A move that has begun.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Move {
    pub(crate) source: u32,
    pub(crate) destination: u32,
    /// Its source was written or pinned meanwhile: the copy is worth nothing.
    pub(crate) dropped: bool,
}

/// A window that is being filled with a region of a sequence, by moves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Filling {
    pub(crate) slot: u32,
    pub(crate) generation: u64,
    /// Of its virtual blocks.
    pub(crate) region: u32,
    /// First block of the window.
    pub(crate) window: u32,
}

/// What the shared lock guards.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) index: Index,
    pub(crate) chains: Chains,
    /// Pins and leases of a block.
    pub(crate) pins: HashMap<u32, u32>,
    /// Blocks of every lease, and how many leases a block is under.
    pub(crate) leases: HashMap<u64, Vec<u32>>,
    pub(crate) leased: HashMap<u32, u32>,
    pub(crate) next_lease: u64,
    /// Source of a move in flight: where it stands in `transactions`.
    pub(crate) moving: HashMap<u32, (u64, usize)>,
    pub(crate) transactions: BTreeMap<u64, Vec<Move>>,
    pub(crate) next_epoch: u64,
    /// Destinations of copies on write that wait for the start of a step in flight.
    pub(crate) awaited: HashMap<u32, u64>,
    /// Cached blocks that a step in flight may still read: not evictable before it has ended.
    cooling: HashMap<u32, u64>,
    cooling_order: VecDeque<(u64, u32)>,
    /// When the evictable blocks entered the order of eviction.
    pub(crate) ages: Ages,
    /// Fenced blocks and the step that each waits for.
    fenced: VecDeque<(u64, u32)>,
    /// Empty between verbs: memory for what one unmaps or maps once more, which the system would
    /// map anew each time.
    pub(crate) pieces: Pieces,
    /// What compaction fills; the hold behind the last slot says how far.
    pub(crate) filling: Option<Filling>,
    /// The slot at which compaction goes on to look for sequences in many runs.
    pub(crate) cursor: u32,
    /// Missed huge pages that compaction has seen to.
    pub(crate) missed: u64,
    /// Moves begun that somebody asked for: the guarantee does not speak of them.
    pub(crate) asked: u64,
}

impl Shared {
    /// Blocks that wait for a step.
    pub(crate) fn fenced_blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.fenced.iter().map(|&(_, block)| block)
    }

    /// Pins of a block that are no leases.
    pub(crate) fn pins_of(&self, block: u32) -> u32 {
        let count = |of: &HashMap<u32, u32>| of.get(&block).copied().unwrap_or(0);
        count(&self.pins) - count(&self.leased)
    }

    /// Blocks that wait for steps, fenced or cooling, and the step of each.
    pub(crate) fn waiting_for(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        let fenced = self.fenced.iter().map(|&(step, block)| (block, step));
        fenced.chain(self.cooling.iter().map(|(&block, &step)| (block, step)))
    }

    /// The step that a cached block waits for before it may be evicted.
    pub(crate) fn cools_for(&self, block: u32) -> Option<u64> {
        self.cooling.get(&block).copied()
    }

    /// Whether a cached block waits for a step before it may be evicted.
    pub(crate) fn is_cooling(&self, block: u32) -> bool {
        self.cooling.contains_key(&block)
    }
}

/// Sequence slots that are free.
#[derive(Debug)]
struct FreeSlots {
    reused: BinaryHeap<Descending<u32>>,
    /// Slots at or above this were never used.
    fresh: u32,
}

/// A memory-management unit for the KV blocks of one device.
///
/// It decides which sequence holds which block and what moves where; it never touches the bytes of
/// a block. All methods take `&self` and may be called from any thread.
#[derive(Debug)]
pub struct Mmu {
    pub(crate) config: Config,
    /// Tells managers apart, so that rows and plans are not used with another one.
    pub(crate) uid: u64,
    pub(crate) pool: Pool,
    pub(crate) table: Table,
    pub(crate) reverse: Reverse,
    pub(crate) holds: Holds,
    pub(crate) tokens: Tokens,
    pub(crate) slots: Box<[Mutex<Sequence>]>,
    free_slots: Mutex<FreeSlots>,
    gate: RwLock<()>,
    shared: Mutex<Shared>,
    steps: Mutex<Steps>,
    pub(crate) stats: Stats,
    /// Shapes that somebody was refused for want of.
    pub(crate) wishes: Wishes,
    /// 1 while the default trigger of compaction is on.
    pub(crate) compacting: AtomicU32,
    /// 1 while its trigger by ratio is.
    pub(crate) compacting_by_ratio: AtomicU32,
}

impl Mmu {
    /// Builds a manager with an empty pool.
    pub fn new(config: Config) -> Result<Self> {
        static NEXT: Serial = Serial::new(1);
        config.check()?;
        let (n, block_size) = (config.span(), config.block_size);
        let reserved = (config.null_block < config.num_blocks).then_some(config.null_block);
        let indexed = if config.prefix_caching { n } else { 0 };
        // Huge pages from the low end, single blocks from the high one.
        let small_from = match config.page_orders.bits() {
            1 => End::Low,
            _ => End::High,
        };
        let slots = (0..config.max_sequences)
            .map(|_| Mutex::new(Sequence::closed()))
            .collect();
        Ok(Self {
            uid: NEXT.fetch_add(1, Ordering::Relaxed),
            pool: Pool::build(n, reserved, config.placement, small_from, config.anchor)?,
            table: Table::new(config.table_nodes, config.max_sequences)?,
            reverse: Reverse::new(n, config.page_orders.bits())?,
            holds: Holds::new(config.max_sequences + 1)?,
            tokens: Tokens::new(n, block_size, config.prefix_caching)?,
            slots,
            free_slots: Mutex::new(FreeSlots {
                reused: BinaryHeap::new(),
                fresh: 0,
            }),
            gate: RwLock::new(()),
            shared: Mutex::new(Shared {
                index: Index::new(indexed, block_size, config.eviction)?.with_log(&config)?,
                chains: Chains::default(),
                pins: HashMap::default(),
                leases: HashMap::default(),
                leased: HashMap::default(),
                next_lease: 1,
                moving: HashMap::default(),
                transactions: BTreeMap::new(),
                next_epoch: 1,
                awaited: HashMap::default(),
                cooling: HashMap::default(),
                cooling_order: VecDeque::new(),
                ages: Ages::new(indexed)?,
                fenced: VecDeque::new(),
                pieces: Pieces::default(),
                filling: None,
                cursor: 0,
                missed: 0,
                asked: 0,
            }),
            steps: Mutex::new(Steps::new()),
            stats: Stats::default(),
            wishes: Wishes::new(),
            compacting: AtomicU32::new(0),
            compacting_by_ratio: AtomicU32::new(0),
            config,
        })
    }

    /// The settings that it was built from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The block that padding points at; never handed out, moved or counted.
    pub fn null_block(&self) -> u32 {
        self.config.null_block
    }

    /// Blocks by state.
    pub fn states(&self) -> States {
        let mut states = self.pool.states();
        let held = self.holds.total().min(states.in_use);
        states.in_use -= held;
        states.empty += held;
        states.available += held;
        states.held = held;
        states
    }

    /// Counters since the start.
    pub fn stats(&self) -> StatsReading {
        self.stats.read()
    }

    /// Blocks that so many tokens need.
    pub(crate) fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.config.block_size)
    }

    // -- locks -------------------------------------------------------------------------------

    pub(crate) fn enter(&self) -> RwLockReadGuard<'_, ()> {
        self.gate
            .read()
            .expect("the gate was poisoned by an earlier panic")
    }

    pub(crate) fn rest(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate
            .write()
            .expect("the gate was poisoned by an earlier panic")
    }

    pub(crate) fn shared(&self) -> MutexGuard<'_, Shared> {
        lock(&self.shared)
    }

    pub(crate) fn steps(&self) -> MutexGuard<'_, Steps> {
        lock(&self.steps)
    }

    /// The sequence of an id, for this call alone.
    pub(crate) fn sequence(&self, id: i64) -> Result<(u32, MutexGuard<'_, Sequence>)> {
        let unknown = Error::UnknownSequence { sequence: id };
        let (generation, slot) = parse(id).ok_or(unknown.clone())?;
        let cell = self.slots.get(slot as usize).ok_or(unknown.clone())?;
        if !self.table.is_open(slot, generation) {
            return Err(unknown);
        }
        let sequence = try_lock(cell).ok_or(Error::ConcurrentUse { sequence: id })?;
        if sequence.open && sequence.generation == generation {
            Ok((slot, sequence))
        } else {
            Err(unknown)
        }
    }

    /// The sequence that had a slot in this generation, if it is still open.
    pub(crate) fn sequence_if_open(
        &self,
        slot: u32,
        generation: u64,
    ) -> Result<Option<MutexGuard<'_, Sequence>>> {
        match self.sequence(id(generation, slot)) {
            Ok((_, sequence)) => Ok(Some(sequence)),
            Err(Error::UnknownSequence { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Blocks that wait for steps: (fenced, cooling).
    pub(crate) fn waiting(shared: &Shared) -> (usize, usize) {
        (shared.fenced.len(), shared.cooling.len())
    }

    /// All slots that were ever used.
    pub(crate) fn used_slots(&self) -> impl Iterator<Item = (u32, &Mutex<Sequence>)> {
        let used = lock(&self.free_slots).fresh;
        (0..used).zip(&self.slots)
    }

    // -- slots -------------------------------------------------------------------------------

    /// A slot with an empty address space. All or nothing.
    pub(crate) fn take_slot(&self) -> Result<(u32, MutexGuard<'_, Sequence>)> {
        let slot = {
            let mut free = lock(&self.free_slots);
            match free.reused.pop() {
                Some(Descending(slot)) => slot,
                None if free.fresh < self.config.max_sequences => {
                    free.fresh += 1;
                    free.fresh - 1
                }
                None => {
                    return Err(Error::OutOfTables {
                        what: "sequence slots",
                        capacity: u64::from(self.config.max_sequences),
                    });
                }
            }
        };
        let mut sequence = lock(&self.slots[slot as usize]);
        let generation = sequence.generation + 1;
        let space = match self.table.open(slot, generation) {
            Ok(space) => space,
            Err(error) => {
                drop(sequence);
                lock(&self.free_slots).reused.push(Descending(slot));
                return Err(error);
            }
        };
        *sequence = Sequence {
            generation,
            open: true,
            space,
            ..Sequence::closed()
        };
        Ok((slot, sequence))
    }

    /// Whether a sequence of so many blocks could be opened as far as slots and table nodes go.
    pub(crate) fn has_room(&self, blocks: u32) -> bool {
        let free = lock(&self.free_slots);
        let slots = free.fresh < self.config.max_sequences || !free.reused.is_empty();
        let next = free
            .reused
            .peek()
            .map_or(free.fresh, |&Descending(slot)| slot);
        slots && self.table.has_room(next, blocks)
    }

    /// Gives a slot back whose address space is empty.
    pub(crate) fn give_slot(&self, slot: u32, mut sequence: MutexGuard<'_, Sequence>) {
        self.table.close(sequence.space);
        sequence.open = false;
        sequence.keys = None;
        drop(sequence);
        lock(&self.free_slots).reused.push(Descending(slot));
    }

    // -- references --------------------------------------------------------------------------

    /// One more holder of a block that is published or already shared, or of a sequence's own
    /// block (fork).
    pub(crate) fn retain(&self, shared: &mut Shared, block: u32) {
        let word = self.pool.word(block);
        if word.state() == State::Cached {
            self.leave_cache(shared, block);
        }
        self.pool.set_word(
            block,
            word.retained().expect("the count was checked before"),
        );
    }

    /// As [`Mmu::retain`], for each of a range.
    pub(crate) fn retain_range(&self, shared: &mut Shared, blocks: std::ops::Range<u32>) {
        self.pool
            .retain_pairs(blocks, |block| self.retain(shared, block));
    }

    /// As [`Mmu::retain`], for each of a piece.
    pub(crate) fn retain_piece(&self, shared: &mut Shared, piece: Piece<'_>) {
        match piece.blocks {
            Blocks::Run(n) => self.retain_range(shared, piece.page.block..piece.page.block + n),
            Blocks::Each(blocks) => self
                .pool
                .retain_each(blocks, |block| self.retain(shared, block)),
        }
    }

    /// One holder less. A block that nobody holds any more goes to the cache, behind the fence, or
    /// to `empty` for the caller to give back.
    pub(crate) fn release(
        &self,
        shared: &mut Shared,
        fence: Option<u64>,
        block: u32,
        empty: &mut Vec<u32>,
    ) {
        match self.pool.word(block).released() {
            Some(word) => {
                self.pool.set_word(block, word);
                if word.state() == State::Cached {
                    self.enter_cache(shared, fence, block);
                }
            }
            None => {
                count(&self.stats.freed_blocks, 1);
                self.let_go(shared, fence, block, empty);
            }
        }
    }

    /// Nobody holds an unpublished block any more: it is emptied, or fenced first.
    pub(crate) fn let_go(
        &self,
        shared: &mut Shared,
        fence: Option<u64>,
        block: u32,
        empty: &mut Vec<u32>,
    ) {
        match fence {
            Some(step) => self.fence(shared, step, block),
            None => {
                self.pool.set_word(block, Word::PRIVATE);
                self.pool.set_stuck(block, false);
                empty.push(block);
            }
        }
    }

    fn fence(&self, shared: &mut Shared, step: u64, block: u32) {
        self.pool.set_word(block, Word::FENCED);
        self.pool.set_stuck(block, true);
        shared.fenced.push_back((step, block));
    }

    /// A block becomes the most recently used of the cached ones.
    fn enter_cache(&self, shared: &mut Shared, fence: Option<u64>, block: u32) {
        count(&self.stats.left_cached, 1);
        match fence {
            Some(step) => {
                shared.cooling.insert(block, step);
                shared.cooling_order.push_back((step, block));
            }
            None => self.enter_order(shared, block),
        }
        if fence.is_some() || self.pool.word(block).is_moving() {
            self.refresh_stuck(shared, block);
        }
    }

    /// True when the block was cooling.
    pub(crate) fn stop_cooling(&self, shared: &mut Shared, block: u32) -> bool {
        let cooling = shared.cooling.remove(&block).is_some();
        if cooling {
            self.refresh_stuck(shared, block);
        }
        cooling
    }

    /// A cooling block has moved: its place in the order of release is taken by where it is now.
    pub(crate) fn cool_elsewhere(&self, shared: &mut Shared, old: u32, new: u32) {
        let step = shared.cooling.remove(&old).expect("it is cooling");
        shared.cooling.insert(new, step);
        let mut entries = shared.cooling_order.iter_mut();
        let entry = entries.find(|entry| **entry == (step, old));
        entry.expect("a cooling block has an entry").1 = new;
    }

    /// Steps have ended: fenced blocks that no step can touch any more become empty, and cached
    /// ones evictable.
    pub(crate) fn cool_down(&self, shared: &mut Shared, steps: &Steps) {
        let mut empty = Vec::new();
        for (step, block) in std::mem::take(&mut shared.fenced) {
            if steps.has_passed(step) {
                self.pool.set_word(block, Word::PRIVATE);
                self.pool.set_stuck(block, false);
                empty.push(block);
            } else {
                shared.fenced.push_back((step, block));
            }
        }
        self.pool.give(&empty);
        // Not in the order of steps: one that was prepared late may end before one that waits.
        for (step, block) in std::mem::take(&mut shared.cooling_order) {
            if !steps.has_passed(step) {
                shared.cooling_order.push_back((step, block));
            } else if shared.cooling.get(&block) == Some(&step) {
                // (Else it was released again since, or is no longer cached.)
                self.stop_cooling(shared, block);
                self.enter_order(shared, block);
            }
        }
    }

    /// Brings the planner's index of untouchable blocks up to date for a block that is not empty.
    pub(crate) fn refresh_stuck(&self, shared: &Shared, block: u32) {
        self.pool
            .set_stuck(block, self.must_be_stuck(shared, block));
    }

    pub(crate) fn must_be_stuck(&self, shared: &Shared, block: u32) -> bool {
        let word = self.pool.word(block);
        !matches!(word.state(), State::InUse | State::Cached)
            || word.is_moving()
            || shared.pins.contains_key(&block)
            || shared.cooling.contains_key(&block)
            || shared.awaited.contains_key(&block)
    }

    /// A step is settled: the copies on write that it began with have been made.
    pub(crate) fn stop_awaiting(&self, shared: &mut Shared, step: u64) {
        if shared.awaited.is_empty() {
            return;
        }
        let done = shared.awaited.iter().filter(|&(_, &since)| since == step);
        for block in done.map(|(&block, _)| block).collect::<Vec<_>>() {
            shared.awaited.remove(&block);
            if !self.pool.is_empty(block) {
                self.refresh_stuck(shared, block);
            }
        }
    }

    /// The source of a move is about to be written or pinned: its move falls out of the commit.
    pub(crate) fn drop_move(&self, shared: &mut Shared, block: u32) {
        let (epoch, index) = shared.moving[&block];
        let moves = shared
            .transactions
            .get_mut(&epoch)
            .expect("a moving block has a transaction");
        moves[index].dropped = true;
    }
}
