//! `validate`: recounts everything and names the first invariant that does not hold.
//!
//! The recount starts from the page table alone and compares every other structure with it, so it
//! shares no shortcut with the code that it checks.

use std::collections::{HashMap, HashSet};

use thiserror::Error;

use crate::BlockMap;
use crate::pool::{State, States, Word};
use crate::sequence::{RowBuffers, Rows};
use crate::state::{Mmu, NONE, ORDERS, PageOf, Shared, id, parse};
use crate::sync::lock;
use crate::table::Loc;

/// An invariant that does not hold: a fault of the core.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("broken invariant: {0}")]
pub struct Broken(String);

type Check = std::result::Result<(), Broken>;

macro_rules! ensure {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(Broken(format!($($message)*)));
        }
    };
}

/// For a message: what it is, if it is anything.
fn or_none(value: Option<u32>) -> String {
    value.map_or_else(|| "none".into(), |value| value.to_string())
}

/// What all page tables map.
#[derive(Default)]
struct Mappings {
    /// How often each block is mapped.
    blocks: HashMap<u32, u32>,
    /// Entries that map each page.
    pages: HashMap<PageOf, Vec<Loc>>,
}

impl Mmu {
    /// Recounts everything: states, references, free structures, the prefix index, the reverse map,
    /// table nodes, sequences, moves, and (where given) exported rows. Costs a walk over all of it.
    pub fn validate(&self, rows: Option<(&Rows, &RowBuffers<'_>)>) -> Check {
        let _rest = self.rest();
        let shared = self.shared();
        let mappings = self.check_sequences()?;
        let held = self.check_holds(&mappings)?;
        self.check_blocks(&shared, &mappings, &held)?;
        self.check_block_map(&shared, &mappings, &held)?;
        self.check_order(&shared)?;
        self.check_moves(&shared)?;
        self.check_guarantee(&shared)?;
        self.check_leases(&shared)?;
        self.check_steps(&shared)?;
        if let Some((rows, buffers)) = rows {
            let fits = rows.check(self, 0, buffers);
            fits.map_err(|error| Broken(error.to_string()))?;
            self.check_rows(rows, buffers)?;
        }
        Ok(())
    }

    /// Walks every sequence; returns the mappings of every block.
    fn check_sequences(&self) -> std::result::Result<Mappings, Broken> {
        let mut mappings = Mappings::default();
        let mut nodes = 1;
        for (slot, cell) in self.used_slots() {
            let seq = lock(cell);
            ensure!(
                seq.open == self.table.space(slot).is_some(),
                "slot {slot} is open: {}, its address space disagrees",
                seq.open
            );
            if !seq.open {
                continue;
            }
            ensure!(
                self.table.space(slot) == Some(seq.space),
                "slot {slot}: its address space is not the one that the table names"
            );
            ensure!(
                self.table.way_agrees(seq.space, seq.generation),
                "slot {slot}: its line of ways says something else than the table"
            );
            let mapped = self.blocks_for(seq.tokens);
            ensure!(
                seq.first <= mapped.saturating_sub(1),
                "slot {slot}: {} of {mapped} blocks are released",
                seq.first
            );
            if mapped > 0 {
                let (from, to) = (
                    seq.space.virtual_of(seq.first),
                    seq.space.virtual_of(mapped),
                );
                nodes += to.div_ceil(512) - from / 512;
            }
            nodes += 1;
            ensure!(
                seq.written <= seq.scheduled && seq.scheduled <= seq.tokens,
                "slot {slot}: written {}, scheduled {}, tokens {}",
                seq.written,
                seq.scheduled,
                seq.tokens
            );
            ensure!(
                seq.published <= seq.written / self.config.block_size,
                "slot {slot}: {} blocks published of {} tokens written",
                seq.published,
                seq.written
            );
            let (mut last, mut runs) = (NONE, 0);
            let mut pages = [0; ORDERS];
            for index in seq.first..mapped {
                let pte = self.table.get(seq.space, index);
                ensure!(
                    pte.is_present(),
                    "slot {slot}: logical block {index} is not mapped"
                );
                let block = pte.block();
                ensure!(
                    block < self.config.span() && block != self.null_block(),
                    "slot {slot}: logical block {index} maps {block}"
                );
                let looked = self.table.look((slot, seq.generation), index);
                ensure!(
                    looked == Some(block),
                    "slot {slot}: logical block {index} maps {block}, without a lock it is {}",
                    or_none(looked)
                );
                runs += u32::from(last == NONE || block != last + 1);
                last = block;
                *mappings.blocks.entry(block).or_default() += 1;
                let page = self.table.page(seq.space, index);
                ensure!(
                    page.order == pte.order()
                        && self.config.page_orders.bits() >> page.order & 1 != 0
                        && page.index >= seq.first
                        && page.index + (1 << page.order) <= mapped
                        && block == page.block + (index - page.index)
                        && page.block.is_multiple_of(1 << page.order)
                        && seq
                            .space
                            .virtual_of(page.index)
                            .is_multiple_of(1 << page.order),
                    "slot {slot}: logical block {index} maps {block} by {page:?}"
                );
                if page.index == index {
                    pages[page.order as usize] += 1;
                    let of = (page.order, page.number());
                    mappings.pages.entry(of).or_default().push(page.loc);
                    ensure!(
                        self.table.whose(page.loc) == (slot, seq.space.virtual_of(index)),
                        "slot {slot}: the entry of logical block {index} does not know whose it is"
                    );
                }
            }
            ensure!(
                pages == seq.pages,
                "slot {slot}: pages by order {pages:?}, noted {:?}",
                seq.pages
            );
            let behind = [seq.first.checked_sub(1), Some(mapped)];
            for index in behind.into_iter().flatten() {
                ensure!(
                    self.table.look((slot, seq.generation), index).is_none(),
                    "slot {slot}: logical block {index} is mapped, not in its {} to {mapped}",
                    seq.first
                );
            }
            ensure!(
                (last, runs) == (seq.last, seq.runs),
                "slot {slot}: last block {last} in {runs} runs, noted {} in {}",
                seq.last,
                seq.runs
            );
        }
        nodes += self.table.upper_nodes();
        let in_use = self.table.nodes_in_use();
        ensure!(
            nodes == in_use,
            "{nodes} table nodes are reachable, {in_use} in use"
        );
        Ok(mappings)
    }

    /// Held blocks are claimed, mapped by nobody, and no two slots hold one.
    fn check_holds(&self, mappings: &Mappings) -> std::result::Result<HashSet<u32>, Broken> {
        let mut held = HashSet::new();
        for (range, slot) in self.holds.largest() {
            let open = slot == self.filling_slot() || lock(&self.slots[slot as usize]).open;
            ensure!(open, "slot {slot} is closed and holds {range:?}");
            for block in range {
                ensure!(held.insert(block), "block {block} is held twice");
                ensure!(
                    !self.pool.is_empty(block) && self.pool.word(block) == Word::PRIVATE,
                    "block {block} is held, and {}",
                    self.pool.state(block)
                );
                ensure!(
                    !mappings.blocks.contains_key(&block),
                    "block {block} is held and mapped"
                );
            }
        }
        let total = self.holds.total();
        ensure!(
            total as usize == held.len(),
            "{} blocks are held, counted are {total}",
            held.len()
        );
        Ok(held)
    }

    fn check_blocks(&self, shared: &Shared, mappings: &Mappings, holds: &HashSet<u32>) -> Check {
        let mut count = States::default();
        let mut published = 0;
        for block in 0..self.config.span() {
            if block == self.null_block() {
                let untouched = !mappings.blocks.contains_key(&block);
                ensure!(untouched, "the null block {block} is mapped");
                continue;
            }
            let (mut state, word) = (self.pool.state(block), self.pool.word(block));
            let kept = holds.contains(&block);
            if kept {
                state = State::Empty;
                count.held += 1;
            }
            let mapped = mappings.blocks.get(&block).copied().unwrap_or(0);
            let pins = shared.pins.get(&block).copied().unwrap_or(0);
            let moves = u32::from(shared.moving.contains_key(&block));
            match state {
                State::Empty => count.empty += 1,
                State::Destined => count.destined += 1,
                State::InUse => count.in_use += 1,
                State::Cached => count.cached += 1,
                State::Fenced => count.fenced += 1,
                State::Offline => count.offline += 1,
            }
            ensure!(
                state != State::Empty || word == Word::PRIVATE,
                "block {block} is empty, its word is {:#x}",
                word.0
            );
            ensure!(
                word.is_moving() == (moves == 1),
                "block {block}: its word says moving {}, {moves} moves know it",
                word.is_moving()
            );
            let held = match state {
                State::InUse => word.references(),
                State::Cached => word.references(),
                _ => 0,
            };
            let counted = mapped + pins + moves;
            ensure!(
                held == counted,
                "block {block} ({state}) has {held} references: {mapped} mappings, {pins} pins and leases, {moves} moves"
            );
            ensure!(
                state != State::InUse || held > 0,
                "block {block} is in use without a reference"
            );
            for page in self.reverse.pages_of(block) {
                if page.1 << page.0 != block {
                    continue;
                }
                let mut reverse = Vec::new();
                self.reverse.entries(&shared.chains, page, &mut reverse);
                reverse.sort_unstable();
                let mut forward = mappings.pages.get(&page).cloned().unwrap_or_default();
                forward.sort_unstable();
                ensure!(
                    reverse == forward,
                    "page {} of order {}: the reverse map says {reverse:?}, the tables say {forward:?}",
                    page.1,
                    page.0
                );
            }
            let indexed = shared.index.is_published(block);
            ensure!(
                indexed == word.is_published(),
                "block {block}: in the prefix index {indexed}, its word says {}",
                word.is_published()
            );
            ensure!(
                state != State::Cached || indexed,
                "block {block} is cached and not in the prefix index"
            );
            if indexed {
                published += 1;
                shared.index.check(&self.tokens, block).map_err(Broken)?;
            }
            let evictable =
                state == State::Cached && !word.is_moving() && !shared.is_cooling(block);
            ensure!(
                self.pool.is_evictable(block) == evictable,
                "block {block} ({state}): evictable {evictable}, the index of it disagrees"
            );
            count.available += u32::from(evictable || state == State::Empty);
            let stuck = kept || state != State::Empty && self.must_be_stuck(shared, block);
            ensure!(
                self.pool.is_stuck(block) == stuck,
                "block {block} ({state}): stuck {stuck}, the index of it disagrees"
            );
            ensure!(
                !shared.is_cooling(block) || state == State::Cached,
                "block {block} ({state}) is cooling"
            );
        }
        self.pool.audit_credits().map_err(Broken)?;
        let states = self.states();
        ensure!(
            states == count,
            "counters say {states:?}, a recount {count:?}"
        );
        let (nodes, entries) = shared.index.counts();
        ensure!(
            nodes == entries && nodes <= published,
            "{nodes} prefix nodes, {entries} by hash, {published} blocks"
        );
        Ok(())
    }

    /// The map of all blocks says the same as words, tables, pins, leases and holds.
    fn check_block_map(&self, shared: &Shared, mappings: &Mappings, holds: &HashSet<u32>) -> Check {
        let map = self.block_map_at_rest(shared);
        let count = |of: &HashMap<u32, u32>, block: u32| of.get(&block).copied().unwrap_or(0);
        for block in 0..self.config.span() {
            let at = block as usize;
            let (state, flags) = (map.states[at], map.flags[at]);
            let has = |flag: u8| flags & flag != 0;
            let (held, null) = (holds.contains(&block), block == self.null_block());
            let wanted = match self.pool.state(block) {
                _ if null => BlockMap::NULL,
                _ if held => BlockMap::EMPTY,
                State::Empty => BlockMap::EMPTY,
                State::Destined => BlockMap::DESTINED,
                State::InUse => BlockMap::IN_USE,
                State::Cached => BlockMap::CACHED,
                State::Fenced => BlockMap::FENCED,
                State::Offline => BlockMap::OFFLINE,
            };
            ensure!(
                state == wanted,
                "the map says {state} of block {block}, its word {wanted}"
            );
            let (mapped, pins) = (count(&mappings.blocks, block), count(&shared.pins, block));
            let leases = count(&shared.leased, block);
            let moves = u32::from(shared.moving.contains_key(&block));
            let (references, counted) = (map.references[at], mapped + pins + moves);
            ensure!(
                references == counted,
                "the map says {references} references of block {block}, counted are {counted}"
            );
            let expected = [
                (BlockMap::HELD, held),
                (BlockMap::PINNED, pins > leases),
                (BlockMap::LEASED, leases > 0),
                (BlockMap::MOVING, moves > 0),
                (BlockMap::PUBLISHED, shared.index.is_published(block)),
                (BlockMap::EVICTABLE, self.pool.is_evictable(block)),
            ];
            for (flag, wanted) in expected {
                ensure!(
                    has(flag) == wanted,
                    "the map says flags {flags} of block {block}, flag {flag} should be {wanted}"
                );
            }
            let largest = (0..ORDERS as u32)
                .rev()
                .find(|&order| mappings.pages.contains_key(&(order, block >> order)));
            let order = u32::try_from(map.orders[at]).ok();
            ensure!(
                order == largest,
                "the map says block {block} lies in a page of order {}, mapped is {}",
                or_none(order),
                or_none(largest)
            );
            let (sequence, logical) = (map.sequences[at], map.logical[at]);
            let Some(order) = order else {
                ensure!(
                    sequence == -1 && logical == -1,
                    "the map says block {block} is {logical} of {sequence}, nobody maps it"
                );
                continue;
            };
            let whose = parse(sequence).and_then(|(generation, slot)| {
                let seq = lock(self.slots.get(slot as usize)?);
                let range = seq.first as i32..self.blocks_for(seq.tokens) as i32;
                let open = seq.open && seq.generation == generation && range.contains(&logical);
                open.then(|| self.table.get(seq.space, logical as u32))
            });
            ensure!(
                whose.is_some_and(|pte| pte.block() == block && pte.order() == order),
                "the map says block {block} is {logical} of {sequence} by order {order}, there is {}",
                or_none(whose.map(|pte| pte.block()))
            );
        }
        Ok(())
    }

    fn check_order(&self, shared: &Shared) -> Check {
        let mut seen = 0;
        let mut fenced = std::collections::HashSet::new();
        let each = |block| match self.pool.state(block) {
            State::Cached if !shared.is_cooling(block) => {
                seen += 1;
                Ok(())
            }
            state => Err(format!(
                "block {block} ({state}) stands in the order of eviction"
            )),
        };
        shared.index.check_order(each).map_err(Broken)?;
        ensure!(
            shared.ages.agree(shared.index.oldest()),
            "the ages of cached blocks, by window, are not those of a recount"
        );
        let states = self.pool.states();
        let (waiting, cooling) = Mmu::waiting(shared);
        ensure!(
            seen + cooling == states.cached as usize,
            "{} cached blocks, {} in the order of eviction, {cooling} cooling",
            states.cached,
            seen
        );
        for block in shared.fenced_blocks() {
            ensure!(fenced.insert(block), "block {block} waits twice for a step");
            ensure!(
                self.pool.state(block) == State::Fenced,
                "block {block} ({}) waits for a step",
                self.pool.state(block)
            );
        }
        ensure!(
            waiting == states.fenced as usize,
            "{} fenced blocks, {waiting} wait for a step",
            states.fenced
        );
        Ok(())
    }

    fn check_moves(&self, shared: &Shared) -> Check {
        let mut moves = 0;
        for (&epoch, begun) in &shared.transactions {
            for (index, m) in begun.iter().enumerate() {
                moves += 1;
                ensure!(
                    shared.moving.get(&m.source) == Some(&(epoch, index)),
                    "move {index} of epoch {epoch}: its source {} does not know it",
                    m.source
                );
                ensure!(
                    self.pool.state(m.destination) == State::Destined,
                    "move {index} of epoch {epoch}: its destination {} is {}",
                    m.destination,
                    self.pool.state(m.destination)
                );
            }
        }
        let (sources, destined) = (shared.moving.len(), self.pool.states().destined);
        ensure!(
            moves == sources && moves == destined as usize,
            "{moves} moves, {sources} sources, {destined} destined blocks"
        );
        Ok(())
    }

    /// What can be seen of the guarantee at any time: moves never outnumber frees, as long as nobody
    /// asked for any. (How many windows are held is bounded after a pass.)
    fn check_guarantee(&self, shared: &Shared) -> Check {
        let stats = self.stats();
        let (moves, frees) = (
            stats.moves_committed,
            stats.freed_blocks + stats.left_cached,
        );
        ensure!(
            self.config.guarantee.is_none() || shared.asked > 0 || moves <= frees,
            "{moves} moves under the guarantee, {frees} frees"
        );
        Ok(())
    }

    /// What sequences have scheduled and not written, steps in flight answer for.
    fn check_steps(&self, shared: &Shared) -> Check {
        let steps = self.steps();
        let mut entries: HashMap<i64, Vec<(u32, u32)>> = HashMap::new();
        for entry in steps.entries() {
            let of = entries.entry(id(entry.generation, entry.slot)).or_default();
            if entry.from < entry.to {
                of.push((entry.from, entry.to)); // (else a truncation has taken it back)
            }
        }
        for (slot, cell) in self.used_slots() {
            let seq = lock(cell);
            if !seq.open {
                continue;
            }
            let mut reached = seq.written;
            let mut of = entries
                .remove(&id(seq.generation, slot))
                .unwrap_or_default();
            of.sort_unstable();
            for (from, to) in of {
                ensure!(
                    from <= reached && to <= seq.scheduled,
                    "slot {slot}: a step has scheduled {from} to {to}, the sequence {reached} to {}",
                    seq.scheduled
                );
                reached = reached.max(to);
            }
            ensure!(
                reached == seq.scheduled,
                "slot {slot}: nobody settles the tokens {reached} to {}",
                seq.scheduled
            );
        }
        for (block, step) in shared.waiting_for() {
            ensure!(
                !steps.has_passed(step),
                "block {block} still waits for step {step}, which has ended"
            );
        }
        Ok(())
    }

    fn check_leases(&self, shared: &Shared) -> Check {
        let mut leased: HashMap<u32, u32> = HashMap::new();
        for &block in shared.leases.values().flatten() {
            *leased.entry(block).or_default() += 1;
        }
        ensure!(
            leased == shared.leased,
            "leases hold {leased:?}, counted are {:?}",
            shared.leased
        );
        for (block, leases) in leased {
            let holds = shared.pins.get(&block).copied().unwrap_or(0);
            ensure!(
                holds >= leases,
                "block {block}: {leases} leases, {holds} pins and leases"
            );
        }
        Ok(())
    }

    fn check_rows(&self, rows: &Rows, buffers: &RowBuffers<'_>) -> Check {
        let (width, null) = rows.layout();
        let mut holding: HashMap<usize, usize> = HashMap::new();
        for (row, id, version, entries, tokens) in rows.held() {
            holding.insert(row, entries as usize);
            let length = buffers.seq_lens[row];
            ensure!(
                length == tokens,
                "row {row} was given the length {tokens}, it says {length}"
            );
            let Some((generation, slot)) = parse(id) else {
                continue;
            };
            let seq = lock(&self.slots[slot as usize]);
            let current = seq.open && seq.generation == generation && seq.version == version;
            if !current {
                continue; // closed, or changed since: the next export will write it
            }
            for at in 0..entries {
                let null = self.null_block();
                let wanted = rows.entry(at, |index| match index < seq.first {
                    true => null,
                    false => self.table.block(seq.space, index),
                });
                let entry = buffers.block_table[row * width + at as usize];
                ensure!(
                    entry == wanted,
                    "row {row}, entry {at} says {entry}, the page table {wanted}"
                );
            }
            // As far as the row's length: what lies behind may have been appended since.
            let mut look = rows.page_check();
            for index in seq.first..self.blocks_for(tokens as u32) {
                let fits = look.block(index, self.table.block(seq.space, index));
                ensure!(
                    fits.is_ok(),
                    "row {row} has pages, logical block {index} does not lie in one"
                );
            }
        }
        let padding = buffers.slot_mapping[rows.num_tokens()..].iter();
        ensure!(
            padding.clone().all(|&slot| slot == rows.padding()),
            "a slot behind the {} tokens of the step is not in the null block",
            rows.num_tokens()
        );
        for (row, entries) in buffers.block_table.chunks(width).enumerate() {
            let used = holding.get(&row).copied().unwrap_or(0);
            let stale = entries[used..]
                .iter()
                .position(|&entry| entry != null as i32);
            ensure!(
                stale.is_none(),
                "row {row} holds {used} entries, an entry behind them is not the null block"
            );
            ensure!(
                row < rows.num_rows() || buffers.seq_lens[row] == 0,
                "row {row} is unused, its length is {}",
                buffers.seq_lens[row]
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::stats::count;

    #[test]
    fn moves_that_outnumber_frees_break_the_guarantee_and_nothing_else() {
        for guarantee in [None, Some(0)] {
            let mut config = Config::new(1024, 1);
            config.guarantee = guarantee;
            let mmu = Mmu::new(config).expect("a sound configuration");
            count(&mmu.stats.freed_blocks, 2);
            count(&mmu.stats.moves_committed, 2);
            assert_eq!(mmu.validate(None), Ok(()));
            count(&mmu.stats.moves_committed, 1);
            let found = mmu.validate(None).map_err(|broken| broken.to_string());
            let expected = "broken invariant: 3 moves under the guarantee, 2 frees".to_string();
            assert_eq!(found, guarantee.map_or(Ok(()), |_| Err(expected)));
            mmu.shared().asked += 1;
            assert_eq!(mmu.validate(None), Ok(()));
        }
    }
}
