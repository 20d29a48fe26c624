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

/// How many groups a pass tries to empty in which pieces do not fit elsewhere.
const TRIES: u32 = 16;
/// How many cached blocks are looked at for each destination that is wanted.
const LOOKS: usize = 16;

/// What planning asks beside the picture.
pub struct Lore<'a> {
    /// Cached blocks, the least recently used first.
    pub lru: &'a mut dyn Iterator<Item = u32>,
    /// Who maps blocks next to what.
    pub neighbours: &'a dyn Neighbours,
}

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
    let groups = starts.map(|first| first..n.min(first + size));
    if size.is_multiple_of(64) {
        let words =
            |group: Range<u32>| (group.start / 64) as usize..group.end.div_ceil(64) as usize;
        groups
            .map(|group| words_of_group(s, words(group.clone()), group.len() as u32))
            .collect()
    } else {
        groups.map(|group| bits_of_group(s, group)).collect()
    }
}

/// A group of whole words, of which the last may reach beyond the pool. Only bits that are there are
/// counted, and blocks in use are what is left.
fn words_of_group(s: &Snapshot<'_>, words: Range<usize>, len: u32) -> Group {
    let mut group = Group::default();
    let mut cached = 0;
    for at in words {
        let (e, c, m, soon) = (s.empty[at], s.cached[at], s.movable[at], s.soon[at]);
        let beyond = (64 * (at as u32 + 1)).saturating_sub(s.num_blocks);
        let here = u64::MAX >> beyond;
        let ones = |bits: u64| if bits == 0 { 0 } else { bits.count_ones() };
        group.empty += ones(e & here);
        cached += ones(c & here);
        group.soon += ones(soon & here);
        group.stuck += ones(!(e | c | m | soon) & here);
    }
    group.available = group.empty + cached;
    group.movable = len - group.available - group.soon - group.stuck;
    group
}

fn bits_of_group(s: &Snapshot<'_>, range: Range<u32>) -> Group {
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
}

/// What is known of the blocks that lie together: who maps them next to what.
pub trait Neighbours {
    /// Of the `most` consecutive blocks from one on: those that belong together.
    fn run(&self, block: u32, most: u32) -> Together;
}

/// The first blocks of a run that belong to one sequence, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Together {
    /// How many.
    pub len: u32,
    /// The block that the sequence has before them.
    pub before: Option<u32>,
    /// Empty blocks that are wanted behind them, for a sequence that ends here and grows.
    pub spare: u32,
}

