// Element types and reduction operations, numbered as in unisono/dtypes.py and unisono/operations.py.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
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

inline constexpr std::size_t dtype_count = 17;

//! The type of the elements of a message: a DType, or a type of Python whose elements are moved as bytes. The number of
//! the latter has `bytes_bit`, and below it a hash of the type's name.
struct ElementType {
  static constexpr std::uint32_t bytes_bit = 1U << 30;

  constexpr ElementType(DType dtype) : number(static_cast<std::uint32_t>(dtype)) {}  // NOLINT: every DType is one
  explicit constexpr ElementType(std::uint32_t value) : number(value) {}

  constexpr bool is_moved_as_bytes() const { return (number & bytes_bit) != 0; }
  //! Whether a message may carry this number.
  constexpr bool is_valid() const { return number < dtype_count || (number ^ bytes_bit) < bytes_bit; }

  std::uint32_t number;
};

//! The name and size of an element type.
struct DTypeInfo {
  std::string_view name;
  std::size_t itemsize;
};

//! By DType.
extern const std::array<DTypeInfo, dtype_count> dtype_table;

//! Lets errors name a type whose elements are moved as bytes. Any thread may call it; the first name stays.
void name_type(ElementType type, std::string_view name, std::size_t itemsize);
//! The name and the size of the elements of a valid type. A type that this process has not named counts as bytes.
struct TypeText {
  std::string name;
  std::size_t itemsize;
};
TypeText text_of(ElementType type);

}  // namespace unisono
