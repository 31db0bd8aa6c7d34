// How the bytes of a message are stored into the slots of shared memory.
//
// Theory of operation. An ordinary store must first own its cache line, which the reader's core holds since it read
// the slot the last time. Between cores that share a cache this is quick, and what has been stored is then near the
// reader; between cores that do not, each line costs a journey, and stores that go past the caches are several times
// as fast. A virtual machine's cores may be moved from one situation to the other at any time. So now and then the
// first bytes of a slot are stored in the ordinary way under the clock, and the times of the last few such samples
// decide: the smallest of them, because whatever interrupts a sample only makes it longer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

// Copies by stores that go past the caches, where the processor has them. What they stored becomes visible to others
// in any order until `fence_streaming_stores`.
void copy_streaming(std::byte* dst, const std::byte* src, std::size_t nbytes);
void fence_streaming_stores();

class StorePolicy {
 public:
  // Fills memory that a peer has read since it was filled the last time. What it stored may become visible to others
  // in any order; whoever publishes it must call `fence_streaming_stores` if this has returned true.
  bool fill(std::byte* dst, const std::byte* src, std::size_t nbytes);

  // Takes in the time of a sample.
  void observe(std::uint32_t ns);
  bool streaming() const { return streaming_; }

 private:
  void sample(std::byte* dst, const std::byte* src);

  static constexpr std::size_t kept = 3;
  std::uint32_t recent_ns_[kept] = {};
  std::uint32_t samples_ = 0;
  std::uint32_t fills_until_sample_ = 0;
  bool streaming_ = false;
};

}  // namespace unisono
