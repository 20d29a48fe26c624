// write_kv: writes the K and V of new tokens of one layer to the slots that a slot mapping names.
//
// Here: the scatter of tokens into blocks. Strides say where a block, a token in it and a head lie,
// so one kernel serves every layout (NHD, HND, packed either way, block-major, an engine's own).
// Never here: a conversion. Source and pool have the same dtype, and bytes are copied.
//
//   slots       int64 [num_tokens], device memory: block * block_size + offset of each token.
//               A negative slot is padding: that token writes nothing
//   num_tokens  0 or more; num_tokens * (chunks of K and V of a token) < 2^31, where a chunk is
//               128 words (blocks.cuh)
//   block_size  tokens a block
//   k, v        address of token 0, head 0 of the new tokens
//   k_pool, v_pool  address of block 0, offset 0, head 0
//   halves      strides and sizes of K and V, by value; heads 0 in the second: there is no V
//
// Launch: any grid of x, blocks of 32 .. 256 threads (a multiple of 32). No shared memory.
//
// Alignment: a half's width divides its addresses, its strides and the bytes of a head's row. Heads
// that touch at both ends are best given as one head: the host does so (kvmmu.cuda.WriteKV).
//
// The caller's duties. Slots are negative or inside of the pool. No two are equal, except of tokens
// whose contents nobody reads (padding may share the null block: either may stay). Sources are
// complete and do not lie in the pool; no kernel in flight reads or moves the blocks written to.
#include "blocks.cuh"

// K or V of one layer. Strides are in bytes.
struct Half {
    u64 source_token;      // from token to token of what is written
    u64 source_head;       // from head to head
    u64 pool_block;        // from block to block
    u64 pool_offset;       // from token to token in a block
    u64 pool_head;         // from head to head
    u32 heads;
    u32 words_per_head;    // words of `width` bytes in the row of one head
    u32 width;             // bytes of a word: 16, 8, 4, 2 or 1
    u32 unused;
};

struct Halves {
    Half half[2];
};

__device__ inline u32 chunks_of(const Half& half) {
    return (half.heads * half.words_per_head + kChunkWords - 1) / kChunkWords;
}

// Copies the words first + lane, first + lane + 32, ... of a token, heads one behind the other.
template <class Word>
__device__ inline void copy_rows(const char* from, char* to, const Half& half, u32 first) {
    const u32 words = half.heads * half.words_per_head;
    Word held[kInFlight] = {};
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
        const u32 word = first + this_lane() + k * kLanes;
        const u32 head = word / half.words_per_head;
        const u64 column = (word - head * half.words_per_head) * sizeof(Word);
        const u64 at = head * half.source_head + column;
        if (word < words) held[k] = *reinterpret_cast<const Word*>(from + at);
    }
#pragma unroll
    for (u32 k = 0; k < kInFlight; ++k) {
        const u32 word = first + this_lane() + k * kLanes;
        const u32 head = word / half.words_per_head;
        const u64 column = (word - head * half.words_per_head) * sizeof(Word);
        const u64 at = head * half.pool_head + column;
        if (word < words) *reinterpret_cast<Word*>(to + at) = held[k];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    write_kv(const long long* slots, u32 num_tokens, u32 block_size, const char* k, const char* v,
             char* k_pool, char* v_pool, const __grid_constant__ Halves halves) {
    const u32 k_chunks = chunks_of(halves.half[0]);
    const u32 chunks = k_chunks + chunks_of(halves.half[1]);
    const u32 total = num_tokens * chunks;
    for (u32 index = this_warp(); index < total; index += num_warps()) {
        const u32 token = index / chunks;
        const u32 chunk = index - token * chunks;
        const long long slot = slots[token];
        if (slot < 0) continue;
        const u64 block = static_cast<u64>(slot) / block_size;
        const u64 offset = static_cast<u64>(slot) - block * block_size;
        const bool is_v = chunk >= k_chunks;
        const Half& half = halves.half[is_v];
        const char* from = (is_v ? v : k) + token * half.source_token;
        char* to = (is_v ? v_pool : k_pool) + block * half.pool_block + offset * half.pool_offset;
        const u32 first = (is_v ? chunk - k_chunks : chunk) * kChunkWords;
        switch (half.width) {
            case 16: copy_rows<uint4>(from, to, half, first); break;
            case 8: copy_rows<uint2>(from, to, half, first); break;
            case 4: copy_rows<u32>(from, to, half, first); break;
            case 2: copy_rows<unsigned short>(from, to, half, first); break;
            default: copy_rows<unsigned char>(from, to, half, first);
        }
    }
}
