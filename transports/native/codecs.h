// Gradients as they travel in fewer bytes than float32: floats of 16 bits, or blocks of int8 with a scale. What the
// narrow form cannot say is kept, so that it can be added to what is sent next.
//
// A block is 256 elements as int8, the last one filled up with zeros, and then the float32 that they are to be
// multiplied by: their largest magnitude / 127. A block with an element that is not finite has NaN for its scale.
#pragma once

#include <cstddef>

#include "dtype.h"

namespace unisono {

struct Codec {
  // What `count` elements are encoded to.
  std::size_t (*nbytes)(std::size_t count);
  // wire = x + residual, rounded to nearest even; residual = what that has lost, or zero where it is not finite.
  void (*encode)(std::byte* wire, const float* x, float* residual, std::size_t count);
  // x = wire, or, if it `adds`, x += wire.
  void (*decode)(float* x, const std::byte* wire, std::size_t count, bool adds);
};

// That of the form that an element type names (float16, bfloat16, int8), or nullptr if there is none.
const Codec* codec(DType form);

namespace detail {

const Codec* codec_baseline(DType form);
#ifdef UNISONO_X86
const Codec* codec_avx2(DType form);
const Codec* codec_avx512(DType form);
#endif

}  // namespace detail
}  // namespace unisono
