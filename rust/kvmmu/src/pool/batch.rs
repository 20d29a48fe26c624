//! Batches in few long runs: which part of the pool a batch is cut from.
//!
//! What lives here: the choice of runs for a batch. What never lives here: finding or claiming one
//! ([`super::shape`]).
//!
//! Plain first fit gives a batch whatever holes come first, and under churn that is about five
//! blocks a run. So a batch of [`super::Placement::AddressOrder`] is cut like this, each time from
//! the end of the pool where small claims go:
//!
//! 1. from windows that are partly used, below the first whole one: runs of 64 and more, lowest
//!    first; then of 16 and more; what is left of the batch fits anywhere that is long enough;
//! 2. from the first whole window on, unless fewer than 5 % of the windows are whole (these are for
//!    huge pages), or less than 16 blocks are left to place;
//! 3. the lowest empty blocks.
//!
//! A search gives up after as many looks in vain as the batch is worth (8, and one for each 64
//! blocks), so that no batch pays for a pool in which there are no runs. Holes that are too small for batches stay for single blocks, which take the lowest there are.

use std::ops::Range;

use super::counter::count;
use super::physical::Physical;
use super::placement::{End, Zone};
use crate::sync::Ordering;

/// A run that is long enough to begin with, and the shorter one that is tried next.
const LONG: [u32; 2] = [64, 16];
/// Fewer blocks do not open a whole window.
const OPENS: u32 = 16;
/// Windows that a search for one run looks into.
const LOOKS: u32 = 64;
/// One window in so many is kept whole.
const KEPT: u32 = 20;

impl<const BITS: u32, const WORDS: usize> Physical<BITS, WORDS> {
    /// Turns up to `n` reserved blocks into runs, appended to `out` by ascending address; returns
    /// how many.
    pub(crate) fn take_runs(&self, n: u32, zone: Zone, out: &mut Vec<u32>) -> u32 {
        let mut runs = Vec::new();
        let mut left = n;
        for zone in self.zones(zone) {
            let partial = self.partial(&zone);
            for length in LONG {
                left -= self.fill(length, &partial, left, &mut runs);
            }
            while left >= OPENS && self.has_spare_windows() {
                let Some(run) = self.open_whole(&zone, left) else {
                    break;
                };
                left -= run.len() as u32;
                runs.push(run);
            }
        }
        runs.sort_unstable_by_key(|run| run.start);
        runs.into_iter().for_each(|run| out.extend(run));
        n - left
    }

    /// With `n` blocks reserved: takes one run of them that begins at `at` modulo `align`. It lies in
    /// windows that are partly used where it can, with `spare` empty blocks behind it if there is
    /// such a place; a whole window is opened only while more than 5 % of the windows are whole.
    pub(crate) fn take_tail(
        &self,
        n: u32,
        spare: u32,
        (align, at): (u32, u32),
        zone: Zone,
    ) -> Option<u32> {
        let fits = |first: u32| first + (at.wrapping_sub(first) & (align - 1));
        let take = |run: u32| {
            let first = fits(run);
            self.take_range(first..first + n).then_some(first)
        };
        let room = |spare: u32| {
            let wanted = n + spare + align - 1;
            let search = |zone: Range<u32>| match self.small_from {
                End::High if wanted <= Self::WINDOW => {
                    self.room_from_above(wanted, self.partial(&zone), &take)
                }
                _ => self.room_from_below(wanted, self.partial(&zone), &take),
            };
            self.zones(zone).into_iter().find_map(search)
        };
        if let Some(first) = room(spare) {
            return Some(first);
        }
        for zone in self.zones(zone) {
            if !self.has_spare_windows() {
                break;
            }
            let open = |window| {
                let first = fits(window * Self::WINDOW);
                let end = (zone.end * Self::WINDOW).min(self.span);
                let taken = self.is_whole(window)
                    && first + n <= end
                    && self.run_length(first, n) == n
                    && self.take_range(first..first + n);
                if taken {
                    for window in window..(first + n).div_ceil(Self::WINDOW) {
                        self.recheck_vacant(window);
                    }
                }
                taken.then_some(first)
            };
            if let Some(first) = self.vacant.find_map(zone.clone(), self.small_from, open) {
                return Some(first);
            }
        }
        room(0)
    }

    /// Turns reserved blocks into those that are empty in these windows, up to `n`, appended to `out` in
    /// this order; returns how many.
    pub(crate) fn take_from_windows(
        &self,
        windows: impl Iterator<Item = u32>,
        n: u32,
        out: &mut Vec<u32>,
    ) -> u32 {
        let mut left = n;
        let mut runs = Vec::new();
        for window in windows {
            if left == 0 {
                break;
            }
            left -= self.fill(1, &(window..window + 1), left, &mut runs);
        }
        runs.into_iter().for_each(|run| out.extend(run));
        n - left
    }

