// Reductions over arrays, and copies of them. One entry for every operation, element type and number of sources,
// dispatched at run time to the widest instruction set that the processor has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace unisono {
namespace detail {

using ReduceFunction = void (*)(std::byte* dst, const std::byte* const* sources, std::size_t sources_count,
                                std::size_t count, std::uint64_t divisor);

}  // namespace detail

// A reduction of arrays of one element type by one operation; false if there is none.
//
// Floats of 8 and 16 bits are computed in float32 and rounded once; integers wrap, and their division truncates towards
// zero; a logical operation makes 0 or 1 of a single source, too.
class Kernel {
 public:
  Kernel(detail::ReduceFunction function) : function_(function) {}

  explicit operator bool() const { return function_ != nullptr; }

  // dst[i] = sources[0][i] ∘ … ∘ sources[sources_count - 1][i] for i < count, of a sum divided by a divisor of at
  // least 2.
  //
  // Pointers need no alignment. dst may be the same as a source, and must not overlap one otherwise. The bits of the
  // result do not depend on the floating-point environment of the thread, because every rank must compute the same.
  void operator()(std::byte* dst, const std::byte* const* sources, std::size_t sources_count, std::size_t count,
                  std::uint64_t divisor) const;

 private:
  detail::ReduceFunction function_;
};

// The kernel for an element type and an operation.
Kernel find_kernel(DType dtype, Combine combine);

// Copies an array to where it does not overlap.
//
// As memcpy does, which is the quickest between caches of two cores where it takes `rep movsb`. But on Zen 3 and 4 that
// is up to 15 times as slow where the destination lies a little further into its page than the source (glibc's bug
// 30994; later versions do without it), as an array of numpy does that lies 16 bytes into a page beside a slot at its
// beginning. There it is done by vectors, which take at most twice as long wherever both lie.
void copy_array(std::byte* dst, const std::byte* src, std::size_t nbytes);

// Whether `rep movsb`, by which the kernel copies too, takes that slow way; `src` may be an address in another process.
bool is_slow_to_move(const std::byte* dst, std::uintptr_t src);

// Name of the instruction set in use: "baseline", "avx2" or "avx512".
const char* simd_level();

namespace detail {

using KernelLookup = ReduceFunction (*)(DType, Combine);
ReduceFunction kernels_baseline(DType dtype, Combine combine);
#ifdef UNISONO_X86
ReduceFunction kernels_avx2(DType dtype, Combine combine);
ReduceFunction kernels_avx512(DType dtype, Combine combine);
#endif

// Of one line of 64 bytes at least.
using CopyFunction = void (*)(std::byte* dst, const std::byte* src, std::size_t nbytes);
void copy_baseline(std::byte* dst, const std::byte* src, std::size_t nbytes);
#ifdef UNISONO_X86
void copy_avx2(std::byte* dst, const std::byte* src, std::size_t nbytes);
void copy_avx512(std::byte* dst, const std::byte* src, std::size_t nbytes);
#endif

}  // namespace detail
}  // namespace unisono
