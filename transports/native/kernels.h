// Reductions over arrays. One entry for every operation, element type and number of sources, dispatched at run time to
// the widest instruction set that the processor has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace unisono {

// dst[i] = sources[0][i] ∘ … ∘ sources[sources_count - 1][i] for i < count, of a sum divided by a divisor of at
// least 2.
//
// Floats of 8 and 16 bits are computed in float32 and rounded once; integers wrap, and their division truncates towards
// zero; a logical operation makes 0 or 1 of a single source, too. Pointers need no alignment. dst may be the same as a
// source, and must not overlap one otherwise.
using ReduceFunction = void (*)(std::byte* dst, const std::byte* const* sources, std::size_t sources_count,
                                std::size_t count, std::uint64_t divisor);

// The kernel for an element type and an operation, or nullptr if there is none.
ReduceFunction reduce_function(DType dtype, Combine combine);

// Name of the instruction set in use: "baseline", "avx2" or "avx512".
const char* simd_level();

namespace detail {

using KernelLookup = ReduceFunction (*)(DType, Combine);
ReduceFunction kernels_baseline(DType dtype, Combine combine);
#ifdef UNISONO_X86
ReduceFunction kernels_avx2(DType dtype, Combine combine);
ReduceFunction kernels_avx512(DType dtype, Combine combine);
#endif

}  // namespace detail
}  // namespace unisono
