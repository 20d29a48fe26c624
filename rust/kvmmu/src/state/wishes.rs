//! What somebody was refused although enough blocks were available: a shape to be made.
//!
//! What lives here: [`Wishes`], the widest shape that is waited for, and how many moves it is still
//! worth. What never lives here: moves (`compact/background.rs`), refusals (`sequence/open.rs`).
//!
//! A wish ends when somebody gets such a shape, when no moves make it, or when it has cost
//! [`WORTH`] times its blocks: whoever waited may have gone. One that is still refused wishes again.

use crate::pool::WINDOW;
use crate::sync::{AtomicU32, Ordering};

/// Moves that a wish is worth, in blocks of what is wished.
const WORTH: u32 = 4;

/// A shape that compaction shall make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    /// So many available blocks in one run.
    Run(u32),
    /// So many free windows.
    Windows(u32),
}

/// What is waited for. (Relaxed, all of it: who is refused right now is seen by the next pass.)
#[derive(Debug)]
pub(crate) struct Wishes {
    run: AtomicU32,
    windows: AtomicU32,
    /// Moves that the wish may still cost.
    left: AtomicU32,
}

impl Wishes {
    pub(crate) fn new() -> Self {
        Self {
            run: AtomicU32::new(0),
            windows: AtomicU32::new(0),
            left: AtomicU32::new(0),
        }
    }

    /// Somebody was refused for want of them; 0: not of those.
    pub(crate) fn want(&self, windows: u32, run: u32) {
        let wider = run > self.run.fetch_max(run, Ordering::Relaxed);
        if windows > self.windows.fetch_max(windows, Ordering::Relaxed) || wider {
            let blocks = run.max(windows.saturating_mul(WINDOW));
            let worth = blocks.saturating_mul(WORTH);
            self.left.fetch_max(worth, Ordering::Relaxed);
        }
    }

    /// Somebody has got them.
    pub(crate) fn granted(&self, windows: u32, run: u32) {
        if run > 0 && run >= self.run.load(Ordering::Relaxed) {
            self.end(Wish::Run(run));
        }
        if windows > 0 && windows >= self.windows.load(Ordering::Relaxed) {
            self.end(Wish::Windows(windows));
        }
    }

    /// What to make.
    pub(crate) fn next(&self) -> Option<Wish> {
        match self.run.load(Ordering::Relaxed) {
            0 => match self.windows.load(Ordering::Relaxed) {
                0 => None,
                windows => Some(Wish::Windows(windows)),
            },
            run => Some(Wish::Run(run)),
        }
    }

    /// So many moves are made for it; false when they are more than it is worth.
    pub(crate) fn spend(&self, moves: u32) -> bool {
        let left = self.left.load(Ordering::Relaxed).checked_sub(moves);
        // (Two that plan at once may count only one of them.)
        left.inspect(|&left| self.left.store(left, Ordering::Relaxed))
            .is_some()
    }

    /// It is there, or is not to be had.
    pub(crate) fn end(&self, wish: Wish) {
        match wish {
            Wish::Run(_) => &self.run,
            Wish::Windows(_) => &self.windows,
        }
        .store(0, Ordering::Relaxed);
        if self.next().is_none() {
            self.left.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom), not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn a_wish_ends_when_it_is_granted_or_has_cost_what_it_is_worth() {
        let wishes = Wishes::new();
        wishes.want(0, 128);
        wishes.want(0, 100);
        assert_eq!(wishes.next(), Some(Wish::Run(128)));
        wishes.granted(0, 127);
        assert_eq!(wishes.next(), Some(Wish::Run(128)));
        wishes.granted(0, 128);
        assert_eq!(wishes.next(), None);
        assert!(!wishes.spend(1));
        wishes.want(0, 8);
        assert!(wishes.spend(20) && wishes.spend(12));
        wishes.want(0, 8); // The same again: it has cost what it is worth.
        assert!(!wishes.spend(1));
        wishes.end(Wish::Run(8));
        wishes.want(2, 8);
        assert_eq!(wishes.next(), Some(Wish::Run(8)));
        wishes.end(Wish::Run(8));
        assert_eq!(wishes.next(), Some(Wish::Windows(2)));
        assert!(wishes.spend(WORTH * 2 * WINDOW) && !wishes.spend(1));
    }
}
