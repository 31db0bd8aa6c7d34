// `StridedRegions`: copies regions of strided arrays to flat memory and back, as the faces of a halo need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace unisono {

//! A region of an array: `base` is its first element, and strides are in bytes and may be negative.
struct StridedRegion {
  std::byte* base;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

//! Regions whose elements lie one after the other in flat memory, each in C order.
class StridedRegions {
 public:
  //! Throws std::invalid_argument if a region has a negative extent, or not as many strides as axes.
  StridedRegions(std::size_t itemsize, const std::vector<StridedRegion>& regions);

  //! The bytes of all regions.
  std::size_t nbytes() const { return nbytes_; }
  //! Copies the elements of all regions to `flat`.
  void gather(std::byte* flat) const;
  //! Copies `flat` to the elements of all regions.
  void scatter(const std::byte* flat) const;

 private:
  struct Axis {
    std::int64_t length;
    std::int64_t stride;
  };
  // A region in its shortest form: runs of contiguous bytes, at the places of the axes, of which the last is the inner.
  struct Runs {
    std::byte* base;
    std::vector<Axis> outer;
    Axis inner;
    std::size_t run_nbytes;
    std::size_t nbytes;
  };

  static Runs shortened(std::size_t itemsize, const StridedRegion& region);
  template <bool gathers>
  static void copy(const Runs& runs, std::byte* flat);

  std::vector<Runs> regions_;
  std::size_t nbytes_ = 0;
};

}  // namespace unisono
