//! Physical memory: who holds which block.
//!
//! What lives here: [`Pool`], which joins the two halves below, for [`crate::Mmu`] and for users who
//! want blocks without sequences. What never lives here: sequences, tokens, the order of eviction.
//!
//! | file | what lives there |
//! |---|---|
//! | `physical` | *empty or not*: lines, counters, credits; the invariants of the lock-free machine |
//! | `claim`, `shape`, `give` | claims of any blocks, claims of blocks that lie together, releases |
//! | `homes`, `counter`, `index` | layouts of the words; the hint sets |
//! | `placement`, `batch`, `fifo` | where new blocks are taken from |
//! | `word`, `states` | the state word of a block: references, states, owners |
//! | `raw` | the public verbs, which check what they are given |
//!
//! # One truth
//!
//! The line bit is the truth of *empty or not*; for a block that is not empty the state word is the
//! truth of the rest, and it is 0 while the block is empty or private. Everything else is an index,
//! claimed before and repaired after:
//!
//! ```text
//! lines      1 bit   set: not empty
//! words      32 bit  see word.rs
//! evictable  1 bit   cached, and may be evicted now: counts as available
//! stuck      1 bit   must not be planned as a source: fenced, destined, offline, moving, pinned,
//!                    or cached but not yet evictable
//! indexed    32 bit  a window: how many bits it has in these two
//! ```
//!
//! | from | to | linearisation point | who may |
//! |---|---|---|---|
//! | empty | in use, destined, offline | credits fall; bit set | holder of a reservation |
//! | in use | empty | bit cleared | last reference |
//! | in use | in use, more or fewer references | exchange of the word | a holder |
//! | in use | cached, fenced | exchange or store of the word | last reference |
//! | cached | in use | exchange or store of the word | who finds it: against eviction one wins |
//! | cached | empty | exchange or store of the word, then the bit | who evicts it |
//! | destined, offline | in use, cached, empty | store of the word | the transaction; `online` |
//!
//! *Store*: [`crate::Mmu`] changes words of blocks that more than one thread may know only under
//! its shared lock, and a private block's word belongs to its sequence; so a store suffices there.
//! *Exchange*: the verbs of `raw`, which take no lock.

mod batch;
mod claim;
mod counter;
mod fifo;
mod give;
mod homes;
mod index;
mod physical;
mod placement;
mod raw;
mod shape;
mod states;
mod word;

use std::ops::Range;

use crate::error::Result;
use crate::sync::{
    AtomicU32, AtomicU64, Mutex, Ordering, lock, thread_number, zeroed_u32, zeroed_u64,
};

use fifo::Fifo;
use give::Group;
use homes::Home;
/// For its models.
#[cfg(loom)]
pub use index::Index;
use physical::Physical;
pub(crate) use placement::Fit;
pub use placement::{End, Placement, Zone};
pub use raw::PoolConfig;
pub(crate) use raw::check_anchor;
pub use states::States;
pub(crate) use word::Word;
pub use word::{MAX_OWNER, MAX_REFERENCES, State};

/// Blocks of a window.
pub(crate) const WINDOW: u32 = Physical::<64, 8>::WINDOW;

/// The physical blocks: `BITS` of them a word, `WORDS` words a window. Other geometries than the
/// default are for model checkers, whose worlds must be small.
#[derive(Debug)]
pub struct Pool<const BITS: u32 = 64, const WORDS: usize = 8> {
    physical: Physical<BITS, WORDS>,
    /// A block in the middle that is never handed out (a null block that is not the last).
    reserved: Option<u32>,
    /// The state words, two in each: the even block's in the lower half, so that a batch changes
    /// two by one exchange.
    words: Box<[AtomicU64]>,
    evictable: Box<[AtomicU64]>,
    stuck: Box<[AtomicU64]>,
    /// Of each window: bits of `evictable` (lower half) and of `stuck` (upper half).
    indexed: Box<[AtomicU32]>,
    counts: [AtomicU32; 5],
    num_evictable: AtomicU32,
    fifo: Option<Mutex<Fifo>>,
}

