//! Every copy is compared with what a plain byte-by-byte model gives, over the whole buffer, so
//! that a byte written beside a block shows as well as a byte missed inside of it.

use std::time::Instant;

use super::*;

/// A pattern in which any two nearby bytes and any two blocks differ.
fn pattern(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    (0..length)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// Where a region lies in a buffer, in bytes.
#[derive(Clone, Copy)]
struct Piece {
    offset: usize,
    stride: usize,
    bytes: usize,
}

/// Runs `copy_blocks` on a buffer and compares the whole of it with a model.
fn assert_copies_exactly(length: usize, pieces: &[Piece], pairs: &[[u32; 2]], blocks: u32) {
    let mut buffer = pattern(length);
    let mut expected = buffer.clone();
    for piece in pieces {
        assert!(piece.offset + (blocks as usize - 1) * piece.stride + piece.bytes <= length);
        for &[source, destination] in pairs {
            let from = piece.offset + source as usize * piece.stride;
            let to = piece.offset + destination as usize * piece.stride;
            expected.copy_within(from..from + piece.bytes, to);
        }
    }
    let base = buffer.as_mut_ptr().expose_provenance();
    let regions: Vec<Region> = pieces
        .iter()
        .map(|piece| Region {
            address: base + piece.offset,
            stride: piece.stride as u64,
            bytes: piece.bytes as u64,
        })
        .collect();
    check_pairs(pairs, blocks).unwrap();
    // SAFETY: the assertion above keeps every block inside the buffer, which nobody else has;
    // the callers below give pieces that do not overlap.
    unsafe { copy_blocks(&regions, pairs) }.unwrap();
    assert!(
        buffer == expected,
        "bytes differ for {} pieces, pairs {pairs:?}",
        pieces.len()
    );
}

#[test]
fn every_size_from_1_to_200_at_every_alignment_copies_exactly_its_bytes() {
    for bytes in 1..=200 {
        for offset in [0, 1, 7, 31, 32, 33, 63] {
            let stride = bytes + bytes % 3;
            let piece = Piece {
                offset,
                stride,
                bytes,
            };
            assert_copies_exactly(offset + 6 * stride, &[piece], &[[0, 3], [1, 4], [0, 5]], 6);
        }
    }
}

#[test]
fn sizes_around_the_streaming_threshold_copy_exactly_their_bytes() {
    for base in [NON_TEMPORAL_BYTES, 2 * NON_TEMPORAL_BYTES] {
        for bytes in base - 130..=base + 130 {
            let piece = Piece {
                offset: bytes % 67,
                stride: bytes + bytes % 5,
                bytes,
            };
            let length = piece.offset + 3 * piece.stride;
            assert_copies_exactly(length, &[piece], &[[2, 0]], 3);
        }
    }
}

#[test]
fn pieces_that_are_copied_together_copy_exactly_their_bytes() {
    // Sources descend and ascend, destinations lie apart: no two moves follow each other. With a
    // stride of whole cache lines all destinations lie alike against them, with others they do not.
    const BLOCKS: u32 = 30;
    for moves in 1..=9 {
        let pairs: Vec<[u32; 2]> = (0..moves).map(|i| [2 * (i * 5 % 9), 11 + 2 * i]).collect();
        for bytes in [1024, 1087, 4096, 5000] {
            for (gap, offset) in [(0, 0), (64 - bytes % 64, 3), (1, 0), (32, 65)] {
                let piece = Piece {
                    offset,
                    stride: bytes + gap,
                    bytes,
                };
                let length = offset + BLOCKS as usize * piece.stride;
                assert_copies_exactly(length, &[piece], &pairs, BLOCKS);
            }
        }
    }
    // Runs of two, five times, and one block between them.
    let runs = [(0, 40), (6, 45), (9, 50), (12, 55), (15, 60)];
    let mut pairs: Vec<[u32; 2]> = (runs.iter())
        .flat_map(|&(from, to)| [[from, to], [from + 1, to + 1]])
        .collect();
    pairs.push([4, 30]);
    let piece = Piece {
        offset: 7,
        stride: 1200,
        bytes: 1200,
    };
    assert_copies_exactly(7 + 70 * 1200, &[piece], &pairs, 70);
}

#[test]
fn quantised_and_odd_strides_are_not_garbled() {
    // 34 KiB and 18 KiB are blocks of 8- and 4-bit formats with their scales inside; fp8 with one
    // float a row behind it gives odd strides; K-only layers are regions like any other.
    let sizes: [(usize, usize); 5] = [
        (34 * 1024, 34 * 1024),
        (18 * 1024, 18 * 1024),
        (17 * 1031, 17 * 1031),
        (16 * 1024 + 64, 16 * 1024 + 97),
        (3, 40_001),
    ];
    let blocks = 5;
    let mut pieces = Vec::new();
    let mut end = 13;
    for (bytes, stride) in sizes {
        pieces.push(Piece {
            offset: end,
            stride,
            bytes,
        });
        end += blocks * stride + 1;
    }
    assert_copies_exactly(end, &pieces, &[[4, 0], [3, 1]], blocks as u32);
}

#[test]
fn moves_that_follow_each_other_are_one_copy_and_copy_exactly_their_bytes() {
    // Runs of 1 to 5 blocks, in a shuffled order, with gaps at either end, small pieces and large:
    // back to back and with a gap behind each.
    let runs = [(3, 40, 5), (20, 9, 1), (21, 60, 2), (23, 62, 3), (30, 0, 3)];
    let mut pairs: Vec<[u32; 2]> = runs
        .iter()
        .flat_map(|&(from, to, n)| (0..n).map(move |at| [from + at, to + at]))
        .collect();
    for turn in 0..pairs.len() {
        pairs.rotate_left(turn);
        for (bytes, gap) in [(96, 0), (96, 7), (700, 0), (3000, 0), (3000, 40)] {
            let stride = bytes + gap;
            let offset = 5;
            let pieces = [
                Piece {
                    offset,
                    stride,
                    bytes,
                },
                Piece {
                    offset: offset + 70 * stride + 3,
                    stride,
                    bytes,
                },
            ];
            assert_copies_exactly(2 * (offset + 70 * stride), &pieces, &pairs, 70);
        }
    }
    assert_eq!(run(&[[1, 7], [2, 8], [3, 10]]), 2);
    assert_eq!(run(&[[1, 7]]), 1);
    // Copy-on-write: one source, destinations that follow each other.
    assert_eq!(run(&[[1, 7], [1, 8]]), 1);
}

#[test]
fn interleaved_regions_leave_each_other_alone() {
    // Block-major: one buffer, every layer's piece of a block side by side, with a gap of 5 bytes.
    let bytes = 4096 + 48;
    let layers = 6;
    let stride = layers * bytes + 5;
    let pieces: Vec<Piece> = (0..layers - 1)
        .map(|layer| Piece {
            offset: layer * bytes,
            stride,
            bytes,
        })
        .collect();
    assert_copies_exactly(9 * stride, &pieces, &[[8, 2], [7, 0], [5, 3]], 9);
}

#[test]
fn blocks_beyond_four_gib_are_found_by_64_bit_arithmetic() {
    // Zeroed memory of this size is mapped lazily: only the pages touched below exist.
    let stride: usize = 1_002_240;
    let bytes: usize = 1_002_240 - 999;
    let blocks: usize = 4_510;
    let mut buffer = vec![0_u8; stride * blocks];
    assert!(buffer.len() > 4 << 30);
    // 2143 is the first block whose offset does not fit a signed 32-bit integer, 4286 an unsigned.
    let sources = [2142_usize, 2143, 4285];
    let destinations = [4286_usize, 4287, 4509];
    let data = pattern(sources.len() * bytes);
    for (source, content) in sources.iter().zip(data.chunks(bytes)) {
        buffer[source * stride..][..bytes].copy_from_slice(content);
    }
    let region = Region {
        address: buffer.as_mut_ptr().expose_provenance(),
        stride: stride as u64,
        bytes: bytes as u64,
    };
    let pairs: Vec<[u32; 2]> = sources
        .iter()
        .zip(destinations)
        .map(|(&s, d)| [s as u32, d as u32])
        .collect();
    check_pairs(&pairs, blocks as u32).unwrap();
    // SAFETY: block 4509 is the last of the buffer, which nobody else has.
    unsafe { copy_blocks(&[region], &pairs) }.unwrap();
    for (destination, content) in destinations.iter().zip(data.chunks(bytes)) {
        assert!(buffer[destination * stride..][..bytes] == *content);
        assert!(
            buffer[destination * stride + bytes..][..stride - bytes]
                .iter()
                .all(|&b| b == 0)
        );
    }
    // Where the offsets would have landed in 32 bits, nothing was written.
    for wrapped in destinations.map(|d| (d * stride) & 0xffff_ffff) {
        if !sources
            .iter()
            .any(|s| (s * stride).abs_diff(wrapped) < stride)
        {
            assert!(buffer[wrapped..][..64].iter().all(|&b| b == 0));
        }
    }
}

#[test]
fn a_region_that_leaves_the_address_space_is_refused_before_anything_is_copied() {
    let mut buffer = pattern(64);
    let before = buffer.clone();
    let address = buffer.as_mut_ptr().expose_provenance();
    let good = Region {
        address,
        stride: 16,
        bytes: 16,
    };
    for bad in [
        Region {
            stride: u64::MAX,
            ..good
        },
        Region {
            stride: u64::MAX / 3,
            ..good
        },
        Region {
            stride: 1 << 62,
            ..good
        },
        Region {
            address: usize::MAX - 8,
            ..good
        },
        Region { address: 0, ..good },
    ] {
        // SAFETY: block 0 and 3 of `good` lie in the buffer; `bad` is refused.
        let refused = unsafe { copy_blocks(&[good, bad], &[[0, 3]]) };
        assert!(
            matches!(
                refused,
                Err(MoveError::RegionOverflow {
                    region: 1,
                    block: 3,
                    ..
                })
            ),
            "{refused:?}"
        );
    }
    assert_eq!(
        check_regions(&[good, Region { stride: 15, ..good }], 3),
        Err(MoveError::StrideTooSmall {
            region: 1,
            stride: 15,
            bytes: 16
        })
    );
    assert_eq!(
        check_regions(&[Region { bytes: 0, ..good }], 3),
        Err(MoveError::EmptyBlock { region: 0 })
    );
    assert_eq!(buffer, before);
}

#[test]
fn no_pairs_and_no_regions_are_fine() {
    assert_eq!(check_pairs(&[], 0), Ok(()));
    // SAFETY: nothing is touched.
    unsafe {
        copy_blocks(&[], &[[0, 1]]).unwrap();
        copy_blocks(
            &[Region {
                address: 0,
                stride: 1,
                bytes: 1,
            }],
            &[],
        )
        .unwrap();
    }
}

#[test]
fn pairs_that_cannot_be_copied_in_any_order_are_refused() {
    assert_eq!(
        check_pairs(&[[0, 1], [0, 2]], 3),
        Ok(()),
        "one source may go to two places"
    );
    assert_eq!(
        check_pairs(&[[0, 1], [2, 3]], 3),
        Err(MoveError::UnknownBlock {
            index: 1,
            block: 3,
            num_blocks: 3
        })
    );
    assert_eq!(
        check_pairs(&[[u32::MAX, 1]], 3),
        Err(MoveError::UnknownBlock {
            index: 0,
            block: u32::MAX,
            num_blocks: 3
        })
    );
    assert_eq!(
        check_pairs(&[[0, 5], [1, 4], [2, 5]], 6),
        Err(MoveError::DuplicateDestination { block: 5 })
    );
    assert_eq!(
        check_pairs(&[[0, 5], [5, 4]], 6),
        Err(MoveError::SourceIsDestination { index: 1, block: 5 })
    );
    assert_eq!(
        check_pairs(&[[3, 3]], 6),
        Err(MoveError::SourceIsDestination { index: 0, block: 3 })
    );
}

#[test]
fn large_sets_are_checked_like_small_ones() {
    for count in [
        ON_STACK as u32 - 1,
        ON_STACK as u32,
        ON_STACK as u32 + 1,
        8192,
    ] {
        let mut pairs: Vec<[u32; 2]> = (0..count).map(|i| [i, 2 * count - 1 - i]).collect();
        assert_eq!(check_pairs(&pairs, 2 * count), Ok(()));
        let last = pairs.len() - 1;
        pairs[last][1] = 2 * count - 1;
        assert_eq!(
            check_pairs(&pairs, 2 * count),
            Err(MoveError::DuplicateDestination {
                block: 2 * count - 1
            })
        );
        pairs[last] = [2 * count - 1, count];
        assert_eq!(
            check_pairs(&pairs, 2 * count),
            Err(MoveError::SourceIsDestination {
                index: last,
                block: 2 * count - 1
            })
        );
    }
}

/// Best of `rounds`, in milliseconds.
fn best_ms(rounds: usize, mut work: impl FnMut()) -> f64 {
    (0..rounds)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64() * 1e3
        })
        .fold(f64::INFINITY, f64::min)
}

