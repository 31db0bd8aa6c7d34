// Gradients as they travel in fewer bytes than float32: floats of 16 bits, or blocks of int8 with a scale. What the
// narrow form cannot say is kept, so that it can be added to what is sent next.
//
// A block is 256 elements as int8, the last one filled up with zeros, and then the float32 that they are to be
// multiplied by: their largest magnitude / 127. A block with an element that is not finite has NaN for its scale.
#pragma once

#include <cstddef>

#include "dtype.h"

namespace unisono {

namespace detail {

struct CodecFunctions {
  std::size_t (*nbytes)(std::size_t count);
  void (*encode)(std::byte* wire, const float* x, float* residual, std::size_t count);
  void (*decode)(float* x, const std::byte* wire, std::size_t count, bool adds);
};

}  // namespace detail

// What turns float32 into a narrow form and back; false if there is no such form. What it computes does not depend on
// the floating-point environment of the thread, because every rank must compute the same.
class Codec {
 public:
  Codec(const detail::CodecFunctions* functions) : functions_(functions) {}

  explicit operator bool() const { return functions_ != nullptr; }

  // What `count` elements are encoded to.
  std::size_t nbytes(std::size_t count) const { return functions_->nbytes(count); }
  // wire = x + residual, rounded to nearest even; residual = what that has lost, or zero where it is not finite.
  void encode(std::byte* wire, const float* x, float* residual, std::size_t count) const;
  // x = wire, or, if it `adds`, x += wire.
  void decode(float* x, const std::byte* wire, std::size_t count, bool adds) const;

 private:
  const detail::CodecFunctions* functions_;
};

// The codec of the form that an element type names: float16, bfloat16 or int8.
Codec find_codec(DType form);

namespace detail {

const CodecFunctions* codec_baseline(DType form);
#ifdef UNISONO_X86
const CodecFunctions* codec_avx2(DType form);
const CodecFunctions* codec_avx512(DType form);
#endif

}  // namespace detail
}  // namespace unisono
