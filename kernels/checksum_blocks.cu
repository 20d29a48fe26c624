// checksum_blocks: a 64-bit checksum of the contents of each block, over all regions.
//
// Here: verification on the device, where reading the bytes back would cost more than the move did.
// The sum, in arithmetic modulo 2^64, over every 8-byte little-endian word of the block:
//
//     mix(word ^ mix(position + 0x9e3779b97f4a7c15)),    position = region << 40 | word in the piece
//
// A piece that does not fill its last word is padded with zeros. mix is the output function of
// SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
// Each word is hashed with its position, so a word that changed, moved or changed places shows but
// for one chance in 2^64. It finds faults, not forgers. The same in NumPy, and the reference:
// kvmmu.cuda.block_checksums. It depends on the order of the regions, not on their strides or widths.
//
//   base              lowest address of all regions
//   regions           Region [num_regions], device memory (blocks.cuh)
//   num_regions       rows, 1 .. 2^24
//   chunks_per_block  chunks of a block in all regions, below 2^31
//   blocks            uint32 [num_blocks], device memory: ids, in any order, also repeated
//   num_blocks        0 or more
//   sums              uint64 [num_blocks], device memory, ZERO before the launch; sums[i] is that of
//                     blocks[i]
//
// Launch: grid (x, y), blocks of 32 .. 256 threads (a multiple of 32). y shares out the blocks, x the
// chunks of each. No shared memory.
//
// The caller's duties. Ids are those of blocks that every region has. Nothing writes to those blocks
// meanwhile.
#include "blocks.cuh"

__device__ inline u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

__device__ inline u64 term(u64 position, u64 word) {
    return mix(word ^ mix(position + 0x9e3779b97f4a7c15ull));
}

// Terms of one chunk of 16-byte words.
__device__ inline u64 sum_wide(const char* from, u64 bytes, u64 position) {
    uint4 held[kInFlight] = {};
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
        const u64 at = (this_lane() + k * kLanes) * sizeof(uint4);
        if (at < bytes) held[k] = *reinterpret_cast<const uint4*>(from + at);
    }
    u64 sum = 0;
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
        const u64 at = (this_lane() + k * kLanes) * sizeof(uint4);
        if (at < bytes) {
            sum += term(position + at / 8, held[k].x | static_cast<u64>(held[k].y) << 32);
            sum += term(position + at / 8 + 1, held[k].z | static_cast<u64>(held[k].w) << 32);
        }
    }
    return sum;
}

// Terms of one chunk of narrower words: 8 bytes are put together from several loads. A chunk begins
// at a multiple of 128 bytes of its piece, so no 8-byte word lies in two chunks.
template <class Word>
__device__ inline u64 sum_narrow(const char* from, u64 bytes, u64 position) {
    const u64 end = bytes < kChunkWords * sizeof(Word) ? bytes : kChunkWords * sizeof(Word);
    u64 sum = 0;
    for (u64 at = this_lane() * 8; at < end; at += kLanes * 8) {
        u64 word = 0;
#pragma unroll
        for (u32 part = 0; part < 8; part += sizeof(Word)) {
            if (at + part < end) {
                const u64 value = *reinterpret_cast<const Word*>(from + at + part);
                word |= value << (8 * part);
            }
        }
        sum += term(position + at / 8, word);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(256)
    checksum_blocks(const char* base, const Region* regions, u32 num_regions, u32 chunks_per_block,
                    const u32* blocks, u32 num_blocks, u64* sums) {
    for (u32 i = blockIdx.y; i < num_blocks; i += gridDim.y) {
        u64 sum = 0;
        for (u32 chunk = this_warp(); chunk < chunks_per_block; chunk += num_warps()) {
            const Region& region = region_of(regions, num_regions, chunk);
            const u64 done = (chunk - region.first_chunk) * region.width * kChunkWords;
            const char* from = base + region.offset + blocks[i] * region.stride + done;
            const u64 left = region.block_bytes - done;
            const u64 position = static_cast<u64>(&region - regions) << 40 | done / 8;
            switch (region.width) {
                case 16: sum += sum_wide(from, left, position); break;
                case 8: sum += sum_narrow<u64>(from, left, position); break;
                case 4: sum += sum_narrow<u32>(from, left, position); break;
                case 2: sum += sum_narrow<unsigned short>(from, left, position); break;
                default: sum += sum_narrow<unsigned char>(from, left, position);
            }
        }
        atomicAdd(sums + i, sum);
    }
}
