// Cache lines, and where something lies in its own one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

inline constexpr std::size_t cache_line = 64;

// How many bytes behind `begin` something lies in its cache line as it does at `other`, in this process or another.
inline std::size_t line_offset(std::uintptr_t other, const std::byte* begin) {
  return (other - reinterpret_cast<std::uintptr_t>(begin)) % cache_line;
}

}  // namespace unisono
