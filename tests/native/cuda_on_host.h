// Runs kernels for GPUs on the host: it defines the parts of CUDA that they use, with loops instead of the threads of a
// grid.
//
// UNISONO_ON_HOST(kernel) defines kernel_on_host(blocks, arguments), which runs a kernel as cuLaunchKernel does:
// `arguments` are the addresses of its parameters. The threads of a block run one after the other. If the threads of a
// kernel exchange values (UNISONO_WARPS), they run as the coroutines of a warp.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <utility>

#ifdef UNISONO_WARPS
#include <ucontext.h>

#include <functional>
#include <vector>
#endif

#define __global__
#define __launch_bounds__(...)
#define __builtin_assume(...)

// The lower half of the 64 bits of high and low, shifted to the right by at most 31.
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >> (shift & 31));
}

// Threads need not wait for each other here: they run one after the other, and exchange nothing.
inline void __syncwarp() {}

struct Dimension {
  uint32_t x;
};
inline Dimension threadIdx, blockIdx, gridDim;

namespace on_host {

#ifdef UNISONO_BLOCK_THREADS
inline constexpr uint32_t block_threads = UNISONO_BLOCK_THREADS;
#else
inline constexpr uint32_t block_threads = 512;
#endif

#ifdef UNISONO_WARPS

inline constexpr uint32_t lanes = 32;
inline constexpr size_t stack_nbytes = 65536;

struct Warp {
  ucontext_t scheduler = {};
  ucontext_t contexts[lanes] = {};
  std::vector<char> stacks = std::vector<char>(lanes * stack_nbytes);
  std::function<void()> body;
  uint32_t values[lanes] = {};
  bool ended[lanes] = {};
  uint32_t lane = 0;
};
inline Warp warp;

inline void run_lane() {
  warp.body();
  warp.ended[warp.lane] = true;
}

// Runs each lane until it exchanges a value or ends.
inline void run_round(uint32_t first_thread) {
  for (warp.lane = 0; warp.lane < lanes; ++warp.lane) {
    if (warp.ended[warp.lane]) __builtin_trap();  // other lanes wait for its value for ever
    threadIdx.x = first_thread + warp.lane;
    swapcontext(&warp.scheduler, &warp.contexts[warp.lane]);
  }
}

inline bool has_ended() {
  for (const bool ended : warp.ended)
    if (ended) return true;
  return false;
}

inline void run_warp(uint32_t first_thread) {
  for (uint32_t lane = 0; lane < lanes; ++lane) {
    ucontext_t& context = warp.contexts[lane];
    getcontext(&context);
    context.uc_stack.ss_sp = &warp.stacks[lane * stack_nbytes];
    context.uc_stack.ss_size = stack_nbytes;
    context.uc_link = &warp.scheduler;
    makecontext(&context, run_lane, 0);
    warp.ended[lane] = false;
  }
  while (!has_ended()) run_round(first_thread);
  for (const bool ended : warp.ended)
    if (!ended) __builtin_trap();  // it waits for the value of a lane that has ended
}

inline void switch_to_next_lane() { swapcontext(&warp.contexts[warp.lane], &warp.scheduler); }

template <class Body>
void run_block(const Body& body) {
  warp.body = body;
  for (uint32_t first = 0; first < block_threads; first += lanes) run_warp(first);
}

#else

template <class Body>
void run_block(const Body& body) {
  for (threadIdx.x = 0; threadIdx.x < block_threads; ++threadIdx.x) body();
}

#endif

template <class... Parameters, size_t... i>
void launch(void (*kernel)(Parameters...), uint32_t blocks, void* const* arguments, std::index_sequence<i...>) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    run_block([&] { kernel(*static_cast<Parameters*>(arguments[i])...); });
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), uint32_t blocks, void* const* arguments) {
  launch(kernel, blocks, arguments, std::index_sequence_for<Parameters...>());
}

// The sizes of the parameters of a kernel, with a 0 behind them.
template <class... Parameters>
struct Sizes {
  static constexpr size_t values[] = {sizeof(Parameters)..., 0};
};
template <class... Parameters>
constexpr Sizes<Parameters...> sizes_of(void (*)(Parameters...)) {
  return {};
}

}  // namespace on_host

#define UNISONO_ON_HOST(kernel)                                                                   \
  extern "C" {                                                                                    \
  extern const size_t* const kernel##_sizes_of_parameters;                                        \
  const size_t* const kernel##_sizes_of_parameters = decltype(on_host::sizes_of(kernel))::values; \
  extern const uint32_t kernel##_threads;                                                         \
  const uint32_t kernel##_threads = on_host::block_threads;                                       \
  }                                                                                               \
  extern "C" void kernel##_on_host(uint32_t blocks, void* const* arguments) {                     \
    on_host::launch(kernel, blocks, arguments);                                                   \
  }

#ifdef UNISONO_WARPS

inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int distance) {
  const uint32_t lane = on_host::warp.lane;
  on_host::warp.values[lane] = value;
  on_host::switch_to_next_lane();
  const uint32_t others = on_host::warp.values[lane ^ static_cast<uint32_t>(distance)];
  on_host::switch_to_next_lane();
  return others;
}

#endif
