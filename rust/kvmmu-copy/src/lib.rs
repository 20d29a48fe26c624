//! The CPU mover of kvmmu: copies blocks of KV between raw addresses.
//!
//! What lives here: the description of a region, the checks that make a set of moves safe to carry
//! out, the copy itself, and (`pages`) giving whole pages back to the system. What never lives here: a decision about what moves where, and any
//! knowledge of sequences or of Python. This is the only crate of the workspace with `unsafe`.
//!
//! # Why the copy is sound
//! The addresses come from outside, so [`copy_blocks`] is `unsafe` and its caller answers for
//! them. Everything else is checked before the first byte moves: every piece that a set of moves
//! touches lies inside the address space ([`MoveError::RegionOverflow`]), pieces of one region
//! never overlap ([`MoveError::StrideTooSmall`]), and [`check_pairs`] proves that no move of a set
//! reads what another one writes. So the order of the moves in a set does not matter.

#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

mod pages;
mod stream;

use std::ptr;

use thiserror::Error;

pub use pages::{Pages, ReleaseError, page_bytes, release_pages};

/// Pieces of at least this many bytes are written past the caches (non-temporal stores).
///
/// Measured by `measure_against_copy_nonoverlapping` (an ignored test) on two cores of a server
/// processor, 16 moves spread over a pool of 512 blocks, 20 to 80 MiB a pass: streaming takes 0.4
/// to 0.9 of the time from 1 KiB up (160 pieces of 32 KiB: 6.9 against 8.9 ms, 4.7 against 6.7
/// when the pieces of a block lie together), makes no difference at 512 bytes and costs twice the
/// time at 256.
pub const NON_TEMPORAL_BYTES: usize = 1024;

/// The same piece of every block: K of one layer, say, or the scales of one layer.
///
/// Block `b` of the region is the `bytes` bytes at `address + b * stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Address of block 0.
    pub address: usize,
    /// Bytes from one block to the next, at least `bytes`.
    pub stride: u64,
    /// Bytes of a block in this region, at least 1.
    pub bytes: u64,
}

/// Why a set of moves was refused. Nothing has been copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MoveError {
    /// A source or destination that the storage does not have.
    #[error(
        "move {index} names block {block}, but the ids of movable blocks end at {num_blocks} (exclusive)"
    )]
    UnknownBlock {
        /// Position in the list of pairs.
        index: usize,
        /// The id that is too large.
        block: u32,
        /// Ids must be below this.
        num_blocks: u32,
    },
    /// Two moves of one set write the same block.
    #[error("block {block} is the destination of more than one move of the same set")]
    DuplicateDestination {
        /// The block written twice.
        block: u32,
    },
    /// A block that one move of a set reads and another (or the same) one writes.
    #[error("move {index} reads block {block}, which the same set of moves writes")]
    SourceIsDestination {
        /// Position of the move that reads.
        index: usize,
        /// The block read and written.
        block: u32,
    },
    /// A region whose blocks are empty.
    #[error("region {region} has blocks of 0 bytes; at least 1 is needed")]
    EmptyBlock {
        /// Position in the list of regions.
        region: usize,
    },
    /// A region whose blocks would overlap each other.
    #[error(
        "region {region} has a stride of {stride} bytes, less than the {bytes} bytes of a block"
    )]
    StrideTooSmall {
        /// Position in the list of regions.
        region: usize,
        /// Bytes from block to block.
        stride: u64,
        /// Bytes of a block.
        bytes: u64,
    },
    /// A block whose last byte has no address.
    #[error(
        "region {region} ends outside of the address space: address {address:#x}, stride {stride}, \
         {bytes} bytes a block, block {block}"
    )]
    RegionOverflow {
        /// Position in the list of regions.
        region: usize,
        /// Address of block 0.
        address: usize,
        /// Bytes from block to block.
        stride: u64,
        /// Bytes of a block.
        bytes: u64,
        /// The highest block that was asked for.
        block: u32,
    },
}

