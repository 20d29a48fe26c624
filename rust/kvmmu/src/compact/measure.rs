//! How scattered the available blocks are: runs, aligned windows, the fragmentation ratio.
//!
//! Here live figures over a bitmap (one bit a block, set = available). Never here: which blocks
//! count as available (the caller decides and hands in the words), atomics, decisions.
//!
//! # Algorithm
//! Windows and words that are all zero or all one cost a comparison. A mixed word is cut in three:
//! the low ones end the run that is open, the high ones open the next, and the runs between are
//! counted without visiting each: `x & x >> 1`, then `& >> 2`, `& >> 4`, ... leaves one bit for every
//! place where 2^k ones begin (Warren, *Hacker's Delight*, 6-3), so the groups of ones left at level
//! k are the runs of at least 2^k.

/// Blocks in a window: an aligned group that one huge page can map.
pub(super) const WINDOW: u32 = 512;
const WINDOW_WORDS: usize = (WINDOW / u64::BITS) as usize;

/// The runs of consecutive available blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Available blocks.
    pub total: u32,
    /// Length of the longest run, in blocks; 0 when nothing is available.
    pub largest: u32,
    /// First block of the longest run, the lowest on ties; 0 when nothing is available.
    pub largest_start: u32,
    /// Windows (aligned groups of 512 blocks) that lie in the pool and are available as a whole.
    pub free_windows: u32,
    /// `histogram[k]`: runs of 2^k to 2^(k+1) - 1 blocks.
    pub histogram: [u64; 32],
}

/// Measures the runs of set bits among the first `n` bits of `words`; later bits are ignored.
///
/// Block `b` is bit `b % 64` of word `b / 64`.
///
/// # Panics
/// If `words` holds fewer than `n` bits.
pub fn runs(words: &[u64], n: u32) -> Runs {
    let mut scan = Scan::new();
    let windows = n / WINDOW;
    let (whole, rest) = words.split_at(windows as usize * WINDOW_WORDS);
    let mut at = 0;
    for window in whole.chunks_exact(WINDOW_WORDS) {
        let any = window.iter().fold(0, |or, word| or | word);
        let all = window.iter().fold(u64::MAX, |and, word| and & word);
        if any == 0 {
            scan.end_open(at, 0);
        } else if all == u64::MAX {
            scan.open += WINDOW;
            scan.runs.total += WINDOW;
            scan.runs.free_windows += 1;
        } else {
            for (word, at) in window.iter().zip((at..).step_by(64)) {
                scan.word(at, *word);
            }
        }
        at += WINDOW;
    }
    let mut rest = rest.iter();
    while at < n {
        let word = rest.next().expect("words hold n bits");
        let kept = (n - at).min(u64::BITS);
        scan.word(at, word & (u64::MAX >> (u64::BITS - kept)));
        // Not `at += 64`: that would overflow in a pool that ends just below 2^32.
        at += kept;
    }
    scan.end_open(n, 0);
    scan.finish()
}

/// The fragmentation ratio: `1 - largest / total`, and 0 when nothing is available.
pub fn ratio(largest: u32, total: u32) -> f64 {
    if total == 0 {
        return 0.0;
    }
    1.0 - f64::from(largest) / f64::from(total)
}

/// A pass over the words, low to high.
struct Scan {
    runs: Runs,
    /// Length of the run that reaches up to the current word; 0 when none does.
    open: u32,
    /// Runs inside words that have at least 2^k blocks; the last entry stays 0.
    at_least: [u64; 7],
}

impl Scan {
    fn new() -> Self {
        let runs = Runs {
            total: 0,
            largest: 0,
            largest_start: 0,
            free_windows: 0,
            histogram: [0; 32],
        };
        Scan {
            runs,
            open: 0,
            at_least: [0; 7],
        }
    }

    /// Ends the open run, which reaches `more` blocks beyond `at`.
    #[inline]
    fn end_open(&mut self, at: u32, more: u32) {
        let len = self.open + more;
        if len > 0 {
            self.runs.histogram[len.ilog2() as usize] += 1;
            if len > self.runs.largest {
                self.runs.largest = len;
                self.runs.largest_start = at - self.open;
            }
            self.open = 0;
        }
    }

    #[inline]
    fn word(&mut self, at: u32, word: u64) {
        if word == 0 {
            self.end_open(at, 0);
        } else if word == u64::MAX {
            self.open += u64::BITS;
            self.runs.total += u64::BITS;
        } else {
            self.mixed_word(at, word);
        }
    }

    fn mixed_word(&mut self, at: u32, word: u64) {
        self.runs.total += word.count_ones();
        self.end_open(at, word.trailing_ones());
        let high = word.leading_ones();
        let inner = word & (word + 1) & (u64::MAX >> high);
        if inner != 0 {
            self.inner_runs(at, inner);
        }
        self.open = high;
    }

