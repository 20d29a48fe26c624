//! Models of the page table: readers without a lock beside the one writer of a space, with nodes of
//! two entries, so that a huge page has two blocks. Every interleaving up to a bound on preemptions,
//! and every reading that the memory model allows.
//!
//! What lives here: what a reader may see while an entry is replaced, a page is split or promoted,
//! a space is truncated or closed, and its nodes become somebody else's; and what one finds by the id
//! of a sequence that is forked or closed. Each twice: with a copy of the first entry of level 2 in the
//! line of a slot (`near`), and without any (`far`), as a reader finds what lies far behind. What never
//! lives here: the pool (`loom.rs`), contents (`model.rs`).
//!
//!     RUSTFLAGS="--cfg loom" cargo test -p kvmmu --test loom_table
#![cfg(loom)]

use std::sync::Arc;

use kvmmu::table::{Space, Table};
use loom::thread;

type Small<const NEAR: usize> = Table<2, NEAR>;

/// Runs each of these models in both worlds.
macro_rules! near_and_far {
    ($($model:ident),* $(,)?) => {
        mod near {
            $(#[test]
            fn $model() {
                super::$model::<1>();
            })*
        }
        mod far {
            $(#[test]
            fn $model() {
                super::$model::<0>();
            })*
        }
    };
}

near_and_far! {
    a_reader_sees_the_old_block_or_the_new_one,
    of_two_remaps_one_wins,
    a_remap_that_meets_a_truncation_loses_or_comes_first,
    a_reader_never_sees_what_a_reused_node_maps_for_somebody_else,
    a_node_that_came_back_is_not_taken_for_the_one_that_went,
    a_reader_never_sees_what_the_nodes_of_a_closed_space_map_for_another_slot,
    a_node_goes_to_another_thread_only_when_no_reader_finds_it_any_more,
    a_space_is_gone_before_another_thread_has_its_nodes,
    a_split_and_a_move_of_one_half_never_show_a_third_block,
    a_promotion_and_a_split_again_show_no_half_of_both,
    an_id_shows_its_own_sequence_while_its_slot_is_closed_and_opened_again,
    a_fork_shows_its_parents_blocks_and_then_its_own_and_a_closed_parent_none,
    a_fork_changes_nothing_that_a_reader_of_the_parent_sees,
}

fn model(model: impl Fn() + Sync + Send + 'static) {
    bounded(3, model);
}

/// With at most so many preemptions, unless the environment says how many.
fn bounded(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    if builder.preemption_bound.is_none() {
        builder.preemption_bound = Some(preemptions);
    }
    builder.check(model);
}

/// A space of a slot with these blocks, one by one.
fn space<const NEAR: usize>(table: &Small<NEAR>, slot: u32, blocks: &[u32]) -> Space {
    let space = table.open(slot, 1).unwrap();
    fill(table, space, blocks);
    space
}

fn fill<const NEAR: usize>(table: &Small<NEAR>, space: Space, blocks: &[u32]) {
    let n = blocks.len() as u32;
    table.reserve(space, 0, n, true).unwrap();
    for (index, &block) in (0..).zip(blocks) {
        table.map(space, index, block, 0);
    }
}

fn a_reader_sees_the_old_block_or_the_new_one<const NEAR: usize>() {
    model(|| {
        let table = Arc::new(Small::<NEAR>::new(8, 2).unwrap());
        let own = space(&table, 0, &[4, 5]);
        let writer = {
            let table = Arc::clone(&table);
            thread::spawn(move || assert!(table.remap(own, 1, 5, 9)))
        };
        let seen = table.look((0, 1), 1);
        assert!(seen == Some(5) || seen == Some(9), "{seen:?}");
        writer.join().unwrap();
        assert_eq!(table.look((0, 1), 1), Some(9));
    });
}

fn of_two_remaps_one_wins<const NEAR: usize>() {
    model(|| {
        let table = Arc::new(Small::<NEAR>::new(8, 2).unwrap());
        let own = space(&table, 0, &[4]);
        let other = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.remap(own, 0, 4, 8))
        };
        let mine = table.remap(own, 0, 4, 9);
        let other = other.join().unwrap();
        assert!(mine != other);
        assert_eq!(table.look((0, 1), 0), Some(if mine { 9 } else { 8 }));
    });
}

fn a_remap_that_meets_a_truncation_loses_or_comes_first<const NEAR: usize>() {
    model(|| {
        let table = Arc::new(Small::<NEAR>::new(8, 2).unwrap());
        let own = space(&table, 0, &[4, 5]);
        let writer = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.unmap(own, 1, 2, 0..1))
        };
        let seen = {
            table.remap(own, 0, 4, 9);
            table.look((0, 1), 1)
        };
        assert!(seen == Some(5) || seen.is_none(), "{seen:?}");
        writer.join().unwrap();
        assert_eq!(
            (table.look((0, 1), 0), table.look((0, 1), 1)),
            (Some(9), None)
        );
    });
}

