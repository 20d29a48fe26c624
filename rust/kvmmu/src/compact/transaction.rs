//! The transaction of moves: `begin`, then somebody copies, then `commit` or `abort`.
//!
//! ```text
//!                 begin              copy            commit                    abort
//!  source         in use / cached ...................  fenced or empty          as it was
//!                 + a reference                                                 - the reference
//!  destination    empty (or evicted) -> destined ....  what the source was      empty
//! ```
//!
//! - `begin` looks at every move again: a source that may not move now (freed, pinned, about to be
//!   written by a step in flight, moving already) or a destination that is not as the plan saw it
//!   (empty, or cached) is left out. A source may belong to somebody else since: it moves all the
//!   same, what matters to a plan is where it lies.
//! - A source that is written in place, copied on write by its last holder or pinned while it is
//!   being copied drops out of the commit ([`Mmu::drop_move`]); one that was freed has only the
//!   move's reference left at the commit, and is emptied.
//! - Each verb writes the gate, so no sequence and no export sees half of a commit. Every mapping
//!   is repointed by a compare-and-swap all the same, and a mapping that does not say what the
//!   reverse map promised is a fault of the core.
//! - Steps in flight may still read sources by their old rows, so sources stay fenced until those
//!   have ended.

use super::{Goal, Moves, Plan};
use crate::error::{Error, Result};
use crate::pool::{State, Word};
use crate::state::{Mmu, Move, Shared};
use crate::stats::count;
use crate::sync::lock;

impl Mmu {
    /// Destines blocks and takes a reference on sources. Moves that are no longer possible are left
    /// out.
    pub fn begin(&self, plan: &Plan) -> Result<Moves> {
        if plan.uid != self.uid {
            return Err(Error::InvalidPlan(
                "the plan was made by another manager".into(),
            ));
        }
        let _rest = self.rest();
        let mut shared = self.shared();
        let epoch = shared.next_epoch;
        shared.next_epoch += 1;
        let mut moves = Vec::with_capacity(plan.pairs.len());
        // Without a step in flight nobody is about to write a block.
        let quiet = self.steps().count() == 0;
        for &[source, destination] in &plan.pairs {
            let evict = plan.evicts.contains(&destination);
            if !self.may_move(&shared, source, quiet)
                || !self.take_destination(&mut shared, destination, evict)
            {
                continue;
            }
            if evict && !self.may_move(&shared, source, quiet) {
                // It stood in the prefix index behind the block that was just evicted.
                self.pool.give(&[destination]);
                continue;
            }
            let word = self.pool.word(source);
            self.pool.set_word(source, word.move_begun());
            self.pool.set_evictable(source, false);
            self.pool.set_stuck(source, true);
            self.pool.set_word(destination, Word::DESTINED);
            self.pool.set_stuck(destination, true);
            shared.moving.insert(source, (epoch, moves.len()));
            moves.push(Move {
                source,
                destination,
                dropped: false,
            });
        }
        count(&self.stats.plans_begun, 1);
        count(&self.stats.plans_stopped_early, usize::from(!plan.complete));
        count(&self.stats.moves_begun, moves.len());
        if plan.goal != Goal::Background {
            shared.asked += moves.len() as u64;
        }
        let pairs = moves.iter().map(|m| [m.source, m.destination]).collect();
        shared.transactions.insert(epoch, moves);
        let uid = self.uid;
        Ok(Moves { uid, epoch, pairs })
    }

    fn may_move(&self, shared: &Shared, block: u32, quiet: bool) -> bool {
        match self.pool.state(block) {
            State::Cached => !self.pool.is_stuck(block),
            State::InUse => {
                !self.pool.is_stuck(block)
                    && !self.is_huge(block)
                    && (quiet || !self.is_unsettled(shared, block))
            }
            _ => false,
        }
    }

    /// Whether somebody maps the window of a block by one huge page: moving parts of it would cost
    /// a huge page to gain one.
    pub(super) fn is_huge(&self, block: u32) -> bool {
        self.config.page_orders.bits() >> 9 & 1 != 0 && self.reverse.is_mapped((9, block / 512))
    }

    /// Whether a step in flight is about to write the block.
    fn is_unsettled(&self, shared: &Shared, block: u32) -> bool {
        self.mappings(shared, block).iter().any(|&(slot, at)| {
            let sequence = lock(&self.slots[slot as usize]);
            let mapped = self.blocks_for(sequence.tokens);
            let unsettled = sequence.unsettled(self.config.block_size, mapped);
            unsettled.contains(&sequence.space.logical_of(at))
        })
    }

    /// `evict`: the plan counted on a cached block there, or a held one; else on an empty one.
    fn take_destination(&self, shared: &mut Shared, block: u32, evict: bool) -> bool {
        if evict && self.pool.is_evictable(block) {
            let mut spare = Vec::new();
            self.evict_block(shared, block, &mut spare);
            self.pool.give(&spare);
            return true;
        }
        if evict && let Some(slot) = self.holds.holder(block) {
            if slot == self.filling_slot() {
                // From the front: the rest stays held.
                let taken = self.holds.take(slot, block.wrapping_sub(1), 1);
                self.pool.unstick(taken.clone());
                return !taken.is_empty();
            }
            self.drop_hold(slot);
        }
        self.pool.take_exact(block)
    }

