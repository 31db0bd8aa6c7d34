//! `Mapping`: memory shared with a peer, mapped into this process but not into its forked children.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <utility>

namespace unisono {

//! An owned mapping.
class Mapping {
 public:
  Mapping() = default;
  //! Takes over `nbytes` at `data`, as returned by mmap.
  Mapping(void* data, std::size_t nbytes) : data_(data), nbytes_(nbytes), process_(::getpid()) {
    ::madvise(data, nbytes, MADV_DONTFORK);
  }
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(nbytes_, other.nbytes_);
    std::swap(process_, other.process_);
    return *this;
  }
  //! Unmaps the memory, except in a forked child, where something else may be at that address.
  ~Mapping() {
    if (data_ != nullptr && process_ == ::getpid()) ::munmap(data_, nbytes_);
  }

  //! The first byte.
  void* data() const { return data_; }
  //! The size.
  std::size_t nbytes() const { return nbytes_; }

 private:
  void* data_ = nullptr;
  std::size_t nbytes_ = 0;
  ::pid_t process_ = 0;
};

}  // namespace unisono
