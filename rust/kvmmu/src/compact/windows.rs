//! Which aligned groups of blocks to empty, and where what lies in them goes.
//!
//! Here live plans for whole groups (windows of 512 blocks for huge pages, granules for memory that
//! is given back): a picture of the pool in, pairs of source and destination out. Never here: the
//! pool itself, one run at any place ([`super::plan`]), when to plan, sequences.
//!
//! # Algorithms
//! **Which groups.** A group costs the moves of its live blocks, wherever they go; so the k cheapest
//! of those without a stuck block are the least that k groups can cost: exact, a selection over a
//! count a group.
//!
//! **Where to.** Into groups with live blocks, the fullest first: they stay in use longest, and no
//! group that is free as a whole is opened (as the Linux kernel's compaction and LLFree's fullest-first
//! do). Consecutive live blocks are one piece, and a piece goes to one run where there is one, at the
//! same place against the pages of middle size, so that sequences keep their runs and pages; else it
//! is cut at such a page, or in halves. That is greedy: how blocks of different sizes fit into holes is
//! bin packing.
//!
//! **Cached blocks** in a group need no move: evicting is enough. As destinations they serve when no
//! empty block is left in groups with live ones, the least recently used first.

use std::ops::Range;

use super::plan::{Impossible, Snapshot, clear, count, is_set, set};

/// How many cached blocks are looked at for each destination that is wanted.
const LOOKS: usize = 16;

/// Cached blocks, the least recently used first.
pub type Lru<'a> = &'a mut dyn Iterator<Item = u32>;

/// What lies in an aligned group of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// Blocks in use that may move.
    pub movable: u32,
    /// Blocks that may not move: pinned, leased, moving, of a huge page, offline.
    pub stuck: u32,
    /// Blocks that will be empty soon.
    pub soon: u32,
    /// Empty and evictable blocks.
    pub available: u32,
    /// Empty blocks.
    pub empty: u32,
}

impl Group {
    /// Whether nothing but available blocks lies in it.
    pub fn is_free(&self) -> bool {
        self.movable + self.stuck + self.soon == 0
    }

    /// Whether moves alone can make it free.
    pub fn can_be_emptied(&self) -> bool {
        self.stuck == 0
    }
}

/// Counts each aligned group of `size` blocks; the last may be shorter.
pub fn census(s: &Snapshot<'_>, size: u32) -> Vec<Group> {
    let n = s.num_blocks;
    let starts = (0..n).step_by(size as usize);
    starts
        .map(|first| {
            let range = first..n.min(first + size);
            let of = |bits: &[u64]| count(bits, range.clone());
            let (empty, cached) = (of(s.empty), of(s.cached));
            let (movable, soon) = (of(s.movable), of(s.soon));
            Group {
                movable,
                soon,
                empty,
                available: empty + cached,
                stuck: range.len() as u32 - empty - cached - movable - soon,
            }
        })
        .collect()
}

/// Moves that empty groups.
#[derive(Clone, Debug, PartialEq)]
pub struct Emptied {
    /// The moves, `[source, destination]`, group by group, the cheapest first.
    pub pairs: Vec<[u32; 2]>,
    /// Moves still to make after these.
    pub remaining: u32,
    /// Groups that are free once these are done, those that are free now among them.
    pub free: u32,
}

/// The pool while a plan is being made: what is taken for one part of it is gone for the next.
pub struct Picture<'a> {
    s: Snapshot<'a>,
    size: u32,
    /// log2 of the middle page size.
    align: u32,
    pub(super) groups: Vec<Group>,
    empty: Vec<u64>,
    movable: Vec<u64>,
    /// Groups with live blocks that have empty ones, the fullest first; those that are being emptied
    /// are not among them.
    targets: Vec<u32>,
    /// Of each group: no longer run of empty blocks is in it.
    longest: Vec<u32>,
    taken: Vec<u64>,
    emptying: Vec<bool>,
    /// The last group, if it is a short one, may be filled even if nothing lies in it: it never counts
    /// as free.
    opens_short: bool,
}

impl<'a> Picture<'a> {
    /// The pool in groups of `size` blocks; `align` is log2 of the page that pieces are kept aligned
    /// to.
    pub fn new(s: Snapshot<'a>, size: u32, align: u32) -> Self {
        let groups = census(&s, size);
        let words = s.num_blocks.div_ceil(64) as usize;
        Picture {
            size,
            align,
            empty: s.empty[..words].to_vec(),
            movable: s.movable[..words].to_vec(),
            targets: Vec::new(),
            longest: groups.iter().map(|group| group.empty).collect(),
            taken: Vec::new(),
            emptying: vec![false; groups.len()],
            opens_short: true,
            groups,
            s,
        }
    }