/// Up to this many moves are checked without an allocation (a pass moves 32 by default).
const ON_STACK: usize = 256;

/// Checks that the pairs (source, destination) can be copied in any order: every id is below
/// `num_blocks`, no block is written twice, and none is both read and written.
///
/// A block may be the source of several pairs (copy-on-write of a shared block does that).
///
/// Costs O(m log m) for m pairs, whatever the size of the pool; allocates once, 4 bytes a pair,
/// above 256 pairs and not at all up to there.
///
/// # Errors
/// [`MoveError::UnknownBlock`], [`MoveError::DuplicateDestination`] or
/// [`MoveError::SourceIsDestination`].
pub fn check_pairs(pairs: &[[u32; 2]], num_blocks: u32) -> Result<(), MoveError> {
    for (index, pair) in pairs.iter().enumerate() {
        for &block in pair {
            if block >= num_blocks {
                return Err(MoveError::UnknownBlock {
                    index,
                    block,
                    num_blocks,
                });
            }
        }
    }
    let mut on_stack = [0; ON_STACK];
    let mut on_heap;
    let destinations = if pairs.len() <= ON_STACK {
        &mut on_stack[..pairs.len()]
    } else {
        on_heap = vec![0; pairs.len()];
        &mut on_heap[..]
    };
    for (slot, pair) in destinations.iter_mut().zip(pairs) {
        *slot = pair[1];
    }
    destinations.sort_unstable();
    if let Some(twice) = destinations.windows(2).find(|two| two[0] == two[1]) {
        return Err(MoveError::DuplicateDestination { block: twice[0] });
    }
    for (index, &[block, _]) in pairs.iter().enumerate() {
        if destinations.binary_search(&block).is_ok() {
            return Err(MoveError::SourceIsDestination { index, block });
        }
    }
    Ok(())
}

/// Checks that blocks `0 ..= highest` of every region have addresses and do not overlap within it.
///
/// # Errors
/// [`MoveError::EmptyBlock`], [`MoveError::StrideTooSmall`] or [`MoveError::RegionOverflow`].
pub fn check_regions(regions: &[Region], highest: u32) -> Result<(), MoveError> {
    for (
        region,
        &Region {
            address,
            stride,
            bytes,
        },
    ) in regions.iter().enumerate()
    {
        if bytes == 0 {
            return Err(MoveError::EmptyBlock { region });
        }
        if stride < bytes {
            return Err(MoveError::StrideTooSmall {
                region,
                stride,
                bytes,
            });
        }
        // Rust allows no object above isize::MAX bytes, so no honest address lies past it either
        // on the machines that we run on; this also keeps every later sum from wrapping.
        let end = stride
            .checked_mul(u64::from(highest))
            .and_then(|offset| offset.checked_add(bytes))
            .and_then(|length| length.checked_add(address as u64));
        if address == 0 || end.is_none_or(|end| end > isize::MAX as u64) {
            return Err(MoveError::RegionOverflow {
                region,
                address,
                stride,
                bytes,
                block: highest,
            });
        }
    }
    Ok(())
}

