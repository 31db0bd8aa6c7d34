// `StridedCopies` for Python, which passes addresses and keeps the arrays alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "kernels/strided.h"
#include "python_call.h"

namespace nb = nanobind;

namespace unisono {
namespace {

using Strides = std::vector<std::int64_t>;
using Described = std::tuple<std::uintptr_t, std::uintptr_t, Strides, Strides, Strides>;

// Less takes no longer than to release the interpreter's lock and to take it again.
constexpr std::size_t least_nbytes_without_lock = 64 << 10;

StridedCopies* make_copies(std::size_t itemsize, const std::vector<Described>& described) {
  std::vector<StridedCopy> copies;
  for (const auto& [dst, src, shape, dst_strides, src_strides] : described)
    copies.push_back(
        {reinterpret_cast<std::byte*>(dst), reinterpret_cast<const std::byte*>(src), shape, dst_strides, src_strides});
  return new StridedCopies(itemsize, copies);
}

void run_copies(const StridedCopies& copies) {
  if (copies.nbytes() < least_nbytes_without_lock) return copies.run();
  const LockReleased released;
  copies.run();
}

}  // namespace

void bind_strided_copies(nb::module_& module) {
  nb::class_<StridedCopies>(module, "StridedCopies")
      .def(nb::new_(&make_copies), nb::arg("itemsize"), nb::arg("copies"))
      .def("__call__", run_copies);
}

}  // namespace unisono