/// Nothing is known: consecutive blocks belong together.
impl Neighbours for () {
    fn run(&self, _block: u32, most: u32) -> Together {
        Together {
            len: most,
            before: None,
            spare: 0,
        }
    }
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
    /// Groups that something moves to.
    received: Vec<bool>,
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
            received: vec![false; groups.len()],
            groups,
            s,
        }
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
    ///
    /// # Errors
    /// [`Impossible`] when no number of moves does: too few blocks are available, or stuck ones lie in
    /// too many groups.
    pub fn empty_groups(
        &mut self,
        k: u32,
        max_moves: u32,
        lore: &mut Lore<'_>,
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
        Ok(self.evacuate(&order, max_moves, 1, lore))
    }

    /// Moves towards `k` free groups, of which only those with at most `most` live blocks are emptied,
    /// and only as far as what belongs together stays in pieces of at least `finest` blocks.
    pub fn empty_at_most(
        &mut self,
        k: u32,
        (most, finest): (u32, u32),
        max_moves: u32,
        lore: &mut Lore<'_>,
    ) -> Emptied {
        let mut order: Vec<u32> = (0..self.complete())
            .filter(|&group| {
                let group = &self.groups[group as usize];
                group.can_be_emptied() && group.movable <= most
            })
            .collect();
        let k = (k as usize).min(order.len());
        self.cheapest(&mut order, k);
        // Pieces may go to groups whose turn comes later, if they find room as a whole nowhere else: two
        // half empty ones become one.
        let mut all = Emptied {
            pairs: Vec::new(),
            remaining: 0,
            free: 0,
        };
        let mut tries = TRIES;
        for group in order {
            let left = max_moves - all.pairs.len() as u32;
            tries = tries.saturating_sub(1);
            if left == 0 || tries == 0 || self.received[group as usize] {
                all.remaining += self.groups[group as usize].movable;
                continue;
            }
            let emptied = self.evacuate(&[group], left, finest, lore);
            all.pairs.extend(emptied.pairs);
            all.remaining += emptied.remaining;
        }
        all.free = self.free();
        all
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
    fn evacuate(
        &mut self,
        order: &[u32],
        max_moves: u32,
        finest: u32,
        lore: &mut Lore<'_>,
    ) -> Emptied {
        for &group in order {
            self.emptying[group as usize] = true;
        }
        self.sort_targets();
        let mut pairs = Vec::new();
        let mut remaining = 0;
        let mut stop = false;
        for &group in order {
            let live = self.groups[group as usize].movable;
            let before = pairs.len();
            let pieces = match stop {
                true => Vec::new(),
                false => self.pieces(group, lore),
            };
            for (start, together) in pieces {
                let left = max_moves - pairs.len() as u32;
                let n = match together.len > left {
                    true => self.cut(start, left),
                    false => together.len,
                };
                stop =
                    n == 0 || !self.move_run(start..start + n, together, finest, &mut pairs, lore);
                if stop {
                    break;
                }
            }
            let moved = (pairs.len() - before) as u32;
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

    /// What lies in a group, in pieces that belong together, the longest first: it is the hardest to
    /// find room for.
    fn pieces(&self, group: u32, lore: &Lore<'_>) -> Vec<(u32, Together)> {
        let first = group * self.size;
        let end = self.s.num_blocks.min(first + self.size);
        let mut pieces = Vec::new();
        let mut at = first;
        while let Some(run) = next_run(&self.movable, at..end) {
            // What is one block need not be kept together.
            let together = match run.len() as u32 {
                1 => ().run(run.start, 1),
                most => lore.neighbours.run(run.start, most),
            };
            pieces.push((run.start, together));
            at = run.start + together.len;
        }
        pieces.sort_by_key(|(_, together)| std::cmp::Reverse(together.len));
        pieces
    }

    /// Moves what lies in a range elsewhere, from its start on, at most `max_moves` blocks.
    pub(super) fn clear(
        &mut self,
        range: Range<u32>,
        max_moves: u32,
        lore: &mut Lore<'_>,
    ) -> Vec<[u32; 2]> {
        for block in range.clone().filter(|&block| is_set(self.s.empty, block)) {
            if is_set(&self.empty, block) {
                // Nothing goes there.
                clear(&mut self.empty, block);
                self.groups[(block / self.size) as usize].empty -= 1;
            }
        }
        self.sort_targets();
        let mut pairs = Vec::new();
        let mut at = range.start;
        while let Some(run) = next_run(&self.movable, at..range.end) {
            let left = max_moves - pairs.len() as u32;
            let together = lore.neighbours.run(run.start, run.len() as u32);
            let n = together.len.min(left);
            if n == 0 || !self.move_run(run.start..run.start + n, together, 1, &mut pairs, lore) {
                break;
            }
            at = run.start + n;
        }
        pairs
    }

    /// Whether a block is stuck: neither available, nor empty soon, nor movable.
    pub(super) fn is_stuck(&self, block: u32) -> bool {
        let sets = [self.s.empty, self.s.cached, self.s.movable, self.s.soon];
        block >= self.s.num_blocks || !sets.iter().any(|set| is_set(set, block))
    }

    /// At most `most` blocks of a piece from `start` on, up to the end of a page if there is one.
    fn cut(&self, start: u32, most: u32) -> u32 {
        let page = 1 << self.align;
        let whole = (start + most) / page * page;
        if whole > start { whole - start } else { most }
    }

    /// Moves what belongs together, or the first part of it: behind what comes before it, or to a run in
    /// which all of it has room.
    fn move_run(
        &mut self,
        piece: Range<u32>,
        together: Together,
        finest: u32,
        pairs: &mut Vec<[u32; 2]>,
        lore: &mut Lore<'_>,
    ) -> bool {
        let n = piece.len() as u32;
        let behind = together.before.map(|before| before + 1);
        let behind = behind.filter(|&first| self.empty_from(first, n) == n);
        let whole = together.len + together.spare;
        let found = match behind {
            Some(first) => {
                self.take(first, n);
                Some(first)
            }
            // What does not fit as a whole goes where much of it does.
            None => [whole, together.len, together.len / 2, together.len / 4]
                .into_iter()
                .filter(|&room| room > n)
                .find_map(|room| self.take_part(room, n, piece.start)),
        };
        match found {
            Some(first) => {
                pairs.extend(piece.zip(first..).map(|(from, to)| [from, to]));
                true
            }
            None => {
                let before = pairs.len();
                let done = self.move_piece(piece, finest, pairs, lore);
                if !done && finest > 1 {
                    // All or nothing, where pieces are to stay whole.
                    pairs.drain(before..).for_each(|[_, to]| self.put_back(to));
                }
                done
            }
        }
    }

    fn put_back(&mut self, block: u32) {
        let group = (block / self.size) as usize;
        let it = &mut self.groups[group];
        it.movable -= 1;
        it.available += 1;
        if is_set(self.s.empty, block) {
            set(&mut self.empty, block);
            it.empty += 1;
            self.longest[group] = it.empty;
        } else {
            clear(&mut self.taken, block);
        }
    }

    /// Moves consecutive blocks, in one run or in several of at least `finest` blocks. `false`: no room
    /// is left.
    fn move_piece(
        &mut self,
        piece: Range<u32>,
        finest: u32,
        pairs: &mut Vec<[u32; 2]>,
        lore: &mut Lore<'_>,
    ) -> bool {
        let n = piece.len() as u32;
        if n == 0 {
            return true;
        }
        if let Some(first) = self.take_run(n, piece.start) {
            pairs.extend(piece.zip(first..first + n).map(|(from, to)| [from, to]));
            return true;
        }
        if n < 2 * finest && finest > 1 {
            return false;
        }
        if n == 1 {
            let Some(block) = self.take_cached(lore) else {
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
        self.move_piece(piece.start..middle, finest, pairs, lore)
            && self.move_piece(middle..piece.end, finest, pairs, lore)
    }

    /// Sorts the groups with live blocks that have empty ones, the fullest first.
    pub(super) fn sort_targets(&mut self) {
        let mut targets: Vec<u32> = (0..self.groups.len() as u32)
            .filter(|&at| {
                let group = &self.groups[at as usize];
                group.empty > 0 && !group.is_free() && !self.emptying[at as usize]
            })
            .collect();
        targets.sort_unstable_by_key(|&at| (self.groups[at as usize].available, at));
        targets.reverse();
        self.targets = targets;
    }

    /// Takes a run of `n` empty blocks in the fullest group that has one, at the same place against
    /// pages of middle size as `at` if it can be.
    pub(super) fn take_run(&mut self, n: u32, at: u32) -> Option<u32> {
        self.take_part(n, n, at)
    }

    /// Takes the first `n` of a run of `whole` empty blocks.
    fn take_part(&mut self, whole: u32, n: u32, at: u32) -> Option<u32> {
        let page = 1u32 << self.align;
        let aligned = whole >= page || (at % page) + whole <= page;
        // Pieces that fill or lie in a page keep their place in it; for others it does not matter.
        let mut found = None;
        if page > 1 && whole > 1 && aligned {
            found = self.find_run(whole, page, at % page);
        }
        let first = found.or_else(|| self.find_run(whole, 1, 0))?;
        self.take(first, n);
        Some(first)
    }

    /// These empty blocks are taken.
    fn take(&mut self, first: u32, n: u32) {
        for block in first..first + n {
            clear(&mut self.empty, block);
        }
        self.fill((first / self.size) as usize, n);
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
        if first >= end || self.groups[group as usize].is_free() || self.emptying[group as usize] {
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

    /// The first run of `n` empty blocks in the fullest group that has one.
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
    fn take_cached(&mut self, lore: &mut Lore<'_>) -> Option<u32> {
        if self.taken.is_empty() {
            self.taken = vec![0; self.empty.len()];
        }
        let found = (0..LOOKS)
            .map_while(|_| lore.lru.next())
            .find(|&block| self.may_evict(block));
        let found = found.or_else(|| {
            let held = |at: &usize| !self.emptying[*at] && !self.groups[*at].is_free();
            let mut groups: Vec<usize> = (0..self.groups.len()).filter(held).collect();
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
            && !self.emptying[group]
            && !self.groups[group].is_free()
    }

    fn fill(&mut self, group: usize, n: u32) {
        self.received[group] = true;
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
    pub fn keep_guarantee(&mut self, slack: u32, max_moves: u32, lore: &mut Lore<'_>) -> Emptied {
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
        self.evacuate(&order, max_moves, 1, lore)
    }
}
