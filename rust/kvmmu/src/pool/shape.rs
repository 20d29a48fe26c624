//! Claims of blocks that lie together: aligned pages, whole windows, exact ranges, runs.
//!
//! What lives here: finding a shape and claiming it. What never lives here: the decision to have a
//! shape.
//!
//! Every shape is claimed in the same order as a single block: reservation, credits of each window
//! it touches, then bits. A search reads the lines without changing anything; only what looks free
//! is tried, and what turns out to be taken is put back in the other order: own bits cleared, then
//! credits raised. Since the credits were taken before the first bit, no other thread is owed one
//! of the bits that are set and cleared again: this is where released allocators went wrong that
//! set bits of several words first and counted later.
//!
//! **Barren windows.** A window in which a search for order k found nothing is taken out of the
//! index of that order until something is released into it. The mark in the counter comes first,
//! then another search, then the index, then the counter is read again (see [`super::index`]): a
//! release that this search did not see sees the mark. Home windows are not marked, since their
//! owner raises no counter; when the home is left, the counter is raised.
//!
//! **Whole windows** need one exchange: the credits of all blocks together are the right to write
//! the lines without one.

use std::ops::Range;

use super::counter::{BUSY, COUNT, HOME, PAGE, barren, count};
use super::homes::Home;
use super::physical::Physical;
use super::placement::{End, Fit, Zone};
use crate::sync::Ordering;

impl<const BITS: u32, const WORDS: usize> Physical<BITS, WORDS> {
    // -- aligned pages -----------------------------------------------------------------------

    /// Claims 2^order aligned blocks and returns the first.
    pub(crate) fn claim_page(&self, home: &Home, order: u32, zone: Zone) -> Option<u32> {
        debug_assert!((1..=Self::HUGE).contains(&order));
        if order == Self::HUGE {
            return self.claim_window(home, zone);
        }
        let n = 1 << order;
        let mut seat = home.seat();
        while let Some(window) = seat.window() {
            // Relaxed: a hint of this thread's own.
            let lower = home.lower.load(Ordering::Relaxed);
            if seat.credits() < n
                || seat.order() > order
                || lower < window
                || !self.is_in(window, zone)
            {
                break;
            }
            match home.change(seat, seat.less(n)) {
                Ok(()) => {
                    if let Some(first) = self.set_page(window, order) {
                        return Some(first);
                    }
                    self.raise(window, n, 0); // undo
                    self.deposit(home, n); // undo
                    break;
                }
                Err(seen) => seat = seen,
            }
        }
        self.claim_page_slowly(home, order, zone)
    }

    fn is_in(&self, window: u32, zone: Zone) -> bool {
        self.zones(zone)[0].contains(&window)
    }

    #[cold]
    fn claim_page_slowly(&self, home: &Home, order: u32, zone: Zone) -> Option<u32> {
        let n = 1 << order;
        self.leave(home);
        home.lower.store(u32::MAX, Ordering::Relaxed);
        if !self.reserve(home, n) {
            return None;
        }
        for others in [false, true] {
            // Homes of others are looked into last, after they were left.
            if others && !self.drain() {
                break;
            }
            for zone in self.zones(zone) {
                let look = |window| self.page_in(home, window, order, others);
                let index = &self.may[order as usize - 1];
                if let Some(first) = index.find_map(zone, End::Low, look) {
                    return Some(first);
                }
            }
        }
        self.deposit(home, n); // undo
        None
    }

    /// With 2^order blocks reserved: claims a page of this window, which becomes home. Another
    /// thread's home only if `others`.
    fn page_in(&self, home: &Home, window: u32, order: u32, others: bool) -> Option<u32> {
        let n = 1 << order;
        if self.counter(window) & HOME != 0 && !(others && self.vacate_window(window)) {
            return None;
        }
        if self.find_page(window, order).is_none() {
            self.give_up_on(window, order)?;
        }
        if self.lower(window, n, n, HOME, HOME) == 0 {
            return None;
        }
        let Some(first) = self.set_page(window, order) else {
            self.raise(window, n, HOME); // undo
            return None;
        };
        // The rest of the window's credits, as far as the pool has them.
        let most = count(self.counter(window));
        let _hand = home.open_hand(most);
        let rest = self.reserve_at_hand(home, most);
        let got = self.lower(window, 1, rest, 0, HOME);
        self.deposit(home, rest - got); // undo
        self.sit(home, window, order, got);
        Some(first)
    }

