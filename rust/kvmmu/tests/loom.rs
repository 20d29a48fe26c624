//! Models of the pool: every interleaving, up to a bound on preemptions, and every reading that the
//! memory model allows, of a few operations by two or three threads on the shipped code.
//!
//! What lives here: programs as small as reach their path, in pools of at most ten blocks. What
//! never lives here: random programs (`pool.rs`, `shuttle.rs`, `examples/stress.rs`).
//!
//!     RUSTFLAGS="--cfg loom" cargo test -p kvmmu --test loom
//!
//! Each model ends with a recount of everything. Each states its bound; `LOOM_MAX_PREEMPTIONS`
//! replaces all of them, and `KVMMU_MODELS=short` lowers them by one. `KVMMU_WEAKEN` weakens one
//! ordering of the pool meanwhile (`scripts/mutate`).
#![cfg(loom)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvmmu::model::{Index, this_is_thread};
use kvmmu::{End, Placement, Pool, PoolConfig, Zone};
use loom::sync::atomic::AtomicU32;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use loom::thread::{self, JoinHandle};

/// Runs a model with at most this many preemptions an execution, and prints how many there were.
fn model(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 5_000;
    if builder.preemption_bound.is_none() {
        let short = std::env::var("KVMMU_MODELS").is_ok_and(|how| how == "short");
        builder.preemption_bound = Some(preemptions.saturating_sub(usize::from(short)));
    }
    let bound = builder.preemption_bound;
    // Not loom's: it counts over all executions.
    let executions = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&executions);
    builder.check(move || {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        model();
    });
    let name = std::thread::current().name().unwrap_or("model").to_owned();
    println!("{name}: {executions:?} executions, preemptions {bound:?}");
}

/// A pool, and a word of memory for each block, which its holder alone writes. They are written and
/// read without any ordering, so a block that comes to its next holder too early shows the old
/// holder's mark in some reading that the memory model allows.
struct World<const BITS: u32, const WORDS: usize> {
    pool: Pool<BITS, WORDS>,
    memory: Vec<AtomicU32>,
}

type Two = World<2, 2>;

impl<const BITS: u32, const WORDS: usize> World<BITS, WORDS> {
    fn new(num_blocks: u32) -> Arc<Self> {
        Self::of(&PoolConfig::new(num_blocks))
    }

    fn of(config: &PoolConfig) -> Arc<Self> {
        Arc::new(Self {
            pool: Pool::new(config).unwrap(),
            memory: (0..config.num_blocks).map(|_| AtomicU32::new(0)).collect(),
        })
    }

    /// A thread, whose seat is its number, modulo two.
    fn spawn<T: 'static>(
        self: &Arc<Self>,
        number: usize,
        work: impl FnOnce(&Self) -> T + 'static,
    ) -> JoinHandle<T> {
        let world = Arc::clone(self);
        thread::spawn(move || {
            this_is_thread(number);
            work(&world)
        })
    }

    /// These blocks are the caller's from now on.
    fn own(&self, blocks: impl IntoIterator<Item = u32>) {
        for block in blocks {
            let mark = self.memory[block as usize].load(Relaxed);
            assert_eq!(mark, 0, "block {block} is somebody's");
            self.memory[block as usize].store(1, Relaxed);
        }
    }

    /// The caller is about to give these blocks up.
    fn disown(&self, blocks: impl IntoIterator<Item = u32>) {
        for block in blocks {
            let mark = self.memory[block as usize].load(Relaxed);
            assert_eq!(mark, 1, "block {block} was not written by its holder");
            self.memory[block as usize].store(0, Relaxed);
        }
    }

    fn claim(&self) -> Option<u32> {
        let block = self.pool.claim();
        self.own(block);
        block
    }

    fn batch(&self, n: u32) -> Option<Vec<u32>> {
        let mut blocks = Vec::new();
        let done = self.pool.claim_batch(n, &mut blocks).is_ok();
        assert_eq!(blocks.len(), if done { n as usize } else { 0 });
        self.own(blocks.iter().copied());
        done.then_some(blocks)
    }

    fn range(&self, first: Option<u32>, n: u32) -> Option<Range<u32>> {
        let range = first.map(|first| first..first + n);
        self.own(range.clone().into_iter().flatten());
        range
    }

    fn page(&self, order: u32) -> Option<Range<u32>> {
        self.range(self.pool.claim_page(order), 1 << order)
    }

    fn run(&self, n: u32) -> Option<Range<u32>> {
        self.range(self.pool.claim_run(n), n)
    }

    fn exact(&self, first: u32, n: u32) -> Option<Range<u32>> {
        self.range(self.pool.claim_exact(first, n).then_some(first), n)
    }

    fn release(&self, block: u32) {
        self.disown([block]);
        self.pool.release(block).unwrap();
    }

    fn release_batch(&self, blocks: &[u32]) {
        self.disown(blocks.iter().copied());
        self.pool.release_batch(blocks).unwrap();
    }

    fn release_page(&self, first: u32, order: u32) {
        self.disown(first..first + (1 << order));
        self.pool.release_page(first, order).unwrap();
    }

    /// With all blocks held: a search finds nothing, and the open index forgets all windows. Whoever
    /// has credits then finds a window only if he sees its counter risen.
    fn forget(&self) {
        assert_eq!(self.pool.claim(), None);
    }

    /// All threads are done: everything adds up, so many blocks are empty, and what the lines show
    /// is to be had, in every shape.
    fn settle(&self, empty: u32) {
        self.pool.audit().unwrap();
        assert_eq!(self.pool.empty(), empty);
        for order in (1..=Pool::<BITS, WORDS>::MAX_ORDER).rev() {
            match self.pool.claim_page(order) {
                Some(first) => self.pool.release_page(first, order).unwrap(),
                None => {
                    let all = self.memory.len() as u32;
                    let found = (0..all)
                        .step_by(1 << order)
                        .find(|&first| self.pool.claim_exact(first, 1 << order));
                    assert_eq!(found, None, "a page of order {order} was not found");
                }
            }
        }
        assert_eq!(self.batch(empty).unwrap().len(), empty as usize);
        assert_eq!(self.pool.claim(), None);
        self.pool.audit().unwrap();
    }
}

