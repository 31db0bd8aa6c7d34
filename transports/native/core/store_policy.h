// How the bytes of a message are stored into the slots of shared memory.
//
// Theory of operation. An ordinary store must first own its cache line, which the reader's core holds since it read
// the slot the last time. Between cores that share a cache this is quick, and what has been stored is then near the
// reader; between cores that do not, each line costs a journey, and stores that go past the caches may be several times
// as fast, but what they stored comes from further away. Which is better depends on the processor, and a virtual
// machine's cores may be moved from one situation to the other at any time. So both ways are tried again and again: the
// writer times its fills, the reader tells how long it took over them, and the way with the smaller sum is used. Of the
// last few times the smallest decides, because whatever interrupts one only makes it longer. Reading the clock, and
// what the reader has told, takes a tenth of a short fill: so most of them are not timed.
//
// So it is with results that nobody reads for now: if caches hold that memory, ordinary stores find it there and are as
// fast, and if they do not, these first read all of it for nothing.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace unisono {

#if defined(__x86_64__)
inline constexpr bool has_streaming_stores = true;
#else
inline constexpr bool has_streaming_stores = false;
#endif

// Copies by stores that go past the caches, where the processor has them. What they stored becomes visible to others
// in any order until `fence_streaming_stores`.
void copy_streaming(std::byte* dst, const std::byte* src, std::size_t nbytes);
void fence_streaming_stores();

enum class Stores : std::uint8_t { ordinary, streaming };
inline constexpr std::size_t store_ways = 2;

// What is done with a fill.
struct Way {
  Stores stores = Stores::ordinary;
  bool timed = false;
};

// The last few times, in nanoseconds for each 64 KiB.
class RecentTimes {
 public:
  static constexpr std::size_t kept = 3;

  static std::uint32_t of(std::chrono::nanoseconds took, std::size_t nbytes) {
    const double each = static_cast<double>(took.count()) * (64 << 10) / static_cast<double>(nbytes);
    return static_cast<std::uint32_t>(std::clamp(each, 1.0, 1e9));
  }
  void add(std::uint32_t each) { times_[added_++ % kept] = each; }
  // 0 as long as there are too few.
  std::uint32_t smallest() const { return added_ < kept ? 0 : *std::min_element(times_.begin(), times_.end()); }
  // The one in the middle; likewise.
  std::uint32_t middle() const {
    if (added_ < kept) return 0;
    auto sorted = times_;
    std::nth_element(sorted.begin(), sorted.begin() + kept / 2, sorted.end());
    return sorted[kept / 2];
  }

 private:
  std::array<std::uint32_t, kept> times_{};
  std::uint64_t added_ = 0;
};

// Which of two ways to take next: the one that costs less and, now and then, the other one so many times (`burst`), to
// know what it costs.
class Choice {
 public:
  explicit Choice(std::uint32_t burst) : burst_(burst) {}
  // Returns whether it is the second. A cost is 0 as long as it is not known.
  bool is_second(std::uint32_t first_cost, std::uint32_t second_cost);
  // Whether both ways have been tried, and the second is the better one.
  bool settled() const { return made_ >= first_trials; }
  bool second_is_better() const { return second_; }

 private:
  // At first both ways take turns so often.
  static constexpr std::uint32_t first_trials = 2 * (RecentTimes::kept + 1);
  static constexpr std::uint32_t fewest_between = 4;

  std::uint32_t burst_;
  std::uint32_t made_ = 0;
  std::uint32_t since_trial_ = 0;
  std::uint32_t trials_left_ = 0;
  std::uint32_t times_between_ = fewest_between;  // trials, which get rarer
  bool second_ = false;
};

class StorePolicy {
 public:
  using ReadTimes = std::array<std::uint32_t, store_ways>;

  // How `nbytes` are to be stored next. `read` returns how long the reader takes, by the way of storing (0: it is not
  // known), and is asked only where that decides something.
  template <class Read>
  Way choose(std::size_t nbytes, const Read& read) {
    if (!has_streaming_stores || nbytes < least_chosen_nbytes) return {};
    if (untimed_left_ == 0) return decide(read());
    --untimed_left_;
    return {usual_, false};
  }
  // Fills memory that a peer has read since it was filled the last time. Returns the time that it took, if it is timed.
  std::chrono::nanoseconds fill(std::byte* dst, const std::byte* src, std::size_t nbytes, Way way);
  // Copies to memory that nobody reads for now, in the way that is faster itself; or to memory that takes so long to be
  // read.
  void copy(std::byte* dst, const std::byte* src, std::size_t nbytes, const ReadTimes& read = {1, 1});
  // What filling and reading usually take together, in nanoseconds for each 64 KiB; 0 if it is not known.
  std::uint32_t usual_cost(const ReadTimes& read) const { return cost(usual_, read); }
  // What ordinary stores take that fill memory which the peer has read, likewise.
  std::uint32_t ordinary_ns() const { return written_[static_cast<std::size_t>(Stores::ordinary)].smallest(); }
  // Takes in how long a fill took.
  void observe(Stores stores, std::chrono::nanoseconds took, std::size_t nbytes) {
    written_[static_cast<std::size_t>(stores)].add(RecentTimes::of(took, nbytes));
  }

 private:
  // What is shorter is stored in the ordinary way.
  static constexpr std::size_t least_chosen_nbytes = 2 << 10;

  Way decide(const ReadTimes& read);
  std::uint32_t cost(Stores stores, const ReadTimes& read) const;

  std::array<RecentTimes, store_ways> written_;
  Choice streaming_{1};
  Stores usual_ = Stores::ordinary;
  std::uint32_t untimed_left_ = 0;  // fills until the next one that is timed
};

}  // namespace unisono