    /// Nothing may be moved into the group: it is being emptied, or is free and stays so.
    fn is_closed(&self, group: usize) -> bool {
        let short = self.opens_short && group as u32 == self.complete();
        self.emptying[group] || self.groups[group].is_free() && !short
    }

    /// Complete groups.
    fn complete(&self) -> u32 {
        self.s.num_blocks / self.size
    }

    /// Available blocks.
    pub fn available(&self) -> u32 {
        self.groups.iter().map(|group| group.available).sum()
    }

    /// Complete groups that are free.
    pub fn free(&self) -> u32 {
        let complete = &self.groups[..self.complete() as usize];
        complete.iter().filter(|group| group.is_free()).count() as u32
    }

    /// Moves that make `k` groups free, those that are free now among them; at most `max_moves` now.
    /// `lru` yields cached blocks, the least recently used first.
    ///
    /// # Errors
    /// [`Impossible`] when no number of moves does: too few blocks are available, or stuck ones lie in
    /// too many groups.
    pub fn empty_groups(
        &mut self,
        k: u32,
        max_moves: u32,
        lru: Lru<'_>,
    ) -> Result<Emptied, Impossible> {
        let available = self.available();
        let need = k.saturating_mul(self.size);
        if available < need {
            return Err(Impossible::TooFewAvailable { need, available });
        }
        let mut order: Vec<u32> = (0..self.complete())
            .filter(|&group| self.groups[group as usize].can_be_emptied())
            .collect();
        if (order.len() as u32) < k {
            return Err(Impossible::TooFewGroups {
                need: k,
                movable: order.len() as u32,
                size: self.size,
            });
        }
        self.cheapest(&mut order, k as usize);
        Ok(self.evacuate(&order, max_moves, lru))
    }

    /// Moves towards `k` free groups, of which only those with at most `most` live blocks are emptied.
    pub fn empty_at_most(&mut self, k: u32, most: u32, max_moves: u32, lru: Lru<'_>) -> Emptied {
        let mut order: Vec<u32> = (0..self.complete())
            .filter(|&group| {
                let group = &self.groups[group as usize];
                group.can_be_emptied() && group.movable <= most
            })
            .collect();
        let k = (k as usize).min(order.len());
        self.cheapest(&mut order, k);
        self.evacuate(&order, max_moves, lru)
    }

    /// Leaves the `k` groups with the fewest live blocks, cheapest first, the lowest on ties.
    fn cheapest(&self, order: &mut Vec<u32>, k: usize) {
        let cost = |group: &u32| {
            let it = &self.groups[*group as usize];
            (it.movable, it.soon, *group)
        };
        if k < order.len() {
            order.select_nth_unstable_by_key(k, cost);
            order.truncate(k);
        }
        order.sort_unstable_by_key(cost);
    }

    /// Empties groups in this order.
    fn evacuate(&mut self, order: &[u32], max_moves: u32, lru: Lru<'_>) -> Emptied {
        for &group in order {
            self.emptying[group as usize] = true;
        }
        self.sort_targets();
        let mut pairs = Vec::new();
        let mut remaining = 0;
        let mut stop = false;
        for &group in order {
            let first = group * self.size;
            let range = first..self.s.num_blocks.min(first + self.size);
            let mut at = range.start;
            let live = self.groups[group as usize].movable;
            let before = pairs.len() as u32;
            while !stop && let Some(piece) = next_run(&self.movable, at..range.end) {
                let left = max_moves - pairs.len() as u32;
                let mut piece = piece;
                if piece.len() as u32 > left {
                    piece.end = piece.start + self.cut(piece.start, left);
                }
                if piece.is_empty() || !self.move_piece(piece.clone(), &mut pairs, lru) {
                    stop = true;
                }
                at = piece.end;
            }
            let moved = pairs.len() as u32 - before;
            remaining += live - moved;
            let it = &mut self.groups[group as usize];
            it.movable -= moved;
            it.available += moved;
        }
        for &[source, _] in &pairs {
            clear(&mut self.movable, source);
        }
        Emptied {
            pairs,
            remaining,
            free: self.free(),
        }
    }

    /// At most `most` blocks of a piece from `start` on, up to the end of a page if there is one.
    fn cut(&self, start: u32, most: u32) -> u32 {
        let page = 1 << self.align;
        let whole = (start + most) / page * page;
        if whole > start { whole - start } else { most }
    }

