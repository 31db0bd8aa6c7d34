// Converts floats to codes of 8 bits, with a float32 scale for each block of 128 elements, and back.
//
// The scale of a block is its greatest magnitude divided by the greatest code: 127 for int8, 448 for float8_e4m3fn,
// 57344 for float8_e5m2. A code is the element divided by the scale, rounded to nearest even and limited to the range
// of codes. It stands for code · scale. A block of zeros has scale 0. A block with a NaN or an infinity has scale NaN
// and codes 0, so all its elements become NaN: a sum over it shows that something went wrong.
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
  static constexpr float greatest_code = 127.0f;
  static uint8_t encode(float value) {
    constexpr float aligner = 12582912.0f;  // 1.5 · 2^23: the sum has no bits for a fraction
    return static_cast<uint8_t>(static_cast<int8_t>(static_cast<int32_t>((value + aligner) - aligner)));
  }
  static float decode(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
};

template <class Conversion, int greatest>
struct Float8Codes {
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

// The codes of a pack's elements, which are stored by one instruction.
template <int n>
struct alignas(n) CodesOfPack {
  uint8_t values[n];
};

inline uint32_t magnitude_bits(float value) { return __builtin_bit_cast(uint32_t, value) & 0x7fffffffu; }

template <class Codes>
float scale_of(uint32_t greatest_bits) {
  if (greatest_bits >= 0x7f800000u) return __builtin_bit_cast(float, 0x7fc00000u);
  return __builtin_bit_cast(float, greatest_bits) / Codes::greatest_code;
}

template <class Codes>
uint8_t code_of(float value, float scale) {
  if (!(scale > 0.0f)) return 0;
  const float quotient = value / scale;  // may exceed the codes if the scale is subnormal
  const float most = Codes::greatest_code;
  return Codes::encode(quotient > most ? most : quotient < -most ? -most : quotient);
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

// Every thread has a pack, and neighbouring threads share a block: 32 threads for float32, 16 for 16-bit floats.
template <class Element, class Codes>
void quantise(uint8_t* codes, float* scales, const void* source, uint64_t count) {
  constexpr int n = Element::lanes;
  constexpr int threads_of_block = quantised_block / n;
  const bool aligned = misalignment(source, pack_nbytes) == 0;
  const bool codes_aligned = misalignment(codes, n) == 0;
  const uint64_t packs = (count + n - 1) / n;
  // Threads behind the last pack take part, because their warp needs them.
  const uint64_t rounded = (packs + warp_threads - 1) / warp_threads * warp_threads;
  for (uint64_t p = thread_of_grid(); p < rounded; p += threads_of_grid()) {
    const uint64_t first = p * n;
    const auto lanes = load_lanes<Element>(source, first, count, aligned);
    uint32_t greatest_bits = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const uint32_t bits = magnitude_bits(lanes.values[i]);
      greatest_bits = bits > greatest_bits ? bits : greatest_bits;
    }
    const float scale = scale_of<Codes>(greatest_of_threads<threads_of_block>(greatest_bits));
    if (first % quantised_block == 0 && first < count) scales[first / quantised_block] = scale;
    CodesOfPack<n> made;
#pragma unroll
    for (int i = 0; i < n; ++i) made.values[i] = code_of<Codes>(lanes.values[i], scale);
    if (codes_aligned && first + n <= count) {
      reinterpret_cast<CodesOfPack<n>*>(codes)[p] = made;
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i)
        if (first + i < count) codes[first + i] = made.values[i];
    }
  }
}

template <class Element, class Codes>
void dequantise(void* dst, const uint8_t* codes, const float* scales, uint64_t count) {
  constexpr int n = Element::lanes;
  const bool aligned = misalignment(dst, pack_nbytes) == 0 && misalignment(codes, n) == 0;
  const uint64_t whole = aligned ? count / n : 0;
  for (uint64_t p = thread_of_grid(); p < whole; p += threads_of_grid()) {
    const CodesOfPack<n> taken = reinterpret_cast<const CodesOfPack<n>*>(codes)[p];
    const float scale = scales[p * n / quantised_block];
    Lanes<float, n> lanes;
#pragma unroll
    for (int i = 0; i < n; ++i) lanes.values[i] = Codes::decode(taken.values[i]) * scale;
    store_pack(dst, p, Element::pack(lanes));
  }
  for (uint64_t i = whole * n + thread_of_grid(); i < count; i += threads_of_grid())
    Element::store(dst, i, Codes::decode(codes[i]) * scales[i / quantised_block]);
}

}  // namespace unisono::cuda

#define UNISONO_QUANTISE(name, ...)                                                        \
  UNISONO_KERNEL name(uint8_t* codes, float* scales, const void* source, uint64_t count) { \
    unisono::cuda::quantise<__VA_ARGS__>(codes, scales, source, count);                    \
  }
#define UNISONO_DEQUANTISE(name, ...)                                                         \
  UNISONO_KERNEL name(void* dst, const uint8_t* codes, const float* scales, uint64_t count) { \
    unisono::cuda::dequantise<__VA_ARGS__>(dst, codes, scales, count);                        \
  }
