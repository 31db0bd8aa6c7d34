// `StridedCopies`: copies between regions of strided arrays, as the faces of a halo need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace unisono {

//! A copy between two regions of the same shape. Strides are in bytes and may be negative. The regions do not overlap.
struct StridedCopy {
  std::byte* dst;
  const std::byte* src;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> dst_strides;
  std::vector<std::int64_t> src_strides;
};

//! Copies that run one after the other.
class StridedCopies {
 public:
  //! Throws std::invalid_argument if a copy has a negative extent, or not as many strides as axes.
  StridedCopies(std::size_t itemsize, const std::vector<StridedCopy>& copies);

  //! The bytes of all regions together.
  std::size_t nbytes() const { return nbytes_; }
  void run() const;

 private:
  struct Axis {
    std::int64_t length;
    std::int64_t dst_stride;
    std::int64_t src_stride;
  };
  // A copy in its shortest form: runs of contiguous bytes, at the places of the axes, of which `inner` is the last.
  struct Runs {
    std::byte* dst;
    const std::byte* src;
    std::vector<Axis> outer;
    Axis inner;
    std::size_t run_nbytes;
    std::size_t nbytes;
  };

  static Runs shortened(std::size_t itemsize, const StridedCopy& copy);
  static void run(const Runs& runs);

  std::vector<Runs> copies_;
  std::size_t nbytes_ = 0;
};

}  // namespace unisono
