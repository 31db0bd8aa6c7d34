#include "kernels/strided.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace unisono {
namespace {

// Copies `count` runs. A length that the compiler knows becomes a few moves.
template <std::size_t known>
void copy_runs(std::byte* dst, std::int64_t dst_stride, const std::byte* src, std::int64_t src_stride,
               std::size_t nbytes, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i, dst += dst_stride, src += src_stride)
    std::memcpy(dst, src, known != 0 ? known : nbytes);
}

using CopyRuns = void (*)(std::byte*, std::int64_t, const std::byte*, std::int64_t, std::size_t, std::int64_t);

CopyRuns copier_of(std::size_t nbytes) {
  switch (nbytes) {
    case 1:
      return copy_runs<1>;
    case 2:
      return copy_runs<2>;
    case 4:
      return copy_runs<4>;
    case 8:
      return copy_runs<8>;
    case 16:
      return copy_runs<16>;
    case 24:
      return copy_runs<24>;
    case 32:
      return copy_runs<32>;
    default:
      return copy_runs<0>;
  }
}

}  // namespace

StridedCopies::StridedCopies(std::size_t itemsize, const std::vector<StridedCopy>& copies) {
  for (const StridedCopy& copy : copies) {
    const Runs runs = shortened(itemsize, copy);
    nbytes_ += runs.nbytes;
    const auto like = std::find_if(groups_.begin(), groups_.end(), [&](const Runs& group) {
      return group.outer == runs.outer && group.inner == runs.inner && group.run_nbytes == runs.run_nbytes;
    });
    if (like == groups_.end())
      groups_.push_back(runs);
    else
      like->ends.push_back(runs.ends.front());
  }
}

StridedCopies::Runs StridedCopies::shortened(std::size_t itemsize, const StridedCopy& copy) {
  if (copy.shape.size() != copy.dst_strides.size() || copy.shape.size() != copy.src_strides.size())
    throw std::invalid_argument("a region needs a stride for each axis");
  std::vector<Axis> axes;
  std::size_t nbytes = itemsize;
  for (std::size_t i = 0; i < copy.shape.size(); ++i) {
    const Axis axis{copy.shape[i], copy.dst_strides[i], copy.src_strides[i]};
    if (axis.length < 0) throw std::invalid_argument("the extent of a region is negative");
    nbytes *= static_cast<std::size_t>(axis.length);
    if (axis.length == 1) continue;
    Axis* before = axes.empty() ? nullptr : &axes.back();
    const bool joins = before != nullptr && before->dst_stride == axis.dst_stride * axis.length &&
                       before->src_stride == axis.src_stride * axis.length;
    if (joins)
      *before = {before->length * axis.length, axis.dst_stride, axis.src_stride};
    else
      axes.push_back(axis);
  }
  std::size_t run_nbytes = itemsize;
  const auto step = static_cast<std::int64_t>(itemsize);
  if (!axes.empty() && axes.back().dst_stride == step && axes.back().src_stride == step) {
    run_nbytes *= static_cast<std::size_t>(axes.back().length);
    axes.pop_back();
  }
  Axis inner{1, 0, 0};
  if (!axes.empty()) {
    inner = axes.back();
    axes.pop_back();
  }
  return {{{copy.dst, copy.src}}, std::move(axes), inner, run_nbytes, nbytes};
}

void StridedCopies::run(const Runs& runs) {
  if (runs.nbytes == 0) return;
  const CopyRuns copy_inner = copier_of(runs.run_nbytes);
  const Axis& inner = runs.inner;
  std::vector<std::int64_t> at(runs.outer.size(), 0);
  std::int64_t dst_offset = 0;
  std::int64_t src_offset = 0;
  for (;;) {
    for (const auto& [dst, src] : runs.ends)
      copy_inner(dst + dst_offset, inner.dst_stride, src + src_offset, inner.src_stride, runs.run_nbytes, inner.length);
    std::size_t axis = runs.outer.size();
    for (; axis > 0; --axis) {
      const Axis& moved = runs.outer[axis - 1];
      dst_offset += moved.dst_stride;
      src_offset += moved.src_stride;
      if (++at[axis - 1] < moved.length) break;
      dst_offset -= moved.dst_stride * moved.length;
      src_offset -= moved.src_stride * moved.length;
      at[axis - 1] = 0;
    }
    if (axis == 0) return;
  }
}

void StridedCopies::run() const {
  for (const Runs& runs : groups_) run(runs);
}

}  // namespace unisono
