//! `open`: a new sequence for a prompt, all of its blocks at once. And the questions before it.

use super::place::{Part, REGION, is_huge_page};
use crate::config::PageOrders;
use crate::error::{Error, Result};
use crate::pool::{Placement, Zone};
use crate::prefix::Keys;
use crate::state::{Mmu, NONE, Sequence, Shared, id, runs_behind};
use crate::stats::count;

/// How [`Mmu::open_with`] places a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opening {
    /// Where its new blocks should lie.
    pub zone: Zone,
    /// Page sizes that the sequence may use, whatever its length; `None`: those that its length
    /// allows.
    pub page_orders: Option<PageOrders>,
    /// Refuse the prompt unless each complete region of 512 blocks is a huge page. Only whole huge
    /// pages of a cached prefix are used then.
    pub require_huge: bool,
    /// Refuse the prompt unless its first tokens, so many or all, lie in one run of blocks.
    pub contiguous: u32,
}

impl Default for Opening {
    fn default() -> Self {
        Self {
            zone: Zone::Body,
            page_orders: None,
            require_huge: false,
            contiguous: 0,
        }
    }
}

/// Whether [`Mmu::open`] would succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// At once.
    Now,
    /// After moves.
    Moves,
    /// When others have released enough.
    Frees,
    /// When blocks that were given back are in the pool again.
    Grows,
    /// Never: larger than the pool or a limit.
    Never,
}

/// What is missing for a required shape although enough blocks are available.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Shape {
    /// Free windows of 512 blocks.
    pub windows: u32,
    /// Blocks in one run.
    pub run: u32,
}

/// Answer of [`Mmu::quote`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quote {
    /// What moves would have to make; see [`Mmu::with_moves`].
    pub shape: Shape,
    /// When `open` would succeed.
    pub when: When,
    /// Moves that it takes first.
    pub moves: u32,
    /// Blocks to claim beside the cached ones.
    pub needed: u32,
    /// Blocks that are empty or could be evicted for it.
    pub available: u32,
    /// Tokens found cached.
    pub num_cached_tokens: u32,
}

impl Mmu {
    /// Opens a sequence for a prompt and claims all of its blocks, or fails and changes nothing.
    ///
    /// The longest cached prefix of full blocks is mapped; at least the last token is left to
    /// compute. Returns the id of the sequence.
    pub fn open(&self, tokens: &[i32], keys: Keys) -> Result<i64> {
        self.open_with(tokens, keys, Opening::default())
    }

    /// As [`Mmu::open`], with a preference where the new blocks lie: [`Zone::Anchor`] for a prompt
    /// that is expected to be shared and to stay, like a system prompt.
    pub fn open_in(&self, zone: Zone, tokens: &[i32], keys: Keys) -> Result<i64> {
        let opening = Opening {
            zone,
            ..Opening::default()
        };
        self.open_with(tokens, keys, opening)
    }

    /// As [`Mmu::open`], placed as the caller wants it. [`Error::Fragmented`] when the shape that
    /// was asked for is not to be had.
    pub fn open_with(&self, tokens: &[i32], keys: Keys, opening: Opening) -> Result<i64> {
        let _gate = self.enter();
        let blocks = self.checked_blocks(0, tokens.len())?;
        self.check_orders(opening.page_orders)?;
        let (slot, mut sequence) = self.take_slot()?;
        let regions = if opening.require_huge {
            blocks / REGION
        } else {
            0
        };
        let contiguous = self.blocks_for(opening.contiguous).min(blocks);
        let opened = self.fill(slot, &mut sequence, blocks, tokens, keys, opening);
        let id = id(sequence.generation, slot);
        match opened {
            Ok(()) => {
                self.wishes.granted(regions, contiguous);
                Ok(id)
            }
            Err(error) => {
                self.give_slot(slot, sequence);
                if matches!(error, Error::Fragmented { .. }) {
                    self.wishes.want(regions, contiguous);
                }
                Err(error)
            }
        }
    }

    fn check_orders(&self, orders: Option<PageOrders>) -> Result<()> {
        let Some(orders) = orders else { return Ok(()) };
        let pool = self.config.page_orders;
        if let Some(order) = orders.iter().find(|&order| pool.bits() >> order & 1 == 0) {
            return Err(Error::InvalidConfig(format!(
                "page order {order} of a sequence: the pool has {:?}",
                pool.iter().collect::<Vec<_>>()
            )));
        }
        Ok(())
    }

