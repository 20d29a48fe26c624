//! What each thread has of the pool for itself, so that threads do not meet: a seat and a wallet.
//!
//! What lives here: the two words of a thread and their layout. What never lives here: lines and
//! counters; [`super::physical`] moves credits between them and these words.
//!
//! ```text
//! seat     63..40  window     the home window (all ones: none)
//!          39..36  order      no lower window had an aligned page of this order, or anything at all
//!                             when 0, when the window became home
//!          35..16  version    changes with every rise of the credits
//!          15..0   credits    clear bits of that window which only holders of the seat may set
//! wallet   63..32  version    changes with every deposit
//!          31..0   credits    reserved from the pool, bound to no window
//! hand     63..32  version    changes each time the hand opens
//!          31..0   credits    at most so many are on their way through this home's hand
//! lower    lowest window below home into which this thread released since (a hint)
//! page     no whole window is free below, as far as this thread knows (a hint)
//! ```
//!
//! A thread takes the seat of its number, modulo the number of seats; threads that share one stay
//! correct, since every change is one compare-and-swap. Other threads take credits away from both
//! words when the pool runs short ([`super::physical`], *drain*).
//!
//! **ABA.** Lowering credits needs no version: a word that is equal means the same credits in the
//! same window, whoever put them there. The versions serve the one reader that compares two looks
//! (*is the pool really short?*): it could be fooled after 2^20 (seat) or 2^32 (wallet) rises
//! between its two looks that end in the same credits, and would then report a shortage that had
//! been over for a moment.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Seats of one pool.
#[cfg(not(any(loom, shuttle)))]
pub(crate) const SEATS: usize = 32;
/// Seats of one pool in a model checker: a shared one is worth checking, too.
#[cfg(any(loom, shuttle))]
pub(crate) const SEATS: usize = 2;

/// No window.
const NONE: u64 = 0xff_ffff;
/// Most windows that a seat can name.
pub(crate) const MAX_WINDOWS: u32 = NONE as u32;

/// A seat, by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seat(pub(crate) u64);

impl Seat {
    /// A seat with no window, before anything happened.
    pub(crate) const FREE: Seat = Seat(NONE << 40);

    /// The home window.
    pub(crate) fn window(self) -> Option<u32> {
        let window = self.0 >> 40;
        (window != NONE).then_some(window as u32)
    }

    pub(crate) fn order(self) -> u32 {
        (self.0 >> 36) as u32 & 0xf
    }

    pub(crate) fn credits(self) -> u32 {
        self.0 as u32 & 0xffff
    }

    /// `n` credits fewer.
    pub(crate) fn less(self, n: u32) -> Seat {
        debug_assert!(self.credits() >= n);
        Seat(self.0 - u64::from(n))
    }

    fn bumped(self) -> u64 {
        (self.0 & (0xf_ffff << 16)).wrapping_add(1 << 16) & (0xf_ffff << 16)
    }

    /// `n` credits more.
    pub(crate) fn more(self, n: u32) -> Seat {
        Seat((self.0 & !(0xf_ffff << 16) | self.bumped()) + u64::from(n))
    }

    /// Left: no window, no credits.
    pub(crate) fn left(self) -> Seat {
        Seat(NONE << 40 | self.bumped())
    }

    /// A window becomes home.
    pub(crate) fn taken(self, window: u32, order: u32, credits: u32) -> Seat {
        debug_assert!(credits <= 0xffff && order <= 0xf && window < MAX_WINDOWS);
        Seat(u64::from(window) << 40 | u64::from(order) << 36 | self.bumped() | u64::from(credits))
    }
}

/// The words of one thread, alone on their cache lines (two, since processors fetch pairs).
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Home {
    pub(crate) seat: AtomicU64,
    pub(crate) wallet: AtomicU64,
    pub(crate) hand: AtomicU64,
    pub(crate) lower: AtomicU32,
    pub(crate) page: AtomicU32,
}

/// Credits on their way; they have arrived when this is dropped.
pub(crate) struct Hand<'a> {
    home: &'a Home,
    n: u32,
}

impl Drop for Hand<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire of whoever looks at the hands: what they held can be seen
        // where it was put.
        self.home
            .hand
            .fetch_sub(u64::from(self.n), Ordering::Release);
    }
}

/// A deposit of `n` credits, as what is added to a wallet.
fn deposit(n: u32) -> u64 {
    1 << 32 | u64::from(n)
}

/// Credits of a wallet.
pub(crate) fn credits(wallet: u64) -> u32 {
    wallet as u32
}

impl Home {
    pub(crate) fn new() -> Self {
        Self {
            seat: AtomicU64::new(Seat::FREE.0),
            wallet: AtomicU64::new(0),
            hand: AtomicU64::new(0),
            lower: AtomicU32::new(u32::MAX),
            page: AtomicU32::new(0),
        }
    }

    pub(crate) fn seat(&self) -> Seat {
        // Acquire: pairs with the Release of `change`: the bits are clear that the credits stand
        // for, and whose hand holds the credits that are gone can be seen.
        Seat(self.seat.load(Ordering::Acquire))
    }

    /// Replaces the seat if it is still `old`; else tells what it is.
    pub(crate) fn change(&self, old: Seat, new: Seat) -> Result<(), Seat> {
        // Release: the next holder of these credits sees the bits clear that were cleared before
        // they were raised, and whoever finds them gone sees the open hand. Success acquires
        // nothing that `old` has not: each rise has its version, so it is the same store. Acquire
        // on failure: as in `seat`.
        let done = self
            .seat
            .compare_exchange(old.0, new.0, Ordering::Release, Ordering::Acquire);
        done.map(|_| ()).map_err(Seat)
    }

    /// At most `n` credits are about to go through this home's hand.
    pub(crate) fn open_hand(&self, n: u32) -> Hand<'_> {
        // Relaxed: whoever sees the credits gone from where they were (a seat, a wallet, the total)
        // has acquired the taking, and so sees this before it.
        self.hand.fetch_add(deposit(n), Ordering::Relaxed);
        Hand { home: self, n }
    }

    /// Takes up to `n` credits out of the wallet.
    pub(crate) fn withdraw_up_to(&self, n: u32) -> u32 {
        // Relaxed: the exchange decides.
        let mut wallet = self.wallet.load(Ordering::Relaxed);
        loop {
            let got = credits(wallet).min(n);
            if got == 0 {
                return 0;
            }
            // AcqRel: Acquire pairs with the Release of `put`; Release with the Acquire of a look at
            // the wallet: who finds the credits gone sees the hand that they are in.
            match self.wallet.compare_exchange(
                wallet,
                wallet - u64::from(got),
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return got,
                Err(seen) => wallet = seen,
            }
        }
    }

    /// Takes exactly `n` credits out of the wallet, or none.
    pub(crate) fn withdraw(&self, n: u32) -> bool {
        // Relaxed: the exchange decides.
        let mut wallet = self.wallet.load(Ordering::Relaxed);
        while credits(wallet) >= n {
            // Acquire: pairs with the Release of `put`. These credits are in no hand: they are used.
            match self.wallet.compare_exchange(
                wallet,
                wallet - u64::from(n),
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(seen) => wallet = seen,
            }
        }
        false
    }

    /// Puts `n` credits into the wallet and tells how many it has then.
    pub(crate) fn put(&self, n: u32) -> u32 {
        // Release: pairs with the Acquire of a withdrawal: the counters that these credits stand
        // for were raised before.
        credits(self.wallet.fetch_add(deposit(n), Ordering::Release)) + n
    }
}
