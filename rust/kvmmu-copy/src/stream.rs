//! Copies that write past the caches.
//!
//! A block that moves is not read again soon by the core that moves it, and a pass moves far more
//! than a cache holds. An ordinary store first reads the line that it is about to overwrite; a
//! non-temporal one does not, which saves a third of the traffic. Such stores are weakly ordered:
//! [`fence`] must run before anybody is told that the copy is done.
//!
//! Pieces that do not follow each other are copied four at once: wherever a piece ends, the processor has
//! to find out anew what is read next, and so it has three others to go on with meanwhile.
//!
//! On processors without AVX2, [`available`] says no and the rest must not be called.

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{available, copy, copy_together, fence};

/// Pieces that [`copy_together`] copies at once.
pub(crate) const TOGETHER: usize = 4;

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    use std::ptr;

    use super::TOGETHER;

    /// Bytes of a vector register.
    const VECTOR: usize = size_of::<__m256i>();
    /// Destinations are aligned to a cache line, so that every line is written whole: a line
    /// written in part leaves the write-combining buffer early and costs a read after all.
    const LINE: usize = 64;
    /// Bytes a turn of the loop: four loads in flight before the first store.
    const TURN: usize = 4 * VECTOR;

    /// Whether [`copy`] and [`fence`] may be called.
    pub(crate) fn available() -> bool {
        is_x86_feature_detected!("avx2")
    }

    /// Copies `bytes` bytes; whole aligned lines of the destination are streamed.
    ///
    /// # Safety
    /// [`available`] said yes. `from` is readable and `to` writable for `bytes` bytes, the two do
    /// not overlap, and nobody else touches them during the call.
    #[target_feature(enable = "avx2")]
    pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: what the caller promised of this piece.
        unsafe { copy_pieces([(from, to)], bytes) };
    }

    /// Copies several pieces of `bytes` bytes each, a little of each in turn. They take as long as one
    /// after the other where destinations lie differently against cache lines.
    ///
    /// # Safety
    /// As for [`copy`], of each piece; no piece is written by another.
    #[target_feature(enable = "avx2")]
    pub(crate) unsafe fn copy_together(pieces: [(*const u8, *mut u8); TOGETHER], bytes: usize) {
        let head = pieces[0].1.align_offset(LINE);
        if pieces.iter().all(|(_, to)| to.align_offset(LINE) == head) {
            // SAFETY: what the caller promised.
            return unsafe { copy_pieces(pieces, bytes) };
        }
        for (from, to) in pieces {
            // SAFETY: what the caller promised.
            unsafe { copy(from, to, bytes) };
        }
    }

    /// Copies `N` pieces whose destinations lie alike against cache lines.
    ///
    /// # Safety
    /// As for [`copy_together`].
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn copy_pieces<const N: usize>(pieces: [(*const u8, *mut u8); N], bytes: usize) {
        // align_offset may give up in theory (usize::MAX); then everything is head.
        let head = pieces[0].1.align_offset(LINE).min(bytes);
        let turns = (bytes - head) / TURN;
        let tail = head + turns * TURN;
        for (from, to) in pieces {
            // SAFETY: head <= bytes, and the caller answers for `bytes` bytes.
            unsafe { ptr::copy_nonoverlapping(from, to, head) };
        }
        for turn in 0..turns {
            let offset = head + turn * TURN;
            for (from, to) in pieces {
                // SAFETY: offset + TURN <= tail <= bytes, so all four loads and stores stay inside;
                // loads need no alignment; `to + head` is aligned to LINE (or there are no turns), and
                // offset - head is a multiple of TURN, so every store is aligned to VECTOR.
                unsafe {
                    let source = from.add(offset).cast::<__m256i>();
                    let target = to.add(offset).cast::<__m256i>();
                    let a = _mm256_loadu_si256(source);
                    let b = _mm256_loadu_si256(source.add(1));
                    let c = _mm256_loadu_si256(source.add(2));
                    let d = _mm256_loadu_si256(source.add(3));
                    _mm256_stream_si256(target, a);
                    _mm256_stream_si256(target.add(1), b);
                    _mm256_stream_si256(target.add(2), c);
                    _mm256_stream_si256(target.add(3), d);
                }
            }
        }
        for (from, to) in pieces {
            // SAFETY: tail <= bytes, and the rest ends exactly at `bytes`.
            unsafe { ptr::copy_nonoverlapping(from.add(tail), to.add(tail), bytes - tail) };
        }
    }

    /// Orders the stores of every earlier [`copy`] of this thread before its later stores: whoever
    /// then sees a flag or takes a lock that this thread releases sees the copied bytes.
    ///
    /// # Safety
    /// [`available`] said yes.
    pub(crate) unsafe fn fence() {
        // SAFETY: AVX2, which the caller found, includes SSE.
        unsafe { _mm_sfence() };
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use plain::{available, copy, copy_together, fence};

#[cfg(not(target_arch = "x86_64"))]
mod plain {
    /// There is no streaming copy for this processor.
    pub(crate) fn available() -> bool {
        false
    }

    /// # Safety
    /// Never called: [`available`] says no. It is a plain copy all the same, with its conditions.
    pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise is that of `copy_nonoverlapping`.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
    }

    /// # Safety
    /// Never called, as [`copy`]; its conditions hold for each piece.
    pub(crate) unsafe fn copy_together(
        pieces: [(*const u8, *mut u8); super::TOGETHER],
        bytes: usize,
    ) {
        for (from, to) in pieces {
            // SAFETY: the caller's promise is that of `copy`.
            unsafe { copy(from, to, bytes) };
        }
    }

    /// # Safety
    /// None needed; the signature is that of the other processors.
    pub(crate) unsafe fn fence() {}
}