// -- single blocks: home, slow path, shared seat, drain ------------------------------------------

/// Three blocks for two: nobody is told that there are none, whatever the other is moving between
/// its home and the total at that moment.
#[test]
fn enough_for_everybody_is_enough() {
    model(3, || {
        let world = Two::new(4);
        let other = world.spawn(1, |world| world.claim().unwrap());
        let mine = world.claim().unwrap();
        assert_ne!(mine, other.join().unwrap());
        world.settle(2);
    });
}

/// As above, while another thread asks for more than there is.
#[test]
fn a_refused_batch_makes_no_other_claim_fail() {
    model(3, || {
        let world = Two::new(4);
        let first = world.claim().unwrap();
        let other = world.spawn(1, |world| assert_eq!(world.batch(4), None));
        let mine = world.claim().unwrap();
        assert_ne!(mine, first);
        other.join().unwrap();
        world.settle(2);
    });
}

/// One block for two.
#[test]
fn the_last_block_goes_to_one() {
    model(3, || {
        let world = Two::new(1);
        let other = world.spawn(1, |world| world.claim().is_some());
        let mine = world.claim().is_some();
        assert!(mine != other.join().unwrap());
        world.settle(0);
    });
}

/// A thread that claims and releases in its home, and one that takes everything from it.
#[test]
fn a_home_is_drained_while_its_thread_works() {
    model(2, || {
        let world = Two::new(4);
        let first = world.claim().unwrap();
        let other = world.spawn(1, |world| world.batch(3).map(|blocks| blocks.len()));
        world.release(first);
        let again = world.claim();
        let got = other.join().unwrap();
        assert!(again.is_some() || got == Some(3));
        world.settle(4 - got.unwrap_or(0) as u32 - u32::from(again.is_some()));
    });
}

/// What one thread releases into its home another may claim, with what was written before.
#[test]
fn a_block_passes_from_home_to_home() {
    model(2, || {
        let world = Two::new(2);
        let first = world.claim().unwrap();
        let other = world.spawn(1, |world| [world.claim(), world.claim()]);
        world.release(first);
        let got = other.join().unwrap();
        world.settle(2 - got.iter().flatten().count() as u32);
    });
}

/// Two threads of one seat.
#[test]
fn threads_of_one_seat_share_its_home() {
    model(1, || {
        let world = Two::new(8);
        let work = |world: &Two| {
            let first = world.claim().unwrap();
            let second = world.claim().unwrap();
            world.release(first);
            second
        };
        let other = world.spawn(2, work);
        assert_ne!(work(&world), other.join().unwrap());
        world.settle(6);
    });
}

/// What a thread released into the home that it shares, in another word of the window.
#[test]
fn threads_of_one_seat_hand_on_what_they_release() {
    model(2, || {
        let world = Two::new(4);
        for block in 0..4 {
            assert_eq!(world.claim(), Some(block));
        }
        world.release(0);
        let other = world.spawn(2, |world| {
            let block = world.claim();
            world.release(2);
            block.is_some()
        });
        let mine = world.claim().is_some();
        let theirs = other.join().unwrap();
        world.settle(2 - u32::from(mine) - u32::from(theirs));
    });
}

/// Two threads of one seat and one of another.
#[test]
#[ignore = "minutes: scripts/deep runs it"]
fn three_threads_find_three_blocks() {
    model(1, || {
        let world = Two::new(8);
        let others = [1, 2].map(|number| world.spawn(number, |world| world.claim().unwrap()));
        world.claim().unwrap();
        for other in others {
            other.join().unwrap();
        }
        world.settle(5);
    });
}

/// A block of another thread's home is released while that thread claims.
#[test]
fn a_block_comes_back_into_a_home_from_outside() {
    model(3, || {
        let world = Two::new(4);
        let blocks = world.batch(3).unwrap();
        let other = world.spawn(1, move |world| {
            world.release(blocks[0]);
            world.release(blocks[2]);
        });
        world.claim().unwrap();
        other.join().unwrap();
        world.settle(2);
    });
}

/// The open index: the last block of a window comes back while a search finds the window full.
#[test]
fn a_window_that_was_full_is_found_again() {
    model(3, || {
        let world = Two::new(8);
        world.batch(8).unwrap();
        let other = world.spawn(1, |world| world.release(5));
        let mine = world.claim();
        other.join().unwrap();
        world.settle(1 - u32::from(mine.is_some()));
    });
}

/// The same with two windows of one word of the index, so that its summary is cleared and set.
#[test]
fn two_windows_that_were_full_are_found_again() {
    model(1, || {
        let world = Two::new(8);
        world.batch(8).unwrap();
        let others = [1, 5].map(|block| world.spawn(1, move |world| world.release(block)));
        let mine = world.claim();
        for other in others {
            other.join().unwrap();
        }
        world.settle(2 - u32::from(mine.is_some()));
    });
}

/// Of two releases of one block one is told.
#[test]
fn of_two_releases_of_one_block_one_is_refused() {
    model(3, || {
        let world = Two::new(4);
        let block = world.claim().unwrap();
        world.disown([block]);
        let other = world.spawn(1, move |world| world.pool.release(block).is_ok());
        let mine = world.pool.release(block).is_ok();
        assert!(mine != other.join().unwrap());
        world.settle(4);
    });
}

