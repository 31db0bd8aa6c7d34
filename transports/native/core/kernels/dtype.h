// Element types and reduction operations, numbered as in unisono/dtypes.py and unisono/operations.py.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace unisono {

//! Element types.
enum class DType : std::uint8_t {
  boolean,
  int8,
  uint8,
  int16,
  uint16,
  int32,
  uint32,
  int64,
  uint64,
  float16,
  bfloat16,
  float32,
  float64,
  float8_e4m3fn,
  float8_e5m2,
  complex64,
  complex128,
};

//! Reduction operations.
enum class Combine : std::uint8_t { sum, prod, min, max, band, bor, bxor, land, lor, lxor, minloc, maxloc };

inline constexpr std::size_t combine_count = 12;

//! The name and size of an element type.
struct DTypeInfo {
  std::string_view name;
  std::size_t itemsize;
};

inline constexpr std::size_t dtype_count = 17;
//! By DType.
extern const std::array<DTypeInfo, dtype_count> dtype_table;

}  // namespace unisono
