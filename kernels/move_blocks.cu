// move_blocks: copies whole blocks, all regions and all moves in one launch.
//
// Here: the kernel for moves that the host knows when it launches. They travel by value in the
// kernel's arguments, so there is no buffer to upload and none that could be reused too early.
//
//   base              lowest address of all regions
//   regions           Region [num_regions], device memory (blocks.cuh)
//   num_regions       rows, at least 1
//   chunks_per_block  chunks of a block in all regions: that of the last row and its own
//   num_moves         0 .. 508; num_moves * chunks_per_block < 2^31
//   moves             (source, destination) block ids; those behind num_moves are not read
//
// Launch: any grid of x, blocks of 32 .. 256 threads (a multiple of 32). Warps take chunks in turn:
// fewer thread blocks leave room for other kernels, more finish sooner. No shared memory.
//
// Alignment: each region says how wide its words are. All five widths are correct, 16 is the fast
// one.
//
// The caller's duties. Ids are those of blocks that every region has. No destination is another
// destination or any source (a source may repeat): the order of the copies is undefined. The launch
// comes after the last write of its sources, and nothing reads or writes a destination, nor writes a
// source, until it has finished.
#include "blocks.cuh"

// 4096 bytes of arguments work on every driver: 32 for the others leave room for 508 pairs.
constexpr u32 kMaxMoves = 508;

struct Moves {
    uint2 pairs[kMaxMoves];
};
static_assert(sizeof(Moves) + 32 <= 4096, "kernel arguments are limited to 4 KiB");

extern "C" __global__ void __launch_bounds__(256)
    move_blocks(char* base, const Region* regions, u32 num_regions, u32 chunks_per_block,
                u32 num_moves, const __grid_constant__ Moves moves) {
    copy_moves(base, regions, num_regions, chunks_per_block, moves.pairs, num_moves);
}
