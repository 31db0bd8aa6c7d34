// `Pack`: 16 bytes, which a thread loads or stores by one instruction. Also the indices of threads in a grid.
//
// All functions are compiled for the device without marks (NVRTC's -default-device). Grids and blocks have one
// dimension, and blocks have `block_threads` threads.
//
// Macros choose variants of kernels (`catalogue.py`). All of them compute the same bits.
#pragma once

#include <stdint.h>
#ifndef __CUDACC_RTC__
#include "cuda_on_host.h"
#endif

namespace unisono::cuda {

// The threads of a block, and the blocks that must fit a multiprocessor.
#ifndef UNISONO_BLOCK_THREADS
#define UNISONO_BLOCK_THREADS 512
#endif
#ifndef UNISONO_BLOCKS
#define UNISONO_BLOCKS 1
#endif
inline constexpr uint32_t block_threads = UNISONO_BLOCK_THREADS;
inline constexpr uint64_t pack_nbytes = 16;

struct alignas(pack_nbytes) Pack {
  uint32_t words[4];
};

template <class T, int n>
struct Lanes {
  T values[n];
};

// Whether loads and stores of GPUs pass the caches by: nothing is read twice.
#ifndef UNISONO_CACHE_HINTS
#define UNISONO_CACHE_HINTS 0
#endif

// The compiler knows nothing about an address that was read from memory. Loads are faster if it knows that the address
// is in global memory.
inline Pack load_pack(const void* from, uint64_t i) {
#if UNISONO_CACHE_HINTS && defined(__CUDA_ARCH__)
  Pack pack;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.words[0]), "=r"(pack.words[1]), "=r"(pack.words[2]), "=r"(pack.words[3])
               : "l"(static_cast<const Pack*>(from) + i)
               : "memory");
  return pack;
#else
  __builtin_assume(__isGlobal(from));
  return static_cast<const Pack*>(from)[i];
#endif
}
inline void store_pack(void* to, uint64_t i, const Pack& pack) {
#if UNISONO_CACHE_HINTS && defined(__CUDA_ARCH__)
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(static_cast<Pack*>(to) + i), "r"(pack.words[0]), "r"(pack.words[1]), "r"(pack.words[2]),
                 "r"(pack.words[3])
               : "memory");
#else
  static_cast<Pack*>(to)[i] = pack;
#endif
}

inline uint64_t thread_of_grid() { return static_cast<uint64_t>(blockIdx.x) * block_threads + threadIdx.x; }
inline uint64_t threads_of_grid() { return static_cast<uint64_t>(gridDim.x) * block_threads; }

inline const void* shifted(const void* address, uint64_t nbytes) { return static_cast<const char*>(address) + nbytes; }
inline void* shifted(void* address, uint64_t nbytes) { return static_cast<char*>(address) + nbytes; }

// The distance of an address from the next lower multiple of `unit`, a power of two.
inline uint64_t misalignment(const void* address, uint64_t unit) {
  return reinterpret_cast<uintptr_t>(address) & (unit - 1);
}

// Loads 16 bytes from an address that need not be a multiple of 16. It loads the one or two aligned packs that contain
// them. Each of these contains one of the 16 bytes, so it lies in the memory of the array.
inline Pack load_shifted(const void* from, uint64_t i) {
  const uint64_t shift = misalignment(from, pack_nbytes);
  const void* units = static_cast<const char*>(from) - shift;
  const Pack low = load_pack(units, i);
  const Pack high = shift != 0 ? load_pack(units, i + 1) : low;
  // Constant indices only, so that all words stay in registers.
  uint32_t words[8];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    words[w] = low.words[w];
    words[w + 4] = high.words[w];
  }
#pragma unroll
  for (int step = 2; step >= 1; step /= 2)
#pragma unroll
    for (int w = 0; w + step < 8; ++w)
      if ((shift / 4 & static_cast<uint64_t>(step)) != 0) words[w] = words[w + step];
  Pack pack;
#pragma unroll
  for (int w = 0; w < 4; ++w)
    pack.words[w] = __funnelshift_r(words[w], words[w + 1], static_cast<uint32_t>(shift % 4 * 8));
  return pack;
}

}  // namespace unisono::cuda

// With the bound of one block of 512 threads, the compiler uses up to 128 registers per thread, and needs them to keep
// all loads under way.
#define UNISONO_KERNEL extern "C" __global__ void __launch_bounds__(UNISONO_BLOCK_THREADS, UNISONO_BLOCKS)
