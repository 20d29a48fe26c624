//! Which blocks are empty: lines, counters, homes, and the credits that flow between them.
//!
//! What lives here: the memory of the lock-free machine, reservations, and the rise and fall of
//! credits. Claims stand in [`super::claim`] (single blocks, batches) and [`super::shape`] (pages,
//! runs, ranges), releases in [`super::give`]. What never lives here: references and states other
//! than *empty or not*.
//!
//! After LLFree (Wrenger et al., USENIX ATC 2023): a line of bits and a counter a window, and a
//! window that a thread has for itself. Different here: the counters are drawn from before any bit
//! is touched, for every shape (so claims over several words cannot meet); the total is exact and
//! reserved from, so that n blocks are claimed all or not; and homes keep no copy of anything.
//!
//! ```text
//! total     reserved from first                      one word, and a wallet a thread
//!   counter   credits of a window: taken next        one word a window, and a seat a thread
//!     line      one bit a block: set last            BITS x WORDS bits a window
//! ```
//!
//! # Invariants
//!
//! 1. The line bit is the truth of *empty or not* (set: not empty). Bits past the end are set.
//! 2. For each window: clear bits >= its counter + the credits of the seats that name it. The
//!    difference are claims and releases in flight.
//! 3. Sum of all counters and seats' credits >= total + sum of wallets + seats' credits. The
//!    difference are reservations.
//!
//! So whoever holds a reservation finds that many credits, and whoever holds credits of a window
//! finds that many clear bits in it. At quiescence all three are equal ([`Physical::audit`]).
//!
//! # Order of the steps
//!
//! A claim lowers total, counter, then sets bits; a release clears bits, raises the counter, then
//! the total (or the seat). Each step is one compare-and-swap or addition.
//!
//! # Linearisation
//!
//! A claim takes effect when its reservation does (for a claim out of a seat: when the seat's
//! credits fall), a release when its bits are cleared; a failed claim for want of blocks when the
//! total is read the last time ([`Physical::reserve_all`] shows that nothing was elsewhere). A
//! shape that is not found gives its reservation back: while it is being looked for, other claims
//! may find that many blocks fewer.
//!
//! # Progress
//!
//! Lock-free: every loop either ends or was overtaken by another thread's finished step. A thread
//! that stops for ever in the middle of a claim or a release keeps what it has reserved or cleared,
//! and hinders nobody. (Placement [`super::Placement::Fifo`] takes a lock.)
//!
//! # ABA
//!
//! Lines: bits are set from a value that was seen clear and cleared from one seen set; a word that
//! went away and came back has the same bits clear, and only holders of credits may set them.
//! Counters: likewise by value. Seats and wallets: see [`super::homes`].

use std::ops::Range;

use super::counter::{BARREN, BUSY, HOME, PAGE, count};
use super::homes::{Home, MAX_WINDOWS, SEATS, Seat, credits};
use super::index::Index;
use super::placement::{End, Placement, Scatter, Zone};
use crate::error::{Error, Result};
use crate::sync::{AtomicU32, AtomicU64, Ordering, collected, relax, zeroed_u32};

/// Looks of a claim at what other threads are just moving, before it is refused.
const PATIENCE: u32 = if cfg!(any(loom, shuttle)) { 4 } else { 4096 };

/// A number alone on its cache lines.
#[derive(Debug)]
#[repr(align(128))]
struct Alone(AtomicU32);

/// See the module. `BITS` blocks a word, `WORDS` words a window.
#[derive(Debug)]
pub(crate) struct Physical<const BITS: u32, const WORDS: usize> {
    pub(crate) span: u32,
    pub(crate) lines: Box<[AtomicU64]>,
    /// One word a window, see [`Physical::cell`].
    counters: Box<[AtomicU32]>,
    windows: u32,
    /// Cache lines of counters, as a power of two.
    stripes: u32,
    /// Windows with credits.
    pub(crate) open: Index,
    /// Windows that are wholly empty.
    pub(crate) vacant: Index,
    /// By order - 1, below the highest: windows with an aligned page of that order.
    pub(crate) may: Box<[Index]>,
    total: Alone,
    pub(crate) homes: Box<[Home]>,
    /// Seats 0 .. this have been used.
    active: AtomicU32,
    pub(crate) placement: Placement,
    pub(crate) scatter: Option<Scatter>,
    pub(crate) small_from: End,
    /// First window of the anchor region; the number of windows if there is none.
    anchor: u32,
}