    /// The transaction that `moves` stands for.
    fn finish(&self, shared: &mut Shared, moves: &Moves) -> Result<Vec<Move>> {
        if moves.uid != self.uid {
            return Err(Error::InvalidPlan(
                "the moves were begun by another manager".into(),
            ));
        }
        let Some(begun) = shared.transactions.get(&moves.epoch) else {
            let epoch = moves.epoch;
            return Err(Error::InvalidPlan(format!(
                "epoch {epoch} was never begun, or is committed or aborted already"
            )));
        };
        if !begun
            .iter()
            .map(|m| [m.source, m.destination])
            .eq(moves.pairs.iter().copied())
        {
            let epoch = moves.epoch;
            return Err(Error::InvalidPlan(format!(
                "the moves of epoch {epoch} are not those that were begun"
            )));
        }
        Ok(shared
            .transactions
            .remove(&moves.epoch)
            .expect("found above"))
    }

    /// The copies are done: repoints every mapping, the prefix index and the order of eviction.
    /// Returns how many blocks moved; sources that were freed, written or pinned meanwhile drop
    /// out.
    pub fn commit(&self, moves: &Moves) -> Result<u32> {
        let _rest = self.rest();
        let mut shared = self.shared();
        let begun = self.finish(&mut shared, moves)?;
        let steps = self.steps();
        let fence = steps.fence();
        let mut empty = Vec::new();
        let mut moved = 0;
        let mut touched = Vec::new();
        for m in &begun {
            let word = self.pool.word(m.source);
            let held = word.state() == State::Cached || word.holders() > 0;
            if m.dropped || !held {
                self.undo(&mut shared, fence, m, &mut empty);
                count(&self.stats.moves_dropped, 1);
            } else {
                self.flip(&mut shared, m, word, &mut touched);
                self.pool.set_stuck(m.source, false);
                self.let_go(&mut shared, fence, m.source, &mut empty);
                moved += 1;
            }
        }
        self.promote_touched(&mut shared, touched);
        count(&self.stats.moves_committed, moved as usize);
        self.pool.give(&empty);
        Ok(moved)
    }

    /// The destination becomes what the source was.
    fn flip(&self, shared: &mut Shared, m: &Move, word: Word, touched: &mut Vec<(u32, u32)>) {
        let &Move {
            source,
            destination,
            ..
        } = m;
        shared.moving.remove(&source);
        for (slot, at) in self.mappings(shared, source) {
            let mut sequence = lock(&self.slots[slot as usize]);
            let index = sequence.space.logical_of(at);
            self.remap(shared, &mut sequence, index, (source, destination));
            touched.push((slot, index));
        }
        self.reverse.transfer(source, destination);
        self.tokens
            .copy(source, destination, self.config.block_size as usize);
        if word.is_published() {
            shared.index.repoint(source, destination);
        }
        let after = word
            .move_ended()
            .expect("somebody holds it, or it is cached");
        self.pool.set_word(destination, after);
        if word.state() == State::Cached {
            // In the order of eviction, or on its way there, it keeps its place: leaves first.
            if shared.is_cooling(source) {
                self.cool_elsewhere(shared, source, destination);
            } else {
                self.move_in_order(shared, source, destination);
            }
        }
        self.refresh_stuck(shared, destination);
    }

    /// Pages that have become consecutive and aligned by moves are mapped as one; what lies behind a
    /// last block that has moved is held.
    fn promote_touched(&self, shared: &mut Shared, mut touched: Vec<(u32, u32)>) {
        touched.sort_unstable();
        for entries in touched.chunk_by(|a, b| a.0 == b.0) {
            let slot = entries[0].0;
            let mut sequence = lock(&self.slots[slot as usize]);
            let orders = self.orders_of(&sequence, sequence.tokens);
            let mapped = self.blocks_for(sequence.tokens);
            for &(_, index) in entries {
                self.promote_around(shared, &mut sequence, (index, mapped), orders);
            }
            if entries.last().is_some_and(|entry| entry.1 + 1 == mapped) {
                self.hold_behind(slot, sequence.last);
            }
        }
    }

    /// One move is taken back: the destination is empty again, the source loses the reference.
    fn undo(&self, shared: &mut Shared, fence: Option<u64>, m: &Move, empty: &mut Vec<u32>) {
        shared.moving.remove(&m.source);
        self.pool.set_word(m.destination, Word::PRIVATE);
        self.pool.set_stuck(m.destination, false);
        empty.push(m.destination);
        match self.pool.word(m.source).move_ended() {
            Some(word) => {
                self.pool.set_word(m.source, word);
                let evictable = word.state() == State::Cached && !shared.is_cooling(m.source);
                self.pool.set_evictable(m.source, evictable);
                self.refresh_stuck(shared, m.source);
            }
            None => {
                count(&self.stats.freed_blocks, 1);
                self.let_go(shared, fence, m.source, empty);
            }
        }
    }

    /// Gives the destinations back. Every sequence keeps its blocks.
    pub fn abort(&self, moves: &Moves) -> Result<()> {
        let _rest = self.rest();
        let mut shared = self.shared();
        let begun = self.finish(&mut shared, moves)?;
        let steps = self.steps();
        let fence = steps.fence();
        let mut empty = Vec::new();
        for m in &begun {
            self.undo(&mut shared, fence, m, &mut empty);
        }
        count(&self.stats.moves_aborted, begun.len());
        self.pool.give(&empty);
        Ok(())
    }
}
