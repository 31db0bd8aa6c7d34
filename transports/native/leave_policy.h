// Whether long messages go through slots or are left where they lie, for the reader to have the kernel copy them.
//
// Theory of operation. Slots cost two copies, one on either side; what is left costs one, on the reader's side, which
// is slower, as the kernel looks up every page. Where both sides send and receive at the same time, each of them does
// both copies; so the sum of what writing and reading take stands against what reading alone takes. Both ways are tried
// again and again, as ways of storing are (store_policy.h), but several times in a row, as each leaves other things
// behind in the caches; and apart for each length, as caches hold the shorter ones.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "store_policy.h"

namespace unisono {

class LeavePolicy {
 public:
  // What is shorter always goes through slots.
  static constexpr std::size_t least_nbytes = 256 << 10;

  // Whether the next message is left. What the last one has taken is known by now: nanoseconds for each 64 KiB, if it
  // went by slots, or if it was left; 0 if it is not known.
  bool leaves(std::size_t nbytes, std::uint32_t slots_ns, std::uint32_t left_ns);

 private:
  struct Alike {
    Choice choice{RecentTimes::kept};
    std::array<RecentTimes, 2> times;  // of slots, and of what was left
  };
  Alike& alike(std::size_t nbytes);

  static constexpr std::size_t lengths = 5;  // each up to four times the one before
  std::array<Alike, lengths> alike_;
  RecentTimes* last_ = nullptr;  // where the time of the last message belongs
  bool left_last_ = false;
};

}  // namespace unisono