    /// Blocks of a sequence that grows from `tokens` by `more`, if it may.
    pub(super) fn checked_blocks(&self, tokens: u32, more: usize) -> Result<u32> {
        let total = u64::from(tokens) + more as u64;
        let needed = total.div_ceil(u64::from(self.config.block_size));
        let limit = u64::from(self.config.max_blocks_per_sequence);
        if needed > limit {
            return Err(Error::LimitExceeded {
                what: "blocks of one sequence",
                needed,
                limit,
            });
        }
        Ok(needed as u32)
    }

    fn fill(
        &self,
        slot: u32,
        sequence: &mut Sequence,
        blocks: u32,
        tokens: &[i32],
        keys: Keys,
        opening: Opening,
    ) -> Result<()> {
        let mut shared = self.shared();
        let limit = self.matchable(tokens.len());
        let contiguous = self.blocks_for(opening.contiguous).min(blocks);
        let strict = opening.require_huge || contiguous > 0;
        let matched = self.matched_blocks(&mut shared, tokens, &keys, limit);
        let orders = (opening.page_orders).map(PageOrders::bits);
        let allowed = self.allowed_orders(tokens.len(), opening);
        let matched = usable(matched, contiguous, opening.require_huge, allowed);
        let start = matched.len() as u32;
        let offset = match opening.require_huge {
            true => 0,
            false => self.offset(&matched, blocks, allowed),
        };
        let mut space = self.table.shift(sequence.space, offset);
        if offset > 0 && self.table.reserve(space, 0, blocks, true).is_err() {
            // One table less may do.
            space = self.table.shift(space, 0);
        }
        sequence.space = space;
        sequence.orders = orders;
        let part = Part {
            at: space.virtual_of(start),
            n: blocks - start,
            orders: allowed,
            zone: opening.zone,
            contiguous: run_wanted(contiguous, start, blocks, opening.require_huge),
            huge: opening.require_huge,
        };
        if let Err(error) = self.check_room(&shared, part, &matched) {
            self.table.trim(space, 0, blocks, true);
            return Err(error);
        }
        self.table.reserve(space, 0, blocks, true)?;

        // Should it fail, what waits for a step now waits for it again.
        let waits = |&block: &u32| shared.cools_for(block);
        let waiting: Vec<Option<u64>> = match strict {
            true => matched.iter().map(waits).collect(),
            false => Vec::new(),
        };
        // Referenced before anything is evicted for it.
        for run in runs(&matched) {
            self.retain_range(&mut shared, run);
        }
        if part.regions() > 0 && self.takes_windows(part) {
            self.make_windows(&mut shared, part.regions());
        }
        self.make_room(&mut shared, part);
        if self.config.guarantee.is_some() {
            self.make_held_room(&mut shared, part.n - part.regions() * REGION);
        }
        self.make_run(&mut shared, part.contiguous);
        let mut fresh = Vec::with_capacity(part.n as usize);
        let placed = self.reserve(&shared, part.n, 0).and_then(|reserved| {
            let mut claim = self.complete(reserved, Some(&mut shared));
            let placed = self.place(&mut claim, part, strict, &mut fresh);
            placed.map_err(|missing| {
                self.give_up(claim);
                self.pool.refusal(missing.run)
            })
        });
        if let Err(error) = placed {
            let mut empty = Vec::new();
            let fence = self.steps().fence();
            for (index, &block) in matched.iter().enumerate().rev() {
                // (One that was not asked for a shape lost a race: all wait for the newest step.)
                let fence = waiting.get(index).copied().unwrap_or(fence);
                self.release(&mut shared, fence, block, &mut empty);
            }
            debug_assert!(empty.is_empty(), "matched blocks are published");
            self.table.trim(space, 0, blocks, true);
            return Err(error);
        }
        self.map_shared(&mut shared, sequence, 0, &matched, allowed);
        shared.index.used(&matched);
        drop(shared);

        self.map_private(sequence, start, &fresh, allowed);
        if self.config.prefix_caching {
            let chunks = tokens
                .chunks(self.config.block_size as usize)
                .skip(matched.len());
            for (&block, tokens) in fresh.iter().zip(chunks) {
                self.tokens.store(block, 0, tokens);
            }
        }
        if let Some(&last) = fresh.last() {
            self.hold_behind(slot, last);
        }
        sequence.tokens = tokens.len() as u32;
        sequence.cached = start * self.config.block_size;
        sequence.scheduled = sequence.cached;
        sequence.written = sequence.cached;
        sequence.published = start;
        let keyed = !keys.salt.is_empty() || !keys.extra.is_empty();
        sequence.keys = keyed.then(|| Box::new(keys));
        count(&self.stats.opened, 1);
        count(&self.stats.prefix_queried_blocks, limit);
        count(&self.stats.prefix_hit_blocks, matched.len());
        Ok(())
    }

