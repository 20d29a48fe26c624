//! Where the blocks of a sequence come from.
//!
//! What lives here: completing a reservation by eviction and by breaking holds, choosing pages and
//! runs for a range of a sequence, growing in place. What never lives here: finding a shape in the
//! pool ([`crate::pool`]), mapping it ([`crate::state`], `mapping`).
//!
//! A range of virtual blocks is cut at the borders of regions of 512. Each complete region gets a
//! huge page, if the sequence is long enough and one is free; what is left, and regions that got
//! none, are claimed as one run each, aligned as they are virtually to the next smaller page, or in
//! the few runs that there are. The last run of a sequence keeps a hold behind it: a few empty
//! blocks into which it grows (compare the reservations of Navarro, Iyer, Druschel and Cox, OSDI
//! 2002). Nothing is refused for its shape unless the caller asked for that.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use crate::config::PageOrders;
use crate::error::{Error, Result};
use crate::pool::{Fit, Placement, WINDOW, Zone};
use crate::state::{Ages, Mmu, NONE, Shared, runs_behind};
use crate::stats::count;
use crate::sync::MutexGuard;

/// Blocks of a region: what one huge page can map.
pub(super) const REGION: u32 = WINDOW;
/// How often a claim breaks holds before it is refused.
const HOLDS_AGAIN: u32 = 8;
/// Windows with live blocks that are looked into for a run.
const LIVE_WINDOWS: usize = 8;
/// Of so many blocks that are evicted next, the windows are looked into as well.
const NEXT_BLOCKS: usize = 1024;

/// Blocks that a call may claim.
#[derive(Debug, Default)]
pub(super) struct Claim {
    /// Reserved in the pool.
    pub(super) reserved: u32,
    /// Claimed already.
    ready: Vec<u32>,
}

/// Blocks that a call may claim, some of them after evicting others.
#[derive(Debug)]
#[must_use]
pub(super) struct Reserved {
    reserved: u32,
    evict: u32,
}

/// What part of a sequence blocks are for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    /// Its first virtual block.
    pub(super) at: u32,
    /// Blocks.
    pub(super) n: u32,
    /// Page orders that may be used, a bit for each.
    pub(super) orders: u32,
    pub(super) zone: Zone,
    /// Blocks at the start of it that must lie in one run.
    pub(super) contiguous: u32,
    /// Each complete region of 512 blocks must be a huge page.
    pub(super) huge: bool,
}

impl Part {
    /// Complete regions of 512 blocks that may be huge pages.
    pub(super) fn regions(&self) -> u32 {
        if self.orders >> 9 & 1 == 0 {
            return 0;
        }
        self.complete_regions()
    }

    /// Complete regions of 512 blocks, whatever pages may be used.
    pub(super) fn complete_regions(&self) -> u32 {
        ((self.at + self.n) / REGION).saturating_sub(self.at.div_ceil(REGION))
    }

    /// Whether blocks for the part give each complete region a huge page.
    fn is_huge(&self, blocks: &[u32]) -> bool {
        let before = (self.at.next_multiple_of(REGION) - self.at).min(self.n) as usize;
        let mut pages = blocks[before..].chunks_exact(REGION as usize);
        pages.all(is_huge_page)
    }
}

/// Whether 512 blocks are a huge page.
pub(super) fn is_huge_page(blocks: &[u32]) -> bool {
    blocks[0].is_multiple_of(REGION) && runs_behind(NONE, blocks) == 1
}

/// A huge page is missing, or a run: what was asked for is not to be had.
#[derive(Debug)]
pub(super) struct Missing {
    /// Blocks that were to be contiguous.
    pub(super) run: u32,
}

