//! What the page table costs: looking up, mapping and unmapping, forking, and the memory of tables.
//!
//! Prints JSON, a figure a line. Times are medians of rounds in which every contender has its turn, and the
//! least of them.
//! A long sequence has 8192 blocks of 16 tokens, 128k tokens; it is mapped by huge pages, by single
//! blocks in one run, or by single blocks all over the pool (placement `Scatter`). Beside ours:
//!
//! - `vec`: what an engine has without a page table: a `Vec` of blocks a sequence, a count a block
//!   and a free list. No reverse map, no locks, no limits.
//! - `walk` and `cached`: a copy of the table's four levels in this file, walked as [`Mmu::look`]
//!   does, and the same behind a walk cache: 256 places, each for one table of level 1. What the
//!   cache answers has to be compared with the entry of level 2, which is what a walk that begins
//!   at the sequence's node of level 2 (`short`) reads as well.
//! - `packed` and `by_page`: counting references a block (two in a word of 64 bits, as ours), and a
//!   page, with counts of single blocks for pages that are shared in part.
//!
//! ```text
//! cargo run --release -p kvmmu --example page_table
//! ```

use std::collections::BTreeMap;
use std::hint::black_box;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use kvmmu::{Config, Keys, Mmu, PageOrders, Placement, Rows};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const BLOCK: u32 = 16;
const LONG: u32 = 8192;
/// Cached blocks of a prompt that goes on differently.
const SHARED: u32 = 5000;
const POOL: u32 = 8 * LONG;
const ROUNDS: usize = 101;
/// Sequences of the look-ups, and blocks of each.
const MANY: u32 = 1000;
const DEPTH: u32 = 512;
const LOOKS: usize = 8192;

/// Times by name.
#[derive(Default)]
struct Figures(BTreeMap<String, Vec<f64>>);

impl Figures {
    /// Runs `work` and notes nanoseconds divided by `per`.
    fn time<T>(&mut self, name: String, per: f64, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let done = black_box(work());
        let took = start.elapsed().as_nanos() as f64 / per;
        self.0.entry(name).or_default().push(took);
        done
    }

    fn note(&mut self, name: &str, value: f64) {
        self.0.insert(name.to_owned(), vec![value]);
    }

    fn print(mut self) {
        let lines = self.0.iter_mut().map(|(name, values)| {
            values.sort_by(f64::total_cmp);
            let (median, least) = (values[values.len() / 2], values[0]);
            format!("  \"{name}\": {median:.3},\n  \"{name}, least\": {least:.3}")
        });
        println!("{{\n{}\n}}", lines.collect::<Vec<_>>().join(",\n"));
    }
}

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * u128::from(end)) >> 64) as u32
    }

    fn tokens(&mut self, n: u32) -> Vec<i32> {
        (0..n).map(|_| self.below(128_000) as i32).collect()
    }
}

// -- the ways to map a long sequence ---------------------------------------------------------

const SHAPES: [&str; 4] = ["huge", "contiguous", "scattered", "holes"];

fn config(shape: &str, blocks: u32, caching: bool) -> Config {
    let mut config = Config::new(blocks, BLOCK);
    config.prefix_caching = caching;
    config.page_orders = match shape {
        "huge" => PageOrders::DEFAULT,
        _ => PageOrders::SINGLE,
    };
    if shape == "scattered" {
        config.placement = Placement::Scatter { seed: 1 };
    }
    config
}

/// A manager in which the next long sequence is mapped like this.
fn manager(shape: &str, caching: bool) -> Outcome<Mmu> {
    if shape != "holes" {
        return Ok(Mmu::new(config(shape, POOL, caching))?);
    }
    let blocks = 4 * LONG;
    let mut config = config(shape, blocks, caching);
    config.max_sequences = blocks;
    config.table_nodes = 3 * blocks;
    config.hold_blocks = 0;
    let mmu = Mmu::new(config)?;
    let single = |_| mmu.open(&[1], Keys::default());
    let ids = (0..blocks).map(single).collect::<Result<Vec<_>, _>>()?;
    for &id in ids.iter().skip(1).step_by(2) {
        mmu.close(id)?;
    }
    Ok(mmu)
}