impl<const BITS: u32, const WORDS: usize> Physical<BITS, WORDS> {
    /// Blocks a window.
    pub(crate) const WINDOW: u32 = BITS * WORDS as u32;
    /// Order of the page that fills a window.
    pub(crate) const HUGE: u32 = Self::WINDOW.trailing_zeros();
    /// Counters on one cache line.
    const COUNTERS: usize = 16;
    /// The bits of a word that stand for blocks.
    pub(crate) const FULL: u64 = if BITS == 64 { !0 } else { (1 << BITS) - 1 };

    pub(crate) fn new(
        span: u32,
        reserved: Option<u32>,
        placement: Placement,
        small_from: End,
        anchor: f64,
    ) -> Result<Self> {
        let windows = span.div_ceil(Self::WINDOW);
        if windows >= MAX_WINDOWS {
            return Err(Error::LimitExceeded {
                what: "windows of the pool",
                needed: u64::from(windows),
                limit: u64::from(MAX_WINDOWS - 1),
            });
        }
        let lines = collected(windows as usize * WORDS, |at| {
            let first = at as u32 * BITS;
            let mut line = !Self::FULL;
            if span.saturating_sub(first) < BITS {
                line |= !0 << span.saturating_sub(first);
            }
            if let Some(reserved) = reserved
                && reserved / BITS == at as u32
            {
                line |= 1 << (reserved % BITS);
            }
            AtomicU64::new(line)
        })?;
        let stripes = windows
            .div_ceil(Self::COUNTERS as u32)
            .next_power_of_two()
            .trailing_zeros();
        let pool = Self {
            span,
            lines,
            counters: zeroed_u32(Self::COUNTERS << stripes)?,
            windows,
            stripes,
            open: Index::new(windows)?,
            vacant: Index::new(windows)?,
            may: (1..Self::HUGE)
                .map(|_| Index::new(windows))
                .collect::<Result<_>>()?,
            total: Alone(AtomicU32::new(0)),
            homes: (0..SEATS).map(|_| Home::new()).collect(),
            active: AtomicU32::new(0),
            placement,
            scatter: match placement {
                Placement::Scatter { seed } => Some(Scatter::new(seed)),
                _ => None,
            },
            small_from,
            anchor: windows - (f64::from(windows) * anchor) as u32,
        };
        let mut total = 0;
        for window in 0..windows {
            let first = window as usize * WORDS;
            // Relaxed, here and below: nobody else has the pool yet.
            let clear = |line: &AtomicU64| (!line.load(Ordering::Relaxed)).count_ones();
            let n = pool.lines[first..first + WORDS].iter().map(clear).sum();
            pool.cell(window).store(n, Ordering::Relaxed);
            total += n;
            if n > 0 {
                pool.open.set(window);
                pool.may.iter().for_each(|index| index.set(window));
            }
            if n == Self::WINDOW {
                pool.vacant.set(window);
            }
        }
        pool.total.0.store(total, Ordering::Relaxed);
        Ok(pool)
    }

    pub(crate) fn windows(&self) -> u32 {
        self.windows
    }

    /// The counter word of a window. Neighbours lie on different cache lines: threads that each
    /// take the lowest window that is free take neighbours.
    pub(crate) fn cell(&self, window: u32) -> &AtomicU32 {
        let line = (window & ((1 << self.stripes) - 1)) as usize;
        &self.counters[line * Self::COUNTERS + (window >> self.stripes) as usize]
    }

    pub(crate) fn window_of(block: u32) -> u32 {
        block / Self::WINDOW
    }