/// The same in batches that share a word.
#[test]
fn of_two_batches_with_one_block_in_common_one_is_refused() {
    model(2, || {
        let world = Two::new(4);
        let blocks = world.batch(3).unwrap();
        world.disown(blocks);
        let other = world.spawn(1, |world| world.pool.release_batch(&[0, 1]).is_ok());
        let mine = world.pool.release_batch(&[1, 2]).is_ok();
        let theirs = other.join().unwrap();
        assert!(!(mine && theirs));
        world.pool.audit().unwrap();
        // Who was refused before anything happened still holds the rest.
        let empty = world.pool.empty();
        assert!(empty >= 3, "{empty}");
    });
}

// -- batches -------------------------------------------------------------------------------------

/// Three and three of four: one at most; two and two: both.
#[test]
fn a_batch_is_all_or_nothing() {
    for n in [2, 3] {
        model(2, move || {
            let world = Two::new(4);
            let other = world.spawn(1, move |world| world.batch(n).is_some());
            let mine = world.batch(n).is_some();
            let theirs = other.join().unwrap();
            assert_eq!((mine && theirs, mine || theirs), (n == 2, true));
            world.settle(4 - n * (u32::from(mine) + u32::from(theirs)));
        });
    }
}

/// A batch over two windows, beside single blocks that come and go.
#[test]
fn a_batch_gathers_what_is_released_meanwhile() {
    model(2, || {
        let world = Two::new(8);
        let held = world.batch(6).unwrap();
        let other = world.spawn(1, move |world| {
            world.release(held[1]);
            world.release(held[5]);
        });
        let mine = world.batch(4).map_or(0, |blocks| blocks.len());
        other.join().unwrap();
        world.settle(4 - mine as u32);
    });
}

// -- pages ---------------------------------------------------------------------------------------

/// A page of two words beside single blocks: there is room for both.
#[test]
fn a_page_of_several_words_meets_single_blocks() {
    model(2, || {
        let world = World::<1, 4>::new(4);
        let other = world.spawn(1, |world| world.claim().unwrap());
        let page = world.page(1);
        other.join().unwrap();
        world.settle(3 - 2 * u32::from(page.is_some()));
    });
}

/// Two pages of two words in one window.
#[test]
fn two_pages_of_several_words_share_no_block() {
    model(2, || {
        let world = World::<1, 4>::new(4);
        let other = world.spawn(1, |world| world.page(1).is_some());
        let mine = world.page(1).is_some();
        let both = u32::from(mine) + u32::from(other.join().unwrap());
        world.settle(4 - 2 * both);
    });
}

/// A page out of the home while a page of the same home is released from outside.
#[test]
fn a_page_is_released_while_another_is_claimed() {
    model(2, || {
        let world = World::<1, 4>::new(4);
        let page = world.page(1).unwrap();
        let other = world.spawn(1, move |world| world.release_page(page.start, 1));
        let mine = world.page(1);
        other.join().unwrap();
        world.settle(4 - 2 * u32::from(mine.is_some()));
    });
}

/// The barren protocol: a search gives a window up while the block comes back that makes a page.
#[test]
fn a_page_that_is_released_is_found_again() {
    model(3, || {
        let world = Two::new(8);
        world.batch(8).unwrap();
        world.release_batch(&[0, 2, 4, 6]);
        let other = world.spawn(1, |world| world.release(1));
        let mine = world.page(1);
        other.join().unwrap();
        world.settle(5 - 2 * u32::from(mine.is_some()));
    });
}

/// The same with two searches.
#[test]
fn two_searches_and_a_release_leave_the_page_to_be_found() {
    model(1, || {
        let world = Two::new(4);
        world.batch(4).unwrap();
        world.release_batch(&[0, 2]);
        let others = [
            world.spawn(1, |world| {
                world.release(1);
                None
            }),
            world.spawn(2, |world| world.page(1)),
        ];
        let mine = world.page(1);
        let got = others.map(|other| other.join().unwrap());
        let pages = got.iter().flatten().count() + usize::from(mine.is_some());
        world.settle(3 - 2 * pages as u32);
    });
}

/// The same when the second search sees the page and does not take it, as one for a run may do.
#[test]
fn a_search_that_finds_a_page_leaves_it_to_be_found() {
    model(3, || {
        let world = Two::new(4);
        world.batch(4).unwrap();
        world.release(0);
        let others = [
            world.spawn(1, |world| world.release(1)),
            world.spawn(1, |world| world.pool.found_no_page(0, 1)),
        ];
        world.pool.found_no_page(0, 1);
        for other in others {
            other.join().unwrap();
        }
        world.settle(2);
    });
}

/// The same when the page comes back into a home, where no counter rises.
#[test]
fn a_page_that_is_released_into_a_home_is_found_after_it_was_left() {
    model(2, || {
        let world = Two::new(4);
        world.batch(4).unwrap();
        world.release_batch(&[0, 2]);
        let other = world.spawn(1, |world| {
            // Adopts the window, then makes a page in it.
            let block = world.claim();
            world.release(1);
            block.map(|block| world.release(block));
        });
        let mine = world.page(1);
        other.join().unwrap();
        world.settle(3 - 2 * u32::from(mine.is_some()));
    });
}

/// A page is made of two blocks that two threads release while a third looks for it.
#[test]
fn a_page_that_two_threads_complete_is_found_again() {
    model(2, || {
        let world = World::<1, 4>::new(4);
        world.batch(4).unwrap();
        let others = [(1, 0), (1, 1)]
            .map(|(number, block)| world.spawn(number, move |world| world.release(block)));
        let mine = world.page(1);
        for other in others {
            other.join().unwrap();
        }
        world.settle(2 - 2 * u32::from(mine.is_some()));
    });
}