    /// Moves consecutive blocks, in one run or in several. `false`: no room is left.
    fn move_piece(&mut self, piece: Range<u32>, pairs: &mut Vec<[u32; 2]>, lru: Lru<'_>) -> bool {
        let n = piece.len() as u32;
        if n == 0 {
            return true;
        }
        if let Some(first) = self.take_run(n, piece.start) {
            pairs.extend(piece.zip(first..first + n).map(|(from, to)| [from, to]));
            return true;
        }
        if n == 1 {
            let Some(block) = self.take_cached(lru) else {
                return false;
            };
            pairs.push([piece.start, block]);
            return true;
        }
        let page = 1 << self.align;
        let half = piece.start + n / 2;
        let at_page = half.next_multiple_of(page);
        let middle = match at_page < piece.end {
            true => at_page,
            false if half / page * page > piece.start => half / page * page,
            false => half,
        };
        self.move_piece(piece.start..middle, pairs, lru)
            && self.move_piece(middle..piece.end, pairs, lru)
    }

    /// Sorts the groups with live blocks that have empty ones, the fullest first.
    pub(super) fn sort_targets(&mut self) {
        let mut targets: Vec<u32> = (0..self.groups.len() as u32)
            .filter(|&at| self.groups[at as usize].empty > 0 && !self.is_closed(at as usize))
            .collect();
        targets.sort_unstable_by_key(|&at| {
            let group = &self.groups[at as usize];
            (group.is_free(), group.available, at)
        });
        targets.reverse();
        self.targets = targets;
    }

    /// Takes a run of `n` empty blocks in the fullest group that has one, at the same place against
    /// pages of middle size as `at` if it can be.
    pub(super) fn take_run(&mut self, n: u32, at: u32) -> Option<u32> {
        let page = 1u32 << self.align;
        let aligned = n >= page || (at % page) + n <= page;
        // Pieces that fill or lie in a page keep their place in it; for others it does not matter.
        if page > 1 && n > 1 && aligned {
            let found = self.find_run(n, page, at % page);
            if found.is_some() {
                return found;
            }
        }
        self.find_run(n, 1, 0)
    }

    /// A group is not to be touched: neither emptied nor counted as free.
    pub(super) fn keep(&mut self, group: u32) {
        self.groups[group as usize].stuck += 1;
    }

    /// Whether a block may move and has not moved in this plan.
    pub(super) fn may_move(&self, block: u32) -> bool {
        is_set(&self.movable, block)
    }

    /// How many empty blocks follow each other from one on, up to `most`, in its group. None in a group
    /// that is free or being emptied.
    pub(super) fn empty_from(&self, first: u32, most: u32) -> u32 {
        let group = first / self.size;
        let end = self.s.num_blocks.min((group + 1).saturating_mul(self.size));
        let end = end.min(first.saturating_add(most));
        if first >= end || self.is_closed(group as usize) {
            return 0;
        }
        next_run(&self.empty, first..end).map_or(0, |run| match run.start == first {
            true => run.len() as u32,
            false => 0,
        })
    }

    /// Whether the `n` blocks before one are empty.
    pub(super) fn empty_before(&self, block: u32, n: u32) -> bool {
        block >= n && self.empty_from(block - n, n) == n
    }

    /// Takes note of moves that were planned elsewhere: destinations are not empty any more, and
    /// sources do not move again.
    pub(super) fn moved(&mut self, pairs: &[[u32; 2]]) {
        for &[source, destination] in pairs {
            clear(&mut self.movable, source);
            let from = &mut self.groups[(source / self.size) as usize];
            from.movable -= 1;
            from.available += 1;
            if is_set(&self.empty, destination) {
                clear(&mut self.empty, destination);
                self.fill((destination / self.size) as usize, 1);
            }
        }
    }

    /// The lowest free group, all of whose blocks are empty, may be filled. `false`: there is none.
    pub(super) fn open_group(&mut self) -> bool {
        let complete = &self.groups[..self.complete() as usize];
        let whole = |group: &Group| group.is_free() && group.empty == self.size;
        let Some(at) = complete.iter().position(whole) else {
            return false;
        };
        self.longest[at] = self.size;
        // The emptiest of all.
        self.targets.insert(0, at as u32);
        true
    }

    fn find_run(&mut self, n: u32, page: u32, phase: u32) -> Option<u32> {
        // From the back: the fullest.
        for i in (0..self.targets.len()).rev() {
            let group = self.targets[i] as usize;
            if self.longest[group] < n {
                continue;
            }
            let first = group as u32 * self.size;
            let end = self.s.num_blocks.min(first + self.size);
            let mut at = first;
            let mut longest = 0;
            while let Some(run) = next_run(&self.empty, at..end) {
                longest = longest.max(run.len() as u32);
                let shift = phase.wrapping_sub(run.start) & (page - 1);
                let start = run.start + shift;
                if start + n <= run.end {
                    for block in start..start + n {
                        clear(&mut self.empty, block);
                    }
                    self.fill(group, n);
                    if self.groups[group].empty == 0 {
                        self.targets.remove(i);
                    }
                    return Some(start);
                }
                at = run.end;
            }
            self.longest[group] = longest;
        }
        None
    }

