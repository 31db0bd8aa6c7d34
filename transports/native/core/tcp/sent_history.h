//! The bytes that a stream has sent last, in a ring buffer. If the connection breaks, the sender takes the bytes that
//! the other end has not received from this buffer, and sends them again over another connection.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

namespace unisono {

//! The last bytes of a sequence.
class SentHistory {
 public:
  //! The number of bytes that are kept.
  std::size_t size() const { return size_; }

  //! Adds bytes at the end.
  void append(const std::byte* data, std::size_t nbytes) {
    if (size_ + nbytes > capacity_) grow(size_ + nbytes);
    const std::size_t end = (begin_ + size_) & (capacity_ - 1);
    const std::size_t first = std::min(nbytes, capacity_ - end);
    if (first != 0) std::memcpy(ring_.get() + end, data, first);
    if (nbytes != first) std::memcpy(ring_.get(), data + first, nbytes - first);
    size_ += nbytes;
  }

  //! Forgets all but the last `nbytes`, or nothing if there are no more.
  void keep_last(std::size_t nbytes) {
    if (nbytes >= size_) return;
    begin_ = (begin_ + size_ - nbytes) & (capacity_ - 1);
    size_ = nbytes;
  }

  //! Removes and returns the last `nbytes`, of which there must be as many.
  std::vector<std::byte> take_last(std::size_t nbytes) {
    std::vector<std::byte> taken(nbytes);
    copy(size_ - nbytes, taken);
    size_ -= nbytes;
    return taken;
  }

 private:
  void copy(std::size_t offset, std::vector<std::byte>& to) const {
    if (to.empty()) return;
    const std::size_t begin = (begin_ + offset) & (capacity_ - 1);
    const std::size_t first = std::min(to.size(), capacity_ - begin);
    std::memcpy(to.data(), ring_.get() + begin, first);
    if (to.size() != first) std::memcpy(to.data() + first, ring_.get(), to.size() - first);
  }

  void grow(std::size_t needed) {
    const std::size_t capacity = std::bit_ceil(std::max(needed, std::size_t{4096}));
    auto ring = std::make_unique_for_overwrite<std::byte[]>(capacity);
    std::vector<std::byte> kept(size_);
    copy(0, kept);
    if (!kept.empty()) std::memcpy(ring.get(), kept.data(), kept.size());
    ring_ = std::move(ring);
    capacity_ = capacity;
    begin_ = 0;
  }

  std::unique_ptr<std::byte[]> ring_;
  std::size_t capacity_ = 0;  // 0 or a power of two
  std::size_t begin_ = 0;
  std::size_t size_ = 0;
};

}  // namespace unisono
