// The codecs for one instruction set.
//
// This file is compiled once for each instruction set, with UNISONO_ISA as its name. kernels_isa.cpp says why. A codec
// works on 256 elements at a time. Its intermediate results fit the first-level cache, so the arrays in memory are read
// and written only once.
#include "kernels/wire_formats.h"

#include <stddef.h>
#include <stdint.h>

#include "kernels/narrow_floats.h"
#include "kernels/unaligned.h"

namespace unisono::detail::UNISONO_ISA {
namespace {

constexpr size_t block_count = 256;
constexpr float most = 127.0F;

// Returns the value if it is finite, and otherwise zero. Only finite values differ from themselves by zero.
inline float finite(float value) { return value - value == 0.0F ? value : 0.0F; }

inline void store_or_add(float* x, const float* values, size_t count, bool adds) {
  if (adds)
    for (size_t i = 0; i < count; ++i) x[i] += values[i];
  else
    __builtin_memcpy(x, values, count * sizeof(float));
}

template <class Format>
struct NarrowCodec {
  static size_t nbytes(size_t count) { return count * Format::itemsize; }

  static void encode(byte* wire, const float* x, float* residual, size_t count) {
    alignas(64) float exact[block_count];
    alignas(64) float decoded[block_count];
    for (size_t start = 0; start < count; start += block_count) {
      const size_t n = count - start < block_count ? count - start : block_count;
      byte* out = wire + nbytes(start);
      float* error = residual + start;
      for (size_t i = 0; i < n; ++i) exact[i] = x[start + i] + error[i];
      Format::encode_all(out, exact, n);
      Format::decode_all(decoded, out, n);
      for (size_t i = 0; i < n; ++i) error[i] = finite(exact[i] - decoded[i]);
    }
  }

  static void decode(float* x, const byte* wire, size_t count, bool adds) {
    alignas(64) float decoded[block_count];
    for (size_t start = 0; start < count; start += block_count) {
      const size_t n = count - start < block_count ? count - start : block_count;
      Format::decode_all(decoded, wire + nbytes(start), n);
      store_or_add(x + start, decoded, n, adds);
    }
  }

  static constexpr CodecFunctions codec{nbytes, encode, decode};
};

// Returns the largest magnitude. It compares bits, which order like magnitudes; those of infinity and NaN are the
// largest.
inline float largest(const float* x) {
  uint32_t bits = 0;
  for (size_t i = 0; i < block_count; ++i) {
    const uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
    bits = magnitude > bits ? magnitude : bits;
  }
  return bits_float(bits);
}

struct BlockCodec {
  static constexpr size_t row_nbytes = block_count + sizeof(float);
  // Adding it to a number of at most 2^22 leaves the nearest integer in the lowest bits.
  static constexpr float rounder = 12582912.0F;

  static size_t nbytes(size_t count) { return (count + block_count - 1) / block_count * row_nbytes; }

  static void encode(byte* wire, const float* x, float* residual, size_t count) {
    alignas(64) float exact[block_count];
    alignas(64) float error[block_count];
    for (size_t start = 0; start < count; start += block_count, wire += row_nbytes) {
      const size_t n = count - start < block_count ? count - start : block_count;
      for (size_t i = 0; i < n; ++i) exact[i] = x[start + i] + residual[start + i];
      for (size_t i = n; i < block_count; ++i) exact[i] = 0.0F;
      encode_row(wire, exact, error);
      __builtin_memcpy(residual + start, error, n * sizeof(float));
    }
  }

  static void encode_row(byte* row, const float* exact, float* error) {
    float scale = largest(exact) / most;
    scale = scale - scale == 0.0F ? scale : bits_float(0x7fc00000u);
    // The inverse is 0 if it would overflow, or if the scale is 0 or NaN. Then all elements become 0. With a tiny
    // scale, the residual keeps their values.
    const float inverse = scale > 0.0F ? finite(1.0F / scale) : 0.0F;
    auto* out = reinterpret_cast<Unaligned<int8_t>*>(row);
    for (size_t i = 0; i < block_count; ++i) {
      const float shifted = finite(exact[i]) * inverse + rounder;
      out[i] = static_cast<int8_t>(float_bits(shifted));
      error[i] = finite(exact[i] - (shifted - rounder) * scale);
    }
    __builtin_memcpy(row + block_count, &scale, sizeof scale);
  }

  static void decode(float* x, const byte* wire, size_t count, bool adds) {
    alignas(64) float decoded[block_count];
    for (size_t start = 0; start < count; start += block_count, wire += row_nbytes) {
      const auto* in = reinterpret_cast<const Unaligned<int8_t>*>(wire);
      float scale;
      __builtin_memcpy(&scale, wire + block_count, sizeof scale);
      for (size_t i = 0; i < block_count; ++i) decoded[i] = static_cast<float>(in[i]) * scale;
      store_or_add(x + start, decoded, count - start < block_count ? count - start : block_count, adds);
    }
  }

  static constexpr CodecFunctions codec{nbytes, encode, decode};
};

const CodecFunctions* lookup_codec(DType form) {
  switch (form) {
    case DType::float16:
      return &NarrowCodec<Float16>::codec;
    case DType::bfloat16:
      return &NarrowCodec<BFloat16>::codec;
    case DType::int8:
      return &BlockCodec::codec;
    default:
      return nullptr;
  }
}

}  // namespace
}  // namespace unisono::detail::UNISONO_ISA

namespace unisono::detail {

#define UNISONO_JOIN_(a, b) a##b
#define UNISONO_JOIN(a, b) UNISONO_JOIN_(a, b)
const CodecFunctions* UNISONO_JOIN(codec_, UNISONO_ISA)(DType form) { return UNISONO_ISA::lookup_codec(form); }

}  // namespace unisono::detail