/// What the manager above asks of the pool: blocks whose words it keeps itself, or keeps 0.
impl<const BITS: u32, const WORDS: usize> Pool<BITS, WORDS> {
    /// A pool of empty blocks 0 .. `span`, without `reserved`.
    pub(crate) fn build(
        span: u32,
        reserved: Option<u32>,
        placement: Placement,
        small_from: End,
        anchor: f64,
    ) -> Result<Self> {
        let words = span.div_ceil(64) as usize;
        let pool = Self {
            physical: Physical::new(span, reserved, placement, small_from, anchor)?,
            reserved,
            words: zeroed_u64(span.div_ceil(2) as usize)?,
            evictable: zeroed_u64(words)?,
            stuck: zeroed_u64(words)?,
            indexed: zeroed_u32(span.div_ceil(Self::WINDOW) as usize)?,
            counts: std::array::from_fn(|_| AtomicU32::new(0)),
            num_evictable: AtomicU32::new(0),
            fifo: match placement {
                Placement::Fifo => Some(Mutex::new(Fifo::new(span, reserved)?)),
                _ => None,
            },
        };
        if let Some(reserved) = reserved {
            pool.set_stuck(reserved, true);
        }
        Ok(pool)
    }

    /// This thread's home.
    fn home(&self) -> &Home {
        self.physical.home(thread_number())
    }

    /// Empty blocks that nobody has reserved.
    pub fn empty(&self) -> u32 {
        self.physical.empty()
    }

    /// Reserves up to `n` empty blocks and returns how many.
    pub(crate) fn reserve_up_to(&self, n: u32) -> u32 {
        let _fifo = self.fifo.as_ref().map(lock);
        self.physical.reserve_up_to(self.home(), n)
    }

    /// Reserves exactly `n` empty blocks, or nothing.
    pub(crate) fn reserve(&self, n: u32) -> bool {
        // Who pops a block from the list counts on finding its credit: homes are emptied, as a
        // reservation may do, under the same lock.
        let _fifo = self.fifo.as_ref().map(lock);
        self.physical.reserve(self.home(), n)
    }

    /// Gives a reservation back.
    pub(crate) fn unreserve(&self, n: u32) {
        self.physical.deposit(self.home(), n);
    }

    /// Turns a reservation of `n` blocks into `n` private blocks, appended to `out`; ascending with
    /// [`Placement::AddressOrder`].
    pub(crate) fn take(&self, n: u32, zone: Zone, fit: Fit, out: &mut Vec<u32>) {
        match &self.fifo {
            None => self.physical.take(n, zone, fit, out),
            Some(fifo) => self.take_oldest(&mut lock(fifo), n, out),
        }
    }

    /// With `n` blocks reserved: claims as many of them as are empty in these windows, in this order, and
    /// returns how many. For [`Placement::AddressOrder`].
    pub(crate) fn take_from_windows(
        &self,
        windows: impl Iterator<Item = u32>,
        n: u32,
        out: &mut Vec<u32>,
    ) -> u32 {
        self.physical.take_from_windows(windows, n, out)
    }

    /// Empty blocks of a window, those of a home included.
    pub(crate) fn empty_in(&self, window: u32) -> u32 {
        self.physical.empty_in(window)
    }

    /// With a window reserved: claims the lowest whole one.
    pub(crate) fn take_window(&self, zone: Zone) -> Option<u32> {
        self.shaped(|| {
            let first = self.physical.take_window(self.home(), zone)?;
            Some((first, first..first + Self::WINDOW))
        })
    }

    /// With `n` blocks reserved: claims a run of them that begins at `at` modulo `align`, where
    /// `spare` more blocks behind it are empty if there is such a place. For
    /// [`Placement::AddressOrder`].
    pub(crate) fn take_tail(
        &self,
        n: u32,
        spare: u32,
        (align, at): (u32, u32),
        zone: Zone,
    ) -> Option<u32> {
        self.physical.take_tail(n, spare, (align, at), zone)
    }

