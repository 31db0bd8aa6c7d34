// Floats of 8 and 16 bits, with conversions from and to float32. Shared by the kernels of each instruction set
// (kernels_isa.cpp) and of GPUs (transports/cuda/kernels), where NVRTC compiles this file unchanged. Encoding rounds
// once, to nearest even.
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

// A choice without a branch. Only then does the compiler vectorise the conversion to a narrower type that follows.
constexpr uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// A format with `digits` fraction bits and the exponent bias `bias`. In a format without infinity the largest bit
// pattern is NaN, and a value that is too large becomes NaN.
template <class Bits, int digits, int bias, bool has_infinity>
struct NarrowFloat {
  static constexpr size_t itemsize = sizeof(Bits);
  static constexpr int shift = 23 - digits;
  static constexpr int sign_shift = 32 - 8 * static_cast<int>(itemsize);
  static constexpr uint32_t sign_bit = 0x80000000u >> sign_shift;
  static constexpr uint32_t rebias = static_cast<uint32_t>(127 - bias) << 23;
  static constexpr uint32_t least_normal = 1u << digits;
  static constexpr uint32_t fraction = least_normal - 1;
  // The first bit pattern that is not a finite number.
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
    // The addition aligns the bits of a subnormal result with the end of the significand, and rounds it.
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
  // Combines elements of two arrays in registers, where that is faster than by accumulators in memory. Returns how many
  // elements it has combined.
  template <class Op>
  static size_t combine_two(byte*, const byte*, const byte*, size_t) {
    return 0;
  }
};

using Float8E4M3 = NarrowFloat<uint8_t, 3, 7, false>;
using Float8E5M2 = NarrowFloat<uint8_t, 2, 15, true>;

using ScalarFloat16 = NarrowFloat<uint16_t, 10, 15, true>;

// Conversions of float16, for as many elements at a time as one instruction converts.
#if defined(__AVX512F__)
inline constexpr size_t half_lanes = 16;
// gcc 12 warns about the undefined values in the forms without a mask.
inline constexpr __mmask16 all_lanes = 0xffff;
inline void decode_halves(float* out, const byte* in) {
  _mm512_storeu_ps(out, _mm512_maskz_cvtph_ps(all_lanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in))));
}
inline void encode_halves(byte* out, const float* in) {
  const __m256i halves = _mm512_maskz_cvtps_ph(all_lanes, _mm512_loadu_ps(in), _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), halves);
}
#elif defined(__F16C__)
inline constexpr size_t half_lanes = 8;
inline void decode_halves(float* out, const byte* in) {
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in))));
}
inline void encode_halves(byte* out, const float* in) {
  const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in), _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), halves);
}
#elif defined(__aarch64__)
inline constexpr size_t half_lanes = 4;
inline void decode_halves(float* out, const byte* in) {
  const uint16x4_t halves = vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(in)));
  vst1q_f32(out, vcvt_f32_f16(vreinterpret_f16_u16(halves)));
}
inline void encode_halves(byte* out, const float* in) {
  const uint16x4_t halves = vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(in)));
  vst1_u8(reinterpret_cast<uint8_t*>(out), vreinterpret_u8_u16(halves));
}
#else
inline constexpr size_t half_lanes = 1;
inline void decode_halves(float* out, const byte* in) { ScalarFloat16::decode_all(out, in, 1); }
inline void encode_halves(byte* out, const float* in) { ScalarFloat16::encode_all(out, in, 1); }
#endif

struct Float16 : ScalarFloat16 {
  static void decode_all(float* out, const byte* in, size_t count) {
    const size_t whole = count - count % half_lanes;
    UNISONO_INDEPENDENT
    for (size_t i = 0; i < whole; i += half_lanes) decode_halves(out + i, in + 2 * i);
    ScalarFloat16::decode_all(out + whole, in + 2 * whole, count - whole);
  }
  static void encode_all(byte* out, const float* in, size_t count) {
    const size_t whole = count - count % half_lanes;
    UNISONO_INDEPENDENT
    for (size_t i = 0; i < whole; i += half_lanes) encode_halves(out + 2 * i, in + i);
    ScalarFloat16::encode_all(out + 2 * whole, in + whole, count - whole);
  }
  template <class Op>
  static size_t combine_two(byte* dst, const byte* a, const byte* b, size_t count) {
    const size_t whole = count - count % half_lanes;
    UNISONO_INDEPENDENT
    for (size_t i = 0; i < whole; i += half_lanes) {
      alignas(64) float x[half_lanes];
      alignas(64) float y[half_lanes];
      decode_halves(x, a + 2 * i);
      decode_halves(y, b + 2 * i);
      for (size_t j = 0; j < half_lanes; ++j) x[j] = Op::apply(x[j], y[j]);
      encode_halves(dst + 2 * i, x);
    }
    return whole;
  }
};

// The upper half of a float32. The conversion instructions of processors are not used, because they flush subnormal
// numbers to zero.
struct BFloat16 {
  static constexpr size_t itemsize = 2;
  static float decode(uint16_t half) { return bits_float(static_cast<uint32_t>(half) << 16); }
  // The result is in the upper half.
  static uint32_t round(float value) {
    const uint32_t bits = float_bits(value);
    return value != value ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  }
  static uint16_t encode(float value) { return static_cast<uint16_t>(round(value) >> 16); }
  static void decode_all(float* out, const byte* in, size_t count) {
    const auto* x = reinterpret_cast<const Unaligned<uint16_t>*>(in);
    for (size_t i = 0; i < count; ++i) out[i] = decode(x[i]);
  }
  static void encode_all(byte* out, const float* in, size_t count) {
    auto* y = reinterpret_cast<Unaligned<uint16_t>*>(out);
    for (size_t i = 0; i < count; ++i) y[i] = encode(in[i]);
  }
  // Combines two elements in the halves of a word, so that none is widened or narrowed.
  template <class Op>
  static size_t combine_two(byte* dst, const byte* a, const byte* b, size_t count) {
    auto* out = reinterpret_cast<Unaligned<uint32_t>*>(dst);
    const auto* x = reinterpret_cast<const Unaligned<uint32_t>*>(a);
    const auto* y = reinterpret_cast<const Unaligned<uint32_t>*>(b);
    constexpr uint32_t upper = 0xffff0000u;
    const size_t pairs = count / 2;
    UNISONO_INDEPENDENT
    for (size_t i = 0; i < pairs; ++i) {
      const float first = Op::apply(bits_float(x[i] << 16), bits_float(y[i] << 16));
      const float second = Op::apply(bits_float(x[i] & upper), bits_float(y[i] & upper));
      out[i] = round(first) >> 16 | (round(second) & upper);
    }
    return 2 * pairs;
  }
};

}  // namespace
}  // namespace unisono::detail::UNISONO_ISA
