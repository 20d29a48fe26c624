//! Counters since the start.
//!
//! Relaxed atomics: each is exact by itself, a reading of several is not one moment.

use crate::sync::{AtomicU64, Ordering};

/// Names every counter once: the atomics, the reading and its field names follow.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        #[derive(Debug, Default)]
        pub(crate) struct Stats { $(pub(crate) $name: AtomicU64),* }

        /// A reading of all counters.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct StatsReading { $($(#[$doc])* pub $name: u64),* }

        impl Stats {
            pub(crate) fn read(&self) -> StatsReading {
                StatsReading { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }

        impl StatsReading {
            /// Name and value of every counter.
            pub fn entries(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }
    };
}

counters! {
    /// Sequences opened.
    opened,
    /// Sequences closed.
    closed,
    /// Sequences forked off.
    forked,
    /// Tokens appended after `open`.
    appended_tokens,
    /// Full prompt blocks looked up by `open` (those that could be matched or not).
    prefix_queried_blocks,
    /// Of those, found.
    prefix_hit_blocks,
    /// Blocks entered into the prefix index.
    published_blocks,
    /// Cached blocks dropped for others.
    evicted_blocks,
    /// Blocks copied because somebody else held them when they were written.
    copied_on_write,
    /// Blocks claimed.
    claimed_blocks,
    /// Blocks emptied or fenced after their last reference (evictions not counted).
    freed_blocks,
    /// Blocks that nobody holds any more and that stay cached.
    left_cached,
    /// Larger pages made of smaller ones that had become consecutive and aligned.
    promotions,
    /// Pages cut into smaller ones.
    splits,
    /// Regions of 512 blocks that got no huge page when their sequence was opened or grew.
    huge_missed,
    /// Holds made.
    holds_made,
    /// Holds given up because somebody else needed the blocks.
    holds_broken,
    /// Blocks claimed out of a hold or right behind a sequence.
    grown_in_place,
    /// Published blocks given back because an equal one was known.
    deduplicated,
    /// Blocks released from the front of sequences.
    released_before,
    /// Plans begun, each a pass of compaction.
    plans_begun,
    /// Of those, plans whose limit stopped them before their goal.
    plans_stopped_early,
    /// Moves begun.
    moves_begun,
    /// Moves that came into effect.
    moves_committed,
    /// Moves that fell out of a commit because their source was freed, written or pinned meanwhile.
    moves_dropped,
    /// Moves taken back by `abort`.
    moves_aborted,
    /// Blocks that went offline.
    given_back,
    /// Blocks that came back.
    taken_back,
}

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}