    /// The word and the bit of a block.
    pub(crate) fn place(block: u32) -> (usize, u64) {
        ((block / BITS) as usize, 1 << (block % BITS))
    }

    /// The words of a window.
    pub(crate) fn words_of(window: u32) -> Range<usize> {
        window as usize * WORDS..(window as usize + 1) * WORDS
    }

    pub(crate) fn is_empty(&self, block: u32) -> bool {
        let (at, bit) = Self::place(block);
        // Relaxed: an answer that may be old when it is given. Who claims acquires then.
        self.lines[at].load(Ordering::Relaxed) & bit == 0
    }

    pub(crate) fn counter(&self, window: u32) -> u32 {
        // Relaxed: whoever acts on it exchanges the word, or reads it again (`counter_after`).
        self.cell(window).load(Ordering::Relaxed)
    }

    /// The counter, read so that later changes of it see what this thread did before (see
    /// [`super::index`]).
    pub(crate) fn counter_after(&self, window: u32) -> u32 {
        // Release on a read-modify-write that changes nothing: pairs with the Acquire of a `raise`
        // or a `revive` that comes later; one that came before is in the value.
        self.cell(window).fetch_or(0, Ordering::Release)
    }

    /// The windows of a zone, the preferred part first.
    pub(crate) fn zones(&self, zone: Zone) -> [Range<u32>; 2] {
        let (body, anchor) = (0..self.anchor, self.anchor..self.windows());
        match zone {
            Zone::Body => [body, anchor],
            Zone::Anchor => [anchor, body],
        }
    }

    /// First block of the anchor region; the span if there is none.
    pub(crate) fn anchor_from(&self) -> u32 {
        (self.anchor * Self::WINDOW).min(self.span)
    }

    // -- homes -------------------------------------------------------------------------------

    /// The home of a thread's number.
    pub(crate) fn home(&self, thread: usize) -> &Home {
        let at = thread % SEATS;
        let used = at as u32 + 1;
        // Relaxed: grows only; a drain that misses a seat which is being taken for the first time
        // comes before that.
        if self.active.load(Ordering::Relaxed) < used {
            // Relaxed: a new home has nothing. Whoever misses what it took from the total acquires
            // that taking, and so sees this before it.
            self.active.fetch_max(used, Ordering::Relaxed);
        }
        &self.homes[at]
    }

    /// The homes that have ever been used.
    pub(crate) fn active(&self) -> &[Home] {
        // Relaxed: the homes were made with the pool; see also `home`.
        &self.homes[..self.active.load(Ordering::Relaxed) as usize]
    }

    /// Takes the seat's window away from it: its credits go back to the window's counter, and to
    /// the total or to this home's wallet. Returns the seat as it was left.
    fn vacate(&self, home: &Home, to_total: bool) -> Seat {
        let mut seat = home.seat();
        while let Some(window) = seat.window() {
            let n = seat.credits();
            let _hand = home.open_hand(n);
            let left = seat.left();
            match home.change(seat, left) {
                Ok(()) => {
                    self.raise(window, n, HOME);
                    if to_total {
                        self.put_total(n);
                    } else {
                        self.deposit(home, n);
                    }
                    return left;
                }
                Err(seen) => seat = seen,
            }
        }
        seat
    }

    /// A thread gives its home window up, or has it taken away.
    pub(crate) fn leave(&self, home: &Home) {
        self.vacate(home, false);
    }

    /// A home loses its window and its wallet to the total. Returns its seat and wallet then.
    fn drain_one(&self, home: &Home) -> (Seat, u64) {
        let seat = self.vacate(home, true);
        // Relaxed: the withdrawal decides, or the load below.
        let wallet = home.wallet.load(Ordering::Relaxed);
        if credits(wallet) > 0 {
            let _hand = home.open_hand(credits(wallet));
            self.put_total(home.withdraw_up_to(credits(wallet)));
        }
        // Acquire: pairs with the Release of `withdraw_up_to`: credits that are gone from here are
        // in a hand that is seen open, or where it put them.
        (seat, home.wallet.load(Ordering::Acquire))
    }

