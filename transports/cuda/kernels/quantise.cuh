// Converts floats to codes of fewer bits, with error feedback, and back to their sum over several ranks.
//
// Codes of 8 bits have a float32 scale for each block of 128 elements: its greatest magnitude divided by the greatest
// code, which is 127 for int8, 448 for float8_e4m3fn, 57344 for float8_e5m2. A code is the element divided by the
// scale, rounded to nearest even and limited to the range of codes. It stands for code · scale. A block of zeros has
// scale 0. A block with a NaN or an infinity has scale NaN and codes 0, so all its elements become NaN: a sum over it
// shows that something went wrong. Codes of 16 bits are float16 or bfloat16, and have no scales.
//
// The residual is what rounding has lost of each element, in float32. It is 0 where that is not finite.
//
// Everything is computed in float32. The last block may be shorter. Arrays must be aligned to the size of their
// elements.
#pragma once

#include <stdint.h>

#include "elements.cuh"

namespace unisono::cuda {

inline constexpr uint64_t quantised_block = 128;
inline constexpr uint32_t warp_threads = 32;

// The integers from -127 to 127.
struct Int8Codes {
  using Bits = uint8_t;
  static constexpr bool has_scales = true;
  static constexpr float greatest_code = 127.0f;
  static uint8_t encode(float value) {
    constexpr float aligner = 12582912.0f;  // 1.5 · 2^23: the sum has no bits for a fraction
    return static_cast<uint8_t>(static_cast<int8_t>(static_cast<int32_t>((value + aligner) - aligner)));
  }
  static float decode(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
};

template <class Conversion, int greatest>
struct Float8Codes {
  using Bits = uint8_t;
  static constexpr bool has_scales = true;
  static constexpr float greatest_code = greatest;
  static uint8_t encode(float value) { return static_cast<uint8_t>(Conversion::encode(value, 0.0f)); }
  static float decode(uint8_t code) {
    float value, beside;
    Conversion::decode(code, value, beside);
    return value;
  }
};
using E4M3Codes = Float8Codes<Float8Pairs<Float8E4M3>, 448>;
using E5M2Codes = Float8Codes<Float8Pairs<Float8E5M2>, 57344>;

template <class Conversion>
struct Float16Codes {
  using Bits = uint16_t;
  static constexpr bool has_scales = false;
  static uint16_t encode(float value) { return static_cast<uint16_t>(Conversion::encode(value, 0.0f)); }
  static float decode(uint16_t code) {
    float value, beside;
    Conversion::decode(code, value, beside);
    return value;
  }
};
using HalfCodes = Float16Codes<Float16Pairs>;
using BrainHalfCodes = Float16Codes<BFloat16Pairs>;

// The codes of a pack's elements, which are stored by one instruction.
template <class Bits, int n>
struct alignas(n * sizeof(Bits)) CodesOfPack {
  Bits values[n];
};

inline uint32_t magnitude_bits(float value) { return __builtin_bit_cast(uint32_t, value) & 0x7fffffffu; }

template <class Codes>
float scale_of(uint32_t greatest_bits) {
  if (greatest_bits >= 0x7f800000u) return __builtin_bit_cast(float, 0x7fc00000u);
  return __builtin_bit_cast(float, greatest_bits) / Codes::greatest_code;
}

template <class Codes>
uint8_t limited_code(float value, float scale) {
  if (!(scale > 0.0f)) return 0;
  const float quotient = value / scale;  // may exceed the codes if the scale is subnormal
  const float most = Codes::greatest_code;
  return Codes::encode(quotient > most ? most : quotient < -most ? -most : quotient);
}

template <class Codes>
typename Codes::Bits code_of(float value, float scale) {
  if constexpr (Codes::has_scales)
    return limited_code<Codes>(value, scale);
  else
    return Codes::encode(value);
}

template <class Codes>
float value_of(typename Codes::Bits code, float scale) {
  const float value = Codes::decode(code);
  return Codes::has_scales ? value * scale : value;
}

// Returns the maximum over the threads of a warp that hold one block; all threads of the warp must call it.
template <int threads>
uint32_t greatest_of_threads(uint32_t value) {
#pragma unroll
  for (int distance = threads / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// Loads a pack's elements from `first` on, with zeros behind the last one.
template <class Element>
Lanes<float, Element::lanes> load_lanes(const void* source, uint64_t first, uint64_t count, bool aligned) {
  if (aligned && first + Element::lanes <= count)
    return Element::unpack(load_pack(shifted(source, first * Element::itemsize), 0));
  Lanes<float, Element::lanes> lanes = {};
#pragma unroll
  for (int i = 0; i < Element::lanes; ++i)
    if (first + i < count) lanes.values[i] = Element::load(source, first + i);
  return lanes;
}

// Adds the residuals to lanes.
template <int n>
void add_residuals(Lanes<float, n>& lanes, const float* residual, uint64_t first, uint64_t count) {
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (first + i < count) lanes.values[i] += residual[first + i];
}

// Every thread has a pack, and neighbouring threads share a block: 32 threads for float32, 16 for 16-bit floats.
//
// If `feeds`, the residual is added to the elements first, and is then what their codes have lost. Otherwise `weight`
// times what the codes have lost is added to the residual. Without a residual (a null pointer), what is lost is lost.
template <class Element, class Codes>
void quantise(typename Codes::Bits* codes, float* scales, float* residual, const void* source, uint64_t count,
              bool feeds, float weight) {
  constexpr int n = Element::lanes;
  constexpr int threads_of_block = quantised_block / n;
  using Made = CodesOfPack<typename Codes::Bits, n>;
  const bool aligned = misalignment(source, pack_nbytes) == 0;
  const bool codes_aligned = misalignment(codes, sizeof(Made)) == 0;
  const uint64_t packs = (count + n - 1) / n;
  // Threads behind the last pack take part, because their warp needs them.
  const uint64_t rounded = (packs + warp_threads - 1) / warp_threads * warp_threads;
  for (uint64_t p = thread_of_grid(); p < rounded; p += threads_of_grid()) {
    const uint64_t first = p * n;
    auto lanes = load_lanes<Element>(source, first, count, aligned);
    if (residual != nullptr && feeds) add_residuals<n>(lanes, residual, first, count);
    float scale = 1.0f;
    if constexpr (Codes::has_scales) {
      uint32_t greatest_bits = 0;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const uint32_t bits = magnitude_bits(lanes.values[i]);
        greatest_bits = bits > greatest_bits ? bits : greatest_bits;
      }
      scale = scale_of<Codes>(greatest_of_threads<threads_of_block>(greatest_bits));
      if (first % quantised_block == 0 && first < count) scales[first / quantised_block] = scale;
    }
    Made made;
#pragma unroll
    for (int i = 0; i < n; ++i) made.values[i] = code_of<Codes>(lanes.values[i], scale);
    if (codes_aligned && first + n <= count) {
      reinterpret_cast<Made*>(codes)[p] = made;
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i)
        if (first + i < count) codes[first + i] = made.values[i];
    }
    if (residual == nullptr) continue;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (first + i >= count) continue;
      const float difference = lanes.values[i] - value_of<Codes>(made.values[i], scale);
      const float lost = magnitude_bits(difference) < 0x7f800000u ? difference : 0.0f;
      residual[first + i] = feeds ? lost : residual[first + i] + weight * lost;
    }
  }
}

// Adds the values of the rows of codes, in their order, and divides the sums by `divisor`. The codes and the scales of
// a row begin `stride` bytes behind those of the row before.
template <class Element, class Codes>
struct Rows {
  using Bits = typename Codes::Bits;
  static constexpr int n = Element::lanes;
  const Bits* codes;
  const float* scales;
  uint64_t rows, stride, divisor;

