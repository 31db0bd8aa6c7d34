//! `RecordClock`: the time of the flight recorder, which is CLOCK_MONOTONIC in nanoseconds.
//!
//! Theory of operation
//! -------------------
//! Each call is recorded with two times, and reading the clock twice takes more time than the rest of the record. So
//! the clock is read at most once a millisecond. In between, the time is that reading plus the cycles that the
//! processor has counted since, multiplied by the length of a cycle. The counter is read in a third of the time of the
//! clock.
//!
//! Each thread has an anchor: a reading of both, the counter and the clock. The length of a cycle follows from two
//! anchors that are at least 20 ms apart. Until then, and on processors without a counter of constant rate, each time
//! is a reading of the clock. A kernel that interrupts the thread between the two readings spoils the anchor. The
//! counter then shows many cycles, and the anchor is not used. A time may differ from the clock by the duration of a
//! good reading, about a microsecond. Callers that compare times of one call take the later one.
#pragma once

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace unisono {

class RecordClock {
 public:
  //! The time in nanoseconds.
  static std::int64_t now_ns() {
    const std::uint64_t since = cycles() - anchor_.cycles;
    if (since < anchor_.lasts) return anchor_.ns + static_cast<std::int64_t>(since * anchor_.scale >> scale_bits);
    return read_clock();
  }

 private:
  static constexpr int scale_bits = 32;
  static constexpr std::int64_t lasts_ns = 1'000'000;
  static constexpr std::int64_t least_measured_ns = 20'000'000;
  static constexpr std::uint64_t most_reading_cycles = 4000;

  struct Anchor {
    std::uint64_t cycles;
    std::int64_t ns;
    std::uint64_t scale;  // nanoseconds in 2^scale_bits cycles
    std::uint64_t lasts;  // for this many cycles; 0: not usable
    // The anchor from which the length of a cycle is measured.
    std::uint64_t measured_from_cycles;
    std::int64_t measured_from_ns;
  };

  static std::uint64_t cycles() {
#if defined(__x86_64__)
    return __rdtsc();
#else
    return 0;
#endif
  }

  static bool counts_at_constant_rate() {
#if defined(__x86_64__)
    constexpr unsigned leaf = 0x80000007, invariant_tsc = 1U << 8;
    unsigned a = 0, b = 0, c = 0, d = 0;
    static const bool is_constant = __get_cpuid(leaf, &a, &b, &c, &d) != 0 && (d & invariant_tsc) != 0;
    return is_constant;
#else
    return false;
#endif
  }

  static std::int64_t clock_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  // Reads the clock, and makes the reading the anchor.
  static std::int64_t read_clock() {
    if (!counts_at_constant_rate()) return clock_ns();
    const std::uint64_t before = cycles();
    const std::int64_t ns = clock_ns();
    anchor_.lasts = 0;
    if (cycles() - before > most_reading_cycles) return ns;
    anchor_.cycles = before;
    anchor_.ns = ns;
    measure_cycle();
    if (anchor_.scale != 0) anchor_.lasts = (static_cast<std::uint64_t>(lasts_ns) << scale_bits) / anchor_.scale;
    return ns;
  }

  static void measure_cycle() {
    const std::int64_t measured_ns = anchor_.ns - anchor_.measured_from_ns;
    const bool is_first = anchor_.measured_from_ns == 0;
    if (!is_first && measured_ns < least_measured_ns) return;
    const std::uint64_t measured_cycles = anchor_.cycles - anchor_.measured_from_cycles;
    // The quotient is a double, because the shifted nanoseconds of some seconds do not fit into 64 bits.
    const double scale = static_cast<double>(measured_ns) / static_cast<double>(measured_cycles) * (1LL << scale_bits);
    anchor_.scale = !is_first && scale > 0 && scale < (1LL << scale_bits) * 8.0 ? static_cast<std::uint64_t>(scale) : 0;
    anchor_.measured_from_cycles = anchor_.cycles;
    anchor_.measured_from_ns = anchor_.ns;
  }

  static thread_local inline Anchor anchor_{};
};

}  // namespace unisono