    /// A search found no page of this order: the window leaves the order's index, unless a second
    /// search, after the mark, finds one (then it is returned).
    pub(crate) fn give_up_on(&self, window: u32, order: u32) -> Option<u32> {
        let mark = barren(order);
        let index = &self.may[order as usize - 1];
        // Acquire: pairs with `raise`: releases counted before this mark are seen below; those
        // counted after it see the mark.
        let old = self.cell(window).fetch_or(mark, Ordering::Acquire);
        let found = self.find_page(window, order);
        if old & HOME != 0 || found.is_some() {
            self.revive(window); // undo
            return found;
        }
        index.clear(window);
        if self.counter_after(window) & mark == 0 {
            index.set(window); // undo
        }
        None
    }

    /// The lowest page of an order in a window that looks free.
    pub(crate) fn find_page(&self, window: u32, order: u32) -> Option<u32> {
        self.find_page_from(window * Self::WINDOW, window, order)
    }

    /// The lowest page of an order in a window that looks free and begins at or after `from`.
    fn find_page_from(&self, from: u32, window: u32, order: u32) -> Option<u32> {
        let words = (from / BITS) as usize..Self::words_of(window).end;
        // Relaxed, both: whoever claims what looks free acquires then.
        if 1 << order < BITS {
            let mut ahead = !0 << (from % BITS);
            for at in words {
                let free = pages(self.lines[at].load(Ordering::Relaxed), order) & ahead;
                if free != 0 {
                    return Some(at as u32 * BITS + free.trailing_zeros());
                }
                ahead = !0;
            }
            return None;
        }
        let span = ((1 << order) / BITS) as usize;
        let free = |at: usize| self.lines[at].load(Ordering::Relaxed) == !Self::FULL;
        (from.div_ceil(1 << order) as usize * span..words.end)
            .step_by(span)
            .find(|&at| (at..at + span).all(free))
            .map(|at| at as u32 * BITS)
    }

    /// With 2^order credits of a window: sets a page's bits. `None`: there is none.
    fn set_page(&self, window: u32, order: u32) -> Option<u32> {
        if 1 << order < BITS {
            return self.set_page_of_a_word(window, order);
        }
        while let Some(first) = self.find_page(window, order) {
            if self.set_range(first..first + (1 << order)) {
                return Some(first);
            }
        }
        None
    }

    fn set_page_of_a_word(&self, window: u32, order: u32) -> Option<u32> {
        for at in Self::words_of(window) {
            // Relaxed: the exchange decides.
            let mut line = self.lines[at].load(Ordering::Relaxed);
            loop {
                let free = pages(line, order);
                if free == 0 {
                    break;
                }
                let first = free.trailing_zeros();
                let mask = ((1 << (1 << order)) - 1) << first;
                // Acquire: pairs with the Release that cleared the bits.
                match self.lines[at].compare_exchange(
                    line,
                    line | mask,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => return Some(at as u32 * BITS + first),
                    Err(seen) => line = seen,
                }
            }
        }
        None
    }

    /// With a credit a block: sets the bits of exactly these blocks, within one window, or none.
    fn set_range(&self, range: Range<u32>) -> bool {
        for (at, mask) in Self::masks(range.clone()) {
            if self.set_mask(at, mask) {
                continue;
            }
            // Own bits are cleared again; their credits are still held.
            for (before, mask) in Self::masks(range).take_while(|(word, _)| *word != at) {
                // Relaxed: a read-modify-write, so the Release with which the last owner cleared
                // these bits still reaches their next owner.
                self.lines[before].fetch_and(!mask, Ordering::Relaxed); // undo
            }
            return false;
        }
        true
    }

    /// With a credit a block: sets bits of a word that are all clear. False: one of them is not, and
    /// nothing has changed.
    pub(crate) fn set_mask(&self, at: usize, mask: u64) -> bool {
        // Relaxed: the exchange decides.
        let mut line = self.lines[at].load(Ordering::Relaxed);
        while line & mask == 0 {
            // Acquire: pairs with the Release that cleared the bits.
            match self.lines[at].compare_exchange(
                line,
                line | mask,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(seen) => line = seen,
            }
        }
        false
    }

