// The size of a cache line, and a function to find memory with the same offset in its cache line as other memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

inline constexpr std::size_t cache_line = 64;

//! Returns how many bytes after `begin` the first address lies that has the same offset in its cache line as `other`.
//! `other` may be an address of another process.
inline std::size_t line_offset(std::uintptr_t other, const std::byte* begin) {
  return (other - reinterpret_cast<std::uintptr_t>(begin)) % cache_line;
}

}  // namespace unisono