/// Copies block `pair[0]` to block `pair[1]` in every region, for every pair.
///
/// Region by region, by ascending source: moves whose sources and destinations follow each other
/// are one copy, and memory is read upwards. (One pair after the other took 1.04 to 1.11 of the time
/// with single blocks all over the pool: 160 regions, pieces of 32 KiB.) Runs of the same length are
/// copied four at once (`stream`). Allocates 8 bytes a pair
/// above 256 pairs.
///
/// Returns when every byte is visible to whoever synchronises with this thread afterwards
/// (non-temporal stores are fenced).
///
/// # Errors
/// Those of [`check_regions`]; nothing has been copied then.
///
/// # Safety
/// - For every region, blocks `0 ..= b` with `b` the highest id in `pairs` must be one live
///   allocation each (or parts of one) that is readable and writable for the whole call.
/// - Blocks of different regions must not overlap.
/// - [`check_pairs`] must have accepted `pairs`.
/// - Nobody writes the sources, and nobody reads or writes the destinations, during the call.
pub unsafe fn copy_blocks(regions: &[Region], pairs: &[[u32; 2]]) -> Result<(), MoveError> {
    let Some(highest) = pairs.iter().flatten().copied().max() else {
        return Ok(());
    };
    check_regions(regions, highest)?;
    let mut on_stack = [[0; 2]; ON_STACK];
    let mut on_heap;
    let pairs = if pairs.len() <= ON_STACK {
        let sorted = &mut on_stack[..pairs.len()];
        sorted.copy_from_slice(pairs);
        sorted
    } else {
        on_heap = pairs.to_vec();
        &mut on_heap[..]
    };
    pairs.sort_unstable();
    let non_temporal = features().non_temporal;
    let mut streamed = false;
    for region in regions {
        // `check_regions` did these sums for the highest block without overflow, and its end
        // fits an isize, so neither the sums nor the casts can go wrong for a lower one, nor for
        // the bytes of blocks that lie back to back up to it.
        let piece = |&[source, destination]: &[u32; 2]| {
            let from = region.address + (u64::from(source) * region.stride) as usize;
            let to = region.address + (u64::from(destination) * region.stride) as usize;
            let from = ptr::with_exposed_provenance::<u8>(from);
            (from, ptr::with_exposed_provenance_mut::<u8>(to))
        };
        let run = |rest| match region.stride == region.bytes {
            true => run(rest),
            false => 1,
        };
        let mut rest = &*pairs;
        while let Some(first) = rest.first() {
            let count = run(rest);
            let bytes = count * region.bytes as usize;
            if !non_temporal || bytes < NON_TEMPORAL_BYTES {
                let (from, to) = piece(first);
                // SAFETY: the caller promises that all blocks are live and that nobody else touches
                // them; no source is a destination (`check_pairs`), and pieces of different blocks
                // do not overlap because the stride is at least `bytes` (`check_regions`). `u8` needs
                // no alignment.
                unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
                rest = &rest[count..];
                continue;
            }
            streamed = true;
            // Runs of the same length, several at once.
            let mut ends = (1..=stream::TOGETHER).map(|n| n * count);
            let alike = |end: usize| {
                rest.get(end - count..)
                    .is_some_and(|rest| !rest.is_empty() && run(rest) == count)
            };
            if ends.all(alike) {
                let pieces = std::array::from_fn(|i| piece(&rest[i * count]));
                // SAFETY: as above, of each piece. The processor has what `stream` needs: `features`
                // asked it.
                unsafe { stream::copy_together(pieces, bytes) };
                rest = &rest[stream::TOGETHER * count..];
            } else {
                let (from, to) = piece(first);
                // SAFETY: as above.
                unsafe { stream::copy(from, to, bytes) };
                rest = &rest[count..];
            }
        }
    }
    if streamed {
        // SAFETY: `streamed` is only set after `features` found what the fence needs.
        unsafe { stream::fence() };
    }
    Ok(())
}

/// How many of the first pairs go on from each other at both ends: one copy where blocks lie back to
/// back.
fn run(pairs: &[[u32; 2]]) -> usize {
    let follows = |two: &[[u32; 2]]| two[1][0] == two[0][0] + 1 && two[1][1] == two[0][1] + 1;
    1 + pairs.windows(2).take_while(|two| follows(two)).count()
}

/// What the mover found on this processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// 32-byte vector instructions.
    pub avx2: bool,
    /// Large pieces are written past the caches.
    pub non_temporal: bool,
}

/// Asks the processor, once (the answer is cached by the standard library).
#[must_use]
pub fn features() -> Features {
    let avx2 = stream::available();
    Features {
        avx2,
        non_temporal: avx2,
    }
}

#[cfg(test)]
mod tests;
