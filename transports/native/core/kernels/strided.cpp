#include "kernels/strided.h"

#include <array>
#include <cstring>
#include <stdexcept>

namespace unisono {
namespace {

// Copies `count` runs between a strided array and flat memory. A length that the compiler knows becomes a few moves.
template <bool gathers, std::size_t known>
void copy_runs(std::byte* strided, std::int64_t stride, std::byte* flat, std::size_t nbytes, std::int64_t count) {
  const std::size_t length = known != 0 ? known : nbytes;
  for (std::int64_t i = 0; i < count; ++i, strided += stride, flat += length) {
    if constexpr (gathers)
      std::memcpy(flat, strided, length);
    else
      std::memcpy(strided, flat, length);
  }
}

template <bool gathers>
using CopyRuns = void (*)(std::byte*, std::int64_t, std::byte*, std::size_t, std::int64_t);

template <bool gathers>
CopyRuns<gathers> copier_of(std::size_t nbytes) {
  switch (nbytes) {
    case 1:
      return copy_runs<gathers, 1>;
    case 2:
      return copy_runs<gathers, 2>;
    case 4:
      return copy_runs<gathers, 4>;
    case 8:
      return copy_runs<gathers, 8>;
    case 16:
      return copy_runs<gathers, 16>;
    case 24:
      return copy_runs<gathers, 24>;
    case 32:
      return copy_runs<gathers, 32>;
    default:
      return copy_runs<gathers, 0>;
  }
}

}  // namespace

StridedRegions::StridedRegions(std::size_t itemsize, const std::vector<StridedRegion>& regions) {
  for (const StridedRegion& region : regions) {
    regions_.push_back(shortened(itemsize, region));
    nbytes_ += regions_.back().nbytes;
  }
}

StridedRegions::Runs StridedRegions::shortened(std::size_t itemsize, const StridedRegion& region) {
  if (region.shape.size() != region.strides.size())
    throw std::invalid_argument("a region needs a stride for each axis");
  std::vector<Axis> axes;
  std::size_t nbytes = itemsize;
  for (std::size_t i = 0; i < region.shape.size(); ++i) {
    const Axis axis{region.shape[i], region.strides[i]};
    if (axis.length < 0) throw std::invalid_argument("the extent of a region is negative");
    nbytes *= static_cast<std::size_t>(axis.length);
    if (axis.length == 1) continue;
    Axis* before = axes.empty() ? nullptr : &axes.back();
    if (before != nullptr && before->stride == axis.stride * axis.length) {
      *before = {before->length * axis.length, axis.stride};
    } else {
      axes.push_back(axis);
    }
  }
  std::size_t run_nbytes = itemsize;
  if (!axes.empty() && axes.back().stride == static_cast<std::int64_t>(itemsize)) {
    run_nbytes *= static_cast<std::size_t>(axes.back().length);
    axes.pop_back();
  }
  Axis inner{1, 0};
  if (!axes.empty()) {
    inner = axes.back();
    axes.pop_back();
  }
  return {region.base, std::move(axes), inner, run_nbytes, nbytes};
}

template <bool gathers>
void StridedRegions::copy(const Runs& runs, std::byte* flat) {
  if (runs.nbytes == 0) return;
  const CopyRuns<gathers> copy_inner = copier_of<gathers>(runs.run_nbytes);
  const std::size_t step = runs.run_nbytes * static_cast<std::size_t>(runs.inner.length);
  std::vector<std::int64_t> at(runs.outer.size(), 0);
  std::byte* strided = runs.base;
  for (;;) {
    copy_inner(strided, runs.inner.stride, flat, runs.run_nbytes, runs.inner.length);
    flat += step;
    std::size_t axis = runs.outer.size();
    for (; axis > 0; --axis) {
      const Axis& moved = runs.outer[axis - 1];
      strided += moved.stride;
      if (++at[axis - 1] < moved.length) break;
      strided -= moved.stride * moved.length;
      at[axis - 1] = 0;
    }
    if (axis == 0) return;
  }
}

void StridedRegions::gather(std::byte* flat) const {
  for (const Runs& runs : regions_) {
    copy<true>(runs, flat);
    flat += runs.nbytes;
  }
}

void StridedRegions::scatter(const std::byte* flat) const {
  for (const Runs& runs : regions_) {
    copy<false>(runs, const_cast<std::byte*>(flat));
    flat += runs.nbytes;
  }
}

}  // namespace unisono