    /// All threads lose their home windows and wallets to the total. Returns whether there was any
    /// home window.
    pub(crate) fn drain(&self) -> bool {
        let mut any = false;
        for home in self.active() {
            any |= home.seat().window().is_some();
            self.drain_one(home);
        }
        any
    }

    // -- reservations ------------------------------------------------------------------------

    /// Empty blocks that nobody has reserved. Exact at quiescence.
    pub(crate) fn empty(&self) -> u32 {
        // Relaxed: a number, from words that do not stand still.
        let mut n = self.total.0.load(Ordering::Relaxed);
        for home in self.active() {
            n = n.saturating_add(home.seat().credits());
            n = n.saturating_add(credits(home.wallet.load(Ordering::Relaxed)));
        }
        // Credits on their way from one place to another may be counted twice.
        n.min(self.span)
    }

    fn put_total(&self, n: u32) {
        if n > 0 {
            // Release: pairs with the Acquire of a reservation: the counters were raised.
            self.total.0.fetch_add(n, Ordering::Release);
        }
    }

    /// Takes `least ..= most` credits out of the total, as many as there are, or none.
    fn draw(&self, least: u32, most: u32) -> u32 {
        // Acquire, here and on failure: pairs with the Release of another thread's drawing: who
        // finds the credits gone sees the hand that they are in (see `reserve_all`).
        let mut total = self.total.0.load(Ordering::Acquire);
        loop {
            let got = total.min(most);
            if got < least || got == 0 {
                return 0;
            }
            // AcqRel: Acquire pairs with the Release of `put_total`: the counters are raised. (The
            // load does not suffice: credits may have gone and others come since.) Release: see
            // the load.
            match self.total.0.compare_exchange(
                total,
                total - got,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return got,
                Err(seen) => total = seen,
            }
        }
    }

    /// Puts credits back: into the thread's wallet, and from there into the total when it is full.
    pub(crate) fn deposit(&self, home: &Home, n: u32) {
        if n == 0 {
            return;
        }
        if n > 2 * Self::WINDOW {
            return self.put_total(n);
        }
        let has = home.put(n);
        if has > 4 * Self::WINDOW {
            let spare = has - 2 * Self::WINDOW;
            let _hand = home.open_hand(spare);
            self.put_total(home.withdraw_up_to(spare));
        }
    }

    /// Reserves exactly `n` empty blocks, or nothing.
    pub(crate) fn reserve(&self, home: &Home, n: u32) -> bool {
        n == 0 || home.withdraw(n) || self.draw(n, n) == n || self.reserve_all(n, n) == n
    }

    /// Reserves up to `n` empty blocks, as many as there are.
    pub(crate) fn reserve_up_to(&self, home: &Home, n: u32) -> u32 {
        if self.reserve(home, n) {
            return n;
        }
        self.reserve_all(0, n)
    }

    /// Reserves up to `n` blocks from what is at hand: wallet and total, nobody else's.
    pub(crate) fn reserve_at_hand(&self, home: &Home, n: u32) -> u32 {
        let got = home.withdraw_up_to(n);
        got + self.draw(0, n - got)
    }

