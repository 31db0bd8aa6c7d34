//! Measures the distance between two cores.
#pragma once

#include <cstdint>

namespace unisono {

//! Half the time in nanoseconds in which a flag travels from a thread on `core_a` to one on `core_b` and back. It is
//! the median over batches of round trips, `rounds` in all. Throws std::system_error if a thread cannot be pinned to
//! its core.
double flag_latency_ns(int core_a, int core_b, std::int64_t rounds);

}  // namespace unisono
