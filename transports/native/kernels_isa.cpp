// The kernels of one instruction set. This file is compiled once for each, with UNISONO_ISA naming it; everything lies
// in a namespace of that name, so that the linker cannot merge code made for one processor into what another one runs.
// For the same reason it instantiates no template of the standard library.
//
// Types whose arithmetic is their own (integers, float32, float64) are combined in place by loops that the compiler
// vectorises. 16-bit floats are decoded, a block at a time, into float32 accumulators in the first-level cache,
// combined there, and encoded once.
#include <stddef.h>
#include <stdint.h>
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

// Of a loop: what an iteration writes, no later one reads. clang looks at the addresses at run time instead, and would
// warn where a sanitizer keeps it from vectorising as it was told.
#if defined(__clang__)
#define UNISONO_INDEPENDENT
#else
#define UNISONO_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace unisono::detail::UNISONO_ISA {
namespace {

using std::byte;

// Loads and stores that need no alignment and may alias anything.
template <class T>
struct Storage {
  typedef T Unaligned __attribute__((aligned(1), may_alias));
};
template <class T>
using Unaligned = typename Storage<T>::Unaligned;

template <class T>
struct Arithmetic {  // the type in which sums and products wrap instead of overflowing
  using Type = T;
};
template <>
struct Arithmetic<int8_t> {
  using Type = uint8_t;
};
template <>
struct Arithmetic<int16_t> {
  using Type = uint16_t;
};
template <>
struct Arithmetic<int32_t> {
  using Type = uint32_t;
};
template <>
struct Arithmetic<int64_t> {
  using Type = uint64_t;
};

template <class T>
inline constexpr bool is_float = T(0.5) != T(0);

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    using A = typename Arithmetic<T>::Type;
    return static_cast<T>(static_cast<A>(static_cast<A>(a) + static_cast<A>(b)));
  }
};

struct Prod {
  template <class T>
  static T apply(T a, T b) {
    using A = typename Arithmetic<T>::Type;
    // 16-bit operands are promoted to int, whose product can overflow; one more promotion to unsigned cannot.
    if constexpr (!is_float<T> && sizeof(T) < 4)
      return static_cast<T>(static_cast<A>(static_cast<unsigned>(static_cast<A>(a)) * static_cast<A>(b)));
    else
      return static_cast<T>(static_cast<A>(static_cast<A>(a) * static_cast<A>(b)));
  }
};

// A NaN in either operand gives NaN, as numpy.minimum and numpy.maximum do.
struct Min {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (is_float<T>)
      return (a < b || a != a) ? a : b;
    else
      return a < b ? a : b;
  }
};

struct Max {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (is_float<T>)
      return (a > b || a != a) ? a : b;
    else
      return a > b ? a : b;
  }
};

template <class T>
T divide(T value, uint64_t divisor) {
  if constexpr (is_float<T>)
    return value / static_cast<T>(divisor);
  else if constexpr (T(-1) < T(0))
    return static_cast<T>(static_cast<int64_t>(value) / static_cast<int64_t>(divisor));
  else
    return static_cast<T>(static_cast<uint64_t>(value) / divisor);
}

template <class T>
void divide_all(byte* dst, size_t count, uint64_t divisor) {
  auto* out = reinterpret_cast<Unaligned<T>*>(dst);
  for (size_t i = 0; i < count; ++i) out[i] = divide<T>(out[i], divisor);
}

template <class T, class Op>
void combine_two(byte* dst, const byte* a, const byte* b, size_t count) {
  auto* out = reinterpret_cast<Unaligned<T>*>(dst);
  const auto* x = reinterpret_cast<const Unaligned<T>*>(a);
  const auto* y = reinterpret_cast<const Unaligned<T>*>(b);
  UNISONO_INDEPENDENT
  for (size_t i = 0; i < count; ++i) out[i] = Op::template apply<T>(x[i], y[i]);
}

template <class T>
void copy_elements(byte* dst, const byte* src, size_t count) {
  if (dst != src) __builtin_memcpy(dst, src, count * sizeof(T));
}

constexpr size_t block_nbytes = 2048;

