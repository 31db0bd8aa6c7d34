// The kernels of one instruction set.
//
// This file is compiled once for each instruction set, with UNISONO_ISA as its name. All code is in a namespace of that
// name. Otherwise the linker could merge code for one processor into a function that another one runs. For the same
// reason no template of the standard library is instantiated here.
//
// Integers, float32, float64 and complex numbers are combined in place, by loops that the compiler vectorises. Narrow
// floats are decoded into float32 accumulators, as many as fit the first-level cache, combined there, and encoded
// once. Two sources of some formats are combined in registers.
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernel_operations.h"
#include "kernels/kernels.h"
#include "kernels/narrow_floats.h"
#include "kernels/unaligned.h"

namespace unisono::detail::UNISONO_ISA {
namespace {

// Loads and stores one element of an array.
template <class T>
struct Array {
  using Part = T;
  static T load(const Unaligned<T>* from, size_t i) { return from[i]; }
  static void store(Unaligned<T>* to, size_t i, T value) { to[i] = value; }
};
template <class T>
struct Array<Complex<T>> {
  using Part = T;
  static Complex<T> load(const Unaligned<T>* from, size_t i) { return {from[2 * i], from[2 * i + 1]}; }
  static void store(Unaligned<T>* to, size_t i, Complex<T> value) {
    to[2 * i] = value.real;
    to[2 * i + 1] = value.imag;
  }
};

template <class T>
void divide_all(byte* dst, size_t count, uint64_t divisor) {
  auto* out = reinterpret_cast<Unaligned<T>*>(dst);
  for (size_t i = 0; i < count; ++i) out[i] = divide<T>(out[i], divisor);
}

template <class T, class Op>
void combine_two(byte* dst, const byte* a, const byte* b, size_t count) {
  using Part = typename Array<T>::Part;
  auto* out = reinterpret_cast<Unaligned<Part>*>(dst);
  const auto* x = reinterpret_cast<const Unaligned<Part>*>(a);
  const auto* y = reinterpret_cast<const Unaligned<Part>*>(b);
  UNISONO_INDEPENDENT
  for (size_t i = 0; i < count; ++i) Array<T>::store(out, i, Op::apply(Array<T>::load(x, i), Array<T>::load(y, i)));
}

// The result of a single source. A logical operation tests each element, which is the same as "x or x".
template <class T, class Op>
void take_one(byte* dst, const byte* src, size_t count) {
  if constexpr (Op::logical)
    combine_two<T, LogicalOr>(dst, src, src, count);
  else if (dst != src)
    __builtin_memcpy(dst, src, count * sizeof(T));
}

constexpr size_t block_nbytes = 2048;

// Three or more sources are combined block by block, so that the block of dst stays in the first-level cache. dst may
// be one of the sources, so the result is gathered in a separate block.
template <class T, class Op>
void reduce_native(byte* dst, const byte* const* sources, size_t sources_count, size_t count, uint64_t divisor) {
  constexpr size_t block = block_nbytes / sizeof(T);
  const bool divides = Op::averages && divisor > 1;
  const size_t step = !divides && sources_count <= 2 ? count : block;
  alignas(64) byte gathered[block_nbytes];
  for (size_t start = 0; start < count; start += step) {
    const size_t n = count - start < step ? count - start : step;
    const size_t offset = start * sizeof(T);
    if (sources_count == 1) {
      take_one<T, Op>(dst + offset, sources[0] + offset, n);
    } else if (sources_count == 2) {
      combine_two<T, Op>(dst + offset, sources[0] + offset, sources[1] + offset, n);
    } else {
      combine_two<T, Op>(gathered, sources[0] + offset, sources[1] + offset, n);
      for (size_t k = 2; k < sources_count; ++k) combine_two<T, Op>(gathered, gathered, sources[k] + offset, n);
      __builtin_memcpy(dst + offset, gathered, n * sizeof(T));
    }
    if constexpr (Op::averages)
      if (divides) divide_all<T>(dst + offset, n, divisor);
  }
}

// Complex numbers are added, and divided by a real number, as pairs of reals.
template <class T, class Op>
void reduce_parts(byte* dst, const byte* const* sources, size_t sources_count, size_t count, uint64_t divisor) {
  reduce_native<T, Op>(dst, sources, sources_count, 2 * count, divisor);
}

template <class Format, class Op>
void reduce_narrow(byte* dst, const byte* const* sources, size_t sources_count, size_t count, uint64_t divisor) {
  constexpr size_t block = block_nbytes / sizeof(float);
  constexpr size_t itemsize = Format::itemsize;
  const bool divides = Op::averages && divisor > 1;
  const bool two = sources_count == 2 && !divides;
  const size_t combined = two ? Format::template combine_two<Op>(dst, sources[0], sources[1], count) : 0;
  alignas(64) float state[block];
  alignas(64) float operand[block];
  for (size_t start = combined; start < count; start += block) {
    const size_t n = count - start < block ? count - start : block;
    Format::decode_all(state, sources[0] + itemsize * start, n);
    if constexpr (Op::logical)
      for (size_t i = 0; i < n; ++i) state[i] = LogicalOr::apply(state[i], state[i]);
    for (size_t k = 1; k < sources_count; ++k) {
      Format::decode_all(operand, sources[k] + itemsize * start, n);
      for (size_t i = 0; i < n; ++i) state[i] = Op::apply(state[i], operand[i]);
    }
    if constexpr (Op::averages)
      if (divides)
        for (size_t i = 0; i < n; ++i) state[i] = divide(state[i], divisor);
    Format::encode_all(dst + itemsize * start, state, n);
  }
}

template <class Op>
ReduceFunction for_integers(DType dtype) {
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
    default:
      return nullptr;
  }
}

// Returns the function of an operation whose result is the same for signed and unsigned integers, so one serves both.
template <class Op>
ReduceFunction for_words(DType dtype) {
  switch (dtype) {
    case DType::int8:
    case DType::uint8:
      return reduce_native<uint8_t, Op>;
    case DType::int16:
    case DType::uint16:
      return reduce_native<uint16_t, Op>;
    case DType::int32:
    case DType::uint32:
      return reduce_native<uint32_t, Op>;
    case DType::int64:
    case DType::uint64:
      return reduce_native<uint64_t, Op>;
    default:
      return nullptr;
  }
}

template <class Op>
ReduceFunction for_floats(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return reduce_narrow<Float16, Op>;
    case DType::bfloat16:
      return reduce_narrow<BFloat16, Op>;
    case DType::float32:
      return reduce_native<float, Op>;
    case DType::float64:
      return reduce_native<double, Op>;
    case DType::float8_e4m3fn:
      return reduce_narrow<Float8E4M3, Op>;
    case DType::float8_e5m2:
      return reduce_narrow<Float8E5M2, Op>;
    default:
      return nullptr;
  }
}