/// A page takes blocks that were claimed and released since they were last seen free.
#[test]
fn a_page_takes_what_was_just_released() {
    model(2, || {
        let world = World::<1, 4>::new(4);
        let other = world.spawn(1, |world| {
            if let Some(block) = world.claim() {
                world.release(block);
            }
        });
        let page = world.page(1);
        other.join().unwrap();
        world.settle(4 - 2 * u32::from(page.is_some()));
    });
}

/// The same with a page that is a part of a word.
#[test]
fn a_page_of_a_word_takes_what_was_just_released() {
    model(2, || {
        let world = World::<4, 1>::new(4);
        let other = world.spawn(1, |world| {
            if let Some(block) = world.claim() {
                world.release(block);
            }
        });
        let page = world.page(1);
        other.join().unwrap();
        world.settle(4 - 2 * u32::from(page.is_some()));
    });
}

/// A page is seen, then one of its blocks is taken; what the search has goes back.
#[test]
fn a_page_that_is_taken_before_its_bits_are_set_costs_nothing() {
    model(2, || {
        let world = Two::new(4);
        world.exact(2, 1).unwrap();
        let other = world.spawn(1, |world| world.exact(1, 1).is_some());
        let page = world.page(1);
        let theirs = other.join().unwrap();
        assert!(page.is_none() || !theirs);
        world.settle(3 - 2 * u32::from(page.is_some()) - u32::from(theirs));
    });
}

/// A page makes its window a home while a block of it is claimed exactly.
#[test]
fn a_page_meets_a_range_in_its_window() {
    model(2, || {
        let world = Two::new(8);
        let other = world.spawn(1, |world| world.exact(3, 1).is_some());
        let page = world.page(1);
        let theirs = other.join().unwrap();
        world.settle(8 - 2 * u32::from(page.is_some()) - u32::from(theirs));
    });
}

// -- whole windows -------------------------------------------------------------------------------

/// A whole window and a single block: there is room for both.
#[test]
fn a_whole_window_meets_single_blocks() {
    model(2, || {
        let world = Two::new(8);
        let other = world.spawn(1, |world| world.claim().unwrap());
        let mine = world.page(2);
        other.join().unwrap();
        world.settle(7 - 4 * u32::from(mine.is_some()));
    });
}

/// The vacant index: the last block of a window comes back while a search finds none whole.
#[test]
fn a_window_that_becomes_whole_is_found_again() {
    model(2, || {
        let world = Two::new(8);
        // Four blocks are empty, so the search looks; they lie in two windows.
        world.batch(8).unwrap();
        world.release_batch(&[1, 2, 3, 7]);
        let other = world.spawn(1, |world| world.release(0));
        let mine = world.page(2);
        other.join().unwrap();
        world.settle(5 - 4 * u32::from(mine.is_some()));
    });
}

/// A window passes from hand to hand.
#[test]
fn a_whole_window_is_released_and_claimed_in_pieces() {
    model(3, || {
        let world = Two::new(4);
        let page = world.page(2).unwrap();
        let other = world.spawn(1, move |world| world.release_page(page.start, 2));
        let mine =
            world.batch(4).map_or(0, |blocks| blocks.len() as u32) + world.claim().map_or(0, |_| 1);
        other.join().unwrap();
        world.settle(4 - mine);
    });
}

/// A window is released as one page by one thread and block by block by another: one release a
/// block is believed.
#[test]
fn a_window_is_released_whole_or_in_parts_never_both() {
    model(3, || {
        let world = Two::new(4);
        let page = world.page(2).unwrap();
        world.disown(page);
        let other = world.spawn(1, |world| world.pool.release(2).is_ok());
        let whole = world.pool.release_page(0, 2).is_ok();
        let part = other.join().unwrap();
        world.pool.audit().unwrap();
        assert!(whole != part || (!whole && !part) || world.pool.empty() == 4);
        assert!(!(whole && part));
    });
}

/// A block of a whole window has a second holder, who retains it once more while the first releases
/// the window as one.
#[test]
fn a_window_that_is_shared_is_not_released_whole() {
    model(3, || {
        let world = Two::new(4);
        world.page(2).unwrap();
        world.pool.retain(&[3]).unwrap();
        let other = world.spawn(1, |world| world.pool.retain(&[3]).unwrap());
        world.pool.release_page(0, 2).unwrap();
        other.join().unwrap();
        world.pool.audit().unwrap();
        assert_eq!(world.pool.empty(), 3);
        assert_eq!(world.pool.references(3), Ok(2));
    });
}

// -- exact ranges, runs, shapes ------------------------------------------------------------------

/// Ranges that overlap: one at most; both take two windows, and undo what they have.
#[test]
fn of_two_ranges_that_overlap_one_is_claimed() {
    model(2, || {
        let world = Two::new(8);
        let other = world.spawn(1, |world| world.exact(2, 4).is_some());
        let mine = world.exact(1, 3).is_some();
        let theirs = other.join().unwrap();
        assert!(!(mine && theirs));
        world.settle(8 - 3 * u32::from(mine) - 4 * u32::from(theirs));
    });
}

/// Ranges beside each other in one word: a failure of one is for want of nothing.
#[test]
fn two_ranges_side_by_side_are_both_claimed() {
    model(2, || {
        let world = Two::new(8);
        let other = world.spawn(1, |world| world.exact(3, 3).is_some());
        assert!(world.exact(0, 3).is_some());
        assert!(other.join().unwrap());
        world.settle(2);
    });
}

