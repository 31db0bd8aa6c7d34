// CRC-32C (Castagnoli), by the processor's own instruction where it has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

// The checksum of `nbytes` at `data`, put after bytes whose checksum is `before` (of none: 0).
std::uint32_t crc32c(std::uint32_t before, const std::byte* data, std::size_t nbytes);

}  // namespace unisono
