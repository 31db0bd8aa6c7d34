// How near two cores are to each other.
#pragma once

#include <cstdint>

namespace unisono {

// Half the time, in nanoseconds, in which a flag in memory goes from a thread on `core_a` to one on `core_b` and back:
// the median over batches of `rounds` round trips in all. Throws std::system_error if a thread cannot run on its core.
double flag_latency_ns(int core_a, int core_b, std::int64_t rounds);

}  // namespace unisono