/// Refuses to measure something else than what the names say.
fn check_shape(mmu: &Mmu, id: i64, shape: &str) -> Outcome<()> {
    let info = mmu.info(id)?;
    let as_named = match shape {
        "huge" => info.pages[9] == LONG / 512 && info.pages[0] == 0,
        "contiguous" => info.pages[0] == LONG && info.num_runs <= 2,
        "holes" => info.num_runs == LONG,
        _ => info.pages[0] == LONG && info.num_runs > LONG / 2,
    };
    match as_named {
        true => Ok(()),
        false => Err(format!("{shape}: pages {:?}, runs {}", info.pages, info.num_runs).into()),
    }
}

/// One step that writes a sequence from where it is cached to its end: full blocks are published.
fn write(mmu: &Mmu, rows: &mut Rows, id: i64) -> Outcome<()> {
    let info = mmu.info(id)?;
    let query = (info.num_tokens - info.num_cached_tokens) as i32;
    let mut tables = rows.buffers();
    let step = mmu.begin_step();
    mmu.prepare(
        step,
        &[id],
        Some(&[query]),
        None,
        rows,
        &mut tables.borrow(),
    )?;
    mmu.written(step)?;
    Ok(mmu.end_step(step)?)
}

/// What an engine has without a page table.
struct Plain {
    free: Vec<u32>,
    counts: Vec<u32>,
}

impl Plain {
    fn open(&mut self, n: u32) -> Vec<u32> {
        let blocks = self.free.split_off(self.free.len() - n as usize);
        for &block in &blocks {
            self.counts[block as usize] = 1;
        }
        blocks
    }

    fn close(&mut self, blocks: Vec<u32>) {
        for block in blocks {
            self.counts[block as usize] -= 1;
            if self.counts[block as usize] == 0 {
                self.free.push(block);
            }
        }
    }

    fn fork(&mut self, blocks: &[u32]) -> Vec<u32> {
        for &block in blocks {
            self.counts[block as usize] += 1;
        }
        blocks.to_vec()
    }
}

/// Without a prefix cache: no tokens are hashed or kept.
fn map_and_fork(figures: &mut Figures) -> Outcome<()> {
    let prompt = vec![1; (LONG * BLOCK) as usize];
    let build = |shape| Ok((shape, manager(shape, false)?));
    let ours = SHAPES.map(build).into_iter().collect::<Outcome<Vec<_>>>()?;
    let mut vec = Plain {
        free: (0..POOL).collect(),
        counts: vec![0; POOL as usize],
    };
    for round in 0..=ROUNDS {
        if round == 1 {
            figures.0.clear(); // the first touch of the memory
        }
        for (shape, mmu) in &ours {
            let start = Instant::now();
            let id = figures.time(format!("map {shape}"), 1e3, || {
                mmu.open(&prompt, Keys::default())
            })?;
            let mapped = start.elapsed();
            check_shape(mmu, id, shape)?;
            let fork = Instant::now();
            let child = figures.time(format!("fork {shape}"), 1e3, || mmu.fork(id))?;
            figures.time(format!("close child {shape}"), 1e3, || mmu.close(child))?;
            let both = fork.elapsed().as_nanos() as f64 / 1e3;
            let name = format!("fork + close {shape}");
            figures.0.entry(name).or_default().push(both);
            let unmap = Instant::now();
            figures.time(format!("unmap {shape}"), 1e3, || mmu.close(id))?;
            let both = (mapped + unmap.elapsed()).as_nanos() as f64 / 1e3;
            let name = format!("map + unmap {shape}");
            figures.0.entry(name).or_default().push(both);
        }
        let mut held = Vec::new();
        figures.time("map + unmap vec".into(), 1e3, || {
            let blocks = vec.open(LONG);
            vec.close(blocks);
        });
        held.append(&mut vec.open(LONG));
        let child = figures.time("fork vec".into(), 1e3, || vec.fork(&held));
        figures.time("close child vec".into(), 1e3, || vec.close(child));
        vec.close(held);
    }
    Ok(())
}