    /// Word and bits of each part of a range.
    pub(crate) fn masks(range: Range<u32>) -> impl Iterator<Item = (usize, u64)> + Clone {
        let (first, last) = (range.start / BITS, range.end.div_ceil(BITS));
        (first..last).map(move |at| {
            let from = range.start.max(at * BITS) - at * BITS;
            let to = range.end.min((at + 1) * BITS) - at * BITS;
            let below = if to == 64 { !0 } else { (1 << to) - 1 };
            (at as usize, below & (!0 << from))
        })
    }

    // -- whole windows -----------------------------------------------------------------------

    fn claim_window(&self, home: &Home, zone: Zone) -> Option<u32> {
        self.leave_if_whole(home);
        if !self.reserve(home, Self::WINDOW) {
            return None;
        }
        let found = self.take_window(home, zone);
        if found.is_none() {
            self.deposit(home, Self::WINDOW); // undo
        }
        found
    }

    /// With a window reserved: claims the lowest whole one that is found.
    pub(crate) fn take_window(&self, home: &Home, zone: Zone) -> Option<u32> {
        // Relaxed: a hint of this thread's own.
        let hint = home.page.load(Ordering::Relaxed);
        for zone in self.zones(zone) {
            let start = zone.start.max(hint);
            if let Some(window) = self.vacant_in(start..zone.end) {
                if hint >= zone.start {
                    home.page.store(window + 1, Ordering::Relaxed);
                }
                return Some(window * Self::WINDOW);
            }
            if let Some(window) = self.vacant_in(zone.start..start.min(zone.end)) {
                return Some(window * Self::WINDOW);
            }
        }
        // Other threads' homes may be whole.
        self.drain();
        for zone in self.zones(zone) {
            if let Some(window) = self.vacant_in(zone) {
                return Some(window * Self::WINDOW);
            }
        }
        None
    }

    /// With a window reserved: claims the lowest whole one of a range.
    fn vacant_in(&self, range: Range<u32>) -> Option<u32> {
        self.vacant.find_map(range, End::Low, |window| {
            if self.lower(window, Self::WINDOW, Self::WINDOW, HOME, PAGE) > 0 {
                self.fill_window(window);
                return Some(window);
            }
            self.recheck_vacant(window);
            None
        })
    }

    /// A window turned out not to be whole, or was claimed from: the vacant index learns it.
    pub(crate) fn recheck_vacant(&self, window: u32) {
        if count(self.counter(window)) < Self::WINDOW {
            self.vacant.clear(window);
            if count(self.counter_after(window)) == Self::WINDOW {
                self.vacant.set(window); // undo
            }
        }
    }

    /// With all credits of a window: sets its bits. Nobody else may set or clear one, so it needs no
    /// exchange.
    pub(crate) fn fill_window(&self, window: u32) {
        for line in &self.lines[Self::words_of(window)] {
            // Relaxed: nobody needs to know more of a block than that it is not empty.
            line.store(!0, Ordering::Relaxed);
        }
    }

    /// A home that is wholly empty serves as a page.
    fn leave_if_whole(&self, home: &Home) {
        let seat = home.seat();
        if let Some(window) = seat.window()
            && seat.credits() + count(self.counter(window)) == Self::WINDOW
        {
            self.leave(home);
        }
    }

    /// Releases a window that was claimed whole and not touched since. False: it was not, and
    /// nothing has changed.
    pub(crate) fn release_window(&self, home: &Home, window: u32) -> bool {
        let mut word = self.counter(window);
        loop {
            if word & (PAGE | BUSY) != PAGE || count(word) != 0 {
                return false;
            }
            // Relaxed: it only decides between this and the `split` of a second owner.
            match self.cell(window).compare_exchange(
                word,
                word & !PAGE | BUSY,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => break,
                Err(seen) => word = seen,
            }
        }
        for line in &self.lines[Self::words_of(window)] {
            // Relaxed: all credits of the window come out of the `raise` below, whose Release pairs
            // with the Acquire of the next claim of these blocks.
            line.store(!Self::FULL, Ordering::Relaxed);
        }
        self.raise(window, Self::WINDOW, BUSY);
        self.lower_hints(home, window);
        self.deposit(home, Self::WINDOW);
        true
    }

    // -- exact ranges and runs ---------------------------------------------------------------

