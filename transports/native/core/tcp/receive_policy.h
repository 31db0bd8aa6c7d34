// How the bytes of a long TCP message get from the kernel to their destination: directly, or through a stage.
//
// Theory of operation
// -------------------
// The kernel copies by `rep movsb` where the processor reports that this is fast. On Zen 3 and 4 it is several times
// slower if the destination lies 1 to 31 bytes further into its page than the source (see `copy_array`). A process
// cannot see how the kernel's buffers are aligned. In that case two copies are faster: one to a stage that is aligned
// differently, and one from there.
//
// So each message begins with direct receives, which are timed. The rest goes through the stage if that takes at most
// 0.8 of the time. One receive in 64 is a trial of the stage. On other processors the stage is never chosen.
//
// A payload that will be combined goes through a stage in any case. After each slow receive its stage begins in the
// other half of a cache line.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "shm/store_policy.h"
#include "system/cache_line.h"

namespace unisono {

// A shift by half a cache line makes a slow copy fast again.
inline constexpr std::size_t half_cache_line = cache_line / 2;

//! Chooses between a direct receive and one through the stage, for the rest of a message.
class ReceivePolicy {
 public:
  //! Shorter receives are not timed, because their times say nothing.
  static constexpr std::size_t least_nbytes = 16 << 10;
  //! The most bytes of one receive until the first one has been timed.
  static constexpr std::size_t first_nbytes = 64 << 10;

  //! Starts a message of `nbytes`.
  void begin_message(std::uint64_t nbytes) {
    is_long_ = nbytes > 2 * first_nbytes;
    straight_ns_ = 0;
  }
  //! How many of `nbytes` may be received next.
  std::size_t most(std::size_t nbytes) const {
    return straight_ns_ == 0 && nbytes > first_nbytes ? first_nbytes : nbytes;
  }
  //! Whether the next bytes should go through the stage.
  bool is_staged() const {
    if (!is_long_ || straight_ns_ == 0) return false;
    const std::uint32_t staged = staged_.smallest();
    return staged == 0 || straight_since_trial_ >= straight_per_trial || staged < straight_ns_ * clearly_better;
  }
  //! Takes in the time `took` of a receive of `nbytes`.
  void note(bool is_staged, std::chrono::nanoseconds took, std::size_t nbytes) {
    if (!is_long_ || nbytes < least_nbytes) return;
    const std::uint32_t ns_per_64k = RecentTimes::of(took, nbytes);
    if (is_staged) {
      staged_.add(ns_per_64k);
      straight_since_trial_ = 0;
    } else {
      if (straight_ns_ == 0 || ns_per_64k < straight_ns_) straight_ns_ = ns_per_64k;
      ++straight_since_trial_;
    }
  }

 private:
  static constexpr std::uint32_t straight_per_trial = 64;
  // The stage is chosen only if it takes less than this part of the direct time.
  static constexpr double clearly_better = 0.8;

  bool is_long_ = false;  // it has more than its timed beginning
  RecentTimes staged_;
  std::uint32_t straight_ns_ = 0;  // the shortest direct time of this message for 64 KiB; 0: unknown
  std::uint32_t straight_since_trial_ = 0;
};

//! Chooses how far into a cache line a stage begins.
class StagingPolicy {
 public:
  std::size_t line_offset() const { return line_offset_; }
  //! Takes in the time `took` of a receive of `nbytes`.
  void note(std::chrono::nanoseconds took, std::size_t nbytes) {
    if (nbytes < ReceivePolicy::least_nbytes) return;
    const std::uint32_t ns_per_64k = RecentTimes::of(took, nbytes);
    if (ns_per_64k > quickest_ * clearly_slower) line_offset_ ^= half_cache_line;
    // The shortest time rises slowly towards the newest one, because the machine may no longer reach the times of the
    // past.
    quickest_ = std::min(ns_per_64k, quickest_ + quickest_ / 16);
  }

 private:
  static constexpr double clearly_slower = 1.5;

  std::size_t line_offset_ = 0;
  std::uint32_t quickest_ = 1'000'000'000;  // nanoseconds for 64 KiB
};

}  // namespace unisono
