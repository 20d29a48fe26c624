// Where the bytes of a block lie, and how one warp copies a part of them.
//
// Here: the region table, its chunks, and the copy of one chunk. Never here: a kernel, or a check of
// block ids (the host has checked them).
//
// A block is one piece in each region. A piece is cut into chunks of kChunkWords words, where a word
// is what the region's alignment allows one access to be (16, 8, 4, 2 or 1 bytes). One warp works on
// one chunk: each lane has kInFlight words, all loaded before the first is stored. Chunks of all
// pieces are numbered through, so small pieces fill the lanes as well as large ones: a piece of
// 4 KiB is 2 chunks of 2 KiB.
#ifndef KVMMU_BLOCKS_CUH
#define KVMMU_BLOCKS_CUH

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kLanes = 32;                         // threads of a warp
constexpr u32 kInFlight = 4;                       // words a lane loads before it stores one
constexpr u32 kChunkWords = kLanes * kInFlight;    // 128: 2 KiB of 16-byte words

// A row of the region table, uint64 [num_regions, 5] in device memory. The host fills it
// (kvmmu.cuda.RegionTable); it is constant while kernels run. `base`, the lowest address of all
// regions, is an argument of each kernel: from that the compiler knows that what it points at is
// global memory (LDG and STG). Of an address that came out of a table it would have to ask.
struct Region {
    u64 offset;         // of block 0, bytes behind `base`
    u64 stride;         // bytes from one block to the next: 64 bits, so no product below wraps
    u64 block_bytes;    // bytes of a block in this region
    u64 width;          // bytes of a word: the largest of 16, 8, 4, 2, 1 that divides the address of
                        // block 0, the stride and block_bytes
    u64 first_chunk;    // chunks of a block in all regions before this one: 0 in the first row
};

// The warps of a launch, numbered through. blockDim.x is a multiple of 32.
__device__ inline u32 this_warp() {
    return blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes;
}
__device__ inline u32 num_warps() { return gridDim.x * (blockDim.x / kLanes); }
__device__ inline u32 this_lane() { return threadIdx.x % kLanes; }

// The row whose chunks include this one of a block: the last with first_chunk <= chunk. All lanes of
// a warp ask for the same chunk, and the table stays in the caches.
__device__ inline const Region& region_of(const Region* regions, u32 num_regions, u32 chunk) {
    u32 low = 0;
    for (u32 high = num_regions; high - low > 1;) {
        const u32 middle = low + (high - low) / 2;
        if (regions[middle].first_chunk <= chunk) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return regions[low];
}

// Copies the words of one chunk, at most kChunkWords of the `bytes` bytes that are left of the piece.
// `held` begins as zeros only so that no older value of it has to be kept in registers.
template <class Word>
__device__ inline void copy_chunk(const char* from, char* to, u64 bytes) {
    const Word* source = reinterpret_cast<const Word*>(from) + this_lane();
    Word* target = reinterpret_cast<Word*>(to) + this_lane();
    const u64 words = bytes / sizeof(Word);
    Word held[kInFlight] = {};
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
        if (this_lane() + k * kLanes < words) held[k] = source[k * kLanes];
    }
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
        if (this_lane() + k * kLanes < words) target[k * kLanes] = held[k];
    }
}

// Copies block pairs[i].x to block pairs[i].y in every region, for i < num_moves.
// num_moves * chunks_per_block < 2^31. A warp takes every num_warps()-th chunk, so any grid will do.
__device__ inline void copy_moves(char* base, const Region* regions, u32 num_regions,
                                  u32 chunks_per_block, const uint2* pairs, u32 num_moves) {
    const u32 total = num_moves * chunks_per_block;
    for (u32 index = this_warp(); index < total; index += num_warps()) {
        const u32 move = index / chunks_per_block;
        const u32 chunk = index - move * chunks_per_block;
        const Region& region = region_of(regions, num_regions, chunk);
        const u64 done = (chunk - region.first_chunk) * region.width * kChunkWords;
        char* piece = base + region.offset + done;
        const char* from = piece + pairs[move].x * region.stride;
        char* to = piece + pairs[move].y * region.stride;
        const u64 left = region.block_bytes - done;
        switch (region.width) {
            case 16: copy_chunk<uint4>(from, to, left); break;
            case 8: copy_chunk<uint2>(from, to, left); break;
            case 4: copy_chunk<u32>(from, to, left); break;
            case 2: copy_chunk<unsigned short>(from, to, left); break;
            default: copy_chunk<unsigned char>(from, to, left);
        }
    }
}

#endif