    /// Claims exactly these blocks if all of them are empty.
    pub(crate) fn claim_range(&self, home: &Home, range: Range<u32>) -> bool {
        let n = range.len() as u32;
        if !self.looks_free(range.clone()) || !self.reserve(home, n) {
            return false;
        }
        let done = self.take_range(range);
        if !done {
            self.deposit(home, n); // undo
        }
        done
    }

    fn looks_free(&self, range: Range<u32>) -> bool {
        // Relaxed, here and in the looks below: as in `find_page_from`.
        Self::masks(range).all(|(at, mask)| self.lines[at].load(Ordering::Relaxed) & mask == 0)
    }

    /// With the blocks reserved: claims exactly them, or none.
    pub(crate) fn take_range(&self, range: Range<u32>) -> bool {
        let parts = |range: Range<u32>| {
            let windows = range.start / Self::WINDOW..range.end.div_ceil(Self::WINDOW);
            windows.map(move |window| {
                let from = range.start.max(window * Self::WINDOW);
                let to = range.end.min((window + 1) * Self::WINDOW);
                (window, from..to)
            })
        };
        for (window, part) in parts(range.clone()) {
            let n = part.len() as u32;
            let credited = self.lower_any(window, n);
            if credited && n == Self::WINDOW {
                self.fill_window(window);
                continue;
            }
            if credited && self.set_range(part) {
                continue;
            }
            if credited {
                self.raise(window, n, 0); // undo
            }
            for (before, part) in parts(range).take_while(|(w, _)| *w != window) {
                for (at, mask) in Self::masks(part.clone()) {
                    // Relaxed: as in `set_range`; where `fill_window` stored, `raise` hands on what
                    // the last owners did, since nobody else has a credit of the window.
                    self.lines[at].fetch_and(!mask, Ordering::Relaxed); // undo
                }
                self.raise(before, part.len() as u32, 0); // undo
            }
            return false;
        }
        true
    }

    /// Takes `n` credits of a window, be it a home or not.
    fn lower_any(&self, window: u32, n: u32) -> bool {
        loop {
            if self.lower(window, n, n, 0, 0) > 0 {
                return true;
            }
            // If its owner is about to sit down or has just left, we do not wait for it.
            if self.counter(window) & HOME == 0 || !self.vacate_window(window) {
                return self.lower(window, n, n, 0, 0) > 0;
            }
        }
    }

    /// Takes a home window away from its thread. False: nobody sits in it.
    fn vacate_window(&self, window: u32) -> bool {
        let seat = |home: &&Home| home.seat().window() == Some(window);
        let found = self.active().iter().find(seat);
        found.inspect(|home| self.leave(home)).is_some()
    }

    /// Claims `n` consecutive blocks, the lowest that are found.
    pub(crate) fn claim_run(&self, home: &Home, n: u32, zone: Zone) -> Option<u32> {
        if !self.reserve(home, n) {
            return None;
        }
        let found = self.take_run(n, zone);
        if found.is_none() {
            self.deposit(home, n); // undo
        }
        found
    }

    /// With `n` blocks reserved: claims the lowest run of that length.
    pub(crate) fn take_run(&self, n: u32, zone: Zone) -> Option<u32> {
        let [first, second] = self.zones(zone);
        // Last, a run that lies across the border of the two.
        for zone in [first, second, 0..self.windows()] {
            let end = (zone.end * Self::WINDOW).min(self.span);
            let mut from = zone.start * Self::WINDOW;
            while let Some(first) = self.find_run(n, from..end) {
                if self.take_range(first..first + n) {
                    return Some(first);
                }
                // Taken meanwhile, or credits that are on their way: on behind it.
                from = first + 1;
            }
        }
        None
    }

    /// The lowest run of `n` blocks in a range that looks free. Windows without an aligned page of
    /// half the length cannot hold the middle of one and are left out by their index.
    pub(crate) fn find_run(&self, n: u32, range: Range<u32>) -> Option<u32> {
        let mut looks = u32::MAX;
        self.find_run_near(n, range, &mut looks)
    }

