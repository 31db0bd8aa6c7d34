// Conversions of two neighbouring narrow floats from and to float32. The GPU's instructions are used where they exist,
// and otherwise the arithmetic of narrow_floats.h. Both round to nearest even, and give the same bits except for NaN.
#pragma once

#include <stdint.h>

#include "narrow_floats.h"

// GPUs convert 8-bit floats since compute capability 8.9.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define UNISONO_FLOAT8_INSTRUCTIONS 1
#endif
// Whether converting them needs few registers.
#if defined(UNISONO_FLOAT8_INSTRUCTIONS) || !defined(__CUDA_ARCH__)
#define UNISONO_FLOAT8_IN_FEW_REGISTERS 1
#else
#define UNISONO_FLOAT8_IN_FEW_REGISTERS 0
#endif

namespace unisono::cuda {

using namespace detail::UNISONO_ISA;

template <class Format, class Bits_>
struct Pairs {
  using Bits = Bits_;
  static constexpr int width = 8 * static_cast<int>(sizeof(Bits));
  static void decode(uint32_t pair, float& low, float& high) {
    low = Format::decode(static_cast<Bits>(pair));
    high = Format::decode(static_cast<Bits>(pair >> width));
  }
  static uint32_t encode(float low, float high) {
    return Format::encode(low) | static_cast<uint32_t>(Format::encode(high)) << width;
  }
};

// For logical operations, which test whether an element is zero and give 0 or 1. They ignore the sign of zero. Nothing
// is converted, because that would take too many registers.
template <class Format, class Bits_>
struct Truths {
  using Bits = Bits_;
  static constexpr int width = 8 * static_cast<int>(sizeof(Bits));
  static constexpr uint32_t magnitude = (1u << (width - 1)) - 1;
  static void decode(uint32_t pair, float& low, float& high) {
    low = (pair & magnitude) != 0 ? 1.0f : 0.0f;
    high = (pair >> width & magnitude) != 0 ? 1.0f : 0.0f;
  }
  static uint32_t encode(float low, float high) {
    const uint32_t one = Format::encode(1.0f);
    return (low != 0.0f ? one : 0) | (high != 0.0f ? one << width : 0);
  }
};

using BFloat16Arithmetic = Pairs<BFloat16, uint16_t>;
using Float16Arithmetic = Pairs<Float16, uint16_t>;

#ifdef __CUDA_ARCH__

inline void decode_halves(uint32_t pair, float& low, float& high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}

struct Float16Pairs : Float16Arithmetic {
  static void decode(uint32_t pair, float& low, float& high) { decode_halves(pair, low, high); }
  static uint32_t encode(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
};

struct BFloat16Pairs : BFloat16Arithmetic {
  static uint32_t encode(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
};

#else

using Float16Pairs = Float16Arithmetic;
using BFloat16Pairs = BFloat16Arithmetic;

#endif

#ifdef UNISONO_FLOAT8_INSTRUCTIONS

// Conversions of two 8-bit floats to two float16, and of two float32 to two 8-bit floats. Tests define them for the
// host.
template <class Format>
struct Float8Instructions;

#ifdef __CUDA_ARCH__

template <>
struct Float8Instructions<Float8E4M3> {
  static uint32_t halves(uint32_t pair) {
    uint32_t decoded;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(decoded) : "h"(static_cast<uint16_t>(pair)));
    return decoded;
  }
  static uint32_t saturated(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
  }
};

template <>
struct Float8Instructions<Float8E5M2> {
  static uint32_t halves(uint32_t pair) {
    uint32_t decoded;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(decoded) : "h"(static_cast<uint16_t>(pair)));
    return decoded;
  }
  static uint32_t saturated(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
  }
};

#endif

// The greatest float32 that rounds to a number of the format.
template <class Format>
inline constexpr float greatest = 464.0f;
template <>
inline constexpr float greatest<Float8E5M2> = 61439.99609375f;

template <class Format>
struct Float8Pairs : Pairs<Format, uint8_t> {
  static void decode(uint32_t pair, float& low, float& high) {
    Float16Pairs::decode(Float8Instructions<Format>::halves(pair), low, high);
  }
  // The instruction turns a value that is too large into the greatest number. The next bit pattern means infinity or,
  // in a format without infinity, NaN, which is the right result.
  static uint32_t encode(float low, float high) {
    const uint32_t pair = Float8Instructions<Format>::saturated(low, high);
    return pair + beyond(low) + (beyond(high) << 8);
  }

 private:
  static uint32_t beyond(float value) { return value > greatest<Format> || value < -greatest<Format>; }
};

#else

template <class Format>
using Float8Pairs = Pairs<Format, uint8_t>;

#endif

}  // namespace unisono::cuda
