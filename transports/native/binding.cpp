// The one place where the native core meets Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "dtype.h"

namespace nb = nanobind;

NB_MODULE(_core, module) {
  module.doc() = "The native core of Unisono.";
  nb::list dtypes;
  for (const auto& info : unisono::dtype_table)
    dtypes.append(nb::make_tuple(std::string(info.name), info.itemsize));
  module.attr("DTYPES") = dtypes;
}