/// The node of a truncated space goes to another slot at once: its block is never seen in ours.
fn a_reader_never_sees_what_a_reused_node_maps_for_somebody_else<const NEAR: usize>() {
    model(|| {
        let table = Arc::new(Small::<NEAR>::new(8, 2).unwrap());
        let own = space(&table, 0, &[4, 5]);
        let other = table.open(1, 1).unwrap();
        let writer = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                table.unmap(own, 0, 2, 0..0);
                fill(&table, other, &[70, 71]);
            })
        };
        let seen = table.look((0, 1), 0);
        assert!(seen == Some(4) || seen.is_none(), "{seen:?}");
        writer.join().unwrap();
        assert_eq!(
            (table.look((0, 1), 0), table.look((1, 1), 0)),
            (None, Some(70))
        );
    });
}

/// As above, and the node comes back to the place where it was.
fn a_node_that_came_back_is_not_taken_for_the_one_that_went<const NEAR: usize>() {
    model(|| {
        let table = Arc::new(Small::<NEAR>::new(8, 2).unwrap());
        let own = space(&table, 0, &[4]);
        let other = table.open(1, 1).unwrap();
        let writer = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                table.unmap(own, 0, 1, 0..0);
                fill(&table, other, &[70]);
                table.unmap(other, 0, 1, 0..0);
                fill(&table, own, &[6]);
            })
        };
        let seen = table.look((0, 1), 0);
        let allowed = [Some(4), None, Some(6)];
        assert!(allowed.contains(&seen), "{seen:?}");
        writer.join().unwrap();
        assert_eq!(table.look((0, 1), 0), Some(6));
    });
}

fn a_reader_never_sees_what_the_nodes_of_a_closed_space_map_for_another_slot<const NEAR: usize>() {
    model(|| {
        let table = Arc::new(Small::<NEAR>::new(8, 2).unwrap());
        let own = space(&table, 0, &[4]);
        let writer = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                table.unmap(own, 0, 1, 0..0);
                table.close(own);
                space(&table, 1, &[20]);
            })
        };
        let seen = table.look((0, 1), 0);
        assert!(seen == Some(4) || seen.is_none(), "{seen:?}");
        writer.join().unwrap();
        assert_eq!(
            (table.look((0, 1), 0), table.look((1, 1), 0)),
            (None, Some(20))
        );
    });
}

/// As above, and it is another thread that takes the node, as soon as it can be had.
fn a_node_goes_to_another_thread_only_when_no_reader_finds_it_any_more<const NEAR: usize>() {
    bounded(2, || {
        let table = Arc::new(Small::<NEAR>::new(8, 2).unwrap());
        let own = space(&table, 0, &[4]);
        let other = table.open(1, 1).unwrap();
        let run = |work: fn(&Small<NEAR>, Space), space: Space| {
            let table = Arc::clone(&table);
            thread::spawn(move || work(&table, space))
        };
        let writers = [
            run(|table, own| table.unmap(own, 0, 1, 0..0), own),
            run(|table, other| fill(table, other, &[70]), other),
        ];
        let seen = table.look((0, 1), 0);
        assert!(seen == Some(4) || seen.is_none(), "{seen:?}");
        writers.map(|writer| writer.join().unwrap());
        assert_eq!(
            (table.look((0, 1), 0), table.look((1, 1), 0)),
            (None, Some(70))
        );
    });
}

/// The same of the nodes of a space that is closed.
fn a_space_is_gone_before_another_thread_has_its_nodes<const NEAR: usize>() {
    bounded(2, || {
        let table = Arc::new(Small::<NEAR>::new(8, 2).unwrap());
        let own = space(&table, 0, &[4]);
        let closes = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                table.unmap(own, 0, 1, 0..0);
                table.close(own);
            })
        };
        let opens = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                space(&table, 1, &[70]);
            })
        };
        let seen = table.look((0, 1), 0);
        assert!(seen == Some(4) || seen.is_none(), "{seen:?}");
        closes.join().unwrap();
        opens.join().unwrap();
        assert_eq!(
            (table.look((0, 1), 0), table.look((1, 1), 0)),
            (None, Some(70))
        );
    });
}

fn a_split_and_a_move_of_one_half_never_show_a_third_block<const NEAR: usize>() {
    model(|| {
        let table = Arc::new(Small::<NEAR>::new(8, 2).unwrap());
        let own = table.open(0, 1).unwrap();
        table.reserve(own, 0, 2, true).unwrap();
        table.map(own, 0, 4, 1);
        let writer = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                table.split(own, 1, 0);
                assert!(table.remap(own, 1, 5, 9));
            })
        };
        let (low, high) = (table.look((0, 1), 0), table.look((0, 1), 1));
        assert_eq!(low, Some(4));
        assert!(high == Some(5) || high == Some(9), "{high:?}");
        writer.join().unwrap();
        assert_eq!(table.look((0, 1), 1), Some(9));
    });
}

