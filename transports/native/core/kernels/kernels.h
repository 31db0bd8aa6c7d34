// Reductions and copies of arrays. There is one kernel for every operation and element type. At run time it is taken
// from the widest instruction set that the processor has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

namespace unisono {
namespace detail {

using ReduceFunction = void (*)(std::byte* dst, const std::byte* const* sources, std::size_t sources_count,
                                std::size_t count, std::uint64_t divisor);

}  // namespace detail

//! A reduction of arrays of one element type by one operation; false if there is none.
//!
//! Floats of 8 and 16 bits are computed in float32 and rounded once. Integers wrap, and their division truncates
//! towards zero. A logical operation turns a single source into 0 or 1 too.
class Kernel {
 public:
  Kernel(detail::ReduceFunction function) : function_(function) {}

  //! Whether the reduction exists.
  explicit operator bool() const { return function_ != nullptr; }

  //! dst[i] = sources[0][i] ∘ … ∘ sources[sources_count - 1][i] for i < count. A sum is divided by `divisor` if that is
  //! at least 2.
  //!
  //! Pointers need no alignment. dst may be the same as a source, but may not overlap one otherwise. The bits of the
  //! result do not depend on the thread's floating-point environment, because every rank must compute the same.
  void operator()(std::byte* dst, const std::byte* const* sources, std::size_t sources_count, std::size_t count,
                  std::uint64_t divisor) const;

 private:
  detail::ReduceFunction function_;
};

//! Returns the kernel for an element type and an operation.
Kernel find_kernel(DType dtype, Combine combine);

//! Copies an array to memory that does not overlap it.
//!
//! It calls memcpy, which is the fastest way between the caches of two cores where it uses `rep movsb`. On Zen 3 and 4,
//! `rep movsb` is up to 15 times as slow if the destination lies slightly further into its page than the source. That
//! is glibc bug 30994, which later versions avoid. For example, a numpy array may begin 16 bytes into a page, and a
//! slot at the beginning of one. Such copies use vector loads and stores, which take at most twice as long for any
//! alignment.
void copy_array(std::byte* dst, const std::byte* src, std::size_t nbytes);

//! Whether `rep movsb`, which the kernel uses too, is slow for these addresses. `src` may be an address in another
//! process.
bool is_slow_for_rep_movsb(const std::byte* dst, std::uintptr_t src);

//! The name of the instruction set in use: "baseline", "avx2" or "avx512".
const char* simd_level();

namespace detail {

using KernelLookup = ReduceFunction (*)(DType, Combine);
ReduceFunction kernels_baseline(DType dtype, Combine combine);
#ifdef UNISONO_X86
ReduceFunction kernels_avx2(DType dtype, Combine combine);
ReduceFunction kernels_avx512(DType dtype, Combine combine);
#endif

// Copies at least one cache line.
using CopyFunction = void (*)(std::byte* dst, const std::byte* src, std::size_t nbytes);
void copy_baseline(std::byte* dst, const std::byte* src, std::size_t nbytes);
#ifdef UNISONO_X86
void copy_avx2(std::byte* dst, const std::byte* src, std::size_t nbytes);
void copy_avx512(std::byte* dst, const std::byte* src, std::size_t nbytes);
#endif

}  // namespace detail
}  // namespace unisono