    /// As [`Physical::reserve`], with everything that the threads have for themselves.
    ///
    /// A refusal holds for the moment when the total was read: before and after it each home was
    /// seen with the same empty seat, wallet and hand (their versions say that they did not change
    /// in between), so there were no credits elsewhere. When hands are open that might hold what is
    /// missing, this thread looks again; only if one of them stays open for [`PATIENCE`] rounds,
    /// because its thread was stopped there, the claim is refused although there might have been
    /// enough: no thread waits for another without end.
    fn reserve_all(&self, least: u32, most: u32) -> u32 {
        let mut seen = [(Seat(0), 0, 0); SEATS];
        for round in 0.. {
            let homes = self.active();
            for (home, seen) in homes.iter().zip(&mut seen) {
                let (seat, wallet) = self.drain_one(home);
                // Acquire: pairs with the closing of the hand.
                *seen = (seat, wallet, home.hand.load(Ordering::Acquire));
            }
            let got = self.draw(least, most);
            if got > 0 {
                return got;
            }
            let mut same = self.active().len() == homes.len();
            let mut hands = 0;
            for (home, seen) in homes.iter().zip(&seen) {
                // Relaxed, both: what is as it was tells nothing new, and the rest is looked at
                // again.
                let wallet = home.wallet.load(Ordering::Relaxed);
                let hand = home.hand.load(Ordering::Relaxed);
                same &= (home.seat(), wallet, hand) == *seen && credits(wallet) == 0;
                hands += credits(hand);
            }
            if (same && hands == 0) || round == PATIENCE {
                return 0;
            }
            if hands > 0 {
                relax(round);
            }
        }
        0
    }

    // -- credits of a window -----------------------------------------------------------------

    /// Takes `least ..= most` credits of a window, as many as there are, or none. `taken` is set
    /// in the word besides, if none of `unless` is.
    pub(crate) fn lower(&self, window: u32, least: u32, most: u32, unless: u32, taken: u32) -> u32 {
        let mut word = self.counter(window);
        loop {
            let got = count(word).min(most);
            if got == 0 || got < least || word & unless != 0 {
                return 0;
            }
            // Acquire: pairs with the Release of each `raise` before it: the bits are clear. (All
            // changes of a counter are read-modify-writes, so this one hands those on to the next.)
            match self.cell(window).compare_exchange(
                word,
                (word - got) | taken,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return got,
                Err(seen) => word = seen,
            }
        }
    }

    /// Gives a window `n` credits, whose bits are clear, and takes `flags` off it. The caller
    /// makes the same number visible in a wallet, a seat or the total afterwards, or reserves it.
    pub(crate) fn raise(&self, window: u32, n: u32, flags: u32) {
        // AcqRel: Release pairs with the Acquire of `lower`; Acquire for the indices (see
        // `super::index`).
        let old = self
            .cell(window)
            .fetch_add(n.wrapping_sub(flags), Ordering::AcqRel);
        debug_assert_eq!(old & flags, flags, "window {window}: {old:#x}");
        let now = count(old) + n;
        debug_assert!(now <= Self::WINDOW, "window {window}: {now} credits");
        if now > 0 {
            self.open.set(window);
        }
        if old & BARREN != 0 {
            self.revive(window);
        }
        if now == Self::WINDOW {
            self.vacant.set(window);
        }
    }

    /// Something was released into a window with barren orders: they are worth a look again.
    pub(crate) fn revive(&self, window: u32) {
        // Acquire: pairs with the reading again in `give_up_on`.
        let old = self.cell(window).fetch_and(!BARREN, Ordering::Acquire);
        for order in 1..Self::HUGE {
            if old & super::counter::barren(order) != 0 {
                self.may[order as usize - 1].set(window);
            }
        }
    }

    /// Cleared bits become credits: in the thread's seat if the window is its home, else in the
    /// window's counter. Returns how many are still to be put where the total can see them.
    pub(crate) fn credit(&self, home: &Home, window: u32, n: u32) -> u32 {
        let mut seat = home.seat();
        while seat.window() == Some(window) {
            match home.change(seat, seat.more(n)) {
                Ok(()) => return 0,
                Err(seen) => seat = seen,
            }
        }
        self.raise(window, n, 0);
        self.lower_hints(home, window);
        n
    }

    /// Something was released into a window: later claims of this thread may begin there.
    pub(crate) fn lower_hints(&self, home: &Home, window: u32) {
        // Relaxed: hints of this thread's own.
        if home.page.load(Ordering::Relaxed) > window {
            home.page.store(window, Ordering::Relaxed);
        }
        if let Some(mine) = home.seat().window()
            && window < mine
            && home.lower.load(Ordering::Relaxed) > window
        {
            home.lower.store(window, Ordering::Relaxed);
        }
    }

