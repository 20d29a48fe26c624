// As much of CUDA C++ as the files of kernels/ need, so that g++ compiles them unchanged and a test
// runs them on a CPU.
//
// Here: the words of the language, and a launcher. Never here: a stream, device memory, a kernel.
//
// A launch runs in one of two ways. SERIAL: every CUDA thread to its end, one after the other, which
// is fast and knows no barrier. PARALLEL: every CUDA thread of all thread blocks is a thread of the
// operating system, so that barriers work and ThreadSanitizer sees two of them meet at one address.
#pragma once

#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) uint2 {
    unsigned x, y;
};

// As on a device, an access is one instruction of 16 bytes, and the address must be aligned for it.
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

namespace shim {

struct Index {
    unsigned x, y, z;
};

inline thread_local Index thread, block;
inline thread_local pthread_barrier_t* barrier;
inline Index threads, blocks;  // written before the threads of a launch begin

// The arguments of a launch as cuLaunchKernel takes them: a pointer to each.
template <class... Parameters, std::size_t... Number>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<Number...>) {
    kernel(*static_cast<std::remove_const_t<Parameters>*>(arguments[Number])...);
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), const unsigned* grid, const unsigned* shape,
            void** arguments, bool parallel) {
    blocks = {grid[0], grid[1], grid[2]};
    threads = {shape[0], shape[1], shape[2]};
    const auto each = [&](auto run) {
        Index at{};
        for (at.z = 0; at.z < blocks.z; ++at.z)
            for (at.y = 0; at.y < blocks.y; ++at.y)
                for (at.x = 0; at.x < blocks.x; ++at.x) run(at);
    };
    const auto run = [&](Index block_at, unsigned x, pthread_barrier_t* shared) {
        block = block_at;
        thread = {x, 0, 0};
        barrier = shared;
        call(kernel, arguments, std::index_sequence_for<Parameters...>{});
    };
    if (!parallel) {
        each([&](Index at) {
            for (unsigned x = 0; x < threads.x; ++x) run(at, x, nullptr);
        });
        return;
    }
    std::vector<pthread_barrier_t> barriers(std::size_t(blocks.x) * blocks.y * blocks.z);
    std::vector<std::thread> all;
    std::size_t number = 0;
    each([&](Index at) {
        pthread_barrier_t* shared = &barriers[number++];
        pthread_barrier_init(shared, nullptr, threads.x);
        for (unsigned x = 0; x < threads.x; ++x) all.emplace_back(run, at, x, shared);
    });
    for (std::thread& one : all) one.join();
    for (pthread_barrier_t& one : barriers) pthread_barrier_destroy(&one);
}

}  // namespace shim

#define threadIdx shim::thread
#define blockIdx shim::block
#define blockDim shim::threads
#define gridDim shim::blocks

inline void __syncthreads() {
    if (shim::barrier == nullptr) {
        std::fputs("shim: __syncthreads in a serial launch\n", stderr);
        std::abort();
    }
    pthread_barrier_wait(shim::barrier);
}

// Sanitizers know no bare fences, so the atomics below order everything by themselves.
inline void __threadfence() {}

inline unsigned atomicInc(unsigned* address, unsigned limit) {
    unsigned old = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(address, &old, old >= limit ? 0 : old + 1, false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
    }
    return old;
}

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
    return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

#define SHIM_ENTRY(kernel)                                                                     \
    extern "C" void shim_##kernel(const unsigned* grid, const unsigned* block, void** arguments, \
                                  int parallel) {                                              \
        shim::launch(kernel, grid, block, arguments, parallel != 0);                           \
    }