/// A range in another thread's home, over two words, one of whose blocks is being claimed.
#[test]
fn a_range_meets_a_claim_and_a_release() {
    model(2, || {
        let world = World::<1, 4>::new(4);
        let first = world.claim().unwrap();
        let other = world.spawn(1, |world| world.exact(1, 3).is_some());
        world.release(first);
        let again = world.claim().is_some();
        let theirs = other.join().unwrap();
        world.settle(4 - u32::from(again) - 3 * u32::from(theirs));
    });
}

/// Exactly these blocks, claimed and released since they were last seen free.
#[test]
fn a_range_takes_what_was_just_released() {
    model(2, || {
        let world = World::<1, 4>::new(4);
        let other = world.spawn(1, |world| {
            let block = world.claim().unwrap();
            world.release(block);
        });
        let range = world.exact(0, 2);
        other.join().unwrap();
        world.settle(4 - 2 * u32::from(range.is_some()));
    });
}

/// The destination of a move: claimed exactly, given back when the move is undone.
#[test]
fn a_destination_is_claimed_and_given_back() {
    model(2, || {
        let world = Two::new(4);
        let other = world.spawn(1, |world| {
            if world.exact(2, 1).is_some() {
                world.release(2);
            }
        });
        let mine = world.batch(3).unwrap();
        other.join().unwrap();
        world.settle(4 - mine.len() as u32);
    });
}

/// A run across two windows beside a claim of one.
#[test]
fn a_run_meets_single_blocks() {
    model(2, || {
        let world = Two::new(8);
        let other = world.spawn(1, |world| world.claim().unwrap());
        let run = world.run(5).map_or(0, |run| run.len() as u32);
        other.join().unwrap();
        world.settle(7 - run);
    });
}

/// The shape of a peer's runs beside a release: all or none.
#[test]
fn a_shape_is_all_or_nothing() {
    model(2, || {
        let world = Two::new(4);
        let held = world.batch(2).unwrap();
        let other = world.spawn(1, move |world| world.release(held[1]));
        let mut blocks = Vec::new();
        let done = world.pool.claim_like(&[2, 1], &mut blocks).is_ok();
        assert_eq!(blocks.len(), if done { 3 } else { 0 });
        world.own(blocks);
        other.join().unwrap();
        world.settle(3 - 3 * u32::from(done));
    });
}

// -- references, contents, owners ----------------------------------------------------------------

/// A cached block comes back into use or is evicted.
#[test]
fn a_cached_block_is_revived_or_evicted_never_both() {
    model(3, || {
        let world = Two::new(2);
        let block = world.claim().unwrap();
        world.pool.publish(&[block]).unwrap();
        world.pool.release(block).unwrap();
        let other = world.spawn(1, move |world| world.pool.evict(block));
        let revived = world.pool.revive(&[block]).is_ok();
        let evicted = other.join().unwrap();
        assert!(revived != evicted, "revived: {revived}, evicted: {evicted}");
        world.pool.audit().unwrap();
        let states = world.pool.states();
        let kept = u32::from(revived);
        assert_eq!(
            (states.cached, states.available, states.in_use),
            (0, 2 - kept, kept)
        );
    });
}

/// Of two evictions one wins.
#[test]
fn a_cached_block_is_evicted_once() {
    model(3, || {
        let world = Two::new(2);
        let block = world.claim().unwrap();
        world.pool.publish(&[block]).unwrap();
        world.disown([block]);
        world.pool.release(block).unwrap();
        let other = world.spawn(1, move |world| world.pool.evict(block));
        assert!(world.pool.evict(block) != other.join().unwrap());
        assert_eq!(world.pool.states().available, 2);
        world.settle(2);
    });
}

/// References come and go; the last one empties the block, once.
#[test]
fn the_last_of_several_references_empties_the_block() {
    model(3, || {
        let world = Two::new(2);
        let block = world.claim().unwrap();
        world.pool.retain(&[block]).unwrap();
        let other = world.spawn(1, move |world| {
            world.pool.retain(&[block]).unwrap();
            world.pool.release(block).unwrap();
            world.pool.release(block).unwrap();
        });
        world.pool.release(block).unwrap();
        other.join().unwrap();
        world.disown([block]);
        world.settle(2);
    });
}

/// What every holder did to a block is done when its next owner has it, whichever verb was last.
#[test]
fn what_holders_wrote_is_before_the_next_owner() {
    let releases: [fn(&Two, u32); 3] = [
        |world, block| world.pool.release(block).unwrap(),
        |world, block| world.pool.release_batch(&[block]).unwrap(),
        |world, block| world.pool.release_page(block, 0).unwrap(),
    ];
    for (release, batch) in releases.into_iter().zip([false, true, false]) {
        model(2, move || {
            let world = Two::new(2);
            let block = world.claim().unwrap();
            world.pool.retain(&[block]).unwrap();
            let other = world.spawn(1, move |world| {
                world.disown([block]);
                if batch {
                    world.pool.release_batch(&[block]).unwrap();
                } else {
                    world.pool.release(block).unwrap();
                }
            });
            release(&world, block);
            // Either of the two was last; this thread does not know yet that the other is done.
            world.claim().unwrap();
            other.join().unwrap();
            world.settle(1);
        });
    }
}

/// The last release and a publication: cached or empty, and known to the evictable index if cached.
#[test]
fn a_release_meets_a_publication() {
    model(3, || {
        let world = Two::new(2);
        let block = world.claim().unwrap();
        world.pool.retain(&[block]).unwrap();
        let other = world.spawn(1, move |world| {
            world.pool.publish(&[block]).unwrap();
            world.pool.release(block).unwrap();
        });
        world.pool.release(block).unwrap();
        other.join().unwrap();
        world.pool.audit().unwrap();
        let states = world.pool.states();
        assert_eq!((states.cached, states.available), (1, 2));
        assert!(world.pool.evict(block));
        world.disown([block]);
        world.settle(2);
    });
}