/// Of a parent that is written and published; and prompts of which a part is cached.
fn published(figures: &mut Figures) -> Outcome<()> {
    let mut random = Random(2);
    let prompt = random.tokens(LONG * BLOCK);
    let mut partly = prompt.clone();
    partly[(SHARED * BLOCK) as usize..].copy_from_slice(&random.tokens((LONG - SHARED) * BLOCK));
    for shape in SHAPES {
        let mmu = manager(shape, true)?;
        let mut rows = Rows::new(&mmu, 1, LONG as usize, prompt.len())?;
        let parent = mmu.open(&prompt, Keys::default())?;
        check_shape(&mmu, parent, shape)?;
        write(&mmu, &mut rows, parent)?;
        for _ in 0..ROUNDS {
            let child =
                figures.time(format!("fork published {shape}"), 1e3, || mmu.fork(parent))?;
            figures.time(format!("close child published {shape}"), 1e3, || {
                mmu.close(child)
            })?;
            figures.time(format!("match part {shape}"), 1e3, || {
                mmu.matched_tokens(&partly, &Keys::default())
            });
            let other = figures.time(format!("open part {shape}"), 1e3, || {
                mmu.open(&partly, Keys::default())
            })?;
            let cached = mmu.info(other)?.num_cached_tokens;
            if cached != SHARED * BLOCK {
                return Err(format!("{shape}: {cached} tokens were cached").into());
            }
            figures.time(format!("close part {shape}"), 1e3, || mmu.close(other))?;
        }
    }
    Ok(())
}

// -- counting by block or by page ------------------------------------------------------------

/// A count a block, two in a word; and a count a page of 512 beside it.
struct Counts {
    pairs: Vec<AtomicU64>,
    pages: Vec<AtomicU32>,
}

/// A count of a page says: look at those of its blocks.
const IN_PART: u32 = u32::MAX;
/// A block's word can be counted up without looking closer.
const CLOSER: u64 = 0xfc00_0000_fc00_0000;

