//! Every set of page sizes of a pool of 64 blocks, with sequences of every length.
//!
//! What lives here: which pages a range is mapped in, through opening, forking, cutting and growing,
//! held against a count made from the table alone. What never lives here: random operations
//! (`model.rs`), larger pools, contents.
#![cfg(not(any(loom, shuttle)))]

use kvmmu::{Config, Keys, Mmu, PageOrders};

const POOL: u32 = 64;

/// The fewest pages that consecutive, aligned blocks can be mapped in, by order: of each place the
/// largest page that lies whole and aligned there.
fn fewest(blocks: &[u32], orders: u32) -> [u32; 10] {
    let mut pages = [0; 10];
    let mut at = 0;
    while at < blocks.len() {
        let is_page = |order: &u32| {
            let size = 1 << order;
            let first = blocks[at];
            orders >> order & 1 != 0
                && at.is_multiple_of(size)
                && first.is_multiple_of(size as u32)
                && at + size <= blocks.len()
                && (first..)
                    .zip(&blocks[at..at + size])
                    .all(|(expected, &block)| expected == block)
        };
        let order = (0..7)
            .rev()
            .find(is_page)
            .expect("single blocks always serve");
        pages[order as usize] += 1;
        at += 1 << order;
    }
    pages
}

struct Pool {
    mmu: Mmu,
    orders: u32,
    token: i32,
}

impl Pool {
    fn new(orders: u32) -> Self {
        let mut config = Config::new(POOL, 1);
        let listed: Vec<u32> = (0..7).filter(|order| orders >> order & 1 != 0).collect();
        config.page_orders = PageOrders::new(&listed).unwrap();
        (config.medium_from, config.huge_from) = (0, 0);
        config.prefix_caching = false;
        config.max_sequences = 4;
        Self {
            mmu: Mmu::new(config).unwrap(),
            orders,
            token: 0,
        }
    }

    fn open(&mut self, n: u32) -> i64 {
        let tokens: Vec<i32> = (self.token..self.token + n as i32).collect();
        self.token += n as i32;
        self.mmu.open(&tokens, Keys::default()).unwrap()
    }

    /// A sequence of `n` blocks is mapped in the fewest pages, and in blocks of its own.
    fn check(&self, id: i64, n: u32) -> Vec<u32> {
        let (blocks, info) = (
            self.mmu.block_table(id).unwrap(),
            self.mmu.info(id).unwrap(),
        );
        assert_eq!(blocks.len() as u32, n);
        assert!(blocks.iter().all(|&block| block < POOL));
        let covered: u32 = (0..)
            .zip(info.pages)
            .map(|(order, pages)| pages << order)
            .sum();
        assert_eq!(
            covered, n,
            "pages {:?} of orders {:b}",
            info.pages, self.orders
        );
        assert_eq!(
            info.pages,
            fewest(&blocks, self.orders),
            "{blocks:?}, orders {:b}",
            self.orders
        );
        blocks
    }
}

#[test]
fn every_mix_of_page_sizes_maps_every_length_in_the_fewest_pages() {
    for orders in 0..1 << 6 {
        let orders = orders << 1 | 1;
        let mut pool = Pool::new(orders);
        for first in 0..=POOL {
            for second in 0..=POOL - first {
                let one = pool.open(first);
                let other = pool.open(second);
                let (ours, theirs) = (pool.check(one, first), pool.check(other, second));
                let mut all = [&ours[..], &theirs[..]].concat();
                all.sort_unstable();
                all.dedup();
                assert_eq!(all.len() as u32, first + second, "a block serves two");
                // Shared, and cut in one holder alone.
                let child = pool.mmu.fork(other).unwrap();
                let kept = second / 2;
                pool.mmu.truncate(child, kept).unwrap();
                assert_eq!(pool.check(other, second), theirs);
                assert_eq!(pool.check(child, kept), theirs[..kept as usize]);
                pool.mmu.close(other).unwrap();
                assert_eq!(pool.check(child, kept), theirs[..kept as usize]);
                if (first + second).is_multiple_of(8) {
                    pool.mmu.validate(None).unwrap();
                }
                pool.mmu.close(one).unwrap();
                pool.mmu.close(child).unwrap();
                assert_eq!(pool.mmu.states().empty, POOL);
            }
        }
    }
}