    /// Page orders that a prompt of so many tokens may use, a bit for each.
    fn allowed_orders(&self, tokens: usize, opening: Opening) -> u32 {
        if let Some(orders) = opening.page_orders {
            return orders.bits();
        }
        let allowed = self.orders_for(tokens as u32);
        match opening.require_huge {
            // Asked for, so the length does not matter.
            true => allowed | self.config.page_orders.bits() & 1 << 9,
            false => allowed,
        }
    }

    /// Refuses what cannot be, before anything changes. `matched`: what of the cache stays.
    fn check_room(&self, shared: &Shared, part: Part, matched: &[u32]) -> Result<()> {
        let reserved = self.reserve(shared, part.n, self.evictable_among(matched))?;
        self.unreserve(reserved);
        if !self.has_shape(part, matched) {
            let regions = if part.huge {
                part.complete_regions()
            } else {
                0
            };
            // There are enough, cached ones that would be evicted among them: the shape is missing.
            return Err(Error::Fragmented {
                needed: u64::from((regions * REGION).max(part.contiguous)),
                largest_run: u64::from(self.pool.runs().largest),
                available: u64::from(self.available_beside(matched)),
                num_blocks: u64::from(self.online()),
            });
        }
        Ok(())
    }

    /// Blocks that are empty or may be evicted, when these stay.
    fn available_beside(&self, matched: &[u32]) -> u32 {
        let available = self.pool.empty() + self.holds.total() + self.pool.num_evictable();
        available - self.evictable_among(matched)
    }

    /// Whether the shape that a part requires is to be had now, if its blocks are.
    fn has_shape(&self, part: Part, matched: &[u32]) -> bool {
        let regions = part.complete_regions();
        if part.huge && regions > 0 {
            // Pages of the cached prefix lie in windows that are idle now, and soon not.
            let is_idle = |page: &&[u32]| page.iter().all(|&block| self.pool.is_evictable(block));
            let taken = matched
                .chunks_exact(REGION as usize)
                .filter(is_idle)
                .count() as u32;
            let idle = self.pool.idle_windows().len() as u32 + self.windows_of_holds();
            if part.orders >> 9 & 1 == 0 || idle < regions + taken {
                return false;
            }
        }
        part.contiguous <= 1 || self.run_to_make(part.contiguous).is_some()
    }

    /// Whether no pool of this kind, however empty, has room for a prompt in the shape required.
    fn is_impossible(&self, part: Part, blocks: u32) -> bool {
        let regions = if part.huge { blocks / REGION } else { 0 };
        if regions == 0 && part.contiguous <= 1 {
            return false;
        }
        let null = self.config.null_block;
        let span = self.config.span();
        let spoilt = null < span / REGION * REGION;
        let windows = span / REGION - u32::from(spoilt);
        let longest = match null < span {
            true => null.max(span - 1 - null),
            false => span,
        };
        self.config.placement != Placement::AddressOrder && part.contiguous > 1
            || regions > 0 && part.orders >> 9 & 1 == 0
            || regions > windows
            || part.contiguous > longest
    }

    /// Virtual block of the first logical one. A sequence takes the alignment of the last page of
    /// its cached prefix that it can map as a whole, for the largest order that has one; else its
    /// own part begins aligned, if it is long enough for a page of that order.
    fn offset(&self, matched: &[u32], blocks: u32, orders: u32) -> u32 {
        let own = blocks - matched.len() as u32;
        for order in (1..10).rev().filter(|&order| orders >> order & 1 != 0) {
            let size = 1 << order;
            if size - 1 > self.config.most_shift() {
                continue;
            }
            let mut at = 0;
            let mut donor = None;
            for run in runs(matched) {
                if run.start.next_multiple_of(size) + size <= run.end {
                    donor = Some(run.start.wrapping_sub(at) & (size - 1));
                }
                at += run.len() as u32;
            }
            let aligned = (own >= size).then(|| (matched.len() as u32).wrapping_neg() & (size - 1));
            if let Some(offset) = donor.or(aligned) {
                return offset;
            }
        }
        0
    }

    /// Full blocks of a prompt that may come from the cache: the last token is always computed.
    fn matchable(&self, tokens: usize) -> usize {
        tokens.saturating_sub(1) / self.config.block_size as usize
    }

    fn matched_blocks(
        &self,
        shared: &mut Shared,
        tokens: &[i32],
        keys: &Keys,
        limit: usize,
    ) -> Vec<u32> {
        let mut blocks = shared.index.walk(&self.tokens, tokens, keys, limit);
        let full = blocks
            .iter()
            .position(|&block| self.pool.word(block).retained().is_none());
        blocks.truncate(full.unwrap_or(blocks.len()));
        blocks
    }

