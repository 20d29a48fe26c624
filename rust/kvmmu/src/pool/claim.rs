//! Claims of single blocks and of batches.
//!
//! What lives here: how credits become blocks when any blocks do. What never lives here: shapes
//! ([`super::shape`]) and the choice between windows ([`super::placement`]).
//!
//! A single block comes from the thread's home window: its seat loses a credit (the claim's point
//! of linearisation), then the lowest clear bit of the window is set. No other thread writes to
//! either word, so threads do not meet. A thread without a home, or with a better window below,
//! goes the slow way: leave, reserve, adopt. A batch reserves all its blocks from the total at
//! once, then collects credits window by window and bits word by word.
//!
//! Both loops over bits end: whoever holds n credits of a window holds n of its clear bits, though
//! it does not know which; each time round without a bit, another thread has set one.

use super::counter::{HOME, count};
use super::homes::Home;
use super::physical::Physical;
use super::placement::{End, Fit, Placement, Zone};
use crate::sync::{AtomicU64, Ordering};
use std::ops::Range;

impl<const BITS: u32, const WORDS: usize> Physical<BITS, WORDS> {
    /// Claims one block. `None`: there is no empty one.
    pub(crate) fn claim_one(&self, home: &Home) -> Option<u32> {
        let mut seat = home.seat();
        while let Some(window) = seat.window() {
            // Relaxed: a hint of this thread's own.
            let lower = home.lower.load(Ordering::Relaxed);
            if seat.credits() == 0 || seat.order() != 0 || lower < window {
                break;
            }
            match home.change(seat, seat.less(1)) {
                Ok(()) => return Some(self.set_one(window)),
                Err(seen) => seat = seen,
            }
        }
        self.claim_one_slowly(home)
    }

    /// Leaves the home, finds another, and claims out of it.
    #[cold]
    fn claim_one_slowly(&self, home: &Home) -> Option<u32> {
        self.leave(home);
        home.lower.store(u32::MAX, Ordering::Relaxed);
        if self.placement == Placement::AddressOrder || self.placement == Placement::Fullest {
            for zone in self.zones(Zone::Body) {
                while let Some(window) = self.choose(zone.clone(), HOME) {
                    let most = count(self.counter(window)).max(1);
                    // All but one of them are only on their way to the seat.
                    let _hand = (most > 1).then(|| home.open_hand(most - 1));
                    let got = self.reserve_at_hand(home, most);
                    if got == 0 {
                        break;
                    }
                    // A single credit is not worth a home.
                    let adopted = match got {
                        1 => self.lower(window, 1, 1, HOME, 0) == 1,
                        _ => self.adopt(home, window, 0, got),
                    };
                    if got == 1 && !adopted {
                        self.deposit(home, 1); // undo
                    }
                    if adopted {
                        return Some(self.set_one(window));
                    }
                }
            }
        }
        // Every window with credits is another thread's home, or there are no credits at hand.
        if !self.reserve(home, 1) {
            return None;
        }
        let mut one = Vec::with_capacity(1);
        self.take(1, Zone::Body, Fit::Apart, &mut one);
        one.pop()
    }

    /// With `reserved` blocks reserved: makes a window this thread's home, with all but one of the
    /// credits that it can take, and keeps that one for the caller. What is not used of the
    /// reservation goes back. False: the window was taken.
    pub(crate) fn adopt(&self, home: &Home, window: u32, order: u32, reserved: u32) -> bool {
        let got = self.lower(window, 1, reserved, HOME, HOME);
        self.deposit(home, reserved - got); // undo
        if got == 0 {
            return false;
        }
        self.sit(home, window, order, got - 1);
        true
    }

    /// A window marked as a home, with credits taken from it, becomes the seat's; if another
    /// thread of the same seat was faster, they go back.
    pub(crate) fn sit(&self, home: &Home, window: u32, order: u32, n: u32) {
        let seat = home.seat();
        if seat.window().is_some() || home.change(seat, seat.taken(window, order, n)).is_err() {
            self.raise(window, n, HOME); // undo
            self.deposit(home, n); // undo
        }
    }

    /// The next window with credits in a range, by the placement's choice. `skip`: counters with
    /// these flags do not count.
    pub(crate) fn choose(&self, range: Range<u32>, skip: u32) -> Option<u32> {
        match self.placement {
            Placement::Fullest => self.fullest(range, skip),
            _ => self.open_from(self.small_from, range, skip),
        }
    }

    /// The first window of a range with credits, from one end.
    fn open_from(&self, end: End, range: Range<u32>, skip: u32) -> Option<u32> {
        let look = |window| self.has_credits(window, skip).then_some(window);
        self.open.find_map(range, end, look)
    }