  float scale_at(uint64_t row, uint64_t i) const {
    if constexpr (Codes::has_scales)
      return static_cast<const float*>(shifted(scales, row * stride))[i / quantised_block];
    else
      return 1.0f;
  }
  float lowered(float sum) const { return divisor == 1 ? sum : sum / static_cast<float>(divisor); }
  float element(uint64_t i) const {
    float sum = 0.0f;
    for (uint64_t row = 0; row < rows; ++row) {
      const float value = value_of<Codes>(static_cast<const Bits*>(shifted(codes, row * stride))[i], scale_at(row, i));
      sum = row == 0 ? value : sum + value;
    }
    return lowered(sum);
  }
  Pack pack(uint64_t p) const {
    Lanes<float, n> sums = {};
    for (uint64_t row = 0; row < rows; ++row) {
      const auto taken = static_cast<const CodesOfPack<Bits, n>*>(shifted(codes, row * stride))[p];
      const float scale = scale_at(row, p * n);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float value = value_of<Codes>(taken.values[i], scale);
        sums.values[i] = row == 0 ? value : sums.values[i] + value;
      }
    }
#pragma unroll
    for (int i = 0; i < n; ++i) sums.values[i] = lowered(sums.values[i]);
    return Element::pack(sums);
  }
};

template <class Element, class Codes>
void dequantise(void* dst, const Rows<Element, Codes>& rows, uint64_t count) {
  constexpr int n = Element::lanes;
  constexpr uint64_t unit = n * sizeof(typename Codes::Bits);
  const bool aligned =
      misalignment(dst, pack_nbytes) == 0 && misalignment(rows.codes, unit) == 0 && rows.stride % unit == 0;
  const uint64_t whole = aligned ? count / n : 0;
  for (uint64_t p = thread_of_grid(); p < whole; p += threads_of_grid()) store_pack(dst, p, rows.pack(p));
  for (uint64_t i = whole * n + thread_of_grid(); i < count; i += threads_of_grid())
    Element::store(dst, i, rows.element(i));
}

}  // namespace unisono::cuda

#define UNISONO_QUANTISE(name, Element, Codes)                                                                \
  UNISONO_KERNEL name(Codes::Bits* codes, float* scales, float* residual, const void* source, uint64_t count, \
                      uint64_t feeds, float weight) {                                                         \
    unisono::cuda::quantise<Element, Codes>(codes, scales, residual, source, count, feeds != 0, weight);      \
  }
#define UNISONO_DEQUANTISE(name, Element, Codes)                                                                \
  UNISONO_KERNEL name(void* dst, const Codes::Bits* codes, const float* scales, uint64_t rows, uint64_t stride, \
                      uint64_t divisor, uint64_t count) {                                                       \
    unisono::cuda::dequantise<Element, Codes>(dst, {codes, scales, rows, stride, divisor}, count);              \
  }