    fn evictable_among(&self, blocks: &[u32]) -> u32 {
        blocks
            .iter()
            .filter(|&&block| self.pool.is_evictable(block))
            .count() as u32
    }

    /// Tokens of this prompt that `open` would find cached. Changes nothing.
    pub fn matched_tokens(&self, tokens: &[i32], keys: &Keys) -> u32 {
        let _gate = self.enter();
        let limit = self.matchable(tokens.len());
        let matched = self.matched_blocks(&mut self.shared(), tokens, keys, limit);
        matched.len() as u32 * self.config.block_size
    }

    /// Says whether `open` would succeed, without changing anything.
    pub fn quote(&self, tokens: &[i32], keys: &Keys) -> Quote {
        let quote = self.quote_with(tokens, keys, Opening::default());
        quote.expect("no orders were asked for")
    }

    /// Says whether `open_with` would succeed, without changing anything. A run of more than a huge
    /// page whose regions must be huge pages too is quoted as [`When::Frees`], be it there or not.
    pub fn quote_with(&self, tokens: &[i32], keys: &Keys, opening: Opening) -> Result<Quote> {
        let _gate = self.enter();
        self.check_orders(opening.page_orders)?;
        let mut shared = self.shared();
        let limit = self.matchable(tokens.len());
        let total = tokens.len().div_ceil(self.config.block_size as usize);
        let blocks = u32::try_from(total).unwrap_or(u32::MAX);
        let huge = opening.require_huge;
        let contiguous = self.blocks_for(opening.contiguous).min(blocks);
        let matched = self.matched_blocks(&mut shared, tokens, keys, limit);
        let allowed = self.allowed_orders(tokens.len(), opening);
        let matched = usable(matched, contiguous, huge, allowed);
        let needed = total - matched.len();
        let available = self.available_beside(&matched);
        let start = matched.len() as u32;
        let part = Part {
            at: start, // as it is where huge pages are required
            n: blocks - start,
            orders: allowed,
            zone: opening.zone,
            contiguous: run_wanted(contiguous, start, blocks, huge),
            huge,
        };
        let never = total > self.config.max_blocks_per_sequence as usize
            || !self.table.could_hold(blocks)
            || self.is_impossible(part, blocks);
        let mut shape = Shape::default();
        let when = if never {
            When::Never
        } else if total > self.online() as usize {
            When::Grows
        } else if needed > available as usize || !self.has_room(blocks) {
            When::Frees
        } else if huge && part.contiguous > REGION
            || (huge || part.contiguous > 1) && !self.has_shape(part, &matched)
        {
            shape = match (huge, part.contiguous) {
                (true, 0) => Shape {
                    windows: part.complete_regions(),
                    run: 0,
                },
                (false, run) => Shape { windows: 0, run },
                // Both at once: no plan makes that.
                (true, _) => Shape::default(),
            };
            When::Frees
        } else {
            When::Now
        };
        Ok(Quote {
            when,
            shape,
            moves: 0,
            needed: u32::try_from(needed).unwrap_or(u32::MAX),
            available,
            num_cached_tokens: start * self.config.block_size,
        })
    }
}

/// What of a cached prefix serves a prompt whose first blocks, so many, must be one run, and whose
/// regions must be huge pages. `orders`: a bit for each page order that it may use; without huge ones
/// no part of the cache is what it requires, however it lies.
fn usable(mut matched: Vec<u32>, contiguous: u32, huge: bool, orders: u32) -> Vec<u32> {
    let contiguous = contiguous as usize;
    if contiguous > matched.len() || runs_behind(NONE, &matched[..contiguous]) > 1 {
        matched.clear();
    }
    if huge {
        let pages = match orders >> 9 & 1 {
            0 => 0,
            _ => whole_pages(&matched),
        };
        matched.truncate(pages);
    }
    matched
}

/// Blocks at the start of what a prompt claims that must be one run.
fn run_wanted(contiguous: u32, start: u32, blocks: u32, huge: bool) -> u32 {
    match start {
        // The first huge page is such a run.
        0 if huge && contiguous <= REGION && blocks >= REGION => 0,
        0 => contiguous,
        _ => 0,
    }
}

/// The runs of consecutive blocks.
fn runs(blocks: &[u32]) -> impl Iterator<Item = std::ops::Range<u32>> + '_ {
    blocks
        .chunk_by(|&a, &b| a + 1 == b)
        .map(|run| run[0]..run[0] + run.len() as u32)
}

/// How many of the first blocks are whole huge pages.
fn whole_pages(blocks: &[u32]) -> usize {
    let pages = blocks.chunks_exact(REGION as usize);
    REGION as usize * pages.take_while(|page| is_huge_page(page)).count()
}
