//! Where single blocks come from in the guarantee mode: windows that are held already.
//!
//! What lives here: the order of windows that the guarantee needs (`docs/guarantee.md`): a claim of
//! single blocks opens a window only when no held one has an available block left. What never lives
//! here: huge pages (each opens a window and fills it), moves ([`crate::compact`]).
//!
//! A window is *held* if a block of it is neither empty nor evictable. It costs a look at each window
//! a claim, so it is a mode and not the default.

use super::place::{Claim, REGION};
use crate::pool::{Fit, Zone};
use crate::state::{Mmu, Shared};
use crate::stats::count;

impl Mmu {
    /// Windows with live blocks, the fullest first: (blocks available, window).
    fn held_first(&self) -> Vec<(u32, u32)> {
        let span = self.config.span();
        let mut windows: Vec<(u32, u32)> = (0..span.div_ceil(REGION))
            .filter_map(|window| {
                let size = REGION.min(span - window * REGION);
                let live = self.pool.live_in(window);
                (live > 0 && live < size).then_some((size - live, window))
            })
            .collect();
        windows.sort_unstable();
        windows
    }

    /// Sees to it that `n` blocks are empty in windows that are held, as far as evicting there does
    /// it, the fullest first. Nothing is evicted for a claim that will be refused.
    pub(super) fn make_held_room(&self, shared: &mut Shared, n: u32) {
        let evictable = self.pool.num_evictable();
        let available = self.pool.empty() + evictable + self.holds.total();
        if evictable == 0 || available < n {
            return;
        }
        let windows = self.held_first();
        let empty = |window: u32| self.pool.empty_in(window);
        let mut room: u32 = windows.iter().map(|&(_, window)| empty(window)).sum();
        for (available, window) in windows {
            if room >= n {
                break;
            }
            let wanted = (n - room).min(available - empty(window));
            let first = window * REGION;
            let evictable = (first..first + REGION).filter(|&block| self.pool.is_evictable(block));
            let chosen: Vec<u32> = evictable.take(wanted as usize).collect();
            for block in chosen {
                if self.pool.is_evictable(block) {
                    let mut given = Vec::new();
                    self.evict_block(shared, block, &mut given);
                    given.push(block);
                    self.pool.give(&given);
                    room += 1;
                }
            }
        }
    }

    /// Claims `n` blocks of what is reserved, in held windows first.
    pub(super) fn take_held_first(
        &self,
        claim: &mut Claim,
        n: u32,
        (zone, fit): (Zone, Fit),
        out: &mut Vec<u32>,
    ) {
        let start = out.len();
        let windows = self.held_first();
        let windows = windows.iter().map(|&(_, window)| window);
        let taken = self.pool.take_from_windows(windows, n, out);
        self.pool.take(n - taken, zone, fit, out);
        out[start..].sort_unstable();
        claim.reserved -= n;
        count(&self.stats.claimed_blocks, n as usize);
    }
}
