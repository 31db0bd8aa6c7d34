// `StridedRegions` for Python, which passes addresses and keeps the arrays alive.
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

using Described = std::tuple<std::uintptr_t, std::vector<std::int64_t>, std::vector<std::int64_t>>;

// Less takes no longer than to release the interpreter's lock and to take it again.
constexpr std::size_t least_nbytes_without_lock = 64 << 10;

std::byte* at(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

StridedRegions* make_regions(std::size_t itemsize, const std::vector<Described>& described) {
  std::vector<StridedRegion> regions;
  for (const auto& [address, shape, strides] : described) regions.push_back({at(address), shape, strides});
  return new StridedRegions(itemsize, regions);
}

template <class Copy>
void without_lock_if_long(const StridedRegions& regions, Copy copy) {
  if (regions.nbytes() < least_nbytes_without_lock) return copy();
  const LockReleased released;
  copy();
}

}  // namespace

void bind_strided_regions(nb::module_& module) {
  nb::class_<StridedRegions>(module, "StridedRegions")
      .def(nb::new_(&make_regions), nb::arg("itemsize"), nb::arg("regions"))
      .def("nbytes", &StridedRegions::nbytes)
      .def(
          "gather",
          [](const StridedRegions& regions, std::uintptr_t flat) {
            without_lock_if_long(regions, [&] { regions.gather(at(flat)); });
          },
          nb::arg("flat"))
      .def(
          "scatter",
          [](const StridedRegions& regions, std::uintptr_t flat) {
            without_lock_if_long(regions, [&] { regions.scatter(at(flat)); });
          },
          nb::arg("flat"));
}

}  // namespace unisono
