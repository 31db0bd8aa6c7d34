#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "check.h"
#include "kernels/kernels.h"
#include "kernels/wire_formats.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

// The sources of a kernel, with random bits. An array ends where its allocation ends, so that the address sanitizer
// detects a kernel that reads beyond the array.
struct Operands {
  std::vector<std::vector<std::byte>> memory;
  std::vector<const std::byte*> sources;

  Operands(std::size_t sources_count, std::size_t nbytes, std::size_t misalignment, Dice& dice) {
    for (std::size_t k = 0; k < sources_count; ++k) {
      std::vector<std::byte> bytes(misalignment + nbytes);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(dice.word());
      memory.push_back(std::move(bytes));
    }
    for (const auto& bytes : memory) sources.push_back(bytes.data() + misalignment);
  }
};

template <class Body>
void for_each_kernel(Body&& body) {
  for (std::size_t code = 0; code < dtype_count; ++code) {
    const auto dtype = static_cast<DType>(code);
    for (std::size_t combine = 0; combine < combine_count; ++combine)
      if (const Kernel kernel = find_kernel(dtype, static_cast<Combine>(combine)))
        body(kernel, dtype, dtype_table[code].itemsize);
  }
}

// Random bits, so that every kernel gets infinities, NaNs, subnormals and overflowing integers, at any alignment and
// length.
void kernels_stay_within_their_arrays() {
  Dice dice(3);
  for_each_kernel([&](Kernel kernel, DType, std::size_t itemsize) {
    for (const std::size_t count : {0, 1, 7, 31, 513, 1025}) {
      for (const std::size_t misalignment : {0, 1, 3}) {
        for (const std::size_t sources_count : {1, 2, 3, 5}) {
          const Operands operands(sources_count, count * itemsize, misalignment, dice);
          std::vector<std::byte> dst(count * itemsize);
          kernel(dst.data(), operands.sources.data(), sources_count, count, dice.below(6));
        }
      }
    }
  });
}

void a_destination_may_be_any_of_the_sources() {
  Dice dice(4);
  for_each_kernel([&](Kernel kernel, DType, std::size_t itemsize) {
    constexpr std::size_t count = 1500;
    for (const std::size_t sources_count : {1, 2, 3, 4}) {
      for (std::size_t aliased = 0; aliased < sources_count; ++aliased) {
        Operands operands(sources_count, count * itemsize, 1, dice);
        std::vector<std::byte> apart(count * itemsize);
        kernel(apart.data(), operands.sources.data(), sources_count, count, 3);
        std::byte* in_place = operands.memory[aliased].data() + 1;
        kernel(in_place, operands.sources.data(), sources_count, count, 3);
        CHECK(std::memcmp(in_place, apart.data(), apart.size()) == 0);
      }
    }
  });
}

// Covers many offsets of both arrays in their pages, because `copy_array` uses `rep movsb` only for some of them.
void a_copy_is_exact_at_any_offset_and_length() {
  constexpr std::align_val_t page{4096};
  const auto free = [](std::byte* memory) { ::operator delete(memory, page); };
  using Pages = std::unique_ptr<std::byte, decltype(free)>;
  const auto pages = [&](std::size_t nbytes) {
    return Pages(static_cast<std::byte*>(::operator new(nbytes, page)), free);
  };
  Dice dice(6);
  for (const std::size_t nbytes : {0, 1, 1023, 1024, 1025, 1087, 1280, 4095, 8192}) {
    for (const std::size_t from : {0, 5, 48}) {
      const Pages src = pages(from + nbytes);
      for (std::size_t i = 0; i < nbytes; ++i) src.get()[from + i] = static_cast<std::byte>(dice.word());
      for (std::size_t to = 0; to < 130; ++to) {
        const Pages dst = pages(to + nbytes);
        std::memset(dst.get(), 0x5a, to);
        copy_array(dst.get() + to, src.get() + from, nbytes);
        CHECK(std::memcmp(dst.get() + to, src.get() + from, nbytes) == 0);
        CHECK(std::all_of(dst.get(), dst.get() + to, [](std::byte each) { return each == std::byte{0x5a}; }));
      }
    }
  }
}

void integers_wrap_and_their_division_truncates() {
  const auto reduced = [](Combine combine, std::int32_t a, std::int32_t b, std::uint64_t divisor) {
    const std::byte* sources[] = {reinterpret_cast<std::byte*>(&a), reinterpret_cast<std::byte*>(&b)};
    std::int32_t result = 0;
    find_kernel(DType::int32, combine)(reinterpret_cast<std::byte*>(&result), sources, 2, 1, divisor);
    return result;
  };
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t least = std::numeric_limits<std::int32_t>::min();
  CHECK(reduced(Combine::sum, most, 1, 1) == least);
  CHECK(reduced(Combine::prod, most, most, 1) == 1);
  CHECK(reduced(Combine::sum, -4, -3, 2) == -3);
  CHECK(reduced(Combine::min, -4, 3, 1) == -4 && reduced(Combine::max, -4, 3, 1) == 3);
}

