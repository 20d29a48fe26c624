// move_blocks_indirect: copies the blocks that a buffer in device memory names, inside of a graph.
//
// Here: the kernel for moves that are known only when a captured CUDA graph is replayed. Grid and
// arguments never change; what to move, and whether anything, stands in the buffer.
//
//   base              lowest address of all regions
//   regions           Region [num_regions], device memory (blocks.cuh)
//   num_regions       rows, at least 1
//   chunks_per_block  chunks of a block in all regions
//   buffer            uint32 [2 + 2 * capacity], device memory, 8-byte aligned:
//                     [0] number of moves, [1] ticket (0 between launches, the kernel's own),
//                     [2 + 2i] source and [3 + 2i] destination of move i
//   capacity          moves that the buffer holds; capacity * chunks_per_block < 2^31
//   refused           uint32 [1], device memory: set to the count if it exceeds the capacity
//
// Launch: a fixed grid of x, blocks of 32 .. 256 threads (a multiple of 32). No shared memory. With
// no moves each thread reads one word and ends.
//
// Moves are carried out once: the last thread block to finish sets the count to 0, so a graph that
// is replayed without new moves copies nothing (copied again, they would overwrite blocks that are
// in use by then). A count above the capacity copies nothing and is reported in `refused`.
//
// The caller's duties are those of move_blocks. Besides: the buffer is written in the order of the
// stream, behind one launch and before the next, and no two launches on one buffer run at once.
#include "blocks.cuh"

extern "C" __global__ void __launch_bounds__(256)
    move_blocks_indirect(char* base, const Region* regions, u32 num_regions, u32 chunks_per_block,
                         u32* buffer, u32 capacity, u32* refused) {
    const u32 count = buffer[0];
    if (count == 0) return;
    if (count <= capacity) {
        copy_moves(base, regions, num_regions, chunks_per_block,
                   reinterpret_cast<const uint2*>(buffer + 2), count);
    } else if (blockIdx.x == 0 && threadIdx.x == 0) {
        *refused = count;
    }
    // Each thread block takes a ticket once all its threads have read the count. Whoever has the last
    // one knows that nobody will read it again. atomicInc wraps: the ticket is 0 for the next launch.
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicInc(buffer + 1, gridDim.x - 1) == gridDim.x - 1) buffer[0] = 0;
    }
}
