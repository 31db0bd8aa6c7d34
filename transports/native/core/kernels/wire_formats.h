// Codecs for gradients in fewer bytes than float32: 16-bit floats, or blocks of int8 with a scale. The rounding error
// is returned as a residual, to be added to the next gradient.
//
// A block holds 256 elements as int8, the last block padded with zeros, and then a float32 scale: the largest magnitude
// / 127. Decoding multiplies the elements by the scale. If an element of a block is not finite, the scale is NaN.
#pragma once

#include <cstddef>

#include "kernels/dtype.h"

namespace unisono {

namespace detail {

struct CodecFunctions {
  std::size_t (*nbytes)(std::size_t count);
  void (*encode)(std::byte* wire, const float* x, float* residual, std::size_t count);
  void (*decode)(float* x, const std::byte* wire, std::size_t count, bool adds);
};

}  // namespace detail

//! Converts float32 to a narrow format and back; false if there is no such format. Results do not depend on the
//! thread's floating-point environment, because every rank must compute the same.
class Codec {
 public:
  Codec(const detail::CodecFunctions* functions) : functions_(functions) {}

  //! Whether the format exists.
  explicit operator bool() const { return functions_ != nullptr; }

  //! The size of `count` encoded elements.
  std::size_t nbytes(std::size_t count) const { return functions_->nbytes(count); }
  //! wire = x + residual, rounded to nearest even. residual = the rounding error, or zero if it is not finite.
  void encode(std::byte* wire, const float* x, float* residual, std::size_t count) const;
  //! x = wire, or x += wire if `adds`.
  void decode(float* x, const std::byte* wire, std::size_t count, bool adds) const;

 private:
  const detail::CodecFunctions* functions_;
};

//! Returns the codec for a format, named by an element type: float16, bfloat16 or int8.
Codec find_codec(DType form);

namespace detail {

const CodecFunctions* codec_baseline(DType form);
#ifdef UNISONO_X86
const CodecFunctions* codec_avx2(DType form);
const CodecFunctions* codec_avx512(DType form);
#endif

}  // namespace detail
}  // namespace unisono
