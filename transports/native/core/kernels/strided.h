// `StridedCopies`: copies between regions of strided arrays, as the faces of a halo need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace unisono {

//! A copy between two regions of the same shape. Strides are in bytes and may be negative. The region that it writes
//! overlaps no other region of any copy.
struct StridedCopy {
  std::byte* dst;
  const std::byte* src;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> dst_strides;
  std::vector<std::int64_t> src_strides;
};

//! Copies that run together. Copies of the same shape and strides take turns, a line after the other, because opposite
//! faces of a field are in the same cache lines.
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

    bool operator==(const Axis&) const = default;
  };
  struct Ends {
    std::byte* dst;
    const std::byte* src;
  };
  // Copies in their shortest form: runs of contiguous bytes, at the places of the axes, of which `inner` is the last.
  struct Runs {
    std::vector<Ends> ends;  // of each copy
    std::vector<Axis> outer;
    Axis inner;
    std::size_t run_nbytes;
    std::size_t nbytes;  // of each copy
  };

  static Runs shortened(std::size_t itemsize, const StridedCopy& copy);
  static void run(const Runs& runs);

  std::vector<Runs> groups_;
  std::size_t nbytes_ = 0;
};

}  // namespace unisono
