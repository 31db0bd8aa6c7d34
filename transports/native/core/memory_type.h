// Where the memory of a message lies. The numbers are those of UCX.
#pragma once

#include <cstdint>

namespace unisono {

enum class MemoryType : std::uint8_t { host, cuda, cuda_managed };

}  // namespace unisono