template <class Op>
ReduceFunction for_complex(DType dtype) {
  switch (dtype) {
    case DType::complex64:
      return reduce_native<Complex<float>, Op>;
    case DType::complex128:
      return reduce_native<Complex<double>, Op>;
    default:
      return nullptr;
  }
}

ReduceFunction complex_sum(DType dtype) {
  switch (dtype) {
    case DType::complex64:
      return reduce_parts<float, Sum>;
    case DType::complex128:
      return reduce_parts<double, Sum>;
    default:
      return nullptr;
  }
}

// For booleans, which are bytes: the minimum is "and", and the maximum is "or".
ReduceFunction for_booleans(Combine combine) {
  switch (combine) {
    case Combine::min:
    case Combine::band:
    case Combine::land:
      return reduce_native<uint8_t, LogicalAnd>;
    case Combine::max:
    case Combine::bor:
    case Combine::lor:
      return reduce_native<uint8_t, LogicalOr>;
    case Combine::bxor:
    case Combine::lxor:
      return reduce_native<uint8_t, LogicalXor>;
    default:
      return nullptr;
  }
}

ReduceFunction first_of(ReduceFunction a, ReduceFunction b, ReduceFunction c = nullptr) {
  return a != nullptr ? a : b != nullptr ? b : c;
}

template <class Op>
ReduceFunction for_logic(DType dtype) {
  return first_of(for_words<Op>(dtype), for_floats<Op>(dtype), for_complex<Op>(dtype));
}

// The size of one register. gcc 12 assumes alignment where it splits wider vectors.
#if defined(__AVX512F__)
#define UNISONO_REGISTER_NBYTES 64
#elif defined(__AVX2__)
#define UNISONO_REGISTER_NBYTES 32
#else
#define UNISONO_REGISTER_NBYTES 16
#endif
typedef uint64_t Register __attribute__((vector_size(UNISONO_REGISTER_NBYTES), aligned(1), may_alias));

// A cache line. The inline function of cache_line.h must not be compiled here, because the linker could merge it.
constexpr size_t line_nbytes = 64;

template <size_t nbytes>
inline void copy_exactly(byte* dst, const byte* src) {
  constexpr size_t count = nbytes / sizeof(Register);
  Register all[count];
  for (size_t i = 0; i < count; ++i) all[i] = reinterpret_cast<const Register*>(src)[i];
  for (size_t i = 0; i < count; ++i) reinterpret_cast<Register*>(dst)[i] = all[i];
}

// Copies four lines at a time, to aligned addresses. Some bytes of the first line may be stored twice.
void copy(byte* dst, const byte* src, size_t nbytes) {
  constexpr size_t step = 4 * line_nbytes;
  copy_exactly<line_nbytes>(dst, src);
  size_t done = line_nbytes - reinterpret_cast<uintptr_t>(dst) % line_nbytes;
  for (; nbytes - done >= step; done += step) copy_exactly<step>(dst + done, src + done);
  __builtin_memcpy(dst + done, src + done, nbytes - done);
}

}  // namespace

ReduceFunction lookup(DType dtype, Combine combine) {
  if (dtype == DType::boolean) return for_booleans(combine);
  switch (combine) {
    case Combine::sum:
      return first_of(for_integers<Sum>(dtype), for_floats<Sum>(dtype), complex_sum(dtype));
    case Combine::prod:
      return first_of(for_words<Prod>(dtype), for_floats<Prod>(dtype), for_complex<Prod>(dtype));
    case Combine::min:
      return first_of(for_integers<Min>(dtype), for_floats<Min>(dtype));
    case Combine::max:
      return first_of(for_integers<Max>(dtype), for_floats<Max>(dtype));
    case Combine::band:
      return for_words<BitAnd>(dtype);
    case Combine::bor:
      return for_words<BitOr>(dtype);
    case Combine::bxor:
      return for_words<BitXor>(dtype);
    case Combine::land:
      return for_logic<LogicalAnd>(dtype);
    case Combine::lor:
      return for_logic<LogicalOr>(dtype);
    case Combine::lxor:
      return for_logic<LogicalXor>(dtype);
    case Combine::minloc:
      return for_complex<Located<Less>>(dtype);
    case Combine::maxloc:
      return for_complex<Located<Greater>>(dtype);
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
void UNISONO_JOIN(copy_, UNISONO_ISA)(std::byte* dst, const std::byte* src, size_t nbytes) {
  UNISONO_ISA::copy(dst, src, nbytes);
}

}  // namespace unisono::detail