    /// LLFree's choice: of the windows with credits the one with the fewest, among the next 64.
    fn fullest(&self, mut range: Range<u32>, skip: u32) -> Option<u32> {
        let mut best = None;
        for _ in 0..64 {
            let Some(window) = self.open_from(End::Low, range.clone(), skip) else {
                break;
            };
            let n = count(self.counter(window));
            if n > 0 && best.is_none_or(|(least, _)| n < least) {
                best = Some((n, window));
            }
            range.start = window + 1;
        }
        best.map(|(_, window)| window)
    }

    /// A look at one window; the open index learns if there is nothing.
    fn has_credits(&self, window: u32, skip: u32) -> bool {
        let word = self.counter(window);
        if count(word) > 0 {
            return word & skip == 0;
        }
        self.open.clear(window);
        if count(self.counter_after(window)) > 0 {
            self.open.set(window); // undo
        }
        false
    }

    /// Turns a reservation of `n` blocks into `n` blocks, appended to `out`; ascending within a
    /// run or a window.
    pub(crate) fn take(&self, mut n: u32, zone: Zone, fit: Fit, out: &mut Vec<u32>) {
        let start = out.len();
        let mut runs = 0;
        if self.placement == Placement::AddressOrder && fit == Fit::Together && n > 1 {
            runs = self.take_runs(n, zone, out);
            n -= runs;
        }
        let single = n;
        if let Some(scatter) = &self.scatter {
            n -= self.take_scattered(&scatter.draw(n, self.span), out);
        } else {
            for zone in self.zones(zone) {
                if self.placement == Placement::Fullest {
                    while n > 0
                        && let Some(window) = self.fullest(zone.clone(), 0)
                    {
                        n -= self.take_in(window, n, out);
                    }
                } else if n > 0 {
                    self.open.find_map(zone, self.small_from, |window| {
                        if self.has_credits(window, 0) {
                            n -= self.take_in(window, n, out);
                        }
                        (n == 0).then_some(())
                    });
                }
            }
        }
        // What the index does not show at this moment (another thread is between raising a counter
        // and saying so), or what was raised behind us: the counters themselves have it.
        while n > 0 {
            for window in 0..self.windows() {
                n -= self.take_in(window, n, out);
                if n == 0 {
                    break;
                }
            }
        }
        if runs > 0 && single > 0 {
            // Both parts ascend: the stable sort merges them.
            out[start..].sort();
        }
    }

    fn take_in(&self, window: u32, n: u32, out: &mut Vec<u32>) -> u32 {
        let got = self.lower(window, 1, n, 0, 0);
        self.set_many(window, got, out);
        got
    }

    /// Claims a block near each of some places, as far as windows show credits; returns how many.
    fn take_scattered(&self, places: &[u32], out: &mut Vec<u32>) -> u32 {
        let start = out.len();
        let mut without = Vec::new();
        if places.len() < self.windows() as usize {
            without.extend_from_slice(places);
        } else {
            self.take_together(places, out, &mut without);
        }
        for place in without {
            if !self.take_near(place, out) {
                break;
            }
        }
        (out.len() - start) as u32
    }

    /// The same for many, as far as the windows of the places have credits, which are taken together,
    /// and so are the bits of a word. `without`: places whose window had none.
    fn take_together(&self, places: &[u32], out: &mut Vec<u32>, without: &mut Vec<u32>) {
        let start = out.len();
        let mut credits = vec![0; self.windows() as usize];
        for &place in places {
            credits[Self::window_of(place) as usize] += 1;
        }
        for (credits, window) in credits.iter_mut().zip(0..) {
            *credits = self.lower(window, 1, *credits, 0, 0);
        }
        // Relaxed, here and below: which bits are likely to be clear; an exchange decides.
        let load = |line: &AtomicU64| line.load(Ordering::Relaxed);
        let mut lines: Vec<u64> = self.lines.iter().map(load).collect();
        let mut taken = vec![0; lines.len()];
        for &place in places {
            let window = Self::window_of(place);
            let credits = &mut credits[window as usize];
            if *credits == 0 {
                without.push(place);
                continue;
            }
            *credits -= 1;
            match Self::clear_near(&lines, place) {
                Some((at, bit)) => {
                    lines[at] |= bit;
                    taken[at] |= bit;
                    out.push(at as u32 * BITS + bit.trailing_zeros());
                }
                // What was seen is no picture of one moment.
                None => out.push(self.set_newest(window)),
            }
        }
        for (at, mut mask) in taken.into_iter().enumerate() {
            while mask != 0 && !self.set_mask(at, mask) {
                // Another thread was faster with some of them: others are to be found for them.
                let mut gone = mask & self.lines[at].load(Ordering::Relaxed);
                mask &= !gone;
                while gone != 0 {
                    let block = at as u32 * BITS + gone.trailing_zeros();
                    gone &= gone - 1;
                    let place = out[start..].iter_mut().find(|taken| **taken == block);
                    *place.expect("it was chosen") = self.set_newest(Self::window_of(block));
                }
            }
        }
    }

