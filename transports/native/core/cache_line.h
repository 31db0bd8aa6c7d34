// The size of a cache line, and how to align memory alike within it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

inline constexpr std::size_t cache_line = 64;

//! Returns how far behind `begin` an address lies at the same offset in its cache line as `other`. `other` may be an
//! address of another process.
inline std::size_t line_offset(std::uintptr_t other, const std::byte* begin) {
  return (other - reinterpret_cast<std::uintptr_t>(begin)) % cache_line;
}

}  // namespace unisono