/// The evictable index after a last release and a revival of one block at the same time.
#[test]
fn the_evictable_index_follows_the_word() {
    model(3, || {
        let world = Two::new(2);
        let block = world.claim().unwrap();
        world.pool.publish(&[block]).unwrap();
        let other = world.spawn(1, move |world| world.pool.revive(&[block]).unwrap());
        world.pool.release(block).unwrap();
        other.join().unwrap();
        let states = world.pool.states();
        assert_eq!((states.cached, states.available), (0, 1));
        world.pool.release(block).unwrap();
        let states = world.pool.states();
        assert_eq!((states.cached, states.available), (1, 2));
        world.pool.audit().unwrap();
    });
}

/// Of two releases with the same owner one is told, and it changes nothing.
#[test]
fn an_owner_releases_once() {
    model(3, || {
        let world = Two::new(4);
        let mut blocks = Vec::new();
        world.pool.claim_for(Zone::Body, 7, 2, &mut blocks).unwrap();
        let (all, last) = (blocks.clone(), blocks[1]);
        let other = world.spawn(1, move |world| world.pool.release_for(7, &[last]).is_ok());
        let mine = world.pool.release_for(7, &all).is_ok();
        let theirs = other.join().unwrap();
        assert!(mine != theirs || !mine);
        world.pool.audit().unwrap();
        let empty = 2 + 2 * u32::from(mine) + u32::from(theirs);
        assert_eq!(world.pool.empty(), empty);
        if theirs {
            world.pool.release_for(7, &[blocks[0]]).unwrap();
        }
    });
}

/// What is refused as a whole changes nothing in part.
#[test]
fn all_or_none_undoes_what_it_has() {
    model(1, || {
        let world = Two::new(4);
        world.batch(2).unwrap();
        assert!(world.pool.retain(&[0, 1, 3]).is_err());
        assert_eq!(world.pool.references(0), Ok(1));
        world.pool.publish(&[0]).unwrap();
        assert!(world.pool.revive(&[0, 1]).is_err());
        assert_eq!(world.pool.references(0), Ok(1));
        world.pool.offline(2, 2).unwrap();
        assert!(world.pool.online(2, 1).is_ok() && world.pool.online(2, 2).is_err());
        assert!(world.pool.offline(2, 1).is_ok());
        assert!(world.pool.online(1, 2).is_err() && world.pool.online(2, 2).is_ok());
        world.pool.offline(2, 1).unwrap();
        assert!(world.pool.online(2, 2).is_err());
        assert_eq!(world.pool.states().offline, 1);
        assert!(world.pool.destine(&[3, 2]).is_err());
        assert_eq!(world.pool.states().destined, 0);
        world.pool.audit().unwrap();
    });
}

/// Two threads of one seat: what one releases elsewhere lies in the wallet of both.
#[test]
fn threads_of_one_seat_share_its_wallet() {
    model(2, || {
        let world = Two::new(2);
        world.batch(2).unwrap();
        let other = world.spawn(2, |world| world.release_batch(&[0, 1]));
        let mine = world.batch(2).map_or(0, |blocks| blocks.len() as u32);
        other.join().unwrap();
        world.settle(2 - mine);
    });
}

/// A batch out of what a third thread's refused claim carries from the wallet to the total.
#[test]
fn a_wallet_passes_through_the_total() {
    model(2, || {
        let world = Two::new(2);
        world.batch(2).unwrap();
        let other = world.spawn(1, |world| world.release_batch(&[0, 1]));
        let mine = world.batch(2).map_or(0, |blocks| blocks.len() as u32);
        other.join().unwrap();
        world.settle(2 - mine);
    });
}

/// As `a_refused_batch_makes_no_other_claim_fail`, with the blocks in the wallet.
#[test]
fn a_refused_batch_carries_a_wallet_and_makes_no_other_claim_fail() {
    model(2, || {
        let world = Two::new(2);
        let blocks = world.batch(2).unwrap();
        world.release_batch(&blocks);
        let other = world.spawn(0, |world| assert_eq!(world.batch(3), None));
        // This thread knows nothing of the other's wallet but what it reads.
        this_is_thread(1);
        world.claim().unwrap();
        other.join().unwrap();
        world.settle(1);
    });
}

/// What a thread carries from another's wallet to the total is drawn by that one into its hand: there
/// is enough for both.
#[test]
fn what_is_carried_to_the_total_and_drawn_is_in_a_hand() {
    model(3, || {
        let world = World::<1, 2>::new(2);
        let blocks = world.batch(2).unwrap();
        world.release_batch(&blocks);
        let other = world.spawn(2, |world| world.claim().unwrap());
        this_is_thread(1);
        world.claim().unwrap();
        other.join().unwrap();
        world.settle(0);
    });
}

/// Credits that a refused batch carries from a seat to the total can be used at once by a thread
/// that knows nothing of the window, which the open index had forgotten.
#[test]
fn credits_in_the_total_are_found_in_a_window() {
    model(2, || {
        let world = Two::new(8);
        world.claim().unwrap();
        this_is_thread(1);
        // Looks at the first window, finds that it has nothing to give, sits down in the second.
        world.claim().unwrap();
        let other = world.spawn(0, |world| assert_eq!(world.batch(8), None));
        world.batch(1).unwrap();
        other.join().unwrap();
        world.settle(5);
    });
}

