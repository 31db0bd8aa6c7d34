// Helpers for a test that plays the hostile peer of a channel.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <vector>

#include "check.h"
#include "drain.h"
#include "shm/shm_channel.h"
#include "system/descriptor.h"

namespace unisono::testing {

// The segment as a hostile peer maps it. Payloads in these tests are zeros, so any other value in it is bookkeeping.
class Segment {
 public:
  explicit Segment(const Descriptor& memory)
      : words_(static_cast<std::uint32_t*>(
            ::mmap(nullptr, ShmChannel::segment_nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0))) {
    CHECK(words_ != MAP_FAILED);
  }
  ~Segment() { ::munmap(words_, ShmChannel::segment_nbytes()); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::size_t words() const { return ShmChannel::segment_nbytes() / sizeof(std::uint32_t); }
  std::vector<std::size_t> bookkeeping() const {
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < words(); ++i)
      if (words_[i] != 0) places.push_back(i);
    return places;
  }
  void set(std::size_t place, std::uint32_t value) {
    std::atomic_ref<std::uint32_t>(words_[place]).store(value, std::memory_order_relaxed);
  }
  // Returns the number of times that `value` occurred.
  std::size_t replace(std::uint32_t value, std::uint32_t by) {
    std::size_t replaced = 0;
    for (const std::size_t place : bookkeeping()) {
      if (words_[place] != value) continue;
      set(place, by);
      ++replaced;
    }
    return replaced;
  }

 private:
  std::uint32_t* words_;
};

}  // namespace unisono::testing