impl Mmu {
    /// Reserves `needed` blocks, taking the shared lock only when the empty ones do not suffice.
    pub(super) fn reserve_with<'a>(
        &'a self,
        needed: u32,
        shared: &mut Option<MutexGuard<'a, Shared>>,
    ) -> Result<Reserved> {
        if self.config.guarantee.is_some() && needed > 0 {
            self.make_held_room(shared.get_or_insert_with(|| self.shared()), needed);
        }
        if self.pool.reserve(needed) {
            return Ok(Reserved {
                reserved: needed,
                evict: 0,
            });
        }
        self.reserve(shared.get_or_insert_with(|| self.shared()), needed, 0)
    }

    /// Reserves `needed` blocks: empty ones, then evictable ones, of which `protected` are spoken
    /// for, then those that are held. All or nothing. What is to be evicted stays there while the
    /// caller holds the shared lock.
    pub(super) fn reserve(
        &self,
        _shared: &Shared,
        needed: u32,
        protected: u32,
    ) -> Result<Reserved> {
        let evictable = self.pool.num_evictable() - protected;
        let mut reserved = self.pool.reserve_up_to(needed);
        // Again if others were faster: they may keep what came of it for themselves.
        for _ in 0..HOLDS_AGAIN {
            let missing = (needed - reserved).saturating_sub(evictable);
            if missing == 0 || missing > self.holds.total() {
                break;
            }
            self.break_holds(missing);
            reserved += self.pool.reserve_up_to(needed - reserved);
        }
        if needed - reserved > evictable {
            self.pool.unreserve(reserved);
            return Err(Error::OutOfBlocks {
                needed: u64::from(needed),
                available: u64::from(reserved + evictable + self.holds.total()),
                num_blocks: u64::from(self.online()),
            });
        }
        Ok(Reserved {
            reserved,
            evict: needed - reserved,
        })
    }

    /// Evicts what a reservation counts on. `shared` is needed when there is something to evict.
    pub(super) fn complete(&self, reserved: Reserved, shared: Option<&mut Shared>) -> Claim {
        let Reserved { reserved, evict } = reserved;
        let mut claim = Claim {
            reserved,
            ready: Vec::new(),
        };
        if evict > 0 {
            let shared = shared.expect("evicting needs the shared lock");
            let (mut evicted, spare) = self.evict_oldest(shared, evict);
            if self.config.placement == Placement::AddressOrder {
                // Where they lay does not matter: what is claimed is chosen among all.
                evicted.sort_unstable();
                self.pool.give_reserved(&evicted);
                claim.reserved += evict;
            } else {
                claim.ready = evicted;
            }
            self.pool.give(&spare);
        }
        claim
    }

    /// Gives a reservation back.
    pub(super) fn unreserve(&self, reserved: Reserved) {
        self.pool.unreserve(reserved.reserved);
    }

    /// Gives back what is left of a claim.
    pub(super) fn give_up(&self, claim: Claim) {
        self.pool.unreserve(claim.reserved);
        self.pool.give(&claim.ready);
    }

    /// Claims blocks one by one or in the runs that there are.
    pub(super) fn take_any(
        &self,
        claim: &mut Claim,
        n: u32,
        (zone, fit): (Zone, Fit),
        out: &mut Vec<u32>,
    ) {
        if self.config.guarantee.is_some() {
            return self.take_held_first(claim, n, (zone, fit), out);
        }
        let reserved = n.min(claim.reserved);
        self.pool.take(reserved, zone, fit, out);
        claim.reserved -= reserved;
        let start = out.len();
        let rest = claim.ready.len() - (n - reserved) as usize;
        out.extend(claim.ready.drain(rest..));
        out[start..].sort_unstable();
        count(&self.stats.claimed_blocks, n as usize);
    }

    /// Claims the blocks of a part of a sequence. `strict`: each complete region must be a huge page
    /// and the contiguous start one run, else it is refused and nothing is claimed.
    pub(super) fn place(
        &self,
        claim: &mut Claim,
        part: Part,
        strict: bool,
        out: &mut Vec<u32>,
    ) -> std::result::Result<(), Missing> {
        let start = out.len();
        let mut placed = self.place_pages(claim, part, strict, out);
        if part.huge && placed.is_ok() && !part.is_huge(&out[start..]) {
            placed = Err(Missing { run: REGION }); // a contiguous start took a region
        }
        if placed.is_err() {
            // The caller still has its claim: what was taken of it is reserved again.
            let taken = out.split_off(start);
            if self.config.placement == Placement::AddressOrder {
                claim.reserved += taken.len() as u32;
                self.pool.give_reserved(&taken);
            } else {
                claim.ready.extend(taken);
            }
        }
        placed
    }

    fn place_pages(
        &self,
        claim: &mut Claim,
        part: Part,
        strict: bool,
        out: &mut Vec<u32>,
    ) -> std::result::Result<(), Missing> {
        let Part {
            mut at,
            n,
            orders,
            zone,
            contiguous,
            ..
        } = part;
        if self.config.placement != Placement::AddressOrder {
            if strict && contiguous > 1 {
                return Err(Missing { run: contiguous });
            }
            return self.place_required(claim, part, out);
        }
        let end = at + n;
        let align = if orders == 1 {
            1
        } else {
            1 << self.config.page_orders.alignment()
        };
        let spare = self.config.hold_blocks;
        if contiguous > 0 {
            let n = contiguous.min(n);
            let room = if at + n == end { spare } else { 0 };
            let first = self
                .pool
                .take_tail(n, room, (align, at & (align - 1)), zone);
            let first = first.or_else(|| self.pool.take_run(n, zone));
            let first = first.or_else(|| {
                self.break_holds(self.holds.total());
                self.pool.take_run(n, zone)
            });
            match first {
                Some(first) => {
                    self.took(claim, first..first + n, out);
                    at += n;
                }
                None if strict => return Err(Missing { run: n }),
                None => {}
            }
        }
        let first = at.div_ceil(REGION);
        let n = end - at;
        let regions = Part { at, n, ..part }.regions();
        let mut windows = Vec::new();
        while (windows.len() as u32) < regions {
            let found = self.pool.take_window(zone);
            let found = found.or_else(|| match self.break_holds_of_windows() {
                true => self.pool.take_window(zone),
                false => None,
            });
            let Some(window) = found else { break };
            claim.reserved -= REGION;
            windows.push(window);
        }
        count(&self.stats.claimed_blocks, windows.len() * REGION as usize);
        let missed = regions - windows.len() as u32;
        if missed > 0 {
            count(&self.stats.huge_missed, missed as usize);
            if part.huge {
                let taken = windows.iter().flat_map(|&first| first..first + REGION);
                out.extend(taken);
                return Err(Missing { run: REGION });
            }
        }
        for (region, window) in (first..).zip(windows) {
            self.place_run(claim, at..region * REGION, align, (zone, 0), out);
            out.extend(window..window + REGION);
            at = (region + 1) * REGION;
        }
        self.place_run(claim, at..end, align, (zone, spare), out);
        Ok(())
    }

    /// Where the placement chooses single blocks: huge pages only as far as they are required, the
    /// rest as it comes.
    fn place_required(
        &self,
        claim: &mut Claim,
        part: Part,
        out: &mut Vec<u32>,
    ) -> std::result::Result<(), Missing> {
        let regions = if part.huge { part.regions() } else { 0 };
        let before = (part.at.next_multiple_of(REGION) - part.at).min(part.n);
        let mut windows = Vec::new();
        for _ in 0..regions {
            // Blocks that were evicted one by one are no windows, and are not reserved.
            let found = (claim.reserved >= REGION).then(|| self.pool.take_window(part.zone));
            let Some(window) = found.flatten() else { break };
            claim.reserved -= REGION;
            windows.push(window);
        }
        count(&self.stats.claimed_blocks, windows.len() * REGION as usize);
        let pages = windows.iter().flat_map(|&first| first..first + REGION);
        let missed = regions - windows.len() as u32;
        if missed > 0 {
            count(&self.stats.huge_missed, missed as usize);
            out.extend(pages);
            return Err(Missing { run: REGION });
        }
        let rest = (part.zone, Fit::Together);
        let before = if regions > 0 { before } else { 0 };
        self.take_any(claim, before, rest, out);
        out.extend(pages);
        self.take_any(claim, part.n - before - regions * REGION, rest, out);
        Ok(())
    }

    /// Claims one run, or the few that there are.
    fn place_run(
        &self,
        claim: &mut Claim,
        part: Range<u32>,
        align: u32,
        (zone, spare): (Zone, u32),
        out: &mut Vec<u32>,
    ) {
        let n = part.len() as u32;
        if n == 0 {
            return;
        }
        let place = (align, part.start & (align - 1));
        if self.config.guarantee.is_some() {
            return self.take_any(claim, n, (zone, Fit::Together), out);
        }
        match self.pool.take_tail(n, spare, place, zone) {
            Some(first) => self.took(claim, first..first + n, out),
            None => self.take_any(claim, n, (zone, Fit::Together), out),
        }
    }

    /// Blocks were claimed of what is reserved.
    fn took(&self, claim: &mut Claim, run: Range<u32>, out: &mut Vec<u32>) {
        claim.reserved -= run.len() as u32;
        count(&self.stats.claimed_blocks, run.len());
        out.extend(run);
    }

    // -- holds -------------------------------------------------------------------------------

    /// Single blocks without holds: they are served as they come, and the cache loses the oldest.
    pub(super) fn is_plain(&self) -> bool {
        self.config.page_orders == PageOrders::SINGLE && !self.has_holds()
    }

    pub(crate) fn has_holds(&self) -> bool {
        self.config.hold_blocks > 0
            && self.config.placement == Placement::AddressOrder
            && self.config.guarantee.is_none()
    }

    /// Up to `n` blocks that follow `last` directly: out of the hold, or because they are empty.
    pub(super) fn grow_in_place(&self, slot: u32, last: u32, n: u32, out: &mut Vec<u32>) {
        let held = self.holds.take(slot, last, n);
        self.pool.unstick(held.clone());
        let mut rest = n - held.len() as u32;
        let last = if held.is_empty() { last } else { held.end - 1 };
        out.extend(held);
        if rest > 0 {
            // What is left of the hold lies elsewhere.
            self.drop_hold(slot);
            let room = self
                .pool
                .free_from(last + 1, rest + self.config.hold_blocks);
            if room >= rest && self.pool.claim_exact(last + 1, room) {
                out.extend(last + 1..last + 1 + rest);
                self.keep(slot, last + 1 + rest..last + 1 + room);
                rest = 0;
            }
        }
        count(&self.stats.claimed_blocks, (n - rest) as usize);
        count(&self.stats.grown_in_place, (n - rest) as usize);
    }

    /// Keeps what is empty behind a sequence for it, if it has no hold there.
    pub(crate) fn hold_behind(&self, slot: u32, last: u32) {
        if !self.has_holds() {
            return;
        }
        let held = self.holds.of(slot);
        if !held.is_empty() {
            if held.start == last + 1 {
                return;
            }
            self.drop_hold(slot);
        }
        let room = self.pool.free_from(last + 1, self.config.hold_blocks);
        if room > 0 && self.pool.claim_exact(last + 1, room) {
            self.keep(slot, last + 1..last + 1 + room);
        }
    }

    /// Takes blocks that had come from behind a sequence back into its hold; what is not kept stays
    /// in `blocks`.
    pub(super) fn hold_again(&self, slot: u32, last: u32, blocks: &mut Vec<u32>) {
        let behind = (last.wrapping_add(1)..).zip(blocks.iter());
        let ours = behind.take_while(|&(place, &block)| place == block).count() as u32;
        let held = self.holds.of(slot);
        let ours = last.wrapping_add(1)..last.wrapping_add(1) + ours;
        let most = self.config.hold_blocks;
        if !self.has_holds() || !held.is_empty() && held.start != ours.end {
            return;
        }
        let n = (ours.len() as u32).min(most.saturating_sub(held.len() as u32));
        if n < ours.len() as u32 && !held.is_empty() {
            return;
        }
        let held = self.holds.clear(slot);
        if held.is_empty() || held.start == ours.end {
            blocks.drain(..n as usize);
            let end = if held.is_empty() {
                ours.start + n
            } else {
                held.end
            };
            self.keep(slot, ours.start..end);
        } else {
            self.keep(slot, held);
        }
    }

    pub(crate) fn keep(&self, slot: u32, held: Range<u32>) {
        if held.is_empty() {
            return;
        }
        for block in held.clone() {
            self.pool.set_stuck(block, true);
        }
        self.holds.put(slot, held);
        count(&self.stats.holds_made, 1);
    }

    /// A sequence gives up its hold. Returns how many blocks are empty for anybody now.
    pub(crate) fn drop_hold(&self, slot: u32) -> u32 {
        let held = self.holds.clear(slot);
        self.pool.unstick(held.clone());
        self.pool.give(&held.clone().collect::<Vec<_>>());
        held.len() as u32
    }

    /// Breaks the largest holds until `n` blocks have come of it.
    fn break_holds(&self, n: u32) {
        let mut freed = 0;
        for (_, slot) in self.holds.largest() {
            if freed >= n {
                break;
            }
            freed += self.drop_hold(slot);
            count(&self.stats.holds_broken, 1);
        }
    }

    // -- windows -----------------------------------------------------------------------------

    /// Sees to it that `n` windows are whole, as far as windows without live blocks make that
    /// possible: those whose cached blocks are oldest, all ages added up, lose them. (Not the one
    /// whose newest block is oldest: then one block that is hot keeps 500 that nobody wants. And a
    /// full window goes before one that is half empty, which is what is left of a prefix that is
    /// used.)
    pub(crate) fn make_windows(&self, shared: &mut Shared, n: u32) {
        if self.config.placement != Placement::AddressOrder {
            return;
        }
        let mut idle = self.pool.idle_windows();
        let is_whole = |&&(cached, _): &&(u32, u32)| cached == 0;
        if idle.iter().filter(is_whole).count() as u32 >= n {
            return;
        }
        if self.break_holds_of_windows() {
            idle = self.pool.idle_windows();
        }
        let whole = idle.iter().filter(is_whole).count() as u32;
        idle.retain(|&(cached, _)| cached > 0);
        idle.sort_by_cached_key(|&(_, window)| Reverse(shared.ages.total(window)));
        for (_, window) in idle.into_iter().take(n.saturating_sub(whole) as usize) {
            self.evict_among(shared, window * REGION..(window + 1) * REGION);
        }
    }

    /// Empties the evictable blocks of a range.
    pub(crate) fn evict_among(&self, shared: &mut Shared, blocks: Range<u32>) {
        let mut empty = Vec::new();
        for block in blocks {
            if self.pool.is_evictable(block) {
                self.evict_block(shared, block, &mut empty);
                empty.push(block);
            }
        }
        self.pool.give(&empty);
    }

    /// Of each window with holds: blocks of them, and the slots that have them.
    fn holds_by_window(&self) -> BTreeMap<u32, (u32, Vec<u32>)> {
        let mut in_way: BTreeMap<u32, (u32, Vec<u32>)> = BTreeMap::new();
        if self.holds.total() == 0 {
            return in_way;
        }
        for (held, slot) in self.holds.largest() {
            for window in held.start / REGION..held.end.div_ceil(REGION) {
                if (window + 1) * REGION > self.config.span() {
                    continue;
                }
                let (from, to) = (window * REGION, (window + 1) * REGION);
                let (n, slots) = in_way.entry(window).or_default();
                *n += held.end.min(to) - held.start.max(from);
                slots.push(slot);
            }
        }
        in_way
    }

    /// Windows in which only holds lie and what is empty or cached.
    pub(super) fn windows_of_holds(&self) -> u32 {
        let alone =
            |&(&window, (held, _)): &(&u32, &(u32, Vec<u32>))| self.pool.live_in(window) == *held;
        self.holds_by_window().iter().filter(alone).count() as u32
    }

    /// Sees to it that the end of a part, what lies behind its last region, finds room for one run:
    /// cached blocks that are in the way go, where they are least likely to be used again.
    pub(super) fn make_room(&self, shared: &mut Shared, part: Part) {
        let end = part.at + part.n;
        let n = match part.regions() {
            0 => part.n,
            _ => end % REGION,
        };
        let wanted = n + self.config.hold_blocks + (1 << self.config.page_orders.alignment()) - 1;
        let evictable = self.pool.num_evictable();
        let none = n == 0 || wanted > REGION || evictable == 0;
        if self.is_plain() || none || self.config.placement != Placement::AddressOrder {
            return;
        }
        let windows = self.windows_for_a_run(shared, wanted);
        let runs = windows
            .into_iter()
            .filter_map(|window| self.coldest_run(&shared.ages, window, wanted, evictable / 4));
        if let Some((_, run)) = runs.min_by(|(one, _), (other, _)| one.total_cmp(other)) {
            self.evict_among(shared, run);
        }
    }

    /// Sees to it that there is a run of `n` empty blocks, where cached or held ones alone are in the
    /// way.
    pub(super) fn make_run(&self, shared: &mut Shared, n: u32) {
        if n <= 1 {
            return;
        }
        let Some((run, false)) = self.run_to_make(n) else {
            return;
        };
        let overlaps = |held: &Range<u32>| held.start < run.end && run.start < held.end;
        for (held, slot) in self.holds.largest() {
            if overlaps(&held) && self.drop_hold(slot) > 0 {
                count(&self.stats.holds_broken, 1);
            }
        }
        self.evict_among(shared, run);
    }

    /// A run of `n` blocks that are empty, evictable or held, and whether all are empty.
    pub(super) fn run_to_make(&self, n: u32) -> Option<(Range<u32>, bool)> {
        let span = self.config.span();
        let run = |bits: &[u64]| {
            let longest = crate::compact::measure::longest(bits, span);
            let first = longest.largest_start;
            (longest.largest >= n).then_some(first..first + n)
        };
        if let Some(run) = run(&self.pool.empty_bits()) {
            return Some((run, true));
        }
        let mut bits = self.pool.available_bits();
        for block in self.holds.blocks() {
            bits[block as usize / 64] |= 1 << (block % 64);
        }
        Some((run(&bits)?, false))
    }

    /// Windows in which a run of `n` blocks, empty or evictable, should be looked for: of those with
    /// live blocks the ones whose cached blocks are oldest, the highest first, and those of the
    /// blocks that are evicted next.
    fn windows_for_a_run(&self, shared: &mut Shared, n: u32) -> Vec<u32> {
        let mut windows = self.pool.windows_with_room(n);
        windows.sort_by_cached_key(|&window| Reverse((shared.ages.mean(window), window)));
        windows.truncate(LIVE_WINDOWS);
        let may = |block: u32| self.pool.is_evictable(block);
        let (_, next) = shared.index.order().oldest(NEXT_BLOCKS, may);
        for window in next.into_iter().map(|block| block / REGION) {
            if (window + 1) * REGION <= self.config.span() && !windows.contains(&window) {
                windows.push(window);
            }
        }
        windows
    }

    /// The run of `n` blocks of a window, empty or evictable, that is least likely to be used again,
    /// and how likely that is: of a cached block one by its age, in blocks that entered the cache
    /// since, and `more`, so that no block counts for all others.
    fn coldest_run(
        &self,
        ages: &Ages,
        window: u32,
        n: u32,
        more: u32,
    ) -> Option<(f64, Range<u32>)> {
        let blocks = window * REGION..(window + 1) * REGION;
        let mut heats = [0.0; REGION as usize];
        let mut best: Option<(f64, Range<u32>)> = None;
        let (mut heat, mut first) = (0.0, blocks.start);
        for (at, block) in blocks.clone().enumerate() {
            if self.pool.is_evictable(block) {
                heats[at] = 1.0 / (ages.of(block) as f64 + f64::from(more) + 1.0);
            } else if !self.pool.is_empty(block) {
                (heat, first) = (0.0, block + 1);
                continue;
            }
            heat += heats[at];
            if block + 1 - first > n {
                heat -= heats[(first - blocks.start) as usize];
                first += 1;
            }
            if block + 1 - first == n && best.as_ref().is_none_or(|(least, _)| heat < *least) {
                best = Some((heat, first..block + 1));
            }
        }
        best
    }

    /// Breaks the holds of windows in which nothing else lies that is not cached. Returns whether
    /// there were any.
    fn break_holds_of_windows(&self) -> bool {
        let mut any = false;
        for (window, (held, slots)) in self.holds_by_window() {
            if self.pool.live_in(window) != held {
                continue;
            }
            for slot in slots {
                if self.drop_hold(slot) > 0 {
                    count(&self.stats.holds_broken, 1);
                    any = true;
                }
            }
        }
        any
    }
}
