// `StorePolicy` chooses between ordinary and streaming stores for writing messages to shared memory.
//
// Theory of operation
// -------------------
// Before an ordinary store, the writer's core must own the cache line, which the reader's core holds since it read the
// slot last. Between cores that share a cache this is fast, and the new data then lie near the reader. Between other
// cores every line costs a transfer. Streaming stores bypass the caches and may then be several times as fast, but the
// reader fetches the data from further away.
//
// Which way is faster depends on the processor, and a hypervisor may move the cores of a virtual machine at any time.
// So both ways are tried again and again. The writer times its fills, the reader reports the time of its reads, and the
// way with the smaller sum is used. The smallest of the last three times counts, because interruptions only make a time
// longer. Reading the clock and the reader's report takes a tenth of a short fill, so only one fill in 8 is timed.
//
// The same choice exists for results that are not read soon. If the destination is cached, ordinary stores are as fast.
// If it is not, an ordinary store first reads the line from memory for nothing, which a streaming store avoids.
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

//! Copies by streaming stores, where the processor has them. Other cores may see these stores in any order until
//! `fence_streaming_stores`.
void copy_streaming(std::byte* dst, const std::byte* src, std::size_t nbytes);
void fence_streaming_stores();

//! The kind of store instructions that write a fill.
enum class Stores : std::uint8_t { ordinary, streaming };
//! The number of kinds.
inline constexpr std::size_t store_ways = 2;

//! How one fill is done: by which stores, and whether its time is measured.
struct Way {
  Stores stores = Stores::ordinary;
  bool timed = false;
};

//! The last three measured times, in nanoseconds for 64 KiB.
class RecentTimes {
 public:
  static constexpr std::size_t kept = 3;

  //! Returns the nanoseconds that 64 KiB take if `nbytes` took the time `took`.
  static std::uint32_t of(std::chrono::nanoseconds took, std::size_t nbytes) {
    const double ns_per_64k = static_cast<double>(took.count()) * (64 << 10) / static_cast<double>(nbytes);
    return static_cast<std::uint32_t>(std::clamp(ns_per_64k, 1.0, 1e9));
  }
  void add(std::uint32_t ns_per_64k) { times_[added_++ % kept] = ns_per_64k; }
  //! The smallest time; 0 before there are three.
  std::uint32_t smallest() const { return added_ < kept ? 0 : *std::min_element(times_.begin(), times_.end()); }
  //! The median; 0 before there are three.
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

//! Chooses between two ways to do the same work, such as ordinary and streaming stores, by their measured costs. It
//! takes the way with the lower cost. Now and then it takes the other way, `burst` times in a row, to measure its cost
//! again.
class Choice {
 public:
  explicit Choice(std::uint32_t burst) : burst_(burst) {}
  //! Returns whether the caller should use the second way next. The costs are those measured so far; 0 if unknown.
  bool is_second(std::uint32_t first_cost, std::uint32_t second_cost);
  //! Whether the first trials of both ways are over.
  bool settled() const { return decisions_ >= first_trials; }
  //! Whether the second way is the better one.
  bool second_is_better() const { return second_; }

 private:
  // The ways alternate for this many decisions at first.
  static constexpr std::uint32_t first_trials = 2 * (RecentTimes::kept + 1);
  static constexpr std::uint32_t fewest_between = 4;

  std::uint32_t burst_;
  std::uint32_t decisions_ = 0;
  std::uint32_t since_trial_ = 0;
  std::uint32_t trials_remaining_ = 0;
  std::uint32_t times_between_ = fewest_between;  // doubles after each trial, up to a bound
  bool second_ = false;
};

//! Chooses how to store, from the measured times of fills and of the peer's reads.
class StorePolicy {
 public:
  //! The time that the reader takes to read 64 KiB, by the kind of store with which they were written; 0 if unknown.
  using ReadTimes = std::array<std::uint32_t, store_ways>;

  //! Returns how to store the next `nbytes`. The function `read` returns the reader's times. It is called only for
  //! fills that are timed, because all others use the kind of stores that was faster last.
  template <class Read>
  Way choose(std::size_t nbytes, const Read& read) {
    if (!has_streaming_stores || nbytes < least_chosen_nbytes) return {};
    if (untimed_remaining_ == 0) return decide(read());
    --untimed_remaining_;
    return {usual_, false};
  }
  //! Fills memory that the peer has read since the last fill. Returns the time taken, or 0 if the fill is not timed.
  std::chrono::nanoseconds fill(std::byte* dst, const std::byte* src, std::size_t nbytes, Way way);
  //! Copies to memory that nobody reads soon, by the faster kind of store. `read` has the times to read that memory, if
  //! the caller knows them; by default they count as equal.
  void copy(std::byte* dst, const std::byte* src, std::size_t nbytes, const ReadTimes& read = {1, 1});
  //! The time of one fill and one read in the usual way, in nanoseconds for 64 KiB; 0 if unknown.
  std::uint32_t usual_cost(const ReadTimes& read) const { return cost(usual_, read); }
  //! The time of an ordinary fill of memory that the peer has read, in nanoseconds for 64 KiB; 0 if unknown.
  std::uint32_t ordinary_ns() const { return written_[static_cast<std::size_t>(Stores::ordinary)].smallest(); }
  //! Takes in the time of a fill.
  void observe(Stores stores, std::chrono::nanoseconds took, std::size_t nbytes) {
    written_[static_cast<std::size_t>(stores)].add(RecentTimes::of(took, nbytes));
  }

 private:
  // Shorter fills use ordinary stores.
  static constexpr std::size_t least_chosen_nbytes = 2 << 10;

  Way decide(const ReadTimes& read);
  std::uint32_t cost(Stores stores, const ReadTimes& read) const;

  std::array<RecentTimes, store_ways> written_;
  Choice streaming_{1};
  Stores usual_ = Stores::ordinary;
  std::uint32_t untimed_remaining_ = 0;  // fills until the next timed one
};

}  // namespace unisono