    /// From now on a window that was claimed whole is a set of single blocks. Returns whether its
    /// blocks may be touched: not while it is being released as a page.
    pub(crate) fn split(&self, window: u32) -> bool {
        // Acquire, here and below: pairs with the `raise` that ends the release of a page: who comes
        // after it sees the bits clear, though they were stored without an exchange, and refuses.
        let word = self.cell(window).load(Ordering::Acquire);
        if word & (PAGE | BUSY) == 0 {
            return true;
        }
        let old = self.cell(window).fetch_and(!PAGE, Ordering::Acquire);
        old & BUSY == 0
    }

    // -- looking -----------------------------------------------------------------------------

    /// Empty blocks of every window, by the credits. Exact at quiescence.
    pub(crate) fn empty_by_window(&self) -> Vec<u32> {
        let counters = (0..self.windows).map(|window| count(self.counter(window)));
        let mut empty: Vec<u32> = counters.collect();
        for seat in self.active().iter().map(Home::seat) {
            if let Some(window) = seat.window() {
                empty[window as usize] += seat.credits();
            }
        }
        empty
    }

    /// Windows that are wholly empty.
    pub(crate) fn free_windows(&self) -> u32 {
        let whole = |window: &u32| {
            // Relaxed: statistics.
            let free = |line: &AtomicU64| line.load(Ordering::Relaxed) == !Self::FULL;
            self.lines[Self::words_of(*window)].iter().all(free)
        };
        (0..self.windows()).filter(whole).count() as u32
    }

    /// Bytes of everything here.
    pub(crate) fn bytes(&self) -> usize {
        let indices = self.may.iter().chain([&self.open, &self.vacant]);
        size_of::<Self>()
            + size_of_val(&*self.lines)
            + size_of_val(&*self.counters)
            + size_of_val(&*self.homes)
            + indices.map(Index::bytes).sum::<usize>()
    }

    /// Holds every count against a recount. Only when nobody else is at work.
    pub(crate) fn audit(&self) -> std::result::Result<(), String> {
        let mut sum = 0;
        for window in 0..self.windows() {
            let word = self.counter(window);
            let lines = &self.lines[Self::words_of(window)];
            // Relaxed: nobody else is at work.
            let clear: u32 = (lines.iter())
                .map(|line| (!line.load(Ordering::Relaxed)).count_ones())
                .sum();
            let seats = self.homes.iter().map(Home::seat);
            let mut seated = seats.filter(|seat| seat.window() == Some(window));
            let seat = seated.next();
            let held = count(word) + seat.map_or(0, Seat::credits);
            let home = word & HOME != 0;
            if seated.next().is_some() || held != clear || seat.is_some() != home {
                return Err(format!(
                    "window {window}: {clear} empty blocks, counter {word:#x}, seat {seat:?}"
                ));
            }
            let whole = word & (PAGE | BUSY);
            if whole == BUSY || whole == PAGE | BUSY || (whole == PAGE && clear != 0) {
                return Err(format!("window {window}: counter {word:#x}, {clear} empty"));
            }
            let hinted = self.open.next(window..window + 1).is_some();
            if count(word) > 0 && !hinted {
                return Err(format!("window {window}: {word:#x}, not in the open index"));
            }
            let hinted = self.vacant.next(window..window + 1).is_some();
            if count(word) == Self::WINDOW && !hinted {
                return Err(format!(
                    "window {window} is whole and not in the vacant index"
                ));
            }
            for order in 1..Self::HUGE {
                let hinted = self.may[order as usize - 1]
                    .next(window..window + 1)
                    .is_some();
                if !home && !hinted && self.find_page(window, order).is_some() {
                    return Err(format!(
                        "window {window} has a page of order {order} and is not in its index"
                    ));
                }
            }
            sum += clear;
        }
        if sum != self.empty() {
            let empty = self.empty();
            return Err(format!(
                "{sum} empty blocks, {empty} in total, wallets and seats"
            ));
        }
        Ok(())
    }
}