/// Copies like `copy_blocks`, but one way whatever the size.
///
/// # Safety
/// As for `copy_blocks`, and `features().non_temporal` if `streamed`.
unsafe fn copy_one_way(regions: &[Region], pairs: &[[u32; 2]], streamed: bool) {
    for &[source, destination] in pairs {
        for region in regions {
            let from = region.address + source as usize * region.stride as usize;
            let to = region.address + destination as usize * region.stride as usize;
            let from = ptr::with_exposed_provenance::<u8>(from);
            let to = ptr::with_exposed_provenance_mut::<u8>(to);
            let bytes = region.bytes as usize;
            // SAFETY: the caller's promise.
            unsafe {
                if streamed {
                    stream::copy(from, to, bytes);
                } else {
                    ptr::copy_nonoverlapping(from, to, bytes);
                }
            }
        }
    }
    if streamed {
        // SAFETY: the caller's promise.
        unsafe { stream::fence() };
    }
}

/// The figures that `NON_TEMPORAL_BYTES` and the docs are taken from. Prints, asserts nothing.
#[test]
#[ignore = "a measurement of half a minute and 2.7 GB: run it with --release -- --ignored --nocapture"]
fn measure_against_copy_nonoverlapping() {
    const BLOCKS: usize = 512;
    let pairs: Vec<[u32; 2]> = (0..16).map(|i| [i * 30, 511 - (i * 7) % 16 * 32]).collect();
    check_pairs(&pairs, BLOCKS as u32).unwrap();
    println!("16 moves in a pool of {BLOCKS} blocks; ms, best of 15");
    println!("layered: a buffer a layer; packed: all pieces of a block side by side");
    for (pieces, bytes) in [
        (160, 32 * 1024),
        (160, 8192),
        (1280, 4096),
        (2560, 2048),
        (2560, 1024),
        (2560, 512),
        (2560, 256),
    ] {
        let mut buffer = vec![1_u8; pieces * BLOCKS * bytes];
        let base = buffer.as_mut_ptr().expose_provenance();
        let layouts = [
            ("layered", BLOCKS * bytes, bytes),
            ("packed", bytes, pieces * bytes),
        ];
        for (name, step, stride) in layouts {
            let regions: Vec<Region> = (0..pieces)
                .map(|piece| Region {
                    address: base + piece * step,
                    stride: stride as u64,
                    bytes: bytes as u64,
                })
                .collect();
            // SAFETY: every block of every region lies in the buffer; `check_pairs` said yes.
            let plain = best_ms(15, || unsafe { copy_one_way(&regions, &pairs, false) });
            let streamed = if features().non_temporal {
                // SAFETY: as above, and asked for.
                best_ms(15, || unsafe { copy_one_way(&regions, &pairs, true) })
            } else {
                f64::NAN
            };
            // SAFETY: as above.
            let mover = best_ms(15, || unsafe { copy_blocks(&regions, &pairs) }.unwrap());
            let gib = (2 * 16 * pieces * bytes) as f64 / f64::from(1 << 30);
            println!(
                "{pieces:5} pieces x {bytes:5} B ({:5.1} MiB) {name:8} copy_nonoverlapping {plain:7.3}  \
                 streamed {streamed:7.3}  copy_blocks {mover:7.3} ({:.1} GiB/s read + write)",
                gib * 512.0,
                gib / mover * 1e3
            );
        }
    }
    for count in [32_u32, 256, 8192] {
        let pairs: Vec<[u32; 2]> = (0..count)
            .map(|i| [(i * 7919) % count, count + i])
            .collect();
        let ms = best_ms(50, || check_pairs(&pairs, 1 << 20).unwrap());
        println!("check_pairs, {count} pairs: {:.1} us", ms * 1e3);
    }
}