    /// With `n` blocks reserved: claims a run of them, the lowest that is found. For
    /// [`Placement::AddressOrder`].
    pub(crate) fn take_run(&self, n: u32, zone: Zone) -> Option<u32> {
        self.physical.take_run(n, zone)
    }

    /// How many blocks from `first` on look empty, `most` at most.
    pub(crate) fn free_from(&self, first: u32, most: u32) -> u32 {
        let most = most.min(self.span().saturating_sub(first));
        self.physical.run_length(first, most)
    }

    /// Empties blocks that the caller owns alone and whose words are 0, and keeps as many
    /// reserved. Not for [`Placement::Fifo`].
    pub(crate) fn give_reserved(&self, blocks: &[u32]) {
        debug_assert!(self.fifo.is_none());
        let wrong = self.physical.give_reserved(blocks);
        assert!(wrong.is_none(), "released block {wrong:?}, which was empty");
    }

    /// Claims exactly this block if it is empty.
    pub(crate) fn take_exact(&self, block: u32) -> bool {
        self.claim_exact(block, 1)
    }

    /// As [`Pool::give`], of whole runs, stuck or not. Not for [`Placement::Fifo`].
    pub(crate) fn give_runs(&self, runs: impl Iterator<Item = Range<u32>>) {
        debug_assert!(self.fifo.is_none());
        let groups = runs.flat_map(|run| {
            debug_assert!(self.all_private(run.clone()));
            self.unstick(run.clone());
            Physical::<BITS, WORDS>::groups(run)
        });
        let wrong = self.physical.give_each(self.home(), groups);
        assert!(wrong.is_none(), "released block {wrong:?}, which was empty");
    }

    /// As [`Pool::give`], of blocks in any order, stuck or not, each of which comes once. Not for
    /// [`Placement::Fifo`], where the order counts.
    pub(crate) fn give_unsorted(&self, blocks: &mut [u32]) {
        debug_assert!(self.fifo.is_none());
        debug_assert!(self.each_private(blocks));
        if blocks.is_empty() {
            return;
        }
        let unstick = |group: &Group| {
            let first = group.first / BITS * BITS;
            // Relaxed: the caller owns the blocks, and asks about their bits alone.
            let stuck = self.stuck[first as usize / 64].load(Ordering::Relaxed) >> (first % 64);
            let mut stuck = stuck & group.mask;
            while stuck != 0 {
                self.set_stuck(first + stuck.trailing_zeros(), false);
                stuck &= stuck - 1;
            }
        };
        let wrong = self.physical.give_unsorted(self.home(), blocks, unstick);
        assert!(wrong.is_none(), "released block {wrong:?}, which was empty");
    }

    /// Empties blocks that the caller owns alone and whose words are 0.
    pub(crate) fn give(&self, blocks: &[u32]) {
        debug_assert!(
            blocks
                .iter()
                .all(|&block| self.word(block) == Word::PRIVATE)
        );
        if blocks.is_empty() {
            return;
        }
        let wrong = self.give_all(blocks);
        assert!(wrong.is_none(), "released block {wrong:?}, which was empty");
    }
}

/// For models: steps of longer ways.
#[cfg(loom)]
impl<const BITS: u32, const WORDS: usize> Pool<BITS, WORDS> {
    /// One of several holders gives a block up, as [`crate::Mmu`] does it under its lock.
    pub fn let_go_under_lock(&self, block: u32) {
        let less = self.word(block).released();
        self.set_word(block, less.expect("somebody else holds it too"));
    }

    /// Whether the caller is the only holder of a block, asked without a lock.
    pub fn is_private(&self, block: u32) -> bool {
        self.word(block) == Word::PRIVATE
    }

    /// A search for an aligned page, or for a run that would hold one, found none in a window.
    pub fn found_no_page(&self, window: u32, order: u32) {
        self.physical.give_up_on(window, order);
    }
}