    /// Empty blocks of a window, by its lines.
    pub(crate) fn empty_in(&self, window: u32) -> u32 {
        // Relaxed: whoever claims what it shows acquires then.
        let ones = |at: usize| self.lines[at].load(Ordering::Relaxed).count_ones();
        let held: u32 = Self::words_of(window).map(ones).sum();
        let size = Self::WINDOW.min(self.span - window * Self::WINDOW);
        size.saturating_sub(held.saturating_sub(Self::WINDOW - size))
    }

    /// The lowest run of a length in some windows that can be taken.
    fn room_from_below(
        &self,
        wanted: u32,
        windows: Range<u32>,
        take: &dyn Fn(u32) -> Option<u32>,
    ) -> Option<u32> {
        let end = (windows.end * Self::WINDOW).min(self.span);
        let mut from = windows.start * Self::WINDOW;
        let mut looks = 8 + wanted / 64;
        while let Some(run) = self.find_run_near(wanted, from..end, &mut looks) {
            if let Some(first) = take(run) {
                return Some(first);
            }
            // Taken meanwhile, or credits that are on their way.
            from = run + 1;
        }
        None
    }

    /// A run of a length within the highest window that has one and where it can be taken.
    fn room_from_above(
        &self,
        wanted: u32,
        windows: Range<u32>,
        take: &dyn Fn(u32) -> Option<u32>,
    ) -> Option<u32> {
        // A run has an aligned page of half its length inside.
        let order = wanted.div_ceil(2).ilog2().min(Self::HUGE - 1);
        let index = match order {
            0 => &self.open,
            order => &self.may[order as usize - 1],
        };
        let looks = std::cell::Cell::new(LOOKS);
        let look = |window: u32| {
            looks.set(looks.get() - 1);
            let end = ((window + 1) * Self::WINDOW).min(self.span);
            let mut one = 1;
            let run = self.find_run_near(wanted, window * Self::WINDOW..end, &mut one);
            match run.and_then(take) {
                Some(first) => Some(Some(first)),
                None => (looks.get() == 0).then_some(None),
            }
        };
        index.find_map(windows, End::High, look).flatten()
    }

    /// The windows of a zone before the first whole one, seen from the end where small claims go.
    fn partial(&self, zone: &Range<u32>) -> Range<u32> {
        let look = |window| self.is_whole(window).then_some(window);
        let whole = self.vacant.find_map(zone.clone(), self.small_from, look);
        match self.small_from {
            End::Low => zone.start..whole.unwrap_or(zone.end),
            End::High => whole.map_or(zone.start, |window| window + 1)..zone.end,
        }
    }

    /// Whether there are more whole windows than are kept, as far as their counters tell.
    fn has_spare_windows(&self) -> bool {
        let mut spare = self.windows() / KEPT + 1;
        let look = |window| {
            spare -= u32::from(self.is_whole(window));
            (spare == 0).then_some(())
        };
        let found = self.vacant.find_map(0..self.windows(), End::Low, look);
        found.is_some()
    }

    /// A look at a window of the vacant index, which learns if it is not whole any more.
    fn is_whole(&self, window: u32) -> bool {
        let whole = count(self.counter(window)) == Self::WINDOW;
        if !whole {
            self.recheck_vacant(window);
        }
        whole
    }

    /// Takes runs of at least `length` (or all that is left) within some windows, the lowest first,
    /// until `n` blocks are taken or there are none; returns how many.
    fn fill(&self, length: u32, windows: &Range<u32>, n: u32, runs: &mut Vec<Range<u32>>) -> u32 {
        let end = (windows.end * Self::WINDOW).min(self.span);
        let mut from = windows.start * Self::WINDOW;
        let mut left = n;
        let mut looks = 8 + n / 64;
        let mut whole = left >= length;
        while left > 0 {
            if whole && left < length {
                // The rest of the batch fits where the others did not.
                from = windows.start * Self::WINDOW;
                whole = false;
            }
            let Some(first) = self.find_run_near(left.min(length), from..end, &mut looks) else {
                break;
            };
            let run = first..first + self.run_length(first, left.min(end - first));
            if self.take_range(run.clone()) {
                left -= run.len() as u32;
                from = run.end;
                runs.push(run);
            } else {
                // Taken meanwhile, or credits that are on their way.
                from = first + 1;
            }
        }
        n - left
    }

    /// Takes a run of up to `n` blocks that begins with a whole window.
    fn open_whole(&self, zone: &Range<u32>, n: u32) -> Option<Range<u32>> {
        let end = (zone.end * Self::WINDOW).min(self.span);
        self.vacant
            .find_map(zone.clone(), self.small_from, |window| {
                if !self.is_whole(window) {
                    return None;
                }
                let first = window * Self::WINDOW;
                let run = first..first + self.run_length(first, n.min(end - first));
                let whole = run.len() as u32 >= n.min(Self::WINDOW);
                if !whole || !self.take_range(run.clone()) {
                    return None; // taken meanwhile
                }
                for window in window..run.end.div_ceil(Self::WINDOW) {
                    self.recheck_vacant(window);
                }
                Some(run)
            })
    }
}