// A second definition of 16-bit floats, by powers of two instead of bits.
struct HalfFormat {
  DType dtype;
  int digits;  // fraction bits
  int least;   // the least exponent of normal numbers
  int most;

  double decode(std::uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> digits;
    const int fraction = bits & ((1 << digits) - 1);
    const double magnitude = exponent == 0 ? std::ldexp(fraction, least - digits)
                                           : std::ldexp((1 << digits) + fraction, exponent - 1 + least - digits);
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
  }
  bool finite(std::uint16_t bits) const { return (bits & 0x7fff) >> digits <= most - least + 1; }
  // Rounds to the nearest number of the format, and of two to the even one. Infinity counts as the number after the
  // largest.
  double round(double value) const {
    if (std::isinf(value)) return value;
    const int exponent = value == 0 ? least : std::max(std::ilogb(value), least);
    const double quantum = std::ldexp(1.0, exponent - digits);
    const double rounded = std::nearbyint(value / quantum) * quantum;
    return std::fabs(rounded) < std::ldexp(1.0, most + 1) ? rounded : std::copysign(HUGE_VAL, rounded);
  }
};
constexpr HalfFormat half_formats[] = {{DType::float16, 10, -14, 15}, {DType::bfloat16, 7, -126, 127}};

void halves_are_summed_in_float32_and_rounded_once() {
  Dice dice(5);
  for (const HalfFormat& format : half_formats) {
    std::vector<std::uint16_t> x(1 << 16), y(1 << 16), sum(1 << 16);
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<std::uint16_t>(i);
      y[i] = static_cast<std::uint16_t>(dice.below(4) == 0 ? 0x8000 : dice.word());  // often minus zero
    }
    const std::byte* sources[] = {reinterpret_cast<std::byte*>(x.data()), reinterpret_cast<std::byte*>(y.data())};
    find_kernel(format.dtype, Combine::sum)(reinterpret_cast<std::byte*>(sum.data()), sources, 2, x.size(), 1);
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (!format.finite(x[i]) || !format.finite(y[i])) continue;
      const double expected = format.round(static_cast<float>(format.decode(x[i]) + format.decode(y[i])));
      const double got = format.finite(sum[i]) ? format.decode(sum[i]) : std::copysign(HUGE_VAL, expected);
      CHECK(got == expected && (y[i] != 0x8000 || sum[i] == x[i]));
    }
  }
}

void complex_numbers_are_added_and_multiplied_by_parts() {
  const float a[] = {1, 2, 3, -4}, b[] = {5, 6, -7, 8};
  const std::byte* sources[] = {reinterpret_cast<const std::byte*>(a), reinterpret_cast<const std::byte*>(b)};
  const auto reduced = [&](Combine combine, std::uint64_t divisor) {
    std::vector<float> result(4);
    find_kernel(DType::complex64, combine)(reinterpret_cast<std::byte*>(result.data()), sources, 2, 2, divisor);
    return result;
  };
  CHECK((reduced(Combine::sum, 1) == std::vector<float>{6, 8, -4, 4}));
  CHECK((reduced(Combine::sum, 2) == std::vector<float>{3, 4, -2, 2}));
  CHECK((reduced(Combine::prod, 1) == std::vector<float>{-7, 16, 11, 52}));
  CHECK((reduced(Combine::maxloc, 1) == std::vector<float>{5, 6, 3, -4}));
}

void logical_operations_make_0_or_1_of_a_single_source() {
  const std::int16_t values[] = {0, -3, 256};
  const std::byte* source = reinterpret_cast<const std::byte*>(values);
  for (const Combine combine : {Combine::land, Combine::lor, Combine::lxor}) {
    std::int16_t result[3];
    find_kernel(DType::int16, combine)(reinterpret_cast<std::byte*>(result), &source, 1, 3, 0);
    CHECK(result[0] == 0 && result[1] == 1 && result[2] == 1);
  }
}

void undefined_operations_have_no_kernel() {
  for (const Combine combine : {Combine::sum, Combine::prod, Combine::minloc})
    CHECK(!find_kernel(DType::boolean, combine));
  for (const Combine combine : {Combine::min, Combine::max, Combine::bxor})
    CHECK(!find_kernel(DType::complex64, combine));
  CHECK(!find_kernel(DType::float32, Combine::band));
  CHECK(!find_kernel(static_cast<DType>(255), Combine::sum));
  CHECK(!find_kernel(DType::float32, static_cast<Combine>(255)));
}

// Floating-point modes that a library may leave in a thread.
struct Mode {
  const char* name;
  void (*set)();
};

#if defined(__x86_64__)
template <unsigned mxcsr>
void set_control() {
  __builtin_ia32_ldmxcsr(mxcsr);
}
const std::vector<Mode> processor_modes = {{"subnormal results flushed", set_control<0x9f80>},
                                           {"subnormal operands flushed", set_control<0x1fc0>},
                                           {"every exception stops", set_control<0x0000>}};