    /// The first clear bit at or after a place, within its window, going round.
    fn clear_near(lines: &[u64], place: u32) -> Option<(usize, u64)> {
        let first = (place / BITS) as usize;
        let words = Self::words_of(Self::window_of(place));
        let here = !lines[first] & (!0 << (place % BITS));
        let lowest = |at: usize, clear: u64| (at, clear & clear.wrapping_neg());
        if here != 0 {
            return Some(lowest(first, here));
        }
        let mut round = (first + 1..words.end).chain(words.start..first + 1);
        let at = round.find(|&at| lines[at] != !0)?;
        Some(lowest(at, !lines[at]))
    }

    /// Claims the first empty block at or after `start`, within the first window that has one,
    /// going round. False: no window shows credits.
    fn take_near(&self, start: u32, out: &mut Vec<u32>) -> bool {
        let first = Self::window_of(start);
        loop {
            let behind = self.open_from(End::Low, first..self.windows(), 0);
            let Some(window) = behind.or_else(|| self.open_from(End::Low, 0..first, 0)) else {
                return false;
            };
            if self.lower(window, 1, 1, 0, 0) == 1 {
                let from = if window == first { start } else { 0 };
                out.push(self.set_one_from(window, from % Self::WINDOW));
                return true;
            }
        }
    }

    /// With one credit of a window: sets its lowest clear bit.
    pub(crate) fn set_one(&self, window: u32) -> u32 {
        self.set_one_from(window, 0)
    }

    /// With one credit of a window: sets its lowest clear bit at or after `start`, going round.
    fn set_one_from(&self, window: u32, start: u32) -> u32 {
        let words = Self::words_of(window);
        let mut at = words.start + (start / BITS) as usize;
        let mut allowed = !0 << (start % BITS);
        loop {
            // Relaxed: the exchange decides.
            let mut line = self.lines[at].load(Ordering::Relaxed);
            while !line & allowed != 0 {
                let clear = !line & allowed;
                let bit = clear & clear.wrapping_neg();
                // Acquire: pairs with the Release that cleared the bit, so what the last owner did
                // to the block is before what the next one does.
                match self.lines[at].compare_exchange(
                    line,
                    line | bit,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => return at as u32 * BITS + bit.trailing_zeros(),
                    Err(seen) => line = seen,
                }
            }
            allowed = !0;
            at += 1;
            if at == words.end {
                at = words.start;
            }
        }
    }

    /// With one credit of a window: sets a clear bit, by what is newest in its words: that of this
    /// credit may be set by now, and another one clear that an old look shows set.
    #[cold]
    fn set_newest(&self, window: u32) -> u32 {
        loop {
            for at in Self::words_of(window) {
                // Relaxed: the exchange decides.
                let clear = !self.lines[at].fetch_or(0, Ordering::Relaxed);
                let bit = clear & clear.wrapping_neg();
                if bit != 0 && self.set_mask(at, bit) {
                    return at as u32 * BITS + bit.trailing_zeros();
                }
            }
        }
    }

    /// With `n` credits of a window: sets its `n` lowest clear bits.
    pub(crate) fn set_many(&self, window: u32, mut n: u32, out: &mut Vec<u32>) {
        let first = window * Self::WINDOW;
        if n == Self::WINDOW {
            self.fill_window(window);
            return out.extend(first..first + Self::WINDOW);
        }
        while n > 0 {
            for at in Self::words_of(window) {
                // Relaxed: the exchange decides.
                let mut line = self.lines[at].load(Ordering::Relaxed);
                while line != !0 && n > 0 {
                    let mask = lowest(!line, n);
                    // Acquire: as in `set_one_from`.
                    match self.lines[at].compare_exchange(
                        line,
                        line | mask,
                        Ordering::Acquire,
                        Ordering::Relaxed,
                    ) {
                        Ok(_) => {
                            n -= mask.count_ones();
                            append(at as u32 * BITS, mask, out);
                            break;
                        }
                        Err(seen) => line = seen,
                    }
                }
            }
        }
    }
}

/// The `n` lowest bits of a mask, or all.
fn lowest(mask: u64, n: u32) -> u64 {
    if mask.count_ones() <= n {
        return mask;
    }
    let mut rest = mask;
    for _ in 0..n {
        rest &= rest - 1;
    }
    mask & !rest
}

/// Appends the blocks of a mask.
fn append(first: u32, mut mask: u64, out: &mut Vec<u32>) {
    let start = first + mask.trailing_zeros();
    let length = mask.count_ones();
    if mask >> mask.trailing_zeros() == u64::MAX >> (64 - length) {
        return out.extend(start..start + length);
    }
    while mask != 0 {
        out.push(first + mask.trailing_zeros());
        mask &= mask - 1;
    }
}
