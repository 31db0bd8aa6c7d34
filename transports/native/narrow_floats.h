// Floats of 8 and 16 bits and their conversions from and to float32, for the kernels of one instruction set (see
// kernels_isa.cpp) and of GPUs (transports/cuda/kernels), where NVRTC compiles this as it stands. Encoding rounds to
// nearest even, once.
#pragma once

#include <stddef.h>
#include <stdint.h>
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "unaligned.h"

namespace unisono::detail::UNISONO_ISA {
namespace {

inline uint32_t float_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
inline float bits_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// The bits of 2^exponent.
constexpr uint32_t power_bits(int exponent) { return static_cast<uint32_t>(127 + exponent) << 23; }

// Where the compiler sees no branch, it makes none; and only then it vectorises what narrows afterwards.
constexpr uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// A format with `digits` bits after the point of its significand and the exponent bias `bias`. Without infinity, the
// largest bit pattern is the NaN, and what is too large for the format becomes it.
template <class Bits, int digits, int bias, bool has_infinity>
struct NarrowFloat {
  static constexpr size_t itemsize = sizeof(Bits);
  static constexpr int shift = 23 - digits;
  static constexpr int sign_shift = 32 - 8 * static_cast<int>(itemsize);
  static constexpr uint32_t sign_bit = 0x80000000u >> sign_shift;
  static constexpr uint32_t rebias = static_cast<uint32_t>(127 - bias) << 23;
  static constexpr uint32_t least_normal = 1u << digits;
  static constexpr uint32_t fraction = least_normal - 1;
  // The first bit pattern that is no number.
  static constexpr uint32_t top = has_infinity ? (sign_bit - 1) & ~fraction : sign_bit - 1;
  static constexpr uint32_t nan = has_infinity ? top | (least_normal >> 1) : top;

  static float decode(Bits value) {
    const uint32_t magnitude = value & (sign_bit - 1);
    const uint32_t normal = (magnitude << shift) + rebias;
    const float unit = bits_float(power_bits(1 - bias - digits));
    const uint32_t subnormal = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * unit);
    const uint32_t number = select(magnitude < least_normal, subnormal, normal);
    const uint32_t other = 0x7f800000u | ((magnitude & fraction) << shift);
    return bits_float((value & sign_bit) << sign_shift | select(magnitude < top, number, other));
  }

  static Bits encode(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t half = (1u << (shift - 1)) - 1;
    const uint32_t normal = (magnitude - rebias + half + ((magnitude >> shift) & 1u)) >> shift;
    // The sum aligns the bits of a subnormal result with the end of the significand, and rounds it.
    constexpr uint32_t aligner = power_bits(24 - bias - digits);
    const uint32_t subnormal = float_bits(bits_float(magnitude) + bits_float(aligner)) - aligner;
    const uint32_t number = select(magnitude < power_bits(1 - bias), subnormal, normal);
    const uint32_t limited = number < top ? number : top;
    return static_cast<Bits>((bits >> sign_shift & sign_bit) | select(magnitude > 0x7f800000u, nan, limited));
  }

  static void decode_all(float* out, const byte* in, size_t count) {
    const auto* x = reinterpret_cast<const Unaligned<Bits>*>(in);
    for (size_t i = 0; i < count; ++i) out[i] = decode(x[i]);
  }
  static void encode_all(byte* out, const float* in, size_t count) {
    auto* y = reinterpret_cast<Unaligned<Bits>*>(out);
    for (size_t i = 0; i < count; ++i) y[i] = encode(in[i]);
  }
};

using Float8E4M3 = NarrowFloat<uint8_t, 3, 7, false>;
using Float8E5M2 = NarrowFloat<uint8_t, 2, 15, true>;

// float16, by the processor's own conversions where it has them.
struct Float16 : NarrowFloat<uint16_t, 10, 15, true> {
  using Scalar = NarrowFloat<uint16_t, 10, 15, true>;
  static void decode_all(float* out, const byte* in, size_t count) {
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * i));
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
    }
#elif defined(__aarch64__)
    for (; i + 4 <= count; i += 4) {
      const uint16x4_t halves = vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(in + 2 * i)));
      vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u16(halves)));
    }
#endif
    Scalar::decode_all(out + i, in + 2 * i, count - i);
  }
  static void encode_all(byte* out, const float* in, size_t count) {
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), halves);
    }
#elif defined(__aarch64__)
    for (; i + 4 <= count; i += 4) {
      const uint16x4_t halves = vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(in + i)));
      vst1_u8(reinterpret_cast<uint8_t*>(out + 2 * i), vreinterpret_u8_u16(halves));
    }
#endif
    Scalar::encode_all(out + 2 * i, in + i, count - i);
  }
};

// The upper half of a float32. The processors that convert to it themselves take subnormal numbers for zero.
struct BFloat16 {
  static constexpr size_t itemsize = 2;
  static float decode(uint16_t half) { return bits_float(static_cast<uint32_t>(half) << 16); }
  static uint16_t encode(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(value != value ? (bits >> 16) | 0x40u : rounded);
  }
  static void decode_all(float* out, const byte* in, size_t count) {
    const auto* x = reinterpret_cast<const Unaligned<uint16_t>*>(in);
    for (size_t i = 0; i < count; ++i) out[i] = decode(x[i]);
  }
  static void encode_all(byte* out, const float* in, size_t count) {
    auto* y = reinterpret_cast<Unaligned<uint16_t>*>(out);
    for (size_t i = 0; i < count; ++i) y[i] = encode(in[i]);
  }
};

}  // namespace
}  // namespace unisono::detail::UNISONO_ISA