#elif defined(__aarch64__)
template <std::uint64_t fpcr>
void set_control() {
  asm volatile("msr fpcr, %0" ::"r"(fpcr) : "memory");
}
const std::vector<Mode> processor_modes = {{"subnormal numbers flushed", set_control<1 << 24>},
                                           {"every NaN the default one", set_control<1 << 25>},
                                           {"another float16", set_control<1 << 26>}};
#else
const std::vector<Mode> processor_modes;
#endif
const std::vector<Mode> portable_modes = {{"rounds up", [] { std::fesetround(FE_UPWARD); }},
                                          {"rounds down", [] { std::fesetround(FE_DOWNWARD); }},
                                          {"rounds towards zero", [] { std::fesetround(FE_TOWARDZERO); }},
                                          {"has raised", [] { std::feraiseexcept(FE_UNDERFLOW); }}};

// Calls `same_bits`, which computes only the result under test, in each mode. Checks that it keeps the mode.
template <class SameBits>
void check_in_each_mode(SameBits&& same_bits) {
  for (const auto* modes : {&processor_modes, &portable_modes}) {
    for (const Mode& mode : *modes) {
      std::fenv_t ours, before, after;
      std::feholdexcept(&ours);
      mode.set();
      std::fegetenv(&before);
      const bool same = same_bits();
      std::fegetenv(&after);
      std::fesetenv(&ours);
      if (!same || std::memcmp(&before, &after, sizeof before) != 0)
        throw std::logic_error(std::string(same ? "the mode was changed: " : "other bits: ") + mode.name);
    }
  }
}

// Makes about half of the elements subnormal.
void make_small(Operands& operands, std::size_t itemsize, Dice& dice) {
  for (auto& memory : operands.memory) {
    for (std::size_t end = itemsize; end <= memory.size(); end += itemsize) {
      if (dice.below(2) == 0) continue;
      memory[end - 1] &= std::byte{0x80};
      if (itemsize > 1) memory[end - 2] &= std::byte{0x0f};
    }
  }
}

void kernels_give_the_same_bits_in_every_mode() {
  Dice dice(6);
  for_each_kernel([&](Kernel kernel, DType, std::size_t itemsize) {
    constexpr std::size_t count = 300;
    for (const std::size_t sources_count : {1, 2, 3}) {
      Operands operands(sources_count, count * itemsize, 0, dice);
      make_small(operands, itemsize, dice);
      std::vector<std::byte> expected(count * itemsize), result(count * itemsize);
      kernel(expected.data(), operands.sources.data(), sources_count, count, 3);
      check_in_each_mode([&] {
        kernel(result.data(), operands.sources.data(), sources_count, count, 3);
        return result == expected;
      });
    }
  });
}

void codecs_give_the_same_bits_in_every_mode() {
  constexpr std::size_t count = 600;
  Dice dice(7);
  Operands operands(2, count * sizeof(float), 0, dice);
  make_small(operands, sizeof(float), dice);
  const auto* x = reinterpret_cast<const float*>(operands.sources[0]);
  for (const DType form : {DType::float16, DType::bfloat16, DType::int8}) {
    const Codec codec = find_codec(form);
    // The wire, the residual, and the sum of two decoded wires.
    const auto coded = [&](std::vector<std::byte>& all) {
      const std::size_t wire_nbytes = codec.nbytes(count);
      all.assign(wire_nbytes + 2 * count * sizeof(float), std::byte{0});
      auto* residual = reinterpret_cast<float*>(all.data() + wire_nbytes);
      std::memcpy(residual, operands.sources[1], count * sizeof(float));
      codec.encode(all.data(), x, residual, count);
      codec.decode(residual + count, all.data(), count, false);
      codec.decode(residual + count, all.data(), count, true);
    };
    std::vector<std::byte> expected, result;
    coded(expected);
    result.reserve(expected.size());
    check_in_each_mode([&] {
      coded(result);
      return result == expected;
    });
  }
}

}  // namespace

int main() {
  return run_tests({
      {"kernels stay within their arrays", kernels_stay_within_their_arrays},
      {"a destination may be any of the sources", a_destination_may_be_any_of_the_sources},
      {"a copy is exact at any offset and length", a_copy_is_exact_at_any_offset_and_length},
      {"integers wrap and their division truncates", integers_wrap_and_their_division_truncates},
      {"halves are summed in float32 and rounded once", halves_are_summed_in_float32_and_rounded_once},
      {"complex numbers are added and multiplied by parts", complex_numbers_are_added_and_multiplied_by_parts},
      {"logical operations make 0 or 1 of a single source", logical_operations_make_0_or_1_of_a_single_source},
      {"kernels give the same bits in every mode", kernels_give_the_same_bits_in_every_mode},
      {"codecs give the same bits in every mode", codecs_give_the_same_bits_in_every_mode},
      {"undefined operations have no kernel", undefined_operations_have_no_kernel},
  });
}