// Several sources are combined a block at a time: the block of dst stays in the first-level cache. dst may be one of
// the sources, so the result is gathered in a block of its own.
template <class T, class Op>
void reduce_native(byte* dst, const byte* const* sources, size_t sources_count, size_t count, uint64_t divisor) {
  constexpr size_t block = block_nbytes / sizeof(T);
  const size_t step = divisor == 1 && sources_count <= 2 ? count : block;
  alignas(64) byte gathered[block_nbytes];
  for (size_t start = 0; start < count; start += step) {
    const size_t n = count - start < step ? count - start : step;
    const size_t offset = start * sizeof(T);
    if (sources_count == 1) {
      copy_elements<T>(dst + offset, sources[0] + offset, n);
    } else if (sources_count == 2) {
      combine_two<T, Op>(dst + offset, sources[0] + offset, sources[1] + offset, n);
    } else {
      combine_two<T, Op>(gathered, sources[0] + offset, sources[1] + offset, n);
      for (size_t k = 2; k < sources_count; ++k) combine_two<T, Op>(gathered, gathered, sources[k] + offset, n);
      copy_elements<T>(dst + offset, gathered, n);
    }
    if (divisor != 1) divide_all<T>(dst + offset, n, divisor);
  }
}

uint32_t float_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
float bits_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

struct BFloat16 {
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

struct Float16 {
  static float decode(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    // 2^-24 is the unit of subnormals; a normal number is rebased from exponent bias 15 to 127.
    if (magnitude < 0x0400u) return bits_float(sign | float_bits(static_cast<float>(magnitude) * 0x1p-24f));
    return bits_float(sign | ((magnitude << 13) + (112u << 23)));
  }
  static uint16_t encode(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
      // Adding 0.5 aligns the bits of a subnormal result with the end of the significand and rounds to nearest even.
      const uint32_t aligned = float_bits(bits_float(magnitude) + 0.5f);
      return static_cast<uint16_t>(sign | (aligned - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
  }
  static void decode_all(float* out, const byte* in, size_t count) {
    const auto* x = reinterpret_cast<const Unaligned<uint16_t>*>(in);
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
    for (; i < count; ++i) out[i] = decode(x[i]);
  }
  static void encode_all(byte* out, const float* in, size_t count) {
    auto* y = reinterpret_cast<Unaligned<uint16_t>*>(out);
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
    for (; i < count; ++i) y[i] = encode(in[i]);
  }
};

template <class Half, class Op>
void reduce_half(byte* dst, const byte* const* sources, size_t sources_count, size_t count, uint64_t divisor) {
  constexpr size_t block = block_nbytes / sizeof(float);
  alignas(64) float state[block];
  alignas(64) float operand[block];
  for (size_t start = 0; start < count; start += block) {
    const size_t n = count - start < block ? count - start : block;
    Half::decode_all(state, sources[0] + 2 * start, n);
    for (size_t k = 1; k < sources_count; ++k) {
      Half::decode_all(operand, sources[k] + 2 * start, n);
      for (size_t i = 0; i < n; ++i) state[i] = Op::template apply<float>(state[i], operand[i]);
    }
    if (divisor != 1)
      for (size_t i = 0; i < n; ++i) state[i] = divide<float>(state[i], divisor);
    Half::encode_all(dst + 2 * start, state, n);
  }
}

template <class Op>
ReduceFunction for_dtype(DType dtype) {
  switch (dtype) {
    case DType::int8:
      return reduce_native<int8_t, Op>;
    case DType::uint8:
      return reduce_native<uint8_t, Op>;
    case DType::int16:
      return reduce_native<int16_t, Op>;
    case DType::uint16:
      return reduce_native<uint16_t, Op>;
    case DType::int32:
      return reduce_native<int32_t, Op>;
    case DType::uint32:
      return reduce_native<uint32_t, Op>;
    case DType::int64:
      return reduce_native<int64_t, Op>;
    case DType::uint64:
      return reduce_native<uint64_t, Op>;
    case DType::float16:
      return reduce_half<Float16, Op>;
    case DType::bfloat16:
      return reduce_half<BFloat16, Op>;
    case DType::float32:
      return reduce_native<float, Op>;
    case DType::float64:
      return reduce_native<double, Op>;
    default:
      return nullptr;
  }
}

}  // namespace

ReduceFunction lookup(DType dtype, Combine combine) {
  switch (combine) {
    case Combine::sum:
      return for_dtype<Sum>(dtype);
    case Combine::prod:
      return for_dtype<Prod>(dtype);
    case Combine::min:
      return for_dtype<Min>(dtype);
    case Combine::max:
      return for_dtype<Max>(dtype);
  }
  return nullptr;
}

}  // namespace unisono::detail::UNISONO_ISA

namespace unisono::detail {

#define UNISONO_JOIN_(a, b) a##b
#define UNISONO_JOIN(a, b) UNISONO_JOIN_(a, b)
ReduceFunction UNISONO_JOIN(kernels_, UNISONO_ISA)(DType dtype, Combine combine) {
  return UNISONO_ISA::lookup(dtype, combine);
}

}  // namespace unisono::detail