    /// As [`Physical::find_run`], but gives up after looking into so many windows in vain; those
    /// that leave the index of their order do not count.
    pub(crate) fn find_run_near(&self, n: u32, range: Range<u32>, looks: &mut u32) -> Option<u32> {
        let order = n.div_ceil(2).ilog2().min(Self::HUGE);
        let windows = |from: u32| from / Self::WINDOW..range.end.div_ceil(Self::WINDOW);
        let mut from = range.start;
        while from < range.end {
            let window = self.candidate(order, windows(from))?;
            from = from.max(window * Self::WINDOW);
            let mut any = false;
            // Each run that is long enough has an aligned page of half its length inside.
            while let Some(page) = self.find_page_from(from, window, order) {
                any = true;
                let least = range.start.max((page + 1).saturating_sub(n));
                let first = self.run_start(page.max(least), least);
                let length = self.run_length(first, n.min(range.end.saturating_sub(first)));
                if length == n {
                    return Some(first);
                }
                from = first.saturating_add(length).max(page + 1);
                if from >= (window + 1) * Self::WINDOW {
                    break;
                }
            }
            from = from.max((window + 1) * Self::WINDOW);
            if any {
                // Pages but no run: the next search comes here again.
                *looks = looks.checked_sub(1)?;
            } else if (1..Self::HUGE).contains(&order) && self.counter(window) & HOME == 0 {
                self.give_up_on(window, order);
            } else if order == Self::HUGE {
                self.recheck_vacant(window);
            }
        }
        None
    }

    /// The next window that may have an aligned page of an order. Homes are candidates always:
    /// their indices may be old.
    fn candidate(&self, order: u32, range: Range<u32>) -> Option<u32> {
        let index = match order {
            0 => &self.open,
            order if order == Self::HUGE => &self.vacant,
            order => &self.may[order as usize - 1],
        };
        let homes = self.active().iter().filter_map(|home| home.seat().window());
        let seated = homes.filter(|window| range.contains(window)).min();
        index.next(range.clone()).into_iter().chain(seated).min()
    }

    /// Where the free run that reaches `at` from below begins, not below `least`.
    fn run_start(&self, at: u32, least: u32) -> u32 {
        let mut start = at;
        while start > least {
            let (word, _) = Self::place(start - 1);
            let below = start - word as u32 * BITS;
            let line = self.lines[word].load(Ordering::Relaxed) << (64 - below);
            let free = line.leading_zeros().min(below);
            start -= free;
            if free < below {
                break;
            }
        }
        start.max(least)
    }

    /// How many blocks from `first` on look free, `most` at most.
    pub(crate) fn run_length(&self, first: u32, most: u32) -> u32 {
        let mut n = 0;
        while n < most {
            let (word, _) = Self::place(first + n);
            let offset = first + n - word as u32 * BITS;
            let line = self.lines[word].load(Ordering::Relaxed) >> offset;
            let free = line.trailing_zeros().min(BITS - offset);
            n += free;
            if free < BITS - offset {
                break;
            }
        }
        n.min(most)
    }

    /// Claims blocks in the shape of a peer's runs, in their order, or as near as it goes: a run
    /// that is not to be had comes in the longest pieces that are.
    pub(crate) fn claim_like(&self, home: &Home, lengths: &[u32], out: &mut Vec<u32>) -> bool {
        let sum = lengths.iter().sum();
        if !self.reserve(home, sum) {
            return false;
        }
        // Longest that may still be there: what failed once is not looked for again.
        let mut longest = u32::MAX;
        for &length in lengths {
            let mut rest = length;
            while rest > 0 {
                let mut piece = rest.min(longest);
                let first = loop {
                    if piece == 1 {
                        break None;
                    }
                    if let Some(first) = self.take_run(piece, Zone::Body) {
                        break Some(first);
                    }
                    longest = piece - 1;
                    piece -= piece.div_ceil(8);
                };
                match first {
                    Some(first) => out.extend(first..first + piece),
                    None => self.take(1, Zone::Body, Fit::Apart, out),
                }
                rest -= piece;
            }
        }
        true
    }
}

/// The first bits of the aligned pages of a word that are clear, for pages smaller than a word.
fn pages(line: u64, order: u32) -> u64 {
    /// A bit at every multiple of 2^order.
    const ALIGNED: [u64; 6] = [
        !0,
        0x5555_5555_5555_5555,
        0x1111_1111_1111_1111,
        0x0101_0101_0101_0101,
        0x0001_0001_0001_0001,
        0x0000_0001_0000_0001,
    ];
    let mut free = !line;
    for step in 0..order {
        free &= free >> (1 << step);
    }
    free & ALIGNED[order as usize]
}

const _: () = assert!(COUNT >= 512);