/// As `what_holders_wrote_is_before_the_next_owner`, for two blocks whose words change together.
#[test]
fn what_holders_wrote_in_two_blocks_is_before_the_next_owner() {
    let releases: [fn(&Two); 2] = [
        |world| world.pool.release_batch(&[0, 1]).unwrap(),
        |world| world.pool.release_page(0, 1).unwrap(),
    ];
    for release in releases {
        model(2, move || {
            let world = Two::new(4);
            world.batch(2).unwrap();
            world.pool.retain(&[0, 1]).unwrap();
            let other = world.spawn(1, |world| {
                world.disown([0, 1]);
                world.pool.release_batch(&[0, 1]).unwrap();
            });
            release(&world);
            world.batch(2).unwrap();
            other.join().unwrap();
            world.settle(2);
        });
    }
}

/// Credits that a thread finds in its wallet stand for a window whose counter has risen, though it
/// knows nothing else of the release.
#[test]
fn what_is_in_a_wallet_is_found_in_a_window() {
    model(2, || {
        let world = Two::new(2);
        world.batch(2).unwrap();
        world.forget();
        let other = world.spawn(2, |world| world.release_batch(&[0, 1]));
        let mine = world.batch(2).map_or(0, |blocks| blocks.len() as u32);
        other.join().unwrap();
        world.settle(2 - mine);
    });
}

/// The same for the total.
#[test]
fn what_is_in_the_total_is_found_in_a_window() {
    model(2, || {
        let world = Two::new(2);
        world.batch(2).unwrap();
        world.forget();
        let other = world.spawn(1, |world| {
            world.release_batch(&[0, 1]);
            assert_eq!(world.batch(3), None);
        });
        let mine = world.batch(2).map_or(0, |blocks| blocks.len() as u32);
        other.join().unwrap();
        world.settle(2 - mine);
    });
}

/// The same when a third thread carries them from the wallet to the total.
#[test]
fn what_is_carried_to_the_total_is_found_in_a_window() {
    model(1, || {
        let world = Two::new(2);
        world.batch(2).unwrap();
        world.forget();
        let batch = |world: &Two, n| world.batch(n).map_or(0, |blocks| blocks.len() as u32);
        let others = [
            world.spawn(1, |world| {
                world.release_batch(&[0, 1]);
                0
            }),
            world.spawn(1, move |world| batch(world, 3)),
            world.spawn(2, move |world| batch(world, 2)),
        ];
        let [_, refused, got] = others.map(|other| other.join().unwrap());
        assert_eq!(refused, 0);
        world.settle(2 - got);
    });
}

/// The total was drawn, and as many other credits have come since: they are found where they are.
#[test]
fn a_total_that_is_the_same_again_stands_for_other_windows() {
    model(2, || {
        let world = Two::new(8);
        world.batch(8).unwrap();
        world.forget();
        world.release_batch(&[0, 1]);
        assert_eq!(world.batch(9), None);
        let other = world.spawn(1, |world| {
            let first = world.batch(2).map_or(0, |blocks| blocks.len() as u32);
            world.release_batch(&[4, 5]);
            assert_eq!(world.batch(9), None);
            first
        });
        let mine = world.batch(2).map_or(0, |blocks| blocks.len() as u32);
        let theirs = other.join().unwrap();
        world.settle(4 - mine - theirs);
    });
}

/// As `a_refused_batch_makes_no_other_claim_fail`, when the thread of the home itself is refused: the
/// other finds the home just left, and the credits in its hand.
#[test]
fn a_home_that_is_just_left_has_its_credits_in_hand() {
    model(2, || {
        let world = Two::new(4);
        world.claim().unwrap();
        let other = world.spawn(1, |world| world.claim().unwrap());
        assert_eq!(world.batch(4), None);
        other.join().unwrap();
        world.settle(2);
    });
}

/// As `enough_for_everybody_is_enough`, in the smallest pool.
#[test]
fn two_blocks_are_enough_for_two() {
    model(3, || {
        let world = World::<1, 2>::new(2);
        let other = world.spawn(1, |world| world.claim().unwrap());
        let mine = world.claim().unwrap();
        assert_ne!(mine, other.join().unwrap());
        world.settle(0);
    });
}

/// Blocks that are shared and published come and go two at a time, by two threads.
#[test]
fn references_of_two_blocks_add_up() {
    model(2, || {
        let world = Two::new(4);
        world.batch(2).unwrap();
        let other = world.spawn(1, |world| {
            world.pool.retain(&[0, 1]).unwrap();
            world.pool.publish(&[1]).unwrap();
            world.pool.release_batch(&[0, 1]).unwrap();
        });
        world.pool.retain(&[0, 1]).unwrap();
        world.pool.release(1).unwrap();
        other.join().unwrap();
        assert_eq!(world.pool.references(0), Ok(2));
        assert_eq!(world.pool.references(1), Ok(1));
        world.pool.release_batch(&[0, 0, 1]).unwrap();
        assert!(world.pool.evict(1));
        world.disown([0, 1]);
        world.settle(4);
    });
}

/// What somebody did who revived a block is done when its next owner has it, though it was cached
/// before, too.
#[test]
fn what_a_reviver_wrote_is_before_the_next_owner() {
    model(3, || {
        let world = Two::new(1);
        let block = world.claim().unwrap();
        world.pool.publish(&[block]).unwrap();
        world.disown([block]);
        world.pool.release(block).unwrap();
        let other = world.spawn(1, move |world| {
            if world.pool.revive(&[block]).is_ok() {
                world.own([block]);
                world.disown([block]);
                world.pool.release(block).unwrap();
            }
        });
        let evicted = world.pool.evict(block);
        if evicted {
            world.claim().unwrap();
        }
        other.join().unwrap();
        world.settle(0);
    });
}

