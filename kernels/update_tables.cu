// update_tables: writes single entries of tables that kernels read, all of them in one launch.
//
// Here: the scatter that brings what changed (rows of block tables, lengths, CSR indices) to buffers
// whose addresses never change. All int32 tables lie in one allocation and are views of it, so that
// one index space covers them. Never here: a decision about what changed.
//
//   tables       int32 [at most 2^32], device memory
//   entries      uint32 [num_entries, 2]: (index into tables, value); device memory, or page-locked
//                host memory that the device can read; 8-byte aligned
//   num_entries  0 or more, below 2^31
//
// Launch: any grid of x, any block up to 256 threads. No shared memory.
//
// The caller's duties. Indices lie inside of the tables and none occurs twice (either value might
// stay). The launch comes after the last kernel that reads the old entries and before the first that
// reads the new ones. `entries` is not written again until the launch has finished.
typedef unsigned int u32;

extern "C" __global__ void __launch_bounds__(256)
    update_tables(int* tables, const uint2* entries, u32 num_entries) {
    const u32 step = gridDim.x * blockDim.x;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < num_entries; i += step) {
        const uint2 entry = entries[i];
        tables[entry.x] = static_cast<int>(entry.y);  // entry.x is unsigned: the offset has 64 bits
    }
}
