//! The kind of memory that a message lies in. The numbers are those of UCX.
#pragma once

#include <cstdint>

namespace unisono {

//! Kinds of memory.
enum class MemoryType : std::uint8_t { host, cuda, cuda_managed };

}  // namespace unisono