/// Whoever revives a block sees what was written before it was published, and nothing else as long
/// as he holds it, whether it is the block that he found or one that came since with the same word.
#[test]
fn what_a_reviver_reads_stays() {
    model(2, || {
        let world = Two::new(1);
        let block = world.claim().unwrap();
        world.pool.publish(&[block]).unwrap();
        let other = world.spawn(1, move |world| {
            world.pool.release(block).unwrap();
            if world.pool.evict(block) {
                assert_eq!(world.pool.claim(), Some(block));
                world.memory[0].store(2, Relaxed);
                world.pool.publish(&[block]).unwrap();
            }
        });
        if world.pool.revive(&[block]).is_ok() {
            let read = world.memory[0].load(Relaxed);
            assert_eq!(read, world.memory[0].load(Relaxed));
        }
        other.join().unwrap();
        world.pool.audit().unwrap();
    });
}

/// The evictable index when a block that was just cached is revived and cached again.
#[test]
fn the_evictable_index_follows_the_word_back() {
    model(2, || {
        let world = Two::new(2);
        let block = world.claim().unwrap();
        world.pool.publish(&[block]).unwrap();
        let other = world.spawn(1, move |world| {
            world.pool.revive(&[block]).unwrap();
            world.pool.release(block).unwrap();
        });
        world.pool.release(block).unwrap();
        other.join().unwrap();
        let states = world.pool.states();
        assert_eq!((states.cached, states.available), (1, 2));
        world.pool.audit().unwrap();
    });
}

/// As the manager does it: one holder gives up under the lock, and the one that is left finds out
/// without it, and writes.
#[test]
fn the_only_holder_left_writes_after_the_others() {
    model(2, || {
        let world = Two::new(2);
        let block = world.claim().unwrap();
        world.pool.retain(&[block]).unwrap();
        let other = world.spawn(1, move |world| {
            world.disown([block]);
            world.pool.let_go_under_lock(block);
        });
        if world.pool.is_private(block) {
            world.own([block]);
        }
        other.join().unwrap();
        world.pool.audit().unwrap();
    });
}

// -- the index by itself -------------------------------------------------------------------------

/// One number comes while another of its word goes: a search that begins in another word finds it.
#[test]
fn an_index_keeps_its_summary() {
    model(3, || {
        let index = Arc::new(Index::new(130).unwrap());
        index.set(70);
        let other = Arc::clone(&index);
        let other = thread::spawn(move || other.clear(70));
        index.set(71);
        other.join().unwrap();
        assert_eq!(index.next(0..130), Some(71));
    });
}

/// A number comes and goes by two threads; a truth beside it says which was last, as in the pool.
#[test]
fn an_index_follows_a_truth() {
    model(3, || {
        let index = Arc::new(Index::new(130).unwrap());
        let truth = Arc::new(AtomicU32::new(0));
        index.set(70);
        let (there, fact) = (Arc::clone(&index), Arc::clone(&truth));
        let other = thread::spawn(move || {
            fact.fetch_add(1, AcqRel);
            there.set(70);
        });
        // Finds nothing, says so, looks again.
        if truth.load(Acquire) == 0 {
            index.clear(70);
            if truth.fetch_or(0, AcqRel) != 0 {
                index.set(70);
            }
        }
        other.join().unwrap();
        assert_eq!(index.next(0..130), Some(70));
    });
}

// -- offline -------------------------------------------------------------------------------------

/// A window goes offline or is claimed from, never both.
#[test]
fn a_block_goes_offline_or_is_claimed() {
    model(2, || {
        let world = Two::new(8);
        let other = world.spawn(1, |world| world.claim().unwrap());
        let gone = world.pool.offline(0, 4).is_ok();
        let block = other.join().unwrap();
        assert!(!gone || block >= 4, "block {block} is offline");
        assert_eq!(world.pool.states().offline, 4 * u32::from(gone));
        world.settle(7 - 4 * u32::from(gone));
    });
}

/// Of two that bring a block back one is told, and what comes back can be claimed.
#[test]
fn a_block_comes_online_once() {
    model(2, || {
        let world = Two::new(4);
        world.pool.offline(0, 4).unwrap();
        let others =
            [1, 2].map(|number| world.spawn(number, |world| world.pool.online(0, 4).is_ok()));
        let mine = world.claim();
        let [first, second] = others.map(|other| other.join().unwrap());
        assert!(first || second);
        assert!(!(first && second) || mine.is_none());
        world.settle(4 - u32::from(mine.is_some()));
    });
}

// -- other placements ----------------------------------------------------------------------------

/// The other choices of a window lose nothing, either.
#[test]
fn every_placement_finds_what_there_is() {
    for placement in [
        Placement::Fullest,
        Placement::Fifo,
        Placement::Scatter { seed: 3 },
    ] {
        for small_from in [End::Low, End::High] {
            model(2, move || {
                let world = Two::of(&PoolConfig {
                    placement,
                    small_from,
                    ..PoolConfig::new(8)
                });
                let held = world.batch(5).unwrap();
                let other = world.spawn(1, move |world| {
                    world.release(held[0]);
                    world.claim().unwrap()
                });
                world.batch(2).unwrap();
                other.join().unwrap();
                world.settle(1);
            });
        }
    }
}

/// A list in the order of release: what is listed is to be had, also while another thread's claim,
/// which is refused, empties the homes.
#[test]
fn what_is_listed_can_be_claimed_while_homes_are_drained() {
    model(2, || {
        let world = Two::of(&PoolConfig {
            placement: Placement::Fifo,
            ..PoolConfig::new(8)
        });
        // The rest of its window is in this thread's seat.
        world.page(1).unwrap();
        let other = world.spawn(1, |world| assert_eq!(world.batch(8), None));
        world.batch(2).unwrap();
        other.join().unwrap();
        world.settle(4);
    });
}
