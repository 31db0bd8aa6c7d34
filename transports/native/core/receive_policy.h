// How the bytes of a long message get from the kernel to where they are wanted: straight, or by a stage, and where
// there.
//
// Theory of operation. The kernel copies by `rep movsb` where the processor says that this is fast. On Zen 3 and 4 it
// is several times slower where bytes go a little further into a page than they lie in one of the kernel's (see
// `copy_array`), and nobody outside knows how they lie there. To copy them twice is quicker then: to a stage that lies
// otherwise in its cache lines, and from there. So each message begins straight, and is timed; its rest goes the other
// way if that takes less, which one receive is made by now and then to know it. On other processors it never does. What
// is staged anyway, as it is to be combined, goes to the other half of a cache line after each receive that was slow.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "cache_line.h"
#include "store_policy.h"

namespace unisono {

// What lies so much further into its cache line is copied quickly, where it was slow.
inline constexpr std::size_t half_a_line = cache_line / 2;

class ReceivePolicy {
 public:
  // What is shorter says nothing.
  static constexpr std::size_t least_nbytes = 16 << 10;
  // How much is received at once until it is known how long it takes.
  static constexpr std::size_t first_nbytes = 64 << 10;

  void begin_message(std::uint64_t nbytes) {
    is_long_ = nbytes > 2 * first_nbytes;
    straight_ns_ = 0;
  }
  // How much may be received next.
  std::size_t most(std::size_t nbytes) const {
    return straight_ns_ == 0 && nbytes > first_nbytes ? first_nbytes : nbytes;
  }
  // Whether the next bytes shall go by the stage.
  bool is_staged() const {
    if (!is_long_ || straight_ns_ == 0) return false;
    const std::uint32_t staged = staged_.smallest();
    return staged == 0 || straight_since_trial_ >= straight_per_trial || staged < straight_ns_ * clearly_better;
  }
  // Takes in how long it took to receive so much.
  void note(bool is_staged, std::chrono::nanoseconds took, std::size_t nbytes) {
    if (!is_long_ || nbytes < least_nbytes) return;
    const std::uint32_t each = RecentTimes::of(took, nbytes);
    if (is_staged) {
      staged_.add(each);
      straight_since_trial_ = 0;
    } else {
      if (straight_ns_ == 0 || each < straight_ns_) straight_ns_ = each;
      ++straight_since_trial_;
    }
  }

 private:
  static constexpr std::uint32_t straight_per_trial = 64;
  // To be taken, the stage must be better by this factor.
  static constexpr double clearly_better = 0.8;

  bool is_long_ = false;  // the message has enough that can go otherwise than its beginning
  RecentTimes staged_;
  std::uint32_t straight_ns_ = 0;  // for 64 KiB, the least of this message; 0: not known
  std::uint32_t straight_since_trial_ = 0;
};

// Where in its first cache line a stage begins.
class StagingPolicy {
 public:
  std::size_t lead() const { return lead_; }
  // Takes in how long it took to receive so much.
  void note(std::chrono::nanoseconds took, std::size_t nbytes) {
    if (nbytes < ReceivePolicy::least_nbytes) return;
    const std::uint32_t each = RecentTimes::of(took, nbytes);
    if (each > quickest_ * clearly_slower) lead_ ^= half_a_line;
    // What was once the quickest may not be possible any more.
    quickest_ = std::min(each, quickest_ + quickest_ / 16);
  }

 private:
  static constexpr double clearly_slower = 1.5;

  std::size_t lead_ = 0;
  std::uint32_t quickest_ = 1'000'000'000;  // for 64 KiB, in nanoseconds
};

}  // namespace unisono
