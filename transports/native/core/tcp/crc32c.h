//! CRC-32C (Castagnoli), by the processor's instruction where it has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

//! Returns the checksum of earlier bytes and `nbytes` at `data` together. `before` is the checksum of the earlier
//! bytes, 0 if there are none.
std::uint32_t crc32c(std::uint32_t before, const std::byte* data, std::size_t nbytes);

}  // namespace unisono