    /// Counts the runs of a word whose first and last bit are clear.
    fn inner_runs(&mut self, at: u32, word: u64) {
        // levels[k]: the bits at which 2^k ones begin. At most 62 ones follow each other.
        let mut levels = [0u64; 6];
        let mut top = 0;
        let mut level = word;
        loop {
            levels[top] = level;
            self.at_least[top] += u64::from((level & !(level << 1)).count_ones());
            level &= level >> (1 << top);
            if level == 0 {
                break;
            }
            top += 1;
        }
        if (2 << top) - 1 > self.runs.largest {
            // Bit by bit of the length, from the top: does any run go on for 2^k more?
            let mut len = 1 << top;
            let mut begins = levels[top];
            for k in (0..top).rev() {
                let longer = begins & (levels[k] >> len);
                if longer != 0 {
                    begins = longer;
                    len += 1 << k;
                }
            }
            if len > self.runs.largest {
                self.runs.largest = len;
                self.runs.largest_start = at + begins.trailing_zeros();
            }
        }
    }

    fn finish(mut self) -> Runs {
        for (k, pair) in self.at_least.windows(2).enumerate() {
            self.runs.histogram[k] += pair[0] - pair[1];
        }
        self.runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, block by block.
    fn runs_by_block(words: &[u64], n: u32) -> Runs {
        let set = |b: u32| b < n && words[(b / 64) as usize] >> (b % 64) & 1 == 1;
        let mut expected = Scan::new().runs;
        let mut len = 0;
        for b in 0..=n {
            if set(b) {
                len += 1;
                continue;
            }
            if len > 0 {
                expected.total += len;
                expected.histogram[len.ilog2() as usize] += 1;
                if len > expected.largest {
                    (expected.largest, expected.largest_start) = (len, b - len);
                }
            }
            len = 0;
        }
        expected.free_windows = (0..n / WINDOW)
            .filter(|w| (w * WINDOW..(w + 1) * WINDOW).all(set))
            .count() as u32;
        expected
    }

    #[test]
    fn every_byte_at_every_place_in_a_word_and_across_two() {
        for byte in 0..=255u64 {
            for shift in 0..=120 {
                let bits = u128::from(byte) << shift;
                for bits in [bits, !bits] {
                    let words = [bits as u64, (bits >> 64) as u64];
                    for n in [0, 1, 63, 64, 65, 127, 128] {
                        assert_eq!(runs(&words, n), runs_by_block(&words, n), "{words:x?} {n}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_run_across_many_windows_is_one_run() {
        let mut words = vec![u64::MAX; 40];
        words[0] = u64::MAX << 60;
        words[39] = 0b1111;
        let found = runs(&words, 40 * 64);
        assert_eq!((found.largest, found.largest_start), (4 + 38 * 64 + 4, 60));
        assert_eq!(found.free_windows, 3);
        assert_eq!(found.histogram.iter().sum::<u64>(), 1);
    }

    #[test]
    fn the_lowest_of_equal_runs_is_named() {
        let words = [0b0111_0111 << 20, u64::MAX >> 61, 0];
        assert_eq!(runs(&words, 192).largest_start, 20);
    }

    #[test]
    fn the_ratio_of_nothing_is_zero() {
        assert_eq!(ratio(0, 0), 0.0);
        assert_eq!(ratio(4, 4), 0.0);
        assert_eq!(ratio(1, 4), 0.75);
        assert_eq!(ratio(0, 4), 1.0);
    }

    /// Words as pools have them: empty, full, sparse, dense, random.
    fn word() -> impl Strategy<Value = u64> {
        prop_oneof![
            3 => Just(0),
            3 => Just(u64::MAX),
            1 => any::<u64>(),
            1 => (any::<u64>(), any::<u64>()).prop_map(|(a, b)| a & b),
            1 => (any::<u64>(), any::<u64>()).prop_map(|(a, b)| a | b),
            1 => (0..64u32).prop_map(|shift| u64::MAX << shift),
            1 => (0..64u32).prop_map(|shift| u64::MAX >> shift),
        ]
    }

    proptest! {
        #[test]
        fn runs_are_what_counting_block_by_block_gives(
            mut words in prop::collection::vec(word(), 1..40),
            full in prop::option::of((0..40usize, 1..30usize)),
            cut in 0..64u32,
        ) {
            if let Some((from, len)) = full {
                let to = (from + len).min(words.len());
                words[from.min(to)..to].fill(u64::MAX);
            }
            let n = words.len() as u32 * 64 - cut;
            prop_assert_eq!(runs(&words, n), runs_by_block(&words, n));
        }
    }

    /// `cargo test --release -p kvmmu measure -- --ignored --nocapture`
    #[test]
    #[ignore = "prints timings, checks nothing"]
    fn timing() {
        let mut state = 1u64;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for n in [90_000u32, 1_000_000] {
            let count = n.div_ceil(64) as usize;
            let few: Vec<u64> = (0..count)
                .map(|i| if i / 100 % 2 == 0 { u64::MAX } else { 0 })
                .collect();
            let half: Vec<u64> = (0..count).map(|_| random()).collect();
            let sparse: Vec<u64> = (0..count).map(|_| random() & random() & random()).collect();
            for (name, words) in [
                ("few runs", few),
                ("random 1/2", half),
                ("random 1/8", sparse),
            ] {
                let took = (0..200)
                    .map(|_| {
                        let begin = std::time::Instant::now();
                        std::hint::black_box(runs(std::hint::black_box(&words), n));
                        begin.elapsed()
                    })
                    .collect::<Vec<_>>();
                let least = took.iter().min().expect("200 rounds");
                println!("runs, {n} blocks, {name}: {least:?}");
            }
        }
    }
}