/// Promoted, moved as a whole (unmapped and mapped elsewhere), split again: a reader that looked at
/// the node before it became a huge page's does not take its new entries for the old ones.
fn a_promotion_and_a_split_again_show_no_half_of_both<const NEAR: usize>() {
    model(|| {
        let table = Arc::new(Small::<NEAR>::new(8, 2).unwrap());
        let own = space(&table, 0, &[4, 5]);
        let writer = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                table.promote(own, 0, 1);
                table.split(own, 0, 0);
            })
        };
        for _ in 0..2 {
            assert_eq!(
                (table.look((0, 1), 0), table.look((0, 1), 1)),
                (Some(4), Some(5))
            );
        }
        writer.join().unwrap();
    });
}

/// A table with sequences that come and go.
struct World<const NEAR: usize> {
    table: Small<NEAR>,
}

impl<const NEAR: usize> World<NEAR> {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            table: Small::new(16, 2).unwrap(),
        })
    }

    /// As a sequence takes a slot and is filled.
    fn open(&self, slot: u32, generation: u64, blocks: &[u32]) -> Space {
        let space = self.begin(slot, generation);
        fill(&self.table, space, blocks);
        space
    }

    fn begin(&self, slot: u32, generation: u64) -> Space {
        self.table.open(slot, generation).unwrap()
    }

    /// As a sequence of `n` blocks is closed.
    fn close(&self, space: Space, n: u32) {
        self.table.unmap(space, 0, n, 0..0);
        self.table.close(space);
    }

    fn look(&self, slot: u32, generation: u64, index: u32) -> Option<u32> {
        self.table.look((slot, generation), index)
    }
}

/// Closed, and the slot taken by another sequence: the old id never shows a block of the new one, nor
/// the new id one of the old.
fn an_id_shows_its_own_sequence_while_its_slot_is_closed_and_opened_again<const NEAR: usize>() {
    model(|| {
        let world = World::<NEAR>::new();
        let own = world.open(0, 1, &[4, 5]);
        let writer = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                world.close(own, 2);
                world.open(0, 2, &[70]);
            })
        };
        let seen = world.look(0, 1, 0);
        assert!(seen == Some(4) || seen.is_none(), "{seen:?}");
        let seen = world.look(0, 2, 0);
        assert!(seen == Some(70) || seen.is_none(), "{seen:?}");
        writer.join().unwrap();
        assert_eq!((world.look(0, 1, 0), world.look(0, 2, 0)), (None, Some(70)));
    });
}

/// A fork of a whole sequence, a huge page and a block, then a copy on write in the child, then the
/// parent is closed and its nodes serve another sequence.
fn a_fork_shows_its_parents_blocks_and_then_its_own_and_a_closed_parent_none<const NEAR: usize>() {
    bounded(2, || {
        let world = World::<NEAR>::new();
        let parent = world.begin(0, 1);
        world.table.reserve(parent, 0, 3, true).unwrap();
        world.table.map(parent, 0, 4, 1);
        world.table.map(parent, 2, 8, 0);
        let writer = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let child = world.begin(1, 1);
                world.table.reserve(child, 0, 3, true).unwrap();
                world.table.map(child, 0, 4, 1);
                world.table.map(child, 2, 8, 0);
                assert!(world.table.remap(child, 2, 8, 9));
                world.close(parent, 3);
                world.open(0, 2, &[70, 71, 72]);
            })
        };
        let (low, high) = (world.look(0, 1, 1), world.look(0, 1, 2));
        assert!(low == Some(5) || low.is_none(), "{low:?}");
        assert!(high == Some(8) || high.is_none(), "{high:?}");
        let seen = world.look(1, 1, 2);
        assert!([None, Some(8), Some(9)].contains(&seen), "{seen:?}");
        writer.join().unwrap();
        assert_eq!(
            (world.look(1, 1, 1), world.look(1, 1, 2)),
            (Some(5), Some(9))
        );
        assert_eq!((world.look(0, 1, 1), world.look(0, 2, 2)), (None, Some(72)));
    });
}

/// A parent that forks and closes while two look: a fork is nobody's change but its own.
fn a_fork_changes_nothing_that_a_reader_of_the_parent_sees<const NEAR: usize>() {
    model(|| {
        let world = World::<NEAR>::new();
        let parent = world.open(0, 1, &[4, 5, 8]);
        let writer = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let child = world.open(1, 1, &[4, 5, 8]);
                assert!(world.table.remap(parent, 2, 8, 9)); // copy on write, in the parent
                world.close(child, 3);
            })
        };
        assert_eq!(world.look(0, 1, 0), Some(4));
        let seen = world.look(0, 1, 2);
        assert!(seen == Some(8) || seen == Some(9), "{seen:?}");
        let seen = world.look(1, 1, 2);
        assert!(seen == Some(8) || seen.is_none(), "{seen:?}");
        writer.join().unwrap();
        assert_eq!((world.look(0, 1, 2), world.look(1, 1, 2)), (Some(9), None));
    });
}
