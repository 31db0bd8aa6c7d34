// The operations on elements: how each one combines two elements, and how sums are divided. Shared by the kernels of
// each instruction set (kernels_isa.cpp) and of GPUs (transports/cuda/kernels), where NVRTC compiles this file
// unchanged.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace unisono::detail::UNISONO_ISA {
namespace {

template <class T>
struct Complex {
  T real;
  T imag;
};

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

// Processors have no vector instructions for integer quotients. The quotient of floats is exact after truncation if the
// significand is longer than the integer.
template <class T>
T divide(T value, uint64_t divisor) {
  if constexpr (is_float<T>)
    return value / static_cast<T>(divisor);
  else if constexpr (sizeof(T) <= 2)
    return static_cast<T>(static_cast<int32_t>(static_cast<float>(value) / static_cast<float>(divisor)));
  else if constexpr (sizeof(T) == 4)
    return static_cast<T>(static_cast<int64_t>(static_cast<double>(value) / static_cast<double>(divisor)));
  else if constexpr (T(-1) < T(0))
    return static_cast<T>(value / static_cast<int64_t>(divisor));
  else
    return static_cast<T>(value / divisor);
}

// The defaults of all operations: no division, and a single source is its own result.
struct Operation {
  static constexpr bool averages = false;
  static constexpr bool logical = false;
};

struct Sum : Operation {
  static constexpr bool averages = true;
  template <class T>
  static T apply(T a, T b) {
    using A = typename Arithmetic<T>::Type;
    return static_cast<T>(static_cast<A>(static_cast<A>(a) + static_cast<A>(b)));
  }
};

struct Prod : Operation {
  template <class T>
  static T apply(T a, T b) {
    using A = typename Arithmetic<T>::Type;
    // 16-bit operands are promoted to int, and their product can overflow. The product of unsigned operands cannot.
    if constexpr (!is_float<T> && sizeof(T) < 4)
      return static_cast<T>(static_cast<A>(static_cast<unsigned>(static_cast<A>(a)) * static_cast<A>(b)));
    else
      return static_cast<T>(static_cast<A>(static_cast<A>(a) * static_cast<A>(b)));
  }
  // The minus sign is on an operand because gcc 12 fuses alternating differences and sums of products, in spite of
  // -ffp-contract=off.
  template <class T>
  static Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.real * b.real + -a.imag * b.imag, a.real * b.imag + a.imag * b.real};
  }
};

// A NaN in either operand gives NaN, as in numpy.minimum and numpy.maximum.
struct Min : Operation {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (is_float<T>)
      return (a < b || a != a) ? a : b;
    else
      return a < b ? a : b;
  }
};

struct Max : Operation {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (is_float<T>)
      return (a > b || a != a) ? a : b;
    else
      return a > b ? a : b;
  }
};

struct BitAnd : Operation {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct BitOr : Operation {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct BitXor : Operation {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// A logical operation tests whether an element is zero and gives 0 or 1. NaN is not zero. The truth is an int, so that
// the compiler computes it instead of branching.
template <class T>
int truth(T value) {
  return value != T(0);
}
template <class T>
int truth(Complex<T> value) {
  return truth(value.real) | truth(value.imag);
}

template <class T>
struct Truth {
  static T of(int value) { return static_cast<T>(value); }
};
template <class T>
struct Truth<Complex<T>> {
  static Complex<T> of(int value) { return {static_cast<T>(value), T(0)}; }
};

struct LogicalAnd : Operation {
  static constexpr bool logical = true;
  template <class T>
  static T apply(T a, T b) {
    return Truth<T>::of(truth(a) & truth(b));
  }
};

struct LogicalOr : Operation {
  static constexpr bool logical = true;
  template <class T>
  static T apply(T a, T b) {
    return Truth<T>::of(truth(a) | truth(b));
  }
};

struct LogicalXor : Operation {
  static constexpr bool logical = true;
  template <class T>
  static T apply(T a, T b) {
    return Truth<T>::of(truth(a) ^ truth(b));
  }
};

// Pairs of a value and an index, in the layout of a complex number. The pair with the better value wins, and of equal
// values the one with the lower index. NaN is better than any number.
template <class Better>
struct Located : Operation {
  template <class T>
  static Complex<T> apply(Complex<T> a, Complex<T> b) {
    const bool a_is_nan = a.real != a.real;
    const bool b_is_nan = b.real != b.real;
    const bool tied = a.real == b.real || (a_is_nan && b_is_nan);
    const bool wins = (a_is_nan && !b_is_nan) || Better::than(a.real, b.real);
    return wins || (tied && a.imag <= b.imag) ? a : b;
  }
};

struct Less {
  template <class T>
  static bool than(T a, T b) {
    return a < b;
  }
};

struct Greater {
  template <class T>
  static bool than(T a, T b) {
    return a > b;
  }
};

}  // namespace
}  // namespace unisono::detail::UNISONO_ISA