impl Counts {
    fn new() -> Self {
        Self {
            pairs: (0..LONG / 2).map(|_| AtomicU64::new(0)).collect(),
            pages: (0..LONG / 512).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    fn packed(&self, blocks: Range<u32>) {
        for pair in &self.pairs[blocks.start as usize / 2..blocks.end as usize / 2] {
            let now = pair.load(Ordering::Relaxed);
            assert!(now & CLOSER == 0, "no count is near its limit");
            pair.store(now + (1 | 1 << 32), Ordering::Relaxed);
        }
    }

    fn by_page(&self, blocks: Range<u32>) {
        let whole = blocks.end / 512;
        for page in 0..whole {
            match self.pages[page as usize].load(Ordering::Relaxed) {
                IN_PART => self.packed(page * 512..(page + 1) * 512),
                now => self.pages[page as usize].store(now + 1, Ordering::Relaxed),
            }
        }
        if whole * 512 < blocks.end {
            // Shared in part: its blocks are counted from here on.
            let now = self.pages[whole as usize].swap(IN_PART, Ordering::Relaxed);
            if now != IN_PART {
                let both = u64::from(now) | u64::from(now) << 32;
                for pair in &self.pairs[whole as usize * 256..(whole as usize + 1) * 256] {
                    pair.store(both, Ordering::Relaxed);
                }
            }
            self.packed(whole * 512..blocks.end);
        }
    }
}

fn counting(figures: &mut Figures) {
    for _ in 0..ROUNDS {
        for (name, blocks) in [("16 pages", LONG), ("5000 blocks", SHARED)] {
            let counts = Counts::new();
            counts.packed(0..LONG); // touched
            figures.time(format!("count {name} packed"), 1.0, || {
                counts.packed(0..black_box(blocks))
            });
            figures.time(format!("count {name} by_page"), 1.0, || {
                counts.by_page(0..black_box(blocks))
            });
        }
    }
}

// -- looking up ------------------------------------------------------------------------------

const FANOUT: u32 = 512;
const PRESENT: u64 = 1;
const PLACES: usize = 256;

/// Four levels like the table's, for single blocks alone. An entry: node or block above a bit.
struct Walks {
    entries: Vec<AtomicU64>,
    spaces: Vec<u32>,
    /// Walk cache: (slot, huge index) + 1, and the entry of level 2.
    places: Vec<[u64; 2]>,
}

impl Walks {
    fn new(mmu: &Mmu, ids: &[i64]) -> Outcome<Self> {
        let mut walks = Self {
            entries: Vec::new(),
            spaces: Vec::new(),
            places: vec![[0; 2]; PLACES],
        };
        let root = walks.node();
        for (slot, &id) in ids.iter().enumerate() {
            if slot.is_multiple_of(FANOUT as usize) {
                let upper = walks.node();
                walks.set(root, slot as u32 / FANOUT, upper);
            }
            let upper = (walks.load(root, slot as u32 / FANOUT) >> 1) as u32;
            let space = walks.node();
            walks.set(upper, slot as u32 % FANOUT, space);
            walks.spaces.push(space);
            for (at, &block) in mmu.block_table(id)?.iter().enumerate() {
                let at = at as u32;
                if at.is_multiple_of(FANOUT) {
                    let table = walks.node();
                    walks.set(space, at / FANOUT, table);
                }
                let table = (walks.load(space, at / FANOUT) >> 1) as u32;
                walks.set(table, at % FANOUT, block);
            }
        }
        Ok(walks)
    }

    fn node(&mut self) -> u32 {
        let node = self.entries.len() as u32 / FANOUT;
        let more = (0..FANOUT).map(|_| AtomicU64::new(0));
        self.entries.extend(more);
        node
    }

    fn set(&self, node: u32, index: u32, value: u32) {
        let entry = &self.entries[(node * FANOUT + index) as usize];
        entry.store(u64::from(value) << 1 | PRESENT, Ordering::Release);
    }

    fn load(&self, node: u32, index: u32) -> u64 {
        self.entries[(node * FANOUT + index) as usize].load(Ordering::Acquire)
    }

    /// All four levels, and the looks again.
    fn walk(&self, slot: u32, index: u32) -> Option<u32> {
        let upper = self.load(0, slot / FANOUT);
        if upper & PRESENT == 0 {
            return None;
        }
        let upper = (upper >> 1) as u32;
        let space = self.load(upper, slot % FANOUT);
        if space & PRESENT == 0 {
            return None;
        }
        let found = self.short((space >> 1) as u32, index);
        (self.load(upper, slot % FANOUT) == space).then_some(found?)
    }

    /// From the node of level 2.
    fn short(&self, space: u32, index: u32) -> Option<u32> {
        let table = self.load(space, index / FANOUT);
        if table & PRESENT == 0 {
            return None;
        }
        let entry = self.load((table >> 1) as u32, index % FANOUT);
        if self.load(space, index / FANOUT) != table {
            return None;
        }
        (entry & PRESENT != 0).then_some((entry >> 1) as u32)
    }

    /// Behind the walk cache; its tags are read and written by this thread alone.
    fn cached(&mut self, slot: u32, index: u32, hits: &mut u32) -> Option<u32> {
        let key = u64::from((slot << 9) | (index / FANOUT)) + 1;
        let place = (key as usize).wrapping_mul(0x9e37_79b9) >> 8 & (PLACES - 1);
        let [tag, table] = self.places[place];
        let space = self.spaces[slot as usize];
        if tag == key {
            // The node may live another life: compared with the entry above before and after.
            let entry = self.load((table >> 1) as u32, index % FANOUT);
            if self.load(space, index / FANOUT) == table {
                *hits += 1;
                return (entry & PRESENT != 0).then_some((entry >> 1) as u32);
            }
        }
        let found = self.walk(slot, index);
        self.places[place] = [key, self.load(space, index / FANOUT)];
        found
    }
}

fn look_ups(figures: &mut Figures) -> Outcome<()> {
    let mut config = Config::new(MANY * DEPTH, BLOCK);
    config.prefix_caching = false;
    config.page_orders = PageOrders::SINGLE;
    config.max_sequences = MANY;
    let mmu = Mmu::new(config)?;
    let prompt = vec![1; (DEPTH * BLOCK) as usize];
    let open = |_| mmu.open(&prompt, Keys::default());
    let ids = (0..MANY).map(open).collect::<Result<Vec<i64>, _>>()?;
    let each = ids.iter().map(|&id| mmu.block_table(id));
    let vec: Vec<Vec<u32>> = each.collect::<Result<_, _>>()?;
    let flat = vec.concat();
    let mut walks = Walks::new(&mmu, &ids)?;
    let mut random = Random(3);
    let per = LOOKS as f64;
    for _ in 0..ROUNDS {
        for (name, sequences) in [("hot", 1), ("cold", MANY)] {
            // Hot: one leaf. Cold: any block of any sequence, others for each contender, so that
            // none finds what another one has brought into the caches.
            let mut one = |name: String, look: &mut dyn FnMut(u32, u32) -> Option<u32>| {
                let queries: Vec<(u32, u32)> = (0..LOOKS)
                    .map(|_| (random.below(sequences), random.below(DEPTH)))
                    .collect();
                let blocks = queries
                    .iter()
                    .map(|&(s, index)| flat[(s * DEPTH + index) as usize]);
                let expected: u64 = blocks.map(u64::from).sum();
                let found = figures.time(name, per, || {
                    queries.iter().fold(0, |sum, &(s, index)| {
                        sum + u64::from(look(s, index).expect("it is mapped"))
                    })
                });
                assert_eq!(found, expected);
            };
            one(format!("look {name}"), &mut |s, index| {
                mmu.look(ids[s as usize], index)
            });
            // One waits for the one before: no two misses of the caches overlap.
            let mut before = 0;
            one(
                format!("look {name}, one behind another"),
                &mut |s, index| {
                    before = mmu.look(ids[s as usize + (before >> 31) as usize], index)?;
                    Some(before)
                },
            );
            one(format!("vec {name}"), &mut |s, index| {
                vec.get(s as usize)?.get(index as usize).copied()
            });
            one(format!("walk {name}"), &mut |s, index| walks.walk(s, index));
            one(format!("short {name}"), &mut |s, index| {
                walks.short(*walks.spaces.get(s as usize)?, index)
            });
            let mut hits = 0;
            one(format!("cached {name}"), &mut |s, index| {
                walks.cached(s, index, &mut hits)
            });
            figures.note(&format!("cached {name}, hits"), f64::from(hits) / per);
        }
        let positions: Vec<i64> = (0..LOOKS)
            .map(|_| i64::from(random.below(DEPTH * BLOCK)))
            .collect();
        figures.time("translate batch".into(), per, || {
            mmu.translate(ids[0], &positions)
        })?;
        figures.time("translate one a call".into(), per, || {
            for &position in &positions {
                let s = position as usize % MANY as usize;
                black_box(mmu.translate(ids[s], &[position]).expect("it is mapped"));
            }
        });
    }
    Ok(())
}

// -- memory ----------------------------------------------------------------------------------

/// Bytes a block of 64 sequences, upper levels and the reverse map included: of nodes that were
/// touched (a huge page keeps one in reserve that is not), the word beside each node, and four
/// bytes for each page in the reverse map.
fn memory(figures: &mut Figures) -> Outcome<()> {
    const SEQUENCES: u32 = 64;
    for (shape, blocks) in [("huge", LONG), ("contiguous", LONG), ("contiguous", 128)] {
        let mut config = config(shape, SEQUENCES * blocks, false);
        config.anchor = 0.0;
        let mmu = Mmu::new(config)?;
        let prompt = vec![1; (blocks * BLOCK) as usize];
        let (mut pages, mut huge) = (0, 0);
        for _ in 0..SEQUENCES {
            let id = mmu.open(&prompt, Keys::default())?;
            let of = mmu.info(id)?.pages;
            pages += of.iter().sum::<u32>();
            huge += of[9];
        }
        let nodes = mmu.measure().table_nodes;
        let bytes = f64::from(nodes - huge) * 4096.0 + f64::from(nodes) * 8.0;
        let name = format!("bytes a block, {shape}, {blocks} blocks");
        let blocks = f64::from(SEQUENCES * blocks);
        figures.note(&name, (bytes + 4.0 * f64::from(pages)) / blocks);
    }
    Ok(())
}

fn main() -> Outcome<()> {
    let mut figures = Figures::default();
    map_and_fork(&mut figures)?;
    published(&mut figures)?;
    counting(&mut figures);
    look_ups(&mut figures)?;
    memory(&mut figures)?;
    figures.print();
    Ok(())
}