    /// The least recently used cached block in a group with live blocks; when none is found soon, any
    /// in the fullest.
    fn take_cached(&mut self, lru: Lru<'_>) -> Option<u32> {
        if self.taken.is_empty() {
            self.taken = vec![0; self.empty.len()];
        }
        let found = lru.take(LOOKS).find(|&block| self.may_evict(block));
        let found = found.or_else(|| {
            let open = |at: &usize| !self.is_closed(*at);
            let mut groups: Vec<usize> = (0..self.groups.len()).filter(open).collect();
            groups.sort_unstable_by_key(|&at| self.groups[at].available);
            let all = groups.iter().flat_map(|&at| {
                let first = at as u32 * self.size;
                first..self.s.num_blocks.min(first + self.size)
            });
            all.into_iter().find(|&block| self.may_evict(block))
        });
        if let Some(block) = found {
            set(&mut self.taken, block);
            let group = &mut self.groups[(block / self.size) as usize];
            group.available -= 1;
            group.movable += 1;
        }
        found
    }

    fn may_evict(&self, block: u32) -> bool {
        let group = (block / self.size) as usize;
        block < self.s.num_blocks
            && is_set(self.s.cached, block)
            && !is_set(&self.taken, block)
            && !self.is_closed(group)
    }

    fn fill(&mut self, group: usize, n: u32) {
        let it = &mut self.groups[group];
        it.empty -= n;
        it.available -= n;
        it.movable += n;
    }
}

/// The first run of set bits in a range.
fn next_run(words: &[u64], range: Range<u32>) -> Option<Range<u32>> {
    let mut at = range.start;
    while at < range.end {
        let word = words[(at / 64) as usize] >> (at % 64);
        if word == 0 {
            at = (at / 64 + 1) * 64;
            continue;
        }
        let start = at + word.trailing_zeros();
        if start >= range.end {
            return None;
        }
        let mut end = start;
        loop {
            let ones = (words[(end / 64) as usize] >> (end % 64)).trailing_ones();
            let room = 64 - end % 64;
            end += ones.min(room);
            if ones < room || end >= range.end {
                return Some(start..end.min(range.end));
            }
        }
    }
    None
}

/// What the guarantee asks for now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Blocks that are neither empty nor evictable.
    pub live: u32,
    /// Windows with at least one of them.
    pub windows: u32,
    /// Windows that the bound allows: `live / 512 + 1 + slack`, one more if the last window is short.
    pub allowed: u32,
    /// Moves that bring `windows` down to `allowed`, as far as moves can.
    pub owed: u32,
    /// Windows above the bound that moves cannot empty: what lies in them may not move.
    pub immovable: u32,
}

impl Picture<'_> {
    /// How the windows that are held stand against the bound of the guarantee.
    ///
    /// The bound: H windows held, L live blocks, windows of W: `H <= L / W + 1 + slack`.
    pub fn held(&self, slack: u32) -> Held {
        let (mut live, mut windows) = (0, 0u32);
        let mut costs = Vec::new();
        for group in &self.groups {
            let here = group.movable + group.stuck + group.soon;
            live += here;
            if here > 0 {
                windows += 1;
                if group.can_be_emptied() {
                    costs.push(group.movable);
                }
            }
        }
        // The last window may be a short one, which holds less than the others.
        let short = u32::from(!self.s.num_blocks.is_multiple_of(self.size));
        let allowed = live / self.size + 1 + short + slack;
        let excess = windows.saturating_sub(allowed) as usize;
        let mut owed = 0;
        if excess > 0 {
            let n = excess.min(costs.len());
            if n < costs.len() {
                costs.select_nth_unstable(n);
            }
            owed = costs[..n].iter().sum();
        }
        Held {
            live,
            windows,
            allowed,
            owed,
            immovable: excess.saturating_sub(costs.len()) as u32,
        }
    }

    /// The moves that are owed to the guarantee, at most `max_moves` now.
    pub fn keep_guarantee(&mut self, slack: u32, max_moves: u32, lru: Lru<'_>) -> Emptied {
        // A short window counts as held like any.
        self.opens_short = false;
        let held = self.held(slack);
        let excess = held.windows.saturating_sub(held.allowed);
        let mut order: Vec<u32> = (0..self.groups.len() as u32)
            .filter(|&at| {
                let group = &self.groups[at as usize];
                !group.is_free() && group.can_be_emptied()
            })
            .collect();
        let k = (excess as usize).min(order.len());
        self.cheapest(&mut order, k);
        self.evacuate(&order, max_moves, lru)
    }
}
